"""Pulls through the filter server, against a scripted broker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.filterserver.filter_kit import CALL, data, installed, record

from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, Refused, TimedOut, Unreachable
from cosmodrome.filterserver.choices import Choices
from cosmodrome.filterserver.pulls import HOLD_MS_MAX, Pulls
from cosmodrome.filterserver.sieve import Sieve
from cosmodrome.wire.commands.consume import PullMessage, PullReply
from cosmodrome.wire.commands.filter import RegisterMessageFilterClass


class Broker:
    def __init__(self) -> None:
        self.asked: list[tuple[PullMessage, int]] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.code = Code.SUCCESS
        self.body = b""

    async def call(self, command: PullMessage, timeout_ms: int = 0) -> PullReply:
        self.asked.append((command, timeout_ms))
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return PullReply(
            code=self.code,
            remark=self.code.name,
            suggest_which_broker_id=1,
            next_begin_offset=7,
            min_offset=2,
            max_offset=9,
            body=self.body,
        )


class World:
    def __init__(self, choices: Choices, in_flight_max: int) -> None:
        self.broker = Broker()
        self.pulls = Pulls(self.broker, choices, Sieve(real_env().offload, 30_000), in_flight_max)

    async def pull(self, **changes: Any) -> PullReply:
        fields: dict[str, Any] = {
            "consumer_group": "g",
            "topic": "T",
            "queue_id": 3,
            "queue_offset": 4,
            "max_msg_nums": 16,
            "sys_flag": 8,
            "commit_offset": 3,
            "suspend_timeout_millis": 15_000,
            "sub_version": 99,
        }
        return await self.pulls.pull(PullMessage(**fields | changes), CALL)


async def make(folder: Path, name: str = "com.acme.Green", in_flight_max: int = 10) -> World:
    choices = Choices(await installed(folder))
    choices.choose(
        RegisterMessageFilterClass(consumer_group="g", topic="T", class_name=name, class_crc=0),
        CALL,
    )
    return World(choices, in_flight_max)


async def test_what_passes_and_where_to_go_on(tmp_path: Path) -> None:
    world = await make(tmp_path)
    world.broker.body = data(record(4, colour="red"), record(5, colour="green"), record(6))
    reply = await world.pull()
    assert reply.code == Code.SUCCESS
    assert reply.body == data(record(5, colour="green"))
    assert (reply.next_begin_offset, reply.min_offset, reply.max_offset) == (7, 2, 9)
    assert reply.suggest_which_broker_id == 0
    assert (world.pulls.seen_total, world.pulls.passed_total) == (3, 1)


async def test_nothing_passes(tmp_path: Path) -> None:
    world = await make(tmp_path)
    world.broker.body = data(record(4, colour="red"))
    reply = await world.pull()
    assert reply.code == Code.PULL_RETRY_IMMEDIATELY
    assert (reply.body, reply.next_begin_offset) == (b"", 7)


@pytest.mark.parametrize(
    "code", [Code.PULL_NOT_FOUND, Code.PULL_RETRY_IMMEDIATELY, Code.PULL_OFFSET_MOVED]
)
async def test_other_answers_pass_through(tmp_path: Path, code: Code) -> None:
    world = await make(tmp_path)
    world.broker.code = code
    reply = await world.pull()
    assert (reply.code, reply.body) == (code, b"")
    assert (reply.next_begin_offset, reply.min_offset, reply.max_offset) == (7, 2, 9)


@pytest.mark.parametrize(
    ("sys_flag", "hold_ms", "forwarded", "held_ms"),
    [
        (8, 15_000, 4, 0),
        (8 | 2, 15_000, 4 | 2, 15_000),
        (8 | 2 | 1, 15_000, 4 | 2 | 1, 15_000),
        (8 | 16 | 4, 15_000, 4, 0),
        (8 | 2, 10**15, 4 | 2, HOLD_MS_MAX),
        (8 | 2, -5, 4 | 2, 0),
    ],
)
async def test_what_the_broker_is_asked(
    tmp_path: Path, sys_flag: int, hold_ms: int, forwarded: int, held_ms: int
) -> None:
    world = await make(tmp_path)
    await world.pull(sys_flag=sys_flag, suspend_timeout_millis=hold_ms, subscription="com.acme.X")
    ((ask, timeout_ms),) = world.broker.asked
    assert (ask.consumer_group, ask.topic, ask.queue_id) == ("g", "T", 3)
    assert (ask.queue_offset, ask.max_msg_nums, ask.commit_offset) == (4, 16, 3)
    assert (ask.sys_flag, ask.suspend_timeout_millis) == (forwarded, held_ms)
    assert (ask.subscription, ask.expression_type) == ("*", "TAG")
    assert timeout_ms > held_ms


@pytest.mark.parametrize("error", [Unreachable("cannot connect to b:1"), TimedOut("b:1 is late")])
async def test_a_broker_that_is_gone(tmp_path: Path, error: Exception) -> None:
    world = await make(tmp_path)
    world.broker.error = error
    with pytest.raises(Refused) as caught:
        await world.pull()
    assert caught.value.code == Code.SYSTEM_ERROR
    assert str(error) in caught.value.remark
    assert world.pulls.in_flight == 0


async def test_refusals_of_the_broker_pass_through(tmp_path: Path) -> None:
    world = await make(tmp_path)
    world.broker.error = Refused(Code.NO_PERMISSION, "not you")
    with pytest.raises(Refused, match="not you") as caught:
        await world.pull()
    assert caught.value.code == Code.NO_PERMISSION


async def test_refused_before_the_broker_is_asked(tmp_path: Path) -> None:
    world = await make(tmp_path)
    for changes in ({"consumer_group": "h"}, {"topic": "U"}, {"topic": "../x"}):
        with pytest.raises(Refused):
            await world.pull(**changes)
    assert world.broker.asked == []


async def test_pulls_that_are_out_are_bounded(tmp_path: Path) -> None:
    world = await make(tmp_path, in_flight_max=2)
    world.broker.gate = asyncio.Event()
    world.broker.code = Code.PULL_NOT_FOUND
    waiting = [asyncio.create_task(world.pull()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="pullsInFlightMax") as caught:
        await world.pull()
    assert caught.value.code == Code.SYSTEM_BUSY
    world.broker.gate.set()
    await asyncio.gather(*waiting)
    assert (await world.pull()).code == Code.PULL_NOT_FOUND
