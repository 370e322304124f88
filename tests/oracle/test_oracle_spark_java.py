"""A real Spark between upstream's clients and brokers: frames, streams, the sink, stores on disk.

What the Java client sends, Spark reads as the Java client reads it, and the other way round.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark")

from peers.clients import JAVA, Client, Letter, Line, run, send
from peers.java import JavaCluster
from peers.process import free_port
from peers.raw import create_topic
from tests.oracle.client_kit import ARTIFACTS, JAVA_49, JAVA_53, Target
from tests.oracle.oracle_checks import body, letters
from tests.oracle.spark_kit import local_spark
from tests.oracle.store_checker import (
    GEOMETRY,
    HALF_TOPIC,
    SCHEDULE_TOPIC,
    History,
    Record,
    read_log,
)
from tests.oracle.store_checker import send as send_raw

from cosmodrome import Message
from cosmodrome.blocking import Admin, Producer, PullConsumer
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.spark.cluster import Cluster
from cosmodrome.spark.read.options import Connection
from cosmodrome.spark.read.rows import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # py4j's sockets
]

DRIVER_S = 180  # a Java program, or a query, on a machine that is busy with others
COUNT = 60

# What holds at this node's own broker is in tests/spark.
at_upstream = pytest.mark.parametrize("target", (JAVA_49, JAVA_53), indirect=True, scope="session")


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    with local_spark() as made:
        yield made


@dataclass(frozen=True, slots=True)
class Filled:
    """A topic of four queues, and what the Java client was told of its letters."""

    topic: str
    answers: list[Line]


@pytest.fixture(scope="module")
def filled(ready: Callable[[Client], Client], target: Target) -> Filled:
    """Letters of all kinds; one is large, so it is compressed."""
    topic = f"filled_{os.getpid()}"
    create_topic(target.cluster.namesrv_port, target.cluster.broker_port, topic, 4)
    large = Letter(body=b"large " * 5_000, tags="TagA", keys="large", properties={"n": "1000"})
    numbered = [Letter(body=b"n%d" % n, tags="TagN", properties={"n": str(n)}) for n in range(20)]
    sent = [*letters(COUNT - 21), *numbered, large]
    answers = send(ready(JAVA), target.namesrv, topic, "g_writer", "sync", sent, DRIVER_S)
    await_rows(target, topic, COUNT)
    return Filled(topic, answers)


def read(spark: SparkSession, target: Target, topic: str, **options: object) -> DataFrame:
    reader = spark.read.format("rocketmq").option("namesrv", target.namesrv)
    return reader.options(**{name: str(value) for name, value in options.items()}).load(topic)


def collect(frame: DataFrame) -> dict[tuple[int, int], dict[str, Any]]:
    """Rows by queue and offset, each of which is there once."""
    rows = frame.toArrow().to_pylist()
    found = {(row["queue_id"], row["queue_offset"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def bodies(frame: DataFrame) -> list[bytes]:
    return sorted(bytes(row.body) for row in frame.select("body").collect())


def ends(target: Target, topic: str) -> dict[int, int]:
    with Cluster(Connection(namesrv=target.namesrv)) as cluster:
        found = cluster.bounds(cluster.queues([topic]))
    return {queue.queue_id: high for queue, (_, high) in found.items()}


def await_rows(target: Target, topic: str, count: int) -> None:
    """Upstream's queues follow its log a moment later."""
    until(lambda: sum(ends(target, topic).values()) >= count, f"{count} messages in {topic}")


