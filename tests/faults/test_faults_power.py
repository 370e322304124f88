"""A real file system loses power under load: acknowledged messages are on the disk.

Promised is what was acknowledged before the shutdown began. While ext4 shuts down, a running
fdatasync may return success for data that is gone, with any program; real power cuts have no
such moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from pathlib import Path

import pytest
from fault_kit import cut_power, make_ext4, mounted
from tests.crash.test_crash_kill import QUEUES, REPOSITORY, body_of, options
from tests.unit.store.store_kit import records

from cosmodrome.env.real import real_env
from cosmodrome.store.store import Store

CUTS = int(os.environ.get("POWER_CUTS", "3"))
CHILD = REPOSITORY / "tests" / "crash" / "test_crash_kill.py"
# ASYNC_FLUSH may lose its interval (30 ms here), the sync under way, and a busy machine.
WINDOW_SECONDS = 0.8

Acknowledged = dict[tuple[int, int], float]  # queue, offset -> when it was acknowledged


async def run_until_cut(mount: Path, mode: str, seconds: float) -> tuple[Acknowledged, float]:
    """What a child acknowledged, when it did so, and when the cut began.

    Both use the machine's one monotonic clock. A sync that is under way while the file system
    is shut down may return without an error, which no process sees when real power goes; so
    only what was acknowledged before the cut began is promised.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(CHILD), str(mount / "store"), mode),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            said = await process.stdout.readline()
            assert said, "the child ended by itself"
            collecting = asyncio.ensure_future(process.stdout.read())
            await asyncio.sleep(seconds)
            cut_at = time.monotonic()
            cut_power(mount)
            with contextlib.suppress(ProcessLookupError):  # it may have ended of the cut
                process.kill()
            said += await collecting
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
    heard: Acknowledged = {}
    for line in said.split(b"\n")[:-1]:
        queue_id, offset, _, at_us = (int(word) for word in line.split())
        heard[queue_id, offset] = at_us / 1e6
    return heard, cut_at


async def found_after(mount: Path, mode: str) -> set[tuple[int, int]]:
    store = Store(options(str(mount / "store"), mode), real_env())
    await store.start()
    found = set()
    for queue_id in range(QUEUES):
        got = records(store, "T", queue_id)
        assert [item.queue_offset for item in got] == list(range(len(got)))
        for item in got:
            assert item.body == body_of(queue_id, item.queue_offset)
            found.add((queue_id, item.queue_offset))
    await store.stop()
    return found


@pytest.mark.timeout(60 + 20 * CUTS)
@pytest.mark.parametrize("mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_power_cuts(tmp_path: Path, mode: str) -> None:
    chance = random.Random(f"power-{mode}")
    image, mount = tmp_path / "image", tmp_path / "mount"
    make_ext4(image, 256)
    kept: set[tuple[int, int]] = set()
    total = 0
    for _ in range(CUTS):
        with mounted(mount, "-o", "loop", str(image)):
            seconds = chance.uniform(0.2, 0.8) + (WINDOW_SECONDS if mode == "ASYNC_FLUSH" else 0)
            heard, cut_at = await run_until_cut(mount, mode, seconds)
        late = cut_at - WINDOW_SECONDS if mode == "ASYNC_FLUSH" else cut_at
        promised = {place for place, at in heard.items() if at < late}
        total += len(promised)
        with mounted(mount, "-o", "loop", str(image)):
            found = await found_after(mount, mode)
        lost = (kept | promised) - found
        assert not lost, f"{len(lost)} acknowledged messages are gone, e.g. {sorted(lost)[:3]}"
        kept = found  # recovered and stopped in order: from now on promised
    assert total > CUTS
