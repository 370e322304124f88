"""Starts after clean stops, kills, cuts, lost files and damage."""

from __future__ import annotations

import asyncio
import struct
import sys
from pathlib import Path

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

from cosmodrome.errors import DirectoryInUse, StoreCorrupt, StoreError
from cosmodrome.layout import CHECKPOINT, INDEX_HEADER, QUEUE_ENTRY
from cosmodrome.store.store import Store


async def opened(root: Path, clock: HandClock | None = None, **changes: object) -> Store:
    store = Store(small(root, **changes), faulty_env(clock=clock))
    await store.start()
    return store


def log_files(root: Path) -> list[str]:
    return sorted(path.name.lstrip("0") or "0" for path in (root / "commitlog").iterdir())


def queue_file(root: Path, base: int = 0, queue: str = "T/0") -> Path:
    return root / "consumequeue" / queue / f"{base:020d}"


def log_file(root: Path, base: int = 0) -> Path:
    return root / "commitlog" / f"{base:020d}"


def overwrite(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


async def test_an_empty_store_stops_and_starts(tmp_path: Path) -> None:
    for _ in range(2):
        store = await opened(tmp_path)
        assert (tmp_path / "abort").exists()
        await store.start()
        await store.stop()
        await store.stop()
        assert not (tmp_path / "abort").exists()
        assert log_files(tmp_path) == []
    with pytest.raises(StoreError, match="open the directory with a new one"):
        await store.start()


async def test_an_empty_store_survives_a_kill(tmp_path: Path) -> None:
    await (await opened(tmp_path)).abandon()
    assert log_files(tmp_path)[0] == "0"
    store = await opened(tmp_path)
    await put(store, draft(b"x"))
    assert bodies(store) == [b"x"]
    await store.stop()


async def test_a_second_process_is_refused(tmp_path: Path) -> None:
    # The lock is between processes, so the second one has to be one.
    store = await opened(tmp_path)
    code = (
        "import fcntl, sys; fd = open(sys.argv[1], 'r+');"
        "fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)"
    )
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(tmp_path / "lock"), stderr=asyncio.subprocess.DEVNULL
    )
    assert await other.wait() != 0
    await store.stop()


async def test_a_locked_directory_leaves_the_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = faulty_env()

    def taken(path: str) -> None:
        raise DirectoryInUse(f"{path} is in use")

    monkeypatch.setattr(env.disk, "lock", taken)
    store = Store(small(tmp_path), env)
    with pytest.raises(DirectoryInUse):
        await store.start()
    assert not (tmp_path / "abort").exists()


@pytest.mark.parametrize("clean", [True, False])
async def test_everything_is_there_again(tmp_path: Path, clean: bool) -> None:
    wanted = [b"%d" % at * 40 for at in range(60)]
    store = await opened(tmp_path)
    await put(store, *(draft(body, keys=f"key{at}") for at, body in enumerate(wanted)))
    end = store.facts().max_offset
    await (store.stop() if clean else store.abandon())
    again = await opened(tmp_path)
    assert bodies(again) == wanted
    assert again.facts().max_offset == end
    for at in range(60):
        assert len(again.find("T", f"key{at}", 64, 0, ALWAYS_MS).records) >= 1
    assert await put(again, draft(b"next")) == [60]
    await again.stop()


async def test_the_file_made_ahead_is_removed_at_stop(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, draft(b"x"))
    await store.stop()
    assert log_files(tmp_path) == ["0"]


