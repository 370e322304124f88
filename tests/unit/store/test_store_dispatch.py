"""What becomes visible when, and who hears of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.store.store_kit import (
    ALWAYS_MS,
    HandClock,
    bodies,
    draft,
    eventually,
    faulty_env,
    put,
    small,
)

from cosmodrome import speed
from cosmodrome.errors import ConfigError, StoreUnwritable
from cosmodrome.layout import QUEUE_ENTRY, SYS_PREPARED
from cosmodrome.store.store import Arrival, Store


async def test_arrivals_come_grouped_and_before_the_answer(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    heard: list[Arrival] = []
    readable: list[int] = []
    store.arrivals.subscribe(heard.append)
    store.arrivals.subscribe(lambda a: readable.append(len(bodies(store, a.topic, a.queue_id))))
    await store.start()
    await put(
        store,
        draft(b"0", tags="a"),
        draft(b"1", queue_id=1),
        draft(b"2", tags="b"),
        draft(b"3", sys_flag=SYS_PREPARED),
    )
    a, b = speed.java_hash("a"), speed.java_hash("b")
    assert heard == [Arrival("T", 0, 2, [a, b]), Arrival("T", 1, 1, [0])]
    assert readable == [2, 1]
    await store.stop()


async def test_only_what_somebody_waits_for_is_announced(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    heard: list[tuple[str, int]] = []
    watched: set[tuple[str, int]] = set()
    store.arrivals.subscribe(lambda a: heard.append((a.topic, a.queue_id)), queues=watched)
    store.arrivals.subscribe(lambda a: None, topic="U")
    await store.start()

    async def everywhere() -> list[tuple[str, int]]:
        heard.clear()
        await put(store, draft(), draft(queue_id=1), draft(topic="U"), draft(topic="V"))
        return heard

    assert await everywhere() == [("U", 0)]
    watched.add(("T", 1))
    assert await everywhere() == [("T", 1), ("U", 0)]
    watched.clear()
    assert await everywhere() == [("U", 0)]
    store.arrivals.subscribe(lambda a: None)
    assert await everywhere() == [("T", 0), ("T", 1), ("U", 0), ("V", 0)]
    await store.stop()


async def test_what_was_just_written_is_not_read_back(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()

    def view(base: int) -> memoryview:
        raise AssertionError(f"the file at {base} is read")

    view_of, store._log.view = store._log.view, view
    for number in range(9):  # over several files
        await put(store, *[draft(bytes(700)) for _ in range(number % 3 + 1)])
    store._log.view = view_of
    assert len(bodies(store)) == 18
    assert not store._log.spans
    await store.stop()


async def test_a_listener_may_fail_or_send(tmp_path: Path) -> None:
    store = Store(small(tmp_path, flush_disk_type="ASYNC_FLUSH"), faulty_env())

    def fails(arrival: Arrival) -> None:
        raise RuntimeError("not the store's fault")

    def answers(arrival: Arrival) -> None:
        if arrival.topic == "T":
            store.append(draft(b"answer", topic="U"))

    store.arrivals.subscribe(answers)
    store.arrivals.subscribe(fails)
    await store.start()
    await put(store, draft(b"question"))
    await eventually(lambda: store.bounds("U", 0) == (0, 1))
    assert store.why_unwritable is None
    await store.stop()


async def test_schedule_entries_carry_the_time_of_delivery(tmp_path: Path) -> None:
    clock = HandClock(1_000_000)
    delays = {1: 1000, 3: 10_000}
    store = Store(small(tmp_path), faulty_env(clock=clock), lambda level: delays[level])
    await store.start()

    def delayed(level: int, topic: str) -> object:
        return draft(topic=topic, queue_id=level, properties=f"DELAY\x01{level}\x02TAGS\x01a")

    for level in (1, 3, 7):
        await put(store, delayed(level, "SCHEDULE_TOPIC_XXXX"))  # type: ignore[arg-type]
        await put(store, delayed(level, "T"))  # type: ignore[arg-type]
    codes = []
    for level in (1, 3, 7):
        for topic in ("SCHEDULE_TOPIC_XXXX", "T"):
            queue = store._queues.get(topic, level)
            assert queue is not None
            entry = queue.entry(0)
            assert entry is not None
            codes.append(entry[2])
    plain = speed.java_hash("a")
    assert codes == [1_001_000, plain, 1_010_000, plain, 1_001_000, plain]
    await store.stop()


async def test_prepared_messages_are_found_by_key_only(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    await put(store, draft(b"half", keys="k", sys_flag=SYS_PREPARED))
    assert store.bounds("T", 0) == (0, 0)
    assert len(store.find("T", "k", 9, 0, ALWAYS_MS).records) == 1
    await store.stop()


async def test_a_failure_half_way_stops_the_store_and_leaves_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = faulty_env()
    store = Store(small(tmp_path), env)
    await store.start()
    env.offload.holding = True  # type: ignore[attr-defined]
    first = [store.append(draft(body)) for body in (b"a", b"b")]
    late = store.append(draft(b"half-way", topic="SCHEDULE_TOPIC_XXXX"))
    waits = [store.durable(item.end) for item in (*first, late)]
    store._log.write()

    def fails(*entry: object) -> None:
        raise RuntimeError("no memory")

    put_one = store._queues.put
    monkeypatch.setattr(store._queues, "put", fails)
    env.offload.open()  # type: ignore[attr-defined]
    for wait in waits:
        with pytest.raises(StoreUnwritable, match="could not be put into their queues"):
            await wait
    with pytest.raises(StoreUnwritable, match="no memory"):
        store.append(draft())
    assert store._dispatch.cursor == 0
    monkeypatch.setattr(store._queues, "put", put_one)
    store._dispatch.advance(late.end)  # as the end of a sync under way would
    assert bodies(store) == [b"a", b"b"]
    assert store.bounds("SCHEDULE_TOPIC_XXXX", 0) == (0, 1)
    await store.stop()
    assert (tmp_path / "abort").exists()


async def test_derived_data_and_checkpoint_are_written_by_themselves(tmp_path: Path) -> None:
    options = small(
        tmp_path, flush_interval_consume_queue=10, flush_consume_queue_thorough_interval=30
    )
    store = Store(options, faulty_env())
    await store.start()
    await put(store, draft(b"x", keys="k"))
    await eventually(lambda: (tmp_path / "consumequeue/T/0" / ("0" * 20)).exists())
    checkpoint = tmp_path / "checkpoint"
    await eventually(lambda: checkpoint.exists() and any(checkpoint.read_bytes()))
    assert checkpoint.stat().st_size == 4096
    await store.stop()


async def test_much_derived_data_is_written_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.store.upkeep.BATCH_BYTES", 100)
    monkeypatch.setattr("cosmodrome.store.upkeep.QUEUE_BATCH_BYTES", 20)
    store = Store(small(tmp_path, flush_interval_consume_queue=60_000), faulty_env())
    await store.start()
    await put(store, *(draft(b"x") for _ in range(10)))
    await eventually(lambda: (tmp_path / "consumequeue/T/0" / ("0" * 20)).exists())
    await store.stop()


async def test_little_of_several_queues_waits_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.store.upkeep.BATCH_BYTES", 100)
    monkeypatch.setattr("cosmodrome.store.upkeep.QUEUE_BATCH_BYTES", 100)
    store = Store(small(tmp_path, flush_interval_consume_queue=60_000), faulty_env())
    await store.start()
    for _ in range(3):
        await put(store, *(draft(b"x", queue_id=number) for number in range(4)))
    assert store._queues.tail_bytes == 12 * QUEUE_ENTRY.size and not store._upkeep._wake.is_set()
    for _ in range(3):
        await put(store, *(draft(b"x", queue_id=number) for number in range(4)))
    await eventually(lambda: (tmp_path / "consumequeue/T/3" / ("0" * 20)).exists())
    await eventually(lambda: store._queues.dirty_count == 0)
    assert store._queues.tail_bytes == 0
    await put(store, *(draft(b"x", queue_id=number) for number in range(4)))
    assert store._queues.dirty_count == 4  # they are noted anew
    await store.stop()


async def test_a_deleted_topic_slows_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    await put(store, draft(b"gone", topic="Gone"), draft(b"x"))
    store.delete_topic("Gone")
    monkeypatch.setattr(store._queues, "put_run", None)  # the way for what needs a closer look
    await put(store, draft(b"y"), draft(b"z"))
    assert bodies(store) == [b"x", b"y", b"z"]
    await store.stop()


async def test_facts_count(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    await put(store, draft(b"x"), draft(b"y", queue_id=1))
    facts = store.facts()
    assert (facts.put_count, facts.put_failed_count, facts.queue_count) == (2, 0, 2)
    assert facts.put_bytes == facts.max_offset == facts.written_offset == facts.flushed_offset
    assert (facts.dispatch_behind_bytes, facts.unwritable) == (0, None)
    assert facts.disk_ratio == pytest.approx(0.1)
    await store.stop()
    assert store.facts().unwritable == "the store is stopped"


def test_settings_are_checked_before_anything_is_opened(tmp_path: Path) -> None:
    for change, reason in (
        ({"store_path_root_dir": ""}, "storePathRootDir"),
        ({"flush_disk_type": "MAYBE"}, "flushDiskType=MAYBE"),
        ({"broker_role": "KING"}, "brokerRole=KING"),
        ({"mapped_file_size_commit_log": 10}, "mappedFileSizeCommitLog=10"),
        ({"max_hash_slot_num": 0}, "maxHashSlotNum=0"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Store(small(tmp_path, **change), faulty_env())
    assert list(tmp_path.iterdir()) == []


async def test_stopping_lets_waiters_go(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    wait = asyncio.ensure_future(store.durable(store.append(draft(b"x")).end))
    await store.stop()
    await wait  # stopping writes and syncs what was staged
    assert (tmp_path / "abort").exists() is False
