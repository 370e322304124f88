from __future__ import annotations

import tracemalloc
import zlib

import pytest
import zstandard

from cosmodrome.errors import ProtocolError
from cosmodrome.wire import message

ZLIB_OLD, LZ4, ZSTD, ZLIB = 0x1, 0x101, 0x201, 0x301


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("", {}),
        ("a\x01b", {"a": "b"}),
        ("a\x01b\x02", {"a": "b"}),
        ("a\x01b\x02a\x01c\x02d\x01e", {"a": "c", "d": "e"}),
        ("a\x01\x02\x01b\x02x\x02\x02c\x01d", {"c": "d"}),
        ("a\x01b\x01c", {"a": "b\x01c"}),
    ],
)
def test_parse_properties(text: str, pairs: dict[str, str]) -> None:
    assert message.parse_properties(text) == pairs


def test_format_properties_has_no_separator_at_the_end() -> None:
    assert message.format_properties({"TAGS": "A", "KEYS": "k"}) == "TAGS\x01A\x02KEYS\x01k"
    assert message.format_properties({}) == ""


def test_tags_code_is_the_java_hash() -> None:
    assert message.tags_code("TagA") == 2598919
    assert message.tags_code("") == 0


def test_reserved_names_are_those_of_the_store() -> None:
    assert len(message.RESERVED) == 31
    assert {"KEYS", "TAGS", "REAL_QID", "TRAN_MSG", "UNIQ_KEY"} <= message.RESERVED
    assert message.INNER_MULTI_DISPATCH not in message.RESERVED


@pytest.mark.parametrize(
    ("port", "offset", "text"),
    [
        (10911, 1234, "7F00000100002A9F00000000000004D2"),
        (29911, 2211, "7F000001000074D700000000000008A3"),
    ],
)
def test_offset_message_id(port: int, offset: int, text: str) -> None:
    host = message.pack_host("127.0.0.1", port)
    assert message.offset_message_id(host, offset) == text
    assert message.parse_offset_message_id(text) == (host, offset)
    assert message.parse_offset_message_id(text.lower()) == (host, offset)


def test_offset_message_id_of_an_ipv6_host() -> None:
    host = message.pack_host("2001:db8::1", 10911)
    text = message.offset_message_id(host, 5)
    assert len(text) == 56
    assert message.parse_offset_message_id(text) == (host, 5)


@pytest.mark.parametrize(
    "text", ["", "7F", "7F00000100002A9F00000000000004D", "x" * 32, " 7" * 16, "7F" * 20]
)
def test_bad_offset_message_ids(text: str) -> None:
    with pytest.raises(ProtocolError, match="not an offset message id"):
        message.parse_offset_message_id(text)


@pytest.mark.parametrize(
    ("ip", "size", "again"),
    [
        ("127.0.0.1", 8, "127.0.0.1"),
        ("::ffff:10.1.2.3", 8, "10.1.2.3"),
        ("::1", 20, "::1"),
        ("fe80::1%eth0", 20, "fe80::1"),
    ],
)
def test_hosts(ip: str, size: int, again: str) -> None:
    host = message.pack_host(ip, 10911)
    assert len(host) == size
    assert message.unpack_host(host) == (again, 10911)


def test_bad_hosts() -> None:
    with pytest.raises(ValueError, match="not an IP address"):
        message.pack_host("localhost", 1)
    with pytest.raises(ValueError, match="port -1"):
        message.pack_host("127.0.0.1", -1)
    with pytest.raises(ProtocolError, match="7 bytes"):
        message.unpack_host(b"1234567")


@pytest.mark.parametrize("sys_flag", [0, ZLIB_OLD, LZ4, ZSTD, ZLIB])
@pytest.mark.parametrize("body", [b"", b"x", b"body" * 5000])
def test_compression_round_trip(sys_flag: int, body: bytes) -> None:
    packed = message.compress(body, sys_flag)
    assert message.decompress(packed, sys_flag, len(body)) == body


def test_compression_kinds() -> None:
    assert message.compress(b"abc", 0) == b"abc"
    assert zlib.decompress(message.compress(b"abc", ZLIB_OLD)) == b"abc"
    assert message.compress(b"abc", LZ4)[:4].hex() == "04224d18"
    assert message.compress(b"abc", ZSTD)[:4].hex() == "28b52ffd"


@pytest.mark.parametrize("sys_flag", [ZLIB_OLD, LZ4, ZSTD, ZLIB])
def test_decompression_stops_at_its_cap(sys_flag: int) -> None:
    bomb = message.compress(bytes(64 * 1024 * 1024), sys_flag)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="cap of 100000 bytes"):
            message.decompress(bomb, sys_flag, 100_000)
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()
    with pytest.raises(ProtocolError, match="cap of 99 bytes"):
        message.decompress(message.compress(bytes(100), sys_flag), sys_flag, 99)


def test_a_zstd_body_that_does_not_state_its_size() -> None:
    writer = zstandard.ZstdCompressor().compressobj()
    packed = writer.compress(b"body" * 5000) + writer.flush()
    assert message.decompress(packed, ZSTD, 20_000) == b"body" * 5000
    with pytest.raises(ProtocolError, match="cap of 19999 bytes"):
        message.decompress(packed, ZSTD, 19_999)
    with pytest.raises(ProtocolError, match="damaged"):
        message.decompress(packed[:-2], ZSTD, 20_000)


@pytest.mark.parametrize("sys_flag", [ZLIB_OLD, LZ4, ZSTD, ZLIB])
def test_damaged_bodies(sys_flag: int) -> None:
    packed = message.compress(b"body" * 5000, sys_flag)
    for data in (packed[:-3], packed[:5], b"", b"junk", b"\0" * 50):
        with pytest.raises(ProtocolError, match=r"damaged|cut short"):
            message.decompress(data, sys_flag, 20_000)


def test_unknown_compression_is_named() -> None:
    with pytest.raises(ProtocolError, match="0x700"):
        message.decompress(b"x", 0x701, 10)
    with pytest.raises(ProtocolError, match="0x400"):
        message.compress(b"x", 0x401)
