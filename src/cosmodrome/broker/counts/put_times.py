"""How long sends took, from the append until the answer could leave.

Two histograms of a minute each, the one being filled and the one before, so the figures cover at
least one and at most two minutes, once the broker runs that long.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

WINDOW_SECONDS = 60.0
# Upper ends in ms. The first dozen are upstream's; the finer ones are for the percentiles.
SHOWN = (0, 10, 50, 100, 200, 500, 1000, 2000, 3000, 4000, 5000, 10_000)
SHOWN_NAMES = (
    "<=0ms",
    "0~10ms",
    "10~50ms",
    "50~100ms",
    "100~200ms",
    "200~500ms",
    "500ms~1s",
    "1~2s",
    "2~3s",
    "3~4s",
    "4~5s",
    "5~10s",
    "10s~",
)
EDGES = (*SHOWN[:1], *range(1, 10), *SHOWN[1:2], 15, 20, 30, 40, *SHOWN[2:3], 75, *SHOWN[3:])


class PutTimes:
    """`longest_ms` is the longest send since the start."""

    def __init__(self) -> None:
        self.longest_ms = 0
        self._counts = [0] * (len(EDGES) + 1)
        self._before = [0] * (len(EDGES) + 1)
        self._past = [0] * (len(EDGES) + 1)  # of the windows before those

    def add(self, seconds: float) -> None:
        # Compat: upstream counts whole milliseconds, so what takes less than one is <=0ms.
        self.add_ms(int(seconds * 1000))

    def add_ms(self, ms: int, count: int = 1) -> None:
        self._counts[bisect.bisect_left(EDGES, ms)] += count
        if ms > self.longest_ms:
            self.longest_ms = ms

    def turn(self) -> None:
        """Begin the next window."""
        self._past = [past + more for past, more in zip(self._past, self._before, strict=True)]
        self._before, self._counts = self._counts, [0] * (len(EDGES) + 1)

    def distribution(self) -> str:
        """Upstream's text: a count for each of its ranges."""
        counts = self._sum()
        ends = [*(bisect.bisect_left(EDGES, edge) + 1 for edge in SHOWN), len(counts)]
        parts = zip(SHOWN_NAMES, itertools.pairwise([0, *ends]), strict=True)
        return "".join(f"[{name}]:{sum(counts[first:end])} " for name, (first, end) in parts)

    def percentile_ms(self, share: float) -> float:
        """The end of the range below which this share of the sends lies."""
        counts = self._sum()
        rank = share * sum(counts)
        if not rank:
            return 0.0
        for edge, reached in zip(EDGES, itertools.accumulate(counts), strict=False):
            if reached >= rank:
                return float(min(edge, self.longest_ms))
        return float(self.longest_ms)

    def below(self, edges_ms: Sequence[int]) -> list[int]:
        """How many sends since the start took less than each of these, and how many there were.

        Whole milliseconds are counted; where EDGES is not that fine, those that took exactly so
        many are included.
        """
        reached = self._reached()
        ends = [edge - 1 if edge - 1 in EDGES else edge for edge in edges_ms]
        return [*(reached[EDGES.index(end)] for end in ends), reached[-1]]

    def longer_than(self, ms: int) -> int:
        """At least so many sends since the start took longer, as far as EDGES can tell."""
        reached = self._reached()
        return reached[-1] - reached[bisect.bisect_left(EDGES, ms)]

    def _reached(self) -> list[int]:
        counts = zip(self._past, self._sum(), strict=True)
        return list(itertools.accumulate(past + now for past, now in counts))

    def _sum(self) -> Sequence[int]:
        return [now + before for now, before in zip(self._counts, self._before, strict=True)]
