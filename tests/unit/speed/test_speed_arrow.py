"""Records become columns: what is kept, why a walk stops, what a null is. Both twins."""

from __future__ import annotations

import importlib
import mmap
import struct
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.layout import (
    MAGIC_RECORD_V2,
    RECORD_LOG_OFFSET_AT,
    SYS_BORN_V6,
    SYS_COMMIT,
    SYS_COMPRESSED,
    SYS_LZ4,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_STORE_V6,
    SYS_ZLIB,
    SYS_ZSTD,
)
from cosmodrome.speed import arrow
from cosmodrome.speed.arrow import (
    STOP_BLANK,
    STOP_CORRUPT,
    STOP_EMPTY,
    STOP_END,
    STOP_FULL,
    STOP_PARTIAL,
)
from cosmodrome.speed.arrow import pure as arrow_pure
from cosmodrome.wire.message import compress, pack_host
from cosmodrome.wire.record import Record, encode_record

ALL = tuple(arrow_pure.KINDS)
V4, V6 = pack_host("10.0.0.7", 4000), pack_host("fe80::1", 65535)
COMPRESSIONS = (SYS_COMPRESSED, *(SYS_COMPRESSED | k for k in (SYS_ZLIB, SYS_LZ4, SYS_ZSTD)))


def twins() -> list[Any]:
    try:
        return [arrow_pure, importlib.import_module("cosmodrome.speed.arrow.native")]
    except ImportError:
        return [arrow_pure]


@pytest.fixture(params=twins(), ids=lambda twin: twin.__name__.rpartition(".")[2])
def builder(request: pytest.FixtureRequest) -> Any:
    return request.param.ColumnBuilder


def record(offset: int = 0, body: bytes = b"body", properties: str = "", **fields: Any) -> bytes:
    sys_flag = fields.get("sys_flag", 0)
    usual: dict[str, Any] = {
        "size": 0,
        "magic": 0,
        "body_crc": 0,
        "queue_id": 3,
        "flag": 5,
        "queue_offset": offset,
        "log_offset": 0,
        "sys_flag": 0,
        "born_ms": 1_000,
        "born_host": V6 if sys_flag & SYS_BORN_V6 else V4,
        "store_ms": 2_000,
        "store_host": V6 if sys_flag & SYS_STORE_V6 else V4,
        "reconsume_times": 1,
        "prepared_offset": 0,
        "body": body,
        "topic": "Topic",
        "properties": properties,
    }
    return encode_record(Record(**usual | fields))


def v2(data: bytes, topic: bytes = b"Topic") -> bytes:
    """The same record in the second version: two bytes of topic length."""
    at = data.rindex(bytes((len(topic),)) + topic)
    return b"".join(
        (
            struct.pack(">ii", len(data) + 1, MAGIC_RECORD_V2),
            data[8:at],
            len(topic).to_bytes(2, "big"),
            data[at + 1 :],
        )
    )


def texts(buffers: tuple[Any, ...]) -> list[bytes | None]:
    validity, offsets, data = buffers
    ends = array("i", bytes(offsets))
    return [
        bytes(data[ends[row] : ends[row + 1]])
        if validity is None or validity[row >> 3] >> (row & 7) & 1
        else None
        for row in range(len(ends) - 1)
    ]


def numbers(kind: str, buffers: tuple[Any, ...]) -> list[int]:
    return array(kind, bytes(buffers[0])).tolist()


def maps(buffers: tuple[Any, ...]) -> list[list[tuple[bytes | None, bytes | None]]]:
    ends = array("i", bytes(buffers[0]))
    pairs = list(zip(texts((None, *buffers[1:3])), texts((None, *buffers[3:5])), strict=True))
    return [pairs[ends[row] : ends[row + 1]] for row in range(len(ends) - 1)]