def until(done: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def pulled_by_java(java: Client, target: Target, topic: str) -> list[Line]:
    lines = run(java, ["pull", target.namesrv, topic, "g_reader", "*"], timeout_s=DRIVER_S)
    return [line for line in lines if line["event"] == "message"]


def pulled_by_us(target: Target, topic: str) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    with PullConsumer(target.namesrv, group="g_ours") as consumer:
        for queue in consumer.queues(topic):
            at, end = consumer.begin_offset(queue), consumer.end_offset(queue)
            while at < end:
                pulled = consumer.pull(queue, at)
                found += pulled.messages
                at = pulled.next_offset
    return found


def epoch_ms(moment: Any) -> int:
    return round(moment.timestamp() * 1000)


@at_upstream
def test_every_column_is_what_clients_read(
    spark: SparkSession, java: Client, target: Target, filled: Filled
) -> None:
    place = filled.topic
    frame = read(spark, target, place)
    assert frame.columns == list(COLUMNS)
    rows = collect(frame)
    assert len(rows) == COUNT
    for answer in filled.answers:
        row = rows[answer["queue_id"], answer["queue_offset"]]
        assert (row["msg_id"], row["broker"]) == (answer["msg_id"], answer["broker"])
        assert row["offset_msg_id"] == answer["offset_msg_id"]

    for message in pulled_by_us(target, place):
        row, record = rows[message.queue_id, message.queue_offset], message.record
        assert {**row, "properties": dict(row["properties"])} == {
            "topic": place,
            "broker": message.broker_name,
            "queue_id": message.queue_id,
            "queue_offset": message.queue_offset,
            "body": message.body,
            "msg_id": message.msg_id,
            "offset_msg_id": message.offset_msg_id,
            "tags": message.tags,
            "keys": message.properties.get("KEYS"),
            "properties": message.properties,
            "born_time": row["born_time"],
            "store_time": row["store_time"],
            "born_host": message.born_host,
            "flag": record.flag,
            "sys_flag": record.sys_flag,
            "reconsume_times": record.reconsume_times,
            "commit_log_offset": record.log_offset,
            "store_size": record.size,
        }
        assert epoch_ms(row["born_time"]) == message.born_ms
        assert epoch_ms(row["store_time"]) == message.store_ms

    lines = pulled_by_java(java, target, place)
    assert len(lines) == COUNT
    for line in lines:
        row = rows[line["queue_id"], line["queue_offset"]]
        assert row["body"] == body(line)
        for name in ("topic", "broker", "msg_id", "tags", "keys", "sys_flag", "reconsume_times"):
            assert row[name] == line[name], name
        assert epoch_ms(row["born_time"]) == line["born_ms"]
        assert epoch_ms(row["store_time"]) == line["store_ms"]
        assert set(row["properties"]) <= set(line["properties"].items())
    assert sum(row["sys_flag"] & 1 for row in rows.values()) == 1  # the large one


@at_upstream
def test_filters(spark: SparkSession, target: Target, filled: Filled) -> None:
    place = filled.topic
    rows = collect(read(spark, target, place))

    def having(wanted: Callable[[dict[str, Any]], bool]) -> list[bytes]:
        return sorted(row["body"] for row in rows.values() if wanted(row))

    tagged = having(lambda row: row["tags"] in ("TagN", "标签"))
    assert len(tagged) > 20
    assert bodies(read(spark, target, place, tags="TagN || 标签")) == tagged
    assert bodies(read(spark, target, place).where("tags IN ('TagN', '标签')")) == tagged
    some = sorted(b"n%d" % n for n in range(5, 10))
    assert bodies(read(spark, target, place, sql="n BETWEEN 5 AND 9")) == some
    times = sorted({epoch_ms(row["store_time"]) for row in rows.values()})
    middle = times[len(times) // 2]
    after = having(lambda row: epoch_ms(row["store_time"]) >= middle)
    before = having(lambda row: epoch_ms(row["store_time"]) < middle)
    assert after and before
    assert bodies(read(spark, target, place, startingTimestamp=middle)) == after
    assert bodies(read(spark, target, place, endingTimestamp=middle)) == before
    one = read(spark, target, place).where("queue_id = 1 AND queue_offset >= 3")
    assert bodies(one) == having(lambda row: row["queue_id"] == 1 and row["queue_offset"] >= 3)


def progress(target: Target, group: str, topic: str) -> dict[int, int]:
    with Admin(target.namesrv, timeout_ms=15_000) as admin:
        found = admin.offsets.progress(group, topic)
    return {queue.queue_id: row.consumer_offset for queue, row in found.queues.items()}


def fill(target: Target, topic: str, numbers: range) -> None:
    with Producer(target.namesrv, group="g_fill", send_timeout_ms=15_000) as producer:
        for number in numbers:
            producer.send(Message(topic, b"%d" % number))
    await_rows(target, topic, numbers.stop)


@at_upstream
def test_a_stream_goes_on_after_a_restart(
    spark: SparkSession, target: Target, place: str, group: str, tmp_path: Path
) -> None:
    def stream() -> list[int]:
        reader = spark.readStream.format("rocketmq").option("namesrv", target.namesrv)
        frame = reader.options(
            startingOffsets="earliest", consumerGroup=group, maxOffsetsPerTrigger="25"
        ).load(place)
        query = (
            frame.select("queue_id", "queue_offset", "body")
            .writeStream.format("parquet")
            .option("path", str(tmp_path / "rows"))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(DRIVER_S)
        return [made["numInputRows"] for made in query.recentProgress]

    def check(count: int) -> None:
        rows = collect(spark.read.parquet(str(tmp_path / "rows")))
        assert sorted(int(row["body"]) for row in rows.values()) == list(range(count))
        # As an operator sees it at the broker.
        assert progress(target, group, place) == ends(target, place)

    fill(target, place, range(60))
    first = stream()
    assert sum(first) == 60 and len(first) >= 3 and max(first) <= 25
    check(60)
    fill(target, place, range(60, 69))
    assert sum(stream()) == 9
    check(69)


@at_upstream
def test_a_java_client_reads_what_a_frame_wrote(
    spark: SparkSession, java: Client, target: Target, place: str
) -> None:
    frame = spark.range(200).selectExpr(
        "concat('row ', id, ' 消息') AS body",
        "IF(id % 2 = 0, 'even', NULL) AS tags",
        "array(concat('key', id), '键') AS keys",
        "map('n', string(id), 'colour', 'blå') AS properties",
        "string(id % 8) AS queue_key",
        "int(id) AS flag",
    )
    frame.repartition(2).write.format("rocketmq").mode("append").option(
        "namesrv", target.namesrv
    ).option("batchRows", "16").save(place)
    await_rows(target, place, 200)
    lines = pulled_by_java(java, target, place)
    by_number = {int(line["properties"]["n"]): line for line in lines}
    assert len(lines) == 200 and sorted(by_number) == list(range(200))
    queues: dict[int, set[int]] = {}
    for number, line in by_number.items():
        assert body(line).decode() == f"row {number} 消息"
        assert line["tags"] == (None if number % 2 else "even")
        assert line["keys"] == f"key{number} 键"
        assert line["properties"]["colour"] == "blå"
        queues.setdefault(number % 8, set()).add(line["queue_id"])
    assert all(len(ids) == 1 for ids in queues.values())


@at_upstream
def test_a_micro_batch_that_came_twice_is_read_once(
    spark: SparkSession, target: Target, place: str, filled: Filled, tmp_path: Path
) -> None:
    """A driver that dies between the sink and its checkpoint leaves just this behind."""
    checkpoint = tmp_path / "checkpoint"

    def stream() -> None:
        reader = spark.readStream.format("rocketmq").option("namesrv", target.namesrv)
        frame = reader.options(startingOffsets="earliest", maxOffsetsPerTrigger="40").load(
            filled.topic
        )
        query = (
            frame.select("body")
            .writeStream.format("rocketmq")
            .options(namesrv=target.namesrv, topic=place, checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(DRIVER_S)

    stream()
    await_rows(target, place, COUNT)
    last = max(int(file.name) for file in (checkpoint / "commits").glob("[0-9]*"))
    (checkpoint / "commits" / str(last)).unlink()
    (checkpoint / "commits" / f".{last}.crc").unlink(missing_ok=True)
    stream()
    await_rows(target, place, COUNT + 1)
    wanted = bodies(read(spark, target, filled.topic))
    raw = bodies(read(spark, target, place))
    assert len(raw) > COUNT and set(raw) == set(wanted)
    assert bodies(read(spark, target, place, dedupe="true")) == wanted


# --- a directory that a Java broker wrote ------------------------------------------------------


@pytest.fixture(params=sorted(ARTIFACTS))
def upstream(request: pytest.FixtureRequest, java: Client, tmp_path: Path) -> JavaCluster:
    return JavaCluster(
        tmp_path,
        free_port(),
        free_port(-2, 1),
        settings=GEOMETRY,
        artifacts=ARTIFACTS[request.param],
    )


def check_store(spark: SparkSession, store: Path, log: list[Record], **options: str) -> None:
    """The table has the records that another reader of the format finds."""
    reader = spark.read.format("rocketmq").option("storePath", str(store))
    rows = reader.options(brokerName="broker-a", mode="failFast", **options).load()
    found = {row["commit_log_offset"]: row for row in rows.toArrow().to_pylist()}
    assert sorted(found) == [record.log_offset for record in log]
    for record in log:
        row = found[record.log_offset]
        assert (row["topic"], row["queue_id"]) == record.queue
        assert row["queue_offset"] == record.queue_offset
        assert (row["body"], dict(row["properties"])) == (record.body, record.properties)
        assert (row["flag"], row["sys_flag"]) == (record.flag, record.sys_flag)
        assert epoch_ms(row["store_time"]) == record.store_ms
        assert (row["tags"], row["keys"]) == tuple(map(record.properties.get, ("TAGS", "KEYS")))
        assert (row["broker"], row["store_size"]) == ("broker-a", len(record.data))


def test_a_store_without_its_broker(spark: SparkSession, upstream: JavaCluster) -> None:
    history, store = History(), upstream.store
    with upstream:
        port = upstream.broker_port
        history.make_group(port, "g_always", retries=1)  # 5.3 keeps progress of known groups only
        history.fill(port, "offline", 160)
        later = history.letter("Orders", 0)
        later.properties["DELAY"] = "10"
        send_raw(port, later)
        half = history.letter("Notes", 1)
        half.properties |= {"TRAN_MSG": "true", "PGROUP": "p"}
        half.sys_flag = 4
        send_raw(port, half)
        # A log that is being written is read as far as it goes.
        check_store(spark, store, read_log(store), includeSystem="true", splitBytes="8k")
        senders = history.load(port, "until the end")
        time.sleep(0.4)
        upstream.kill9()
        for sender in senders:
            sender.join(10)
    log = read_log(store)
    assert len(list((store / "commitlog").iterdir())) >= 3
    assert {SCHEDULE_TOPIC, HALF_TOPIC} < {record.topic for record in log}
    check_store(spark, store, log, includeSystem="true", splitBytes="5000")
    plain = [r for r in log if r.topic in ("Orders", "Notes") and r.queued]
    check_store(spark, store, plain)
    orders = {r.log_offset for r in plain if r.topic == "Orders"}
    assert orders >= {s.log_offset for s in history.acknowledged if s.topic == "Orders"}
    frame = spark.read.format("rocketmq").option("storePath", str(store)).load("Orders")
    assert frame.count() == len(orders)
