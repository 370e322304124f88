"""Staging requests that only need their places, and being told at once when they are safe."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.store.store_kit import (
    HOST,
    Faults,
    bodies,
    draft,
    faulty_env,
    put,
    record_size,
    small,
)

from cosmodrome import speed
from cosmodrome.env.real import real_env
from cosmodrome.errors import StoreUnwritable
from cosmodrome.store import log as log_module
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
        place: Callable[[str, int], speed.Place],
        undo: list[Callable[[], None]],
    ) -> tuple[int, int]:
        size = count = 0
        kept = place("T", 0)
        while self.left and size + self.next_bytes <= room:
            old = kept.next
            undo.append(functools.partial(speed.put_back, [(kept, old)]))
            kept.next += 1
            size += speed.encode_record(
                *(out, log_offset + size, old, store_ms, b"T", 0, 0, 0, 0, HOST, HOST, 0, 0),
                *(self._bodies[self._done], b""),
            )
            self._done += 1
            count += 1
            self.ends.append(log_offset + size)
        return size, count


async def test_staged_and_appended_messages_share_one_order(tmp_path: Path) -> None:
    store = Store(small(tmp_path), real_env())
    await store.start()
    await put(store, draft(b"first"))
    told: list[object] = []
    requests = Requests([b"second", b"third"])
    store.stage(requests)
    store.settle_then(requests.ends[-1], told.append)
    assert not told
    assert await put(store, draft(b"fourth")) == [3]
    assert told == [PutStatus.OK]
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
    await store.settle(requests.ends[-1])
    assert store.bounds("T", 0) == (0, 9)
    assert requests.ends[-1] > 2 * 4096
    await store.stop()


async def test_what_cannot_be_written_is_told_and_taken_back(tmp_path: Path) -> None:
    faults = Faults()
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    await put(store, draft(b"kept"))
    faults.write = "commitlog"
    told: list[object] = []
    requests = Requests([b"lost"])
    store.stage(requests)
    store.settle_then(requests.ends[-1], told.append)
    store.settle_then(requests.ends[-1], told.append, wait=False)
    store.relieve()
    await asyncio.sleep(0)
    assert len(told) == 2 and all(isinstance(one, StoreUnwritable) for one in told)
    faults.write = None
    assert await put(store, draft(b"again")) == [1]
    await store.stop()


async def test_a_store_that_takes_nothing_stages_nothing(tmp_path: Path) -> None:
    store = Store(small(tmp_path), real_env())
    requests = Requests([b"x"])
    store.stage(requests)
    assert requests.left == 1
    pooled = Store(
        small(tmp_path, transient_store_pool_enable=True, flush_disk_type="ASYNC_FLUSH"),
        real_env(),
    )
    await pooled.start()
    pooled.stage(requests)
    assert requests.left == 1  # a pool answers before the write: that is not the lane's business
    await pooled.stop()


async def test_much_is_written_before_the_turn_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "STAGED_BYTES_MAX", 500)
    store = Store(small(tmp_path, flush_disk_type="ASYNC_FLUSH"), real_env())
    await store.start()
    told: list[object] = []
    requests = Requests([bytes(300)] * 2)
    store.stage(requests)
    store.settle_then(requests.ends[-1], told.append)
    store.relieve()
    assert told == [PutStatus.OK]  # without a turn of the loop in between
    await store.stop()


async def test_a_listener_that_fails_harms_nobody(tmp_path: Path) -> None:
    store = Store(small(tmp_path), real_env())
    await store.start()

    def fail(outcome: object) -> None:
        raise RuntimeError("a fault of the listener")

    requests = Requests([b"x"])
    store.stage(requests)
    store.settle_then(requests.ends[-1], fail)
    store.relieve()
    assert await store.settle(requests.ends[-1]) is PutStatus.OK
    assert await put(store, draft()) == [1]
    await store.stop()


# --- waiting lines ---------------------------------------------------------------------------


class Heard:
    """A waiting line that keeps what it is told."""

    def __init__(self, store: Store) -> None:
        self.told: list[tuple[list[object], object]] = []
        self.line = store.line(lambda who, outcome: self.told.append((who, outcome)))


def stage(store: Store, heard: Heard, who: str, *, wait: bool = True) -> None:
    requests = Requests([who.encode()])
    store.stage(requests)
    store.join(heard.line, requests.ends[-1], who, wait=wait)


async def test_those_of_one_turn_are_told_together(tmp_path: Path) -> None:
    store = Store(small(tmp_path, flush_disk_type="ASYNC_FLUSH"), real_env())
    await store.start()
    heard = Heard(store)
    for who in ("a", "b", "c"):
        stage(store, heard, who)
        store.relieve()
    assert heard.told == []
    await asyncio.sleep(0)
    assert heard.told == [(["a", "b", "c"], PutStatus.OK)]
    assert bodies(store) == [b"a", b"b", b"c"]
    await store.stop()


async def test_whoever_is_alone_is_written_at_once(tmp_path: Path) -> None:
    store = Store(small(tmp_path, flush_disk_type="ASYNC_FLUSH"), real_env())
    await store.start()
    heard = Heard(store)
    stage(store, heard, "a")
    store.relieve(at_once=True)
    assert heard.told == [(["a"], PutStatus.OK)]
    assert bodies(store) == [b"a"]
    assert store._log._due is None  # no turn of the loop is wasted
    await store.stop()


async def test_a_line_waits_for_the_sync_unless_it_need_not(tmp_path: Path) -> None:
    env = faulty_env()
    store = Store(small(tmp_path, sync_flush_timeout=60), env)
    await store.start()
    heard = Heard(store)
    env.offload.holding = True  # type: ignore[attr-defined]
    stage(store, heard, "waits")
    stage(store, heard, "goes", wait=False)
    store.relieve(at_once=True)
    assert heard.told == [(["goes"], PutStatus.OK)]
    stage(store, heard, "late")
    store.relieve()
    async with asyncio.timeout(10):
        while len(heard.told) < 2:
            await asyncio.sleep(0.01)
    # The second joined later than the first, but within what a timer may be late.
    late = [who for group, outcome in heard.told[1:] for who in group]
    assert late[0] == "waits"
    assert heard.told[1][1] is PutStatus.FLUSH_DISK_TIMEOUT
    env.offload.open()  # type: ignore[attr-defined]
    async with asyncio.timeout(10):
        while store.bounds("T", 0) != (0, 3):
            await asyncio.sleep(0.01)
    assert sorted(who for group, _ in heard.told for who in group) == ["goes", "late", "waits"]
    await store.stop()


async def test_a_line_hears_of_what_was_lost_and_of_nothing_else(tmp_path: Path) -> None:
    faults = Faults()
    store = Store(small(tmp_path, flush_disk_type="ASYNC_FLUSH"), faulty_env(faults))
    await store.start()
    heard = Heard(store)
    stage(store, heard, "kept")
    store.relieve(at_once=True)
    faults.write = "commitlog"
    stage(store, heard, "lost")
    stage(store, heard, "lost too", wait=False)
    store.relieve(at_once=True)
    assert heard.told[0] == (["kept"], PutStatus.OK)
    assert sorted(who for group, _ in heard.told[1:] for who in group) == ["lost", "lost too"]
    assert all(isinstance(outcome, StoreUnwritable) for _, outcome in heard.told[1:])
    faults.write = None
    stage(store, heard, "again")
    store.relieve(at_once=True)
    assert heard.told[-1] == (["again"], PutStatus.OK)
    assert bodies(store) == [b"kept", b"again"]
    await store.stop()


async def test_a_stop_lets_go_of_a_line(tmp_path: Path) -> None:
    env = faulty_env()
    store = Store(small(tmp_path), env)
    await store.start()
    heard = Heard(store)
    stage(store, heard, "a")
    await store.abandon()  # before anything is written
    assert len(heard.told) == 1 and isinstance(heard.told[0][1], StoreUnwritable)
