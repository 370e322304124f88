"""The servers that are measured: started when asked for, pinned to one core, asleep in between.

A server that is not being measured is halted (SIGSTOP): an idle JVM takes some percent of the core
and its timers would show in the tail of the other one's latencies.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peers.java import JavaCluster
from peers.node import CosmoNode
from peers.process import Process, accepts, free_port

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "RESULTS.md"
SERVER_CORE, CLIENT_CORE = "0", "1"
# A server JVM as an operator would run it on a small machine: full JIT, G1, 1 GiB heap. The
# first two take back what tests choose to start quickly.
JAVA_HEAP = (
    *("-XX:TieredStopAtLevel=4", "-XX:-UseSerialGC", "-XX:+UseG1GC"),
    *("-Xms1g", "-Xmx1g", "-XX:MaxDirectMemorySize=1g"),
)
# What a guarded server knows: one account, which may send to the topic of `bench.access`.
GUARDED_TOPIC = "Guarded0000"
ACCOUNT = ("benchSender", "bench-secret-1")
ACCOUNTS = f"""accounts:
- accessKey: {ACCOUNT[0]}
  secretKey: {ACCOUNT[1]}
  whiteRemoteAddress:
  admin: false
  defaultTopicPerm: DENY
  defaultGroupPerm: DENY
  topicPerms:
  - {GUARDED_TOPIC}=PUB
