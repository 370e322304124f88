from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.unit.broker.broker_fakes import FakeConnection
from tests.virtual_time import virtual_time

from cosmodrome.broker.receive import waiters as module
from cosmodrome.broker.receive.waiters import Waiters
from cosmodrome.errors import Code, Refused
from cosmodrome.store.store import Arrival, Arrivals


class Hall:
    """Waiters with a hand on the signal."""

    def __init__(self, held_max: int = 100) -> None:
        self.arrivals = Arrivals()
        self.waiters: Waiters[str] = Waiters(self.arrivals, held_max)
        self.connection = FakeConnection()
        self.reruns = 0

    def hold(
        self,
        offset: int = 5,
        *,
        matches: Callable[[int], bool] | None = None,
        timeout_ms: int = 60_000,
        connection: FakeConnection | None = None,
        rerun: Callable[[], str] | None = None,
        skip: Callable[[int], int | None] | None = None,
    ) -> asyncio.Future[str] | None:
        return self.waiters.hold(
            key=("T", 0),
            offset=offset,
            matches=matches,
            timeout_ms=timeout_ms,
            connection=connection or self.connection,
            rerun=rerun or self.rerun,
            skip=skip,
        )

    def rerun(self) -> str:
        self.reruns += 1
        return f"run {self.reruns}"

    def arrive(self, max_offset: int = 6, codes: tuple[int, ...] = (0,), queue_id: int = 0) -> None:
        self.arrivals.fire(Arrival("T", queue_id, max_offset, list(codes)))


async def soon(future: asyncio.Future[str] | None) -> str:
    assert future is not None
    return await asyncio.wait_for(future, 60)


async def test_an_arrival_wakes_once() -> None:
    hall = Hall()
    held = hall.hold()
    hall.arrive()
    assert hall.reruns == 1, "a consumer waits for every turn of the loop"
    hall.arrive(7)
    assert await soon(held) == "run 1"
    hall.arrive(8)
    await asyncio.sleep(0)
    assert hall.reruns == 1
    assert hall.waiters.held == 0


async def test_only_a_wanted_arrival_wakes() -> None:
    hall = Hall()
    held = hall.hold(matches=lambda code: code == 9)
    assert held is not None
    hall.arrive(6, (1, 2))
    hall.arrive(5, (9,))  # at or below the offset: not new for this one
    hall.arrive(9, (9,), queue_id=1)
    await asyncio.sleep(0.01)
    assert not held.done()
    hall.arrive(7, (1, 9))
    assert await soon(held) == "run 1"


async def test_the_deadline_wakes() -> None:
    hall = Hall()
    assert await soon(hall.hold(timeout_ms=5)) == "run 1"
    assert hall.waiters.held == 0


async def test_the_hold_time_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLD_MS_MAX", 5)
    hall = Hall()
    assert await soon(hall.hold(timeout_ms=2**62)) == "run 1"


async def test_all_waiters_of_a_queue_wake_in_order() -> None:
    hall = Hall()
    order: list[int] = []

    def run(number: int) -> Callable[[], str]:
        def rerun() -> str:
            order.append(number)
            return str(number)

        return rerun

    held = [hall.hold(rerun=run(number)) for number in range(5)]
    hall.arrive()
    assert [await soon(one) for one in held] == ["0", "1", "2", "3", "4"]
    assert order == [0, 1, 2, 3, 4]


async def test_what_the_rerun_raises_is_the_answer() -> None:
    def refuse() -> str:
        raise Refused(Code.TOPIC_NOT_EXIST, "gone")

    hall = Hall()
    held = hall.hold(rerun=refuse)
    hall.arrive()
    with pytest.raises(Refused):
        await soon(held)
    assert hall.waiters.held == 0


async def test_a_closed_connection_takes_its_pulls_along() -> None:
    hall = Hall()
    other = FakeConnection()
    mine = [hall.hold() for _ in range(3)]
    stays = hall.hold(connection=other)
    hall.connection.close("left")
    assert all(one is not None and one.cancelled() for one in mine)
    assert hall.waiters.held == 1
    hall.arrive()
    assert await soon(stays) == "run 1"


