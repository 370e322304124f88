"""Stores written by upstream: opened, they hold exactly what upstream reads from them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from tests.goldens import Golden, each_golden

from cosmodrome import speed
from cosmodrome.env.options import StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.layout import QUEUE_ENTRY
from cosmodrome.store.store import ReadStatus, Store

ALWAYS = 1 << 60

DELAYS_MS = {1: 1000, 2: 5000, 3: 10_000, 14: 600_000, 18: 7_200_000}


def options(golden: Golden, root: Path) -> StoreOptions:
    return StoreOptions(
        store_path_root_dir=str(root),
        disk_space_warning_level_ratio=100,
        **cast(Any, golden.sizes),
    )


def copied(golden: Golden, name: str, tmp_path: Path) -> Path:
    root = tmp_path / name
    shutil.copytree(golden.path / name, root)
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    root.chmod(0o755)
    return root


def read_all(store: Store, topic: str, queue_id: int) -> list[speed.Entry]:
    entries: list[speed.Entry] = []
    offset, end = store.bounds(topic, queue_id)
    while offset < end:
        batch = store.read(topic, queue_id, offset, 32)
        assert batch.status is ReadStatus.FOUND
        at = 0
        while at < len(batch.data):
            size = int.from_bytes(batch.data[at : at + 4], "big")
            record = batch.data[at : at + size]
            base = int.from_bytes(record[28:36], "big")
            found, _, _ = speed.walk(memoryview(record), base, 0, size, True, 1)
            entries += found
            at += size
        offset = batch.next_offset
    return entries


def check_messages(store: Store, facts: dict[str, Any]) -> None:
    wanted: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for message in facts["messages"]:
        wanted.setdefault((message["topic"], message["queueId"]), []).append(message)
    for (topic, queue_id), messages in wanted.items():
        messages.sort(key=lambda m: m["queueOffset"])
        got = read_all(store, topic, queue_id)
        assert [(e[0], e[1], e[2], e[3], e[4], e[6]) for e in got] == [
            (
                m["commitLogOffset"],
                m["storeSize"],
                topic,
                queue_id,
                m["queueOffset"],
                m["storeTimestamp"],
            )
            for m in messages
        ]
        queue = store._queues.get(topic, queue_id)
        assert queue is not None
        for m in messages:
            assert queue.entry(m["queueOffset"]) == (m["cq_offset"], m["cq_size"], m["cq_tagsCode"])
    for topic, queues in facts["queues"].items():
        for queue_id, bounds in queues.items():
            assert store.bounds(topic, int(queue_id)) == (bounds["min"], bounds["max"])


def check_keys(store: Store, facts: dict[str, Any]) -> None:
    assert facts["key_queries"]
    for query in facts["key_queries"]:
        found = store.find(query["topic"], query["key"], 64, 0, ALWAYS)
        offsets = {int.from_bytes(record[28:36], "big") for record in found.records}
        wanted = {int(text[-16:], 16) for text in query["offsetMsgIds"]}
        # Upstream's client compares the keys again, so ours may hold collisions beside them.
        assert wanted <= offsets, query
        assert len(offsets) == len(found.records)


@each_golden
async def test_a_clean_store_is_read_without_touching_it(golden: Golden) -> None:
    facts = golden.manifest("store")
    store = Store(options(golden, golden.path / "store"), real_env(), read_only=True)
    await store.start()
    check_messages(store, facts)
    check_keys(store, facts)
    assert store.facts().max_offset == facts["commitlog_walk_end"]
    assert store.facts().min_offset == int(facts["brokerMinCommitLogOffset"])
    for ask in facts["search_offset"]:
        topic, queue_id, when = ask["topic"], ask["queueId"], ask["timestamp"]
        low, high = store.bounds(topic, queue_id)
        times = [store.store_time(topic, queue_id, at) for at in range(low, high)]
        bound = sum(1 for at in times if at < when)
        assert store.offset_by_time(topic, queue_id, when) == low + bound
    await store.stop()
    assert not (golden.path / "store/abort").exists()


@each_golden
@pytest.mark.parametrize("name", ["store-crash", "store-torn"])
async def test_a_killed_store_recovers_to_what_upstream_recovers(
    golden: Golden, name: str, tmp_path: Path
) -> None:
    facts = golden.manifest(name)
    root = copied(golden, name, tmp_path)
    store = Store(options(golden, root), real_env())
    await store.start()
    check_messages(store, facts)
    check_keys(store, facts)
    assert store.facts().max_offset == facts["commitlog_walk_end"]
    await store.stop()
    names = sorted(path.name for path in (root / "commitlog").iterdir())
    assert names == [item["file"].split("/")[1] for item in facts["commitlog_files"]]
    again = Store(options(golden, root), real_env())
    await again.start()
    check_messages(again, facts)
    check_keys(again, facts)
    await again.stop()


@each_golden
async def test_derived_data_built_from_the_log_equals_upstreams(
    golden: Golden, tmp_path: Path
) -> None:
    root = copied(golden, "store", tmp_path)
    shutil.rmtree(root / "consumequeue")
    shutil.rmtree(root / "index")
    store = Store(options(golden, root), real_env(), lambda level: DELAYS_MS[level])
    await store.start()
    check_messages(store, golden.manifest("store"))
    await store.stop()
    for ours in sorted((root / "consumequeue").rglob("0*")):
        if ours.is_file():
            theirs = golden.path / "store" / ours.relative_to(root)
            assert list(QUEUE_ENTRY.iter_unpack(ours.read_bytes())) == list(
                QUEUE_ENTRY.iter_unpack(theirs.read_bytes())
            )
    ours_index = [path.read_bytes() for path in sorted((root / "index").iterdir())]
    theirs_index = [path.read_bytes() for path in sorted((golden.path / "store/index").iterdir())]
    assert ours_index == theirs_index
