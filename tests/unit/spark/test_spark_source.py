"""What the source does with schemas, as far as no JVM is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import IntegerType, MapType, StringType, StructField, StructType

from cosmodrome.errors import ConfigError
from cosmodrome.spark.read.options import ReadOptions
from cosmodrome.spark.read.rows import COLUMNS, NEVER_NULL
from cosmodrome.spark.source import RocketMQSource, fit_schema

LIVE = {"namesrv": "127.0.0.1:9876", "subscribe": "orders"}


def nullable(schema: StructType) -> set[str]:
    return {field.name for field in schema if field.nullable}


def test_only_tags_and_keys_of_a_topic_may_be_null(tmp_path: Path) -> None:
    assert nullable(RocketMQSource(LIVE).schema()) == {"tags", "keys"}
    assert nullable(RocketMQSource({**LIVE, "columns": "body,keys"}).schema()) == {"keys"}
    # A damaged record is a row of nulls, and a store does not say whose it is.
    store = RocketMQSource({"storePath": str(tmp_path)}).schema()
    assert nullable(store) == {*COLUMNS, "_corrupt_record"}


def test_batches_are_declared_as_the_schema_is() -> None:
    options = ReadOptions.parse(LIVE)
    assert options.required == NEVER_NULL
    assert fit_schema(RocketMQSource(LIVE).schema(), options).required == NEVER_NULL
    text = StringType()
    own = StructType(
        [
            StructField("topic", text, True),
            StructField("queue_id", IntegerType(), False),
            StructField("properties", MapType(text, text), True),
        ]
    )
    found = fit_schema(own, options)
    assert found.columns == ("topic", "queue_id", "properties")
    assert found.required == {"queue_id"}


def test_not_null_is_refused_where_nulls_may_come(tmp_path: Path) -> None:
    tags = StructType([StructField("tags", StringType(), False)])
    with pytest.raises(ConfigError, match="column tags may be null; leave NOT NULL out"):
        fit_schema(tags, ReadOptions.parse(LIVE))
    topic = StructType([StructField("topic", StringType(), False)])
    assert fit_schema(topic, ReadOptions.parse(LIVE)).required == {"topic"}
    with pytest.raises(ConfigError, match="column topic may be null"):
        fit_schema(topic, ReadOptions.parse({"storePath": str(tmp_path)}))
