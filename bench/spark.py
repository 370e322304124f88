"""`python -m bench.spark`: this source beside Spark's own Kafka connector, on the same Spark.

Both brokers hold the same messages (random bodies, so nothing compresses) in four queues. First
each side scans once in sessions of its own. Then one session, local[2], scans both in turn:
rounds are interleaved, the first ones only warm up (the JVM compiles for both for a while),
medians are shown. The number to compare is CPU time of the Spark side per message: the driver, its
JVM, and the Python processes below it, without the brokers. Then both are followed live at a steady
rate, and the store directory is read without its broker. With --record the tables replace the part
"Spark" of bench/RESULTS.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from peers.java import class_path, java_command
from peers.kafka import KAFKA_VERSION, KafkaNode, connector_jars
from peers.node import CosmoNode
from peers.process import dying_with_parent
from peers.resolve import BUILD, make_once, run_with_tries

from bench.loadgen import TICKS
from bench.run import RESULTS, ROOT

SOURCES = ROOT / "bench" / "clients"
SIZE, QUEUES, RATE = 1024, 4, 10_000
BODIES_HELD = 128 << 10  # in the file; beyond them they come again, too far away to compress
TOPIC, LIVE_TOPIC = "BenchScan", "BenchLive"
WARM_SECONDS, LIVE_SECONDS, LIVE_TURNS = 5, 12, 2
FEED_SECONDS = 300  # a feeder is ended when its turn is over
SIDES = ("kafka", "ours")
SCANS = {
    "noop": "all columns to noop",
    "bare": "all columns but properties and headers to noop",
    "four": "queue, offset, time and body to noop",
    "parquet": "all columns to Parquet",
    "four_parquet": "queue, offset, time and body to Parquet",
}
# What the ratio ours : Kafka may be at most.
BARS = {"noop": 0.6, "parquet": 1.0}
FRESH, FRESH_ROUNDS = "all columns to noop, the first query of a new session", 2
OFFLINE_BAR, DECODE_BAR, LIVE_BAR = 180, 400, 1.2

Answer = dict[str, Any]
Rows = dict[tuple[str, str], list[Answer]]


# --- what is measured ------------------------------------------------------------------------


def cpu_of_tree(root: int) -> float:
    """CPU seconds of a process and all below it, ended children included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended meanwhile; its parent has its time
        parents[int(entry.name)] = int(fields[1])
        ticks[int(entry.name)] = sum(int(field) for field in fields[11:15])
    members = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in members} - members
        if not more:
            return sum(ticks.get(pid, 0) for pid in members) / TICKS
        members |= more