@pytest.mark.parametrize("damage", ["crc", "half", "magic"])
async def test_a_torn_end_is_cut_and_never_seen_again(tmp_path: Path, damage: str) -> None:
    store = await opened(tmp_path)
    size = record_size(draft(b"00"))
    await put(store, *(draft(b"%02d" % at) for at in range(10)))
    await store.abandon()
    at = 8 * size
    if damage == "crc":
        overwrite(log_file(tmp_path), at + 88, b"!!")
    elif damage == "half":
        overwrite(log_file(tmp_path), at + size // 2, bytes(size - size // 2))
    else:
        overwrite(log_file(tmp_path), at + 4, b"\x01")
    again = await opened(tmp_path)
    assert bodies(again) == [b"%02d" % at for at in range(8)]
    assert again.facts().max_offset == at
    # Number 9 was good and would continue the log behind a record of the same size.
    assert not any(log_file(tmp_path).read_bytes()[at:])
    await put(again, draft(b"08"))
    await again.abandon()
    third = await opened(tmp_path)
    assert bodies(third) == [b"%02d" % at for at in range(9)]
    await third.stop()


async def test_a_bad_record_before_synced_files_is_not_cut(tmp_path: Path) -> None:
    clock = HandClock()
    store = await opened(tmp_path, clock)
    for _ in range(12):
        clock.at_ms += 1000
        await put(store, draft(bytes(1000)))
    assert await store._upkeep.write_checkpoint()
    await store.abandon()
    before = log_files(tmp_path)
    overwrite(log_file(tmp_path, 4096), 1200, b"\xff" * 8)
    # Nothing but the log: the walk begins at its first file.
    overwrite(tmp_path / "checkpoint", 8, bytes(8))
    with pytest.raises(StoreCorrupt, match=r"4096, position 1092.*was synced"):
        await opened(tmp_path)
    assert log_files(tmp_path) == before


async def test_a_checkpoint_shortens_the_walk(tmp_path: Path) -> None:
    clock = HandClock()
    store = await opened(tmp_path, clock)
    for _ in range(12):
        clock.at_ms += 5000
        await put(store, draft(bytes(1000), keys="k"))
    assert await store._upkeep.write_checkpoint()
    await put(store, draft(b"last", keys="k"))
    await store.abandon()
    # Damage in a part that the walk must not visit stays unnoticed until it is read.
    overwrite(log_file(tmp_path), 4, b"\x01")
    again = await opened(tmp_path, clock, message_index_enable=False)
    assert again.bounds("T", 0) == (0, 13)
    await again.stop()


async def test_queue_entries_that_did_not_reach_the_disk_are_built_again(tmp_path: Path) -> None:
    clock = HandClock()
    store = await opened(tmp_path, clock)
    for at in range(30):
        clock.at_ms += 1000
        await put(store, draft(b"%02d" % at + bytes(500)))
        if at == 17:
            assert await store._upkeep.write_checkpoint()
    assert await store._upkeep.write_derived()
    await store.abandon()
    # What a power cut may do to entries behind the checkpoint: a hole, and garbage after it.
    overwrite(queue_file(tmp_path, 400), 0, bytes(20))
    overwrite(queue_file(tmp_path, 500), 20, QUEUE_ENTRY.pack(5, 7, 9))
    again = await opened(tmp_path, clock)
    assert [body[:2] for body in bodies(again)] == [b"%02d" % at for at in range(30)]
    await again.stop()
    third = await opened(tmp_path, clock)
    assert [body[:2] for body in bodies(third)] == [b"%02d" % at for at in range(30)]
    await third.stop()


async def test_index_files_behind_the_checkpoint_are_built_again(tmp_path: Path) -> None:
    clock = HandClock()
    store = await opened(tmp_path, clock)
    for at in range(30):
        clock.at_ms += 1000
        await put(store, draft(b"%02d" % at, keys=f"a{at} b{at}"))
        if at == 17:
            assert await store._upkeep.write_checkpoint()
    assert await store._upkeep.write_derived()
    await store.abandon()
    names = sorted((tmp_path / "index").iterdir())
    for name in names[4:]:
        overwrite(name, INDEX_HEADER.size, b"\x00" * 28)  # slots lost
    again = await opened(tmp_path, clock)
    kept = sorted((tmp_path / "index").iterdir())
    assert kept[:3] == names[:3]
    for at in range(30):
        for key in (f"a{at}", f"b{at}"):
            found = again.find("T", key, 64, 0, ALWAYS_MS).records
            assert sum(b"%02d" % at in record for record in found) >= 1
            assert len(set(found)) == len(found)
    await again.stop()


async def test_a_clean_start_that_finds_the_queues_odd_recovers(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(b"%d" % at) for at in range(7)))
    await store.stop()
    # A stale entry behind the end, as a store cut by upstream may hold.
    overwrite(queue_file(tmp_path, 100), 40, QUEUE_ENTRY.pack(3, 100, 0))
    again = await opened(tmp_path)
    assert bodies(again) == [b"%d" % at for at in range(7)]
    assert await put(again, draft(b"7")) == [7]
    await again.stop()


