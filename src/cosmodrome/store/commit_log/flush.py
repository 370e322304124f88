"""How far the log is safe, and who waits for it.

SYNC_FLUSH: group commit. One sync runs at a time, off the loop, and covers all that was
written before it began; then the durable end moves there. ASYNC_FLUSH: the durable end
follows the written end at once and a sync runs now and then behind it.

Whenever the durable end moves, `advance` is called (dispatch) and only then those leave the wait
line who waited for it, so whoever was answered can read its message. Waiting needs no task, and
one timer for all. After `require_acks` (SYNC_MASTER) a send waits for `acked_end` too, the best
report of any slave; dispatch does not.

A failed sync is final: the kernel may have dropped the very pages, so nothing can be promised until
recovery has read the log again.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections.abc import Callable, Sequence

from cosmodrome.env.base import Done, Env, Offload, SegmentFile, Syncer
from cosmodrome.env.signal import Signal
from cosmodrome.errors import StoreUnwritable, reason_of
from cosmodrome.store.commit_log.log import Log
from cosmodrome.store.commit_log.wait_line import (
    Listener,
    Outcome,
    WaitLine,
    resolve,
)
from cosmodrome.store.values import PutStatus

UNSYNCED_BYTES_MAX = 256 * 1024 * 1024  # a disk that hangs must not gather waiters for ever
BUSY_BYTES = 64 * 1024 * 1024  # a disk that also takes long for one sync must gather less

_log = logging.getLogger(__name__)


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
        slave_timeout_ms: int = 3000,
        busy_ms: Callable[[], int] = lambda: 1000,
        pooled: bool = False,
    ) -> None:
        self.durable_end = 0
        self.synced_end = 0
        self.acked_end = 0  # what some linked slave has; falls when its link goes
        self.synced_ms = 0  # store time of the last record known to be synced
        self.failure: str | None = None
        self.written: Signal[None] = Signal()  # once per write
        self._log = log
        self._advance = advance
        self._synced = synced
        self._pooled = pooled  # to be staged is enough for an acknowledgement
        self._usual = False  # whoever stages has to wait, and will hear of it
        self._timeout_seconds = timeout_ms / 1000
        self._interval_seconds = interval_ms / 1000
        self._busy_ms = busy_ms
        self._sync_began = 0.0
        self._available: Callable[[int], bool] | None = None  # a slave to wait for; None: no acks
        at_once = not synced and not pooled  # written is durable, and failed writes are heard of
        self._wait_line = WaitLine(
            math.inf if at_once else self._timeout_seconds, slave_timeout_ms / 1000
        )
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._interval_timer: asyncio.TimerHandle | None = None
        self._new_syncer = env.syncer or functools.partial(_OffloadSyncer, env.offload)
        self._syncer: Syncer | None = None
        # From `open` on. To ask for the running loop is a call of the kernel before Python 3.12.
        self._loop: asyncio.AbstractEventLoop
        self._syncing = False
        self._at_sync_end: list[asyncio.Future[None]] = []
        self.on_sync_failed: Callable[[], None] = lambda: None
        log.on_written = self._on_written
        log.on_lost = self._on_lost

    def open(self, end: int, last_ms: int) -> None:
        """Everything up to `end` was recovered and synced."""
        self._loop = asyncio.get_running_loop()
        self.durable_end = self.synced_end = end
        self.synced_ms = last_ms
        self._syncer = self._new_syncer()
        self._usual = not self._pooled and self.failure is None and self._available is None
        if not self._synced:
            self._wake_later()

    def begin_at(self, end: int) -> None:
        """A log without records begins there."""
        self.durable_end = self.synced_end = end

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
        self._usual = False
        gone = StoreUnwritable("the store was stopped before the message was synced")
        self._wait_line.give_up_slaves(self.durable_end)
        self._wait_line.fail_above(-1, gone)

    def require_acks(self, available: Callable[[int], bool]) -> None:
        """From now on whoever waits waits for a slave too, if `available(end)` says there is one.

        It is asked once, when somebody begins to wait.
        """
        self._available = available
        self._usual = False

    @property
    def waits_for_slaves(self) -> bool:
        return self._available is not None

    def acknowledge(self, end: int) -> None:
        """The best report of any linked slave; it may fall."""
        rises = end > self.acked_end
        self.acked_end = end
        if rises and self._available is not None:
            self._settle()

    @property
    def trouble(self) -> str | None:
        """Why messages are refused for a moment."""
        behind = self._log.end - self.synced_end
        if not self._synced or (behind <= BUSY_BYTES and behind <= UNSYNCED_BYTES_MAX):
            return None if self._available is None else self._slave_trouble()
        seconds = 0.0
        if self._syncing:
            seconds = asyncio.get_running_loop().time() - self._sync_began
        if behind <= UNSYNCED_BYTES_MAX and seconds * 1000 <= self._busy_ms():
            return None
        return (
            f"{behind} bytes wait for the disk to sync them, the sync under way has taken"
            f" {seconds:.1f} s; the disk is too slow or hangs: check it, sends resume by themselves"
        )

    @property
    def overfull(self) -> str | None:
        """Why not even a slave takes more, which has no sender to refuse."""
        behind = self._log.end - self.synced_end
        if not self._synced or behind <= UNSYNCED_BYTES_MAX:
            return None
        return f"{behind} bytes wait for the disk to sync them; the disk is too slow: check it"

    def durable(self, end: int, *, wait: bool) -> asyncio.Future[PutStatus]:
        """Resolves once the log is written (or, with `wait`, durable) up to `end`.

        Call it in the turn of the loop that staged: offsets that a failed write took back are
        given out again, and only a waiter that was there at the time learns of it.
        """
        waiter: asyncio.Future[PutStatus] = asyncio.get_running_loop().create_future()
        self.when_durable(end, resolve, waiter, wait=wait)
        self._log.relieve()
        return waiter

    def when_durable(self, end: int, listener: Listener, who: object, *, wait: bool = True) -> None:
        """Like `durable`, but calls `listener` in the very turn in which the outcome is known; a
        turn later if a future before it is heard of then.

        It hears of neighbours of its own together. The caller then has the log relieved.
        """
        if self._usual and wait and self.durable_end < end <= self._log.end:
            outcome = None
        else:
            outcome = self._known_outcome(end, wait=wait)
        if outcome is not None:
            self._wait_line.tell(listener, [who], outcome)
        elif not wait:
            self._wait_line.join_written(end, listener, who)
        elif self._available is not None:
            self._join_acked(end, listener, who, available=self._available(end))
        elif not self._synced:
            self._wait_line.join_durable(end, math.inf, listener, who)
        else:
            loop = self._loop
            deadline = loop.time() + self._timeout_seconds
            self._wait_line.join_durable(end, deadline, listener, who)
            if self._deadline_timer is None:
                self._deadline_timer = loop.call_at(deadline, self._expire)

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
        self._usual = False
        if self.failure is None:
            self.failure = reason
            _log.critical("store_unwritable reason=%s", reason)
        self._wait_line.give_up_slaves(self.durable_end)
        self._wait_line.fail_above(-1, StoreUnwritable(self.failure))

    # --- inside ------------------------------------------------------------------------------
    def _known_outcome(self, end: int, *, wait: bool) -> Outcome | None:
        """What is certain already, None when it has to be waited for."""
        if end <= (self.durable_end if wait else self._log.written_end):
            if not wait or self._available is None or end <= self.acked_end:
                return PutStatus.OK
            if self.failure is not None or self._syncer is None:
                return PutStatus.FLUSH_SLAVE_TIMEOUT  # stored; nobody will hear of slaves any more
            return None
        if self.failure is not None:
            return StoreUnwritable(self.failure)
        if end > self._log.end:
            return StoreUnwritable(
                f"the log ends at {self._log.end}, before {end}: the write that carried this"
                " message failed; send it again"
            )
        if self._syncer is None:
            return StoreUnwritable("the store is not running: nobody would hear when it is safe")
        return PutStatus.OK if self._pooled and self._available is None else None

    def _join_acked(self, end: int, listener: Listener, who: object, *, available: bool) -> None:
        now = self._loop.time()
        if available:
            first = self._wait_line.join_slave(end, now, listener, who)
        elif end <= self.durable_end:
            self._wait_line.tell(listener, [who], PutStatus.SLAVE_NOT_AVAILABLE)
            return
        else:
            first = self._wait_line.join_without_slave(end, now, listener, who)
        if first:  # who joins behind others leaves behind them
            self._arm(self._wait_line.next_deadline(now))

    def _settle(self) -> None:
        """This disk, a slave or time has moved on."""
        now = self._loop.time()
        if self._wait_line.settle(self.durable_end, self.acked_end, now):
            self._arm(self._wait_line.next_deadline(now))

    def _slave_trouble(self) -> str | None:
        first = self._wait_line.first_for_slave
        if first is None or (waiting := self._log.end - first[0]) <= BUSY_BYTES:
            return None
        seconds = asyncio.get_running_loop().time() - first[1]
        if waiting <= UNSYNCED_BYTES_MAX and seconds * 1000 <= self._busy_ms():
            return None
        return (
            f"{waiting} bytes wait for a slave to report them, the first for {seconds:.1f} s;"
            " the slave or the network is too slow: check them, sends resume by themselves"
        )

    def _on_written(self) -> None:
        written_end = self._log.written_end
        if self._wait_line.for_written:
            self._wait_line.written(written_end)
        if self._synced:
            self._begin_sync()
        elif self.failure is None:
            self._move(written_end)
        if self.written.listeners:
            try:
                self.written.fire(None)
            except Exception:
                _log.exception("written_listener_failed")  # its fault must not stop the store

    def _on_lost(self, start: int, error: StoreUnwritable) -> None:
        self._wait_line.fail_above(start, error)

    def _begin_sync(self) -> None:
        target = self._log.written_end
        syncer = self._syncer
        if self._syncing or self.failure is not None or target == self.synced_end:
            return
        if syncer is None:
            return  # closed
        files = self._log.take_dirty()
        written_ms = self._log.written_ms
        self._sync_began = self._loop.time()
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
            _log.error("sync_failed error=%s", error)
            self.fail(
                f"syncing the commit log failed ({reason_of(error)}); the disk may be damaged:"
                " check it, then restart the broker, which recovers from the log"
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
            self.fail(
                f"messages could not be put into their queues ({reason_of(error)});"
                " see the log file"
            )
        self._wait_line.durable(end)
        if self._available is not None:
            self._settle()

    def _expire(self) -> None:
        self._deadline_timer = None
        now = asyncio.get_running_loop().time()
        self._wait_line.expire(now)
        self._wait_line.settle(self.durable_end, self.acked_end, now)
        # Only now, because whoever was told may have come back.
        self._arm(self._wait_line.next_deadline(now))

    def _arm(self, deadline: float) -> None:
        """Have the timer fire at `deadline`, or before."""
        timer = self._deadline_timer
        if deadline == math.inf or (timer is not None and timer.when() <= deadline):
            return
        if timer is not None:
            timer.cancel()
        self._deadline_timer = self._loop.call_at(deadline, self._expire)

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
