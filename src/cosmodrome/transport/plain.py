"""One blocking connection for bulk readers: a driver of `wire.session` without loop or threads.

There are two ways to use it. `call` and `call_all` ask and wait. Underneath, `write`,
`write_repeated`, `flush` and `read` let the caller keep many requests on their way: what was
written leaves with one `sendall`, and `read` hands out the next answer with its body as a view of
the receive buffer, without a copy. Such a view is good until the next `read` or call.

An answer that a caller has given up may be read later by a caller who waits for others: opaque
numbers tell them apart. Requests of the peer (a broker that says that the members of a group
changed) are dropped. After Unreachable, TimedOut or ProtocolError the connection is closed; the
next request opens it again, with a new session. Refused leaves it open.

The receive buffer grows to the largest frame met and never beyond the frame limit.
"""

from __future__ import annotations

import collections
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from cosmodrome.errors import CosmodromeError, ProtocolError, Refused, TimedOut, Unreachable
from cosmodrome.layout import FRAME_BYTES_MAX
from cosmodrome.wire.frame import Frame, InPlaceSplitter, sniff
from cosmodrome.wire.message import join_address
from cosmodrome.wire.session import Prepare, RepeatedRequest, Session
from cosmodrome.wire.table import Command, R, decode_reply

RECEIVE_BYTES = 1 << 20
RECEIVE_BYTES_MIN = 64 * 1024  # room below which the rest is moved to the front first
# Requests of one `call_all` that are out at once: small enough that neither side can fill the
# other's socket buffers and wait for it forever.
CALLS_AHEAD = 256


class _Answers(collections.deque[Frame]):
    """Answers in the order of their arrival; every request waits here (`wire.session.Waiter`)."""

    set_result = collections.deque.append

    def done(self) -> bool:
        return False

    def set_exception(self, exception: CosmodromeError) -> None:
        """Nothing: the call that notices the end of the connection raises it."""


