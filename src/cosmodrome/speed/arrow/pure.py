"""Stored records as Arrow columns, in plain Python: the law that `native.pyx` is compared with.

A `ColumnBuilder` walks records, drops those that nobody asked for and keeps the wanted columns
of the others in the form of Arrow's buffers (numbers in the machine's order, offsets of 32 bits,
bits of validity with the lowest first). What a record holds is said by `wire.record`; here the same
bytes are taken apart without a value per record, and every length is checked before its use.

A row that is dropped was looked at as far as its structure; its checksum was not.
"""

from __future__ import annotations

import ipaddress
import zlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from cosmodrome.errors import ProtocolError
from cosmodrome.layout import (
    CRC_MASK,
    HOST_V4_BYTES,
    HOST_V6_BYTES,
    MAGIC_BLANK,
    MAGIC_RECORD,
    MAGIC_RECORD_V2,
    NAME_END,
    PAIR_END,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
    RECORD_MIDDLE,
    STOP_BLANK,
    STOP_CORRUPT,
    STOP_EMPTY,
    STOP_END,
    STOP_FULL,
    STOP_PARTIAL,
    SYS_BORN_V6,
    SYS_COMPRESSED,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_STORE_V6,
    SYS_TRANSACTION_MASK,
)
from cosmodrome.speed.packing import decompress

# What a column is made of, in the order of a whole row.
KINDS: dict[str, str] = {
    "topic": "text",
    "broker": "text",
    "queue_id": "i",
    "queue_offset": "q",
    "body": "text",
    "msg_id": "text",
    "offset_msg_id": "text",
    "tags": "text",
    "keys": "text",
    "properties": "map",
    "born_time": "q",
    "store_time": "q",
    "born_host": "text",
    "flag": "i",
    "sys_flag": "i",
    "reconsume_times": "i",
    "commit_log_offset": "q",
    "store_size": "i",
}

Buffer = bytes | bytearray | memoryview
Buffers = dict[str, tuple[Buffer | None, ...]]
Taken = tuple[int, Buffers, list[tuple[int, str]]]

INT32_MAX = (1 << 31) - 1
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
ROWS_MAX = 1 << 24
# Times that no calendar shows are shown as the first or the last one it shows.
FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999
# What a row may need beside its body: replaced characters may triple topic and properties.
_BESIDE_BODY_BYTES = 1 << 20
_WITH_PAIRS = ("msg_id", "tags", "keys", "properties")


def check_arguments(
    columns: Sequence[str], broker: str | None, rows_max: int, bytes_max: int, body_bytes_max: int
) -> None:
    """ValueError for columns that do not exist and for limits that break 32-bit offsets."""
    unknown = [name for name in columns if name not in KINDS]
    if unknown or len(set(columns)) != len(columns):
        raise ValueError(f"columns {list(columns)}: each is one of {list(KINDS)}, and once only")
    if not 1 <= rows_max <= ROWS_MAX:
        raise ValueError(f"rows_max {rows_max}: from 1 to {ROWS_MAX}")
    if bytes_max < 1 or body_bytes_max < 0:
        raise ValueError(f"bytes_max {bytes_max}, body_bytes_max {body_bytes_max}: too small")
    if bytes_max + body_bytes_max + _BESIDE_BODY_BYTES > INT32_MAX:
        raise ValueError("bytes_max and body_bytes_max together stay below 2 GiB")
    if broker is not None and len(broker.encode()) * rows_max > INT32_MAX:
        raise ValueError(f"{rows_max} rows with a broker name of {len(broker)} characters")


class Parts(NamedTuple):
    """Where the parts of a sound record lie, and its numbers."""

    size: int
    crc: int
    queue_id: int
    flag: int
    queue_offset: int
    log_offset: int
    sys_flag: int
    born_ms: int
    born_at: int
    store_ms_at: int
    store_at: int
    middle_at: int
    reconsume_times: int
    body_at: int
    body_end: int
    topic_at: int
    topic_end: int
    properties_at: int


