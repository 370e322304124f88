"""Which queues a reader reads: named topics, a pattern over topic names, or assigned queues.

Also the batch plan made from it, and the decision whether a data loss is an error or a warning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from cosmodrome.client.values import NoRoute
from cosmodrome.errors import ConfigError
from cosmodrome.spark.read.offsets import Offsets, describe, order
from cosmodrome.spark.read.options import EARLIEST_WORD, LATEST_WORD, OffsetsOption, ReadOptions
from cosmodrome.spark.read.plan import DataLoss, Range, clamp, cut, loss_text, resolve
from cosmodrome.spark.read.pushdown import PushedFilters
from cosmodrome.wire.bodies import MessageQueue
from cosmodrome.wire.names import DLQ_PREFIX, REPLY_TOPIC_SUFFIX, RETRY_PREFIX, is_system_topic

log = logging.getLogger(__name__)


class ClusterView(Protocol):
    """What planning asks a cluster; `cluster.Cluster` answers."""

    def topics(self) -> list[str]: ...
    def queues(self, topics: Iterable[str]) -> dict[MessageQueue, tuple[str, ...]]: ...
    def bounds(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, tuple[int, int]]: ...
    def at_time(self, queues: Iterable[MessageQueue], ms: int) -> dict[MessageQueue, int]: ...
    def answered_by_replica(self, broker: str) -> bool: ...
    def average_bytes(self, queue: MessageQueue, offset: int) -> float | None: ...
    def commit(self, group: str, offsets: dict[MessageQueue, int]) -> None: ...
    def close(self) -> None: ...


class Subscription:
    """The queues of one reader as they are now."""

    def __init__(self, options: ReadOptions, cluster: ClusterView) -> None:
        self._options = options
        self._cluster = cluster
        self._pattern = None if options.pattern is None else re.compile(options.pattern)

    def topics(self) -> list[str]:
        options = self._options
        if self._pattern is not None:
            return sorted(name for name in self._cluster.topics() if self._matches(name))
        return list(dict.fromkeys(options.topics or (queue.topic for queue in options.assign)))

    def queues(self, *, absent_ok: bool = False) -> dict[MessageQueue, tuple[str, ...]]:
        """Readable queues and their brokers' addresses.

        A topic or queue that does not exist is an error, unless `absent_ok` or found by pattern.
        """
        topics = self.topics()
        found = self._existing(topics, absent_ok or self._pattern is not None)
        assign = self._options.assign
        if not assign:
            return found
        missing = [queue for queue in assign if queue not in found]
        if missing and not absent_ok:
            there = "; ".join(describe(queue) for queue in sorted(found, key=order)[:8])
            raise ConfigError(f"assign: {describe(missing[0])} does not exist; there are {there}")
        return {queue: found[queue] for queue in assign if queue in found}

    def reads(self, queue: MessageQueue) -> bool:
        """Whether this queue belongs here, existing or not."""
        if self._options.assign:
            return queue in self._options.assign
        if self._pattern is not None:
            return self._matches(queue.topic)
        return queue.topic in self._options.topics

    def check_offsets(self) -> None:
        """Refuses offsets of queues that this reader would not read."""
        options = self._options
        named = {"startingOffsets": options.starting, "endingOffsets": options.ending}
        for name, option in named.items():
            strangers = [q for q in option if not self.reads(q)] if isinstance(option, dict) else []
            if strangers:
                raise ConfigError(f"{name}: {describe(strangers[0])} is not among what is read")

    def _existing(self, topics: list[str], absent_ok: bool) -> dict[MessageQueue, tuple[str, ...]]:
        if not topics:
            return {}
        try:
            return self._cluster.queues(topics)
        except NoRoute:
            if not absent_ok:
                raise
        if len(topics) == 1:
            return {}
        found: dict[MessageQueue, tuple[str, ...]] = {}
        for topic in topics:
            found.update(self._existing([topic], True))
        return found

    def _matches(self, topic: str) -> bool:
        assert self._pattern is not None
        if is_system_topic(topic) or topic.endswith(REPLY_TOPIC_SUFFIX):
            return False
        if topic.startswith((RETRY_PREFIX, DLQ_PREFIX)) and not self._options.include_retry:
            return False
        return self._pattern.fullmatch(topic) is not None


def batch_ranges(
    options: ReadOptions, cluster: ClusterView, filters: PushedFilters | None = None
) -> list[Range]:
    """The ranges of a batch: everything between start and end that `filters` leave in."""
    filters = filters or PushedFilters()
    subscription = Subscription(options, cluster)
    subscription.check_offsets()
    addresses = {q: where for q, where in subscription.queues().items() if filters.admits(q)}
    queues = list(addresses)
    bounds = cluster.bounds(queues) if queues else {}
    start = _chosen(options.starting, EARLIEST_WORD, options.starting_ms, cluster, bounds, filters)
    end = _chosen(options.ending, LATEST_WORD, options.ending_ms, cluster, bounds, filters)
    start, start_losses = clamp(start, bounds)
    end, end_losses = clamp(end, bounds)
    report_losses(list(dict.fromkeys(start_losses + end_losses)), options.fail_on_data_loss)
    if filters.since_floor_ms is not None and queues:
        _raise_to(start, cluster.at_time(queues, filters.since_floor_ms))
    if filters.until_ceiling_ms is not None and queues:
        _lower_to(end, cluster.at_time(queues, filters.until_ceiling_ms))
    _raise_to(start, dict.fromkeys(queues, filters.low))
    _lower_to(end, dict.fromkeys(queues, filters.high))
    return cut(start, end, addresses, options.min_partitions)


def report_losses(losses: list[str], fail: bool) -> None:
    """Ends the query, or lets it go on without what is lost."""
    if not losses:
        return
    text = loss_text(losses)
    if fail:
        raise DataLoss(
            f"messages were lost before they were read: {text}. Set failOnDataLoss=false to go on"
            " with what is there, or choose other offsets to start from"
        )
    log.warning("failOnDataLoss=false, going on without what is lost: %s", text)


def _chosen(
    option: OffsetsOption | None,
    default: str,
    moment_ms: int | None,
    cluster: ClusterView,
    bounds: Mapping[MessageQueue, tuple[int, int]],
    filters: PushedFilters,
) -> Offsets:
    if moment_ms is not None:
        return cluster.at_time(list(bounds), moment_ms) if bounds else {}
    offsets = resolve(default if option is None else option, bounds, unlisted=default)
    return {queue: offset for queue, offset in offsets.items() if filters.admits(queue)}


def _raise_to(offsets: Offsets, floors: Mapping[MessageQueue, int]) -> None:
    for queue in offsets:
        offsets[queue] = max(offsets[queue], floors.get(queue, 0))


def _lower_to(offsets: Offsets, ceilings: Mapping[MessageQueue, int]) -> None:
    for queue in offsets:
        offsets[queue] = min(offsets[queue], ceilings.get(queue, offsets[queue]))
