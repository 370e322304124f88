"""How far groups are behind, for metrics: in messages, in time, and in what they have pulled.

Groups without members count like any other; a group that is connected counts with the topics it
subscribes to. What is not known is left out and never taken for 0: a queue with messages in which
the group has committed nothing counts as unknown, and so does an age whose message is gone.

One walk is bounded in groups, queues and reads of the store, and gives way between queues. The
store times that a walk has read are kept for the next one: a group that stands still costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from cosmodrome.broker.counts.stats import Item, Stats
from cosmodrome.broker.members.clients import Clients
from cosmodrome.broker.members.offsets import Offsets
from cosmodrome.broker.members.topics import Topics
from cosmodrome.env.base import Clock
from cosmodrome.store.store import Store

PAIRS_MAX = 10_000  # of group and topic
QUEUES_MAX = 200_000
READS_MAX = 20_000
QUEUES_PER_STEP = 16
KEYS_PER_STEP = 256
BROADCASTING = "BROADCASTING"

Position = tuple[str, int, int]  # topic, queue id, offset


class Lag(NamedTuple):
    """How far a group is behind in one topic; None means not known."""

    group: str
    topic: str
    messages: int | None
    age_ms: int | None  # of the oldest message not consumed, 0 when all are
    unknown_queues: int
    in_flight: int | None  # pulled and not committed
    ready: int | None  # not pulled
    queueing_ms: int | None  # age of the oldest message not pulled


class Lags:
    """`left_out` is how many pairs the last walk did not look at."""

    def __init__(
        self,
        store: Store,
        topics: Topics,
        offsets: Offsets,
        clients: Clients,
        stats: Stats,
        clock: Clock,
    ) -> None:
        self._store = store
        self._topics = topics
        self._offsets = offsets
        self._clients = clients
        self._stats = stats
        self._clock = clock
        self._times: dict[Position, int] = {}  # what the last walk has read
        self._fresh: dict[Position, int] = {}
        self._reads = 0
        self._queues = 0
        self.left_out = 0

    def forget_topic(self, topic: str) -> None:
        """Its offsets will belong to other messages."""
        self._times, self._fresh = {}, {}

    def walk(self) -> Iterator[Lag | None]:
        """All groups in their topics. After a None others may run before the walk goes on."""
        self._fresh = {}
        self._reads = self._queues = self.left_out = looked = 0
        now_ms = self._clock.now_ms()
        for number, (topic, group) in enumerate(self._offsets.pairs()):
            if number % KEYS_PER_STEP == 0:
                yield None
            config = self._topics.get(topic)
            if config is None or not self._counts(group, topic):
                continue
            looked += 1
            if looked > PAIRS_MAX or self._queues + config.read_queue_nums > QUEUES_MAX:
                self.left_out += 1
                continue
            yield from self._look(group, topic, config.read_queue_nums, now_ms)
        self._times, self._fresh = self._fresh, {}

    def _counts(self, group: str, topic: str) -> bool:
        online = self._clients.group(group)
        if online is None:
            return True
        # Compat: while the group is online only what it subscribes to counts.
        return topic in online.subscriptions and online.message_model != BROADCASTING

    def _look(self, group: str, topic: str, queues: int, now_ms: int) -> Iterator[Lag | None]:
        committed = self._offsets.of(group, topic)
        pulled = self._stats.of_group(topic, group)
        sums = _Sums()
        for queue_id in range(queues):
            if queue_id % QUEUES_PER_STEP == 0:
                yield None
            self._queues += 1
            self._add(sums, topic, queue_id, committed, pulled)
        yield sums.lag(group, topic, now_ms)

    def _add(
        self,
        sums: _Sums,
        topic: str,
        queue_id: int,
        committed: Mapping[int, int],
        pulled: Item | None,
    ) -> None:
        first, end = self._store.bounds(topic, queue_id)
        offset = committed.get(queue_id, -1)
        if end <= first and offset <= end:
            return  # an empty queue has nothing to consume, whoever asks
        if not 0 <= offset <= end:
            sums.unknown_queues += 1
            return
        sums.known_queues += 1
        at = max(offset, first)
        if at == end:
            return
        sums.messages += end - at
        sums.older(self._time(topic, queue_id, at))
        queue = None if pulled is None else pulled.queues.get(queue_id)
        if queue is None:
            sums.pulls_known = False
            return
        reached = min(max(queue.next_offset, at), end)
        sums.in_flight += reached - at
        if reached < end:
            sums.ready += end - reached
            sums.older_ready(self._time(topic, queue_id, reached))

    def _time(self, topic: str, queue_id: int, offset: int) -> int:
        """When a message was stored, -1 when that is not known."""
        position = (topic, queue_id, offset)
        ms = self._fresh.get(position, self._times.get(position, -1))
        if ms < 0 and self._reads < READS_MAX:
            self._reads += 1
            ms = self._store.store_time(*position)
        if ms >= 0:
            self._fresh[position] = ms
        return ms


class _Sums:
    """What the queues of one group and topic add up to."""

    __slots__ = (
        "_oldest_ms",
        "_oldest_ready_ms",
        "in_flight",
        "known_queues",
        "messages",
        "pulls_known",
        "ready",
        "unknown_queues",
    )

    def __init__(self) -> None:
        self.messages = self.known_queues = self.unknown_queues = 0
        self.in_flight = self.ready = 0
        self.pulls_known = True
        # 0 without any message, -1 when the time of one is not known.
        self._oldest_ms = self._oldest_ready_ms = 0

    def older(self, ms: int) -> None:
        self._oldest_ms = _older(self._oldest_ms, ms)

    def older_ready(self, ms: int) -> None:
        self._oldest_ready_ms = _older(self._oldest_ready_ms, ms)

    def lag(self, group: str, topic: str, now_ms: int) -> Lag:
        if not self.known_queues and self.unknown_queues:
            return Lag(group, topic, None, None, self.unknown_queues, None, None, None)
        pulls = self.pulls_known
        return Lag(
            group=group,
            topic=topic,
            messages=self.messages,
            age_ms=_age(self._oldest_ms, now_ms),
            unknown_queues=self.unknown_queues,
            in_flight=self.in_flight if pulls else None,
            ready=self.ready if pulls else None,
            queueing_ms=_age(self._oldest_ready_ms, now_ms) if pulls else None,
        )


def _older(known_ms: int, ms: int) -> int:
    if known_ms < 0 or ms < 0:
        return -1
    return ms if known_ms == 0 else min(known_ms, ms)


def _age(stored_ms: int, now_ms: int) -> int | None:
    if stored_ms < 0:
        return None
    return max(0, now_ms - stored_ms) if stored_ms else 0
