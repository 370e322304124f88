"""Bodies that grow when they are decompressed: memory stays bounded, and no message is lost."""

from __future__ import annotations

import asyncio
import gc
import zlib
from typing import Any

import pytest
from tests.unit.client.conftest import Node, until
from tests.unit.client.test_client_decoding import stored

from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.engine.decoding import Arrivals, Decoder
from cosmodrome.client.receive.engine.inflating import Inflated
from cosmodrome.client.receive.engine.options import MIB
from cosmodrome.client.receive.engine.subscriptions import Subscription
from cosmodrome.client.receive.pull_consumer import PullConsumer
from cosmodrome.client.received import received_all
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import ConfigError, ProtocolError
from cosmodrome.layout import SYS_COMPRESSED, SYS_ZLIB

FLAGS = SYS_COMPRESSED | SYS_ZLIB
BOMB = zlib.compress(bytes(MIB), 9)  # a thousandth of what it becomes
Q0 = MessageQueue(topic="T", broker_name="broker-a", queue_id=0)
ORDERS = Subscription.of("orders", 1)
COUNT = 24


def decoded(parts: list[bytes], *, body_bytes_max: int = MIB, **room: int) -> Arrivals:
    return Decoder("g", "", body_bytes_max, ()).decode(b"".join(parts), "b", ORDERS, **room)


def bomb(offset: int) -> bytes:
    return stored(offset, BOMB, sys_flag=FLAGS)


# --- one answer ----------------------------------------------------------------------------------


def test_an_answer_is_cut_where_the_next_body_does_not_fit() -> None:
    parts = [stored(5), bomb(6), stored(7), bomb(8), bomb(9), stored(10), bomb(11)]
    found = decoded(parts, body_bytes_max=2 * MIB)
    assert [message.queue_offset for message in found.messages] == [5, 6, 7, 8]
    assert found.cut_at == 9
    assert found.size == sum(map(len, parts[:4]))
    assert list(found.inflated.values()) == [MIB, MIB]
    assert not found.damaged


def test_a_body_that_fits_in_no_answer_is_damaged_and_the_rest_goes_on() -> None:
    found = decoded([bomb(6), stored(7)], body_bytes_max=MIB - 1)
    assert [message.queue_offset for message in found.messages] == [6, 7]
    assert [message.queue_offset for message in found.damaged] == [6]
    assert found.cut_at is None


def test_less_room_than_a_body_may_have_leaves_it_for_later() -> None:
    found = decoded([stored(5), bomb(6)], room=MIB - 1)
    assert [message.queue_offset for message in found.messages] == [5]
    assert (found.cut_at, found.damaged) == (6, [])
    assert decoded([bomb(6)], room=0).cut_at == 6


def test_a_message_that_a_filter_drops_counts_no_more() -> None:
    class Even:
        def keep(self, group: str, message: ReceivedMessage) -> bool:
            return message.queue_offset % 2 == 0

    decoder = Decoder("g", "", 4 * MIB, (Even(),))
    found = decoder.decode(bomb(6) + bomb(7), "b", ORDERS)
    assert [message.queue_offset for message in found.inflated] == [6]


def test_an_admin_call_shows_every_message_but_not_every_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cosmodrome.client.received.ANSWER_BYTES_MAX", 2 * MIB + 5)
    shown = received_all(bomb(1) + bomb(2) + bomb(3) + stored(4, b"small"), "b")
    assert [message.queue_offset for message in shown] == [1, 2, 3, 4]
    assert [message.damage is None for message in shown] == [True, True, False, True]
    assert "the cap of 5 bytes" in str(shown[2].damage)


# --- all queues ----------------------------------------------------------------------------------


def test_the_budget_of_a_consumer() -> None:
    budget = Inflated(10)
    woken: list[str] = []
    assert budget.room(64) == 64  # nothing is held: even more than the budget
    budget.take(7)
    assert budget.room(64) == 3
    assert budget.room(2) == 2
    budget.take(5)
    assert budget.full
    assert budget.room(64) == 0
    budget.wait(lambda: woken.append("a"))
    budget.give_back(6)
    assert woken == []  # who is woken now would hardly find room
    budget.give_back(1)
    budget.give_back(1)
    assert woken == ["a"]


@pytest.fixture
async def bombs(node: Node) -> Node:
    await node.create_topic("T", 2)
    for number in range(COUNT):
        await node.send("T", BOMB, queue_id=number % 2, sys_flag=FLAGS)
    return node


