"""A real process, really killed: whatever it said was stored is there afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.store.store_kit import HOST, records

from cosmodrome.env.options import StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.store.store import Draft, Store

CYCLES = int(os.environ.get("CRASH_CYCLES", "6"))
QUEUES = 3
REPOSITORY = Path(__file__).parents[2]


def options(root: str, mode: str) -> StoreOptions:
    return StoreOptions(
        store_path_root_dir=root,
        flush_disk_type=cast(Any, mode),
        mapped_file_size_commit_log=64 * 1024,
        mapped_file_size_consume_queue=400,
        max_hash_slot_num=100,
        max_index_num=200,
        flush_interval_consume_queue=20,
        flush_consume_queue_thorough_interval=60,
        flush_interval_commit_log=30,
        disk_space_warning_level_ratio=100,
    )


def body_of(queue_id: int, queue_offset: int) -> bytes:
    """Content that depends on the place, so a message in a wrong place is seen."""
    seed = hashlib.sha256(b"%d-%d" % (queue_id, queue_offset)).digest()
    return seed * (1 + seed[0] % 20)


async def child(root: str, mode: str) -> None:
    store = Store(options(root, mode), real_env())
    await store.start()
    said = sys.stdout.fileno()

    async def sender(queue_id: int) -> None:
        while True:
            queue_offset = store.bounds("T", queue_id)[1]
            message = Draft("T", queue_id, body_of(queue_id, queue_offset), "", HOST, HOST)
            stored = store.append(message)
            assert stored.queue_offset == queue_offset
            await store.durable(stored.end)
            synced_end = store.facts().flushed_offset
            at_us = time.monotonic_ns() // 1000  # not before it was synced so far
            words = (queue_id, queue_offset, stored.log_offset, synced_end, at_us)
            # One write, so that a line is said whole or not at all.
            os.write(said, b"%d %d %d %d %d\n" % words)

    await asyncio.gather(*(sender(queue_id) for queue_id in range(QUEUES)))


async def killed_run(root: str, mode: str, seconds: float) -> list[tuple[int, int, int]]:
    """What a child acknowledged before it was killed, some time after its first word."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        root,
        mode,
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"},
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        first = await process.stdout.readline()
        assert first, "the child ended by itself"
        collecting = asyncio.ensure_future(process.stdout.read())
        await asyncio.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        said = first + await collecting
        assert await process.wait() == -signal.SIGKILL
    lines = said.split(b"\n")[:-1]
    return [(int(a), int(b), int(c)) for a, b, c, _, _ in (line.split() for line in lines)]


@pytest.mark.timeout(300 + 20 * CYCLES)
@pytest.mark.parametrize("mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_acknowledged_messages_survive_kills(tmp_path: Path, mode: str) -> None:
    chance = random.Random(f"kill-{mode}")
    root = str(tmp_path)
    acknowledged: dict[tuple[int, int], int] = {}
    for _ in range(CYCLES):
        said = await killed_run(root, mode, chance.uniform(0.0, 0.15))
        for queue_id, queue_offset, log_offset in said:
            assert (queue_id, queue_offset) not in acknowledged
            acknowledged[queue_id, queue_offset] = log_offset
    assert len(acknowledged) > CYCLES
    assert (tmp_path / "abort").exists()

    store = Store(options(root, mode), real_env())
    await store.start()
    for queue_id in range(QUEUES):
        got = records(store, "T", queue_id)
        assert [item.queue_offset for item in got] == list(range(len(got)))
        for item in got:
            assert item.body == body_of(queue_id, item.queue_offset)
            said_at = acknowledged.pop((queue_id, item.queue_offset), item.log_offset)
            assert said_at == item.log_offset
    assert not acknowledged
    await store.stop()


if __name__ == "__main__":
    asyncio.run(child(sys.argv[1], sys.argv[2]))
