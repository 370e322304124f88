"""Messages acknowledged from memory, files filled ahead, and a next file that is late."""

from __future__ import annotations

import asyncio
import errno
import time
from pathlib import Path
from typing import Any

import pytest
from tests.unit.store.store_kit import (
    Faults,
    FaultyDisk,
    GatedOffload,
    bodies,
    draft,
    eventually,
    faulty_env,
    put,
    record_size,
    small,
)

from cosmodrome.env.base import SegmentFile
from cosmodrome.env.real import RealDisk
from cosmodrome.errors import MessageTooLarge, StoreBusy, StoreUnwritable
from cosmodrome.store.commit_log import spare as spare_module
from cosmodrome.store.commit_log.segment import Warming
from cosmodrome.store.store import PutStatus, Store

NEVER_MS = 600_000


def pooled(root: Path, faults: Faults | None = None, **changes: Any) -> Store:
    settings: dict[str, Any] = {
        "flush_disk_type": "ASYNC_FLUSH",
        "transient_store_pool_enable": True,
        "commit_interval_commit_log": NEVER_MS,
    }
    return Store(small(root, **(settings | changes)), faulty_env(faults))


async def test_acknowledged_while_only_in_memory(tmp_path: Path) -> None:
    store = pooled(tmp_path)
    await store.start()
    stored = store.append(draft(b"a"))
    for wait in (True, False):
        assert await store.durable(stored.end, wait=wait) is PutStatus.OK
    assert store.facts().written_offset == 0
    assert store.bounds("T", 0) == (0, 0), "readers see only what is written"
    await store.abandon()
    again = pooled(tmp_path)
    await again.start()
    assert again.bounds("T", 0) == (0, 0), "a kill loses it: that is the bargain"
    await again.stop()


async def test_a_kill_loses_no_more_than_the_interval(tmp_path: Path) -> None:
    store = pooled(tmp_path, commit_interval_commit_log=30)
    await store.start()
    await put(store, draft(b"old"))
    await eventually(lambda: store.bounds("T", 0) == (0, 1))
    await put(store, draft(b"young"))
    await store.abandon()
    again = pooled(tmp_path)
    await again.start()
    assert bodies(again) == [b"old"]
    assert await put(again, draft(b"next")) == [1]
    await again.stop()


async def test_a_clean_stop_loses_nothing(tmp_path: Path) -> None:
    store = pooled(tmp_path)
    await store.start()
    wanted = [b"%03d" % at * 300 for at in range(10)]
    for body in wanted:
        await put(store, draft(body))
    await store.stop()
    assert not (tmp_path / "abort").exists()
    again = pooled(tmp_path)
    await again.start()
    assert bodies(again) == wanted
    await again.stop()


async def test_a_full_pool_is_busy(tmp_path: Path) -> None:
    store = pooled(tmp_path, transient_store_pool_size=1)
    await store.start()
    count = 4096 // record_size(draft(bytes(900)))
    for _ in range(count):
        store.append(draft(bytes(900)))
    with pytest.raises(StoreBusy, match="transient store pool is full"):
        store.append(draft(bytes(900)))
    await asyncio.sleep(0)  # half full begins a commit before the interval
    await asyncio.sleep(0)
    assert store.bounds("T", 0) == (0, count)
    assert await put(store, draft(b"on")) == [count]
    await store.stop()


async def test_what_was_acknowledged_survives_a_full_disk(tmp_path: Path) -> None:
    faults = Faults()
    store = pooled(tmp_path, faults, commit_interval_commit_log=20)
    await store.start()
    faults.write, faults.write_part_bytes = "commitlog", 10
    await put(store, draft(b"kept"), draft(b"too"))
    await eventually(lambda: store.why_unwritable is not None)
    with pytest.raises(StoreUnwritable, match="No space left"):
        store.append(draft(b"refused"))
    assert store.bounds("T", 0) == (0, 0)
    faults.write = None
    await eventually(lambda: store.why_unwritable is None)
    assert bodies(store) == [b"kept", b"too"]
    assert await put(store, draft(b"next")) == [2]
    await store.stop()


async def test_a_stop_that_cannot_write_is_no_clean_one(tmp_path: Path) -> None:
    faults = Faults()
    store = pooled(tmp_path, faults)
    await store.start()
    await put(store, draft(b"lost"))
    faults.write = "commitlog"
    await store.stop()
    assert (tmp_path / "abort").exists()


@pytest.mark.parametrize(
    "changes", [{"flush_disk_type": "SYNC_FLUSH"}, {"transient_store_pool_enable": False}]
)
async def test_other_modes_have_no_pool(tmp_path: Path, changes: dict[str, Any]) -> None:
    store = pooled(tmp_path, **changes)
    await store.start()
    await put(store, draft(b"a"))
    await store.abandon()
    again = pooled(tmp_path)
    await again.start()
    assert bodies(again) == [b"a"]
    await again.stop()


# --- the next file -------------------------------------------------------------------------------


