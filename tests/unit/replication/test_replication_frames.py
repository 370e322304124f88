"""Bytes of both streams: cut anywhere, within limits, and named when they are wrong."""

from __future__ import annotations

import contextlib
import random
import struct
from typing import Any

import pytest
from tests.unit.replication.pair_kit import who

from cosmodrome.errors import ProtocolError
from cosmodrome.replication import frames


def joined(said: list[Any]) -> list[Any]:
    """Runs as plain (offset, bytes), consecutive ones as one: cuts must not show."""
    found: list[Any] = []
    for item in said:
        if isinstance(item, frames.Run):
            data = b"".join(bytes(part) for part in item.parts)
            assert len(data) == item.size
            last = found[-1] if found else None
            if isinstance(last, list) and last[0] + len(last[1]) == item.offset:
                last[1] += data
                continue
            found.append([item.offset, data])
        else:
            found.append(item)
    return found


def cut(data: bytes, chance: random.Random) -> list[bytes]:
    pieces = []
    while data:
        size = chance.choice((1, 2, 5, 13, 40, 1000))
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def fed(reader: Any, pieces: list[bytes]) -> list[Any]:
    """Every read uses the same buffer, as a link does."""
    said: list[Any] = []
    buffer = bytearray(max(map(len, pieces), default=0))
    for piece in pieces:
        buffer[: len(piece)] = piece
        for item in reader.feed(memoryview(buffer)[: len(piece)]):
            if isinstance(item, frames.Run):
                item.parts = [memoryview(bytes(part)) for part in item.parts]
            said.append(item)
    return joined(said)


BEGIN = frames.Begin(version=1, epoch=0, first=0, end=900, begin=100)
FROM_MASTER = [
    frames.begin(BEGIN),
    frames.data_head(0, 100, 90, 7) + b"abcdefg",
    frames.data_head(0, 107, 100, 3) + b"hij",
    frames.beat(0, 900, 12345),
    *frames.states(lambda: 110, "topics", {"a": {"x": 1}, "b": None}, whole=True),
    frames.data_head(0, 500, 100, 2) + b"kl",
    frames.data_head(0, 400, 100, 2) + b"mn",
    frames.refused(frames.Refusal(why="because", remedy="do this", marks=((9, 1, 7), (4, 0, 5)))),
]
HEARD = [
    BEGIN,
    [100, b"abcdefghij"],
    frames.Beat(0, 900, 12345),
    frames.State(offset=110, table="topics", rows={"a": {"x": 1}, "b": None}, whole=True),
    [500, b"kl"],
    [400, b"mn"],
    frames.Refusal(why="because", remedy="do this", marks=((9, 1, 7), (4, 0, 5))),
]


def test_both_greetings_are_negative_and_differ() -> None:
    assert frames.HELLO < 0 and frames.WELCOME < 0 and frames.HELLO != frames.WELCOME


def test_the_bytes_are_those_of_the_design() -> None:
    assert frames.data_head(1, 2, 3, 4) == struct.pack(">BIqqq", 4, 28, 1, 2, 3)
    assert frames.ack(1, 2) == struct.pack(">BIqq", 6, 16, 1, 2)
    assert frames.beat(1, 2, 3) == struct.pack(">BIqqq", 7, 24, 1, 2, 3)
    assert frames.classic_head(1, 2) == struct.pack(">qi", 1, 2)
    refusal = frames.Refusal(why="w", remedy="r")
    assert frames.refused(refusal) == b'\x03\x00\x00\x00\x18{"why":"w","remedy":"r"}'


def test_a_master_is_heard_in_one_read_as_in_many() -> None:
    stream = b"".join(FROM_MASTER)
    said = frames.MasterFrames().feed(memoryview(stream))
    assert joined(said) == HEARD
    assert len(said) == len(HEARD)  # frames that follow each other are one run
    for seed in range(50):
        assert fed(frames.MasterFrames(), cut(stream, random.Random(seed))) == HEARD
    assert fed(frames.MasterFrames(), [bytes((byte,)) for byte in stream]) == HEARD


def test_a_classic_master_is_heard_in_one_read_as_in_many() -> None:
    stream = b"".join(
        frames.classic_head(offset, len(data)) + data
        for offset, data in [(0, b""), (0, b"abc"), (3, b"d" * 50), (53, b""), (10, b"e")]
    )
    heard = [frames.Beat(0, 0, -1), [0, b"abc" + b"d" * 50], frames.Beat(0, 53, -1), [10, b"e"]]
    assert joined(frames.ClassicFrames().feed(memoryview(stream))) == heard
    for seed in range(50):
        assert fed(frames.ClassicFrames(), cut(stream, random.Random(seed))) == heard


def test_a_slave_is_heard_in_one_read_as_in_many() -> None:
    stream = who(end=7) + frames.ack(0, 5) + frames.beat(0, 6, 7) + frames.ack(0, 8)
    whole = frames.SlaveFrames().feed(stream)
    assert isinstance(whole[0], frames.Who) and whole[0].end == 7
    assert whole[1:] == [frames.Ack(0, 5), frames.Beat(0, 6, 7), frames.Ack(0, 8)]
    for seed in range(50):
        reader = frames.SlaveFrames()
        pieces = cut(stream, random.Random(seed))
        assert [item for piece in pieces for item in reader.feed(piece)] == whole


