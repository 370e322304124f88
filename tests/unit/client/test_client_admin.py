"""Administrative calls against real brokers and a name server in this process."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import Fleet, PartlyFailed
from cosmodrome.client.operate.offsets import NotMoved
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.errors import ConfigError, Refused
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.message import format_properties

QUEUE = MessageQueue(topic="T", broker_name="broker-a", queue_id=0)


@pytest.fixture
async def admin(node: Any) -> AsyncIterator[Admin]:
    async with Admin(node.namesrv) as admin:
        yield admin


async def put(node: Any, topic: str = "T", *, count: int = 1, **properties: str) -> list[str]:
    """Send to queue 0; their offset ids."""
    channel = Channel("127.0.0.1", node.broker.port)
    ids = []
    for number in range(count):
        reply = await channel.call(
            commands.SendMessageV2(
                producer_group="p",
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=0,
                sys_flag=0,
                born_timestamp=1,
                flag=0,
                properties=format_properties(properties),
                body=b"m%d" % number,
            )
        )
        ids.append(reply.msg_id)
    await channel.close()
    return ids


async def commit(node: Any, group: str, offset: int, topic: str = "T") -> None:
    channel = Channel("127.0.0.1", node.broker.port)
    for queue_id in range(4):
        await channel.call(
            commands.UpdateConsumerOffset(
                consumer_group=group,
                topic=topic,
                queue_id=queue_id,
                commit_offset=offset if queue_id == 0 else 0,
            )
        )
    await channel.close()


# --- topics ----------------------------------------------------------------------------------


async def test_topics_are_made_changed_listed_and_deleted(admin: Admin) -> None:
    await admin.topics.create("orders", queues=3, perm=6)
    assert "orders" in await admin.topics.names()
    assert "orders" in await admin.topics.names(cluster="DefaultCluster")
    config = (await admin.topics.describe("orders"))["broker-a"]
    assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (3, 3, 6)

    await admin.topics.update("orders", write_queues=5, perm=4)
    config = (await admin.topics.describe("orders"))["broker-a"]
    assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (3, 5, 4)
    row = (await admin.topics.route("orders")).queue_datas[0]
    assert (row.write_queue_nums, row.perm) == (5, 4)

    await admin.topics.delete("orders")
    assert "orders" not in await admin.topics.names()
    with pytest.raises(NoRoute, match="orders"):
        await admin.topics.route("orders")


async def test_an_ordered_topic_is_known_to_the_name_servers(admin: Admin) -> None:
    await admin.topics.create("steps", queues=2, order=True)
    assert await admin.name_servers.get("ORDER_TOPIC_CONFIG", "steps") == "broker-a:2"
    await admin.topics.set_order("steps", None)
    assert await admin.name_servers.get("ORDER_TOPIC_CONFIG", "steps") is None


async def test_status_of_a_topic(node: Any, admin: Admin) -> None:
    await put(node, count=3)
    status = await admin.topics.status("T")
    assert len(status) == 4
    assert (status[QUEUE].min_offset, status[QUEUE].max_offset) == (0, 3)
    await commit(node, "g", 1)
    assert await admin.topics.consumers("T") == ["g"]


async def test_wrong_names_are_refused_before_anything_is_sent(admin: Admin) -> None:
    with pytest.raises(Refused, match="not allowed"):
        await admin.topics.create("a b")
    with pytest.raises(ConfigError, match=r"no cluster 'x'.*DefaultCluster"):
        await admin.topics.create("t", cluster="x")
    with pytest.raises(ConfigError, match=r"no broker 'x'.*broker-a"):
        await admin.brokers.runtime("x")


async def test_a_broker_that_fails_is_named(bare_node: Any) -> None:
    await bare_node.start_broker("broker-a")
    await bare_node.start_broker("broker-b", broker_permission=6)
    async with Admin(bare_node.namesrv, timeout_ms=20_000) as admin:
        await admin.brokers.addresses()
        dead = (await admin.brokers.addresses())["broker-b"]
        fleet = admin.topics._fleet
        targets = {"broker-a": (await admin.brokers.addresses())["broker-a"], "broker-b": dead}
        await bare_node.stop_broker("broker-b")
        with pytest.raises(PartlyFailed, match=r"GET_BROKER_RUNTIME_INFO.*broker-b") as failed:
            await fleet.each(targets, commands.GetBrokerRuntimeInfo())
        assert list(failed.value.failures) == ["broker-b"]
        assert list(failed.value.results) == ["broker-a"]


# --- groups ----------------------------------------------------------------------------------


async def test_groups_are_made_listed_and_deleted(admin: Admin) -> None:
    await admin.groups.create("billing", retry_max_times=3, consume_enable=False)
    assert "billing" in await admin.groups.names()
    config = (await admin.groups.describe("billing"))["broker-a"]
    assert (config.retry_max_times, config.consume_enable) == (3, False)
    await admin.groups.delete("billing")
    assert await admin.groups.describe("billing") == {}


async def test_connected_members_are_listed(node: Any, admin: Admin) -> None:
    await put(node)
    channel = Channel("127.0.0.1", node.broker.port)
    data = bodies.HeartbeatData(
        client_id="me",
        consumer_data_set=[
            bodies.ConsumerData(
                group_name="g",
                subscription_data_set=[bodies.SubscriptionData(topic="T", sub_version=1)],
            )
        ],
        producer_data_set=[bodies.ProducerData(group_name="p")],
    )
    await channel.call(commands.HeartBeat(body=bodies.encode(data)))
    assert await admin.groups.members("g") == ["me"]
    assert "T" in (await admin.groups.connections("g"))["broker-a"].subscription_table
    producers = await admin.groups.producer_connections("p", "T")
    assert producers["broker-a"].connection_set[0].client_id == "me"
    assert [row.client_id for row in (await admin.groups.producers())["p"]] == ["me"]
    with pytest.raises(Refused):
        await admin.groups.members("nobody")
    with pytest.raises(Refused):
        await admin.groups.running_info("g", "not-there")
    await channel.close()


# --- offsets ---------------------------------------------------------------------------------


async def test_progress_lag_and_offsets_by_number(node: Any, admin: Admin) -> None:
    await put(node, count=5)
    await commit(node, "g", 2)
    progress = await admin.offsets.progress("g", "T")
    assert (progress.queues[QUEUE].consumer_offset, progress.queues[QUEUE].broker_offset) == (2, 5)
    assert progress.lag == await admin.offsets.lag("g") == 3
    await admin.offsets.set("g", QUEUE, 4)
    assert await admin.offsets.lag("g", "T") == 1
    assert await admin.offsets.bounds(QUEUE) == (0, 5)
    with pytest.raises(ConfigError, match="negative"):
        await admin.offsets.set("g", QUEUE, -1)


async def test_an_offset_that_the_broker_does_not_keep_is_reported(
    node: Any, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(node, count=5)
    call = Fleet.call

    async def forgetful(self: Fleet, address: str, command: Any, timeout_ms: Any = None) -> Any:
        if isinstance(command, commands.UpdateConsumerOffset):
            command.commit_offset = 1  # somebody else was faster
        return await call(self, address, command, timeout_ms)

    monkeypatch.setattr(Fleet, "call", forgetful)
    with pytest.raises(NotMoved, match=r"is at 1 .* not at 4"):
        await admin.offsets.set("g", QUEUE, 4)


async def test_a_group_without_members_is_reset_by_writing(node: Any, admin: Admin) -> None:
    await put(node, count=4)
    await commit(node, "g", 2)
    assert (await admin.offsets.skip("g", "T"))[QUEUE] == 4
    assert await admin.offsets.lag("g", "T") == 0
    assert (await admin.offsets.reset("g", "T", "begin"))[QUEUE] == 0
    assert await admin.offsets.lag("g", "T") == 4
    later = datetime.datetime.now() + datetime.timedelta(hours=1)
    assert (await admin.offsets.reset("g", "T", later, force=False))[QUEUE] == 0
    assert (await admin.offsets.reset("g", "T", later))[QUEUE] == 4
    with pytest.raises(ConfigError, match="not a moment"):
        await admin.offsets.reset("g", "T", "tomorrow")  # type: ignore[arg-type]


async def test_progress_is_cloned(node: Any, admin: Admin) -> None:
    await put(node, count=4)
    await commit(node, "g", 3)
    await admin.offsets.clone("g", "h", "T")
    assert (await admin.offsets.progress("h", "T")).queues[QUEUE].consumer_offset == 3


async def test_time_spans(node: Any, admin: Admin) -> None:
    await put(node, count=2)
    await commit(node, "g", 1)
    spans = await admin.offsets.time_spans("g", "T")
    span = next(span for span in spans if span.message_queue == QUEUE)
    assert 0 < span.min_time_stamp <= span.max_time_stamp


# --- messages --------------------------------------------------------------------------------


async def test_messages_are_found_by_id_key_and_offset(node: Any, admin: Admin) -> None:
    unique = "7F00000100017F0000010000000A0001"
    (offset_id,) = await put(node, KEYS="k1 k2", UNIQ_KEY=unique, TAGS="A")
    found = await admin.messages.by_id(offset_id)
    assert (found.body, found.tags, found.broker_name) == (b"m0", "A", "broker-a")
    assert found.offset_msg_id == offset_id
    by_key: list[Any] = []
    for _ in range(100):
        by_key = await admin.messages.by_key("T", "k2")
        if by_key:
            break
        await asyncio.sleep(0.02)
    assert [message.msg_id for message in by_key] == [unique]
    assert await admin.messages.by_key("T", "k3") == []
    assert (await admin.messages.by_id(unique, "T")).offset_msg_id == offset_id
    assert await admin.messages.by_unique_key("T", "nothing") is None
    at = await admin.messages.by_offset(QUEUE, 0)
    assert at is not None and at.offset_msg_id == offset_id
    assert await admin.messages.by_offset(QUEUE, 1) is None
    entries = await admin.messages.queue_entries(QUEUE, 0)
    assert entries.max_queue_index == 1 and len(entries.queue_data) == 1
    with pytest.raises(ConfigError, match="is no offset id"):
        await admin.messages.by_id("zz")
    await admin.messages.resume_transaction(offset_id)
    with pytest.raises(Refused, match="no message at log offset"):
        await admin.messages.resume_transaction(offset_id[:-1] + "1")
    assert await admin.messages.pending_timers("broker-a") == []


# --- brokers and name servers ----------------------------------------------------------------


async def test_broker_settings_and_figures(node: Any, admin: Admin) -> None:
    await put(node)
    assert (await admin.brokers.config("broker-a"))["brokerName"] == "broker-a"
    await admin.brokers.update_config({"traceOn": "false"}, broker="broker-a")
    assert (await admin.brokers.config("broker-a"))["traceOn"] == "false"
    assert "bootTimestamp" in await admin.brokers.runtime("broker-a")
    assert "broker-a" in (await admin.brokers.cluster()).broker_addr_table
    stats = await admin.brokers.stats("broker-a", "TOPIC_PUT_NUMS", "T")
    assert stats.stats_minute.sum >= 0
    assert (await admin.brokers.consume_stats("broker-a")).total_diff >= 0
    await admin.brokers.clean_queues()
    await admin.brokers.clean_topics()
    await admin.brokers.delete_expired()


async def test_write_permission_is_taken_and_given_back(node: Any, admin: Admin) -> None:
    await put(node)
    await asyncio.sleep(0)
    assert await admin.brokers.wipe_write_perm("broker-a") > 0
    assert (await admin.topics.route("TBW102")).queue_datas[0].perm & 2 == 0
    assert await admin.brokers.add_write_perm("broker-a") > 0
    assert (await admin.topics.route("TBW102")).queue_datas[0].perm & 2 == 2


async def test_values_of_name_servers(admin: Admin) -> None:
    assert await admin.name_servers.entries("n") == {}
    await admin.name_servers.put("n", "k", "v")
    assert await admin.name_servers.get("n", "k") == "v"
    assert await admin.name_servers.entries("n") == {"k": "v"}
    await admin.name_servers.delete("n", "k")
    assert await admin.name_servers.get("n", "k") is None
    (settings,) = (await admin.name_servers.config()).values()
    assert "listenPort" in settings
    await admin.name_servers.update_config({"productEnvName": "test"})
    (settings,) = (await admin.name_servers.config()).values()
    assert settings["productEnvName"] == "test"


async def test_a_namespace_is_put_before_names_and_taken_off_again(node: Any) -> None:
    async with Admin(node.namesrv, client=ClientOptions(namespace="ns")) as admin:
        await admin.topics.create("orders")
        assert "orders" in await admin.topics.names()
        assert (await admin.topics.describe("orders"))["broker-a"].topic_name == "orders"
        await put(node, "ns%orders", count=2)
        queue = MessageQueue(topic="orders", broker_name="broker-a", queue_id=0)
        assert (await admin.topics.status("orders"))[queue].max_offset == 2
        await commit(node, "ns%g", 0, topic="ns%orders")
        assert (await admin.offsets.progress("g", "orders")).queues[queue].lag == 2
        assert (await admin.offsets.skip("g", "orders"))[queue] == 2
        found = await admin.messages.by_offset(queue, 1)
        assert found is not None and found.topic == "orders"
    async with Admin(node.namesrv) as admin:
        assert "ns%orders" in await admin.topics.names()


async def test_calls_need_a_started_admin() -> None:
    admin = Admin("127.0.0.1:1")
    with pytest.raises(ConfigError, match="async with"):
        _ = admin.topics
    await admin.stop()
    with pytest.raises(ConfigError, match="timeout_ms"):
        Admin(timeout_ms=0)
