"""Pulls that found nothing, parked until something arrives or their time is over.

A parked pull belongs to one queue and one connection and ends in exactly one of four ways:

- woken, by an arrival that its filter wants or by its deadline: the pull runs once more, in the
  same turn of the loop, and its outcome is the answer. A filter that needs the records themselves
  looks at what arrived first (`skip`); while nothing is wanted the pull stays parked behind it,
  deadline unchanged. Those that have to look stand in one line, and each turn of the loop takes a
  few of them, so that thousands of costly filters stop nobody else;
- refused, because the broker stops;
- dropped, because its connection closed, so it is never answered;
- cancelled from outside, which forgets it like a closed connection does.

Parking happens in the same turn of the loop as the read that found nothing, and arrivals fire
in the loop too, so no arrival can fall between the two. At most `held_max` pulls are parked.
"""

from __future__ import annotations

import asyncio
import collections
import heapq
import itertools
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from cosmodrome.broker.receive.filters import Matches
from cosmodrome.errors import Code, Refused
from cosmodrome.store.store import Arrival, Arrivals
from cosmodrome.wire.table import Connection

R = TypeVar("R")

# Longest time a client may ask to be held. Java clients ask for 15 s to 20 s; anything far
# beyond only keeps a forgotten pull alive.
HOLD_MS_MAX = 600_000

# What the looks of one turn may cost together: comparisons of filters, about 0.5 ms.
LOOK_COST_PER_TURN = 400
LOOK_COST_LEAST = 16  # of any look, for the read

GONE_KEPT = 1024  # deadlines of pulls that were woken before, besides as many as are parked

QueueKey = tuple[str, int]

# Looks at the messages from an offset on: the offset behind those it does not want, or None
# when the pull has something to answer.
Skip = Callable[[int], int | None]


class Parked(Protocol):
    """A pull that waits. One of `run`, `refuse` and `drop` ends that, and none of them raises."""

    key: QueueKey
    offset: int
    matches: Matches | None
    gone: bool  # no longer parked; false at first

    @property
    def connection(self) -> Connection: ...
    @property
    def skip(self) -> Skip | None: ...
    def run(self) -> None:
        """It is woken: pull once more and answer, unless nobody is there any more."""

    def refuse(self, error: Refused) -> None: ...
    def drop(self) -> None:
        """Nobody is there to be answered."""


class _Waiter(Generic[R]):
    """A parked pull whose outcome goes to a future."""

    __slots__ = (
        "answer",
        "connection",
        "end",
        "gone",
        "key",
        "look_cost",
        "looking",
        "matches",
        "offset",
        "rerun",
        "skip",
    )

    def __init__(
        self,
        key: QueueKey,
        offset: int,
        matches: Matches | None,
        connection: Connection,
        rerun: Callable[[], R],
        skip: Skip | None,
        look_cost: int,
        answer: asyncio.Future[R],
    ) -> None:
        self.key = key
        self.offset = offset
        self.matches = matches
        self.connection = connection
        self.rerun = rerun
        self.skip = skip
        self.look_cost = look_cost
        self.looking = False  # it stands in the line of those that look
        self.end = offset  # of the queue, as the last arrival told
        self.answer = answer
        self.gone = False

    def run(self) -> None:
        if self.answer.done():
            return
        if self.connection.closed:
            self.answer.cancel()
            return
        try:
            outcome = self.rerun()
        except Exception as error:
            self.answer.set_exception(error)
        else:
            self.answer.set_result(outcome)

    def refuse(self, error: Refused) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def drop(self) -> None:
        self.answer.cancel()


