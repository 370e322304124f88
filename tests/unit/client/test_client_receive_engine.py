"""What every kind of consumer promises while queues come and go, against a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import pytest
from tests.unit.client.conftest import Node, until

from cosmodrome.client.instance import Instance
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.engine.assignment import Assignment
from cosmodrome.client.receive.engine.decoding import Arrivals
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.receive.polling import Polling
from cosmodrome.client.receive.pull_consumer import PullConsumer
from cosmodrome.client.receive.pull_schedule import PullSchedule, Turn
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import ConfigError, ProtocolError

Q0 = MessageQueue(topic="T", broker_name="broker-a", queue_id=0)


def puller(node: Node, **changes: Any) -> PullConsumer:
    options: dict[str, Any] = {"group": "g", "consume_from": "first", "suspend_ms": 500}
    return PullConsumer(node.namesrv, **(options | changes))


async def polled(consumer: PullConsumer, count: int) -> list[bytes]:
    found: list[ReceivedMessage] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await consumer.poll(1_000)
    return [message.body for message in found]


async def fill(node: Node, count: int, queues: int = 1, topic: str = "T") -> list[bytes]:
    await node.create_topic(topic, queues)
    bodies = [b"m%d" % number for number in range(count)]
    for number, body in enumerate(bodies):
        await node.send(topic, body, queue_id=number % queues)
    return bodies


# --- start, join and stop ------------------------------------------------------------------------


async def test_a_subscribe_that_was_cancelled_can_be_made_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member reacts to later changes of the group, as if the first attempt had never been."""
    await node.create_topic("T", 4)
    beating = asyncio.Event()

    async def never(_: Instance) -> None:
        beating.set()
        await asyncio.Event().wait()

    async with puller(node) as consumer:
        with monkeypatch.context() as patch:
            patch.setattr(Instance, "heartbeat", never)
            joining = asyncio.create_task(consumer.subscribe("T"))
            await asyncio.wait_for(beating.wait(), 60)
            joining.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await joining
        await consumer.subscribe("T")
        await until(lambda: len(consumer.assignment) == 4)
        async with puller(node) as other:
            await other.subscribe("T")
            await until(lambda: len(consumer.assignment) == len(other.assignment) == 2)


