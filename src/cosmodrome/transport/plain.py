"""One blocking connection for bulk readers: no event loop, no threads.

Two ways to use it. `call` and `call_all` ask and wait. Underneath, `write`, `write_repeated`,
`flush` and `read` let the caller keep many requests on their way: what was written leaves with one
`sendall`, and `read` hands out the next answer with its body as a view of the receive buffer,
without a copy. Such a view is good until the next `read` or call.

Answers that nobody waits for any more may be read later by somebody who waits for others: they
are told apart by their opaque number. Requests of the peer (a broker that says that the members of
a group changed) are dropped. After Unreachable, TimedOut or ProtocolError the connection is closed;
the next request opens it again. Refused leaves it open.

The receive buffer grows to the largest frame met and never beyond the frame limit.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from cosmodrome.errors import ProtocolError, Refused, TimedOut, Unreachable
from cosmodrome.layout import FRAME_BYTES_MAX, FRAME_PREFIX, HEADER_LENGTH_MASK
from cosmodrome.wire.frame import Frame, decode, encode, prepare_json, sniff
from cosmodrome.wire.session import Prepare
from cosmodrome.wire.table import Command, R, decode_reply
from cosmodrome.wire.table import encode as encode_row

RECEIVE_BYTES = 1 << 20
RECEIVE_BYTES_MIN = 64 * 1024  # room below which the rest is moved to the front first
# Requests of one `call_all` that are out at once: small enough that neither side can fill the
# other's socket buffers and wait for it forever.
CALLS_AHEAD = 256

_OPAQUE_MAX = 0x7FFFFFFF


class Repeated:
    """A request that goes out many times; one number of its header differs every time."""

    __slots__ = ("code", "ext", "name", "prepared")

    def __init__(self, command: Command[Any], name: str) -> None:
        """`name` is the field as the wire spells it."""
        self.code = command.request_code
        self.ext = encode_row(command)
        self.name = name
        del self.ext[name]
        self.prepared = prepare_json(self.code, self.ext, name)


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
        self.said = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._address = (host, port)
        self._connect_timeout_s = connect_timeout_ms / 1000
        self._tls = tls
        self._prepare = prepare
        self._frame_bytes_max = frame_bytes_max
        self._socket: socket.socket | None = None
        self._timeout_s = 0.0  # of the socket
        self._buffer = memoryview(b"")
        self._at = self._end = 0  # what was received and not handed out
        self._first = True
        self._output: list[bytes] = []
        self._opaque = 0

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
            found = socket.create_connection(self._address, self._connect_timeout_s)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._tls is not None:
                found = self._tls.wrap_socket(found, server_hostname=self._address[0])
        except OSError as error:
            if found is not None:
                found.close()
            raise self._not_connected(error) from error
        self._socket = found
        self._timeout_s = self._connect_timeout_s
        if not self._buffer:
            self._buffer = memoryview(bytearray(min(RECEIVE_BYTES, self._frame_bytes_max)))
        self._at = self._end = 0
        self._first = True

    def close(self) -> None:
        """Requests that were written and not answered are lost."""
        found, self._socket = self._socket, None
        self._output.clear()
        if found is not None:
            found.close()

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
        Refused: it answered with a code that is no success."""
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
            frame, body = self.read(timeout_ms, next(iter(waiting.values())).name)
            command = waiting.pop(frame.opaque, None)
            if command is not None:
                found[frame.opaque] = self.answer(command, frame, body)
        return [found[opaque] for opaque in answers]

    def answer(self, command: Command[R], frame: Frame, body: memoryview) -> R | Refused:
        """What `read` found as the reply of the request it belongs to, with a body of its own."""
        if frame.code not in command.success_codes:
            return self.refusal(command.name, frame)
        frame.body = bytes(body)
        return decode_reply(type(command), frame)

    def refusal(self, name: str, frame: Frame) -> Refused:
        remark = frame.remark or "no reason was given; look into its log"
        return Refused(frame.code, f"{remark} ({self.said} answered this to {name})")

    # --- many requests on their way --------------------------------------------------------------

    def write(self, command: Command[Any]) -> int:
        """Add a request to what `flush` sends; its opaque number."""
        opaque = self._next_opaque()
        self._output.append(
            self._encode(command.request_code, encode_row(command), command.body, opaque)
        )
        return opaque

    def write_repeated(self, request: Repeated, number: int) -> int:
        """The same for a request of which only a number is new."""
        opaque = self._next_opaque()
        if self._prepare is None:
            opening, fields = request.prepared
            header = b'%b%d%b%d"}}' % (opening, opaque, fields, number)
            self._output.append(FRAME_PREFIX.pack(4 + len(header), len(header)) + header)
        else:
            ext = {**request.ext, request.name: str(number)}
            self._output.append(self._encode(request.code, ext, b"", opaque))
        return opaque

    def flush(self, timeout_ms: int = 3_000) -> None:
        """Send what was written, connecting first if need be."""
        if not self._output:
            return
        try:
            self.connect()
        except Unreachable:
            self._output.clear()
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
                f"{self.said} took no {len(data)} bytes within {timeout_ms} ms;"
                " it is overloaded, or the network is"
            ) from None
        except OSError as error:
            self._fail(error)

    def read(self, timeout_ms: int = 3_000, what: str = "a request") -> tuple[Frame, memoryview]:
        """The next answer of any request: its header, and its body until the next `read`."""
        deadline = 0.0
        while True:
            have = self._end - self._at
            need = FRAME_PREFIX.size
            if have >= need:
                length, word = FRAME_PREFIX.unpack_from(self._buffer, self._at)
                if self._first or not 4 <= length <= self._frame_bytes_max - 4:
                    self._check_length(length)
                need = 4 + length
                if have >= need:
                    header_end = self._at + 8 + (word & HEADER_LENGTH_MASK)
                    begin, self._at = self._at, self._at + need
                    frame = self._header(begin + 4, header_end)
                    if frame.is_response:
                        return frame, self._buffer[header_end : self._at]
                    continue
            now = time.monotonic()
            if not deadline:
                deadline = now + timeout_ms / 1000
            self._receive(need, timeout_ms, what, late=now >= deadline)

    # --- bytes ---------------------------------------------------------------------------------

    def _receive(self, need: int, timeout_ms: int, what: str, *, late: bool) -> None:
        """Read more of a frame of `need` bytes that begins at the first byte not handed out."""
        if self._socket is None:
            raise Unreachable(f"the connection to {self.said} is closed")
        if late:
            self._time_out(timeout_ms, what)
        self._make_room(need)
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
                f"{self.said} closed the connection before it answered {what};"
                " look into its log, it may have been restarted"
            )
        self._end += count

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

    def _header(self, begin: int, end: int) -> Frame:
        try:
            if end > self._at:
                raise ProtocolError(f"a header of {end - begin} bytes is larger than its frame")
            return decode(bytes(self._buffer[begin:end]))
        except ProtocolError as error:
            self.close()
            raise ProtocolError(f"{self.said}: {error}") from None

    def _check_length(self, length: int) -> None:
        kind = sniff(bytes(self._buffer[self._at : self._at + 4])) if self._first else None
        self._first = False
        if kind is None and 4 <= length <= self._frame_bytes_max - 4:
            return
        self.close()
        if kind is not None:
            raise Unreachable(f"{self.said} speaks {kind} instead of remoting; check the port")
        raise ProtocolError(
            f"{self.said} sent a frame of {length} bytes; from 4 to {self._frame_bytes_max - 4} are"
            " allowed: check that this is a broker or name server, and the limits of its answers"
        )

    def _encode(self, code: int, ext: dict[str, str], body: bytes, opaque: int) -> bytes:
        frame = Frame(code, opaque, 0, ext, body)
        if self._prepare is not None:
            self._prepare(frame)
        return encode(frame)

    def _next_opaque(self) -> int:
        self._opaque = self._opaque + 1 if self._opaque < _OPAQUE_MAX else 1
        return self._opaque

    def _set_timeout(self, timeout_ms: int) -> None:
        # Each change costs a system call.
        if timeout_ms / 1000 != self._timeout_s and self._socket is not None:
            self._timeout_s = timeout_ms / 1000
            self._socket.settimeout(self._timeout_s)

    # --- errors --------------------------------------------------------------------------------

    def _time_out(self, timeout_ms: int, what: str) -> NoReturn:
        self.close()  # the answer may still come, and nobody would know it
        raise TimedOut(
            f"{self.said} did not answer {what} within {timeout_ms} ms;"
            " look whether it is overloaded, or allow it more time"
        )

    def _fail(self, error: OSError) -> NoReturn:
        self.close()
        raise Unreachable(
            f"the connection to {self.said} broke: {error.strerror or error};"
            " check that it runs and look into its log"
        ) from error

    def _not_connected(self, error: OSError) -> Unreachable:
        if isinstance(error, ssl.SSLError):
            return Unreachable(
                f"no TLS with {self.said}: {error.reason or error};"
                " check that it expects TLS on this port and who signed its certificate"
            )
        if isinstance(error, TimeoutError):
            return Unreachable(
                f"{self.said} did not accept a connection within"
                f" {round(self._connect_timeout_s * 1000)} ms;"
                " check that it runs and that no firewall is between"
            )
        return Unreachable(
            f"cannot connect to {self.said}: {error.strerror or error};"
            " check the address and that it runs"
        )
