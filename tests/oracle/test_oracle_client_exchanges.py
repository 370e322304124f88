"""Transactions, requests with replies and traces of our client, against our node and upstream's."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from peers.java import mqadmin
from tests.oracle.client_kit import Inbox, Target, eventually, running, until

from cosmodrome import (
    Admin,
    ClientOptions,
    Consumer,
    Message,
    Producer,
    ReceivedMessage,
    Reject,
    RetryLater,
    TransactionProducer,
    TransactionState,
)
from cosmodrome.client.send.failures import RequestTimedOut


async def test_transactions(target: Target, place: str, group: str) -> None:
    """What was left open is asked about: here it is decided at the second time."""
    asked: Counter[bytes] = Counter()

    async def check(message: ReceivedMessage) -> TransactionState:
        asked[message.body] += 1
        assert message.topic == place
        assert message.properties["outcome"] == message.body.split()[-1].decode()
        if asked[message.body] < 2:
            return TransactionState.UNKNOWN
        commits = message.body.endswith(b"commit")
        return TransactionState.COMMIT if commits else TransactionState.ROLLBACK

    def local(message: Message) -> TransactionState:
        first, _, _ = message.body.partition(b" ")
        if first == b"later":
            return TransactionState.UNKNOWN
        if first == b"broken":
            raise RuntimeError("the local transaction failed")
        return TransactionState.COMMIT if first == b"commit" else TransactionState.ROLLBACK

    inbox = Inbox()
    consumer = Consumer(target.namesrv, group=f"c_{group}", consume_from="first")
    bodies = ("commit", "rollback", "later commit", "later rollback", "broken commit")
    async with (
        running(consumer, place, inbox),
        TransactionProducer(target.namesrv, group=group, check=check) as producer,
    ):
        results = [
            await producer.send_in_transaction(
                Message(place, body, keys="k", properties={"outcome": body.split()[-1]}), local
            )
            for body in bodies
        ]
        await until(lambda: {b"later commit", b"broken commit"} <= set(inbox.bodies), "commits", 60)
        await until(lambda: asked[b"later rollback"] >= 2, "the last question")
        await asyncio.sleep(0.3)
    wanted = [b"commit", b"later commit", b"broken commit"]
    assert Counter(inbox.bodies) == Counter(wanted)
    assert set(asked) == {b"later commit", b"later rollback", b"broken commit"}
    by_id = {message.msg_id: message.body for message in inbox.messages}
    for body, result in zip(bodies, results, strict=True):
        if body.encode() in wanted:
            assert by_id[result.send.msg_id] == body.encode()
    assert isinstance(results[-1].local_error, RuntimeError)


async def test_request_and_reply(target: Target, place: str, group: str) -> None:
    """Asker and answerer are two clients; neither shares a connection with the other."""
    asking, answering = ClientOptions(instance_name="asks"), ClientOptions(instance_name="answers")
    async with (
        Producer(target.namesrv, group=f"p_{group}", client=asking) as asker,
        Producer(target.namesrv, group=f"r_{group}", client=answering) as answerer,
    ):

        async def answer(message: ReceivedMessage) -> None:
            await answerer.reply(message, message.body[::-1], properties={"by": "us"})

        consumer = Consumer(
            target.namesrv, group=f"c_{group}", client=answering, consume_from="first"
        )
        async with running(consumer, place, answer):
            replies = await asyncio.gather(
                *(
                    asker.request(Message(place, b"question %d" % n), timeout_ms=10_000)
                    for n in range(10)
                )
            )
        assert [reply.body for reply in replies] == [(b"question %d" % n)[::-1] for n in range(10)]
        assert {reply.properties["by"] for reply in replies} == {"us"}
        with pytest.raises(RequestTimedOut):
            await asker.request(Message(place, b"nobody is there"), timeout_ms=300)


async def test_inside_a_namespace(target: Target, name: str, group: str) -> None:
    """Retries, dead letters, replies and transactions keep to the names that the user knows."""
    inside = ClientOptions(namespace=f"NS{name}")
    topic = "orders"
    seen: list[tuple[str, bytes, int]] = []
    checked: list[tuple[str, bytes]] = []

    async def handle(message: ReceivedMessage) -> None:
        seen.append((message.topic, message.body, message.reconsume_times))
        if message.body == b"again" and message.reconsume_times == 0:
            raise RetryLater(delay_level=1)
        if message.body == b"dead":
            raise Reject("no")
        if message.body == b"question":
            await producer.reply(message, b"answer")

    def check(message: ReceivedMessage) -> TransactionState:
        checked.append((message.topic, message.body))
        return TransactionState.COMMIT

    async with (
        Admin(target.namesrv, client=inside) as admin,
        TransactionProducer(target.namesrv, group=group, client=inside, check=check) as producer,
    ):
        await admin.topics.create(topic, queues=4)
        await eventually(admin.topics.names, lambda names: topic in names)
        consumer = Consumer(target.namesrv, group=group, client=inside, consume_from="first")
        async with running(consumer, topic, handle):
            for text in ("again", "dead"):
                await producer.send(Message(topic, text))
            reply = await producer.request(Message(topic, "question"), timeout_ms=10_000)
            await producer.send_in_transaction(
                Message(topic, "later"), lambda message: TransactionState.UNKNOWN
            )
            await until(lambda: len(seen) >= 5, f"five deliveries: {seen}")
            assert await admin.groups.members(group)
        dead = await eventually(
            admin.topics.names, lambda names: any(one.startswith("%DLQ%") for one in names)
        )
    assert reply.body == b"answer"
    assert checked == [(topic, b"later")]
    assert Counter(seen) == Counter(
        (topic, text, times)
        for text, times in (
            *((b"again", 0), (b"again", 1)),
            *((b"dead", 0), (b"question", 0), (b"later", 0)),
        )
    )
    assert f"%DLQ%{group}" in dead


async def test_trace(target: Target, place: str, group: str) -> None:
    """Upstream's own tool shows what our producer and consumer have traced."""
    inbox = Inbox()
    consumer = Consumer(target.namesrv, group=f"c_{group}", consume_from="first", trace=True)
    async with (
        running(consumer, place, inbox),
        Producer(target.namesrv, group=group, trace=True) as producer,
    ):
        result = await producer.send(Message(place, b"traced", tags="T1", keys="key1"))
        await inbox.receive(1)

    async def rows() -> dict[str, list[str]]:
        printed = await asyncio.to_thread(
            mqadmin, target.namesrv, "queryMsgTraceById", "-i", result.msg_id
        )
        split = [line.split() for line in printed.splitlines() if "success" in line]
        return {row[0]: row for row in split}

    shown = await eventually(rows, lambda found: set(found) == {"Pub", "Sub"})
    assert set(shown) == {"Pub", "Sub"}
    assert shown["Pub"][1] == group
    assert shown["Sub"][1] == f"c_{group}"
