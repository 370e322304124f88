"""Staging requests that only need their offsets, and hearing at once when they are safe."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.store.store_kit import (
    Faults,
    FaultySegment,
    bodies,
    draft,
    encode,
    faulty_env,
    put,
    record_size,
    small,
)

from cosmodrome import speed
from cosmodrome.env.real import real_env
from cosmodrome.errors import StoreBusy, StoreUnwritable
from cosmodrome.store.commit_log import log as log_module
from cosmodrome.store.store import PutStatus, Store


class Requests:
    """Requests of one message each, encoded as the lane does it."""

    def __init__(self, bodies: list[bytes]) -> None:
        self._bodies = bodies
        self._done = 0
        self.ends: list[int] = []

    @property
    def left(self) -> int:
        return len(self._bodies) - self._done

    @property
    def next_bytes(self) -> int:
        return record_size(draft(self._bodies[self._done]))

    def encode(
        self,
        out: bytearray,
        log_offset: int,
        room: int,
        store_ms: int,
        queue_end: Callable[[str, int], speed.QueueEnd],
        undo: list[Callable[[], None]],
    ) -> tuple[int, int, None, bytes]:
        size = count = 0
        kept = queue_end("T", 0)
        while self.left and size + self.next_bytes <= room:
            old = kept.next
            undo.append(functools.partial(speed.put_back, [(kept, old)]))
            kept.next += 1
            size += encode(out, log_offset + size, old, store_ms, self._bodies[self._done])
            self._done += 1
            count += 1
            self.ends.append(log_offset + size)
        return size, count, None, b""


def into(outcomes: list[object]) -> Callable[[list[object], object], None]:
    """A listener that keeps the outcomes only."""
    return lambda who, outcome: outcomes.append(outcome)


async def test_staged_and_appended_messages_share_one_order(tmp_path: Path) -> None:
    store = Store(small(tmp_path), real_env())
    await store.start()
    await put(store, draft(b"first"))
    outcomes: list[object] = []
    requests = Requests([b"second", b"third"])
    store.stage(requests)
    store.when_durable(requests.ends[-1], into(outcomes), None)
    assert not outcomes
    assert await put(store, draft(b"fourth")) == [3]
    assert outcomes == [PutStatus.OK]
    assert bodies(store) == [b"first", b"second", b"third", b"fourth"]
    facts = store.facts()
    assert facts.put_count == 4 and facts.put_bytes == facts.written_offset
    await store.stop()


async def test_a_full_file_is_followed_by_the_next(tmp_path: Path) -> None:
    store = Store(small(tmp_path), real_env())
    await store.start()
    requests = Requests([bytes(1000)] * 9)
    store.stage(requests)
    store.relieve()
    assert not requests.left
    await store.durable(requests.ends[-1])
    assert store.bounds("T", 0) == (0, 9)
    assert requests.ends[-1] > 2 * 4096
    await store.stop()


async def test_what_cannot_be_written_is_told_and_taken_back(tmp_path: Path) -> None:
    faults = Faults()
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    await put(store, draft(b"kept"))
    faults.write = "commitlog"
    outcomes: list[object] = []
    requests = Requests([b"lost"])
    store.stage(requests)
    store.when_durable(requests.ends[-1], into(outcomes), None)
    store.when_durable(requests.ends[-1], into(outcomes), None, wait=False)
    store.relieve()
    await asyncio.sleep(0)
    assert len(outcomes) == 2 and all(isinstance(one, StoreUnwritable) for one in outcomes)
    faults.write = None
    assert await put(store, draft(b"again")) == [1]
    await store.stop()


async def test_a_store_that_takes_nothing_stages_nothing(tmp_path: Path) -> None:
    store = Store(small(tmp_path), real_env())
    requests = Requests([b"x"])
    store.stage(requests)
    assert requests.left == 1


async def test_a_pool_takes_what_fits_and_answers_at_once(tmp_path: Path) -> None:
    pool = small(
        tmp_path,
        transient_store_pool_enable=True,
        transient_store_pool_size=1,
        flush_disk_type="ASYNC_FLUSH",
        commit_interval_commit_log=3_600_000,
    )
    store = Store(pool, real_env())
    await store.start()
    requests = Requests([bytes(1000)] * 5)  # the pool has 4096 bytes
    store.stage(requests)
    assert requests.left == 2
    heard = Heard()
    store.when_durable(requests.ends[-1], heard.listen, "all")
    assert heard.calls == [(["all"], PutStatus.OK)]
    assert store.facts().written_offset == 0
    with pytest.raises(StoreBusy, match="pool is full"):
        store.append(draft(bytes(1000)))
    store._log.write()
    assert bodies(store) == [bytes(1000)] * 3
    store.stage(requests)
    assert not requests.left
    await store.stop()


async def test_records_that_cannot_be_read_are_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()

    def fails(*_: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(speed, "gather", fails)
        with pytest.raises(StoreUnwritable, match="no room"):
            await store.durable(store.append(draft(b"lost")).end)
    assert store.facts().written_offset == store._log.end == 0
    assert await put(store, draft(b"kept")) == [0]
    assert bodies(store) == [b"kept"]
    await store.stop()


async def test_what_is_no_record_is_never_written(tmp_path: Path) -> None:
    class Garbage(Requests):
        def encode(self, out: bytearray, *where: Any) -> tuple[int, int, None, bytes]:
            size, count, runs, keys = super().encode(out, *where)
            out[-size + 4] ^= 1
            return size, count, runs, keys

    store = Store(small(tmp_path), faulty_env())
    await store.start()
    await put(store, draft(b"kept"))
    end = store.facts().written_offset
    requests = Garbage([b"bad"])
    store.stage(requests)
    with pytest.raises(StoreUnwritable, match=f"at offset {end} of the commit log is no record"):
        await store.durable(requests.ends[-1])
    assert store.facts().written_offset == end
    assert await put(store, draft(b"again")) == [1]
    assert bodies(store) == [b"kept", b"again"]
    await store.stop()


async def test_much_is_written_before_the_turn_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "STAGED_BYTES_MAX", 500)
    store = Store(small(tmp_path, flush_disk_type="ASYNC_FLUSH"), real_env())
    await store.start()
    outcomes: list[object] = []
    requests = Requests([bytes(300)] * 2)
    store.stage(requests)
    store.when_durable(requests.ends[-1], into(outcomes), None)
    store.relieve()
    assert outcomes == [PutStatus.OK]  # without a turn of the loop in between
    await store.stop()


async def test_a_listener_that_fails_harms_nobody(tmp_path: Path) -> None:
    store = Store(small(tmp_path), real_env())
    await store.start()

    def fail(who: list[object], outcome: object) -> None:
        raise RuntimeError("a fault of the listener")

    requests = Requests([b"x"])
    store.stage(requests)
    store.when_durable(requests.ends[-1], fail, None)
    store.relieve()
    assert await store.durable(requests.ends[-1]) is PutStatus.OK
    assert await put(store, draft()) == [1]
    await store.stop()


# --- listeners in the wait line --------------------------------------------------------------


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[object], object]] = []

    def listen(self, who: list[object], outcome: object) -> None:
        self.calls.append((who, outcome))


def stage(store: Store, heard: Heard, who: str, *, wait: bool = True) -> None:
    requests = Requests([who.encode()])
    store.stage(requests)
    store.when_durable(requests.ends[-1], heard.listen, who, wait=wait)


async def test_those_of_one_turn_are_told_together(tmp_path: Path) -> None:
    store = Store(small(tmp_path, flush_disk_type="ASYNC_FLUSH"), real_env())
    await store.start()
    heard = Heard()
    for who in ("a", "b", "c"):
        stage(store, heard, who)
        store.relieve()
    assert heard.calls == []
    await asyncio.sleep(0)
    assert heard.calls == [(["a", "b", "c"], PutStatus.OK)]
    assert bodies(store) == [b"a", b"b", b"c"]
    await store.stop()


async def test_whoever_is_alone_is_written_at_once(tmp_path: Path) -> None:
    store = Store(small(tmp_path, flush_disk_type="ASYNC_FLUSH"), real_env())
    await store.start()
    heard = Heard()
    stage(store, heard, "a")
    store.relieve(at_once=True)
    assert heard.calls == [(["a"], PutStatus.OK)]
    assert bodies(store) == [b"a"]
    assert store._log._due is None  # no turn of the loop is wasted
    await store.stop()


async def test_a_line_waits_for_the_sync_unless_it_need_not(tmp_path: Path) -> None:
    env = faulty_env()
    store = Store(small(tmp_path, sync_flush_timeout=60), env)
    await store.start()
    heard = Heard()
    env.offload.holding = True  # type: ignore[attr-defined]
    stage(store, heard, "waits")
    stage(store, heard, "goes", wait=False)
    store.relieve(at_once=True)
    assert heard.calls == [(["goes"], PutStatus.OK)]
    stage(store, heard, "late")
    store.relieve()
    async with asyncio.timeout(60):
        while len(heard.calls) < 2:
            await asyncio.sleep(0.01)
    # The second joined later than the first, but within what a timer may be late.
    late = [who for group, outcome in heard.calls[1:] for who in group]
    assert late[0] == "waits"
    assert heard.calls[1][1] is PutStatus.FLUSH_DISK_TIMEOUT
    env.offload.open()  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        while store.bounds("T", 0) != (0, 3):
            await asyncio.sleep(0.01)
    assert sorted(str(who) for group, _ in heard.calls for who in group) == [
        "goes",
        "late",
        "waits",
    ]
    await store.stop()


async def test_a_line_hears_of_what_was_lost_and_of_nothing_else(tmp_path: Path) -> None:
    faults = Faults()
    store = Store(small(tmp_path, flush_disk_type="ASYNC_FLUSH"), faulty_env(faults))
    await store.start()
    heard = Heard()
    stage(store, heard, "kept")
    store.relieve(at_once=True)
    faults.write = "commitlog"
    stage(store, heard, "lost")
    stage(store, heard, "lost too", wait=False)
    store.relieve(at_once=True)
    assert heard.calls[0] == (["kept"], PutStatus.OK)
    assert sorted(str(who) for group, _ in heard.calls[1:] for who in group) == ["lost", "lost too"]
    assert all(isinstance(outcome, StoreUnwritable) for _, outcome in heard.calls[1:])
    faults.write = None
    stage(store, heard, "again")
    store.relieve(at_once=True)
    assert heard.calls[-1] == (["again"], PutStatus.OK)
    assert bodies(store) == [b"kept", b"again"]
    await store.stop()


async def test_a_stop_lets_go_of_a_line(tmp_path: Path) -> None:
    env = faulty_env()
    store = Store(small(tmp_path), env)
    await store.start()
    heard = Heard()
    stage(store, heard, "a")
    await store.abandon()  # before anything is written
    assert len(heard.calls) == 1 and isinstance(heard.calls[0][1], StoreUnwritable)


# --- what fails in the middle ----------------------------------------------------------------


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_the_second_file_of_three_fails(tmp_path: Path, flush: str) -> None:
    faults = Faults()
    store = Store(small(tmp_path, flush_disk_type=flush), faulty_env(faults))
    await store.start()
    heard = Heard()
    requests = Requests([bytes(1000)] * 3)
    store.stage(requests)
    store.when_durable(requests.ends[-1], heard.listen, "first file")
    store.when_durable(requests.ends[0], heard.listen, "first record", wait=False)
    more = Requests([bytes(1000)] * 4)
    store.stage(more)
    other = store.append(draft(b"elsewhere", queue_id=1))
    for who, end in (("second file", more.ends[0]), ("third file", more.ends[-1])):
        store.when_durable(end, heard.listen, who)
        store.when_durable(end, heard.listen, f"{who}, written", wait=False)
    waiter = store.durable(other.end)
    faults.write = "00000000000000004096"
    store.relieve(at_once=True)
    with pytest.raises(StoreUnwritable):
        await waiter
    assert await store.durable(requests.ends[-1]) is PutStatus.OK
    await asyncio.sleep(0)  # those behind a future hear of it a turn later
    outcomes = {who: outcome for group, outcome in heard.calls for who in group}
    assert len(outcomes) == sum(len(group) for group, _ in heard.calls) == 6  # once each
    assert outcomes.pop("first file") is outcomes.pop("first record") is PutStatus.OK
    assert all(isinstance(outcome, StoreUnwritable) for outcome in outcomes.values())
    assert store.bounds("T", 0) == (0, 3) and not store._log.spans
    faults.write = None
    assert await put(store, draft(b"again"), draft(b"there", queue_id=1)) == [3, 0]
    assert bodies(store)[3:] == [b"again"] and bodies(store, queue_id=1) == [b"there"]
    await store.abandon()
    store = Store(small(tmp_path, flush_disk_type=flush), faulty_env())
    await store.start()
    assert bodies(store)[3:] == [b"again"] and bodies(store, queue_id=1) == [b"there"]
    await store.stop()


async def test_whatever_a_write_fails_with_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    await put(store, draft(b"kept"))

    write = FaultySegment.write

    def fails(self: FaultySegment, data: bytes, position: int) -> None:
        if "commitlog" in self.path:
            raise MemoryError("no room")
        write(self, data, position)

    with monkeypatch.context() as patch:
        patch.setattr(FaultySegment, "write", fails)
        with pytest.raises(StoreUnwritable, match="no room"):
            async with asyncio.timeout(60):
                await store.durable(store.append(draft(b"lost")).end)
    assert await put(store, draft(b"again")) == [1]
    assert bodies(store) == [b"kept", b"again"]
    await store.stop()


@pytest.mark.parametrize("wait", [True, False])
async def test_a_store_that_has_gone_promises_nothing_more(tmp_path: Path, wait: bool) -> None:
    pool = small(
        tmp_path,
        transient_store_pool_enable=True,
        flush_disk_type="ASYNC_FLUSH",
        commit_interval_commit_log=3_600_000,
    )
    store = Store(pool, real_env())
    await store.start()
    safe = store.append(draft(b"safe"))
    store._log.write()
    dropped = store.append(draft(b"dropped"))
    await store.abandon()
    with pytest.raises(StoreUnwritable, match="not running"):
        await store.durable(dropped.end, wait=wait)
    assert await store.durable(safe.end, wait=wait) is PutStatus.OK
