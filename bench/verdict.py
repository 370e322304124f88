"""What measured samples say: medians, ratios, bars, tables, the page and the trend. No I/O.

A ratio is "so many times better than the peer", whichever direction is better, so that every
bar against a peer reads "at least n ×". Bars that stand alone are limits of our own figure.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Sample = Mapping[str, object]

PAGE_BEGIN, PAGE_END = "<!-- measured -->\n", "<!-- end -->"


def number(sample: Sample, key: str) -> float:
    value = sample.get(key, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def values(samples: Iterable[Sample], key: str) -> list[float]:
    return [number(sample, key) for sample in samples]


def median(of: Sequence[float]) -> float:
    return statistics.median(of) if of else 0.0


def errors(*groups: Iterable[Sample]) -> int:
    return sum(int(number(sample, "errors")) for group in groups for sample in group)


@dataclass(frozen=True)
class Row:
    """One line of a table; `ours` and `peer` have one figure per repetition."""

    name: str
    unit: str
    ours: Sequence[float]
    peer: Sequence[float] = ()
    times: float | None = None  # the bar: so many times better than the peer
    limit: float | None = None  # the bar: ours alone is not worse than this
    more: bool = False  # whether more is better
    errors: int = 0
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many times better ours is; None without both figures."""
        ours, peer = median(self.ours), median(self.peer)
        if not ours or not peer:
            return None
        return ours / peer if self.more else peer / ours

    @property
    def passed(self) -> bool | None:
        """Whether every bar is met; None when there is none."""
        if self.times is None and self.limit is None:
            return None
        if self.errors or not self.ours:
            return False
        if self.times is not None and (self.ratio is None or self.ratio < self.times):
            return False
        if self.limit is not None:
            ours = median(self.ours)
            return ours >= self.limit if self.more else ours <= self.limit
        return True

    @property
    def bar(self) -> str:
        bars = [] if self.times is None else [f"≥ {self.times:g} ×"]
        if self.limit is not None:
            bars.append(f"{'≥' if self.more else '≤'} {self.limit:,g}")
        return ", ".join(bars)

    @property
    def verdict(self) -> str:
        word = {None: "", True: "pass", False: "**fail**"}[self.passed]
        return f"{word} ({self.errors} errors)".strip() if self.errors else word


def figure(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def spread(of: Sequence[float]) -> str:
    """The median, and how far repetitions lay apart."""
    if not of:
        return ""
    middle = figure(median(of))
    if len(of) < 2:
        return middle
    return f"{middle} ({figure(min(of))}–{figure(max(of))})"


def table(rows: Sequence[Row], peer: str = "Java") -> str:
    lines = [f"| row | unit | ours | {peer} | ratio | bar | verdict | |", "|---|" + "---|" * 7]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f} ×"
        lines.append(
            f"| {row.name} | {row.unit} | {spread(row.ours)} | {spread(row.peer)} | {ratio}"
            f" | {row.bar} | {row.verdict} | {row.note} |"
        )
    return "\n".join(lines)


def put_sections(page: str, sections: Mapping[str, str], order: Sequence[str]) -> str:
    """The page with these sections new; others that it has stay, all in this order."""
    before, rest = page.split(PAGE_BEGIN, 1)
    old, after = rest.split(PAGE_END, 1)
    found = re.findall(r"<!-- rows (\w+) -->\n(.*?)\n<!-- end rows -->", old, re.DOTALL)
    merged = {**dict(found), **sections}
    text = "\n\n".join(
        f"<!-- rows {name} -->\n{merged[name]}\n<!-- end rows -->"
        for name in order
        if name in merged
    )
    return f"{before}{PAGE_BEGIN}{text}\n{PAGE_END}{after}"


def trend_line(date: str, commit: str, rows: Iterable[Row]) -> str:
    """One line of the trend file: medians of ours and of the peer by row."""
    figures = {
        f"{row.name}, {row.unit}": [round(median(row.ours), 3), round(median(row.peer), 3)]
        for row in rows
    }
    return json.dumps({"date": date, "commit": commit, "rows": figures}, ensure_ascii=False)


def changes(trend: str, rows: Sequence[Row], share: float = 0.15) -> list[str]:
    """Ratios that moved by more than `share` since a line of the trend last had them."""
    moved = []
    lines = [json.loads(line) for line in trend.splitlines() if line.strip()]
    for row in rows:
        key = f"{row.name}, {row.unit}"
        last = next((line for line in reversed(lines) if key in line["rows"]), None)
        if last is None or row.ratio is None or not all(last["rows"][key]):
            continue
        ours, peer = last["rows"][key]
        was = ours / peer if row.more else peer / ours
        if abs(row.ratio / was - 1) > share:
            moved.append(f"{key}: {was:.2f} × at {last['commit']}, now {row.ratio:.2f} ×")
    return moved
