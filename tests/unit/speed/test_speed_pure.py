"""The law itself: known values of the Java system, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from cosmodrome import layout
from cosmodrome.errors import MessageTooLarge, ProtocolError
from cosmodrome.layout import INDEX_KEY, MAGIC_RECORD_V2, QUEUE_ENTRY, SYS_BORN_V6, SYS_STORE_V6
from cosmodrome.speed.core import pure

V4 = bytes([127, 0, 0, 1, 0, 0, 0x2A, 0x9F])
V6 = bytes(15) + b"\x01" + bytes([0, 0, 0x2A, 0x9F])
JSON_VECTOR = (
    b'{"code":0,"extFields":{"a":"1"},"flag":1,"language":"JAVA","opaque":1,'
    b'"serializeTypeCurrentRPC":"JSON","version":409}'
)
BINARY_VECTOR = bytes.fromhex("0000000199000000010000000100000000000000080001610000000131")
VECTOR = (0, 0, 409, 1, 1, None, {"a": "1"})


@pytest.mark.parametrize(("serialize", "data"), [(0, JSON_VECTOR), (1, BINARY_VECTOR)])
def test_header_vectors(serialize: int, data: bytes) -> None:
    assert pure.encode_header(serialize, *VECTOR) == data
    assert pure.decode_header(serialize, data) == VECTOR


def test_binary_send_vector() -> None:
    values = ("PG", "T", "TBW102", "4", "1", "0", "1700000000000", "0", "TAGS\x01A", "0")
    ext = dict(zip("abcdefghijkm", (*values, "false", "false"), strict=True))
    data = pure.encode_header(1, 310, 0, 0, 5, 0, None, ext)
    assert len(data) == 148
    assert data.hex().startswith("01360000000000000500000000000000000000007f")
    assert pure.decode_header(1, data)[6] == ext


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("TagA", 2598919),
        ("TagB", 2598920),
        ("中文", 646394),
        ("订单", 1129459),
        ("😀", 1772899),
        ("", 0),
        ("polygenelubricants", -(1 << 31)),
        ("TopicA#k0", -1903240650),
        ("Topic#AaBB", 1102261108),
        ("Topic#BBAa", 1102261108),
    ],
)
def test_java_hash(text: str, value: int) -> None:
    assert pure.java_hash(text) == value


def json_ext(text: bytes) -> dict[str, str]:
    return pure.decode_header(0, b'{"code":1,"extFields":' + text + b"}")[6]


def test_header_values_are_written_as_java_prints_them() -> None:
    ext = json_ext(b'{"a":5,"b":true,"c":false,"d":null,"e":1.5,"f":"x","g":{"h":[1]},"i":-7}')
    assert ext == {
        "a": "5", "b": "true", "c": "false", "e": "1.5", "f": "x", "g": '{"h":[1]}', "i": "-7",
    }  # fmt: skip


@pytest.mark.parametrize("text", [b"null", b"{}"])
def test_absent_fields_are_an_empty_map(text: bytes) -> None:
    assert json_ext(text) == {}
    assert pure.decode_header(0, b'{"code":1}')[6] == {}


@pytest.mark.parametrize(
    ("text", "language"),
    [(b'"GO"', 9), (b'"NODE_JS"', 13), (b"3", 3), (b'"KLINGON"', 7), (b"99", 7), (b"null", 7)],
)
def test_language(text: bytes, language: int) -> None:
    assert pure.decode_header(0, b'{"language":' + text + b',"code":1,"x":{}}')[1] == language


def test_language_is_java_when_nobody_says_so() -> None:
    assert pure.decode_header(0, b'{"code":1}')[1] == 0


@pytest.mark.parametrize("text", [b'""', b"null"])
def test_an_empty_remark_is_none(text: bytes) -> None:
    assert pure.decode_header(0, b'{"code":1,"remark":' + text + b"}")[5] is None


def test_json_text_that_only_java_accepts() -> None:
    assert json_ext(b'{"a":"\\ud800x","b":"\xff","c":"\x01"}') == {
        "a": "?x",
        "b": "�",
        "c": "\x01",
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"5",
        b"{",
        b"{}",
        b'{"code":"1"}',
        b'{"code":null}',
        b'{"code":2147483648}',
        b'{"code":1,"opaque":-2147483649}',
        b'{"code":1,"extFields":[]}',
        b'{"code":1,"extFields":{"a":NaN}}',
        b'{"code":1,"extFields":{"a":' + b"9" * 5000 + b"}}",
        b'{"code":1} trailing',
        b'{"code":1,"deep":' + b"[" * 100_000,
        b'{"code":1,"deep":"\xff","deeper":' + b"[" * 100_000,
        b'{"code":1,"extFields":{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    ],
)
def test_bad_json_headers(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="JSON header"):
        pure.decode_header(0, data)


@pytest.mark.parametrize(
    ("at", "bytes_"),
    [
        (13, "7fffffff"),  # remark beyond the header
        (13, "ffffffff"),
        (17, "00000009"),  # fields beyond the header
        (17, "ffffffff"),
        (17, "00000005"),  # a field cut by the end of the fields
        (21, "0009"),
        (21, "ffff"),
        (24, "00000002"),
        (24, "ffffffff"),
    ],
)
def test_bad_binary_headers(at: int, bytes_: str) -> None:
    data = bytearray(BINARY_VECTOR)
    patch = bytes.fromhex(bytes_)
    data[at : at + len(patch)] = patch
    with pytest.raises(ProtocolError, match="binary header"):
        pure.decode_header(1, bytes(data))


def test_every_prefix_of_a_binary_header_is_refused() -> None:
    for size in range(len(BINARY_VECTOR)):
        with pytest.raises(ProtocolError):
            pure.decode_header(1, BINARY_VECTOR[:size])


def test_binary_leniency() -> None:
    empty_pairs = bytes.fromhex("0000 00000001 780001 79 00000000")
    data = BINARY_VECTOR[:17] + len(empty_pairs).to_bytes(4, "big") + empty_pairs + b"behind"
    assert pure.decode_header(1, data) == (0, 0, 409, 1, 1, None, {})
    assert pure.decode_header(1, data[:2] + b"\xff" + data[3:])[1] == 7


def test_encoding_never_fails_on_text() -> None:
    for serialize in (0, 1):
        data = pure.encode_header(serialize, 1, 3, 409, 1, 0, "\ud800", {"\udc00": "a\ud800b"})
        assert pure.decode_header(serialize, data)[5:] == ("?", {"?": "a?b"})


def test_json_keeps_java_order_and_leaves_out_nulls() -> None:
    assert pure.encode_header(0, 1, 99, 2, 3, 4, "r", None) == (
        b'{"code":1,"flag":4,"language":"OTHER","opaque":3,"remark":"r",'
        b'"serializeTypeCurrentRPC":"JSON","version":2}'
    )
    assert b'"extFields":{},' in pure.encode_header(0, 1, 0, 2, 3, 4, None, {})


@pytest.mark.parametrize(
    ("serialize", "fields", "said"),
    [
        (1, (200050, 0, 409, 1, 0, None, {}), "does not fit in 16 bits"),
        (1, (1, 0, 40000, 1, 0, None, {}), "does not fit in 16 bits"),
        (1, (1, 0, 409, 1 << 31, 0, None, {}), "does not fit in 32 bits"),
        (0, (1 << 31, 0, 409, 1, 0, None, {}), "does not fit in 32 bits"),
        (1, (1, 0, 409, 1, 0, None, {"k" * 40000: "v"}), "too long"),
        (2, (1, 0, 409, 1, 0, None, {}), "serialize type 2"),
    ],
)
def test_headers_that_cannot_be_written(serialize: int, fields: Any, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        pure.encode_header(serialize, *fields)


def test_unknown_serialize_type() -> None:
    with pytest.raises(ProtocolError, match="serialize type 7"):
        pure.decode_header(7, b"{}")


# --- record --------------------------------------------------------------------------------


def record(out: bytearray, base: int = 0, **changes: Any) -> int:
    fields: dict[str, Any] = {
        "log_offset": base + len(out),
        "queue_offset": 3,
        "store_ms": 1_700_000_000_001,
        "topic": b"TopicA",
        "queue_id": 2,
        "flag": 7,
        "sys_flag": 0,
        "born_ms": 1_700_000_000_000,
        "born_host": V4,
        "store_host": V4,
        "reconsume_times": 0,
        "prepared_offset": 0,
        "body": b"batch0",
        "properties": b"UNIQ_KEY\x01U1\x02KEYS\x01k1 k2\x02TAGS\x01TagA\x02DELAY\x013",
    }
    return pure.encode_record(out, **(fields | changes))


def test_record_layout() -> None:
    out = bytearray(b"before")
    size = record(out, body=b"a", log_offset=6)
    data = bytes(out[6:])
    assert size == len(data) == int.from_bytes(data[:4], "big")
    assert data[4:8].hex() == "daa320a7"
    assert int.from_bytes(data[8:12], "big") == 1756872259
    assert int.from_bytes(data[20:28], "big") == 3
    assert int.from_bytes(data[28:36], "big") == 6
    assert data[48:56] == data[64:72] == V4
    assert data[84:89] == b"\0\0\0\1a"


def test_walk_returns_what_was_encoded() -> None:
    out = bytearray()
    sizes = [record(out, 1000, queue_offset=n) for n in range(3)]
    entries, at, why = pure.walk(memoryview(out), 1000, 0, len(out), True, 100)
    assert (at, why) == (len(out), layout.WALK_MORE)
    assert [entry[1] for entry in entries] == sizes
    assert entries[1] == (
        1000 + sizes[0],
        sizes[1],
        "TopicA",
        2,
        1,
        0,
        1_700_000_000_001,
        2598919,
        3,
        ("U1", "k1", "k2"),
    )
    assert pure.walk(memoryview(out), 1000, 0, len(out), True, 2) == (
        entries[:2],
        sizes[0] + sizes[1],
        layout.WALK_MORE,
    )
    assert pure.walk(memoryview(out), 1000, sizes[0], len(out), True, 9)[0] == entries[1:]


@pytest.mark.parametrize("born", [V4, V6])
@pytest.mark.parametrize("store", [V4, V6])
def test_address_family_bits_follow_the_hosts(born: bytes, store: bytes) -> None:
    out = bytearray()
    record(out, born_host=born, store_host=store, sys_flag=SYS_BORN_V6 | SYS_STORE_V6 | 1)
    entries, _, why = pure.walk(memoryview(out), 0, 0, len(out), True, 9)
    assert why == layout.WALK_MORE
    expected = 1 | (SYS_BORN_V6 if born == V6 else 0) | (SYS_STORE_V6 if store == V6 else 0)
    assert entries[0][5] == expected
    assert entries[0][6] == 1_700_000_000_001


def test_walk_reads_topics_with_a_two_byte_length() -> None:
    out = bytearray()
    size = record(out)
    at = out.index(b"\x06TopicA")
    out[at:at] = b"\0"
    out[:8] = (size + 1).to_bytes(4, "big") + MAGIC_RECORD_V2.to_bytes(4, "big", signed=True)
    entries, _, why = pure.walk(memoryview(out), 0, 0, len(out), True, 9)
    assert why == layout.WALK_MORE
    assert entries[0][2] == "TopicA"


@pytest.mark.parametrize(
    ("properties", "facts"),
    [
        (b"", (0, 0, ())),
        (b"TAGS\x01A\x02TAGS\x01TagA", (2598919, 0, ())),
        (b"TAGS\x01TagA\x02TAGS\x01\x02TAGS\x02\x01x", (2598919, 0, ())),
        (b"KEYS\x01 a  b \x02UNIQ_KEY\x01u\x02", (0, 0, ("u", "a", "b"))),
        (b"TAGS\x01\xe4\xb8\xad\xe6\x96\x87", (646394, 0, ())),
        (b"DELAY\x01+18", (0, 18, ())),
        (b"DELAY\x01-1", (0, 0, ())),
        (b"DELAY\x01soon", (0, 0, ())),
        (b"DELAY\x012147483648", (0, 0, ())),
    ],
)
def test_what_the_walk_takes_from_properties(properties: bytes, facts: tuple[Any, ...]) -> None:
    out = bytearray()
    record(out, properties=properties)
    assert pure.walk(memoryview(out), 0, 0, len(out), True, 9)[0][0][7:] == facts


@pytest.mark.parametrize(
    ("tail", "why"),
    [
        (b"", layout.WALK_MORE),
        (b"\0" * 5, layout.WALK_EMPTY),
        (b"\0" * 500, layout.WALK_EMPTY),
        (bytes.fromhex("00000862cbd43194") + bytes(20), layout.WALK_BLANK),
        (bytes.fromhex("00000007cbd43194"), layout.WALK_CORRUPT),
        (b"\0\0\0\1", layout.WALK_CORRUPT),
        (b"garbage!" * 20, layout.WALK_CORRUPT),
    ],
)
def test_how_a_walk_ends(tail: bytes, why: int) -> None:
    out = bytearray()
    size = record(out)
    out += tail
    entries, at, ended = pure.walk(memoryview(out), 0, 0, len(out), True, 9)
    assert (len(entries), at, ended) == (1, size, why)


@pytest.mark.parametrize("at", [0, 3, 4, 7, 8, 35, 39, 87, 94, 102])
def test_a_walk_stops_before_a_damaged_record(at: int) -> None:
    out = bytearray()
    size = record(out)
    record(out)
    out[size + at] ^= 0x11
    entries, position, why = pure.walk(memoryview(out), 0, 0, len(out), True, 9)
    assert (len(entries), position, why) == (1, size, layout.WALK_CORRUPT)


def test_a_damaged_body_is_seen_only_when_asked_for() -> None:
    out = bytearray()
    size = record(out)
    out[88] ^= 1
    view = memoryview(out)
    assert pure.walk(view, 0, 0, size, True, 9)[2] == layout.WALK_CORRUPT
    assert pure.walk(view, 0, 0, size, False, 9)[2] == layout.WALK_MORE


def test_a_record_at_another_offset_is_not_good() -> None:
    out = bytearray()
    size = record(out)
    assert pure.walk(memoryview(out), 1, 0, size, True, 9) == ([], 0, layout.WALK_CORRUPT)


def test_a_record_cut_by_the_end_is_not_good() -> None:
    out = bytearray()
    size = record(out)
    for end in range(8, size):
        assert pure.walk(memoryview(out), 0, 0, end, True, 9) == ([], 0, layout.WALK_CORRUPT)


@pytest.mark.parametrize(("start", "end"), [(-1, 5), (0, 11), (6, 5)])
def test_a_walk_outside_its_view_is_a_bug(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        pure.walk(memoryview(bytes(10)), 0, start, end, True, 9)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"topic": b"t" * 128}, MessageTooLarge),
        ({"properties": b"p" * 32768}, MessageTooLarge),
        ({"born_host": b"1234567"}, ValueError),
        ({"store_host": b"123456789"}, ValueError),
        ({"queue_id": 1 << 31}, ValueError),
        ({"store_ms": 1 << 63}, ValueError),
        ({"prepared_offset": -(1 << 63) - 1}, ValueError),
    ],
)
def test_records_that_cannot_be_written(changes: Any, error: type[Exception]) -> None:
    out = bytearray(b"before")
    with pytest.raises(error):
        record(out, **changes)
    assert out == b"before"


pack = QUEUE_ENTRY.pack


def record_with(properties: bytes, body: bytes = b"b", topic: bytes = b"T") -> bytearray:
    log = bytearray()
    pure.encode_record(log, 0, 0, 70, topic, 0, 0, 0, 5, V4, V4, 0, 0, body, properties)
    return log


@pytest.mark.parametrize("body_bytes", [1, 300, 415, 416, 417, 418, 419, 420, 421])
def test_a_lost_sector_of_properties_is_torn(body_bytes: int) -> None:
    log = record_with(b"p" * 1500, b"b" * body_bytes)
    properties_at = len(log) - 1500
    for sector in range(0, len(log), 512):
        torn = bytearray(log)
        torn[sector : sector + 512] = bytes(len(torn[sector : sector + 512]))
        view = memoryview(torn)
        assert pure.walk(view, 0, 0, len(log), True, 9)[0] == [], sector
        if sector >= properties_at:
            assert pure.walk(view, 0, 0, len(log), True, 9)[2] == layout.WALK_CORRUPT
            assert len(pure.walk(view, 0, 0, len(log), True, 9, 71)[0]) == 1, "synced is whole"
            assert len(pure.walk(view, 0, 0, len(log), False, 9)[0]) == 1
    assert len(pure.walk(memoryview(log), 0, 0, len(log), True, 9)[0]) == 1


def test_zeros_that_begin_within_a_sector_are_no_tear() -> None:
    log = record_with(b"p" * 100 + bytes(50))
    assert len(pure.walk(memoryview(log), 0, 0, len(log), True, 9)[0]) == 1


def test_a_topic_with_a_zero_byte_is_torn() -> None:
    log = memoryview(record_with(b"", topic=b"a\0"))
    assert pure.walk(log, 0, 0, len(log), True, 9) == ([], 0, layout.WALK_CORRUPT)
    assert len(pure.walk(log, 0, 0, len(log), False, 9)[0]) == 1


def test_gathered_records_are_grouped_by_queue() -> None:
    log = bytearray()
    places: list[int] = []
    for topic, queue_id, offset, kind, properties in (
        (b"T", 0, 5, 0, b"KEYS\x01k"),
        (b"T", 1, 0, 0, b"TAGS\x01t"),
        (b"T", 0, 6, 0, b""),
        (b"T", 0, 9, 0, b""),  # a gap
        (b"T", 0, 0, 4, b"KEYS\x01half"),
        (b"T", 0, 0, 12, b"KEYS\x01gone"),
        (b"SCHEDULE_TOPIC_XXXX", 2, 0, 0, b"DELAY\x013\x02KEYS\x01late"),
    ):
        places.append(len(log))
        pure.encode_record(
            log, len(log), offset, 70, topic, queue_id, 0, kind, 5, V4, V4, 0, 0, b"b", properties
        )
    sizes = [b - a for a, b in zip(places, [*places[1:], len(log)], strict=True)]
    runs, keys, delayed, count, last_ms, position, why = pure.gather(
        memoryview(log), 0, 0, len(log), True, 99
    )
    assert runs == [
        ("T", 0, 5, pack(places[0], sizes[0], 0) + pack(places[2], sizes[2], 0)),
        ("T", 1, 0, pack(places[1], sizes[1], ord("t"))),
        ("T", 0, 9, pack(places[3], sizes[3], 0)),
    ]
    names = [("T", "k", 0), ("T", "half", 4), ("SCHEDULE_TOPIC_XXXX", "late", 6)]
    assert list(INDEX_KEY.iter_unpack(keys)) == [
        (pure.key_hash(topic, key), places[at], 70) for topic, key, at in names
    ]
    assert [entry[0] for entry in delayed] == [places[6]]
    assert (count, last_ms, position, why) == (7, 70, len(log), layout.WALK_MORE)
