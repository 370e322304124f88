"""Which files go, when, and what readers see of it."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.store.store_kit import (
    ALWAYS_MS,
    Faults,
    FaultyDisk,
    HandClock,
    bodies,
    draft,
    eventually,
    faulty_env,
    put,
    small,
)

from cosmodrome.env.base import DiskUsage
from cosmodrome.errors import ConfigError, StoreUnwritable
from cosmodrome.store import retain
from cosmodrome.store.retain import hours_of
from cosmodrome.store.store import ReadStatus, Store

HOUR_MS = 3_600_000


def at_hour(hour: int) -> int:
    """A wall time within that local hour."""
    day = time.struct_time((2026, 3, 10, hour, 30, 0, 0, 0, -1))
    return int(time.mktime(day)) * 1000


def log_names(root: Path) -> list[int]:
    return sorted(int(path.name) for path in (root / "commitlog").iterdir())


def queue_names(root: Path, queue: str = "T/0") -> list[int]:
    return sorted(int(path.name) for path in (root / "consumequeue" / queue).iterdir())


def age(root: Path, now_ms: int, hours: float, count: int = 99) -> None:
    for path in sorted((root / "commitlog").iterdir())[:count]:
        seconds = now_ms / 1000 - hours * 3600
        os.utime(path, (seconds, seconds))


class Case:
    """A store of several log files, its clock and its disk."""

    def __init__(self, root: Path, hour: int = 4, *, alone: bool = False, **changes: Any) -> None:
        self.root = root
        self.alone = alone  # the store looks by itself; otherwise only the test makes it look
        self.faults = Faults()
        self.clock = HandClock(at_hour(hour))
        changes = {
            "delete_commit_log_files_interval": 0,
            "delete_consume_queue_files_interval": 0,
            "disk_space_warning_level_ratio": 90,
        } | changes
        self.store = Store(small(root, **changes), faulty_env(self.faults, self.clock))

    async def start(self) -> None:
        await self.store.start()
        if not self.alone:
            await self.store._retention.stop()
            self.store._retention._stopping = False

    async def filled(self, files: int = 5) -> Case:
        await self.start()
        size = 0
        while self.store.facts().max_offset <= (files - 1) * 4096:
            await put(self.store, draft(b"%04d" % size * 200, keys=f"k{size}"))
            size += 1
        await self.store._upkeep.write_derived()
        return self

    async def look(self) -> int:
        return await self.store._retention.clean_log()

    async def follow(self) -> int:
        return await self.store._retention.clean_derived()


async def test_expired_files_go_in_their_hour(tmp_path: Path) -> None:
    case = await Case(tmp_path).filled(5)
    age(tmp_path, case.clock.at_ms, 72, count=2)
    assert await case.look() == 2
    assert case.store.facts().min_offset == 8192
    assert log_names(tmp_path)[0] == 8192
    assert await case.look() == 0
    await case.store.stop()


async def test_a_young_file_protects_those_behind_it(tmp_path: Path) -> None:
    case = await Case(tmp_path).filled(4)
    age(tmp_path, case.clock.at_ms, 100)
    first = tmp_path / "commitlog" / f"{0:020d}"
    os.utime(first, (case.clock.at_ms / 1000 - 71.9 * 3600,) * 2)
    assert await case.look() == 0
    await case.store.stop()


async def test_the_last_file_stays(tmp_path: Path) -> None:
    case = await Case(tmp_path, file_reserved_time=0).filled(4)
    age(tmp_path, case.clock.at_ms, 1)
    assert await case.look() == 3
    assert log_names(tmp_path)[0] == 3 * 4096
    assert await put(case.store, draft(b"next")) == [case.store.bounds("T", 0)[1] - 1]
    await case.store.stop()
    assert log_names(tmp_path) == [3 * 4096]


async def test_other_hours_wait_unless_somebody_asks(tmp_path: Path) -> None:
    case = await Case(tmp_path, hour=5).filled(4)
    age(tmp_path, case.clock.at_ms, 80)
    assert await case.look() == 0
    case.store.delete_expired()
    assert await case.look() == 3
    assert case.store._retention._requested == retain.REQUESTED_LOOKS - 1
    await case.store.stop()


async def test_a_request_is_good_for_twenty_looks(tmp_path: Path) -> None:
    case = await Case(tmp_path, hour=5).filled(3)
    case.store._retention.request()
    for _ in range(20):
        assert await case.look() == 0
    age(tmp_path, case.clock.at_ms, 80)
    assert await case.look() == 0
    await case.store.stop()


async def test_at_most_so_many_per_look(tmp_path: Path) -> None:
    case = await Case(tmp_path, delete_file_batch_max=2).filled(6)
    age(tmp_path, case.clock.at_ms, 80)
    assert [await case.look() for _ in range(4)] == [2, 2, 1, 0]
    await case.store.stop()


@pytest.mark.parametrize(
    ("used", "expired", "forced", "gone"),
    [
        (0.74, True, True, 0),
        (0.75, True, True, 0),
        (0.76, True, True, 3),
        (0.76, False, True, 0),
        (0.85, False, True, 0),
        (0.86, False, True, 3),
        (0.86, False, False, 0),
        (0.86, True, False, 3),
    ],
)
async def test_space(tmp_path: Path, used: float, expired: bool, forced: bool, gone: int) -> None:
    case = await Case(tmp_path, hour=5, clean_file_forcibly_enable=forced).filled(4)
    age(tmp_path, case.clock.at_ms, 80 if expired else 1)
    case.faults.used_ratio = used
    assert await case.look() == gone
    await case.store.stop()


async def test_force_ends_with_the_need_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = await Case(tmp_path, hour=5).filled(5)
    age(tmp_path, case.clock.at_ms, 1)

    def usage(disk: FaultyDisk, path: str) -> DiskUsage:
        used = 76 + 4 * len(log_names(tmp_path))
        return DiskUsage(used_bytes=used, free_bytes=100 - used)

    monkeypatch.setattr(FaultyDisk, "usage", usage)
    before = len(log_names(tmp_path))
    assert await case.look() == before - 2  # two files: 84 %
    assert case.store.why_unwritable is None
    await case.store.stop()


async def test_a_disk_that_cannot_be_asked_counts_as_full_of_expired_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = await Case(tmp_path, hour=5).filled(3)
    age(tmp_path, case.clock.at_ms, 80, count=1)

    def broken(disk: FaultyDisk, path: str) -> DiskUsage:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(FaultyDisk, "usage", broken)
        patch.setattr(case.store._upkeep, "check_disk", lambda: asyncio.sleep(0))
        assert await case.look() == 1
    await case.store.stop()


async def test_when_sends_stop_and_resume(tmp_path: Path) -> None:
    case = await Case(tmp_path, clean_file_forcibly_enable=False).filled(2)
    store, faults = case.store, case.faults

    async def check() -> bool:
        await store._upkeep.check_disk()
        return store.why_unwritable is None

    async def look() -> bool:
        await case.look()
        return store.why_unwritable is None

    faults.used_ratio = 0.90
    assert await check() and await look()
    faults.used_ratio = 0.91
    assert not await look()
    with pytest.raises(StoreUnwritable, match=r"91\.0% used"):
        store.append(draft())
    faults.used_ratio = 0.88
    assert not await look(), "between 85 and 90 a look for files decides nothing"
    assert await check(), "the disk check does"
    faults.used_ratio = 0.91
    assert not await check()
    faults.used_ratio = 0.84
    assert await look()
    await store.stop()


async def test_the_ratio_for_space_is_held_in_bounds(tmp_path: Path) -> None:
    for given, used, gone in ((0, 0.09, 0), (0, 0.11, 1), (99, 0.96, 1)):
        root = tmp_path / f"{given}-{used}"
        case = await Case(
            root,
            hour=5,
            disk_max_used_space_ratio=given,
            disk_space_clean_forcibly_ratio=100,
            disk_space_warning_level_ratio=100,
        ).filled(3)
        age(root, case.clock.at_ms, 80, count=1)
        case.faults.used_ratio = used
        assert await case.look() == gone, (given, used)
        await case.store.stop()


async def test_queues_and_index_follow(tmp_path: Path) -> None:
    case = await Case(tmp_path).filled(8)
    store = case.store
    total = store.bounds("T", 0)[1]
    assert total > 22
    indexes = len(list((tmp_path / "index").iterdir()))
    age(tmp_path, case.clock.at_ms, 80, count=5)
    assert await case.look() == 5
    first_kept = min(
        at for at in range(total) if cast(Any, store._queues.get("T", 0)).entry(at)[0] >= 5 * 4096
    )
    assert await case.follow() > 0
    assert store.bounds("T", 0) == (first_kept, total)
    assert queue_names(tmp_path)[0] == first_kept // 5 * 100
    assert len(list((tmp_path / "index").iterdir())) < indexes
    assert store.read("T", 0, 0, 9).status is ReadStatus.OFFSET_TOO_SMALL
    assert store.find("T", "k1", 9, 0, ALWAYS_MS).records == []
    assert len(store.find("T", f"k{total - 1}", 9, 0, ALWAYS_MS).records) == 1
    kept = bodies(store)
    assert len(kept) == total - first_kept
    assert await case.follow() == 0
    await store.abandon()
    for _ in range(2):  # after a kill, then after a clean stop
        again = Store(small(tmp_path), faulty_env())
        await again.start()
        assert again.bounds("T", 0) == (first_kept, total)
        assert bodies(again) == kept
        await again.stop()


async def test_an_idle_queue_keeps_its_last_file_and_its_offsets(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.start()
    await put(case.store, *(draft(b"x", topic="Idle") for _ in range(12)))
    await case.filled(4)
    age(tmp_path, case.clock.at_ms, 80, count=2)
    await case.look()
    await case.follow()
    assert case.store.bounds("Idle", 0) == (12, 12)
    assert queue_names(tmp_path, "Idle/0") == [200]
    assert await put(case.store, draft(b"y", topic="Idle")) == [12]
    assert case.store.bounds("Idle", 0) == (12, 13)
    assert bodies(case.store, "Idle") == [b"y"]
    await case.store.stop()


async def test_entries_still_in_memory_are_no_files(tmp_path: Path) -> None:
    case = Case(tmp_path)
    await case.start()
    while case.store.facts().max_offset <= 3 * 4096:
        await put(case.store, draft(bytes(700)))
    age(tmp_path, case.clock.at_ms, 80, count=3)
    assert await case.look() == 3
    assert await case.follow() == 0
    least, most = case.store.bounds("T", 0)
    assert 0 < least < most
    assert len(bodies(case.store)) == most - least
    await case.store.stop()


async def test_what_a_reader_holds_stays_valid(tmp_path: Path) -> None:
    case = await Case(tmp_path).filled(4)
    held = case.store._log.slice(0, 600, 4096)
    assert held is not None
    before = bytes(held)
    age(tmp_path, case.clock.at_ms, 80)
    assert await case.look() == 3
    assert not (tmp_path / "commitlog" / ("0" * 20)).exists()
    assert bytes(held) == before
    assert case.store._log.slice(0, 600, 4096) is None
    assert case.store.record(0) is None
    await case.store.stop()


async def test_a_file_that_stays_is_tried_again_and_nothing_overtakes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = await Case(tmp_path, redelete_hanged_file_interval=3_600_000).filled(5)
    age(tmp_path, case.clock.at_ms, 80)
    remove = FaultyDisk.remove
    tried: list[str] = []

    def stubborn(disk: FaultyDisk, path: str) -> None:
        tried.append(Path(path).name)
        if int(Path(path).name) == 4096:
            raise OSError(errno.EPERM, "Operation not permitted")
        remove(disk, path)

    with monkeypatch.context() as patch:
        patch.setattr(FaultyDisk, "remove", stubborn)
        assert await case.look() == 1
        assert await case.look() == 0
        assert tried.count(f"{4096:020d}") == 1
        assert log_names(tmp_path)[0] == 4096
        assert case.store.facts().min_offset == 8192, "it is no longer read"
        case.store._retention._retry_at -= 3600  # an hour passes
        assert await case.look() == 0
        assert tried.count(f"{4096:020d}") == 2
    case.store._retention._retry_at -= 3600
    assert await case.look() == 2
    assert log_names(tmp_path)[0] == 4 * 4096
    await case.store.stop()


async def test_a_queue_file_that_stays_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = await Case(tmp_path).filled(6)
    age(tmp_path, case.clock.at_ms, 80, count=4)
    await case.look()

    def stubborn(disk: FaultyDisk, path: str) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(FaultyDisk, "remove", stubborn)
        assert await case.follow() == 0
    assert queue_names(tmp_path)[0] == 0
    assert await case.follow() > 0
    assert queue_names(tmp_path)[0] > 0
    await case.store.stop()


async def test_a_topic_deleted_meanwhile_keeps_its_new_files(tmp_path: Path) -> None:
    case = await Case(tmp_path).filled(6)
    store = case.store
    age(tmp_path, case.clock.at_ms, 80, count=4)
    await case.look()
    async with store._upkeep.lock:  # a batch is under way
        following = asyncio.ensure_future(case.follow())
        await asyncio.sleep(0.01)
        store.delete_topic("T")
    await put(store, draft(b"new"))
    await store._upkeep.write_derived()
    await following
    assert queue_names(tmp_path) == [0]
    assert bodies(store) == [b"new"]
    await store.stop()


async def test_it_happens_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retain, "FIRST_LOOK_SECONDS", 0.05)
    case = await Case(tmp_path, alone=True, clean_resource_interval=20).filled(6)
    age(tmp_path, case.clock.at_ms, 80)
    await eventually(lambda: log_names(tmp_path)[0] == 5 * 4096)
    await eventually(lambda: queue_names(tmp_path)[0] > 0)
    await case.store.stop()


async def test_a_failed_look_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retain, "FIRST_LOOK_SECONDS", 0.01)
    case = await Case(tmp_path, alone=True, clean_resource_interval=10).filled(3)
    monkeypatch.setattr(case.store._retention, "_hour", lambda: 1 // 0)
    await eventually(lambda: "retention_failed" in caplog.text)
    monkeypatch.undo()
    age(tmp_path, case.clock.at_ms, 80)
    await eventually(lambda: log_names(tmp_path)[0] == 2 * 4096)
    await case.store.stop()


def test_hours() -> None:
    assert hours_of("04") == {4}
    assert hours_of("4;23; 00;") == {0, 4, 23}
    assert hours_of("") == frozenset()
    for wrong in ("24", "-1", "4,5", "four", "4.5"):
        with pytest.raises(ConfigError, match="00 to 23"):
            hours_of(wrong)


async def test_a_wrong_hour_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="deleteWhen=25"):
        Store(small(tmp_path, delete_when="25"), faulty_env())


async def test_files_that_a_slave_needs_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = await Case(tmp_path).filled(6)
    age(tmp_path, case.clock.at_ms, 100)
    case.store.hold_back = lambda: 2 * 4096 + 1
    assert await case.look() == 2
    assert await case.look() == 0
    assert caplog.text.count("log_file_kept_for_slave") == 1
    case.store.hold_back = lambda: 3 * 4096
    assert await case.look() == 1
    case.store.hold_back = lambda: None
    assert await case.look() == 2
    await case.store.stop()


async def test_files_that_a_slave_needs_go_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    case = await Case(tmp_path).filled(6)
    case.store.hold_back = lambda: 0
    case.faults.used_ratio = 0.80  # space is wanted, and nothing has expired
    assert await case.look() == 0
    age(tmp_path, case.clock.at_ms, 100)
    assert await case.look() == 0
    case.faults.used_ratio = 0.86  # diskSpaceCleanForciblyRatio is 85
    assert await case.look() == 5
    await case.store.stop()
