"""The key index: from a hash of topic and key to offsets in the log.

A file is a header, hash slots and entries; a slot names the newest entry of its chain, each
entry the one before it. Entry 0 is never used, so the count starts at 1. Like queues, the
index is written behind: entries, slots and header live in memory until `pending` hands
them to a batch, and reads look there first. A file exists on disk only after its first batch.
Keys are not compared, only their hashes: whoever asks filters the answer.

While many records come (in recovery, or under load), the slots of the file under way are one
table in memory, filled by compiled code and written by whole pages that changed; otherwise only
the changed slots are kept and written.
"""

from __future__ import annotations

import bisect
import logging
import os.path
import sys
import time
from array import array
from collections.abc import Iterator, Sequence

from cosmodrome import speed
from cosmodrome.env.base import Clock, Disk
from cosmodrome.layout import INDEX_ENTRY, INDEX_HEADER, INDEX_KEY, INDEX_SLOT
from cosmodrome.store.commit_log.segment import (
    FileWrite,
    OpenFiles,
    holds_nothing,
    write_files,
    zero_from,
)

NAME_DIGITS = 17  # yyyyMMddHHmmssSSS
SALVAGE_MARGIN_MS = 999  # entries know their second, not their millisecond
BLOCK_BYTES = 65_520  # of entries in memory, at most; malloc takes such a block from what was freed
TABLE_KEYS_MIN = 1024  # keys between two batches that make a table in memory worth its size

_HEADER_BYTES = INDEX_HEADER.size
_SLOT_BYTES = INDEX_SLOT.size
_ENTRY_BYTES = INDEX_ENTRY.size
_PAGE_BYTES = speed.SLOT_PAGE_BYTES

_log = logging.getLogger(__name__)


key_hash = speed.key_hash


