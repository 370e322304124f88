"""Consumers against a real name server and broker: subscribe, iterate, handle, retry, close."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.client.conftest import Node, until

from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.consumer_options import (
    ConsumerOptions,
    ConsumerSettings,
    Consumption,
)
from cosmodrome.client.receive.handlers import Reject, RetryLater, level_of
from cosmodrome.client.receive.pull_consumer import PullOptions, PullSettings
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import ConfigError, Refused
from cosmodrome.wire import commands


@contextlib.asynccontextmanager
async def running(consumer: Consumer, handler: Any) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(consumer.run(handler))
    await asyncio.sleep(0)
    try:
        yield task
    finally:
        await consumer.stop()
        await asyncio.wait_for(task, 60)


def first(node: Node, group: str = "g", **settings: Any) -> Consumer:
    return Consumer(node.namesrv, group=group, **({"consume_from": "first"} | settings))


async def test_a_consumer_is_iterated_and_what_is_acknowledged_is_committed(node: Node) -> None:
    await node.create_topic("T", 1)
    for number in range(5):
        await node.send("T", b"%d" % number, properties={"TAGS": "A", "KEYS": "k1 k2"})
    async with first(node) as consumer:
        await consumer.subscribe("T")
        got = []
        async for message in consumer:
            got.append(message)
            if len(got) < 5:
                await message.ack()
            else:
                break
        assert [message.body for message in got] == [b"0", b"1", b"2", b"3", b"4"]
        assert (got[0].topic, got[0].tags, got[0].keys) == ("T", "A", ("k1", "k2"))
        assert (got[0].min_offset, got[0].max_offset) == (0, 5)
        assert consumer.assignment[-1].topic in ("T", "%RETRY%g")
    assert await node.committed("g", "T") == 4
    async with first(node) as consumer:
        await consumer.subscribe("T")
        again = await anext(consumer)
        assert again.body == b"4"
        await again.ack()
    assert await node.committed("g", "T") == 5


async def test_progress_never_jumps_over_a_message_that_is_not_done(node: Node) -> None:
    await node.create_topic("T", 1)
    for number in range(3):
        await node.send("T", b"%d" % number)
    async with first(node) as consumer:
        await consumer.subscribe("T")
        messages = [await anext(consumer) for _ in range(3)]
        await messages[1].ack()
        await messages[2].ack()
        await consumer.commit()
        assert await node.committed("g", "T") == 0
        await messages[0].ack()
        await consumer.commit()
        assert await node.committed("g", "T") == 3
        await messages[0].ack()  # a second time changes nothing
        assert consumer.lag()[MessageQueue(topic="T", broker_name="broker-a", queue_id=0)] == 0


@pytest.mark.parametrize("kind", ["plain", "async", "batch", "async batch"])
async def test_a_handler_gets_every_message(node: Node, kind: str) -> None:
    await node.create_topic("T", 2)
    for number in range(40):
        await node.send("T", b"%d" % number, queue_id=number % 2)
    got: list[bytes] = []

    def plain(message: ReceivedMessage) -> None:
        got.append(message.body)

    async def waits(message: ReceivedMessage) -> None:
        await asyncio.sleep(0)
        got.append(message.body)

    def batch(messages: list[ReceivedMessage]) -> None:
        assert 1 <= len(messages) <= 4
        got.extend(message.body for message in messages)

    async def waiting_batch(messages: list[ReceivedMessage]) -> None:
        batch(messages)

    handler = {"plain": plain, "async": waits, "batch": batch, "async batch": waiting_batch}[kind]
    consumer = first(node, batch=4 if "batch" in kind else 1)
    await consumer.subscribe("T")
    async with running(consumer, handler):
        await until(lambda: len(got) >= 40)
    assert sorted(got) == sorted(b"%d" % number for number in range(40))
    assert [await node.committed("g", "T", queue) for queue in (0, 1)] == [20, 20]


async def test_new_messages_arrive_at_once(node: Node) -> None:
    await node.create_topic("T", 1)
    # The hold is far longer than the test may last: the message has to end it.
    async with first(node, suspend_ms=600_000, pull_timeout_ms=700_000) as consumer:
        await consumer.subscribe("T")
        waiting = asyncio.create_task(anext(consumer))
        await asyncio.sleep(0.2)  # so that the broker holds the pull
        await node.send("T", b"now")
        message = await asyncio.wait_for(waiting, 60)
        assert message.body == b"now"
        await message.ack()


async def test_a_failed_message_comes_again_under_its_own_topic(node: Node) -> None:
    await node.create_topic("T", 1)
    await node.send("T", b"x", properties={"UNIQ_KEY": "0" * 32})
    seen: list[tuple[str, int, str]] = []

    def handler(message: ReceivedMessage) -> None:
        seen.append((message.topic, message.reconsume_times, message.msg_id))
        if len(seen) == 1:
            raise RetryLater(1)

    consumer = first(node)
    await consumer.subscribe("T")
    async with running(consumer, handler):
        await until(lambda: len(seen) == 2)
    assert seen == [("T", 0, "0" * 32), ("T", 1, "0" * 32)]
    assert await node.committed("g", "T") == 1


async def test_what_is_rejected_or_fails_too_often_becomes_a_dead_letter(node: Node) -> None:
    await node.create_topic("T", 1)
    await node.send("T", b"never")
    await node.send("T", b"broken")
    calls: list[bytes] = []

    async def handler(message: ReceivedMessage) -> None:
        calls.append(message.body)
        if message.body == b"never":
            raise Reject
        raise ValueError("no")

    consumer = first(node, max_reconsume_times=0)
    await consumer.subscribe("T")
    async with running(consumer, handler):
        await until(lambda: len(calls) == 2)
        await until(lambda: all(lag == 0 for lag in consumer.lag().values()))
    reply = await node.call(commands.GetMaxOffset(topic="%DLQ%g", queue_id=0))
    assert reply.offset == 2
    assert sorted(calls) == [b"broken", b"never"]


async def test_batches_may_be_done_in_part(node: Node) -> None:
    await node.create_topic("T", 1)
    for number in range(4):
        await node.send("T", b"%d" % number)
    got: list[list[bytes]] = []

    def handler(messages: list[ReceivedMessage]) -> None:
        got.append([message.body for message in messages])
        if len(got) == 1:
            raise RetryLater(1, done=3)

    consumer = first(node, batch=8)
    await consumer.subscribe("T")
    async with running(consumer, handler):
        await until(lambda: len(got) == 2)
    assert got == [[b"0", b"1", b"2", b"3"], [b"3"]]


async def test_tags_are_compared_as_text(node: Node) -> None:
    await node.create_topic("T", 1)
    # Two tags with one hash: the broker lets both through.
    for tag in ("Aa", "BB", "C"):
        await node.send("T", tag.encode(), properties={"TAGS": tag})
    await node.send("T", b"none")
    async with first(node) as consumer:
        await consumer.subscribe("T", tags="Aa || X")
        message = await anext(consumer)
        assert message.body == b"Aa"
        await message.ack()
        await until(lambda: all(window == 0 for window in consumer.lag().values()))
    assert await node.committed("g", "T") == 4


async def test_an_expression_selects_and_a_wrong_one_is_refused(node: Node) -> None:
    await node.create_topic("T", 1)
    for number in range(6):
        await node.send("T", b"%d" % number, properties={"n": str(number)})
    async with first(node) as consumer:
        with pytest.raises(Refused, match=r"\[23\]"):
            await consumer.subscribe("T", sql="n > > 3")
        await consumer.subscribe("T", sql="n > 3")
        got = [await anext(consumer) for _ in range(2)]
        assert [message.body for message in got] == [b"4", b"5"]
        with pytest.raises(ConfigError, match="not both"):
            await consumer.subscribe("T", tags="A", sql="n > 3")


async def test_topics_may_have_handlers_of_their_own(node: Node) -> None:
    await node.create_topic("T", 1)
    await node.create_topic("U", 1)
    await node.send("T", b"t")
    await node.send("U", b"u")
    got: dict[str, list[bytes]] = {"T": [], "U": []}
    consumer = first(node)
    await consumer.subscribe("T", handler=lambda message: got["T"].append(message.body))
    await consumer.subscribe("U", handler=lambda message: got["U"].append(message.body))
    async with running(consumer, None):
        await until(lambda: all(got.values()))
    assert got == {"T": [b"t"], "U": [b"u"]}


async def test_a_new_group_begins_where_it_was_told(node: Node) -> None:
    await node.create_topic("T", 1)
    await node.send("T", b"old")
    await asyncio.sleep(0.02)
    middle = datetime.datetime.now()
    await node.send("T", b"later")
    async with first(node, "g1") as consumer:
        await consumer.subscribe("T")
        assert (await anext(consumer)).body == b"old"
    async with first(node, "g2", consume_from=middle) as consumer:
        await consumer.subscribe("T")
        found = await anext(consumer)
        # Compat: the broker answers 0 for a group it does not know while a queue is young.
        assert found.body in (b"old", b"later")


async def test_pause_seek_and_replay(node: Node) -> None:
    await node.create_topic("T", 1)
    for number in range(4):
        await node.send("T", b"%d" % number)
    async with first(node, pull_batch=1, prefetch_messages=1) as consumer:
        await consumer.subscribe("T")
        message = await anext(consumer)
        assert message.body == b"0"
        consumer.pause(message.queue)
        await message.ack()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 0.3)
        consumer.resume(message.queue)
        assert (await asyncio.wait_for(anext(consumer), 60)).body == b"1"
        await consumer.seek(message.queue, 3)
        jumped = await asyncio.wait_for(anext(consumer), 60)
        assert jumped.body == b"3"
        assert await node.committed("g", "T") == 3
        await consumer.replay("T", since=message.store_ms)
        assert (await asyncio.wait_for(anext(consumer), 60)).body == b"0"
        await jumped.ack()  # of before: without effect
        consumer.pause()
        consumer.resume()
        with pytest.raises(ConfigError, match="does not have"):
            await consumer.seek(MessageQueue(topic="X", broker_name="b", queue_id=0), 0)


async def test_an_offset_that_is_gone_is_corrected(node: Node) -> None:
    await node.create_topic("T", 1)
    await node.send("T", b"x")
    async with first(node) as consumer:
        await consumer.subscribe("T")
        await anext(consumer)
        queue = MessageQueue(topic="T", broker_name="broker-a", queue_id=0)
        await consumer.seek(queue, 500)
        await asyncio.sleep(0.2)
        await node.send("T", b"y")
        message = await asyncio.wait_for(anext(consumer), 60)
        assert message.body in (b"x", b"y")


async def test_names_of_a_namespace_are_short_for_users(node: Node) -> None:
    await node.create_topic("ns%T", 1)
    await node.send("ns%T", b"x")
    client = ClientOptions(namespace="ns")
    got: list[ReceivedMessage] = []

    def handler(message: ReceivedMessage) -> None:
        got.append(message)
        if len(got) == 1:
            raise RetryLater(1)

    consumer = first(node, client=client)
    await consumer.subscribe("T")
    async with running(consumer, handler):
        await until(lambda: len(got) == 2)
        assert {queue.topic for queue in consumer.assignment} == {"T", "%RETRY%g"}
    assert [message.topic for message in got] == ["T", "T"]
    assert await node.committed("ns%g", "ns%T") == 1


async def test_members_share_the_queues_and_take_over(node: Node) -> None:
    await node.create_topic("T", 4)
    one, two = first(node), first(node)
    await one.subscribe("T")
    assert len([queue for queue in one.assignment if queue.topic == "T"]) == 4
    await two.subscribe("T")

    def shares() -> list[int]:
        return [len([q for q in c.assignment if q.topic == "T"]) for c in (one, two)]

    await until(lambda: shares() == [2, 2])
    assert not set(one.assignment) & set(two.assignment)
    await one.stop()
    await until(lambda: shares() == [0, 4])
    await two.stop()


async def test_flow_control_holds_pulling(node: Node) -> None:
    await node.create_topic("T", 1)
    for number in range(30):
        await node.send("T", b"%d" % number)
    async with first(node, pull_batch=4, prefetch_messages=8) as consumer:
        await consumer.subscribe("T")
        held = [await anext(consumer) for _ in range(8)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 0.3)
        for message in held:
            await message.ack()
        assert (await asyncio.wait_for(anext(consumer), 60)).queue_offset == 8


async def test_closing_lets_handlers_finish_and_keeps_what_they_did(node: Node) -> None:
    await node.create_topic("T", 1)
    for number in range(3):
        await node.send("T", b"%d" % number)
    begun = asyncio.Event()
    done: list[bytes] = []

    async def handler(message: ReceivedMessage) -> None:
        begun.set()
        await until(lambda: consumer._running is None)  # it is being closed
        done.append(message.body)

    consumer = first(node, concurrency=1)
    await consumer.subscribe("T")
    async with running(consumer, handler):
        await begun.wait()
    assert done == [b"0"]
    assert await node.committed("g", "T") == 1
    await consumer.stop()
    with pytest.raises(ConfigError, match="closed"):
        await consumer.start()


async def test_broadcasting_gives_everybody_everything_and_keeps_offsets_here(
    node: Node, tmp_path: Any
) -> None:
    await node.create_topic("T", 2)
    settings = {"model": "broadcasting", "offsets_dir": str(tmp_path / "offsets")}
    client = ClientOptions(client_ip="10.0.0.9")
    got: list[bytes] = []

    def handler(message: ReceivedMessage) -> None:
        got.append(message.body)
        raise ValueError("nobody tries again")

    for number in range(4):
        await node.send("T", b"%d" % number, queue_id=number % 2)
    consumer = first(node, client=client, **settings)
    await consumer.subscribe("T")
    async with running(consumer, handler):
        await until(lambda: len(got) == 4 and not any(consumer.lag().values()))
    path = tmp_path / "offsets" / "10.0.0.9@DEFAULT" / "g" / "offsets.json"
    assert '"brokerName":"broker-a"' in path.read_text().replace(" ", "")
    await node.send("T", b"new")
    consumer = first(node, client=client, **settings)
    await consumer.subscribe("T")
    async with running(consumer, got.append):
        await until(lambda: len(got) == 5)
    assert isinstance(got[4], ReceivedMessage) and got[4].body == b"new"


async def test_an_operator_sees_and_moves_a_consumer(node: Node) -> None:
    await node.create_topic("T", 1)
    await node.send("T", b"0")
    sent = await node.send("T", b"1")
    got: list[bytes] = []
    consumer = first(node)
    await consumer.subscribe("T", tags="*")
    async with running(consumer, lambda message: got.append(message.body)):
        await until(lambda: got == [b"0", b"1"])
        await consumer.commit()
        client_id = (await node.call(commands.GetConsumerListByGroup(consumer_group="g"))).body
        client_id = json.loads(client_id)["consumerIdList"][0]
        ask = commands.GetConsumerRunningInfo(
            consumer_group="g", client_id=client_id, jstack_enable=True
        )
        text = (await node.call(ask)).body.decode()
        assert '"mqTable":{{"brokerName":"broker-a","queueId":0,"topic":' in text
        assert '"PROP_CONSUMEORDERLY":"false"' in text and '"jstack":' in text
        assert '"commitOffset":2' in text and '"consumeOKTPS":0.2' in text
        direct = commands.ConsumeMessageDirectly(
            consumer_group="g", client_id=client_id, msg_id=sent.msg_id
        )
        result = json.loads((await node.call(direct)).body)
        assert result["consumeResult"] == "CR_SUCCESS" and got == [b"0", b"1", b"1"]
        status = await node.call(commands.InvokeBrokerToGetConsumerStatus(topic="T", group="g"))
        assert b":2}" in status.body
        await node.call(
            commands.InvokeBrokerToResetOffset(topic="T", group="g", timestamp=0, is_force=True)
        )
        await until(lambda: got == [b"0", b"1", b"1", b"0", b"1"])


async def test_hooks_and_filters_see_messages(node: Node) -> None:
    await node.create_topic("T", 1)
    for number in range(4):
        await node.send("T", b"%d" % number)
    seen: list[tuple[str, bytes, str | None]] = []

    class Hook:
        def before_consume(self, consumption: Consumption) -> None:
            consumption.notes["body"] = consumption.messages[0].body
            raise RuntimeError("hooks do no harm")

        def after_consume(self, consumption: Consumption) -> None:
            error = type(consumption.error).__name__ if consumption.error else None
            seen.append((consumption.group, consumption.messages[0].body, error))

    class Odd:
        def keep(self, group: str, message: ReceivedMessage) -> bool:
            return int(message.body) % 2 == 1

    def handler(message: ReceivedMessage) -> None:
        if message.body == b"3":
            raise Reject

    consumer = first(node, hooks=(Hook(),), filters=(Odd(),))
    await consumer.subscribe("T")
    async with running(consumer, handler):
        await until(lambda: len(seen) == 2)
        await until(lambda: all(lag == 0 for lag in consumer.lag().values()))
    assert seen == [("g", b"1", None), ("g", b"3", "Reject")]
    assert await node.committed("g", "T") == 4


async def test_misuse_is_explained(node: Node) -> None:
    with pytest.raises(ConfigError, match="reserved"):
        Consumer(node.namesrv, group="DEFAULT_CONSUMER")
    with pytest.raises(Refused, match="not allowed"):
        Consumer(node.namesrv, group="a b")
    for wrong in (
        {"model": "x"},
        {"consume_from": "middle"},
        {"concurrency": 0},
        {"batch": 0},
        {"commit_every_ms": 1},
        {"suspend_ms": 40_000},
        {"close_timeout_ms": -1},
        {"suspend_queue_ms": 0},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ConsumerOptions(**wrong)
    async with first(node) as consumer:
        with pytest.raises(ConfigError, match="no handler"):
            await consumer.run()
        with pytest.raises(ConfigError, match="no handler"):
            await consumer.run("x")  # type: ignore[arg-type]
        consumer.__aiter__()
        waiting = asyncio.create_task(anext(consumer))
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="iterated"):
            await consumer.run(print)
        await consumer.stop()
        with pytest.raises(StopAsyncIteration):
            await waiting
        with pytest.raises(ConfigError, match="does not run"):
            consumer.pause()


def test_settings_are_the_fields_of_the_options() -> None:
    for settings, options, apart in (
        (ConsumerSettings, ConsumerOptions, set()),
        (PullSettings, PullOptions, {"strategy"}),  # an argument of its own, that may be None
    ):
        named = {field.name for field in dataclasses.fields(options)}
        assert set(settings.__annotations__) == named - apart


def test_a_delay_takes_the_next_longer_level() -> None:
    assert [level_of(seconds) for seconds in (0, 1, 1.5, 7200, 1e9)] == [1, 1, 2, 18, 18]
    assert RetryLater(delay_s=20).delay_level == 4
    for wrong in ({"delay_level": -1}, {"delay_level": 1, "delay_s": 1.0}):
        with pytest.raises(ConfigError):
            RetryLater(**wrong)


async def test_a_topic_can_be_left_again(node: Node) -> None:
    await node.create_topic("T", 1)
    await node.create_topic("U", 1)
    async with first(node) as consumer:
        await consumer.subscribe("T")
        await consumer.subscribe("U")
        await consumer.unsubscribe("T")
        await consumer.unsubscribe("never")
        await until(lambda: {queue.topic for queue in consumer.assignment} == {"U", "%RETRY%g"})


async def test_iterated_messages_pass_hooks_too(node: Node) -> None:
    await node.create_topic("T", 1)
    for number in range(3):
        await node.send("T", b"%d" % number)
    seen: list[tuple[bytes, str]] = []

    class Hook:
        def before_consume(self, consumption: Consumption) -> None:
            assert consumption.iterated

        def after_consume(self, consumption: Consumption) -> None:
            seen.append((consumption.messages[0].body, type(consumption.error).__name__))

    async with first(node, hooks=(Hook(),)) as consumer:
        await consumer.subscribe("T")
        messages = [await anext(consumer) for _ in range(3)]
        await messages[0].ack()
        await messages[1].retry(2)
        await messages[2].retry(-1)
        await messages[2].ack()  # too late
    assert seen == [(b"0", "NoneType"), (b"1", "RetryLater"), (b"2", "Reject")]
    assert (await node.call(commands.GetMaxOffset(topic="%DLQ%g", queue_id=0))).offset == 1
    assert await node.committed("g", "T") == 3


async def test_what_happens_to_messages_can_be_traced(node: Node) -> None:
    await node.create_topic("T", 1)
    await node.create_topic("traces", 1)
    await node.send("T", b"x", properties={"UNIQ_KEY": "A" * 32, "KEYS": "k"})
    consumer = first(node, trace=True, trace_topic="traces")

    def handler(message: ReceivedMessage) -> None:
        raise Reject

    await consumer.subscribe("T")
    async with running(consumer, handler):
        await until(lambda: all(lag == 0 for lag in consumer.lag().values()))
    async with first(node, "reader") as reader:
        await reader.subscribe("traces")
        text = (await asyncio.wait_for(anext(reader), 60)).body.decode()
    before, after = (line.split("\x01") for line in text.split("\x02")[:2])
    assert (before[0], before[3], before[5]) == ("SubBefore", "g", "A" * 32)
    assert (after[0], after[2], after[4], after[6]) == ("SubAfter", "A" * 32, "false", "4")
