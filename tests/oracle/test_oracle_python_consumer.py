"""The Python consumer with servers of either kind, beside Java consumers and Java's tools."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest
from peers.clients import Client, Letter, send
from peers.clients import Consumer as PeerConsumer
from peers.java import mqadmin
from tests.oracle.oracle_checks import Cluster, body

from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.handlers import Reject, RetryLater
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.errors import Refused
from cosmodrome.wire import commands


async def until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not done():
            await asyncio.sleep(0.05)


async def java_sends(
    java: Client, cluster: Cluster, topic: str, letters: list[Letter]
) -> list[dict[str, object]]:
    return await asyncio.to_thread(
        send, java, cluster.namesrv, topic, f"p_{topic}", "sync", letters
    )


async def test_it_reads_what_the_java_client_sent(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    letters = [
        Letter("消息 plain".encode(), tags="标签"),
        Letter(b"big " * 5000, tags="big"),
        Letter(b"not wanted", tags="other"),
    ]
    answers = await java_sends(java, cluster, topic, letters)
    got: dict[str, ReceivedMessage] = {}
    async with Consumer(cluster.namesrv, group=group, consume_from="first") as consumer:
        await consumer.subscribe(topic, tags="标签 || big")
        async with asyncio.timeout(60):
            async for message in consumer:
                got[message.msg_id] = message
                await message.ack()
                if len(got) == 2:
                    break
    for letter, answer in zip(letters[:2], answers, strict=False):
        message = got[str(answer["msg_id"])]
        assert (message.body, message.tags) == (letter.body, letter.tags)
        assert message.offset_msg_id == answer["offset_msg_id"]
        assert message.queue_offset == answer["queue_offset"]


async def test_failures_come_again_and_rejections_do_not(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    await java_sends(java, cluster, topic, [Letter(b"later"), Letter(b"never")])
    seen: list[tuple[bytes, int, str]] = []

    async def handler(message: ReceivedMessage) -> None:
        seen.append((message.body, message.reconsume_times, message.topic))
        if message.body == b"never":
            raise Reject
        if message.reconsume_times < 2:
            raise RetryLater(1)

    async with Consumer(cluster.namesrv, group=group, consume_from="first") as consumer:
        await consumer.subscribe(topic, handler=handler)
        await until(lambda: (b"later", 2, topic) in seen)
        address = f"%DLQ%{group}"
        route = await consumer._live().instance.routes.get(address)
        assert len(route.read_queues) >= 1
    assert sorted(seen) == [
        *((b"later", attempt, topic) for attempt in range(3)),
        (b"never", 0, topic),
    ]


async def test_java_and_python_share_a_group(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    got: list[bytes] = []
    async with Consumer(cluster.namesrv, group=group, consume_from="first") as consumer:
        await consumer.subscribe(topic, handler=lambda message: got.append(message.body))

        def mine() -> int:
            return len([queue for queue in consumer.assignment if queue.topic == topic])

        await until(lambda: mine() == 4)
        with await asyncio.to_thread(PeerConsumer, java, cluster.namesrv, topic, group) as peer:
            await asyncio.to_thread(peer.await_start)
            await until(lambda: mine() == 2)
            letters = [Letter(b"%d" % number) for number in range(40)]
            await java_sends(java, cluster, topic, letters)
            # The queues get ten each, and each member has two of them.
            lines = await asyncio.to_thread(peer.receive, 20)
            await until(lambda: len(got) == 20)
        assert sorted(got + [body(line) for line in lines]) == sorted(
            letter.body for letter in letters
        )
        await until(lambda: mine() == 4)


@pytest.mark.parametrize("orderly", [False, True], ids=["concurrent", "orderly"])
async def test_operators_see_it_and_move_it(
    java: Client, cluster: Cluster, topic: str, group: str, orderly: bool
) -> None:
    (answer,) = await java_sends(java, cluster, topic, [Letter(b"letter", tags="TagA")])
    got: list[bytes] = []
    async with Consumer(
        cluster.namesrv, group=group, consume_from="first", orderly=orderly
    ) as consumer:
        await consumer.subscribe(
            topic, tags="TagA || TagB", handler=lambda message: got.append(message.body)
        )
        await until(lambda: got == [b"letter"])
        await consumer.commit()
        client_id = consumer._live().instance.client_id

        def ask(*words: str) -> asyncio.Future[str]:
            return asyncio.ensure_future(asyncio.to_thread(mqadmin, cluster.namesrv, *words))

        printed = await ask("consumerConnection", "-g", group)
        assert client_id in printed
        assert re.search(rf"^{topic}\s+TagA \|\| TagB", printed, re.MULTILINE), printed
        printed = await ask("consumerStatus", "-g", group, "-i", client_id)
        assert re.search(rf"Topic: {topic}\s.*SubExpression: TagA \|\| TagB", printed), printed
        detail = printed.partition("#Consumer MQ Detail#")[2]
        queues = re.findall(rf"^{topic}\s+\S+\s+(\d)\s+ProcessQueueInfo", detail, re.MULTILINE)
        assert sorted(queues) == ["0", "1", "2", "3"], printed
        identity = str(answer["offset_msg_id"])
        printed = await ask("queryMsgById", "-i", identity, "-g", group, "-d", client_id)
        assert "consumeResult=CR_SUCCESS" in printed, printed
        assert got == [b"letter", b"letter"]
        printed = await ask("resetOffsetByTime", "-g", group, "-t", topic, "-s", "0")
        await until(lambda: len(got) == 3)


async def test_expressions_are_checked_by_the_broker(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    letters = [Letter(b"%d" % n, properties={"n": str(n)}) for n in range(6)]
    await java_sends(java, cluster, topic, letters)
    async with Consumer(cluster.namesrv, group=group, consume_from="first") as consumer:
        with pytest.raises(Refused):
            await consumer.subscribe(topic, sql="n > > 1")
        await consumer.subscribe(topic, sql="n > 3")
        async with asyncio.timeout(60):
            found = {(await anext(consumer)).body for _ in range(2)}
    assert found == {b"4", b"5"}


async def test_order_is_kept_and_progress_too(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    letters = [Letter(b"%d" % number) for number in range(20)]
    await java_sends(java, cluster, topic, letters)
    got: dict[int, list[int]] = {}
    failed: set[int] = set()

    async def handler(message: ReceivedMessage) -> None:
        if message.queue_id not in failed:
            failed.add(message.queue_id)
            raise RetryLater(delay_s=0.1)
        got.setdefault(message.queue_id, []).append(message.queue_offset)

    async with Consumer(
        cluster.namesrv, group=group, consume_from="first", orderly=True
    ) as consumer:
        await consumer.subscribe(topic, handler=handler)
        await until(lambda: sum(map(len, got.values())) == 20)
        instance = consumer._live().instance
        queues = [queue for queue in consumer.assignment if queue.topic == topic]
    assert all(offsets == list(range(len(offsets))) for offsets in got.values())
    async with Consumer(cluster.namesrv, group=f"{group}_2", consume_from="first") as other:
        await other.subscribe(topic)
        instance = other._live().instance
        for queue in queues:
            address = instance.routes.address(queue.broker_name)
            assert address is not None
            reply = await instance.links.call(
                address,
                commands.QueryConsumerOffset(
                    consumer_group=group, topic=topic, queue_id=queue.queue_id
                ),
            )
            assert reply.offset == len(got.get(queue.queue_id, []))
