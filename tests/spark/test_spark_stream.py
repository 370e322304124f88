"""Streams over a real node: restarts, limits, what appears and what vanishes meanwhile."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cosmodrome.spark.cluster import Cluster
from cosmodrome.spark.read.options import Connection
from cosmodrome.wire.bodies import MessageQueue

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from tests.spark.conftest import Lab


def run(frame: DataFrame, out: Path) -> StreamingQuery:
    """Everything that is there now, into Parquet; progress lies beside it."""
    query = (
        frame.selectExpr("queue_id", "queue_offset", "CAST(body AS STRING) AS body")
        .writeStream.format("parquet")
        .option("path", str(out / "rows"))
        .option("checkpointLocation", str(out / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(240)
    return query


def read_back(spark: SparkSession, out: Path) -> list[int]:
    return sorted(int(row.body) for row in spark.read.parquet(str(out / "rows")).collect())


def sizes(query: StreamingQuery) -> list[int]:
    return [progress["numInputRows"] for progress in query.recentProgress]


def committed(lab: Lab, group: str, topic: str) -> dict[int, int]:
    with Cluster(Connection(namesrv=lab.namesrv)) as cluster:
        found = cluster.committed(group, cluster.queues([topic]))
    return {queue.queue_id: offset for queue, offset in found.items()}


def test_available_now_limits_and_restart(spark: SparkSession, lab: Lab, tmp_path: Path) -> None:
    topic = lab.topic(queues=2)
    lab.send(topic, [str(number) for number in range(20)])
    lab.send(topic, [str(number) for number in range(20, 30)], queue=1)
    options = {
        "startingOffsets": "earliest",
        "maxOffsetsPerTrigger": 12,
        "consumerGroup": "spark-stream",
    }
    first = run(lab.stream(spark, topic, **options), tmp_path)
    assert sizes(first) == [12, 12, 6]
    assert read_back(spark, tmp_path) == list(range(30))
    assert committed(lab, "spark-stream", topic) == {0: 20, 1: 10}
    ends = [json.loads(p["sources"][0]["endOffset"]) for p in first.recentProgress]
    assert ends[0].pop("@start") == {topic: {lab.broker: {"0": 0, "1": 0}}}
    assert ends[0] == {topic: {lab.broker: {"0": 8, "1": 4}}}
    assert ends[1] == {topic: {lab.broker: {"0": 16, "1": 8}}}

    # A restart goes on behind the last row, and finds the queue that came in between.
    lab.admin.topics.update(topic, queues=3)
    lab.send(topic, ["30"])
    lab.send(topic, ["31", "32"], queue=2)
    options["maxOffsetsPerTrigger"] = 100
    second = run(lab.stream(spark, topic, **options), tmp_path)
    assert sizes(second) == [3]
    assert read_back(spark, tmp_path) == list(range(33))
    assert committed(lab, "spark-stream", topic) == {0: 21, 1: 10, 2: 2}


def test_a_running_stream_meets_new_queues_and_topics(
    spark: SparkSession, lab: Lab, checkpoint: str
) -> None:
    prefix = f"live{time.monotonic_ns()}"
    topic = lab.topic(queues=1, prefix=prefix)
    lab.send(topic, ["before"])
    frame = lab.stream(spark, subscribePattern=f"{prefix}.*", maxBytesPerTrigger="10m")
    query = (
        frame.selectExpr("topic", "queue_id", "CAST(body AS STRING) AS body")
        .writeStream.format("memory")
        .queryName("live_rows")
        .option("checkpointLocation", checkpoint)
        .start()
    )
    try:
        query.processAllAvailable()
        lab.send(topic, ["after"])
        lab.admin.topics.update(topic, queues=2)
        lab.send(topic, ["new queue"], queue=1)
        other = lab.topic(queues=1, prefix=prefix)
        lab.send(other, ["new topic"])
        deadline = time.monotonic() + 120
        seen: set[tuple[str, int, str]] = set()
        while len(seen) < 3 and time.monotonic() < deadline:
            query.processAllAvailable()
            seen = {(r.topic, r.queue_id, r.body) for r in spark.table("live_rows").collect()}
        assert seen == {(topic, 0, "after"), (topic, 1, "new queue"), (other, 0, "new topic")}
        assert spark.table("live_rows").count() == 3
    finally:
        query.stop()


def test_a_topic_that_was_made_anew(spark: SparkSession, lab: Lab, tmp_path: Path) -> None:
    topic = lab.topic(queues=1)
    lab.send(topic, ["0", "1", "2"])
    run(lab.stream(spark, topic, startingOffsets="earliest"), tmp_path)
    lab.admin.topics.delete(topic)
    lab.admin.topics.create(topic, queues=1)
    lab.send(topic, ["3"])
    with pytest.raises(Exception, match=r"the queue ends at 1.*failOnDataLoss=false"):
        run(lab.stream(spark, topic), tmp_path)
    run(lab.stream(spark, topic, failOnDataLoss="false"), tmp_path)
    lab.send(topic, ["4", "5"])
    run(lab.stream(spark, topic, failOnDataLoss="false"), tmp_path)
    assert read_back(spark, tmp_path) == [0, 1, 2, 4, 5]


def test_expired_messages(spark: SparkSession, tmp_path: Path) -> None:
    """A store with tiny files that keeps nothing: the beginning is gone, the end is there."""
    from cosmodrome import Message
    from cosmodrome.blocking import Admin, Producer, embedded

    with embedded(
        mapped_file_size_commit_log=1 << 16,
        mapped_file_size_consume_queue=20 * 100,
        file_reserved_time=0,
        delete_commit_log_files_interval=0,
        flush_disk_type="SYNC_FLUSH",  # only files on disk may go
    ) as node:
        queue = MessageQueue(topic="t", broker_name=node.broker_name, queue_id=0)
        with Admin(node.namesrv) as admin, Producer(node.namesrv, group="p") as producer:
            admin.topics.create("t", queues=1)
            for _ in range(10):
                producer.send_batch([Message("t", b"7" * 2000) for _ in range(20)], queue=queue)
            admin.brokers.delete_expired()
            low = _until_expired(admin, node.namesrv, queue)

            def frame(**options: str) -> DataFrame:
                offsets = f'{{"t": {{"{queue.broker_name}": {{"0": 0}}}}}}'
                reader = spark.readStream.format("rocketmq").option("namesrv", node.namesrv)
                return reader.options(startingOffsets=offsets, **options).load("t")

            with pytest.raises(Exception, match=f"wanted offset 0, the first there is {low}"):
                run(frame(), tmp_path / "strict")
            query = run(frame(failOnDataLoss="false"), tmp_path / "careless")
            assert sum(sizes(query)) == 200 - low


def _until_expired(admin: object, namesrv: str, queue: MessageQueue) -> int:
    deadline = time.monotonic() + 120
    with Cluster(Connection(namesrv=namesrv)) as cluster:
        while time.monotonic() < deadline:
            admin.brokers.clean_queues()  # type: ignore[attr-defined]
            low, _ = cluster.bounds([queue])[queue]
            if low == 180:  # a file has room for one batch of 20, and the last file stays
                return low
            time.sleep(0.05)
    raise AssertionError("nothing expired")
