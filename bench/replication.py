"""What a slave costs: a master and its slave of ours beside those of Java.

The master runs on the core of servers, its slave on the core of the generator. CPU is that of both
processes, counted until the slave has all, divided by all messages that were stored.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from peers.pair import JAVA, OURS, Pair
from peers.raw import max_offset, put_topic

from bench.brokers import ASYNC, CLIENT_CORE, JAVA_HEAP, SERVER_CORE, SYNC, Target, pin
from bench.loadgen import cpu_seconds
from bench.verdict import Row, Sample, errors, figure, median, values

if TYPE_CHECKING:
    from bench.rows import Bench

Load = Mapping[str, object]

KINDS = {"ours": OURS, "java": JAVA}
ROLES = ("ASYNC_MASTER", "SYNC_MASTER")
QUEUES = 8
LOADS: dict[str, Load] = {
    f"{8 * window} in flight": {
        "op": "send",
        "topic": f"Flight{8 * window}",
        "conns": 8,
        "window": window,
        "size": 1024,
    }
    for window in (8, 32)
}
CPU, BEHIND = "pair_cpu_us_msg", "behind_mb"
CPU_TIMES = 4.0
SYNC_SHARE_MIN = 70.0  # % of the messages per second without waiting for the slave
# Less than one file of the log has: Java's empty slave begins with the last one.
COPY_BATCHES = 22_000  # of 32 messages
COPY_MIN = 300.0  # MB/s, or what the disk does
FILL: Load = {"topic": "Copied", "queues": QUEUES, "size": 1024, "batch": 32, "window": 1}
DISK_BLOCKS = 512
CAUGHT_UP_S = 120.0
# A half that is halted while others are measured is not given up, nor looked for elsewhere.
PATIENT = {"haHousekeepingInterval": "3600000", "haSendHeartbeatInterval": "1000"}

# Two JVMs on two cores: a send that waited for 200 ms must not be refused.
JAVA_PATIENT = {"brokerFastFailureEnable": "false"}


@dataclass
class Measured:
    """A running pair and the sleeping target that stands for both processes."""

    pair: Pair
    target: Target
    role: str

    def stored(self, topic: str) -> int:
        return sum(max_offset(self.target.port, topic, queue) for queue in range(QUEUES))

    @property
    def behind(self) -> int:
        return self.pair.master.end - self.pair.slave.end


def replication(bench: Bench) -> list[Row]:
    rows = []
    for flush in (ASYNC, SYNC):
        with _pairs(bench, flush) as pairs:
            rows += _sends(bench, flush, pairs)
    return [*rows, *_copies(bench)]


@contextlib.contextmanager
def _pairs(bench: Bench, flush: str) -> Iterator[list[Measured]]:
    """All four, linked and asleep; their files go with them."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_folder(bench, f"pairs-{flush}"))
        pairs = []
        for role in ROLES:
            for name in KINDS:
                pair = _pair(folder / f"{name}-{role}", name, role, flush)
                stack.callback(pair.stop)
                pair.start()
                pairs.append(_measured(pair, name, role))
        yield pairs


def _pair(folder: Path, name: str, role: str, flush: str) -> Pair:
    return Pair(
        folder,
        master=KINDS[name],
        slave=KINDS[name],
        role=role,
        settings={"flushDiskType": flush, **PATIENT, **(JAVA_PATIENT if name == "java" else {})},
        heap=JAVA_HEAP,
    )


def _measured(pair: Pair, name: str, role: str) -> Measured:
    pids = pair.master.process.pid, pair.slave.process.pid
    target = Target(name, pair.master.port, pids)
    for load in LOADS.values():
        put_topic(target.port, str(load["topic"]), QUEUES)
    for pid, core in zip(pids, (SERVER_CORE, CLIENT_CORE), strict=True):
        pin(pid, core)
    measured = Measured(pair, target, role)
    pair.wait_linked()
    target.halt()
    return measured


def _sends(bench: Bench, flush: str, pairs: Sequence[Measured]) -> list[Row]:
    for number, load in enumerate(LOADS.values()):
        for each in pairs:
            if each.target.name == "java" and bench.warm_s:
                _sample(bench, each, load, bench.warm_s * (0.3 if number else 0.7))
    found: dict[tuple[str, str, str], list[Sample]] = {}
    for _ in range(bench.repetitions):
        for name, load in LOADS.items():
            for each in pairs:
                sample = _sample(bench, each, load, bench.seconds)
                found.setdefault((name, each.role, each.target.name), []).append(sample)
    return [row for name in LOADS for row in rows_of(flush, name, found)]


