"""The whole broker over real sockets, with a name server in the same process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, ConfigError, DirectoryInUse, Refused, Unreachable
from cosmodrome.nameserver.app import NameServer, build_nameserver
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.ports import advertised_host
from cosmodrome.wire import bodies, commands, fastjson, properties_text
from cosmodrome.wire.record import iter_records

SMALL = {
    "mapped_file_size_commit_log": 1 << 20,
    "mapped_file_size_consume_queue": 6000,
    "max_hash_slot_num": 100,
    "max_index_num": 400,
    "max_message_size": 64 * 1024,
}


def options(**changes: Any) -> BrokerOptions:
    return BrokerOptions(**(dict[str, Any](broker_name="broker-a", listen_port=0) | changes))


def store_options(folder: Path, **changes: Any) -> StoreOptions:
    return StoreOptions(**({"store_path_root_dir": str(folder)} | SMALL | changes))


@contextlib.asynccontextmanager
async def running(folder: Path, **changes: Any) -> AsyncIterator[Broker]:
    broker = build_broker(
        options(**changes), store_options(folder), SocketOptions(), real_env(seed=1)
    )
    await broker.start()
    try:
        yield broker
    finally:
        await broker.stop()


@contextlib.asynccontextmanager
async def channel_to(port: int) -> AsyncIterator[Channel]:
    channel = Channel("127.0.0.1", port)
    try:
        yield channel
    finally:
        await channel.close()


@pytest.fixture
async def nameserver() -> AsyncIterator[NameServer]:
    server = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), real_env())
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with running(tmp_path) as broker:
        yield broker


@pytest.fixture
async def channel(broker: Broker) -> AsyncIterator[Channel]:
    async with channel_to(broker.port) as channel:
        yield channel


def send(topic: str = "T", body: bytes = b"hello", queue_id: int = 0) -> commands.SendMessageV2:
    return commands.SendMessageV2(
        producer_group="p",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=queue_id,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties="TAGS\x01A\x02KEYS\x01k1",
        body=body,
    )


def pull(offset: int, *, hold_ms: int = 0, topic: str = "T") -> commands.PullMessage:
    return commands.PullMessage(
        consumer_group="g",
        topic=topic,
        queue_id=0,
        queue_offset=offset,
        max_msg_nums=32,
        sys_flag=2 if hold_ms else 0,
        commit_offset=0,
        suspend_timeout_millis=hold_ms,
        sub_version=1,
    )


def heartbeat(client: str = "c", topic: str = "T") -> commands.HeartBeat:
    data = bodies.HeartbeatData(
        client_id=client,
        consumer_data_set=[
            bodies.ConsumerData(
                group_name="g",
                subscription_data_set=[bodies.SubscriptionData(topic=topic, sub_version=1)],
            )
        ],
        producer_data_set=[bodies.ProducerData(group_name="p")],
    )
    return commands.HeartBeat(body=bodies.encode(data))


def create(topic: str, queues: int = 2) -> commands.UpdateAndCreateTopic:
    return commands.UpdateAndCreateTopic(
        topic=topic,
        default_topic="TBW102",
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=6,
        topic_filter_type="SINGLE_TAG",
        order=False,
    )


async def until(done: Any) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.01)


# --- messages ---------------------------------------------------------------------------------


async def test_send_then_pull(channel: Channel) -> None:
    await channel.call(heartbeat())
    sent = await channel.call(send())
    assert (sent.queue_id, sent.queue_offset) == (0, 0)
    found = await channel.call(pull(0))
    (record,) = iter_records(found.body)
    assert (record.topic, record.body, found.next_begin_offset) == ("T", b"hello", 1)
    seen = await channel.call(
        commands.ViewMessageById(offset=int(sent.msg_id[16:], 16))  # the id ends in the offset
    )
    assert seen.body == found.body


async def test_the_vip_port_serves_too(broker: Broker) -> None:
    async with channel_to(broker.vip_port) as channel:
        assert (await channel.call(send())).queue_offset == 0


async def test_a_parked_pull_wakes_with_the_message(channel: Channel) -> None:
    await channel.call(heartbeat())
    await channel.call(send())
    parked = asyncio.create_task(channel.call(pull(1, hold_ms=90_000), timeout_ms=60_000))
    await asyncio.sleep(0.05)
    assert not parked.done()
    await channel.call(send(body=b"second"))
    found = await parked  # before its own time of 90 s is over, or the call fails
    (record,) = iter_records(found.body)
    assert record.body == b"second"


async def test_a_parked_pull_is_refused_at_the_end(broker: Broker, channel: Channel) -> None:
    """Not dropped: a Java client would wait out its own 30 s."""
    await channel.call(create("T"))
    await channel.call(heartbeat())
    waiting = asyncio.create_task(channel.call(pull(0, hold_ms=20_000)))
    _, pending = await asyncio.wait([waiting], timeout=0.2)
    assert pending == {waiting}
    await broker.stop()
    with pytest.raises(Refused, match="stopping") as refusal:
        await asyncio.wait_for(waiting, 60)
    assert refusal.value.code == Code.SERVICE_NOT_AVAILABLE


async def test_offsets(channel: Channel) -> None:
    await channel.call(send())
    ask: dict[str, Any] = {"consumer_group": "g", "topic": "T", "queue_id": 0}
    assert (await channel.call(commands.QueryConsumerOffset(**ask))).offset == 0
    await channel.call(commands.UpdateConsumerOffset(**ask, commit_offset=1))
    assert (await channel.call(commands.QueryConsumerOffset(**ask))).offset == 1
    assert (await channel.call(commands.GetMaxOffset(topic="T", queue_id=0))).offset == 1


async def test_locks(channel: Channel) -> None:
    def ask(client: str) -> bytes:
        queue = bodies.MessageQueue(broker_name="broker-a", queue_id=0, topic="T")
        return bodies.encode(
            bodies.LockBatchRequestBody(client_id=client, consumer_group="g", mq_set=[queue])
        )

    async def held(client: str) -> int:
        reply = await channel.call(commands.LockBatchMq(body=ask(client)))
        return len(bodies.decode(bodies.LockBatchResponseBody, reply.body).lock_ok_mq_set)

    assert [await held("a"), await held("b")] == [1, 0]
    await channel.call(commands.UnlockBatchMq(body=ask("a")))
    assert await held("b") == 1


# --- administration ---------------------------------------------------------------------------


async def test_topic_life(channel: Channel) -> None:
    await channel.call(create("Made", 3))
    await channel.call(send("Made", queue_id=2))
    stats = await channel.call(commands.GetTopicStatsInfo(topic="Made"))
    table = bodies.decode(bodies.TopicStatsTable, stats.body).offset_table
    assert {queue.queue_id: entry.max_offset for queue, entry in table.items()} == {
        0: 0,
        1: 0,
        2: 1,
    }
    commit = commands.UpdateConsumerOffset(
        consumer_group="g", topic="Made", queue_id=2, commit_offset=1
    )
    await channel.call(commit)
    await channel.call(commands.DeleteTopicInBroker(topic="Made"))
    with pytest.raises(Refused) as refused:
        await channel.call(commands.GetTopicStatsInfo(topic="Made"))
    assert refused.value.code == Code.TOPIC_NOT_EXIST
    offsets = (await channel.call(commands.GetAllConsumerOffset())).body
    assert fastjson.loads(offsets) == {"offsetTable": {}}
    await channel.call(create("Made", 3))
    assert (await channel.call(commands.GetMaxOffset(topic="Made", queue_id=2))).offset == 0


async def test_group_deletion_removes_offsets_on_request(channel: Channel) -> None:
    await channel.call(send())
    for keep in (True, False):
        await channel.call(
            commands.UpdateConsumerOffset(
                consumer_group="g", topic="T", queue_id=0, commit_offset=1
            )
        )
        await channel.call(commands.DeleteSubscriptiongroup(group_name="g", remove_offset=not keep))
        table = fastjson.loads((await channel.call(commands.GetAllConsumerOffset())).body)
        assert ("T@g" in table["offsetTable"]) is keep


async def test_membership_over_sockets(broker: Broker, channel: Channel) -> None:
    async with channel_to(broker.port) as other:
        await channel.call(heartbeat("c1"))
        await other.call(heartbeat("c2"))
        listed = await channel.call(commands.GetConsumerListByGroup(consumer_group="g"))
        assert sorted(json.loads(listed.body)["consumerIdList"]) == ["c1", "c2"]
        shown = await channel.call(commands.GetConsumerConnectionList(consumer_group="g"))
        connection = bodies.decode(bodies.ConsumerConnection, shown.body)
        assert len(connection.connection_set) == 2
    async with asyncio.timeout(60):
        while True:
            listed = await channel.call(commands.GetConsumerListByGroup(consumer_group="g"))
            if json.loads(listed.body)["consumerIdList"] == ["c1"]:
                break


async def test_settings_and_figures(broker: Broker, channel: Channel) -> None:
    shown = await channel.call(commands.GetBrokerConfig())
    settings = properties_text.loads(shown.body)
    assert settings["brokerName"] == "broker-a"
    assert settings["flushDiskType"] == "SYNC_FLUSH"
    assert settings["brokerIP1"] == ""
    assert json.loads(shown.version)["counter"] == 0
    await channel.call(send())
    figures = await channel.call(commands.GetBrokerRuntimeInfo())
    table = bodies.decode(bodies.KVTable, figures.body).table
    assert table["putMessageTimesTotal"] == "1"
    assert table["brokerVersion"] == "409"


async def test_unknown_and_planned_codes_are_answered(channel: Channel) -> None:
    with pytest.raises(Refused) as refused:
        await channel.call(commands.TriggerDeleteFiles())
    assert refused.value.code == Code.REQUEST_CODE_NOT_SUPPORTED


# --- life -------------------------------------------------------------------------------------


async def test_restart_keeps_everything(tmp_path: Path) -> None:
    async with running(tmp_path) as broker, channel_to(broker.port) as channel:
        await channel.call(heartbeat())
        await channel.call(create("Made"))
        await channel.call(send(body=b"kept"))
        await channel.call(
            commands.UpdateConsumerOffset(
                consumer_group="g", topic="T", queue_id=0, commit_offset=1
            )
        )
    async with running(tmp_path) as broker, channel_to(broker.port) as channel:
        await channel.call(heartbeat())
        found = await channel.call(pull(0))
        assert [record.body for record in iter_records(found.body)] == [b"kept"]
        ask = commands.QueryConsumerOffset(consumer_group="g", topic="T", queue_id=0)
        assert (await channel.call(ask)).offset == 1
        topics = await channel.call(commands.GetAllTopicConfig())
        table = bodies.decode(bodies.TopicConfigSerializeWrapper, topics.body).topic_config_table
        assert {"T", "Made", "%RETRY%g"} <= set(table)
        groups = await channel.call(commands.GetAllSubscriptiongroupConfig())
        wrapper = bodies.decode(bodies.SubscriptionGroupWrapper, groups.body)
        assert "g" in wrapper.subscription_group_table
        assert (await channel.call(send())).queue_offset == 1


async def test_start_and_stop_twice(tmp_path: Path) -> None:
    broker = build_broker(options(), store_options(tmp_path), SocketOptions(), real_env())
    assert broker.ready() == (False, "stopped")
    await broker.start()
    await broker.start()
    assert broker.alive()
    assert broker.ready()[0]
    await broker.stop()
    await broker.stop()
    assert broker.ready() == (False, "stopped")
    async with channel_to(broker.port) as channel:
        with pytest.raises(Unreachable):
            await channel.call(commands.GetMaxOffset(topic="T", queue_id=0))


HOLD = """
import sys
from cosmodrome.env.real import RealDisk
held = RealDisk().lock(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


async def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    holder = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        HOLD,
        str(tmp_path / "lock"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"
    broker = build_broker(options(), store_options(tmp_path), SocketOptions(), real_env())
    try:
        with pytest.raises(DirectoryInUse, match="in use"):
            await broker.start()
        assert broker.ready() == (False, "stopped")
    finally:
        await holder.communicate(b"")
    await broker.start()  # free again
    await broker.stop()


async def test_a_taken_port_undoes_the_start(tmp_path: Path, broker: Broker) -> None:
    other = build_broker(
        options(listen_port=broker.port),
        store_options(tmp_path / "other"),
        SocketOptions(),
        real_env(),
    )
    with pytest.raises(ConfigError, match="listen"):
        await other.start()
    async with running(tmp_path / "other"):
        pass  # the store was closed and opens again


# --- name servers -----------------------------------------------------------------------------


async def route(nameserver: NameServer, topic: str) -> bodies.TopicRouteData | None:
    async with channel_to(nameserver.port) as channel:
        try:
            reply = await channel.call(commands.GetRouteinfoByTopic(topic=topic))
        except Refused as refused:
            assert refused.code == Code.TOPIC_NOT_EXIST
            return None
        return bodies.decode(bodies.TopicRouteData, reply.body)


async def test_a_created_topic_has_a_route_when_it_is_answered(
    tmp_path: Path, nameserver: NameServer
) -> None:
    async with (
        running(tmp_path, namesrv_addr=nameserver.address) as broker,
        channel_to(broker.port) as channel,
    ):
        await until(lambda: broker.ready()[0])
        await channel.call(create("Made", 3))
        found = await route(nameserver, "Made")
        assert found is not None
        assert found.broker_datas[0].broker_addrs == {0: broker.address}
        assert (found.queue_datas[0].broker_name, found.queue_datas[0].write_queue_nums) == (
            "broker-a",
            3,
        )
        assert (await route(nameserver, "TBW102")) is not None
        assert (await route(nameserver, "Unknown")) is None
    assert await route(nameserver, "Made") is None  # it unregistered


async def test_readiness_follows_registration(tmp_path: Path) -> None:
    probe = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), real_env())
    await probe.start()
    await probe.stop()
    async with running(tmp_path, namesrv_addr=f"127.0.0.1:{probe.port}") as broker:
        ready, why = broker.ready()
        assert not ready and "not registered" in why
        late = build_nameserver(
            NameServerOptions(listen_port=probe.port), SocketOptions(), real_env()
        )
        await late.start()
        await until(lambda: broker.ready()[0])
        assert (await route(late, "TBW102")) is not None
        await late.stop()


