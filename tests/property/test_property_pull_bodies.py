"""The quick reader of pull bodies against the careful one, on good and on broken bytes."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from cosmodrome.errors import ProtocolError
from cosmodrome.layout import MAGIC_RECORD, SYS_BORN_V6, SYS_STORE_V6
from cosmodrome.wire.record import Record, decode_records, encode_record, iter_records


@st.composite
def records(draw: st.DrawFn) -> Record:
    flags = draw(st.sampled_from([0, 1, 0x301, SYS_BORN_V6, SYS_STORE_V6, 0x30]))
    int64 = st.integers(-(1 << 63), (1 << 63) - 1)
    return Record(
        size=0,
        magic=MAGIC_RECORD,
        body_crc=0,
        queue_id=draw(st.integers(0, 1 << 16)),
        flag=draw(st.integers(-(1 << 31), (1 << 31) - 1)),
        queue_offset=draw(int64),
        log_offset=draw(int64),
        sys_flag=flags,
        born_ms=draw(int64),
        born_host=bytes(20 if flags & SYS_BORN_V6 else 8),
        store_ms=draw(int64),
        store_host=bytes(20 if flags & SYS_STORE_V6 else 8),
        reconsume_times=draw(st.integers(0, 20)),
        prepared_offset=draw(int64),
        body=draw(st.binary(max_size=40)),
        topic=draw(st.sampled_from(["T", "%RETRY%g", "x" * 127])),
        properties=draw(st.text(max_size=30)),
    )


def outcome(data: bytes, *, quick: bool) -> object:
    try:
        return decode_records(data) if quick else list(iter_records(data))
    except ProtocolError as error:
        return str(error)


@given(st.lists(records(), max_size=5))
def test_both_read_the_same(items: list[Record]) -> None:
    data = b"".join(encode_record(item) for item in items)
    found = decode_records(data)
    assert found == list(iter_records(data))
    for item, read in zip(items, found, strict=True):
        same = dataclasses.replace(item, size=read.size, body_crc=read.body_crc)
        assert read == same


@given(st.lists(records(), min_size=1, max_size=3), st.data())
def test_both_refuse_the_same(items: list[Record], data: st.DataObject) -> None:
    good = bytearray(b"".join(encode_record(item) for item in items))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at] = data.draw(st.integers(0, 255))
    broken = bytes(good[: data.draw(st.integers(0, len(good)))])
    assert outcome(broken, quick=True) == outcome(broken, quick=False)


def test_properties_that_are_too_long_for_their_length_are_refused() -> None:
    plain = Record(
        0,
        MAGIC_RECORD,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        bytes(8),
        0,
        bytes(8),
        0,
        0,
        b"body",
        "T",
        "p" * 100,
    )
    data = bytearray(encode_record(plain))
    data[-102:] = (40_000).to_bytes(2, "big") + b"p" * 40_000
    data[:4] = len(data).to_bytes(4, "big")
    assert isinstance(outcome(bytes(data), quick=True), str)
    assert outcome(bytes(data), quick=True) == outcome(bytes(data), quick=False)
