"""From bounds to ranges: which offsets a batch reads. Pure; nothing here asks a broker.

Invariants: ranges are never empty, never overlap, and lie within what was asked; together they
cover it. A limit is never exceeded, and whatever has messages makes progress of at least one row.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Mapping

from cosmodrome.errors import CosmodromeError
from cosmodrome.spark.read.offsets import EARLIEST, LATEST, Offsets, describe, order
from cosmodrome.spark.read.options import EARLIEST_WORD, LATEST_WORD, OffsetsOption
from cosmodrome.wire.bodies import MessageQueue

Bounds = Mapping[MessageQueue, tuple[int, int]]
_LOSSES_SHOWN = 5


class DataLoss(CosmodromeError):
    """Messages that were to be read are not there any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Offsets [start, end) of one queue and where its broker is, master first."""

    queue: MessageQueue
    start: int
    end: int
    addresses: tuple[str, ...]

    @property
    def rows(self) -> int:
        return self.end - self.start


def resolve(option: OffsetsOption, bounds: Bounds, *, unlisted: str) -> Offsets:
    """Real offsets for all queues of `bounds`; queues the map leaves out are at `unlisted`.

    Queues that only the map knows are kept: `clamp` says what became of them.
    """
    if isinstance(option, str):
        return {queue: _at(option, bound) for queue, bound in bounds.items()}
    words = {EARLIEST: EARLIEST_WORD, LATEST: LATEST_WORD}
    resolved = {queue: _at(unlisted, bound) for queue, bound in bounds.items()}
    for queue, offset in option.items():
        if offset not in words:
            resolved[queue] = offset
        elif queue in bounds:
            resolved[queue] = _at(words[offset], bounds[queue])
    return resolved


def clamp(asked: Offsets, bounds: Bounds) -> tuple[Offsets, list[str]]:
    """Moves every offset into its queue's bounds; says in words what was lost by that."""
    clamped: Offsets = {}
    losses: list[str] = []
    for queue in sorted(asked, key=order):
        offset = asked[queue]
        if queue not in bounds:
            losses.append(f"{describe(queue)}: the queue is gone, wanted offset {offset}")
            continue
        low, high = bounds[queue]
        if offset < low:
            losses.append(
                f"{describe(queue)}: wanted offset {offset}, the first there is {low} (expired)"
            )
        elif offset > high:
            losses.append(
                f"{describe(queue)}: wanted offset {offset}, the queue ends at {high}"
                " (made anew, or its broker lost messages)"
            )
        clamped[queue] = min(max(offset, low), high)
    return clamped, losses


def loss_text(losses: list[str]) -> str:
    """One sentence for an error or a warning."""
    shown = "; ".join(losses[:_LOSSES_SHOWN])
    more = len(losses) - _LOSSES_SHOWN
    return shown + (f"; and {more} more" if more > 0 else "")


def within_rows(start: Offsets, end: Offsets, rows_max: int) -> Offsets:
    """An end at most `rows_max` rows after `start`, shared in proportion to what queues have.

    Largest remainders get what flooring leaves, so the sum is exact and, since a long backlog
    has the larger remainder, no queue waits for ever.
    """
    sizes = _sizes(start, end)
    total = sum(sizes.values())
    if total <= rows_max:
        return dict(end)
    shares = {queue: rows_max * size // total for queue, size in sizes.items()}
    left = rows_max - sum(shares.values())
    by_remainder = sorted(
        sizes, key=lambda queue: (-(rows_max * sizes[queue] % total), -sizes[queue], order(queue))
    )
    for queue in by_remainder[:left]:
        shares[queue] += 1
    return _moved(start, end, shares)


def within_bytes(
    start: Offsets, end: Offsets, averages: Mapping[MessageQueue, float], bytes_max: int
) -> Offsets:
    """An end about `bytes_max` after `start`, by the average size of each queue's messages."""
    sizes = _sizes(start, end)
    weight = sum(size * max(averages.get(queue, 1.0), 1.0) for queue, size in sizes.items())
    if weight <= bytes_max:
        return dict(end)
    shares = {queue: math.floor(size * bytes_max / weight) for queue, size in sizes.items()}
    if not any(shares.values()):
        # One message may be larger than the limit: it must pass all the same.
        shares[max(sizes, key=lambda queue: (sizes[queue], order(queue)))] = 1
    return _moved(start, end, shares)


def cut(
    start: Offsets,
    end: Offsets,
    addresses: Mapping[MessageQueue, tuple[str, ...]],
    min_partitions: int | None = None,
) -> list[Range]:
    """One range per queue that has rows; long ones in pieces until there are `min_partitions`."""
    whole = [
        Range(queue, start[queue], end[queue], addresses.get(queue, ()))
        for queue in sorted(end, key=order)
        if queue in start and end[queue] > start[queue]
    ]
    missing = (min_partitions or 0) - len(whole)
    if missing <= 0:
        return whole
    parts = [1] * len(whole)
    heap = [(-float(span.rows), index) for index, span in enumerate(whole)]
    heapq.heapify(heap)
    for _ in range(missing):
        if not heap or heap[0][0] >= -1:
            break  # nothing but single rows is left
        index = heap[0][1]
        parts[index] += 1
        heapq.heapreplace(heap, (-(whole[index].rows / parts[index]), index))
    return [
        piece for span, count in zip(whole, parts, strict=True) for piece in _pieces(span, count)
    ]


def _at(word: str, bound: tuple[int, int]) -> int:
    return bound[0] if word == EARLIEST_WORD else bound[1]


def _sizes(start: Offsets, end: Offsets) -> dict[MessageQueue, int]:
    return {queue: end[queue] - start[queue] for queue in end if end[queue] > start[queue]}


def _moved(start: Offsets, end: Offsets, shares: Mapping[MessageQueue, int]) -> Offsets:
    return {queue: start[queue] + shares[queue] if queue in shares else end[queue] for queue in end}


def _pieces(span: Range, count: int) -> list[Range]:
    edges = [span.start + span.rows * index // count for index in range(count + 1)]
    return [
        dataclasses.replace(span, start=low, end=high)
        for low, high in itertools.pairwise(edges)
        if high > low
    ]
