"""The pipeline's sink, and dropping what it repeated, at Cosmodrome and upstream's brokers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tests.oracle.client_kit import Target

pytest.importorskip("pyspark")

from pyspark.sql import types

from cosmodrome.blocking import Admin
from cosmodrome.spark.cluster import Cluster
from cosmodrome.spark.read.options import ReadOptions
from cosmodrome.spark.read.plan import Range
from cosmodrome.spark.read.reader import read_range
from cosmodrome.spark.write.writer import BatchWriter, Sent, make_writer

TEXT = types.StringType()


def writer(target: Target, topic: str, columns: Sequence[str], **options: object) -> BatchWriter:
    given = {"namesrv": target.namesrv, "topic": topic, "timeoutMs": "15000"}
    given |= {name: str(value) for name, value in options.items()}
    kinds = {"delay_level": types.IntegerType(), "body": types.BinaryType()}
    fields = [types.StructField(name, kinds.get(name, TEXT)) for name in columns]
    return make_writer(given, types.StructType(fields), False)


def run(made: BatchWriter, rows: list[dict[str, Any]], attempt: int = 0) -> Sent:
    """One attempt of one task."""
    context = SimpleNamespace(
        partitionId=lambda: 0,
        attemptNumber=lambda: attempt,
        taskAttemptId=lambda: attempt,
        getLocalProperty=lambda _: None,
    )
    return made._task.send([pa.RecordBatch.from_pylist(rows)], context)


def read(target: Target, topic: str, columns: str = "body", **options: str) -> list[dict[str, Any]]:
    wanted = ReadOptions.parse(
        {"namesrv": target.namesrv, "subscribe": topic, "columns": columns, **options}
    )
    found: list[dict[str, Any]] = []
    with Cluster(wanted.connection) as cluster:
        queues = cluster.queues([topic])
        for queue, (low, high) in cluster.bounds(queues).items():
            for batch in read_range(Range(queue, low, high, queues[queue]), wanted):
                found += batch.to_pylist()
    return found


def numbered(count: int, **more: str) -> list[dict[str, Any]]:
    return [{"body": b"%05d" % number, **more} for number in range(count)]


def test_rows_arrive_in_order_with_what_they_carry(target: Target, place: str) -> None:
    rows = numbered(1_000, queue_key="k", tags="A", keys="k1 k2")
    made = writer(target, place, ("body", "queue_key", "tags", "keys"), batchRows=50)
    assert run(made, rows) == Sent(0, 1_000, 0)
    found = read(target, place, "body,tags,keys,msg_id,queue_id,properties")
    assert [row["body"] for row in found] == [row["body"] for row in rows]
    assert {(row["tags"], row["keys"]) for row in found} == {("A", "k1 k2")}
    assert len({row["queue_id"] for row in found}) == 1
    assert len({row["msg_id"] for row in found}) == 1_000
    assert not any("SPARK_RESEND" in dict(row["properties"]) for row in found)


def test_a_repeated_task_is_dropped_by_the_key_index(target: Target, place: str) -> None:
    made = writer(target, place, ("body",), batchRows=20)
    rows = numbered(500)
    run(made, rows[:300])
    run(made, rows, attempt=1)
    assert len(read(target, place)) == 800
    once = read(target, place, dedupe="true")
    assert sorted(row["body"] for row in once) == [row["body"] for row in rows]


def test_a_repeated_stage_finds_its_first_row(target: Target, place: str) -> None:
    made = writer(target, place, ("body",))
    rows = numbered(100)
    run(made, rows)
    run(made, rows)
    assert len(read(target, place)) == 200
    assert sorted(row["body"] for row in read(target, place, dedupe="true")) == [
        row["body"] for row in rows
    ]


def test_a_topic_that_the_first_batch_creates(target: Target, name: str) -> None:
    topic = f"New_{os.getpid()}_{name}"
    run(writer(target, topic, ("body",), batchRows=10), numbered(100))
    deadline = time.monotonic() + 30
    while len(found := read(target, topic)) < 100 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert len({row["body"] for row in found}) == 100


def test_delayed_rows(target: Target, place: str) -> None:
    rows: list[dict[str, Any]] = [
        {"body": b"later", "delay_level": 1},
        {"body": b"now", "delay_level": None},
    ]
    assert run(writer(target, place, ("body", "delay_level")), rows).rows == 2
    deadline = time.monotonic() + 60
    while len(found := read(target, place)) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert sorted(row["body"] for row in found) == [b"later", b"now"]


def test_operators_find_a_row_by_its_key(target: Target, place: str) -> None:
    run(writer(target, place, ("body",)), numbered(3))
    rows = read(target, place, "msg_id,body")
    for _ in range(600):
        if len(rows) == 3:
            break
        time.sleep(0.05)  # upstream makes a message readable a little after it answered
        rows = read(target, place, "msg_id,body")
    key = rows[1]
    with Admin(target.namesrv) as admin:
        message = admin.messages.by_unique_key(place, key["msg_id"])
    assert message is not None
    assert message.body == key["body"]
