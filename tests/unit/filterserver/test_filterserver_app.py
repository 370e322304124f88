"""The whole filter server over real sockets, with a broker and a name server in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.filterserver.filter_kit import GREEN, install

from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.env.options import (
    BrokerOptions,
    FilterServerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, ConfigError, Refused
from cosmodrome.filterserver.app import FilterServer, build_filterserver, parse_broker
from cosmodrome.filterserver.enrolment import Enrolment
from cosmodrome.nameserver.app import NameServer, build_nameserver
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, commands, fastjson
from cosmodrome.wire.record import iter_records

CLASS_FILTER = 8


@contextlib.asynccontextmanager
async def started(part: Any) -> AsyncIterator[None]:
    await part.start()
    try:
        yield
    finally:
        await part.stop()


def a_broker(folder: Path, **changes: Any) -> Broker:
    return build_broker(
        BrokerOptions(**(dict[str, Any](broker_name="broker-a", listen_port=0) | changes)),
        StoreOptions(
            store_path_root_dir=str(folder / "store"),
            mapped_file_size_commit_log=1 << 20,
            mapped_file_size_consume_queue=6000,
            max_hash_slot_num=100,
            max_index_num=400,
        ),
        SocketOptions(),
        real_env(seed=1),
    )


def a_filterserver(folder: Path, broker: Broker, **changes: Any) -> FilterServer:
    options = FilterServerOptions(
        connect_which_broker=broker.address, filter_path=str(folder / "filters"), **changes
    )
    return build_filterserver(options, SocketOptions(), real_env(seed=1))


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nameserver: NameServer = build_nameserver(
            NameServerOptions(listen_port=0), SocketOptions(), real_env()
        )
        self.broker: Broker
        self.filterserver: FilterServer

    async def route(self) -> dict[str, list[str]]:
        async with channel_to(self.nameserver.address) as channel:
            try:
                reply = await channel.call(commands.GetRouteinfoByTopic(topic="T"))
            except Refused:  # its broker has not registered yet
                return {}
        table: dict[str, list[str]] = fastjson.loads(reply.body)["filterServerTable"]
        return table

    async def routed(self, wanted: Callable[[dict[str, list[str]]], bool]) -> None:
        async with asyncio.timeout(60):
            while not wanted(await self.route()):
                await asyncio.sleep(0.02)

    async def send(self, *colours: str) -> None:
        async with channel_to(self.broker.address) as channel:
            for colour in colours:
                await channel.call(
                    commands.SendMessageV2(
                        producer_group="p",
                        topic="T",
                        default_topic="TBW102",
                        default_topic_queue_nums=1,
                        queue_id=0,
                        sys_flag=0,
                        born_timestamp=1,
                        flag=0,
                        properties=f"colour\x01{colour}",
                        body=colour.encode(),
                    )
                )


@contextlib.asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[Channel]:
    host, port = address.rsplit(":", 1)
    channel = Channel(host, int(port))
    try:
        yield channel
    finally:
        await channel.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    install(tmp_path / "filters", GREEN)
    async with started(world.nameserver):
        world.broker = a_broker(tmp_path, namesrv_addr=world.nameserver.address)
        async with started(world.broker):
            await world.send("green")  # makes the topic
            world.filterserver = a_filterserver(tmp_path, world.broker)
            async with started(world.filterserver):
                yield world


@pytest.fixture
async def channel(world: World) -> AsyncIterator[Channel]:
    async with channel_to(world.filterserver.address) as channel:
        yield channel


def choose(name: str = "com.acme.Green") -> commands.RegisterMessageFilterClass:
    return commands.RegisterMessageFilterClass(
        consumer_group="g", topic="T", class_name=name, class_crc=7, body=b"public class Green {}"
    )


def pull(offset: int, hold_ms: int = 0) -> commands.PullMessage:
    return commands.PullMessage(
        consumer_group="g",
        topic="T",
        queue_id=0,
        queue_offset=offset,
        max_msg_nums=32,
        sys_flag=CLASS_FILTER | (2 if hold_ms else 0),
        commit_offset=0,
        suspend_timeout_millis=hold_ms,
        sub_version=1,
    )


def colours(body: bytes) -> list[bytes]:
    return [record.body for record in iter_records(body)]


# --- being found --------------------------------------------------------------------------------


async def test_routes_name_it_while_it_lives(world: World) -> None:
    broker, server = world.broker.address, world.filterserver.address
    await world.routed(lambda table: table == {broker: [server]})
    assert world.filterserver.broker_name == "broker-a"
    ready, text = world.filterserver.ready()
    assert ready and "broker-a" in text and "2 filters" in text
    second = a_filterserver(world.folder, world.broker)
    async with started(second):
        await world.routed(lambda table: table == {broker: [server, second.address]})
    await world.routed(lambda table: table == {broker: [server]})
    await world.filterserver.stop()
    await world.routed(lambda table: table == {})
    assert not world.filterserver.ready()[0]


async def test_it_finds_a_broker_that_was_restarted(world: World) -> None:
    port = world.broker.port
    await world.broker.stop()
    async with asyncio.timeout(60):
        while world.filterserver.ready()[0]:
            await asyncio.sleep(0.02)
    async with channel_to(world.filterserver.address) as channel:
        await channel.call(choose())
        with pytest.raises(Refused, match="gives no answer"):
            await channel.call(pull(0), timeout_ms=20_000)
        world.broker = a_broker(
            world.folder, namesrv_addr=world.nameserver.address, listen_port=port
        )
        async with started(world.broker):
            await world.routed(lambda table: list(table.values()) == [[world.filterserver.address]])
            reply = await channel.call(pull(0))
            assert colours(reply.body) == [b"green"]


# --- filtering ----------------------------------------------------------------------------------


async def test_only_what_passes_arrives(world: World, channel: Channel) -> None:
    await world.send("red", "green", "blue")
    await channel.call(choose())
    reply = await channel.call(pull(0))
    assert (reply.code, colours(reply.body)) == (Code.SUCCESS, [b"green", b"green"])
    assert (reply.next_begin_offset, reply.min_offset, reply.max_offset) == (4, 0, 4)
    async with channel_to(world.broker.address) as direct:
        stored = await direct.call(commands.PullMessage(**_everything(2)))
    assert reply.body.endswith(stored.body)  # as it is stored
    reply = await channel.call(pull(3))
    assert (reply.code, reply.body, reply.next_begin_offset) == (20, b"", 4)
    reply = await channel.call(pull(4))
    assert (reply.code, reply.next_begin_offset) == (Code.PULL_NOT_FOUND, 4)
    reply = await channel.call(pull(99))
    assert (reply.code, reply.next_begin_offset) == (Code.PULL_OFFSET_MOVED, 4)


def _everything(offset: int) -> dict[str, Any]:
    ask = pull(offset)
    fields = {name: getattr(ask, name) for name in ask.__struct_fields__ if name != "body"}
    return fields | {"sys_flag": 4, "subscription": "*", "max_msg_nums": 1}


async def test_a_pull_waits_in_the_broker(world: World, channel: Channel) -> None:
    await channel.call(choose())
    waiting = asyncio.create_task(channel.call(pull(1, hold_ms=20_000), timeout_ms=30_000))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    await world.send("green")
    async with asyncio.timeout(60):
        assert colours((await waiting).body) == [b"green"]


async def test_a_stop_ends_waiting_pulls(world: World, channel: Channel) -> None:
    await channel.call(choose())
    waiting = asyncio.create_task(channel.call(pull(1, hold_ms=20_000), timeout_ms=30_000))
    await asyncio.sleep(0.2)
    async with asyncio.timeout(60):
        await world.filterserver.stop()
        with pytest.raises(Refused, match="gives no answer"):
            await waiting
    await world.filterserver.stop()


async def test_a_pull_may_commit(world: World, channel: Channel) -> None:
    await channel.call(choose())
    ask = pull(1)
    ask.sys_flag |= 1
    ask.commit_offset = 1
    await channel.call(ask)
    async with channel_to(world.broker.address) as direct:
        reply = await direct.call(
            commands.QueryConsumerOffset(consumer_group="g", topic="T", queue_id=0)
        )
    assert reply.offset == 1


async def test_a_filter_that_is_not_installed(world: World, channel: Channel) -> None:
    with pytest.raises(Refused, match="not installed") as caught:
        await channel.call(choose("com.acme.Red"))
    assert caught.value.code == Code.SYSTEM_ERROR
    with pytest.raises(Refused, match=r"com\.acme\.Red"):
        await channel.call(pull(0))
    install(world.folder / "filters", "FILTERS = {'com.acme.Red': 5}", name="more.py")
    await world.filterserver.reload()  # refused, and the old set stays
    assert world.filterserver.filters == ["acme.filters.All", "com.acme.Green"]
    install(
        world.folder / "filters",
        "FILTERS = {'com.acme.Red': lambda message: message.body == b'red'}",
        name="more.py",
    )
    await world.filterserver.reload()
    await world.send("red")
    assert colours((await channel.call(pull(0))).body) == [b"red"]


async def test_other_requests_are_refused(channel: Channel) -> None:
    with pytest.raises(Refused) as caught:
        await channel.call(commands.GetMaxOffset(topic="T", queue_id=0))
    assert caught.value.code == Code.REQUEST_CODE_NOT_SUPPORTED
    assert "filter server" in caught.value.remark


async def test_what_a_broker_does_with_such_a_consumer(world: World) -> None:
    """Compat: a pull that comes past the filter server brings everything."""
    await world.send("red")
    subscription = bodies.SubscriptionData(
        topic="T", sub_string="com.acme.Green", class_filter_mode=True, sub_version=1
    )
    heartbeat = bodies.HeartbeatData(
        client_id="c",
        consumer_data_set=[
            bodies.ConsumerData(group_name="g", subscription_data_set=[subscription])
        ],
    )
    async with channel_to(world.broker.address) as direct:
        await direct.call(commands.HeartBeat(body=bodies.encode(heartbeat)))
        assert colours((await direct.call(pull(0))).body) == [b"green", b"red"]
        listed = await direct.call(commands.GetConsumerConnectionList(consumer_group="g"))
    table = json.loads(listed.body)["subscriptionTable"]
    assert table["T"]["classFilterMode"] is True


# --- starting -----------------------------------------------------------------------------------


async def test_no_broker_is_a_clear_error(tmp_path: Path, unused_tcp_port: int) -> None:
    channel = Channel("127.0.0.1", unused_tcp_port)
    enrolment = Enrolment(channel, start_s=0.2)
    with pytest.raises(ConfigError, match=r"start the broker first.*connectWhichBroker"):
        await enrolment.start("127.0.0.1:1")
    assert not enrolment.ready()[0]
    await enrolment.stop()
    await channel.close()


async def test_something_else_than_a_broker(tmp_path: Path) -> None:
    nameserver = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), real_env())
    async with started(nameserver):
        server = build_filterserver(
            FilterServerOptions(
                connect_which_broker=nameserver.address, filter_path=str(tmp_path / "none")
            ),
            SocketOptions(),
            real_env(),
        )
        with pytest.raises(ConfigError, match="takes no filter servers"):
            await server.start()
        assert not server.ready()[0]
        await server.stop()


async def test_a_broken_filter_stops_the_start(world: World) -> None:
    install(world.folder / "filters", "FILTERS = 1 / 0", name="broken.py")
    server = a_filterserver(world.folder, world.broker)
    with pytest.raises(ConfigError, match=r"broken\.py, line 1: ZeroDivisionError"):
        await server.start()


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="filterPath"):
        build_filterserver(FilterServerOptions(), SocketOptions(), real_env())
    assert parse_broker("broker-1.example:10911") == ("broker-1.example", 10911)
    assert parse_broker("[::1]:1") == ("::1", 1)
    for text in ("", "host", "host:0", "a:1;b:2", "host:99999"):
        with pytest.raises(ConfigError, match="name one broker as host:port"):
            parse_broker(text)
