"""What a command is: one row per request code, from which everything else is derived.

A row is a `Command` subclass: its fields are the request's header fields, its `Reply` type
holds the answer's. `decode`/`encode` turn a row into the string map that travels in a frame
header; codecs, dispatch, typed calls, documentation and tests all read the same rows.

    @command(30, "GET_MAX_OFFSET", served_by=BROKER, needs=topic("topic", SUB))
    class GetMaxOffset(Command[OffsetReply]):
        '''Offset that the next message of this queue will receive.'''
        topic: str
        queue_id: int

Field names are snake case here and camel case on the wire; the few that differ say so with
`msgspec.field(name=...)`. A field without default is required.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, overload

import msgspec

from cosmodrome.errors import Code, ProtocolError
from cosmodrome.layout import FRAME_BYTES_MAX
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.needs import Needs

BODY_BYTES_MAX = 64 * 1024  # of a request that is not known to bring more
SETTINGS_BYTES_MAX = 8 * 1024  # of one that brings settings; all of them take less than half
SUBSCRIPTION_BYTES_MAX = 36 * 1024  # of one that brings a subscription; the longest one fits
LIST_BYTES_MAX = 256 * 1024  # of one that brings a list: subscriptions, queues
ANY_BODY = FRAME_BYTES_MAX  # whoever serves it has limits of its own


class Role(enum.Enum):
    BROKER = "broker"
    NAMESERVER = "name server"
    CLIENT = "client"
    FILTERSERVER = "filter server"


BROKER, NAMESERVER, CLIENT, FILTERSERVER = Role


class Reply(msgspec.Struct, rename="camel", kw_only=True):
    """An answer: `code`, `remark` and `body` have their own place in a frame; every further
    field of a subclass is a header field. Fields that are None are left out."""

    code: int = Code.SUCCESS
    remark: str | None = None
    body: bytes = b""


R = TypeVar("R", bound=Reply)
S = TypeVar("S")
C = TypeVar("C", bound="Command[Any]")
M = TypeVar("M", bound=msgspec.Struct)


class Connection(Protocol):
    """The requester's end as a handler sees it."""

    @property
    def peer(self) -> tuple[str, int]: ...

    @property
    def closed(self) -> bool: ...

    def push(self, command: Command[Any]) -> None:
        """Send a one-way request to the peer; dropped when the connection is closed."""

    async def call(self, command: Command[R], *, timeout_ms: int = 3000) -> R: ...

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call back once when this connection is gone (at once if it already is)."""

    def close(self, reason: str) -> None: ...


class Call:
    """One request in progress: the frame it came in and the connection it came over."""

    __slots__ = ("connection", "frame")

    def __init__(self, frame: Frame, connection: Connection) -> None:
        self.frame = frame
        self.connection = connection


class Command(msgspec.Struct, Generic[R], rename="camel", kw_only=True):
    """A request. `body` travels behind the header; all other fields are header fields."""

    request_code: ClassVar[int]
    name: ClassVar[str]
    served_by: ClassVar[frozenset[Role]]
    needs: ClassVar[Needs | None]  # what a broker or name server asks for; None of other rows
    planned: ClassVar[str]  # why no handler exists yet; empty when served
    body_bytes_max: ClassVar[int]
    reply: ClassVar[type[Reply]]
    success_codes: ClassVar[frozenset[int]] = frozenset({Code.SUCCESS})

    body: bytes = b""

    # Three overloads, so that who calls a handler itself knows what it gets.
    @overload
    @classmethod
    def handler(
        cls, method: Callable[[S, Self, Call], Coroutine[Any, Any, R]]
    ) -> Callable[[S, Self, Call], Coroutine[Any, Any, R]]: ...

    @overload
    @classmethod
    def handler(cls, method: Callable[[S, Self, Call], R]) -> Callable[[S, Self, Call], R]: ...

    @overload
    @classmethod
    def handler(
        cls, method: Callable[[S, Self, Call], R | Awaitable[R | None]]
    ) -> Callable[[S, Self, Call], R | Awaitable[R | None]]: ...

    @classmethod
    def handler(cls, method: Any) -> Any:
        """Mark a service method as what serves this row. Plain methods are answered at once;
        `async def` methods run as tasks; None means that no answer is sent."""
        method.serves = (*getattr(method, "serves", ()), cls)
        return method

    @classmethod
    def describe(cls) -> str:
        """The row as people know it: name and code."""
        return f"{cls.name} ({cls.request_code})"


_registry: dict[int, type[Command[Any]]] = {}
_META = frozenset({"code", "remark", "body"})
_JAVA_INTEGER = re.compile(r"(?:\+|(-))?0*([0-9]+)", re.ASCII)


def command(
    code: int,
    name: str,
    *,
    served_by: Role | tuple[Role, ...],
    needs: Needs | None = None,
    planned: str = "",
    success: tuple[int, ...] = (0,),
    body_bytes_max: int = BODY_BYTES_MAX,
) -> Callable[[type[C]], type[C]]:
    """Register a row. `needs` says who may ask; a broker or name server serves no row without it.
    `planned` says why its server answers "not supported" for now. A request whose body is longer
    than `body_bytes_max` is refused before anybody reads it."""

    def register(row: type[C]) -> type[C]:
        if code in _registry:
            raise AssertionError(f"request code {code} has two rows")
        row.request_code = code
        row.name = name
        row.served_by = frozenset(served_by if isinstance(served_by, tuple) else (served_by,))
        row.needs = needs
        row.planned = planned
        row.body_bytes_max = body_bytes_max
        if needs is None and not planned and row.served_by & {BROKER, NAMESERVER}:
            raise AssertionError(f"{row.describe()} does not say what it needs (wire/needs.py)")
        row.reply = _reply_type(row)
        row.success_codes = frozenset(success)
        _registry[code] = row
        return row

    return register


def rows() -> Mapping[int, type[Command[Any]]]:
    """The whole table by request code."""
    import cosmodrome.wire.commands  # noqa: F401  (filling the registry is its import effect)

    return _registry


def header_fields(row: type[msgspec.Struct]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The fields of a row or reply that travel in the header."""
    return tuple(field for field in msgspec.structs.fields(row) if field.name not in _META)