def look(view: memoryview, at: int, end: int, base: int) -> Parts | tuple[int, str]:
    """The record at `at`, or why there is none: a STOP_* and, for damage, words."""
    left = end - at
    if left < 8:
        return (STOP_PARTIAL if any(view[at:end]) else STOP_EMPTY), ""
    size = int.from_bytes(view[at : at + 4], "big", signed=True)
    magic = int.from_bytes(view[at + 4 : at + 8], "big", signed=True)
    if magic == MAGIC_BLANK and size >= 8:
        return STOP_BLANK, ""
    if not size and not magic:
        return STOP_EMPTY, ""
    if magic not in (MAGIC_RECORD, MAGIC_RECORD_V2):
        return STOP_CORRUPT, f"unknown magic 0x{magic & 0xFFFFFFFF:08x}"
    if size < RECORD_BYTES_MIN:
        return STOP_CORRUPT, f"a size of {size} bytes; no record is so small"
    if size > left:
        return STOP_PARTIAL, ""
    return _take_apart(view, at, size, base)


def _take_apart(view: memoryview, at: int, size: int, base: int) -> Parts | tuple[int, str]:
    head = RECORD_HEAD.unpack_from(view, at)
    magic, crc, queue_id, flag, queue_offset, log_offset, sys_flag, born_ms = head[1:]
    if base >= 0 and log_offset != base + at:
        return STOP_CORRUPT, f"it says log offset {log_offset} but lies at {base + at}"
    record_end = at + size
    born_at = at + RECORD_HEAD.size
    store_ms_at = born_at + (HOST_V6_BYTES if sys_flag & SYS_BORN_V6 else HOST_V4_BYTES)
    store_at = store_ms_at + 8
    middle_at = store_at + (HOST_V6_BYTES if sys_flag & SYS_STORE_V6 else HOST_V4_BYTES)
    body_at = middle_at + RECORD_MIDDLE.size
    width = 1 if magic == MAGIC_RECORD else 2
    if body_at + width + 2 > record_end:
        return STOP_CORRUPT, f"{size} bytes are too few for its hosts"
    reconsume_times, _, body_bytes = RECORD_MIDDLE.unpack_from(view, middle_at)
    if not 0 <= body_bytes <= record_end - body_at - width - 2:
        return STOP_CORRUPT, f"a body of {body_bytes} bytes does not fit into {size}"
    body_end = body_at + body_bytes
    topic_at = body_end + width
    topic_bytes = int.from_bytes(view[body_end:topic_at], "big", signed=True)
    if not 0 <= topic_bytes <= record_end - topic_at - 2:
        return STOP_CORRUPT, f"a topic of {topic_bytes} bytes does not fit"
    topic_end = topic_at + topic_bytes
    properties_at = topic_end + 2
    properties_bytes = int.from_bytes(view[topic_end:properties_at], "big", signed=True)
    if properties_bytes != record_end - properties_at:
        return STOP_CORRUPT, f"its parts do not add up to its size of {size} bytes"
    return Parts(
        size=size,
        crc=crc,
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        log_offset=log_offset,
        sys_flag=sys_flag,
        born_ms=born_ms,
        born_at=born_at,
        store_ms_at=store_ms_at,
        store_at=store_at,
        middle_at=middle_at,
        reconsume_times=reconsume_times,
        body_at=body_at,
        body_end=body_end,
        topic_at=topic_at,
        topic_end=topic_end,
        properties_at=properties_at,
    )


def parse_pairs(text: str) -> dict[str, str]:
    """As `wire.message.parse_properties`: the last duplicate wins, empty ones vanish."""
    pairs: dict[str, str] = {}
    for pair in text.split(PAIR_END):
        name, _, value = pair.partition(NAME_END)
        if name and value:
            pairs[name] = value
    return pairs


def host_text(host: bytes) -> str:
    ip = str(ipaddress.ip_address(host[:-4]))
    port = int.from_bytes(host[-4:], "big")
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def plain_body(body: bytes, sys_flag: int, limit_bytes: int) -> bytes | str:
    """The body as its sender wrote it, or why there is none."""
    try:
        plain = decompress(body, sys_flag, limit_bytes)
    except (ProtocolError, MemoryError) as error:
        return str(error) or "no memory for the decompressed body"
    if len(plain) > limit_bytes:
        return f"a body of {len(plain)} bytes is beyond the cap of {limit_bytes}"
    return plain


def checksum_fault(stored: int, found: int) -> str:
    return f"its checksum is 0x{stored & 0xFFFFFFFF:08x}, its body gives 0x{found:08x}"


