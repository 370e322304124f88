"""Parquet as sessions write it: which columns have dictionaries, and what a time is there."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pyspark.sql import SparkSession

HADOOP = "spark.hadoop."
NOW = datetime.datetime(2026, 1, 2, 3, 4, 5, 678_901)
VALUES: dict[str, Any] = {"string": "same", "int": 1, "bigint": 1, "binary": b"same" * 8}
VALUES |= {"timestamp": NOW, "map<string,string>": {"same": "same value"}}


@pytest.fixture
def options(spark: SparkSession) -> Iterator[dict[str, str]]:
    """What the session of this process is told later than one of ours is: as a write's options."""
    from cosmodrome.spark.runtime.session import WITHOUT_DICTIONARY, parquet_settings

    settings = parquet_settings(WITHOUT_DICTIONARY)
    before = {name: spark.conf.get(name) for name in settings if not name.startswith(HADOOP)}
    for name in before:
        spark.conf.set(name, settings[name])
    yield {name.removeprefix(HADOOP): settings[name] for name in settings if name not in before}
    for name, value in before.items():
        spark.conf.set(name, str(value))


def test_columns_without_repeated_values_have_no_dictionary(
    spark: SparkSession, tmp_path: Path, options: dict[str, str]
) -> None:
    import pyarrow.parquet as pq

    from cosmodrome.spark.read import rows
    from cosmodrome.spark.runtime.session import WITHOUT_DICTIONARY

    schema = rows.schema()
    # Values do repeat here, so that a dictionary would pay in each column.
    row = tuple(VALUES[field.dataType.simpleString()] for field in schema)
    frame = spark.createDataFrame([row] * 500, schema).coalesce(1)
    frame.write.options(**options).parquet(str(tmp_path / "out"))
    (file,) = (tmp_path / "out").glob("*.parquet")
    group = pq.ParquetFile(file).metadata.row_group(0)
    columns = [group.column(at) for at in range(group.num_columns)]
    plain = {column.path_in_schema for column in columns if not column.has_dictionary_page}
    assert plain == set(WITHOUT_DICTIONARY)
    times = [column for column in columns if column.path_in_schema.endswith("_time")]
    assert [column.physical_type for column in times] == ["INT64", "INT64"]
    assert all(column.statistics.max == NOW.replace(tzinfo=datetime.UTC) for column in times)
    assert [tuple(got) for got in spark.read.parquet(str(tmp_path / "out")).collect()] == [
        row
    ] * 500
