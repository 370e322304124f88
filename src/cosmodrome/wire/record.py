"""The stored record as a value. The commit log and the body of a pull answer share this form."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from collections.abc import Iterator

from cosmodrome import speed
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import (
    CRC_MASK,
    HOST_V4_BYTES,
    HOST_V6_BYTES,
    MAGIC_RECORD,
    MAGIC_RECORD_V2,
    PROPERTIES_BYTES_MAX,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
    RECORD_MIDDLE,
    RECORD_SYS_FLAG_AT,
    SYS_BORN_V6,
    SYS_STORE_V6,
    TOPIC_BYTES_MAX,
)
from cosmodrome.wire.message import offset_message_id, parse_properties

_INT = struct.Struct(">i")
# Everything before the body of a record with two IPv4 hosts.
_ORDINARY = struct.Struct(">iiiiiqqiq8sq8siqi")
_V6_HOSTS = SYS_BORN_V6 | SYS_STORE_V6
assert _ORDINARY.size == RECORD_BYTES_MIN - 3


@dataclasses.dataclass(slots=True)
class Record:
    """Every field of a stored record; `body` is as stored, perhaps compressed."""

    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    log_offset: int
    sys_flag: int
    born_ms: int
    born_host: bytes
    store_ms: int
    store_host: bytes
    reconsume_times: int
    prepared_offset: int
    body: bytes
    topic: str
    properties: str

    @property
    def message_id(self) -> str:
        return offset_message_id(self.store_host, self.log_offset)

    def pairs(self) -> dict[str, str]:
        """The properties as a map, parsed anew at every call."""
        return parse_properties(self.properties)

    def body_is_intact(self) -> bool:
        """For tests and for users of records; the store checks bodies in compiled code."""
        return zlib.crc32(self.body) & CRC_MASK == self.body_crc


def decode_record(data: bytes | bytearray | memoryview, at: int = 0) -> Record:
    """The record that begins at `at`; ProtocolError when its parts do not add up."""
    view = memoryview(data)
    if not 0 <= at <= len(view) - RECORD_BYTES_MIN:
        raise ProtocolError(f"record at {at}: only {max(len(view) - at, 0)} bytes are left")
    head = RECORD_HEAD.unpack_from(view, at)
    size, magic, crc, queue_id, flag, queue_offset, log_offset, sys_flag, born_ms = head
    if magic not in (MAGIC_RECORD, MAGIC_RECORD_V2):
        raise ProtocolError(f"record at {at}: unknown magic 0x{magic & 0xFFFFFFFF:08x}")
    if not RECORD_BYTES_MIN <= size <= len(view) - at:
        raise ProtocolError(f"record at {at}: size {size} does not fit")
    end = at + size
    born_at = at + RECORD_HEAD.size
    store_ms_at = born_at + (HOST_V6_BYTES if sys_flag & SYS_BORN_V6 else HOST_V4_BYTES)
    store_at = store_ms_at + 8
    middle_at = store_at + (HOST_V6_BYTES if sys_flag & SYS_STORE_V6 else HOST_V4_BYTES)
    body_at = middle_at + RECORD_MIDDLE.size
    topic_width = 1 if magic == MAGIC_RECORD else 2
    if body_at + topic_width + 2 > end:
        raise ProtocolError(f"record at {at}: too short for its hosts")
    reconsume_times, prepared_offset, body_bytes = RECORD_MIDDLE.unpack_from(view, middle_at)
    if not 0 <= body_bytes <= end - body_at - topic_width - 2:
        raise ProtocolError(f"record at {at}: body of {body_bytes} bytes does not fit")
    body_end = body_at + body_bytes
    topic_at = body_end + topic_width
    topic_bytes = int.from_bytes(view[body_end:topic_at], "big", signed=True)
    if not 0 <= topic_bytes <= end - topic_at - 2:
        raise ProtocolError(f"record at {at}: topic of {topic_bytes} bytes does not fit")
    topic_end = topic_at + topic_bytes
    properties_at = topic_end + 2
    properties_bytes = int.from_bytes(view[topic_end:properties_at], "big", signed=True)
    if properties_bytes != end - properties_at:
        raise ProtocolError(f"record at {at}: its parts do not add up to its size {size}")
    return Record(
        size=size,
        magic=magic,
        body_crc=crc,
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        log_offset=log_offset,
        sys_flag=sys_flag,
        born_ms=born_ms,
        born_host=bytes(view[born_at:store_ms_at]),
        store_ms=int.from_bytes(view[store_ms_at:store_at], "big", signed=True),
        store_host=bytes(view[store_at:middle_at]),
        reconsume_times=reconsume_times,
        prepared_offset=prepared_offset,
        body=bytes(view[body_at:body_end]),
        topic=str(view[topic_at:topic_end], "utf-8", "replace"),
        properties=str(view[properties_at:end], "utf-8", "replace"),
    )


def encode_record(record: Record) -> bytes:
    """The bytes of a record; size, magic and checksum follow from the rest."""
    out = bytearray()
    speed.encode_record(
        out,
        record.log_offset,
        record.queue_offset,
        record.store_ms,
        record.topic.encode(),
        record.queue_id,
        record.flag,
        record.sys_flag,
        record.born_ms,
        record.born_host,
        record.store_host,
        record.reconsume_times,
        record.prepared_offset,
        record.body,
        record.properties.encode(),
    )
    return bytes(out)


def record_properties(record: bytes | memoryview) -> dict[str, str]:
    """The properties of one whole record, without reading the rest of it.

    Empty when the parts do not add up: a filter has to decide about any record.
    """
    view = memoryview(record)
    if len(view) < RECORD_BYTES_MIN:
        return {}
    (magic,), (sys_flag,) = _INT.unpack_from(view, 4), _INT.unpack_from(view, RECORD_SYS_FLAG_AT)
    hosts = HOST_V6_BYTES if sys_flag & SYS_BORN_V6 else HOST_V4_BYTES
    hosts += HOST_V6_BYTES if sys_flag & SYS_STORE_V6 else HOST_V4_BYTES
    body_at = RECORD_HEAD.size + hosts + 8 + RECORD_MIDDLE.size
    topic_width = 1 if magic == MAGIC_RECORD else 2
    body_bytes = int.from_bytes(view[body_at - 4 : body_at], "big", signed=True)
    topic_at = body_at + body_bytes + topic_width
    if body_bytes < 0 or topic_at + 2 > len(view):
        return {}
    topic_bytes = int.from_bytes(view[topic_at - topic_width : topic_at], "big", signed=True)
    properties_at = topic_at + topic_bytes + 2
    if topic_bytes < 0 or properties_at > len(view):
        return {}
    return parse_properties(str(view[properties_at:], "utf-8", "replace"))


def iter_records(data: bytes | bytearray | memoryview) -> Iterator[Record]:
    """The records of a pull body, one behind the other."""
    at = 0
    while at < len(data):
        record = decode_record(data, at)
        yield record
        at += record.size


def decode_records(data: bytes) -> list[Record]:
    """All records of a pull body at once: what `iter_records` gives, in a fraction of its time.

    Ordinary records are taken apart here; anything else is left to `decode_record`, which also
    knows what to say about a record that is damaged.
    """
    records: list[Record] = []
    at, end = 0, len(data)
    unpack, bare = _ORDINARY.unpack_from, _ORDINARY.size
    topic_seen, topic = b"", ""
    while at < end:
        if end - at >= RECORD_BYTES_MIN:
            # fmt: off
            (size, magic, crc, queue_id, flag, queue_offset, log_offset, sys_flag, born_ms,
             born_host, store_ms, store_host, reconsume_times, prepared_offset, body_bytes,
             ) = unpack(data, at)
            # fmt: on
            body_at, next_at = at + bare, at + size
            body_end = body_at + body_bytes
            if (
                magic == MAGIC_RECORD
                and not sys_flag & _V6_HOSTS
                and body_bytes >= 0
                and body_end + 3 <= next_at <= end
                and data[body_end] <= TOPIC_BYTES_MAX
            ):
                topic_end = body_end + 1 + data[body_end]
                text_at = topic_end + 2
                text_bytes = next_at - text_at
                if 0 <= text_bytes <= PROPERTIES_BYTES_MAX and text_bytes == (
                    data[topic_end] << 8 | data[topic_end + 1]
                ):
                    topic_bytes = data[body_end + 1 : topic_end]
                    if topic_bytes != topic_seen:
                        topic_seen, topic = topic_bytes, str(topic_bytes, "utf-8", "replace")
                    body = data[body_at:body_end]
                    text = str(data[text_at:next_at], "utf-8", "replace")
                    # Field by field: `Record(*fields)` takes a seventh more time in all.
                    # fmt: off
                    records.append(Record(
                        size, magic, crc, queue_id, flag, queue_offset, log_offset, sys_flag,
                        born_ms, born_host, store_ms, store_host, reconsume_times, prepared_offset,
                        body, topic, text,
                    ))
                    # fmt: on
                    at = next_at
                    continue
        record = decode_record(data, at)
        records.append(record)
        at += record.size
    return records
