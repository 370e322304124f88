"""Whether the broker keeps up: a heartbeat of the event loop that says how late it is.

One loop serves everything, so a request waits at most about one turn of it before it is looked
at: the lateness of a timer is the age of the requests that are being read. Ten beats in a row,
each later than `waitTimeMillsInSendQueue`, mean that more is asked than can be done; until a
beat is on time again, sends are answered SYSTEM_BUSY. A single long turn (a slow disk call, the
garbage collector, a busy machine) refuses nothing, because clients report code 2 to the
application instead of trying elsewhere. A store that falls behind is refused by the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import Code, Refused

BEAT_SECONDS = 0.1  # lateness is what counts, so a calm beat loses nothing and costs no idle CPU
LATE_BEATS_MAX = 10
POOLS = ("send", "pull", "query")  # Compat: upstream's; here all of them wait for one loop


class Pressure:
    """`late_ms` is how late the last beat was."""

    def __init__(self, options: BrokerOptions) -> None:
        self._options = options
        self.late_ms = 0.0
        self.refused_total = 0
        self._late_beats = 0  # those in a row up to now
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        if self._timer is None:
            self._beat_later(asyncio.get_running_loop())

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._late_beats = 0

    @property
    def overloaded(self) -> bool:
        return self._late_beats >= LATE_BEATS_MAX and self._options.broker_fast_failure_enable

    def check(self) -> None:
        """Refused with SYSTEM_BUSY while the loop is overloaded."""
        options = self._options
        if not self.overloaded:
            return
        self.refused_total += 1
        raise Refused(
            Code.SYSTEM_BUSY,
            f"[OVERLOAD] The broker is overloaded: requests wait {self.late_ms:.0f} ms and have"
            f" waited longer than waitTimeMillsInSendQueue ({options.wait_time_mills_in_send_queue}"
            f" ms) for the last {self._late_beats} checks; send less, or spread the topic over more"
            " brokers.",
        )

    def figures(self) -> Mapping[str, str]:
        """For the runtime information: how long requests wait for their turn."""
        late = str(int(self.late_ms))
        return {f"{pool}ThreadPoolQueueHeadWaitTimeMills": late for pool in POOLS}

    def beat(self, late_seconds: float) -> None:
        self.late_ms = max(0.0, late_seconds) * 1000
        late = self.late_ms > self._options.wait_time_mills_in_send_queue
        self._late_beats = self._late_beats + 1 if late else 0

    def _beat_later(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = loop.time() + BEAT_SECONDS
        self._timer = loop.call_at(self._due, self._on_beat, loop)

    def _on_beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self.beat(loop.time() - self._due)
        self._beat_later(loop)
