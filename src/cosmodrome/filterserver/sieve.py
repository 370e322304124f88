"""Runs filters over the records of a pull, off the loop.

A filter is foreign code: it may raise, answer nonsense, or not come back. Whatever it does, a
message is never dropped because of it: the pull is refused with the reason, and the consumer
asks again from the same offset until the operator has mended the filter.

One pull at a time per filter, in a worker thread. A thread cannot be ended, so a filter that
outlives its time keeps its thread; it gets no further work until it comes back, and the others go
on with the threads that are left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import weakref

from cosmodrome.env.base import Offload
from cosmodrome.errors import Code, Refused
from cosmodrome.filterserver.filters import Filter, Message
from cosmodrome.transport.router import LogLimit
from cosmodrome.wire.record import Record, decode_record

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
ERROR_CHARACTERS_MAX = 500


@dataclasses.dataclass(frozen=True, slots=True)
class Sifted:
    """The records that passed, as they are stored, and how many there were before."""

    data: bytes
    passed: int
    seen: int


class FilterFailed(Refused):
    """A filter gave no usable answer about a message."""

    def __init__(self, chosen: Filter, record: Record, what: str) -> None:
        super().__init__(
            Code.SYSTEM_ERROR,
            f"Filter {chosen.name} {what[:ERROR_CHARACTERS_MAX]} at offset {record.queue_offset} of"
            f" {record.topic}, queue {record.queue_id}; correct the filter, until then the consumer"
            " stays at this message.",
        )


def sift(chosen: Filter, data: bytes, group: str) -> Sifted:
    """Ask the filter about each record of a pull body."""
    view = memoryview(data)
    passed: list[memoryview] = []
    seen = at = 0
    while at < len(data):
        record = decode_record(data, at)
        if _verdict(chosen, record, group):
            passed.append(view[at : at + record.size])
        seen += 1
        at += record.size
    return Sifted(b"".join(passed), len(passed), seen)


def _verdict(chosen: Filter, record: Record, group: str) -> bool:
    try:
        verdict = chosen.matches(Message(record, group))
    except BaseException as error:  # sys.exit() in a filter must not end the server
        raise FilterFailed(chosen, record, f"raised {type(error).__name__}: {error}") from error
    if not isinstance(verdict, bool):
        raise FilterFailed(
            chosen, record, f"returned a {type(verdict).__name__}, not True or False,"
        )
    return verdict


class _Lane:
    """The turn of one filter."""

    __slots__ = ("overdue", "turn")

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.overdue = False


class _Job:
    """One piece of work in a thread, as far as the loop has to know about it."""

    __slots__ = ("abandoned", "begun")

    def __init__(self) -> None:
        self.begun = False
        self.abandoned = False


class Sieve:
    def __init__(self, offload: Offload, timeout_ms: int) -> None:
        self._offload = offload
        self._timeout_ms = timeout_ms
        self._lanes: weakref.WeakKeyDictionary[Filter, _Lane] = weakref.WeakKeyDictionary()
        self._overdue: set[_Lane] = set()
        self._log_limit = LogLimit(LOG_INTERVAL_S)

    @property
    def overdue(self) -> int:
        """Filters that have not come back in time and hold a thread."""
        return len(self._overdue)

    async def run(self, chosen: Filter, data: bytes, group: str) -> Sifted:
        """What passes; Refused when the filter fails, is late, or gets no turn."""
        lane = self._lanes.get(chosen)
        if lane is None:
            lane = self._lanes[chosen] = _Lane()
        await self._take_turn(lane, chosen)
        job = _Job()

        def work() -> Sifted | None:
            job.begun = True
            return None if job.abandoned else sift(chosen, data, group)

        future = asyncio.ensure_future(self._offload(work))
        future.add_done_callback(lambda future: self._came_back(lane, chosen, future))
        await asyncio.wait((future,), timeout=self._timeout_ms / 1000)
        if not future.done():
            self._give_up(lane, chosen, job)
        try:
            sifted = future.result()
        except FilterFailed as error:
            self._log_failure(chosen, error)
            raise
        assert sifted is not None  # only abandoned work has no result
        return sifted

    async def _take_turn(self, lane: _Lane, chosen: Filter) -> None:
        if not lane.overdue:
            try:
                async with asyncio.timeout(self._timeout_ms / 1000):
                    await lane.turn.acquire()
                return
            except TimeoutError:
                pass
        if lane.overdue:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Filter {chosen.name} has not come back from an earlier message within"
                f" {self._timeout_ms} ms (filterTimeoutMillis); correct it and restart the filter"
                " server.",
            )
        raise Refused(
            Code.SYSTEM_BUSY,
            f"Filter {chosen.name} has more pulls before this one than it can answer within"
            f" {self._timeout_ms} ms; pull again, or start another filter server.",
        )

    def _give_up(self, lane: _Lane, chosen: Filter, job: _Job) -> None:
        if not job.begun:
            job.abandoned = True
            raise Refused(
                Code.SYSTEM_BUSY,
                f"Filter {chosen.name} got no thread within {self._timeout_ms} ms,"
                f" {self.overdue} filters hold theirs without coming back; pull again.",
            )
        lane.overdue = True
        self._overdue.add(lane)
        log.error(
            "filter_overdue name=%s origin=%s after_ms=%d; it holds a thread, correct it and"
            " restart this server",
            chosen.name,
            chosen.origin,
            self._timeout_ms,
        )
        raise Refused(
            Code.SYSTEM_ERROR,
            f"Filter {chosen.name} did not answer within {self._timeout_ms} ms"
            " (filterTimeoutMillis); correct it and restart the filter server.",
        )

    def _came_back(
        self, lane: _Lane, chosen: Filter, future: asyncio.Future[Sifted | None]
    ) -> None:
        if not future.cancelled():
            future.exception()  # whoever asked may be gone
        if lane.overdue:
            lane.overdue = False
            self._overdue.discard(lane)
            log.warning("filter_back name=%s; it gets work again", chosen.name)
        lane.turn.release()

    def _log_failure(self, chosen: Filter, error: FilterFailed) -> None:
        held = self._log_limit.admit(chosen.name)
        if held is not None:
            log.error(
                "filter_failed name=%s origin=%s error=%s held_back=%d",
                chosen.name,
                chosen.origin,
                error.remark,
                held,
                exc_info=error.__cause__,
            )
