"""`python -m bench.client`: this client, the Java client and the C++ client, side by side.

The broker is pinned to core 0 and the client to core 1; every case runs in a process of its own,
repetitions are interleaved and medians are shown. `--broker` chooses this broker or the Java one.
The number to compare is CPU-µs per message of the client's process. With --record the
table replaces the part of bench/RESULTS.md that was measured on the same broker.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from peers.clients import CPP
from peers.java import JavaCluster, class_path, java_command
from peers.node import CosmoNode
from peers.process import free_port
from peers.resolve import BUILD, make_once, run_with_tries

from bench.brokers import CLIENT_CORE, JAVA_HEAP, RESULTS, ROOT, pin, pinned
from cosmodrome.cli.diagnose import bench as cosmo
from cosmodrome.cli.support.running import run
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message, ReceivedMessage

SOURCES = ROOT / "bench" / "clients"
SIZE = 128
TASKS, WINDOW, AUTO_WINDOW, LINGER_MS, BATCH, RATE = 64, 512, 4096, 5, 32, 1000
# How many messages a case has, and which clients can do it.
CASES = {
    "sync": (40_000, ("ours", "java", "cpp")),
    "pipelined": (100_000, ("ours", "java")),
    "auto-batched": (300_000, ("ours",)),
    "batch": (300_000, ("ours", "java")),
    "consume": (300_000, ("ours", "java", "cpp")),
    "e2e": (5_000, ("ours", "java")),
}
NAMES = {"ours": "this client", "java": "Java 4.9.8", "cpp": "C++ (Python wheel)"}
TITLES = {
    "sync": f"send and wait, {TASKS} at once",
    "pipelined": f"send, {WINDOW} in flight",
    "auto-batched": f"send, batches make themselves ({AUTO_WINDOW} in flight)",
    "batch": f"send in batches of {BATCH}",
    "consume": "consume into a counter",
    "e2e": f"end to end at {RATE}/s",
}
CPP_SLOWER = 8  # its threads wait for each other; fewer messages say the same
CASE_TIMEOUT_S = 180

Row = dict[str, float]


# --- our own client, in a process of its own -------------------------------------------------


def ours(case: str, namesrv: str, topic: str, count: int, size: int) -> None:
    if case == "sync":
        row = run(_sync(namesrv, topic, count, size))
    elif case == "consume":
        row = run(_consume(namesrv, topic, count))
    elif case == "e2e":
        row = _row(run(cosmo.end_to_end(namesrv, topic, count, size, RATE)))
    else:
        window = AUTO_WINDOW if case == "auto-batched" else WINDOW
        linger_ms = LINGER_MS if case == "auto-batched" else 0
        batch = BATCH if case == "batch" else 1
        row = _row(run(cosmo.produce(namesrv, topic, count, size, window, linger_ms, batch)))
    print(json.dumps(row))


def _row(outcome: cosmo.Outcome) -> Row:
    figures = outcome.row()
    return {
        "messages": outcome.messages,
        "failed": outcome.failed,
        "seconds": outcome.seconds,
        "cpu_seconds": outcome.cpu_seconds,
        **{name: figures[name] for name in ("p50_ms", "p99_ms") if name in figures},
    }


async def _sync(namesrv: str, topic: str, count: int, size: int) -> Row:
    left, body = count, bytes(size)

    async def work() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await producer.send(Message(topic, body))

    async with Producer(namesrv, group="bench_ours", retries=0) as producer:
        await producer.send(Message(topic, body))
        began = _now()
        async with asyncio.TaskGroup() as group:
            for _ in range(TASKS):
                group.create_task(work())
        return _since(began, count)


async def _consume(namesrv: str, topic: str, count: int) -> Row:
    seen, first, began = 0, count // 4, (0.0, 0.0)
    enough = asyncio.Event()

    def received(_message: ReceivedMessage) -> None:
        nonlocal seen, began
        seen += 1
        if seen == first:
            began = _now()
        elif seen == count:
            enough.set()

    group = f"bench_{os.getpid()}_{time.monotonic_ns()}"
    async with Consumer(namesrv, group=group, consume_from="first") as consumer:
        await consumer.subscribe(topic, handler=received)
        await enough.wait()
        return _since(began, count - first)


def _now() -> tuple[float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic(), usage.ru_utime + usage.ru_stime


def _since(began: tuple[float, float], messages: int) -> Row:
    now = _now()
    return {
        "messages": messages,
        "failed": 0,
        "seconds": now[0] - began[0],
        "cpu_seconds": now[1] - began[1],
    }


# --- all of them -----------------------------------------------------------------------------


def command(client: str) -> list[str]:
    if client == "ours":
        return [sys.executable, "-m", "bench.client", "--case"]
    if client == "cpp":
        return [CPP.command()[0], str(SOURCES / "cpp_bench.py")]
    source, libraries, folder = SOURCES / "ClientBench.java", class_path("client"), BUILD / "bench"

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        words = ["javac", "-nowarn", "-encoding", "UTF-8", "-cp", libraries, "-d", str(folder)]
        run_with_tries([*words, str(source)], cwd=SOURCES)

    make_once("java-bench", [source, libraries], folder, make)
    # Full JIT: what tests choose to start quickly is taken back.
    options = ("-XX:TieredStopAtLevel=4", "-Xmx512m", "-Drocketmq.client.logLevel=ERROR")
    return [*java_command(*options, "-cp", f"{folder}{os.pathsep}{libraries}"), "ClientBench"]


def measure(client: str, case: str, namesrv: str, topic: str, count: int) -> Row:
    done = subprocess.run(
        [*pinned(CLIENT_CORE), *command(client), case, namesrv, topic, str(count), str(SIZE)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=CASE_TIMEOUT_S,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{client} {case} failed: {(done.stdout + done.stderr)[-2000:]}")
    row: Row = json.loads(lines[-1])
    return row


@contextlib.contextmanager
def broker(kind: str, flush: str, folder: Path) -> Iterator[str]:
    """The name server's address of a new broker on core 0."""
    if kind == "cosmodrome":
        with CosmoNode(folder, options=["--set", f"flushDiskType={flush}"]) as node:
            pin(node.pid)
            yield node.namesrv_address
        return
    settings = {"flushDiskType": flush}
    ports = (free_port(), free_port(-2, 1))
    with JavaCluster(folder, *ports, settings=settings, heap=JAVA_HEAP) as cluster:
        pin(cluster.broker.pid)
        yield f"127.0.0.1:{ports[0]}"


