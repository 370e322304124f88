"""`make bench-abuse`: what a well-behaved neighbour feels while one peer abuses the node.

For each attack of `bench.attacks` a node of its own is started. A neighbour sends 200 messages per
second and waits for each of them in a consumer; first alone, which is the baseline, then beside
the attack. The bars: its p99 at most doubles, the node's own memory stays within the bound of
docs/reliability.md, its log gets at most one line per second and cause and no traceback, and the
health port answers. In one attack the node is asked to end, and has to within `STOP_S_MAX`. Both
halves share a run, so a busy machine disturbs both; a baseline that is endless says that the
machine was too busy to measure anything.

    make bench-abuse ARGS="--only held-sql-pulls --only slow-http"
    make bench-abuse ARGS="--record"  # the table of all attacks goes into bench/RESULTS.md
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from peers.node import CosmoNode

from bench import verdict
from bench.attacks import ATTACKS, QUEUES, STOPPED, TOPIC
from bench.brokers import CLIENT_CORE, RESULTS, ROOT, pin, pinned
from bench.java import SECTIONS, heading

RATE = 200
BASELINE_S, ABUSE_S, HEAD_START_S = 4.0, 6.0, 1.0
RATIO_MAX = 2.0
LINES_PER_SECOND_MAX = 1.0
GRACE_S = 60.0  # for a node that stands still
STOP_S_MAX = 30.0  # for a node that is asked to end
# docs/reliability.md, "Memory": what the process takes anyway, and what each of its two servers
# may hold for its connections.
HELD_MB = 64
MEMORY_MB_MAX = 128 + 2 * HELD_MB
LOOK_S = 0.05
SETTINGS = ("flushDiskType=ASYNC_FLUSH", f"serverHeldBytesMax={HELD_MB << 20}")
AUDIT = "cosmodrome.audit"
LINE = re.compile(r"^\S+ \S+ (\w+) (.*)")  # date, time, level, text
# Reads the neighbour's topic as users do, and says how large it became.
VICTIM = f"""
import asyncio, resource, sys
from cosmodrome import Consumer

async def main():
    async with Consumer(sys.argv[1], group="victim", consume_from="last") as consumer:
        await consumer.subscribe("{TOPIC}", handler=lambda message: None)
        while not consumer.assignment:
            await asyncio.sleep(0.1)
        print("ready", flush=True)
        await asyncio.sleep(float(sys.argv[2]))

asyncio.run(main())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@dataclass
class Felt:
    """What the neighbour measured, in ms; endless when messages did not come at all."""

    p50: float
    p99: float


@dataclass
class Outcome:
    name: str
    alone: Felt
    beside: Felt
    memory_mb: float  # the node's own, at its peak
    lines_per_s: float  # of the most frequent cause
    faults: int  # tracebacks in its log
    probed: bool  # whether the health port answered
    ended_s: float | None  # from SIGTERM to the end, where that was asked for
    note: str

    @property
    def ratio(self) -> float:
        ratio = self.beside.p99 / self.alone.p99
        return ratio if math.isfinite(self.alone.p99) else math.inf

    @property
    def good(self) -> bool:
        quiet = self.lines_per_s <= LINES_PER_SECOND_MAX and not self.faults
        ended = self.ended_s is None or self.ended_s <= STOP_S_MAX
        fair = self.ratio <= RATIO_MAX and self.probed and ended
        return fair and quiet and self.memory_mb <= MEMORY_MB_MAX

    def row(self) -> str:
        return (
            f"| {self.name} | {self.alone.p50:.1f} / {self.alone.p99:.1f}"
            f" | {self.beside.p50:.1f} / {self.beside.p99:.1f} | {self.ratio:.1f} ×"
            f" | {self.memory_mb:.0f} | {self.lines_per_s:.1f} | {'yes' if self.good else 'NO'}"
            f" | {self.note} |"
        )


HEAD = (
    "| attack | alone p50 / p99 ms | beside it p50 / p99 ms | ratio of p99 | node MB |"
    " log lines/s | holds | note |\n|---|---|---|---|---|---|---|---|"
)


def neighbour(node: CosmoNode, seconds: float) -> Felt:
    command = [*pinned(CLIENT_CORE), sys.executable, "-m", "bench.loadgen", "--op", "pushlatency"]
    command += ["--addr", node.broker_address, "--topic", TOPIC, "--queues", str(QUEUES)]
    command += ["--rate", str(RATE), "--conns", "1", "--warmup", "0.5", "--duration", str(seconds)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + GRACE_S
        )
        found = json.loads(done.stdout)
    except (subprocess.TimeoutExpired, ValueError):
        return Felt(math.inf, math.inf)
    felt = Felt(found["p50_us"] / 1000, found["p99_us"] / 1000)
    if found["msgs"] < 0.5 * RATE * seconds:
        felt.p50 = math.inf
    if found["msgs"] < 0.98 * RATE * seconds:  # those that are missing took longer than all others
        felt.p99 = math.inf
    return felt