async def test_a_late_file_is_waited_for_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare_module, "WAIT_STEPS", 5)
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    spare = store._log._spare
    assert spare is not None and spare.done is not None
    await spare.done
    made, spare.made = spare.made, []  # as if the worker were still at it
    await put(store, *(draft(bytes(900)) for _ in range(4)))
    for _ in range(2):
        with pytest.raises(StoreBusy, match="still being made"):
            store.append(draft(bytes(900)))
    assert spare.wanted
    spare.made = made
    assert await put(store, draft(bytes(900))) == [4]
    assert len(bodies(store)) == 5
    await store.stop()


async def test_fail_fast_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = small(tmp_path, fast_fail_if_no_buffer_in_store_pool=True)
    store = Store(options, faulty_env())
    await store.start()
    spare = store._log._spare
    assert spare is not None and spare.done is not None
    await spare.done
    made, spare.made = spare.made, []
    await put(store, *(draft(bytes(900)) for _ in range(4)))
    monkeypatch.setattr(time, "sleep", lambda seconds: 1 // 0)
    with pytest.raises(StoreBusy):
        store.append(draft(bytes(900)))
    spare.made = made
    assert await put(store, draft(b"x")) == [4]
    await store.stop()


async def test_a_file_no_worker_has_begun_is_made_at_once(tmp_path: Path) -> None:
    env = faulty_env()
    gate = env.offload
    assert isinstance(gate, GatedOffload)
    gate.holding = True
    store = Store(small(tmp_path, flush_disk_type="ASYNC_FLUSH"), env)
    starting = asyncio.ensure_future(store.start())
    while not starting.done():
        await asyncio.sleep(0)
        gate.open()
        gate.holding = True
    assert len(await put(store, *(draft(bytes(900)) for _ in range(9)))) == 9
    gate.open()
    await store.stop()


async def test_a_next_file_that_could_not_be_made_is_tried_again(tmp_path: Path) -> None:
    faults = Faults()
    store = Store(small(tmp_path), faulty_env(faults))
    faults.create = f"{4096:020d}"
    await store.start()
    await put(store, *(draft(bytes(900)) for _ in range(4)))
    with pytest.raises(StoreUnwritable, match="could not be made"):
        store.append(draft(bytes(900)))
    with pytest.raises(StoreUnwritable, match="could not be made"):
        store.append(draft(bytes(900)))
    faults.create = None
    assert await put(store, draft(bytes(900))) == [4]
    await store.stop()


# --- filled ahead --------------------------------------------------------------------------


async def test_the_next_file_is_filled_ahead(tmp_path: Path) -> None:
    size = 4 << 20
    options = small(tmp_path, mapped_file_size_commit_log=size, warm_maped_file_enable=True)
    store = Store(options, faulty_env(Faults(used_ratio=0.0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultyDisk, "usage", RealDisk.usage)
        await store.start()
        spare = store._log._spare
        assert spare is not None and spare.done is not None
        await spare.done
    status = (tmp_path / "commitlog" / f"{size:020d}").stat()
    assert status.st_size == size and status.st_blocks * 512 >= size
    await put(store, draft(b"x"))
    await store.abandon()
    again = Store(options, faulty_env())
    await again.start()
    assert bodies(again) == [b"x"]
    await again.stop()


class Slow:
    """A segment that counts what is written."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size
        self.written: list[tuple[int, int]] = []
        self.synced_at: list[int] = []

    def write(self, data: bytes, position: int) -> None:
        assert not any(data)
        self.written.append((position, len(data)))

    def sync(self) -> None:
        self.synced_at.append(sum(self.written[-1]))


def test_filling_is_bounded_and_ends_when_the_file_is_wanted(tmp_path: Path) -> None:
    disk = FaultyDisk(Faults(used_ratio=0.5))
    mib = 1 << 20
    file: Any = Slow(str(tmp_path / "x"), 40 * mib + 5)
    plenty: Any = type("", (), {"usage": lambda self, path: RealDisk().usage(path)})()
    assert Warming(100).fill(plenty, file, lambda: False) == file.size
    assert [sum(piece) for piece in file.written][-1] == file.size
    assert max(size for _, size in file.written) == mib
    assert file.synced_at == [16 * mib, 32 * mib, file.size]
    file.written.clear()
    assert Warming(100).fill(plenty, file, lambda: len(file.written) >= 3) == 3 * mib
    # 500 of 1000 bytes are used: no room for this file.
    assert Warming(85).fill(disk, file, lambda: False) == 0


async def test_a_full_disk_while_filling_leaves_a_usable_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Warming, disk: object, file: SegmentFile, enough: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Warming, "fill", full)
    store = Store(small(tmp_path, warm_maped_file_enable=True), faulty_env())
    await store.start()
    await put(store, *(draft(bytes(900)) for _ in range(4)))
    assert await put(store, draft(bytes(900))) == [4]
    await store.stop()


# --- properties ------------------------------------------------------------------------------


async def test_properties_that_look_like_lost_data_are_refused(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    for bad in ("a\x01b\0", "a\x01" + "\0" * 512 + "c"):
        with pytest.raises(MessageTooLarge, match="power cut"):
            store.append(draft(properties=bad))
    fine = "a\x01" + "\0" * 511 + "c"
    assert await put(store, draft(properties=fine)) == [0]
    await store.abandon()
    again = Store(small(tmp_path), faulty_env())
    await again.start()
    assert len(bodies(again)) == 1
    await again.stop()
