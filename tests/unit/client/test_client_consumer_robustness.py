"""What a consumer must not do, however its handlers, its user or its brokers behave: go silent,
skip a message, or hang when it is closed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.client.conftest import Node, until

from cosmodrome.client.instance import Instance
from cosmodrome.client.receive.concurrent import Concurrent
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.errors import Unreachable


def first(node: Node, group: str = "g", **settings: Any) -> Consumer:
    return Consumer(node.namesrv, group=group, **({"consume_from": "first"} | settings))


async def filled(node: Node, count: int = 5, queues: int = 1) -> None:
    await node.create_topic("T", queues)
    for number in range(count):
        await node.send("T", b"%d" % number, queue_id=number % queues)


# --- handlers that are cancelled from within -----------------------------------------------------


async def test_a_plain_handler_whose_work_was_cancelled_does_not_silence_the_consumer(
    node: Node,
) -> None:
    await filled(node)
    got: list[bytes] = []

    def handler(message: ReceivedMessage) -> None:
        got.append(message.body)
        if len(got) == 1:
            raise asyncio.CancelledError  # as the result of a cancelled future does

    async with first(node) as consumer:
        await consumer.subscribe("T", handler=handler)
        await until(lambda: len(set(got)) == 5)


async def test_a_handler_that_returns_a_cancelled_future_does_not_silence_the_consumer(
    node: Node,
) -> None:
    await filled(node)
    got: list[bytes] = []

    def handler(message: ReceivedMessage) -> asyncio.Future[None]:
        got.append(message.body)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if len(got) == 1:
            future.cancel()
        else:
            future.set_result(None)
        return future

    async with first(node) as consumer:
        await consumer.subscribe("T", handler=handler)
        await until(lambda: len(set(got)) == 5)


# --- several that iterate ------------------------------------------------------------------------


@pytest.mark.parametrize("orderly", [False, True])
async def test_every_task_that_iterates_ends_when_the_consumer_is_closed(
    node: Node, orderly: bool
) -> None:
    await filled(node, 0)
    consumer = first(node, orderly=orderly)
    await consumer.start()
    await consumer.subscribe("T")

    async def work() -> None:
        async for message in consumer:
            await message.ack()

    tasks = [asyncio.create_task(work()) for _ in range(5)]
    await asyncio.sleep(0.1)
    await consumer.stop()
    done, left = await asyncio.wait(tasks, timeout=60)
    for task in left:
        task.cancel()
    assert len(done) == 5


async def test_an_orderly_message_reaches_whoever_still_waits(node: Node) -> None:
    await filled(node, 0)
    async with first(node, orderly=True) as consumer:
        await consumer.subscribe("T")
        patient = asyncio.create_task(anext(consumer))
        await asyncio.sleep(0.05)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 0.1)
        await node.send("T", b"x")
        assert (await asyncio.wait_for(patient, 60)).body == b"x"


async def test_orderly_batches_that_are_iterated_give_back_only_what_was_refused(
    node: Node,
) -> None:
    await filled(node, 4)
    got: list[bytes] = []
    async with first(node, orderly=True, batch=4, suspend_queue_ms=10) as consumer:
        await consumer.subscribe("T")
        async with asyncio.timeout(60):
            async for message in consumer:
                got.append(message.body)
                if message.body == b"2" and got.count(b"2") == 1:
                    await message.retry(1)
                else:
                    await message.ack()
                if got.count(b"3"):
                    break
    assert got == [b"0", b"1", b"2", b"2", b"3"]


# --- a queue that lost its oldest messages -------------------------------------------------------


async def test_what_was_pulled_is_done_though_the_queue_moved_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker removed old files and answers the next pull with a later offset. What was pulled
    before is still to be done, however long that takes, and is not committed earlier."""
    monkeypatch.setattr("cosmodrome.client.receive.engine.assignment.MOVED_WAIT_S", 0.1)
    await filled(node, 4)
    go_on = asyncio.Event()
    got: list[bytes] = []

    async def handler(message: ReceivedMessage) -> None:
        await go_on.wait()
        got.append(message.body)

    async with first(node, concurrency=1) as consumer:
        await consumer.subscribe("T", handler=handler)
        running = consumer._running
        assert running is not None
        windows = running.assignment.windows
        await until(lambda: any(len(window.unfinished) == 4 for window in windows.values()))
        window: Window = next(w for w in windows.values() if w.unfinished)
        consumer.pause()
        await running.assignment.moved(window, window.next_offset + 100)
        await consumer.commit()
        assert await node.committed("g", "T") == 0
        go_on.set()
        await until(lambda: len(got) == 4)


