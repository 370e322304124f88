"""What the lanes put into queues, also when it is taken back, or when its queue is gone."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.twins.test_twins_lane_facts import HOST, START, STORE_MS, send
from tests.unit.store.store_kit import Faults, bodies, draft, faulty_env, put, small

from cosmodrome import speed
from cosmodrome.env.real import real_env
from cosmodrome.errors import StoreUnwritable
from cosmodrome.layout import QUEUE_ENTRY_BYTES
from cosmodrome.speed.core import pure
from cosmodrome.store.store import PutStatus, Store


def make_intake(core: ModuleType) -> Any:
    return core.Intake(lambda name: core.Plan(name.decode(), 4, 0), "c", 9000, 90_000)


def stage(store: Store, intake: Any, *sends: bytes) -> int:
    """Put sends into the log; where they end there."""
    data = b"".join(sends)
    intake.gather(None, memoryview(data), 0, 1000, HOST, HOST)
    store.stage(intake)
    assert intake.left == 0
    end: int = intake.tickets()[1][-1][0]
    intake.clear()
    return end


async def test_a_failed_write_takes_back_what_both_ways_staged(
    tmp_path: Path, lane_core: ModuleType
) -> None:
    faults, intake = Faults(), make_intake(lane_core)
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    end = stage(store, intake, send("T", 0, "", b"a0"), send("T", 1, "", b"b0"))
    store.relieve()
    await store.durable(end)
    faults.write = "commitlog"
    outcomes: list[object] = []
    store.append(draft(b"lost", queue_id=1))
    stage(store, intake, *(send("T", n % 3, "", b"lost") for n in range(7)))
    store.append(draft(b"lost"))
    store.append(draft(b"lost", queue_id=2))
    end = stage(store, intake, send("T", 0, "", b"lost"), send("T", 2, "", b"lost"))
    store.when_durable(end, lambda who, outcome: outcomes.append(outcome), None)
    store.relieve(at_once=True)
    assert len(outcomes) == 1 and isinstance(outcomes[0], StoreUnwritable)
    faults.write = None
    end = stage(store, intake, send("T", 0, "", b"a1"), send("T", 2, "", b"c0"))
    assert await put(store, draft(b"b1", queue_id=1), draft(b"a2")) == [1, 2]
    end = stage(store, intake, send("T", 2, "", b"c1"), send("T", 1, "", b"b2"))
    store.when_durable(end, lambda who, outcome: outcomes.append(outcome), None)
    store.relieve(at_once=True)
    await store.durable(end)
    assert outcomes[1:] == [PutStatus.OK]
    assert bodies(store) == [b"a0", b"a1", b"a2"]
    assert bodies(store, queue_id=1) == [b"b0", b"b1", b"b2"]
    assert bodies(store, queue_id=2) == [b"c0", b"c1"]
    await store.stop()


async def test_a_deleted_topic_begins_again(tmp_path: Path, lane_core: ModuleType) -> None:
    store, intake = Store(small(tmp_path), real_env()), make_intake(lane_core)
    await store.start()
    for number in range(3):
        await store.durable(stage(store, intake, send("T", 0, "", b"%d" % number)))
    assert store.bounds("T", 0) == (0, 3)
    store.delete_topic("T")
    assert store.bounds("T", 0) == (0, 0)
    for number in range(2):  # the plan is the same, and knows the old end
        await store.durable(stage(store, intake, send("T", 0, "", b"new %d" % number)))
    assert store.bounds("T", 0) == (0, 2) and bodies(store) == [b"new 0", b"new 1"]
    await store.stop()
    store = Store(small(tmp_path), real_env())
    await store.start()
    assert bodies(store) == [b"new 0", b"new 1"]
    await store.stop()


async def test_a_queue_that_was_dropped_and_made_again(
    tmp_path: Path, lane_core: ModuleType
) -> None:
    store, intake = Store(small(tmp_path), real_env()), make_intake(lane_core)
    await store.start()
    for body in (b"a", b"b"):  # the second one finds the queue, which the first one made
        await store.durable(stage(store, intake, send("T", 0, "", body)))
    queue = store._queues.get("T", 0)
    # Its tail is empty then, and ends where the next entry belongs.
    assert queue is not None and await store._upkeep.write_derived()
    store._queues.drop(queue)  # the end of the log's queue stays
    await store.durable(stage(store, intake, send("T", 0, "", b"c")))
    await store.durable(stage(store, intake, send("T", 0, "", b"d")))
    assert bodies(store) == [b"c", b"d"] and store.bounds("T", 0) == (2, 4)
    assert not queue.tail and store._queues.dirty_count == 1
    assert store._queues.tail_bytes == len(store._queues.get("T", 0).tail)
    await store.stop()


def test_ends_of_queues_that_are_gone_stay_so() -> None:
    for twin in {pure, speed}:
        kept, gone = twin.QueueEnd("T", 0, 5), twin.QueueEnd("T", 1, 5)
        kept.next, gone.next = 9, -1
        twin.put_back([(kept, 5), (gone, 5), (kept, 7)])
        assert (kept.next, gone.next) == (5, -1) and kept.key == ("T", 0)


class Growing:
    def __init__(self, twin: Any, first: int) -> None:
        self.growth = twin.Tail(self)
        self.growth.at = first * QUEUE_ENTRY_BYTES


class Every:
    def __contains__(self, name: object) -> bool:
        return True


def test_a_tail_takes_at_most_twice_its_room() -> None:
    for twin in {pure, speed}:
        queue = Growing(twin, 0)
        entry = bytes(6) + b"\1" * 14
        for number in range(3000):
            log_offset = (number + 1).to_bytes(8, "big")
            runs = [("T", 0, number, log_offset + entry[8:])]
            assert twin.spread(runs, {("T", 0): queue}, set(), set(), [])[0] == 1
            tail = queue.growth.data
            assert len(tail) == 20 * (number + 1) and tail.__alloc__() <= 2 * len(tail)


@pytest.mark.parametrize("seed", range(20))
def test_runs_that_know_their_tails(seed: int) -> None:
    """The compiled lane's runs go where the same runs as tuples go by the law."""
    lane = pytest.importorskip("cosmodrome.speed.lane.native")
    native = pytest.importorskip("cosmodrome.speed.core.native")
    chance, intake, log_offset = random.Random(seed), make_intake(lane), START
    keys = [(topic, queue_id) for topic in "TUV" for queue_id in range(4)]
    ends = {key: native.QueueEnd(*key, chance.randrange(3)) for key in keys}
    sides: list[tuple[Any, dict[Any, Growing], set[Any]]] = [
        (twin, {key: Growing(twin, ends[key].next) for key in keys}, set())
        for twin in (native, pure)
    ]
    stops = 0
    for _ in range(30):
        chosen = [chance.choice(keys) for _ in range(chance.randrange(1, 30))]
        view = memoryview(b"".join(send(*key, f"TAGS\x01{key}") for key in chosen))
        intake.gather(None, view, 0, 1000, HOST, HOST)
        before = {key: queue_end.next for key, queue_end in ends.items()}
        undo: list[Any] = []
        taken, _, runs, _ = intake.encode(
            bytearray(), log_offset, 1 << 30, STORE_MS, lambda *key: ends[key], undo
        )
        intake.clear()
        assert len(runs) == len(set(chosen)) and len(undo) == 1
        if chance.random() < 0.2:
            undo[0]()
            assert {key: queue_end.next for key, queue_end in ends.items()} == before
            continue
        log_offset += taken
        watched: list[Any] = [{chance.choice(keys)} if chance.random() < 0.5 else set(), set()]
        many = {"V", *(f"other{number}" for number in range(30))}
        topics: Any = chance.choice((set(), {"V"}, {"V", "other"}, many, frozenset("V"), Every()))
        results = []
        for (twin, queues, dirty), said in zip(sides, (runs, list(runs)), strict=True):
            names = {id(queue): key for key, queue in queues.items()}
            done, size, seen = twin.spread(said, queues, dirty, topics, watched)
            tails = {key: queue.growth for key, queue in queues.items()}
            facts = {key: (bytes(tail.data), tail.end, tail.log_end) for key, tail in tails.items()}
            heard = [(names[id(queue)], entries) for queue, entries in seen]
            marked = {key for key, tail in tails.items() if tail.dirty}
            assert marked == {names[id(queue)] for queue in dirty}
            results.append((done, size, heard, facts, marked))
        assert results[0] == results[1]
        stops += results[0][0] < len(runs)
        # Queues come and go; those that are behind are brought to where the log is.
        for key in keys:
            renew = chance.random() < 0.1
            for twin, queues, dirty in sides:
                if key not in queues or renew or queues[key].growth.end != ends[key].next * 20:
                    old = queues.pop(key, None)
                    if old is not None:
                        old.growth.owner = None
                        dirty.discard(old)
                    if not renew:
                        queues[key] = Growing(twin, ends[key].next)
    assert stops
