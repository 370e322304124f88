"""`make bench`: this broker and the Java broker under the same load, side by side.

Each server is pinned to core 0 and the generator to core 1 where the machine has two. The
generator is the neutral Go one beside the repository (../shared/loadgen) when it is there and Go
is installed, otherwise `bench.loadgen`. Results are printed and, with --record, written into
bench/RESULTS.md between its markers.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peers.java import JavaCluster
from peers.node import CosmoNode
from peers.process import free_port

from bench.loadgen import cpu_seconds

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "RESULTS.md"
NEUTRAL = ROOT.parent / "shared" / "loadgen"
SERVER_CORE, CLIENT_CORE = "0", "1"
# A server JVM as an operator would run it on a small machine: full JIT, G1, 1 GiB heap. The
# first two take back what tests choose to start quickly.
JAVA_HEAP = (
    *("-XX:TieredStopAtLevel=4", "-XX:-UseSerialGC", "-XX:+UseG1GC"),
    *("-Xms1g", "-Xmx1g", "-XX:MaxDirectMemorySize=1g"),
)


@dataclass(frozen=True)
class Case:
    name: str
    arguments: dict[str, object]
    needs_filled: bool = False


CASES = (
    Case("send 128 B, 8 × 16 in flight", {"op": "send", "conns": 8, "window": 16, "size": 128}),
    Case("send 1 KiB, 8 × 16 in flight", {"op": "send", "conns": 8, "window": 16, "size": 1024}),
    Case(
        "send 128 B in batches of 32",
        {"op": "send", "conns": 8, "window": 4, "size": 128, "batch": 32},
    ),
    Case("send 128 B, one at a time", {"op": "send", "conns": 1, "window": 1, "size": 128}),
    Case("pull 32 × 128 B, 8 × 8", {"op": "pull", "conns": 8, "window": 8, "size": 128}, True),
    Case("pull 32 × 1 KiB, 8 × 8", {"op": "pull", "conns": 8, "window": 8, "size": 1024}, True),
)


@dataclass
class Target:
    name: str
    address: str
    pid: int
    ready_s: float


def generator() -> list[str]:
    """The command of the load generator and its flag style."""
    if NEUTRAL.is_dir() and shutil.which("go"):
        binary = ROOT / "build" / "loadgen"
        subprocess.run(["go", "build", "-o", str(binary), "."], cwd=NEUTRAL, check=True)
        return [str(binary)]
    return [sys.executable, "-m", "bench.loadgen"]


def measure(command: list[str], target: Target, case: Case, seconds: float) -> dict[str, float]:
    neutral = command[0] != sys.executable
    topic = f"Bench{case.arguments['size']}"
    arguments: dict[str, object] = {
        "addr": target.address,
        "topic": topic,
        "queues": 8,
        "pid": target.pid,
        "duration": f"{seconds}s" if neutral else seconds,
        "warmup": "1s" if neutral else 1,
        **case.arguments,
    }
    dash = "-" if neutral else "--"
    words = [word for key, value in arguments.items() for word in (dash + key, str(value))]
    done = subprocess.run(
        [*pinned(CLIENT_CORE), *command, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds + 60,
    )
    if done.returncode:
        raise SystemExit(f"the load generator failed: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def pinned(core: str) -> list[str]:
    return ["taskset", "-c", core] if (os.cpu_count() or 1) > 1 and shutil.which("taskset") else []


def pin(pid: int) -> None:
    if (os.cpu_count() or 1) > 1 and shutil.which("taskset"):
        subprocess.run(["taskset", "-acp", SERVER_CORE, str(pid)], check=True, capture_output=True)


@contextlib.contextmanager
def cosmodrome(directory: Path, flush: str) -> Iterator[Target]:
    began = time.monotonic()
    with CosmoNode(directory, options=["--set", f"flushDiskType={flush}"]) as node:
        ready = time.monotonic() - began
        pin(node.pid)
        yield Target(f"cosmodrome {flush}", node.broker_address, node.pid, ready)


@contextlib.contextmanager
def java(directory: Path, flush: str) -> Iterator[Target]:
    began = time.monotonic()
    cluster = JavaCluster(
        directory,
        free_port(),
        free_port(-2, 1),
        settings={"flushDiskType": flush},
        heap=JAVA_HEAP,
    )
    with cluster:
        ready = time.monotonic() - began
        pin(cluster.broker.pid)
        yield Target(f"java 4.9.7 {flush}", cluster.broker_address, cluster.broker.pid, ready)


def memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    return 0.0


def idle(target: Target) -> tuple[float, float]:
    """Memory (MB) and share of one core (%) of a server that has nothing to do."""
    time.sleep(2)
    before = cpu_seconds([target.pid])
    time.sleep(5)
    return memory_mb(target.pid), (cpu_seconds([target.pid]) - before) / 5 * 100


def main() -> None:
    parser = argparse.ArgumentParser(description="This broker and the Java broker, side by side.")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time per case")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions")
    parser.add_argument("--java-warmup", type=float, default=40.0, help="seconds per path")
    parser.add_argument("--no-java", action="store_true", help="measure this broker only")
    parser.add_argument("--record", action="store_true", help="write bench/RESULTS.md")
    options = parser.parse_args()
    command = generator()
    (ROOT / "build").mkdir(exist_ok=True)
    text = "\n\n".join(compare(command, flush, options) for flush in ("SYNC_FLUSH", "ASYNC_FLUSH"))
    print(text)
    if options.record:
        record(command, text)


def compare(command: list[str], flush: str, options: argparse.Namespace) -> str:
    """One table: every case on both brokers, medians of interleaved rounds."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "build")))
        targets = [stack.enter_context(cosmodrome(scratch / "ours", flush))]
        if not options.no_java:
            targets.append(stack.enter_context(java(scratch / "java", flush)))
        resting = {target.name: idle(target) for target in targets}
        if not options.no_java:
            for case in CASES:
                measure(command, targets[1], case, options.java_warmup)
        rows: dict[str, dict[str, list[dict[str, float]]]] = {}
        for _ in range(options.rounds):
            for case in CASES:
                for target in targets:
                    result = measure(command, target, case, options.seconds)
                    rows.setdefault(case.name, {}).setdefault(target.name, []).append(result)
        return render(flush, targets, resting, rows)