async def test_a_connection_carries_one_callback_however_often_it_polls() -> None:
    hall = Hall()
    for offset in range(20):
        held = hall.hold(offset)
        hall.arrive(offset + 1)
        await soon(held)
    assert len(hall.connection.callbacks) == 1


async def test_no_room_no_time_no_connection() -> None:
    hall = Hall(held_max=2)
    first, second = hall.hold(), hall.hold()
    assert hall.hold() is None
    assert first is not None
    first.cancel()
    await asyncio.sleep(0)
    assert hall.waiters.held == 1, "cancelling from outside makes room"
    assert hall.hold(timeout_ms=0) is None
    gone = FakeConnection()
    gone.close("left")
    assert hall.hold(connection=gone) is None
    assert hall.hold() is not None
    assert second is not None
    await hall.waiters.stop()


async def test_stop_refuses_everyone_and_twice_is_fine() -> None:
    hall = Hall()
    gone = FakeConnection()
    held, left = hall.hold(), hall.hold(connection=gone)
    gone.close("left")
    await hall.waiters.stop()
    await hall.waiters.stop()
    with pytest.raises(Refused, match="stopping") as refusal:
        await soon(held)
    assert refusal.value.code == Code.SERVICE_NOT_AVAILABLE
    assert hall.reruns == 0
    assert left is not None
    assert left.cancelled()
    assert hall.hold() is None
    assert hall.waiters.held == 0


async def test_nothing_is_left_behind() -> None:
    hall = Hall()
    for _ in range(10):
        await soon(hall.hold(timeout_ms=1))
    hall.connection.close("left")
    tables: Any = hall.waiters
    assert not tables._by_queue
    assert not tables._by_connection


# --- filters that need the records -------------------------------------------------------------


class Steps:
    """A filter over a queue: which offsets are wanted, and how far one look reaches."""

    def __init__(self, wanted: set[int], reach: int = 100) -> None:
        self.wanted = wanted
        self.reach = reach
        self.end = 5
        self.looks: list[int] = []

    def __call__(self, offset: int) -> int | None:
        self.looks.append(offset)
        stop = min(self.end, offset + self.reach)
        return None if self.wanted & set(range(offset, stop)) else stop


async def turns() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


async def test_a_pull_stays_parked_while_nothing_is_wanted() -> None:
    hall, steps = Hall(), Steps({7})
    held = hall.hold(5, skip=steps)
    assert held is not None
    for steps.end in (6, 7):
        hall.arrive(steps.end)
        await turns()
        assert (held.done(), hall.waiters.held, hall.reruns) == (False, 1, 0)
    steps.end = 8
    hall.arrive(8)
    assert await soon(held) == "run 1"
    assert steps.looks == [5, 6, 7], "nothing is looked at twice"
    assert hall.waiters.held == 0


async def test_arrivals_of_one_turn_are_looked_at_once() -> None:
    hall, steps = Hall(), Steps(set())
    held = hall.hold(5, skip=steps)
    for steps.end in range(6, 20):
        hall.arrive(steps.end)
    await turns()
    assert steps.looks == [5]
    hall.arrive(19)
    await turns()
    assert steps.looks == [5], "it stands behind that already"
    assert held is not None
    held.cancel()


async def test_a_long_way_is_gone_in_steps() -> None:
    hall, steps = Hall(), Steps({45}, reach=10)
    held = hall.hold(5, skip=steps)
    steps.end = 50
    hall.arrive(50)
    assert await soon(held) == "run 1"
    assert steps.looks == [5, 15, 25, 35, 45]


@virtual_time
async def test_the_deadline_does_not_move() -> None:
    hall, steps = Hall(), Steps(set())
    loop = asyncio.get_running_loop()
    begin = loop.time()
    held = hall.hold(5, skip=steps, timeout_ms=60)
    assert held is not None
    while not held.done() and loop.time() - begin < 2:
        steps.end += 1
        hall.arrive(steps.end)
        await asyncio.sleep(0.01)
    assert await soon(held) == "run 1"
    assert 0.06 <= loop.time() - begin <= 0.08


