"""A log that is cut: whatever interrupts it, a prefix is left and nothing stale behind it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from tests.unit.store.store_kit import bodies, draft
from tests.virtual_time import virtual_time

from cosmodrome.env.base import Env
from cosmodrome.env.options import StoreOptions
from cosmodrome.sim.disk import PowerCut, SimDisk
from cosmodrome.sim.env import SimClock, SimOffload
from cosmodrome.store.checkpoint import Checkpoint, save_checkpoint
from cosmodrome.store.commit_log import cut as cutting
from cosmodrome.store.commit_log.cut import plan_cut
from cosmodrome.store.store import Store

FILE_BYTES = 16384
LOG = "/store/commitlog"
BODIES = [bytes([65 + number % 26]) * 900 for number in range(40)]


@asynccontextmanager
async def opened(disk: SimDisk) -> AsyncIterator[Store]:
    options = StoreOptions(
        store_path_root_dir="/store",
        mapped_file_size_commit_log=FILE_BYTES,
        max_hash_slot_num=100,
        max_index_num=100,
    )
    clock = SimClock(asyncio.get_running_loop())
    chance = random.Random(1)
    store = Store(options, Env(clock, disk, chance, SimOffload(chance, 0)))
    await store.start()
    try:
        yield store
    finally:
        await store.stop()


async def filled(seed: int) -> tuple[SimDisk, list[int]]:
    """A disk with a log of three files, and where each of its records ends."""
    disk = SimDisk(seed)
    ends = []
    async with opened(disk) as store:
        for body in BODIES:
            ends.append(store.append(draft(body)).end)
            await store.durable(ends[-1])
    assert ends[-1] > 2 * FILE_BYTES
    return disk, ends


def cut(disk: SimDisk, offset: int) -> None:
    """As a repair does it, without copies."""
    disk.replace("/store/abort", b"\0", keep=False)
    save_checkpoint(disk, "/store/checkpoint", Checkpoint())
    plan_cut(disk, LOG, FILE_BYTES, offset).run(disk, lambda path: None)


def stale_bytes(disk: SimDisk, offset: int) -> int:
    """What is not zero in the log from an offset on."""
    found = 0
    for path, data in disk.files().items():
        if path.startswith(LOG):
            tail = data[max(0, offset - int(path[-20:])) :]
            found += len(tail) - tail.count(0)
    return found


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PIECE_BYTES", 4096)


@virtual_time
async def test_power_goes_at_any_step() -> None:
    places = (9, 24, 0)  # in the first file, in the second, nothing is left
    for kept in places:
        step = 0
        while True:
            disk, ends = await filled(step)
            offset = ends[kept - 1] if kept else 0
            disk.cut_after(step)
            with suppress(PowerCut):
                cut(disk, offset)
            done = not disk.dead
            disk.restart(power=True)
            async with opened(disk) as store:
                left = bodies(store)
                assert left == BODIES[: len(left)]
                assert len(left) == kept if done else len(left) >= kept
                assert stale_bytes(disk, store.log_end) == 0
            cut(disk, offset)
            async with opened(disk) as store:
                assert bodies(store) == BODIES[:kept]
                again = store.append(draft(b"new"))
                assert again.log_offset == offset
                await store.durable(again.end)
            disk.restart(power=True)  # names of removed files may come back
            async with opened(disk) as store:
                assert bodies(store) == [*BODIES[:kept], b"new"]
            if done:
                break
            step += 1
        assert step > 5


@virtual_time
async def test_a_cut_at_a_file_s_begin_removes_the_file() -> None:
    disk, _ = await filled(1)
    planned = plan_cut(disk, LOG, FILE_BYTES, FILE_BYTES)
    assert (planned.removed[0], planned.zeroed) == (FILE_BYTES, None)
    kept: list[str] = []
    planned.run(disk, kept.append)
    assert kept == sorted(kept, reverse=True) and len(kept) == len(planned.removed)
    assert disk.list(LOG) == [f"{0:020d}"]
