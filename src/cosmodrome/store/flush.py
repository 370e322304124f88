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
from collections import deque
from collections.abc import Callable

from cosmodrome.env.base import Env, SegmentFile
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
        self._heap: list[tuple[int, int, _Waiter]] = []
        self._order = itertools.count()

    def add(self, end: int, waiter: _Waiter) -> None:
        heapq.heappush(self._heap, (end, next(self._order), waiter))

    def reached(self, end: int) -> None:
        while self._heap and self._heap[0][0] <= end:
            waiter = heapq.heappop(self._heap)[2]
            if not waiter.done():
                waiter.set_result(PutStatus.OK)

    def fail_above(self, end: int, error: StoreUnwritable) -> None:
        lost = [item for item in self._heap if item[0] > end]
        self._heap = [item for item in self._heap if item[0] <= end]
        heapq.heapify(self._heap)
        for _, _, waiter in sorted(lost, key=lambda item: item[:2]):
            _fail(waiter, error)


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
        self._env = env
        self._advance = advance
        self._synced = synced
        self._pooled = pooled  # to be staged is enough for an acknowledgement
        self._timeout_seconds = timeout_ms / 1000
        self._interval_seconds = interval_ms / 1000
        self._busy_ms = busy_ms
        self._sync_began = 0.0
        self._for_written = _Waiters()
        self._for_durable = _Waiters()
        self._deadlines: deque[tuple[float, _Waiter]] = deque()
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._interval_timer: asyncio.TimerHandle | None = None
        self._syncing: asyncio.Future[None] | None = None
        self.on_sync_failed: Callable[[], None] = lambda: None
        log.on_written = self._on_written
        log.on_lost = self._on_lost

    def open(self, end: int, last_ms: int) -> None:
        """Everything up to `end` was recovered and synced."""
        self.durable_end = self.synced_end = end
        self.synced_ms = last_ms
        if not self._synced:
            self._wake_later()

    async def close(self) -> None:
        """No more timers, and no sync under way when this returns. Waiters are let go."""
        for timer in (self._deadline_timer, self._interval_timer):
            if timer is not None:
                timer.cancel()
        self._deadline_timer = self._interval_timer = None
        self._interval_seconds = 0
        while self._syncing is not None:
            await asyncio.wait([self._syncing])
            await asyncio.sleep(0)  # its callback clears `_syncing`, or starts another
        gone = StoreUnwritable("the store was stopped before the message was synced")
        self._for_written.fail_above(-1, gone)
        self._for_durable.fail_above(-1, gone)
        self._deadlines.clear()

    @property
    def trouble(self) -> str | None:
        """Why messages are refused for a moment."""
        behind = self._log.end - self.synced_end
        if not self._synced or (behind <= BUSY_BYTES and behind <= UNSYNCED_BYTES_MAX):
            return None
        seconds = 0.0
        if self._syncing is not None:
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
            if self._syncing is None:
                break
            await asyncio.wait([self._syncing])
            await asyncio.sleep(0)

    def fail(self, reason: str) -> None:
        """Take no more messages until a restart."""
        if self.failure is None:
            self.failure = reason
            _log.critical("store_unwritable reason=%s", reason)
        self._for_durable.fail_above(-1, StoreUnwritable(self.failure))
        self._for_written.fail_above(-1, StoreUnwritable(self.failure))

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
        elif not wait:
            self._for_written.add(end, waiter)
        else:
            self._for_durable.add(end, waiter)
            if self._synced:
                self._add_deadline(waiter)

    def _add_deadline(self, waiter: _Waiter) -> None:
        loop = asyncio.get_running_loop()
        self._deadlines.append((loop.time() + self._timeout_seconds, waiter))
        if self._deadline_timer is None:
            self._deadline_timer = loop.call_later(self._timeout_seconds, self._expire)

    def _on_written(self) -> None:
        self._for_written.reached(self._log.written_end)
        if self._synced:
            self._begin_sync()
        elif self.failure is None:
            self._move(self._log.written_end)

    def _on_lost(self, start: int, error: StoreUnwritable) -> None:
        self._for_written.fail_above(start, error)
        self._for_durable.fail_above(start, error)

    def _begin_sync(self) -> None:
        target = self._log.written_end
        if self._syncing is not None or self.failure is not None or target == self.synced_end:
            return
        files = self._log.take_dirty()
        written_ms = self._log.written_ms
        self._sync_began = asyncio.get_running_loop().time()
        self._syncing = asyncio.ensure_future(
            self._env.offload(functools.partial(_sync_files, files, self.on_sync_failed))
        )
        self._syncing.add_done_callback(functools.partial(self._on_synced, target, written_ms))

    def _on_synced(self, target: int, written_ms: int, done: asyncio.Future[None]) -> None:
        self._syncing = None
        if done.cancelled():
            return
        error = done.exception()
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
        self._for_durable.reached(end)
        while self._deadlines and self._deadlines[0][1].done():
            self._deadlines.popleft()

    def _expire(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._deadline_timer = None
        while self._deadlines:
            deadline, waiter = self._deadlines[0]
            if not waiter.done():
                if deadline > now:
                    self._deadline_timer = loop.call_at(deadline, self._expire)
                    return
                waiter.set_result(PutStatus.FLUSH_DISK_TIMEOUT)
            self._deadlines.popleft()

    def _wake_later(self) -> None:
        if self._interval_seconds > 0:
            self._interval_timer = asyncio.get_running_loop().call_later(
                self._interval_seconds, self._on_interval
            )

    def _on_interval(self) -> None:
        self._begin_sync()
        self._wake_later()


def _sync_files(files: list[SegmentFile], on_failed: Callable[[], None]) -> None:
    try:
        for file in files:
            file.sync()
    except OSError:
        on_failed()  # here, off the loop: the process may not live to hear of it
        raise
