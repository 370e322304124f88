from __future__ import annotations

import time

import pytest

from cosmodrome.errors import ProtocolError
from cosmodrome.wire.frame import Frame, FrameSplitter, decode, encode, sniff

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
    began = time.perf_counter()
    count = sum(len(splitter.feed(data[at : at + 512])) for at in range(0, len(data), 512))
    assert count == 1
    assert time.perf_counter() - began < 5  # copying it all for every piece takes minutes


@pytest.mark.parametrize(
    ("data", "said"),
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
def test_broken_streams(data: str, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        FrameSplitter().feed(bytes.fromhex(data))


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
