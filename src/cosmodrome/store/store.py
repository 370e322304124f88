"""The message store: the one door to messages on disk.

    stage ─► log ─► flush ─► dispatch ─► queues, index ─► arrivals ─► wait line
                                             ▲
    read, find, record, offset_by_time ──────┘        upkeep: derived data, checkpoint, space

Order is the promise: a message is in its queue, and announced, before the send that carried
it is answered; and it is in no queue before it is durable. `append` and `durable` belong
together in one turn of the loop (see `Flush.durable`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os.path
from collections.abc import Callable, Mapping, Sequence

from cosmodrome.env.base import Env, FileLock
from cosmodrome.env.options import StoreOptions
from cosmodrome.env.signal import Signal
from cosmodrome.errors import StoreBusy, StoreError, StoreUnwritable
from cosmodrome.speed.due import DueMessages
from cosmodrome.store.arrivals import Arrivals
from cosmodrome.store.checked_options import check_options
from cosmodrome.store.checkpoint import load_checkpoint, save_checkpoint
from cosmodrome.store.commit_log.flush import Flush
from cosmodrome.store.commit_log.segment import OpenFiles
from cosmodrome.store.commit_log.settings import make_log, pool_of
from cosmodrome.store.commit_log.staging import DraftRecords, Stageable
from cosmodrome.store.delays import DelayLevels
from cosmodrome.store.dispatch import Dispatch
from cosmodrome.store.index import Index
from cosmodrome.store.inventory import load_inventory, save_inventory, take_inventory
from cosmodrome.store.parts import StoreParts
from cosmodrome.store.queue import Queues, check_path_names
from cosmodrome.store.read import Reader
from cosmodrome.store.recover import Recovery
from cosmodrome.store.removed import Removed
from cosmodrome.store.retain import Retention, hours_of
from cosmodrome.store.upkeep import Upkeep
from cosmodrome.store.values import (
    Arrival,
    Batch,
    Draft,
    Found,
    PutStatus,
    ReadStatus,
    Stored,
    StoreFacts,
)

__all__ = [
    "Arrival",
    "Arrivals",
    "Batch",
    "DelayLevels",
    "Draft",
    "Found",
    "PutStatus",
    "ReadStatus",
    "Store",
    "StoreFacts",
    "Stored",
    "hours_of",
]

MEMORY_BYTES_ASSUMED = 8 << 30
# One descriptor each. Most systems allow a process 1024, and sockets need them more.
LOG_FILES_OPEN_MAX = 128
DERIVED_FILES_OPEN_MAX = 256
ABORT_PLAIN, ABORT_DOUBT = b"\0", b"\1"  # Compat: upstream only asks whether the file is there

_log = logging.getLogger(__name__)


class Store:
    """One store directory. `read_only` takes no lock, changes nothing and serves reads."""

    def __init__(
        self,
        options: StoreOptions,
        env: Env,
        delay_ms: Callable[[int], int] | None = None,
        *,
        memory_bytes: int = MEMORY_BYTES_ASSUMED,
        read_only: bool = False,
    ) -> None:
        check_options(options)
        root = options.store_path_root_dir
        self.arrivals = Arrivals()
        self._options = options
        self._env = env
        self._root = root
        self._read_only = read_only
        self._log_files = OpenFiles(env.disk, LOG_FILES_OPEN_MAX)
        self._derived_files = OpenFiles(env.disk, DERIVED_FILES_OPEN_MAX)
        self._queues = self._make_queues()
        self._index = self._make_index() if options.message_index_enable else None
        self._log = make_log(options, env, self._log_files, self._queues.next_offset)
        if delay_ms is None:
            delay_ms = DelayLevels(options.message_delay_level).delay_ms
        self._removed = Removed(
            env.disk, os.path.join(root, "config", "deletedTopics.json"), read_only=read_only
        )
        self._dispatch = Dispatch(
            self._log, self._queues, self._index, self.arrivals, delay_ms, self._removed
        )
        self._flush = self._make_flush()
        # Called for every turn of the loop, so without a detour.
        self.when_durable = self._flush.when_durable
        self.relieve = self._log.relieve
        self.hold_back: Callable[[], int | None] = lambda: None  # slaves need all from there on
        parts = StoreParts(self._log, self._flush, self._dispatch, self._queues, self._index)
        self._parts = parts
        directories = (root, self._log.directory)
        self._upkeep = Upkeep(options, env, directories, self._path("checkpoint"), parts)
        self._retention = Retention(
            options, env, root, parts, self._upkeep, lambda: self.hold_back()
        )
        self._reader = Reader(options, memory_bytes, parts)
        self._lock: FileLock | None = None
        self._state = "not started"
        self._put_count = self._put_bytes = self._put_failed_count = 0
        # Fewer than 30 attributes: with more, Python takes 1.5 % longer for a send.

    # --- life --------------------------------------------------------------------------------
    async def start(self) -> None:
        """Lock the directory, recover, and take messages."""
        if self._state == "running":
            return
        if self._state != "not started":
            raise StoreError(f"this store is {self._state}; open the directory with a new one")
        disk = self._env.disk
        if not self._read_only:
            disk.make_dirs(self._root)
            disk.make_dirs(self._log.directory)
            self._lock = disk.lock(self._path("lock"))
        try:
            await self._recover()
            if not self._read_only:
                self._mark_running()
                if disk.read(self._path("abort")) != ABORT_PLAIN:
                    disk.replace(self._path("abort"), ABORT_PLAIN, keep=False)
                self._give_mark_a_block()
                try:
                    self._log.prepare()
                except StoreUnwritable as error:
                    # Consumers can be served, and what they finish may free the space.
                    _log.error("log_not_writable_yet error=%s", error)
                await self._upkeep.start()
                await self._retention.start()
        except BaseException as error:
            self._state = "stopped because its start failed"
            if isinstance(error, OSError) and not self._read_only:
                self._mark_doubt()
            await self._retention.stop()
            await self._upkeep.stop()
            await self._release()
            self._unlock()
            raise
        self._state = "running"

    async def stop(self) -> None:
        """Write, sync and vouch for everything; safe to call twice."""
        if self._state != "running":
            return
        self._state = "stopped"
        if self._read_only:
            await self._release()
            return
        self._log.write()
        await self._flush.sync_all()
        await self._retention.stop()
        await self._upkeep.stop()
        vouched = self._flush.failure is None and await self._upkeep.write_checkpoint()
        written = self._log.written_end == self._log.end
        caught_up = written and self._dispatch.cursor == self._log.end == self._flush.synced_end
        left = take_inventory(self._log.min_offset, self._log.end, self._queues, self._index)
        await self._release()
        if vouched and caught_up:
            save_inventory(self._env.disk, self._root, left)
            self._env.disk.remove(self._path("abort"))
        else:
            _log.error("store_stopped_unclean next=%s", "the next start recovers from the log")
        self._unlock()

    async def abandon(self) -> None:
        """Let go of everything as it is, as a killed process would. For tests of recovery."""
        self._state = "stopped"
        await self._retention.stop()
        await self._upkeep.stop()
        await self._release(keep_spare=True)
        self._unlock()

    # --- taking messages -----------------------------------------------------------------------
    def append(self, draft: Draft) -> Stored:
        """Stage one message: its offsets are known now, `durable` says when it is safe there."""
        return self.append_batch((draft,))[0]

    def append_batch(self, drafts: Sequence[Draft]) -> list[Stored]:
        """Stage messages, contiguous, all or none."""
        try:
            stored = self._stage_drafts(drafts)
        except StoreError:
            self._put_failed_count += len(drafts)
            raise
        self._put_count += len(stored)
        if stored:
            self._put_bytes += stored[-1].end - stored[0].log_offset
        return stored

    def stage(self, records: Stageable) -> None:
        """Stage what of `records` can be taken without further ado.

        `append` says why something is not taken. Register who waits with `when_durable`, then
        call `relieve`, all in one turn of the loop.
        """
        if self.why_unwritable is None:
            size, messages, _ = self._log.stage(records)
            self._put_count += messages
            self._put_bytes += size

    def durable(self, end: int, *, wait: bool = True) -> asyncio.Future[PutStatus]:
        """Done when the log is safe up to `end`: synced with SYNC_FLUSH and `wait`, else written.

        After `require_acks` and with `wait`, a slave has it too, or the status says why not.
        Its error is StoreUnwritable when the bytes did not make it. Call it in the same turn of
        the loop as the append: the write may fail before the next one.
        """
        return self._flush.durable(end, wait=wait)

    @property
    def why_unwritable(self) -> str | None:
        """Why messages are refused right now, None when they are taken."""
        if self._state != "running" or self._read_only:
            return self._why_closed
        if self._options.broker_role == "SLAVE":
            return "this broker is a slave; send to its master"
        flush = self._flush
        return flush.failure or flush.trouble or self._log.trouble or self._upkeep.trouble

    @property
    def why_not_ready(self) -> str | None:
        """Why messages are refused, or failed a moment ago; None when they are stored."""
        return self.why_unwritable or self._log.failing

    # --- the log as it is, for replication -----------------------------------------------------
    @property
    def log_start(self) -> int:
        return self._log.min_offset

    @property
    def log_end(self) -> int:
        """The written end: bytes below it may be sent."""
        return self._log.written_end

    @property
    def durable_end(self) -> int:
        """What this disk has: synced with SYNC_FLUSH, else written."""
        return self._flush.durable_end

    @property
    def last_store_ms(self) -> int:
        return self._log.written_ms

    @property
    def written(self) -> Signal[None]:
        """Fires once per write to the log."""
        return self._flush.written

    def log_bytes(self, offset: int, size_max: int) -> memoryview | None:
        return self._log.bytes_from(offset, size_max)

    def fingerprint(self, end: int) -> tuple[int, int]:
        return self._log.fingerprint(end)

    def require_acks(self, available: Callable[[int], bool]) -> None:
        self._flush.require_acks(available)

    @property
    def waits_for_slaves(self) -> bool:
        """Whether `require_acks` was called."""
        return self._flush.waits_for_slaves

    def acknowledge(self, end: int) -> None:
        self._flush.acknowledge(end)

    def take(self, offset: int, data: bytes | bytearray | memoryview) -> int:
        """Append what is whole at the front of a piece of the master's log; see `Log.take`."""
        flush = self._flush
        why = self._why_closed or flush.failure or flush.overfull or self._upkeep.backlog
        if why is not None:
            raise StoreUnwritable(why)
        return self._log.take(offset, data)

    def begin_at(self, offset: int) -> None:
        """Have a log without any record begin at `offset`; StoreError when it has one."""
        if self._why_closed is not None:
            raise StoreUnwritable(self._why_closed)
        self._log.begin_at(offset)
        self._flush.begin_at(offset)
        self._dispatch.cursor = offset

    @property
    def _why_closed(self) -> str | None:
        if self._state != "running":
            return f"the store is {self._state}"
        return "the store was opened for reading only" if self._read_only else None

    # --- reading -------------------------------------------------------------------------------
    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        *,
        matches: Callable[[int], bool] | None = None,
        matches_record: Callable[[memoryview], bool] | None = None,
        records_max: int | None = None,
    ) -> Batch:
        """Messages from `offset` on, within the limits for warm or cold data.

        `matches` sees the tags code of an entry, `matches_record` the whole record of at most
        `records_max` entries.
        """
        return self._reader.read(
            topic, queue_id, offset, max_count, matches, matches_record, records_max
        )

    @property
    def compiled_reader(self) -> Reader:
        """The door for compiled code, which reads plain messages by itself (`speed.pulls`)."""
        return self._reader

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """First offset, and the one the next visible message gets; (0, 0) when unknown."""
        queue = self._queues.get(topic, queue_id)
        return (0, 0) if queue is None else (queue.min_offset, queue.max_offset)

    def entries(
        self, topic: str, queue_id: int, offset: int, max_count: int
    ) -> list[tuple[int, int, int]]:
        """Log offset, size and tags code of consecutive messages from `offset` on.

        Nothing outside the queue; fewer than wanted at the end of a file. An entry without a
        message (its topic was deleted, its log is gone) names no `record`.
        """
        return self._reader.entries(topic, queue_id, offset, max_count)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """First offset stored at or after that time; the queue's end when there is none."""
        return self._reader.offset_by_time(topic, queue_id, timestamp_ms)

    def store_time(self, topic: str, queue_id: int, queue_offset: int) -> int:
        """Store time of one message, -1 when there is none."""
        return self._reader.store_time(topic, queue_id, queue_offset)

    def in_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        """Whether reading from there is cheap; True for a message that does not exist."""
        return self._reader.in_memory(topic, queue_id, queue_offset)

    def record(self, log_offset: int, size: int | None = None) -> bytes | None:
        """The durable record that begins there, None when none does."""
        return self._reader.record(log_offset, size)

    def due_messages(
        self, topic: str, queue_id: int, offset: int, count: int, bytes_max: int
    ) -> DueMessages:
        """Messages that wait there, to be staged under the topics that they are meant for.

        From `offset` on, at most `count` (and `bytes_max`, but for the first), as far as they
        are plain: maybe none.
        """
        return self._reader.due_messages(topic, queue_id, offset, count, bytes_max)

    def find(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> Found:
        """Messages whose key has the same hash, in log order; compare the keys again."""
        return self._reader.find(topic, key, max_count, begin_ms, end_ms)

    def queues(self) -> Mapping[str, Sequence[int]]:
        """Queue ids by topic, for every queue that has files or messages."""
        return self._queues.by_topic()

    def delete_topic(self, topic: str) -> None:
        """Remove the queues of a topic; offsets start again, the log keeps its records."""
        check_path_names(topic, 0)
        if self._state == "running" and not self._read_only:
            self._log.write()  # what is staged may be taken back, and its offsets given again
            self._removed.note(topic, self._log.end, self._log.min_offset)
        for queue in self._queues:
            if queue.topic == topic:
                self._queues.drop(queue)
        self._log.forget(topic)

    def delete_expired(self) -> None:
        """Remove what has expired soon, whatever the hour; the work goes on in the background."""
        self._retention.request()

    def clean_queues(self) -> None:
        """Remove queue and index files without a message soon, also those that stayed before."""
        self._retention.request_derived()

    def follow_settings(self) -> None:
        """Settings that the store does not read where it uses them have changed."""
        self._reader.follow_settings()

    def facts(self) -> StoreFacts:
        return StoreFacts(
            min_offset=self._log.min_offset,
            max_offset=self._flush.durable_end,
            written_offset=self._log.written_end,
            flushed_offset=self._flush.synced_end,
            dispatch_behind_bytes=self._log.written_end - self._dispatch.cursor,
            disk_ratio=self._upkeep.disk_ratio,
            earliest_ms=self._reader.earliest_ms(),
            put_count=self._put_count,
            put_bytes=self._put_bytes,
            put_failed_count=self._put_failed_count,
            queue_count=len(self._queues),
            unwritable=self.why_unwritable,
        )

    @property
    def deletions(self) -> Removed:
        """Which topics were deleted, and where the log ended then."""
        return self._removed

    def follow_deletions(self, ends: Mapping[str, int]) -> None:
        """The master of this slave deleted these topics when its log ended there: before or behind
        the end of this one."""
        for topic in ends:
            check_path_names(topic, 0)
        self._removed.note_all(ends, self._log.min_offset)
        for queue in self._queues:
            # A queue of the topic's next life began anew with its first record, so none has both.
            if queue.log_end <= ends.get(queue.topic, -1):
                self._queues.drop(queue)
        for topic in ends:
            self._log.forget(topic)

    # --- inside --------------------------------------------------------------------------------
    def _make_queues(self) -> Queues:
        return Queues(
            os.path.join(self._root, "consumequeue"),
            self._options.mapped_file_size_consume_queue,
            self._env.disk,
            self._derived_files,
            read_only=self._read_only,
        )

    def _make_index(self) -> Index:
        return Index(
            os.path.join(self._root, "index"),
            self._options.max_hash_slot_num,
            self._options.max_index_num,
            self._env.disk,
            self._env.clock,
            self._derived_files,
            read_only=self._read_only,
        )

    def _make_flush(self) -> Flush:
        options = self._options
        flush = Flush(
            self._log,
            self._env,
            self._advance,
            synced=options.flush_disk_type == "SYNC_FLUSH",
            timeout_ms=options.sync_flush_timeout,
            interval_ms=options.flush_interval_commit_log,
            slave_timeout_ms=options.slave_timeout,
            busy_ms=lambda: options.os_page_cache_busy_time_out_mills,
            pooled=pool_of(options) is not None,
        )
        flush.on_sync_failed = self._mark_doubt
        return flush

    def _stage_drafts(self, drafts: Sequence[Draft]) -> list[Stored]:
        why = self.why_unwritable
        if why is not None:
            busy = self._flush.failure is None and self._flush.trouble is not None
            raise (StoreBusy if busy else StoreUnwritable)(why)
        records = DraftRecords(drafts, self._options.max_message_size, self._log.segment_bytes)
        _, _, refusal = self._log.stage(records)
        if refusal is None:
            lost = self._log.relieve()
            if records.stored and records.stored[-1].end > self._log.written_end:
                refusal = lost
        if refusal is not None:
            raise refusal
        return records.stored

    def _path(self, name: str) -> str:
        return os.path.join(self._root, name)

    def _advance(self, end: int) -> None:
        self._dispatch.advance(end)
        self._upkeep.nudge()

    async def _recover(self) -> None:
        disk = self._env.disk
        self._removed.load()
        self._queues.load(self._disown)
        if self._index is not None:
            self._index.load()
        recovery = Recovery(
            self._parts,
            self._env,
            load_checkpoint(disk, self._path("checkpoint")),
            _nothing if self._read_only else self._upkeep.relieve,
            self._disown,
            self._disown_index,
            check_crc=self._options.check_crc_on_recover,
            read_only=self._read_only,
            inventory=load_inventory(disk, self._root),
            doubtful=self._doubtful(),
        )
        found = await recovery.run(clean=not disk.exists(self._path("abort")))
        self._removed.clip(found.min_offset, found.end)
        self._log.open(found.min_offset, found.end, found.last_ms)
        self._flush.open(found.end, found.last_ms)

    def _disown(self) -> None:
        """Note on disk that queues are being built again, before anything of them is given up.

        Otherwise a crash before the next checkpoint would leave an old one that vouches for
        entries which were only in memory.
        """
        if self._read_only:
            return
        path = self._path("checkpoint")
        known = load_checkpoint(self._env.disk, path)
        if known.queue_ms:
            save_checkpoint(self._env.disk, path, dataclasses.replace(known, queue_ms=0))
        self._mark_running()

    def _disown_index(self, index_ms: int) -> None:
        """The same for the index, which is being built again from records of `index_ms` on."""
        if self._read_only:
            return
        path = self._path("checkpoint")
        known = load_checkpoint(self._env.disk, path)
        if known.index_ms > index_ms:
            save_checkpoint(self._env.disk, path, dataclasses.replace(known, index_ms=index_ms))

    def _mark_running(self) -> None:
        """From here on a start without a stop in between is an abnormal one."""
        if not self._env.disk.exists(self._path("abort")):
            self._env.disk.create_segment(self._path("abort"), len(ABORT_PLAIN)).close()

    def _give_mark_a_block(self) -> None:
        """Write the mark, so that a full disk cannot keep `_mark_doubt` from changing it."""
        try:
            self._write_mark(ABORT_PLAIN)
        except OSError as error:
            _log.warning("abort_file_without_block error=%s", error)  # a start needs no space

    def _write_mark(self, mark: bytes) -> None:
        file = self._env.disk.open_segment(self._path("abort"))
        try:
            file.write(mark, 0)
        finally:
            file.close()

    def _mark_doubt(self) -> None:
        """A sync failed: the next start must not take what it can read for what is on disk.

        Nothing is synced here: the mark has to outlive this process, not a power cut, after
        which only what is on the disk can be read anyway.
        """
        try:
            self._mark_running()
            self._write_mark(ABORT_DOUBT)
        except (OSError, ValueError) as error:
            _log.error("failed_sync_not_marked error=%s", error)

    def _doubtful(self) -> bool:
        path = self._path("abort")
        return self._env.disk.exists(path) and self._env.disk.read(path)[:1] == ABORT_DOUBT

    async def _release(self, *, keep_spare: bool = False) -> None:
        await self._flush.close()
        await self._log.close(keep_spare=keep_spare)
        self._log_files.close()
        self._derived_files.close()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.release()


async def _nothing() -> None:
    """A store that may not write keeps what it derives in memory."""
