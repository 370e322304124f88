"""Requests that are signed after they were written, so that their header keeps its form."""

from __future__ import annotations

import json
import re
import struct

from cosmodrome.errors import ProtocolError
from cosmodrome.layout import ACCESS_KEY, SIGNATURE
from cosmodrome.wire.frame import decode
from cosmodrome.wire.signature import signature

KEY, SECRET = "the-key", b"the-secret"


def with_field(frame: bytes, name: str, value: str) -> bytes:
    """The frame with one field more, before all others; unchanged where there are none."""
    word = int.from_bytes(frame[4:8], "big")
    header_end = 8 + (word & 0xFFFFFF)
    header, body = frame[8:header_end], frame[header_end:]
    if word >> 24:
        at = 17 + int.from_bytes(header[13:17], "big") + 4
        text = name.encode(), value.encode()
        pair = b"".join(
            (struct.pack(">h", len(text[0])), text[0], struct.pack(">i", len(text[1])), text[1])
        )
        fields = struct.pack(">i", len(header) - at + len(pair))
        header = header[: at - 4] + fields + pair + header[at:]
    else:
        begin = header.find(b"{", header.find(b'"extFields"')) + 1
        if b'"extFields"' not in header or not begin or header[begin : begin + 1] == b"}":
            return frame
        pair = f"{json.dumps(name)}:{json.dumps(value)},".encode()
        header = header[:begin] + pair + header[begin:]
    head = struct.pack(">II", 4 + len(header) + len(body), (word >> 24) << 24 | len(header))
    return head + header + body


def unsigned(frame: bytes) -> bytes:
    """A JSON frame without what the C++ client puts in when it has no credentials."""
    header_end = 8 + int.from_bytes(frame[5:8], "big")
    header = re.sub(rb'"(AccessKey|Signature)":"[^"]*",', b"", frame[8:header_end])
    body = frame[header_end:]
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


def signed(frame: bytes, key: str = KEY, secret: bytes = SECRET) -> bytes:
    """The same request, signed; unchanged when nobody could read it."""
    known = with_field(frame, ACCESS_KEY, key)
    try:
        read = decode(known[4:])
    except ProtocolError:
        return frame
    return with_field(known, SIGNATURE, signature(secret, read.ext, read.body))


def cut(data: bytes) -> list[bytes]:
    """The frames of a stream."""
    found, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        found.append(data[at:end])
        at = end
    return found