def in_memory(consumer: Consumer) -> int:
    """Bytes of the bodies that wait for a handler or are in one."""
    windows = consumer._live().assignment.windows.values()
    return sum(len(one.body) for window in windows for one in window.unfinished.values())


@pytest.mark.parametrize("orderly", [False, True])
async def test_bombs_arrive_one_after_the_other(bombs: Node, orderly: bool) -> None:
    """What a consumer holds stays within its budget while handlers are slow."""
    most, seen = 0, []
    options: dict[str, Any] = {"body_bytes_max": 2 * MIB, "inflated_bytes_max": 4 * MIB}
    async with Consumer(
        bombs.namesrv, group="g", consume_from="first", orderly=orderly, **options
    ) as consumer:

        async def handle(message: ReceivedMessage) -> None:
            nonlocal most
            await asyncio.sleep(0)
            most = max(most, in_memory(consumer))
            assert len(message.body) == MIB
            seen.append((message.queue_id, message.queue_offset))

        await consumer.subscribe("T", handler=handle)
        await until(lambda: len(seen) == COUNT)
        await until(lambda: not any(consumer.lag().values()))
        assert consumer._live().assignment.inflated.held == 0
    assert sorted(seen) == [(queue, offset) for queue in (0, 1) for offset in range(COUNT // 2)]
    assert MIB <= most <= 4 * MIB


def existing() -> set[int]:
    """The messages in this process."""
    gc.collect()
    return {id(one) for one in gc.get_objects() if isinstance(one, ReceivedMessage)}


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("waits", [False, True])
async def test_messages_that_are_done_are_held_by_nobody(
    bombs: Node, orderly: bool, waits: bool
) -> None:
    """A worker that waits for the next message has forgotten the last one."""
    done, before = 0, existing()

    def count(message: ReceivedMessage) -> None:
        nonlocal done
        done += 1

    async def count_later(message: ReceivedMessage) -> None:
        await asyncio.sleep(0)
        count(message)

    async with Consumer(
        bombs.namesrv, group="g", consume_from="first", orderly=orderly
    ) as consumer:
        await consumer.subscribe("T", handler=count_later if waits else count)
        await until(lambda: done == COUNT and not any(consumer.lag().values()))
        await asyncio.sleep(0)
        assert existing() <= before


async def test_a_paused_queue_does_not_hold_up_another(bombs: Node) -> None:
    other = MessageQueue(topic="T", broker_name="broker-a", queue_id=1)
    async with PullConsumer(
        bombs.namesrv, group="g", body_bytes_max=2 * MIB, inflated_bytes_max=2 * MIB
    ) as consumer:
        await consumer.assign([Q0], offsets={Q0: 0})
        window = consumer._live().assignment.windows[Q0]
        await until(lambda: window.bytes > MIB)
        consumer.pause([Q0])
        await consumer.assign([Q0, other], offsets={other: 0})
        got = 0
        async with asyncio.timeout(60):
            while got < COUNT // 2:
                got += len(await consumer.poll(1000))
        consumer.resume([Q0])
        async with asyncio.timeout(60):
            while got < COUNT:
                got += len(await consumer.poll(1000))


async def test_one_pull_brings_what_fits_and_says_where_to_go_on(bombs: Node) -> None:
    at, offsets = 0, list[int]()
    async with PullConsumer(bombs.namesrv, group="g", body_bytes_max=3 * MIB) as consumer:
        while len(offsets) < COUNT // 2:
            pulled = await consumer.pull(Q0, at)
            assert 1 <= len(pulled.messages) <= 3
            offsets += [message.queue_offset for message in pulled.messages]
            at = pulled.next_offset
    assert offsets == list(range(COUNT // 2))


async def test_offsets_that_lead_nowhere_are_refused(
    bombs: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record with an offset outside of its answer must not send the consumer anywhere."""
    whole = Decoder.decode

    def elsewhere(self: Decoder, *args: Any, **options: Any) -> Arrivals:
        found = whole(self, *args, **options)
        found.cut_at = 1 << 40
        return found

    monkeypatch.setattr(Decoder, "decode", elsewhere)
    async with PullConsumer(bombs.namesrv, group="g") as consumer:
        with pytest.raises(ProtocolError, match="offset 1099511627776 is in an answer about"):
            await consumer.pull(Q0, 0)


def test_the_budget_is_an_option() -> None:
    with pytest.raises(ConfigError, match="inflated_bytes_max is 0; use 1 to"):
        Consumer(group="g", inflated_bytes_max=0)
