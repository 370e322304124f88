"""Follows the log: queue entries, index entries, then the announcement of what arrived.

The cursor only moves over whole records, and all of it happens in one turn of the loop, so
readers see either nothing or everything of a record. The queues' ends are the visible bound.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cosmodrome import speed
from cosmodrome.env.signal import Signal
from cosmodrome.errors import StoreCorrupt, StoreError
from cosmodrome.layout import (
    QUEUE_ENTRY,
    QUEUE_ENTRY_BYTES,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_TRANSACTION_MASK,
)
from cosmodrome.store.index import Index
from cosmodrome.store.log import Log
from cosmodrome.store.queue import Queue, Queues
from cosmodrome.store.removed import Removed
from cosmodrome.store.values import Arrival

SCHEDULE_TOPIC = speed.SCHEDULE_TOPIC
DELAY_UNKNOWN_MS = 1000  # Compat: what upstream adds for a level it does not know
RECORDS_PER_WALK = 1024

_log = logging.getLogger(__name__)


class Dispatch:
    def __init__(
        self,
        log: Log,
        queues: Queues,
        index: Index | None,
        arrivals: Signal[Arrival],
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
        arrived: dict[Queue, list[int]] = {}
        try:
            while self.cursor < end:
                self._step(end, arrived)
        finally:
            # What was dispatched before a failure is readable, so it is announced.
            for queue, tags_codes in arrived.items():
                self._announce(Arrival(queue.topic, queue.queue_id, queue.max_offset, tags_codes))

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
        limit: int,
        *,
        check_crc: bool,
        whole_ms: int,
    ) -> tuple[int, int]:
        """Put the records from `start` on into queues and index, many at once, for recovery.

        Returns the position behind the last good one, and why it is the last (WALK_*).
        """
        runs, keys, delayed, count, last_ms, position, why = speed.gather(
            view, base, start, len(view), check_crc, limit, whole_ms
        )
        for topic, queue_id, queue_offset, entries in runs:
            try:
                gone = self._gone_bytes(topic, entries)
                if gone < len(entries):
                    first = queue_offset + gone // QUEUE_ENTRY_BYTES
                    self._queues.put_run(topic, queue_id, first, entries[gone:])
            except StoreError as error:
                log_offset = QUEUE_ENTRY.unpack_from(entries)[0]
                _log.error("records_without_queue log_offset=%d error=%s", log_offset, error)
        for entry in delayed:
            self.take(entry, with_keys=False)
        if self._index is not None:
            self._index.put_many(keys)
        if count:
            self.last_ms = last_ms
            self.cursor = base + position
        return position, why

    # --- inside ------------------------------------------------------------------------------
    def _step(self, end: int, arrived: dict[Queue, list[int]]) -> None:
        base = self._log.base_of(self.cursor)
        stop = min(end - base, self._log.segment_bytes)
        entries, _, why = speed.walk(
            self._log.view(base), base, self.cursor - base, stop, False, RECORDS_PER_WALK
        )
        for entry in entries:
            queue, tags_code = self.take(entry)
            if queue is not None:
                arrived.setdefault(queue, []).append(tags_code)
        if why == speed.WALK_BLANK:
            self.cursor = base + self._log.segment_bytes
        elif why != speed.WALK_MORE or not entries:
            raise StoreCorrupt(
                f"no record at offset {self.cursor} of the commit log (file"
                f" {self._log.path_of(base)}) although it was written; the disk or its memory"
                " is damaged: check it, then restart to recover"
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
