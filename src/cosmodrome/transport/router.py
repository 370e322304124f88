"""From a request frame to the one handler of its row, and from what happens there to a reply.

Hidden here: finding handlers, decoding headers, running coroutines, and the only place where
exceptions become response codes. Invariants:

- every row the role serves has exactly one handler, checked when the router is built;
- every dispatched request gets exactly one `answer` call, with None when nothing is to be sent;
- a one-way request is never answered, whatever happens to it;
- no exception of a handler leaves the router, except cancellation of the router's own tasks.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from cosmodrome.errors import (
    AccessDenied,
    Code,
    MessageTooLarge,
    ProtocolError,
    Refused,
    StoreBusy,
    StoreUnwritable,
    TimedOut,
    Unreachable,
    reason_of,
)
from cosmodrome.layout import FLAG_RESPONSE
from cosmodrome.wire import table
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.table import Call, Command, Connection, Handler, Reply, Role

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Reply, covariant=True)
T = TypeVar("T")

UNKNOWN = -1  # the key under which requests without a row are counted
REMARK_CHARACTERS_MAX = 2000
LOG_INTERVAL_S = 1.0
LOG_KINDS_MAX = 1024


class Requester(Connection, Protocol):
    """A connection as the router sees it: it also takes the answers."""

    def answer(self, reply: Frame | None) -> None:
        """Called once per dispatched request; None says that it ends without a reply."""


class Gate(Protocol):
    """Decides who may ask for what."""

    def check(
        self, row: type[Command[Any]], ask: Command[Any], frame: Frame, peer: tuple[str, int]
    ) -> None:
        """AccessDenied when the request may not be served."""


class PendingReply(Awaitable[R]):
    """A reply that is made when a future is done: a handler that waits for one thing only needs
    no task for it."""

    __slots__ = ("after", "make")

    def __init__(self, after: asyncio.Future[T], make: Callable[[asyncio.Future[T]], R]) -> None:
        self.after: asyncio.Future[Any] = after
        self.make: Callable[[asyncio.Future[Any]], R] = make

    def __await__(self) -> Generator[Any, None, R]:
        return self._waited().__await__()

    async def _waited(self) -> R:
        await asyncio.wait((self.after,))
        return self.make(self.after)


class LogLimit:
    """Lets one line per kind and second through, so that no peer can flood the log."""

    def __init__(self, interval_s: float = LOG_INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._kinds: dict[object, tuple[float, int]] = {}  # kind -> next time, lines held back

    def admit(self, kind: object) -> int | None:
        """The number of lines held back since the last one, or None to hold this one back."""
        now = asyncio.get_running_loop().time()
        next_time, held = self._kinds.get(kind, (now, 0))
        if now < next_time:
            self._kinds[kind] = (next_time, held + 1)
            return None
        if len(self._kinds) >= LOG_KINDS_MAX:
            self._kinds.clear()
        self._kinds[kind] = (now + self._interval_s, 0)
        return held


class Router:
    """Serves the rows of one role with the handlers found on `services`."""

    def __init__(
        self,
        role: Role,
        services: Sequence[object],
        *,
        partial: bool = False,
        gate: Gate | None = None,
    ) -> None:
        """`partial` allows rows without handler: they are answered "not supported". Every request
        passes the `gate` before its handler."""
        self.role = role
        self._gate = gate
        self.requests: dict[int, int] = {UNKNOWN: 0}
        self.errors: dict[int, int] = {UNKNOWN: 0}
        self._handlers: dict[int, tuple[type[Command[Any]], Handler]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._log_limit = LogLimit()
        self._slow_ms: Callable[[], int] = lambda: 0
        self.slow: dict[int, int] = {}  # requests that took long, by code
        for row, handler in _handlers_of(services):
            self._add(row, handler)
        if not partial:
            self._demand_all()

    @property
    def tasks(self) -> int:
        """Handlers that run as tasks right now."""
        return len(self._tasks)

    def dispatch(self, frame: Frame, requester: Requester) -> None:
        """Serve one request; its answer may come before this returns or any time later."""
        entry = self._handlers.get(frame.code)
        if entry is None:
            self.requests[UNKNOWN] += 1
            self.errors[UNKNOWN] += 1
            self._answer_error(
                frame, requester, Code.REQUEST_CODE_NOT_SUPPORTED, self._why_not(frame.code)
            )
            return
        row, handler = entry
        self.requests[frame.code] += 1
        began = asyncio.get_running_loop().time() if self._slow_ms() else 0.0
        body_bytes = len(frame.body) + frame.skipped_bytes
        if body_bytes > row.body_bytes_max:
            self._failed(row, frame, requester, _long_body(row, body_bytes))
            return
        try:
            ask = table.decode(row, frame.ext, frame.body)
            if self._gate is not None:
                self._gate.check(row, ask, frame, requester.peer)
            outcome = handler(ask, Call(frame, requester))
        except Exception as error:
            self._failed(row, frame, requester, error)
            self._timed(row, requester, began)
            return
        if outcome is None or isinstance(outcome, Reply):
            self._finish(row, frame, requester, outcome)
            self._timed(row, requester, began)
        elif isinstance(outcome, PendingReply):
            frame.body = b""  # it is stored: what waits for the disk must not fill the memory
            self._await_future(row, frame, requester, outcome.after, outcome.make, began)
        elif isinstance(outcome, asyncio.Future):
            # A pull on hold: how long it waits is what its client has asked for.
            self._await_future(row, frame, requester, outcome, asyncio.Future.result, 0.0)
        else:
            self._spawn(row, frame, requester, outcome, began)

    def watch_slow(self, slow_ms: Callable[[], int]) -> None:
        """Count and log requests that take so long or longer; nothing while it is 0."""
        self._slow_ms = slow_ms

    def count(self, code: int, requests: int = 1) -> None:
        """Requests of a row were served elsewhere, by the fast lane."""
        self.requests[code] += requests

    def finish(self, frame: Frame, requester: Requester, reply: Reply) -> None:
        """Answer a request that was counted and served elsewhere."""
        self._finish(self._handlers[frame.code][0], frame, requester, reply)

    def fail(self, frame: Frame, requester: Requester, error: Exception) -> None:
        """Answer a request that was counted elsewhere and failed there."""
        self._failed(self._handlers[frame.code][0], frame, requester, error)

    async def stop(self, *, grace_s: float = 0.0) -> None:
        """Let running handlers finish within the grace, cancel the rest, wait for all."""
        if self._tasks and grace_s > 0:
            await asyncio.wait(tuple(self._tasks), timeout=grace_s)
        while self._tasks:
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # --- building ----------------------------------------------------------------------------

    def _add(self, row: type[Command[Any]], handler: Handler) -> None:
        if row.planned:
            raise AssertionError(
                f"{row.describe()} is marked as planned but has a handler: {handler!r}"
            )
        if self.role not in row.served_by:
            raise AssertionError(
                f"{row.describe()} is not served by the {self.role.value}: {handler!r}"
            )
        if row.request_code in self._handlers:
            raise AssertionError(f"{row.describe()} has two handlers; the second is {handler!r}")
        self._handlers[row.request_code] = (row, handler)
        self.requests[row.request_code] = 0
        self.errors[row.request_code] = 0

    def _demand_all(self) -> None:
        missing = [
            f"{row.name} ({code})"
            for code, row in sorted(table.rows().items())
            if self.role in row.served_by and not row.planned and code not in self._handlers
        ]
        if missing:
            raise AssertionError(f"no handler of the {self.role.value} for {', '.join(missing)}")

    # --- running -----------------------------------------------------------------------------

    def _spawn(
        self,
        row: type[Command[Any]],
        frame: Frame,
        requester: Requester,
        outcome: Awaitable[Reply | None],
        began: float,
    ) -> None:
        task = asyncio.get_running_loop().create_task(
            self._run(row, frame, requester, outcome, began)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(
        self,
        row: type[Command[Any]],
        frame: Frame,
        requester: Requester,
        outcome: Awaitable[Reply | None],
        began: float,
    ) -> None:
        try:
            reply = await outcome
        except asyncio.CancelledError:
            requester.answer(None)
            raise
        except Exception as error:
            self._failed(row, frame, requester, error)
        else:
            self._finish(row, frame, requester, reply)
        self._timed(row, requester, began)

    def _await_future(
        self,
        row: type[Command[Any]],
        frame: Frame,
        requester: Requester,
        future: asyncio.Future[Any],
        make: Callable[[asyncio.Future[Any]], Reply | None],
        began: float,
    ) -> None:
        """A future needs no task of its own: whoever resolves it carries the reply out."""

        def done(future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                requester.answer(None)
                return
            try:
                reply = make(future)
            except Exception as error:
                self._failed(row, frame, requester, error)
            except BaseException:
                requester.answer(None)
                raise
            else:
                self._finish(row, frame, requester, reply)
            self._timed(row, requester, began)

        future.add_done_callback(done)

    def _timed(self, row: type[Command[Any]], requester: Requester, began: float) -> None:
        """A request that came at `began`, when that is known, was answered now."""
        slow_ms = self._slow_ms()
        if not began or not slow_ms:
            return
        took_ms = (asyncio.get_running_loop().time() - began) * 1000
        if took_ms < slow_ms:
            return
        self.slow[row.request_code] = self.slow.get(row.request_code, 0) + 1
        held = self._log_limit.admit(("slow", row.request_code))
        if held is not None:
            log.warning(
                "slow_request request=%s code=%d took_ms=%d peer=%s:%d held_back=%d",
                row.name,
                row.request_code,
                took_ms,
                *requester.peer[:2],
                held,
            )

    # --- answering ---------------------------------------------------------------------------

    def _finish(
        self, row: type[Command[Any]], frame: Frame, requester: Requester, reply: Reply | None
    ) -> None:
        if reply is None or frame.is_oneway:
            requester.answer(None)
            return
        try:
            answer = reply_frame(frame, reply)
        except Exception as error:
            self._failed(row, frame, requester, error)
            return
        if reply.code not in row.success_codes:
            self.errors[frame.code] += 1
        requester.answer(answer)

    def _failed(
        self, row: type[Command[Any]], frame: Frame, requester: Requester, error: Exception
    ) -> None:
        self.errors[frame.code] += 1
        code, remark = self._code_and_remark(row, frame, requester, error)
        self._answer_error(frame, requester, code, remark)

    def _code_and_remark(
        self, row: type[Command[Any]], frame: Frame, requester: Requester, error: Exception
    ) -> tuple[int, str]:
        if isinstance(error, AccessDenied):
            self._log_denied(row, requester, error)
        if isinstance(error, Refused):
            return error.code, error.remark
        if isinstance(error, StoreBusy):
            return Code.SYSTEM_BUSY, str(error)
        if isinstance(error, StoreUnwritable):
            return Code.SERVICE_NOT_AVAILABLE, str(error)
        if isinstance(error, MessageTooLarge):
            return Code.MESSAGE_ILLEGAL, str(error)
        if isinstance(error, ProtocolError | TimedOut | Unreachable):
            return Code.SYSTEM_ERROR, str(error)
        held = self._log_limit.admit((row.request_code, type(error)))
        if held is not None:
            log.error(
                "request failed unexpectedly: request=%s code=%d opaque=%d peer=%s:%d held_back=%d",
                row.name,
                row.request_code,
                frame.opaque,
                *requester.peer[:2],
                held,
                exc_info=error,
            )
        return (
            Code.SYSTEM_ERROR,
            f"{row.name} failed: {type(error).__name__}: {reason_of(error)};"
            " the server's log has more.",
        )

    def _log_denied(
        self, row: type[Command[Any]], requester: Requester, error: AccessDenied
    ) -> None:
        held = self._log_limit.admit("denied")
        if held is not None:
            log.warning(
                "request_denied request=%s code=%d peer=%s:%d reason=%r held_back=%d",
                row.name,
                row.request_code,
                *requester.peer[:2],
                error.remark,
                held,
            )

    def _answer_error(self, frame: Frame, requester: Requester, code: int, remark: str) -> None:
        remark = remark[:REMARK_CHARACTERS_MAX]
        if frame.is_oneway:
            log.debug(
                "one-way request refused: code=%d opaque=%d peer=%s:%d answer=%d remark=%s",
                frame.code,
                frame.opaque,
                *requester.peer[:2],
                code,
                remark,
            )
            requester.answer(None)
            return
        requester.answer(error_frame(frame, code, remark))

    def _why_not(self, code: int) -> str:
        row = table.rows().get(code)
        if row is None:
            return f"Request code {code} is not known to this {self.role.value}."
        if self.role not in row.served_by:
            servers = " or ".join(sorted(role.value for role in row.served_by))
            return (
                f"{row.describe()} is served by the {servers}, this is a {self.role.value};"
                " check the address the request was sent to."
            )
        if row.planned:
            return f"{row.describe()} is not served: {row.planned}"
        return f"{row.describe()} is not served on this port."


def _long_body(row: type[Command[Any]], size: int) -> ProtocolError:
    return ProtocolError(
        f"{row.describe()} with a body of {size} bytes: at most {row.body_bytes_max} are taken;"
        " send less at once."
    )


def reply_frame(request: Frame, reply: Reply) -> Frame:
    """The frame that answers `request`, in the serialize form it came in."""
    return Frame(
        code=int(reply.code),
        opaque=request.opaque,
        flag=FLAG_RESPONSE,
        ext=table.encode(reply),
        body=reply.body,
        remark=reply.remark,
        serialize=request.serialize,
    )


def error_frame(request: Frame, code: int, remark: str) -> Frame:
    return Frame(
        code=int(code),
        opaque=request.opaque,
        flag=FLAG_RESPONSE,
        remark=remark,
        serialize=request.serialize,
    )


def _handlers_of(services: Sequence[object]) -> Iterator[tuple[type[Command[Any]], Handler]]:
    for service in services:
        kind = type(service)
        for name in dir(kind):
            # Looked up without binding, so that no property of a service runs here.
            serves = getattr(inspect.getattr_static(kind, name), "serves", None)
            if isinstance(serves, tuple):
                for row in serves:
                    yield row, getattr(service, name)
