"""One connection to etcd's JSON gateway, and what is said through it.

HTTP/1.1 as far as it is needed: requests with a length; answers with a length or in chunks, each of
them bounded. A watch is one answer that goes on, a JSON object per line. Whatever else comes back
is a `ProtocolError`, redirects too. When etcd itself says that it did nothing, that is a
`ConsensusRefused`, a `LeaseGone` or a `TokenEnded`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any, TypeVar

import msgspec

from cosmodrome.errors import ConsensusRefused, LeaseGone, ProtocolError
from cosmodrome.replication.consensus import Changes, Entry
from cosmodrome.wire.message import join_address

HEADERS_MAX = 64
RESPONSE_BYTES_MAX = 4 << 20  # of an answer, or of one line of a watch
READ_BYTES = 64 * 1024  # of a piece of an answer; a line of its head is no longer either

# What ends a connection, with any answer that is under way.
FAULTS = (OSError, EOFError, asyncio.LimitOverrunError, ProtocolError, msgspec.MsgspecError)

_SIZE = re.compile(r"[0-9A-Fa-f]{1,8}", re.ASCII)
_UNKNOWN, _PERMISSION_DENIED = 2, 7
_REFUSALS = {3, 5, 7, 8, 9, 11, 12, 16}  # gRPC's codes for: this was not done, and why

A = TypeVar("A")


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    host: str
    port: int
    secure: bool

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.address}"

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)


# --- what etcd says: int64 are strings, bytes are base64, what is empty is left out ---------------


class Header(msgspec.Struct):
    revision: int = 0


class KeyValue(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0

    def entry(self) -> Entry:
        return Entry(key_name(self.key), self.value, self.mod_revision, self.lease)


class Range(msgspec.Struct):
    header: Header
    kvs: list[KeyValue] = []


class Granted(msgspec.Struct):
    ID: int
    TTL: int


class Kept(msgspec.Struct):
    class Result(msgspec.Struct):
        TTL: int = 0

    result: Result


class Committed(msgspec.Struct):
    header: Header
    succeeded: bool = False


class Revoked(msgspec.Struct):
    header: Header


class Authenticated(msgspec.Struct):
    token: str


class Version(msgspec.Struct):
    etcdserver: str


class Event(msgspec.Struct):
    kv: KeyValue
    type: str = "PUT"


class Error(msgspec.Struct):
    """What an answer with another status than 200 says; in a stream it is in `error`."""

    error: str | Error = ""
    message: str = ""
    code: int = _UNKNOWN
    grpc_code: int = _UNKNOWN


class Watched(msgspec.Struct):
    class Result(msgspec.Struct):
        header: Header
        created: bool = False
        canceled: bool = False
        cancel_reason: str = ""
        compact_revision: int = 0
        events: list[Event] = []

        def changes(self) -> Changes:
            last = {event.kv.key: event for event in self.events}
            return Changes(
                revision=self.events[-1].kv.mod_revision,
                entries=tuple(e.kv.entry() for e in last.values() if e.type != "DELETE"),
                deleted=tuple(key_name(e.kv.key) for e in last.values() if e.type == "DELETE"),
            )

    result: Result | None = None
    error: Error | None = None


class TokenEnded(Exception):
    """etcd does not know the token any more, and did nothing."""


def key_bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def key_name(key: bytes) -> str:
    return key.decode("utf-8", "surrogateescape")


def key_range(key: str) -> dict[str, Any]:
    """One key, or all from `key/` up to the first that does not begin with it."""
    asked = {"key": key_bytes(key)}
    if key.endswith("/"):
        asked["range_end"] = key_bytes(key[:-1] + "0")  # which comes behind the slash
    return asked


def refusal(endpoint: Endpoint, code: int, message: str) -> Exception:
    if "lease not found" in message:
        return LeaseGone("the lease has ended")
    if "invalid auth token" in message or "auth store is old" in message:
        return TokenEnded()
    if code in _REFUSALS:
        hint = "; give user and password" if "user name is empty" in message else ""
        return ConsensusRefused(f"etcd at {endpoint} refused: {message}{hint}")
    return ProtocolError(message or f"gRPC error {code}")


def _cancelled(endpoint: Endpoint, reason: str) -> Exception:
    """A watch says its code in words: `rpc error: code = PermissionDenied desc = …`."""
    refused = "PermissionDenied" in reason or "InvalidArgument" in reason
    return refusal(endpoint, _PERMISSION_DENIED if refused else _UNKNOWN, reason)


# --- HTTP -----------------------------------------------------------------------------------------


class Connection:
    """One request at a time. It can be used again when the answer was read to its end."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, endpoint: Endpoint
    ) -> None:
        self.endpoint = endpoint
        self._reader = reader
        self._writer = writer
        self._whole = True  # nothing of an answer is missing
        self._left = 0  # bytes of the current chunk, or of an answer with a length
        self._chunked = False
        self._closes = False
        self._lines = bytearray()  # of a watch: what was read beyond the last one

    @property
    def usable(self) -> bool:
        closing = self._closes or self._writer.is_closing() or self._reader.at_eof()
        return self._whole and not closing

    def abort(self) -> None:
        self._writer.transport.abort()

    async def ask(self, path: str, question: object, answer: type[A], token: str = "") -> A:
        """POST `question`, or GET when there is none; the whole answer."""
        status = await self._send(path, question, token)
        if status != 200:
            raise self._error(status, await self._rest())
        return msgspec.json.decode(await self._rest(), type=answer, strict=False)

    async def begin(self, path: str, question: object, token: str) -> None:
        """POST `question` and leave the answer to be read in lines."""
        status = await self._send(path, question, token)
        if status != 200:
            raise self._error(status, await self._rest())

    async def watched(self) -> Watched.Result:
        """The next line of a watch."""
        while not (line := await self._line()).strip():
            if not line:
                raise EOFError
        answer = msgspec.json.decode(line, type=Watched, strict=False)
        if answer.error is not None:
            raise refusal(self.endpoint, answer.error.grpc_code, answer.error.message)
        if answer.result is None:
            raise ProtocolError("a line of its watch says nothing")
        if answer.result.canceled and not answer.result.compact_revision:
            raise _cancelled(self.endpoint, answer.result.cancel_reason)
        return answer.result

    async def _send(self, path: str, question: object, token: str) -> int:
        """The status of the answer, which is to be read then."""
        body = b"" if question is None else msgspec.json.encode(question)
        head = [
            f"{'GET' if question is None else 'POST'} {path} HTTP/1.1",
            f"Host: {self.endpoint.address}",
            f"Content-Length: {len(body)}",
            "Content-Type: application/json",
            # A watch then ends when the member loses its leader. Other calls fail anyway.
            "Grpc-Metadata-hasleader: true",
        ]
        if token:
            head.append(f"Authorization: {token}")
        self._whole = False
        self._writer.write("\r\n".join([*head, "", ""]).encode() + body)
        await self._writer.drain()
        return await self._head()

    async def _rest(self) -> bytes:
        data = bytearray()
        while piece := await self._piece():
            data += piece
            _check_size(data)
        return bytes(data)

    async def _line(self) -> bytes:
        """The next line with its end; nothing at the end of the answer."""
        while (end := self._lines.find(b"\n") + 1) == 0:
            _check_size(self._lines)
            piece = await self._piece()
            if not piece:
                end = len(self._lines)
                break
            self._lines += piece
        line = bytes(self._lines[:end])
        del self._lines[:end]
        return line

    async def _head(self) -> int:
        words = (await self._text()).split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not words[1].isdigit():
            raise ProtocolError("it does not answer with HTTP/1.1; is it etcd's client port?")
        headers: dict[str, str] = {}
        for _ in range(HEADERS_MAX):
            name, _, value = (await self._text()).partition(":")
            if not name:
                break
            headers[name.strip().lower()] = value.strip()
        else:
            raise ProtocolError(f"its answer has more than {HEADERS_MAX} headers")
        self._closes = headers.get("connection", "").lower() == "close"
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length", "")
        if not self._chunked and not (length.isdigit() and int(length) <= RESPONSE_BYTES_MAX):
            raise ProtocolError(f"its answer has no length, or more than {RESPONSE_BYTES_MAX}")
        self._left = 0 if self._chunked else int(length)
        return int(words[1])

    async def _text(self) -> str:
        return (await self._reader.readuntil(b"\n")).decode("latin-1").rstrip("\r\n")

    async def _piece(self) -> bytes:
        """Some more bytes of the answer; none at its end."""
        if not self._left and self._chunked:
            size = (await self._text()).partition(";")[0].strip()
            if not _SIZE.fullmatch(size):
                raise ProtocolError("a chunk of its answer has no size")
            self._left = int(size, 16)
            if not self._left:
                await self._trailers()
        if not self._left:
            self._whole = True
            return b""
        piece = await self._reader.read(min(self._left, READ_BYTES))
        if not piece:
            raise EOFError
        self._left -= len(piece)
        if not self._left and self._chunked and await self._text():
            raise ProtocolError("a chunk of its answer is longer than it said")
        return piece

    async def _trailers(self) -> None:
        for _ in range(HEADERS_MAX):
            if not await self._text():
                return
        raise ProtocolError(f"its answer has more than {HEADERS_MAX} trailers")

    def _error(self, status: int, data: bytes) -> Exception:
        if 300 <= status < 400:
            return ProtocolError("it redirects, which is not followed; name etcd itself")
        try:
            error = msgspec.json.decode(data, type=Error, strict=False)
        except msgspec.MsgspecError:
            if status != 404:
                return ProtocolError(f"it answered with status {status}")
            return ConsensusRefused(
                f"{self.endpoint} has no /v3/ gateway; run etcd 3.4 or newer, with"
                " --enable-grpc-gateway"
            )
        if isinstance(error.error, Error):
            return refusal(self.endpoint, error.error.grpc_code, error.error.message)
        return refusal(self.endpoint, error.code, error.message or error.error)


def _check_size(data: bytearray) -> None:
    if len(data) > RESPONSE_BYTES_MAX:
        raise ProtocolError(f"its answer has more than {RESPONSE_BYTES_MAX} bytes")
