"""How much memory the decompressed bodies of one consumer may take.

A compressed body says nothing reliable about what it grows to: 127 KB may become gigabytes. So
everything that was decompressed for a consumer and is not done yet is counted here. Invariant:
`held` stays within `bytes_max`, unless it is what a single pull brought.
"""

from __future__ import annotations

from collections.abc import Callable


class Inflated:
    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self._waiting: dict[Callable[[], None], None] = {}  # in the order in which they came

    @property
    def full(self) -> bool:
        return self.held >= self.bytes_max

    def room(self, wanted: int) -> int:
        """How much of `wanted` may be decompressed now. Whoever comes while nothing is held gets
        all of it: a body that is larger than the whole budget has to arrive too."""
        return wanted if not self.held else max(0, min(wanted, self.bytes_max - self.held))

    def take(self, count: int) -> None:
        self.held += count

    def give_back(self, count: int) -> None:
        self.held -= count
        # Not for every body: who is woken pulls, and finds no room if the next one is large.
        if self._waiting and self.held <= self.bytes_max // 2:
            waiting, self._waiting = self._waiting, {}
            for wake in waiting:
                wake()

    def wait(self, wake: Callable[[], None]) -> None:
        """Have `wake` called once, when half of the budget is free again."""
        self._waiting[wake] = None
