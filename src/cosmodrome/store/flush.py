"""How far the log is safe, and who waits for it.

SYNC_FLUSH: group commit. One sync runs at a time, off the loop, and covers all that was
written before it began; then the durable end moves there. ASYNC_FLUSH: the durable end
follows the written end at once and a sync runs now and then behind it.

Whenever the durable end moves, `advance` is called (dispatch) and only then the waiters are
resolved, so whoever was answered can read its message. Waiting costs one future per send,
no task, and one timer for all of them. A failed sync is final: the kernel may have dropped
the very pages, so nothing can be promised until recovery has read the log again.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from cosmodrome.env.base import Done, Env, Offload, SegmentFile, Syncer
from cosmodrome.errors import StoreUnwritable
from cosmodrome.store.log import Log
from cosmodrome.store.values import PutStatus

UNSYNCED_BYTES_MAX = 256 * 1024 * 1024  # a disk that hangs must not gather waiters for ever
BUSY_BYTES = 64 * 1024 * 1024  # a disk that also takes long for one sync must gather less

Tell = Callable[[PutStatus | StoreUnwritable], None]

_log = logging.getLogger(__name__)


class _Told:
    """Waits like a future, but is told in the very turn in which it is settled."""

    __slots__ = ("_done", "_tell")

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._done = False

    def done(self) -> bool:
        return self._done

    def set_result(self, outcome: PutStatus | StoreUnwritable) -> None:
        self._done = True
        try:
            self._tell(outcome)
        except Exception:
            _log.exception("settled_listener_failed")  # its fault must not stop the store


_Waiter = asyncio.Future[PutStatus] | _Told


def _fail(waiter: _Waiter, error: StoreUnwritable) -> None:
    if waiter.done():
        return
    if isinstance(waiter, _Told):
        waiter.set_result(error)
    else:
        waiter.set_exception(error)
        waiter.exception()  # a waiter whose task was cancelled is nobody's error


class _Waiters:
    """Ordered by the log offset they wait for."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, _Waiter]] = []
        self._order = itertools.count()

    def add(self, end: int, waiter: _Waiter) -> None:
        heapq.heappush(self.heap, (end, next(self._order), waiter))

    def reached(self, end: int) -> None:
        while self.heap and self.heap[0][0] <= end:
            waiter = heapq.heappop(self.heap)[2]
            if not waiter.done():
                waiter.set_result(PutStatus.OK)

    def fail_above(self, end: int, error: StoreUnwritable) -> None:
        lost = [item for item in self.heap if item[0] > end]
        self.heap = [item for item in self.heap if item[0] <= end]
        heapq.heapify(self.heap)
        for _, _, waiter in sorted(lost, key=lambda item: item[:2]):
            _fail(waiter, error)


Many = Callable[[list[Any], PutStatus | StoreUnwritable], None]


class Line:
    """Waits for many, who joined in the order of the log, and tells of all of them at once."""

    def __init__(self, tell: Many) -> None:
        self._tell = tell
        self.for_written: deque[tuple[int, Any]] = deque()
        self.for_durable: deque[tuple[int, float, Any]] = deque()  # end, deadline, who

    def written(self, end: int) -> None:
        line = self.for_written
        if line and line[0][0] <= end:
            told = []
            while line and line[0][0] <= end:
                told.append(line.popleft()[1])
            self._say(told, PutStatus.OK)

    def durable(self, end: int) -> None:
        line = self.for_durable
        if line and line[0][0] <= end:
            told = []
            while line and line[0][0] <= end:
                told.append(line.popleft()[2])
            self._say(told, PutStatus.OK)

    @property
    def deadline(self) -> float:
        """The next one, infinity when there is none."""
        return self.for_durable[0][1] if self.for_durable else math.inf

    def expire(self, now: float) -> None:
        """Tell those whose time is over."""
        line = self.for_durable
        told = []
        while line and line[0][1] <= now:
            told.append(line.popleft()[2])
        if told:
            self._say(told, PutStatus.FLUSH_DISK_TIMEOUT)

    def fail_above(self, end: int, error: StoreUnwritable) -> None:
        told = []
        while self.for_written and self.for_written[-1][0] > end:
            told.append(self.for_written.pop()[1])
        while self.for_durable and self.for_durable[-1][0] > end:
            told.append(self.for_durable.pop()[2])
        if told:
            self._say(told[::-1], error)

    def _say(self, told: list[Any], outcome: PutStatus | StoreUnwritable) -> None:
        try:
            self._tell(told, outcome)
        except Exception:
            _log.exception("settled_listener_failed")  # its fault must not stop the store


