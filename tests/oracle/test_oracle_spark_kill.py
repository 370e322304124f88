"""kill -9 of driver, workers and broker under a running archive: the lake has every message once.

The judge is a plain reader of Parquet that knows nothing of us: after the last run it must find
each offset of each queue exactly once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import pyarrow.dataset as arrow_dataset
from peers.node import CosmoNode
from peers.raw import create_topic
from peers.resolve import ROOT

from cosmodrome import Message
from cosmodrome.blocking import Producer
from cosmodrome.errors import CosmodromeError
from cosmodrome.spark.cluster import Cluster
from cosmodrome.spark.read.options import Connection

TOPIC = "killed"
QUEUES = 4
DEADLINE_S = 240  # for one step on a machine that is busy with others
DAEMON = b"pyspark.daemon"


class Traffic:
    """Sends all the time, whatever the broker does; what was unclear is sent again."""

    def __init__(self, namesrv: str) -> None:
        self._namesrv = namesrv
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def _run(self) -> None:
        number = 0
        with Producer(self._namesrv, group="traffic", send_timeout_ms=2_000) as producer:
            while not self._ended.wait(0.1):
                messages = [Message(TOPIC, b"%d" % (number + n)) for n in range(10)]
                try:
                    producer.send_batch(messages)
                    number += 10
                except CosmodromeError:
                    continue


class Archive:
    """`cosmo pipeline archive` in a process group of its own."""

    def __init__(self, path: Path, namesrv: str, log: Path, *words: str) -> None:
        self.path = path
        self._command = [
            *(sys.executable, "-m", "cosmodrome.cli", "pipeline", "archive", str(path)),
            *("-t", TOPIC, "-n", namesrv, "--no-delta", "--trigger", "200 milliseconds"),
            *("--rows-per-batch", "500", "--compact-after", "3", *words),
        ]
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._starts_left = 5

    def start(self) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environ, start_new_session=True
            )

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def run(self) -> None:
        """To its end, which must be a good one."""
        while True:
            self.start()
            assert self._child is not None
            if self._child.wait(DEADLINE_S) == 0:
                return
            self._starts_left -= 1
            assert self._starts_left > 0, self.log()

    def stop(self) -> int:
        """As an operator does it; returns the exit code."""
        assert self._child is not None
        self._child.send_signal(signal.SIGTERM)
        return self._child.wait(DEADLINE_S)

    def kill9(self) -> None:
        assert self._child is not None
        os.killpg(self.pid, signal.SIGKILL)
        self._child.wait(30)

    def log(self) -> str:
        return self._log.read_text(errors="replace")[-3_000:]

    def wait_for_batch(self, number: int) -> None:
        """Until so many batches are complete since the archive was begun."""
        self.wait(lambda: self.newest() >= number, f"batch {number}")

    def newest(self) -> int:
        found = (self.path / "_cosmodrome" / "progress").glob("*.json")
        return max((int(name.stem) for name in found), default=-1)

    def wait(self, happened: Callable[[], bool], what: str) -> None:
        """A driver that gave up (its broker is away, the machine is slow) is one more crash."""
        assert self._child is not None
        deadline = time.monotonic() + DEADLINE_S
        while not happened():
            if self._child.poll() is not None:
                self._starts_left -= 1
                assert self._starts_left > 0, f"ended before {what}:\n{self.log()}"
                self.start()
            assert time.monotonic() < deadline, f"no {what}:\n{self.log()}"
            time.sleep(0.05)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[CosmoNode]:
    with CosmoNode(tmp_path / "data") as node:
        create_topic(node.namesrv_port, node.broker_port, TOPIC, QUEUES)
        yield node


def python_workers(driver: int) -> list[int]:
    """The processes in which tasks of a driver run Python: children of its JVM's children."""
    parents: dict[int, int] = {}
    daemons = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                after_name = (entry / "stat").read_text().rpartition(")")[2]
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            parents[int(entry.name)] = int(after_name.split()[1])
            if DAEMON in command:
                daemons.append(int(entry.name))

    def belongs(pid: int) -> bool:
        while pid > 1:
            pid = parents.get(pid, 0)
            if pid == driver:
                return True
        return False

    return [pid for pid in daemons if belongs(pid)]


def lake_offsets(path: Path) -> dict[int, list[int]]:
    found = arrow_dataset.dataset(path, format="parquet", partitioning="hive")
    table = found.to_table(columns=["queue_id", "queue_offset"]).to_pydict()
    offsets: dict[int, list[int]] = {}
    for queue, offset in zip(table["queue_id"], table["queue_offset"], strict=True):
        offsets.setdefault(queue, []).append(offset)
    return {queue: sorted(held) for queue, held in sorted(offsets.items())}


def broker_offsets(namesrv: str) -> dict[int, list[int]]:
    with Cluster(Connection(namesrv=namesrv)) as cluster:
        bounds = cluster.bounds(list(cluster.queues([TOPIC])))
    held = {queue.queue_id: list(range(low, high)) for queue, (low, high) in bounds.items()}
    return dict(sorted(held.items()))


def test_every_message_is_in_the_lake_once(node: CosmoNode, tmp_path: Path) -> None:
    path = tmp_path / "lake"
    archive = Archive(
        path, node.namesrv_address, tmp_path / "archive.log", "--master", "local[2,4]"
    )
    with Traffic(node.namesrv_address):
        for moment in (0.0, 0.07, 0.3):
            archive.start()
            archive.wait_for_batch(archive.newest() + 3)
            time.sleep(moment)
            archive.kill9()
        archive.start()
        archive.wait_for_batch(archive.newest() + 2)
        for pid in python_workers(archive.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        archive.wait_for_batch(archive.newest() + 2)
        node.kill9()
        time.sleep(1)
        node.start()
        archive.wait_for_batch(archive.newest() + 3)
        assert archive.stop() == 0, archive.log()
    last_words = ("--once", "--compact", "--rows-per-batch", "100000")
    final = Archive(path, node.namesrv_address, tmp_path / "final.log", *last_words)
    final.run()
    expected = broker_offsets(node.namesrv_address)
    assert sum(map(len, expected.values())) > 500
    assert lake_offsets(path) == expected
