"""Log files as batches: every record once, whatever the ranges, and damage said exactly."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.goldens import Golden, each_golden
from tests.unit.spark.log_kit import (
    FIRST_MS,
    HARMS,
    Harm,
    Sent,
    StoredRecord,
    flip,
    harm_body,
    harm_magic,
    make_log,
    overwrite,
)

import cosmodrome
from cosmodrome.env.base import SegmentFile
from cosmodrome.env.real import RealDisk
from cosmodrome.errors import ConfigError, StoreCorrupt, StoreError
from cosmodrome.layout import SYS_PREPARED
from cosmodrome.spark.read import segments, splits
from cosmodrome.spark.read.options import ReadOptions
from cosmodrome.spark.read.rows import COLUMNS, arrow_schema
from cosmodrome.spark.read.splits import plan_splits, read_split
from cosmodrome.speed.arrow import ColumnBuilder
from cosmodrome.speed.arrow import pure as arrow_pure

TWINS: list[ModuleType] = [arrow_pure]
try:
    from cosmodrome.speed.arrow import native as arrow

    TWINS.append(arrow)
except ImportError:
    if os.environ.get("COSMODROME_REQUIRE_NATIVE"):
        raise

WIDE = 1 << 26


@pytest.fixture(params=TWINS, ids=lambda twin: twin.__name__.rpartition(".")[2])
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "ColumnBuilder", request.param.ColumnBuilder)
    monkeypatch.setattr(splits, "ColumnBuilder", request.param.ColumnBuilder)


def options(path: Path, split_bytes: int = WIDE, **values: str) -> ReadOptions:
    parsed = ReadOptions.parse({"storePath": str(path), **values})
    return dataclasses.replace(parsed, split_bytes=split_bytes)


def read(path: Path, split_bytes: int = WIDE, **values: str) -> list[dict[str, Any]]:
    chosen = options(path, split_bytes, **values)
    rows = []
    for split in plan_splits(chosen):
        for batch in read_split(split, chosen):
            batch.validate(full=True)
            assert batch.num_rows
            assert batch.schema == arrow_schema(chosen.columns, chosen.corrupt)
            rows += batch.to_pylist()
    return rows


def offsets_read(rows: list[dict[str, Any]]) -> list[int]:
    return [row["commit_log_offset"] for row in rows if not row.get("_corrupt_record")]


def damages(rows: list[dict[str, Any]]) -> list[str]:
    return [row["_corrupt_record"] for row in rows if row["_corrupt_record"]]


def several(count: int = 24) -> list[Sent]:
    chance = random.Random(5)
    return [
        Sent(f"T{n % 3}", n % 2, chance.randbytes(chance.choice((0, 3, 60, 200))))
        for n in range(count)
    ]


# --- stores of others, and ours ----------------------------------------------------------------
@each_golden
def test_a_java_store_is_read_as_java_reads_it(golden: Golden, twin: None) -> None:
    rows = read(golden.path / "store", 5000, includeSystem="true", brokerName="b")
    walk = golden.manifest("store")["commitlog_walk"]
    assert len(rows) == len(walk)
    for row, fact in zip(rows, walk, strict=True):
        assert row["topic"] == fact["topic"]
        assert row["queue_id"] == fact["queueId"]
        assert row["queue_offset"] == fact["queueOffset"]
        assert row["commit_log_offset"] == fact["commitLogOffset"]
        assert row["store_size"] == fact["storeSize"]
        assert row["sys_flag"] == fact["sysFlag"]
        assert row["born_host"] == fact["bornHost"]
        assert row["store_time"].timestamp() * 1000 == pytest.approx(fact["storeTimestamp"])
        assert row["reconsume_times"] == fact["reconsumeTimes"]
        assert row["broker"] == "b"
        assert row["_corrupt_record"] is None


@each_golden
@pytest.mark.parametrize("name", ["store", "store-crash", "store-torn"])
def test_the_size_of_the_ranges_does_not_matter(golden: Golden, name: str) -> None:
    golden.skip_without(f"{name}.manifest.json")
    whole = read(golden.path / name)
    assert not damages(whole)
    file_bytes = golden.sizes["mapped_file_size_commit_log"]
    for split_bytes in (file_bytes // 13, file_bytes // 3):
        assert read(golden.path / name, split_bytes) == whole


@each_golden
@pytest.mark.parametrize("name", ["store-crash", "store-torn"])
def test_what_a_crash_left_unfinished_is_the_end(golden: Golden, name: str) -> None:
    golden.skip_without(f"{name}.manifest.json")
    rows = read(golden.path / name, mode="failFast", includeSystem="true")
    assert len(rows) == golden.manifest(name)["commitlog_walk_count"]


async def test_our_own_store_while_the_broker_runs(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with cosmodrome.embedded(data=str(store)) as node:
        async with cosmodrome.Producer(node.namesrv, group="g") as producer:
            for number in range(40):
                await producer.send(cosmodrome.Message("Live", f"{number}".encode()))
        rows = read(store, 1 << 10, subscribe="Live", mode="failFast")
        assert sorted(int(row["body"]) for row in rows) == list(range(40))
    assert read(store, 1 << 12, subscribe="Live", mode="failFast") == rows


# --- ranges --------------------------------------------------------------------------------------
@pytest.mark.parametrize("split_bytes", [1, 17, 64, 91, 128, 200, 333, 1000, 2048, 5000])
def test_every_record_once(tmp_path: Path, twin: None, split_bytes: int) -> None:
    records = make_log(tmp_path / "commitlog", several(10 if split_bytes < 64 else 24), 700)
    assert len({record.path for record in records}) > 2
    rows = read(tmp_path, split_bytes)
    assert offsets_read(rows) == [record.log_offset for record in records]
    assert not damages(rows)


def test_a_log_directory_itself_is_fine_too(tmp_path: Path) -> None:
    records = make_log(tmp_path / "log", several())
    (tmp_path / "log" / "notes.txt").write_text("not a segment")
    assert len(read(tmp_path / "log")) == len(records)


def test_a_log_whose_first_files_expired(tmp_path: Path) -> None:
    records = make_log(tmp_path / "commitlog", several(), 2048)
    records[0].path.unlink()
    left = [record.log_offset for record in records if record.path.exists()]
    assert offsets_read(read(tmp_path, mode="failFast")) == left


def test_files_made_ahead_are_not_the_log(tmp_path: Path) -> None:
    records = make_log(tmp_path / "commitlog", several(), 4096)
    base = int(records[-1].path.name)
    for ahead in (1, 2):
        (tmp_path / "commitlog" / f"{base + ahead * 4096:020d}").write_bytes(bytes(4096))
    assert len(read(tmp_path, 500, mode="failFast")) == len(records)


def test_holes_are_not_planned(tmp_path: Path) -> None:
    records = make_log(tmp_path / "commitlog", several(), 1 << 16)
    path = records[-1].path
    data = path.read_bytes().rstrip(b"\0")
    path.write_bytes(data)
    os.truncate(path, 1 << 30)
    planned = plan_splits(options(tmp_path))
    if len(planned) > 1:
        pytest.skip("this file system does not tell holes")
    assert planned[0].end <= 1 << 16
    assert planned[0].file_bytes == 1 << 30
    assert len(read(tmp_path, mode="failFast")) == len(records)


def test_an_empty_log_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    assert read(tmp_path) == []
    (tmp_path / "commitlog" / f"{0:020d}").write_bytes(bytes(4096))
    assert read(tmp_path) == []


def test_a_record_longer_than_ranges(tmp_path: Path, twin: None) -> None:
    sent = [Sent(body=b"a" * 5000), Sent(body=b"b"), Sent(body=bytes(9000)), Sent(body=b"c")]
    make_log(tmp_path / "commitlog", sent, 1 << 15)
    assert [row["body"] for row in read(tmp_path, 512)] == [message.body for message in sent]


def test_more_rows_than_a_batch_holds(tmp_path: Path, twin: None) -> None:
    make_log(tmp_path / "commitlog", [Sent(body=b"%d" % n) for n in range(9000)], 4 << 20)
    chosen = options(tmp_path)
    batches = [b for split in plan_splits(chosen) for b in read_split(split, chosen)]
    assert [batch.num_rows for batch in batches] == [8192, 808]


# --- the end of the log ------------------------------------------------------------------------
@pytest.mark.parametrize("split_bytes", [100, WIDE])
def test_a_last_record_cut_off_anywhere_is_no_damage(
    tmp_path: Path, twin: None, split_bytes: int
) -> None:
    records = make_log(tmp_path / "commitlog", [Sent(body=b"12345")] * 4, 1024)
    last = records[-1]
    for written in range(last.size - 1, -1, -1):
        if not last.path.read_bytes()[last.position + written]:
            continue  # as before
        overwrite(last.path, last.position + written, b"\0")
        rows = read(tmp_path, split_bytes, mode="failFast")
        assert offsets_read(rows) == [record.log_offset for record in records[:-1]], written


def test_a_whole_last_record_without_properties_is_read(tmp_path: Path, twin: None) -> None:
    make_log(tmp_path / "commitlog", [Sent()])
    path = tmp_path / "commitlog" / f"{0:020d}"
    data = path.read_bytes().rstrip(b"\0")
    text_bytes = len(b"UNIQ_KEY\x01ID0000\x02")
    bare = len(data) - text_bytes
    path.write_bytes(bare.to_bytes(4, "big") + data[4 : bare - 2] + bytes(4096 - bare + 2))
    assert [row["properties"] for row in read(tmp_path, mode="failFast")] == [[]]


def test_the_log_may_grow_between_two_batches(tmp_path: Path, monkeypatch: Any) -> None:
    """The second half is written while the first is read: a prefix comes, and no damage."""
    records = make_log(tmp_path / "commitlog", several(), 1 << 16)
    half = records[len(records) // 2]
    whole = half.path.read_bytes()
    overwrite(half.path, half.position, bytes(len(whole) - half.position))
    builder_of = ColumnBuilder

    def small(*args: Any, **rest: Any) -> Any:
        return builder_of(*args, **rest, rows_max=2)

    monkeypatch.setattr(splits, "ColumnBuilder", small)
    chosen = options(tmp_path, mode="failFast")
    (split,) = plan_splits(chosen)
    batches = read_split(split, chosen)
    found = [next(batches)]
    overwrite(half.path, half.position, whole[half.position :])
    found += batches
    count = sum(batch.num_rows for batch in found)
    assert len(records) // 2 <= count <= len(records)


def test_zeros_before_records_are_damage_also_in_the_last_file(tmp_path: Path, twin: None) -> None:
    records = make_log(tmp_path / "commitlog", several(6), 4096)
    overwrite(records[2].path, records[2].position, bytes(records[2].size))
    rows = read(tmp_path)
    assert len(offsets_read(rows)) == 5
    (text,) = damages(rows)
    assert text.endswith(
        f"at {records[2].position}: zeros where a record should begin;"
        f" resumed at {records[3].position}"
    )


# --- damage --------------------------------------------------------------------------------------
each_harm = pytest.mark.parametrize(
    "harm", HARMS, ids=lambda harm: harm.__name__.removeprefix("harm_")
)


def sent_for_harm() -> list[Sent]:
    return [Sent(f"T{n % 3}", n % 2, b"%03d" % n * 20) for n in range(24)]


@each_harm
@pytest.mark.parametrize("split_bytes", [50, 191, WIDE])
def test_permissive_has_one_row_per_damaged_place(
    tmp_path: Path, twin: None, harm: Harm, split_bytes: int
) -> None:
    records = make_log(tmp_path / "commitlog", sent_for_harm(), 2048)
    first, behind = harm(records)
    rows = read(tmp_path, split_bytes, brokerName="b")
    left = records[:first] + records[behind:]
    assert offsets_read(rows) == [record.log_offset for record in left]
    (text,) = damages(rows)
    assert text.startswith(f"{records[first].path} at {records[first].position}: ")
    if behind == len(records):
        assert text.endswith("; no record follows")
    elif records[behind].path == records[first].path:
        assert text.endswith(f"; resumed at {records[behind].position}")
    else:
        assert text.endswith(f"; resumed at {records[behind].path.name} at 0")
    (row,) = [row for row in rows if row["_corrupt_record"]]
    known = {name for name, value in row.items() if value is not None}
    assert known == {"commit_log_offset", "broker", "_corrupt_record"}
    assert row["commit_log_offset"] == records[first].log_offset


@each_harm
def test_drop_malformed_says_it_once_in_the_log(
    tmp_path: Path, harm: Harm, caplog: pytest.LogCaptureFixture
) -> None:
    records = make_log(tmp_path / "commitlog", sent_for_harm(), 2048)
    first, behind = harm(records)
    with caplog.at_level(logging.WARNING, "cosmodrome.spark.read.splits"):
        rows = read(tmp_path, 300, mode="dropMalformed")
    assert len(rows) == len(records) - (behind - first)
    assert "_corrupt_record" not in rows[0]
    (line,) = caplog.messages
    assert f"{records[first].path} at {records[first].position}: " in line


@each_harm
def test_fail_fast_names_file_and_position(tmp_path: Path, twin: None, harm: Harm) -> None:
    records = make_log(tmp_path / "commitlog", sent_for_harm(), 2048)
    first, _ = harm(records)
    with pytest.raises(StoreCorrupt) as failed:
        read(tmp_path, 300, mode="failFast")
    assert f"{records[first].path} at {records[first].position}: " in str(failed.value)
    assert "mode=permissive" in str(failed.value)


def test_a_lost_file_is_said(tmp_path: Path) -> None:
    records = make_log(tmp_path / "commitlog", sent_for_harm(), 1024)
    files = sorted({record.path for record in records})
    files[1].unlink()
    rows = read(tmp_path, 300)
    assert len(offsets_read(rows)) == len([p for p in records if p.path != files[1]])
    (text,) = damages(rows)
    assert text == (
        f"{files[0]} at 1024: the log from 1024 to 2048 is missing: a file was lost or cut short;"
        f" resumed at {files[2].name} at 0"
    )


def test_a_file_of_zeros_between_others_is_damage(tmp_path: Path, twin: None) -> None:
    records = make_log(tmp_path / "commitlog", sent_for_harm(), 1024)
    files = sorted({record.path for record in records})
    for hole in (False, True):
        if hole:
            os.truncate(files[1], 0)
            os.truncate(files[1], 1024)
        else:
            files[1].write_bytes(bytes(1024))
        (text,) = damages(read(tmp_path, 300))
        assert text.startswith(f"{files[1]} at 0: zeros where a record should begin")


def test_damage_over_many_ranges_and_lines_are_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = make_log(tmp_path / "commitlog", [Sent(body=b"x" * 40)] * 1200, 1 << 18)
    for record in records:
        flip(record.path, record.position + 90)
    assert len(damages(read(tmp_path, 1 << 10))) == 1200
    with caplog.at_level(logging.WARNING, "cosmodrome.spark.read.splits"):
        assert read(tmp_path, mode="dropMalformed") == []
    assert len(caplog.messages) == splits.DAMAGE_LINES_MAX + 1
    assert caplog.messages[-1] == "1200 damaged places skipped in all"


def test_without_the_column_damage_is_a_row_and_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    records = make_log(tmp_path / "commitlog", sent_for_harm(), 2048)
    harm_magic(records)
    with caplog.at_level(logging.WARNING, "cosmodrome.spark.read.splits"):
        rows = read(tmp_path, columns="topic,queue_id")
    assert [row for row in rows if row["topic"] is None] == [{"topic": None, "queue_id": None}]
    assert len(caplog.messages) == 1


def test_unchecked_bodies_are_not_damage(tmp_path: Path, twin: None) -> None:
    records = make_log(tmp_path / "commitlog", sent_for_harm(), 2048)
    harm_body(records)
    assert len(read(tmp_path, mode="failFast", checkCrc="false")) == len(records)


@pytest.mark.parametrize("seed", range(6))
def test_any_harm_at_all(tmp_path: Path, twin: None, seed: int) -> None:
    """Random bytes anywhere: nothing raises, every untouched record comes once, in every cut."""
    chance = random.Random(seed)
    records = make_log(tmp_path / "commitlog", several(30), 2048)
    hurt: list[tuple[Path, int, int]] = []
    for _ in range(chance.randint(1, 4)):
        path = chance.choice(records).path
        at, length = chance.randrange(2000), chance.choice((1, 4, 48, 300))
        data = chance.choice((bytes(length), chance.randbytes(length)))[: 2048 - at]
        overwrite(path, at, data)
        hurt.append((path, at, at + len(data)))

    def untouched(record: StoredRecord) -> bool:
        return not any(
            path == record.path and start < record.position + record.size and record.position < end
            for path, start, end in hurt
        )

    whole = read(tmp_path)
    for split_bytes in (120, 600):
        rows = read(tmp_path, split_bytes)
        assert sorted(offsets_read(rows)) == sorted(offsets_read(whole))
        assert sorted(damages(rows)) == sorted(damages(whole))
    assert {p.log_offset for p in records if untouched(p)} <= set(offsets_read(whole))
    assert len(set(offsets_read(whole))) == len(offsets_read(whole))


# --- what is wanted ------------------------------------------------------------------------------
def mixed() -> list[Sent]:
    return [
        Sent("A", 0, b"0", tags="red"),
        Sent("A", 1, b"1", tags="blue"),
        Sent("B", 0, b"2"),
        Sent("B", 1, b"3", tags="red"),
        Sent("%RETRY%g", 0, b"4"),
        Sent("RMQ_SYS_TRANS_HALF_TOPIC", 0, b"5"),
        Sent("rmq_sys_wheel_timer", 0, b"6"),
        Sent("A", 0, b"7", sys_flag=SYS_PREPARED),
        Sent("AB", 0, b"8"),
    ]


@pytest.mark.parametrize(
    ("filters", "bodies"),
    [
        ({}, "012348"),
        ({"includeSystem": "true"}, "012345678"),
        ({"subscribe": "A"}, "01"),
        ({"subscribe": "A,AB"}, "018"),
        ({"subscribe": "RMQ_SYS_TRANS_HALF_TOPIC"}, "5"),
        ({"subscribePattern": "A.*"}, "018"),
        ({"subscribePattern": ".*"}, "01238"),
        ({"subscribePattern": ".*", "includeRetry": "true"}, "012348"),
        ({"subscribePattern": ".*", "includeSystem": "true"}, "0123567" + "8"),
        ({"subscribePattern": "nothing"}, ""),
        ({"assign": '{"A":{"b":[1]},"B":{"b":[0]}}'}, "12"),
        ({"assign": '{"A":{"b":[0,1]}}'}, "01"),
        ({"assign": '{"A":{"b":[0]},"B":{"c":[0]}}', "brokerName": "c"}, "2"),
        ({"tags": "red"}, "03"),
        ({"tags": "red || blue", "subscribe": "A"}, "01"),
        ({"startingTimestamp": str(FIRST_MS + 30)}, "348"),
        ({"endingTimestamp": str(FIRST_MS + 20)}, "01"),
        (
            {
                "startingTimestamp": str(FIRST_MS + 10),
                "endingTimestamp": str(FIRST_MS + 30),
            },
            "12",
        ),
    ],
)
def test_filters(tmp_path: Path, twin: None, filters: dict[str, str], bodies: str) -> None:
    make_log(tmp_path / "commitlog", mixed())
    rows = read(tmp_path, 300, **filters)
    assert b"".join(row["body"] for row in rows).decode() == bodies
    few = read(tmp_path, 300, columns="body", **filters)
    assert few == [{"body": row["body"]} for row in rows]


def test_columns_and_their_order(tmp_path: Path) -> None:
    make_log(tmp_path / "commitlog", mixed())
    rows = read(tmp_path, columns="queue_id,topic", subscribe="B")
    assert [list(row) for row in rows] == [["queue_id", "topic"]] * 2
    (row,) = read(tmp_path, subscribe="AB")
    assert list(row) == [*COLUMNS, "_corrupt_record"]
    assert row["broker"] is None
    assert row["msg_id"] == "ID0008"
    at = datetime.datetime.fromtimestamp((FIRST_MS + 80) / 1000, datetime.UTC)
    assert row["store_time"] == at


def test_a_filter_does_not_ask_for_system_topics(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    from pyspark.sql.datasource import In

    from cosmodrome.spark.read.pushdown import PushedFilters
    from cosmodrome.spark.source import narrowed

    make_log(tmp_path / "commitlog", mixed())
    for names, bodies in (
        (("B", "rmq_sys_wheel_timer"), [b"2", b"3"]),
        (("rmq_sys_wheel_timer",), []),
    ):
        filters = PushedFilters()
        filters.take([In(("topic",), names)])
        chosen = narrowed(options(tmp_path), filters)
        found = [
            row["body"]
            for split in plan_splits(chosen)
            for batch in read_split(split, chosen)
            for row in batch.to_pylist()
            if row["topic"] in names
        ]
        assert found == bodies


# --- what goes wrong -----------------------------------------------------------------------------
def test_a_place_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not a directory here"):
        plan_splits(options(tmp_path / "none"))
    with pytest.raises(StoreError, match="is not a store: it has no commitlog"):
        plan_splits(options(tmp_path))


def test_ranges_that_are_far_too_small_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    make_log(tmp_path / "commitlog", mixed())
    monkeypatch.setattr(splits, "SPLITS_MAX", 3)
    with pytest.raises(ConfigError, match=r"splitBytes=100 cuts .* raise it"):
        plan_splits(options(tmp_path, 100))


def test_a_file_that_expires_before_it_is_read(tmp_path: Path) -> None:
    records = make_log(tmp_path / "commitlog", mixed())
    chosen = options(tmp_path)
    (split,) = plan_splits(chosen)
    records[0].path.unlink()
    with pytest.raises(StoreError, match="a broker removed it because it expired"):
        list(read_split(split, chosen))


class Forbidden(RealDisk):
    def open_segment(self, path: str, *, read_only: bool = False) -> SegmentFile:
        raise PermissionError(13, "Permission denied", path)


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    make_log(tmp_path / "commitlog", mixed())
    with pytest.raises(StoreError, match="may not be read: run as the broker's user"):
        plan_splits(options(tmp_path), Forbidden())
    chosen = options(tmp_path)
    with pytest.raises(StoreError, match="may not be read"):
        list(read_split(plan_splits(chosen)[0], chosen, Forbidden()))