class PlainConnection:
    """See the module. Opened by its first use; not safe for use from several threads."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        connect_timeout_ms: int = 3_000,
        tls: ssl.SSLContext | None = None,
        prepare: Prepare | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        """`prepare` sees every request last, to sign it."""
        self.address = join_address(host, port)
        self._target = (host, port)
        self._connect_timeout_s = connect_timeout_ms / 1000
        self._tls = tls
        self._prepare = prepare
        self._frame_bytes_max = frame_bytes_max
        self._socket: socket.socket | None = None
        self._timeout_s = 0.0  # of the socket
        self._buffer = memoryview(b"")
        self._output: list[bytes] = []
        self._answers = _Answers()
        self._begin_session()

    # --- life ----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    def connect(self) -> None:
        """Be connected when this returns, or raise Unreachable."""
        if self._socket is not None:
            return
        found = None
        try:
            found = socket.create_connection(self._target, self._connect_timeout_s)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                found = self._tls.wrap_socket(found, server_hostname=self._target[0])
        except OSError as error:
            if found is not None:
                found.close()
            raise self._not_connected(error) from error
        self._socket = found
        self._timeout_s = self._connect_timeout_s
        if not self._buffer:
            self._buffer = memoryview(bytearray(min(RECEIVE_BYTES, self._frame_bytes_max)))

    def close(self) -> None:
        """Requests that were written and not answered are lost."""
        found, self._socket = self._socket, None
        self._output.clear()
        self._begin_session()
        if found is not None:
            found.close()

    def _begin_session(self) -> None:
        self._answers.clear()
        self._at = self._end = 0
        self._sniffed = False  # whether the first bytes were looked at
        self._splitter = InPlaceSplitter(self._frame_bytes_max)
        self._session = Session(prepare=self._prepare, splitter=self._splitter)

    def looks_alive(self) -> bool:
        """False when the peer has closed an idle connection; True is no promise."""
        if self._socket is None:
            return False
        if self._tls is not None:
            return True  # only the next exchange tells
        self._set_timeout(0)  # not even a look would come back at once otherwise
        try:
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    # --- calls ---------------------------------------------------------------------------------

    def call(self, command: Command[R], timeout_ms: int = 3_000) -> R:
        """Ask the peer. Unreachable: no connection, or it broke; TimedOut: it may have acted;
        Refused: it answered with a code that means failure."""
        answer = self.call_all((command,), timeout_ms)[0]
        if isinstance(answer, Refused):
            raise answer
        return answer

    def call_all(
        self, commands: Sequence[Command[R]], timeout_ms: int = 3_000
    ) -> list[R | Refused]:
        """The answers to many requests, sent together; each may take `timeout_ms`."""
        answers: list[R | Refused] = []
        for first in range(0, len(commands), CALLS_AHEAD):
            answers += self._call_some(commands[first : first + CALLS_AHEAD], timeout_ms)
        return answers

    def _call_some(self, commands: Sequence[Command[R]], timeout_ms: int) -> list[R | Refused]:
        waiting = {self.write(command): command for command in commands}
        answers = dict.fromkeys(waiting)  # keeps the order of the requests
        self.flush(timeout_ms)
        found: dict[int, R | Refused] = {}
        while waiting:
            frame = self.read(timeout_ms, next(iter(waiting.values())).name)
            command = waiting.pop(frame.opaque, None)
            if command is not None:
                found[frame.opaque] = self._answer(command, frame)
        return [found[opaque] for opaque in answers]

    def _answer(self, command: Command[R], frame: Frame) -> R | Refused:
        if frame.code not in command.success_codes:
            return self.refusal(command.name, frame)
        frame.body = bytes(frame.body)
        return decode_reply(type(command), frame)

    def refusal(self, name: str, frame: Frame) -> Refused:
        remark = frame.remark or "no reason was given; look into its log"
        return Refused(frame.code, f"{remark} ({self.address} answered this to {name})")

    # --- many requests on their way --------------------------------------------------------------

    def write(self, command: Command[Any]) -> int:
        """Add a request to what `flush` sends; its opaque number."""
        opaque, data = self._session.request(command, self._answers)
        self._output.append(data)
        return opaque

    def write_repeated(self, request: RepeatedRequest, number: int) -> int:
        """Like `write`, for a request of which only one number is new."""
        opaque, data = self._session.request_repeated(request, number, self._answers)
        self._output.append(data)
        return opaque

    def flush(self, timeout_ms: int = 3_000) -> None:
        """Send what was written, connecting first if need be."""
        if not self._output:
            return
        try:
            self.connect()
        except Unreachable:
            self.close()
            raise
        assert self._socket is not None
        data = b"".join(self._output)
        self._output.clear()
        self._set_timeout(timeout_ms)
        try:
            self._socket.sendall(data)
        except TimeoutError:
            self.close()
            raise TimedOut(
                f"{self.address} did not take {len(data)} bytes within {timeout_ms} ms;"
                " it is overloaded, or the network is"
            ) from None
        except OSError as error:
            self._fail(error)

    def read(self, timeout_ms: int = 3_000, what: str = "a request") -> Frame:
        """The next answer to any request. Its body is a view, good until the next `read`."""
        deadline = 0.0
        while not self._answers:
            now = time.monotonic()
            if not deadline:
                deadline = now + timeout_ms / 1000
            elif now >= deadline:
                self._time_out(timeout_ms, what)
            self._receive(timeout_ms, what)
        return self._answers.popleft()

    # --- bytes ---------------------------------------------------------------------------------

    def _receive(self, timeout_ms: int, what: str) -> None:
        """Read once; the session takes the frames that are whole now."""
        if self._socket is None:
            raise Unreachable(f"the connection to {self.address} is closed")
        splitter = self._splitter
        self._make_room(splitter.needed)
        self._set_timeout(timeout_ms)
        try:
            count = self._socket.recv_into(self._buffer[self._end :])
        except TimeoutError:
            self._time_out(timeout_ms, what)
        except OSError as error:
            self._fail(error)
        if not count:
            self.close()
            raise Unreachable(
                f"{self.address} closed the connection before it answered {what};"
                " look into its log, it may have been restarted"
            )
        self._end += count
        if self._end - self._at < splitter.needed:
            return
        if not self._sniffed:
            self._sniff()
        try:
            self._session.receive(self._buffer[self._at : self._end])
        except ProtocolError as error:
            self.close()
            raise ProtocolError(
                f"{self.address}: {error}; check that it is a broker or a name server"
            ) from None
        self._at += splitter.used

    def _sniff(self) -> None:
        self._sniffed = True
        kind = sniff(bytes(self._buffer[:4]))
        if kind is not None:
            self.close()
            raise Unreachable(f"{self.address} speaks {kind} instead of remoting; check the port")

    def _make_room(self, need: int) -> None:
        have = self._end - self._at
        if not have:
            self._at = self._end = 0
        size = len(self._buffer)
        if need > size:
            # A new one: views of the old one stay what they are.
            while size < need:
                size *= 2
            grown = memoryview(bytearray(min(size, self._frame_bytes_max)))
            grown[:have] = self._buffer[self._at : self._end]
            self._buffer = grown
        elif self._at and (self._at + need > size or size - self._end < RECEIVE_BYTES_MIN):
            self._buffer[:have] = self._buffer[self._at : self._end]
        else:
            return
        self._at, self._end = 0, have

    def _set_timeout(self, timeout_ms: int) -> None:
        # Each change costs a system call.
        if timeout_ms / 1000 != self._timeout_s and self._socket is not None:
            self._timeout_s = timeout_ms / 1000
            self._socket.settimeout(self._timeout_s)

    # --- errors --------------------------------------------------------------------------------

    def _time_out(self, timeout_ms: int, what: str) -> NoReturn:
        self.close()  # the answer may still come, and nobody would know it
        raise TimedOut(
            f"{self.address} did not answer {what} within {timeout_ms} ms;"
            " look whether it is overloaded, or allow it more time"
        )

    def _fail(self, error: OSError) -> NoReturn:
        self.close()
        raise Unreachable(
            f"the connection to {self.address} broke: {error.strerror or error};"
            " check that it runs and look into its log"
        ) from error

    def _not_connected(self, error: OSError) -> Unreachable:
        if isinstance(error, ssl.SSLError):
            return Unreachable(
                f"no TLS with {self.address}: {error.reason or error};"
                " check that it expects TLS on this port and who signed its certificate"
            )
        if isinstance(error, TimeoutError):
            return Unreachable(
                f"{self.address} did not accept a connection within"
                f" {round(self._connect_timeout_s * 1000)} ms;"
                " check that it runs and that no firewall is between"
            )
        return Unreachable(
            f"cannot connect to {self.address}: {error.strerror or error};"
            " check the address and that it runs"
        )