def decode(row: type[C], ext: Mapping[str, str], body: bytes) -> C:
    """Header fields and body as a typed row; unknown fields are ignored, as every peer does."""
    try:
        ask: C = _convert(_without_meta(ext), row)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"{row.name} ({row.request_code}): {error}") from None
    ask.body = body
    return ask


def decode_reply(row: type[Command[R]], frame: Frame) -> R:
    try:
        answer = _convert(_without_meta(frame.ext), row.reply)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"answer to {row.name} ({row.request_code}): {error}") from None
    answer.code, answer.remark, answer.body = frame.code, frame.remark, frame.body
    return answer  # type: ignore[return-value]  # row.reply is R by construction


def encode(row: Command[Any] | Reply) -> dict[str, str]:
    """The header fields as the strings every peer expects; None is left out."""
    out: dict[str, str] = {}
    for attribute, wire_name in _names(type(row)):
        value = getattr(row, attribute)
        if value is None:
            continue
        if value is True or value is False:
            out[wire_name] = "true" if value else "false"
        else:
            out[wire_name] = value if type(value) is str else str(value)
    return out


def _convert(ext: Mapping[str, str], kind: type[M]) -> M:
    try:
        return msgspec.convert(ext, kind, strict=False)
    except msgspec.ValidationError:
        relaxed = dict(ext)
        for name in _integers(kind):
            if name in relaxed:
                relaxed[name] = _canonical(relaxed[name])
        if relaxed == ext:
            raise
        return msgspec.convert(relaxed, kind, strict=False)


def _canonical(text: str) -> str:
    # Compat: Java reads "+7" and "007" as numbers, and clients pad with zeros.
    number = _JAVA_INTEGER.fullmatch(text)
    return text if number is None else (number[1] or "") + number[2]


@functools.cache
def _integers(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Wire names of the fields that hold whole numbers."""
    return tuple(
        field.encode_name
        for field in header_fields(kind)
        if type(msgspec.convert("1", field.type, strict=False)) is int
    )


_name_cache: dict[type[msgspec.Struct], tuple[tuple[str, str], ...]] = {}


def _names(row: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    names = _name_cache.get(row)
    if names is None:
        names = tuple((field.name, field.encode_name) for field in header_fields(row))
        _name_cache[row] = names
    return names


def _without_meta(ext: Mapping[str, str]) -> Mapping[str, str]:
    if _META.isdisjoint(ext):
        return ext
    return {name: value for name, value in ext.items() if name not in _META}


def _reply_type(row: type[Command[Any]]) -> type[Reply]:
    for base in getattr(row, "__orig_bases__", ()):
        for argument in getattr(base, "__args__", ()):
            if isinstance(argument, type) and issubclass(argument, Reply):
                return argument
    for base in row.__mro__[1:]:
        if isinstance(getattr(base, "reply", None), type):
            return base.reply  # type: ignore[no-any-return, attr-defined]
    raise AssertionError(f"{row.__name__} does not say what its reply is: Command[SomeReply]")


Handler = Callable[[Any, Call], Reply | Awaitable[Reply | None] | None]
