"""Follows the log: queue entries, index entries, then the announcement of what arrived.

The cursor only moves over whole records, and all of it happens in one turn of the loop, so
readers see either nothing or everything of a record. The queues' ends are the visible bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import overload

from cosmodrome import speed
from cosmodrome.errors import StoreCorrupt, StoreError
from cosmodrome.layout import (
    QUEUE_ENTRY,
    QUEUE_ENTRY_BYTES,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_TRANSACTION_MASK,
)
from cosmodrome.store.arrivals import Arrivals
from cosmodrome.store.index import Index
from cosmodrome.store.log import Log
from cosmodrome.store.queue import Queue, Queues
from cosmodrome.store.removed import Removed
from cosmodrome.store.values import Arrival

SCHEDULE_TOPIC = speed.SCHEDULE_TOPIC
DELAY_UNKNOWN_MS = 1000  # Compat: what upstream adds for a level it does not know
RECORDS_PER_STEP = 1024

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
        """Dispatch [cursor, end), which holds whole, good records only."""
        arrived: Arrived = {}
        try:
            while self.cursor < end:
                if not (self._log.told and self._take_told(end, arrived)):
                    self._step(end, arrived)
        finally:
            if self._log.recent.size_bytes:
                self._log.recent.let_go(self.cursor)
            # What was dispatched before a failure is readable, so it is announced.
            for queue, packed in arrived.items():
                codes = TagsCodes(packed)
                self._announce(Arrival(queue.topic, queue.queue_id, queue.max_offset, codes))

    def take(self, entry: speed.Entry, *, with_keys: bool = True) -> tuple[Queue | None, int]:
        """Put one record into queue and index; its queue (None without one) and tags code."""
        log_offset, size, topic, queue_id, queue_offset = entry[:5]
        sys_flag, store_ms, tags_code, delay_level, keys = entry[5:]
        kind = sys_flag & SYS_TRANSACTION_MASK
        queue: Queue | None = None
        gone = log_offset < self._removed.before.get(topic, 0)
        if kind not in (SYS_PREPARED, SYS_ROLLBACK) and not gone:
            if delay_level > 0 and topic == SCHEDULE_TOPIC:
                tags_code = store_ms + self._delay_of(delay_level)
            try:
                queue = self._queues.put(topic, queue_id, queue_offset, log_offset, size, tags_code)
            except StoreError as error:  # appends refuse such names; someone else's log may not
                _log.error("record_without_queue log_offset=%d error=%s", log_offset, error)
        if with_keys and keys and self._index is not None and kind != SYS_ROLLBACK:
            self._index.put(topic, keys, log_offset, store_ms)
        self.last_ms = store_ms
        self.cursor = log_offset + size
        return queue, tags_code

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
        arrived: Arrived | None = None,
    ) -> tuple[int, int]:
        """Put the records of [start, stop) into queues and index, at most `limit` of them.

        Returns the position behind the last good one, and why it is the last (WALK_*).
        """
        runs, keys, delayed, count, last_ms, position, why = speed.gather(
            view, base, start, stop, check_crc, limit, whole_ms
        )
        self._put_runs(runs, base + start, arrived)
        for entry in delayed:
            taken, tags_code = self.take(entry, with_keys=False)
            if taken is not None and arrived is not None:
                packed = QUEUE_ENTRY.pack(entry[0], entry[1], tags_code)
                arrived.setdefault(taken, []).append(packed)
        if self._index is not None:
            self._index.put_many(keys)
        if count:
            self.last_ms = last_ms
            self.cursor = base + position
        return position, why

    # --- inside ------------------------------------------------------------------------------
    def _take_told(self, end: int, arrived: Arrived) -> bool:
        """Put what the log was told about the records at the cursor, if it was."""
        told = self._log.told
        while told and told[0].start < self.cursor:
            told.popleft()
        if not told or told[0].start != self.cursor or told[0].end > end:
            return False
        start, self.cursor, self.last_ms, runs, keys = told.popleft()
        self._put_runs(runs, start, arrived)
        if self._index is not None:
            self._index.put_many(keys)
        return True

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

    def _step(self, end: int, arrived: Arrived) -> None:
        cursor = self.cursor
        told = self._log.told
        stop = min(end, told[0].start) if told and told[0].start > cursor else end
        recent = self._log.recent.find(cursor)
        if recent is None:
            base = self._log.base_of(cursor)
            data = self._log.view(base)
        else:
            data, base = recent
        start = cursor - base
        position, why = self.take_many(
            *(data, base, start, min(stop - base, len(data)), RECORDS_PER_STEP),
            check_crc=False,
            arrived=arrived,
        )
        if why == speed.WALK_BLANK:
            self.cursor = self._log.base_of(cursor) + self._log.segment_bytes
        elif why != speed.WALK_MORE or position == start:
            raise StoreCorrupt(
                f"no record at offset {self.cursor} of the commit log (file"
                f" {self._log.path_of(self._log.base_of(cursor))}) although it was written; the"
                " disk or its memory is damaged: check it, then restart to recover"
            )

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
