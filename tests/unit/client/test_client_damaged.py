"""A message whose body cannot be read is never skipped unseen, whoever reads its queue."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
from tests.unit.client.conftest import Node, until

from cosmodrome import blocking
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.pull_consumer import PullConsumer
from cosmodrome.client.receive.pull_schedule import PullSchedule, Turn
from cosmodrome.client.values import DamagedBody, DamagedMessage, MessageQueue, ReceivedMessage
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import SYS_COMPRESSED, SYS_ZLIB

Q0 = MessageQueue(topic="T", broker_name="broker-a", queue_id=0)
RUBBISH = b"this is no compressed body"


@pytest.fixture
async def damaged(node: Node) -> Node:
    """Queue T:0 has `before`, a message that says it is compressed but is not, and `after`."""
    await node.create_topic("T", 1)
    await node.send("T", b"before")
    flags = SYS_COMPRESSED | SYS_ZLIB
    await node.send("T", RUBBISH, sys_flag=flags, properties={"KEYS": "k"})
    await node.send("T", b"after")
    return node


def puller(node: Node, **changes: Any) -> PullConsumer:
    options: dict[str, Any] = {"group": "g", "consume_from": "first", "suspend_ms": 500}
    return PullConsumer(node.namesrv, **(options | changes))


async def dead_letters(node: Node, count: int = 1) -> list[ReceivedMessage]:
    queue = MessageQueue(topic="%DLQ%g", broker_name="broker-a", queue_id=0)
    async with asyncio.timeout(60), puller(node, group="undertakers") as consumer:
        while True:
            try:
                found = (await consumer.pull(queue, 0)).messages
            except Exception:  # the topic comes with its first message
                found = []
            if len(found) == count:
                return found
            await asyncio.sleep(0.05)


def shown(messages: list[ReceivedMessage]) -> list[bytes]:
    """Bodies, and what is stored instead of them."""
    return [m.stored_body if isinstance(m, DamagedMessage) else m.body for m in messages]


# --- messages come by themselves -----------------------------------------------------------------


@pytest.mark.parametrize("orderly", [False, True])
async def test_handlers_get_the_others_and_it_becomes_a_dead_letter(
    damaged: Node, orderly: bool
) -> None:
    got: list[bytes] = []
    async with Consumer(
        damaged.namesrv, group="g", consume_from="first", orderly=orderly
    ) as consumer:
        await consumer.subscribe("T", handler=lambda message: got.append(message.body))
        (dead,) = await dead_letters(damaged)
        await until(lambda: got == [b"before", b"after"])
        await until(lambda: not any(consumer.lag().values()))
        info = consumer._live().running_info(stacks=False)
        assert b'"consumeFailedMsgs":1' in info.replace(b" ", b"")
    assert await damaged.committed("g", "T") == 3
    assert isinstance(dead, DamagedMessage)
    assert (dead.stored_body, dead.keys) == (RUBBISH, ("k",))


@pytest.mark.parametrize("orderly", [False, True])
async def test_an_iteration_gets_the_others_and_it_becomes_a_dead_letter(
    damaged: Node, orderly: bool
) -> None:
    got: list[bytes] = []
    async with Consumer(
        damaged.namesrv, group="g", consume_from="first", orderly=orderly
    ) as consumer:
        await consumer.subscribe("T")
        async with asyncio.timeout(60):
            async for message in consumer:
                got.append(message.body)
                await message.ack()
                if len(got) == 2:
                    break
        await until(lambda: not any(consumer.lag().values()))
    assert len(await dead_letters(damaged)) == 1
    assert got == [b"before", b"after"]
    assert await damaged.committed("g", "T") == 3


async def test_progress_waits_until_it_is_among_the_dead_letters(
    damaged: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster does not take it back: nothing may be committed past it."""
    refused = asyncio.Event()

    async def refuse(*_: object) -> bool:
        refused.set()
        return False

    monkeypatch.setattr("cosmodrome.client.receive.returns.Returns.give_back", refuse)
    got: list[bytes] = []
    async with Consumer(damaged.namesrv, group="g", consume_from="first") as consumer:
        await consumer.subscribe("T", handler=lambda message: got.append(message.body))
        await until(lambda: got == [b"before", b"after"] and refused.is_set())
        await consumer.commit()
        assert await damaged.committed("g", "T") == 1
    assert await damaged.committed("g", "T") == 1


