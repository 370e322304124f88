"""The wait line: who waits until the log is written, durable, or on a slave too, up to an end.

Everybody stands in one line in the order of the log: the futures of slow sends, the tickets of the
fast lane, delayed deliveries. When an end moves, those whose end is reached leave together and
hear the outcome in this order, so a connection is answered in the order of the log whichever lane
its requests took.

Four lists hold them. An entry is a plain tuple, because one is made for each send; its second field
is a time of the loop:

    for_written      wait for the write; never late (infinity)
    _for_durable     wait for this disk; when they give up
    _for_slave       wait for this disk and a slave; when they came
    _without_slave   wait for this disk, and found no slave; when they came

The last two keep when they came, because each wait of theirs has its own limit.

Who waits for this disk and for a slave leaves when both are decided. Each is decided when its end
is reached or its time is over; when both are late, the slave's status is the one to tell.

Ends and deadlines are both in ascending order. Nearly everybody waits for what was just staged and
joins behind the others. Who asks later for less stands further in front, and gives up no later
than those behind.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from cosmodrome.errors import StoreUnwritable
from cosmodrome.store.values import PutStatus

Outcome = PutStatus | StoreUnwritable
Listener = Callable[[list[Any], Outcome], None]  # called with those who leave
Entry = tuple[int, float, Listener, Any]  # end in the log, time (see above), listener, who waits

_log = logging.getLogger(__name__)


class WaitLine:
    def __init__(self, disk_seconds: float = math.inf, slave_seconds: float = math.inf) -> None:
        """The times are for those who wait for a slave, or found none."""
        self.for_written: deque[Entry] = deque()
        self._for_durable: deque[Entry] = deque()
        self._for_slave: deque[Entry] = deque()
        self._without_slave: deque[Entry] = deque()
        self._disk_seconds = disk_seconds
        self._slave_seconds = slave_seconds
        self._unheard = 0  # groups that left and hear of it in the next turn of the loop

    def join_written(self, end: int, listener: Listener, who: object) -> None:
        _join(self.for_written, (end, math.inf, listener, who))

    def join_durable(self, end: int, deadline: float, listener: Listener, who: object) -> None:
        line = self._for_durable
        if not line or line[-1][0] <= end:
            line.append((end, deadline, listener, who))
        else:
            _join(line, (end, deadline, listener, who))

    def join_slave(self, end: int, now: float, listener: Listener, who: object) -> bool:
        """Wait for this disk and for a slave; whether nobody did before."""
        line = self._for_slave
        if line and line[-1][0] <= end:
            line.append((end, now, listener, who))
            return False
        _join(line, (end, now, listener, who))
        return len(line) == 1

    def join_without_slave(self, end: int, now: float, listener: Listener, who: object) -> bool:
        """There is no slave to wait for: wait for this disk; whether nobody did before."""
        _join(self._without_slave, (end, now, listener, who))
        return len(self._without_slave) == 1

    def written(self, end: int) -> None:
        """The log is in the kernel up to `end`."""
        if self.for_written:
            self._tell_all(_reached(self.for_written, end), PutStatus.OK)

    def durable(self, end: int) -> None:
        """The log is safe up to `end`."""
        line = self._for_durable
        if not line or line[0][0] > end:
            return
        first = line.popleft()
        if not line or line[0][0] > end:  # alone, as nearly always
            self.tell(first[2], [first[3]], PutStatus.OK)
        else:
            self._tell_all([first, *_reached(line, end)], PutStatus.OK)

    def expire(self, now: float) -> None:
        """Let those go who waited too long."""
        late = []
        while self._for_durable and self._for_durable[0][1] <= now:
            late.append(self._for_durable.popleft())
        self._tell_all(late, PutStatus.FLUSH_DISK_TIMEOUT)

    def settle(self, durable_end: int, acked_end: int, now: float) -> bool:
        """Let those go for whom both this disk and the slave are decided; whether anybody went."""
        leaving: dict[PutStatus, list[Entry]] = {}
        line = self._for_slave
        while line:
            end, came, _, _ = line[0]
            durable, acked = end <= durable_end, end <= acked_end
            if not durable and now < came + self._disk_seconds:
                break
            if not acked and now < came + self._slave_seconds:
                break
            status = PutStatus.OK if durable else PutStatus.FLUSH_DISK_TIMEOUT
            if not acked:
                status = PutStatus.FLUSH_SLAVE_TIMEOUT  # Compat: upstream's slave has the last word
            leaving.setdefault(status, []).append(line.popleft())
        line = self._without_slave
        while line and (line[0][0] <= durable_end or now >= line[0][1] + self._disk_seconds):
            leaving.setdefault(PutStatus.SLAVE_NOT_AVAILABLE, []).append(line.popleft())
        for status, entries in leaving.items():
            self._tell_all(entries, status)
        return bool(leaving)

    def next_deadline(self, now: float) -> float:
        """When time alone may let somebody go next; infinity when it never does."""
        nearest = self._for_durable[0][1] if self._for_durable else math.inf
        if self._for_slave:
            came = self._for_slave[0][1]
            for deadline in (came + self._disk_seconds, came + self._slave_seconds):
                if now < deadline < nearest:
                    nearest = deadline
        if self._without_slave:
            nearest = min(nearest, self._without_slave[0][1] + self._disk_seconds)
        return nearest

    @property
    def first_for_slave(self) -> tuple[int, float] | None:
        """End of the first who waits for a slave, and when it came."""
        return self._for_slave[0][:2] if self._for_slave else None

    def give_up_slaves(self, durable_end: int) -> None:
        """Nobody will hear of slaves any more; what this disk has is stored all the same."""
        self._tell_all(_reached(self._for_slave, durable_end), PutStatus.FLUSH_SLAVE_TIMEOUT)

    def fail_above(self, end: int, error: StoreUnwritable) -> None:
        """What lies above `end` will never be there."""
        lost = []
        lines = (self.for_written, self._for_durable, self._for_slave, self._without_slave)
        for line in lines:
            while line and line[-1][0] > end:
                lost.append(line.pop())
        # Only now: a listener may come back, and waits for offsets that were given out again.
        lost.reverse()  # those who wait for the same end leave in the order in which they came
        # At once, whoever is in front: their offsets are given out again in this very turn.
        for listener, group in _groups(sorted(lost, key=_end_of)):
            _call(listener, group, error)

    # --- telling -----------------------------------------------------------------------------

    def _tell_all(self, leaving: Iterable[Entry], outcome: Outcome) -> None:
        """In the order of the log; neighbours with one listener together."""
        for listener, group in _groups(leaving):
            self.tell(listener, group, outcome)

    def tell(self, listener: Listener, group: list[Any], outcome: Outcome) -> None:
        """Whoever awaits a future hears of it a turn of the loop later, so do those behind it."""
        if listener is resolve:
            resolve(group, outcome)
            self._unheard += 1
            asyncio.get_running_loop().call_soon(self._heard)
        elif self._unheard:
            self._unheard += 1
            asyncio.get_running_loop().call_soon(self._tell_now, listener, group, outcome)
        else:
            _call(listener, group, outcome)

    def _heard(self) -> None:
        self._unheard -= 1

    def _tell_now(self, listener: Listener, group: list[Any], outcome: Outcome) -> None:
        self._unheard -= 1
        _call(listener, group, outcome)


def _groups(leaving: Iterable[Entry]) -> list[tuple[Listener, list[Any]]]:
    """Who leaves, in their order; neighbours with one listener together."""
    groups: list[tuple[Listener, list[Any]]] = []
    for _, _, listener, who in leaving:
        if groups and groups[-1][0] == listener:
            groups[-1][1].append(who)
        else:
            groups.append((listener, [who]))
    return groups


def _call(listener: Listener, group: list[Any], outcome: Outcome) -> None:
    try:
        listener(group, outcome)
    except Exception:
        _log.exception("wait_listener_failed")  # its fault must not stop the store


def resolve(futures: list[asyncio.Future[PutStatus]], outcome: Outcome) -> None:
    """The listener of those who await a future."""
    for future in futures:
        if future.done():
            continue
        if isinstance(outcome, StoreUnwritable):
            future.set_exception(outcome)
            future.exception()  # a future whose task was cancelled is nobody's error
        else:
            future.set_result(outcome)


def _end_of(entry: Entry) -> int:
    return entry[0]


def _join(line: deque[Entry], entry: Entry) -> None:
    """Behind all who wait for no more."""
    end, time, listener, who = entry
    at = len(line)
    while at and line[at - 1][0] > end:
        at -= 1
    if at < len(line):
        time = min(time, line[at][1])
    line.insert(at, (end, time, listener, who))


def _reached(line: deque[Entry], end: int) -> list[Entry]:
    leaving = []
    while line and line[0][0] <= end:
        leaving.append(line.popleft())
    return leaving
