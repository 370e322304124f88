"""kill -9 of driver, executor and broker under a stream that writes: readers see each row once."""

from __future__ import annotations

import collections
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

pytest.importorskip("pyspark")

from peers.node import CosmoNode
from peers.raw import create_topic
from peers.resolve import ROOT

from cosmodrome import Message
from cosmodrome.blocking import Producer
from cosmodrome.spark.cluster import Cluster
from cosmodrome.spark.read.options import Connection, ReadOptions
from cosmodrome.spark.read.plan import Range
from cosmodrome.spark.read.reader import read_range

SOURCE, TARGET = "rows", "sunk"
ROWS = 4_000
DEADLINE_S = 400  # for one step on a machine that is busy with others
EXECUTOR = b"CoarseGrainedExecutorBackend"

# A few hundred rows a second, so that a kill finds micro-batches half sent.
PROGRAM = textwrap.dedent(
    """
    import sys, time
    from cosmodrome.spark.runtime.session import session

    namesrv, checkpoint, master = sys.argv[1:]
    conf = {"spark.sql.execution.arrow.maxRecordsPerBatch": "20"}
    spark = session("sink", master=master, conf=conf, delta=False)

    def slowly(batches):
        for batch in batches:
            time.sleep(0.05)
            yield batch

    rows = (
        spark.readStream.format("rocketmq").option("namesrv", namesrv)
        .option("subscribe", "rows").option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "400").option("columns", "body").load()
    )
    query = (
        rows.mapInArrow(slowly, "body binary").writeStream.format("rocketmq")
        .option("namesrv", namesrv).option("topic", "sunk").option("batchRows", "8")
        .option("retries", "20").option("checkpointLocation", checkpoint)
        .trigger(availableNow=True).start()
    )
    query.awaitTermination()
    spark.stop()
    """
)


class Sink:
    """The program in a process group of its own."""

    def __init__(self, folder: Path, namesrv: str, master: str) -> None:
        self._program = folder / "sink.py"
        self._program.write_text(PROGRAM)
        self._words = [namesrv, str(folder / "checkpoint"), master]
        self._log = folder / "sink.log"
        self._namesrv = namesrv
        self.child: subprocess.Popen[bytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.kill9()

    def start(self) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with self._log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, str(self._program), *self._words],
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,
            )

    def kill9(self) -> None:
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait(30)

    def finish(self) -> None:
        assert self.child.wait(DEADLINE_S) == 0, self._log_tail()

    def wait_for_rows(self, more: int) -> None:
        """Until so many rows came since now, in the middle of a micro-batch most likely."""
        wanted = stored(self._namesrv) + more
        self.wait(lambda: stored(self._namesrv) >= wanted, f"{more} rows")

    def wait(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not happened():
            assert self.child.poll() is None, f"ended before {what}:\n{self._log_tail()}"
            assert time.monotonic() < deadline, f"no {what}:\n{self._log_tail()}"
            time.sleep(0.02)

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-3_000:]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CosmoNode]:
    with CosmoNode(tmp_path / "data") as node:
        for topic in (SOURCE, TARGET):
            create_topic(node.namesrv_port, node.broker_port, topic, 2)
        with Producer(node.namesrv_address, group="fill", send_timeout_ms=15_000) as producer:
            for first in range(0, ROWS, 100):
                producer.send_batch([Message(SOURCE, b"%d" % (first + n)) for n in range(100)])
        yield node


def stored(namesrv: str) -> int:
    with Cluster(Connection(namesrv=namesrv)) as cluster:
        bounds = cluster.bounds(list(cluster.queues([TARGET])))
    return sum(high for _, high in bounds.values())


def copies(namesrv: str, *, dedupe: bool) -> collections.Counter[int]:
    """How often each row is read."""
    given = {"namesrv": namesrv, "subscribe": TARGET, "columns": "body", "dedupe": str(dedupe)}
    options = ReadOptions.parse(given)
    found: collections.Counter[int] = collections.Counter()
    with Cluster(options.connection) as cluster:
        queues = cluster.queues([TARGET])
        for queue, (low, high) in cluster.bounds(queues).items():
            for batch in read_range(Range(queue, low, high, queues[queue]), options):
                found.update(map(int, batch.column(0).to_pylist()))
    return found


def executors(group: int) -> list[int]:
    """Executor processes that belong to a driver."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                mine = os.getpgid(int(entry.name)) == group
                if mine and EXECUTOR in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_driver_and_broker_are_killed(node: CosmoNode, tmp_path: Path) -> None:
    with Sink(tmp_path, node.namesrv_address, "local[2,4]") as sink:
        for rows in (150, 490):
            sink.start()
            sink.wait_for_rows(rows)
            sink.kill9()
        sink.start()
        sink.wait_for_rows(250)
        node.kill9()
        time.sleep(1)
        node.start()
        sink.finish()
    raw = copies(node.namesrv_address, dedupe=False)
    assert set(raw) == set(range(ROWS))
    # Whether a kill falls between a send and its commit is chance: there may be copies or not.
    assert copies(node.namesrv_address, dedupe=True) == dict.fromkeys(range(ROWS), 1)


def test_an_executor_is_killed(node: CosmoNode, tmp_path: Path) -> None:
    with Sink(tmp_path, node.namesrv_address, "local-cluster[2,1,1024]") as sink:
        sink.start()
        for rows in (130, 500):
            sink.wait_for_rows(rows)
            sink.wait(lambda: bool(executors(sink.child.pid)), "executor")
            os.kill(executors(sink.child.pid)[0], signal.SIGKILL)
        sink.finish()
    raw = copies(node.namesrv_address, dedupe=False)
    assert set(raw) == set(range(ROWS))
    assert copies(node.namesrv_address, dedupe=True) == dict.fromkeys(range(ROWS), 1)