def rows_of(taken: arrow_pure.Taken) -> list[dict[str, Any]]:
    rows, buffers, _ = taken
    columns: dict[str, list[Any]] = {}
    for name, parts in buffers.items():
        kind = arrow_pure.KINDS[name]
        columns[name] = (
            maps(parts)
            if kind == "map"
            else texts(parts)
            if kind == "text"
            else numbers(kind, parts)
        )
        assert len(columns[name]) == rows
    return [{name: columns[name][row] for name in columns} for row in range(rows)]


def kept(built: Any, data: Any, **rest: Any) -> list[int]:
    """Queue offsets of the rows that one walk over sound records keeps."""
    assert built.add(data, 0, len(data), **rest) == (len(data), STOP_END)
    _, buffers, _ = built.take()
    return numbers("q", buffers["queue_offset"])


def test_every_column(builder: Any) -> None:
    data = record(
        9, b"hello", "TAGS\x01a\x02KEYS\x01k1 k2\x02UNIQ_KEY\x01id\x02own\x01\u20ac", log_offset=77
    )
    built = builder(ALL, broker="broker-a")
    assert built.add(data, 0, len(data)) == (len(data), STOP_END)
    assert (built.rows, built.records, built.last_offset) == (1, 1, 9)
    (row,) = rows_of(built.take())
    assert row == {
        "topic": b"Topic",
        "broker": b"broker-a",
        "queue_id": 3,
        "queue_offset": 9,
        "body": b"hello",
        "msg_id": b"id",
        "offset_msg_id": b"0A00000700000FA0000000000000004D",
        "tags": b"a",
        "keys": b"k1 k2",
        "properties": [
            (b"TAGS", b"a"),
            (b"KEYS", b"k1 k2"),
            (b"UNIQ_KEY", b"id"),
            (b"own", "\u20ac".encode()),
        ],
        "born_time": 1_000_000,
        "store_time": 2_000_000,
        "born_host": b"10.0.0.7:4000",
        "flag": 5,
        "sys_flag": 0,
        "reconsume_times": 1,
        "commit_log_offset": 77,
        "store_size": len(data),
    }
    assert (built.rows, built.records, built.last_offset) == (0, 1, 9)


def test_what_is_absent_is_null(builder: Any) -> None:
    built = builder(ALL)
    data = b"".join(
        record(n, properties="TAGS\x01t\x02KEYS\x01k" if n % 3 == 0 else "TAGS\x01\x02x\x01y")
        for n in range(20)
    )
    built.add(data, 0, len(data))
    for n, row in enumerate(rows_of(built.take())):
        assert row["tags"] == (b"t" if n % 3 == 0 else None)
        assert row["keys"] == (b"k" if n % 3 == 0 else None)
        assert row["broker"] is None
        assert row["msg_id"] == row["offset_msg_id"]


def test_nothing_was_added(builder: Any) -> None:
    rows, buffers, marked = builder(ALL, broker="b", marked="m").take()
    assert (rows, marked, tuple(buffers)) == (0, [], ALL)
    zero = bytes(4)
    for name, parts in buffers.items():
        kind = arrow_pure.KINDS[name]
        empty = {"map": (zero, zero, b"", zero, b""), "text": (None, zero, b"")}.get(kind, (b"",))
        assert parts == empty, name


@pytest.mark.parametrize("sys_flag", [SYS_BORN_V6, SYS_STORE_V6, SYS_BORN_V6 | SYS_STORE_V6])
def test_hosts_of_sixteen_bytes(builder: Any, sys_flag: int) -> None:
    data = record(1, sys_flag=sys_flag) + record(2)
    built = builder(ALL)
    assert built.add(data, 0, len(data)) == (len(data), STOP_END)
    first, second = rows_of(built.take())
    born = b"[fe80::1]:65535" if sys_flag & SYS_BORN_V6 else b"10.0.0.7:4000"
    assert (first["born_host"], second["born_host"]) == (born, b"10.0.0.7:4000")
    store = V6 if sys_flag & SYS_STORE_V6 else V4
    assert first["offset_msg_id"] == (store + bytes(8)).hex().upper().encode()


