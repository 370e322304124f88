"""For all inputs: round trips come back, any cut of a stream gives the same frames, and garbage
raises nothing but ProtocolError."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmodrome import speed
from cosmodrome.errors import ProtocolError
from cosmodrome.speed.core import pure
from cosmodrome.wire.frame import Frame, FrameSplitter, decode, encode
from cosmodrome.wire.message import (
    compress,
    decompress,
    format_properties,
    offset_message_id,
    parse_offset_message_id,
    parse_properties,
)
from cosmodrome.wire.record import decode_record, iter_records
from cosmodrome.wire.session import Session

quiet = settings(max_examples=150, deadline=None)

INT16 = st.integers(-(1 << 15), (1 << 15) - 1)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TEXT = st.text(max_size=20)
WORD = st.text(min_size=1, max_size=20)
FRAME = st.builds(
    Frame,
    code=INT16,
    opaque=INT32,
    flag=INT32,
    ext=st.dictionaries(WORD, WORD, max_size=5),
    body=st.binary(max_size=60),
    remark=st.none() | WORD,
    version=INT16,
    language=st.integers(0, 13),
    serialize=st.integers(0, 1),
)
HOST = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)
PLAIN = st.text(st.characters(exclude_characters="\x01\x02"), min_size=1, max_size=12)


@quiet
@given(FRAME)
def test_a_frame_comes_back(frame: Frame) -> None:
    assert decode(encode(frame)[4:]) == frame


@quiet
@given(st.lists(FRAME, max_size=6), st.lists(st.integers(1, 200), min_size=1, max_size=30))
def test_frames_do_not_depend_on_how_they_arrive(frames: list[Frame], sizes: list[int]) -> None:
    data = b"".join(map(encode, frames))
    splitter = FrameSplitter()
    got: list[Frame] = []
    at = turn = 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        got += splitter.feed(data[at : at + size])
        at += size
        turn += 1
    assert got == frames
    assert splitter.pending_bytes == 0


@quiet
@given(st.integers(0, 255), st.binary(max_size=120))
@pytest.mark.parametrize("flavour", [speed, pure], ids=["chosen", "pure"])
def test_garbage_headers(flavour: Any, serialize: int, data: bytes) -> None:
    with suppress(ProtocolError):
        code, language, *_, remark, ext = flavour.decode_header(serialize, data)
        assert -(1 << 31) <= code < 1 << 31
        assert 0 <= language < len(speed.LANGUAGES)
        assert remark is None or remark.encode()
        for name, value in ext.items():
            name.encode()
            value.encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@quiet
@given(
    st.fixed_dictionaries(
        {"code": INT32 | JSON},
        optional={
            "extFields": JSON | st.dictionaries(TEXT, JSON, max_size=4),
            "language": JSON,
            "remark": JSON,
            "opaque": JSON,
            "flag": JSON,
            "version": JSON,
            "other": JSON,
        },
    )
)
@pytest.mark.parametrize("flavour", [speed, pure], ids=["chosen", "pure"])
def test_strange_json_headers(flavour: Any, header: dict[str, Any]) -> None:
    with suppress(ProtocolError):
        ext = flavour.decode_header(0, json.dumps(header).encode())[6]
        assert all(type(value) is str for value in ext.values())


@quiet
@given(st.binary(max_size=200))
def test_garbage_streams(data: bytes) -> None:
    with suppress(ProtocolError):
        FrameSplitter().feed(data)
    with suppress(ProtocolError):
        Session().receive(len(data).to_bytes(4, "big") + data)


@quiet
@given(st.lists(FRAME, min_size=1, max_size=3), st.integers(0, 1 << 20), st.integers(0, 255))
def test_damaged_streams(frames: list[Frame], at: int, byte: int) -> None:
    data = bytearray(b"".join(map(encode, frames)))
    data[at % len(data)] = byte
    with suppress(ProtocolError):
        FrameSplitter().feed(data)


RECORD = st.tuples(
    INT64,
    INT64,
    INT64,
    st.binary(max_size=127),
    INT32,
    INT32,
    INT32,
    INT64,
    HOST,
    HOST,
    INT32,
    INT64,
    st.binary(max_size=60),
    st.binary(max_size=60),
)


@quiet
@given(RECORD)
def test_a_record_comes_back(fields: tuple[Any, ...]) -> None:
    out = bytearray()
    size = speed.encode_record(out, *fields)
    record = decode_record(out)
    assert record.size == size == len(out)
    assert (record.log_offset, record.queue_offset, record.store_ms) == fields[:3]
    assert (record.queue_id, record.flag) == fields[4:6]
    assert record.sys_flag & ~0x30 == fields[6] & ~0x30
    assert (record.born_ms, record.born_host, record.store_host) == fields[7:10]
    assert (record.reconsume_times, record.prepared_offset, record.body) == fields[10:13]
    assert record.topic == fields[3].decode("utf-8", "replace")
    assert record.properties == fields[13].decode("utf-8", "replace")
    assert record.body_is_intact()


@quiet
@given(RECORD, st.integers(0, 1 << 16), st.integers(0, 255))
def test_the_walk_and_the_decoder_accept_the_same_records(
    fields: tuple[Any, ...], at: int, byte: int
) -> None:
    out = bytearray()
    speed.encode_record(out, 0, *fields[1:])
    out[at % len(out)] = byte
    entries, _, why = speed.walk(memoryview(out), 0, 0, len(out), False, 1)
    try:
        record = decode_record(out)
    except ProtocolError:
        assert why != speed.WALK_MORE
        return
    good = record.size == len(out) and record.log_offset == 0
    assert (why == speed.WALK_MORE and len(entries) == 1) == good


@quiet
@given(st.binary(max_size=300))
def test_garbage_records(data: bytes) -> None:
    with suppress(ProtocolError):
        list(iter_records(data))
    entries, at, why = speed.walk(memoryview(data), 0, 0, len(data), True, 10)
    assert 0 <= at <= len(data)
    assert sum(entry[1] for entry in entries) == at
    assert why in (speed.WALK_MORE, speed.WALK_BLANK, speed.WALK_EMPTY, speed.WALK_CORRUPT)


@quiet
@given(st.dictionaries(PLAIN, PLAIN, max_size=5))
def test_properties_come_back(pairs: dict[str, str]) -> None:
    text = format_properties(pairs)
    assert parse_properties(text) == pairs
    assert parse_properties(text + "\x02") == pairs


@quiet
@given(HOST, INT64)
def test_offset_message_ids_come_back(host: bytes, offset: int) -> None:
    assert parse_offset_message_id(offset_message_id(host, offset)) == (host, offset)


@quiet
@given(st.text(max_size=60))
def test_garbage_offset_message_ids(text: str) -> None:
    with suppress(ProtocolError):
        parse_offset_message_id(text)


@quiet
@given(st.binary(max_size=500), st.sampled_from([0x1, 0x101, 0x201, 0x301]), st.integers(0, 600))
def test_bodies_come_back_or_hit_the_cap(body: bytes, sys_flag: int, limit: int) -> None:
    packed = compress(body, sys_flag)
    if len(body) <= limit:
        assert decompress(packed, sys_flag, limit) == body
    else:
        with pytest.raises(ProtocolError, match=f"cap of {limit} bytes"):
            decompress(packed, sys_flag, limit)


@quiet
@given(st.binary(max_size=100), st.sampled_from([0x1, 0x101, 0x201, 0x301, 0x401]))
def test_garbage_bodies(data: bytes, sys_flag: int) -> None:
    with suppress(ProtocolError):
        decompress(data, sys_flag, 1000)
    magic = {0x101: bytes.fromhex("04224d18"), 0x201: bytes.fromhex("28b52ffd")}
    with suppress(ProtocolError):
        decompress(magic.get(sys_flag, b"\x78\x9c") + data, sys_flag, 1000)
