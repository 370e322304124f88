"""Batches hold what `wire.record` says of the same bytes, in the types that Spark expects."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest
from tests.goldens import Golden, each_golden

from cosmodrome.errors import ConfigError
from cosmodrome.layout import SYS_BORN_V6, SYS_COMPRESSED, SYS_ZSTD
from cosmodrome.spark.read import rows
from cosmodrome.speed import arrow
from cosmodrome.speed.arrow import pure as arrow_pure
from cosmodrome.wire.message import compress, decompress, pack_host, unpack_host
from cosmodrome.wire.record import Record, decode_records, encode_record

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
BUILDERS: list[Any] = [arrow_pure.ColumnBuilder]
if arrow.ColumnBuilder is not arrow_pure.ColumnBuilder:
    BUILDERS.append(arrow.ColumnBuilder)


def row_of(record: Record, broker: str | None) -> dict[str, Any]:
    """A row as the value of the record says it."""
    pairs = record.pairs()
    ip, port = unpack_host(record.born_host)
    return {
        "topic": record.topic,
        "broker": broker,
        "queue_id": record.queue_id,
        "queue_offset": record.queue_offset,
        "body": decompress(record.body, record.sys_flag, 1 << 20),
        "msg_id": pairs.get("UNIQ_KEY", record.message_id),
        "offset_msg_id": record.message_id,
        "tags": pairs.get("TAGS"),
        "keys": pairs.get("KEYS"),
        "properties": list(pairs.items()),
        "born_time": EPOCH + datetime.timedelta(milliseconds=record.born_ms),
        "store_time": EPOCH + datetime.timedelta(milliseconds=record.store_ms),
        "born_host": f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}",
        "flag": record.flag,
        "sys_flag": record.sys_flag,
        "reconsume_times": record.reconsume_times,
        "commit_log_offset": record.log_offset,
        "store_size": record.size,
    }


def batch_of(builder: Any, data: bytes, columns: tuple[str, ...], **rest: Any) -> pa.RecordBatch:
    built = builder(columns, **rest)
    _, stop = built.add(data, 0, len(data))
    assert stop in (arrow.STOP_END, arrow.STOP_BLANK, arrow.STOP_EMPTY), built.fault
    count, buffers, _ = built.take()
    found = rows.batch(count, buffers, columns)
    found.validate(full=True)
    return found


def some(count: int) -> bytes:
    out = bytearray()
    for n in range(count):
        sys_flag = (0, SYS_COMPRESSED | SYS_ZSTD, SYS_BORN_V6, 0)[n % 4]
        born = pack_host("::1" if sys_flag & SYS_BORN_V6 else "10.0.0.1", n)
        text = ("", "TAGS\x01t", f"KEYS\x01\u20ac{n}\x02UNIQ_KEY\x01id{n}", "own\x01\U0001f680")[
            n % 4
        ]
        out += encode_record(
            Record(
                size=0,
                magic=0,
                body_crc=0,
                queue_id=n % 3,
                flag=n,
                queue_offset=n,
                log_offset=len(out),
                sys_flag=sys_flag,
                born_ms=1_000_000 * n,
                born_host=born,
                store_ms=n,
                store_host=pack_host("10.0.0.2", 10911),
                reconsume_times=n % 5,
                prepared_offset=0,
                body=compress(bytes(n), sys_flag),
                topic=f"Topic{n % 2}",
                properties=text,
            )
        )
    return bytes(out)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("broker", [None, "broker-a"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_a_batch_is_what_the_records_say(builder: Any, broker: str | None, count: int) -> None:
    data = some(count)
    found = batch_of(builder, data, rows.COLUMNS, broker=broker)
    assert found.schema == rows.arrow_schema()
    assert found.to_pylist() == [row_of(record, broker) for record in decode_records(data)]


@pytest.mark.parametrize("builder", BUILDERS)
@each_golden
def test_recorded_stores(builder: Any, golden: Golden) -> None:
    seen = 0
    for path in sorted((golden.path / "store" / "commitlog").iterdir()):
        data = path.read_bytes()
        built = builder((), rows_max=1 << 20)
        end, _ = built.add(data, 0, len(data))
        found = batch_of(builder, data, rows.COLUMNS, rows_max=1 << 20)
        assert found.to_pylist() == [row_of(record, None) for record in decode_records(data[:end])]
        seen += found.num_rows
    assert seen > 50


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("name", rows.COLUMNS)
def test_each_column_alone(builder: Any, name: str) -> None:
    data = some(11)
    found = batch_of(builder, data, (name,))
    assert found.schema == rows.arrow_schema((name,))
    assert found.column(0).to_pylist() == [row_of(r, None)[name] for r in decode_records(data)]


def test_the_order_is_the_caller_s() -> None:
    found = batch_of(arrow.ColumnBuilder, some(3), ("flag", "topic", "properties"))
    assert found.schema.names == ["flag", "topic", "properties"]


def test_damage_has_a_column() -> None:
    columns = ("queue_offset", "body", "properties")
    built = arrow.ColumnBuilder(columns)
    data = some(3)
    built.add(data, 0, len(data))
    count, buffers, _ = built.take()
    good = rows.batch(count, buffers, columns, corrupt=True)
    bad = rows.corrupt_batch(["torn", "bent"], columns, {"queue_offset": [5, None]})
    for each in (good, bad):
        each.validate(full=True)
        assert each.schema == rows.arrow_schema(columns, corrupt=True)
    assert good.column(3).to_pylist() == [None] * 3
    assert bad.to_pylist() == [
        {"queue_offset": offset, "body": None, "properties": None, "_corrupt_record": why}
        for offset, why in ((5, "torn"), (None, "bent"))
    ]


def test_names_are_checked() -> None:
    assert rows.check_columns(["body", "topic"]) == ("body", "topic")
    with pytest.raises(ConfigError, match=r"called Body, x; there are topic, broker, .*store_size"):
        rows.check_columns(["Body", "topic", "x"])
    with pytest.raises(ConfigError, match="no column is named"):
        rows.check_columns([])
    with pytest.raises(ConfigError, match="topic: a column is named once"):
        rows.check_columns(["topic", "body", "topic"])


@pytest.mark.parametrize("corrupt", [False, True])
def test_spark_and_arrow_mean_the_same(corrupt: bool) -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql.pandas.types import to_arrow_schema

    spark = rows.schema(corrupt=corrupt)
    assert to_arrow_schema(spark, timezone="UTC") == rows.arrow_schema(corrupt=corrupt)
    assert all(field.nullable for field in spark)
    strict = rows.schema(corrupt=corrupt, required=rows.NEVER_NULL)
    assert to_arrow_schema(strict, timezone="UTC") == rows.arrow_schema(
        rows.COLUMNS, corrupt, rows.NEVER_NULL
    )
    nullable = {field.name for field in strict if field.nullable}
    assert nullable == {"tags", "keys"} | ({rows.CORRUPT} if corrupt else set())
    assert rows.schema(("body", "topic")).names == ["body", "topic"]
    assert ("_corrupt_record" in spark.names) is corrupt
