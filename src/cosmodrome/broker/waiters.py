"""Pulls that found nothing, parked until something arrives or their time is over.

A parked pull belongs to one queue and one connection and ends in exactly one of four ways:

- woken, by an arrival that its filter wants or by its deadline: the pull runs once more, in the
  same turn of the loop, and its outcome is the answer. A filter that needs the records themselves
  looks at what arrived first (`skip`); while nothing is wanted the pull stays parked behind it,
  deadline unchanged;
- refused, because the broker stops;
- dropped, because its connection closed: its future is cancelled, so it is never answered;
- cancelled from outside, which forgets it like a closed connection does.

Parking happens in the same turn of the loop as the read that found nothing, and arrivals fire
in the loop too, so no arrival can fall between the two. At most `held_max` pulls are parked.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from cosmodrome.broker.filters import Matches
from cosmodrome.errors import Code, Refused
from cosmodrome.store.store import Arrival, Arrivals
from cosmodrome.wire.table import Connection

R = TypeVar("R")
Outcome = TypeVar("Outcome", contravariant=True)
T = TypeVar("T")

# Longest time a client may ask to be held. Java clients ask for 15 s to 20 s; anything far
# beyond only keeps a forgotten pull alive.
HOLD_MS_MAX = 600_000

GONE_KEPT = 1024  # deadlines of pulls that were woken before, besides as many as are parked

QueueKey = tuple[str, int]

# Looks at the messages from an offset on: the offset behind those it does not want, or None
# when the pull has something to answer.
Skip = Callable[[int], int | None]


class Answer(Protocol[Outcome]):
    """Takes what becomes of a parked pull, as a future does; once."""

    def done(self) -> bool: ...
    def get_loop(self) -> asyncio.AbstractEventLoop: ...
    def set_result(self, result: Outcome, /) -> None: ...
    def set_exception(self, exception: Exception, /) -> None: ...
    def cancel(self) -> object: ...


class _Waiter:
    __slots__ = (
        *("answer", "connection", "end", "gone", "key", "looking", "matches", "offset", "rerun"),
        "skip",
    )

    def __init__(
        self,
        key: QueueKey,
        offset: int,
        matches: Matches | None,
        connection: Connection,
        rerun: Callable[[], Any],
        skip: Skip | None,
        answer: Answer[Any],
    ) -> None:
        self.key = key
        self.offset = offset
        self.matches = matches
        self.connection = connection
        self.rerun = rerun
        self.skip = skip
        self.looking = False  # a look at what arrived is due already
        self.end = offset  # of the queue, as the last arrival told
        self.answer = answer
        self.gone = False  # no longer parked

    def wants(self, arrival: Arrival) -> bool:
        if arrival.max_offset <= self.offset:
            return False
        return self.matches is None or any(map(self.matches, arrival.tags_codes))


class _Deadlines:
    """When the time of parked pulls is over. Most are woken long before, so there is one timer
    for all, and those that are gone are dropped in bulk."""

    def __init__(self, over: Callable[[_Waiter], None]) -> None:
        self._over = over
        self._heap: list[tuple[float, int, _Waiter]] = []
        self._order = itertools.count()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def add(self, loop: asyncio.AbstractEventLoop, at: float, waiter: _Waiter, held: int) -> None:
        if len(self._heap) >= 2 * held + GONE_KEPT:
            self._heap = [item for item in self._heap if not item[2].gone]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (at, next(self._order), waiter))
        self._arm(loop, at)

    def clear(self) -> None:
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Have the timer run at that time, if it does not run before."""
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = loop.call_at(at, self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        due_at = max(loop.time(), self._timer_at)
        self._timer = None
        while self._heap:
            at, _, waiter = self._heap[0]
            if not waiter.gone and at > due_at:
                self._arm(loop, at)
                return
            heapq.heappop(self._heap)
            if not waiter.gone:
                self._over(waiter)


class Waiters(Generic[R]):
    """Who waits for which queue."""

    def __init__(self, arrivals: Arrivals, held_max: int) -> None:
        self._held_max = held_max
        self._held = 0
        self._deadlines = _Deadlines(self._wake)
        self._stopped = False
        # Dicts serve as ordered sets: the longest waiting pull of a queue is woken first.
        self._by_queue: dict[QueueKey, dict[_Waiter, None]] = {}
        self._by_connection: dict[Connection, dict[_Waiter, None]] = {}
        arrivals.subscribe(self._arrived, queues=self._by_queue)

    @property
    def held(self) -> int:
        return self._held

    def hold(
        self,
        *,
        topic: str,
        queue_id: int,
        offset: int,
        matches: Matches | None,
        timeout_ms: int,
        connection: Connection,
        rerun: Callable[[], R],
        skip: Skip | None = None,
    ) -> asyncio.Future[R] | None:
        """Park a pull at `offset`; None when there is no room or the wait would be empty."""
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        waiter = self._park(
            *(topic, queue_id, offset, matches, timeout_ms, connection, rerun, skip, future)
        )
        if waiter is None:
            return None
        future.add_done_callback(lambda _: self._forget(waiter))
        return future

    def hold_for(
        self,
        answer: Answer[T],
        *,
        topic: str,
        queue_id: int,
        offset: int,
        matches: Matches | None,
        timeout_ms: int,
        connection: Connection,
        rerun: Callable[[], T],
    ) -> bool:
        """Like `hold`, but `answer` is told, in the very turn; false when nothing was parked."""
        waiter = self._park(
            *(topic, queue_id, offset, matches, timeout_ms, connection, rerun, None, answer)
        )
        return waiter is not None

    def _park(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        matches: Matches | None,
        timeout_ms: int,
        connection: Connection,
        rerun: Callable[[], Any],
        skip: Skip | None,
        answer: Answer[Any],
    ) -> _Waiter | None:
        if timeout_ms <= 0 or self._held >= self._held_max or self._stopped or connection.closed:
            return None
        waiter = _Waiter((topic, queue_id), offset, matches, connection, rerun, skip, answer)
        self._remember(waiter)
        loop = answer.get_loop()
        until = loop.time() + min(timeout_ms, HOLD_MS_MAX) / 1000
        self._deadlines.add(loop, until, waiter, self._held)
        return waiter

    async def stop(self) -> None:
        """Refuse everyone; nothing is parked from now on.

        Compat: a Java client (4.9.8) does not notice that a connection closes under a pull and
        waits out its own 30 s, however soon the broker is back. Told "nothing found" it would
        pull again at once, into the closing connection; refused, it tries again 3 s later.
        """
        self._stopped = True
        for parked in tuple(self._by_queue.values()):
            for waiter in tuple(parked):
                self._refuse(waiter)
        self._by_connection.clear()
        self._deadlines.clear()

    # --- the ways out ------------------------------------------------------------------------

    def _arrived(self, arrival: Arrival) -> None:
        parked = self._by_queue.get((arrival.topic, arrival.queue_id))
        if parked is None:
            return
        for waiter in [waiter for waiter in parked if waiter.wants(arrival)]:
            if waiter.skip is not None:
                waiter.end = arrival.max_offset
                self._look_soon(waiter)
                continue
            self._wake(waiter)  # the store has everything in its place when it announces

    def _look_soon(self, waiter: _Waiter) -> None:
        if not waiter.looking:
            waiter.looking = True
            waiter.answer.get_loop().call_soon(self._look, waiter)

    def _look(self, waiter: _Waiter) -> None:
        """One step over what arrived; a long way is gone in several turns of the loop."""
        waiter.looking = False
        if waiter.answer.done() or waiter.skip is None:
            return
        try:
            behind = waiter.skip(waiter.offset)
        except Exception:
            behind = None  # the pull itself says what is wrong
        if behind is None or (behind <= waiter.offset and waiter.offset < waiter.end):
            self._wake(waiter)
            return
        waiter.offset = max(behind, waiter.offset)
        if waiter.offset < waiter.end:
            self._look_soon(waiter)

    def _wake(self, waiter: _Waiter) -> None:
        self._forget(waiter)
        if waiter.answer.done():
            return
        if waiter.connection.closed:
            waiter.answer.cancel()
            return
        try:
            outcome = waiter.rerun()
        except Exception as error:
            waiter.answer.set_exception(error)
        else:
            waiter.answer.set_result(outcome)

    def _refuse(self, waiter: _Waiter) -> None:
        self._forget(waiter)
        if not waiter.answer.done():
            waiter.answer.set_exception(
                Refused(
                    Code.SERVICE_NOT_AVAILABLE,
                    "This broker is stopping; pull again when it is back.",
                )
            )

    def _drop(self, waiter: _Waiter) -> None:
        self._forget(waiter)
        waiter.answer.cancel()

    def _closed(self, connection: Connection) -> None:
        for waiter in tuple(self._by_connection.pop(connection, ())):
            self._drop(waiter)

    # --- the tables --------------------------------------------------------------------------

    def _remember(self, waiter: _Waiter) -> None:
        self._by_queue.setdefault(waiter.key, {})[waiter] = None
        mine = self._by_connection.get(waiter.connection)
        if mine is None:
            # One callback per connection, not per pull: it stays registered until the close.
            mine = self._by_connection[waiter.connection] = {}
            connection = waiter.connection
            connection.on_close(lambda: self._closed(connection))
        mine[waiter] = None
        self._held += 1

    def _forget(self, waiter: _Waiter) -> None:
        parked = self._by_queue.get(waiter.key)
        if parked is None or waiter not in parked:
            return
        del parked[waiter]
        if not parked:
            del self._by_queue[waiter.key]
        mine = self._by_connection.get(waiter.connection)
        if mine is not None:
            mine.pop(waiter, None)
        self._held -= 1
        waiter.gone = True
