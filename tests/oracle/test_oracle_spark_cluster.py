"""A standalone cluster: a master, a worker and executors that are processes of their own.

Executors are killed under a stream and under an archive. Nothing may be lost, and nothing may be
there twice: in the lake at all, in the topic for readers that drop what was sent again.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow.dataset as arrow_dataset
from peers.node import CosmoNode
from peers.process import dying_with_parent
from peers.raw import create_topic
from peers.resolve import ROOT
from peers.spark import StandaloneSpark

from cosmodrome import Message
from cosmodrome.blocking import Producer
from cosmodrome.spark.cluster import Cluster
from cosmodrome.spark.read.options import Connection, ReadOptions
from cosmodrome.spark.read.plan import Range
from cosmodrome.spark.read.reader import read_range

ROWS = 4_000
DEADLINE_S = 300  # for one step on a machine that is busy with others

# A few hundred rows a second, so that a kill finds micro-batches half sent.
PROGRAM = textwrap.dedent(
    """
    import json, sys, time
    from cosmodrome.spark.runtime.session import session, stop

    namesrv, checkpoint, master, conf = sys.argv[1:]
    spark = session("cluster", master=master, conf=json.loads(conf), delta=False)

    def slowly(batches):
        for batch in batches:
            time.sleep(0.05)
            yield batch

    frame = spark.read.format("rocketmq").options(namesrv=namesrv).load("source")
    found = {"rows": frame.count(), "parts": frame.rdd.getNumPartitions()}
    print(json.dumps(found), flush=True)
    frame.select("body").write.format("rocketmq").mode("append").options(
        namesrv=namesrv, topic="copied"
    ).save()

    rows = spark.readStream.format("rocketmq").options(
        namesrv=namesrv, startingOffsets="earliest", maxOffsetsPerTrigger="400", columns="body"
    ).load("source")
    query = rows.mapInArrow(slowly, "body binary").writeStream.format("rocketmq").options(
        namesrv=namesrv, topic="sunk", batchRows="8", checkpointLocation=checkpoint
    ).trigger(availableNow=True).start()
    query.awaitTermination()
    stop(spark)
    """
)


class Driver:
    """A Python that runs a driver; what it says on standard output is kept apart."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self._log, self.out = folder / "driver.log", folder / "driver.out"
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "SPARK_LOCAL_IP": "127.0.0.1"}
        with self._log.open("ab") as errors, self.out.open("ab") as out:
            self._child = subprocess.Popen(
                dying_with_parent([sys.executable, *words]), stdout=out, stderr=errors, env=environ
            )

    def wait(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not happened():
            assert self._child.poll() is None, f"ended before {what}:\n{self._log_tail()}"
            assert time.monotonic() < deadline, f"no {what}:\n{self._log_tail()}"
            time.sleep(0.02)

    def finish(self) -> None:
        assert self._child.wait(DEADLINE_S) == 0, self._log_tail()

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-4_000:]


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandaloneSpark]:
    with StandaloneSpark(tmp_path_factory.mktemp("standalone")) as spark:
        yield spark


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CosmoNode]:
    with CosmoNode(tmp_path_factory.mktemp("node") / "data") as node:
        for topic in ("source", "copied", "sunk"):
            create_topic(node.namesrv_port, node.broker_port, topic, 2)
        with Producer(node.namesrv_address, group="fill", send_timeout_ms=15_000) as producer:
            for first in range(0, ROWS, 100):
                producer.send_batch([Message("source", b"%d" % (first + n)) for n in range(100)])
        yield node


def kill_one(standalone: StandaloneSpark, driver: Driver) -> None:
    driver.wait(lambda: bool(standalone.executors()), "executor")
    os.kill(standalone.executors()[0], signal.SIGKILL)


def stored(namesrv: str, topic: str) -> int:
    with Cluster(Connection(namesrv=namesrv)) as cluster:
        bounds = cluster.bounds(list(cluster.queues([topic])))
    return sum(high for _, high in bounds.values())


def copies(namesrv: str, topic: str, *, dedupe: bool) -> collections.Counter[int]:
    """How often each row is read."""
    given = {"namesrv": namesrv, "subscribe": topic, "columns": "body", "dedupe": str(dedupe)}
    options = ReadOptions.parse(given)
    found: collections.Counter[int] = collections.Counter()
    with Cluster(options.connection) as cluster:
        queues = cluster.queues([topic])
        for queue, (low, high) in cluster.bounds(queues).items():
            for batch in read_range(Range(queue, low, high, queues[queue]), options):
                found.update(map(int, batch.column(0).to_pylist()))
    return found


def test_reads_writes_and_a_stream_whose_executors_die(
    standalone: StandaloneSpark, node: CosmoNode, tmp_path: Path
) -> None:
    program = tmp_path / "driver.py"
    program.write_text(PROGRAM)
    namesrv = node.namesrv_address
    conf = json.dumps({**standalone.conf, "spark.sql.execution.arrow.maxRecordsPerBatch": "20"})
    words = [str(program), namesrv, str(tmp_path / "checkpoint"), standalone.url, conf]
    driver = Driver(words, tmp_path)
    for more in (130, 500):
        wanted = stored(namesrv, "sunk") + more
        driver.wait(partial(lambda least: stored(namesrv, "sunk") >= least, wanted), f"{more} rows")
        kill_one(standalone, driver)
    driver.finish()
    assert json.loads(driver.out.read_text()) == {"rows": ROWS, "parts": 2}
    once = dict.fromkeys(range(ROWS), 1)
    assert copies(namesrv, "copied", dedupe=True) == once
    raw = copies(namesrv, "sunk", dedupe=False)
    assert set(raw) == set(range(ROWS))
    # Whether a kill falls between a send and its commit is chance: there may be copies or not.
    assert copies(namesrv, "sunk", dedupe=True) == once


def test_an_archive_whose_executors_die(
    standalone: StandaloneSpark, node: CosmoNode, tmp_path: Path
) -> None:
    lake = tmp_path / "lake"
    words = ["-m", "cosmodrome.cli", "pipeline", "archive", str(lake), "-t", "source", "--once"]
    words += ["-n", node.namesrv_address, "--no-delta", "--rows-per-batch", "400"]
    words += ["--master", standalone.url]
    for pair in standalone.conf.items():
        words += ["--conf", "=".join(pair)]
    driver = Driver(words, tmp_path)

    def newest() -> int:
        found = (lake / "_cosmodrome" / "progress").glob("*.json")
        return max((int(file.stem) for file in found), default=-1)

    for batch in (1, 4):
        driver.wait(partial(lambda least: newest() >= least, batch), f"batch {batch}")
        kill_one(standalone, driver)
    driver.finish()
    found = arrow_dataset.dataset(lake, format="parquet", partitioning="hive")
    table = found.to_table(columns=["queue_id", "queue_offset", "body"]).to_pydict()
    offsets = collections.Counter(zip(table["queue_id"], table["queue_offset"], strict=True))
    assert len(offsets) == sum(offsets.values()) == ROWS
    assert sorted(map(int, table["body"])) == list(range(ROWS))
