"""Attempts, deadlines and avoidance in simulated time, against brokers that follow a script."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from cosmodrome.client.options import ClientOptions
from cosmodrome.client.routes import Route
from cosmodrome.client.send.choosing import Chooser
from cosmodrome.client.send.delivery import Delivery
from cosmodrome.client.send.failures import SendFailed, SendTimedOut
from cosmodrome.client.send.faults import AVOID_MS, LATENCY_MS, Faults, avoid_ms
from cosmodrome.client.send.hooks import Hooks, MessageKind, SendMode
from cosmodrome.client.send.packing import Packed
from cosmodrome.client.send.sending import Sender
from cosmodrome.client.send.window import Window
from cosmodrome.client.values import Message, MessageQueue, SendResult, SendStatus
from cosmodrome.errors import Refused, Unreachable
from cosmodrome.sim.loop import JumpLoop
from cosmodrome.wire.bodies import TopicRouteData
from cosmodrome.wire.frame import Frame

SILENT = -1
BREAKS = -2
NO_CONNECTION = -3


class Peer:
    """One broker: answers with `code` after `latency_s`; a negative code is a failure."""

    takes_prepared = False  # so that tests see the fields of the header

    def __init__(self, name: str) -> None:
        self.name = name
        self.code = 0
        self.latency_s = 0.001
        self.codes: list[int] = []  # used up first
        self.requests: list[dict[str, str]] = []
        self.forgotten: list[int] = []
        self.congested = False
        self.connected = False
        self.closed = False

    @property
    def live(self) -> Peer | None:
        return self if self.connected else None

    async def connect(self) -> None:
        await asyncio.sleep(0.002)
        if self.code == NO_CONNECTION:
            raise Unreachable(f"cannot connect to {self.name}")
        self.connected = True

    def begin(self, code: int, ext: dict[str, str], body: bytes, waiter: Any) -> int:
        self.requests.append(ext)
        answer = self.codes.pop(0) if self.codes else self.code
        loop = asyncio.get_running_loop()
        if answer == BREAKS:
            loop.call_later(self.latency_s, waiter.set_exception, Unreachable("it broke"))
        elif answer != SILENT:
            reply = {"msgId": "00" * 16, "queueId": ext["e"], "queueOffset": "5"}
            frame = Frame(answer, 1, 1, reply, remark=None if answer == 0 else f"says {answer}")
            loop.call_later(self.latency_s, self._answer, waiter, frame)
        return len(self.requests)

    def _answer(self, waiter: Any, frame: Frame) -> None:
        if not waiter.done():
            waiter.set_result(frame)

    def forget(self, opaque: int) -> None:
        self.forgotten.append(opaque)


class World:
    """Stands in for an instance with its routes and links."""

    def __init__(self, brokers: str = "abc", queues: int = 2, seed: int = 1) -> None:
        self.peers = {name: Peer(name) for name in brokers}
        self.options = ClientOptions()
        self.env = self
        self.clock = self
        self.random = random.Random(seed)
        self.routes = self
        self.links = self
        self.asked_again = 0
        self.version = 0
        listed = tuple(
            MessageQueue(topic="t", broker_name=name, queue_id=number)
            for name in brokers
            for number in range(queues)
        )
        self.route = Route("t", listed, listed, {}, TopicRouteData())

    def now_ms(self) -> int:
        return round(asyncio.get_running_loop().time() * 1000)

    def known(self, topic: str) -> Route:
        return self.route

    async def get(self, topic: str, *, fresh: bool = False) -> Route:
        self.asked_again += 1
        return self.route

    def address(self, name: str) -> str:
        return name

    def channel(self, address: str) -> Peer:
        return self.peers[address]

    def sender(self, **options: Any) -> Sender:
        return Sender(self, "g", Window(1000), hooks=Hooks(()), **options)  # type: ignore[arg-type]

    def asked(self) -> list[str]:
        return [f"{peer.name}{ext['e']}" for peer in self.peers.values() for ext in peer.requests]


def packed(key: str | None = None) -> Packed:
    message = Message("t", b"x", queue_key=key)
    return Packed(message, "t", b"x", 0, "UNIQ_KEY\x01id", "id", MessageKind.NORMAL)


async def send(
    sender: Sender,
    *,
    timeout_s: float = 3.0,
    retries: int = 2,
    mode: SendMode = SendMode.SYNC,
    key: str | None = None,
) -> SendResult:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[SendResult] = loop.create_future()
    sender.window.take(1, 1)
    sender.post(
        Delivery(sender, packed(key), future, loop.time() + timeout_s, mode=mode, retries=retries)
    )
    try:
        return await future
    finally:
        assert sender.window.messages == 0 and sender.in_flight == 0


def simulated(scenario: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await scenario()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others)

    with asyncio.Runner(loop_factory=JumpLoop) as runner:
        runner.run(whole())


@pytest.mark.parametrize("code", [1, 14, 16, 17, 204, 205, BREAKS])
@pytest.mark.parametrize("mode", [SendMode.SYNC, SendMode.ASYNC])
def test_what_another_broker_may_do_better_is_tried_there(code: int, mode: SendMode) -> None:
    async def scenario() -> None:
        world = World("ab")
        for peer in world.peers.values():
            peer.codes = [code]
        result = await send(world.sender(), mode=mode)
        assert result.status is SendStatus.OK
        assert len(world.asked()) == 3

        for peer in world.peers.values():
            peer.codes = [code] * 3
        with pytest.raises(SendFailed) as raised:
            await send(world.sender(), mode=mode)
        assert len(raised.value.tried) == 3
        assert {attempt.broker_name for attempt in raised.value.tried} == {"a", "b"}

    simulated(scenario)


def test_a_second_attempt_avoids_the_broker_of_the_first() -> None:
    async def scenario() -> None:
        for seed in range(20):
            world = World("ab", seed=seed)
            world.peers["a"].code = BREAKS
            result = await send(world.sender())
            assert result.queue.broker_name == "b"
            assert len(world.peers["a"].requests) <= 1

    simulated(scenario)


def test_pipelined_attempts_keep_the_queue_id() -> None:
    async def scenario() -> None:
        for seed in range(20):
            world = World("ab", queues=4, seed=seed)
            for peer in world.peers.values():
                peer.codes = [BREAKS]
            await send(world.sender(), mode=SendMode.ASYNC)
            assert len({name[1] for name in world.asked()}) == 1
            assert len(world.asked()) == 3

    simulated(scenario)


def test_other_refusals_are_final_and_told() -> None:
    async def scenario() -> None:
        world = World()
        for peer in world.peers.values():
            peer.code = 13
        with pytest.raises(SendFailed) as raised:
            await send(world.sender())
        failure = raised.value
        assert failure.code == 13 and failure.remark == "says 13"
        assert len(failure.tried) == 1
        assert isinstance(failure.tried[0].error, Refused)
        assert "says 13" in str(failure) and "after 1 ms" in str(failure)
        assert world.asked_again == 0

    simulated(scenario)


def test_all_attempts_are_listed() -> None:
    async def scenario() -> None:
        world = World("ab")
        world.peers["a"].code = NO_CONNECTION
        world.peers["b"].code = 14
        with pytest.raises(SendFailed) as raised:
            await send(world.sender())
        text = str(raised.value)
        assert "cannot connect to a" in text and "[14] says 14" in text
        assert len(raised.value.tried) == 3
        assert world.asked_again == 1  # a broker that fails may have moved

    simulated(scenario)


def test_a_chosen_queue_is_tried_once() -> None:
    async def scenario() -> None:
        world = World()
        for peer in world.peers.values():
            peer.code = BREAKS
        with pytest.raises(SendFailed) as raised:
            await send(world.sender(), key="k")
        assert len(raised.value.tried) == 1

    simulated(scenario)


def test_one_deadline_covers_all_attempts() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        world = World("ab")
        for peer in world.peers.values():
            peer.connected = True
            peer.codes = [BREAKS]
            peer.latency_s = 1.0
            peer.code = SILENT
        began = loop.time()
        with pytest.raises(SendTimedOut) as raised:
            await send(world.sender(), retries=5)
        assert 3.0 <= loop.time() - began <= 3.01
        assert len(raised.value.tried) == 3
        assert "did not answer" in str(raised.value)
        assert sum(len(peer.forgotten) for peer in world.peers.values()) == 1

    simulated(scenario)


def test_each_of_many_deadlines_is_kept() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        world = World("a")
        world.peers["a"].code = SILENT
        sender = world.sender()

        async def one(timeout_s: float) -> float:
            future: asyncio.Future[SendResult] = loop.create_future()
            began = loop.time()
            sender.window.take(1, 1)
            sender.post(Delivery(sender, packed(), future, began + timeout_s, mode=SendMode.SYNC))
            with pytest.raises(SendTimedOut):
                await future
            return loop.time() - began

        timeouts = [3.0, 0.1, 1.0, 0.05, 2.0, 0.1001]
        took = await asyncio.gather(*map(one, timeouts))
        for wish, real in zip(timeouts, took, strict=True):
            assert wish <= real <= wish + 0.01
        assert sender.window.messages == 0

    simulated(scenario)


@pytest.mark.parametrize("code", [10, 11, 12])
def test_stored_but_not_as_promised(code: int) -> None:
    async def scenario() -> None:
        world = World("ab")
        for peer in world.peers.values():
            peer.code = code
        result = await send(world.sender())
        assert result.status.value == code
        assert len(world.asked()) == 1

        world = World("ab")
        world.peers["a"].code = world.peers["b"].code = code
        result = await send(world.sender(retry_when_not_ok=True))
        assert result.status.value == code  # stored all the same
        assert len(world.asked()) == 3

        world = World("ab")
        world.peers["a"].codes = world.peers["b"].codes = [code]
        result = await send(world.sender(retry_when_not_ok=True))
        assert result.status is SendStatus.OK

        # The second attempt fails, the first one is stored: that counts.
        world = World("a")
        world.peers["a"].codes = [code, 13]
        result = await send(world.sender(retry_when_not_ok=True))
        assert result.status.value == code

    simulated(scenario)


def test_malformed_answers_are_an_error() -> None:
    class Odd(Peer):
        def begin(self, code: int, ext: dict[str, str], body: bytes, waiter: Any) -> int:
            loop = asyncio.get_running_loop()
            loop.call_soon(waiter.set_result, Frame(0, 1, 1, {"queueId": "x"}))
            return 1

    async def scenario() -> None:
        world = World("a")
        world.peers["a"] = Odd("a")
        with pytest.raises(SendFailed, match="malformed"):
            await send(world.sender())

    simulated(scenario)


def test_stopping_fails_what_is_out() -> None:
    async def scenario() -> None:
        world = World("a")
        world.peers["a"].code = SILENT
        sender = world.sender()
        waiting = asyncio.ensure_future(send(sender))
        await asyncio.sleep(0.1)
        assert not await sender.quiet(0.1)
        await sender.stop("the producer was closed")
        with pytest.raises(SendFailed, match="the producer was closed"):
            await waiting
        assert await sender.quiet(0.1)

    simulated(scenario)


# --- avoidance ---------------------------------------------------------------------------------


def test_the_table_of_latencies_is_upstreams() -> None:
    assert [avoid_ms(latency) for latency in LATENCY_MS] == list(AVOID_MS)
    assert avoid_ms(49) == 0 and avoid_ms(549) == 0 and avoid_ms(550) == 30_000
    assert avoid_ms(10**9) == 600_000


def test_slow_and_failed_brokers_are_left_alone_for_their_time() -> None:
    async def scenario() -> None:
        world = World("ab")
        world.peers["a"].latency_s = 0.6
        sender = world.sender(avoid_slow_brokers=True)
        for _ in range(3):
            await send(sender)
        slow = len(world.peers["a"].requests)
        assert slow == 1
        for _ in range(10):
            await send(sender)
        assert len(world.peers["a"].requests) == slow
        await asyncio.sleep(30)
        for _ in range(4):
            await send(sender)
        assert len(world.peers["a"].requests) == slow + 1

        await asyncio.sleep(31)
        world.peers["a"].latency_s = 0.001
        world.peers["b"].codes = [BREAKS]
        for _ in range(4):
            await send(sender)
        broken = len(world.peers["b"].requests)
        await asyncio.sleep(590)
        for _ in range(6):
            await send(sender)
        assert len(world.peers["b"].requests) == broken
        await asyncio.sleep(11)
        for _ in range(4):
            await send(sender)
        assert len(world.peers["b"].requests) == broken + 2

    simulated(scenario)


def test_when_all_are_avoided_the_better_half_is_used() -> None:
    chance = random.Random(1)
    faults = Faults(chance)
    queues = [
        MessageQueue(topic="t", broker_name=name, queue_id=number)
        for name in "abcd"
        for number in range(2)
    ]
    for name, latency in zip("abcd", (2000, 700, 5000, 600), strict=True):
        faults.answered(name, latency, 0.0)
    assert not any(faults.is_free(name, 1.0) for name in "abcd")
    assert {faults.least_bad(queues, 1.0).broker_name for _ in range(10)} == {"b", "d"}
    only = [queue for queue in queues if queue.broker_name == "c"]
    assert faults.least_bad(only, 1.0).broker_name == "c"
    faults.failed("b", 0.0)
    assert not faults.is_free("b", 599.0) and faults.is_free("b", 600.0)


def test_turns_begin_anywhere() -> None:
    async def scenario() -> None:
        first = set()
        for seed in range(60):
            world = World("abc", seed=seed)
            chooser = Chooser(world, "", None)  # type: ignore[arg-type]
            future = asyncio.get_running_loop().create_future()
            delivery = Delivery(world.sender(), packed(), future, 0.0, mode=SendMode.SYNC)
            first.add(chooser.choose(delivery, world.route))
        assert first == set(World("abc").route.write_queues)

    simulated(scenario)