async def test_a_look_that_gets_nowhere_or_fails_ends_in_an_answer() -> None:
    hall = Hall()

    def fail(offset: int) -> int | None:
        raise OSError("the disk is gone")

    for skip in (lambda offset: offset, fail):
        held = hall.hold(5, skip=skip)
        hall.arrive(9)
        assert (await soon(held)).startswith("run")
    assert hall.waiters.held == 0


async def test_who_left_is_not_looked_for() -> None:
    hall, steps = Hall(), Steps(set())
    held = hall.hold(5, skip=steps)
    steps.end = 6
    hall.arrive(6)
    hall.connection.close("gone")
    await turns()
    assert held is not None
    assert held.cancelled()
    assert steps.looks == []


async def test_deadlines_in_any_order() -> None:
    hall = Hall()
    order: list[int] = []
    waits = (40, 5, 20, 60_000, 5, 30)
    held = [
        hall.hold(timeout_ms=wait, rerun=partial(lambda number: str(order.append(number)), number))
        for number, wait in enumerate(waits)
    ]
    for number in (1, 4, 2, 5, 0):
        await soon(held[number])
    assert order == [1, 4, 2, 5, 0]
    assert hall.waiters.held == 1 and held[3] is not None and not held[3].done()


async def test_deadlines_of_woken_pulls_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GONE_KEPT", 10)
    hall = Hall()
    stays = hall.hold(offset=1_000_000)
    for offset in range(500):
        woken = hall.hold(offset=offset)
        hall.arrive(offset + 1)
        await soon(woken)
    assert len(hall.waiters._deadlines._heap) < 20
    hall.arrive(1_000_001)
    assert await soon(stays) == "run 501"


async def test_whoever_waits_may_be_told_at_once() -> None:
    told: list[object] = []

    class ParkedPull:
        skip = None

        def __init__(self, connection: FakeConnection) -> None:
            self.key = ("T", 0)
            self.offset = 5
            self.matches: Callable[[int], bool] | None = None
            self.connection = connection
            self.gone = False

        def run(self) -> None:
            told.append("run")

        def refuse(self, error: Refused) -> None:
            told.append(error)

        def drop(self) -> None:
            told.append("dropped")

    def hold(hall: Hall) -> bool:
        return hall.waiters.park(ParkedPull(hall.connection), 60_000)

    hall = Hall()
    assert hold(hall)
    hall.arrive()
    assert told == ["run"] and hall.waiters.held == 0
    told.clear()
    assert hold(hall)
    hall.connection.close("gone")
    assert told == ["dropped"] and hall.waiters.held == 0
    told.clear()
    hall = Hall()
    assert hold(hall)
    await hall.waiters.stop()
    assert isinstance(told[0], Refused) and not hold(hall)


async def test_costly_looks_are_spread_over_turns_of_the_loop_and_take_turns() -> None:
    """2,000 pulls with long filters must not stop everybody else for each message."""
    hall = Hall(held_max=1000)
    looked: list[int] = []
    turns = 0

    def skip(number: int, offset: int) -> int:
        looked.append(number)
        return offset + 1

    for number in range(400):
        assert hall.waiters.hold(
            key=("T", 0),
            offset=5,
            matches=None,
            timeout_ms=60_000,
            connection=hall.connection,
            rerun=hall.rerun,
            skip=partial(skip, number),
            look_cost=module.LOOK_COST_PER_TURN // 8,
        )
    hall.arrive(6)
    most = before = 0
    while len(looked) < 400:
        await asyncio.sleep(0)
        turns += 1
        most, before = max(most, len(looked) - before), len(looked)
        if turns == 10:
            hall.arrive(7)  # who looked already comes again, behind those that did not
    assert most <= 8 and turns >= 50
    assert looked[:400] == list(range(400))
    while len(looked) < 720:
        await asyncio.sleep(0)
    assert looked[400:720] == list(range(320))
    hall.connection.close("done")
    await asyncio.sleep(0)


async def test_a_long_stretch_lets_others_look_between() -> None:
    hall = Hall()
    looked: list[str] = []

    def skip(name: str, offset: int) -> int:
        looked.append(name)
        return offset + 1

    for name in ("a", "b"):
        hall.hold(skip=partial(skip, name))
    hall.arrive(8)
    for _ in range(10):
        await asyncio.sleep(0)
    assert looked == ["a", "b"] * 3
    hall.connection.close("done")
