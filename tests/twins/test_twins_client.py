"""The client's compiled functions against the law in `pure`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cosmodrome.errors import ProtocolError
from cosmodrome.layout import FRAME_BYTES_MAX, SYS_BORN_V6, SYS_STORE_V6
from cosmodrome.speed.client import pure as client_pure
from cosmodrome.wire.frame import FrameSplitter, prepare_json
from cosmodrome.wire.record import Record, decode_record, encode_record

try:
    from cosmodrome.speed.client import native as client
except ImportError:
    if os.environ.get("COSMODROME_REQUIRE_NATIVE"):
        raise
    pytest.skip("the compiled twin is not built", allow_module_level=True)

often = settings(max_examples=200, deadline=None)
TEXT = st.text(max_size=40)
HOST = bytes((127, 0, 0, 1, 0, 0, 0, 9))
HOST_V6 = bytes(15) + bytes((1, 0, 0, 0, 9))


@dataclasses.dataclass
class Item:
    body: bytes
    properties: str
    flag: int


def record(body: bytes, properties: str, offset: int, sys_flag: int, topic: str) -> bytes:
    born = HOST_V6 if sys_flag & SYS_BORN_V6 else HOST
    store = HOST_V6 if sys_flag & SYS_STORE_V6 else HOST
    return encode_record(
        Record(
            0,
            0,
            0,
            3,
            0,
            offset,
            77,
            sys_flag,
            1,
            born,
            2,
            store,
            0,
            0,
            body,
            topic,
            properties,
        )
    )


RECORDS = st.lists(
    st.builds(
        record,
        st.binary(max_size=60),
        TEXT,
        st.integers(0, (1 << 63) - 1),
        st.sampled_from([0, 0, 0, 1, SYS_BORN_V6, SYS_STORE_V6]),
        st.sampled_from(["t", "topic", "long" * 30]),
    ),
    max_size=5,
)


@often
@given(RECORDS)
def test_outlines_say_what_the_record_says(records: list[bytes]) -> None:
    data = b"".join(records)
    at = 0
    while at < len(data):
        found, stopped = client.outline(data, at)
        assert (found, stopped) == client_pure.outline(data, at)
        for begin, size, offset, sys_flag, body_at, body_end in found:
            whole = decode_record(data, begin)
            assert (size, offset, sys_flag) == (whole.size, whole.queue_offset, whole.sys_flag)
            assert data[body_at:body_end] == whole.body
        at = stopped
        if at < len(data):
            at += decode_record(data, at).size  # only those of IPv6 hosts are left over


@often
@given(
    RECORDS,
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=4),
    st.integers(0, 1500),
)
def test_outlines_of_damaged_bodies(
    records: list[bytes], changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(b"".join(records) or b"\0")
    for at, byte in changes:
        data[at % len(data)] = byte
    for damaged in (bytes(data), bytes(data[:length])):
        found, stopped = client.outline(damaged, 0)
        assert (found, stopped) == client_pure.outline(damaged, 0)
        for begin, size, *_ in found:
            assert decode_record(damaged, begin).size == size


@often
@given(st.lists(st.builds(Item, st.binary(max_size=50), TEXT, st.integers(-(1 << 31), 1 << 30))))
def test_batch_body(items: list[Item]) -> None:
    assert client.batch_body(items) == client_pure.batch_body(items)


@often
@given(
    st.integers(0, 0x7FFFFFFF),
    st.integers(0, (1 << 63) - 1),
    TEXT,
    st.binary(max_size=50),
    TEXT,
)
@example(0, 0, '\x00\x01\x02\x08\t\n\x0c\r\x1f"\\\x7f\u20ac\U0001f680', b"", '"\\')
def test_send_frame(opaque: int, born_ms: int, properties: str, body: bytes, topic: str) -> None:
    opening, fields = prepare_json(310, {"b": topic, "e": "3"}, "g")
    arguments: tuple[Any, ...] = (opening, opaque, fields, born_ms, properties, body)
    data = client.send_frame(*arguments)
    assert data == client_pure.send_frame(*arguments)
    (frame,) = FrameSplitter().feed(data)
    assert (frame.code, frame.opaque, frame.flag, frame.body) == (310, opaque, 0, body)
    assert frame.ext == {"b": topic, "e": "3", "g": str(born_ms), "i": properties}


@pytest.mark.parametrize("twin", [client, client_pure])
def test_too_big_a_frame(twin: Any) -> None:
    with pytest.raises(ProtocolError, match="send less at once"):
        twin.send_frame(b"{", 1, b"", 1, "", bytes(FRAME_BYTES_MAX))


@pytest.mark.parametrize("twin", [client, client_pure])
def test_text_that_is_none(twin: Any) -> None:
    with pytest.raises(UnicodeEncodeError):
        twin.send_frame(b"{", 1, b"", 1, "\ud800", b"")
    with pytest.raises(OverflowError):
        twin.batch_body([Item(b"", "x" * 0x10000, 0)])
