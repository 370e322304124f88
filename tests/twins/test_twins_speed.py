"""The compiled functions against the law: same values, or an exception of the same type."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cosmodrome.layout import INDEX_KEY, QUEUE_ENTRY, QUEUE_FILLER_SIZE
from cosmodrome.speed.core import pure

try:
    from cosmodrome.speed.core import native
except ImportError:
    if os.environ.get("COSMODROME_REQUIRE_NATIVE"):
        raise
    pytest.skip("the compiled twin is not built", allow_module_level=True)

often = settings(max_examples=300, deadline=None)

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
ANY_INT = st.one_of(
    INT32,
    INT64,
    st.integers(),
    st.sampled_from([0, -1, 32767, 32768, -32768, -32769, 1 << 31, (1 << 31) - 1, 1 << 63]),
)
TEXT = st.text(st.characters(exclude_categories=()), max_size=30)  # lone surrogates included
EXT = st.dictionaries(TEXT, TEXT, max_size=6)


def outcome(function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    try:
        return "value", function(*arguments)
    except Exception as error:
        return "error", (type(error), str(error))


def same(name: str, *arguments: Any) -> tuple[str, Any]:
    law = outcome(getattr(pure, name), *arguments)
    assert outcome(getattr(native, name), *arguments) == law
    return law


@often
@given(TEXT)
@example("polygenelubricants")
@example("\U0010ffff\ud800")
def test_java_hash(text: str) -> None:
    same("java_hash", text)


HEADER = st.tuples(
    st.integers(0, 3),
    ANY_INT,
    ANY_INT,
    ANY_INT,
    ANY_INT,
    ANY_INT,
    st.none() | TEXT,
    st.none() | EXT,
)
INT16 = st.integers(-32768, 32767)
FITTING_HEADER = st.tuples(
    INT16, st.integers(-1, 15), INT16, INT32, INT32, st.none() | TEXT, st.none() | EXT
)


@often
@given(HEADER)
def test_encode_header_takes_anything(fields: tuple[Any, ...]) -> None:
    same("encode_header", *fields)


@often
@given(st.integers(0, 1), FITTING_HEADER)
def test_headers_that_fit(serialize: int, fields: tuple[Any, ...]) -> None:
    kind, data = same("encode_header", serialize, *fields)
    assert kind == "value"
    kind, _ = same("decode_header", serialize, data)
    assert kind == "value"


@often
@given(st.integers(0, 2), st.binary(max_size=200))
def test_decode_header_of_garbage(serialize: int, data: bytes) -> None:
    same("decode_header", serialize, data)


@often
@given(
    st.integers(0, 1),
    EXT,
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    st.integers(0, 400),
)
def test_decode_header_of_damaged_headers(
    serialize: int, ext: dict[str, str], changes: list[tuple[int, int]], length: int
) -> None:
    data = bytearray(pure.encode_header(serialize, 310, 0, 409, 5, 0, "why", ext))
    for at, byte in changes:
        data[at % len(data)] = byte
    same("decode_header", serialize, bytes(data))
    same("decode_header", serialize, bytes(data[:length]))


JSON_PIECE = st.sampled_from(
    [
        b'{"code":1',
        b'{"code" : -7 ',
        b'{"code":01',
        b'{"code":-0',
        b'{"code":1.0',
        b'{"code":1e2',
        b',"extFields":{',
        b',"extFields":null',
        b'"a":"b"',
        b'"a":5',
        b'"a":-5',
        b'"a":1.5',
        b'"a":true',
        b'"b":false',
        b'"a":null',
        b'"c":{"x":[1,"y"]}',
        b'"d":[]',
        b'"a":""',
        b",",
        b"}",
        b"}",
        b" ",
        b"\n",
        b'"',
        b"\\",
        b'"a":"\\u0041\\n\\/"',
        b'"\\u0061":"z"',
        b'"e":"\\ud83d\\ude00"',
        b'"e":"\\ud83d"',
        b'"e":"\\udc00"',
        b'"e":"\\ud83d\\u0041"',
        b'"f":"\xff"',
        b'"f":"\xe4\xb8\xad"',
        b'"f":"\x01"',
        b'"f":"\\x"',
        b'"f":"\\u12"',
        b',"language":"JAVA"',
        b',"language":"GO"',
        b',"language":"XX"',
        b',"language":3',
        b',"language":99',
        b',"language":null',
        b',"language":""',
        b',"opaque":2147483647',
        b',"opaque":2147483648',
        b',"opaque":-2147483648',
        b',"flag":1',
        b',"version":409',
        b',"remark":null',
        b',"remark":""',
        b',"remark":"r"',
        b',"remark":5',
        b',"other":{}',
        b',"serializeTypeCurrentRPC":"JSON"',
        b',"code":2',
        b',"code":99999999999',
        b',"extFields":{}',
        b',"extFields":{"a":12345678901234567890123}',
        b"\x00",
    ]
)


@often
@given(st.lists(JSON_PIECE, max_size=12).map(b"".join))
@example(b'{"code":1,"extFields":{"a":"x","a":null}}')
@example(b'{"code":1,"extFields":{"a":1},"extFields":{"b":"2"}}')
@example(b'{"code":1,"extFields":' + b'{"a":' * 5000)
@example(b'{"code":1,"x":' + b"[" * 200_000)
@example(b'{"code":1,"extFields":{"a":' + b"9" * 5000 + b"}}")
@example(b'\t{ "code" :\r\n1 , "extFields" : { "a" : "b" , "c" : 5 } } \n')
def test_decode_header_of_json_pieces(data: bytes) -> None:
    same("decode_header", 0, data)


@often
@given(st.lists(JSON_PIECE, max_size=5).map(b"".join))
def test_decode_header_of_json_bodies(inner: bytes) -> None:
    same("decode_header", 0, b'{"code":1,"extFields":{' + inner + b"}}")
    same("decode_header", 0, b'{"code":1' + inner + b"}")


HOST = st.sampled_from([b"\x7f\0\0\x01\0\0\x2a\x9f", b"\x01" * 20]) | st.binary(max_size=21)
PROPERTIES = st.lists(
    st.sampled_from(
        [
            b"TAGS\x01A",
            b"TAGS\x01\xe4\xb8\xad",
            b"TAGS\x01",
            b"TAGS",
            b"KEYS\x01a b  c ",
            b"UNIQ_KEY\x01U",
            b"DELAY\x013",
            b"DELAY\x01+3",
            b"DELAY\x01-3",
            b"DELAY\x01x",
            b"DELAY\x019999999999",
            b"DELAY\x0100000000001",
            b"DELAY\x01+",
            b"\x01v",
            b"x\x01y",
            b"KEYS\x01\xff",
            b"UNIQ_KEY\x01a\x01b",
            b"",
            b"TAGS\x01B",
            b"KEYS\x01 ",
        ]
    ),
    max_size=6,
).map(b"\x02".join)


RECORD_FIELDS = st.tuples(
    *([ANY_INT] * 3),
    st.binary(max_size=130),
    *([ANY_INT] * 4),
    HOST,
    HOST,
    ANY_INT,
    ANY_INT,
    st.binary(max_size=50),
    PROPERTIES | st.sampled_from([b"p" * 32767, b"p" * 32768]),
)


FITTING_HOST = st.sampled_from([b"\x7f\0\0\x01\0\0\x2a\x9f", b"\x01" * 20])
FITTING_RECORD_FIELDS = st.tuples(
    *([INT64] * 3),
    st.binary(max_size=127),
    *([INT32] * 3),
    INT64,
    FITTING_HOST,
    FITTING_HOST,
    INT32,
    INT64,
    st.binary(max_size=50),
    PROPERTIES,
)


@often
@given(FITTING_RECORD_FIELDS)
def test_records_that_fit(fields: tuple[Any, ...]) -> None:
    outs = bytearray(b"before"), bytearray(b"before")
    size = pure.encode_record(outs[0], *fields)
    assert native.encode_record(outs[1], *fields) == size
    assert outs[0] == outs[1]
    assert len(outs[0]) == 6 + size


@often
@given(RECORD_FIELDS)
def test_encode_record_takes_anything(fields: tuple[Any, ...]) -> None:
    outs = bytearray(b"before"), bytearray(b"before")
    law = outcome(pure.encode_record, outs[0], *fields)
    got = outcome(native.encode_record, outs[1], *fields)
    assert got[0] == law[0]
    assert outs[0] == outs[1]
    if law[0] == "value":
        assert got == law
    else:
        assert got[1][0] is law[1][0]
        assert outs[0] == b"before"


V4, V6 = b"\x7f\0\0\x01\0\0\x2a\x9f", b"\x01" * 20
RECORD = st.tuples(
    st.binary(max_size=127), INT32, INT32, st.sampled_from([V4, V6]), st.sampled_from([V4, V6]),
    st.binary(max_size=40), PROPERTIES,
)  # fmt: skip


def log_of(records: list[tuple[Any, ...]], base: int) -> bytearray:
    out = bytearray()
    for number, (topic, queue_id, flag, born, store, body, properties) in enumerate(records):
        pure.encode_record(
            out, base + len(out), number, 1_700_000_000_000, topic, queue_id, flag, 0,
            5, born, store, 0, 0, body, properties,
        )  # fmt: skip
    return out


@often
@given(
    st.lists(RECORD, max_size=4),
    st.integers(0, 1 << 40),
    st.sampled_from(
        [b"", b"\0" * 3, b"\0" * 40, b"\0\0\x01\0\xcb\xd4\x31\x94", b"\0\0\0\1", b"x" * 9]
    ),
    st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=2),
    st.booleans(),
    st.integers(-1, 5),
    st.integers(0, 1000),
)
def test_walk(
    records: list[tuple[Any, ...]],
    base: int,
    tail: bytes,
    changes: list[tuple[int, int]],
    check_crc: bool,
    limit: int,
    cut: int,
) -> None:
    log = log_of(records, base) + tail
    view = memoryview(log)
    kind, found = same("walk", view, base, 0, len(log), check_crc, 99)
    torn = check_crc and any(0 in record[0] for record in records)
    assert kind == "value" and (torn or len(found[0]) == len(records))
    same("gather", view, base, 0, len(log), check_crc, 99)
    same("walk", view, base, 0, len(log), check_crc, limit)
    same("walk", view, base, 0, min(cut, len(log)), check_crc, 99)
    same("walk", view, base, min(cut, len(log)), len(log), check_crc, 99)
    same("walk", view, base, 0, cut, check_crc, 99)
    for at, byte in changes:
        if log:
            log[at % len(log)] = byte
    assert same("walk", view, base, 0, len(log), check_crc, 99)[0] == "value"
    assert same("gather", view, base, 0, len(log), check_crc, limit)[0] == "value"


@often
@given(RECORD, st.integers(0, 91), st.integers(0, 255))
def test_walk_over_a_record_with_one_byte_changed(
    record: tuple[Any, ...], at: int, byte: int
) -> None:
    log = log_of([record, record], 0)
    log[-1 - at % len(log)] = byte
    same("walk", memoryview(log), 0, 0, len(log), True, 99)
    log = log_of([record], 7)
    log[4:8] = (0xDAA320AB).to_bytes(4, "big")
    log[at % len(log)] = byte
    same("walk", memoryview(bytes(log)), 7, 0, len(log), False, 99)


@often
@given(st.binary(max_size=300), st.booleans())
def test_walk_over_garbage(data: bytes, check_crc: bool) -> None:
    assert same("walk", memoryview(data), 0, 0, len(data), check_crc, 99)[0] == "value"


QUEUED = st.tuples(
    st.sampled_from([b"T", b"U", "ü".encode(), b"\xff", b"\xfe", b"SCHEDULE_TOPIC_XXXX"]),
    st.integers(-1, 1),
    st.integers(0, 3),
    st.sampled_from([0, 4, 8, 12]),
    st.sampled_from(
        [
            b"",
            b"KEYS\x01a  b\x02UNIQ_KEY\x01u",
            b"KEYS\x01\xc3\xbc \xff\x02TAGS\x01t",
            b"TAGS\x01\xf0\x9f\x98\x80\x02DELAY\x013",
        ]
    ),
)


@often
@given(st.lists(QUEUED, max_size=12), st.integers(0, 14))
def test_gather(records: list[tuple[bytes, int, int, int, bytes]], limit: int) -> None:
    log = bytearray()
    for number, (topic, queue_id, queue_offset, kind, properties) in enumerate(records):
        pure.encode_record(
            log, len(log), queue_offset, 1_700_000_000_000 + number, topic, queue_id, 0, kind,
            5, V4, V4, 0, 0, b"body", properties,
        )  # fmt: skip
    kind_, found = same("gather", memoryview(log), 0, 0, len(log), True, limit)
    assert kind_ == "value" and found[3] == min(limit, len(records))
    same("key_hash", "T", str(limit))


@often
@given(st.integers(400, 600), st.integers(0, 1500), st.integers(0, 2000), st.integers(1, 700))
def test_lost_sectors(body_bytes: int, length: int, at: int, zeros: int) -> None:
    log = bytearray()
    pure.encode_record(
        log, 0, 0, 50, b"T", 0, 0, 0, 5, V4, V4, 0, 0, b"b" * body_bytes, b"p" * length
    )
    at = min(at, len(log))
    log[at : at + zeros] = bytes(len(log[at : at + zeros]))
    for whole_ms in (0, 50, 51):
        same("walk", memoryview(log), 0, 0, len(log), True, 9, whole_ms)
        same("gather", memoryview(log), 0, 0, len(log), True, 9, whole_ms)


@often
@given(st.lists(st.tuples(INT32, INT64, INT64), max_size=30), st.integers(1, 9), INT64,
       st.integers(1, 40), st.integers(0, 40))  # fmt: skip
def test_chain(
    keys: list[tuple[int, int, int]], slots: int, begin_ms: int, count: int, limit: int
) -> None:
    packed = b"".join(INDEX_KEY.pack(*key) for key in keys)
    tables = [bytearray(b"\0\0\0\x02" * slots), bytearray(b"\0\0\0\x02" * slots)]
    outs = [bytearray(b"x"), bytearray(b"x")]
    marks = [bytearray(2), bytearray(2)]
    results = [
        twin.chain(table, packed, count, begin_ms, limit, out, pages)
        for twin, table, out, pages in zip((pure, native), tables, outs, marks, strict=True)
    ]
    assert results[0] == results[1]
    assert outs[0] == outs[1] and tables[0] == tables[1] and marks[0] == marks[1]
    assert marks[1][0] == (results[1][0] > 0)
    assert same("chain", bytearray(9000), packed, 1, 0, 9, bytearray(), bytearray(2))[0] == "error"
    assert same("chain", bytearray(3), packed, 1, 0, 9, bytearray())[0] == "error"


SELECTED = st.tuples(
    st.integers(0, 12),  # record
    st.sampled_from(["good", "size", "offset", "filler", "far", "code", "minus"]),
    st.sampled_from([0, 7, -1, 1 << 31]),
)


@often
@given(
    st.lists(SELECTED, max_size=14),
    st.integers(0, 3),
    st.sampled_from([None, frozenset(), frozenset({7, 0xFFFFFFFF})]),
    st.tuples(*[st.integers(0, 6), st.integers(0, 700)] * 2, st.integers(0, 1400)),
    st.integers(0, 1300),
    st.integers(0, 1300),
    st.sampled_from([-1, 3, 4]),
    st.integers(0, 3),
)
def test_select(
    wanted: list[tuple[int, str, int]],
    index: int,
    codes: frozenset[int] | None,
    limits: tuple[int, int, int, int, int],
    low: int,
    high: int,
    queue_id: int,
    count: int,
) -> None:
    base, log = 100, bytearray()
    places = []
    for number in range(13):
        at = base + len(log)
        size = pure.encode_record(
            log, at, 5 + number, 1, b"T", 3, 0, 0, 1, V4, V4, 0, 0, b"b" * number, b""
        )
        places.append((at, size))
    entries = bytearray()
    for number, kind, code in wanted:
        at, size = places[number]
        entries += QUEUE_ENTRY.pack(
            0 if kind == "filler" else -at if kind == "minus" else at + 9999 * (kind == "far"),
            QUEUE_FILLER_SIZE if kind == "filler" else size + (kind == "size"),
            code,
        )
    view = memoryview(log)
    index = min(index, len(wanted))
    for within in ((low, high), (base, base + len(log))):
        same(
            "select",
            bytes(entries),
            index,
            view,
            base,
            *within,
            queue_id,
            5,
            codes,
            count,
            10 * count,
            limits,
        )


class Growing:
    def __init__(self, twin: Any, entries: int, log_end: int, at: int) -> None:
        self.growth = twin.Tail(self)
        self.growth.data[:] = bytes(entries * QUEUE_ENTRY.size)
        self.growth.at = at
        self.growth.log_end = log_end


def facts(tail: Any) -> tuple[Any, ...]:
    assert tail.end == tail.at + len(tail.data)
    return bytes(tail.data), tail.at, tail.log_end, tail.dirty


RUNS = st.lists(
    st.tuples(
        st.sampled_from(["T", "U", "gone"]),
        st.integers(0, 2),
        st.integers(-2, 2),
        st.integers(1, 3),
    ),
    max_size=6,
)


@often
@given(RUNS, st.integers(0, 400), st.sets(st.sampled_from("TU")), st.integers(0, 2))
def test_spread(
    wanted: list[tuple[str, int, int, int]], log_end: int, topics: set[str], watched: int
) -> None:
    ends = {(topic, queue): 3 + queue for topic in "TU" for queue in range(3)}
    runs, log_offset = [], 300
    for topic, queue, shift, count in wanted:
        entries = b""
        for _ in range(count):
            entries += QUEUE_ENTRY.pack(log_offset, 100, count)
            log_offset += 100
        end = ends.get((topic, queue), 0)
        first = end if shift < 2 else end + 1  # mostly as it should be
        ends[topic, queue] = first + count
        runs.append((topic, queue, first, entries))
    results = []
    for twin in (pure, native):
        queues = {
            (topic, queue): Growing(twin, 3 if queue else 0, log_end, 20 * queue if queue else 60)
            for topic in "TU"
            for queue in range(3)
        }
        names = {queue: key for key, queue in queues.items()}
        dirty: set[Growing] = set()
        done, size, seen = twin.spread(runs, queues, dirty, topics, [{("U", watched)}])
        assert {names[queue] for queue, _ in seen} <= {names[queue] for queue in dirty}
        results.append(
            (
                done,
                size,
                [(names[queue], entries) for queue, entries in seen],
                sorted(names[queue] for queue in dirty),
                {key: facts(queue.growth) for key, queue in queues.items()},
            )
        )
    assert results[0] == results[1]


@pytest.mark.parametrize("size", [*range(200), 1023, 1024, 65_537])
def test_checksums(size: int) -> None:
    body = bytes(at * 7 % 251 for at in range(size))
    outs = bytearray(), bytearray()
    for twin, out in zip((pure, native), outs, strict=True):
        twin.encode_record(out, 0, 0, 1, b"T", 0, 0, 0, 1, V4, V4, 0, 0, body, b"")
    assert outs[0] == outs[1]
    assert int.from_bytes(outs[1][8:12], "big") == zlib.crc32(body) & 0x7FFFFFFF