class IndexFile:
    """One file and what of it is still in memory."""

    def __init__(self, path: str, slots: int, entries_max: int, files: OpenFiles) -> None:
        self.path = path
        self.slots = slots
        self.entries_max = entries_max
        self.size = _HEADER_BYTES + slots * _SLOT_BYTES + entries_max * _ENTRY_BYTES
        self.begin_ms = self.end_ms = self.begin_offset = self.end_offset = 0
        self.used_slots = 0
        self.count = 1
        self._files = files
        self._made = False
        self._tail_at = 1  # number of the first entry in memory
        # Entries in memory, in blocks with the numbers of their first ones. A batch takes the
        # blocks as they are, so it ends the last one: what comes goes to a new one.
        self._blocks: list[bytearray] = []
        self._block_starts: list[int] = []
        self._block_ended = True
        self._slots: dict[int, int] = {}
        self._table: bytearray | None = None
        self._table_copy = bytearray()  # its pages as a batch writes them
        self._table_ends = False
        self._pages = (
            bytearray()
        )  # a mark for each page of the table that the next batch must write
        self._pages_under_way = bytearray()

    @property
    def full(self) -> bool:
        return self.count >= self.entries_max

    @property
    def dirty(self) -> bool:
        return self.count > self._tail_at

    @property
    def memory_bytes(self) -> int:
        return (self.count - self._tail_at) * _ENTRY_BYTES

    def load(self) -> bool:
        """Read the header; False when it makes no sense."""
        header = INDEX_HEADER.unpack_from(self._files.view(self.path))
        self.begin_ms, self.end_ms, self.begin_offset, self.end_offset = header[:4]
        self.used_slots, self.count = header[4:]
        self.count = max(1, self.count)
        self._made = True
        self._tail_at = self.count
        return self.count <= self.entries_max and 0 <= self.used_slots <= self.slots

    def salvage(self, disk: Disk, synced_ms: int) -> bool:
        """Cut back to the entries that were synced before `synced_ms`; False if there are none.

        Entries never change once written, so the synced ones are whole whatever else a crash
        left. Slots and header did change: they are made anew from the entries. Blocking.
        """
        slots = array("i", bytes(_SLOT_BYTES * self.slots))
        number, end_offset, end_ms = 1, self.begin_offset, self.begin_ms
        entries_at = _HEADER_BYTES + self.slots * _SLOT_BYTES
        view = self._files.view(self.path)[entries_at + _ENTRY_BYTES :]
        for hashed, log_offset, seconds, previous in INDEX_ENTRY.iter_unpack(view):
            entry_ms = self.begin_ms + seconds * 1000 + SALVAGE_MARGIN_MS  # the latest possible
            slot = hashed % self.slots
            if (
                number >= self.entries_max
                or not (hashed or log_offset or previous)
                or hashed < 0
                or seconds < 0
                or log_offset < end_offset
                or previous != slots[slot]
                or entry_ms >= synced_ms
            ):
                break
            slots[slot] = number
            number, end_offset, end_ms = number + 1, log_offset, entry_ms
        if number == 1:
            return False
        if (number, end_offset) != (self.count, self.end_offset):  # else it is known exactly
            self.end_offset, self.end_ms = end_offset, end_ms
        self.count = self._tail_at = number
        self.used_slots = self.slots - slots.count(0)
        if sys.byteorder == "little":
            slots.byteswap()
        pieces = [(_HEADER_BYTES, slots.tobytes()), (0, self._header())]
        error = write_files(disk, [FileWrite(self.path, self.size, pieces)])[0]
        if error is not None:
            return False
        zero_from(disk, self.path, entries_at + number * _ENTRY_BYTES)
        return True

    def put(self, hashed: int, log_offset: int, store_ms: int) -> None:
        slot = hashed % self.slots
        previous = self._slot(slot)
        if self.count <= 1:
            self.begin_ms, self.begin_offset = store_ms, log_offset
            seconds = 0
        else:
            seconds = min(max(0, (store_ms - self.begin_ms) // 1000), 0x7FFFFFFF)
        block = self._block()
        block += INDEX_ENTRY.pack(hashed, log_offset, seconds, previous)
        if self._table is None:
            self._slots[slot] = self.count
        else:
            INDEX_SLOT.pack_into(self._table, slot * _SLOT_BYTES, self.count)
            self._pages[slot * _SLOT_BYTES // _PAGE_BYTES] = 1
        if previous == 0:
            self.used_slots += 1
        self.count += 1
        self.end_ms, self.end_offset = store_ms, log_offset

    def put_many(self, keys: bytes) -> int:
        """As many of these packed keys as fit; how many bytes of them were taken."""
        table = self._table
        if table is None:
            table = self._table = self._load_table()
        self._table_ends = False
        if self.count <= 1:
            _, self.begin_offset, self.begin_ms = INDEX_KEY.unpack_from(keys)
        block = self._block()
        room = (BLOCK_BYTES - len(block)) // _ENTRY_BYTES
        taken, fresh = speed.chain(
            table,
            keys,
            self.count,
            self.begin_ms,
            min(self.entries_max, self.count + room),
            block,
            self._pages,
        )
        self.count += taken
        self.used_slots += fresh
        taken_bytes = taken * INDEX_KEY.size
        _, self.end_offset, self.end_ms = INDEX_KEY.unpack_from(keys, taken_bytes - INDEX_KEY.size)
        return taken_bytes

    def end_table(self) -> None:
        """No more keys come in bulk: give the table's memory back once it is written."""
        self._table_ends = True
        if not self.dirty:
            self._drop_table()

    @property
    def has_table(self) -> bool:
        return self._table is not None

    def find(
        self, hashed: int, begin_ms: int, end_ms: int, found: list[int], max_count: int
    ) -> None:
        """Append log offsets to `found`, newest first, until it has `max_count`."""
        number = self._slot(hashed % self.slots)
        while number and len(found) < max_count:
            entry_hash, log_offset, seconds, previous = self._entry(number)
            entry_ms = self.begin_ms + seconds * 1000
            if seconds < 0:
                break
            if entry_hash == hashed and begin_ms <= entry_ms <= end_ms:
                found.append(log_offset)
            # Chains lead strictly back, so a damaged file cannot make this loop forever.
            if not 0 < previous < number or entry_ms < begin_ms:
                break
            number = previous

    def pending(self) -> tuple[FileWrite, int, dict[int, int]]:
        slots_at = _HEADER_BYTES
        entries_at = slots_at + self.slots * _SLOT_BYTES
        pieces: list[tuple[int, bytes | memoryview]] = [
            (entries_at + start * _ENTRY_BYTES, memoryview(block))
            for start, block in zip(self._block_starts, self._blocks, strict=True)
        ]
        self._block_ended = True
        if self._made:
            # A slot that names an entry beyond the count ends its chain for upstream's broker, so
            # the count goes first. Which records they are of is said by the header, at the end.
            pieces.append((_HEADER_BYTES - 4, self._header()[-4:]))
        slots = dict(self._slots)
        if self._table is not None:
            pieces += self._changed_pages(self._table)
        pieces += [
            (slots_at + slot * _SLOT_BYTES, INDEX_SLOT.pack(number))
            for slot, number in sorted(slots.items())
        ]
        pieces.append((0, self._header()))
        return FileWrite(self.path, self.size, pieces), self.memory_bytes, slots

    def written(self, tail_bytes: int, slots: dict[int, int]) -> None:
        self._made = True
        self._tail_at += tail_bytes // _ENTRY_BYTES
        done = bisect.bisect_left(self._block_starts, self._tail_at)
        del self._blocks[:done], self._block_starts[:done]
        self._block_ended |= not self._blocks
        for slot, number in slots.items():
            if self._slots.get(slot) == number:
                del self._slots[slot]
        self._pages_under_way = bytearray(len(self._pages_under_way))
        if self._table_ends and not self.dirty:
            self._drop_table()

    def _block(self) -> bytearray:
        """The block for the next entry, with room for it."""
        if self._block_ended or len(self._blocks[-1]) + _ENTRY_BYTES > BLOCK_BYTES:
            self._blocks.append(bytearray())
            self._block_starts.append(self.count)
            self._block_ended = False
        return self._blocks[-1]

    def _changed_pages(self, table: bytearray) -> Iterator[tuple[int, memoryview]]:
        """What the batch that begins has to write of the table; what failed last is in it.

        Copies, because keys that come while they are written have no entries in this batch.
        """
        changed, under_way = int.from_bytes(self._pages), int.from_bytes(self._pages_under_way)
        pages = (changed | under_way).to_bytes(len(self._pages))
        self._pages_under_way = bytearray(pages)
        self._pages = bytearray(len(pages))
        source, copy = memoryview(table), memoryview(self._table_copy)
        first = pages.find(1)
        while first >= 0:
            end = pages.find(0, first)
            end = len(pages) if end < 0 else end
            run = slice(first * _PAGE_BYTES, end * _PAGE_BYTES)
            copy[run] = source[run]
            yield _HEADER_BYTES + run.start, copy[run]
            first = pages.find(1, end)

    def _load_table(self) -> bytearray:
        at = _HEADER_BYTES
        if self._made:
            table = bytearray(self._files.view(self.path)[at : at + self.slots * _SLOT_BYTES])
        else:
            table = bytearray(self.slots * _SLOT_BYTES)
        for slot, number in self._slots.items():
            INDEX_SLOT.pack_into(table, slot * _SLOT_BYTES, number)
        self._table_copy = bytearray(len(table))
        self._pages = bytearray(-(-len(table) // _PAGE_BYTES))
        self._pages_under_way = bytearray(len(self._pages))
        for slot in self._slots:
            self._pages[slot * _SLOT_BYTES // _PAGE_BYTES] = 1
        self._slots.clear()
        return table

    def _drop_table(self) -> None:
        self._table, self._table_copy = None, bytearray()

    def _header(self) -> bytes:
        return INDEX_HEADER.pack(
            self.begin_ms,
            self.end_ms,
            self.begin_offset,
            self.end_offset,
            self.used_slots,
            self.count,
        )

    def _slot(self, slot: int) -> int:
        number = self._slots.get(slot)
        if self._table is not None:
            (number,) = INDEX_SLOT.unpack_from(self._table, slot * _SLOT_BYTES)
        elif number is None:
            if not self._made:
                return 0
            at = _HEADER_BYTES + slot * _SLOT_BYTES
            (number,) = INDEX_SLOT.unpack_from(self._files.view(self.path), at)
        return number if 0 < number < self.count else 0

    def _entry(self, number: int) -> tuple[int, int, int, int]:
        if number >= self._tail_at:
            which = bisect.bisect_right(self._block_starts, number) - 1
            at = (number - self._block_starts[which]) * _ENTRY_BYTES
            hashed, log_offset, seconds, previous = INDEX_ENTRY.unpack_from(self._blocks[which], at)
        else:
            at = _HEADER_BYTES + self.slots * _SLOT_BYTES + number * _ENTRY_BYTES
            view = self._files.view(self.path)
            hashed, log_offset, seconds, previous = INDEX_ENTRY.unpack_from(view, at)
        return hashed, log_offset, seconds, previous


class Index:
    """All index files, oldest first."""

    def __init__(
        self,
        directory: str,
        slots: int,
        entries_max: int,
        disk: Disk,
        clock: Clock,
        files: OpenFiles,
        *,
        read_only: bool,
    ) -> None:
        self._directory = directory
        self._slots = slots
        self._entries_max = entries_max
        self._disk = disk
        self._clock = clock
        self._files = files
        self._read_only = read_only
        self._list: list[IndexFile] = []
        self._resume_at = 0  # records before this are in the index already
        self._bulk_count = 0
        self.unsynced: set[str] = set()

    @property
    def last_ms(self) -> int:
        return self._list[-1].end_ms if self._list else 0

    @property
    def kept_ms(self) -> int:
        """No record behind the last indexed one is older; right after `keep_synced`."""
        return max(0, self.last_ms - SALVAGE_MARGIN_MS)

    @property
    def last_offset(self) -> int:
        """Log offset of the last indexed record, -1 when there is none."""
        return self._list[-1].end_offset if self._list else -1

    def extents(self) -> dict[str, tuple[int, int]]:
        """Entries and log offset of the last one, by file name."""
        return {os.path.basename(file.path): (file.count, file.end_offset) for file in self._list}

    @property
    def memory_bytes(self) -> int:
        return sum(file.memory_bytes for file in self._list)

    @property
    def busy(self) -> bool:
        """Whether a batch would be large, so that it is better to wait for more."""
        return bool(self._list) and self._list[-1].has_table

    def put(self, topic: str, keys: Sequence[str], log_offset: int, store_ms: int) -> None:
        if log_offset < self._resume_at:
            return
        for key in keys:
            file = self._list[-1] if self._list else None
            if file is None or file.full:
                file = self._add_file()
            file.put(key_hash(topic, key), log_offset, store_ms)

    def put_many(self, keys: bytes) -> None:
        """Packed keys of many records, in log order."""
        at, stop = 0, len(keys)
        while at < stop and INDEX_KEY.unpack_from(keys, at)[1] < self._resume_at:
            at += INDEX_KEY.size
        self._bulk_count += (stop - at) // INDEX_KEY.size
        while at < stop:
            file = self._list[-1] if self._list else None
            if file is None or file.count >= file.entries_max:
                if file is not None:
                    file.end_table()
                file = self._add_file()
            if file.has_table or self._bulk_count >= TABLE_KEYS_MIN:
                at += file.put_many(keys[at:] if at else keys)
            else:
                file.put(*INDEX_KEY.unpack_from(keys, at))
                at += INDEX_KEY.size

    def end_bulk(self) -> None:
        """Fewer keys come: tables in memory go once they are written."""
        for file in self._list:
            file.end_table()

    def find(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> list[int]:
        """Log offsets, ascending, of messages whose key may be `key`."""
        hashed = key_hash(topic, key)
        found: list[int] = []
        for file in reversed(self._list):
            if file.begin_ms <= end_ms and file.end_ms >= begin_ms:
                try:
                    file.find(hashed, begin_ms, end_ms, found, max_count)
                except OSError as error:
                    _log.error("index_file_unreadable path=%s error=%s", file.path, error)
            if len(found) >= max_count or file.begin_ms < begin_ms:
                break
        return sorted(set(found))

    def take_expired(self, log_min_offset: int) -> str | None:
        """Forget the oldest file if the log has none of its records, never the last one.

        Returns its path, for the caller to remove.
        """
        if len(self._list) < 2:
            return None
        oldest = self._list[0]
        if oldest.end_offset >= log_min_offset or oldest.dirty:
            return None
        del self._list[0]
        self._files.forget(oldest.path)
        self.unsynced.discard(oldest.path)
        return oldest.path

    # --- batches -----------------------------------------------------------------------------
    def pending(self) -> list[tuple[IndexFile, FileWrite, int, dict[int, int]]]:
        if self._bulk_count < TABLE_KEYS_MIN:
            self.end_bulk()
        self._bulk_count = 0
        return [(file, *file.pending()) for file in self._list if file.dirty]

    def written(
        self,
        batch: list[tuple[IndexFile, FileWrite, int, dict[int, int]]],
        results: list[OSError | None],
    ) -> OSError | None:
        for (file, write, tail_bytes, slots), error in zip(batch, results, strict=True):
            if error is None:
                file.written(tail_bytes, slots)
                self.unsynced.add(write.path)
        return next((error for error in results if error is not None), None)

    # --- recovery ----------------------------------------------------------------------------
    def load(self) -> None:
        for name in self._disk.list(self._directory):
            if len(name) != NAME_DIGITS or not (name.isascii() and name.isdigit()):
                continue
            path = os.path.join(self._directory, name)
            if holds_nothing(self._disk, path, _HEADER_BYTES):
                # Made, but its first batch never came, or not whole: the header is written last.
                if not self._read_only:
                    self._disk.remove(path)
                continue
            geometry = self._geometry(self._disk.size(path))
            file = geometry and IndexFile(path, *geometry, self._files)
            if file and file.load():
                self._list.append(file)
            else:
                _log.warning(
                    "index_file_ignored path=%s size=%d next=%s",
                    path,
                    self._disk.size(path),
                    "check maxHashSlotNum and maxIndexNum",
                )
        self._resume_at = self.last_offset + 1

    def keep_synced(self, synced_ms: int) -> int:
        """After an abnormal stop: keep only entries older than `synced_ms`, which are synced.

        Returns the log offset from which the index has to be built again, which may repeat
        the last record of the last file kept: its further keys may be in a dropped one.
        """
        keep = 0
        for file in self._list:
            # The header alone proves nothing: it may be older than the slots behind it. Only a
            # full file does not change any more.
            if file.end_ms >= synced_ms or not file.full:
                break
            keep += 1
        if keep < len(self._list) and not self._read_only:
            file = self._list[keep]
            try:
                if file.salvage(self._disk, synced_ms):
                    self.unsynced.add(file.path)
                    keep += 1
            except OSError as error:
                _log.error("index_file_not_salvaged path=%s error=%s", file.path, error)
        self._drop_from(keep)
        self._resume_at = max(0, self.last_offset)
        return self._resume_at

    def cut(self, log_end: int) -> None:
        """The log ends before some records the index knows; others will take their place."""
        if self.last_offset >= log_end:
            keep = sum(1 for file in self._list if file.end_offset < log_end)
            _log.warning("index_beyond_log end=%d kept=%d of=%d", log_end, keep, len(self._list))
            self._drop_from(keep)
            self._resume_at = log_end

    # --- inside ------------------------------------------------------------------------------
    def _drop_from(self, keep: int) -> None:
        for file in self._list[keep:]:
            self._files.forget(file.path)
            self.unsynced.discard(file.path)
            if not self._read_only:
                self._disk.remove(file.path)
        del self._list[keep:]

    def _geometry(self, size: int) -> tuple[int, int] | None:
        """Slots and entries of a file: the configured slots, and entries to fill its size."""
        entries_bytes = size - _HEADER_BYTES - self._slots * _SLOT_BYTES
        if entries_bytes < 2 * _ENTRY_BYTES or entries_bytes % _ENTRY_BYTES:
            return None
        return self._slots, entries_bytes // _ENTRY_BYTES

    def _add_file(self) -> IndexFile:
        file = IndexFile(self._new_path(), self._slots, self._entries_max, self._files)
        if self._list:
            last = self._list[-1]
            file.begin_ms = file.end_ms = last.end_ms
            file.begin_offset = file.end_offset = last.end_offset
        self._list.append(file)
        return file

    def _new_path(self) -> str:
        now_ms = self._clock.now_ms()
        last = os.path.basename(self._list[-1].path) if self._list else ""
        while True:
            seconds, ms = divmod(now_ms, 1000)
            name = time.strftime("%Y%m%d%H%M%S", time.localtime(seconds)) + f"{ms:03d}"
            path = os.path.join(self._directory, name)
            if name > last and not self._disk.exists(path):
                return path
            # Names order the files, so a clock that went back must not bring an older name.
            now_ms = max(now_ms + 1, _time_of(last)) if last else now_ms + 1


def _time_of(name: str) -> int:
    """Milliseconds of an index file's name, 0 when it is not a time."""
    try:
        seconds = time.mktime(time.strptime(name[:14], "%Y%m%d%H%M%S"))
    except (ValueError, OverflowError):
        return 0
    return int(seconds) * 1000 + int(name[14:] or 0)