def test_the_second_version(builder: Any) -> None:
    long = "long" * 50
    data = v2(record(1, properties="TAGS\x01x")) + record(2)
    built = builder(ALL)
    assert built.add(data, 0, len(data)) == (len(data), STOP_END)
    first, second = rows_of(built.take())
    assert first == second | {
        "queue_offset": 1,
        "tags": b"x",
        "properties": [(b"TAGS", b"x")],
        "store_size": len(data) - len(record(2)),
    }
    plain = record(3, topic="T" * 100)
    at = plain.rindex(b"T" * 100)
    data = b"".join(
        (
            struct.pack(">ii", len(plain) + 101, MAGIC_RECORD_V2),
            plain[8 : at - 1],
            struct.pack(">h", 200),
            long.encode(),
            plain[at + 100 :],
        )
    )
    assert built.add(data, 0, len(data)) == (len(data), STOP_END)
    assert rows_of(built.take())[0]["topic"] == long.encode()


@pytest.mark.parametrize("sys_flag", COMPRESSIONS)
def test_bodies_are_plain(builder: Any, sys_flag: int) -> None:
    body = b"many words " * 500
    data = record(1, compress(body, sys_flag), sys_flag=sys_flag) + record(2)
    built = builder(ALL)
    assert built.add(data, 0, len(data)) == (len(data), STOP_END)
    first, second = rows_of(built.take())
    assert (first["body"], first["sys_flag"]) == (body, sys_flag)
    assert second["body"] == b"body"


@pytest.mark.parametrize("sys_flag", [*COMPRESSIONS, SYS_COMPRESSED | 0x700])
def test_a_packed_body_that_is_none(builder: Any, sys_flag: int) -> None:
    good = record(1)
    bad = record(2, b"\x00not packed at all", sys_flag=sys_flag)
    data = good + bad + record(3)
    built = builder(ALL)
    assert built.add(data, 0, len(data)) == (len(good), STOP_CORRUPT)
    assert "compress" in built.fault and built.fault_size == len(bad)
    assert (built.rows, built.records, built.last_offset) == (1, 1, 1)
    assert built.add(data, len(good) + built.fault_size, len(data)) == (len(data), STOP_END)
    assert [row["queue_offset"] for row in rows_of(built.take())] == [1, 3]
    assert kept(builder(("queue_offset",)), data) == [1, 2, 3]  # nobody asks for bodies


@pytest.mark.parametrize("sys_flag", [0, *COMPRESSIONS])
def test_bodies_have_a_cap(builder: Any, sys_flag: int) -> None:
    data = record(1, compress(bytes(2_000), sys_flag), sys_flag=sys_flag)
    built = builder(("body",), body_bytes_max=1_999)
    assert built.add(data, 0, len(data)) == (0, STOP_CORRUPT)
    assert "1999" in built.fault and built.fault_size == len(data)
    built = builder(("body",), body_bytes_max=2_000)
    assert built.add(data, 0, len(data)) == (len(data), STOP_END)


def test_a_wrong_checksum(builder: Any) -> None:
    good, bad = record(1), bytearray(record(2, b"AAAA"))
    bad[bad.index(b"AAAA")] = 66
    data = good + bytes(bad) + record(3)
    built = builder(ALL)
    assert built.add(data, 0, len(data)) == (len(good), STOP_CORRUPT)
    assert "checksum" in built.fault and built.fault_size == len(bad)
    assert kept(builder(ALL, check_crc=False), data) == [1, 2, 3]
    assert kept(builder(ALL), data, low=3) == [3]  # who is dropped is not examined
    assert built.add(data, len(good) + len(bad), len(data)) == (len(data), STOP_END)
    assert built.fault == "" and built.fault_size == 0


