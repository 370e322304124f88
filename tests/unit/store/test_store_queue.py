"""Queue files: fillers, gaps, batches that fail, deletion while a batch is under way."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from tests.unit.store.store_kit import GatedOffload, bodies, draft, faulty_env, put, small

from cosmodrome.env.real import RealDisk
from cosmodrome.errors import StoreError
from cosmodrome.layout import QUEUE_ENTRY, QUEUE_FILLER_SIZE
from cosmodrome.store.commit_log.segment import OpenFiles, write_files
from cosmodrome.store.queue import GAP_ENTRIES_MAX, Queues, check_path_names
from cosmodrome.store.store import Store

FILLER = (0, QUEUE_FILLER_SIZE, 0)


def made(root: Path, *, read_only: bool = False) -> Queues:
    disk = RealDisk()
    return Queues(str(root), 90, disk, OpenFiles(disk, 2), read_only=read_only)


def fill(queues: Queues, count: int, start: int = 0) -> None:
    for at in range(start, start + count):
        queues.put("T", 0, at, at * 50, 50, at)


def written(queues: Queues) -> None:
    batch = queues.pending()
    results = write_files(RealDisk(), [write for _, write in batch])
    assert queues.written(batch, results) is None


def file_entries(root: Path, base: int) -> list[tuple[int, ...]]:
    return list(QUEUE_ENTRY.iter_unpack((root / "T/0" / f"{base:020d}").read_bytes()))


def test_the_file_size_is_rounded_up_to_whole_entries(tmp_path: Path) -> None:
    queues = made(tmp_path)
    fill(queues, 1)
    written(queues)
    assert (tmp_path / "T/0" / ("0" * 20)).stat().st_size == 100


def test_entries_are_the_same_before_and_after_a_batch(tmp_path: Path) -> None:
    queues = made(tmp_path)
    fill(queues, 13)
    queue = queues.get("T", 0)
    assert queue is not None
    wanted = [(at * 50, 50, at) for at in range(13)]
    assert [queue.entry(at) for at in range(13)] == wanted
    assert queues.tail_bytes == 260
    written(queues)
    assert queues.tail_bytes == 0 and not queues.pending()
    queues.written([], [])
    assert [queue.entry(at) for at in range(13)] == wanted
    assert queue.entry(13) is None and queue.entry(-1) is None
    again = made(tmp_path)
    again.load()
    loaded = again.get("T", 0)
    assert loaded is not None and loaded.max_offset == 13 and loaded.log_end == 650


def test_a_queue_that_begins_late_is_filled_from_its_files_start(tmp_path: Path) -> None:
    queues = made(tmp_path)
    queues.put("T", 0, 7, 1000, 50, 3)
    queue = queues.get("T", 0)
    assert queue is not None
    assert (queue.min_offset, queue.max_offset) == (7, 8)
    assert queue.entry(6) is None and queue.entry(7) == (1000, 50, 3)
    written(queues)
    assert file_entries(tmp_path, 100) == [FILLER, FILLER, (1000, 50, 3), (0, 0, 0), (0, 0, 0)]
    again = made(tmp_path)
    again.load()
    loaded = again.get("T", 0)
    assert loaded is not None
    loaded.find_min(0)
    assert (loaded.min_offset, loaded.max_offset) == (7, 8)


def test_repeats_are_ignored_and_gaps_filled(tmp_path: Path) -> None:
    queues = made(tmp_path)
    fill(queues, 3)
    fill(queues, 3)
    queue = queues.get("T", 0)
    assert queue is not None and queue.max_offset == 3
    queues.put("T", 0, 5, 500, 50, 5)
    assert queue.max_offset == 6
    assert [queue.entry(at) for at in (3, 4)] == [None, None]
    assert queue.entry(5) == (500, 50, 5)
    queues.put("T", 0, 6 + GAP_ENTRIES_MAX + 1, 700, 50, 5)
    assert queue.max_offset == 6


def test_the_least_offset_follows_the_log(tmp_path: Path) -> None:
    queues = made(tmp_path)
    fill(queues, 13)
    queue = queues.get("T", 0)
    assert queue is not None
    for log_min, wanted in ((0, 0), (1, 1), (50, 1), (600, 12), (9000, 13)):
        queue.find_min(log_min)
        assert queue.min_offset == wanted


@pytest.mark.parametrize(("limit", "left"), [(0, 0), (50, 1), (99, 1), (500, 10), (650, 13)])
def test_truncation_zeroes_what_it_drops(tmp_path: Path, limit: int, left: int) -> None:
    queues = made(tmp_path)
    fill(queues, 13)
    written(queues)
    again = made(tmp_path)
    again.load()
    queue = again.get("T", 0)
    assert queue is not None
    again.truncate(queue, limit)
    assert again.max_offset("T", 0) == left
    names = sorted((tmp_path / "T/0").iterdir()) if (tmp_path / "T").exists() else []
    assert len(names) == -(-left // 5)
    entries = [entry for name in names for entry in QUEUE_ENTRY.iter_unpack(name.read_bytes())]
    assert [entry for entry in entries if entry[1]] == [(at * 50, 50, at) for at in range(left)]
    fill(again, 13)
    assert again.max_offset("T", 0) == 13


def test_reading_only_truncates_in_memory(tmp_path: Path) -> None:
    queues = made(tmp_path)
    fill(queues, 13)
    written(queues)
    again = made(tmp_path, read_only=True)
    again.load()
    queue = again.get("T", 0)
    assert queue is not None
    again.truncate(queue, 300)
    assert queue.max_offset == 6
    assert len(list((tmp_path / "T/0").iterdir())) == 3


def test_a_failed_batch_is_repeated_whole(tmp_path: Path) -> None:
    queues = made(tmp_path)
    fill(queues, 13)
    batch = queues.pending()
    results: list[OSError | None] = [None, OSError(errno.ENOSPC, "full"), None]
    fill(queues, 2, start=13)
    assert queues.written(batch, results) is results[1]
    assert queues.tail_bytes == 300
    written(queues)
    queue = queues.get("T", 0)
    assert queue is not None and queue.tail_at == 300
    assert [queue.entry(at) for at in range(15)] == [(at * 50, 50, at) for at in range(15)]


def test_few_files_stay_open(tmp_path: Path) -> None:
    queues = made(tmp_path)
    fill(queues, 40)
    written(queues)
    queue = queues.get("T", 0)
    assert queue is not None
    assert [queue.entry(at) for at in range(40)] == [(at * 50, 50, at) for at in range(40)]
    assert len(queues._files._files) == 2


def test_names_that_are_no_directory_are_refused() -> None:
    for topic in ("", ".", "..", "a/b", "x" * 128, "nul\0"):
        with pytest.raises(StoreError):
            check_path_names(topic, 0)
    check_path_names("%RETRY%group|x-1_2", 0)


async def test_a_topic_deleted_during_a_batch_leaves_no_files(tmp_path: Path) -> None:
    env = faulty_env()
    assert isinstance(env.offload, GatedOffload)
    store = Store(small(tmp_path), env)
    await store.start()
    await put(store, *(draft(b"old") for _ in range(12)), draft(b"other", topic="U"))
    env.offload.holding = True
    batch = asyncio.ensure_future(store._upkeep.write_derived())
    await asyncio.sleep(0)
    store.delete_topic("T")
    stored = store.append(draft(b"new"))
    assert stored.queue_offset == 0
    settled = asyncio.ensure_future(store.durable(stored.end))
    await asyncio.sleep(0)
    env.offload.open()
    assert await batch
    await settled
    assert not (tmp_path / "consumequeue/T").exists()
    assert bodies(store) == [b"new"] and bodies(store, "U") == [b"other"]
    assert store.queues() == {"T": [0], "U": [0]}
    await store.stop()
    assert [path.name for path in (tmp_path / "consumequeue/T/0").iterdir()] == ["0" * 20]
    again = Store(small(tmp_path), faulty_env())
    await again.start()
    assert bodies(again) == [b"new"]
    await again.stop()


async def test_deleting_checks_the_name(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    with pytest.raises(StoreError):
        store.delete_topic("../commitlog")
    store.delete_topic("never-there")
    await store.stop()
