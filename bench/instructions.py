"""`make bench-gate`: instructions per operation against what is written down, whatever the load.

Time on a shared machine is noise; the number of instructions that the same input takes is not. Each
operation of `bench.operations` is done many times under a counter. The counts are in
bench/instructions.json, one table per counter, machine and Python, because they depend on all
three. More than 1 % above is a failure; `--record` writes the table again, which belongs into
the commit that changes the counts.

Two whole runs of the same code agreed within 0.1 % for compiled loops; an operation that is counted
alone may differ by 2 %. Code elsewhere moves some of them by up to 0.8 %, because it changes what
the allocator did before; so each operation is counted twice, in a process that does all of them in
their order and in one that does them backwards, and the smaller count is taken. The operations of a
whole broker once came out 10,000 instructions lower, all five alike; the higher counts are recorded
(bench/RESULTS.md).

The counter is `perf stat` where the machine has hardware counters (most virtual machines do not),
else valgrind's callgrind. Without either, or without a table to compare with, the gate says so and
passes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "bench" / "instructions.json"
LIMIT = 0.01
TIMEOUT_S = 900
REPEATS = ("movsb", "stosb")
PERF_TIMES = (1000, 5000)  # perf counts the start of Python too: it falls out of the difference

Counts = dict[str, int]
Tables = dict[str, Counts]


class CannotCount(Exception):
    """No counter works here; the text says why."""


# --- comparing -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    name: str
    recorded: int | None
    counted: int | None

    @property
    def change(self) -> float | None:
        if self.recorded is None or self.counted is None:
            return None
        return self.counted / self.recorded - 1

    def verdict(self, limit: float = LIMIT) -> str:
        if self.recorded is None:
            return "not recorded"
        if self.counted is None:
            return "no such operation"
        more = self.counted - self.recorded
        if more > limit * self.recorded:
            return "SLOWER"
        return "faster: record it" if -more > limit * self.recorded else "ok"

    def fails(self, limit: float = LIMIT) -> bool:
        return self.verdict(limit) in ("SLOWER", "not recorded", "no such operation")


def compare(recorded: Mapping[str, int], counted: Mapping[str, int]) -> list[Line]:
    """One line per operation of either table, those counted first."""
    names = [*counted, *(name for name in recorded if name not in counted)]
    return [Line(name, recorded.get(name), counted.get(name)) for name in names]


def render(lines: Sequence[Line], limit: float = LIMIT) -> str:
    rows = [("operation", "recorded", "now", "change", "")]
    for line in lines:
        change = "" if line.change is None else f"{line.change:+.1%}"
        before, now = ("" if n is None else f"{n:,}" for n in (line.recorded, line.counted))
        rows.append((line.name, before, now, change, line.verdict(limit)))
    wide = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        f"{row[0]:<{wide[0]}}  {row[1]:>{wide[1]}}  {row[2]:>{wide[2]}}"
        f"  {row[3]:>{wide[3]}}  {row[4]}".rstrip()
        for row in rows
    )


# --- counting --------------------------------------------------------------------------------


def per_operation(rounds: Sequence[int], times: int) -> int:
    """What one costs: timers and allocators disturb some rounds, and only ever add to them."""
    return round(min(rounds) / times)


def _child(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "bench.operations", *words]


def _environment() -> dict[str, str]:
    """Equal from run to run: hashes, where large blocks of memory come from, the compiled core."""
    kept = {name: value for name, value in os.environ.items() if name != "COSMODROME_PURE"}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",  # else it follows what was freed before
        # Valgrind counts `rep movsb` once per byte, so a copy that is made or not made, as the
        # allocator decides, weighs far more than it costs.
        "GLIBC_TUNABLES": ":".join(
            f"glibc.cpu.x86_rep_{how}_threshold=1073741824" for how in REPEATS
        ),
    }


def _run(command: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed\n{done.stdout[-4000:]}")


def perf_total(text: str) -> int | None:
    """Instructions in the output of `perf stat -x,`; None when it could not count them."""
    for line in text.splitlines():
        fields = line.split(",")
        if len(fields) > 2 and fields[2].startswith("instructions"):
            return int(fields[0]) if fields[0].isdigit() else None
    return None


def _perf(command: Sequence[str]) -> int | None:
    with tempfile.NamedTemporaryFile("r") as out:
        words = ["perf", "stat", "-x,", "-e", "instructions:u", "-o", out.name, "--", *command]
        _run(words)
        return perf_total(out.read())


def why_no_perf() -> str | None:
    if shutil.which("perf") is None:
        return "perf is not installed"
    try:
        return None if _perf(["true"]) else "this machine has no hardware counters for perf"
    except SystemExit as failure:
        return f"perf may not count here: {str(failure).splitlines()[-1]}"


def count_by_perf(names: Sequence[str]) -> Counts:
    counts: Counts = {}
    few, many = PERF_TIMES
    for name in names:
        first, second = (_perf(_child(["--times", str(times), name])) for times in PERF_TIMES)
        if first is None or second is None:
            raise CannotCount("perf stopped counting")
        counts[name] = round((second - first) / (many - few))
    return counts


def why_no_valgrind() -> str | None:
    return None if shutil.which("valgrind") else "valgrind is not installed"


def callgrind_total(text: str) -> int:
    """Instructions in one dump of callgrind."""
    found = re.search(r"^(?:summary|totals): (\d+)", text, re.MULTILINE)
    if found is None:
        raise CannotCount("valgrind wrote a dump without a total")
    return int(found[1])


def count_by_valgrind(names: Sequence[str]) -> Counts:
    """The smaller of two counts, with other operations before each."""
    first, second = _count_in_order(names), _count_in_order(names[::-1])
    return {name: min(first[name], second[name]) for name in names}


def _count_in_order(names: Sequence[str]) -> Counts:
    """All operations in one process: starting Python under valgrind takes long."""
    from bench.operations import MARK, ROUNDS, TIMES

    each = ROUNDS + 1  # dumps of one operation: all before it, then the rounds
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "counts"
        options = [f"--callgrind-out-file={out}", f"--dump-before={MARK}", "--dump-line=no"]
        _run(["valgrind", "--tool=callgrind", *options, *_child(["--marks", *names])])
        # What follows the last mark is in a file without a number.
        dumps = sorted(Path(folder).glob("counts.*"), key=lambda path: int(path.suffix[1:]))
        if len(dumps) != each * len(names):
            raise CannotCount(f"valgrind made {len(dumps)} dumps for {len(names)} operations")
        totals = [callgrind_total(path.read_text(errors="replace")) for path in dumps]
    return {
        name: per_operation(totals[each * at + 1 : each * (at + 1)], TIMES)
        for at, name in enumerate(names)
    }


@dataclass(frozen=True)
class Counter:
    name: str
    why_not: Callable[[], str | None]
    count: Callable[[Sequence[str]], Counts]


COUNTERS = (
    Counter("perf", why_no_perf, count_by_perf),
    Counter("valgrind", why_no_valgrind, count_by_valgrind),
)


def table_name(counter: str) -> str:
    python = f"{platform.python_implementation()} {'.'.join(platform.python_version_tuple()[:2])}"
    return f"{counter}, {platform.machine()}, {python}"


def choose(
    counters: Sequence[Counter], recorded: Mapping[str, object] | None, only: str | None = None
) -> Counter:
    """The first counter that works and, unless `recorded` is None, has a table there."""
    reasons: list[str] = []
    for counter in counters:
        if only not in (None, counter.name):
            continue
        reason = counter.why_not()
        if reason is None and recorded is not None and table_name(counter.name) not in recorded:
            reason = f"no counts are recorded for {table_name(counter.name)} (--record does it)"
        if reason is None:
            return counter
        reasons.append(reason)
    raise CannotCount("; ".join(reasons))


# --- the program -----------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="operations; all when none")
    parser.add_argument("--record", action="store_true", help="write the counts down")
    parser.add_argument("--counter", choices=[one.name for one in COUNTERS])
    parser.add_argument("--list", action="store_true", help="name the operations")
    options = parser.parse_args()
    from bench.operations import OPERATIONS
    from cosmodrome.speed import lane

    if options.list:
        print("\n".join(OPERATIONS))
        return 0
    unknown = [name for name in options.names if name not in OPERATIONS]
    if unknown:
        parser.error(f"no operation {unknown[0]!r}; --list names them")
    tables: Tables = json.loads(RECORDED.read_text()) if RECORDED.exists() else {}
    try:
        if not lane.HAS_LANE:
            raise CannotCount("the compiled core is not built, and it is what is counted")
        counter = choose(COUNTERS, None if options.record else tables, options.counter)
        counted = counter.count(options.names or list(OPERATIONS))
    except CannotCount as reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    return _finish(options, tables, table_name(counter.name), counted)


def _finish(options: argparse.Namespace, tables: Tables, name: str, counted: Counts) -> int:
    recorded = tables.get(name, {})
    if options.names:
        recorded = {one: count for one, count in recorded.items() if one in counted}
    lines = compare(recorded, counted)
    print(f"{name}, instructions per operation\n\n{render(lines)}")
    if options.record:
        tables[name] = {**(tables.get(name, {}) if options.names else {}), **counted}
        RECORDED.write_text(json.dumps(tables, indent=2, ensure_ascii=False) + "\n")
        return 0
    failing = [line.name for line in lines if line.fails()]
    if failing:
        print(
            f"\n{len(failing)} of {len(lines)} failed. If it is meant, `make bench-gate"
            " ARGS=--record` writes the counts down for the commit that changes them."
        )
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
