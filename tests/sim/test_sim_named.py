"""What seeds have found, each as one short story."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest
from tests.unit.store.store_kit import bodies, draft, put, small

from cosmodrome.errors import StoreUnwritable
from cosmodrome.sim.disk import SimDisk
from cosmodrome.sim.env import SimClock, sim_env
from cosmodrome.sim.loop import JumpLoop
from cosmodrome.store.store import Store

ROOT = "/store"
Open = Callable[..., Coroutine[None, None, Store]]


def play(story: Callable[[SimDisk, Open], Coroutine[None, None, None]], seeds: int = 20) -> None:
    for seed in range(seeds):
        loop = JumpLoop()
        try:
            clock = SimClock(loop)
            disk = SimDisk(seed, clock.now_ms)
            env = sim_env(disk, clock, seed, delay_ms_max=0)

            async def reopened(env: object = env, **changes: object) -> Store:
                changes.setdefault("flush_consume_queue_thorough_interval", 10**9)
                store = Store(small(ROOT, **changes), env)  # type: ignore[arg-type]
                await store.start()
                return store

            loop.run_until_complete(story(disk, reopened))
        finally:
            loop.close()


async def ended(store: Store, disk: SimDisk, *, power: bool) -> None:
    """The process is gone; with `power`, so is what was not synced."""
    await store.abandon()
    disk.restart(power=power)


async def fill(store: Store, count: int) -> list[bytes]:
    sent = []
    for at in range(count):
        sent.append(b"%d " % at + bytes(300))
        await put(store, draft(sent[-1], keys=f"k{at}"))
        await asyncio.sleep(0.5)
    return sent


@pytest.mark.parametrize("power", [False, True])
def test_a_rebuild_that_crashes_leaves_no_checkpoint_that_vouches_for_it(power: bool) -> None:
    async def story(disk: SimDisk, opened: Open) -> None:
        store = await opened(max_index_num=1000)
        sent = await fill(store, 40)
        assert await store._upkeep.write_checkpoint()
        await ended(store, disk, power=False)
        disk.remove(f"{ROOT}/consumequeue/T/0/{100:020d}")
        store = await opened(max_index_num=1000)  # everything is built again, in memory
        assert bodies(store) == sent
        await ended(store, disk, power=power)
        store = await opened(max_index_num=1000)
        assert bodies(store) == sent
        await store.stop()

    play(story)


def test_pages_of_a_failed_sync_are_written_again() -> None:
    async def story(disk: SimDisk, opened: Open) -> None:
        page = bytes(2900)  # so that messages do not share pages
        store = await opened(mapped_file_size_commit_log=65536)
        await put(store, draft(b"first" + page))
        disk.faults.sync_error = "commitlog"
        with pytest.raises(StoreUnwritable):
            await put(store, *(draft(b"second %d" % at + page) for at in range(3)))
        await ended(store, disk, power=False)
        store = await opened(mapped_file_size_commit_log=65536)
        before = bodies(store)
        assert len(before) == 4  # it reads all, which may not be on the disk
        await put(store, draft(b"third" + page))
        await ended(store, disk, power=True)
        store = await opened(mapped_file_size_commit_log=65536)
        assert bodies(store) == [*before, b"third" + page]
        await store.stop()

    play(story)


def test_a_failed_sync_on_a_full_disk_is_not_forgotten() -> None:
    async def story(disk: SimDisk, opened: Open) -> None:
        page = bytes(2900)  # so that messages do not share pages
        store = await opened(mapped_file_size_commit_log=65536)
        await put(store, draft(b"first" + page))
        disk.faults.sync_error = "commitlog"
        ends = [store.append(draft(b"second %d" % at + page)).end for at in range(3)]
        store._log.write()
        disk.faults.capacity_pages = disk.used_pages  # nothing can be allocated any more
        with pytest.raises(StoreUnwritable):
            await store.durable(ends[-1])
        await ended(store, disk, power=False)
        disk.faults.capacity_pages = None
        store = await opened(mapped_file_size_commit_log=65536)
        before = bodies(store)
        assert len(before) == 4  # it reads all, which may not be on the disk
        await put(store, draft(b"third" + page))
        await ended(store, disk, power=True)
        store = await opened(mapped_file_size_commit_log=65536)
        assert bodies(store) == [*before, b"third" + page]
        await store.stop()

    play(story)


def test_a_clock_that_went_back_is_no_damage() -> None:
    async def story(disk: SimDisk, opened: Open) -> None:
        store = await opened(flush_disk_type="ASYNC_FLUSH", flush_interval_commit_log=10**9)
        sent = await fill(store, 3)
        await store.stop()
        store = await opened(flush_disk_type="ASYNC_FLUSH", flush_interval_commit_log=10**9)
        store._env.clock.skew_ms -= 10**6  # type: ignore[attr-defined]
        await fill(store, 25)  # over several files, all at the time of the last record
        assert await store._upkeep.write_checkpoint()
        await ended(store, disk, power=True)
        store = await opened(flush_disk_type="ASYNC_FLUSH", flush_interval_commit_log=10**9)
        assert bodies(store)[:3] == sent
        await store.stop()

    play(story)


def test_a_stop_that_loses_power_leaves_no_gap_in_the_log() -> None:
    async def story(disk: SimDisk, opened: Open) -> None:
        store = await opened()
        await asyncio.sleep(1)  # the next file is made ahead
        assert len(disk.list(f"{ROOT}/commitlog")) == 2
        await store.stop()
        disk.restart(power=True)
        assert disk.list(f"{ROOT}/commitlog")[:1] in ([], [f"{0:020d}"])

    play(story)