def compare(options: argparse.Namespace) -> str:
    rows: dict[tuple[str, str], list[Row]] = {}
    (ROOT / "build").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch,
        broker(options.broker, options.flush, Path(scratch) / "data") as namesrv,
    ):
        filled = CASES["consume"][0]
        measure("ours", "auto-batched", namesrv, "BenchConsume", filled + 1_000)
        for number in range(options.rounds):
            for case, (count, clients) in CASES.items():
                if options.only and case not in options.only:
                    continue
                topic = "BenchConsume" if case == "consume" else f"Bench{case.title()}"
                for client in clients:
                    if client == "cpp" and case == "sync":
                        count //= CPP_SLOWER
                    # The broker has to be warm too, and a JVM takes its time.
                    if number == 0 and options.broker == "java" and client == "ours":
                        measure(client, case, namesrv, topic, count)
                    found = measure(client, case, namesrv, topic, count)
                    rows.setdefault((case, client), []).append(found)
                    print(number, case, client, found, file=sys.stderr)
    return render(rows)


def render(rows: dict[tuple[str, str], list[Row]]) -> str:
    lines = [
        "| case | client | CPU-µs/msg | msg/s | p50 ms | p99 ms | failed |",
        "|---|---|---|---|---|---|---|",
    ]
    for (case, client), found in rows.items():
        cpu = statistics.median(row["cpu_seconds"] / row["messages"] * 1e6 for row in found)
        rate = statistics.median(row["messages"] / row["seconds"] for row in found)
        late = ["", ""]
        if case == "e2e":
            names = ("p50_ms", "p99_ms")
            late = [f"{statistics.median(row[name] for row in found):.2f}" for name in names]
        failed = sum(row["failed"] for row in found)
        lines.append(
            f"| {TITLES[case]} | {NAMES[client]} | {cpu:.2f} | {rate:,.0f} | {late[0]} | {late[1]}"
            f" | {failed:.0f} |"
        )
    return "\n".join(lines)


def record(options: argparse.Namespace, text: str) -> None:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    broker = "Java 4.9.7" if options.broker == "java" else "cosmodrome"
    head = (
        f"### Clients with {broker}, {options.flush}\n\n"
        f"Measured {stamp} at {commit}, {platform.machine()}, {os.cpu_count()} cores, load average"
        f" {os.getloadavg()[1]:.1f} at the end, {SIZE} B.\n"
        f"Command: `.venv/bin/python -m bench.client {' '.join(sys.argv[1:])}`.\n\n"
    )
    begin, end = f"<!-- clients {options.broker} {options.flush} -->\n", "<!-- end clients -->\n"
    page = RESULTS.read_text()
    if begin in page:
        before, rest = page.split(begin, 1)
        after = rest.split(end, 1)[1]
    else:
        before, _, rest = page.partition("## What these numbers do not say")
        after = f"\n## What these numbers do not say{rest}"
    RESULTS.write_text(f"{before}{begin}{head}{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Clients side by side.")
    parser.add_argument("--broker", choices=["cosmodrome", "java"], default="cosmodrome")
    parser.add_argument("--flush", choices=["SYNC_FLUSH", "ASYNC_FLUSH"], default="ASYNC_FLUSH")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", action="append", choices=list(CASES), help="just this case")
    parser.add_argument("--record", action="store_true", help="write bench/RESULTS.md")
    parser.add_argument("--case", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        case, namesrv, topic, count, size = options.case
        ours(case, namesrv, topic, int(count), int(size))
        return
    text = compare(options)
    print(text)
    if options.record:
        record(options, text)


if __name__ == "__main__":
    main()
