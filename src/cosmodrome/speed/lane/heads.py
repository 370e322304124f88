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
from cosmodrome.layout import CODE_SEND
from cosmodrome.speed.core.pure import decode_header

_Int32 = Annotated[int, msgspec.Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
_NUMBER = re.compile(r"0*[0-9]{1,18}|-0*[1-9][0-9]{0,17}", re.ASCII)
_LONG_NAMES = (
    "producerGroup",
    "topic",
    "defaultTopic",
    "defaultTopicQueueNums",
    "queueId",
    "sysFlag",
    "bornTimestamp",
    "flag",
    "properties",
    "reconsumeTimes",
    "unitMode",
    "maxReconsumeTimes",
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
