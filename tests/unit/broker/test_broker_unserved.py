"""Which requests of RocketMQ 4.9 nobody serves, and that each of them is told why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

import cosmodrome
from cosmodrome.errors import Code, Refused
from cosmodrome.node import Node
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, table
from cosmodrome.wire.bodies import SubscriptionGroupConfig, TopicConfig
from cosmodrome.wire.commands import (
    GetSubscriptiongroupConfig,
    GetTopicConfig,
    LitePullMessage,
    UpdateAndCreateSubscriptiongroup,
    UpdateAndCreateTopic,
)
from cosmodrome.wire.table import Command

# Upstream keeps the numbers and serves none of them.
DROPPED = (13, 22, 23, 27, 209, 210, 211, 212, 213, 214)
LEAKS_SECRETS = (54,)
LAST_CODE_OF_4_9 = 329


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with cosmodrome.embedded() as node:
        yield node


@pytest.fixture
async def broker(node: Node) -> AsyncIterator[Channel]:
    host, _, port = node.broker_address.rpartition(":")
    channel = Channel(host, int(port))
    yield channel
    await channel.close()


def test_the_codes_that_are_not_served() -> None:
    rows = table.rows()
    left = [code for code in rows if code <= LAST_CODE_OF_4_9 and rows[code].planned]
    assert sorted(left) == sorted(DROPPED + LEAKS_SECRETS)


@pytest.mark.parametrize("code", DROPPED + LEAKS_SECRETS)
async def test_a_code_that_is_not_served_says_why(code: int, broker: Channel) -> None:
    row = table.rows()[code]
    fields = {
        field.encode_name: "true" if "bool" in str(field.type) else "7"
        for field in table.header_fields(row)
    }
    ask: Command[Any] = table.decode(row, fields, b"")
    with pytest.raises(Refused) as refused:
        await broker.call(ask)
    assert refused.value.code == Code.REQUEST_CODE_NOT_SUPPORTED == 3
    assert row.name in refused.value.remark and row.planned in refused.value.remark
    assert ("dropped upstream" in row.planned) == (code in DROPPED)


# --- for tools of 5.x ------------------------------------------------------------------------


async def test_the_settings_of_one_topic(broker: Channel) -> None:
    made = UpdateAndCreateTopic(
        topic="T1",
        default_topic="TBW102",
        read_queue_nums=3,
        write_queue_nums=2,
        perm=6,
        topic_filter_type="SINGLE_TAG",
        topic_sys_flag=0,
        order=False,
    )
    await broker.call(made)
    config = bodies.decode(TopicConfig, (await broker.call(GetTopicConfig(topic="T1"))).body)
    assert (config.topic_name, config.read_queue_nums, config.write_queue_nums) == ("T1", 3, 2)
    assert GetTopicConfig.request_code == 351
    with pytest.raises(Refused) as refused:
        await broker.call(GetTopicConfig(topic="Missing"))
    assert refused.value.code == Code.TOPIC_NOT_EXIST


async def test_the_settings_of_one_group(broker: Channel) -> None:
    made = SubscriptionGroupConfig(group_name="G1", retry_max_times=5)
    await broker.call(UpdateAndCreateSubscriptiongroup(body=bodies.encode(made)))
    assert GetSubscriptiongroupConfig.request_code == 352
    reply = await broker.call(GetSubscriptiongroupConfig(group="G1"))
    assert bodies.decode(SubscriptionGroupConfig, reply.body) == made


async def test_a_lite_pull(node: Node, broker: Channel) -> None:
    async with cosmodrome.Producer(node.namesrv, group="P") as producer:
        sent = await producer.send(cosmodrome.Message("T1", b"hello"))
    pull = LitePullMessage(
        consumer_group="G1",
        topic="T1",
        queue_id=sent.queue.queue_id,
        queue_offset=0,
        max_msg_nums=32,
        sys_flag=4 | 16,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription="*",
        sub_version=0,
    )
    assert LitePullMessage.request_code == 361
    reply = await broker.call(pull)
    assert (reply.code, reply.next_begin_offset) == (Code.SUCCESS, 1)
    assert b"hello" in reply.body
