"""The compiled columns against the law in `pure`, on sound and on damaged bytes."""

from __future__ import annotations

import base64
import os
import random
import struct
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.goldens import Golden, each_golden, frames

from cosmodrome import layout
from cosmodrome.layout import (
    MAGIC_BLANK,
    MAGIC_RECORD,
    MAGIC_RECORD_V2,
    SYS_BORN_V6,
    SYS_COMPRESSED,
    SYS_LZ4,
    SYS_PREPARED,
    SYS_STORE_V6,
    SYS_ZSTD,
)
from cosmodrome.speed.arrow import pure as arrow_pure
from cosmodrome.wire.frame import FrameSplitter
from cosmodrome.wire.message import compress
from cosmodrome.wire.record import Record, encode_record

try:
    from cosmodrome.speed.arrow import native as arrow
except ImportError:
    if os.environ.get("COSMODROME_REQUIRE_NATIVE"):
        raise
    pytest.skip("the compiled twin is not built", allow_module_level=True)

ALL = tuple(arrow_pure.KINDS)
often = settings(max_examples=200, deadline=None)
V4, V6 = bytes((127, 0, 0, 1, 0, 0, 0, 9)), bytes(range(200, 216)) + bytes((255, 255, 0, 9))


def drained(twin: Any, data: bytes, base: int, low: int, high: int, **rest: Any) -> list[Any]:
    """Everything a caller sees of a walk that skips what may be skipped."""
    built = twin.ColumnBuilder(**rest)
    seen: list[Any] = []
    at = 0
    while True:
        at, stop = built.add(data, at, len(data), base=base, low=low, high=high)
        seen.append((at, stop, built.fault, built.fault_size))
        seen.append((built.rows, built.records, built.last_offset))
        if stop == layout.STOP_FULL:
            seen.append(built.take())
        elif stop == layout.STOP_CORRUPT and built.fault_size:
            at += built.fault_size
        else:
            return [*seen, built.take()]


def agree(
    data: bytes, *, base: int = -1, low: int = 0, high: int = (1 << 63) - 1, **rest: Any
) -> list[Any]:
    arguments = {"columns": ALL} | rest
    found = drained(arrow, data, base, low, high, **arguments)
    assert found == drained(arrow_pure, data, base, low, high, **arguments)
    return found


def bodies(golden: Golden) -> Iterator[bytes]:
    """Bodies of all recorded answers; the twins agree about those that hold no records too."""
    for path in golden.captures():
        for row in frames(path):
            for frame in FrameSplitter().feed(base64.b64decode(row["frame_b64"])):
                if frame.body:
                    yield bytes(frame.body)


@each_golden
def test_recorded_stores(golden: Golden) -> None:
    rows = 0
    for path in sorted(golden.path.glob("store*/commitlog/*")):
        data = path.read_bytes()
        for rest in ({}, {"rows_max": 7}, {"skip_unseen": True, "tags": frozenset({"T1", "T2"})}):
            seen = agree(data, base=int(path.name), broker="b", marked="UNIQ_KEY", **rest)
            rows += seen[-1][0]
    assert rows > 100


@each_golden
def test_recorded_pulls(golden: Golden) -> None:
    rows = sum(agree(body)[-1][0] for body in bodies(golden))
    assert rows > 10


def make(
    body: bytes,
    properties: str,
    numbers: tuple[int, int, int],
    times: tuple[int, int],
    sys_flag: int,
    topic: str,
) -> bytes:
    packed = compress(body, sys_flag)
    return encode_record(
        Record(
            0,
            0,
            0,
            numbers[0],
            numbers[1],
            numbers[2],
            77,
            sys_flag,
            times[0],
            V6 if sys_flag & SYS_BORN_V6 else V4,
            times[1],
            V6 if sys_flag & SYS_STORE_V6 else V4,
            3,
            0,
            packed,
            topic,
            properties,
        )
    )


