"""The part of the law about what grows with every message: the ends and the tails of queues.

A `QueueEnd` has the offset that the next message of a queue gets, a `Tail` the entries that the
queue has in memory. Both are small objects that stay for as long as their queue does, so that
compiled code can keep them instead of looking queues up. `spread` adds entries to tails.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any, Protocol

from cosmodrome.layout import QUEUE_ENTRY

QueueKey = tuple[str, int]

# topic, queue id, offset of the first entry, packed entries
Run = tuple[str, int, int, bytes]


class QueueEnd:
    """The offset that the next message of a queue gets."""

    __slots__ = ("key", "next")

    def __init__(self, topic: str, queue_id: int, following: int) -> None:
        self.key = (topic, queue_id)
        self.next = following  # negative once the queue is gone


def put_back(moved: Sequence[tuple[QueueEnd, int]]) -> None:
    """Take back moves of queue ends, the last one first; a queue that is gone stays so."""
    for end, before in reversed(moved):
        if end.next >= 0:
            end.next = before


class Tail:
    """The newest entries of a queue, which are in memory only."""

    __slots__ = ("at", "data", "dirty", "log_end", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner = owner  # the queue; None once it is gone
        self.data = bytearray()
        self.at = 0  # the position of its first byte
        self.log_end = 0  # end of the record that the last entry names
        self.dirty = False  # whether whoever writes entries to files knows of it

    @property
    def end(self) -> int:
        """The position behind the last entry."""
        return self.at + len(self.data)


class Growing(Protocol):
    """What `spread` needs of a queue."""

    @property
    def growth(self) -> Tail: ...


def spread(
    runs: Collection[Run],
    queues: Mapping[QueueKey, Growing],
    dirty: set[Any],
    topics: Container[str],
    watched: Sequence[Container[QueueKey]],
) -> tuple[int, int, list[tuple[Any, bytes]]]:
    """Add runs of packed entries to the tails of their queues, which become `dirty`.

    Stops before a run that needs a closer look: its queue is not there, or ends elsewhere, or has
    its first record already. Returns how many runs were added, their bytes, and queue and
    entries of those somebody waits for: their topic or their queue is among the last arguments.
    """
    done = size = 0
    seen: list[tuple[Any, bytes]] = []
    for topic, queue_id, queue_offset, entries in runs:
        key = (topic, queue_id)
        queue = queues.get(key)
        if queue is None:
            break
        tail = queue.growth
        log_offset, record_bytes, _ = QUEUE_ENTRY.unpack_from(entries)
        if tail.at + len(tail.data) != queue_offset * QUEUE_ENTRY.size:
            break
        if log_offset + record_bytes <= tail.log_end:
            break
        tail.data += entries
        log_offset, record_bytes, _ = QUEUE_ENTRY.unpack_from(
            entries, len(entries) - QUEUE_ENTRY.size
        )
        tail.log_end = log_offset + record_bytes
        if not tail.dirty:
            tail.dirty = True
            dirty.add(queue)
        if topic in topics or any(key in some for some in watched):
            seen.append((queue, entries))
        size += len(entries)
        done += 1
    return done, size, seen
