from __future__ import annotations

import struct
import time

import pytest

from cosmodrome.errors import ProtocolError
from cosmodrome.layout import HEADER_BYTES_MAX
from cosmodrome.wire.frame import (
    Frame,
    FrameSplitter,
    InPlaceSplitter,
    decode,
    encode,
    frame_end,
    sniff,
)

JSON_FRAME = bytes.fromhex("0000007900000075") + (
    b'{"code":0,"extFields":{"a":"1"},"flag":1,"language":"JAVA","opaque":1,'
    b'"serializeTypeCurrentRPC":"JSON","version":409}'
)
BINARY_FRAME = bytes.fromhex(
    "000000210100001d0000000199000000010000000100000000000000080001610000000131"
)
VECTOR = Frame(code=0, opaque=1, flag=1, ext={"a": "1"}, language=0)


@pytest.mark.parametrize(("data", "serialize"), [(JSON_FRAME, 0), (BINARY_FRAME, 1)])
def test_vectors(data: bytes, serialize: int) -> None:
    VECTOR.serialize = serialize
    assert encode(VECTOR) == data
    assert decode(data[4:]) == VECTOR
    assert FrameSplitter().feed(data) == [VECTOR]


@pytest.mark.parametrize("serialize", [0, 1])
def test_a_frame_with_everything(serialize: int) -> None:
    frame = Frame(310, -5, 2, {"i": "TAGS\x01中\x02"}, b"\0body", "why", 401, 9, serialize)
    assert decode(encode(frame)[4:]) == frame
    assert frame.is_oneway
    assert not frame.is_response


def test_flags() -> None:
    assert Frame(0, 1, flag=1).is_response
    assert not Frame(0, 1, flag=1).is_oneway


def test_frames_in_pieces_of_every_size() -> None:
    frames = [Frame(n, n + 1, 0, {"n": str(n)}, bytes(n * 7), serialize=n % 2) for n in range(8)]
    data = b"".join(map(encode, frames))
    for size in range(1, len(data) + 1):
        splitter = FrameSplitter()
        got = [f for at in range(0, len(data), size) for f in splitter.feed(data[at : at + size])]
        assert got == frames
        assert splitter.pending_bytes == 0


def test_frames_in_place_in_pieces_of_every_size() -> None:
    frames = [Frame(n, n + 1, 0, {"n": str(n)}, bytes(n * 7), serialize=n % 2) for n in range(8)]
    data = b"".join(map(encode, frames))
    for size in range(1, len(data) + 1):
        splitter = InPlaceSplitter()
        got, used, end = [], 0, 0
        while used < len(data):
            end = min(end + size, len(data))
            got += splitter.feed(memoryview(data)[used:end])
            used += splitter.used
            if end - used >= 4:
                assert end - used < splitter.needed == 4 + int.from_bytes(data[used : used + 4])
        assert got == frames
        assert all(type(frame.body) is memoryview for frame in got)


def test_an_unfinished_frame_waits() -> None:
    splitter = FrameSplitter()
    assert splitter.feed(JSON_FRAME + JSON_FRAME[:50]) != []
    assert splitter.pending_bytes == 50
    assert splitter.feed(memoryview(JSON_FRAME)[50:]) != []
    assert splitter.pending_bytes == 0
    assert splitter.feed(b"") == []


def test_a_frame_does_not_change_with_the_buffer_it_came_in() -> None:
    buffer = bytearray(encode(Frame(1, 1, body=b"body")))
    (frame,) = FrameSplitter().feed(memoryview(buffer))
    buffer[:] = bytes(len(buffer))
    assert frame.body == b"body"
    assert type(frame.body) is bytes


def test_many_small_pieces_of_a_large_frame_cost_little() -> None:
    data = encode(Frame(1, 1, body=bytes(8 * 1024 * 1024)))
    splitter = FrameSplitter()
    began = time.process_time()
    count = sum(len(splitter.feed(data[at : at + 512])) for at in range(0, len(data), 512))
    assert count == 1
    # CPU time, whatever else runs: copying it all for every piece takes minutes.
    assert time.process_time() - began < 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("00000003", "smaller than"),
        ("00fffffd", "above the limit"),
        ("ffffffff", "above the limit"),
        ("47455420", "above the limit"),
        ("0000000400000001", "header of 1 bytes"),
        ("0000000500ffffff7b", "header of 16777215 bytes"),
        ("0000000402000000", "serialize type 2"),
        ("0000000400000000", "JSON header"),
        ("0000000401000000", "binary header"),
    ],
)
def test_broken_streams(data: str, message: str) -> None:
    for splitter in (FrameSplitter(), InPlaceSplitter()):
        with pytest.raises(ProtocolError, match=message):
            splitter.feed(bytes.fromhex(data))


@pytest.mark.parametrize("splitter", [FrameSplitter, InPlaceSplitter])
@pytest.mark.parametrize("whole", [True, False])
def test_a_header_that_is_too_long(splitter: type[FrameSplitter], whole: bool) -> None:
    header = b'{"code":1,"extFields":{"a":"' + b"x" * HEADER_BYTES_MAX + b'"}}'
    data = struct.pack(">II", 4 + len(header), len(header)) + header
    with pytest.raises(ProtocolError, match=f"a header of {len(header)} bytes; at most 65536 fit"):
        splitter().feed(data if whole else data[:8])
    with pytest.raises(ProtocolError, match="at most 65536 fit"):
        decode(data[4:])
    assert frame_end(memoryview(data[:7]), 0) == 0
    assert frame_end(memoryview(data[:9]), 0) == 9  # so that it is refused now
    with pytest.raises(ProtocolError, match="put less into its fields"):
        encode(Frame(1, 1, ext={"a": "x" * HEADER_BYTES_MAX}))


def test_the_longest_properties_fit() -> None:
    properties = "".join(f"key{n:05d}\x01value{n:07d}\x02" for n in range(32_767 // 22))
    assert len(encode(Frame(310, 1, ext={"i": properties}))) < HEADER_BYTES_MAX


def test_the_largest_frame() -> None:
    limit = 16 * 1024 * 1024
    room = limit - len(encode(Frame(1, 1)))
    data = encode(Frame(1, 1, body=bytes(room)))
    assert len(data) == limit
    assert len(FrameSplitter().feed(data)) == 1
    with pytest.raises(ProtocolError, match="send less at once"):
        encode(Frame(1, 1, body=bytes(room + 1)))


def test_a_smaller_limit() -> None:
    assert FrameSplitter(len(JSON_FRAME)).feed(JSON_FRAME) != []
    with pytest.raises(ProtocolError, match="above the limit"):
        FrameSplitter(len(JSON_FRAME) - 1).feed(JSON_FRAME)


def test_decode_of_too_little() -> None:
    with pytest.raises(ProtocolError, match="3 bytes"):
        decode(b"abc")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x16\x03\x01\x02", "tls"),
        (b"GET / HTTP/1.1", "http"),
        *((method, "http") for method in (b"POST", b"PUT ", b"HEAD", b"OPTI", b"DELE", b"PATC")),
        (b"PRI * HTTP/2.0", "grpc"),
        (JSON_FRAME, None),
        (b"\x16", None),
        (b"", None),
        (b"GETX", None),
    ],
)
def test_sniff(data: bytes, kind: str | None) -> None:
    assert sniff(data) == kind
