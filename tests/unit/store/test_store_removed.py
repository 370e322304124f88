"""Deleted topics stay deleted, whatever kind of stop follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.store.store_kit import Faults, bodies, draft, faulty_env, put, small

from cosmodrome.env.real import RealDisk
from cosmodrome.store import removed as removed_module
from cosmodrome.store.removed import Removed
from cosmodrome.store.store import Store


async def opened(root: Path, faults: Faults | None = None) -> Store:
    store = Store(small(root), faulty_env(faults))
    await store.start()
    return store


def noted(root: Path) -> dict[str, int]:
    found: dict[str, int] = json.loads((root / "config" / "deletedTopics.json").read_text())[
        "topics"
    ]
    return found


@pytest.mark.parametrize("clean", [True, False])
async def test_a_deleted_topic_does_not_come_back(tmp_path: Path, clean: bool) -> None:
    store = await opened(tmp_path)
    await put(store, draft(b"keep", topic="K"), *(draft(b"%d" % at) for at in range(9)))
    store.delete_topic("T")
    for _ in range(2):
        await (store.stop() if clean else store.abandon())
        store = await opened(tmp_path)
        assert dict(store.queues()) == {"K": [0]}
        assert store.bounds("T", 0) == (0, 0)
        assert bodies(store, "K") == [b"keep"]
    await store.stop()


@pytest.mark.parametrize("clean", [True, False])
async def test_a_topic_made_again_has_only_its_new_messages(tmp_path: Path, clean: bool) -> None:
    store = await opened(tmp_path)
    await put(store, *(draft(b"%d" % at, tags="t") for at in range(9)))
    store.delete_topic("T")
    assert await put(store, draft(b"new"), draft(b"newer")) == [0, 1]
    await (store.stop() if clean else store.abandon())
    store = await opened(tmp_path)
    assert bodies(store) == [b"new", b"newer"]
    assert await put(store, draft(b"next")) == [2]
    await store.stop()


async def test_messages_on_their_way_go_with_their_topic(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, draft(b"old"))
    stored = store.append(draft(b"on its way"))
    settling = store.durable(stored.end)
    store.delete_topic("T")
    await settling
    assert store.bounds("T", 0) == (0, 0)
    assert await put(store, draft(b"new")) == [0]
    assert bodies(store) == [b"new"]
    await store.stop()


async def test_offsets_that_were_taken_back_count_for_the_new_topic(tmp_path: Path) -> None:
    faults = Faults()
    store = await opened(tmp_path, faults)
    await put(store, draft(b"old"))
    store.append(draft(b"lost" * 100))
    faults.write = "commitlog"
    store.delete_topic("T")
    faults.write = None
    assert await put(store, draft(b"new")) == [0]
    await store.abandon()
    store = await opened(tmp_path)
    assert bodies(store) == [b"new"]
    await store.stop()


async def test_a_log_that_begins_anew_is_not_affected(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await put(store, draft(b"old" * 100))
    store.delete_topic("T")
    await store.stop()
    assert noted(tmp_path)["T"] > 0
    for path in (tmp_path / "commitlog").iterdir():
        path.unlink()
    store = await opened(tmp_path)
    assert noted(tmp_path) == {}
    await put(store, draft(b"new"))
    await store.abandon()
    store = await opened(tmp_path)
    assert bodies(store) == [b"new"]
    await store.stop()


def test_lines_are_dropped_with_the_log_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removed_module, "TOPICS_MAX", 3)
    path = str(tmp_path / "config" / "deletedTopics.json")
    removed = Removed(RealDisk(), path, read_only=False)
    removed.load()
    for end, topic in enumerate("abcda", start=10):
        removed.note(topic, end, 0)
    assert removed.before == {"c": 12, "d": 13, "a": 14}
    removed.note("e", 20, 13)
    assert noted(tmp_path) == {"a": 14, "e": 20}
    again = Removed(RealDisk(), path, read_only=False)
    again.load()
    again.clip(0, 15)
    assert again.before == noted(tmp_path) == {"a": 14, "e": 15}
    looking = Removed(RealDisk(), path, read_only=True)
    looking.load()
    looking.clip(14, 15)
    assert looking.before == {"e": 15} and "a" in noted(tmp_path)


async def test_an_unreadable_file_is_said_and_survived(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "deletedTopics.json").write_text('{"topics": 5}')
    store = await opened(tmp_path)
    assert "deleted_topics_unreadable" in caplog.text
    await put(store, draft(b"x"))
    await store.stop()


async def test_a_note_that_cannot_be_saved_does_not_stop_the_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = await opened(tmp_path)
    await put(store, draft(b"x"))

    def full(disk: object, path: str, data: bytes, **rest: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(RealDisk, "replace", full)
        store.delete_topic("T")
    assert "deleted_topics_not_saved" in caplog.text
    assert store.bounds("T", 0) == (0, 0)
    await store.stop()
