"""Headers as the pure lane reads them, and what of them it takes for granted.

A send with short names in a JSON header, which is what nearly every client sends, is decoded
straight into a struct. Everything else goes through the ordinary decoder first, so it is seen
exactly as the slow lane sees it. What a number or a truth may look like is narrower than there:
whoever writes it differently is served by the slow lane.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from cosmodrome.errors import ProtocolError
from cosmodrome.layout import (
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    FRAME_BYTES_MAX,
    FRAME_PREFIX,
    HEADER_LENGTH_MASK,
)
from cosmodrome.speed.pure import decode_header

CODE_SEND = 10
CODE_PULL = 11
CODE_COMMIT = 15
CODE_SEND_V2 = 310
CODE_SEND_BATCH = 320

# serialize, opaque, one-way, end of the frame; then the fields
Pull = tuple[
    int, int, bool, int, str, str, int, int, int, int, int, int, int, str | None, str | None
]
Commit = tuple[int, int, bool, int, str, str, int, int]

_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_NUMBER = re.compile(r"0*[0-9]{1,18}|-0*[1-9][0-9]{0,17}", re.ASCII)
_LONG_NAMES = (
    *("producerGroup", "topic", "defaultTopic", "defaultTopicQueueNums", "queueId", "sysFlag"),
    *("bornTimestamp", "flag", "properties", "reconsumeTimes", "unitMode", "maxReconsumeTimes"),
    "batch",
)
_SHORT_NAMES = tuple("abcdefghijklm")


class Fields(msgspec.Struct, gc=False):
    """The fields of a send by their short names; None: not there."""

    a: str | None = None  # producer group
    b: str | None = None  # topic
    c: str | None = None  # default topic
    d: str | None = None  # its number of queues
    e: str | None = None  # queue id
    f: str | None = None  # system flags
    g: str | None = None  # born time
    h: str | None = None  # the message's flag
    i: str | None = None  # properties
    j: str | None = None  # times it was consumed before
    k: str | None = None  # unit mode
    l: str | None = None  # noqa: E741  (how often at most)
    m: str | None = None  # batch


# In the order in which Java writes the members: that is how they are found fastest.
class Head(msgspec.Struct, gc=False):
    code: _Int32
    extFields: Fields | None = None
    flag: _Int32 = 0
    language: str | int | None = 0
    opaque: _Int32 = 0
    remark: str | None = None
    version: _Int32 = 0


read_json = msgspec.json.Decoder(Head).decode  # a ValueError says: look at it more closely


def read_any(serialize: int, data: bytes) -> Head | None:
    """The header of a request in any form; None when the slow lane has to look at it."""
    try:
        code, _, _, opaque, flag, _, ext = decode_header(serialize, data)
    except ProtocolError:
        return None
    names = _LONG_NAMES if code == CODE_SEND else _SHORT_NAMES
    return Head(code, Fields(*map(ext.get, names)), flag, 0, opaque)


def read_number(text: str | None) -> int | None:
    """A whole number of at most 18 digits; Java, and so the slow lane, allows zeros in front."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def read_number32(text: str | None) -> int | None:
    number = read_number(text)
    return number if number is not None and -0x80000000 <= number <= 0x7FFFFFFF else None


def is_null(text: str) -> bool:
    """Whether the slow lane might take this text for nothing at all."""
    return len(text) == 4 and text.lower() == "null"


def _read_fields(
    view: memoryview, at: int, wanted: int
) -> tuple[int, int, bool, int, dict[str, str]] | None:
    """Serialize, opaque, one-way, end and fields of a whole request frame with that code."""
    if len(view) - at < FRAME_PREFIX.size:
        return None
    length, word = FRAME_PREFIX.unpack_from(view, at)
    end = at + 4 + length
    header_at = at + FRAME_PREFIX.size
    header_end = header_at + (word & HEADER_LENGTH_MASK)
    if length > FRAME_BYTES_MAX - 4 or header_end > end or end > len(view):
        return None
    serialize = word >> 24
    try:
        code, _, _, opaque, flag, _, ext = decode_header(
            serialize, bytes(view[header_at:header_end])
        )
    except ProtocolError:
        return None
    if code != wanted or flag & FLAG_RESPONSE:
        return None
    return serialize, opaque, bool(flag & FLAG_ONEWAY), end, ext


def read_pull(view: memoryview, at: int) -> Pull | None:
    """The frame of a pull: serialize, opaque, one-way, end, and its fields by position.

    None when the slow lane has to look at it. Fields: group, topic, queue id, queue offset,
    count, flags, offset to commit, milliseconds to wait, subscription version, subscription,
    expression type.
    """
    found = _read_fields(view, at, CODE_PULL)
    if found is None:
        return None
    serialize, opaque, oneway, end, ext = found
    field = ext.get
    group, topic = field("consumerGroup"), field("topic")
    text, kind, most = field("subscription"), field("expressionType"), field("maxMsgBytes")
    queue_id, count = read_number32(field("queueId")), read_number32(field("maxMsgNums"))
    flags, offset = read_number32(field("sysFlag")), read_number(field("queueOffset"))
    commit, version = read_number(field("commitOffset")), read_number(field("subVersion"))
    wait_ms = read_number(field("suspendTimeoutMillis"))
    if group is None or topic is None or queue_id is None or offset is None or count is None:
        return None
    if flags is None or commit is None or wait_ms is None or version is None:
        return None
    if most is not None and read_number32(most) is None:
        return None
    if (text is not None and is_null(text)) or (kind is not None and is_null(kind)):
        return None
    return (
        *(serialize, opaque, oneway, end, group, topic, queue_id, offset, count, flags),
        *(commit, wait_ms, version, text, kind),
    )


def read_commit(view: memoryview, at: int) -> Commit | None:
    """The frame of an offset commit: serialize, opaque, one-way, end, group, topic, queue, offset.

    None when the slow lane has to look at it.
    """
    found = _read_fields(view, at, CODE_COMMIT)
    if found is None:
        return None
    ext = found[4]
    group, topic = ext.get("consumerGroup"), ext.get("topic")
    queue_id, offset = read_number32(ext.get("queueId")), read_number(ext.get("commitOffset"))
    if group is None or topic is None or queue_id is None or offset is None:
        return None
    return (*found[:4], group, topic, queue_id, offset)
