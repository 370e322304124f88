"""Reading messages: by queue and offset, by time, by key, by log offset.

Everything here looks only below the durable end and never changes anything.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping

from cosmodrome import speed
from cosmodrome.env.options import StoreOptions
from cosmodrome.layout import (
    BLANK_BYTES,
    HOST_V4_BYTES,
    HOST_V6_BYTES,
    MAGIC_RECORD,
    MAGIC_RECORD_V2,
    QUEUE_ENTRY,
    QUEUE_ENTRY_BYTES,
    QUEUE_FILLER_SIZE,
    RECORD_BORN_HOST_AT,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
    RECORD_SYS_FLAG_AT,
    SYS_BORN_V6,
)
from cosmodrome.speed.due import DueMessages
from cosmodrome.store.parts import StoreParts
from cosmodrome.store.queue import Queue
from cosmodrome.store.values import Batch, Found, ReadStatus

SCAN_BYTES_MIN = 16_000  # of queue entries, however few messages are wanted
SCAN_COUNT_MIN = SCAN_BYTES_MIN // QUEUE_ENTRY_BYTES
FIND_ROUNDS = 3
LIGHT_PREFIX = "%LMQ%"

_log = logging.getLogger(__name__)

_MAGICS = (MAGIC_RECORD, MAGIC_RECORD_V2)
_INT = struct.Struct(">i")
_LONG = struct.Struct(">q")
_STORE_TIME_END = RECORD_BORN_HOST_AT + HOST_V6_BYTES + _LONG.size


class Reader:
    def __init__(self, options: StoreOptions, memory_bytes: int, parts: StoreParts) -> None:
        self.options = options
        self._memory_bytes = memory_bytes
        self.warm_bytes = 0  # how far from the log's end messages count as being in memory
        self.log = parts.log
        self.flush = parts.flush
        self._queues = parts.queues
        self._index = parts.index
        self.segment_bytes = parts.log.segment_bytes
        self.scan_count_min = SCAN_COUNT_MIN
        self.follow_settings()

    def follow_settings(self) -> None:
        """Settings that are too costly to read with every pull have changed."""
        self.warm_bytes = (
            self._memory_bytes * self.options.access_message_in_memory_max_ratio // 100
        )

    # --- for compiled code, which reads by itself what `_read_plainly` and `_scan` would ------

    @property
    def queues(self) -> Mapping[tuple[str, int], Queue]:
        return self._queues.table

    # --- for everybody -----------------------------------------------------------------------

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        matches: Callable[[int], bool] | None,
        matches_record: Callable[[memoryview], bool] | None,
        records_max: int | None = None,
    ) -> Batch:
        queue = self._queues.get(topic, queue_id)
        if queue is None or queue.max_offset == 0:
            return Batch(ReadStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
        least, most = queue.min_offset, queue.max_offset
        if offset < least:
            return Batch(ReadStatus.OFFSET_TOO_SMALL, least, least, most)
        if offset == most:
            return Batch(ReadStatus.OFFSET_OVERFLOW_ONE, offset, least, most)
        if offset > most:
            return Batch(ReadStatus.OFFSET_OVERFLOW_BADLY, most, least, most)
        max_count = max(1, max_count)
        if matches_record is None and (matches is None or isinstance(matches, frozenset)):
            batch = self._read_plainly(queue, offset, max_count, matches)
            if batch is not None:
                return batch
        return self._scan(queue, offset, max_count, matches, matches_record, records_max)

    def entries(
        self, topic: str, queue_id: int, offset: int, max_count: int
    ) -> list[tuple[int, int, int]]:
        queue = self._queues.get(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            return []
        count = min(max_count, queue.max_offset - offset)
        return list(QUEUE_ENTRY.iter_unpack(queue.entries(offset, count)))

    def record(self, log_offset: int, size: int | None) -> bytes | None:
        """One whole record, None unless a record of that size begins there."""
        end = self.flush.durable_end
        head = self.log.slice(log_offset, RECORD_BYTES_MIN, end)
        if head is None:
            return None
        fields = RECORD_HEAD.unpack_from(head)
        if fields[1] not in (MAGIC_RECORD, MAGIC_RECORD_V2) or fields[6] != log_offset:
            return None
        if size is not None and size != fields[0]:
            return None
        data = self.log.slice(log_offset, fields[0], end)
        return None if data is None else bytes(data)

    def due_messages(
        self, topic: str, queue_id: int, offset: int, count: int, bytes_max: int
    ) -> DueMessages:
        records = self._in_one_piece(topic, queue_id, offset, count, bytes_max)
        largest = self.segment_bytes - BLANK_BYTES
        return DueMessages(records, largest, self.options.max_message_size)

    def find(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> Found:
        if self._index is None:
            return Found([], 0, 0)
        records: list[bytes] = []
        max_count = min(max_count, self.options.max_msgs_num_batch)
        until_ms = end_ms
        for _ in range(FIND_ROUNDS):
            offsets = self._index.find(topic, key, max_count, begin_ms, until_ms)
            found = (self.record(offset, None) for offset in offsets)
            records = [record for record in found if record is not None]
            if records or not offsets:
                break
            until_ms = self._time_at(offsets[0]) - 1  # only removed messages so far: look back
            if until_ms < begin_ms:
                break
        return Found(records, self._index.last_ms, max(0, self._index.last_offset))

    def store_time(self, topic: str, queue_id: int, queue_offset: int) -> int:
        queue = self._queues.get(topic, queue_id)
        entry = None if queue is None else queue.entry(queue_offset)
        return -1 if entry is None else self._time_at(entry[0])

    def earliest_ms(self) -> int:
        return self._time_at(self.log.min_offset)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """First offset stored at or after that time, the queue's end when there is none."""
        queue = self._queues.get(topic, queue_id)
        if queue is None:
            return 0
        low, high = queue.min_offset, queue.max_offset
        while low < high:
            middle = (low + high) // 2
            # An entry without a record counts with the next one that has a record.
            at, found_ms = middle, -1
            while at < high and found_ms < 0:
                entry = queue.entry(at)
                found_ms = -1 if entry is None else self._time_at(entry[0])
                at += 1
            if 0 <= found_ms < timestamp_ms:
                low = at
            else:
                high = middle
        return low

    def in_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """False when the message is so far back that reading it means disk access.

        A message that is not there counts as in memory: nothing about it is on disk.
        """
        queue = self._queues.get(topic, queue_id)
        entry = None if queue is None else queue.entry(queue_offset)
        return entry is None or not self._cold(entry[0])

    # --- inside ------------------------------------------------------------------------------
    def _cold(self, log_offset: int) -> bool:
        return self.flush.durable_end - log_offset > self.warm_bytes

    def _time_at(self, log_offset: int) -> int:
        end = self.flush.durable_end
        head = self.log.slice(log_offset, _STORE_TIME_END, end)
        if head is None or _INT.unpack_from(head, 4)[0] not in (MAGIC_RECORD, MAGIC_RECORD_V2):
            return -1
        (sys_flag,) = _INT.unpack_from(head, RECORD_SYS_FLAG_AT)
        host_bytes = HOST_V6_BYTES if sys_flag & SYS_BORN_V6 else HOST_V4_BYTES
        store_ms: int = _LONG.unpack_from(head, RECORD_BORN_HOST_AT + host_bytes)[0]
        return store_ms

    def _record_of(
        self, queue: Queue, queue_offset: int, log_offset: int, size: int, end: int
    ) -> memoryview | None:
        """The record an entry names, None unless it is the message of this queue and offset.

        A damaged queue file must not hand out somebody else's message, or half of one.
        """
        record = self.log.slice(log_offset, size, end)
        if record is not None and size >= RECORD_BYTES_MIN:
            head = RECORD_HEAD.unpack_from(record)
            # Compat: entries of light queues (4.9) name records of another topic.
            here = (head[3], head[5]) == (queue.queue_id, queue_offset)
            here = here or queue.topic.startswith(LIGHT_PREFIX)
            if here and (head[0], head[6]) == (size, log_offset) and head[1] in _MAGICS:
                return record
        if not 0 <= log_offset < self.log.min_offset:  # else it has expired
            _log.error(
                "queue_entry_wrong topic=%s queue=%d offset=%d log_offset=%d next=%s",
                queue.topic,
                queue.queue_id,
                queue_offset,
                log_offset,
                "the message is skipped; stop the broker and run `cosmo store check`",
            )
        return None

    def _in_one_piece(
        self, topic: str, queue_id: int, offset: int, count: int, bytes_max: int
    ) -> bytes:
        """Records of a queue from `offset` on, at most `count`, which lie in one log file.

        It ends before an entry that names no record of its own.
        """
        queue = self._queues.get(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.max_offset:
            return b""
        entries = queue.entries(offset, min(count, queue.max_offset - offset))
        end = self.flush.durable_end
        base = self.log.base_of(_LONG.unpack_from(entries)[0]) if entries else end
        if not self.log.min_offset <= base < end:
            return b""
        try:
            view = self.log.view(base)
        except OSError:
            return b""
        limits = (count, bytes_max, count, bytes_max, 0)
        where = (view, base, self.log.min_offset, end, queue_id, offset)
        index, records, found, *_ = speed.select(entries, 0, *where, None, 0, 0, limits)
        return records if index == found else b""  # fillers: their numbers have no record

    def _read_plainly(
        self, queue: Queue, offset: int, max_count: int, codes: frozenset[int] | None
    ) -> Batch | None:
        """The common case of `_scan`, in one step: all that is wanted lies in one log file.

        None when that is not so, or not known before the others were looked at too.
        """
        entries = queue.entries(offset, min(max_count + 1, _scan_count(max_count)))
        end = self.flush.durable_end
        if not entries or queue.topic.startswith(LIGHT_PREFIX):
            return None
        base = self.log.base_of(_LONG.unpack_from(entries)[0])
        if not self.log.min_offset <= base < end:
            return None
        limits = self._limits(max_count, end)
        try:
            view = self.log.view(base)
        except OSError:
            return None
        index, data, count, _, last, full = speed.select(
            entries,
            0,
            view,
            base,
            base,
            end,
            queue.queue_id,
            offset,
            codes,
            0,
            0,
            limits,
        )
        if not count or not (full or offset + index == queue.max_offset):
            return None
        return Batch(
            status=ReadStatus.FOUND,
            next_offset=offset + index,
            min_offset=queue.min_offset,
            max_offset=queue.max_offset,
            data=data,
            count=count,
            behind=last < limits[4],
        )

    def _limits(self, max_count: int, end: int) -> speed.Limits:
        options = self.options
        return (
            min(max_count, options.max_transfer_count_on_message_in_memory),
            options.max_transfer_bytes_on_message_in_memory,
            min(max_count, options.max_transfer_count_on_message_in_disk),
            options.max_transfer_bytes_on_message_in_disk,
            end - self.warm_bytes,
        )

    def _scan(
        self,
        queue: Queue,
        offset: int,
        max_count: int,
        matches: Callable[[int], bool] | None,
        matches_record: Callable[[memoryview], bool] | None,
        records_max: int | None,
    ) -> Batch:
        least, most = queue.min_offset, queue.max_offset
        taking = _Taking(self._limits(max_count, self.flush.durable_end), matches, matches_record)
        status = ReadStatus.NO_MATCHED_MESSAGE
        scanned_max = _scan_count(max_count)
        if records_max is not None:
            scanned_max = min(scanned_max, records_max)
        at, stop = offset, min(most, offset + scanned_max)
        step = max_count + 1  # where all are wanted, the entry behind the last one ends it
        while at < stop and not taking.full:
            entries = queue.entries(at, min(stop - at, step))
            step *= 2
            if not entries:
                if at == offset:
                    status = ReadStatus.OFFSET_FOUND_NULL
                    per_file = queue.file_bytes // QUEUE_ENTRY_BYTES
                    at = min(most, (at // per_file + 1) * per_file)
                break
            at += self._take(queue, at, entries, taking)
        if taking.count:
            status = ReadStatus.FOUND
        elif taking.removed:
            status = ReadStatus.MESSAGE_WAS_REMOVING
        behind = taking.last < taking.limits[4]
        return Batch(status, at, least, most, taking.data(), taking.count, behind)

    def _take(self, queue: Queue, offset: int, entries: bytes, taking: _Taking) -> int:
        """Take what the packed entries from `offset` on name; how many of them are done with."""
        index, count, end = 0, len(entries) // QUEUE_ENTRY_BYTES, self.flush.durable_end
        if not taking.plain:
            while index < count and not taking.full:
                index += self._take_one(queue, offset, entries, index, end, taking)
            return index
        low = self.log.min_offset
        queue_id = -1 if queue.topic.startswith(LIGHT_PREFIX) else queue.queue_id
        while index < count and not taking.full:
            base = self.log.base_of(_LONG.unpack_from(entries, index * QUEUE_ENTRY_BYTES)[0])
            if low <= base + self.log.segment_bytes and base < end:
                try:
                    view = self.log.view(base)
                except OSError:
                    pass  # logged below, for the entry that needs it
                else:
                    index = taking.select(entries, index, view, base, low, end, queue_id, offset)
            if index < count and not taking.full:
                index += self._take_one(queue, offset, entries, index, end, taking)
        return index

    def _take_one(
        self, queue: Queue, offset: int, entries: bytes, index: int, end: int, taking: _Taking
    ) -> int:
        """The entry number `index`; 0 when it has to wait for the next read, else 1."""
        log_offset, size, tags_code = QUEUE_ENTRY.unpack_from(entries, index * QUEUE_ENTRY_BYTES)
        if size == QUEUE_FILLER_SIZE and log_offset == 0:
            return 1
        taking.last = log_offset
        taking.full = taking.is_full(log_offset, size)
        if taking.full:
            return 0
        if taking.matches is None or taking.matches(tags_code):
            record = self._record_of(queue, offset + index, log_offset, size, end)
            if record is None:
                taking.removed = taking.removed or not taking.count
            elif taking.matches_record is None or taking.matches_record(record):
                taking.add(record)
        return 1


def _scan_count(max_count: int) -> int:
    """How many entries one read looks at."""
    return max(SCAN_COUNT_MIN, max_count)


class _Taking:
    """What one read has taken so far, and what it still may."""

    def __init__(
        self,
        limits: speed.Limits,
        matches: Callable[[int], bool] | None,
        matches_record: Callable[[memoryview], bool] | None,
    ) -> None:
        self.limits = limits
        self.matches = matches
        self.matches_record = matches_record
        self._codes = matches if isinstance(matches, frozenset) else None
        # Whether everything that decides is in the entries.
        self.plain = matches_record is None and (matches is None or self._codes is not None)
        self.full = False
        self.removed = False  # entries before the first message named none
        self.last = limits[4]  # log offset of the last entry looked at
        self.count = self.size = 0
        self._parts: list[bytes | memoryview] = []

    def is_full(self, log_offset: int, size: int) -> bool:
        if self.count == 0:
            return False
        count_max, bytes_max, cold_count_max, cold_bytes_max, cold_below = self.limits
        if log_offset < cold_below:
            count_max, bytes_max = cold_count_max, cold_bytes_max
        return self.count >= count_max or self.size + size > bytes_max

    def add(self, record: memoryview) -> None:
        self._parts.append(record)
        self.count += 1
        self.size += len(record)

    def select(
        self,
        entries: bytes,
        index: int,
        view: memoryview,
        base: int,
        low: int,
        high: int,
        queue_id: int,
        queue_offset: int,
    ) -> int:
        index, data, self.count, self.size, last, self.full = speed.select(
            entries,
            index,
            view,
            base,
            low,
            high,
            queue_id,
            queue_offset,
            self._codes,
            self.count,
            self.size,
            self.limits,
        )
        if data:
            self._parts.append(data)
        if last >= 0:
            self.last = last
        return index

    def data(self) -> bytes:
        part = self._parts[0] if len(self._parts) == 1 else b""
        return part if isinstance(part, bytes) and part else b"".join(self._parts)
