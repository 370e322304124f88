"""`make soak`: everything at once against one node for an hour, and what it leaves behind.

Sends and their consumer, delayed messages, transactions, retries, topics and clients that come and
go, and what operators ask. Each acknowledged message has to arrive. Memory, open files and threads
of the node are sampled; after the warm-up, which is a quarter of the time, memory may grow by less
than 1 MB per hour and the others not at all. At the end the checker reads the store.

"Memory" is what the process holds for itself (RssAnon). Pages of mapped log files are the kernel's:
they grow with the log and can be dropped at any time, so they are shown and not judged.

    SOAK_SECONDS=300 make soak ARGS="--out build/soak.txt"
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from peers.node import CosmoNode

from bench.brokers import ROOT
from cosmodrome import (
    Admin,
    ClientOptions,
    Consumer,
    Message,
    Producer,
    ReceivedMessage,
    RetryLater,
    TransactionProducer,
    TransactionState,
)

SAMPLE_S = 5.0
WARM_UP = 0.25  # of the time
SLOPE_MB_PER_HOUR_MAX = 1.0
SETTLE_S = 60.0  # for messages that wait when the load ends
SENDS_PER_S, LATER_PER_S, TRANSACTIONS_PER_S = 100, 5, 5
RETRIED = 50  # every so-manieth message fails once
TOPICS_EVERY_S, CLIENTS_EVERY_S, ADMIN_EVERY_S = 2.0, 2.0, 1.0
CHURN_NAMES = 100  # names of topics and groups come back, as those of tests and tenants do
TOPIC = "Soak"


@dataclass
class Sample:
    second: float
    anonymous_mb: float
    resident_mb: float
    files: int
    threads: int


@dataclass
class Run:
    """What happened so far."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    errors: collections.Counter[str] = field(default_factory=collections.Counter)
    samples: list[Sample] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    numbers: itertools.count[int] = field(default_factory=itertools.count)
    ending: bool = False

    def message(self, kind: str, delay_level: int = 0) -> Message:
        key = f"{kind}-{next(self.numbers)}"
        return Message(TOPIC, b"x" * 200, tags=kind, keys=key, delay_level=delay_level)

    @contextlib.contextmanager
    def expecting(self, message: Message) -> Iterator[None]:
        """What is acknowledged inside has to arrive, and may do so before the answer."""
        (key,) = message.keys
        self.missing.add(key)
        try:
            yield
        except Exception:
            self.missing.discard(key)
            raise

    def arrived(self, message: ReceivedMessage) -> None:
        (key,) = message.keys
        self.missing.discard(key)
        if key in self.rolled_back:
            self.errors["a message that was rolled back arrived"] += 1
        self.counts["consumed"] += 1


def sample(pid: int, second: float) -> Sample:
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return Sample(
        second,
        int(status["RssAnon"].split()[0]) / 1024,
        int(status["VmRSS"].split()[0]) / 1024,
        len(os.listdir(f"/proc/{pid}/fd")),
        int(status["Threads"]),
    )


