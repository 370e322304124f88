"""The offsets that the next messages of queues get, also when a master numbered them.

A slave's records are taken in the order of its master's log. Nearly all of them are plain and go on
with their queues: compiled code finds and checks them and moves the ends in one walk
(`plain_span`). The others are found by `copy.whole_spans`, and the ends follow (`follow`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from cosmodrome import speed
from cosmodrome.errors import StoreError
from cosmodrome.layout import (
    QUEUE_ENTRY_BYTES,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_TRANSACTION_MASK,
)
from cosmodrome.store.commit_log.copy import WHOLE_MS
from cosmodrome.store.commit_log.staging import Span, Undo

QueueKey = tuple[str, int]


class QueueEnds:
    def __init__(self, next_offset: Callable[[str, int], int]) -> None:
        self._next_offset = next_offset  # of a queue, as far as it was dispatched
        self._ends: dict[QueueKey, speed.QueueEnd] = {}
        self._known: dict[bytes, object] = {}  # the same, as compiled code finds them

    def find(self, topic: str, queue_id: int) -> speed.QueueEnd:
        """The end of a queue; it may be kept for as long as it is not negative."""
        found = self._ends.get((topic, queue_id))
        if found is None:
            found = speed.QueueEnd(topic, queue_id, self._next_offset(topic, queue_id))
            self._ends[found.key] = found
        return found

    def forget(self, topic: str) -> None:
        """The queues of this topic are gone: their offsets start again."""
        for key in [key for key in self._ends if key[0] == topic]:
            self._ends.pop(key).next = -1
        self._known.clear()

    def plain_span(self, undo: Undo, piece: memoryview, offset: int, stop: int) -> Span | None:
        """The records at the front of a piece of a master's log that go on with their queues."""
        runs, keys, count, last_ms, position = speed.gather_next(
            piece, offset, stop, WHOLE_MS, self._known, self.find, undo
        )
        if not count:
            return None
        return Span(offset, offset + position, last_ms, count, runs, keys, followed=True)

    def follow(self, span: Span) -> Callable[[], None]:
        """Bring the ends of queues behind records that a master numbered; returns what undoes it.

        They are only used once this broker takes messages itself.
        """
        assert span.runs is not None
        moved: list[tuple[speed.QueueEnd, int]] = []
        ends = [(run[0], run[1], run[2] + len(run[3]) // QUEUE_ENTRY_BYTES) for run in span.runs]
        ends += [
            (entry[2], entry[3], entry[4] + 1)
            for entry in span.delayed
            if entry[5] & SYS_TRANSACTION_MASK not in (SYS_PREPARED, SYS_ROLLBACK)
        ]
        for topic, queue_id, end in ends:
            try:
                queue_end = self.find(topic, queue_id)
            except StoreError:
                continue  # dispatch says why there is no such queue
            moved.append((queue_end, queue_end.next))
            queue_end.next = end
        return functools.partial(speed.put_back, moved)
