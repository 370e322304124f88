"""SQL92 subscriptions through a whole broker, over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.broker.receive.consume import COMPARISONS_PER_READ
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, Refused
from cosmodrome.layout import PULL_SUSPEND
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.commands.consume import PullReply
from cosmodrome.wire.message import format_properties
from cosmodrome.wire.record import iter_records

INLINE = 4


class Node:
    def __init__(self, broker: Broker, channel: Channel) -> None:
        self.broker = broker
        self.channel = channel

    async def send(self, topic: str = "T", body: bytes = b"x", **properties: str) -> None:
        await self.channel.call(
            commands.SendMessageV2(
                producer_group="p",
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=1,
                queue_id=0,
                sys_flag=0,
                born_timestamp=1,
                flag=0,
                properties=format_properties(properties),
                body=body,
            )
        )

    async def subscribe(
        self, text: str, version: int = 1, kind: str = "SQL92", topics: tuple[str, ...] = ("T",)
    ) -> None:
        items = [
            bodies.SubscriptionData(
                topic=topic, sub_string=text, sub_version=version, expression_type=kind
            )
            for topic in topics
        ]
        items.append(bodies.SubscriptionData(topic="%RETRY%g", sub_version=version))
        data = bodies.HeartbeatData(
            client_id="c",
            consumer_data_set=[bodies.ConsumerData(group_name="g", subscription_data_set=items)],
        )
        await self.channel.call(commands.HeartBeat(body=bodies.encode(data)))

    async def pull(self, offset: int = 0, **changes: Any) -> PullReply:
        fields: dict[str, Any] = {
            "consumer_group": "g",
            "topic": "T",
            "queue_id": 0,
            "queue_offset": offset,
            "max_msg_nums": 32,
            "sys_flag": 0,
            "commit_offset": 0,
            "suspend_timeout_millis": 0,
            "sub_version": 1,
        }
        return await self.channel.call(commands.PullMessage(**fields | changes), timeout_ms=60_000)

    async def refusal(self, **changes: Any) -> tuple[int, str]:
        with pytest.raises(Refused) as refused:
            await self.pull(**changes)
        return refused.value.code, refused.value.remark


@contextlib.asynccontextmanager
async def running(folder: Path, **changes: Any) -> AsyncIterator[Node]:
    broker = build_broker(
        BrokerOptions(**(dict[str, Any](broker_name="broker-a", listen_port=0) | changes)),
        StoreOptions(
            store_path_root_dir=str(folder),
            mapped_file_size_commit_log=1 << 20,
            mapped_file_size_consume_queue=6000,
            max_hash_slot_num=100,
            max_index_num=400,
        ),
        SocketOptions(),
        real_env(seed=1),
    )
    await broker.start()
    channel = Channel("127.0.0.1", broker.port)
    try:
        yield Node(broker, channel)
    finally:
        await channel.close()
        await broker.stop()


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with running(tmp_path) as node:
        yield node


def got(reply: PullReply) -> list[bytes]:
    return [record.body for record in iter_records(reply.body)]


async def some_letters(node: Node) -> None:
    for n in range(6):
        await node.send(body=b"%d" % n, a=str(n), b="even" if n % 2 == 0 else "odd", TAGS="TagA")
    await node.send(body=b"none")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a between 1 and 3 and b = 'odd'", [b"1", b"3"]),
        ("a > 3 or a is null", [b"4", b"5", b"none"]),
        ("TAGS = 'TagA' and a in ('0', '5')", [b"0", b"5"]),
        ("b contains 'dd' and b not startswith 'x'", [b"1", b"3", b"5"]),
        ("TAGS > 5", []),
    ],
)
@pytest.mark.parametrize("inline", [True, False])
async def test_only_matching_messages_are_delivered(
    node: Node, text: str, wanted: list[bytes], inline: bool
) -> None:
    await some_letters(node)
    if inline:
        reply = await node.pull(sys_flag=INLINE, subscription=text, expression_type="SQL92")
    else:
        await node.subscribe(text)
        reply = await node.pull()
    assert got(reply) == wanted
    assert reply.next_begin_offset == 7
    assert reply.code == (Code.SUCCESS if wanted else Code.PULL_RETRY_IMMEDIATELY)


async def test_a_held_pull_waits_for_a_message_it_wants(node: Node) -> None:
    await some_letters(node)
    await node.subscribe("a = 42")
    held = asyncio.create_task(node.pull(7, sys_flag=PULL_SUSPEND, suspend_timeout_millis=60_000))
    for n in range(5):
        await node.send(a=str(n))
    await asyncio.sleep(0.05)
    assert not held.done()
    await node.send(body=b"yes", a="42")
    reply = await asyncio.wait_for(held, 60)
    assert got(reply) == [b"yes"]
    assert (reply.code, reply.next_begin_offset, reply.max_offset) == (Code.SUCCESS, 13, 13)


async def test_a_long_expression_tests_few_messages_per_pull(node: Node) -> None:
    """The answer says from where to go on, so that no pull takes long."""
    for n in range(60):
        await node.send(a=str(n))
    text = " OR ".join(["a = 59"] * 200)
    offset, seen = 0, 0
    while offset < 60:
        reply = await node.pull(offset, sys_flag=INLINE, subscription=text, expression_type="SQL92")
        assert 0 < reply.next_begin_offset - offset <= COMPARISONS_PER_READ // 200
        offset, seen = reply.next_begin_offset, seen + len(got(reply))
    assert seen == 1


async def test_at_the_deadline_unwanted_messages_are_passed_over(node: Node) -> None:
    await some_letters(node)
    await node.subscribe("a = 42")
    held = asyncio.create_task(node.pull(7, sys_flag=PULL_SUSPEND, suspend_timeout_millis=1500))
    await asyncio.sleep(0.02)
    await node.send(a="1")
    await node.send(a="2")
    reply = await asyncio.wait_for(held, 60)
    assert (reply.code, reply.next_begin_offset) == (Code.PULL_RETRY_IMMEDIATELY, 9)
    assert (reply.remark, got(reply)) == ("NO_MATCHED_MESSAGE", [])


async def test_a_filter_that_changes_while_a_pull_waits_is_applied_from_its_start(
    node: Node,
) -> None:
    await some_letters(node)
    await node.subscribe("a = 42")
    held = asyncio.create_task(node.pull(7, sys_flag=PULL_SUSPEND, suspend_timeout_millis=2000))
    await asyncio.sleep(0.02)
    await node.send(body=b"one", a="1")
    await node.subscribe("a = 1", version=2)
    reply = await asyncio.wait_for(held, 60)
    assert got(reply) == [b"one"]


async def test_a_tag_filter_and_no_filter_still_work(node: Node) -> None:
    await some_letters(node)
    assert len(got(await node.pull(sys_flag=INLINE, subscription="TagA"))) == 6
    await node.subscribe("*", kind="TAG")
    assert len(got(await node.pull())) == 7


# --- refusals -----------------------------------------------------------------------------------


async def test_a_bad_expression_is_explained_to_who_pulls(node: Node) -> None:
    await some_letters(node)
    await node.subscribe("a > AND b")
    code, remark = await node.refusal()
    assert code == Code.SUBSCRIPTION_PARSE_FAILED
    assert "character 5: expected a property" in remark
    assert "a > AND b\n    ^" in remark
    code, remark = await node.refusal(sys_flag=INLINE, subscription="a >", expression_type="SQL92")
    assert (code, "character 4" in remark) == (Code.SUBSCRIPTION_PARSE_FAILED, True)
    code, remark = await node.refusal(sys_flag=INLINE, subscription="a", expression_type="JS")
    assert (code, "'JS' is unknown" in remark) == (Code.SUBSCRIPTION_PARSE_FAILED, True)
    await node.subscribe("a > 4", version=2)
    assert got(await node.pull(sub_version=2)) == [b"5"]


async def test_a_filter_that_did_not_arrive_yet(node: Node) -> None:
    await some_letters(node)
    assert (await node.refusal())[0] == Code.SUBSCRIPTION_NOT_EXIST
    await node.subscribe("a > 4", version=3)
    assert (await node.refusal(sub_version=4))[0] == Code.SUBSCRIPTION_NOT_LATEST
    # An empty expression is never registered.
    await node.subscribe(" ", version=5)
    assert (await node.refusal(sub_version=5))[0] == Code.FILTER_DATA_NOT_LATEST
    await node.send("U", a="1")
    await node.subscribe(" ", topics=("U",))
    assert (await node.refusal(topic="U"))[0] == Code.FILTER_DATA_NOT_EXIST


async def check(node: Node, text: str, kind: str = "SQL92") -> None:
    item = bodies.SubscriptionData(topic="T", sub_string=text, expression_type=kind)
    body = {"clientId": "c", "group": "g", "subscriptionData": json.loads(bodies.encode(item))}
    await node.channel.call(commands.CheckClientConfig(body=json.dumps(body).encode()))


async def test_a_client_asks_before_it_starts(node: Node) -> None:
    await check(node, "a > 1")
    with pytest.raises(Refused) as refused:
        await check(node, "a ! 1")
    assert refused.value.code == Code.SUBSCRIPTION_PARSE_FAILED
    assert refused.value.remark.endswith("a ! 1\n  ^")


async def test_where_filters_are_off(tmp_path: Path) -> None:
    async with running(tmp_path, enable_property_filter=False) as node:
        await some_letters(node)
        await check(node, "*", kind="TAG")
        with pytest.raises(Refused, match="enablePropertyFilter=true") as refused:
            await check(node, "a > 1")
        assert refused.value.code == Code.SYSTEM_ERROR
        await node.subscribe("a > 4")
        assert (await node.refusal())[0] == Code.SYSTEM_ERROR
        inline: dict[str, Any] = {"sys_flag": INLINE, "expression_type": "SQL92"}
        assert (await node.refusal(subscription="a > 4", **inline))[0] == Code.SYSTEM_ERROR
        # A bad expression is the first thing to say.
        code, _ = await node.refusal(subscription="a >", **inline)
        assert code == Code.SUBSCRIPTION_PARSE_FAILED


# --- retried messages, and what is kept ---------------------------------------------------------


@pytest.mark.parametrize(("again", "wanted"), [(False, [b"1", b"2", b"3"]), (True, [b"1", b"3"])])
@pytest.mark.parametrize("kind", ["TAG", "SQL92"])
async def test_retried_messages(
    tmp_path: Path, again: bool, wanted: list[bytes], kind: str
) -> None:
    async with running(tmp_path, filter_support_retry=again) as node:
        await node.subscribe("a = 1")  # makes the retry topic too
        for body, topic, value in ((b"1", "T", "1"), (b"2", "T", "2"), (b"3", "Other", "2")):
            await node.send("%RETRY%g", body, a=value, RETRY_TOPIC=topic)
        text = "*" if kind == "TAG" else "a = 99"
        reply = await node.pull(
            topic="%RETRY%g", sys_flag=INLINE, subscription=text, expression_type=kind
        )
        assert got(reply) == wanted


async def test_expressions_survive_a_restart_and_die_with_their_group(tmp_path: Path) -> None:
    path = tmp_path / "config" / "consumerFilter.json"
    async with running(tmp_path) as node:
        await some_letters(node)
        await node.subscribe("a > 4", version=7)
    row = json.loads(path.read_text())["filterDataByTopic"]["T"]["groupFilterData"]["g"]
    assert (row["expression"], row["clientVersion"], row["dead"]) == ("a > 4", 7, True)
    assert row["deadTime"] >= row["bornTime"] > 0
    async with running(tmp_path) as node:
        assert (await node.refusal(sub_version=7))[0] == Code.SUBSCRIPTION_NOT_EXIST
        await node.subscribe("a > 4", version=7)
        assert got(await node.pull(sub_version=7)) == [b"5"]
    after = json.loads(path.read_text())["filterDataByTopic"]["T"]["groupFilterData"]["g"]
    assert after["bornTime"] == row["bornTime"]