async def every(run: Run, name: str, seconds: float, do: Callable[[], Awaitable[object]]) -> None:
    """Until the run ends. What fails is counted under its name and text."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while not run.ending:
        due = max(due + seconds, loop.time() - 1)  # a machine that stood still is not caught up
        try:
            await do()
            run.counts[name] += 1
        except Exception as error:
            run.errors[f"{name}: {type(error).__name__}: {str(error)[:160]}"] += 1
        await asyncio.sleep(max(0.0, due - loop.time()))


async def send(run: Run, producer: Producer, kind: str) -> None:
    message = run.message(kind, delay_level=1 if kind == "delay" else 0)
    with run.expecting(message):
        await producer.send(message)


async def transact(run: Run, producer: TransactionProducer) -> None:
    """Two of three are committed, the third is rolled back."""
    message = run.message("transaction")
    if next(run.numbers) % 3:
        with run.expecting(message):
            await producer.send_in_transaction(message, lambda _: TransactionState.COMMIT)
    else:
        await producer.send_in_transaction(message, lambda _: TransactionState.ROLLBACK)
        run.rolled_back.add(message.keys[0])


async def churn_topic(run: Run, admin: Admin, producer: Producer) -> None:
    name = f"SoakTopic{next(run.numbers) % CHURN_NAMES}"
    await admin.topics.create(name, queues=4)
    for _ in range(3):
        await producer.send(Message(name, b"short life"))
    await admin.topics.delete(name)


async def churn_client(run: Run, namesrv: str, admin: Admin) -> None:
    """A process that comes, sends, reads something and goes, and its group."""
    number = next(run.numbers) % CHURN_NAMES
    options = ClientOptions(instance_name=f"guest{next(run.numbers)}")
    group = f"soak_guest{number}"
    async with (
        Producer(namesrv, group=group, client=options) as producer,
        Consumer(namesrv, group=group, client=options, consume_from="last") as consumer,
    ):
        got = asyncio.Event()
        await consumer.subscribe(TOPIC, handler=lambda _message: got.set())
        await producer.send(Message(TOPIC, b"guest", tags="guest", keys="guest"))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(got.wait(), 5)
    await admin.groups.delete(group)


async def ask(run: Run, admin: Admin, http_port: int) -> None:
    """What dashboards and operators ask all day, one thing per call."""
    broker = next(iter(await admin.brokers.addresses()))
    asked: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: admin.brokers.runtime(broker),
        lambda: admin.brokers.config(broker),
        lambda: admin.topics.status(TOPIC),
        lambda: admin.topics.names(),
        lambda: admin.groups.names(),
        lambda: admin.offsets.progress("soak"),
        lambda: admin.brokers.consume_stats(broker),
        lambda: admin.groups.connections("soak"),
        lambda: metrics(http_port),
    )
    await asked[next(run.numbers) % len(asked)]()


async def metrics(http_port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", http_port)
    try:
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n\r\n")
        answer = await reader.read(-1)
        assert answer.startswith(b"HTTP/1.1 200"), answer[:100]
    finally:
        writer.close()


async def watch(run: Run, pid: int, out: Path | None) -> None:
    began = time.monotonic()
    while not run.ending:
        run.samples.append(sample(pid, time.monotonic() - began))
        if out is not None:
            with out.open("a") as lines:
                lines.write(json.dumps(vars(run.samples[-1])) + "\n")
        await asyncio.sleep(SAMPLE_S)


async def load(run: Run, node: CosmoNode, seconds: float, samples: Path | None) -> None:
    namesrv = node.namesrv_address

    def handle(message: ReceivedMessage) -> None:
        if message.tags == "retry" and message.reconsume_times == 0:
            raise RetryLater(delay_level=1)
        run.arrived(message)

    def undecided(_message: ReceivedMessage) -> TransactionState:
        return TransactionState.COMMIT

    async with (
        Admin(namesrv) as admin,
        Producer(namesrv, group="soak_send") as producer,
        TransactionProducer(namesrv, group="soak_transact", check=undecided) as transactions,
    ):
        await admin.topics.create(TOPIC, queues=8)
        async with Consumer(namesrv, group="soak", consume_from="first") as consumer:
            await consumer.subscribe(TOPIC, handler=handle)
            jobs = (
                ("send", 1 / SENDS_PER_S, lambda: send(run, producer, "plain")),
                ("retry", RETRIED / SENDS_PER_S, lambda: send(run, producer, "retry")),
                ("delay", 1 / LATER_PER_S, lambda: send(run, producer, "delay")),
                ("transaction", 1 / TRANSACTIONS_PER_S, lambda: transact(run, transactions)),
                ("topic", TOPICS_EVERY_S, lambda: churn_topic(run, admin, producer)),
                ("client", CLIENTS_EVERY_S, lambda: churn_client(run, namesrv, admin)),
                ("admin", ADMIN_EVERY_S, lambda: ask(run, admin, node.http_port)),
            )
            async with asyncio.TaskGroup() as group:
                group.create_task(watch(run, node.pid, samples))
                for name, gap_s, do in jobs:
                    group.create_task(every(run, name, gap_s, do))
                await asyncio.sleep(seconds)
                run.ending = True
            deadline = time.monotonic() + SETTLE_S
            while run.missing and time.monotonic() < deadline:  # noqa: ASYNC110 - no event for it
                await asyncio.sleep(0.5)


def slope_per_hour(points: list[tuple[float, float]]) -> float:
    """Least squares: how much the value grows in an hour."""
    count = len(points)
    if count < 2:
        return 0.0
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return 3600 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def judge(run: Run, seconds: float, complaints: list[str], faults: str) -> tuple[list[str], bool]:
    """The report, and whether all bars hold."""
    warm = [one for one in run.samples if one.second >= seconds * WARM_UP]
    slope = slope_per_hour([(one.second, one.anonymous_mb) for one in warm])
    files = max(one.files for one in warm) - max(one.files for one in warm[: len(warm) // 3 + 1])
    threads = max(one.threads for one in warm) - warm[0].threads
    half = len(warm) // 2
    bars = [
        (f"memory grows {slope:+.2f} MB/h after warm-up", slope < SLOPE_MB_PER_HOUR_MAX),
        (f"open files: {warm[0].files} to {warm[-1].files}, most {files:+d}", files <= 8),
        (f"threads: {warm[0].threads} to {warm[-1].threads}", threads <= 0),
        (f"errors: {sum(run.errors.values())}", not run.errors),
        (f"acknowledged and not arrived: {len(run.missing)}", not run.missing),
        (f"warnings and errors in the node's log: {len(complaints)}", not complaints),
        (f"store check: {faults or 'clean'}", not faults),
    ]
    first, last = (
        sum(one.anonymous_mb for one in part) / max(1, len(part))
        for part in (warm[:half], warm[half:])
    )
    lines = [f"soak of {seconds:.0f} s, warm-up {seconds * WARM_UP:.0f} s, {len(warm)} samples"]
    lines += [f"{'ok  ' if good else 'BAD '} {text}" for text, good in bars]
    lines += [
        f"memory: mean of halves after warm-up {first:.1f} and {last:.1f} MB; with pages of files"
        f" {warm[0].resident_mb:.0f} to {warm[-1].resident_mb:.0f} MB",
        "done: " + ", ".join(f"{name} {count}" for name, count in sorted(run.counts.items())),
    ]
    lines += [f"error ×{count}: {text}" for text, count in run.errors.most_common(10)]
    lines += [f"log: {line}" for line in complaints[:10]]
    return lines, all(good for _, good in bars)


def check_store(data: Path) -> str:
    """What the checker finds in the stopped store; empty when it is clean."""
    command = [sys.executable, "-m", "cosmodrome.cli", "store", "check", str(data), "-o", "json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    report = json.loads(done.stdout)
    return "" if report["ok"] else json.dumps(report)[:2000]


def complaints_of(log: str) -> list[str]:
    """Warnings and errors, except that the machine was slow, which says nothing about the node."""
    lines = [line for line in log.splitlines() if " WARNING " in line or " ERROR " in line]
    return [line for line in lines if " slow_" not in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=os.environ.get("SOAK_SECONDS") or 3600.0)
    parser.add_argument("--out", type=Path, help="write the report to this file too")
    parser.add_argument(
        "--samples", type=Path, help="add every sample to this file as a line of JSON"
    )
    options = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    run = Run()
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch:
        node = CosmoNode(Path(scratch) / "data")
        with node:
            asyncio.run(load(run, node, options.seconds, options.samples))
            code = node.stop()
        if code != 0:
            run.errors[f"the node ended with {code}"] += 1
        complaints = complaints_of(node.process.log.read_text(errors="replace"))
        lines, good = judge(run, options.seconds, complaints, check_store(node.data))
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
