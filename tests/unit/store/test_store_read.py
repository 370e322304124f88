"""Reading by offset, time, key and place, with upstream's statuses and limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.store.store_kit import (
    ALWAYS_MS,
    HandClock,
    bodies,
    draft,
    faulty_env,
    put,
    record_size,
    small,
)

from cosmodrome import speed
from cosmodrome.store.store import ReadStatus, Store
from cosmodrome.wire.record import decode_record, iter_records


async def opened(root: Path, clock: HandClock | None = None, **changes: Any) -> Store:
    memory_bytes = changes.pop("memory_bytes", 1 << 30)
    settings = {"mapped_file_size_commit_log": 1 << 20} | changes
    store = Store(small(root, **settings), faulty_env(clock=clock), memory_bytes=memory_bytes)
    await store.start()
    return store


async def test_the_statuses_of_upstream(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    empty = store.read("T", 0, 5, 1)
    assert (empty.status, empty.next_offset) == (ReadStatus.NO_MESSAGE_IN_QUEUE, 0)
    await put(store, *(draft(b"%d" % at, tags="t") for at in range(3)))
    cases = {
        0: (ReadStatus.FOUND, 3),
        3: (ReadStatus.OFFSET_OVERFLOW_ONE, 3),
        4: (ReadStatus.OFFSET_OVERFLOW_BADLY, 3),
        -1: (ReadStatus.OFFSET_TOO_SMALL, 0),
    }
    for offset, wanted in cases.items():
        batch = store.read("T", 0, offset, 10)
        assert (batch.status, batch.next_offset) == wanted
        assert (batch.min_offset, batch.max_offset) == (0, 3)
    nothing = store.read("T", 0, 1, 10, matches=lambda code: False)
    assert (nothing.status, nothing.next_offset, nothing.count) == (
        ReadStatus.NO_MATCHED_MESSAGE,
        3,
        0,
    )
    await store.stop()


async def test_filters_see_tags_and_records(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(b"%d" % at, tags="even" if at % 2 == 0 else "odd") for at in range(9)))
    even = speed.java_hash("even")
    batch = store.read("T", 0, 0, 3, matches=lambda code: code == even)
    assert [item.body for item in iter_records(batch.data)] == [b"0", b"2", b"4"]
    # The scan stops at the first entry it has no room for.
    assert batch.next_offset == 5
    batch = store.read("T", 0, 0, 32, matches_record=lambda view: view[88:89] in (b"3", b"7"))
    assert [item.body for item in iter_records(batch.data)] == [b"3", b"7"]
    assert (batch.count, batch.next_offset) == (2, 9)
    await store.stop()


async def test_counts_and_bytes_are_bounded_warm_and_cold(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(bytes(1000)) for _ in range(100)))
    assert store.read("T", 0, 0, 90).count == 90
    assert store.read("T", 0, 0, 5).count == 5
    await store.stop()
    upstream = await opened(tmp_path, max_transfer_count_on_message_in_memory=32)
    assert upstream.read("T", 0, 0, 90).count == 32
    await upstream.stop()
    cold = await opened(tmp_path, memory_bytes=5000)
    batch = cold.read("T", 0, 0, 100)
    assert (batch.count, batch.behind) == (8, True)
    assert not cold.in_memory("T", 0, 0)
    assert cold.in_memory("T", 0, 100) and cold.in_memory("U", 0, 0)
    assert not cold.read("T", 0, 99, 1).behind
    await cold.stop()
    few = await opened(tmp_path, max_transfer_bytes_on_message_in_memory=2500)
    size = record_size(draft(bytes(1000)))
    assert len(few.read("T", 0, 0, 100).data) == 2 * size
    await few.stop()
    one = await opened(tmp_path, max_transfer_bytes_on_message_in_memory=10)
    assert one.read("T", 0, 0, 100).count == 1
    await one.stop()


async def test_a_scan_is_bounded(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    for _ in range(3):
        await put(store, *(draft(b"") for _ in range(500)))
    batch = store.read("T", 0, 0, 1, matches=lambda code: False)
    assert (batch.status, batch.next_offset) == (ReadStatus.NO_MATCHED_MESSAGE, 800)
    batch = store.read("T", 0, 0, 1000, matches=lambda code: False)
    assert batch.next_offset == 1000
    await store.stop()


async def test_entries_of_a_queue(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(b"%02d" % at, tags="a") for at in range(12)))
    await store._upkeep.write_derived()
    await put(store, *(draft(b"%02d" % at, tags="a") for at in range(12, 20)))
    found: list[tuple[int, int, int]] = []
    while len(found) < 20:
        entries = store.entries("T", 0, len(found), 100)
        assert entries
        found += entries
    for at, (log_offset, size, code) in enumerate(found):
        record = store.record(log_offset, size)
        assert record is not None and decode_record(record).body == b"%02d" % at
        assert code == speed.java_hash("a")
    assert len(store.entries("T", 0, 0, 2)) == 2
    for topic, queue_id, offset in (("T", 0, 20), ("T", 0, -1), ("T", 1, 0), ("U", 0, 0)):
        assert store.entries(topic, queue_id, offset, 9) == []
    await store.stop()


async def test_a_read_crosses_queue_files_and_memory(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(b"%02d" % at) for at in range(12)))
    await store._upkeep.write_derived()
    await put(store, *(draft(b"%02d" % at) for at in range(12, 20)))
    batch = store.read("T", 0, 3, 32)
    assert [item.body for item in iter_records(batch.data)] == [b"%02d" % n for n in range(3, 20)]
    await store.stop()


async def test_a_lost_queue_file_is_skipped(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(b"%02d" % at) for at in range(12)))
    await store._upkeep.write_derived()
    (tmp_path / "consumequeue/T/0" / f"{100:020d}").unlink()
    batch = store.read("T", 0, 6, 32)
    assert (batch.status, batch.next_offset) == (ReadStatus.OFFSET_FOUND_NULL, 10)
    assert store.read("T", 0, 0, 32).next_offset == 5
    await store.stop()


async def test_offset_by_time_is_a_lower_bound(tmp_path: Path) -> None:
    clock = HandClock()
    store = await opened(tmp_path, clock)
    times = [1000, 1000, 2000, 2000, 2000, 5000]
    for at_ms in times:
        clock.at_ms = at_ms
        await put(store, draft())
    for when in (0, 999, 1000, 1001, 2000, 2001, 4999, 5000, 5001):
        assert store.offset_by_time("T", 0, when) == sum(1 for at in times if at < when)
    assert store.offset_by_time("U", 0, 1) == 0
    assert store.store_time("T", 0, 5) == 5000
    assert store.store_time("T", 0, 6) == store.store_time("U", 0, 0) == -1
    assert store.facts().earliest_ms == 1000
    await store.stop()


async def test_records_by_place(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    assert store.facts().earliest_ms == -1
    first, second = store.append(draft(b"a")), store.append(draft(b"b"))
    await store.durable(second.end)
    data = store.record(second.log_offset, second.size)
    assert data is not None and next(iter_records(data)).body == b"b"
    assert store.record(second.log_offset) == data
    for offset, size in ((1, None), (first.log_offset, 5), (second.end, None), (-1, None)):
        assert store.record(offset, size) is None
    await store.stop()


async def test_keys_are_found_newest_files_first_and_within_times(tmp_path: Path) -> None:
    clock = HandClock(1_000_000)
    store = await opened(tmp_path, clock)
    for at in range(40):
        clock.at_ms = 1_000_000 + at * 10_000
        await put(store, draft(b"%02d" % at, keys=f"each k{at}"))

    def found(key: str, count: int = 64, begin: int = 0, end: int = ALWAYS_MS) -> list[bytes]:
        result = store.find("T", key, count, begin, end)
        return [next(iter_records(record)).body for record in result.records]

    assert found("k7") == [b"07"]
    assert found("none") == []
    assert found("each") == [b"%02d" % at for at in range(40)]
    assert found("each", count=3) == [b"37", b"38", b"39"]
    assert found("each", begin=1_100_000, end=1_130_000) == [b"10", b"11", b"12", b"13"]
    assert store.find("U", "each", 64, 0, ALWAYS_MS).records == []
    last = store.find("T", "k39", 1, 0, ALWAYS_MS)
    assert last.last_update_ms == clock.at_ms
    assert last.last_update_offset == store.facts().max_offset - record_size(
        draft(b"39", keys="each k39")
    )
    await store.stop()


@pytest.mark.parametrize("on", [True, False])
async def test_the_index_can_be_off(tmp_path: Path, on: bool) -> None:
    store = await opened(tmp_path, message_index_enable=on)
    await put(store, draft(b"x", keys="k"))
    assert len(store.find("T", "k", 9, 0, ALWAYS_MS).records) == int(on)
    await store.stop()
    assert (tmp_path / "index").exists() is on


async def test_a_damaged_entry_does_not_serve_another_message(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    await put(store, draft(b"a"), draft(b"b", "Other", 3), draft(b"c"))
    assert await store._upkeep.write_derived()
    await store.stop()
    (mine,) = (tmp_path / "consumequeue" / "T" / "0").iterdir()
    (other,) = (tmp_path / "consumequeue" / "Other" / "3").iterdir()
    data = mine.read_bytes()
    for entry in (other.read_bytes()[:20], bytes([255]) + data[1:20], data[20:40]):
        mine.write_bytes(entry + data[20:])
        store = Store(small(tmp_path), faulty_env())
        await store.start()
        assert store.bounds("T", 0) == (0, 2)
        assert bodies(store) == [b"c"]
        await store.stop()
