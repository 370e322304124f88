"""How transactions ended, by topic: how often, and how long after their half was stored."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

from cosmodrome.transport.http.exposition import Histogram

TOPICS_MAX = 10_000
# Upper ends in ms: 5 s, 1 min, 10 min, 1 h, 12 h, 24 h, as upstream has them.
EDGES_MS = (5_000, 60_000, 600_000, 3_600_000, 43_200_000, 86_400_000)
_EDGE_TEXTS = tuple(map(str, EDGES_MS))


class Ends:
    """The ends of the transactions of one topic."""

    __slots__ = ("_counts", "_ms", "committed", "rolled_back")

    def __init__(self) -> None:
        self.committed = self.rolled_back = 0
        self._counts = [0] * (len(EDGES_MS) + 1)
        self._ms = 0

    def add(self, *, commit: bool, took_ms: int) -> None:
        if commit:
            self.committed += 1
        else:
            self.rolled_back += 1
        self._counts[bisect.bisect_left(EDGES_MS, took_ms)] += 1
        self._ms += took_ms

    def times(self) -> Histogram:
        return Histogram(_EDGE_TEXTS, list(itertools.accumulate(self._counts)), self._ms)


class TransactionCounts:
    """Bounded: topics beyond the limit are not counted."""

    def __init__(self) -> None:
        self._topics: dict[str, Ends] = {}

    def add(self, topic: str, *, commit: bool, took_ms: int) -> None:
        ends = self._topics.get(topic)
        if ends is None:
            if len(self._topics) >= TOPICS_MAX:
                return
            ends = self._topics[topic] = Ends()
        ends.add(commit=commit, took_ms=max(0, took_ms))

    def forget_topic(self, topic: str) -> None:
        self._topics.pop(topic, None)

    def by_topic(self) -> Iterator[tuple[str, Ends]]:
        return iter(list(self._topics.items()))
