"""The parts of a consumer by themselves: start offsets, files, windows, subscriptions, counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.consumer_options import ConsumerOptions
from cosmodrome.client.receive.engine.assignment import Assignment
from cosmodrome.client.receive.engine.decoding import Arrivals, Decoder
from cosmodrome.client.receive.engine.inflating import Inflated
from cosmodrome.client.receive.engine.locking import QueueLocks
from cosmodrome.client.receive.engine.options import MIB
from cosmodrome.client.receive.engine.progress import (
    BrokerOffsets,
    LocalOffsets,
    broker_address,
    offsets_path,
)
from cosmodrome.client.receive.engine.pulling import Puller
from cosmodrome.client.receive.engine.report import Rates
from cosmodrome.client.receive.engine.subscriptions import Subscription, check
from cosmodrome.client.receive.engine.window import LOCK_VALID_S, Window
from cosmodrome.client.receive.handlers import Calls, Handler, Reject
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, ConfigError, ProtocolError, Refused, TimedOut, Unreachable
from cosmodrome.layout import MAGIC_RECORD
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.record import Record, encode_record
from cosmodrome.wire.table import Command


def queue(number: int = 0, topic: str = "T") -> MessageQueue:
    return MessageQueue(topic=topic, broker_name="b", queue_id=number)


def record(offset: int, body: bytes = b"x", **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "size": 100,
        "magic": MAGIC_RECORD,
        "body_crc": 0,
        "queue_id": 0,
        "flag": 0,
        "queue_offset": offset,
        "log_offset": offset * 100,
        "sys_flag": 0,
        "born_ms": 0,
        "born_host": bytes(8),
        "store_ms": 0,
        "store_host": bytes(8),
        "reconsume_times": 0,
        "prepared_offset": 0,
        "body": body,
        "topic": "T",
        "properties": "",
    }
    return Record(**{**fields, **changes})


def message(offset: int, **changes: Any) -> ReceivedMessage:
    return ReceivedMessage(record(offset, **changes), "b")


def window(**options: Any) -> Window:
    return Window(queue(), 0, ConsumerOptions(**options), 0.0, Inflated(MIB))


class Broker:
    """Answers calls by their rows, for parts that know an instance."""

    def __init__(self, answers: dict[type[Command[Any]], Any]) -> None:
        self.answers = answers
        self.asked: list[Any] = []
        self.beats = 0
        self.client_id = "me"
        self.env = real_env(seed=1)
        self.links = self
        self.routes = SimpleNamespace(
            address=self.address, get=self.route, replicas=lambda name: self.addresses, version=1
        )
        self.addresses: dict[int, str] = {0: "master", 1: "slave"}
        self.options = ClientOptions()

    def address(self, name: str, number: int = 0) -> str | None:
        return self.addresses.get(number)

    async def route(self, topic: str, *, fresh: bool = False) -> Any:
        return SimpleNamespace(addresses={"b": self.addresses}, topic=topic)

    def heartbeat_soon(self) -> None:
        self.beats += 1

    async def call(self, address: str, command: Any, timeout_ms: int = 0) -> Any:
        self.asked.append((address, command))
        answer = self.answers[type(command)]
        if isinstance(answer, Callable):  # type: ignore[arg-type]
            answer = answer(command)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def notify(self, address: str, command: Any) -> None:
        await self.call(address, command)


def offset(number: int) -> Any:
    return SimpleNamespace(offset=number)


# --- start offsets -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("consume_from", "topic", "stored", "expected"),
    [
        ("last", "T", 7, 7),
        ("first", "T", 7, 7),
        (123, "T", 7, 7),
        ("last", "T", None, 50),
        ("last", "%RETRY%g", None, 0),
        ("first", "T", None, 0),
        ("first", "%RETRY%g", None, 0),
        (123, "T", None, 33),
        (123, "%RETRY%g", None, 50),
    ],
)
async def test_where_a_queue_begins(
    consume_from: Any, topic: str, stored: int | None, expected: int
) -> None:
    broker: Any = Broker(
        {
            commands.QueryConsumerOffset: (
                Refused(Code.QUERY_NOT_FOUND, "no") if stored is None else offset(stored)
            ),
            commands.GetMaxOffset: offset(50),
            commands.SearchOffsetByTimestamp: lambda ask: offset(33 if ask.timestamp == 123 else 0),
        }
    )
    opened: list[Window] = []
    host: Any = SimpleNamespace(opened=opened.append)
    options = ConsumerOptions(consume_from=consume_from)
    subscriptions = {topic: Subscription.of(topic, 1)}
    assignment = Assignment(broker, "g", options, subscriptions, BrokerOffsets(broker, "g"), host)
    assert await assignment._gain(queue(topic=topic))
    assert [found.next_offset for found in opened] == [expected]


async def test_a_queue_whose_offset_is_not_known_waits() -> None:
    broker: Any = Broker({commands.QueryConsumerOffset: Refused(Code.SYSTEM_ERROR, "no")})
    host: Any = SimpleNamespace(opened=lambda window: pytest.fail("too early"))
    assignment = Assignment(broker, "g", ConsumerOptions(), {}, BrokerOffsets(broker, "g"), host)
    assert not await assignment._gain(queue())
    assert assignment.windows == {}


# --- progress ------------------------------------------------------------------------------------


def test_a_window_is_done_up_to_the_first_that_is_not() -> None:
    found = window()
    messages = [message(number) for number in range(5)]
    found.add(messages, 500)
    found.next_offset = 9
    found.finish(messages[2:])
    assert found.done_to == 0
    found.finish(messages[:1])
    assert found.done_to == 1
    found.finish([*messages[:1], *messages[1:2]])
    assert (found.done_to, found.bytes, found.finished) == (9, 0, 5)
    stranger = message(9)
    found.add([message(9)], 100)
    found.finish([stranger])  # an older delivery of the same offset
    assert found.done_to == 9 and not found.holds(stranger)


@pytest.mark.parametrize(
    ("options", "offsets", "full"),
    [
        ({}, [0, 1], False),
        ({"prefetch_messages": 2}, [0, 1], True),
        ({"prefetch_bytes": 200}, [0, 1], True),
        ({"prefetch_span": 50}, [0, 60], True),
        ({"prefetch_span": 50, "orderly": True}, [0, 60], False),
    ],
)
def test_a_window_has_limits(options: dict[str, Any], offsets: list[int], full: bool) -> None:
    found = window(**options)
    found.add([message(number) for number in offsets], 100 * len(offsets))
    found.next_offset = offsets[-1] + 1
    assert found.full() is full
    assert bool(found.why_full) is full


async def test_who_waits_for_room_is_woken() -> None:
    found = window(prefetch_messages=1)
    only = message(0)
    found.add([only], 100)
    assert found.full()
    waits = [asyncio.create_task(found.wait(60)) for _ in range(2)]
    await asyncio.sleep(0)
    found.finish([only])
    async with asyncio.timeout(60):
        await asyncio.gather(*waits)


def test_a_lock_is_trusted_for_a_while() -> None:
    found = window()
    assert not found.is_locked(0)
    found.locked_at = 5.0
    assert found.is_locked(5 + LOCK_VALID_S - 0.1)
    assert not found.is_locked(5 + LOCK_VALID_S)


async def test_offsets_go_to_the_master_or_to_a_slave_while_there_is_none() -> None:
    broker: Any = Broker({commands.UpdateConsumerOffset: SimpleNamespace()})
    offsets = BrokerOffsets(broker, "g")
    await offsets.write({queue(): 5})
    broker.addresses = {1: "slave"}
    await offsets.write({queue(): 6})
    assert [(address, ask.commit_offset) for address, ask in broker.asked] == [
        ("master", 5),
        ("slave", 6),
    ]
    broker.answers[commands.UpdateConsumerOffset] = TimedOut("late")
    await offsets.write({queue(): 7})  # logged, not raised
    broker.addresses = {}
    with pytest.raises(Unreachable, match="no route"):
        broker_address(broker.routes, "b")


async def test_an_offset_is_stored_after_those_before_it_were_answered() -> None:
    answered = asyncio.Event()
    asked: list[int] = []

    async def call(address: str, command: commands.UpdateConsumerOffset, timeout_ms: int) -> None:
        asked.append(command.commit_offset)
        await answered.wait()

    instance: Any = SimpleNamespace(
        links=SimpleNamespace(call=call), routes=SimpleNamespace(address=lambda *_: "master")
    )
    offsets = BrokerOffsets(instance, "g")
    writes = [asyncio.create_task(offsets.write({queue(): offset})) for offset in (5, 6)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert asked == [5]
    answered.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*writes)
    assert asked == [5, 6]


async def test_local_offsets_survive_and_a_damaged_file_has_a_spare(tmp_path: Path) -> None:
    env = real_env()
    path = offsets_path(str(tmp_path), ClientOptions(unit_name="u"), "10.0.0.1@123@u", "g")
    assert path == str(tmp_path / "10.0.0.1@DEFAULT@u" / "g" / "offsets.json")
    first = LocalOffsets(path, env)
    assert await first.read(queue()) is None
    await first.write({queue(): 5})
    await first.write({queue(): 6, queue(1): 1})
    assert await LocalOffsets(path, env).read(queue()) == 6
    Path(path).write_text("{ damaged")
    assert await LocalOffsets(path, env).read(queue()) == 5
    Path(path).unlink()
    Path(path).mkdir()  # nothing can be written there
    again = LocalOffsets(path, env)
    await again.write({queue(): 9})
    assert await again.read(queue()) == 5


# --- subscriptions, locks, pulls -----------------------------------------------------------------


def test_subscriptions_are_read_as_users_write_them() -> None:
    assert Subscription.of("T", 1, tags=" A||B || A ||").tags == {"A", "B"}
    for everything in (None, "", " * "):
        assert Subscription.of("T", 1, tags=everything).expression == "*"
    data = Subscription.of("T", 7, tags="A || B").data()
    assert (data.sub_string, data.tags_set, data.sub_version) == ("A || B", ["A", "B"], 7)
    assert data.code_set == [65, 66]
    for wrong in ({"tags": "||"}, {"sql": "  "}, {"tags": "A", "sql": "a = 1"}):
        with pytest.raises(ConfigError):
            Subscription.of("T", 1, **wrong)
    chosen = Subscription.of("T", 1, tags="A")
    assert chosen.wants(message(0, properties="TAGS\x01A"))
    assert not chosen.wants(message(0))


async def test_an_expression_needs_a_broker_that_answers() -> None:
    broker: Any = Broker({commands.CheckClientConfig: Unreachable("gone")})
    await check(broker, "g", Subscription.of("T", 1))
    assert broker.asked == []
    with pytest.raises(Unreachable, match="gone"):
        await check(broker, "g", Subscription.of("T", 1, sql="a = 1"))
    broker.addresses = {}
    with pytest.raises(Unreachable, match="no broker"):
        await check(broker, "g", Subscription.of("T", 1, sql="a = 1"))


async def test_a_lock_that_another_member_has_is_lost() -> None:
    def answer(ask: Any) -> Any:
        chosen = bodies.decode(bodies.LockBatchRequestBody, ask.body).mq_set
        held = bodies.LockBatchResponseBody(lock_ok_mq_set=[q for q in chosen if not q.queue_id])
        return SimpleNamespace(body=bodies.encode(held))

    broker: Any = Broker({commands.LockBatchMq: answer, commands.UnlockBatchMq: TimedOut("late")})
    options = ConsumerOptions(orderly=True)
    windows = [
        Window(queue(number), 0, options, 0.0, Inflated(MIB), locked_at=1.0) for number in (0, 1)
    ]
    locks = QueueLocks(broker, "g", lambda: windows)
    assert await locks.take(queue(0)) and not await locks.take(queue(1))
    await locks.renew()
    assert windows[0].locked_at is not None and windows[1].locked_at is None
    await locks.give_up([queue()])  # logged, not raised
    broker.answers[commands.LockBatchMq] = Unreachable("gone")
    assert not await locks.take(queue(0))


async def test_only_the_master_grants_locks(caplog: pytest.LogCaptureFixture) -> None:
    broker: Any = Broker({})
    broker.addresses = {1: "slave"}
    locks = QueueLocks(broker, "g", list)
    for _ in range(3):
        assert not await locks.take(queue(0))
    assert broker.asked == []
    assert caplog.text.count("the master of broker b is away; ordered consumers wait for it") == 1


def pull_answer(code: int = 0, data: bytes = b"", **fields: int) -> Any:
    numbers = {"suggest_which_broker_id": 0, "next_begin_offset": 1, "min_offset": 0}
    return SimpleNamespace(code=code, body=data, max_offset=1, **{**numbers, **fields})


class Host:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.errors: list[ProtocolError] = []

    def subscription(self, queue: MessageQueue) -> Subscription:
        return Subscription.of(queue.topic, 3)

    def arrived(self, window: Window, found: Arrivals) -> None:
        self.bodies += [message.body for message in found.messages]

    def unreadable(self, window: Window, error: ProtocolError) -> None:
        self.errors.append(error)

    async def moved(self, window: Window, offset: int) -> None:
        raise AssertionError


def puller(broker: Any, host: Host) -> Puller:
    rates = Rates(asyncio.get_running_loop().time)
    return Puller(broker, "g", ConsumerOptions(), Decoder("g", "", 1 << 20, ()), rates, host)


async def test_pulls_follow_the_suggestion_and_commit_at_the_master_only() -> None:
    answer = pull_answer(data=encode_record(record(0)), suggest_which_broker_id=1)
    broker: Any = Broker({commands.PullMessage: answer})
    host, found = Host(), window()
    pulls = puller(broker, host)
    chosen = host.subscription(queue())
    await pulls._pull_once(found, chosen)
    found.finish(list(found.unfinished.values()))
    answer.body, answer.code = b"", Code.PULL_NOT_FOUND
    await pulls._pull_once(found, chosen)
    answer.suggest_which_broker_id = 0
    await pulls._pull_once(found, chosen)
    await pulls._pull_once(found, chosen)
    sent = [(address, ask.sys_flag, ask.commit_offset) for address, ask in broker.asked]
    assert sent == [("master", 2, 0), ("slave", 2, 0), ("slave", 2, 0), ("master", 3, 1)]
    assert broker.asked[0][1].sub_version == 3
    assert host.bodies == [b"x"]


async def test_pulls_that_fail_wait_before_the_next() -> None:
    broker: Any = Broker({})
    host, found = Host(), window()
    pulls = puller(broker, host)
    chosen = Subscription.of("T", 3)

    async def pause(answer: Any) -> float:
        broker.answers[commands.PullMessage] = answer
        return await pulls._pull_once(found, chosen)

    assert await pause(Refused(Code.FLOW_CONTROL, "busy")) == 0.02
    assert await pause(Refused(Code.SYSTEM_ERROR, "no")) == 1.0
    assert broker.beats == 0
    assert await pause(Refused(Code.SUBSCRIPTION_NOT_EXIST, "who are you")) == 1.0
    assert broker.beats == 1
    assert await pause(TimedOut("late")) == 1.0
    assert await pause(pull_answer(data=b"garbage")) == 3.0
    assert found.next_offset == 0 and len(host.errors) == 1
    broker.addresses = {}
    assert await pause(pull_answer()) == 1.0


# --- handlers ------------------------------------------------------------------------------------


async def test_direct_consumption_says_how_it_went() -> None:
    rates = Rates(asyncio.get_running_loop().time)

    async def result(handler: Any, **options: Any) -> dict[str, Any]:
        calls = Calls("g", ConsumerOptions(**options), rates, real_env().clock)
        found = await calls.directly(handler and Handler(handler), message(0))
        result_of: dict[str, Any] = json.loads(found)
        return result_of

    def rejects(_: object) -> None:
        raise Reject("no")

    async def raises(_: object) -> None:
        raise ValueError("bad")

    assert (await result(lambda received: None))["consumeResult"] == "CR_SUCCESS"
    assert (await result(len, batch=2))["consumeResult"] == "CR_SUCCESS"
    assert (await result(rejects))["consumeResult"] == "CR_LATER"
    result_of = await result(raises, orderly=True)
    assert (result_of["consumeResult"], result_of["order"]) == ("CR_THROW_EXCEPTION", True)
    assert result_of["remark"] == "ValueError: bad"
    assert (await result(None))["consumeResult"] == "CR_RETURN_NULL"


async def test_a_handler_whose_work_was_cancelled_has_failed() -> None:
    calls = Calls("g", ConsumerOptions(), Rates(lambda: 0.0), real_env().clock)

    async def handler(_: object) -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    error = await calls.call(Handler(handler), window(), [message(0)])
    assert error is not None and "cancelled" in str(error)


def test_what_is_plain_and_what_waits() -> None:
    class Both:
        async def __call__(self, received: object) -> None: ...

    async def waits(received: object) -> None: ...

    assert [Handler(call).inline for call in (print, waits, Both())] == [True, False, False]


def test_rates_are_those_of_the_last_minute() -> None:
    now = 0.0
    rates = Rates(lambda: now)
    rates.pulled("T", 20, -0.005)
    rates.consumed("T", 9, 1, -0.02, now)
    status = rates.of("T")
    assert (status.pull_tps, status.consume_ok_tps, status.consume_failed_tps) == (2.0, 0.9, 0.1)
    assert (status.pull_rt, status.consume_rt, status.consume_failed_msgs) == (5.0, 2.0, 1)
    now = 75.0
    status = rates.of("T")
    assert (status.pull_tps, status.consume_rt, status.consume_failed_msgs) == (0.0, 0.0, 1)
    assert rates.of("unknown").pull_tps == 0.0
