"""Our producer against our node and upstream's: every way to send, read back by our consumer."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import defaultdict
from typing import Any

import pytest
from tests.oracle.client_kit import Inbox, Target, check_same, messages, running

from cosmodrome import (
    ClientOptions,
    Consumer,
    Message,
    Producer,
    PullConsumer,
    SendFailed,
    SendStatus,
)
from cosmodrome.errors import CosmodromeError


async def read_all(target: Target, topic: str, count: int, **options: Any) -> Inbox:
    """What a new group gets of a topic that has so many messages."""
    inbox = Inbox()
    consumer = Consumer(target.namesrv, group=f"read_{topic}", consume_from="first", **options)
    async with running(consumer, topic, inbox):
        await inbox.receive(count)
    return inbox


async def test_send(target: Target, place: str, group: str) -> None:
    sent = messages(place, 40)
    async with Producer(target.namesrv, group=group) as producer:
        results = [await producer.send(message) for message in sent]
    assert {result.status for result in results} == {SendStatus.OK}
    assert sorted({result.queue.queue_id for result in results}) == [0, 1, 2, 3]
    inbox = await read_all(target, place, len(sent))
    check_same(sent, inbox.messages)
    by_id = {message.msg_id: message for message in inbox.messages}
    for message, result in zip(sent, results, strict=True):
        got = by_id[result.msg_id]
        assert got.body == message.body
        assert (got.queue, got.queue_offset) == (result.queue, result.queue_offset)
        assert got.offset_msg_id == result.offset_msg_id
        assert got.store_host == target.cluster.broker


async def test_submit(target: Target, place: str, group: str) -> None:
    sent = messages(place, 500)
    async with Producer(target.namesrv, group=group, in_flight_max=100) as producer:
        futures = []
        for message in sent:
            await producer.ready()
            futures.append(producer.submit(message))
        results = await asyncio.gather(*futures)
    assert len({result.msg_id for result in results}) == len(sent)
    inbox = await read_all(target, place, len(sent))
    check_same(sent, inbox.messages)
    places = {(m.queue.queue_id, m.queue_offset): m.msg_id for m in inbox.messages}
    assert places == {(r.queue.queue_id, r.queue_offset): r.msg_id for r in results}


async def test_oneway(target: Target, place: str, group: str) -> None:
    sent = messages(place, 60)
    async with Producer(target.namesrv, group=group) as producer:
        for message in sent:
            await producer.send_oneway(message)
    check_same(sent, (await read_all(target, place, len(sent))).messages)


async def test_batch(target: Target, place: str, group: str) -> None:
    sent = messages(place, 90)
    async with Producer(target.namesrv, group=group, max_message_bytes=4_000) as producer:
        results = await producer.send_batch(sent)
    inbox = await read_all(target, place, len(sent))
    check_same(sent, inbox.messages)
    by_id = {message.msg_id: message for message in inbox.messages}
    for message, result in zip(sent, results, strict=True):
        got = by_id[result.msg_id]
        assert got.body == message.body
        assert (got.queue, got.queue_offset) == (result.queue, result.queue_offset)
        assert got.offset_msg_id == result.offset_msg_id


async def test_batches_that_make_themselves(target: Target, place: str, group: str) -> None:
    sent = messages(place, 200)
    async with Producer(target.namesrv, group=group, linger_ms=5) as producer:
        results = await asyncio.gather(*(producer.send(message) for message in sent))
    inbox = await read_all(target, place, len(sent))
    check_same(sent, inbox.messages)
    by_id = {message.msg_id: message for message in inbox.messages}
    for message, result in zip(sent, results, strict=True):
        assert by_id[result.msg_id].body == message.body
        assert by_id[result.msg_id].queue_offset == result.queue_offset
    # They did travel together: the records of a batch were stored at one moment.
    assert len({(m.queue_id, m.store_ms) for m in inbox.messages}) < len(sent) / 2


@pytest.mark.parametrize("compression", ["zlib", "lz4", "zstd"])
async def test_compression(target: Target, place: str, group: str, compression: Any) -> None:
    body = "großer Text 🚀 ".encode() * 4_000
    async with Producer(target.namesrv, group=group, compression=compression) as producer:
        await producer.send(Message(place, body, tags="large"))
        await producer.send(Message(place, b"small"))
    inbox = await read_all(target, place, 2)
    assert sorted(inbox.bodies) == sorted([body, b"small"])
    stored = {len(message.body): len(message.record.body) for message in inbox.messages}
    assert stored[len(body)] < len(body) / 10
    assert stored[5] == 5


async def test_order(target: Target, place: str, group: str) -> None:
    """Messages of one key stay in order, whichever queue they share with others."""
    keys = [f"order-{number}" for number in range(10)]
    steps = ("created", "paid", "packed", "shipped")
    seen: dict[str, list[str]] = defaultdict(list)
    queues: dict[str, set[int]] = defaultdict(set)
    running_now = set()

    async def handle(message: Any) -> None:
        key, step = message.body.decode().split()
        assert message.queue_id not in running_now, "two calls for one queue"
        running_now.add(message.queue_id)
        await asyncio.sleep(0.002)
        running_now.discard(message.queue_id)
        seen[key].append(step)
        queues[key].add(message.queue_id)

    consumer = Consumer(target.namesrv, group=f"c_{group}", consume_from="first", orderly=True)
    async with (
        running(consumer, place, handle),
        Producer(target.namesrv, group=group) as producer,
    ):
        for step in steps:
            for key in keys:
                await producer.send(Message(place, f"{key} {step}", queue_key=key))
        async with asyncio.timeout(30):
            while sum(map(len, seen.values())) < len(keys) * len(steps):
                await asyncio.sleep(0.02)
    assert dict(seen) == {key: list(steps) for key in keys}
    assert all(len(of_key) == 1 for of_key in queues.values())
    assert len(set.union(*queues.values())) > 1


async def test_queue_and_selector(target: Target, place: str, group: str) -> None:
    async with (
        Producer(target.namesrv, group=group) as producer,
        PullConsumer(target.namesrv, group=f"c_{group}") as consumer,
    ):
        queues = await consumer.queues(place)
        fixed = await producer.send(Message(place, b"fixed"), queue=queues[2])
        chosen = await producer.send(
            Message(place, b"chosen"), selector=lambda them, message: them[-1]
        )
    assert fixed.queue == queues[2]
    assert chosen.queue.queue_id == 3


async def test_delay_levels_and_timers(target: Target, place: str, group: str) -> None:
    inbox = Inbox()
    consumer = Consumer(target.namesrv, group=f"c_{group}", consume_from="first")
    async with (
        running(consumer, place, inbox),
        Producer(target.namesrv, group=group) as producer,
    ):
        began_ms = time.time() * 1000
        wanted = {b"level 1": 1_000.0}
        await producer.send(Message(place, b"level 1", delay_level=1, keys="k", tags="t"))
        if target.has_timers:
            wanted |= {b"in 1500": 1_500.0, b"at 2000": 2_000.0}
            await producer.send(Message(place, b"in 1500", delay_ms=1_500))
            await producer.send(Message(place, b"at 2000", deliver_at_ms=int(began_ms) + 2_000))
            recalled = await producer.send(Message(place, b"never", delay_ms=2_200))
            assert recalled.recall_handle
            await producer.recall(place, recalled.recall_handle)
        await inbox.receive(len(wanted))
        if target.has_timers:
            await asyncio.sleep(1.5)
    assert set(inbox.bodies) == set(wanted)
    for message, at_ms in zip(inbox.messages, inbox.at_ms, strict=True):
        # Upstream's timers count in whole seconds and may be up to one early.
        assert at_ms - began_ms >= wanted[message.body] - 1_000 * (b"level" not in message.body)
        assert message.topic == place
    first = next(message for message in inbox.messages if message.body == b"level 1")
    assert (first.keys, first.tags) == (("k",), "t")


async def test_vip_channel(target: Target, place: str, group: str) -> None:
    client = ClientOptions(vip_channel=True)
    sent = messages(place, 4)
    async with Producer(target.namesrv, group=group, client=client) as producer:
        for message in sent:
            await producer.send(message)
    check_same(sent, (await read_all(target, place, 4, client=client)).messages)


async def test_tls(target: Target, place: str, group: str) -> None:
    """Upstream's servers sign a certificate for themselves unless they are given one."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    client = ClientOptions(tls=context)
    sent = messages(place, 8)
    async with Producer(target.namesrv, group=group, client=client) as producer:
        for message in sent:
            await producer.send(message)
    check_same(sent, (await read_all(target, place, 8, client=client)).messages)
    # Nobody has signed for it, which a client that checks says.
    strict = ClientOptions(tls=ssl.create_default_context())
    with pytest.raises(CosmodromeError, match=r"TLS|certificate"):
        async with Producer(target.namesrv, group=f"s_{group}", client=strict) as producer:
            await producer.send(sent[0])


async def test_namespace(target: Target, place: str, group: str) -> None:
    client = ClientOptions(namespace="NS1")
    sent = messages("inside", 6)
    async with Producer(target.namesrv, group=group, client=client) as producer:
        results = [await producer.send(message) for message in sent]
    assert {result.queue.topic for result in results} == {"inside"}
    inbox = await read_all(target, "inside", 6, client=client)
    check_same(sent, inbox.messages)
    assert {message.record.topic for message in inbox.messages} == {"NS1%inside"}


async def test_a_refusal_is_told(target: Target, place: str, group: str) -> None:
    async with Producer(
        target.namesrv, group=group, max_message_bytes=8 << 20, compress_above_bytes=16 << 20
    ) as producer:
        with pytest.raises(SendFailed) as failed:
            await producer.send(Message(place, bytes(5 << 20)))
    assert failed.value.code == 13
    assert failed.value.tried[0].broker_name == target.cluster.broker_name