def _sample(bench: Bench, each: Measured, load: Load, seconds: float) -> Sample:
    bench.fill_memory()
    topic, pids = str(load["topic"]), list(each.target.pids)
    with each.target.awake():
        _catch_up(each)
        before, cpu = each.stored(topic), cpu_seconds(pids)
        sample = bench.generator.run(each.target, load, seconds)
        behind = each.behind
        _catch_up(each)
        cpu = cpu_seconds(pids) - cpu
        time.sleep(0.3)  # Java's queues follow its log
        stored = each.stored(topic) - before
    return {**sample, CPU: cpu / max(1, stored) * 1e6, BEHIND: max(0, behind) / 1e6}


def _catch_up(each: Measured) -> None:
    each.pair.wait(lambda: each.behind == 0, CAUGHT_UP_S)


def rows_of(
    flush: str, name: str, found: Mapping[tuple[str, str, str], Sequence[Sample]]
) -> list[Row]:
    """The rows of one load; samples by load, role and kind."""
    rows = []
    shares = {kind: _shares(name, kind, found) for kind in KINDS}
    for role in ROLES:
        ours, java = (found[name, role, kind] for kind in KINDS)
        load, wrong = f"{role}, {flush}, send 1 KiB, {name}", errors(ours, java)
        behind = "slave behind by MB " + _both(ours, java, BEHIND)
        rates = "msg/s " + _both(ours, java, "tps")
        rows += [
            Row(
                f"{load}, both processes",
                "CPU-µs/msg",
                values(ours, CPU),
                values(java, CPU),
                times=CPU_TIMES,
                errors=wrong,
                note=f"{rates}, {behind}",
            ),
            Row(
                f"{load}, p99",
                "µs",
                values(ours, "p99_us"),
                values(java, "p99_us"),
                times=1.0,
                errors=wrong,
                note="p50 " + _both(ours, java, "p50_us"),
            ),
        ]
    rows.append(
        Row(
            f"SYNC_MASTER, {flush}, send 1 KiB, {name}",
            "% of ASYNC_MASTER's msg/s",
            shares["ours"],
            shares["java"],
            limit=SYNC_SHARE_MIN,
            more=True,
        )
    )
    return rows


def _shares(
    name: str, kind: str, found: Mapping[tuple[str, str, str], Sequence[Sample]]
) -> list[float]:
    """Of each repetition."""
    alone, waited = (values(found[name, role, kind], "tps") for role in ROLES)
    return [b / a * 100 if a else 0.0 for a, b in zip(alone, waited, strict=True)]


def _copies(bench: Bench) -> list[Row]:
    """How fast an empty slave gets all that an idle master has."""
    speeds: dict[str, list[float]] = {name: [] for name in KINDS}
    batches = COPY_BATCHES if bench.seconds >= 2 else COPY_BATCHES // 20
    with _folder(bench, "copies") as folder, contextlib.ExitStack() as stack:
        disk = _disk_speed(folder)
        pairs = {}
        for name in KINDS:
            pair = pairs[name] = _pair(folder / name, name, "ASYNC_MASTER", ASYNC)
            stack.callback(pair.stop)
            pair.start_master()
            target = Target(name, pair.master.port, (pair.master.process.pid,))
            bench.ring(target, {**FILL, "count": batches}, 60, 0)
        for _ in range(bench.repetitions):
            for name, pair in pairs.items():
                bench.fill_memory()
                speeds[name].append(_copy_speed(pair))
    return [
        Row(
            "an empty slave copies the log of an idle master, ASYNC_FLUSH",
            "MB/s",
            speeds["ours"],
            speeds["java"],
            limit=min(COPY_MIN, disk),
            more=True,
            note=f"the disk writes and syncs {figure(disk)} MB/s",
        )
    ]


def _copy_speed(pair: Pair) -> float:
    """From the first bytes that the slave has to the last; it is empty again afterwards."""
    wanted = pair.master.end
    pair.slave.start()
    pair.wait(lambda: pair.slave.end > 0, CAUGHT_UP_S)
    first, began = pair.slave.end, time.monotonic()
    while pair.slave.end < wanted and time.monotonic() < began + CAUGHT_UP_S:
        time.sleep(0.01)
    took_s = time.monotonic() - began
    copied = pair.slave.end - first
    pair.slave.kill9()
    shutil.rmtree(pair.slave.store)
    return copied / took_s / 1e6


def _disk_speed(folder: Path) -> float:
    """MB/s of a file that is written from its beginning to its end and then synced."""
    block = os.urandom(1 << 20)
    file = folder / "disk"
    began = time.monotonic()
    with file.open("wb") as out:
        for _ in range(DISK_BLOCKS):
            out.write(block)
        out.flush()
        os.fsync(out.fileno())
    took_s = time.monotonic() - began
    file.unlink()
    return DISK_BLOCKS * len(block) / took_s / 1e6


@contextlib.contextmanager
def _folder(bench: Bench, name: str) -> Iterator[Path]:
    folder = bench.brokers.scratch / name
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _both(ours: Sequence[Sample], java: Sequence[Sample], key: str) -> str:
    return " / ".join(figure(median(values(of, key))) for of in (ours, java))
