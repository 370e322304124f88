"""Overload, offset-moved events and clean-ups by hand."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from tests.unit.broker.broker_fakes import STORE_HOST, FakeStore, call_of, foundation

from cosmodrome.broker.counts import pressure as pressure_module
from cosmodrome.broker.counts.pressure import LATE_BEATS_MAX, Pressure
from cosmodrome.broker.operate.cleaning import Cleaning
from cosmodrome.broker.receive import offset_moves as moves_module
from cosmodrome.broker.receive.offset_moves import OffsetMoves
from cosmodrome.broker.role import MASTER, SLAVE, Role
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, Refused, StoreBusy
from cosmodrome.wire.commands.broker import CleanExpiredConsumequeue, DeleteExpiredCommitlog
from cosmodrome.wire.commands.topic import CleanUnusedTopic
from cosmodrome.wire.message import parse_properties
from cosmodrome.wire.names import OFFSET_MOVED_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC

# --- overload ---------------------------------------------------------------------------------


def test_one_long_turn_refuses_nothing() -> None:
    pressure = Pressure(BrokerOptions())
    pressure.beat(30.0)
    pressure.check()
    for _ in range(LATE_BEATS_MAX - 2):
        pressure.beat(0.21)
    pressure.check()
    pressure.beat(0.21)
    with pytest.raises(Refused) as refused:
        pressure.check()
    assert refused.value.code == Code.SYSTEM_BUSY
    assert refused.value.remark.startswith("[OVERLOAD]")
    assert "210 ms" in refused.value.remark and "(200 ms)" in refused.value.remark
    assert pressure.figures()["sendThreadPoolQueueHeadWaitTimeMills"] == "210"
    pressure.beat(0.2)
    pressure.check()
    assert pressure.refused_total == 1


def block() -> None:
    time.sleep(0.02)


async def test_a_blocked_loop_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure_module, "LATE_BEATS_MAX", 3)
    pressure = Pressure(BrokerOptions(wait_time_mills_in_send_queue=5))
    await pressure.start()
    await pressure.start()
    with pytest.raises(Refused):
        for _ in range(100):
            block()
            await asyncio.sleep(0.001)
            pressure.check()
    assert pressure.late_ms > 5
    await pressure.stop()
    await pressure.stop()
    pressure.check()


async def test_overload_may_be_ignored() -> None:
    pressure = Pressure(BrokerOptions(broker_fast_failure_enable=False))
    for _ in range(20):
        pressure.beat(10)
    pressure.check()
    assert pressure.late_ms == 10_000


# --- offset-moved events ----------------------------------------------------------------------


def moves(store: Any, role: Role = MASTER) -> OffsetMoves:
    return OffsetMoves(foundation(BrokerOptions(broker_name="b"), real_env(seed=1), store, role))


async def test_an_event_says_who_asked_for_what() -> None:
    store = FakeStore()
    moves(store).tell("G", "T", 3, 100, 7)
    (event,) = store.log
    assert (event.topic, event.queue_id, event.store_host) == (OFFSET_MOVED_TOPIC, 0, STORE_HOST)
    assert parse_properties(event.properties) == {"TAGS": "G", "KEYS": "G", "DELAY": "0"}
    assert json.loads(event.body) == {
        "consumerGroup": "G",
        "messageQueue": {"brokerName": "b", "queueId": 3, "topic": "T"},
        "offsetNew": 7,
        "offsetRequest": 100,
    }


async def test_events_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    store = FakeStore()
    moved = moves(store)
    now = [50.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    for _ in range(10):
        moved.tell("G", "T", 0, 100, 7)
    assert moved.events_total == 1
    for queue_id in range(500):
        moved.tell("G", "T", queue_id, 100, 7)
    assert moved.events_total == moves_module.EVENTS_PER_PERIOD_MAX == len(moved._noted)
    now[0] += moves_module.PERIOD_SECONDS
    moved.tell("G", "T", 0, 100, 7)
    assert (moved.events_total, len(store.log)) == (101, 101)
    monkeypatch.undo()


async def test_a_slave_writes_no_events_and_a_busy_store_is_no_error() -> None:
    store = FakeStore()
    moves(store, SLAVE).tell("G", "T", 0, 100, 7)
    store.error = StoreBusy("not now")
    moved = moves(store)
    moved.tell("G", "T", 0, 100, 7)
    assert (store.log, moved.events_total) == ([], 0)


# --- clean-ups --------------------------------------------------------------------------------


class Cleaned:
    """A store and a topic table that say what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def queues(self) -> dict[str, list[int]]:
        names = ("Known", "Unknown", SCHEDULE_TOPIC, TIMER_TOPIC, OP_HALF_TOPIC)
        return {name: [0] for name in names}

    def delete_topic(self, topic: str) -> None:
        self.asked.append(topic)

    def delete_expired(self) -> None:
        self.asked.append("log")

    def clean_queues(self) -> None:
        self.asked.append("queues")

    def get(self, name: str) -> object | None:
        return self if name == "Known" else None

    def is_system(self, name: str) -> bool:
        return name in (SCHEDULE_TOPIC, OP_HALF_TOPIC)


def test_clean_ups() -> None:
    world: Any = Cleaned()
    cleaning = Cleaning(world, world)
    cleaning.clean_unused_topics(CleanUnusedTopic(), call_of(code=316))
    cleaning.clean_expired_queues(CleanExpiredConsumequeue(), call_of(code=306))
    cleaning.delete_expired_log(DeleteExpiredCommitlog(), call_of(code=329))
    assert world.asked == ["Unknown", "queues", "log"]
