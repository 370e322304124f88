"""The blocking readers of the pipeline against Cosmodrome and two generations of upstream's."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

import pyarrow as pa
import pytest
from tests.oracle.client_kit import Target

from cosmodrome import Message
from cosmodrome.blocking import Producer
from cosmodrome.errors import Refused
from cosmodrome.spark.cluster import Cluster
from cosmodrome.spark.read.options import Connection, ReadOptions
from cosmodrome.spark.read.plan import DataLoss, Range
from cosmodrome.spark.read.reader import read_range
from cosmodrome.wire.bodies import MessageQueue


def options(target: Target, **more: object) -> ReadOptions:
    base = ReadOptions(
        connection=Connection(namesrv=target.namesrv, retries=2), columns=("queue_offset", "body")
    )
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def read(span: Range, wanted: ReadOptions) -> list[tuple[object, ...]]:
    batches = list(read_range(span, wanted))
    if not batches:
        return []
    for batch in batches:
        batch.validate(full=True)
    table = pa.Table.from_batches(batches)
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def fill(target: Target, queue: MessageQueue, bodies: list[bytes], tags: str = "AB") -> list[str]:
    with Producer(target.namesrv, group="w", send_timeout_ms=15_000) as producer:
        return [
            producer.send(
                Message(queue.topic, body, tags=tags[at % len(tags)], properties={"n": str(at)}),
                queue=queue,
            ).msg_id
            for at, body in enumerate(bodies)
        ]


def first_queue(cluster: Cluster, topic: str) -> tuple[MessageQueue, tuple[str, ...]]:
    return next(iter(cluster.queues([topic]).items()))


def until(found: Callable[[], object], wanted: object) -> None:
    """Upstream's queues and key index follow the log a moment later."""
    deadline = time.monotonic() + 20
    while (last := found()) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert last == wanted


def test_a_range_is_read_whole(target: Target, place: str) -> None:
    with Cluster(options(target).connection) as cluster:
        queue, addresses = first_queue(cluster, place)
        bodies = [b"m%d" % at for at in range(300)]
        ids = fill(target, queue, bodies)
        until(lambda: cluster.bounds([queue]), {queue: (0, 300)})
        assert place in cluster.topics()
        key = ids[123]
        until(
            lambda: [one[:3] for one in cluster.find_by_unique_keys(place, [key])[key]],
            [(queue.broker_name, 0, 123)],
        )
        average = cluster.average_bytes(queue, 10)
        assert average is not None and average > 91
    rows = list(enumerate(bodies))
    for start, end in ((0, 300), (7, 8), (33, 290)):
        span = Range(queue, start, end, addresses)
        assert read(span, options(target)) == rows[start:end]
    span = Range(queue, 0, 300, addresses)
    assert read(span, options(target, tags=("A",))) == rows[::2]
    assert read(span, options(target, sql="n BETWEEN 200 AND 205")) == rows[200:206]
    with pytest.raises(Refused, match=place):
        read(span, options(target, sql="n BETWEEN AND"))
    with pytest.raises(DataLoss, match="ends at 300"):
        read(Range(queue, 250, 400, addresses), options(target))


def test_messages_of_all_sizes(target: Target, place: str) -> None:
    bodies = [os.urandom(size) for size in (1, 70_000, 3_000_000, 10, 300_000, 2_000, 1_000_000)]
    with Cluster(options(target).connection) as cluster:
        queue, addresses = first_queue(cluster, place)
        fill(target, queue, bodies * 3)
        until(lambda: cluster.bounds([queue]), {queue: (0, 21)})
    rows = read(Range(queue, 0, 21, addresses), options(target))
    assert [row[1] for row in rows] == bodies * 3


def test_progress_of_a_group(target: Target, place: str, group: str) -> None:
    with Cluster(options(target).connection) as cluster:
        queue, _ = first_queue(cluster, place)
        fill(target, queue, [b"x"] * 9)
        cluster.commit(group, {queue: 7})
        assert cluster.committed(group, [queue]) == {queue: 7}


def test_offsets_by_time(target: Target, place: str) -> None:
    with Cluster(options(target).connection) as cluster:
        queue, addresses = first_queue(cluster, place)
        with Producer(target.namesrv, group="w", send_timeout_ms=15_000) as producer:
            for at in range(12):
                # Pairs are stored close together, often in the same millisecond.
                producer.send(Message(place, b"m%d" % at), queue=queue)
                time.sleep(0.02 if at % 2 else 0)
        until(lambda: cluster.bounds([queue]), {queue: (0, 12)})
        span = Range(queue, 0, 12, addresses)
        rows = read(span, options(target, columns=("store_time",)))
        times = [round(row[0].timestamp() * 1000) for row in rows]  # type: ignore[attr-defined]
        for moment in sorted({t + more for t in times for more in (-1, 0, 1)}):
            right = sum(t < moment for t in times)
            assert cluster.at_time([queue], moment) == {queue: right}, (moment, times)
        assert cluster.at_time([queue], 0) == {queue: 0}
        assert cluster.at_time([queue], 1 << 45) == {queue: 12}
