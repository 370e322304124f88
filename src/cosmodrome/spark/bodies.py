"""Bodies as columns: JSON parsed by Spark itself, with a schema that is given or inferred.

Spark does the work (`from_json`, and the inference of its JSON reader); this module only joins it
to the source.
For Avro and Protobuf use Spark's `from_avro` and `from_protobuf` on `body`: they need Spark's jars.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cosmodrome.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

SAMPLE_ROWS = 1_000


def json_bodies(
    frame: DataFrame,
    schema: StructType | str | None = None,
    *,
    column: str = "value",
    sample: int = SAMPLE_ROWS,
) -> DataFrame:
    """The frame with one more column: its `body` parsed as JSON, null where it is not JSON.

    Without a schema, `sample` rows of a batch are read first to infer one. A stream cannot be read
    twice: give it a schema, for example from `infer_json_schema` over a batch of the same topic.
    """
    from pyspark.sql import functions

    if schema is None:
        schema = infer_json_schema(frame.sparkSession, frame, sample=sample)
    return frame.withColumn(column, functions.from_json(_text(), schema))


def infer_json_schema(
    spark: SparkSession,
    source: DataFrame | Mapping[str, Any],
    *,
    sample: int = SAMPLE_ROWS,
) -> StructType:
    """The schema that fits the first `sample` bodies that are JSON objects.

    `source` is a batch with a `body` column, or options of the source such as
    `{"namesrv": "127.0.0.1:9876", "subscribe": "orders"}`.
    """
    from pyspark.sql import DataFrame

    if sample < 1:
        raise ConfigError(f"sample={sample}: look at one row at least")
    frame = source if isinstance(source, DataFrame) else _read(spark, source)
    if frame.isStreaming:
        raise ConfigError(
            "a stream has no schema of bodies to look at; give one, for example"
            " infer_json_schema(spark, {'namesrv': ..., 'subscribe': ...})"
        )
    # Only objects become columns.
    texts = frame.select(_text().alias("text")).where("ltrim(text) LIKE '{%'").limit(sample)
    schema = spark.read.json(texts, mode="DROPMALFORMED").schema
    if not schema.fields:
        raise ConfigError(
            f"none of the first {sample} bodies is a JSON object with fields; give a schema,"
            " or raise sample"
        )
    return schema


def _read(spark: SparkSession, options: Mapping[str, Any]) -> DataFrame:
    reader = spark.read.format("rocketmq")
    for name, value in options.items():
        reader = reader.option(name, str(value))
    return reader.option("columns", "body").load()


def _text() -> Column:
    """The body as text; bytes that are not UTF-8 are replaced and then fail to parse."""
    from pyspark.sql import functions

    return functions.col("body").cast("string")
