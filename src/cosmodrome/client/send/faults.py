"""Which brokers answer slowly or not at all, and for how long to leave them alone.

Off unless a producer asks for it. The numbers are upstream's: a latency costs a pause, a failure
counts as the longest latency.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Sequence

from cosmodrome.client.values import MessageQueue

LATENCY_MS = (50, 100, 550, 1_000, 2_000, 3_000, 15_000)
AVOID_MS = (0, 0, 30_000, 60_000, 120_000, 180_000, 600_000)
FAILED_MS = 30_000
BROKERS_MAX = 10_000  # the table is emptied above this


def avoid_ms(latency_ms: float) -> int:
    """How long to avoid a broker that took this long to answer."""
    step = bisect.bisect_right(LATENCY_MS, latency_ms)
    return AVOID_MS[step - 1] if step else 0


class Faults:
    """Times are the event loop's, in seconds."""

    def __init__(self, chance: random.Random) -> None:
        self._brokers: dict[str, tuple[float, float]] = {}  # name → free again at, latency ms
        self._turn = chance.getrandbits(16)

    def answered(self, broker_name: str, latency_ms: float, now: float) -> None:
        if len(self._brokers) >= BROKERS_MAX:
            self._brokers.clear()
        self._brokers[broker_name] = (now + avoid_ms(latency_ms) / 1000, latency_ms)

    def failed(self, broker_name: str, now: float) -> None:
        self.answered(broker_name, FAILED_MS, now)

    def is_free(self, broker_name: str, now: float) -> bool:
        entry = self._brokers.get(broker_name)
        return entry is None or now >= entry[0]

    def least_bad(self, queues: Sequence[MessageQueue], now: float) -> MessageQueue:
        """A queue of the better half of brokers, when all of them are avoided."""
        names = sorted(
            {queue.broker_name for queue in queues},
            key=lambda name: (not self.is_free(name, now), *self._badness(name), name),
        )
        self._turn += 1
        name = names[self._turn % max(1, len(names) // 2)]
        own = [queue for queue in queues if queue.broker_name == name]
        return own[self._turn % len(own)]

    def _badness(self, broker_name: str) -> tuple[float, float]:
        free_at, latency_ms = self._brokers.get(broker_name, (0.0, 0.0))
        return latency_ms, free_at
