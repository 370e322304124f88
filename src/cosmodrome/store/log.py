"""The commit log: every message, one record after the other, in files of one size.

Theory of operation: `append` only stages. It gives each record its place in the log and in
its queue and encodes it into the buffer of the current file; at the end of the loop's turn
one `write` per file carries everything staged. Three ends follow each other:
`end` (staged) >= `written_end` (in the kernel) >= the durable end, which is kept in `flush`.
With a pool (transientStorePoolEnable) staged records are acknowledged and stay in memory until
the next commit: then a failed write keeps them for the next one instead of taking them back.

Invariants: a record never crosses a file's end; eight bytes for the blank record are always
left; store times never go backwards. When a write fails everything staged is taken back,
log and queue offsets alike, as if it had never been asked for; bytes that a failed write
may have left behind the end are zeroed by the next write that succeeds there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from cosmodrome import speed
from cosmodrome.env.base import Env, SegmentFile
from cosmodrome.errors import MessageTooLarge, StoreBusy, StoreUnwritable
from cosmodrome.layout import (
    BLANK,
    BLANK_BYTES,
    HOST_V4_BYTES,
    HOST_V6_BYTES,
    MAGIC_BLANK,
    PROPERTIES_BYTES_MAX,
    RECORD_BYTES_MIN,
    SECTOR_BYTES,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_TRANSACTION_MASK,
    TOPIC_BYTES_MAX,
)
from cosmodrome.store.failures import Failures
from cosmodrome.store.recent import Recent
from cosmodrome.store.segment import OpenFiles, Warming, create_lasting, segment_path
from cosmodrome.store.spare import Spare
from cosmodrome.store.values import Draft, Stored

STAGED_BYTES_MAX = 4 * 1024 * 1024
RECORD_OVERHEAD_BYTES_MAX = 65_536  # topic, properties and fixed fields beside the body

QueueKey = tuple[str, int]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Chunk:
    """What is staged for one file."""

    file: SegmentFile
    base: int
    start: int
    end: int
    data: bytearray
    undo: list[Callable[[], None]]  # take queue offsets back, in the order of taking
    last_ms: int = 0  # store time of the last record
    told: bool = True  # `Log.told` has all of its records


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """How much may be acknowledged before it is written, and for how long."""

    size_bytes: int
    interval_seconds: float


class Told(NamedTuple):
    """What whoever encoded records said about them, so that dispatch need not read them."""

    start: int
    end: int
    last_ms: int
    runs: Collection[speed.Run]
    keys: bytes


class Ready(Protocol):
    """Requests whose messages only need their places; see `stage`."""

    @property
    def left(self) -> int:
        """Requests that are not encoded yet."""

    @property
    def next_bytes(self) -> int:
        """Room that the next request needs, contiguous in one file."""

    def encode(
        self,
        out: bytearray,
        log_offset: int,
        room: int,
        store_ms: int,
        place: Callable[[str, int], speed.Place],
        undo: list[Callable[[], None]],
    ) -> tuple[Any, ...]:
        """Append the records of as many requests as fit.

        `place` gives the place of a queue, which is moved on for what is appended; what moves it
        back goes to `undo`. How many bytes and messages; whoever knows adds the runs and keys
        that `speed.gather` would find in them.
        """


class Log:
    def __init__(
        self,
        directory: str,
        segment_bytes: int,
        body_bytes_max: int,
        env: Env,
        files: OpenFiles,
        queue_end: Callable[[str, int], int],
        *,
        pool: Pool | None = None,
        warming: Warming | None = None,
        zeros_ahead_bytes: int = 0,
        fail_fast: bool = False,
    ) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.min_offset = 0
        self.end = 0
        self.written_end = 0
        self.written_ms = 0  # store time of the last written record
        self.on_written: Callable[[], None] = lambda: None
        self.on_lost: Callable[[int, StoreUnwritable], None] = lambda start, error: None
        self._body_bytes_max = body_bytes_max
        self._env = env
        self._files = files
        self._queue_end = queue_end
        self._pool = pool
        self._warming = warming
        self._zeros_ahead_bytes = zeros_ahead_bytes
        self._zeros_end = 0  # the log's blocks are written up to there, with zeros behind the data
        self._fail_fast = fail_fast
        self.trouble: str | None = None  # why messages are refused for now
        self._due: asyncio.Handle | None = None
        self._places: dict[QueueKey, speed.Place] = {}
        self._last_ms = 0
        self._staged: list[_Chunk] = []
        self._staged_bytes = 0
        self.recent = Recent()  # what was written and not dispatched
        self._writers: dict[int, SegmentFile] = {}
        self._dirty: set[int] = set()
        self.told: deque[Told] = deque()  # in log order; dispatch takes them away
        self._failures = Failures()
        self._stale: dict[int, int] = {}  # file -> end of what a failed write may have left
        self._spare: Spare | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- life ------------------------------------------------------------------------------
    def open(self, min_offset: int, end: int, last_ms: int) -> None:
        """Take over after recovery: the log reaches from `min_offset` to `end`."""
        self._loop = asyncio.get_running_loop()
        self.min_offset = min_offset
        self.end = self.written_end = end
        self._last_ms = self.written_ms = last_ms

    def prepare(self) -> None:
        """Make the file that the next record needs, so that an unusable disk shows at start."""
        self._writer(self.base_of(self.end))

    async def close(self, *, keep_spare: bool = False) -> None:
        """Release the files; a file made ahead that holds nothing is removed."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        spare, self._spare = self._spare, None
        if spare is not None:
            made = await spare.give_up()
            if made is not None:
                self._writers[spare.base] = made
        for base, file in self._writers.items():
            file.close()
            if base >= self.written_end and not keep_spare:
                self._env.disk.remove(file.path)
        self._writers.clear()
        self._staged.clear()
        self.told.clear()
        self.recent.clear()
        self._loop = None

    # --- appending -------------------------------------------------------------------------
    def append(self, drafts: Sequence[Draft]) -> list[Stored]:
        """Stage records, all or none, contiguous in one file."""
        if self._loop is None:
            raise StoreUnwritable("the store is not running; start it first")
        encoded = [self._encode_texts(draft) for draft in drafts]
        total = sum(size for _, _, size in encoded)
        if total + BLANK_BYTES > self.segment_bytes:
            raise MessageTooLarge(
                f"{total} bytes of records do not fit a commit-log file of {self.segment_bytes}"
                " bytes; send less at once or raise mappedFileSizeCommitLog"
            )
        if self._pool is not None and self._staged_bytes + total > self._pool.size_bytes:
            raise StoreBusy(
                f"the transient store pool is full: {self._staged_bytes} bytes wait to be written;"
                " send again, or raise transientStorePoolSize"
            )
        chunk = self._room(total)
        if self._due is None:
            self._write_in(0.0 if self._pool is None else self._pool.interval_seconds)
        store_ms = self._last_ms = max(self._last_ms, self._env.clock.now_ms())
        mark = len(chunk.data)
        stored: list[Stored] = []
        moved: list[tuple[speed.Place, int]] = []
        offset = self.end
        try:
            for draft, (topic, properties, size) in zip(drafts, encoded, strict=True):
                queue_offset = self._take_queue_offset(draft, moved)
                wrote = speed.encode_record(
                    chunk.data,
                    offset,
                    queue_offset,
                    store_ms,
                    topic,
                    draft.queue_id,
                    draft.flag,
                    draft.sys_flag,
                    draft.born_ms,
                    draft.born_host,
                    draft.store_host,
                    draft.reconsume_times,
                    draft.prepared_offset,
                    draft.body,
                    properties,
                )
                assert wrote == size, (wrote, size)
                stored.append(Stored(offset, size, draft.queue_id, queue_offset))
                offset += size
        except BaseException:
            del chunk.data[mark:]
            speed.put_back(moved)
            raise
        chunk.undo.append(functools.partial(speed.put_back, moved))
        chunk.told = False
        self.end = chunk.end = offset
        chunk.last_ms = store_ms
        self._staged_bytes += total
        if self._pool is not None:
            if self._staged_bytes > min(STAGED_BYTES_MAX, self._pool.size_bytes // 2):
                self._write_in(0.0)
        elif self._staged_bytes > STAGED_BYTES_MAX:
            error = self.write()
            if error is not None and offset > self.written_end:
                raise error
        return stored

    def stage(self, ready: Ready) -> tuple[int, int]:
        """Stage what fits, request by request; how many bytes and messages.

        What is left over (no file to write to, a pool) is for `append`, which says why. The
        caller registers who waits for it and then calls `relieve`.
        """
        size = messages = 0
        while ready.left and self._pool is None and self._loop is not None:
            chunk = self._staged[-1] if self._staged else None
            needed = self.end + ready.next_bytes + BLANK_BYTES
            if chunk is None or needed > chunk.base + self.segment_bytes:
                try:
                    chunk = self._room(ready.next_bytes)
                except StoreUnwritable:
                    break
            store_ms = self._env.clock.now_ms()
            if store_ms < self._last_ms:
                store_ms = self._last_ms
            room = chunk.base + self.segment_bytes - self.end - BLANK_BYTES
            taken, count, *facts = ready.encode(
                chunk.data, self.end, room, store_ms, self.place, chunk.undo
            )
            if not facts:
                chunk.told = False
            elif taken:
                self.told.append(Told(self.end, self.end + taken, store_ms, *facts))
            self.end = chunk.end = self.end + taken
            self._last_ms = chunk.last_ms = store_ms
            self._staged_bytes += taken
            size += taken
            messages += count
        return size, messages

    def relieve(self, *, at_once: bool = False) -> None:
        """Have written what is staged: now if it is much, else at the end of this turn.

        With `at_once` nobody else is expected to stage anything in this turn. What fails is told
        to those who wait for it.
        """
        if not self._staged or self._pool is not None:
            return
        if at_once or self._staged_bytes > STAGED_BYTES_MAX:
            self.write()
        else:
            self.remind()

    def remind(self) -> None:
        """Somebody waits for what is staged."""
        if self._staged and self._due is None:
            self._write_in(0.0)

    def place(self, topic: str, queue_id: int) -> speed.Place:
        """The place of a queue; it may be kept for as long as it is not negative."""
        place = self._places.get((topic, queue_id))
        if place is None:
            place = speed.Place(topic, queue_id, self._queue_end(topic, queue_id))
            self._places[place.key] = place
        return place

    def forget(self, topic: str) -> None:
        """The queues of this topic are gone: their offsets start again."""
        for key in [key for key in self._places if key[0] == topic]:
            self._places.pop(key).next = -1

    def write(self) -> StoreUnwritable | None:
        """Carry everything staged to the kernel; what failed is taken back and returned."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        staged, self._staged = self._staged, []
        self._staged_bytes = 0
        failure: StoreUnwritable | None = None
        before = self.written_end
        for at, chunk in enumerate(staged):
            error = self._write_chunk(chunk)
            if error is not None:
                failure = self._take_back(staged[at:], error)
                break
        if self._pool is not None:
            self.trouble = None if failure is None else str(failure)
        elif failure is not None:
            self.on_lost(self.written_end, failure)
        if self.written_end > before:
            self.on_written()
        return failure

    # --- what flush needs --------------------------------------------------------------------
    def take_dirty(self) -> list[SegmentFile]:
        """Files written since the last call; the caller syncs them."""
        dirty = [self._writers[base] for base in sorted(self._dirty)]
        self._dirty.clear()
        return dirty

    def release(self, synced_end: int) -> None:
        """Close files that are full and synced."""
        for base in [b for b in self._writers if b + self.segment_bytes <= synced_end]:
            self._writers.pop(base).close()

    # --- reading -----------------------------------------------------------------------------
    def base_of(self, offset: int) -> int:
        return offset - offset % self.segment_bytes

    def path_of(self, base: int) -> str:
        return segment_path(self.directory, base)

    def view(self, base: int) -> memoryview:
        """The file that begins at `base`, which must hold data."""
        file = self._writers.get(base)
        return self._files.view(self.path_of(base)) if file is None else file.view

    def expire(self, base: int) -> None:
        """The log begins behind the file at `base`, which is about to be removed."""
        self.min_offset = max(self.min_offset, base + self.segment_bytes)
        self.drop_view(base)

    def drop_view(self, base: int) -> None:
        """The file at `base` is about to be removed."""
        self._files.forget(self.path_of(base))

    def slice(self, offset: int, size: int, end: int) -> memoryview | None:
        """`size` bytes at `offset` when all of them lie below `end` and in one file."""
        if offset < self.min_offset or size <= 0 or offset + size > end:
            return None
        base = self.base_of(offset)
        at = offset - base
        if at + size > self.segment_bytes:
            return None
        try:
            return self.view(base)[at : at + size]
        except OSError as error:
            _log.error("log_file_unreadable path=%s error=%s", self.path_of(base), error)
            return None

    # --- inside ------------------------------------------------------------------------------
    def _encode_texts(self, draft: Draft) -> tuple[bytes, bytes, int]:
        topic = draft.topic.encode()
        properties = draft.properties.encode()
        if not 0 < len(topic) <= TOPIC_BYTES_MAX:
            raise MessageTooLarge(
                f"the topic name has {len(topic)} bytes; 1 to {TOPIC_BYTES_MAX} are allowed"
            )
        if len(properties) > PROPERTIES_BYTES_MAX:
            raise MessageTooLarge(
                f"the properties have {len(properties)} bytes; at most {PROPERTIES_BYTES_MAX}"
                " are allowed, move large values into the body"
            )
        if "\0" in draft.properties and _looks_torn(properties):
            raise MessageTooLarge(
                "the properties hold or end with zero bytes in a way that cannot be told from"
                " data lost in a power cut; encode such values as text"
            )
        if len(draft.body) > self._body_bytes_max:
            raise MessageTooLarge(
                f"the body has {len(draft.body)} bytes; maxMessageSize is {self._body_bytes_max}"
            )
        hosts = len(draft.born_host), len(draft.store_host)
        if not all(length in (HOST_V4_BYTES, HOST_V6_BYTES) for length in hosts):
            raise ValueError(f"packed hosts of {hosts} bytes; 8 or 20 are expected")
        size = RECORD_BYTES_MIN + sum(hosts) - 2 * HOST_V4_BYTES
        size += len(draft.body) + len(topic) + len(properties)
        return topic, properties, size

    def _take_queue_offset(self, draft: Draft, moved: list[tuple[speed.Place, int]]) -> int:
        if draft.sys_flag & SYS_TRANSACTION_MASK in (SYS_PREPARED, SYS_ROLLBACK):
            return 0  # not in any queue
        place = self.place(draft.topic, draft.queue_id)
        queue_offset = place.next
        moved.append((place, queue_offset))
        place.next = queue_offset + 1
        return queue_offset

    def _room(self, size: int) -> _Chunk:
        """The chunk that takes `size` more bytes, after rolling to the next file if needed."""
        end = self.end
        base = end - end % self.segment_bytes
        chunk = self._staged[-1] if self._staged else None
        fresh = chunk is None or chunk.base != base
        if chunk is None or fresh:
            file = self._writers.get(base) or self._writer(base)
            chunk = _Chunk(file, base, end, end, bytearray(), [])
        left = base + self.segment_bytes - end
        if size + BLANK_BYTES > left:
            # The next file first: if it cannot be made, nothing has changed.
            base += self.segment_bytes
            following = _Chunk(self._writer(base), base, base, base, bytearray(), [])
            chunk.data += BLANK.pack(left, MAGIC_BLANK)
            chunk.told = False
            self.end = chunk.end = base
            if fresh:
                self._staged.append(chunk)
            chunk, fresh = following, True
        if fresh:
            self._staged.append(chunk)
        return chunk

    def _write_in(self, seconds: float) -> None:
        assert self._loop is not None
        if self._due is not None:
            self._due.cancel()
        if seconds > 0:
            self._due = self._loop.call_later(seconds, self.write)
        else:
            self._due = self._loop.call_soon(self.write)

    def _write_chunk(self, chunk: _Chunk) -> OSError | None:
        data = chunk.data
        data_end = chunk.start + len(data)
        stale = self._stale.get(chunk.base, 0)
        if stale > data_end:
            data = data + bytes(stale - data_end)
        try:
            if self._zeros_ahead_bytes and data_end > self._zeros_end:
                self._put_zeros_ahead(chunk, data_end)
            chunk.file.write(data, chunk.start - chunk.base)
        except OSError as error:
            self._stale[chunk.base] = max(stale, data_end)
            return error
        if stale:
            del self._stale[chunk.base]
        self._dirty.add(chunk.base)
        self.written_end = chunk.end
        if chunk.last_ms > self.written_ms:
            self.written_ms = chunk.last_ms
        if not chunk.told:
            self.recent.add(chunk.start, chunk.end, chunk.data)
        return None

    def _put_zeros_ahead(self, chunk: _Chunk, data_end: int) -> None:
        """Have the blocks behind the data written before data comes.

        A block that was only allocated has to be noted as written in the file system's journal
        when its data is synced; with zeros in it a sync carries the data and nothing else. All
        of it happens here, on the loop, so that zeros can never overtake data.
        """
        end = min(data_end + self._zeros_ahead_bytes, chunk.base + self.segment_bytes)
        chunk.file.write(bytes(end - data_end), data_end - chunk.base)
        self._zeros_end = end

    def _take_back(self, chunks: list[_Chunk], error: OSError) -> StoreUnwritable:
        self._failures.say(chunks[0].file.path, chunks[0].start, error)
        if self._pool is not None:
            # They were acknowledged: keep them, in front of all that comes, and try again.
            self._staged = chunks
            self._staged_bytes = sum(len(chunk.data) for chunk in chunks)
            self._write_in(self._pool.interval_seconds)
        else:
            for chunk in reversed(chunks):
                for undo in reversed(chunk.undo):
                    undo()
            self.end = chunks[0].start
            while self.told and self.told[-1].start >= self.end:
                self.told.pop()
        return StoreUnwritable(
            f"the commit log could not be written ({error.strerror or error}, file"
            f" {chunks[0].file.path}); free disk space or repair the disk, sends resume by"
            " themselves"
        )

    def _writer(self, base: int) -> SegmentFile:
        file = self._writers.get(base)
        if file is not None:
            return file
        path = self.path_of(base)
        try:
            spare = self._spare
            if spare is not None and spare.base == base:
                file = self._take_spare(spare)
            elif base < self.written_end or self._env.disk.exists(path):
                file = self._env.disk.open_segment(path)
            else:
                file = create_lasting(self._env.disk, path, self.segment_bytes)
        except OSError as error:
            _log.error("log_file_not_made path=%s error=%s", path, error)
            raise StoreUnwritable(
                f"the commit-log file {path} could not be made ({error.strerror or error});"
                " free disk space or check the directory's permissions, sends resume by"
                " themselves"
            ) from error
        self._writers[base] = file
        self._make_ahead(base + self.segment_bytes)
        return file

    def _take_spare(self, spare: Spare) -> SegmentFile:
        try:
            file = spare.take(wait=not self._fail_fast)
        except OSError:
            self._spare = None  # the next message tries to make it again
            raise
        self._spare = None
        return file

    def _make_ahead(self, base: int) -> None:
        if self._spare is not None or base in self._writers:
            return
        path, disk = self.path_of(base), self._env.disk
        self._spare = Spare(disk, path, base, self.segment_bytes, self._warming)
        self._spare.begin(self._env.offload)


def _looks_torn(properties: bytes) -> bool:
    """Whether recovery could, depending on their place, take these for a lost sector."""
    return properties.endswith(b"\0") or bytes(SECTOR_BYTES) in properties
