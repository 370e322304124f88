"""A topic that the master deleted goes at the slave too: what the log had of it before, no more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.unit.broker.broker_fakes import STORE_HOST
from tests.unit.replication.tables_kit import SMALL

from cosmodrome.broker.replicate.tables import DeletionsTable
from cosmodrome.env.options import StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.store.store import Draft, Store


def store_at(folder: Path) -> Store:
    return Store(StoreOptions(store_path_root_dir=str(folder), **SMALL), real_env(seed=1))


async def put(store: Store, topic: str, *bodies: bytes) -> None:
    for body in bodies:
        draft = Draft(topic, 0, body, "", STORE_HOST, STORE_HOST, born_ms=1)
        await store.durable(store.append(draft).end)


async def master_with_deletion(folder: Path) -> dict[str, int]:
    """A log with a topic that lived twice and one that is gone; the rows that a slave gets."""
    store = store_at(folder)
    await store.start()
    told: list[dict[str, int]] = []
    table = DeletionsTable(store)
    table.on_change(lambda rows: told.append(dict(rows)))
    await put(store, "Twice", b"1", b"2", b"3")
    await put(store, "Gone", b"1", b"2")
    await put(store, "Stays", b"1")
    end = store.facts().written_offset
    store.delete_topic("Twice")
    store.delete_topic("Gone")
    assert told == [{"Twice": end}, {"Gone": end}]
    await put(store, "Twice", b"new")
    await put(store, "Stays", b"2")
    rows = dict(table.rows())
    await store.stop()
    return rows


def ends(store: Store) -> dict[str, int]:
    return {topic: store.bounds(topic, 0)[1] for topic in store.queues()}


async def test_news_of_a_deletion_that_comes_late(tmp_path: Path) -> None:
    rows = await master_with_deletion(tmp_path / "master")
    shutil.copytree(tmp_path / "master" / "commitlog", tmp_path / "slave" / "commitlog")
    store = store_at(tmp_path / "slave")
    await store.start()
    assert ends(store) == {"Twice": 1, "Gone": 2, "Stays": 2}
    table = DeletionsTable(store)
    table.apply(rows, whole=True)
    assert ends(store) == {"Twice": 1, "Stays": 2}
    assert store.read("Twice", 0, 0, 10).count == 1
    assert table.rows() == rows
    # A row that the master has forgotten stays as long as this log has such records.
    table.apply({}, whole=True)
    table.apply({"Gone": None}, whole=False)
    assert table.rows() == rows
    await put(store, "Gone", b"again")
    assert ends(store)["Gone"] == 1
    await store.abandon()  # a crash: queues are built again from the log
    shutil.rmtree(tmp_path / "slave" / "consumequeue", ignore_errors=True)
    store = store_at(tmp_path / "slave")
    await store.start()
    assert ends(store) == {"Twice": 1, "Gone": 1, "Stays": 2}
    await store.stop()


async def test_news_of_a_deletion_that_comes_before_the_log(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    await store.start()
    await put(store, "T", b"1")
    end = store.facts().written_offset
    DeletionsTable(store).apply({"T": end + 200}, whole=True)
    assert "T" not in store.queues()
    await put(store, "T", b"x" * 20)  # still before the deletion
    assert store.facts().written_offset < end + 200
    assert "T" not in store.queues()
    while store.facts().written_offset < end + 200:
        await put(store, "Other", b"fill")
    await put(store, "T", b"2")
    assert store.bounds("T", 0)[1] > 0
    await store.stop()


async def test_bad_rows_and_known_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_at(tmp_path)
    await store.start()
    await put(store, "T", b"1")
    end = store.facts().written_offset
    table = DeletionsTable(store)
    saves: list[str] = []
    store.deletions.changes.subscribe(saves.append)
    table.apply({"T": -1, "../x": 5, "U": "soon", "V": 1 << 70, "W": [1], "T2": end}, whole=False)
    assert table.rows() == {"T2": end}
    assert len([line for line in caplog.messages if line.startswith("row_refused")]) == 5
    table.apply({"T2": end}, whole=True)
    assert saves == ["T2"]
    await store.stop()
