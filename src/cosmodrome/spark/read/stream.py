"""The streaming reader: where a stream begins, how far the next batch goes, what it reads.

Spark's checkpoint is the truth about progress. Offsets given to Spark hold every queue that has
been read or was there at the beginning; a queue that appears later starts at its first message. The
end of the batch that first reads a queue also says from where: Spark writes down ends only, and
asks for the beginning again when it repeats the first batch after a crash. The offsets of the
consumer group are only a report: they follow finished batches, and a failure to publish them is a
warning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from cosmodrome.errors import CosmodromeError, TimedOut, Unreachable
from cosmodrome.spark.read.offsets import Offsets, describe, to_json, with_starts, without_starts
from cosmodrome.spark.read.options import EARLIEST_WORD, LATEST_WORD, ReadOptions
from cosmodrome.spark.read.plan import Range, clamp, cut, resolve, within_bytes, within_rows
from cosmodrome.spark.read.queue_watch import QueueSnapshot, QueueWatch
from cosmodrome.spark.read.subscription import ClusterView, Subscription, report_losses

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

_PUBLISH_PAUSE_S = 10.0  # a broker that is down must not slow every batch

OpenCluster = Callable[[ReadOptions], ClusterView]


class RangePartition(InputPartition):
    """What one task reads."""

    def __init__(self, span: Range) -> None:
        super().__init__(None)
        self.span = span


def read_partition(partition: InputPartition, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """Runs in the task. When there is no partition Spark makes one up, which is empty."""
    from cosmodrome.spark.read.reader import read_range

    if isinstance(partition, RangePartition):
        yield from read_range(partition.span, options)


def open_cluster(options: ReadOptions) -> ClusterView:
    from cosmodrome.spark.cluster import Cluster

    return Cluster(options.connection)


class TopicStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Lives in one planning process of the driver; tasks get a copy that holds options only."""

    def __init__(
        self,
        options: ReadOptions,
        opener: OpenCluster = open_cluster,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._opener = opener
        self._cluster: ClusterView | None = None
        self._watch: QueueWatch | None = None
        self._latest: Offsets = {}  # as last seen
        self._target: Offsets | None = None  # where a Trigger.AvailableNow run ends
        self._initial: dict[str, Any] | None = None
        self._published: Offsets = {}
        self._now = now
        self._publish_again: float | None = None  # after a failure: when to try it again

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._options,))

    def initialOffset(self) -> dict[str, Any]:
        """All brokers must answer here, so that a typo in a topic shows at once."""
        options, cluster = self._options, self._asked()
        subscription = Subscription(options, cluster)
        subscription.check_offsets()
        queues = list(subscription.queues())
        bounds = cluster.bounds(queues) if queues else {}
        if options.starting_ms is not None:
            offsets = cluster.at_time(queues, options.starting_ms) if queues else {}
        else:
            option = LATEST_WORD if options.starting is None else options.starting
            offsets = resolve(option, bounds, unlisted=EARLIEST_WORD)
        start, losses = clamp(offsets, bounds)
        report_losses(losses, options.fail_on_data_loss)
        self._initial = to_json(start)
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.rows_per_trigger is not None:
            return ReadMaxRows(self._options.rows_per_trigger)
        if self._options.bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        snapshot = self._queue_watch().look(())
        self._target = {queue: high for queue, (_, high) in snapshot.bounds.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        done, _ = without_starts(start, what="offset of the checkpoint")
        # Spark asks for more only when everything up to `start` is finished.
        self._publish(done)
        snapshot = self._queue_watch().look(done)
        self._latest = {queue: high for queue, (_, high) in snapshot.bounds.items()}
        base, waiting = self._base(done, snapshot)
        ends = {queue: max(self._end(queue), low) for queue, low in base.items()}
        ends = self._limited(base, ends, limit)
        # A new queue without messages is left out: naming it would make an empty batch.
        reached = {q: end for q, end in ends.items() if q in done or end > base[q]} | waiting
        if reached == done:
            return start  # Spark compares texts
        written_down = {} if start == self._initial else done
        starts = {q: low for q, low in base.items() if q not in written_down and ends[q] > low}
        return with_starts(to_json(reached), starts)

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return to_json(self._latest) if self._latest else None

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        ends, starts = without_starts(end)
        begins = without_starts(start)[0] | starts
        watch = self._queue_watch()
        strangers = [q for q in ends if q not in watch.addresses]
        if strangers:
            # A restarted query plans its unfinished batch before it has looked around.
            gone = watch.look(ends).gone
            lost = {queue: begins.get(queue, 0) for queue in gone if queue in strangers}
            report_losses(clamp(lost, {})[1], self._options.fail_on_data_loss)
            ends = {queue: offset for queue, offset in ends.items() if queue not in lost}
        starts_at = {queue: begins.get(queue, 0) for queue in ends}
        spans = cut(starts_at, ends, watch.addresses, self._options.min_partitions)
        return [RangePartition(span) for span in spans]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._options)

    def commit(self, end: dict[str, Any]) -> None:
        done, _ = without_starts(end)
        self._publish({q: at for q, at in done.items() if at > self._published.get(q, -1)})

    def stop(self) -> None:
        """Nothing is left to publish: progress is published as soon as it is known."""
        self._watch = None
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    def _base(self, done: Offsets, snapshot: QueueSnapshot) -> tuple[Offsets, Offsets]:
        """Where the next batch begins, and the queues that wait for their broker."""
        waiting = {queue: at for queue, at in done.items() if snapshot.waits(queue, at)}
        present = {queue: at for queue, at in done.items() if queue not in waiting}
        base, losses = clamp(present, snapshot.bounds)
        report_losses(losses, self._options.fail_on_data_loss)
        for queue, (low, _) in snapshot.bounds.items():
            if queue not in done:
                base[queue] = low
        return base, waiting

    def _end(self, queue: Any) -> int:
        latest = self._latest[queue]
        if self._target is None:
            return latest
        return min(latest, self._target.get(queue, -1))

    def _limited(self, base: Offsets, ends: Offsets, limit: ReadLimit) -> Offsets:
        rows, size = self._options.rows_per_trigger, self._options.bytes_per_trigger
        if isinstance(limit, ReadAllAvailable):
            return ends
        if isinstance(limit, ReadMinRows):
            waiting = sum(ends[queue] - base[queue] for queue in ends)
            return ends if waiting >= limit.min_rows or self._target is not None else dict(base)
        if isinstance(limit, ReadMaxRows):
            rows = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        if rows is not None:
            ends = within_rows(base, ends, rows)
        if size is not None:
            ends = within_bytes(base, ends, self._averages(base, ends, size), size)
        return ends

    def _averages(self, base: Offsets, ends: Offsets, size: int) -> dict[Any, float]:
        averages: dict[Any, float] = {}
        for queue in (queue for queue in ends if ends[queue] > base[queue]):
            try:
                average = self._asked().average_bytes(queue, base[queue])
            except (Unreachable, TimedOut) as error:
                log.warning("sizes of %s are unknown: %s", describe(queue), error)
                average = None
            # Without a sample one message is taken for the whole limit: too little, never too much.
            averages[queue] = size if average is None else average
        return averages

    def _publish(self, offsets: Offsets) -> None:
        group = self._options.consumer_group
        if group is None:
            return
        news = {queue: at for queue, at in offsets.items() if self._published.get(queue) != at}
        if not news or (self._publish_again or 0.0) > self._now():
            return
        try:
            self._asked().commit(group, news)
        except CosmodromeError as error:
            if self._publish_again is None:
                log.warning("progress of group %s is not published: %s", group, error)
            self._publish_again = self._now() + _PUBLISH_PAUSE_S
            return
        self._publish_again = None
        self._published.update(news)

    def _asked(self) -> ClusterView:
        if self._cluster is None:
            self._cluster = self._opener(self._options)
        return self._cluster

    def _queue_watch(self) -> QueueWatch:
        if self._watch is None:
            self._watch = QueueWatch(self._options, self._asked())
        return self._watch