class Flush:
    def __init__(
        self,
        log: Log,
        env: Env,
        advance: Callable[[int], None],
        *,
        synced: bool,
        timeout_ms: int,
        interval_ms: int,
        busy_ms: Callable[[], int] = lambda: 1000,
        pooled: bool = False,
    ) -> None:
        self.durable_end = 0
        self.synced_end = 0
        self.synced_ms = 0  # store time of the last record known to be synced
        self.failure: str | None = None
        self._log = log
        self._advance = advance
        self._synced = synced
        self._pooled = pooled  # to be staged is enough for an acknowledgement
        self._timeout_seconds = timeout_ms / 1000
        self._interval_seconds = interval_ms / 1000
        self._busy_ms = busy_ms
        self._sync_began = 0.0
        self._for_written = _Waiters()
        self._for_durable = _Waiters()
        self._lines: list[Line] = []
        self._deadlines: deque[tuple[float, _Waiter]] = deque()
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._interval_timer: asyncio.TimerHandle | None = None
        self._new_syncer = env.syncer or functools.partial(_OffloadSyncer, env.offload)
        self._syncer: Syncer | None = None
        self._syncing = False
        self._at_sync_end: list[asyncio.Future[None]] = []
        self.on_sync_failed: Callable[[], None] = lambda: None
        log.on_written = self._on_written
        log.on_lost = self._on_lost

    def open(self, end: int, last_ms: int) -> None:
        """Everything up to `end` was recovered and synced."""
        self.durable_end = self.synced_end = end
        self.synced_ms = last_ms
        self._syncer = self._new_syncer()
        if not self._synced:
            self._wake_later()

    async def close(self) -> None:
        """No more timers, and no sync under way when this returns. Waiters are let go."""
        for timer in (self._deadline_timer, self._interval_timer):
            if timer is not None:
                timer.cancel()
        self._deadline_timer = self._interval_timer = None
        self._interval_seconds = 0
        while self._syncing:
            await self._sync_end()  # which may start another
        if self._syncer is not None:
            self._syncer.close()
            self._syncer = None
        gone = StoreUnwritable("the store was stopped before the message was synced")
        self._fail_above(-1, gone)
        self._deadlines.clear()

    @property
    def trouble(self) -> str | None:
        """Why messages are refused for a moment."""
        behind = self._log.end - self.synced_end
        if not self._synced or (behind <= BUSY_BYTES and behind <= UNSYNCED_BYTES_MAX):
            return None
        seconds = 0.0
        if self._syncing:
            seconds = asyncio.get_running_loop().time() - self._sync_began
        if behind <= UNSYNCED_BYTES_MAX and seconds * 1000 <= self._busy_ms():
            return None
        return (
            f"{behind} bytes wait for the disk to sync them, the sync under way has taken"
            f" {seconds:.1f} s; the disk is too slow or hangs: check it, sends resume by themselves"
        )

    def settle(self, end: int, *, wait: bool) -> asyncio.Future[PutStatus]:
        """Resolves once the log is written (or, with `wait`, durable) up to `end`.

        Call it in the turn of the loop that appended: offsets that a failed write took back
        are given out again, and only a waiter that was there at the time learns of it.
        """
        waiter: asyncio.Future[PutStatus] = asyncio.get_running_loop().create_future()
        self._enter(end, wait, waiter)
        return waiter

    def settle_then(self, end: int, tell: Tell, *, wait: bool) -> None:
        """Like `settle`, but calls `tell` with what the future would hold, without a detour."""
        self._enter(end, wait, _Told(tell))

    async def sync_all(self) -> None:
        """Return when everything written so far is synced, or syncing has failed for good."""
        target = self._log.written_end
        while self.failure is None and self.synced_end < target:
            self._begin_sync()
            if not self._syncing:
                break
            await self._sync_end()

    def fail(self, reason: str) -> None:
        """Take no more messages until a restart."""
        if self.failure is None:
            self.failure = reason
            _log.critical("store_unwritable reason=%s", reason)
        self._fail_above(-1, StoreUnwritable(self.failure))

    def line(self, tell: Many) -> Line:
        """A waiting line for `join`: who is in it is told in the turn in which it is settled."""
        line = Line(tell)
        self._lines.append(line)
        return line

    def join(self, line: Line, end: int, who: object, *, wait: bool) -> None:
        """Like `settle_then`, for what was staged in this turn, behind all that joined before."""
        if not wait:
            line.for_written.append((end, who))
        elif self._synced:
            loop = asyncio.get_running_loop()
            line.for_durable.append((end, loop.time() + self._timeout_seconds, who))
            if self._deadline_timer is None:
                self._deadline_timer = loop.call_later(self._timeout_seconds, self._expire)
        else:
            line.for_durable.append((end, math.inf, who))

    # --- inside ------------------------------------------------------------------------------
    def _enter(self, end: int, wait: bool, waiter: _Waiter) -> None:
        if end <= (self.durable_end if wait else self._log.written_end):
            waiter.set_result(PutStatus.OK)
        elif self.failure is not None:
            _fail(waiter, StoreUnwritable(self.failure))
        elif self._pooled and end <= self._log.end:
            waiter.set_result(PutStatus.OK)
        elif end > self._log.end:
            why = (
                f"the log ends at {self._log.end}, before {end}: the write that carried this"
                " message failed; send it again"
            )
            _fail(waiter, StoreUnwritable(why))
        else:
            self._log.remind()
            if not wait:
                self._for_written.add(end, waiter)
                return
            self._for_durable.add(end, waiter)
            if self._synced:
                self._add_deadline(waiter)

    def _add_deadline(self, waiter: _Waiter) -> None:
        loop = asyncio.get_running_loop()
        self._deadlines.append((loop.time() + self._timeout_seconds, waiter))
        if self._deadline_timer is None:
            self._deadline_timer = loop.call_later(self._timeout_seconds, self._expire)

    def _on_written(self) -> None:
        written_end = self._log.written_end
        if self._for_written.heap:
            self._for_written.reached(written_end)
        for line in self._lines:
            if line.for_written:
                line.written(written_end)
        if self._synced:
            self._begin_sync()
        elif self.failure is None:
            self._move(written_end)

    def _on_lost(self, start: int, error: StoreUnwritable) -> None:
        self._fail_above(start, error)

    def _fail_above(self, end: int, error: StoreUnwritable) -> None:
        self._for_durable.fail_above(end, error)
        self._for_written.fail_above(end, error)
        for line in self._lines:
            line.fail_above(end, error)

    def _begin_sync(self) -> None:
        target = self._log.written_end
        syncer = self._syncer
        if self._syncing or self.failure is not None or target == self.synced_end:
            return
        if syncer is None:
            return  # closed
        files = self._log.take_dirty()
        written_ms = self._log.written_ms
        self._sync_began = asyncio.get_running_loop().time()
        self._syncing = True
        done = functools.partial(self._on_synced, target, written_ms)
        syncer.begin(files, self.on_sync_failed, done)

    async def _sync_end(self) -> None:
        """Return when the sync under way has ended."""
        end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._at_sync_end.append(end)
        await end

    def _on_synced(self, target: int, written_ms: int, error: BaseException | None) -> None:
        self._syncing = False
        waiting, self._at_sync_end = self._at_sync_end, []
        for end in waiting:
            if not end.done():
                end.set_result(None)
        if isinstance(error, asyncio.CancelledError):
            return
        if error is not None:
            self.fail(
                f"syncing the commit log failed ({error}); the disk may be damaged: check it,"
                " then restart the broker, which recovers from the log"
            )
            return
        self.synced_end = target
        self.synced_ms = written_ms
        self._log.release(target)
        if self._synced:
            self._begin_sync()  # the next sync runs while this one's messages are dispatched
            self._move(target)

    def _move(self, end: int) -> None:
        self.durable_end = end
        try:
            self._advance(end)
        except Exception as error:
            _log.exception("dispatch_failed end=%d", end)
            self.fail(f"messages could not be put into their queues ({error}); see the log file")
        if self._for_durable.heap:
            self._for_durable.reached(end)
        for line in self._lines:
            if line.for_durable:
                line.durable(end)
        while self._deadlines and self._deadlines[0][1].done():
            self._deadlines.popleft()

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for line in self._lines:
            line.expire(now)
        while self._deadlines:
            deadline, waiter = self._deadlines[0]
            if not waiter.done():
                if deadline > now:
                    break
                waiter.set_result(PutStatus.FLUSH_DISK_TIMEOUT)
            self._deadlines.popleft()
        # Only now, because whoever was told may have come back.
        following = min([line.deadline for line in self._lines], default=math.inf)
        if self._deadlines:
            following = min(following, self._deadlines[0][0])
        self._deadline_timer = None
        if following < math.inf:
            self._deadline_timer = loop.call_at(following, self._expire)

    def _wake_later(self) -> None:
        if self._interval_seconds > 0:
            self._interval_timer = asyncio.get_running_loop().call_later(
                self._interval_seconds, self._on_interval
            )

    def _on_interval(self) -> None:
        self._begin_sync()
        self._wake_later()


class _OffloadSyncer:
    """For a world that brings no syncer of its own."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._running: asyncio.Future[None] | None = None  # the loop keeps weak references only

    def begin(self, files: Sequence[SegmentFile], failed: Callable[[], None], done: Done) -> None:
        def work() -> None:
            try:
                for file in files:
                    file.sync()
            except OSError:
                failed()  # here, off the loop: the process may not live to hear of it
                raise

        def ended(future: asyncio.Future[None]) -> None:
            self._running = None
            done(asyncio.CancelledError() if future.cancelled() else future.exception())

        self._running = asyncio.ensure_future(self._offload(work))
        self._running.add_done_callback(ended)

    def close(self) -> None:
        """Nothing is kept."""