def at_byte(data: bytes, at: int, what: bytes) -> bytes:
    return data[:at] + what + data[at + len(what) :]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (at_byte(record(), 4, b"\x12\x34\x56\x78"), "magic 0x12345678"),
        (at_byte(record(), 0, b"\0\0\0\x5a"), "90 bytes"),
        (at_byte(record(), 0, b"\xff\xff\xff\xff"), "-1 bytes"),
        (at_byte(record(body=b""), 39, b"\x30"), "hosts"),
        (at_byte(record(), 84, b"\x7f"), "body"),
        (at_byte(record(), 84, b"\xff"), "body"),
        (at_byte(record(), 92, b"\x7f"), "topic"),
        (at_byte(record(), 92, b"\xff"), "topic"),
        (at_byte(record(), 92, b"\x04"), "add up"),
        (at_byte(record(properties="a\x01b"), 98, b"\x00\x04"), "add up"),
        (at_byte(record(properties="a\x01b"), 98, b"\xff\xff"), "add up"),
    ],
)
def test_structure_that_is_damaged(builder: Any, data: bytes, said: str) -> None:
    built = builder(ALL)
    whole = record(1) + data + record(2)
    assert built.add(whole, 0, len(whole)) == (len(record(1)), STOP_CORRUPT)
    assert said in built.fault and built.fault_size == 0
    assert built.rows == 1


def test_log_offsets(builder: Any) -> None:
    first = record(1, log_offset=1000)
    data = first + record(2, log_offset=1000 + len(first))
    assert kept(builder(ALL), data, base=1000) == [1, 2]
    built = builder(ALL)
    padded = bytes(10) + data
    assert built.add(padded, 10, len(padded), base=990) == (len(padded), STOP_END)
    assert built.add(data, 0, len(data), base=999) == (0, STOP_CORRUPT)
    assert "log offset 1000" in built.fault and built.fault_size == 0
    wrapped = at_byte(record(), RECORD_LOG_OFFSET_AT, struct.pack(">q", -(1 << 63)))
    assert built.add(b"\0" + wrapped, 1, 1 + len(wrapped), base=(1 << 63) - 1) == (1, STOP_CORRUPT)


def test_the_end_of_a_file(builder: Any) -> None:
    data = record(1)
    size = len(data)
    blank = struct.pack(">iI", 500, 0xCBD43194) + bytes(20)
    for rest, stop in (
        (blank, STOP_BLANK),
        (bytes(100), STOP_EMPTY),
        (bytes(3), STOP_EMPTY),
        (b"\0\0\1", STOP_PARTIAL),
        (record(2)[:-1], STOP_PARTIAL),
        (record(2)[:8], STOP_PARTIAL),
        (b"", STOP_END),
    ):
        built = builder(ALL)
        assert built.add(data + rest, 0, size + len(rest)) == (size, stop)
        assert built.rows == 1 and not built.fault


def test_rows_have_a_limit(builder: Any) -> None:
    data = b"".join(record(n) for n in range(10))
    size = len(record())
    built = builder(ALL, rows_max=4)
    assert built.add(data, 0, len(data)) == (4 * size, STOP_FULL)
    assert built.add(data, 4 * size, len(data)) == (4 * size, STOP_FULL)
    assert built.take()[0] == 4
    assert built.add(data, 4 * size, 8 * size) == (8 * size, STOP_END)
    assert built.take()[0] == 4
    assert built.add(data, 8 * size, len(data)) == (len(data), STOP_END)
    assert built.records == 10 and built.take()[0] == 2


def test_bytes_have_a_limit(builder: Any) -> None:
    data = b"".join(record(n, bytes(100)) for n in range(10))
    size = len(record(0, bytes(100)))
    built = builder(("body",), bytes_max=250)
    assert built.add(data, 0, len(data)) == (3 * size, STOP_FULL)
    built = builder(("queue_offset",), bytes_max=250)
    assert built.add(data, 0, len(data)) == (len(data), STOP_END)
    built = builder(("body",), bytes_max=1)  # at least one always fits
    assert built.add(data, 0, len(data)) == (size, STOP_FULL)


