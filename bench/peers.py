"""This broker beside other message systems: the same work, and what each promises by its answer.

    python -m bench.peers [--rounds 3] [--only NAME ...] [--record]

The work is a producer that sends bodies of 1 KiB and waits for the acknowledgement of each, with
128 in flight and with one. Every server runs on one core and its load generator on the other; those
not being measured are halted. Rounds are interleaved, figures are medians. An acknowledgement is
worth what the server did before it, so that is a column: compare rows of one kind.

Servers come from Maven, Debian, Go's proxy and crates.io into build/peers. The one from crates.io
takes half an hour to build, so it is only measured once it was asked for (`--only rust`).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.java import class_path, java_command
from peers.kafka import KAFKA_VERSION, KafkaNode
from peers.nats import NatsNode
from peers.redis import RedisNode
from peers.resolve import BUILD, make_once, run_with_tries
from peers.rust import VERSION as RUST_VERSION
from peers.rust import RustNode, is_built

from bench.brokers import (
    ASYNC,
    CLIENT_CORE,
    JAVA_HEAP,
    RESULTS,
    ROOT,
    SYNC,
    Brokers,
    Target,
    memory_mb,
    pin,
    pinned,
)
from bench.load import Generator, parse
from bench.verdict import Sample, median, number, values

SIZE = 1024
MANY, ONE = 128, 1  # messages in flight
CONNECTIONS = 8
BATCH = 16
QUEUES = 8
START_TIMEOUT_S = 180
PATIENCE_S = 240  # beyond the time that a load takes
BEGIN, END = "<!-- peers -->\n", "<!-- end peers -->"
BEFORE = "## What these numbers do not say"

# What a server has done when it answers.
EACH = "synced, each write by itself"
GROUP = "synced, many per sync (group commit)"
CACHE = "in the page cache, synced later"

One = Callable[[int, float], Sample]  # messages in flight, seconds
Run = Callable[[Sequence[int], float], list[Sample]]  # one sample per number in flight


@dataclass(frozen=True)
class Peer:
    """One row group: a server in one setting under one kind of load."""

    name: str
    durability: str
    target: Target
    run: Run
    windows: Sequence[int] = (MANY, ONE)
    jvm: bool = False  # needs a warm-up


@dataclass(frozen=True)
class Measured:
    name: str
    durability: str
    window: int
    samples: Sequence[Sample]
    memory_mb: float


# --- load ------------------------------------------------------------------------------------


def _output(name: str, command: Sequence[str], seconds: float) -> str:
    done = subprocess.run(
        [*pinned(CLIENT_CORE), *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=seconds + PATIENCE_S,
    )
    if done.returncode:
        raise SystemExit(f"{name} failed\n{done.stderr[-2000:]}")
    return done.stdout


def _each(one: One, prepare: Callable[[], object] = lambda: None) -> Run:
    def run(windows: Sequence[int], seconds: float) -> list[Sample]:
        samples = []
        for window in windows:
            prepare()
            samples.append(one(window, seconds))
        return samples

    return run


def remoting(generator: Generator, target: Target, batch: int = 1) -> Run:
    """Sends by RocketMQ's protocol."""

    def one(window: int, seconds: float) -> Sample:
        connections = CONNECTIONS if window > 1 else 1
        load: dict[str, object] = {
            "op": "send",
            "topic": "Bench",
            "queues": QUEUES,
            "size": SIZE,
            "batch": batch,
            "conns": connections,
            "window": max(1, window // connections // batch),
        }
        return generator.run(target, load, seconds)

    return _each(one)


def pipelined(protocol: str, target: Target, prepare: Callable[[], object] = lambda: None) -> Run:
    def one(window: int, seconds: float) -> Sample:
        connections = CONNECTIONS if window > 1 else 1
        words = ["--addr", target.address, "--pid", str(target.pid), "--size", str(SIZE)]
        words += ["--conns", str(connections), "--window", str(max(1, window // connections))]
        words += ["--duration", str(seconds)]
        command = [sys.executable, "-m", "bench.pipelined", protocol, *words]
        return parse(_output(f"bench.pipelined {protocol}", command, seconds))

    return _each(one, prepare)


def kafka_sends(target: Target, flush_messages: int) -> Run:
    source, libraries = ROOT / "bench" / "clients" / "KafkaSends.java", class_path("kafka")
    folder = BUILD / "kafka-sends"

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        words = ["javac", "-nowarn", "-encoding", "UTF-8", "-cp", libraries, "-d", str(folder)]
        run_with_tries([*words, str(source)], cwd=ROOT)

    make_once("kafka-sends", [source, libraries], folder, make)
    options = ("-XX:TieredStopAtLevel=4", "-Xmx1g", "-cp", f"{folder}{os.pathsep}{libraries}")

    def run(windows: Sequence[int], seconds: float) -> list[Sample]:
        """All in one process, because a JVM has to warm up."""
        words = [target.address, f"Bench{flush_messages}", str(flush_messages), str(QUEUES)]
        words += [",".join(map(str, windows)), str(SIZE), "2", str(seconds), str(target.pid)]
        command = [*java_command(*options), "KafkaSends", *words]
        output = _output("KafkaSends", command, (seconds + 2) * len(windows))
        return [parse(line) for line in output.strip().splitlines()[-len(windows) :]]

    return run


# --- servers ---------------------------------------------------------------------------------


def _ours(brokers: Brokers, generator: Generator) -> Iterator[Peer]:
    for flush, durability in ((SYNC, GROUP), (ASYNC, CACHE)):
        target = brokers.get("ours", flush)
        yield Peer("this broker", durability, target, remoting(generator, target))
        run = remoting(generator, target, BATCH)
        yield Peer(f"this broker, batches of {BATCH}", durability, target, run, (MANY,))


def _java(brokers: Brokers, generator: Generator) -> Iterator[Peer]:
    for flush, durability in ((SYNC, GROUP), (ASYNC, CACHE)):
        target = brokers.get("java", flush)
        run = remoting(generator, target)
        yield Peer("RocketMQ 4.9.7 (Java)", durability, target, run, jvm=True)


def _kafka(folder: Path, stack: contextlib.ExitStack) -> Iterator[Peer]:
    # A halted node must not find itself dead when it wakes.
    long_session = {"broker.session.timeout.ms": "3600000"}
    node = KafkaNode(folder, partitions=QUEUES, heap=JAVA_HEAP, settings=long_session)
    node.start(START_TIMEOUT_S)
    stack.callback(node.stop)
    target = _settled("kafka", node.port, node.pid, stack)
    for flush_messages, durability in ((1, EACH), (0, CACHE)):
        run = kafka_sends(target, flush_messages)
        yield Peer(f"Kafka {KAFKA_VERSION}", durability, target, run, jvm=True)


def _redis(folder: Path, stack: contextlib.ExitStack) -> Iterator[Peer]:
    node = RedisNode(folder)
    stack.enter_context(node)
    name = f"Redis {node.version()} streams"
    target = _settled("redis", node.port, node.pid, stack)

    def prepare(policy: str) -> None:
        node.call("FLUSHALL", "SYNC")  # what earlier rounds left is memory
        node.call("CONFIG", "SET", "appendfsync", policy)

    for policy, durability in (("always", GROUP), ("everysec", CACHE)):
        run = pipelined("redis", target, functools.partial(prepare, policy))
        yield Peer(name, durability, target, run)


def _nats(folder: Path, stack: contextlib.ExitStack) -> Iterator[Peer]:
    for always, durability in ((True, EACH), (False, CACHE)):
        node = NatsNode(folder / ("always" if always else "later"), sync_always=always)
        stack.enter_context(node)
        node.make_stream("Bench", "bench.*")
        target = _settled("nats", node.port, node.pid, stack)
        name = f"NATS JetStream {node.version()}"
        yield Peer(name, durability, target, pipelined("nats", target))


def _rust(folder: Path, stack: contextlib.ExitStack, generator: Generator) -> Iterator[Peer]:
    for flush, durability in ((SYNC, GROUP), (ASYNC, CACHE)):
        node = RustNode(folder / flush, flush=flush)
        stack.enter_context(node)
        target = _settled("rust", node.port, node.pid, stack)
        name = f"RocketMQ in Rust {RUST_VERSION}"
        yield Peer(name, durability, target, remoting(generator, target))


def _settled(name: str, port: int, pid: int, stack: contextlib.ExitStack) -> Target:
    target = Target(name, port, (pid,))
    pin(pid)
    target.halt()
    stack.callback(target.wake)  # a halted process does not hear that it should end
    return target


KINDS = ("ours", "java", "kafka", "redis", "nats", "rust")


def start(
    kinds: Sequence[str], scratch: Path, stack: contextlib.ExitStack, generator: Generator
) -> list[Peer]:
    brokers = Brokers(scratch, stack)
    starts: dict[str, Callable[[], Iterator[Peer]]] = {
        "ours": lambda: _ours(brokers, generator),
        "java": lambda: _java(brokers, generator),
        "kafka": lambda: _kafka(scratch / "kafka", stack),
        "redis": lambda: _redis(scratch / "redis", stack),
        "nats": lambda: _nats(scratch / "nats", stack),
        "rust": lambda: _rust(scratch / "rust", stack, generator),
    }
    return [peer for kind in KINDS if kind in kinds for peer in starts[kind]()]


# --- the program -----------------------------------------------------------------------------


def rounds(peers: Sequence[Peer], options: argparse.Namespace) -> list[Measured]:
    for peer in peers:
        if peer.jvm and options.warmup:
            with peer.target.awake():
                peer.run(peer.windows, options.warmup)
    found: dict[tuple[int, int], list[Sample]] = {}
    for turn in range(options.rounds):
        for at, peer in enumerate(peers):
            with peer.target.awake():
                samples = peer.run(peer.windows, options.seconds)
            for window, sample in zip(peer.windows, samples, strict=True):
                found.setdefault((at, window), []).append(sample)
                print(
                    f"{turn + 1}  {peer.name}, {peer.durability}, {window} in flight:"
                    f" {number(sample, 'srv_cpu_us_msg'):.2f} CPU-µs,"
                    f" {number(sample, 'tps'):,.0f}/s",
                    file=sys.stderr,
                )
    return [
        Measured(
            peers[at].name,
            peers[at].durability,
            window,
            samples,
            memory_mb(peers[at].target.pid),
        )
        for (at, window), samples in found.items()
    ]


def render(rows: Sequence[Measured]) -> str:
    """A table per number in flight, servers of one durability together."""
    parts = []
    for window in (MANY, ONE):
        title = "one at a time" if window == ONE else f"{window} in flight"
        lines = [
            f"### 1 KiB, acknowledged, {title}",
            "",
            "| when answered, a message is | server | CPU-µs/msg | msg/s | p50 µs | p99 µs"
            " | errors | MB |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for durability in (EACH, GROUP, CACHE):
            chosen = [row for row in rows if (row.window, row.durability) == (window, durability)]
            for row in sorted(chosen, key=_cpu):
                figures = {key: median(values(row.samples, key)) for key in ("p50_us", "p99_us")}
                lines.append(
                    f"| {durability} | {row.name} | {_cpu(row):.2f}"
                    f" | {median(values(row.samples, 'tps')):,.0f} | {figures['p50_us']:,.0f}"
                    f" | {figures['p99_us']:,.0f} | {sum(values(row.samples, 'errors')):.0f}"
                    f" | {row.memory_mb:,.0f} |"
                )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cpu(row: Measured) -> float:
    return median(values(row.samples, "srv_cpu_us_msg"))


NOTES = f"""\
CPU is user + system time of the server's process, on a core of its own; MB is its resident memory
after the last round, pages of mapped log files included (this broker and RocketMQ map theirs).
Compare rows of one durability: the first column says what an answer is worth.

- {MANY} in flight are {CONNECTIONS} connections with {MANY // CONNECTIONS} each. Latency is that
  of a closed loop, so with {MANY} in flight it is mostly waiting in line.
- Kafka has one producer instead (its own Java client, acks=all, linger.ms=0), which joins what has
  come together into batches of up to 16 KiB. This broker's row with batches is the one beside it.
- Kafka with `flush.messages=1` syncs every appended batch; its default never syncs by itself.
- Redis (XADD, appendonly) syncs once per turn of its loop with `appendfsync always`, else every
  second. It keeps all messages in memory; they are deleted before each load, so MB says little.
- NATS syncs every message with `sync_interval: always`, else every two minutes.
- RocketMQ and this broker sync before the answer with SYNC_FLUSH, every 500 ms with ASYNC_FLUSH.
- Generators: {{generator}} for RocketMQ's protocol, `bench.pipelined` for Redis and NATS.
- RocketMQ in Rust is the crates rocketmq-namesrv and rocketmq-broker {RUST_VERSION}, built by
  `cargo install`, with no setting but addresses, directory and flushDiskType."""


def head(options: argparse.Namespace) -> str:
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return (
        f"## Other message systems\n\nMeasured {stamp} at {commit}, {platform.machine()},"
        f" {os.cpu_count()} cores, load average {os.getloadavg()[1]:.1f} at the end (5 minutes),\n"
        f"medians of {options.rounds} interleaved rounds of {options.seconds:g} s.\n"
        f"Command: `.venv/bin/python -m bench.peers {' '.join(sys.argv[1:])}`.\n\n"
    )


def put(page: str, text: str) -> str:
    """The page with this section new; the first time it goes before the last chapter."""
    section = f"{BEGIN}{text}{END}"
    if BEGIN in page:
        before, rest = page.split(BEGIN, 1)
        return before + section + rest.split(END, 1)[1]
    before, heading, after = page.partition(BEFORE)
    return f"{before.rstrip()}\n\n{section}\n\n{heading}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions")
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time per figure")
    parser.add_argument("--warmup", type=float, default=6.0, help="seconds for a JVM per load")
    usual = [kind for kind in KINDS if kind != "rust" or is_built()]
    parser.add_argument("--only", nargs="+", choices=KINDS, default=usual)
    parser.add_argument("--record", action="store_true", help="write bench/RESULTS.md")
    options = parser.parse_args()
    began = time.monotonic()
    generator = Generator()
    (ROOT / "build").mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=ROOT / "build")))
        peers = start(options.only, scratch, stack, generator)
        text = render(rounds(peers, options))
    print(text)
    print(f"took {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.record:
        notes = NOTES.format(generator=generator.name)
        RESULTS.write_text(put(RESULTS.read_text(), f"{head(options)}{text}\n\n{notes.rstrip()}\n"))


if __name__ == "__main__":
    main()
