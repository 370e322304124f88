"""Groups of consumers through virtual minutes and hours: members, brokers, delays, order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Awaitable, Callable

import pytest
from tests.sim.sim_cluster import BROKER_PORT, Cluster, simulate

from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.handlers import Reject, RetryLater
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import CosmodromeError
from cosmodrome.layout import SYS_COMPRESSED, SYS_ZLIB
from cosmodrome.wire.message import compress


def shares(*consumers: Consumer, topic: str = "T") -> list[int]:
    return [len([q for q in c.assignment if q.topic == topic]) for c in consumers]


def is_partition(consumers: list[Consumer], queues: int) -> bool:
    taken = [q for c in consumers for q in c.assignment if q.topic == "T"]
    return len(taken) == len(set(taken)) == queues


@pytest.mark.parametrize("seed", range(5))
def test_members_come_and_go_and_no_message_is_lost(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=6)
        got: dict[bytes, int] = {}

        async def handler(message: ReceivedMessage) -> None:
            # Slow enough that whoever goes has messages in hand.
            await asyncio.sleep(0.5)
            got[message.body] = got.get(message.body, 0) + 1

        sent = 0

        async def feed() -> None:
            nonlocal sent
            for number in itertools.count():
                await cluster.send(b"%d" % number, number % 6)
                sent += 1
                await asyncio.sleep(0.1)

        feeding = asyncio.create_task(feed())
        members = [await cluster.join(handler)]
        assert shares(*members) == [6]
        for _ in range(2):
            members.append(await cluster.join(handler))
        await cluster.until(lambda: is_partition(members, 6), 60)
        assert shares(*members) == [2, 2, 2]
        await cluster.die(members.pop(1))
        # The broker sees the connection close and tells the others.
        await cluster.until(lambda: is_partition(members, 6), 5)
        await members.pop(0).stop()
        await cluster.until(lambda: is_partition(members, 6), 5)
        members.append(await cluster.join(handler))
        await cluster.hang(members.pop(0))
        # Nothing closes; the broker forgets it after 120 s without a heartbeat.
        await cluster.until(lambda: is_partition(members, 6), 180)
        feeding.cancel()
        await cluster.until(lambda: len(got) == sent, 60)
        twice = sum(count - 1 for count in got.values())
        assert twice <= sent // 4
        for member in members:
            await member.stop()
        assert sum([await cluster.committed(queue_id=queue) for queue in range(6)]) == sent

    simulate(scenario, seed)


def test_a_broker_that_is_away_for_minutes_is_found_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=2)
        got: list[bytes] = []
        consumer = await cluster.join(lambda message: got.append(message.body))
        await cluster.send(b"before")
        await cluster.until(lambda: got == [b"before"], 5)
        await cluster.stop_broker()
        await asyncio.sleep(200)
        await cluster.start_broker()
        await cluster.send(b"after")
        await cluster.until(lambda: got == [b"before", b"after"], 60)
        assert shares(consumer) == [2]
        await consumer.stop()
        assert await cluster.committed() == 2

    simulate(scenario)


def test_a_silent_network_ends_and_messages_flow_again() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=1)
        got: list[bytes] = []
        await cluster.join(lambda message: got.append(message.body))
        cluster.loop.silent.add(BROKER_PORT)
        await asyncio.sleep(45)
        cluster.loop.silent.clear()
        cluster.loop.cut(BROKER_PORT)
        await asyncio.sleep(2)
        await cluster.send(b"x")
        await cluster.until(lambda: got == [b"x"], 60)

    simulate(scenario)


def test_every_retry_waits_longer_and_the_last_is_a_dead_letter() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=1)
        attempts: list[float] = []

        def handler(message: ReceivedMessage) -> None:
            assert message.reconsume_times == len(attempts)
            attempts.append(cluster.loop.time())
            raise ValueError("never good")

        await cluster.join(handler)
        await cluster.send(b"x")
        await cluster.until(lambda: len(attempts) == 17, 6 * 3600)
        await asyncio.sleep(10)
        waits = [later - sooner for sooner, later in itertools.pairwise(attempts)]
        expected = [10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200]
        assert waits == pytest.approx(expected, abs=1.5)
        assert await cluster.end("%DLQ%g") == 1
        assert await cluster.committed() == 1

    simulate(scenario)


def test_when_a_message_cannot_be_given_back_a_copy_is_sent() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=1)
        body = b"x" * 5000
        packed = compress(body, SYS_COMPRESSED | SYS_ZLIB)
        await cluster.send(packed, sys_flag=SYS_COMPRESSED | SYS_ZLIB)
        got: list[tuple[bytes, int, str]] = []

        def handler(message: ReceivedMessage) -> None:
            got.append((message.body, message.reconsume_times, message.topic))
            if message.reconsume_times == 0:
                # What the broker is asked for is not there, as after its log was cleaned.
                message.record.log_offset = 1 << 40
                raise RetryLater

        await cluster.join(handler)
        await cluster.until(lambda: len(got) == 2, 60)
        assert got == [(body, 0, "T"), (body, 1, "T")]

    simulate(scenario)


def test_a_message_that_the_cluster_does_not_take_back_is_tried_again_here() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=1)
        await cluster.send(b"x")
        got: list[int] = []

        async def handler(message: ReceivedMessage) -> None:
            got.append(message.reconsume_times)
            if len(got) == 1:
                cluster.loop.silent.add(BROKER_PORT)
                raise RetryLater
            cluster.loop.silent.clear()
            cluster.loop.cut(BROKER_PORT)

        await cluster.join(handler)
        await cluster.until(lambda: got == [0, 1], 60)
        await cluster.until(lambda: not cluster.loop.silent, 10)
        await asyncio.sleep(20)
        assert await cluster.committed() == 1

    simulate(scenario)


def test_a_handler_that_hangs_loses_its_message_to_another_attempt() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=1)
        await cluster.send(b"x")
        calls: list[tuple[float, int]] = []

        async def handler(message: ReceivedMessage) -> None:
            calls.append((cluster.loop.time(), message.reconsume_times))
            if len(calls) == 1:
                await asyncio.sleep(3600)

        await cluster.join(handler, close_timeout_ms=10)
        await cluster.until(lambda: len(calls) == 2, 1200)
        assert calls[1][1] == 1
        assert 900 <= calls[1][0] - calls[0][0] <= 900 + 60 + 12

    simulate(scenario)


# --- in order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_order_holds_while_members_change(seed: int) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=3)
        got: dict[int, list[int]] = {0: [], 1: [], 2: []}
        inside: set[int] = set()
        overlaps: list[bytes] = []

        async def handler(message: ReceivedMessage) -> None:
            if message.queue_id in inside:
                overlaps.append(message.body)
            inside.add(message.queue_id)
            await asyncio.sleep(0.6)  # nearly always at work
            inside.discard(message.queue_id)
            got[message.queue_id].append(int(message.body))

        async def feed() -> None:
            for number in range(240):
                await cluster.send(b"%d" % number, number % 3)
                await asyncio.sleep(0.22)

        feeding = asyncio.create_task(feed())
        one = await cluster.join(handler, orderly=True)
        await asyncio.sleep(5)
        two = await cluster.join(handler, orderly=True)
        await asyncio.sleep(20)
        await one.stop()
        await asyncio.sleep(20)
        three = await cluster.join(handler, orderly=True)
        await feeding
        await cluster.until(lambda: sum(map(len, got.values())) >= 240, 120)
        assert sorted(shares(two, three)) == [1, 2]
        assert overlaps == []
        for queue, numbers in got.items():
            assert numbers == list(range(queue, 240, 3))

    simulate(scenario, seed)


def test_a_failing_message_holds_its_queue_and_no_other() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=2)
        got: list[tuple[bytes, int]] = []

        def handler(message: ReceivedMessage) -> None:
            got.append((message.body, message.reconsume_times))
            if message.body == b"bad":
                if message.reconsume_times == 0:
                    raise RetryLater(delay_s=5)
                raise ValueError

        for body, queue in ((b"bad", 0), (b"a", 0), (b"b", 1)):
            await cluster.send(body, queue)
        began = cluster.loop.time()
        consumer = await cluster.join(handler, orderly=True, max_reconsume_times=3)
        await cluster.until(lambda: (b"a", 0) in got, 30)
        # One pause of 5 s, two of 1 s; then the attempts are used up.
        assert 7 <= cluster.loop.time() - began < 9
        assert [item for item in got if item[0] == b"bad"] == [(b"bad", n) for n in range(4)]
        assert got.index((b"b", 0)) < got.index((b"a", 0))
        await consumer.stop()
        assert await cluster.committed() == 2
        assert await cluster.end("%DLQ%g") == 1

    simulate(scenario)


def test_the_lock_of_a_member_that_hangs_expires() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=1)
        got: list[bytes] = []
        one = await cluster.join(lambda message: got.append(message.body), orderly=True, name="a")
        two = await cluster.join(lambda message: got.append(message.body), orderly=True, name="b")
        assert shares(one, two) == [1, 0]
        await cluster.send(b"x")
        await cluster.until(lambda: got == [b"x"], 10)
        await asyncio.sleep(6)  # so that its progress is known
        await cluster.hang(one)
        await cluster.send(b"y")
        await cluster.until(lambda: got == [b"x", b"y"], 240)

    simulate(scenario)


def test_an_ordered_consumer_is_iterated_one_message_at_a_time() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=1)
        for number in range(3):
            await cluster.send(b"%d" % number)
        consumer = cluster.consumer(orderly=True)
        await consumer.subscribe("T")
        message = await anext(consumer)
        assert message.body == b"0"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(consumer), 5)
        await message.retry()
        message = await anext(consumer)
        assert (message.body, message.reconsume_times) == (b"0", 1)
        await message.ack()
        assert (await anext(consumer)).body == b"1"
        await consumer.stop()
        assert await cluster.committed() == 1

    simulate(scenario)


def test_seek_waits_for_the_call_that_runs_in_order() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=1)
        for number in range(4):
            await cluster.send(b"%d" % number)
        trace: list[str] = []

        async def handler(message: ReceivedMessage) -> None:
            trace.append(f"begin {message.body.decode()}")
            await asyncio.sleep(1)
            trace.append(f"end {message.body.decode()}")

        consumer = await cluster.join(handler, orderly=True)
        await cluster.until(lambda: bool(trace), 5)
        await consumer.seek(MessageQueue(topic="T", broker_name="b", queue_id=0), 3)
        await cluster.until(lambda: "end 3" in trace, 10)
        assert trace == ["begin 0", "end 0", "begin 3", "end 3"]

    simulate(scenario)


def test_broadcasting_in_order_drops_what_fails_too_often() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create_topic(queues=1)
        got: list[list[tuple[bytes, int]]] = [[], []]

        def into(seen: list[tuple[bytes, int]]) -> Callable[[ReceivedMessage], None]:
            def handler(message: ReceivedMessage) -> None:
                seen.append((message.body, message.reconsume_times))
                if message.body == b"bad":
                    raise ValueError
                if message.body == b"rejected":
                    raise Reject

            return handler

        for seen in got:
            await cluster.join(
                into(seen),
                orderly=True,
                model="broadcasting",
                offsets_dir="/offsets",
                max_reconsume_times=1,
            )
        for body in (b"bad", b"rejected", b"good"):
            await cluster.send(body)
        await cluster.until(lambda: all(len(seen) == 4 for seen in got), 30)
        assert got[0] == got[1] == [(b"bad", 0), (b"bad", 1), (b"rejected", 0), (b"good", 0)]

    simulate(scenario)


def never_skipped(numbers: list[int]) -> bool:
    """What comes twice comes again from there on; neighbours in a queue are 5 apart."""
    reached = numbers[0] - 5 if numbers else 0
    for number in numbers:
        if number - 5 > reached:
            return False
        reached = max(reached, number)
    return True


async def disturb(
    cluster: Cluster,
    members: list[Consumer],
    chance: random.Random,
    join: Callable[[], Awaitable[Consumer]],
) -> None:
    """One thing that happens to consumers."""
    event = chance.choice(("join", "join", "stop", "die", "hang", "cut", "restart"))
    if event == "join" and len(members) < 6:
        members.append(await join())
    elif event == "cut":
        cluster.loop.cut(BROKER_PORT)
    elif event == "restart":
        await cluster.stop_broker()
        await asyncio.sleep(chance.uniform(0.1, 20))
        await cluster.start_broker()
    elif len(members) > 1:
        leaver = members.pop(chance.randrange(len(members)))
        if event == "stop":
            await leaver.stop()
        elif event == "hang":
            await cluster.hang(leaver)
        else:
            await cluster.die(leaver)


@pytest.mark.parametrize("orderly", [False, True], ids=["concurrent", "orderly"])
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_every_message_is_done(seed: int, orderly: bool) -> None:
    """Members come, go, die and hang; connections break; the broker restarts."""

    async def scenario(cluster: Cluster) -> None:
        chance = random.Random(seed)
        await cluster.create_topic(queues=5)
        got: dict[bytes, int] = {}
        order: dict[int, list[int]] = {number: [] for number in range(5)}

        async def handler(message: ReceivedMessage) -> None:
            await asyncio.sleep(chance.choice((0.0, 0.05, 0.4)))
            if chance.random() < 0.05:
                raise RetryLater(1)
            got[message.body] = got.get(message.body, 0) + 1
            order[message.queue_id].append(int(message.body))

        sent = 0

        async def feed() -> None:
            nonlocal sent
            while True:
                with contextlib.suppress(CosmodromeError):
                    await cluster.send(b"%d" % sent, sent % 5)
                    sent += 1
                await asyncio.sleep(0.2)

        def join() -> Awaitable[Consumer]:
            return cluster.join(handler, orderly=orderly)

        members = [await join()]
        feeding = asyncio.create_task(feed())
        for _ in range(14):
            await asyncio.sleep(chance.uniform(1, 15))
            await disturb(cluster, members, chance, join)
        feeding.cancel()
        await cluster.until(lambda: is_partition(members, 5), 300)
        await cluster.until(lambda: set(got) >= {b"%d" % n for n in range(sent)}, 300)
        await asyncio.sleep(120)
        assert not orderly or all(map(never_skipped, order.values()))
        for member in members:
            await member.stop()
        done = [await cluster.committed(queue_id=number) for number in range(5)]
        assert done == [await cluster.end("T", number) for number in range(5)]

    simulate(scenario, seed)
