"""From a user's message to what travels: checks, properties as text, compression, a unique id.

Invariant: what leaves here breaks no rule that a broker checks by looking at the message alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

import msgspec

from cosmodrome.client.namespace import wrap
from cosmodrome.client.send.failures import BadMessage
from cosmodrome.client.send.hooks import MessageKind
from cosmodrome.client.values import Message
from cosmodrome.errors import ConfigError, Refused
from cosmodrome.layout import (
    NAME_END,
    PAIR_END,
    PROPERTIES_BYTES_MAX,
    SYS_COMPRESSED,
    SYS_LZ4,
    SYS_ZLIB,
    SYS_ZSTD,
)
from cosmodrome.wire.message import (
    DELAY,
    INSTANCE_ID,
    KEYS,
    RESERVED,
    TAGS,
    TIMER_DELAY_MS,
    TIMER_DELIVER_MS,
    UNIQ_KEY,
    WAIT,
    compress,
    format_properties,
)
from cosmodrome.wire.names import RETRY_PREFIX, SEND_FORBIDDEN_TOPICS, check_topic

Compression = Literal["zlib", "lz4", "zstd"]
_FLAGS = {"zlib": SYS_ZLIB, "lz4": SYS_LZ4, "zstd": SYS_ZSTD}
_TOPICS_MAX = 10_000
_UTF8_BYTES_MAX = 3  # of one UTF-16 unit; text shorter than a third of a limit is within it
_INT32 = 1 << 31


# Thousands of these are on their way at once, and none can be part of a cycle: the garbage
# collector need not look at them again and again.
class Packed(msgspec.Struct, gc=False):
    """A message ready to travel; `topic` is the full name."""

    message: Message
    topic: str
    body: bytes
    sys_flag: int
    properties: str
    msg_id: str
    kind: MessageKind

    @property
    def flag(self) -> int:
        return self.message.flag


class Ids(Protocol):
    """Gives each message an id of its own."""

    def next(self) -> str: ...


class Packer:
    def __init__(
        self,
        namespace: str,
        *,
        max_message_bytes: int,
        compress_above_bytes: int,
        compression: Compression,
    ) -> None:
        if compression not in _FLAGS:
            raise ConfigError(f"compression {compression!r} is unknown; use zlib, lz4 or zstd")
        if not 0 < max_message_bytes < 1 << 28:
            raise ConfigError(f"max_message_bytes must be 1 … 256 MiB, not {max_message_bytes}")
        self.max_message_bytes = max_message_bytes
        self.compress_above_bytes = compress_above_bytes
        self.prepare: Callable[[Message], None] | None = None  # sees each message first
        self._next_id: Callable[[], str] = _no_ids
        self._namespace = namespace
        self._sys_flag = SYS_COMPRESSED | _FLAGS[compression]
        self._topics: dict[str, str] = {}  # names that were checked → full names

    def number_with(self, ids: Ids) -> None:
        """Where unique ids come from; to be called before the first message."""
        self._next_id = ids.next

    def pack(
        self,
        message: Message,
        *,
        compressed: bytes | None = None,
        plain: bool = False,
        reserved: Mapping[str, str] | None = None,
    ) -> Packed:
        """`compressed` is the body that `compress` made before; `plain` keeps it as it is;
        `reserved` are properties that only this package may set."""
        if self.prepare is not None:
            self.prepare(message)
        topic = self._topics.get(message.topic) or self._checked_topic(message.topic)
        body = message.body
        if not body:
            raise BadMessage(
                f"a message to {message.topic} has an empty body; send at least a byte"
            )
        if len(body) > self.max_message_bytes:
            raise BadMessage(
                f"a message to {message.topic} has {len(body)} bytes;"
                f" at most {self.max_message_bytes} are allowed (max_message_bytes)"
            )
        if message.flag and not -_INT32 <= message.flag < _INT32:
            raise BadMessage(f"flag {message.flag} does not fit into 32 bits")
        msg_id = self._next_id()
        text = f"{UNIQ_KEY}{NAME_END}{msg_id}"
        kind = MessageKind.NORMAL
        more = None if self._is_bare(message) else self._more_pairs(message)
        if reserved:
            more = {**(more or {}), **reserved}
        if more:
            if DELAY in more or TIMER_DELAY_MS in more or TIMER_DELIVER_MS in more:
                kind = MessageKind.DELAY
            text = f"{text}{PAIR_END}{format_properties(more)}"
            if len(text) * _UTF8_BYTES_MAX > PROPERTIES_BYTES_MAX:
                _check_length(text)
        sys_flag = 0
        if not plain and len(body) >= self.compress_above_bytes:
            smaller = compress(body, self._sys_flag) if compressed is None else compressed
            if len(smaller) < len(body):
                body, sys_flag = smaller, self._sys_flag
        return Packed(message, topic, body, sys_flag, text, msg_id, kind)

    def compress(self, body: bytes) -> bytes:
        """For callers that compress big bodies off the loop."""
        return compress(body, self._sys_flag)

    def _is_bare(self, message: Message) -> bool:
        """Whether the unique id is its only property: the usual case, worth a shortcut."""
        return (
            not (message.properties or message.keys or message.delay_level or self._namespace)
            and message.wait_store
            and message.tags is None
            and message.delay_ms is None
            and message.deliver_at_ms is None
        )

    def _more_pairs(self, message: Message) -> dict[str, str]:
        """The properties of a message beside its unique id, checked."""
        pairs: dict[str, str] = {}
        if message.tags is not None:
            pairs[TAGS] = _checked("tag", message.tags)
        if message.keys:
            pairs[KEYS] = " ".join([_checked("key", key) for key in message.keys])
        if not message.wait_store:
            pairs[WAIT] = "false"
        if message.delay_level or message.delay_ms is not None or message.deliver_at_ms is not None:
            _add_delay(message, pairs)
        for name, value in message.properties.items():
            _check_property(name, value)
            pairs[name] = value
        if self._namespace:
            pairs[INSTANCE_ID] = self._namespace
        return pairs

    def _checked_topic(self, name: str) -> str:
        full = wrap(self._namespace, name)
        try:
            check_topic(full)
        except Refused as refusal:
            raise BadMessage(refusal.remark) from None
        if full in SEND_FORBIDDEN_TOPICS:
            raise BadMessage(f"topic {name} belongs to the broker; send to a topic of your own")
        if len(self._topics) >= _TOPICS_MAX:
            self._topics.clear()
        self._topics[name] = full
        return full


def _no_ids() -> str:
    raise AssertionError("a packer without ids")


def batch_hindrance(packed: Packed) -> str | None:
    """Why a message cannot be part of a batch; None when it can."""
    if packed.kind is not MessageKind.NORMAL:
        return "it is delayed or transactional"
    if packed.topic.startswith(RETRY_PREFIX):
        return "it goes to a retry topic"
    if packed.sys_flag:
        return "it is compressed"
    return None


def _add_delay(message: Message, pairs: dict[str, str]) -> None:
    wishes = (message.delay_level or None, message.delay_ms, message.deliver_at_ms)
    if sum(wish is not None for wish in wishes) > 1:
        raise BadMessage("give one of delay_level, delay_ms and deliver_at_ms, not several")
    if min(wish for wish in wishes if wish is not None) < 0:
        raise BadMessage("a delay cannot be negative")
    if message.delay_level:
        pairs[DELAY] = str(message.delay_level)
    elif message.delay_ms is not None:
        pairs[TIMER_DELAY_MS] = str(message.delay_ms)
    else:
        pairs[TIMER_DELIVER_MS] = str(message.deliver_at_ms)


def _check_property(name: str, value: str) -> None:
    if name in RESERVED:
        raise BadMessage(f"property name {name} is reserved; choose another one")
    _checked("property name", name)
    _checked(f"property {name}", value)


def _checked(what: str, text: str) -> str:
    if not isinstance(text, str):
        raise BadMessage(f"{what}: {text!r} is no text; properties are strings")
    if not text:
        raise BadMessage(f"{what} is empty; leave it out")
    if NAME_END in text or PAIR_END in text:
        raise BadMessage(f"{what} {text!r} has a character 0x01 or 0x02; they separate properties")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadMessage(f"{what} is no valid text: {error}") from None
    return text


def _check_length(text: str) -> None:
    size = len(text.encode())
    if size > PROPERTIES_BYTES_MAX:
        raise BadMessage(
            f"tags, keys and properties have {size} bytes; at most {PROPERTIES_BYTES_MAX} fit"
        )
