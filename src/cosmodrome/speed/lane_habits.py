"""What producers repeat: JSON headers that differ in nothing but time, unique key and opaque.

Theory of operation. When a header was read and taken in the ordinary way, it is cut at those three
values, and its parts are put together again around other values and decoded: if exactly these
values come out, and the rest unchanged, then the parts mean the same around any values, as long as
they are digits and letters. From then on a header of the same length with the same parts at the
same places is known without decoding it. What it means is the business of whoever keeps habits.

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

# Whether the opaque comes behind the fields, and the parts: around the time, behind the unique
# key, and on the other side of the opaque.
Key = tuple[bool, bytes, bytes, bytes, bytes]
Cut = tuple[Key, bytes, bytes, bytes]  # and time, unique key, opaque
# Where the three values begin and end, in the order of the header; whether the opaque is the last.
Places = tuple[int, int, int, int, int, int, bool]

_OPAQUE = b'"opaque":'
_BORN = b'"g":"'
_UNIQUE = b"UNIQ_KEY\\u0001"
_PAIR_END = b"\\u0002"
# Values that no client sends.
_PROOFS = ((b"7", b"x", b"3"), (b"987654321098765432", b"0Az9" * 16, b"2147483601"))


def cut(header: bytes) -> Cut:
    """The parts of a header; whatever is missing is empty."""
    front, _, rest = header.partition(_OPAQUE)
    opaque, _, rest = rest.partition(b",")
    behind = _BORN in front
    if behind:
        front, rest = rest, front
    before, _, rest = rest.partition(_BORN)
    born, _, rest = rest.partition(b'"')
    between, _, rest = rest.partition(_UNIQUE)
    unique, _, rest = rest.partition(_PAIR_END)
    return (behind, before, between, rest, front), born, unique, opaque


def join(key: Key, born: bytes, unique: bytes, opaque: bytes) -> bytes:
    """The header that has these parts."""
    behind, before, between, after, other = key
    fields = b"".join((before, _BORN, born, b'"', between, _UNIQUE, unique, _PAIR_END, after))
    parts = (fields, other) if behind else (other, fields)
    return b"".join((parts[0], _OPAQUE, opaque, b",", parts[1]))


def places(found: Cut) -> Places:
    """Where the values of a header lie."""
    (behind, before, between, after, other), born, unique, opaque = found
    born_at = len(before) + len(_BORN)
    unique_at = born_at + len(born) + 1 + len(between) + len(_UNIQUE)
    fields_bytes = unique_at + len(unique) + len(_PAIR_END) + len(after)
    opaque_at = len(_OPAQUE) + (fields_bytes if behind else len(other))
    if not behind:
        shift = opaque_at + len(opaque) + 1
        born_at, unique_at = born_at + shift, unique_at + shift
    ends = [(at, at + len(value)) for at, value in ((born_at, born), (unique_at, unique))]
    opaque_ends = (opaque_at, opaque_at + len(opaque))
    first, second, third = (*ends, opaque_ends) if behind else (opaque_ends, *ends)
    return (*first, *second, *third, behind)


def repeats(key: Key, header: bytes, unique: bytes) -> bool:
    """Whether the parts of this header mean the same around any values."""
    try:
        known = decode_header(SERIALIZE_JSON, header)
        for born, other, opaque in _PROOFS:
            there = decode_header(SERIALIZE_JSON, join(key, born, other, opaque))
            if there != _with(known, born, unique, other, opaque):
                return False
    except ProtocolError:
        return False
    return True


def _with(known: Header, born: bytes, unique: bytes, other: bytes, opaque: bytes) -> Header:
    """What a header is when its time, unique key and opaque are others."""
    code, language, version, _, flag, remark, ext = known
    text = ext.get("i", "")
    mark = f"UNIQ_KEY\x01{unique.decode()}\x02"
    if text.count(mark) == 1:
        text = text.replace(mark, f"UNIQ_KEY\x01{other.decode()}\x02")
    changed = {**ext, "g": born.decode(), "i": text}
    return code, language, version, int(opaque), flag, remark, changed