def second(data: bytes) -> bytes:
    """As a record of the second version if its last part says so; else still a fair test."""
    sys_flag = int.from_bytes(data[36:40], "big")
    at = 88 + 12 * (bool(sys_flag & SYS_BORN_V6) + bool(sys_flag & SYS_STORE_V6))
    at += int.from_bytes(data[at - 4 : at], "big")
    head = struct.pack(">ii", len(data) + 1, MAGIC_RECORD_V2)
    return b"".join((head, data[8:at], b"\0", data[at:]))


TIME = st.integers(-(1 << 63), (1 << 63) - 1)
NAMES = st.one_of(st.sampled_from(["TAGS", "KEYS", "UNIQ_KEY", "WAIT", "m"]), st.text(max_size=5))
PROPERTIES = st.one_of(
    st.text(alphabet="\x01\x02aT", max_size=30),
    st.lists(st.tuples(NAMES, st.text(max_size=8)), max_size=8).map(
        lambda pairs: "\x02".join(f"{name}\x01{value}" for name, value in pairs)
    ),
    st.integers(60, 70).map(lambda n: "\x02".join(f"n{i % 66}\x01{i}" for i in range(n))),
)
FLAGS = st.sampled_from(
    [
        0,
        0,
        0,
        SYS_PREPARED,
        SYS_BORN_V6,
        SYS_STORE_V6 | SYS_BORN_V6,
        SYS_COMPRESSED,
        SYS_COMPRESSED | SYS_LZ4,
        SYS_COMPRESSED | SYS_ZSTD,
    ]
)
RECORD = st.builds(
    make,
    st.binary(max_size=60),
    PROPERTIES,
    st.tuples(
        st.integers(-(1 << 31), (1 << 31) - 1),
        st.integers(-(1 << 31), (1 << 31) - 1),
        st.integers(0, 9),
    ),
    st.tuples(TIME, TIME),
    FLAGS,
    st.sampled_from(["t", "topic", "\u20ac", "long" * 30]),
)
RECORDS = st.lists(st.one_of(RECORD, RECORD, RECORD.map(second)), max_size=6)
FILTERS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "columns": st.lists(st.sampled_from(ALL), unique=True),
        "broker": st.sampled_from([None, "", "broker-a"]),
        "check_crc": st.booleans(),
        "rows_max": st.integers(1, 5),
        "bytes_max": st.integers(1, 300),
        "body_bytes_max": st.integers(0, 80),
        "topics": st.frozensets(st.sampled_from(["t", "topic", "\u20ac"])),
        "queue_ids": st.frozensets(st.integers(-5, 5)),
        "tags": st.frozensets(st.text(max_size=3), max_size=20),
        "since_ms": TIME,
        "until_ms": TIME,
        "skip_unseen": st.booleans(),
        "marked": st.sampled_from(["m", "UNIQ_KEY", ""]),
        "low": st.integers(0, 5),
        "high": st.integers(3, 12),
        "base": st.sampled_from([-1, 0, 77, (1 << 63) - 1]),
    },
)


@often
@given(RECORDS, FILTERS)
def test_records_that_are_sound(records: list[bytes], filters: dict[str, Any]) -> None:
    agree(b"".join(records), **filters)


@often
@given(
    RECORDS,
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 255)), max_size=5),
    st.integers(0, 2000),
    FILTERS,
)
def test_records_that_are_damaged(
    records: list[bytes], changes: list[tuple[int, int]], length: int, filters: dict[str, Any]
) -> None:
    data = bytearray(b"".join(records) or b"\0")
    for at, byte in changes:
        data[at % len(data)] = byte
    agree(bytes(data), **filters)
    agree(bytes(data[:length]), **filters)


