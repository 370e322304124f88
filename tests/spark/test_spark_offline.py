"""A store directory as a table of Spark, whole and damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.goldens import Golden, each_golden

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

from pyspark.errors import PySparkException
from pyspark.sql import functions as F


def table(spark: SparkSession, path: Path, **options: str) -> DataFrame:
    reader = spark.read.format("rocketmq").option("storePath", str(path))
    return reader.options(**options).load()


@each_golden
def test_a_java_store_is_a_table(spark: SparkSession, golden: Golden) -> None:
    facts = golden.manifest("store")
    store = golden.path / "store"
    rows = table(spark, store, includeSystem="true", splitBytes="8k", mode="failFast")
    rows = rows.withColumn("part", F.spark_partition_id())
    found = (
        rows.groupBy("topic", "queue_id")
        .agg(F.count("*").alias("rows"), F.collect_set("part").alias("parts"))
        .collect()
    )
    assert len({part for row in found for part in row.parts}) > 2
    wanted: dict[tuple[str, int], int] = {}
    for fact in facts["commitlog_walk"]:
        queue = fact["topic"], fact["queueId"]
        wanted[queue] = wanted.get(queue, 0) + 1
    assert {(row.topic, row.queue_id): row["rows"] for row in found} == wanted


def test_damage_in_three_modes(spark: SparkSession, tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "store-crash"
    shutil.copytree(golden / "commitlog", tmp_path / "commitlog")
    path = tmp_path / "commitlog" / f"{0:020d}"
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    hurt = int.from_bytes(data[:4], "big")  # the second record
    data[hurt + 4] ^= 1
    path.write_bytes(data)

    rows = table(spark, tmp_path, brokerName="b", splitBytes="5000").collect()
    (bad,) = [row for row in rows if row["_corrupt_record"]]
    assert bad["_corrupt_record"].startswith(f"{path} at {hurt}: unknown magic")
    assert (bad.commit_log_offset, bad.broker, bad.topic) == (hurt, "b", None)
    assert len(rows) == 110

    assert table(spark, tmp_path, mode="dropMalformed").count() == 109

    with pytest.raises(PySparkException, match=f"{path.name} at {hurt}: unknown magic"):
        table(spark, tmp_path, mode="failFast").collect()