def test_reports_are_numbers_of_eight_bytes() -> None:
    reader = frames.Reports()
    assert reader.feed(b"") == ()
    assert reader.feed(struct.pack(">qq", 1, 2) + b"\0\0\0") == (1, 2)
    assert reader.feed(b"\0\0\0\0\x09" + b"\xff") == (9,)
    assert reader.feed(b"\xff" * 7) == (-1,)


def test_large_tables_are_divided_and_joined() -> None:
    rows = {f"r{number}": "v" * 3000 for number in range(2500)}
    parts = list(frames.states(lambda: 5, "t", rows, whole=True))
    assert len(parts) > 3 and all(len(part) <= frames.STATE_BYTES for part in parts)
    (state,) = frames.MasterFrames().feed(memoryview(b"".join(parts)))
    assert state == frames.State(offset=5, table="t", rows=rows, whole=True)
    assert list(frames.states(lambda: 5, "t", {}, whole=False)) == []
    assert len(list(frames.states(lambda: 5, "t", {}, whole=True))) == 1


def test_rows_are_never_said_to_be_older_than_they_are() -> None:
    """They are sent as they are, however long after they were gathered."""
    end, row = 10, {"0": 1}
    rows = {"row": row, **{f"r{number}": 0 for number in range(2000)}}
    parts = frames.states(lambda: end, "t", rows, whole=True)
    end, row["0"] = 20, 2
    reader = frames.MasterFrames()
    assert reader.feed(memoryview(next(parts))) == []
    end = 30
    (state,) = reader.feed(memoryview(b"".join(parts)))
    assert isinstance(state, frames.State)
    assert (state.rows["row"], state.offset) == ({"0": 2}, 30)


def test_a_row_that_fits_no_frame_is_named() -> None:
    with pytest.raises(ProtocolError, match="'big' of the table t"):
        list(frames.states(lambda: 5, "t", {"big": "v" * (17 << 20)}, whole=False))


def head(kind: int, size: int) -> bytes:
    return struct.pack(">BI", kind, size)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (head(0, 5), "kind 0"),
        (head(1, 5), "kind 1"),
        (head(6, 16), "kind 6"),
        (head(255, 5), "kind 255"),
        (head(4, 24), "DATA of 24"),
        (head(4, 24 + (2 << 20) + 1), "DATA of 2097177"),
        (head(5, (16 << 20) + 1), "STATE of 16777217"),
        (head(7, 23), "BEAT of 23"),
        (head(2, 2) + b"{]", "BEGIN that cannot be read"),
        (head(2, 2) + b"{}", "BEGIN that cannot be read"),
        (head(5, 12) + b'{"offset":"\xff', "STATE that cannot be read"),
        (head(3, 9) + b'{"why":1}', "REFUSED that cannot be read"),
    ],
)
def test_what_a_master_cannot_say(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        frames.MasterFrames().feed(memoryview(data))
    with pytest.raises(ProtocolError, match=text):
        fed(frames.MasterFrames(), [bytes((byte,)) for byte in data + b"\0"])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (head(4, 30), "kind 4"),
        (head(1, (64 << 10) + 1), "WHO of 65537"),
        (head(6, 17), "ACK of 17"),
        (head(1, 2) + b"[]", "WHO that cannot be read"),
        (head(1, 60_000) + b"[" * 60_000, "WHO that cannot be read"),
    ],
)
def test_what_a_slave_cannot_say(data: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        frames.SlaveFrames().feed(data)


@pytest.mark.parametrize(("offset", "size"), [(0, -1), (0, (4 << 20) + 1), (-1, 0), (-5, 10)])
def test_what_a_classic_master_cannot_say(offset: int, size: int) -> None:
    with pytest.raises(ProtocolError, match=f"{size} bytes at offset {offset}"):
        frames.ClassicFrames().feed(memoryview(frames.classic_head(offset, size)))


def test_a_table_has_a_bound_and_is_not_mixed_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    part = frames._json(
        frames.STATE, frames.State(offset=0, table="t", rows={"a": 1}, whole=True, more=True)
    )
    (other,) = frames.states(lambda: 0, "u", {"a": 1}, whole=True)
    with pytest.raises(ProtocolError, match="rows of the table u"):
        frames.MasterFrames().feed(memoryview(part + other))
    monkeypatch.setattr(frames, "TABLE_BYTES_MAX", 1000)
    with pytest.raises(ProtocolError, match="the table t takes more"):
        frames.MasterFrames().feed(memoryview(part * 20))


def test_garbage_is_an_error_or_waits_for_more() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        data = chance.randbytes(chance.randint(1, 400))
        for reader in (frames.MasterFrames(), frames.ClassicFrames()):
            with contextlib.suppress(ProtocolError):
                reader.feed(memoryview(data))
        with contextlib.suppress(ProtocolError):
            frames.SlaveFrames().feed(data)
