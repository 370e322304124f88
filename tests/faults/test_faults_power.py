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
from tests.crash.test_crash_kill import QUEUES, REPOSITORY, body_of, options
from tests.faults.fault_kit import cut_power, make_ext4, mounted
from tests.unit.store.store_kit import records

from cosmodrome.env.real import real_env
from cosmodrome.store.store import Store

CUTS = int(os.environ.get("POWER_CUTS", "3"))
CHILD = REPOSITORY / "tests" / "crash" / "test_crash_kill.py"
ASYNC_SECONDS = 0.8  # so that several syncs happen before the cut

Places = set[tuple[int, int]]  # queue and offset


async def run_until_cut(mount: Path, mode: str, seconds: float) -> Places:
    """What a child promised: what it acknowledged, with ASYNC_FLUSH what it had also synced.

    Child and test use the machine's one monotonic clock. A sync that is under way while the file
    system is shut down may return without an error, which no process sees when real power goes;
    so only what was said before the cut began counts.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(CHILD),
        str(mount / "store"),
        mode,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"},
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
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
    lines = [tuple(map(int, line.split())) for line in said.split(b"\n")[:-1]]
    before = [line for line in lines if line[-1] / 1e6 < cut_at]
    synced_end = max((end for _, _, _, end, _ in before), default=0)
    return {
        (queue_id, offset)
        for queue_id, offset, log_offset, _, _ in before
        if mode == "SYNC_FLUSH" or log_offset < synced_end
    }


async def found_after(mount: Path, mode: str) -> Places:
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


@pytest.mark.timeout(300 + 60 * CUTS)
@pytest.mark.parametrize("mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_power_cuts(tmp_path: Path, mode: str) -> None:
    chance = random.Random(f"power-{mode}")
    image, mount = tmp_path / "image", tmp_path / "mount"
    make_ext4(image, 256)
    kept: Places = set()
    total = 0
    for _ in range(CUTS):
        with mounted(mount, "-o", "loop", str(image)):
            seconds = chance.uniform(0.2, 0.8) + (ASYNC_SECONDS if mode == "ASYNC_FLUSH" else 0)
            promised = await run_until_cut(mount, mode, seconds)
        total += len(promised)
        with mounted(mount, "-o", "loop", str(image)):
            found = await found_after(mount, mode)
        lost = (kept | promised) - found
        assert not lost, f"{len(lost)} acknowledged messages are gone, e.g. {sorted(lost)[:3]}"
        kept = found  # recovered and stopped in order: from now on promised
    assert total > CUTS