def test_filters(builder: Any) -> None:
    data = b"".join(
        record(
            n,
            properties=f"TAGS\x01t{n % 3}",
            queue_id=n % 4,
            store_ms=100 * n,
            topic=f"Topic{n % 2}",
            sys_flag=(0, SYS_PREPARED, SYS_COMMIT, SYS_ROLLBACK)[n % 4],
        )
        for n in range(12)
    )
    every = list(range(12))

    def rows(low: int = 0, high: int = 100, **filters: Any) -> list[int]:
        built = builder(ALL, **filters)
        found = kept(built, data, low=low, high=high)
        assert (built.records, built.last_offset) == (12, 11)
        return found

    assert rows() == every
    assert rows(low=3, high=7) == [3, 4, 5, 6]
    assert rows(topics=frozenset({"Topic1", "Other"})) == every[1::2]
    assert rows(topics=frozenset()) == []
    assert rows(queue_ids=frozenset({1, 2})) == [1, 2, 5, 6, 9, 10]
    assert rows(tags=frozenset({"t1"})) == every[1::3]
    assert rows(tags=frozenset({f"t{n}" for n in range(1, 50)})) == [n for n in every if n % 3]
    assert rows(tags=frozenset({"T1", "\ud800"})) == []
    assert rows(since_ms=300, until_ms=600) == [3, 4, 5]
    assert rows(skip_unseen=True) == every[::2]
    assert rows(low=2, tags=frozenset({"t0"}), skip_unseen=True) == [6]


def test_a_tag_filter_drops_what_has_none(builder: Any) -> None:
    data = (
        record(1)
        + record(2, properties="TAGS\x01\x02KEYS\x01a")
        + record(3, properties="TAGS\x01a")
    )
    assert kept(builder(ALL, tags=frozenset({"a", ""})), data) == [3]


def test_marked_rows(builder: Any) -> None:
    data = b"".join(record(n, properties=f"mark\x01\u20ac{n}" if n % 2 else "") for n in range(6))
    built = builder(("queue_offset",), marked="mark")
    built.add(data, 0, len(data), low=2)
    assert built.take()[2] == [(1, "\u20ac3"), (3, "\u20ac5")]
    assert built.take()[2] == []


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        (b"", {}),
        (b"a", {}),
        (b"\x01b\x02a\x01\x02\x02", {}),
        (b"a\x01b\x02", {"a": "b"}),
        (b"a\x01b\x01c\x02a\x01d", {"a": "d"}),
        (b"a\x011\x02b\x012\x02a\x013\x02a\x01", {"a": "3", "b": "2"}),
        (b"\xff\x01\xfe\x02\xfd\x01x", {"\ufffd": "x"}),
        ("\u00e9\x01\U0001f680".encode(), {"\u00e9": "\U0001f680"}),
        (b"a\x01\xe2\x82\x02b\x01\xed\xa0\x80", {"a": "\ufffd", "b": "\ufffd" * 3}),
        (b"a\x01\0", {"a": "\0"}),
        (b"\x02".join(b"%d\x01%d" % (n % 90, n) for n in range(200)), None),
        (b"\x02".join(b"%d\x01v" % n for n in range(3000)), None),
        (b"a\x01b\x02" * 8191, {"a": "b"}),
    ],
)
def test_properties(builder: Any, text: bytes, pairs: dict[str, str] | None) -> None:
    if pairs is None:
        pairs = arrow_pure.parse_pairs(text.decode())
        assert len(pairs) > 64
    plain = record(1)
    data = b"".join(
        (
            struct.pack(">i", len(plain) + len(text)),
            plain[4:-2],
            struct.pack(">h", len(text)),
            text,
        )
    )
    built = builder(("properties", "queue_offset"))
    assert built.add(data + plain, 0, len(data + plain)) == (len(data + plain), STOP_END)
    first, second = rows_of(built.take())
    assert first["properties"] == [(a.encode(), b.encode()) for a, b in pairs.items()]
    assert second["properties"] == []


