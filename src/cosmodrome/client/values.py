"""What passes between a user and the client: messages, queues, results of sends."""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from cosmodrome.errors import CosmodromeError, ProtocolError
from cosmodrome.layout import RECORD_BYTES_MIN
from cosmodrome.wire import message as names
from cosmodrome.wire.bodies import MessageQueue as MessageQueue
from cosmodrome.wire.message import host_text, parse_properties
from cosmodrome.wire.record import Record, decode_records

_new = object.__new__
_LENGTH = struct.Struct(">i")
_BODY_AT = RECORD_BYTES_MIN - 3  # behind two IPv4 hosts; what follows it has 3 bytes at least


class NoRoute(CosmodromeError):
    """No name server knows brokers for a topic."""


class DamagedBody(ProtocolError):
    """The body of a message cannot be read. `message` is the `DamagedMessage` it belongs to,
    `reason` says what is wrong with the body."""

    def __init__(self, message: DamagedMessage, reason: object) -> None:
        super().__init__(
            f"the body of message {message.queue_offset} in queue {message.queue_id} of"
            f" {message.topic} on {message.broker_name} cannot be read: {reason};"
            " `message.stored_body` has its bytes as they are stored"
        )
        self.message = message
        self.reason = str(reason)


class Message:
    """A message to be sent. The body is bytes; text is encoded as UTF-8.

    `delay_level` counts from 1 (the broker's table of levels); `delay_ms` and `deliver_at_ms`
    ask for an exact time instead. `queue_key` sends all messages with the same key to the same
    queue, in order.
    """

    __slots__ = (
        "body",
        "delay_level",
        "delay_ms",
        "deliver_at_ms",
        "flag",
        "keys",
        "properties",
        "queue_key",
        "tags",
        "topic",
        "wait_store",
    )

    def __init__(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        flag: int = 0,
        delay_level: int = 0,
        delay_ms: int | None = None,
        deliver_at_ms: int | None = None,
        queue_key: str | None = None,
        wait_store: bool = True,
    ) -> None:
        self.topic = topic
        self.body = body.encode() if isinstance(body, str) else bytes(body)
        self.tags = tags
        self.keys = (keys,) if isinstance(keys, str) else tuple(keys)
        self.properties = dict(properties) if properties else {}
        self.flag = flag
        self.delay_level = delay_level
        self.delay_ms = delay_ms
        self.deliver_at_ms = deliver_at_ms
        self.queue_key = queue_key
        self.wait_store = wait_store

    def __repr__(self) -> str:
        return f"Message(topic={self.topic!r}, {len(self.body)} bytes, tags={self.tags!r})"


class SendStatus(enum.Enum):
    """All of these mean "stored"; the later three say that a further promise was not kept."""

    OK = 0
    FLUSH_DISK_TIMEOUT = 10
    FLUSH_SLAVE_TIMEOUT = 12
    SLAVE_NOT_AVAILABLE = 11


class SendResult(msgspec.Struct, gc=False):
    """Where a message was stored. `msg_id` is the client's unique id, as tools show it."""

    status: SendStatus
    msg_id: str
    queue: MessageQueue
    queue_offset: int
    offset_msg_id: str = ""
    transaction_id: str | None = None
    recall_handle: str | None = None  # cancels a timed message
    region: str | None = None


