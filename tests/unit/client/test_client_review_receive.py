"""What a consumer must not do, however its handlers, its user or its brokers behave: go silent,
skip a message, or hang when it is closed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from cosmodrome.client.receive.concurrent import Concurrent
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.prefetch import Window
from cosmodrome.client.receive.pull_consumer import PullConsumer
from cosmodrome.client.receive.pull_schedule import PullSchedule, Turn
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import Unreachable

if TYPE_CHECKING:
    from conftest import Node


def first(node: Node, group: str = "g", **settings: Any) -> Consumer:
    return Consumer(node.namesrv, group=group, **({"consume_from": "first"} | settings))


async def filled(node: Node, count: int = 5, queues: int = 1) -> None:
    await node.create_topic("T", queues)
    for number in range(count):
        await node.send("T", b"%d" % number, queue_id=number % queues)


async def until(done: Any, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not done():
            await asyncio.sleep(0.01)


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


async def test_a_turn_whose_work_was_cancelled_does_not_end_the_turns_of_its_queue(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.client.receive.pull_schedule.AFTER_FAILURE_MS", 10)
    await filled(node, 1)
    turns: list[MessageQueue] = []

    async def work(turn: Turn) -> None:
        turns.append(turn.queue)
        turn.next_in_ms = 10
        if len(turns) == 1:
            raise asyncio.CancelledError

    async with PullSchedule(node.namesrv, group="g", consume_from="first") as schedule:
        await schedule.register("T", work)
        await until(lambda: len(turns) >= 3)


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
    done, left = await asyncio.wait(tasks, timeout=2)
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
        assert (await asyncio.wait_for(patient, 10)).body == b"x"


async def test_orderly_batches_that_are_iterated_give_back_only_what_was_refused(
    node: Node,
) -> None:
    await filled(node, 4)
    got: list[bytes] = []
    async with first(node, orderly=True, batch=4, suspend_queue_ms=10) as consumer:
        await consumer.subscribe("T")
        async with asyncio.timeout(10):
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
    """The broker removed old files: the next pull is told to go on later. What is in our hands
    is still to be done, however long that takes, and is not committed before it is."""
    monkeypatch.setattr("cosmodrome.client.receive.assignment.MOVED_WAIT_S", 0.1)
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
    monkeypatch.setattr("cosmodrome.client.receive.assignment.MOVED_WAIT_S", 0.1)
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
    await asyncio.wait_for(begun.wait(), 10)
    assert consumer._running is not None
    instance = consumer._running.instance
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consumer.stop(), 0.1)
    await until(lambda: not instance.consumers and instance._users == 0, 3)


async def test_two_pull_consumers_of_a_group_share_its_queues_in_one_process(node: Node) -> None:
    await node.create_topic("T", 4)
    async with (
        PullConsumer(node.namesrv, group="g", rebalance_every_ms=100) as one,
        PullConsumer(node.namesrv, group="g", rebalance_every_ms=100) as two,
    ):
        await one.subscribe("T")
        await two.subscribe("T")
        await until(lambda: len(one.assignment) == 2 and len(two.assignment) == 2)


async def test_a_commit_that_failed_is_made_again(node: Node) -> None:
    await filled(node, 3)
    async with PullConsumer(
        node.namesrv, group="g", consume_from="first", commit_every_ms=60_000
    ) as consumer:
        await consumer.subscribe("T")
        assert len(await consumer.poll()) == 3
        await node.stop_broker()
        with pytest.raises(Unreachable, match="was not stored"):
            await consumer.commit()
        await node.start_broker()
    assert await node.committed("g", "T") == 3


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
            monkeypatch.setattr(Concurrent, "_settle", broken)

        async def broken(*_: Any) -> None:
            raise RuntimeError("a bug")

        await consumer.subscribe("T")
        with pytest.raises(RuntimeError, match="a bug"):
            await asyncio.wait_for(consumer.run(handle), 10)