async def test_what_was_pulled_is_pulled_again_when_the_queue_became_shorter(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.client.receive.engine.assignment.MOVED_WAIT_S", 0.1)
    await filled(node, 4)
    hang = asyncio.Event()

    async def handler(message: ReceivedMessage) -> None:
        await hang.wait()

    async with first(node, concurrency=1, close_timeout_ms=100) as consumer:
        await consumer.subscribe("T", handler=handler)
        running = consumer._running
        assert running is not None
        windows = running.assignment.windows
        await until(lambda: any(len(window.unfinished) == 4 for window in windows.values()))
        window = next(w for w in windows.values() if w.unfinished)
        await running.assignment.moved(window, 2)
        assert await node.committed("g", "T") == 0


# --- closing -------------------------------------------------------------------------------------


async def test_a_close_that_is_cancelled_still_leaves_the_group(node: Node) -> None:
    await filled(node, 1)
    hang = asyncio.Event()
    begun = asyncio.Event()

    async def handler(message: ReceivedMessage) -> None:
        begun.set()
        await hang.wait()

    consumer = first(node, close_timeout_ms=5_000)
    await consumer.start()
    await consumer.subscribe("T", handler=handler)
    await asyncio.wait_for(begun.wait(), 60)
    assert consumer._running is not None
    instance = consumer._running.instance
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consumer.stop(), 0.1)
    await until(lambda: not instance.consumers and instance._users == 0)


async def test_a_commit_that_was_asked_for_says_when_it_failed(node: Node) -> None:
    await filled(node)
    async with first(node) as consumer:
        await consumer.subscribe("T")
        await (await anext(consumer)).ack()
        await consumer.commit()
        await node.stop_broker()
        with pytest.raises(Unreachable, match="was not stored"):
            await consumer.commit()
        await node.start_broker()


async def test_a_worker_that_fails_unexpectedly_ends_the_consumer_loudly(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(node)
    async with first(node) as consumer:

        async def handle(_: ReceivedMessage) -> None:
            monkeypatch.setattr(Concurrent, "_conclude", broken)

        async def broken(*_: Any) -> None:
            raise RuntimeError("a bug")

        await consumer.subscribe("T")
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(consumer.run(handle), 60)


async def test_a_consumer_survives_a_restart_of_the_broker(node: Node) -> None:
    await node.create_topic("T", 1)
    async with first(node) as consumer:
        await consumer.subscribe("T")
        await node.stop_broker()
        await node.start_broker()
        await node.send("T", b"back")
        message = await asyncio.wait_for(anext(consumer), 60)
        assert message.body == b"back"
        await message.ack()
    assert await node.committed("g", "T") == 1


async def test_a_part_that_breaks_ends_the_consumer_loudly(node: Node) -> None:
    await node.create_topic("T", 1)

    class Broken:
        name = "BROKEN"
        armed = False

        def share(self, member: str, members: Any, queues: Any) -> Any:
            if self.armed:
                raise RuntimeError("strategy is broken")
            return list(queues)

    strategy = Broken()
    consumer = first(node, strategy=strategy, rebalance_every_ms=100)
    await consumer.subscribe("T")
    task = asyncio.create_task(consumer.run(lambda message: None))
    await asyncio.sleep(0)
    strategy.armed = True
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(task, 60)
    await consumer.stop()
    strategy.armed = False
    consumer = first(node, strategy=strategy, rebalance_every_ms=100)
    await consumer.subscribe("T")
    strategy.armed = True
    with pytest.raises(RuntimeError, match="broken"):
        await asyncio.wait_for(anext(consumer), 60)
    await consumer.stop()


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("waits", [False, True])
async def test_a_handler_may_stop_its_consumer(node: Node, orderly: bool, waits: bool) -> None:
    await node.create_topic("T", 1)
    await node.send("T", b"last")
    consumer = first(node, orderly=orderly, close_timeout_ms=2000)
    await consumer.subscribe("T")
    stopping: list[asyncio.Task[None]] = []

    async def handler(message: ReceivedMessage) -> None:
        if waits:
            await consumer.stop()
        else:
            stopping.append(asyncio.create_task(consumer.stop()))

    await asyncio.wait_for(consumer.run(handler), 60)
    await asyncio.gather(*stopping)


async def test_no_broker_is_asked_for_members_before_it_knows_this_one(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await node.create_topic("T", 1)
    beat = Instance.heartbeat

    async def slow(self: Instance) -> None:
        await asyncio.sleep(0.4)
        await beat(self)

    monkeypatch.setattr(Instance, "heartbeat", slow)
    async with first(node, rebalance_every_ms=100) as consumer:
        await consumer.subscribe("T")
        await until(lambda: any(queue.topic == "T" for queue in consumer.assignment))
    assert "not shared anew" not in caplog.text