class _Deadlines:
    """When the time of parked pulls is over. Most are woken long before, so there is one timer for
    all, and those that are gone are dropped in bulk."""

    def __init__(self, over: Callable[[Parked], None]) -> None:
        self._over = over
        self._heap: list[tuple[float, int, Parked]] = []
        self._order = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0

    def add(self, parked: Parked, wait_ms: int, held: int) -> None:
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        at = loop.time() + (wait_ms if wait_ms < HOLD_MS_MAX else HOLD_MS_MAX) / 1000
        heap = self._heap
        if len(heap) >= 2 * held + GONE_KEPT:
            heap = self._heap = [item for item in heap if not item[2].gone]
            heapq.heapify(heap)
        heapq.heappush(heap, (at, next(self._order), parked))
        if self._timer is None or at < self._timer_at:
            self._arm(loop, at)

    def clear(self) -> None:
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Make the timer run at that time, unless it runs earlier anyway."""
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
            at, _, parked = self._heap[0]
            if not parked.gone and at > due_at:
                self._arm(loop, at)
                return
            heapq.heappop(self._heap)
            if not parked.gone:
                self._over(parked)


class Waiters(Generic[R]):
    """Who waits for which queue."""

    def __init__(self, arrivals: Arrivals, held_max: int) -> None:
        self._held_max = held_max
        self._held = 0
        self._deadlines = _Deadlines(self._wake)
        self._line: collections.deque[_Waiter[R]] = collections.deque()
        self._line_runs = False  # the next turn of the loop takes some of the line
        self._stopped = False
        # Dicts serve as ordered sets: the longest waiting pull of a queue is woken first.
        self._by_queue: dict[QueueKey, dict[Parked, None]] = {}
        self._by_connection: dict[Connection, dict[Parked, None]] = {}
        arrivals.subscribe(self._arrived, queues=self._by_queue)

    @property
    def held(self) -> int:
        return self._held

    def hold(
        self,
        *,
        key: QueueKey,
        offset: int,
        matches: Matches | None,
        timeout_ms: int,
        connection: Connection,
        rerun: Callable[[], R],
        skip: Skip | None = None,
        look_cost: int = 1,
    ) -> asyncio.Future[R] | None:
        """Park a pull at `offset`; None when there is no room or the wait would be empty.
        `look_cost` is what `skip` takes for each message."""
        if connection.closed:
            return None
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(key, offset, matches, connection, rerun, skip, look_cost, future)
        if not self.park(waiter, timeout_ms):
            return None
        future.add_done_callback(lambda _: self._forget(waiter))
        return future

    def park(self, parked: Parked, timeout_ms: int) -> bool:
        """Like `hold`, but the outcome goes to `parked` itself; false when it was not parked.

        Its connection must be open.
        """
        if timeout_ms <= 0 or self._held >= self._held_max or self._stopped:
            return False
        connection = parked.connection
        key = parked.key
        others = self._by_queue.get(key)
        if others is None:
            self._by_queue[key] = {parked: None}
        else:
            others[parked] = None
        mine = self._by_connection.get(connection)
        if mine is None:
            # One callback per connection, not per pull: it stays registered until the close.
            mine = self._by_connection[connection] = {}
            connection.on_close(lambda: self._closed(connection))
        mine[parked] = None
        self._held += 1
        self._deadlines.add(parked, timeout_ms, self._held)
        return True

    async def stop(self) -> None:
        """Refuse everyone; nothing is parked from now on.

        Compat: a Java client (4.9.8) does not notice that a connection closes under a pull and
        waits out its own 30 s, however soon the broker is back. If it were told "nothing found",
        it would pull again at once, into the closing connection. When it is refused, it tries
        again 3 s later.
        """
        self._stopped = True
        for others in tuple(self._by_queue.values()):
            for parked in tuple(others):
                if self._forget(parked):
                    parked.refuse(
                        Refused(
                            Code.SERVICE_NOT_AVAILABLE,
                            "This broker is stopping; pull again when it is back.",
                        )
                    )
        self._by_connection.clear()
        self._deadlines.clear()

    # --- the ways out ------------------------------------------------------------------------

    def _arrived(self, arrival: Arrival) -> None:
        topic, queue_id, end, codes = arrival
        others = self._by_queue.get((topic, queue_id))
        if others is None:
            return
        for parked in tuple(others):
            matches = parked.matches
            if end <= parked.offset or not (matches is None or any(map(matches, codes))):
                continue
            if parked.skip is not None:
                assert isinstance(parked, _Waiter)
                parked.end = end
                self._look_soon(parked)
            elif self._forget(parked):
                parked.run()  # the store has everything in its place when it announces

    def _look_soon(self, waiter: _Waiter[R]) -> None:
        if waiter.looking:
            return
        waiter.looking = True
        self._line.append(waiter)
        if not self._line_runs:
            self._line_runs = True
            waiter.answer.get_loop().call_soon(self._look_on)

    def _look_on(self) -> None:
        """Let the first ones in the line look; the others have to wait for the next turn."""
        line, left = self._line, LOOK_COST_PER_TURN
        loop = asyncio.get_running_loop()
        while line and left > 0:
            waiter = line.popleft()
            waiter.looking = False
            messages = max(1, waiter.end - waiter.offset)
            left -= LOOK_COST_LEAST + min(waiter.look_cost * messages, LOOK_COST_PER_TURN)
            self._look(waiter)
        self._line_runs = bool(line)
        if line:
            loop.call_soon(self._look_on)

    def _look(self, waiter: _Waiter[R]) -> None:
        """One step over what arrived; a long stretch takes several of them."""
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

    def _wake(self, parked: Parked) -> None:
        if self._forget(parked):
            parked.run()

    def _closed(self, connection: Connection) -> None:
        for parked in tuple(self._by_connection.pop(connection, ())):
            self._forget(parked)
            parked.drop()

    def _forget(self, parked: Parked) -> bool:
        """Take a pull out of the tables; false when it is not there any more."""
        if parked.gone:
            return False
        parked.gone = True
        others = self._by_queue[parked.key]
        del others[parked]
        if not others:
            del self._by_queue[parked.key]
        mine = self._by_connection.get(parked.connection)
        if mine is not None:
            mine.pop(parked, None)
        self._held -= 1
        return True
