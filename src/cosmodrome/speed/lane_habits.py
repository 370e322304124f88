"""What producers repeat: headers that differ in nothing but time, unique key and opaque.

Theory of operation. When a header was read and taken in the ordinary way, those three values are
replaced by others and the result is decoded: if exactly these values come out, and the rest
unchanged, then the text around them means the same around any values of the same lengths, as long
as they are digits and letters. From then on a header of the same length with the same text at
the same places is known without decoding it. What it means is the business of whoever keeps habits.

Learning costs as much as several headers, so it is paid from credit that recognised headers earn
and others cost: where nothing repeats, hardly anything is tried.
"""

from __future__ import annotations

from cosmodrome.errors import ProtocolError
from cosmodrome.layout import SERIALIZE_JSON
from cosmodrome.speed.pure import Header, decode_header

HEADER_BYTES_MAX = 2048
CREDIT_MAX = 256
LEARN_COST = 8
REST_COUNT = 1000  # buffers until it is tried again where nothing repeated

# Where the three values begin and end, in the order of the header; whether the opaque is the last,
# otherwise it is the first.
Places = tuple[int, int, int, int, int, int, bool]

_BINARY_OPAQUE = (5, 9)
_BINARY_BORN = b"\0\1g\0\0\0"  # name and most of the length of a value
_BORN_DIGITS_MAX = 18
_OPAQUE_DIGITS_MAX = 10


def places(serialize: int, header: bytes) -> Places | None:
    """Where the values of a header seem to lie; None when it is no such header."""
    if serialize == SERIALIZE_JSON:
        opaque = _span(header, b'"opaque":', b",")
        born = _span(header, b'"g":"', b'"')
        unique = _span(header, b"UNIQ_KEY\\u0001", b"\\u0002")
    else:
        opaque = _BINARY_OPAQUE
        born_at = header.find(_BINARY_BORN) + len(_BINARY_BORN) + 1
        born = (born_at, born_at + header[born_at - 1]) if born_at < len(header) else (0, 0)
        unique = _span(header, b"UNIQ_KEY\1", b"\2")
    if not header[slice(*born)].isdigit() or not header[slice(*unique)].isalnum():
        return None
    if born[1] - born[0] > _BORN_DIGITS_MAX or unique[0] < born[1]:
        return None
    if serialize == SERIALIZE_JSON:
        text = header[slice(*opaque)]
        if not text.isdigit() or len(text) > _OPAQUE_DIGITS_MAX:
            return None
    if opaque[0] >= unique[1]:
        return (*born, *unique, *opaque, True)
    return (*opaque, *born, *unique, False) if opaque[1] <= born[0] else None


def repeats(serialize: int, header: bytes, where: Places) -> bool:
    """Whether the text around the values means the same around others."""
    a, b, c, d, e, f, behind = where
    unique = header[c:d] if behind else header[e:f]
    try:
        known = decode_header(serialize, header)
        for letters, digits in ((b"0Az9", b"1234567890"), (b"x7Y", b"1098765432")):
            values = []
            for index, (start, end) in enumerate(((a, b), (c, d), (e, f))):
                text = letters if index == (1 if behind else 2) else digits
                values.append((text * (end - start))[: end - start])
            born, other, opaque = values if behind else (values[1], values[2], values[0])
            there = header[:a] + values[0] + header[b:c] + values[1] + header[d:e] + values[2]
            number = int(opaque) if serialize == SERIALIZE_JSON else int.from_bytes(opaque, "big")
            wanted = _with(known, born, unique, other, number)
            if wanted is None or decode_header(serialize, there + header[f:]) != wanted:
                return False
    except ProtocolError:
        return False
    return True


def _span(header: bytes, mark: bytes, stop: bytes) -> tuple[int, int]:
    """From behind a mark to the next stop; nothing when either is missing."""
    found = header.find(mark)
    start = found + len(mark)
    end = header.find(stop, start)
    return (start, end) if found >= 0 and end >= 0 else (0, 0)


def _with(known: Header, born: bytes, unique: bytes, other: bytes, opaque: int) -> Header | None:
    """What a header is when its time, unique key and opaque are others."""
    code, language, version, _, flag, remark, ext = known
    text = ext.get("i", "")
    mark = f"UNIQ_KEY\x01{unique.decode()}\x02"
    if text.count(mark) != 1 or "g" not in ext:
        return None
    text = text.replace(mark, f"UNIQ_KEY\x01{other.decode()}\x02")
    changed = {**ext, "g": born.decode(), "i": text}
    return code, language, version, opaque, flag, remark, changed