class ReceivedMessage:
    """A message as it was stored. Properties are parsed when they are first asked for.

    From an iterating consumer it also carries the two ways to be done with it: `ack` and
    `retry`; elsewhere they do nothing.
    """

    __slots__ = (
        "_at",
        "_body",
        "_data",
        "_on_answer",
        "_properties",
        "_record",
        "broker_name",
        "max_offset",
        "min_offset",
        "queue_offset",
        "size",
        "topic",
    )

    def __init__(
        self,
        record: Record,
        broker_name: str,
        *,
        topic: str | None = None,
        body: bytes | None = None,
        min_offset: int = -1,
        max_offset: int = -1,
    ) -> None:
        self._record: Record | None = record
        self._data, self._at = b"", 0
        self.queue_offset = record.queue_offset
        self.size = record.size  # bytes of the whole record
        self.broker_name = broker_name
        self.topic = record.topic if topic is None else topic
        self._body: bytes | None = record.body if body is None else body
        self.min_offset = min_offset
        self.max_offset = max_offset
        self._properties: dict[str, str] | None = None
        self._on_answer: Callable[[ReceivedMessage, int | None], Any] | None = None

    @classmethod
    def outlined(
        cls,
        data: bytes,
        at: int,
        size: int,
        queue_offset: int,
        broker_name: str,
        topic: str,
        min_offset: int,
        max_offset: int,
    ) -> ReceivedMessage:
        """A message whose record begins at `at` in the body of an answer: it is taken apart when
        something is asked of it. Its parts must be known to add up."""
        made = _new(cls)
        made._data = data
        made._at = at
        made.size = size
        made.queue_offset = queue_offset
        made.broker_name = broker_name
        made.topic = topic
        made.min_offset = min_offset
        made.max_offset = max_offset
        made._record = made._body = made._properties = made._on_answer = None
        return made

    @property
    def damage(self) -> DamagedBody | None:
        """Why the body cannot be read; None for every message but a `DamagedMessage`."""
        return None

    @property
    def record(self) -> Record:
        record = self._record
        if record is None:
            at = self._at
            (record,) = decode_records(self._data[at : at + self.size])
            self._record = record
        return record

    @property
    def body(self) -> bytes:
        body = self._body
        if body is None:
            # An outlined record is ordinary: its body begins at the same place in all of them.
            begin = self._at + _BODY_AT
            (length,) = _LENGTH.unpack_from(self._data, begin - _LENGTH.size)
            body = self._body = self._data[begin : begin + length]
        return body

    @body.setter
    def body(self, body: bytes) -> None:
        self._body = body

    @property
    def properties(self) -> dict[str, str]:
        if self._properties is None:
            self._properties = parse_properties(self.record.properties)
        return self._properties

    @property
    def tags(self) -> str | None:
        return self.properties.get(names.TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.properties.get(names.KEYS, "").split())

    @property
    def msg_id(self) -> str:
        """The sender's unique id, or where the message is stored if it has none."""
        return self.properties.get(names.UNIQ_KEY) or self.record.message_id

    @property
    def offset_msg_id(self) -> str:
        return self.record.message_id

    @property
    def queue_id(self) -> int:
        return self.record.queue_id

    @property
    def queue(self) -> MessageQueue:
        """The queue it was read from: the retry topic's for a message that came again."""
        return MessageQueue(
            topic=self.record.topic, broker_name=self.broker_name, queue_id=self.record.queue_id
        )

    @property
    def born_ms(self) -> int:
        return self.record.born_ms

    @property
    def store_ms(self) -> int:
        return self.record.store_ms

    @property
    def born_host(self) -> str:
        return host_text(self.record.born_host)

    @property
    def store_host(self) -> str:
        return host_text(self.record.store_host)

    @property
    def reconsume_times(self) -> int:
        """How often it came back before this time."""
        return self.record.reconsume_times

    @property
    def transaction_id(self) -> str | None:
        return self.properties.get("__transactionId__") or self.properties.get(names.UNIQ_KEY)

    async def ack(self) -> None:
        """Done: progress moves past it as soon as all before it are done too."""
        if self._on_answer is not None:
            await self._on_answer(self, None)

    async def retry(self, delay_level: int = 0) -> None:
        """Not done: it comes again after the delay of a level (0: longer with every attempt)."""
        if self._on_answer is not None:
            await self._on_answer(self, delay_level)

    def __repr__(self) -> str:
        return (
            f"ReceivedMessage(topic={self.topic!r}, queue={self.broker_name}:{self.queue_id},"
            f" offset={self.queue_offset}, {len(self.body)} bytes)"
        )


class DamagedMessage(ReceivedMessage):
    """A message whose body cannot be read, because it does not decompress for example.

    Everything but the body is as usual. Reading `body` raises `damage`; `stored_body` has the
    bytes as the broker stores them.
    """

    __slots__ = ("_damage",)

    _damage: DamagedBody

    @classmethod
    def of(cls, message: ReceivedMessage, reason: object) -> DamagedMessage:
        made = cls(
            message.record,
            message.broker_name,
            topic=message.topic,
            min_offset=message.min_offset,
            max_offset=message.max_offset,
        )
        made._damage = DamagedBody(made, reason)
        return made

    @property
    def damage(self) -> DamagedBody:
        return self._damage

    @property
    def stored_body(self) -> bytes:
        return self.record.body

    @property  # type: ignore[misc]
    def body(self) -> bytes:
        raise self._damage

    def __repr__(self) -> str:
        return (
            f"DamagedMessage(topic={self.topic!r}, queue={self.broker_name}:{self.queue_id},"
            f" offset={self.queue_offset}, {len(self.stored_body)} bytes stored)"
        )
