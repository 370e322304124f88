"""Whatever was lost between a clean stop and the next start, queues and index equal the log."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.unit.store.store_kit import ALWAYS_MS, bodies, draft, put, small

from cosmodrome.env.real import real_env
from cosmodrome.store.store import Store

SENT = [b"body %03d" % number for number in range(60)]
INVENTORY = "storeInventory.json"


async def filled(root: Path) -> None:
    """Two queues over several log, queue and index files, stopped cleanly."""
    store = Store(small(root), real_env())
    await store.start()
    for number, body in enumerate(SENT):
        await put(store, draft(body, "T", number % 2, keys=f"k{number}"))
    await store.stop()


async def whole(root: Path) -> None:
    """Everything is served, found by its key, and new messages go on behind it."""
    store = Store(small(root), real_env())
    await store.start()
    try:
        for queue_id in (0, 1):
            assert bodies(store, "T", queue_id) == SENT[queue_id::2]
            assert store.bounds("T", queue_id) == (0, len(SENT) // 2)
        for number, body in enumerate(SENT):
            found = store.find("T", f"k{number}", 64, 0, ALWAYS_MS).records
            assert any(body in record for record in found), number
        assert await put(store, draft(b"more", "T", 1)) == [len(SENT) // 2]
    finally:
        await store.stop()


def lose_last_queue_file(root: Path) -> None:
    sorted((root / "consumequeue" / "T" / "1").iterdir())[-1].unlink()


def lose_first_queue_file(root: Path) -> None:
    sorted((root / "consumequeue" / "T" / "1").iterdir())[0].unlink()


def lose_a_queue(root: Path) -> None:
    shutil.rmtree(root / "consumequeue" / "T" / "0")


def lose_all_queues(root: Path) -> None:
    shutil.rmtree(root / "consumequeue")


def lose_first_index_file(root: Path) -> None:
    sorted((root / "index").iterdir())[0].unlink()


def lose_last_index_file(root: Path) -> None:
    sorted((root / "index").iterdir())[-1].unlink()


def lose_the_index(root: Path) -> None:
    shutil.rmtree(root / "index")


@pytest.mark.parametrize(
    "lose",
    [
        lose_last_queue_file,
        lose_first_queue_file,
        lose_a_queue,
        lose_all_queues,
        lose_first_index_file,
        lose_last_index_file,
        lose_the_index,
    ],
)
async def test_what_was_lost_is_built_again(tmp_path: Path, lose: object) -> None:
    await filled(tmp_path)
    assert callable(lose)
    lose(tmp_path)
    await whole(tmp_path)


async def test_a_clean_start_walks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await filled(tmp_path)
    with caplog.at_level("INFO"):
        await whole(tmp_path)
    begins = next(line for line in caplog.messages if line.startswith("recovery_begins"))
    done = next(line for line in caplog.messages if line.startswith("recovery_done"))
    assert "clean=True" in begins
    assert begins.split("from=")[1] == done.split("end=")[1].split()[0]


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"logEnd": "x"}'])
async def test_without_a_readable_inventory_the_last_files_are_walked(
    tmp_path: Path, content: bytes | None
) -> None:
    await filled(tmp_path)
    if content is None:
        (tmp_path / INVENTORY).unlink()
    else:
        (tmp_path / INVENTORY).write_bytes(content)
    lose_last_queue_file(tmp_path)
    await whole(tmp_path)


async def test_an_old_inventory_allows_more_than_it_says(tmp_path: Path) -> None:
    """Another broker worked on the store since: it does not rewrite our list."""
    await filled(tmp_path)
    old = (tmp_path / INVENTORY).read_bytes()
    store = Store(small(tmp_path), real_env())
    await store.start()
    await put(store, *(draft(b"later %d" % number, "U") for number in range(9)))
    await store.stop()
    (tmp_path / INVENTORY).write_bytes(old)
    store = Store(small(tmp_path), real_env())
    await store.start()
    assert bodies(store, "U") == [b"later %d" % number for number in range(9)]
    await store.stop()
    await whole(tmp_path)