"""
ASYNC, SYNC = "ASYNC_FLUSH", "SYNC_FLUSH"
WAKE_S = 0.5  # for timers that are late after a halt
SETTLE_S = 0.6  # for what the server still writes after a load; both flush every 500 ms


def pinned(core: str) -> list[str]:
    return ["taskset", "-c", core] if (os.cpu_count() or 1) > 1 and shutil.which("taskset") else []


def pin(pid: int, core: str = SERVER_CORE) -> None:
    if (os.cpu_count() or 1) > 1 and shutil.which("taskset"):
        subprocess.run(["taskset", "-acp", core, str(pid)], check=True, capture_output=True)


@dataclass
class Target:
    """One server. `pids` begins with the process whose CPU is counted."""

    name: str
    port: int
    pids: tuple[int, ...]
    ready_s: float = 0.0
    warmed: set[str] = field(default_factory=set)

    @property
    def pid(self) -> int:
        return self.pids[0]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def memory_mb(self) -> float:
        return sum(map(memory_mb, self.pids))

    def halt(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)

    def wake(self) -> None:
        for pid in reversed(self.pids):
            os.kill(pid, signal.SIGCONT)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.wake()
        try:
            time.sleep(WAKE_S)
            yield
            time.sleep(SETTLE_S)
        finally:
            self.halt()


class Brokers:
    """Servers by kind (see `get`) and flush mode; all end with the context."""

    def __init__(self, scratch: Path, stack: contextlib.ExitStack) -> None:
        self.scratch = scratch
        self._stack = stack
        self._running: dict[tuple[str, str], Target] = {}

    def get(self, kind: str, flush: str = ASYNC) -> Target:
        """A server that sleeps until it is measured; started by the first call.

        "pure" is ours without the compiled core, "floor" stores nothing, "bare" is bench/bare.c;
        "ours guarded" and "java guarded" have access control and know `ACCOUNT`.
        """
        if (kind, flush) not in self._running:
            start: dict[str, Callable[[Path, str], Target]] = {
                "ours": self._start_ours,
                "pure": self._start_pure,
                "java": self._start_java,
                "floor": self._start_floor,
                "bare": self._start_bare,
                "ours guarded": self._start_guarded,
                "java guarded": self._start_guarded_java,
            }
            directory = self.scratch / f"{kind}-{flush}".replace(" ", "-")
            target = start[kind](directory, flush)
            pin(target.pid)
            target.halt()
            self._running[kind, flush] = target
        return self._running[kind, flush]

    def start_seconds(self) -> float:
        """How long one more `cosmo up` takes until it is ready; it is ended again."""
        directory = self.scratch / f"start-{time.monotonic_ns()}"
        node = CosmoNode(directory)
        began = time.monotonic()
        node.start()
        took = time.monotonic() - began
        node.kill9()
        return took

    @contextlib.contextmanager
    def workers(self, count: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Ports and process ids of one `cosmo up --workers`, on whatever cores there are."""
        directory = self.scratch / f"workers-{count}-{time.monotonic_ns()}"
        options = ["--workers", str(count), "--set", f"flushDiskType={ASYNC}"]
        port = free_port(-2, 1, *(10 * number for number in range(1, count)))
        with CosmoNode(directory, broker_port=port, options=options) as node:
            children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
            ports = tuple(port + 10 * number for number in range(count))
            yield ports, (node.pid, *map(int, children))

    def _start_ours(self, directory: Path, flush: str) -> Target:
        return self._start_node(directory, flush, {})

    def _start_pure(self, directory: Path, flush: str) -> Target:
        return self._start_node(directory, flush, {"COSMODROME_PURE": "1"})

    def _start_guarded(self, directory: Path, flush: str) -> Target:
        file = directory.with_suffix(".yml")
        file.write_text(ACCOUNTS)
        # The node's own broker has no account of its own at its name server.
        settings = ("aclEnable=true", f"aclFile={file}", "peerAddresses=127.0.0.1")
        return self._start_node(directory, flush, {}, settings)

    def _start_node(
        self, directory: Path, flush: str, env: Mapping[str, str], settings: Sequence[str] = ()
    ) -> Target:
        words = [word for setting in settings for word in ("--set", setting)]
        options = ["--set", f"flushDiskType={flush}", *words]
        node = CosmoNode(directory, options=options, env=env)
        self._stack.callback(node.kill9)
        began = time.monotonic()
        node.start()
        ready = time.monotonic() - began
        return Target("ours", node.broker_port, (node.pid,), ready)

    def _start_java(self, directory: Path, flush: str) -> Target:
        return self._start_cluster(directory, {"flushDiskType": flush})

    def _start_guarded_java(self, directory: Path, flush: str) -> Target:
        conf = directory / "conf"
        conf.mkdir(parents=True)
        (conf / "plain_acl.yml").write_text(ACCOUNTS)
        return self._start_cluster(directory, {"flushDiskType": flush, "aclEnable": "true"})

    def _start_cluster(self, directory: Path, settings: Mapping[str, str]) -> Target:
        namesrv, broker = free_port(), free_port(-2, 1)
        cluster = JavaCluster(directory, namesrv, broker, settings=settings, heap=JAVA_HEAP)
        self._stack.callback(cluster.kill9)
        began = time.monotonic()
        cluster.start()
        ready = time.monotonic() - began
        pids = (cluster.broker.pid, cluster.namesrv.pid)
        return Target("java", broker, pids, ready)

    def _start_floor(self, directory: Path, _flush: str) -> Target:
        return self._start_program("floor", directory, [sys.executable, "-m", "bench.floor"], [])

    def _start_bare(self, directory: Path, _flush: str) -> Target:
        program = directory.with_suffix(".bin")
        command = ["cc", "-O2", "-D_GNU_SOURCE", "-o", str(program), str(ROOT / "bench" / "bare.c")]
        subprocess.run(command, check=True)
        return self._start_program("bare", directory, [str(program)], [f"{directory}.written"])

    def _start_program(
        self, name: str, directory: Path, command: list[str], further: list[str]
    ) -> Target:
        port = free_port()
        command = [*command, str(port), *further]
        process = Process(name, command, directory.with_suffix(".log"), cwd=ROOT)
        self._stack.callback(process.kill9)
        process.start()
        process.wait_until(lambda: accepts(port), 20)
        return Target(name, port, (process.pid,))


def memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0