def test_topics_that_are_no_text(builder: Any) -> None:
    data = bytearray(record(1) + record(2))
    data[data.index(b"Topic")] = 0xFF
    built = builder(("topic", "queue_offset"), topics=frozenset({"\ufffdopic"}))
    assert built.add(data, 0, len(data)) == (len(data), STOP_END)
    assert rows_of(built.take()) == [{"topic": "\ufffdopic".encode(), "queue_offset": 1}]


def test_times_that_no_calendar_has(builder: Any) -> None:
    data = record(born_ms=-(1 << 63), store_ms=(1 << 63) - 2)
    built = builder(("born_time", "store_time"))
    built.add(data, 0, len(data))
    (row,) = rows_of(built.take())
    assert row == {"born_time": -62_135_596_800_000_000, "store_time": 253_402_300_799_999_000}


def test_what_records_may_lie_in(builder: Any, tmp_path: Path) -> None:
    data = record(1) + record(2)
    for form in (data, bytearray(data), memoryview(data), memoryview(b"x" + data)[1:]):
        assert kept(builder(ALL), form) == [1, 2]
    held = bytearray(data)
    built = builder(ALL)
    built.add(held, 0, len(held))
    held.clear()  # nothing holds on to the bytes
    assert built.take()[0] == 2
    path = tmp_path / "log"
    path.write_bytes(data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        assert builder(ALL).add(whole, 0, len(data)) == (len(data), STOP_END)


@pytest.mark.parametrize(("at", "end"), [(-1, 3), (4, 3), (0, 11)])
def test_places_outside(builder: Any, at: int, end: int) -> None:
    built = builder(ALL)
    with pytest.raises(ValueError, match="outside of 10"):
        built.add(bytes(10), at, end)
    with pytest.raises(TypeError):
        built.add("text", 0, 1)
    assert built.add(bytes(10), 0, 10) == (0, STOP_EMPTY)


@pytest.mark.parametrize(
    ("columns", "limits"),
    [
        (("nonsense",), {}),
        (("body", "body"), {}),
        (ALL, {"rows_max": 0}),
        (ALL, {"rows_max": 1 << 25}),
        (ALL, {"bytes_max": 0}),
        (ALL, {"body_bytes_max": -1}),
        (ALL, {"bytes_max": 1 << 30, "body_bytes_max": 1 << 30}),
        (ALL, {"rows_max": 1 << 24, "broker": "b" * 200}),
    ],
)
def test_arguments_are_checked(builder: Any, columns: Any, limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        builder(columns, **limits)


def test_no_columns_count_rows(builder: Any) -> None:
    data = record(1) + record(2)
    built = builder(())
    built.add(data, 0, len(data))
    assert built.take() == (2, {}, [])


def test_buffers_stay_as_they_were(builder: Any) -> None:
    data = b"".join(record(n, bytes((n,)) * 50) for n in range(100))
    built = builder(ALL, rows_max=10)
    taken, at = [], 0
    while at < len(data):
        at, _ = built.add(data, at, len(data))
        taken.append(built.take())
    rows = [row for part in taken for row in rows_of(part)]
    assert [row["body"] for row in rows] == [bytes((n,)) * 50 for n in range(100)]


def test_the_choice() -> None:
    from cosmodrome.speed import FLAVOUR

    module = arrow.ColumnBuilder.__module__
    assert module == f"cosmodrome.speed.arrow.{FLAVOUR}"


def test_one_thread_at_a_time() -> None:
    """The compiled builder lets others run while it decompresses; they must not come in."""
    if len(twins()) < 2:
        pytest.skip("the compiled twin is not built")
    native = twins()[1]
    body = bytes(20 << 20)
    data = record(1, compress(body, SYS_COMPRESSED), sys_flag=SYS_COMPRESSED) * 3
    refused = 0
    while not refused:  # a busy machine may not let this thread run in between
        built = native.ColumnBuilder(("body",), bytes_max=1 << 30)
        thread = threading.Thread(target=built.add, args=(data, 0, len(data)))
        thread.start()
        while thread.is_alive():
            try:
                built.take()
            except RuntimeError:
                refused += 1
            time.sleep(0.001)
        thread.join()
        assert built.records == 3
