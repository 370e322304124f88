"""Writing through Spark: batches, streams, failed tasks and killed streams, read back."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as f

from cosmodrome.blocking import PullConsumer
from cosmodrome.spark.write.row_messages import user_properties

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from cosmodrome import ReceivedMessage


def read(lab: Any, topic: str) -> list[ReceivedMessage]:
    """Every message of a topic by our own client, queue by queue."""
    found: list[ReceivedMessage] = []
    with PullConsumer(lab.namesrv, group="readers") as consumer:
        for queue in consumer.queues(topic):
            offset = 0
            while True:
                pulled = consumer.pull(queue, offset, max_count=1_000)
                found += pulled.messages
                offset = pulled.next_offset
                if offset >= pulled.max_offset:
                    break
    return found


def save(lab: Any, frame: DataFrame, topic: str | None = None, **options: object) -> None:
    writer = frame.write.format("rocketmq").mode("append").option("namesrv", lab.namesrv)
    for name, value in options.items():
        writer = writer.option(name, str(value))
    writer.save(topic)


def run_stream(lab: Any, frame: DataFrame, topic: str, checkpoint: str) -> None:
    query = (
        frame.writeStream.format("rocketmq")
        .option("namesrv", lab.namesrv)
        .option("topic", topic)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)


def test_a_batch_write_with_every_column(spark: SparkSession, lab: Any) -> None:
    topic = lab.topic(queues=4)
    frame = spark.range(0, 400, numPartitions=2).select(
        f.format_string("%04d", "id").alias("body"),
        f.lit(topic).alias("topic"),
        f.concat(f.lit("t"), f.col("id") % 3).alias("tags"),
        f.array(f.concat(f.lit("k"), "id"), f.lit("all")).alias("keys"),
        f.create_map(f.lit("n"), f.col("id").cast("string")).alias("properties"),
        f.concat(f.lit("q"), f.col("id") % 5).alias("queue_key"),
        f.lit(None).cast("bigint").alias("delay_ms"),
        f.when(f.col("id") < 0, f.current_timestamp()).alias("deliver_time"),
        f.lit(0).alias("delay_level"),
        (f.col("id") % 7).cast("int").alias("flag"),
    )
    save(lab, frame, batchRows=16)
    found = read(lab, topic)
    assert sorted(m.body for m in found) == [b"%04d" % n for n in range(400)]
    for message in found:
        number = int(message.body)
        assert message.tags == f"t{number % 3}"
        assert message.keys == (f"k{number}", "all")
        assert message.properties["n"] == str(number)
        assert message.record.flag == number % 7
        assert "SPARK_RESEND" not in message.properties
    # One queue per key, and in it the rows of each partition in their order.
    queues = collections.defaultdict(set)
    order = collections.defaultdict(list)
    for message in found:
        number = int(message.body)
        queues[number % 5].add(message.queue_id)
        order[number % 5, number // 200].append(number)
    assert all(len(ids) == 1 for ids in queues.values())
    assert all(numbers == sorted(numbers) for numbers in order.values())


def test_what_cannot_be_written_is_said(spark: SparkSession, lab: Any) -> None:
    topic = lab.topic()
    frame = spark.range(3).select(f.col("id").cast("string").alias("body"))
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        frame.write.format("rocketmq").mode("overwrite").option("topic", topic).save()
    with pytest.raises(PySparkException, match="no column 'tag'; it takes body, topic, tags"):
        save(lab, frame.withColumn("tag", f.lit("x")), topic)
    with pytest.raises(PySparkException, match="body is bigint; it must be binary or string"):
        save(lab, frame.select(f.col("body").cast("bigint")), topic)
    nulls = frame.select(f.when(f.col("body") != "1", f.col("body")).alias("body")).coalesce(1)
    with pytest.raises(PySparkException, match="row 1 of partition 0: body is null"):
        save(lab, nulls, topic)


def test_a_stream_from_topic_to_topic(spark: SparkSession, lab: Any, checkpoint: str) -> None:
    """Four micro-batches. The last is then sent again, as after a kill between send and commit."""
    source, target = lab.topic(), lab.topic()
    for queue in (0, 1):
        lab.send(source, [f"{queue}-{n:03d}" for n in range(200)], queue=queue, tags="A")
    frame = lab.stream(spark, source, startingOffsets="earliest", maxOffsetsPerTrigger=100).select(
        "body", "tags", user_properties(f.col("properties")).alias("properties")
    )
    run_stream(lab, frame, target, checkpoint)
    expected = sorted(b"%d-%03d" % (queue, n) for queue in (0, 1) for n in range(200))
    assert sorted(m.body for m in read(lab, target)) == expected
    commits = sorted((Path(checkpoint) / "commits").glob("[0-9]"))
    assert [path.name for path in commits] == ["0", "1", "2", "3"]
    for path in (commits[-1], commits[-1].with_name(".3.crc")):
        path.unlink()

    run_stream(lab, frame, target, checkpoint)
    again = read(lab, target)
    assert len(again) == 500
    marked = [message for message in again if "SPARK_RESEND" in message.properties]
    assert 100 <= len(marked) < 500  # the repeated batch, and not everything
    assert {message.tags for message in again} == {"A"}
    assert bodies(lab.read(spark, target)) != expected
    assert bodies(lab.read(spark, target, dedupe=True, columns="body")) == expected


def test_named_writes_in_foreach_batch(spark: SparkSession, lab: Any, checkpoint: str) -> None:
    source, target = lab.topic(), lab.topic()
    lab.send(source, [str(n) for n in range(20)])

    def write(frame: DataFrame, batch_id: int) -> None:
        rows = frame.select("body", f.lit(str(batch_id)).alias("tags"))
        for name in ("a", "b"):
            save(lab, rows, target, idempotenceId=name)

    stream = lab.stream(spark, source, startingOffsets="earliest", maxOffsetsPerTrigger=10)
    query = (
        stream.writeStream.foreachBatch(write)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    found = read(lab, target)
    assert len({message.msg_id for message in found}) == len(found) == 40
    assert {(message.tags, int(message.msg_id[12:18], 16)) for message in found} == {
        ("0", 0),
        ("1", 1),
    }


def test_a_task_that_fails_midway_and_is_repeated(spark: SparkSession, lab: Any) -> None:
    topic = lab.topic(queues=3)

    def spoil_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """A null, which the sink refuses, behind 700 good rows of the first attempt."""
        import pyarrow as pa
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            rows = batch.column(0).to_pylist()
            if context.attemptNumber() == 0 and "01700" in rows:
                rows[rows.index("01700")] = None
            yield pa.record_batch([pa.array(rows, pa.string())], names=["body"])

    frame = spark.range(0, 2_000, numPartitions=2).select(
        f.format_string("%05d", "id").alias("body")
    )
    save(lab, frame.mapInArrow(spoil_once, "body string"), topic, batchRows=10)
    expected = [b"%05d" % n for n in range(2_000)]
    everything = [message.body for message in read(lab, topic)]
    assert len(everything) == 2_700
    assert sorted(set(everything)) == expected
    assert len(bodies(lab.read(spark, topic))) == 2_700
    assert bodies(lab.read(spark, topic, dedupe=True)) == expected


def bodies(frame: DataFrame) -> list[bytes]:
    return sorted(bytes(row.body) for row in frame.select("body").collect())
