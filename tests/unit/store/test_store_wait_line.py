"""The wait line: everybody hears in the order of the log, neighbours of one listener together."""

from __future__ import annotations

import asyncio
import functools
import math
from typing import Any

import pytest

from cosmodrome.errors import StoreUnwritable
from cosmodrome.store.commit_log.wait_line import WaitLine, resolve
from cosmodrome.store.values import PutStatus

LOST = StoreUnwritable("lost")


class Heard:
    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], object]] = []

    def __call__(self, who: list[Any], outcome: object) -> None:
        self.calls.append((who, outcome))


def line_of(*entries: tuple[int, float, Heard, str]) -> WaitLine:
    line = WaitLine()
    for end, deadline, listener, who in entries:
        line.join_durable(end, deadline, listener, who)
    return line


def test_neighbours_of_one_listener_hear_together() -> None:
    one, two = Heard(), Heard()
    line = line_of((10, 1, one, "a"), (20, 1, two, "b"), (30, 1, one, "c"), (40, 1, one, "d"))
    line.durable(5)
    assert not one.calls and not two.calls
    line.durable(20)
    assert one.calls == [(["a"], PutStatus.OK)]
    assert two.calls == [(["b"], PutStatus.OK)]
    line.durable(20)
    assert len(one.calls) == 1
    line.durable(40)
    assert one.calls[1:] == [(["c", "d"], PutStatus.OK)]


async def test_futures_and_listeners_hear_in_the_order_of_the_log() -> None:
    """Also when several ends move in one turn of the loop, as at the end of a log file."""
    line, heard = WaitLine(), list[str]()
    ends = {"l0": 5, "f1": 10, "l1": 20, "f2": 30, "l2": 40, "l3": 50, "f3": 60, "l4": 70}

    def listen(who: list[str], _outcome: object) -> None:
        heard.extend(who)

    def hear(name: str, _future: object) -> None:
        heard.append(name)

    for name, end in ends.items():
        if name.startswith("l"):
            line.join_durable(end, math.inf, listen, name)
            continue
        future: asyncio.Future[PutStatus] = asyncio.get_running_loop().create_future()
        future.add_done_callback(functools.partial(hear, name))
        line.join_durable(end, math.inf, resolve, future)
    line.durable(10)
    assert heard == ["l0"]  # nobody is in front, so it hears at once
    for end in (30, 40, 70):
        line.durable(end)
    await asyncio.sleep(0)
    assert heard == list(ends)
    line.join_durable(80, math.inf, listen, "l5")
    line.durable(80)
    assert heard[-1] == "l5"


def test_written_and_durable_are_different_ends() -> None:
    heard, line = Heard(), WaitLine()
    line.join_durable(10, math.inf, heard, "durable")
    line.join_written(10, heard, "written")
    line.written(10)
    assert heard.calls == [(["written"], PutStatus.OK)]
    line.durable(10)
    assert heard.calls[1:] == [(["durable"], PutStatus.OK)]


def test_who_asks_later_for_less_stands_further_in_front() -> None:
    heard = Heard()
    line = line_of(
        (10, 1, heard, "a"), (30, 3, heard, "c"), (20, 9, heard, "b"), (5, 9, heard, "0")
    )
    line.durable(20)
    assert heard.calls == [(["0", "a", "b"], PutStatus.OK)]


def test_who_asks_later_for_less_gives_up_no_later_than_those_behind() -> None:
    heard = Heard()
    line = line_of((10, 1, heard, "a"), (30, 3, heard, "c"), (20, 9, heard, "b"))
    line.expire(2)
    assert heard.calls == [(["a"], PutStatus.FLUSH_DISK_TIMEOUT)]
    assert line.next_deadline(0) == 3
    line.expire(3)
    assert heard.calls[1:] == [(["b", "c"], PutStatus.FLUSH_DISK_TIMEOUT)]
    assert line.next_deadline(0) == math.inf


def test_what_is_lost_is_lost_from_an_end_on() -> None:
    heard = Heard()
    line = line_of((10, 1, heard, "a"), (20, 1, heard, "b"), (30, 1, heard, "c"))
    line.join_written(25, heard, "w")
    line.fail_above(10, LOST)
    assert heard.calls == [(["b", "w", "c"], LOST)]
    line.durable(99)
    assert heard.calls[1:] == [(["a"], PutStatus.OK)]


def test_who_comes_back_after_a_loss_waits_for_what_comes_next() -> None:
    heard, line, lost = Heard(), WaitLine(), []

    def again(who: list[Any], outcome: object) -> None:
        lost.append((who, outcome))
        line.join_durable(20, 9, heard, "again")  # the offset was given out once more

    line.join_written(20, again, "first")
    line.fail_above(10, LOST)
    assert lost == [(["first"], LOST)] and not heard.calls
    line.durable(20)
    assert heard.calls == [(["again"], PutStatus.OK)]


def test_a_listener_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fails(who: list[Any], outcome: object) -> None:
        raise RuntimeError("a fault of the listener")

    heard, line = Heard(), WaitLine()
    line.join_durable(10, 1, fails, "x")
    line.join_durable(10, 1, heard, "y")
    line.durable(10)
    assert heard.calls == [(["y"], PutStatus.OK)]
    assert "wait_listener_failed" in caplog.text


def test_a_listener_may_join_again() -> None:
    line, calls = WaitLine(), []

    def again(who: list[Any], outcome: object) -> None:
        calls.append(who)
        line.join_durable(20, 2, again, "again")

    line.join_durable(10, 1, again, "first")
    line.durable(10)
    assert calls == [["first"]] and line.next_deadline(0) == 2
    line.durable(20)
    assert calls == [["first"], ["again"]]


async def test_futures_are_resolved_or_fail_and_cancelled_ones_are_left_alone() -> None:
    loop = asyncio.get_running_loop()
    first, gone, last = loop.create_future(), loop.create_future(), loop.create_future()
    gone.cancel()
    resolve([first, gone], PutStatus.OK)
    resolve([gone, last], LOST)
    assert first.result() is PutStatus.OK and gone.cancelled()
    assert last.exception() is LOST