async def test_a_log_longer_than_the_queues_is_dispatched(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(b"%d" % at) for at in range(4)))
    await store.stop()
    overwrite(queue_file(tmp_path), 40, bytes(40))
    again = await opened(tmp_path)
    assert bodies(again) == [b"%d" % at for at in range(4)]
    await again.stop()


async def test_an_empty_log_empties_the_queues(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, draft(b"x", keys="k"))
    await store.stop()
    log_file(tmp_path).unlink()
    again = await opened(tmp_path)
    assert again.bounds("T", 0) == (0, 0)
    assert not again.find("T", "k", 9, 0, ALWAYS_MS).records
    assert await put(again, draft(b"y")) == [0]
    await again.stop()


async def test_a_topic_deleted_and_made_again_keeps_its_new_messages(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(b"old%d" % at) for at in range(9)))
    store.delete_topic("T")
    assert store.bounds("T", 0) == (0, 0)
    assert await put(store, draft(b"new0"), draft(b"new1")) == [0, 1]
    await store.abandon()
    again = await opened(tmp_path)
    assert bodies(again) == [b"new0", b"new1"]
    await again.stop()
    assert [path.name for path in (tmp_path / "consumequeue/T/0").iterdir()] == ["0" * 20]


async def test_a_log_file_of_another_size_is_refused(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(bytes(1000)) for _ in range(5)))
    await store.stop()
    with pytest.raises(StoreCorrupt, match="mappedFileSizeCommitLog=4096"):
        await opened(tmp_path, mapped_file_size_commit_log=2048)
    log_file(tmp_path, 0).unlink()
    with log_file(tmp_path, 8192).open("wb") as file:
        file.write(b"\x01" * 100)
    with pytest.raises(StoreCorrupt, match="100 bytes instead of 4096"):
        await opened(tmp_path)


async def test_a_gap_between_log_files_is_refused(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(bytes(1000)) for _ in range(9)))
    await store.stop()
    log_file(tmp_path, 4096).unlink()
    with pytest.raises(StoreCorrupt, match="without gaps"):
        await opened(tmp_path)


@pytest.mark.parametrize("length", [0, 100])
async def test_files_that_were_being_made_are_dropped(tmp_path: Path, length: int) -> None:
    store = await opened(tmp_path)
    await put(store, draft(b"x"))
    await store.abandon()
    log_file(tmp_path, 4096).unlink(missing_ok=True)
    log_file(tmp_path, 4096).write_bytes(bytes(length))
    queue_file(tmp_path).parent.mkdir(parents=True, exist_ok=True)
    queue_file(tmp_path).write_bytes(b"")
    again = await opened(tmp_path)
    assert bodies(again) == [b"x"]
    await put(again, *(draft(bytes(1000)) for _ in range(5)))
    await again.stop()


@pytest.mark.parametrize("damage", ["short", "gone"])
async def test_a_lost_queue_file_is_built_again(tmp_path: Path, damage: str) -> None:
    clock = HandClock()
    store = await opened(tmp_path, clock)
    for at in range(14):
        clock.at_ms += 9000
        await put(store, draft(b"%02d" % at + bytes(900)), draft(b"x", queue_id=1))
    await store.stop()
    if damage == "gone":
        queue_file(tmp_path, 100).unlink()
    else:
        overwrite(queue_file(tmp_path, 100), 0, b"")
        with queue_file(tmp_path, 100).open("r+b") as file:
            file.truncate(60)
    again = await opened(tmp_path, clock)
    assert [body[:2] for body in bodies(again)] == [b"%02d" % at for at in range(14)]
    await again.stop()


async def test_queue_files_keep_the_size_they_have(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(b"%d" % at) for at in range(7)))
    await store.stop()
    again = await opened(tmp_path, mapped_file_size_consume_queue=6000)
    await put(again, *(draft(b"%d" % at) for at in range(7, 12)))
    await put(again, draft(b"z", queue_id=1))
    await again.stop()
    assert queue_file(tmp_path, 200).stat().st_size == 100
    assert queue_file(tmp_path, 0, "T/1").stat().st_size == 6000
    third = await opened(tmp_path)
    assert bodies(third) == [b"%d" % at for at in range(12)]
    await third.stop()


