"""`make bench-java`: this broker and the Java broker under the same load, every row with its bar.

Java 4.9.7 (from build/peers, full JIT, 1 GiB heap) is warmed up on each path before it is measured
there. The server is pinned to one core and the generator to the other; the server that is not
measured is halted; memory is full of files (`bench.ballast`). Repetitions are interleaved and
medians are shown with their range. With --record the groups that ran replace theirs in
bench/RESULTS.md, and one line goes to bench/trend.jsonl; this happens after each group, so an
interrupted run keeps what it has.

`bench.run` is the short form of this.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from bench import verdict
from bench.ballast import Ballast
from bench.brokers import RESULTS, ROOT, Brokers
from bench.load import Generator
from bench.rows import GROUPS, Bench

TREND = ROOT / "bench" / "trend.jsonl"
SECTIONS = [*GROUPS, "abuse"]  # of the page, in their order; the last is bench.abuse's


def chosen(text: str) -> list[str]:
    """Names of groups, separated by commas, in the order of measuring."""
    names = [name for name in text.split(",") if name]
    unknown = sorted(set(names) - set(GROUPS))
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{unknown or 'nothing'}: choose from {','.join(GROUPS)}")
    return [name for name in GROUPS if name in names]


def options_of(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="This broker and the Java broker, side by side.",
        epilog="A full run with the defaults takes about 30 minutes.",
    )
    parser.add_argument("--rows", type=chosen, default=list(GROUPS), help=",".join(GROUPS))
    parser.add_argument("--repetitions", type=int, default=3, help="interleaved (3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured per sample (3)")
    parser.add_argument("--warm", type=float, default=20.0, help="seconds per path of Java (20)")
    parser.add_argument(
        "--memory", choices=("full", "as-is"), default="full", help="see bench/ballast.py (full)"
    )
    parser.add_argument("--record", action="store_true", help="write RESULTS.md and the trend")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, *, page: Path | None = RESULTS) -> None:
    """Without a `page`, --record only adds to the trend."""
    options = options_of(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # cleaning up
    rows: dict[str, list[verdict.Row]] = {}
    failed = []
    began = time.monotonic()
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=build)))
        generator = Generator()
        brokers = Brokers(scratch, stack)
        ballast = Ballast(scratch) if options.memory == "full" else None
        bench = Bench(
            brokers, generator, options.seconds, options.repetitions, options.warm, ballast
        )
        for name in options.rows:
            title, measure = GROUPS[name]
            started = time.monotonic()
            try:
                rows[name] = measure(bench)
            except Exception:
                traceback.print_exc()
                failed.append(name)
                continue
            took = f"{time.monotonic() - started:.0f} s"
            print(f"### {title}\n\n{verdict.table(rows[name], peer_of(name))}\n", flush=True)
            print(f"({name} took {took})\n", flush=True)
            if options.record and page is not None:
                text = section(title, name, rows[name], generator.name)
                sections = {name: text}
                page.write_text(verdict.put_sections(page.read_text(), sections, SECTIONS))
    measured = [row for name in rows for row in rows[name]]
    trend = TREND.read_text() if TREND.exists() else ""
    for line in verdict.changes(trend, measured):
        print(f"changed: {line}")
    if options.record and measured:
        with TREND.open("a") as file:
            file.write(verdict.trend_line(_now(), _commit(), measured) + "\n")
    missed = sum(row.passed is False for row in measured)
    met = sum(row.passed is True for row in measured)
    print(
        f"{met} bars met, {missed} missed, generator {generator.name},"
        f" load average {os.getloadavg()[0]:.1f}, {time.monotonic() - began:.0f} s in all"
    )
    if failed:
        raise SystemExit(f"could not be measured: {', '.join(failed)}")


def peer_of(group: str) -> str:
    return {"floor": "floor", "workers": "one worker"}.get(group, "Java")


def section(title: str, name: str, rows: Sequence[verdict.Row], generator: str) -> str:
    head = heading(title, "bench-java", generator)
    return f"{head}\n\n{verdict.table(rows, peer_of(name))}"


def heading(title: str, target: str, generator: str) -> str:
    """Title of a section, and when, where and how it was measured."""
    words = " ".join(sys.argv[1:])
    return (
        f"### {title}\n\nMeasured {_now()} at {_commit()}, {platform.machine()},"
        f" {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f},"
        f" Python {platform.python_version()}, generator {generator}.\n"
        f'Command: `make {target} ARGS="{words}"`.'
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
