"""Zeros ahead of the data: blocks are written before data comes, and never over data."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.unit.store.store_kit import Faults, bodies, draft, faulty_env, put, small

from cosmodrome.errors import StoreUnwritable
from cosmodrome.store.store import Store

AHEAD_BYTES = 2000
FILE_BYTES = 8192


def writes(faults: Faults) -> list[tuple[str, int, int]]:
    """File, position and size of what was written to the log."""
    lines = [line.split() for line in faults.log if line.startswith("write 000")]
    return [(name, int(position), int(size)) for _, name, position, size in lines]


async def test_syncs_in_between_find_their_blocks_written(tmp_path: Path) -> None:
    faults = Faults()
    options = small(
        tmp_path, mapped_file_size_commit_log=1 << 20, commit_log_zeros_ahead=AHEAD_BYTES
    )
    store = Store(options, faulty_env(faults))
    await store.start()
    faults.log.clear()
    for number in range(30):
        await put(store, draft(b"%04d" % number))
    ahead = 0
    rounds = 0
    for _, position, size in writes(faults):
        if size == AHEAD_BYTES:
            rounds += 1
            ahead = position + size
        else:
            assert position + size <= ahead
    assert 1 < rounds < 6
    assert bodies(store) == [b"%04d" % number for number in range(30)]
    await store.stop()


async def test_zeros_end_with_their_file_and_data_stays(tmp_path: Path) -> None:
    faults = Faults()
    options = small(
        tmp_path, mapped_file_size_commit_log=FILE_BYTES, commit_log_zeros_ahead=AHEAD_BYTES
    )
    store = Store(options, faulty_env(faults))
    await store.start()
    chance = random.Random(5)
    sent = [chance.randbytes(chance.randrange(1, 1500)) for _ in range(60)]
    for body in sent:
        await put(store, draft(body))
    assert len({name for name, _, _ in writes(faults)}) > 3
    assert all(position + size <= FILE_BYTES for _, position, size in writes(faults))
    assert bodies(store) == sent
    await store.abandon()
    again = Store(options, faulty_env())
    await again.start()
    assert bodies(again) == sent
    await put(again, draft(b"more"))
    assert bodies(again) == [*sent, b"more"]
    await again.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"flush_disk_type": "ASYNC_FLUSH"},
        {"commit_log_zeros_ahead": 0},
        {"warm_maped_file_enable": True},
    ],
)
async def test_without_zeros(tmp_path: Path, changes: dict[str, object]) -> None:
    faults = Faults()
    store = Store(small(tmp_path, **changes), faulty_env(faults))
    await store.start()
    faults.log.clear()
    await put(store, draft(b"one"))
    assert len([at for name, at, _ in writes(faults) if name == "0" * 20]) == 1
    await store.stop()


async def test_zeros_that_cannot_be_written_refuse_the_message(tmp_path: Path) -> None:
    faults = Faults()
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    faults.write = "commitlog"
    with pytest.raises(StoreUnwritable, match="No space left"):
        await put(store, draft(b"lost"))
    faults.write = None
    await put(store, draft(b"kept"))
    assert bodies(store) == [b"kept"]
    await store.stop()