async def test_store_times_never_go_back_over_a_restart(tmp_path: Path) -> None:
    clock = HandClock(2_000_000_000_000)
    store = await opened(tmp_path, clock)
    await put(store, draft(b"a"))
    await store.stop()
    clock.at_ms -= 1_000_000
    again = await opened(tmp_path, clock)
    await put(again, draft(b"b"))
    assert again.store_time("T", 0, 1) == 2_000_000_000_000
    await again.stop()
    times = CHECKPOINT.unpack_from((tmp_path / "checkpoint").read_bytes())
    assert times == (2_000_000_000_000,) * 3


async def test_reading_only_writes_nothing(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(b"%d" % at, keys="k") for at in range(30)))
    await store._upkeep.write_derived()
    await put(store, draft(b"30", keys="k"))

    def files() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}

    await store.abandon()
    before = files()
    again = Store(small(tmp_path), faulty_env(), read_only=True)
    await again.start()
    assert bodies(again) == [b"%d" % at for at in range(31)]
    with pytest.raises(StoreError, match="reading only"):
        again.append(draft())
    await again.stop()
    assert files() == before
    assert struct.unpack(">i", before[str(log_file(tmp_path))][:4])[0] > 0


async def test_files_left_short_by_a_power_cut_are_dropped(tmp_path: Path) -> None:
    clock = HandClock()
    store = await opened(tmp_path, clock)
    for at in range(5):
        clock.at_ms += 1000
        await put(store, draft(b"%02d" % at, keys=f"k{at}"))
    await store._upkeep.write_checkpoint()
    await put(store, draft(b"05", keys="k5"), draft(b"only", queue_id=1))
    await store.abandon()
    queue_files = (queue_file(tmp_path, 100), queue_file(tmp_path, 0, "T/1"))
    for path in (log_file(tmp_path, 4096), *queue_files):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(60))
    (tmp_path / "index/20990101000000000").write_bytes(bytes(80))
    again = await opened(tmp_path, clock)
    assert bodies(again) == [b"%02d" % at for at in range(6)]
    assert bodies(again, queue_id=1) == [b"only"]
    assert len(again.find("T", "k5", 9, 0, ALWAYS_MS).records) == 1
    await again.stop()
    for path in queue_files:
        assert path.stat().st_size == 100
    assert not (tmp_path / "index/20990101000000000").exists()


async def test_a_half_written_entry_that_looks_early_is_dropped(tmp_path: Path) -> None:
    clock = HandClock()
    store = await opened(tmp_path, clock)
    await put(store, draft(b"q", queue_id=1))
    for at in range(12):
        clock.at_ms += 9000
        await put(store, draft(b"%02d" % at + bytes(900)))
    await store._upkeep.write_checkpoint()
    await put(store, draft(b"late", queue_id=1))
    await store._upkeep.write_derived()
    await store.abandon()
    # The upper bytes of the last entry's log offset are lost: it seems to lie further back.
    path = queue_file(tmp_path, 0, "T/1")
    log_offset, size, tags = QUEUE_ENTRY.unpack_from(path.read_bytes(), 20)
    assert log_offset > 8192
    overwrite(path, 20, QUEUE_ENTRY.pack(log_offset & 0xFFF, size, tags))
    again = await opened(tmp_path, clock)
    assert bodies(again, queue_id=1) == [b"q", b"late"]
    await again.stop()


async def test_a_record_with_a_torn_topic_ends_the_log(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, draft(b"a", topic="Topic"), draft(b"b", topic="Topic"))
    await store.abandon()
    size = record_size(draft(b"a", topic="Topic"))
    overwrite(log_file(tmp_path), 2 * size - 4, bytes(2))  # within the second one's topic
    again = await opened(tmp_path)
    assert bodies(again, "Topic") == [b"a"]
    assert again.facts().max_offset == size
    assert list(again.queues()) == ["Topic"]
    await again.stop()
