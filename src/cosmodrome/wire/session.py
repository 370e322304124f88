"""One connection without its socket: bytes in, requests out; commands in, bytes out.

Theory of operation. A connection carries two independent conversations. Requests of the peer come
out of `receive` and are answered with the bytes of `reply`. Requests of ours get their bytes and
an opaque number from `request`; the waiter given with them hears exactly once, with the
answer (`receive`) or with the error that ended the connection (`close`), unless it was withdrawn
(`forget`) or is done already. Opaque numbers of the two directions never meet: the response bit
tells them apart.

The driver owns the socket and time: it feeds what it read, writes what it gets, forgets waiters
whose time is over, and closes the connection when `receive` raises ProtocolError. There are two:
`transport.connection` in an event loop, and the blocking `transport.plain`, whose splitter leaves
the bodies of answers in the receive buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from cosmodrome.errors import Code, CosmodromeError, Refused
from cosmodrome.layout import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    FRAME_BYTES_MAX,
    FRAME_PREFIX,
    SERIALIZE_BINARY,
    SERIALIZE_JSON,
)
from cosmodrome.speed.client import send_frame
from cosmodrome.wire.frame import Frame, FrameSplitter, Prepared, encode, prepare_json
from cosmodrome.wire.table import Command, Reply
from cosmodrome.wire.table import encode as encode_row

WAITERS_MAX = 65_535  # requests of ours that may be out at once


class Waiter(Protocol):
    """What waits for an answer; an asyncio Future of a Frame is one."""

    def done(self) -> bool: ...

    def set_result(self, result: Frame, /) -> None: ...

    def set_exception(self, exception: CosmodromeError, /) -> None: ...


Prepare = Callable[[Frame], Callable[[Frame], None] | None]

_OPAQUE_MAX = 0x7FFFFFFF
_BINARY_CODE_MAX = 0x7FFF


class RepeatedRequest:
    """A request that goes out many times; one number of its header differs every time."""

    __slots__ = ("code", "ext", "name", "prepared")

    def __init__(self, command: Command[Any], name: str) -> None:
        """`name` is the field as the wire spells it."""
        self.code = command.request_code
        self.ext = encode_row(command)
        self.name = name
        del self.ext[name]
        self.prepared = prepare_json(self.code, self.ext, name)


class Session:
    """See the module's theory of operation. Not safe for use from several threads."""

    def __init__(
        self,
        *,
        serialize: int = SERIALIZE_JSON,
        waiters_max: int = WAITERS_MAX,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        prepare: Prepare | None = None,
        splitter: FrameSplitter | None = None,
    ) -> None:
        """`prepare` sees every request of ours last, to sign it or to add header fields; what it
        returns is called with the answer. `splitter` replaces the one that copies bodies."""
        self._serialize = serialize
        self._prepare = prepare
        self._observers: dict[int, Callable[[Frame], None]] = {}
        self._waiters_max = waiters_max
        self._splitter = splitter or FrameSplitter(frame_bytes_max)
        self._waiters: dict[int, Waiter] = {}
        self._opaque = 0
        self._ended: Callable[[], CosmodromeError] | None = None

    @property
    def waiting(self) -> int:
        """Requests of ours that are still unanswered."""
        return len(self._waiters)

    @property
    def pending_bytes(self) -> int:
        """Bytes of a frame that has not arrived completely."""
        return self._splitter.pending_bytes

    def receive(self, data: bytes | bytearray | memoryview) -> list[Frame]:
        """Take what the peer sent. Answers go to their waiters, requests are returned.

        An answer that nobody waits for (any more) is dropped. ProtocolError is final.
        """
        if self._ended is not None:
            return []
        requests: list[Frame] = []
        for frame in self._splitter.feed(data):
            if frame.serialize == SERIALIZE_BINARY:
                self.heard_binary()
            if not frame.flag & FLAG_RESPONSE:
                requests.append(frame)
                continue
            if self._observers:
                observer = self._observers.pop(frame.opaque, None)
                if observer is not None:
                    observer(frame)
            waiter = self._waiters.pop(frame.opaque, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(frame)
        return requests

    def heard_binary(self) -> None:
        """The peer sent a binary header."""
        # Compat: the C++ and Node clients read only JSON headers, so binary ones are sent only
        # to a peer that has shown that it knows them.
        self._serialize = SERIALIZE_BINARY

    def request(self, command: Command[Any], waiter: Waiter) -> tuple[int, bytes]:
        """Opaque number and bytes of a request of ours, whose answer goes to `waiter`."""
        return self.request_fields(command.request_code, encode_row(command), command.body, waiter)

    def request_fields(
        self, code: int, ext: dict[str, str], body: bytes, waiter: Waiter
    ) -> tuple[int, bytes]:
        """The same for whoever has the header fields as text already; `ext` is not kept."""
        opaque = self._next_opaque()
        data = self._encode(code, ext, body, opaque, 0)
        self._waiters[opaque] = waiter
        return opaque, data

    @property
    def takes_prepared(self) -> bool:
        """Whether headers go out as JSON that nobody else has to see first."""
        return self._prepare is None and self._serialize == SERIALIZE_JSON

    def request_prepared(
        self, header: Prepared, born_ms: int, properties: str, body: bytes, waiter: Waiter
    ) -> tuple[int, bytes]:
        """A send whose header was prepared (`frame.prepare_json`), while `takes_prepared`."""
        opaque = self._next_opaque()
        data = send_frame(header[0], opaque, header[1], born_ms, properties, body)
        self._waiters[opaque] = waiter
        return opaque, data

    def request_repeated(
        self, request: RepeatedRequest, number: int, waiter: Waiter
    ) -> tuple[int, bytes]:
        """A request that differs from the last one of its kind by one number."""
        if self._prepare is not None or self._serialize != SERIALIZE_JSON:
            ext = {**request.ext, request.name: str(number)}
            return self.request_fields(request.code, ext, b"", waiter)
        opaque = self._next_opaque()
        opening, fields = request.prepared
        header = b'%b%d%b%d"}}' % (opening, opaque, fields, number)
        self._waiters[opaque] = waiter
        return opaque, FRAME_PREFIX.pack(4 + len(header), len(header)) + header

    def push(self, command: Command[Any]) -> bytes:
        """The bytes of a one-way request of ours: nobody answers it."""
        opaque = self._next_opaque(waits=False)
        ext = encode_row(command)
        return self._encode(command.request_code, ext, command.body, opaque, FLAG_ONEWAY)

    def forget(self, opaque: int) -> bool:
        """Withdraw a waiter (its time is over); a late answer will be dropped."""
        self._observers.pop(opaque, None)
        return self._waiters.pop(opaque, None) is not None

    def reply(self, request: Frame, answer: Reply) -> bytes:
        """The bytes that answer `request`, in the header form the requester used.

        Nothing for a one-way request: it is never answered, not even with an error.
        """
        if request.flag & FLAG_ONEWAY:
            return b""
        return encode(
            Frame(
                answer.code,
                request.opaque,
                FLAG_RESPONSE,
                encode_row(answer),
                answer.body,
                answer.remark,
                serialize=request.serialize,
            )
        )

    def close(self, error: Callable[[], CosmodromeError]) -> None:
        """The connection is gone: waiters fail with `error()`, later requests raise it.

        Each gets an exception of its own, because raising one adds its traceback to it.
        """
        if self._ended is not None:
            return
        self._ended = error
        self._observers.clear()
        self._splitter.drop()
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters.values():
            if not waiter.done():
                waiter.set_exception(error())

    def _encode(self, code: int, ext: dict[str, str], body: bytes, opaque: int, flag: int) -> bytes:
        serialize = self._serialize if code <= _BINARY_CODE_MAX else SERIALIZE_JSON
        frame = Frame(code, opaque, flag, ext, body, serialize=serialize)
        if self._prepare is not None:
            observer = self._prepare(frame)
            if observer is not None and not flag & FLAG_ONEWAY:
                self._observers[opaque] = observer
        return encode(frame)

    def _next_opaque(self, *, waits: bool = True) -> int:
        """The number of a new request; Refused when too many of those that wait are out."""
        if self._ended is not None:
            raise self._ended()
        if waits and len(self._waiters) >= self._waiters_max:
            raise Refused(
                Code.SYSTEM_BUSY,
                f"{self._waiters_max} requests on this connection are unanswered;"
                " wait for some of them or use another connection",
            )
        # Compat: the Node client replaces opaque 0 by one of its own, so 0 is never used.
        while True:
            self._opaque = self._opaque + 1 if self._opaque < _OPAQUE_MAX else 1
            if self._opaque not in self._waiters:
                return self._opaque
