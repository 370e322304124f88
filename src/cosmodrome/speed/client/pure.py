"""The client's hot functions in plain Python: the law that `native.pyx` is compared with.

What is handed in was checked by the client, so only sizes that come off the wire are looked at.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Protocol

from cosmodrome.errors import ProtocolError
from cosmodrome.layout import (
    BATCH_ITEM_HEAD,
    FRAME_BYTES_MAX,
    FRAME_PREFIX,
    MAGIC_RECORD,
    PROPERTIES_BYTES_MAX,
    RECORD_BYTES_MIN,
    SYS_BORN_V6,
    SYS_STORE_V6,
    TOPIC_BYTES_MAX,
)

# Where a record begins, its size, queue offset and system flag, where its body begins and ends.
Outline = tuple[int, int, int, int, int, int]

_ORDINARY = struct.Struct(">iiiiiqqiq8sq8siqi")  # all before the body, with two IPv4 hosts
_V6_HOSTS = SYS_BORN_V6 | SYS_STORE_V6
_escaped = json.JSONEncoder(ensure_ascii=False).encode


class Item(Protocol):
    """What a message of a batch looks like to `batch_body`."""

    @property
    def body(self) -> bytes: ...

    @property
    def properties(self) -> str: ...

    @property
    def flag(self) -> int: ...


def outline(data: bytes, at: int) -> tuple[list[Outline], int]:
    """The ordinary records of a pull body from `at` on, and where the first other one begins.

    Ordinary: first version, IPv4 hosts, all parts add up. The end of `data` when all are.
    """
    found: list[Outline] = []
    end = len(data)
    while end - at >= RECORD_BYTES_MIN:
        fields = _ORDINARY.unpack_from(data, at)
        size, magic, _, _, _, queue_offset, _, sys_flag = fields[:8]
        body_bytes = fields[14]
        body_at, next_at = at + _ORDINARY.size, at + size
        body_end = body_at + body_bytes
        if (
            magic != MAGIC_RECORD
            or sys_flag & _V6_HOSTS
            or body_bytes < 0
            or not body_end + 3 <= next_at <= end
            or data[body_end] > TOPIC_BYTES_MAX
        ):
            break
        text_at = body_end + 3 + data[body_end]
        text_bytes = next_at - text_at
        if not 0 <= text_bytes <= PROPERTIES_BYTES_MAX or text_bytes != (
            data[text_at - 2] << 8 | data[text_at - 1]
        ):
            break
        found.append((at, size, queue_offset, sys_flag, body_at, body_end))
        at = next_at
    return found, at


def batch_body(items: Sequence[Item]) -> bytes:
    """The body of a batch request."""
    parts: list[bytes] = []
    for item in items:
        body, properties = item.body, item.properties.encode()
        size = BATCH_ITEM_HEAD.size + 2 + len(body) + len(properties)
        parts.append(BATCH_ITEM_HEAD.pack(size, 0, 0, item.flag, len(body)))
        parts += (body, len(properties).to_bytes(2, "big"), properties)
    return b"".join(parts)


def send_frame(
    opening: bytes, opaque: int, fields: bytes, born_ms: int, properties: str, body: bytes
) -> bytes:
    """A whole send request whose JSON header is prepared but for what differs every time:
    `opening` goes up to the opaque number, `fields` from there to the born time."""
    text = _escaped(properties).encode()
    header = b'%b%d%b%d","i":%b}}' % (opening, opaque, fields, born_ms, text)
    length = 4 + len(header) + len(body)
    if length + 4 > FRAME_BYTES_MAX:
        raise ProtocolError(
            f"a frame of {length + 4} bytes; at most {FRAME_BYTES_MAX} fit, send less at once"
        )
    return b"".join((FRAME_PREFIX.pack(length, len(header)), header, body))