async def test_broadcasting_says_that_it_is_dropped(
    damaged: Node, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[bytes] = []
    with caplog.at_level(logging.ERROR):
        async with Consumer(
            damaged.namesrv,
            group="g",
            consume_from="first",
            model="broadcasting",
            offsets_dir=str(tmp_path / "offsets"),
        ) as consumer:
            await consumer.subscribe("T", handler=lambda message: got.append(message.body))
            await until(lambda: got == [b"before", b"after"])
            await until(lambda: "broadcasting has no dead letters" in caplog.text)


# --- the user asks for messages ------------------------------------------------------------------


@pytest.mark.parametrize("chosen", ["assign", "subscribe"])
async def test_poll_returns_it_in_its_place(damaged: Node, chosen: str) -> None:
    got: list[ReceivedMessage] = []
    async with puller(damaged) as consumer:
        await (consumer.assign([Q0]) if chosen == "assign" else consumer.subscribe("T"))
        async with asyncio.timeout(60):
            while len(got) < 3:
                got += await consumer.poll(1000)
        assert shown(got) == [b"before", RUBBISH, b"after"]
        assert [message.damage is not None for message in got] == [False, True, False]
        with pytest.raises(DamagedBody, match="message 1 in queue 0 of T") as raised:
            _ = got[1].body
        assert raised.value.message is got[1]
        assert got[1].keys == ("k",) and "DamagedMessage" in repr(got[1])
    assert await damaged.committed("g", "T") == 3  # the user saw it, and the block ended well


async def test_who_does_not_expect_it_stays_before_it(damaged: Node) -> None:
    async def read() -> list[bytes]:
        got: list[bytes] = []
        async with puller(damaged, pull_batch=1) as consumer:
            await consumer.subscribe("T")
            while True:
                for message in await consumer.poll(1000):
                    got.append(message.body)

    for _ in range(2):  # a program that is started again meets it again
        with pytest.raises(DamagedBody):
            await asyncio.wait_for(read(), 60)
        assert await damaged.committed("g", "T") == 1


async def test_what_is_left_out_by_tags_is_not_reported(damaged: Node) -> None:
    async with puller(damaged) as consumer:
        await consumer.assign([Q0], tags="A")
        await damaged.send("T", b"tagged", properties={"TAGS": "A"})
        async with asyncio.timeout(60):
            found: list[ReceivedMessage] = []
            while not found:
                found = await consumer.poll(1000)
        assert shown(found) == [b"tagged"]


async def test_a_pull_at_an_offset_returns_it_in_its_place(damaged: Node) -> None:
    async with puller(damaged) as consumer:
        pulled = await consumer.pull(Q0, 0)
    assert shown(pulled.messages) == [b"before", RUBBISH, b"after"]
    with pytest.raises(DamagedBody):
        _ = pulled.messages[1].body


async def test_a_turn_of_a_schedule_that_does_not_expect_it_fails(
    damaged: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.client.receive.pull_schedule.AFTER_FAILURE_MS", 10)
    got: list[bytes] = []
    expected = False
    met: list[int] = []

    async def work(turn: Turn) -> None:
        pulled = await turn.pull(max_count=1)
        for message in pulled.messages:
            if isinstance(message, DamagedMessage):
                met.append(message.queue_offset)
                got.append(message.stored_body if expected else message.body)
            else:
                got.append(message.body)
        await turn.commit(pulled.next_offset)
        turn.next_in_ms = 10

    async with PullSchedule(damaged.namesrv, group="g", consume_from="first") as schedule:
        await schedule.register("T", work)
        await until(lambda: len(met) == 3)
        assert got == [b"before"]
        assert await damaged.committed("g", "T") == 1
        expected = True
        await until(lambda: len(got) == 3)
    assert got == [b"before", RUBBISH, b"after"]


async def test_an_answer_that_makes_no_sense_is_raised_by_poll(
    damaged: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with puller(damaged) as consumer:

        def broken(*_: object, **__: object) -> None:
            raise ProtocolError("record at 0: unknown magic")

        with monkeypatch.context() as patch:
            patch.setattr(consumer._live()._decoder, "decode", broken)
            await consumer.assign([Q0])
            with pytest.raises(ProtocolError, match="offset 0: record at 0: unknown magic"):
                await asyncio.wait_for(consumer.poll(60_000), 60)
        await consumer.seek(Q0, 2)
        assert shown(await consumer.poll(30_000)) == [b"after"]


# --- without await -------------------------------------------------------------------------------


async def test_the_blocking_faces_do_the_same(damaged: Node) -> None:
    def polled() -> list[bytes]:
        with blocking.PullConsumer(damaged.namesrv, group="p", consume_from="first") as consumer:
            consumer.assign([Q0])
            got: list[ReceivedMessage] = []
            while len(got) < 3:
                got += consumer.poll(1000)
            at_once = consumer.pull(Q0, 0).messages
            assert shown(at_once) == shown(got)
            with pytest.raises(DamagedBody):
                _ = got[1].body
            return shown(got)

    def not_expected() -> None:
        with blocking.PullConsumer(
            damaged.namesrv, group="q", consume_from="first", pull_batch=1
        ) as consumer:
            consumer.subscribe("T")
            while True:
                for message in consumer.poll(1000):
                    _ = message.body

    def iterated() -> list[bytes]:
        with blocking.Consumer(damaged.namesrv, group="g", consume_from="first") as consumer:
            consumer.subscribe("T")
            got: list[bytes] = []
            for message in consumer:
                got.append(message.body)
                message.ack()
                if len(got) == 2:
                    while any(consumer.lag().values()):
                        time.sleep(0.01)
                    return got
        raise AssertionError("the iteration ended by itself")

    async with asyncio.timeout(60):
        assert await asyncio.to_thread(polled) == [b"before", RUBBISH, b"after"]
        with pytest.raises(DamagedBody):
            await asyncio.to_thread(not_expected)
        assert await asyncio.to_thread(iterated) == [b"before", b"after"]
    assert await damaged.committed("p", "T") == 3
    assert await damaged.committed("q", "T") == 1
    assert shown(await dead_letters(damaged)) == [RUBBISH]