class SparkSide:
    """The process with the session; one request at a time."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._log: TextIO = (folder / "spark.log").open("w+")
        words = ["-m", "bench.spark_side", str(folder), ",".join(connector_jars())]
        self._child = subprocess.Popen(
            dying_with_parent([sys.executable, *words]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._folder = folder
        self.version = self._answer()["spark"]

    def ask(
        self, case: str, when_ready: Callable[[], object] | None = None, **more: object
    ) -> Answer:
        assert self._child.stdin is not None
        before = cpu_of_tree(self._child.pid)
        words = {"case": case, "folder": str(self._folder), **more}
        self._child.stdin.write(json.dumps(words) + "\n")
        self._child.stdin.flush()
        answer = self._answer()
        if "ready" in answer and when_ready is not None:
            when_ready()
            answer = self._answer()
        return {**answer, "cpu_seconds": cpu_of_tree(self._child.pid) - before}

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()

    def _answer(self) -> Answer:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            self._log.seek(0)
            raise SystemExit(f"Spark ended\n{self._log.read()[-6000:]}")
        answer: Answer = json.loads(line)
        return answer


class Brokers:
    """A Kafka and a node of ours, and how to fill their topics alike."""

    def __init__(self, addresses: dict[str, str], store: Path, bodies: Path, size: int) -> None:
        self.addresses = addresses
        self.store = store
        self._bodies = bodies
        self._size = size

    def fill(self, side: str, topic: str, count: int, rate: int = 0) -> subprocess.Popen[bytes]:
        numbers = map(str, (self._size, count, rate, QUEUES))
        words = [self.addresses[side], topic, str(self._bodies), *numbers]
        command = [sys.executable, "-m", "bench.spark_load"] if side == "ours" else _kafka_load()
        return subprocess.Popen(
            dying_with_parent([*command, *words]),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.DEVNULL,
        )


def _kafka_load() -> list[str]:
    source, libraries = SOURCES / "KafkaLoad.java", class_path("kafka")
    folder = BUILD / "kafka-bench"

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        words = ["javac", "-nowarn", "-encoding", "UTF-8", "-cp", libraries, "-d", str(folder)]
        run_with_tries([*words, str(source)], cwd=SOURCES)

    make_once("kafka-bench", [source, libraries], folder, make)
    options = ("-XX:TieredStopAtLevel=4", "-Xmx1g", "-cp", f"{folder}{os.pathsep}{libraries}")
    return [*java_command(*options), "KafkaLoad"]


@contextlib.contextmanager
def brokers(folder: Path, options: argparse.Namespace) -> Iterator[Brokers]:
    size, sides = options.size, options.sides
    bodies, store = folder / "bodies", folder / "node" / "data"
    bodies.write_bytes(os.urandom(BODIES_HELD * size))
    addresses: dict[str, str] = {}
    with contextlib.ExitStack() as running:
        if "kafka" in sides:
            kafka = running.enter_context(KafkaNode(folder / "kafka", partitions=QUEUES))
            addresses["kafka"] = kafka.address
        if "ours" in sides:
            settings = ["flushDiskType=ASYNC_FLUSH", *options.set]
            words = [word for setting in settings for word in ("--set", setting)]
            node = running.enter_context(CosmoNode(store, options=words))
            addresses["ours"] = node.namesrv_address
        yield Brokers(addresses, store, bodies, size)


def finish(child: subprocess.Popen[bytes], what: str) -> None:
    if child.wait(600):
        raise SystemExit(f"{what} could not be filled")


# --- the parts -------------------------------------------------------------------------------


def scans(options: argparse.Namespace, held: Brokers, spark: SparkSide) -> Rows:
    rows: Rows = {}
    for number in range(1 - options.warm, options.rounds + 1):
        for case in options.only or SCANS:
            for side in options.sides:
                found = spark.ask(case, side=side, address=held.addresses[side], topic=TOPIC)
                _say("warm-up" if number < 1 else number, case, side, found)
                if number >= 1:
                    rows.setdefault((case, side), []).append(found)
    for side in options.sides:
        counted = spark.ask("count", side=side, address=held.addresses[side], topic=TOPIC)
        if counted["rows"] != options.messages:
            raise SystemExit(f"{side}: {counted['rows']} of {options.messages} messages were read")
    return rows


def fresh(options: argparse.Namespace, held: Brokers, folder: Path) -> Rows:
    """One scan by a session of its own, as a job does it: no compiled code waits for it."""
    rows: Rows = {}
    for number in range(FRESH_ROUNDS):
        for side in options.sides:
            spark = SparkSide(folder / f"fresh-{side}-{number}")
            try:
                found = spark.ask("noop", side=side, address=held.addresses[side], topic=TOPIC)
            finally:
                spark.close()
            _say("fresh", side, found)
            rows.setdefault(("fresh", side), []).append(found)
    return rows


def live(options: argparse.Namespace, held: Brokers, spark: SparkSide) -> Rows:
    """Turns of following a topic that grows by RATE messages per second."""
    rows: Rows = {}
    for side in options.sides:
        finish(held.fill(side, LIVE_TOPIC, QUEUES * 100), side)
    for number in range(LIVE_TURNS + 1):  # the first one warms up
        for side in options.sides:
            feeders: list[subprocess.Popen[bytes]] = []
            feed = functools.partial(held.fill, side, LIVE_TOPIC, RATE * FEED_SECONDS, RATE)
            try:
                found = spark.ask(
                    "stream",
                    functools.partial(_feed, feeders, feed),
                    side=side,
                    address=held.addresses[side],
                    topic=LIVE_TOPIC,
                    seconds=LIVE_SECONDS,
                    warm_seconds=WARM_SECONDS,
                )
            finally:
                for feeder in feeders:
                    feeder.kill()
                    feeder.wait()
            if number:
                rows.setdefault(("live", side), []).append(found)
            _say("live", side, len(found["batches"]), "batches", found["batches"][:3])
    return rows


def _feed(
    feeders: list[subprocess.Popen[bytes]], feed: Callable[[], subprocess.Popen[bytes]]
) -> None:
    feeders.append(feed())


def offline(options: argparse.Namespace, held: Brokers, spark: SparkSide) -> Rows:
    place = {"side": "ours", "store": str(held.store), "topic": TOPIC}
    counted = spark.ask("count", None, **place)
    if counted["rows"] != options.messages:
        raise SystemExit(f"offline: {counted['rows']} of {options.messages} messages were read")
    found = [spark.ask("noop", None, **place) for _ in range(options.rounds)]
    _say("offline", counted, found)
    return {("offline", "ours"): [{**row, "bytes": counted["bytes"]} for row in found]}


def _say(*words: object) -> None:
    print(f"{time.strftime('%H:%M:%S')}", *words, file=sys.stderr, flush=True)


def measure(options: argparse.Namespace) -> tuple[Rows, str]:
    rows: Rows = {}
    (ROOT / "build").mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch,
        brokers(Path(scratch), options) as held,
    ):
        for side in options.sides:
            began = time.monotonic()
            finish(held.fill(side, TOPIC, options.messages), side)
            _say("filled", side, round(time.monotonic() - began, 1), "s")
        if "fresh" in options.parts:
            rows |= fresh(options, held, Path(scratch))
        spark = SparkSide(Path(scratch) / "spark")
        try:
            _say("Spark", spark.version)
            if "scan" in options.parts:
                rows |= scans(options, held, spark)
            if "offline" in options.parts and "ours" in options.sides:
                rows |= offline(options, held, spark)
            if "live" in options.parts:
                rows |= live(options, held, spark)
        finally:
            spark.close()
    return rows, spark.version


# --- tables ----------------------------------------------------------------------------------


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def scan_table(rows: Rows, messages: int, size: int) -> str:
    lines = [
        "| scan | Kafka CPU-µs/msg | ours CPU-µs/msg | ratio | bar | Kafka MiB/s | ours MiB/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, name in {**SCANS, "fresh": FRESH}.items():
        if (case, SIDES[0]) not in rows or (case, SIDES[1]) not in rows:
            continue
        cpu, rate = {}, {}
        for side in SIDES:
            found = rows.get((case, side), [])
            cpu[side] = median([row["cpu_seconds"] / messages * 1e6 for row in found])
            rate[side] = median([messages * size / row["seconds"] / 2**20 for row in found])
        bar = BARS.get(case)
        lines.append(
            f"| {name} | {cpu['kafka']:.2f} | {cpu['ours']:.2f}"
            f" | {cpu['ours'] / cpu['kafka']:.2f} | {f'≤ {bar}' if bar else ''}"
            f" | {rate['kafka']:,.0f} | {rate['ours']:,.0f} |"
        )
    return "\n".join(lines)


def live_table(rows: Rows) -> str:
    """Batches of all turns together."""
    lines = [
        f"| live at {RATE:,} msg/s | Kafka | ours | ratio | bar |",
        "|---|---|---|---|---|",
    ]
    found: dict[str, dict[str, float]] = {}
    for side in SIDES:
        turns = rows.get(("live", side), [])
        took = [times["triggerExecution"] for turn in turns for times in turn["took_ms"]]
        batches = [batch for turn in turns for batch in turn["batches"]]
        number = sum(batch[0] for batch in batches)
        mean = sum(batch[0] * batch[1] for batch in batches) / number if number else float("nan")
        found[side] = {
            "micro-batch, p50 ms": percentile(took, 0.5),
            "micro-batch, p95 ms": percentile(took, 0.95),
            "age of a row when its batch is done, mean ms": mean,
            "age of the oldest row, p95 ms": percentile([batch[2] for batch in batches], 0.95),
            "rows in a batch, mean": number / len(batches) if batches else float("nan"),
        }
    for name, kafka in found["kafka"].items():
        ours = found["ours"][name]
        bar = f"≤ {LIVE_BAR}" if name.endswith("ms") else ""
        lines.append(f"| {name} | {kafka:,.0f} | {ours:,.0f} | {ours / kafka:.2f} | {bar} |")
    return "\n".join(lines)


def core_table(rows: Rows, decode_mb: float | None) -> str:
    lines = ["| MB/s per core | ours | bar |", "|---|---|---|"]
    found = rows.get(("offline", "ours"), [])
    if found:
        speed = median([row["bytes"] / row["cpu_seconds"] / 1e6 for row in found])
        name = f"store of {found[0]['bytes'] / 2**30:.2f} GiB without its broker, to noop"
        lines.append(f"| {name} | {speed:,.0f} | ≥ {OFFLINE_BAR} |")
    if decode_mb is not None:
        lines.append(f"| decode loop with CRC, alone | {decode_mb:,.0f} | ≥ {DECODE_BAR} |")
    return "\n".join(lines)


def decode_speed() -> float | None:
    """MB of records per CPU second through the column builder alone."""
    try:
        from bench import columnar
    except ImportError:
        return None
    from cosmodrome.speed import arrow as chosen

    data = columnar.records(40_000, SIZE)
    return columnar.rate(chosen, data, tuple(chosen.KINDS), True, 3.0)


def render(options: argparse.Namespace, rows: Rows) -> str:
    parts = []
    if "scan" in options.parts or "fresh" in options.parts:
        parts.append(scan_table(rows, options.messages, options.size))
    if "live" in options.parts:
        parts.append(live_table(rows))
    if "offline" in options.parts:
        parts.append(core_table(rows, decode_speed()))
    return "\n\n".join(parts)


def record(options: argparse.Namespace, spark: str, text: str) -> None:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    head = (
        "## Spark\n\n"
        f"Measured {stamp} at {commit}, {platform.machine()}, {os.cpu_count()} cores, load average"
        f" {os.getloadavg()[1]:.1f} at the end (5 minutes), Spark {spark}, local[2], Kafka"
        f" {KAFKA_VERSION} with Spark's\nown connector 4.2.0, {options.messages:,} messages of"
        f" {options.size} random bytes in {QUEUES} queues, median of {options.rounds} rounds\n"
        f"after {options.warm} that warm up. "
        f"Command: `.venv/bin/python -m bench.spark {' '.join(sys.argv[1:])}`.\n\n"
    )
    notes = (
        "CPU is that of the Spark side (driver, JVM, Python processes) without brokers. They share"
        " the two cores with Spark, so\nMiB/s of wall time says how fast the whole machine is, not"
        " the source. Ours reads 18 columns and checks CRC-32 of every\nbody; Kafka's connector has"
        " 8 columns and checks CRC-32C of every batch. The one property of a\nmessage, its id, is a"
        " header in Kafka (`includeHeaders`). Kafka's sends go to disk by its"
        " defaults,\nours with ASYNC_FLUSH. The ages are from append at the broker to the end of"
        " the batch.\n"
    )
    begin, end = "<!-- spark -->\n", "<!-- end spark -->\n"
    page = RESULTS.read_text()
    if begin in page:
        before, rest = page.split(begin, 1)
        after = rest.split(end, 1)[1]
    else:
        before, _, rest = page.partition("## What these numbers do not say")
        after = f"\n## What these numbers do not say{rest}"
    RESULTS.write_text(f"{before}{begin}{head}{text}\n\n{notes}{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description="This source beside Spark's Kafka connector.")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=SIZE, help="bytes of a body")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", type=int, default=3, help="rounds before them, not counted")
    parser.add_argument("--only", action="append", choices=list(SCANS), help="just this scan")
    parser.add_argument("--parts", nargs="+", default=["fresh", "scan", "offline", "live"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE for our broker")
    parser.add_argument("--record", action="store_true", help="write bench/RESULTS.md")
    options = parser.parse_args()
    rows, spark = measure(options)
    text = render(options, rows)
    print(text)
    if options.record:
        record(options, spark, text)


if __name__ == "__main__":
    main()
