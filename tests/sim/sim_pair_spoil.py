"""Bits that flip on the way from a master, where a slave can find it.

A record has a checksum of its body only. What else can be found is found by structure: the magic
number and the record's own log offset. So a bit flips in one of these. A flip in flags, times,
hosts, queue numbers, topic or properties, in the head of a frame or in rows of tables cannot be
found by anybody, and those bytes are left alone: the network's own checksums guard them. So are
the sizes in a record, which may leave a slave waiting for bytes until the next ones come.
"""

from __future__ import annotations

import random
import struct

MAGIC = b"\xda\xa3\x20\xa7"
LOG_OFFSET_AT = 28
BODY_SIZE_AT = 84
BODY_AT = 88
DATA = 4
DATA_HEAD_BYTES = 29
KINDS = range(1, 8)


def spoiled(data: bytes, chance: random.Random) -> bytes | None:
    """`data` with one bit flipped in some record, None when no record is whole in it.

    It has to begin with a frame: what a master writes at once are whole frames.
    """
    log, at_of = log_bytes(data)
    places = []
    at = log.find(MAGIC)
    while at >= 4:
        start = at - 4
        size = int.from_bytes(log[start:at], "big")
        if start + size <= len(log) and size > BODY_AT:
            body = int.from_bytes(log[start + BODY_SIZE_AT : start + BODY_AT], "big")
            places += [at, start + LOG_OFFSET_AT + chance.randrange(8)]
            if body:
                places.append(start + BODY_AT + chance.randrange(body))
        at = log.find(MAGIC, at + 4)
    if not places:
        return None
    changed = bytearray(data)
    changed[at_of[chance.choice(places)]] ^= 1 << chance.randrange(8)
    return bytes(changed)


def log_bytes(data: bytes) -> tuple[bytes, list[int]]:
    """Bytes of the log in these frames, and where each of them stands in `data`."""
    log = b""
    at_of: list[int] = []
    at = 0
    while at + 5 <= len(data) and data[at] in KINDS:
        kind, size = struct.unpack_from(">BI", data, at)
        if kind == DATA:
            first, end = at + DATA_HEAD_BYTES, min(len(data), at + 5 + size)
            log += data[first:end]
            at_of += range(first, end)
        at += 5 + size
    return log, at_of
