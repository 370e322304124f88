"""Damaged requests: what the lane takes of them, the slow lane takes the same way."""

from __future__ import annotations

import asyncio
import random
import struct
from pathlib import Path

import pytest
from tests.twins import test_twins_lanes as lanes

from cosmodrome.errors import ProtocolError
from cosmodrome.wire.frame import decode

pytestmark = pytest.mark.usefixtures("lane_core")

ROUNDS = 250
EDGES = (0, 1, 3, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0xFFFFFF, 0x7FFFFFFF, 0x80000000)
WORDS = (
    b'"',
    b"\\",
    b"\\u",
    b"\\ud800",
    b"\\u0000",
    b"{",
    b"}",
    b",",
    b":",
    b"null",
    b"true",
    b" ",
    b"-",
    b"-0",
    b"00",
    b"9" * 20,
    b"1e5",
    b"1.0",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\0",
    b"\x01",
    b"\x02",
    b"DELAY\x011",
    b"DELAY\\u00011",
    b"TRAN_MSG\x01true",
    b"TIMER_",
    b"CLUSTER\x01",
    b"WAIT\x01false\x02",
    b"WAIT\\u0001false",
    b'"code":310,',
    b'"flag":1,',
    b'"extFields":{},',
    b'"opaque":7,',
    b'"language":"XX",',
    b'"language":99,',
    b'"version":-1,',
)
FIELDS = (
    b'"b":"Multi"',
    b'"e":"3"',
    b'"e":2',
    b'"i":"TAGS\\u0001Z"',
    b'"i":null',
    b'"a":""',
    b'"i":"q\\u0001\\"\\\\\\/\\b\\f\\n\\r\\t\\ud83d\\ude80"',
    b'"m":"true"',
    b'"x":"\\u0041"',
    b'"queueId":"0"',
    b'"topic":"Plain"',
    b'"commitOffset":"-1"',
    b'"sysFlag":"4"',
)


def dented(chance: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if not out:
            break
        at, kind = chance.randrange(len(out)), chance.randrange(7)
        if kind == 0:
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            out[at] = chance.randrange(256)
        elif kind == 2:
            del out[at : at + chance.choice((1, 2, 5, 50))]
        elif kind == 3:
            out[at:at] = chance.choice(WORDS)
        elif kind == 4:
            word = chance.choice(WORDS)
            out[at : at + len(word)] = word
        elif kind == 5:
            width = chance.choice((2, 4))
            out[at : at + width] = struct.pack(">I", chance.choice(EDGES))[-width:]
        else:
            other = chance.randrange(len(out))
            out[at:at] = out[other : other + chance.choice((1, 5, 20, 100))]
    return bytes(out)


def damaged(chance: random.Random, frame: bytes) -> bytes:
    if chance.random() < 0.1:
        return dented(chance, frame)  # its lengths too
    (word,) = struct.unpack_from(">I", frame, 4)
    body_at = 8 + (word & 0xFFFFFF)
    header, body = frame[8:body_at], frame[body_at:]
    what = chance.randrange(4)
    if what == 0:
        header = dented(chance, header)
    elif what == 1:
        body = dented(chance, body)
    elif header.endswith(b"}}"):
        header = header[:-2] + b"," + chance.choice(FIELDS) + header[-2:]
    word = word & 0xFF000000 | len(header)
    return struct.pack(">II", 4 + len(header) + len(body), word) + header + body


def reads(chance: random.Random, data: bytes) -> list[bytes]:
    """The stream in pieces; what comes before a broken frame is served before that is seen."""
    cuts = {chance.randrange(len(data)) for _ in range(chance.choice((0, 0, 1, 3)))}
    cuts |= {first_broken(data), len(data), *range(200_000, len(data), 200_000)}
    pieces, at = [], 0
    for cut in sorted(cuts - {0}):
        pieces.append(data[at:cut])
        at = cut
    return pieces


def first_broken(data: bytes) -> int:
    at = 0
    while len(data) - at >= 4:
        end = at + 4 + struct.unpack_from(">I", data, at)[0]
        if not at + 8 <= end <= at + (16 << 20):
            return at
        if end > len(data):
            break
        try:
            decode(data[at + 4 : end])
        except ProtocolError:
            return at
        at = end
    return len(data)


async def answers(side: lanes.Side, pieces: list[bytes]) -> tuple[bool, list[bytes]]:
    """Over a connection of its own: whether that was ended, and all replies."""
    side.wire = lanes.Wire(lanes.PEER)
    side.connection = side.broker._server._connection()
    side.connection.connection_made(side.wire)
    for piece in pieces:
        if not side.wire.ended:
            await side.feed(piece)
    for _ in range(20):
        if side.connection.in_flight:
            await asyncio.sleep(0.001)
    side.connection.connection_lost(None)
    out, frames, at = bytes(side.wire.out), [], 0
    while at < len(out):
        end = at + 4 + struct.unpack_from(">I", out, at)[0]
        frames.append(out[at:end])
        at = end
    return side.wire.ended, sorted(frames)


@pytest.mark.parametrize("seed", range(2))
async def test_damaged_requests(tmp_path: Path, seed: int) -> None:
    slow = lanes.Side(tmp_path / "slow", lanes.env(seed), fast=False)
    fast = lanes.Side(tmp_path / "fast", lanes.env(seed), fast=True)
    async with slow, fast:
        for number in range(ROUNDS):
            chance = random.Random(f"{seed}-{number}")
            frames = [chance.choice(lanes.KINDS)(chance, 1000 + at) for at in range(3)]
            data = b"".join(
                damaged(chance, one) if chance.random() < 0.5 else one for one in frames
            )
            pieces = reads(chance, data)
            assert await answers(fast, pieces) == await answers(slow, pieces), number
        assert fast.store._log.end == slow.store._log.end > 50_000
        wanted, found = slow.counted(), fast.counted()
        assert found == wanted
        assert slow.dispatched > ROUNDS and fast.dispatched < 0.9 * slow.dispatched
    assert fast.files() == slow.files()
