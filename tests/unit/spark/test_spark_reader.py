"""Reading ranges: from real embedded nodes, and through or from peers that fail on purpose."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.unit.spark.live_kit import (
    another_broker,
    connection,
    dead_address,
    queue_of,
    send,
    send_all,
)

from cosmodrome import Message
from cosmodrome.blocking import Node, Producer, embedded
from cosmodrome.errors import Refused
from cosmodrome.spark import links
from cosmodrome.spark.cluster import Cluster
from cosmodrome.spark.read.options import ReadOptions
from cosmodrome.spark.read.plan import DataLoss, Range
from cosmodrome.spark.read.reader import read_range
from cosmodrome.spark.read.rows import COLUMNS, arrow_schema
from cosmodrome.wire.commands import DeleteExpiredCommitlog


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with embedded(enable_property_filter=True) as node:
        yield node


@pytest.fixture(autouse=True)
def no_kept_connections() -> Iterator[None]:
    yield
    links.close_all()


def options(node: Node, **more: object) -> ReadOptions:
    retries = more.pop("retries", 0)
    namespace = more.pop("namespace", "")
    base = ReadOptions(
        connection=connection(node.namesrv, retries=retries, namespace=namespace),
        columns=("queue_offset", "body"),
    )
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def whole(node: Node, topic: str, count: int, queue_id: int = 0) -> Range:
    return Range(queue_of(topic, queue_id), 0, count, (node.broker_address,))


def read(span: Range, wanted: ReadOptions) -> list[tuple[object, ...]]:
    batches = list(read_range(span, wanted))
    if not batches:
        return []
    for batch in batches:
        batch.validate(full=True)
    table = pa.Table.from_batches(batches)
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def expected(start: int, end: int, step: int = 1) -> list[tuple[object, ...]]:
    return [(number, b"m%d" % number) for number in range(start, end, step)]


def test_every_offset_once_and_in_order(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 200)
    span = whole(node, cosmo_topic, 200)
    assert read(span, options(node)) == expected(0, 200)
    for start, end in ((0, 1), (1, 2), (31, 33), (0, 32), (5, 166), (199, 200)):
        part = dataclasses.replace(span, start=start, end=end)
        assert read(part, options(node)) == expected(start, end), (start, end)


@pytest.mark.parametrize("ahead", [1, 2, 3, 64])
def test_any_number_of_pulls_ahead(node: Node, cosmo_topic: str, ahead: int) -> None:
    send(node, cosmo_topic, 150)
    assert read(whole(node, cosmo_topic, 150), options(node, pulls_ahead=ahead)) == expected(0, 150)


def test_all_columns(node: Node, cosmo_topic: str) -> None:
    ids = send(node, cosmo_topic, 3, queue_id=1)
    (batch,) = read_range(whole(node, cosmo_topic, 3, 1), options(node, columns=COLUMNS))
    assert batch.schema == arrow_schema(COLUMNS)
    row = batch.to_pylist()[2]
    assert row["topic"] == cosmo_topic and row["broker"] == "embedded" and row["queue_id"] == 1
    assert row["msg_id"] == ids[2] and row["tags"] == "C" and dict(row["properties"])["n"] == "2"


def test_nothing_is_asked_for_an_empty_range(node: Node, cosmo_topic: str) -> None:
    span = Range(queue_of(cosmo_topic), 7, 7, (dead_address(),))
    assert read(span, options(node)) == []


def test_tags_are_exact(node: Node, cosmo_topic: str) -> None:
    # "Aa" and "BB" have the same hash, which is all that a broker compares.
    messages = [Message(cosmo_topic, b"m%d" % n, tags=("Aa", "BB", "C")[n % 3]) for n in range(120)]
    send_all(node.namesrv, messages)
    span = whole(node, cosmo_topic, 120)
    assert read(span, options(node, tags=("Aa",))) == expected(0, 120, 3)
    both = read(span, options(node, tags=("Aa", "C")))
    assert both == sorted(expected(0, 120, 3) + expected(2, 120, 3))
    assert read(span, options(node, tags=("none",))) == []


def test_sql_is_applied_by_the_broker(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 100)
    span = whole(node, cosmo_topic, 100)
    assert read(span, options(node, sql="n BETWEEN 40 AND 42")) == expected(40, 43)
    assert read(span, options(node, sql="TAGS = 'B'")) == expected(1, 100, 3)
    with pytest.raises(Refused, match=cosmo_topic):
        read(span, options(node, sql="n BETWEEN"))


def test_sparse_matches_over_many_offsets(node: Node, cosmo_topic: str) -> None:
    with Producer(node.namesrv, group="writers") as producer:
        batch = [
            Message(cosmo_topic, b"m%d" % n, tags="A" if n % 977 else "B") for n in range(5000)
        ]
        for first in range(0, 5000, 500):
            producer.send_batch(batch[first : first + 500], queue=queue_of(cosmo_topic))
    span = whole(node, cosmo_topic, 5000)
    assert read(span, options(node, tags=("B",))) == expected(0, 5000, 977)
    part = dataclasses.replace(span, start=978, end=4885)
    assert read(part, options(node, tags=("B",))) == expected(1954, 4885, 977)


def test_large_and_small_messages_mixed(node: Node, cosmo_topic: str) -> None:
    sizes = [10, 3 << 20, 100, 4_000_000, 200_000, 5, 300_000, 70_000] * 2
    bodies = [bytes([index]) * size for index, size in enumerate(sizes)]
    with Producer(node.namesrv, group="w", compress_above_bytes=5 << 20) as producer:
        for body in bodies:
            producer.send(Message(cosmo_topic, body), queue=queue_of(cosmo_topic))
    span = whole(node, cosmo_topic, len(bodies))
    for pull_bytes in (4 << 20, 1 << 10):
        rows = read(span, options(node, pull_bytes=pull_bytes))
        assert [row[1] for row in rows] == bodies


def test_compressed_bodies_are_plain(node: Node, cosmo_topic: str) -> None:
    send_all(node.namesrv, [Message(cosmo_topic, b"x" * 50_000)] * 3)
    rows = read(whole(node, cosmo_topic, 3), options(node))
    assert [row[1] for row in rows] == [b"x" * 50_000] * 3


def test_names_of_a_namespace(node: Node, cosmo_topic: str) -> None:
    send(node, cosmo_topic, 4, namespace="shop")
    wanted = options(node, namespace="shop", columns=("topic", "queue_offset"))
    rows = read(whole(node, cosmo_topic, 4), wanted)
    assert rows == [(cosmo_topic, number) for number in range(4)]


def test_two_brokers(node: Node, cosmo_topic: str, tmp_path: Path) -> None:
    with another_broker(node, "b", tmp_path) as address:
        with Producer(node.namesrv, group="w") as producer:  # it makes the topic on both
            for broker, count in (("embedded", 70), ("b", 40)):
                for number in range(count):
                    message = Message(cosmo_topic, b"m%d" % number)
                    producer.send(message, queue=queue_of(cosmo_topic, 0, broker))
        first = read_range(whole(node, cosmo_topic, 70), options(node))
        other = Range(queue_of(cosmo_topic, 0, "b"), 0, 40, (address,))
        wanted = options(node, columns=("broker", "queue_offset"))
        assert read(other, wanted) == [("b", number) for number in range(40)]
        assert sum(batch.num_rows for batch in first) == 70


def test_a_broker_that_gives_much_at_once(cosmo_topic: str) -> None:
    with embedded(
        max_transfer_count_on_message_in_memory=5000,
        max_transfer_bytes_on_message_in_memory=100_000,
    ) as node:
        with Producer(node.namesrv, group="w") as producer:
            batch = [Message(cosmo_topic, b"m%d" % n) for n in range(4000)]
            for first in range(0, 4000, 1000):
                producer.send_batch(batch[first : first + 1000], queue=queue_of(cosmo_topic))
        assert read(whole(node, cosmo_topic, 4000), options(node)) == expected(0, 4000)


def test_expired_messages(cosmo_topic: str) -> None:
    """Log files of 64 KiB that are removed as soon as nobody writes to them."""
    with embedded(
        mapped_file_size_commit_log=64 << 10,
        mapped_file_size_consume_queue=20 * 50,
        file_reserved_time=0,
    ) as node:
        send_all(node.namesrv, [Message(cosmo_topic, os.urandom(1_000)) for _ in range(300)])
        with Cluster(connection(node.namesrv)) as cluster:
            link = links.take(node.broker_address, connection(node.namesrv))
            deadline = time.monotonic() + 120
            queue = queue_of(cosmo_topic)
            while cluster.bounds([queue])[queue][0] == 0 and time.monotonic() < deadline:
                link.call(DeleteExpiredCommitlog(), 10_000)
                time.sleep(0.02)
            links.give_back(node.broker_address, connection(node.namesrv), link)
            least, most = cluster.bounds([queue])[queue]
        assert 0 < least < most == 300
        span = whole(node, cosmo_topic, 300)
        with pytest.raises(DataLoss, match=f"wanted offset 0, .* {least} "):
            read(span, options(node))
        kept = read(span, options(node, fail_on_data_loss=False))
        assert [row[0] for row in kept] == list(range(least, 300))
        kept = read(span, options(node, fail_on_data_loss=False, tags=("none",)))
        assert kept == []
