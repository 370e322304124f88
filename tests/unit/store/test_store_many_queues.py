"""Ten thousand queues: descriptors, memory and starts stay bounded."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from pathlib import Path

import pytest
from tests.unit.store.store_kit import draft

from cosmodrome.env import real
from cosmodrome.env.options import StoreOptions
from cosmodrome.env.real import MappedSegment, real_env
from cosmodrome.store import upkeep
from cosmodrome.store.store import Store

QUEUES = 10_000
MESSAGES = 3
DESCRIPTORS_MAX = 600
MEMORY_BYTES_MAX = 120 << 20
START_SECONDS_MAX = 10.0  # of this process's own time: the machine may be busy with others


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def own_memory_bytes() -> int:
    """Without pages that are only mapped from files: the kernel may take those back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon in /proc/self/status")


@pytest.fixture
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand syncs say more about the disk under the test than about the store."""
    monkeypatch.setattr(MappedSegment, "sync", lambda self: None)
    monkeypatch.setattr(real, "_sync_directory", lambda path: None)


def place(number: int) -> tuple[str, int]:
    return f"topic{number // 10}", number % 10


@pytest.mark.timeout(900)  # eight seconds of one core; a busy machine gives it little of that
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
async def test_ten_thousand_queues(tmp_path: Path, without_syncs: None) -> None:
    options = StoreOptions(
        store_path_root_dir=str(tmp_path),
        flush_disk_type="ASYNC_FLUSH",
        disk_space_warning_level_ratio=100,
        flush_interval_consume_queue=600_000,
    )
    gc.collect()
    memory, files = own_memory_bytes(), descriptors()

    def check_bounds() -> None:
        gc.collect()
        assert own_memory_bytes() - memory < MEMORY_BYTES_MAX
        assert descriptors() - files < DESCRIPTORS_MAX

    def check_content(store: Store) -> None:
        for number in range(QUEUES):
            assert store.bounds(*place(number)) == (0, MESSAGES)
            assert store.read(*place(number), 0, 32).count == MESSAGES

    store = Store(options, real_env())
    await store.start()
    for _ in range(MESSAGES):
        for number in range(QUEUES):
            topic, queue_id = place(number)
            end = store.append(draft(b"x" * 100, topic=topic, queue_id=queue_id, keys="k")).end
            if number % 1000 == 0:
                await store.durable(end)
        await store.durable(end)
    check_bounds()
    assert await store._upkeep.write_derived()
    check_content(store)
    check_bounds()
    for clean in (True, False):
        await (store.stop() if clean else store.abandon())
        store = Store(options, real_env())
        began = time.process_time()
        await store.start()
        assert time.process_time() - began < START_SECONDS_MAX
        check_bounds()
        check_content(store)
        check_bounds()
    await store.abandon()


@pytest.mark.parametrize("queues", [8, upkeep.MANY_QUEUES + 8])
async def test_many_queues_with_little_each_are_written_rarely(
    tmp_path: Path, without_syncs: None, monkeypatch: pytest.MonkeyPatch, queues: int
) -> None:
    monkeypatch.setattr(upkeep, "MANY_QUEUES_SECONDS", 0.5)
    options = StoreOptions(
        store_path_root_dir=str(tmp_path),
        flush_disk_type="ASYNC_FLUSH",
        disk_space_warning_level_ratio=100,
        flush_interval_consume_queue=10,
    )
    store = Store(options, real_env())
    await store.start()
    batches: list[float] = []
    write = store._upkeep.write_derived

    async def counted(*, index_too: bool = True) -> bool:
        if store._queues.dirty_count:
            batches.append(time.monotonic())
        return await write(index_too=index_too)

    monkeypatch.setattr(store._upkeep, "write_derived", counted)
    began = time.monotonic()

    def rarely() -> float:
        """As many batches as there may have been until now, half a second apart."""
        return (time.monotonic() - began) / 0.5 + 1

    def seen() -> bool:
        if queues > upkeep.MANY_QUEUES:
            return len(batches) >= 2
        return len(batches) > rarely()

    while not seen():
        for number in range(queues):
            end = store.append(draft(b"x", topic=f"t{number}", queue_id=0)).end
        await store.durable(end)
        await asyncio.sleep(0.02)
    assert (len(batches) <= rarely()) is (queues > upkeep.MANY_QUEUES)
    assert not store.facts().unwritable
    await store.stop()