@contextlib.contextmanager
def attacked(name: str, node: CosmoNode, seconds: float) -> Iterator[None]:
    facts = {
        "namesrv_port": node.namesrv_port,
        "broker_port": node.broker_port,
        "http_port": node.http_port,
        "seconds": seconds,
    }
    words = [sys.executable, "-m", "bench.attacks", name, json.dumps(facts)]
    command = [*pinned(CLIENT_CORE), *words]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        time.sleep(HEAD_START_S)
        yield
    finally:
        child.kill()
        child.wait()


@contextlib.contextmanager
def victim(node: CosmoNode, seconds: float) -> Iterator[list[str]]:
    """A consumer with this client; its peak memory in MB is in the list afterwards."""
    findings: list[str] = []
    command = [sys.executable, "-c", VICTIM, node.namesrv_address, str(seconds)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    assert child.stdout is not None
    try:
        child.stdout.readline()
        yield findings
        out, _ = child.communicate(timeout=seconds + GRACE_S)
        findings.append(f"a consumer took {out.decode().strip() or 'more than there is'} MB")
    finally:
        child.kill()
        child.wait()


def probe(node: CosmoNode) -> tuple[bool, str]:
    began = time.monotonic()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{node.http_port}/livez", timeout=5):
            return True, f"probe in {(time.monotonic() - began) * 1000:.0f} ms"
    except OSError as error:
        return False, f"probe failed: {error}"


class Memory(threading.Thread):
    """Looks at the memory of a process, without pages of mapped files: the kernel may have those
    back at any time."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._status = Path(f"/proc/{pid}/status")
        self._over = threading.Event()
        self.peak_mb = 0.0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(LOOK_S):
            with contextlib.suppress(OSError):  # it has ended
                for found in re.findall(r"RssAnon:\s+(\d+)", self._status.read_text()):
                    self.peak_mb = max(self.peak_mb, int(found) / 1024)


def end(node: CosmoNode) -> float:
    """Seconds from SIGTERM until the node has ended by itself; endless when it had to be killed."""
    began = time.monotonic()
    code = node.process.stop(STOP_S_MAX + GRACE_S)
    return time.monotonic() - began if code == 0 else math.inf


def most_frequent(lines: list[str], seconds: float) -> tuple[float, str]:
    """The cause that was logged most: a line without its numbers, names and addresses.

    The audit log does not count. It has one line for each change, and the limits of changes (here
    `autoCreateTopicsPerMinuteByAddress`) bound it.
    """
    causes = collections.Counter(
        re.sub(r"\"[^\"]*\"|'[^']*'|=\S+|[\w.%-]*\d[\w.:%-]*", "#", match.group(2))[:80]
        for line in lines
        if AUDIT not in line and (match := LINE.match(line))
    )
    if not causes:
        return 0.0, ""
    cause, count = causes.most_common(1)[0]
    return count / seconds, cause


def measure(name: str, scratch: Path) -> Outcome:
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    node = CosmoNode(scratch / name, options=options)
    with node, contextlib.ExitStack() as stack:
        pin(node.pid)
        neighbour(node, 1.0)  # the topic is there, and everything is warm
        alone = neighbour(node, BASELINE_S)
        seconds = ABUSE_S + HEAD_START_S + 2
        findings = stack.enter_context(victim(node, seconds)) if name == "inflate-bomb" else []
        memory = stack.enter_context(Memory(node.pid))
        logged = node.process.log.stat().st_size
        began = time.monotonic()
        with attacked(name, node, seconds + 2 * GRACE_S):
            beside = neighbour(node, ABUSE_S)
            probed, note = probe(node)
            ended_s = end(node) if name == STOPPED else None
        took = time.monotonic() - began
        stack.close()
        lines = node.process.log.read_bytes()[logged:].decode(errors="replace").splitlines()
        node.kill9()  # how it stops after the other attacks is not measured
    per_second, cause = most_frequent(lines, took)
    faults = sum(line.startswith("Traceback") for line in lines)
    notes = [note, *findings] + ([f"logs: {cause}"] if per_second > LINES_PER_SECOND_MAX else [])
    notes += [f"ended in {ended_s:.1f} s"] if ended_s is not None else []
    notes += [f"{faults} tracebacks"] if faults else []
    return Outcome(
        name=name,
        alone=alone,
        beside=beside,
        memory_mb=memory.peak_mb,
        lines_per_s=per_second,
        faults=faults,
        probed=probed,
        ended_s=ended_s,
        note="; ".join(notes),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", choices=list(ATTACKS), help="just this attack")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    parser.add_argument("--record", action="store_true", help="write bench/RESULTS.md")
    options = parser.parse_args()
    if options.record and options.only:
        parser.error("--record takes all attacks, because it replaces the whole table")
    (ROOT / "build").mkdir(exist_ok=True)
    rows = [HEAD]
    good = True
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as scratch:
        for name in options.only or ATTACKS:
            outcome = measure(name, Path(scratch))
            good = good and outcome.good
            rows.append(outcome.row())
            print(rows[-1], flush=True)
    table = "\n".join(rows)
    if options.out:
        options.out.write_text(table + "\n")
    if options.record:
        section = f"{heading('Beside an attack', 'bench-abuse', 'bench.loadgen')}\n\n{table}"
        page = verdict.put_sections(RESULTS.read_text(), {"abuse": section}, SECTIONS)
        RESULTS.write_text(page)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
