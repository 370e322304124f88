"""Request and reply between two clients, through a real broker."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.client.conftest import Node
from tests.unit.client.producer_kit import stored

from cosmodrome.client.options import ClientOptions
from cosmodrome.client.send.failures import BadMessage, RequestTimedOut
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message, ReceivedMessage
from cosmodrome.wire.record import Record


async def arrived(node: Node, topic: str, count: int) -> Record:
    """The last of so many messages on a topic."""
    async with asyncio.timeout(60):
        while True:
            if len(records := await stored(node.broker, topic)) >= count:
                return max(records, key=lambda record: record.log_offset)
            await asyncio.sleep(0.01)


async def test_a_request_gets_the_reply_that_belongs_to_it(node: Node) -> None:
    asking = Producer(node.namesrv, group="asking")
    replying = Producer(
        node.namesrv, group="replying", client=ClientOptions(instance_name="replier")
    )
    async with asking, replying:
        await asking.send(Message("asked", b"create the topic"))
        first = asyncio.ensure_future(asking.request(Message("asked", b"one"), timeout_ms=60_000))
        one = ReceivedMessage(await arrived(node, "asked", 2), "broker-a")
        second = asyncio.ensure_future(asking.request(Message("asked", b"two"), timeout_ms=60_000))
        two = ReceivedMessage(await arrived(node, "asked", 3), "broker-a")
        assert one.properties["TTL"] == "60000"
        await replying.reply(two, b"second " * 1000, properties={"colour": "blue"})
        await replying.reply(one, "first")
        assert (await first).body == b"first"
        reply = await second
        assert reply.body == b"second " * 1000
        assert reply.properties["colour"] == "blue"
        assert reply.properties["MSG_TYPE"] == "reply"
        assert {"ARRIVE_TIME", "PUSH_REPLY_TIME"} <= set(reply.properties)
        assert reply.topic == "DefaultCluster_REPLY_TOPIC"
        assert reply.born_host.startswith("127.0.0.1:")


async def test_a_request_and_its_reply_in_a_namespace(node: Node) -> None:
    asking = Producer(node.namesrv, group="asking", client=ClientOptions(namespace="NS"))
    replying = Producer(
        node.namesrv,
        group="replying",
        client=ClientOptions(namespace="NS", instance_name="replier"),
    )
    async with asking, replying:
        await asking.send(Message("asked", b"create the topic"))
        first = asyncio.ensure_future(asking.request(Message("asked", b"one"), timeout_ms=60_000))
        one = ReceivedMessage(await arrived(node, "NS%asked", 2), "broker-a")
        await replying.reply(one, "first")
        reply = await first
    assert (reply.body, reply.topic) == (b"first", "DefaultCluster_REPLY_TOPIC")


async def test_a_request_that_nobody_answers_times_out(node: Node) -> None:
    async with Producer(node.namesrv, group="asking") as asking:
        with pytest.raises(RequestTimedOut, match="nobody replied to the request"):
            await asking.request(Message("unheard", b"?"), timeout_ms=2_000)
        instance = asking._live()
        assert not instance.replies


async def test_only_requests_can_be_answered(node: Node) -> None:
    async with Producer(node.namesrv, group="p") as sender:
        await sender.send(Message("plain", b"x"))
        (record,) = await stored(node.broker, "plain")
        with pytest.raises(BadMessage, match="expects no reply: it has no property CORR"):
            await sender.reply(ReceivedMessage(record, "broker-a"), b"?")


async def test_a_broker_that_restarted_is_told_about_us_before_a_request(node: Node) -> None:
    asking = Producer(node.namesrv, group="asking")
    replying = Producer(
        node.namesrv, group="replying", client=ClientOptions(instance_name="replier")
    )
    async with asking, replying:
        await asking.send(Message("again", b"create the topic"))
        await node.stop_broker()
        await node.start_broker()
        request = asyncio.ensure_future(asking.request(Message("again", b"?"), timeout_ms=60_000))
        received = ReceivedMessage(await arrived(node, "again", 2), "broker-a")
        await replying.reply(received, b"!")
        assert (await request).body == b"!"
