"""Batch reads of a real node by a real Spark: every option, exact rows, filters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from cosmodrome.errors import ConfigError
from cosmodrome.spark.read.rows import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from tests.spark.conftest import Lab

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture(scope="module")
def filled(lab: Lab) -> str:
    """Two queues: bodies 0..19 in the first, 100..104 in the second; even ones are tagged."""
    topic = lab.topic(queues=2, prefix="batch")
    for number in range(0, 20, 2):
        lab.send(
            topic, [f"{number}"], tags="even", keys=f"k{number}", properties={"n": f"{number}"}
        )
        lab.send(topic, [f"{number + 1}"], tags="odd")
    lab.send(topic, [f"{number}" for number in range(100, 105)], queue=1)
    return topic


def bodies(frame: DataFrame) -> list[int]:
    return sorted(int(bytes(row.body)) for row in frame.select("body").collect())


def parts(frame: DataFrame) -> int:
    return frame.rdd.getNumPartitions()


def test_a_message_has_all_its_columns(spark: SparkSession, lab: Lab, filled: str) -> None:
    before_s = time.time()
    frame = lab.read(spark, filled)
    assert frame.columns == list(COLUMNS)
    rows = {int(bytes(row.body)): row for row in frame.collect()}
    assert sorted(rows) == [*range(20), *range(100, 105)]
    row: Any = rows[4]
    assert (row.topic, row.broker, row.queue_id, row.queue_offset) == (filled, lab.broker, 0, 4)
    assert (row.tags, row.keys, row.properties["n"]) == ("even", "k4", "4")
    assert row.msg_id == row.properties["UNIQ_KEY"]
    assert row.store_time.timestamp() <= before_s
    assert row.born_host.startswith("127.0.0.1:")
    assert rows[101].tags is None and rows[101].queue_id == 1
    assert [rows[n].queue_offset for n in range(20)] == list(range(20))


def test_places_partitions_and_columns(spark: SparkSession, lab: Lab, filled: str) -> None:
    frame = lab.read(
        spark,
        subscribe=filled,
        startingOffsets=f'{{"{filled}": {{"{lab.broker}": {{"0": 3, "1": 1}}}}}}',
        endingOffsets=f'{{"{filled}": {{"{lab.broker}": {{"0": 15, "1": -1}}}}}}',
        minPartitions=5,
        columns="queue_offset,body",
        pullBytes="1k",
        pullsAhead=2,
        timeoutMs=60000,
        retries=2,
    )
    assert frame.columns == ["queue_offset", "body"]
    assert parts(frame) == 5
    assert bodies(frame) == [*range(3, 15), *range(101, 105)]
    nothing = lab.read(spark, filled, endingTimestamp=0)
    assert nothing.count() == 0


def test_filters_at_the_broker(spark: SparkSession, lab: Lab, filled: str) -> None:
    assert bodies(lab.read(spark, filled, tags="even || other")) == list(range(0, 20, 2))
    assert bodies(lab.read(spark, filled, sql="n > 9")) == list(range(10, 20, 2))


def test_subjects(spark: SparkSession, lab: Lab, filled: str) -> None:
    other = lab.topic(queues=1, prefix="batch-other")
    lab.send(other, ["77"])
    pattern = lab.read(spark, subscribePattern="batch-.*").where("body IN ('77', '19')")
    assert {(row.topic, bytes(row.body)) for row in pattern.collect()} == {
        (filled, b"19"),
        (other, b"77"),
    }
    assign = lab.read(spark, assign=f'{{"{filled}": {{"{lab.broker}": [1]}}}}')
    assert bodies(assign) == list(range(100, 105))


def test_times(spark: SparkSession, lab: Lab) -> None:
    topic = lab.topic(queues=1)
    lab.send(topic, ["1"])
    time.sleep(0.02)
    middle_ms = int(time.time() * 1000)
    time.sleep(0.02)
    lab.send(topic, ["2", "3"])
    assert bodies(lab.read(spark, topic, startingTimestamp=middle_ms)) == [2, 3]
    assert bodies(lab.read(spark, topic, endingTimestamp=middle_ms)) == [1]
    frame = lab.read(spark, topic)
    moment = f"timestamp_millis({middle_ms})"
    assert bodies(frame.where(f"store_time >= {moment}")) == [2, 3]
    assert bodies(frame.where(f"store_time < {moment}")) == [1]


def test_filters_are_pushed_down(spark: SparkSession, lab: Lab, filled: str) -> None:
    frame = lab.read(spark, filled)
    assert spark.conf.get(PUSHDOWN) == "true"
    one = frame.where("queue_id = 1 AND queue_offset BETWEEN 1 AND 2")
    assert parts(one) == 1 and bodies(one) == [101, 102]
    assert bodies(frame.where(f"topic = '{filled}' AND queue_offset < 2 AND tags = 'odd'")) == [1]
    assert frame.where("topic IN ('a', 'b') OR broker = 'c'").count() == 0


def test_a_fresh_session_finds_the_source_by_itself(
    spark: SparkSession, lab: Lab, filled: str
) -> None:
    """Nothing is registered there, and filters stay with Spark, which must do no harm."""
    fresh = spark.newSession()
    assert fresh.conf.get(PUSHDOWN) == "false"
    frame = fresh.read.format("cosmodrome").option("namesrv", lab.namesrv).load(filled)
    assert bodies(frame.where("queue_id = 1")) == list(range(100, 105))
    assert parts(frame.where("queue_id = 1")) == 2


def test_the_schema_of_the_user(spark: SparkSession, lab: Lab, filled: str) -> None:
    def read(ddl: str) -> DataFrame:
        reader = spark.read.format("rocketmq").option("namesrv", lab.namesrv)
        return reader.schema(ddl).load(filled)

    frame = read("body BINARY, properties MAP<STRING, STRING>, queue_id INT")
    assert all(field.nullable for field in frame.schema)
    rows = frame.where("queue_id = 0").collect()
    assert len(rows) == 20 and rows[0].__fields__ == ["body", "properties", "queue_id"]
    whole = lab.read(spark, filled)
    assert {field.name for field in whole.schema if field.nullable} == {"tags", "keys"}
    again = spark.read.format("rocketmq").option("namesrv", lab.namesrv).schema(whole.schema)
    assert again.load(filled).collect() == whole.collect()
    with pytest.raises(Exception, match="column body is binary, not string"):
        read("body STRING").count()
    with pytest.raises(Exception, match="no column is called value"):
        read("value BINARY").count()


def test_errors_say_what_to_do(spark: SparkSession, lab: Lab, filled: str) -> None:
    with pytest.raises(Exception, match="did you mean subscribePattern"):
        lab.read(spark, subscribePatern="x")
    with pytest.raises(Exception, match="no broker has topic nowhere"):
        lab.read(spark, "nowhere").count()
    offsets = f'{{"{filled}": {{"{lab.broker}": {{"1": 99}}}}}}'
    with pytest.raises(Exception, match=r"ends at 5.*failOnDataLoss=false"):
        lab.read(spark, filled, startingOffsets=offsets).count()
    careless = lab.read(spark, filled, startingOffsets=offsets, failOnDataLoss="false")
    assert bodies(careless) == list(range(20))


def test_json_bodies(spark: SparkSession, lab: Lab) -> None:
    from cosmodrome.spark import infer_json_schema, json_bodies

    topic = lab.topic(queues=1)
    lab.send(topic, ['{"a": 1, "b": "x"}', "no json", '{"a": 2.5, "c": [true]}', "[1]"])
    options = {"namesrv": lab.namesrv, "subscribe": topic}
    schema = infer_json_schema(spark, options)
    assert schema.simpleString() == "struct<a:double,b:string,c:array<boolean>>"
    rows = json_bodies(lab.read(spark, topic)).orderBy("queue_offset").collect()
    assert [row.value and row.value.a for row in rows] == [1.0, None, 2.5, None]
    with pytest.raises(ConfigError, match="a stream has no schema"):
        json_bodies(lab.stream(spark, topic))
    with pytest.raises(ConfigError, match="none of the first 1000 bodies"):
        infer_json_schema(spark, lab.read(spark, topic, endingTimestamp=0))
