"""From files on disk to a store that agrees with its log.

Clean start (no abort file): queues and index are complete up to some record; the log is
walked from there. Abnormal start: the walk begins at the newest file whose first record is
old enough to be covered by the checkpoint; queue entries from there on and index files that
may be damaged are dropped and built again. Either way the log ends at the first offset where
no good record begins, and nothing behind it is left to look like one later.

The log is cut only where a crash can have torn it. A bad record in front of files that the
checkpoint says were synced is damage; then nothing is touched and a person has to decide.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable

from cosmodrome import speed
from cosmodrome.env.base import Env
from cosmodrome.errors import StoreCorrupt
from cosmodrome.layout import MAGIC_RECORD, MAGIC_RECORD_V2, RECORD_HEAD
from cosmodrome.store.checkpoint import Checkpoint
from cosmodrome.store.commit_log.segment import (
    holds_nothing,
    rewrite_files,
    segment_offsets,
    sync_files,
    zero_from,
)
from cosmodrome.store.inventory import Inventory
from cosmodrome.store.parts import StoreParts
from cosmodrome.store.queue import Queue

CLEAN_FILES = 3  # log files that a clean start without inventory walks again
RECORDS_PER_STEP = 8192

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Recovered:
    min_offset: int
    end: int
    last_ms: int


class Recovery:
    def __init__(
        self,
        parts: StoreParts,
        env: Env,
        checkpoint: Checkpoint,
        relieve: Callable[[], Awaitable[None]],
        disown: Callable[[], None],
        disown_index: Callable[[int], None],
        *,
        check_crc: bool,
        read_only: bool,
        inventory: Inventory | None = None,
        doubtful: bool = False,
    ) -> None:
        self._log = parts.log
        self._queues = parts.queues
        self._index = parts.index
        self._dispatch = parts.dispatch
        self._env = env
        self._checkpoint = checkpoint
        self._relieve = relieve  # lets derived data in memory reach the disk
        self._disown = disown  # makes the checkpoint vouch for no queue entries
        self._disown_index = disown_index  # makes it vouch for no index entry from a time on
        self._check_crc = check_crc
        self._read_only = read_only
        self._inventory = inventory  # what the last clean stop left
        self._index_lost = False
        self._doubtful = doubtful  # a sync failed: what can be read may not be on the disk

    async def run(self, *, clean: bool) -> Recovered:
        bases = self._log_files()
        if not bases:
            for queue in self._queues:
                self._queues.drop(queue)
            if self._index is not None:
                self._index.keep_synced(-1)
                self._disown_index(0)
            return Recovered(0, 0, 0)
        self._log.min_offset = bases[0]
        start = self._clean_start(bases) if clean and not self._queues.damaged else None
        orderly = start is not None
        if start is None:
            start = self._abnormal_start(bases)
        elif start < self._vouched_start(bases):
            self._disown()  # queue files were removed: what is built now is only in memory
        _log.info("recovery_begins clean=%s from=%d", orderly, start)
        end, why = await self._walk(start, bases)
        self._refuse_damage(end, bases)
        if self._index is not None:
            self._index.end_bulk()
            self._index.cut(end)
        if not self._read_only:
            await self._cut(end, bases, sweep=not orderly or why == speed.WALK_CORRUPT)
            walked = range(self._log.base_of(start), end, self._log.segment_bytes)
            paths = [self._log.path_of(base) for base in walked]
            keep = rewrite_files if self._doubtful else sync_files
            await self._env.offload(functools.partial(keep, self._env.disk, paths))
        self._queues.sweep()
        for queue in self._queues:
            queue.find_min(bases[0])
        self._dispatch.cursor = end
        _log.info("recovery_done min=%d end=%d queues=%d", bases[0], end, len(self._queues))
        return Recovered(bases[0], end, self._dispatch.last_ms)

    # --- the files of the log ------------------------------------------------------------------
    def _log_files(self) -> list[int]:
        disk, size = self._env.disk, self._log.segment_bytes
        bases = segment_offsets(disk, self._log.directory)
        for at, base in enumerate(bases):
            path = self._log.path_of(base)
            actual = disk.size(path)
            if base % size or (at and base != bases[at - 1] + size):
                raise StoreCorrupt(
                    f"{path} does not continue the commit log: files must begin at multiples of"
                    f" {size} bytes without gaps; restore the missing file, or check"
                    " mappedFileSizeCommitLog"
                )
            if actual == size:
                continue
            if at == len(bases) - 1 and holds_nothing(disk, path, RECORD_HEAD.size):
                # It was being made when the process ended.
                _log.warning("log_file_unfinished path=%s size=%d", path, actual)
                if not self._read_only:
                    disk.remove(path)
                return bases[:-1]
            raise StoreCorrupt(
                f"{path} has {actual} bytes instead of {size}; set"
                f" mappedFileSizeCommitLog={actual} if the store was written with that size,"
                " otherwise restore the file from a replica"
            )
        return bases

    def _first_record_ms(self, base: int) -> int | None:
        """Store time of the record a file begins with, None when it begins with none."""
        view = self._log.view(base)
        magic = RECORD_HEAD.unpack_from(view)[1]
        if magic not in (MAGIC_RECORD, MAGIC_RECORD_V2):
            return None
        entries, _, _ = speed.walk(view, base, 0, len(view), False, 1)
        return entries[0][6] if entries else None

    # --- where to begin ------------------------------------------------------------------------
    def _clean_start(self, bases: list[int]) -> int | None:
        """Where the queues end in the log, None when anything about them is odd."""
        start = bases[0]
        limit = bases[-1] + self._log.segment_bytes
        for queue in self._queues:
            entry = queue.entry(queue.max_offset - 1)
            if entry is None or entry[0] + entry[1] > limit:
                self._say_odd(queue)
                return None
            if entry[0] < bases[0]:
                continue  # all its messages have expired
            record = self._matches(queue, entry)
            if record is None:
                self._say_odd(queue)
                return None
            if queue.log_end > start:
                start = queue.log_end
                self._dispatch.last_ms = record[6]
        if self._index is not None and self._index.last_offset >= limit:
            _log.warning("index_beyond_log offset=%d", self._index.last_offset)
            return None
        if self._lost(bases[0]):
            return None
        if self._inventory is not None:
            return max(bases[0], min(start, self._inventory.log_end))
        # Compat: nobody counted the queues at the last stop, so look where upstream looks.
        return min(start, bases[-CLEAN_FILES:][0])

    def _lost(self, log_min: int) -> bool:
        """Whether files that the last clean stop left are missing; then all is built again."""
        if self._inventory is None:
            return False
        queue = self._inventory.lost_queue(self._queues, log_min)
        index = self._index and self._inventory.lost_index(self._index, log_min)
        for lost in filter(None, (queue, index)):
            _log.error("derived_data_lost what=%s next=%s", lost, "building it again from the log")
        self._queues.damaged |= queue is not None
        self._index_lost = bool(index)
        return queue is not None or self._index_lost

    def _say_odd(self, queue: Queue) -> None:
        _log.warning(
            "queue_disagrees_with_log topic=%s queue=%d end=%d next=%s",
            queue.topic,
            queue.queue_id,
            queue.max_offset,
            "recovering as after a crash",
        )

    def _matches(self, queue: Queue, last: tuple[int, int, int]) -> speed.Entry | None:
        """The record of a queue's last entry, None when the log has another one there."""
        record = self._record_at(last[0])
        expected = (last[1], queue.topic, queue.queue_id, queue.max_offset - 1)
        return record if record is not None and record[1:5] == expected else None

    def _record_at(self, log_offset: int) -> speed.Entry | None:
        base = self._log.base_of(log_offset)
        view = self._log.view(base)
        entries, _, _ = speed.walk(
            view,
            base,
            log_offset - base,
            len(view),
            self._check_crc,
            1,
            self._checkpoint.log_ms,
        )
        return entries[0] if entries else None

    def _abnormal_start(self, bases: list[int]) -> int:
        # The checkpoint cannot know of damaged queues: then everything is built again.
        start = bases[0] if self._queues.damaged else self._vouched_start(bases)
        for queue in self._queues:
            self._queues.truncate(queue, start)
            self._drop_torn_entry(queue, bases[0])
        if self._index is not None:
            synced_ms = min(self._checkpoint.log_ms, self._checkpoint.index_ms)
            resume = self._index.keep_synced(-1 if self._index_lost else synced_ms)
            # Synced or not, what is put into new files now looks as old as what was dropped.
            self._disown_index(self._index.kept_ms)
            start = max(bases[0], min(start, self._log.base_of(resume)))
        return start

    def _vouched_start(self, bases: list[int]) -> int:
        """The last file before which, says the checkpoint, every record has its queue entry."""
        for base in reversed(bases):
            first_ms = self._first_record_ms(base)
            if first_ms and first_ms <= self._checkpoint.safe_ms:
                return base
        return bases[0]

    def _drop_torn_entry(self, queue: Queue, log_min: int) -> None:
        """A half-written entry can look like an earlier one: the last must match its record."""
        while self._queues.get(queue.topic, queue.queue_id) is queue:
            entry = queue.entry(queue.max_offset - 1)
            if entry is None or entry[0] < log_min or self._matches(queue, entry):
                return
            self._queues.truncate(queue, entry[0] + entry[1] - 1)

    # --- the walk ------------------------------------------------------------------------------
    async def _walk(self, start: int, bases: list[int]) -> tuple[int, int]:
        at, limit = start, bases[-1] + self._log.segment_bytes
        why = speed.WALK_MORE
        while at < limit:
            base = self._log.base_of(at)
            view = self._log.view(base)
            # What was synced is whole, so that odd properties of old records do no harm.
            position, why = self._dispatch.take_many(
                view,
                base,
                at - base,
                len(view),
                RECORDS_PER_STEP,
                check_crc=self._check_crc,
                whole_ms=self._checkpoint.log_ms,
            )
            at = base + position
            if why == speed.WALK_BLANK:
                at = base + self._log.segment_bytes
            elif why != speed.WALK_MORE:
                break
            if self._log.base_of(at) != base:
                _log.info("recovery_walks offset=%d of=%d", at, limit)
            await self._relieve()
            await asyncio.sleep(0)
        return at, why

    def _refuse_damage(self, end: int, bases: list[int]) -> None:
        for base in bases:
            if base <= end:
                continue
            first_ms = self._first_record_ms(base)
            # Later records may share the time of the last synced one: the clock may go back.
            if first_ms and first_ms < self._checkpoint.log_ms:
                raise StoreCorrupt(
                    f"no good record at offset {end} (file"
                    f" {self._log.path_of(self._log.base_of(end))}, position"
                    f" {end - self._log.base_of(end)}) although the later file"
                    f" {self._log.path_of(base)} was synced: the disk is damaged. Restore the"
                    " file from a replica, or move the later files away to give up what they hold"
                )

    async def _cut(self, end: int, bases: list[int], *, sweep: bool) -> None:
        for base in reversed(bases):
            if base >= end:
                path = self._log.path_of(base)
                _log.info("log_file_dropped path=%s", path)
                self._log.drop_view(base)
                self._env.disk.remove(path)
        base = self._log.base_of(end)
        if sweep and base in bases and base < end:
            found = await self._env.offload(
                functools.partial(zero_from, self._env.disk, self._log.path_of(base), end - base)
            )
            if found:
                _log.warning("log_cut path=%s offset=%d", self._log.path_of(base), end)