async def test_a_restarted_name_server_gets_the_routes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.broker.announce.WATCH_SECONDS", 0.02)
    monkeypatch.setattr("cosmodrome.broker.announce.RETRY_SECONDS_FIRST", 0.05)
    first = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), real_env())
    await first.start()
    async with running(tmp_path, namesrv_addr=first.address) as broker:
        await until(lambda: broker.ready()[0])
        await first.stop()
        await until(lambda: not broker.ready()[0])
        second = build_nameserver(
            NameServerOptions(listen_port=first.port), SocketOptions(), real_env()
        )
        await second.start()
        await until(lambda: broker.ready()[0])
        assert await route(second, "TBW102") is not None
        await second.stop()


async def test_a_broker_that_cannot_store_is_alive_but_not_ready(
    broker: Broker, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(broker._base.store), "why_unwritable", property(lambda self: "the disk is full")
    )
    assert broker.ready() == (False, "sends are refused: the disk is full")
    assert broker.alive()


# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "store", "why"),
    [
        ({}, {"broker_role": "SLAVE"}, "above 0"),
        ({}, {"broker_role": "OTHER"}, "ASYNC_MASTER"),
        ({"broker_id": 1}, {"broker_role": "SLAVE"}, "nothing says where its master is"),
        (
            {"broker_id": 1},
            {"broker_role": "SLAVE", "ha_master_address": "nowhere"},
            "haMasterAddress: 'nowhere' has no port",
        ),
        ({"listen_port": 10_911}, {"ha_listen_port": 10_909}, "haListenPort is 10909"),
        ({}, {"store_path_root_dir": ""}, "storePathRootDir"),
        ({"listen_port": 2}, {}, "VIP port"),
        ({"listen_port": 65_535}, {}, "HA"),
        ({"broker_name": "a/b"}, {}, "brokerName"),
        ({"broker_name": ".."}, {}, "brokerName"),
        ({"broker_cluster_name": ""}, {}, "brokerClusterName"),
        ({"broker_cluster_name": "c" * 120}, {}, "brokerClusterName"),
        ({"namesrv_addr": "nowhere"}, {}, "port"),
    ],
)
def test_bad_settings_are_named(
    tmp_path: Path, changes: dict[str, Any], store: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        build_broker(
            options(**changes), store_options(tmp_path, **store), SocketOptions(), real_env()
        )


async def test_a_master_has_id_zero(tmp_path: Path, nameserver: NameServer) -> None:
    async with running(tmp_path, broker_id=3, namesrv_addr=nameserver.address) as broker:
        await until(lambda: broker.ready()[0])
        found = await route(nameserver, "TBW102")
        assert found is not None and list(found.broker_datas[0].broker_addrs) == [0]


async def test_the_configured_address_is_told(tmp_path: Path, nameserver: NameServer) -> None:
    async with running(tmp_path, broker_ip1="localhost", namesrv_addr=nameserver.address) as broker:
        assert broker.address == f"localhost:{broker.port}"
        await until(lambda: broker.ready()[0])
        found = await route(nameserver, "TBW102")
        assert found is not None and found.broker_datas[0].broker_addrs == {0: broker.address}
        async with channel_to(broker.port) as channel:
            assert (await channel.call(send())).msg_id.startswith("7F000001")


async def test_an_unknown_host_is_an_error(tmp_path: Path) -> None:
    broker = build_broker(
        options(broker_ip1="no-such-host.invalid"),
        store_options(tmp_path),
        SocketOptions(),
        real_env(),
    )
    with pytest.raises(ConfigError, match="brokerIP1"):
        await broker.start()


def test_advertised_host() -> None:
    assert advertised_host("198.51.100.7") == "198.51.100.7"
    assert advertised_host("0.0.0.0") not in ("", "0.0.0.0", "::")
    assert advertised_host("::") == advertised_host("0.0.0.0")


def test_the_default_name_is_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for host, expected in (("web.example.org", "web-example-org"), ("--", "broker")):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        broker = build_broker(
            options(broker_name=""), store_options(tmp_path), SocketOptions(), real_env()
        )
        assert broker.name == expected
