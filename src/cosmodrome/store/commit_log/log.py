"""The commit log: every message, one record after the other, in files of one size.

Theory of operation: `stage` is the way in for messages, `take` for what a slave gets of its
master's log. `stage` gives each record its offset in the log and in
its queue and has it encoded into the buffer of the current file; at the end of the loop's turn
one `write` per file carries everything staged. Three ends follow each other:
`end` (staged) >= `written_end` (in the kernel) >= the durable end, which is kept in `flush`.
What was written waits in `spans`, with all that dispatch needs of it, until it is durable.
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
import zlib
from collections import deque
from collections.abc import Callable

from cosmodrome.env.base import Env, SegmentFile
from cosmodrome.errors import StoreBusy, StoreError, StoreUnwritable, name_of, reason_of
from cosmodrome.layout import (
    BLANK,
    BLANK_BYTES,
    MAGIC_BLANK,
)
from cosmodrome.store.commit_log.copy import whole_spans
from cosmodrome.store.commit_log.failures import Failures
from cosmodrome.store.commit_log.queue_ends import QueueEnds
from cosmodrome.store.commit_log.segment import OpenFiles, Warming, create_lasting, segment_path
from cosmodrome.store.commit_log.spare import Spare
from cosmodrome.store.commit_log.staging import Chunk, Span, Stageable, Undo

STAGED_BYTES_MAX = 4 * 1024 * 1024
FINGERPRINT_BYTES = 64 * 1024

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """How much may be acknowledged before it is written, and for how long."""

    size_bytes: int
    interval_seconds: float


class Log:
    def __init__(
        self,
        directory: str,
        segment_bytes: int,
        env: Env,
        files: OpenFiles,
        next_offset: Callable[[str, int], int],
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
        self._env = env
        self._files = files
        self.queue_ends = QueueEnds(next_offset)
        self._pool = pool
        self._warming = warming
        self._zeros_ahead_bytes = zeros_ahead_bytes
        self._zeros_end = 0  # the log's blocks are written up to there, with zeros behind the data
        self._fail_fast = fail_fast
        self.trouble: str | None = None  # why messages are refused for now
        self._due: asyncio.Handle | None = None
        self._last_ms = 0
        self._staged: list[Chunk] = []
        self._staged_bytes = 0
        self.spans: deque[Span] = deque()  # written, in log order; dispatch takes them away
        self._writers: dict[int, SegmentFile] = {}
        self._dirty: set[int] = set()
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

    def begin_at(self, offset: int) -> None:
        """Have a log without any record begin at `offset`, where a file begins.

        StoreError when it has records. The files that were made for another place are removed.
        """
        if self.end != self.min_offset:
            raise StoreError(
                f"the log has records from {self.min_offset} to {self.end}; only an empty one can"
                f" begin at {offset}"
            )
        if offset < 0 or offset % self.segment_bytes:
            raise StoreError(
                f"a log cannot begin at {offset}: its files begin at multiples of"
                f" {self.segment_bytes} bytes (mappedFileSizeCommitLog)"
            )
        if offset == self.end:
            return
        self._drop_writers()
        self._stale.clear()
        self._zeros_end = 0
        self.min_offset = self.end = self.written_end = offset
        self.prepare()

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
        for base, file in sorted(self._writers.items(), reverse=True):  # a crash leaves no hole
            file.close()
            if base >= self.written_end and not keep_spare:
                self._env.disk.remove(file.path)
        self._writers.clear()
        self._staged.clear()
        self.spans.clear()
        self._loop = None

    # --- staging ---------------------------------------------------------------------------
    def stage(self, records: Stageable) -> tuple[int, int, StoreUnwritable | None]:
        """Stage what fits, request by request; how many bytes and messages.

        The error says why something is left over. The caller registers who waits for what was
        staged and then calls `relieve`.
        """
        if self._loop is None:
            return 0, 0, StoreUnwritable("the store is not running; start it first")
        size = messages = 0
        while records.left:
            chunk = self._staged[-1] if self._staged else None
            needed = self.end + records.next_bytes + BLANK_BYTES
            if chunk is None or needed > chunk.base + self.segment_bytes or self._pool is not None:
                try:
                    chunk = self._room(records.next_bytes)
                except StoreUnwritable as error:
                    return size, messages, error
            store_ms = self._env.clock.now_ms()
            if store_ms < self._last_ms:
                store_ms = self._last_ms
            room = chunk.base + self.segment_bytes - self.end - BLANK_BYTES
            if self._pool is not None:
                room = min(room, self._pool.size_bytes - self._staged_bytes)
            taken, count, runs, keys = records.encode(
                chunk.data, self.end, room, store_ms, self.queue_ends.find, chunk.undo
            )
            chunk.add(taken, count, store_ms, runs, keys)
            self.end = chunk.end
            self._last_ms = store_ms
            self._staged_bytes += taken
            size += taken
            messages += count
        return size, messages, None

    def take(self, offset: int, data: bytes | bytearray | memoryview) -> int:
        """Append what is whole at the front of `data`, which continues the log at `offset`.

        Returns its size, 0 when more has to come. Nothing behind the current file's end is taken:
        call it again with the rest. StoreCorrupt, StoreUnwritable: nothing was taken.
        """
        if self._pool is not None:
            raise StoreUnwritable(
                "a log that is written from a pool takes no copy: set transientStorePoolEnable to"
                " false"
            )
        if offset != self.end or self.end != self.written_end:
            raise StoreUnwritable(f"the log ends at {self.end}; {offset} does not continue it")
        base = self.base_of(offset)
        file = self._writer(base)
        undo: Undo = []
        plain_span = functools.partial(self.queue_ends.plain_span, undo)
        with memoryview(data) as view:
            spans = whole_spans(view, offset, base + self.segment_bytes, plain_span)
            if not spans:
                return 0
            last = spans[-1]
            size = last.end - offset
            undo += [self.queue_ends.follow(span) for span in spans if not span.followed]
            chunk = Chunk(file, base, start=offset, end=last.end, undo=undo, spans=spans)
            chunk.last_ms = last.last_ms
            chunk.copied = view[:size]
            self.end = chunk.end
            self._last_ms = max(self._last_ms, chunk.last_ms)
            self._staged.append(chunk)
            failure = self.write()
        if failure is not None:
            raise failure
        return size

    def relieve(self, *, at_once: bool = False) -> StoreUnwritable | None:
        """Have written what is staged: now if it is much, else at the end of this turn.

        With `at_once` nobody else is expected to stage anything in this turn. Those who wait
        hear of a failed write, which is returned too. A pool is written when its time has come.
        """
        if not self._staged:
            return None
        if self._pool is not None:
            if self._staged_bytes > min(STAGED_BYTES_MAX, self._pool.size_bytes // 2):
                self._write_in(0.0)
            elif self._due is None:
                self._write_in(self._pool.interval_seconds)
        elif at_once or self._staged_bytes > STAGED_BYTES_MAX:
            return self.write()
        elif self._due is None:
            self._write_in(0.0)
        return None

    def forget(self, topic: str) -> None:
        """The queues of this topic are gone: their offsets start again."""
        self.queue_ends.forget(topic)

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
        if staged and failure is None:
            self._failures.why = None
        if self._pool is not None:
            self.trouble = None if failure is None else str(failure)
        elif failure is not None:
            self.on_lost(self.written_end, failure)
        if self.written_end > before:
            self.on_written()
        return failure

    @property
    def failing(self) -> str | None:
        """Why the last write failed, if that was a moment ago. The next one is tried all the same:
        that is how sends resume."""
        return self._failures.recent

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

    def bytes_from(self, offset: int, size_max: int) -> memoryview | None:
        """Written bytes of one file from `offset` on, at most `size_max`; None when there are none.

        The blank at a file's end is there with the zeros behind it.
        """
        stop = min(self.written_end, self.base_of(offset) + self.segment_bytes, offset + size_max)
        return self.slice(offset, stop - offset, stop)

    def fingerprint(self, end: int) -> tuple[int, int]:
        """Where the last bytes before `end` begin, up to 64 KiB of one file, and their CRC-32.

        The zeros that fill a file are left out: they are the same in every log. Nothing is before
        the log's beginning: its fingerprint is (`end`, 0). ValueError when the log does not reach
        to `end`, or not any more.
        """
        if end == self.min_offset <= self.written_end:
            return end, 0
        base = max(self.base_of(end - 1), self.min_offset)
        view = self.slice(base, end - base, self.written_end)
        if view is None:
            raise ValueError(
                f"the log reaches from {self.min_offset} to {self.written_end}, not to {end}"
            )
        stop = len(view)
        if end % self.segment_bytes == 0:
            while stop and not bytes(view[max(0, stop - FINGERPRINT_BYTES) : stop]).strip(b"\0"):
                stop -= min(stop, FINGERPRINT_BYTES)
        start = max(0, stop - FINGERPRINT_BYTES)
        return base + start, zlib.crc32(view[start:stop])

    # --- inside ------------------------------------------------------------------------------
    def _drop_writers(self) -> None:
        """Remove the files that were made for records, of which there are none yet."""
        spare = self._spare
        if spare is not None:
            try:
                self._writers[spare.base] = spare.take(wait=True)
            except OSError as error:
                _log.warning("spare_log_file_not_made base=%d error=%s", spare.base, error)
            self._spare = None
        for base in sorted(self._writers, reverse=True):  # what a crash leaves has no hole
            file = self._writers.pop(base)
            self.drop_view(base)
            file.close()
            self._env.disk.remove(file.path)

    def _room(self, size: int) -> Chunk:
        """The chunk that takes `size` more bytes, after rolling to the next file if needed."""
        if self._pool is not None and self._staged_bytes + size > self._pool.size_bytes:
            raise StoreBusy(
                f"the transient store pool is full: {self._staged_bytes} bytes wait to be written;"
                " send again, or raise transientStorePoolSize"
            )
        end = self.end
        base = end - end % self.segment_bytes
        chunk = self._staged[-1] if self._staged else None
        fresh = chunk is None or chunk.base != base
        if chunk is None or fresh:
            file = self._writers.get(base) or self._writer(base)
            chunk = Chunk(file, base, start=end, end=end)
        left = base + self.segment_bytes - end
        if size + BLANK_BYTES > left:
            # The next file first: if it cannot be made, nothing has changed.
            base += self.segment_bytes
            following = Chunk(self._writer(base), base, start=base, end=base)
            chunk.add_blank(BLANK.pack(left, MAGIC_BLANK), base)
            self.end = base
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

    def _write_chunk(self, chunk: Chunk) -> Exception | None:
        """What fails is returned: what is staged must be taken back, not forgotten."""
        data: bytes | bytearray | memoryview = chunk.data
        if chunk.copied is not None:
            data = chunk.copied
        data_end = chunk.start + len(data)
        stale = self._stale.get(chunk.base, 0)
        if stale > data_end:
            data = bytes(data) + bytes(stale - data_end)
        try:
            if not chunk.described:
                chunk.describe()
        except Exception as error:
            return error  # nothing was written yet
        try:
            if self._zeros_ahead_bytes and data_end > self._zeros_end:
                self._put_zeros_ahead(chunk, data_end)
            chunk.file.write(data, chunk.start - chunk.base)
        except Exception as error:
            self._stale[chunk.base] = max(stale, data_end)
            return error
        if stale:
            del self._stale[chunk.base]
        self._dirty.add(chunk.base)
        self.written_end = chunk.end
        if chunk.last_ms > self.written_ms:
            self.written_ms = chunk.last_ms
        self.spans += chunk.spans
        return None

    def _put_zeros_ahead(self, chunk: Chunk, data_end: int) -> None:
        """Have the blocks behind the data written before data comes.

        A block that was only allocated has to be noted as written in the file system's journal
        when its data is synced; with zeros in it a sync carries the data and nothing else. All
        of it happens here, on the loop, so that zeros can never overtake data.
        """
        end = min(data_end + self._zeros_ahead_bytes, chunk.base + self.segment_bytes)
        chunk.file.write(bytes(end - data_end), data_end - chunk.base)
        self._zeros_end = end

    def _take_back(self, chunks: list[Chunk], error: Exception) -> StoreUnwritable:
        self._failures.log(chunks[0].file.path, chunks[0].start, error)
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
        self._failures.why = (
            f"the commit log could not be written ({reason_of(error)}, file"
            f" {name_of(chunks[0].file.path)}); free disk space or repair the disk, sends resume by"
            " themselves"
        )
        return StoreUnwritable(self._failures.why)

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
            self._failures.log(path, base, error)
            self._failures.why = (
                f"the log file {name_of(path)} could not be made ({reason_of(error)});"
                " free disk space or check the directory's permissions, sends resume by"
                " themselves"
            )
            raise StoreUnwritable(self._failures.why) from error
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