class _Texts:
    """A column of texts or bytes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.offsets = array("i", (0,))
        self.nulls: list[int] = []

    def add(self, value: bytes | None) -> int:
        if value is None:
            self.nulls.append(len(self.offsets) - 1)
        else:
            self.data += value
        self.offsets.append(len(self.data))
        return 0 if value is None else len(value)

    def buffers(self) -> tuple[Buffer | None, ...]:
        count = len(self.offsets) - 1
        validity = bytearray()
        if self.nulls:
            validity += b"\xff" * (count // 8)
            if count % 8:
                validity.append((1 << count % 8) - 1)
            for row in self.nulls:
                validity[row >> 3] &= ~(1 << (row & 7))
        return (validity if self.nulls else None), self.offsets.tobytes(), self.data


class ColumnBuilder:
    """Takes records in and gives columns out; see `add` and `take`."""

    def __init__(
        self,
        columns: Sequence[str],
        *,
        broker: str | None = None,
        check_crc: bool = True,
        rows_max: int = 8192,
        bytes_max: int = 16 << 20,
        body_bytes_max: int = 64 << 20,
        topics: frozenset[str] | None = None,
        queue_ids: frozenset[int] | None = None,
        tags: frozenset[str] | None = None,
        since_ms: int = INT64_MIN,
        until_ms: int = INT64_MAX,
        skip_unseen: bool = False,
        marked: str | None = None,
    ) -> None:
        check_arguments(columns, broker, rows_max, bytes_max, body_bytes_max)
        self._columns = tuple(columns)
        self._broker = None if broker is None else broker.encode()
        self._check_crc = check_crc
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._body_bytes_max = body_bytes_max
        self._topics = topics
        self._queue_ids = queue_ids
        self._tags = tags
        self._since_ms = since_ms
        self._until_ms = until_ms
        self._skip_unseen = skip_unseen
        self._marked = marked
        self._with_pairs = (
            tags is not None or marked is not None or any(name in columns for name in _WITH_PAIRS)
        )
        self.records = 0
        self.last_offset = -1
        self.fault = ""
        self.fault_size = 0
        self._clear()

    def _clear(self) -> None:
        self.rows = 0
        self._bytes = 0
        self._marks: list[tuple[int, str]] = []
        self._texts = {name: _Texts() for name in self._columns if KINDS[name] == "text"}
        self._numbers = {
            name: array(KINDS[name]) for name in self._columns if len(KINDS[name]) == 1
        }
        self._map_offsets = array("i", (0,))
        self._map_names, self._map_values = _Texts(), _Texts()

    def add(
        self,
        data: Buffer,
        at: int,
        end: int,
        *,
        base: int = -1,
        low: int = 0,
        high: int = INT64_MAX,
    ) -> tuple[int, int]:
        """Walk the records in data[at:end]; where it stopped and why (STOP_*).

        A row is kept when its queue offset is in [low, high) and the filters want it. With
        `base`, the log offset of data[0], a record must say the log offset it lies at. At damage
        `fault` says what is wrong; `fault_size` is the size of the record when its structure is
        sound and only its body is not, else 0. Any bytes may be given; none of them raise.
        """
        self.fault, self.fault_size = "", 0
        view = memoryview(data)
        if not 0 <= at <= end <= len(view):
            raise ValueError(f"records from {at} to {end} outside of {len(view)} bytes")
        while at < end:
            if self.rows >= self._rows_max or self._bytes >= self._bytes_max:
                return at, STOP_FULL
            parts = look(view, at, end, base)
            if not isinstance(parts, Parts):
                stop, self.fault = parts
                return at, stop
            fault = self._row(view, at, parts) if self._wants(view, parts, low, high) else ""
            if fault:
                self.fault, self.fault_size = fault, parts.size
                return at, STOP_CORRUPT
            self.records += 1
            self.last_offset = parts.queue_offset
            at += parts.size
        return at, STOP_END

    def _wants(self, view: memoryview, parts: Parts, low: int, high: int) -> bool:
        """What can be decided without the properties."""
        if not low <= parts.queue_offset < high:
            return False
        if self._queue_ids is not None and parts.queue_id not in self._queue_ids:
            return False
        if self._skip_unseen:
            kind = parts.sys_flag & SYS_TRANSACTION_MASK
            if kind in (SYS_PREPARED, SYS_ROLLBACK):
                return False
        store_ms = int.from_bytes(view[parts.store_ms_at : parts.store_at], "big", signed=True)
        if not self._since_ms <= store_ms < self._until_ms:
            return False
        if self._topics is None:
            return True
        return str(view[parts.topic_at : parts.topic_end], "utf-8", "replace") in self._topics

    def _row(self, view: memoryview, at: int, parts: Parts) -> str:
        """Keep one row unless its tag is not wanted; what is wrong with its body."""
        pairs: dict[str, str] = {}
        if self._with_pairs:
            properties = view[parts.properties_at : at + parts.size]
            pairs = parse_pairs(str(properties, "utf-8", "replace"))
            if self._tags is not None and pairs.get("TAGS") not in self._tags:
                return ""
        stored = view[parts.body_at : parts.body_end]
        if self._check_crc:
            found = zlib.crc32(stored) & CRC_MASK
            if found != parts.crc:
                return checksum_fault(parts.crc, found)
        with_body = "body" in self._texts
        body = bytes(stored) if with_body else b""
        if with_body and (parts.sys_flag & SYS_COMPRESSED or len(body) > self._body_bytes_max):
            plain = plain_body(body, parts.sys_flag, self._body_bytes_max)
            if isinstance(plain, str):
                return plain
            body = plain
        self._keep(view, parts, pairs, body)
        return ""

    def _keep(self, view: memoryview, parts: Parts, pairs: dict[str, str], body: bytes) -> None:
        store_ms = int.from_bytes(view[parts.store_ms_at : parts.store_at], "big", signed=True)
        for name, numbers in self._numbers.items():
            if name == "born_time":
                numbers.append(1000 * min(max(parts.born_ms, FIRST_MS), LAST_MS))
            elif name == "store_time":
                numbers.append(1000 * min(max(store_ms, FIRST_MS), LAST_MS))
            elif name == "commit_log_offset":
                numbers.append(parts.log_offset)
            elif name == "store_size":
                numbers.append(parts.size)
            else:
                numbers.append(getattr(parts, name))
        for name, texts in self._texts.items():
            if name == "body":
                self._bytes += texts.add(body)
            elif name != "broker":
                self._bytes += texts.add(self._text(name, view, parts, pairs))
        if "properties" in self._columns:
            for key, value in pairs.items():
                self._bytes += self._map_names.add(key.encode())
                self._bytes += self._map_values.add(value.encode())
            self._map_offsets.append(len(self._map_names.offsets) - 1)
        if self._marked is not None and self._marked in pairs:
            self._marks.append((self.rows, pairs[self._marked]))
        self.rows += 1

    def _text(
        self, name: str, view: memoryview, parts: Parts, pairs: dict[str, str]
    ) -> bytes | None:
        if name == "topic":
            return str(view[parts.topic_at : parts.topic_end], "utf-8", "replace").encode()
        if name == "born_host":
            return host_text(bytes(view[parts.born_at : parts.store_ms_at])).encode()
        text = pairs.get({"tags": "TAGS", "keys": "KEYS", "msg_id": "UNIQ_KEY"}.get(name, ""))
        if text is not None:
            return text.encode()
        if name in ("tags", "keys"):
            return None
        packed = bytes(view[parts.store_at : parts.middle_at]) + parts.log_offset.to_bytes(
            8, "big", signed=True
        )
        return packed.hex().upper().encode()

    def take(self) -> Taken:
        """The number of rows, their buffers by column, the marked rows; the builder is empty then.

        Numbers and times (UTC microseconds): data. Texts and bodies: validity or None, offsets,
        data. Properties: offsets of the map, offsets and data of names, the same of values.
        """
        buffers: Buffers = {}
        for name in self._columns:
            if name == "properties":
                names, values = self._map_names.buffers(), self._map_values.buffers()
                buffers[name] = (self._map_offsets.tobytes(), *names[1:], *values[1:])
            elif name == "broker":
                for _ in range(self.rows):
                    self._texts[name].add(self._broker)
                buffers[name] = self._texts[name].buffers()
            elif name in self._texts:
                buffers[name] = self._texts[name].buffers()
            else:
                buffers[name] = (self._numbers[name].tobytes(),)
        taken = self.rows, buffers, self._marks
        self._clear()
        return taken
