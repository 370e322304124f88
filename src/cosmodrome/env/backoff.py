"""How long to pause after a failure, so that whoever failed is not asked too often."""

from __future__ import annotations

from random import Random


class Backoff:
    """Pauses that double from `first_s` to `longest_s`; a success starts them again.

    With `random` each pause is a random part, at least half, of its full length, so that many
    callers that failed together do not come back together.
    """

    def __init__(self, first_s: float, longest_s: float, random: Random | None = None) -> None:
        if not 0 < first_s <= longest_s:
            raise ValueError(
                f"first pause {first_s} s, longest {longest_s} s: use 0 < first <= longest"
            )
        self.failures = 0  # since the last success
        self._first_s = first_s
        self._longest_s = longest_s
        self._random = random

    def next_s(self) -> float:
        """Count one more failure; how long to pause because of it."""
        doublings = min(self.failures, 64)  # beyond that the pause cannot grow any more
        self.failures += 1
        pause_s = min(self._longest_s, self._first_s * 2.0**doublings)
        if self._random is None:
            return pause_s
        return self._random.uniform(pause_s / 2, pause_s)

    def reset(self) -> None:
        """It worked: the next failure is a first one again."""
        self.failures = 0
