"""One TCP connection that drives a session; servers and channels use the same.

Theory of operation. One socket read becomes one `receive` of the session, which yields all the
requests that are complete; each goes to the router. Answers, pushes and calls only append to an
output list, and one write at the end of the loop's turn carries all of it, so a burst of requests
costs one read and one write. Where there is a lane, it is offered what was read first; the frames
that it does not take go to the session in their order. Invariants:

- what one read brought is served for one slice of time (`transport/turns.py`); the rest waits,
  in order and mostly as bytes, until it is this connection's turn again;
- serving and reading pause while too many requests are unanswered or while the peer does not
  take what was written; what waits to be written never exceeds `Limits.queued_bytes_max`. The side
  that asks (`Limits.reads_always`) does not pause for the latter: two sides that each wait for
  the other to read would wait forever;
- input that waits and answers that peers do not take are counted with the owner, whose limit covers
  all its connections: the one that would exceed it is cut;
- a connection without progress in either direction, or with a half frame that stays half or grows
  by fewer than `HALF_FRAME_BYTES_PER_S_MIN`, is closed after `Limits.idle_s`;
- close callbacks run exactly once, and calls that are out then fail with Unreachable.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from cosmodrome.errors import Code, ProtocolError, Refused, TimedOut, Unreachable
from cosmodrome.layout import FRAME_LENGTH
from cosmodrome.transport.output import Output
from cosmodrome.transport.peers import Lane, Limits, Owner, plain_peer
from cosmodrome.transport.router import Router, error_frame
from cosmodrome.transport.timeouts import give_up
from cosmodrome.transport.tls import FRAMES, MORE, SECURE, Door, opening
from cosmodrome.transport.turns import SLICE_S, TASK_S
from cosmodrome.wire import table
from cosmodrome.wire.frame import Frame, Prepared, begun, encode, frame_end
from cosmodrome.wire.session import Prepare, Session, Waiter
from cosmodrome.wire.table import BODY_BYTES_MAX, Command, R

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0  # for the peer to take the last bytes before the socket is cut
TICKS_PER_IDLE = 4
NOTHING = memoryview(b"")
HALF_FRAME_BYTES_PER_S_MIN = 1024  # since it was begun, once that is `Limits.idle_s` ago


class SocketConnection(Output):
    """Implements `wire.table.Connection` over a stream transport."""

    def __init__(
        self,
        router: Router,
        owner: Owner,
        limits: Limits,
        buffer: memoryview,
        *,
        prepare: Prepare | None = None,
        lane: Lane | None = None,
        door: Door | None = None,
    ) -> None:
        """`buffer` may be shared: a read fills it and it is emptied before the next one."""
        super().__init__(owner, limits)
        self._lane = lane
        self._door = door
        self._router = router
        self._buffer = buffer
        self._session = Session(waiters_max=limits.calls_max, prepare=prepare)
        self._on_close: list[Callable[[], None]] = []
        self.file_number = -1  # of the socket
        self._accepted = False
        self._refusal = ""
        # reading
        self._in_flight = 0
        self._waiting: deque[Frame] = deque()  # requests that come before those in `rest`
        self._in_line = False  # for a slice of time to go on
        self._slice_ends = 0.0
        self._reading_paused = False
        self._received_bytes = 0
        self._opening: bytes | None = b""  # first bytes, until they are known to be frames
        # Whoever serves cuts frames off one by one. The side that asks has little to serve and
        # gets all the answers of a read at once.
        self._by_frame = lane is not None or not limits.reads_always
        self._rest = bytearray()  # what was read and not cut: a half frame, or all that waits
        self._rest_since = 0.0  # when the frame at its front was begun
        self._skip_bytes = 0  # to come, of a body that was refused by its header
        # progress as of the last tick
        self._tick_timer: asyncio.TimerHandle | None = None
        self._cut_timer: asyncio.TimerHandle | None = None
        self._read_mark = (0, 0.0)

    # --- what handlers see -------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Requests of the peer that are not answered yet."""
        return self._in_flight

    @property
    def busy(self) -> bool:
        """It has requests that are not answered or not even served."""
        return bool(self._in_flight) or self._in_line

    @property
    def congested(self) -> bool:
        """The peer does not take what was written; whoever can wait should."""
        return self.writing_paused

    def begin(self, code: int, ext: dict[str, str], body: bytes, waiter: Waiter) -> int:
        """Send a request without waiting: its answer, or the error that ends this connection,
        resolves `waiter`, unless `forget` withdraws it first. Returns its opaque number."""
        opaque, data = self._session.request_fields(code, ext, body, waiter)
        self._send(data)
        return opaque

    @property
    def takes_prepared(self) -> bool:
        """Whether `begin_prepared` may be used."""
        return self._session.takes_prepared

    def begin_prepared(
        self, header: Prepared, born_ms: int, properties: str, body: bytes, waiter: Waiter
    ) -> int:
        """Like `begin`, for a send whose header was prepared."""
        opaque, data = self._session.request_prepared(header, born_ms, properties, body, waiter)
        self._send(data)
        return opaque

    def forget(self, opaque: int) -> None:
        self._session.forget(opaque)

    def push(self, command: Command[Any]) -> None:
        if not self.closed:
            self._send(self._session.push(command))

    async def call(self, command: Command[R], *, timeout_ms: int = 3000) -> R:
        """Ask the peer; Refused, TimedOut or Unreachable when there is no good answer."""
        if self.closed:
            raise Unreachable(
                f"{command.describe()} was not sent: the connection to {self.name} is closed:"
                f" {self._close_reason}"
            )
        answered: asyncio.Future[Frame] = self._loop.create_future()
        opaque, data = self._session.request(command, answered)
        self._send(data)
        # A bare timer: every pull is such a call, and `asyncio.timeout` costs far more.
        due = self._loop.time() + timeout_ms / 1000
        timer = self._loop.call_at(due, give_up, self._loop, answered, due)
        try:
            frame = await answered
        except TimeoutError:
            raise TimedOut(
                f"{self.name} did not answer {command.describe()} within {timeout_ms} ms"
            ) from None
        finally:
            timer.cancel()
            self._session.forget(opaque)
        if frame.code not in command.success_codes:
            raise Refused(frame.code, frame.remark or f"{self.name} refused {command.describe()}.")
        return table.decode_reply(type(command), frame)

    def on_close(self, callback: Callable[[], None]) -> None:
        if self._lost:
            self._run_callback(callback)
        else:
            self._on_close.append(callback)

    def close(self, reason: str) -> None:
        """Write what is queued and close; the socket is cut if the peer does not take it."""
        if self.closed or self._transport is None:
            return
        self._close_reason = reason
        log.debug("connection closing: peer=%s reason=%s", self.name, reason)
        self._flush()
        self._end_session()
        self._transport.close()
        self._cut_timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    # --- what the owner sees -----------------------------------------------------------------

    def refuse_requests(self, remark: str) -> None:
        """Answer further requests with "service not available" instead of serving them."""
        self._refusal = remark

    def abort(self, reason: str) -> None:
        """Cut the connection; what is queued is lost."""
        self._close_reason = self._close_reason or reason
        self._drop_queued()
        self._end_session()
        if self._transport is not None:
            self._transport.abort()

    # --- what the router sees ----------------------------------------------------------------

    def answer(self, reply: Frame | None) -> None:
        self._answered(1)
        if reply is None or self.closed:
            return
        try:
            data = encode(reply)
        except Exception as error:
            if self._owner.log_limit.admit("reply cannot be encoded") is not None:
                log.exception("reply cannot be encoded: code=%d peer=%s", reply.code, self.name)
            remark = f"The reply cannot be encoded: {error}; the server's log has more."
            data = encode(error_frame(reply, Code.SYSTEM_ERROR, remark))
        self._send(data)

    def _answered(self, count: int) -> None:
        self._in_flight -= count
        if self._reading_paused and self._in_flight <= self._limits.in_flight_max // 2:
            # Not from here: a handler that answers at once would come back to this line.
            self._join_line()
        if self._refusal and not self._in_flight:
            self._owner.connection_quiet(self)

    # --- what the lane sees ------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more requests may be unanswered."""
        return max(0, self._limits.in_flight_max - self._in_flight)

    def accept(self, count: int) -> None:
        """Requests were taken; `answer`, or `answer_many`, follows for each of them."""
        self._in_flight += count

    def hand_back(self, count: int, frames: bytes) -> None:
        """These requests, which were accepted, have to be served one by one after all."""
        self._in_flight -= count
        if not self.closed:
            if not self._driving:
                self._begin_slice()
            self._hear(memoryview(frames))

    def answer_many(self, count: int, data: bytes) -> None:
        """So many requests are done with; `data` is the frames that answer them."""
        if self._reading_paused or self._refusal:
            self._answered(count)
        else:
            self._in_flight -= count
        if not data:
            return
        if self._driving or self._out or self.writing_paused or self._lost or self._close_reason:
            self.put(data)
            return
        transport = self._transport
        assert transport is not None
        if not transport.get_write_buffer_size():
            self._write_mark = (self._written_bytes, self._loop.time())
        self._written_bytes += len(data)
        transport.write(data)

    def heard_binary(self) -> None:
        self._session.heard_binary()

    # --- what the transport calls ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.peer = plain_peer(transport.get_extra_info("peername"))
        raw = transport.get_extra_info("socket")
        self.file_number = -1 if raw is None else raw.fileno()
        self._accepted = self._owner.connection_opened(self)
        if not self._accepted:
            self.abort("not accepted")
            return
        self._transport.set_write_buffer_limits(high=self._limits.queued_bytes_high)
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._fd = -1 if transport.get_extra_info("sslcontext") else self.file_number
        now = self._loop.time()
        self._read_mark = self._write_mark = (0, now)
        self._arm_tick()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._close_reason = self._close_reason or "the peer closed it"
        for timer in (self._tick_timer, self._cut_timer):
            if timer is not None:
                timer.cancel()
        self._drop_queued()
        # Now and not when the collector finds this object: an idle server seldom runs it.
        self._rest = bytearray()
        self._hold(0, 0)
        self._end_session()
        callbacks, self._on_close = self._on_close, []
        for callback in callbacks:
            self._run_callback(callback)
        if self._accepted:
            self._owner.connection_lost(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._lost or self._close_reason:
            return
        data = self._buffer[:nbytes]
        self._received_bytes += nbytes
        if self._opening is not None:
            first = self._opening + bytes(data)
            if not self._opens(first):
                return
            data = memoryview(first)
        if self._skip_bytes:
            skipped = min(self._skip_bytes, nbytes)
            self._skip_bytes -= skipped
            data = data[skipped:]
            if skipped == nbytes:
                return
        lane = self._lane
        if not self._by_frame:
            self._begin_slice()
            self._hear(data)
        elif lane is None or self._rest or self._waiting or self.writing_paused or self._refusal:
            self._drive(data)
        else:
            self._driving = True
            try:
                at = lane.feed(self, data, 0)
            finally:
                self._driving = False
            if at < len(data) or self._lost or self._close_reason:
                self._drive(data, at, fed=True)
            elif self._out and not self.writing_paused:
                self._flush()

    def eof_received(self) -> bool:
        self._flush()
        return False

    def pause_writing(self) -> None:
        self.writing_paused = True

    def resume_writing(self) -> None:
        self.writing_paused = False
        self._hold(self._held[0], 0)
        self._flush()
        if self._reading_paused:
            self._join_line()

    # --- reading -----------------------------------------------------------------------------

    def _opens(self, first: bytes) -> bool:
        """Whether frames begin here. Where TLS begins, they follow within it."""
        kind = opening(first, self._door)
        self._opening = first if kind == MORE else None
        if kind == SECURE and self._door is not None and self._transport is not None:
            door, self._door = self._door, None  # it is passed once
            self._opening, self._fd = b"", -1
            self._transport = door.secure(self._transport, self, first)
        elif kind not in (FRAMES, MORE):
            self._turn_away(kind)
        return kind == FRAMES

    def _hear(self, data: memoryview) -> bool:
        """Give bytes to the session and serve what they complete; false when that was the end."""
        try:
            requests = self._session.receive(data)
        except ProtocolError as error:
            self._warn("broken frame", str(error))
            self.close(f"broken frame: {error}")
            return False
        # Who cuts frames off gives the session whole ones only.
        if not self._by_frame and not self._hold(self._session.pending_bytes, self._held[1]):
            return False
        self._waiting.extend(requests)
        self._serve_waiting()
        return not self.closed

    def _drive(self, data: memoryview, at: int = 0, *, fed: bool = False) -> None:
        """Serve the frames of `rest` and of what was read, for one slice of time.

        The lane sees the view that it has seen before: what it found out about it still holds.
        `at`, and whether the lane has left the frame there already, are of a read without `rest`.
        """
        rest = self._rest
        if rest:
            rest += data
        size = len(rest) or len(data)
        self._begin_slice()
        self._driving = True
        try:
            if rest:
                with memoryview(rest) as view:
                    at = self._drive_over(view, 0, fed=False)
            else:
                at = self._drive_over(data, at, fed=fed)
        finally:
            self._driving = False
        if self._lost or self._close_reason:
            rest.clear()
            return
        if at or not rest:
            self._rest_since = self._loop.time()
        if rest:
            del rest[:at]
        elif at < size:
            rest += data[at:]
        if len(rest) > BODY_BYTES_MAX and not self._waiting:
            self._skip_long_body()
            rest = self._rest
        if self._held[0] != len(rest) and not self._hold(len(rest), self._held[1]):
            return
        if self._lane is not None and self._out and not self.writing_paused:
            self._flush()

    def _skip_long_body(self) -> None:
        """Refuse the frame at the front of `rest` by its header, if no request of its code may have
        a body as long as that; nothing of it is kept."""
        frame = begun(self._rest)
        if frame is None or frame.is_response:
            return
        row = table.rows().get(frame.code)
        if frame.skipped_bytes <= (row.body_bytes_max if row else BODY_BYTES_MAX):
            return
        (length,) = FRAME_LENGTH.unpack_from(self._rest)
        self._skip_bytes = FRAME_LENGTH.size + length - len(self._rest)
        self._rest = bytearray()
        self._waiting.append(frame)
        self._serve_waiting()

    def _drive_over(self, view: memoryview, at: int, *, fed: bool) -> int:
        """Offer what was read to the lane; each frame that it leaves goes to the session."""
        size, lane = len(view), self._lane
        while at < size and not self.closed:
            if self._in_line or self._waiting or not self._can_serve():
                self._read_on(False)
                break
            if lane is not None and not (fed or self.writing_paused or self._refusal):
                at = lane.feed(self, view, at)
                if not self._can_serve():
                    continue
            fed = False
            end = frame_end(view, at) if at < size else 0
            if not end:
                break
            # Given back at once: an error that somebody keeps would keep it, and `rest` with it.
            with view[at:end] as piece:
                if not self._hear(piece):
                    break
            at = end
            if at < size and self._owner.turns.now() >= self._slice_ends:
                self._join_line()
        return at

    def _turn_away(self, kind: str) -> None:
        """End a connection whose first bytes are another protocol's."""
        reason, last_words = self._owner.stray(kind)
        self._warn(kind, reason)
        if last_words:
            self._send(last_words)
        self.close(reason)

    def _refuse(self, frame: Frame) -> None:
        if frame.is_oneway:
            self.answer(None)
        else:
            self.answer(error_frame(frame, Code.SERVICE_NOT_AVAILABLE, self._refusal))

    def serve_slice(self) -> None:
        """It is this connection's turn to go on with what it has read."""
        self._in_line = False
        if self.closed:
            return
        self._begin_slice()
        self._serve_waiting()
        if self._rest and not self._waiting and not self.closed:
            self._drive(NOTHING)
            self._read_on(self._can_serve() and not self._in_line)

    def _begin_slice(self) -> None:
        self._slice_ends = self._owner.turns.now() + SLICE_S

    def _join_line(self) -> None:
        """Go on with what was read when others had their turn; read no more until then."""
        if not self._in_line:
            self._in_line = True
            self._owner.turns.join(self)
        self._read_on(False)

    def _serve_waiting(self) -> None:
        """Serve the requests that were cut, as far as limits and time allow; read on after that."""
        while self._waiting and not self.closed:
            if self._in_line or not self._can_serve():
                self._read_on(False)
                return
            self._serve(self._waiting.popleft())
            if self._waiting and self._owner.turns.now() >= self._slice_ends:
                self._join_line()
        self._read_on(self._can_serve() and not self._in_line)

    def _serve(self, frame: Frame) -> None:
        self._in_flight += 1
        if self._refusal:
            self._refuse(frame)
            return
        tasks = self._router.tasks
        self._router.dispatch(frame, self)
        if self._router.tasks > tasks:
            self._slice_ends -= TASK_S

    def _can_serve(self) -> bool:
        if self.writing_paused and not self._limits.reads_always:
            return False
        return self._in_flight < self._limits.in_flight_max

    def _read_on(self, go: bool) -> None:
        if go is not self._reading_paused or self.closed or self._transport is None:
            return
        self._reading_paused = not go
        if go:
            self._rest_since = self._loop.time()
            self._read_mark = (self._received_bytes, self._rest_since)
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def _drop_queued(self) -> None:
        self._waiting.clear()
        self._out.clear()
        self._out_bytes = 0

    # --- progress ----------------------------------------------------------------------------

    def _arm_tick(self) -> None:
        self._tick_timer = self._loop.call_later(self._limits.idle_s / TICKS_PER_IDLE, self._tick)

    def _tick(self) -> None:
        """Compare what moved with the last tick; close when nothing did for too long."""
        if self.closed or self._transport is None:
            return
        now = self._loop.time()
        queued = self._transport.get_write_buffer_size()
        drained_bytes = self._written_bytes - queued
        if self._received_bytes != self._read_mark[0]:
            self._read_mark = (self._received_bytes, now)
        if drained_bytes != self._write_mark[0]:
            self._write_mark = (drained_bytes, now)
        read_quiet = now - self._read_mark[1] >= self._limits.idle_s
        write_quiet = now - self._write_mark[1] >= self._limits.idle_s
        if queued and write_quiet:
            self._warn("unread replies", "the peer does not read its replies")
            self.abort("the peer does not read its replies")
        elif not self._reading_paused and (
            self._creeps(now)
            or (read_quiet and (self._session.pending_bytes or self._rest or self._opening))
        ):
            self._warn("half frame", "a frame was begun and never finished")
            self.close("a frame was begun and never finished")
        elif read_quiet and write_quiet:
            self.close("idle")
        else:
            self._arm_tick()

    def _creeps(self, now: float) -> bool:
        """Whether a frame was begun long ago and comes too slowly to be waited for."""
        took_s = now - self._rest_since
        size = len(self._rest)
        return 0 < size < took_s * HALF_FRAME_BYTES_PER_S_MIN and took_s >= self._limits.idle_s

    def _end_session(self) -> None:
        """Nobody waits for answers over this connection any more."""
        self._session.close(
            lambda: Unreachable(f"the connection to {self.name} broke: {self._close_reason}")
        )

    # --- words -------------------------------------------------------------------------------

    def _run_callback(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:
            log.exception("close callback failed: peer=%s", self.name)
