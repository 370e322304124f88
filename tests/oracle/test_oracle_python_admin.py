"""Our administrative calls and pulling consumers, against all kinds of clusters."""

from __future__ import annotations

import asyncio

import pytest
from tests.oracle.client_kit import JAVA_53, Target

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.offsets import NotMoved
from cosmodrome.client.receive.engine.pulling import PullStatus
from cosmodrome.client.receive.pull_consumer import PullConsumer
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message, MessageQueue, ReceivedMessage


async def gather(consumer: PullConsumer, count: int) -> list[ReceivedMessage]:
    found: list[ReceivedMessage] = []
    async with asyncio.timeout(60):
        while len(found) < count:
            found += await consumer.poll(1000)
    return found


async def test_topics_and_groups(target: Target, name: str) -> None:
    topic, group = f"T_{name}", f"g_{name}"
    async with Admin(target.namesrv) as admin:
        await admin.topics.create(topic, queues=3)
        (broker,) = await admin.brokers.addresses()
        async with asyncio.timeout(60):
            while topic not in await admin.topics.names():
                await asyncio.sleep(0.1)
        config = (await admin.topics.describe(topic))[broker]
        assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (3, 3, 6)
        await admin.topics.update(topic, write_queues=5)
        config = (await admin.topics.describe(topic))[broker]
        assert (config.read_queue_nums, config.write_queue_nums) == (3, 5)
        assert len(await admin.topics.status(topic)) >= 3
        await admin.groups.create(group, retry_max_times=2)
        assert (await admin.groups.describe(group))[broker].retry_max_times == 2
        assert group in await admin.groups.names()
        await admin.groups.delete(group)
        assert await admin.groups.describe(group) == {}
        await admin.topics.delete(topic)
        assert topic not in await admin.topics.names()


async def test_brokers_and_name_servers(target: Target, name: str) -> None:
    async with Admin(target.namesrv) as admin:
        ((broker, address),) = (await admin.brokers.addresses()).items()
        assert (await admin.brokers.config(broker))["brokerName"] == broker
        assert "bootTimestamp" in await admin.brokers.runtime(address)
        assert broker in (await admin.brokers.cluster()).broker_addr_table
        await admin.name_servers.put("n", name, "value")
        assert await admin.name_servers.get("n", name) == "value"
        assert (await admin.name_servers.entries("n"))[name] == "value"
        await admin.name_servers.delete("n", name)
        assert await admin.name_servers.get("n", name) is None
        (settings,) = (await admin.name_servers.config()).values()
        assert settings["listenPort"] == str(target.cluster.namesrv_port)


async def test_a_group_that_pulls_is_seen_and_moved(target: Target, place: str, group: str) -> None:
    namesrv = target.namesrv
    async with Producer(namesrv, group="p") as producer:
        sent = [
            await producer.send(Message(place, f"m{number}", keys=f"k{number}", tags="A"))
            for number in range(8)
        ]
    async with (
        Admin(namesrv) as admin,
        PullConsumer(namesrv, group=group, consume_from="first", suspend_ms=1000) as consumer,
    ):
        await consumer.subscribe(place)
        async with asyncio.timeout(60):
            while len(consumer.assignment) != 4:
                await asyncio.sleep(0.05)
        found = await gather(consumer, 8)
        assert {message.msg_id for message in found} == {result.msg_id for result in sent}
        await consumer.commit()
        progress = await admin.offsets.progress(group, place)
        assert len(progress.queues) == 4
        assert progress.lag == 0

        (member,) = await admin.groups.members(group)
        info = await admin.groups.running_info(group, member)
        assert len(info.mq_table) == 4
        seen = (await admin.offsets.of_members(group, place))[member]
        assert sum(seen.values()) == 8

        moved = await admin.offsets.reset(group, place, "begin")
        assert set(moved.values()) == {0}
        again = await gather(consumer, 8)
        assert {message.body for message in again} == {message.body for message in found}

        message = found[0]
        assert (await admin.messages.by_id(message.offset_msg_id)).body == message.body
        assert (await admin.messages.by_id(message.msg_id, place)).body == message.body
        at = await admin.messages.by_offset(message.queue, message.queue_offset)
        assert at is not None and at.msg_id == message.msg_id
        (key,) = message.keys
        (by_key,) = await admin.messages.by_key(place, key)
        assert by_key.msg_id == message.msg_id


async def test_offsets_of_a_group_without_members(target: Target, place: str, group: str) -> None:
    namesrv = target.namesrv
    async with Producer(namesrv, group="p") as producer:
        queue = (await producer.send(Message(place, b"a"))).queue
        await producer.send(Message(place, b"b"), queue=queue)
    async with PullConsumer(namesrv, group=group, consume_from="first") as consumer:
        await consumer.assign([queue])
        assert [message.body for message in await gather(consumer, 2)] == [b"a", b"b"]
    async with Admin(namesrv) as admin:
        assert await admin.offsets.bounds(queue) == (0, 2)
        assert (await admin.offsets.progress(group, place)).queues[queue].consumer_offset == 2
        assert (await admin.offsets.reset(group, place, "begin"))[queue] == 0
        assert await admin.offsets.lag(group, place) == 2
        assert (await admin.offsets.skip(group, place))[queue] == 2
        if target.kind == JAVA_53:
            with pytest.raises(NotMoved, match="is at 2"):
                await admin.offsets.set(group, queue, 1)
        else:
            await admin.offsets.set(group, queue, 1)
        kept = (await admin.offsets.progress(group, place)).queues[queue].consumer_offset
        await admin.offsets.clone(group, f"{group}_2", place)
        other = await admin.offsets.progress(f"{group}_2", place)
        assert other.queues[queue].consumer_offset == kept


async def test_pulls_say_what_they_found(target: Target, place: str, group: str) -> None:
    namesrv = target.namesrv
    async with Producer(namesrv, group="p") as producer:
        queue = (await producer.send(Message(place, b"a", tags="A"))).queue
    async with PullConsumer(namesrv, group=group) as consumer:
        found = await consumer.pull(queue, 0, tags="A || B")
        assert (found.status, [m.body for m in found.messages]) == (PullStatus.FOUND, [b"a"])
        assert (await consumer.pull(queue, 1)).status is PullStatus.NO_NEW
        assert (await consumer.pull(queue, 0, tags="Z")).status is PullStatus.NO_MATCH
        assert (await consumer.pull(queue, 77)).status is PullStatus.OFFSET_MOVED
        empty = MessageQueue(
            topic=place, broker_name=queue.broker_name, queue_id=(queue.queue_id + 1) % 4
        )
        assert (await consumer.pull(empty, 0)).messages == []
        assert await consumer.end_offset(queue) == 1
        assert await consumer.offset_for_time(queue, 0) == 0
