"""Follows the log: queue entries, index entries, then the announcement of what arrived.

The cursor only moves over whole records, and all of it happens in one turn of the loop, so
readers see either nothing or everything of a record. The queues' ends are the visible bound.

What was just written comes as spans, which the log has ready (`Log.spans`). Recovery walks through
the records themselves (`take_many`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import overload

from cosmodrome import speed
from cosmodrome.errors import StoreError
from cosmodrome.layout import (
    QUEUE_ENTRY,
    QUEUE_ENTRY_BYTES,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_TRANSACTION_MASK,
)
from cosmodrome.store.arrivals import Arrivals
from cosmodrome.store.commit_log.log import Log
from cosmodrome.store.index import Index
from cosmodrome.store.queue import Queue, Queues
from cosmodrome.store.removed import Removed
from cosmodrome.store.values import Arrival

SCHEDULE_TOPIC = speed.SCHEDULE_TOPIC
DELAY_UNKNOWN_MS = 1000  # Compat: what upstream adds for a level it does not know

_log = logging.getLogger(__name__)


class TagsCodes(Sequence[int]):
    """The tags codes of packed queue entries, unpacked when somebody asks: mostly nobody does."""

    __slots__ = ("_packed",)

    def __init__(self, packed: list[bytes]) -> None:
        self._packed = packed

    def __iter__(self) -> Iterator[int]:
        for entries in self._packed:
            for _, _, tags_code in QUEUE_ENTRY.iter_unpack(entries):
                yield tags_code

    def __len__(self) -> int:
        return sum(map(len, self._packed)) // QUEUE_ENTRY_BYTES

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


Arrived = dict[Queue, list[bytes]]  # packed entries


class Dispatch:
    def __init__(
        self,
        log: Log,
        queues: Queues,
        index: Index | None,
        arrivals: Arrivals,
        delay_ms: Callable[[int], int] | None,
        removed: Removed,
    ) -> None:
        self.cursor = 0
        self.last_ms = 0  # store time of the last record dispatched
        self._log = log
        self._queues = queues
        self._index = index
        self._arrivals = arrivals
        self._delay_ms = delay_ms
        self._removed = removed

    def advance(self, end: int) -> None:
        """Dispatch what was written up to `end`."""
        arrived: Arrived = {}
        spans = self._log.spans
        try:
            while spans and spans[0].end <= end:
                span = spans[0]
                assert span.runs is not None
                self._put(span.runs, span.keys, span.delayed, span.start, arrived)
                # Only now: what failed half-way is tried again, and what is there is left out.
                spans.popleft()
                self.cursor = span.end
                if span.count:
                    self.last_ms = span.last_ms
        finally:
            # What was dispatched before a failure is readable, so it is announced.
            for queue, packed in arrived.items():
                codes = TagsCodes(packed)
                self._announce(Arrival(queue.topic, queue.queue_id, queue.max_offset, codes))

    def take_many(
        self,
        view: memoryview,
        base: int,
        start: int,
        stop: int,
        limit: int,
        *,
        check_crc: bool,
        whole_ms: int = 0,
    ) -> tuple[int, int]:
        """Put the records of [start, stop) into queues and index, at most `limit` of them.

        Returns the position behind the last good one, and why it is the last (WALK_*).
        """
        runs, keys, delayed, count, last_ms, position, why = speed.gather(
            view, base, start, stop, check_crc, limit, whole_ms
        )
        self._put(runs, keys, delayed, base + start, None)
        if count:
            self.last_ms = last_ms
            self.cursor = base + position
        return position, why

    # --- inside ------------------------------------------------------------------------------
    def _put(
        self,
        runs: Collection[speed.Run],
        keys: bytes,
        delayed: Sequence[speed.Entry],
        start: int,
        arrived: Arrived | None,
    ) -> None:
        """Put records from the log offset `start` on into queues and index."""
        self._put_runs(runs, start, arrived)
        for entry in delayed:
            self._put_delayed(entry, arrived)
        if self._index is not None:
            self._index.put_many(keys)

    def _put_delayed(self, entry: speed.Entry, arrived: Arrived | None) -> None:
        """Put a message of the schedule topic: the tags code of its entry is when it is due."""
        log_offset, size, topic, queue_id, queue_offset = entry[:5]
        sys_flag, store_ms, tags_code, delay_level, _ = entry[5:]
        kind = sys_flag & SYS_TRANSACTION_MASK
        if kind in (SYS_PREPARED, SYS_ROLLBACK) or log_offset < self._removed.before.get(topic, 0):
            return
        if delay_level > 0:
            tags_code = store_ms + self._delay_of(delay_level)
        try:
            queue = self._queues.put(topic, queue_id, queue_offset, log_offset, size, tags_code)
        except StoreError as error:  # staging refuses such names; someone else's log may not
            _log.error("record_without_queue log_offset=%d error=%s", log_offset, error)
            return
        if arrived is not None:
            packed = QUEUE_ENTRY.pack(log_offset, size, tags_code)
            arrived.setdefault(queue, []).append(packed)

    def _put_runs(self, runs: Collection[speed.Run], start: int, arrived: Arrived | None) -> None:
        """Put the runs of records from the log offset `start` on."""
        if start >= self._removed.end:
            done, seen = self._queues.put_runs(runs, self._arrivals)
            if arrived is not None:
                for queue, entries in seen:
                    arrived.setdefault(queue, []).append(entries)
            if done == len(runs):
                return
            runs = list(runs)[done:]
        for topic, queue_id, queue_offset, entries in runs:
            try:
                gone = self._gone_bytes(topic, entries)
                if gone:
                    entries = entries[gone:]
                    queue_offset += gone // QUEUE_ENTRY_BYTES
                if entries:
                    queue = self._queues.put_run(topic, queue_id, queue_offset, entries)
                    if arrived is not None and self._arrivals.wanted(topic, queue_id):
                        arrived.setdefault(queue, []).append(entries)
            except StoreError as error:
                log_offset = QUEUE_ENTRY.unpack_from(entries)[0]
                _log.error("records_without_queue log_offset=%d error=%s", log_offset, error)

    def _gone_bytes(self, topic: str, entries: bytes) -> int:
        """How much of these entries belongs to a former life of the topic."""
        before = self._removed.before.get(topic, 0)
        at = 0
        while at < len(entries) and QUEUE_ENTRY.unpack_from(entries, at)[0] < before:
            at += QUEUE_ENTRY_BYTES
        return at

    def _announce(self, arrival: Arrival) -> None:
        try:
            self._arrivals.fire(arrival)
        except Exception:
            # A listener's fault must not stop the store.
            _log.exception("arrival_listener_failed topic=%s", arrival.topic)

    def _delay_of(self, level: int) -> int:
        if self._delay_ms is None:
            return DELAY_UNKNOWN_MS
        try:
            delay = self._delay_ms(level)
        except LookupError:
            return DELAY_UNKNOWN_MS
        return delay if delay > 0 else DELAY_UNKNOWN_MS
