"""Rows of a DataFrame as messages: which columns there may be, and what each becomes.

Columns are known by name, in any order and case; every one but `body` may be absent or null. Wrong
columns are reported on the driver before anything is sent. A wrong row is reported when its turn
comes, with its number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from cosmodrome.client.send.failures import BadMessage
from cosmodrome.client.send.packing import Packed, Packer
from cosmodrome.client.values import Message
from cosmodrome.errors import ConfigError
from cosmodrome.layout import PROPERTIES_BYTES_MAX
from cosmodrome.spark.read.rows import SPARK_TYPES
from cosmodrome.spark.write.options import MESSAGE_BYTES_MAX, WriteOptions
from cosmodrome.spark.write.repeats import MARK, RowKeys, WritePart
from cosmodrome.wire.message import RESERVED

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import StructType

_WHOLE = ("tinyint", "smallint", "int", "bigint")
# The types a column may have, the one to recommend first: for a column that the source has too,
# the type it has there.
TYPES: dict[str, tuple[str, ...]] = {
    "body": (SPARK_TYPES["body"], "string"),
    "topic": (SPARK_TYPES["topic"],),
    "tags": (SPARK_TYPES["tags"],),
    "keys": (SPARK_TYPES["keys"], "array<string>"),
    "properties": (SPARK_TYPES["properties"],),
    "queue_key": ("string",),
    "delay_ms": ("bigint", *_WHOLE[:3]),
    "deliver_time": ("timestamp",),
    "delay_level": ("int", *_WHOLE[:2], "bigint"),
    "flag": (SPARK_TYPES["flag"], *_WHOLE[:2]),
}
NEVER_BYTES = 1 << 62
MARK_BYTES = 64  # kept free for the mark, which a second attempt adds
_SHORT = (PROPERTIES_BYTES_MAX - MARK_BYTES) // 3  # characters; none has more bytes in UTF-8


def user_properties(properties: Column) -> Column:
    """A properties column of the source without the names that clients and brokers set, so that it
    may be written to another topic."""
    from pyspark.sql import functions

    set_by_others = sorted({*RESERVED, MARK})
    return functions.map_filter(properties, lambda name, _: ~name.isin(set_by_others))


@dataclasses.dataclass(frozen=True, slots=True)
class RowLayout:
    """Where each known column is in the rows."""

    positions: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, schema: StructType, options: WriteOptions) -> Self:
        """Checked against what the sink takes; ConfigError says what to change."""
        positions: dict[str, int] = {}
        for position, field in enumerate(schema.fields):
            name = field.name.lower()
            if name not in TYPES:
                raise ConfigError(
                    f"the sink has no column {field.name!r}; it takes {', '.join(TYPES)}:"
                    " rename or drop it"
                )
            if name in positions:
                raise ConfigError(f"column {field.name!r} is there twice; drop one")
            has = field.dataType.simpleString()
            if has not in TYPES[name]:
                raise ConfigError(
                    f"column {field.name} is {has}; it must be {' or '.join(TYPES[name])}:"
                    f' cast it, for example col("{field.name}").cast("{TYPES[name][0]}")'
                )
            positions[name] = position
        if "body" not in positions:
            raise ConfigError("a column `body` (binary or string) is needed: the message's content")
        if "topic" not in positions and options.topic is None:
            raise ConfigError("which topic? give option topic, .save(topic), or a column `topic`")
        return cls(tuple(positions.items()))

    def columns(self, batch: pa.RecordBatch) -> dict[str, list[Any]]:
        """Python values by column name."""
        found = {}
        for name, position in self.positions:
            column = batch.column(position)
            if name == "deliver_time":
                # Milliseconds; rounded up, a message never comes before its time.
                micros = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
                found[name] = [None if at is None else -(-at // 1000) for at in micros.to_pylist()]
            else:
                found[name] = column.to_pylist()
        return found


class RowMessages:
    """Packs the rows of one task, numbering them."""

    def __init__(self, layout: RowLayout, options: WriteOptions, part: WritePart) -> None:
        self._layout = layout
        self._topic = options.topic
        self._partition = part.partition
        self._packer = Packer(
            options.connection.namespace,
            max_message_bytes=MESSAGE_BYTES_MAX,
            compress_above_bytes=options.compress_above_bytes
            if options.compression
            else NEVER_BYTES,
            compression=options.compression or "zlib",
        )
        self._packer.number_with(RowKeys(part))
        self.rows = 0

    def packed(self, batch: pa.RecordBatch) -> Iterator[Packed]:
        """The messages of a batch of rows, in order."""
        columns = self._layout.columns(batch)
        bodies = columns.pop("body")
        topics = columns.pop("topic", None)
        pack, default = self._packer.pack, self._topic
        if not columns and topics is None:
            # Nothing but bodies: the usual case when speed matters.
            assert default is not None
            messages: Iterable[Message] = (Message(default, _body(body)) for body in bodies)
        else:
            messages = self._messages(bodies, topics or [None] * len(bodies), columns)
        iterator = iter(messages)
        while True:
            try:
                message = next(iterator, None)
                if message is None:
                    return
                packed = pack(message)
                if len(packed.properties) > _SHORT:
                    _leave_room_for_mark(packed.properties)
            except BadMessage as error:
                raise BadMessage(
                    f"row {self.rows} of partition {self._partition}: {error}"
                ) from None
            self.rows += 1
            yield packed

    def _messages(
        self, bodies: Sequence[Any], topics: Sequence[str | None], columns: dict[str, list[Any]]
    ) -> Iterator[Message]:
        setters = [(_SETTERS[name], values) for name, values in columns.items()]
        for number, (body, topic) in enumerate(zip(bodies, topics, strict=True)):
            topic = topic or self._topic
            if topic is None:
                raise BadMessage("topic is null; fill it or give option topic")
            message = Message(topic, _body(body))
            for setter, values in setters:
                value = values[number]
                if value is not None:
                    setter(message, value)
            yield message


def _leave_room_for_mark(properties: str) -> None:
    size = len(properties.encode())
    if size > PROPERTIES_BYTES_MAX - MARK_BYTES:
        raise BadMessage(
            f"tags, keys and properties have {size} bytes;"
            f" at most {PROPERTIES_BYTES_MAX - MARK_BYTES} fit"
        )


def _body(body: bytes | str | None) -> bytes | str:
    if body is None:
        raise BadMessage("body is null; filter such rows or fill them, for example with coalesce")
    return body


def _set_tags(message: Message, tags: str) -> None:
    message.tags = tags or None


def _set_keys(message: Message, keys: str | list[str | None]) -> None:
    # A text is kept as it is: several keys are separated by blanks in it, as brokers store them.
    several = (keys,) if isinstance(keys, str) else keys
    message.keys = tuple(key for key in several if key)


def _set_properties(message: Message, pairs: list[tuple[str, str | None]]) -> None:
    for name, value in pairs:
        if name == MARK or name in RESERVED:
            raise BadMessage(
                f"property name {name} is reserved; filter properties that come from a topic with"
                " cosmodrome.spark.user_properties, and use the columns tags and keys"
            )
        if value:
            message.properties[name] = value


def _set_queue_key(message: Message, key: str) -> None:
    message.queue_key = key


def _set_delay_ms(message: Message, delay_ms: int) -> None:
    message.delay_ms = delay_ms


def _set_deliver_time(message: Message, at_ms: int) -> None:
    message.deliver_at_ms = at_ms


def _set_delay_level(message: Message, level: int) -> None:
    message.delay_level = level


def _set_flag(message: Message, flag: int) -> None:
    message.flag = flag


_SETTERS: dict[str, Callable[[Message, Any], None]] = {
    "tags": _set_tags,
    "keys": _set_keys,
    "properties": _set_properties,
    "queue_key": _set_queue_key,
    "delay_ms": _set_delay_ms,
    "deliver_time": _set_deliver_time,
    "delay_level": _set_delay_level,
    "flag": _set_flag,
}
