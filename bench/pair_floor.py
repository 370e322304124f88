"""What the kernel alone takes for a pair: ours beside bench/bare_pair.c, by turns.

    python -m bench.pair_floor [--seconds 2] [--rounds 5]

It prints one row per load: CPU-µs per message of both processes of each pair, and how much of ours
was spent in the kernel. The generator and the cores are those of `make bench-java`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from peers.pair import Pair
from peers.process import Process, accepts, free_port
from peers.raw import put_topic

from bench.brokers import ASYNC, CLIENT_CORE, ROOT, SERVER_CORE, SYNC, Target, pin
from bench.load import Generator
from bench.loadgen import TICKS
from bench.replication import LOADS, PATIENT, QUEUES, ROLES
from bench.verdict import values

Seconds = tuple[float, float]  # in user mode and in the kernel


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    generator = Generator()
    print("| load | ours, both | of it kernel | bare_pair.c | ratio | msg/s ours / bare |")
    print("|---|---|---|---|---|---|")
    for flush in (ASYNC, SYNC):
        for role in ROLES:
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "build")))
                targets = _ours(stack, folder, role, flush), _bare(stack, folder, role, flush)
                for name, load in LOADS.items():
                    found = [
                        [_cost(generator, target, load, options.seconds) for target in targets]
                        for _ in range(options.rounds)
                    ]
                    print(f"| {role}, {flush}, {name} | {_row(found)} |", flush=True)
    print(f"load average {os.getloadavg()[0]:.1f} at the end")


def _ours(stack: ExitStack, folder: Path, role: str, flush: str) -> Target:
    pair = Pair(folder / "ours", role=role, settings={"flushDiskType": flush, **PATIENT})
    stack.callback(pair.stop)
    pair.start()
    for load in LOADS.values():
        put_topic(pair.master.port, str(load["topic"]), QUEUES)
    pair.wait_linked()
    return _asleep("ours", pair.master.port, (pair.master.process, pair.slave.process))


def _bare(stack: ExitStack, folder: Path, role: str, flush: str) -> Target:
    program = folder / "bare_pair"
    source = ROOT / "bench" / "bare_pair.c"
    subprocess.run(["cc", "-O2", "-D_GNU_SOURCE", "-o", program, source], check=True)
    synced, waits = str(int(flush == SYNC)), str(int(role == "SYNC_MASTER"))
    ports = free_port(), free_port()
    words = ((ports[0], "slave", synced), (ports[1], "master", synced, ports[0], waits))
    started = []
    for port, name, *rest in words:
        command = [str(program), str(port), str(folder / name), *map(str, rest)]
        process = Process(f"bare {name}", command, folder / f"{name}.log")
        stack.callback(process.kill9)
        process.start()
        started.append(process)
    started[-1].wait_until(lambda: accepts(ports[1]), 60)
    return _asleep("bare", ports[1], (started[1], started[0]))


def _asleep(name: str, port: int, processes: Sequence[Process]) -> Target:
    target = Target(name, port, tuple(process.pid for process in processes))
    for pid, core in zip(target.pids, (SERVER_CORE, CLIENT_CORE), strict=True):
        pin(pid, core)
    target.halt()
    return target


def _cost(
    generator: Generator, target: Target, load: Mapping[str, object], seconds: float
) -> tuple[float, float, float]:
    """CPU-µs per message, those in the kernel, and messages per second."""
    with target.awake():
        before = _used(target)
        (rate,) = values([generator.run(target, load, seconds, 0.0)], "tps")
        user, kernel = (after - was for after, was in zip(_used(target), before, strict=True))
    messages = max(1.0, rate * seconds)
    return (user + kernel) / messages * 1e6, kernel / messages * 1e6, rate


def _used(target: Target) -> Seconds:
    user = kernel = 0
    for pid in target.pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        user, kernel = user + int(fields[11]), kernel + int(fields[12])
    return user / TICKS, kernel / TICKS


def _row(found: Sequence[Sequence[tuple[float, float, float]]]) -> str:
    ours, bare = (
        [statistics.median(each) for each in zip(*samples, strict=True)]
        for samples in zip(*found, strict=True)
    )
    rates = f"{ours[2]:,.0f} / {bare[2]:,.0f}"
    return f"{ours[0]:.2f} | {ours[1]:.2f} | {bare[0]:.2f} | {ours[0] / bare[0]:.2f} × | {rates}"


if __name__ == "__main__":
    main()