async def test_a_consumer_that_is_closed_while_it_joins_leaves_nothing_behind(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that stays in a shared client would keep its queues for ever."""
    await node.create_topic("T", 1)
    asked, go_on = asyncio.Event(), asyncio.Event()
    async with puller(node, group="keeps-the-client") as keeper:
        instance = keeper._live().instance
        consumer = puller(node)
        await consumer.start()
        assert consumer._live().instance is instance
        get = instance.routes.get

        async def slow(topic: str, **named: Any) -> Any:
            if topic == "T":
                asked.set()
                await go_on.wait()
            return await get(topic, **named)

        monkeypatch.setattr(instance.routes, "get", slow)
        joining = asyncio.create_task(consumer.subscribe("T"))
        await asyncio.wait_for(asked.wait(), 60)
        await consumer.stop()
        go_on.set()
        with contextlib.suppress(ConfigError):
            await asyncio.wait_for(joining, 60)
        assert "g" not in instance.consumers


@pytest.mark.parametrize("kind", [PullConsumer, PullSchedule, Consumer])
async def test_starting_twice_at_once_makes_one_member(node: Node, kind: Any) -> None:
    instances: list[Instance] = []
    start = Instance.start

    async def seen(self: Instance) -> None:
        instances.append(self)
        await asyncio.sleep(0)
        await start(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Instance, "start", seen)
        consumer = kind(node.namesrv, group="g")
        await asyncio.gather(consumer.start(), consumer.start())
        await asyncio.gather(consumer.stop(), consumer.stop())
    assert len(set(instances)) == 1
    assert instances[0]._users == 0


# --- pauses --------------------------------------------------------------------------------------


async def test_a_pull_consumer_forgets_the_pause_of_a_queue_that_it_lost(node: Node) -> None:
    """While the queue is elsewhere nobody can resume it, so it would be silent for ever."""
    bodies = await fill(node, 2)
    async with puller(node) as consumer:
        await consumer.assign([Q0])
        consumer.pause([Q0])
        await consumer.assign([])
        with pytest.raises(ConfigError, match="not assigned"):
            consumer.resume([Q0])
        await consumer.assign([Q0])
        assert await polled(consumer, 2) == bodies


async def test_a_queue_stays_paused_after_a_seek(node: Node) -> None:
    bodies = await fill(node, 3)
    async with puller(node) as consumer:
        await consumer.assign([Q0])
        assert await polled(consumer, 3) == bodies
        consumer.pause([Q0])
        await consumer.seek(Q0, 1)
        assert await consumer.poll(100) == []
        consumer.resume([Q0])
        assert await polled(consumer, 2) == bodies[1:]


async def test_one_queue_is_resumed_though_all_were_paused(node: Node) -> None:
    await fill(node, 4, queues=2)
    q1 = MessageQueue(topic="T", broker_name="broker-a", queue_id=1)
    got: list[int] = []
    async with Consumer(node.namesrv, group="g", consume_from="first") as consumer:
        consumer.pause()
        await consumer.subscribe("T", handler=lambda message: got.append(message.queue_id))
        await until(lambda: {Q0, q1} <= set(consumer.assignment))
        consumer.resume(Q0)
        await until(lambda: got == [0, 0])
        await consumer.seek(Q0, 0)  # a new window for the same queue
        await until(lambda: got == [0, 0, 0, 0])
        assert consumer._live().assignment.windows[q1].paused


# --- answers that make no sense ------------------------------------------------------------------


async def test_a_poll_that_does_not_wait_raises_what_cannot_be_read(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ClientOptions(namespace="N")
    await fill(node, 3, topic="N%T")
    async with puller(node, client=client) as consumer:

        def broken(*_: object, **__: object) -> None:
            raise ProtocolError("record at 0: unknown magic")

        with monkeypatch.context() as patch:
            patch.setattr(consumer._live()._decoder, "decode", broken)
            await consumer.assign([Q0])

            async def poll_at_once() -> None:
                while True:
                    assert await consumer.poll(0) == []
                    await asyncio.sleep(0.01)

            with pytest.raises(ProtocolError, match="queue 0 of T on broker-a"):
                await asyncio.wait_for(poll_at_once(), 60)


async def test_what_cannot_be_read_is_forgotten_when_the_user_goes_elsewhere(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = await fill(node, 3)
    broke = asyncio.Event()
    async with puller(node) as consumer:

        def broken(*_: object, **__: object) -> None:
            broke.set()
            raise ProtocolError("record at 0: unknown magic")

        with monkeypatch.context() as patch:
            patch.setattr(consumer._live()._decoder, "decode", broken)
            await consumer.assign([Q0])
            await asyncio.wait_for(broke.wait(), 60)
        await consumer.seek(Q0, 2)
        assert [message.body for message in await consumer.poll(60_000)] == bodies[2:]


# --- order ---------------------------------------------------------------------------------------


async def test_a_queue_that_was_lost_while_it_waited_for_a_worker_is_not_called(
    node: Node,
) -> None:
    await fill(node, 2, queues=2)
    called: list[int] = []
    running, go_on = asyncio.Event(), asyncio.Event()

    async def handler(message: ReceivedMessage) -> None:
        called.append(message.queue_id)
        running.set()
        await go_on.wait()

    options: dict[str, Any] = {"consume_from": "first", "orderly": True, "concurrency": 1}
    async with Consumer(node.namesrv, group="g", **options) as consumer:
        await consumer.subscribe("T", handler=handler)
        await asyncio.wait_for(running.wait(), 60)
        windows = consumer._live().assignment.windows
        (waiting,) = [
            window
            for queue, window in windows.items()
            if queue.topic == "T" and queue.queue_id != called[0]
        ]
        await until(lambda: waiting.unfinished and not waiting.waiting)  # it is about to be called
        waiting.locked_at = None  # another member has the queue now
        go_on.set()
        first = MessageQueue(topic="T", broker_name="broker-a", queue_id=called[0])
        await until(lambda: not windows[first].unfinished)
        await asyncio.sleep(0.05)
        assert len(called) == 1
        waiting.locked_at = asyncio.get_running_loop().time()
        waiting.changed()
        await until(lambda: len(called) == 2)


async def test_a_lock_that_was_taken_for_nothing_is_given_up(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another member would wait for the broker to forget it, a minute long."""
    bodies = await fill(node, 2)
    asked = asyncio.Event()
    start_offset = Assignment._start_offset

    async def never(self: Assignment, queue: MessageQueue) -> int:
        if queue == Q0:
            asked.set()
            await asyncio.Event().wait()
        return await start_offset(self, queue)

    options: dict[str, Any] = {"group": "g", "consume_from": "first", "orderly": True}
    first = Consumer(node.namesrv, client=ClientOptions(instance_name="first"), **options)
    with monkeypatch.context() as patch:
        patch.setattr(Assignment, "_start_offset", never)
        await first.start()
        joining = asyncio.create_task(first.subscribe("T"))
        await asyncio.wait_for(asked.wait(), 60)
        joining.cancel()
        await asyncio.wait((joining,))
        await first.stop()
    got: list[bytes] = []
    other = ClientOptions(instance_name="second")
    async with Consumer(node.namesrv, client=other, **options) as second:
        await second.subscribe("T", handler=lambda message: got.append(message.body))
        await until(lambda: got == bodies, 30)


# --- rounds --------------------------------------------------------------------------------------


async def test_nothing_of_a_schedule_is_logged_as_failed_when_it_closes(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    await node.create_topic("T", 4)
    turns = asyncio.Event()

    async def work(turn: Turn) -> None:
        turns.set()
        turn.next_in_ms = 0

    with caplog.at_level(logging.ERROR):
        async with PullSchedule(node.namesrv, group="g", concurrency=1) as schedule:
            await schedule.register("T", work)
            await asyncio.wait_for(turns.wait(), 60)
    assert caplog.text == ""


async def test_windows_that_were_left_hold_no_messages(node: Node) -> None:
    """A user who seeks and never polls does not fill the memory."""
    await fill(node, 5)
    async with puller(node) as consumer:
        await consumer.assign([Q0])
        polling = consumer._polling
        assert polling is not None
        for _ in range(3):
            await until(lambda: polling._ready and not polling._ready[-1][0].dropped)
            await consumer.seek(Q0, 0)
        await until(lambda: polling._ready and not polling._ready[-1][0].dropped)
        assert {window.dropped for window, _ in polling._ready} == {False}


# --- nothing is lost -----------------------------------------------------------------------------


async def test_a_poll_that_is_cancelled_takes_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even when the messages arrive in the same moment."""
    bodies = await fill(node, 1)
    arrived = Polling.arrived
    async with puller(node) as consumer:
        await consumer.assign([Q0])
        assert await polled(consumer, 1) == bodies
        waiting = asyncio.create_task(consumer.poll(60_000))
        await asyncio.sleep(0)

        def arrive_and_cancel(self: Polling, window: Window, found: Arrivals) -> None:
            arrived(self, window, found)
            waiting.cancel()

        with monkeypatch.context() as patch:
            patch.setattr(Polling, "arrived", arrive_and_cancel)
            await node.send("T", b"later")
            await asyncio.wait((waiting,), timeout=60)
        assert waiting.cancelled()
        assert consumer.position(Q0) == 1
        assert await polled(consumer, 1) == [b"later"]


async def test_a_queue_that_is_lost_while_its_handler_runs_is_committed_before_it_only(
    node: Node,
) -> None:
    """Whoever has the queue next gets the message that was not done."""
    bodies = await fill(node, 3)
    running, go_on = asyncio.Event(), asyncio.Event()
    seen: list[bytes] = []

    async def handler(message: ReceivedMessage) -> None:
        seen.append(message.body)
        if message.body == bodies[1]:
            running.set()
            await go_on.wait()

    options: dict[str, Any] = {"consume_from": "first", "concurrency": 1}
    async with Consumer(node.namesrv, group="g", **options) as consumer:
        await consumer.subscribe("T", handler=handler)
        await asyncio.wait_for(running.wait(), 60)
        await consumer.unsubscribe("T")
        await asyncio.wait_for(consumer._live().assignment.left(), 60)
        assert await node.committed("g", "T") == 1
        go_on.set()
        await consumer.subscribe("T", handler=handler)
        await until(lambda: seen == [*bodies[:2], *bodies[1:]])
    assert await node.committed("g", "T") == 3
