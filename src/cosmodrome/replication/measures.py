"""What is measured about a link over time: rates, and how old the bytes are that a slave lacks."""

from __future__ import annotations

from collections import deque

RATE_SECONDS = 5
WRITE_TIMES_MAX = 1024
WRITE_TIMES_APART_S = 0.1
COARSENESS = 1 / 32


class Rate:
    """Bytes per second over the last seconds."""

    def __init__(self) -> None:
        self.total = 0
        self._seconds: deque[tuple[int, int]] = deque(maxlen=RATE_SECONDS + 1)  # second, total then

    def add(self, size: int, now: float) -> None:
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, self.total))
        self.total += size

    def per_second(self, now: float) -> float:
        oldest = now - RATE_SECONDS
        for second, total in self._seconds:
            if second >= oldest:
                return (self.total - total) / max(1.0, now - second)
        return 0.0


class WriteTimes:
    """When the log reached which end; the longer ago, the more coarsely."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, float]] = []  # end, when it was first seen

    def add(self, end: int, now: float) -> None:
        samples = self._samples
        if samples and samples[-1][0] >= end:
            return
        if samples and now - samples[-1][1] < WRITE_TIMES_APART_S:
            samples[-1] = (end, samples[-1][1])
            return
        samples.append((end, now))
        if len(samples) > WRITE_TIMES_MAX:
            self._thin(now)

    def _thin(self, now: float) -> None:
        """Join neighbours that are close, seen from now: the later end with the earlier time.

        So a lag is rather shown too long than too short, by a part of it that is always the same.
        Years fit into fewer samples than are kept.
        """
        samples = self._samples
        thinned = [samples[0]]
        for (end, time), (_, after) in zip(samples[1:], [*samples[2:], (0, now)], strict=True):
            first = thinned[-1][1]
            if after - first <= (now - after) * COARSENESS:
                thinned[-1] = (end, first)
            else:
                thinned.append((end, time))
        self._samples = thinned

    def age(self, end: int, now: float) -> float:
        """For how long the first byte behind `end` is there; 0 when there is none."""
        samples = self._samples
        low, high = 0, len(samples)
        while low < high:
            middle = (low + high) // 2
            if samples[middle][0] > end:
                high = middle
            else:
                low = middle + 1
        return max(0.0, now - samples[low][1]) if low < len(samples) else 0.0