def render(
    flush: str,
    targets: list[Target],
    resting: dict[str, tuple[float, float]],
    rows: dict[str, dict[str, list[dict[str, float]]]],
) -> str:
    lines = [f"### {flush}", ""]
    for target in targets:
        memory, share = resting[target.name]
        lines.append(
            f"- {target.name}: ready after {target.ready_s:.2f} s, idle {memory:.0f} MB"
            f" and {share:.1f} % of a core, {memory_mb(target.pid):.0f} MB after the load"
        )
    names = [target.name for target in targets]
    lines += [
        "",
        "| case | broker | CPU-µs/msg | msg/s | MB/s | p50 µs | p99 µs | errors | ratio |",
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for case, results in rows.items():
        cpu = {name: median(results[name], "srv_cpu_us_msg") for name in names}
        for name in names:
            ratio = ""
            if name == names[0] and len(names) > 1 and cpu[name]:
                ratio = f"{cpu[name] / cpu[names[1]]:.2f} × Java's CPU"
            found = results[name]
            lines.append(
                f"| {case} | {name} | {cpu[name]:.2f} | {median(found, 'tps'):,.0f}"
                f" | {median(found, 'mb_s'):.1f} | {median(found, 'p50_us'):.0f}"
                f" | {median(found, 'p99_us'):.0f} | {sum(one['errors'] for one in found):.0f}"
                f" | {ratio} |"
            )
    return "\n".join(lines)


def median(results: list[dict[str, float]], key: str) -> float:
    return statistics.median(float(result.get(key, 0)) for result in results)


def record(command: list[str], text: str) -> None:
    generator_name = "shared/loadgen (Go)" if command[0] != sys.executable else "bench.loadgen"
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    head = (
        f"Measured {stamp} at {commit}, {platform.machine()}, {os.cpu_count()} cores,"
        f" Python {platform.python_version()}, generator {generator_name}.\n"
        f'Command: `make bench ARGS="{" ".join(sys.argv[1:])}"`.\n\n'
    )
    page = RESULTS.read_text()
    before, rest = page.split("<!-- measured -->\n", 1)
    after = rest.split("<!-- end -->", 1)[1]
    RESULTS.write_text(f"{before}<!-- measured -->\n{head}{text}\n<!-- end -->{after}")


if __name__ == "__main__":
    main()