SAMPLES = (
    make(b"body", "TAGS\x01a\x02KEYS\x01b", (1, 2, 3), (4, 5), 0, "topic"),
    make(b"body" * 20, "UNIQ_KEY\x01a", (1, 2, 3), (4, 5), SYS_COMPRESSED, "topic"),
    make(b"body", "a\x01b\x02a\x01c", (1, 2, 3), (4, 5), SYS_BORN_V6 | SYS_STORE_V6, "t"),
    second(make(b"", "", (1, 2, 3), (4, 5), 0, "topic")),
)


@pytest.mark.parametrize("sample", SAMPLES, ids=("plain", "packed", "v6", "second"))
def test_cut_at_every_byte(sample: bytes) -> None:
    for length in range(len(sample)):
        agree(sample + sample[:length])
        # A record whose size says that it ends there is damaged, not cut.
        agree(length.to_bytes(4, "big") + sample[4:length], check_crc=False)


@pytest.mark.parametrize("sample", SAMPLES, ids=("plain", "packed", "v6", "second"))
def test_every_bit_turned(sample: bytes) -> None:
    for bit in range(8 * len(sample)):
        data = bytearray(sample + sample)
        data[bit >> 3] ^= 1 << (bit & 7)
        agree(bytes(data))
        agree(bytes(data), check_crc=False)


EDGES = (0, 1, 0x5A, 0x5B, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def garbage(chance: random.Random) -> bytes:
    """Records with edges for numbers, parts missing or doubled, bytes of chance."""
    data = bytearray()
    for _ in range(chance.randrange(1, 4)):
        data += chance.choice(SAMPLES)
    for _ in range(chance.randrange(1, 6)):
        at, kind = chance.randrange(len(data)), chance.randrange(6)
        if kind == 0:
            data[at] = chance.randrange(256)
        elif kind == 1:
            width = chance.choice((1, 2, 4))
            data[at : at + width] = struct.pack(">I", chance.choice(EDGES))[-width:]
        elif kind == 2:
            del data[at : at + chance.choice((1, 2, 8, 50))]
        elif kind == 3:
            data[at:at] = chance.randbytes(chance.choice((1, 2, 8, 50)))
        elif kind == 4:
            magic = chance.choice((MAGIC_RECORD, MAGIC_RECORD_V2, MAGIC_BLANK, 0))
            data[4:8] = struct.pack(">i", magic)
        else:
            data[at : at + 8] = struct.pack(">q", chance.choice((-1, 0, 1 << 62)))
        if not data:
            data = bytearray(b"\0")
    return bytes(data)


def test_garbage() -> None:
    chance = random.Random(11)
    rounds = int(os.environ.get("GARBAGE_ROUNDS", "3000"))
    for _ in range(rounds):
        data = garbage(chance)
        agree(data, check_crc=chance.random() < 0.3, base=chance.choice((-1, -1, -1, 77)))
        agree(chance.randbytes(chance.randrange(200)))


@pytest.mark.parametrize("rows_max", [1, 255, 256, 257, 1_000, 8_192])
def test_batches_of_many_sizes_out_of_one_builder(rows_max: int) -> None:
    """Room for rows is made for many of them at once, by the size of the batch before."""
    texts = ("", "TAGS\x01t", "KEYS\x01k\x02UNIQ_KEY\x01id", "own\x01value\x02TAGS\x01u")
    data = b"".join(
        make(bytes(n % 5), texts[n % 4], (n % 3, n, n), (n, n), 0, f"T{n % 2}")
        for n in range(1_100)
    )
    for columns in (ALL, ("queue_id", "tags"), ("properties",), ("store_size", "broker")):
        seen = agree(data, columns=columns, rows_max=rows_max, broker="b")
        assert sum(part[0] for part in seen if isinstance(part[1], dict)) == 1_100
    twins = [twin.ColumnBuilder(ALL) for twin in (arrow, arrow_pure)]
    for size in (len(data), 0, len(data) // 7, len(data), 100):
        found = []
        for built in twins:
            built.add(data, 0, size)
            found.append(built.take())
        assert found[0] == found[1]
