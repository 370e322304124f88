"""The streaming reader and the batch plan over a cluster made of dictionaries."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
)

from cosmodrome.client.values import NoRoute
from cosmodrome.errors import Code, ConfigError, Refused, Unreachable
from cosmodrome.spark.read.offsets import Offsets, from_json, to_json, without_starts
from cosmodrome.spark.read.options import ReadOptions
from cosmodrome.spark.read.plan import DataLoss
from cosmodrome.spark.read.pushdown import PushedFilters
from cosmodrome.spark.read.queue_watch import QueueWatch
from cosmodrome.spark.read.stream import RangePartition, TopicStreamReader
from cosmodrome.spark.read.subscription import batch_ranges
from cosmodrome.wire.bodies import MessageQueue
from cosmodrome.wire.names import SELF_TEST_TOPIC


def queue(number: int, topic: str = "t", broker: str = "b") -> MessageQueue:
    return MessageQueue(topic=topic, broker_name=broker, queue_id=number)


class FakeCluster:
    """Queues with bounds; brokers may be silent (no answer) or out (not registered)."""

    def __init__(self, bounds: dict[MessageQueue, tuple[int, int]]) -> None:
        self.table = dict(bounds)
        self.silent: set[str] = set()
        self.out: set[str] = set()
        self.brokers = {q.broker_name for q in bounds}
        self.published: list[tuple[str, Offsets]] = []
        self.publishing_fails = False
        self.name_servers_down = False
        self.closed = False
        self.replicas: set[str] = set()

    def answered_by_replica(self, broker: str) -> bool:
        return broker in self.replicas

    def topics(self) -> list[str]:
        return sorted({q.topic for q in self._there()} | {SELF_TEST_TOPIC, "rmq_sys_x"})

    def queues(self, topics: Iterable[str]) -> dict[MessageQueue, tuple[str, ...]]:
        if self.name_servers_down:
            raise Unreachable("no name server")
        found: dict[MessageQueue, tuple[str, ...]] = {}
        for topic in topics:
            queues = [q for q in self._there() if q.topic == topic]
            if topic == SELF_TEST_TOPIC:
                queues = [queue(0, topic, broker) for broker in self.brokers - self.out]
            if not queues:
                raise NoRoute(f"no route of {topic}")
            found.update({q: (f"{q.broker_name}:1",) for q in queues})
        return found

    def bounds(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, tuple[int, int]]:
        asked = list(queues)
        for q in asked:
            if q.broker_name in self.silent:
                raise Unreachable(f"{q.broker_name} is silent")
            if q not in self.table:
                raise Refused(Code.TOPIC_NOT_EXIST, "no topic")
        return {q: self.table[q] for q in asked}

    def at_time(self, queues: Iterable[MessageQueue], ms: int) -> dict[MessageQueue, int]:
        """A message per millisecond since 0."""
        return {q: min(max(ms, self.table[q][0]), self.table[q][1]) for q in queues}

    def average_bytes(self, queue: MessageQueue, offset: int) -> float | None:
        return 100.0

    def commit(self, group: str, offsets: Offsets) -> None:
        if self.publishing_fails:
            raise Unreachable("not now")
        self.published.append((group, dict(offsets)))

    def close(self) -> None:
        self.closed = True

    def _there(self) -> list[MessageQueue]:
        return [q for q in self.table if q.broker_name not in self.out]


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster({queue(0): (10, 30), queue(1): (0, 10), queue(0, "t", "c"): (5, 5)})


def reader(cluster: FakeCluster, **options: str) -> TopicStreamReader:
    parsed_options = {"namesrv": "a:1", "retries": "1", **options}
    if not {"subscribe", "subscribePattern", "assign"} & parsed_options.keys():
        parsed_options["subscribe"] = "t"
    return TopicStreamReader(ReadOptions.parse(parsed_options), lambda _: cluster)


def latest(stream: TopicStreamReader, start: Offsets, limit: ReadLimit | None = None) -> Offsets:
    end = stream.latestOffset(to_json(start), limit or stream.getDefaultReadLimit())
    return without_starts(end)[0]


def ranges(stream: TopicStreamReader, start: Offsets, end: Offsets) -> list[tuple[Any, int, int]]:
    return spans(stream.partitions(to_json(start), to_json(end)))


def spans(parts: list[InputPartition]) -> list[tuple[Any, int, int]]:
    assert all(isinstance(part, RangePartition) for part in parts)
    return [(p.span.queue, p.span.start, p.span.end) for p in parts]  # type: ignore[attr-defined]


FIRST = {queue(0): 10, queue(1): 0, queue(0, "t", "c"): 5}
LAST = {queue(0): 30, queue(1): 10, queue(0, "t", "c"): 5}


def test_where_a_stream_begins(cluster: FakeCluster) -> None:
    assert from_json(reader(cluster).initialOffset()) == LAST
    assert from_json(reader(cluster, startingOffsets="earliest").initialOffset()) == FIRST
    timed = reader(cluster, startingTimestamp="7", startingOffsets="latest")
    assert from_json(timed.initialOffset()) == {**FIRST, queue(1): 7}
    offsets = '{"t": {"b": {"0": 12, "1": -1}}}'
    mixed = reader(cluster, startingOffsets=offsets)
    assert from_json(mixed.initialOffset()) == {**FIRST, queue(0): 12, queue(1): 10}
    assign = reader(cluster, assign='{"t": {"b": [1]}}')
    assert from_json(assign.initialOffset()) == {queue(1): 10}


def test_a_typo_shows_at_the_beginning(cluster: FakeCluster) -> None:
    with pytest.raises(NoRoute):
        reader(cluster, subscribe="u").initialOffset()
    with pytest.raises(ConfigError, match="queue 9 does not exist"):
        reader(cluster, assign='{"t": {"b": [9]}}').initialOffset()
    with pytest.raises(ConfigError, match="not among what is read"):
        reader(cluster, startingOffsets='{"u": {"b": {"0": 1}}}').initialOffset()
    with pytest.raises(DataLoss, match="wanted offset 3, the first there is 10"):
        reader(cluster, startingOffsets='{"t": {"b": {"0": 3}}}').initialOffset()


def test_all_available_and_nothing_new(cluster: FakeCluster) -> None:
    stream = reader(cluster)
    assert stream.reportLatestOffset() is None
    assert latest(stream, FIRST) == LAST
    assert stream.reportLatestOffset() == to_json(LAST)
    assert stream.latestOffset(to_json(LAST), ReadAllAvailable()) == to_json(LAST)
    assert ranges(stream, FIRST, LAST) == [(queue(0), 10, 30), (queue(1), 0, 10)]
    assert ranges(stream, LAST, LAST) == []


def test_limits(cluster: FakeCluster) -> None:
    rows = reader(cluster, maxOffsetsPerTrigger="6")
    assert rows.getDefaultReadLimit() == ReadMaxRows(6)
    assert latest(rows, FIRST) == {**FIRST, queue(0): 14, queue(1): 2}
    assert latest(rows, FIRST, ReadAllAvailable()) == LAST
    size = reader(cluster, maxBytesPerTrigger="600")
    assert size.getDefaultReadLimit() == ReadMaxBytes(600)
    assert latest(size, FIRST) == {**FIRST, queue(0): 14, queue(1): 2}
    both = reader(cluster, maxBytesPerTrigger="300", maxOffsetsPerTrigger="6")
    assert latest(both, FIRST) == {**FIRST, queue(0): 12, queue(1): 1}
    assert latest(reader(cluster), FIRST, ReadMinRows(31)) == FIRST
    assert latest(reader(cluster), FIRST, ReadMinRows(30)) == LAST


def test_available_now_ends_where_it_began(cluster: FakeCluster) -> None:
    stream = reader(cluster)
    stream.prepareForTriggerAvailableNow()
    cluster.table[queue(0)] = (10, 99)
    cluster.table[queue(7)] = (0, 5)
    assert latest(stream, FIRST) == LAST
    assert latest(stream, LAST) == LAST
    assert latest(reader(cluster), FIRST) == {**LAST, queue(0): 99, queue(7): 5}


def test_new_queues_topics_and_brokers_start_at_their_first_message(cluster: FakeCluster) -> None:
    stream = reader(cluster, subscribePattern="t.*")
    new = queue(3, "t2", "d")
    cluster.table[new] = (4, 4)
    assert latest(stream, LAST) == LAST  # empty: not worth a batch
    cluster.table[new] = (4, 9)
    end = stream.latestOffset(to_json(LAST), ReadAllAvailable())
    assert without_starts(end) == ({**LAST, new: 9}, {new: 4})
    cluster.table[new] = (6, 12)  # what was planned stays planned, also if it expires by now
    for planner in (stream, reader(cluster, subscribePattern="t.*")):
        assert spans(planner.partitions(to_json(LAST), end)) == [(new, 4, 9)]
    assert latest(stream, {**LAST, new: 9}) == {**LAST, new: 12}


def test_the_first_batch_is_the_same_after_a_restart(cluster: FakeCluster) -> None:
    """Spark writes its end down, and asks again where the stream begins."""
    stream = reader(cluster)
    begin = stream.initialOffset()
    cluster.table[queue(0)] = (10, 35)
    end = stream.latestOffset(begin, ReadAllAvailable())
    cluster.table[queue(0)] = (10, 50)
    restarted = reader(cluster)
    later = restarted.initialOffset()
    assert spans(restarted.partitions(later, end)) == [(queue(0), 30, 35)]
    # It is said once, and an offset that does not move stays the same text.
    after = restarted.latestOffset(end, ReadAllAvailable())
    assert after == to_json({**LAST, queue(0): 50})
    cluster.table[queue(0)] = (10, 35)
    assert reader(cluster).latestOffset(end, ReadAllAvailable()) == end


def test_a_topic_that_is_not_subscribed_to_keeps_its_place(cluster: FakeCluster) -> None:
    both = {**LAST, queue(0, "u"): 7}
    cluster.table[queue(0, "u")] = (0, 9)
    for fail in ("true", "false"):
        narrower = reader(cluster, failOnDataLoss=fail)
        assert latest(narrower, both) == both
        assert ranges(narrower, both, both) == []
        # A batch that was planned before is read as it was planned.
        unfinished = ranges(reader(cluster), both, {**both, queue(0, "u"): 9})
        assert unfinished == [(queue(0, "u"), 7, 9)]
    wider = reader(cluster, subscribe="t,u")
    assert latest(wider, both) == {**both, queue(0, "u"): 9}


@pytest.mark.parametrize("fail", ["true", "false"])
def test_a_replica_that_lags_is_no_loss(cluster: FakeCluster, fail: str) -> None:
    stream = reader(cluster, failOnDataLoss=fail)
    cluster.table[queue(0)] = (10, 28)
    cluster.table[queue(1)] = (0, 12)
    cluster.replicas.add("b")
    assert latest(stream, LAST) == {**LAST, queue(1): 12}
    cluster.replicas.clear()
    cluster.table[queue(0)] = (10, 31)
    assert latest(stream, LAST) == {**LAST, queue(0): 31, queue(1): 12}


def test_patterns_leave_out_system_and_retry_topics(cluster: FakeCluster) -> None:
    cluster.table[queue(0, "%RETRY%g")] = (0, 1)
    cluster.table[queue(0, "%DLQ%g")] = (0, 1)
    cluster.table[queue(0, "tt")] = (0, 1)
    plain = from_json(reader(cluster, subscribePattern=".*").initialOffset())
    assert {q.topic for q in plain} == {"t", "tt"}
    with_retry = reader(cluster, subscribePattern=".*", includeRetry="true").initialOffset()
    assert with_retry.keys() == {"t", "tt", "%RETRY%g", "%DLQ%g"}
    exact = reader(cluster, subscribePattern="t").initialOffset()
    assert exact.keys() == {"t"}
    assert reader(cluster, subscribePattern="none").initialOffset() == {}


@pytest.mark.parametrize(
    ("bounds", "words"),
    [((12, 30), "the first there is 12"), ((0, 3), "the queue ends at 3"), (None, "gone")],
)
def test_loss_ends_the_query_or_is_skipped(
    cluster: FakeCluster, bounds: tuple[int, int] | None, words: str
) -> None:
    if bounds is None:
        del cluster.table[queue(0)]
    else:
        cluster.table[queue(0)] = bounds
    with pytest.raises(DataLoss, match=words):
        latest(reader(cluster), FIRST)
    careless = reader(cluster, failOnDataLoss="false")
    end = latest(careless, FIRST)
    rest = {queue(1): 10, queue(0, "t", "c"): 5}
    assert end == (rest if bounds is None else {**rest, queue(0): bounds[1]})
    planned = ranges(careless, FIRST, end)
    assert (queue(1), 0, 10) in planned
    # A queue that was made anew is not read from an offset it does not have.
    assert all(low < high for _, low, high in planned)


def test_an_unfinished_batch_whose_queue_is_gone(cluster: FakeCluster) -> None:
    del cluster.table[queue(0)]
    with pytest.raises(DataLoss):
        ranges(reader(cluster), FIRST, LAST)
    careless = reader(cluster, failOnDataLoss="false")
    assert ranges(careless, FIRST, LAST) == [(queue(1), 0, 10)]


def test_a_silent_broker_waits_and_the_others_go_on(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    stream = reader(cluster)
    cluster.table[queue(0, "t", "c")] = (5, 8)
    cluster.silent.add("c")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert latest(stream, FIRST) == {**LAST, queue(0, "t", "c"): 5}
    assert len([r for r in caplog.records if "does not answer" in r.message]) == 1


def test_an_unregistered_broker_waits_and_comes_back(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    stream = reader(cluster)
    cluster.out.add("c")
    with caplog.at_level(logging.WARNING):
        assert latest(stream, FIRST) == LAST
        assert latest(stream, FIRST) == LAST
    assert len([r for r in caplog.records if "not registered" in r.message]) == 1
    cluster.out.clear()
    cluster.table[queue(0, "t", "c")] = (5, 8)
    assert latest(stream, FIRST) == {**LAST, queue(0, "t", "c"): 8}


def test_nobody_answers(cluster: FakeCluster) -> None:
    options = ReadOptions.parse({"namesrv": "a:1", "subscribe": "t", "retries": "3"})
    slept: list[float] = []
    cluster.out = {"b", "c"}
    with pytest.raises(Unreachable, match=r"no broker answers: b, c \(asked 4 times\)"):
        QueueWatch(options, cluster, sleep=slept.append).look(FIRST)
    assert slept == [0.2, 0.4, 0.8]

    def come_back(seconds: float) -> None:
        cluster.out.clear()

    assert QueueWatch(options, cluster, sleep=come_back).look(FIRST).bounds == cluster.table
    cluster.silent = {"b", "c"}
    with pytest.raises(Unreachable, match=r"no broker answers: b, c .*; b is silent; c is"):
        QueueWatch(options, cluster, sleep=slept.append).look(FIRST)


def test_a_silent_broker_is_asked_again_after_a_pause(cluster: FakeCluster) -> None:
    options = ReadOptions.parse({"namesrv": "a:1", "subscribe": "t"})
    clock = [100.0]
    watch = QueueWatch(options, cluster, now=lambda: clock[0])
    cluster.silent = {"c"}
    assert watch.look(FIRST).away == {queue(0, "t", "c")}
    cluster.silent.clear()
    assert watch.look(FIRST).away == {queue(0, "t", "c")}
    clock[0] += 11
    assert watch.look(FIRST).away == frozenset()


def test_name_servers_may_be_down_for_a_while(cluster: FakeCluster) -> None:
    stream = reader(cluster)
    latest(stream, FIRST)
    cluster.name_servers_down = True
    cluster.table[queue(0)] = (10, 33)
    assert latest(stream, FIRST) == {**LAST, queue(0): 33}
    with pytest.raises(Unreachable):
        latest(reader(cluster), FIRST)


def test_progress_is_published_and_never_kills(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    clock = [0.0]
    options = ReadOptions.parse({"namesrv": "a:1", "subscribe": "t", "consumerGroup": "g"})
    stream = TopicStreamReader(options, lambda _: cluster, lambda: clock[0])
    cluster.publishing_fails = True
    with caplog.at_level(logging.WARNING):
        latest(stream, FIRST)
        clock[0] += 11
        latest(stream, FIRST)
    assert len([r for r in caplog.records if "not published" in r.message]) == 1
    cluster.publishing_fails = False
    latest(stream, FIRST)
    assert cluster.published == []  # a pause after a failure
    clock[0] += 11
    latest(stream, FIRST)
    moved = {**FIRST, queue(0): 30}
    latest(stream, moved)
    stream.commit(to_json(FIRST))  # late: it must not go back
    stream.commit(to_json(LAST))
    latest(stream, LAST)
    assert cluster.published == [("g", FIRST), ("g", {queue(0): 30}), ("g", {queue(1): 10})]
    stream.stop()
    stream.stop()
    assert cluster.closed


def test_tasks_get_options_only(cluster: FakeCluster) -> None:
    stream = reader(cluster, minPartitions="4")
    latest(stream, FIRST)
    parts = stream.partitions(to_json(FIRST), to_json(LAST))
    assert len(parts) == 4
    options = ReadOptions.parse({"namesrv": "a:1", "subscribe": "t"})
    copy = pickle.dumps(TopicStreamReader(options))
    assert len(copy) < 1000
    assert pickle.loads(copy)._options == options
    assert pickle.loads(pickle.dumps(parts[0])).span == parts[0].span  # type: ignore[attr-defined]


def batch(cluster: FakeCluster, filters: PushedFilters | None = None, **options: str) -> Any:
    parsed = ReadOptions.parse({"namesrv": "a:1", "subscribe": "t", **options})
    return [(r.queue, r.start, r.end) for r in batch_ranges(parsed, cluster, filters)]


def test_batches(cluster: FakeCluster) -> None:
    everything = [(queue(0), 10, 30), (queue(1), 0, 10)]
    assert batch(cluster) == everything
    assert batch(cluster, startingTimestamp="12", endingTimestamp="14") == [(queue(0), 12, 14)]
    ending = '{"t": {"b": {"0": 11, "1": -1}}}'
    assert batch(cluster, endingOffsets=ending) == [(queue(0), 10, 11), (queue(1), 0, 10)]
    with pytest.raises(DataLoss, match="queue ends at 10"):
        batch(cluster, endingOffsets='{"t": {"b": {"1": 11}}}')
    careless = batch(
        cluster,
        failOnDataLoss="false",
        startingOffsets='{"t": {"b": {"0": 1}}}',
        endingOffsets='{"t": {"b": {"1": 11, "4": 9}}}',
    )
    assert careless == everything


def test_batches_with_filters(cluster: FakeCluster) -> None:
    assert batch(cluster, PushedFilters(low=5, high=12)) == [(queue(0), 10, 12), (queue(1), 5, 10)]
    one = PushedFilters(sets={"queue_id": frozenset({1})})
    assert batch(cluster, one, startingOffsets='{"t": {"b": {"0": 10}}}') == [(queue(1), 0, 10)]
    assert batch(cluster, PushedFilters(sets={"topic": frozenset()})) == []
    cluster.table[queue(0)] = (0, 500_000)
    hinted = PushedFilters(since_ms=200_000, until_ms=300_000)
    assert batch(cluster, hinted)[0] == (queue(0), 140_000, 360_000)
