"""Offsets by time, made exact: the first message of a queue stored at or after a moment.

Brokers answer this differently. Upstream's 4.x picks a queue file by its modification time and
in it the message that is nearest, or any of several with the same time; so what a broker says is
taken as a guess, and the messages beside it decide. A guess that is right costs one look at it
and its neighbour, one that is wrong a search: outwards in growing steps, then by halves. The
times of a queue are taken as nondecreasing, as brokers do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

Q = TypeVar("Q")

ROUNDS_MAX = 130  # 64 to get out, 64 to get in


@dataclasses.dataclass(slots=True)
class _Search:
    """The offset sought is in [low, high]; everything below `low` is older, `high` is not."""

    low: int
    high: int
    at: int
    step: int = 1

    @property
    def done(self) -> bool:
        return self.low >= self.high


class Times(Generic[Q]):
    """`look` gives the store times of messages by queue and offset; None for one it cannot see."""

    def __init__(
        self, look: Callable[[list[tuple[Q, int]]], Mapping[tuple[Q, int], int | None]]
    ) -> None:
        self._look = look

    def first(
        self, time_ms: int, bounds: Mapping[Q, tuple[int, int]], guesses: Mapping[Q, int]
    ) -> dict[Q, int]:
        """The first offset of each queue stored at or after `time_ms`, or the queue's end."""
        searches = {
            queue: _Search(low, high, min(max(guesses[queue], low), high))
            for queue, (low, high) in bounds.items()
        }
        for _ in range(ROUNDS_MAX):
            open_ones = {queue: search for queue, search in searches.items() if not search.done}
            if not open_ones:
                break
            positions = [
                (queue, offset)
                for queue, search in open_ones.items()
                for offset in (search.at - 1, search.at)
                if search.low <= offset < search.high
            ]
            times = self._look(positions)
            for queue, search in open_ones.items():
                _narrow(search, time_ms, times, queue)
        return {queue: search.high for queue, search in searches.items()}


def _narrow(
    search: _Search, time_ms: int, times: Mapping[tuple[Q, int], int | None], queue: Q
) -> None:
    at = search.at
    for offset in (at - 1, at):
        if not search.low <= offset < search.high:
            continue
        found = times.get((queue, offset))
        if found is None:
            # Removed meanwhile, or a hole: what the broker said is as good as anything.
            search.low = search.high = at
            return
        if found < time_ms:
            search.low = offset + 1
        else:
            search.high = offset
            break
    if search.done:
        return
    span = search.high - search.low
    if search.step * 2 >= span:
        search.at = search.low + span // 2  # its neighbour below is looked at too
        return
    search.at = search.low + search.step if search.low > at else search.high - search.step
    search.step *= 2
