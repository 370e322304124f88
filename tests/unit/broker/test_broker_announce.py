"""Registration with name servers, against scripted ones."""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.virtual_time import virtual_time

from cosmodrome.broker import announce as module
from cosmodrome.broker.announce import (
    Announce,
    Identity,
    Master,
    parse_name_servers,
    parts_of,
    registration_body,
)
from cosmodrome.broker.members.topics import Topics
from cosmodrome.env.background import at_once
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, Refused, Unreachable
from cosmodrome.layout import FRAME_BYTES_MAX, TOPIC_BYTES_MAX
from cosmodrome.wire import bodies, registration
from cosmodrome.wire.bodies import DataVersion, KVTable, TopicConfig, TopicConfigSerializeWrapper
from cosmodrome.wire.commands.route import (
    QueryDataVersion,
    QueryDataVersionReply,
    RegisterBroker,
    RegisterBrokerReply,
    UnregisterBroker,
)
from cosmodrome.wire.table import Reply

IDENTITY = Identity("DefaultCluster", "broker-a", 0, "192.0.2.1:10911", "192.0.2.1:10912")


class NameServer:
    """One scripted name server; the channel to it is itself."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.name = host, f"{host}:{port}"
        self.up = True
        self.connected = False
        self.closed = False
        self.asked: list[Any] = []
        self.ordered: dict[str, str] | None = None
        self.master: Master | None = None
        self.changed = False
        self.news = asyncio.Event()
        self.gate: asyncio.Event | None = None

    async def call(self, command: Any, timeout_ms: int = 3000) -> Any:
        if self.gate is not None:
            await self.gate.wait()
        await asyncio.sleep(0)
        if not self.up:
            self.connected = False
            raise Unreachable(f"cannot connect to {self.host}")
        self.connected = True
        self.asked.append(command)
        self.news.set()
        if isinstance(command, QueryDataVersion):
            return QueryDataVersionReply(changed=self.changed)
        if isinstance(command, UnregisterBroker):
            return Reply()
        reply = RegisterBrokerReply()
        if self.master is not None:
            reply.master_addr = self.master.address
            reply.ha_server_addr = self.master.ha_address
        if self.ordered is not None:
            reply.body = bodies.encode(KVTable(table=self.ordered))
        return reply

    async def close(self) -> None:
        self.closed = True

    async def reached(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.asked) < count:
                self.news.clear()
                await self.news.wait()
        await asyncio.sleep(0.001)

    def topics(self, index: int = -1) -> set[str]:
        ask = self.asked[index]
        assert isinstance(ask, RegisterBroker)
        body = at_once(registration.reading(ask.body, compressed=bool(ask.compressed)))
        return set(body.topic_config_serialize_wrapper.topic_config_table)


class World:
    """An announcer, its topics, and the name servers it talks to."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        options = BrokerOptions(
            **({"broker_name": "broker-a", "namesrv_addr": "one:9876;two:9876"} | settings)
        )
        self.topics = Topics(options, str(folder / "topics.json"), real_env())
        self.servers: dict[str, NameServer] = {}
        self.announce = Announce(options, self.topics, self._connect)  # type: ignore[arg-type]
        self.prepare: Callable[[NameServer], None] = lambda server: None

    def _connect(self, host: str, port: int) -> NameServer:
        server = self.servers[host] = NameServer(host, port)
        self.prepare(server)
        return server

    async def start(self) -> None:
        await self.topics.start()
        await self.announce.start(IDENTITY)

    async def stop(self) -> None:
        await self.announce.stop()
        await self.topics.stop()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    await world.start()
    yield world
    await world.stop()


# --- addresses --------------------------------------------------------------------------------


def test_addresses() -> None:
    assert parse_name_servers("") == []
    assert parse_name_servers(" a:1; b.c:65535;a:1;[::1]:9876; ") == [
        ("a", 1),
        ("b.c", 65535),
        ("::1", 9876),
    ]


@pytest.mark.parametrize(
    "text", ["localhost", "a:0", "a:65536", "a:x", ":9876", "a b:1", "::1:9876", "a:1,b:2", "a:¹"]
)
def test_bad_addresses_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        parse_name_servers(text)


# --- registering ------------------------------------------------------------------------------


async def test_every_name_server_hears_the_whole_table(world: World) -> None:
    for name in ("one", "two"):
        server = world.servers[name]
        await server.reached(1)
        ask = server.asked[0]
        assert (ask.broker_name, ask.broker_addr, ask.cluster_name) == (
            "broker-a",
            "192.0.2.1:10911",
            "DefaultCluster",
        )
        assert (ask.ha_server_addr, ask.broker_id, ask.compressed) == ("192.0.2.1:10912", 0, False)
        assert ask.body_crc32 == zlib.crc32(ask.body) & 0x7FFFFFFF
        assert server.topics() == set(world.topics.table)
    assert world.announce.ready() == (True, "registered with 2 of 2 name servers")


async def test_a_change_travels_alone_and_at_once(world: World) -> None:
    one = world.servers["one"]
    await one.reached(1)
    await world.servers["two"].reached(1)
    world.topics.ensure("A", 1, 6)
    world.topics.ensure("B", 1, 6)
    await world.announce.announced()
    assert one.topics() == {"A", "B"}
    assert len(one.asked) == 2
    sent = at_once(registration.reading(one.asked[-1].body, compressed=False))
    assert sent.topic_config_serialize_wrapper.data_version == world.topics.version
    world.topics.ensure("C", 1, 6)
    world.topics.delete("A")
    await world.announce.announced()
    assert one.topics() == set(world.topics.table)


@virtual_time
async def test_announced_returns_at_once_when_nothing_changed(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.announce.start(IDENTITY)
    await world.servers["one"].reached(1)
    await world.servers["two"].reached(1)
    began = asyncio.get_running_loop().time()
    await world.announce.announced()
    assert asyncio.get_running_loop().time() == began
    await world.announce.stop()


async def test_changes_during_a_registration_are_not_lost(world: World) -> None:
    one, two = world.servers["one"], world.servers["two"]
    await one.reached(1)
    await two.reached(1)
    one.gate = asyncio.Event()
    world.topics.ensure("A", 1, 6)
    await two.reached(2)
    world.topics.ensure("B", 1, 6)
    waiting = asyncio.create_task(world.announce.announced())
    await two.reached(3)
    assert not waiting.done()
    one.gate.set()
    await waiting
    assert [one.topics(1), one.topics(2)] == [{"A"}, {"B"}]


async def test_a_restarted_name_server_hears_everything_first(world: World) -> None:
    one = world.servers["one"]
    await one.reached(1)
    one.connected = False  # it went away and came back
    world.topics.ensure("A", 1, 6)
    await one.reached(2)
    assert one.topics() == set(world.topics.table)


async def test_a_lost_connection_is_noticed_before_the_period_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.01)
    world = World(tmp_path, namesrv_addr="one:9876")
    await world.start()
    one = world.servers["one"]
    await one.reached(1)
    one.up = one.connected = False
    async with asyncio.timeout(60):
        while world.announce.registered:
            await asyncio.sleep(0.005)
    assert not world.announce.ready()[0]
    await world.stop()


async def test_the_first_failure_ends_the_registration_although_the_connection_is_open(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world.servers["one"]
    await one.reached(1)
    await world.servers["two"].reached(1)

    async def refuse(command: Any, timeout_ms: int = 3000) -> Any:
        one.news.set()
        raise Refused(1, "busy")

    monkeypatch.setattr(one, "call", refuse)
    world.topics.ensure("A", 1, 6)
    await world.announce.announced()
    assert world.announce.ready() == (True, "registered with 1 of 2 name servers")
    monkeypatch.setattr(world.servers["two"], "call", refuse)
    world.topics.ensure("B", 1, 6)
    await world.announce.announced()
    ready, why = world.announce.ready()
    assert not ready and "two:9876: " in why and "busy" in why


@virtual_time
async def test_one_that_is_down_is_retried_and_delays_nobody(tmp_path: Path) -> None:
    world = World(tmp_path)

    def prepare(server: NameServer) -> None:
        server.up = server.host != "one"

    world.prepare = prepare
    await world.announce.start(IDENTITY)
    await world.servers["two"].reached(1)
    assert world.announce.ready() == (True, "registered with 1 of 2 name servers")
    world.topics.ensure("A", 1, 6)
    began = asyncio.get_running_loop().time()
    await world.announce.announced()
    assert asyncio.get_running_loop().time() == began  # it does not wait for the one that is down
    world.servers["one"].up = True
    await world.servers["one"].reached(1)
    assert world.servers["one"].topics() == set(world.topics.table)
    assert world.announce.registered == 2
    await world.announce.stop()


async def test_not_ready_says_why(tmp_path: Path) -> None:
    world = World(tmp_path, namesrv_addr="one:9876")
    world.prepare = lambda server: setattr(server, "up", False)
    await world.start()
    while "cannot connect" not in world.announce.ready()[1]:
        await asyncio.sleep(0.001)
    ready, why = world.announce.ready()
    assert not ready
    assert "one:9876" in why
    await world.stop()


async def test_retries_slow_down_to_the_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []

    async def recorded(self: object, seconds: float) -> None:
        waits.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(module._Peer, "_pause", recorded)
    world = World(tmp_path, namesrv_addr="one:9876", register_name_server_period=1)
    world.prepare = lambda server: setattr(server, "up", False)
    await world.start()
    while len(waits) < 6:
        await asyncio.sleep(0.001)
    await world.announce.stop()
    assert waits[:6] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]  # the period is held above 10 s
    await world.topics.stop()


async def test_the_period_brings_the_whole_table_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PERIOD_MS_MAX", 10)
    world = World(tmp_path, namesrv_addr="one:9876")
    await world.start()
    await world.servers["one"].reached(3)
    assert world.servers["one"].topics(2) == set(world.topics.table)
    await world.stop()


async def test_a_large_table_travels_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 1000)
    monkeypatch.setattr(module, "PERIOD_MS_MAX", 10)
    world = World(tmp_path, namesrv_addr="one:9876")
    await world.topics.start()
    for number in range(20):
        world.topics.ensure(f"T{number}", 1, 6)
    await world.announce.start(IDENTITY)
    one = world.servers["one"]
    async with asyncio.timeout(60):
        while not world.announce.registered:
            await asyncio.sleep(0.001)
    routes = routes_after(one.asked)
    parts = len(one.asked)
    assert parts > 3 and routes == set(world.topics.table)
    assert all(len(ask.body) < 1500 for ask in one.asked)
    versions = [version_of(ask) for ask in one.asked[:parts]]
    assert len({(version.counter, version.timestamp) for version in versions}) == parts
    assert versions[-1] == world.topics.version
    await one.reached(parts + 2)  # while nothing changes one part says that the broker lives
    assert one.topics(parts) == one.topics(parts + 1) == one.topics(0)
    assert version_of(one.asked[parts]) == world.topics.version
    await world.stop()


def version_of(ask: RegisterBroker) -> DataVersion:
    body = at_once(registration.reading(ask.body, compressed=bool(ask.compressed)))
    return body.topic_config_serialize_wrapper.data_version


def routes_after(asked: list[RegisterBroker]) -> set[str]:
    """The topics that upstream's name server (4.9) knows: it looks at a new version only."""
    known: set[str] = set()
    version = None
    for ask in asked:
        body = at_once(registration.reading(ask.body, compressed=bool(ask.compressed)))
        if version_of(ask) != version:
            known |= set(body.topic_config_serialize_wrapper.topic_config_table)
        version = version_of(ask)
    return known


async def test_without_force_the_version_is_asked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PERIOD_MS_MAX", 10)
    world = World(tmp_path, namesrv_addr="one:9876", force_register=False)
    await world.start()
    one = world.servers["one"]
    await one.reached(3)
    assert [type(ask) for ask in one.asked[:3]] == [
        RegisterBroker,
        QueryDataVersion,
        QueryDataVersion,
    ]
    assert bodies.decode(DataVersion, one.asked[1].body) == world.topics.version
    one.changed = True
    count = len(one.asked)
    await one.reached(count + 2)
    assert RegisterBroker in {type(ask) for ask in one.asked[count:]}
    await world.stop()


async def test_compressed(tmp_path: Path) -> None:
    world = World(tmp_path, namesrv_addr="one:9876", compressed_register=True)
    await world.start()
    one = world.servers["one"]
    await one.reached(1)
    assert one.asked[0].compressed is True
    assert one.topics() == set(world.topics.table)
    await world.stop()


async def test_order_topics_are_the_union_of_all_answers(tmp_path: Path) -> None:
    world = World(tmp_path)

    def prepare(server: NameServer) -> None:
        server.ordered = {"A": "broker-a:4"} if server.host == "one" else None

    world.prepare = prepare
    await world.topics.start()
    world.topics.put(TopicConfig(topic_name="A"))
    world.topics.put(TopicConfig(topic_name="B", order=True))
    await world.announce.start(IDENTITY)
    await world.servers["one"].reached(1)
    await world.servers["two"].reached(1)
    assert (world.topics.table["A"].order, world.topics.table["B"].order) == (True, False)
    await world.stop()


async def test_an_answer_that_makes_no_sense_does_not_end_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS_FIRST", 0.01)
    world = World(tmp_path, namesrv_addr="one:9876")
    faults: list[Exception] = [Refused(1, "no"), ValueError("odd")]

    def prepare(server: NameServer) -> None:
        real = server.call

        async def call(command: Any, timeout_ms: int = 3000) -> Any:
            if faults:
                raise faults.pop()
            return await real(command, timeout_ms)

        server.call = call

    world.prepare = prepare
    await world.start()
    await world.servers["one"].reached(1)
    assert world.announce.registered == 1
    assert "odd" in caplog.text
    await world.stop()


async def test_stop_unregisters_and_closes(world: World) -> None:
    await world.servers["one"].reached(1)
    await world.servers["two"].reached(1)
    await world.announce.stop()
    await world.announce.stop()
    for server in world.servers.values():
        last = server.asked[-1]
        assert isinstance(last, UnregisterBroker)
        assert (last.broker_addr, last.broker_id) == ("192.0.2.1:10911", 0)
        assert server.closed
    world.topics.ensure("Later", 1, 6)  # nobody is left to be told


async def test_without_name_servers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = World(tmp_path, namesrv_addr="")
    await world.start()
    await world.announce.start(IDENTITY)
    assert world.announce.ready() == (True, "no name servers are configured")
    await world.announce.announced()
    assert "namesrvAddr is empty" in caplog.text
    await world.stop()


# --- bodies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_a_restricted_broker_lowers_every_topic(compressed: bool) -> None:
    wrapper = TopicConfigSerializeWrapper(
        data_version=DataVersion(counter=3, timestamp=9),
        topic_config_table={
            "T": TopicConfig(topic_name="T", read_queue_nums=3, perm=6, order=True)
        },
    )
    data = registration_body(wrapper, broker_permission=4, compressed=compressed)
    body = at_once(registration.reading(data, compressed=compressed))
    (config,) = body.topic_config_serialize_wrapper.topic_config_table.values()
    assert (config.perm, config.read_queue_nums, config.order) == (4, 3, False)
    assert body.topic_config_serialize_wrapper.data_version.counter == 3
    assert wrapper.topic_config_table["T"].perm == 6


@pytest.mark.parametrize("compressed", [False, True])
def test_filter_servers_travel_with_it(compressed: bool) -> None:
    data = registration_body(
        TopicConfigSerializeWrapper(data_version=DataVersion(counter=3, timestamp=9)),
        broker_permission=6,
        compressed=compressed,
        filter_servers=["192.0.2.9:1", "192.0.2.9:2"],
    )
    body = at_once(registration.reading(data, compressed=compressed))
    assert body.filter_server_list == ["192.0.2.9:1", "192.0.2.9:2"]


@pytest.mark.parametrize("force", [True, False])
async def test_a_renewed_registration_carries_everything(tmp_path: Path, force: bool) -> None:
    world = World(tmp_path, force_register=force)
    await world.start()
    server = world.servers["one"]
    await server.reached(1)
    world.announce.renew()
    await server.reached(2)
    assert isinstance(server.asked[1], RegisterBroker)
    assert server.topics(1) == server.topics(0)
    await world.stop()


# --- a slave and its master -------------------------------------------------------------------

SLAVE = dataclasses.replace(IDENTITY, broker_id=1)
MASTER = Master("192.0.2.9:10911", "192.0.2.9:10912")


def virtual_slave(folder: Path, looks: Callable[[], bool]) -> tuple[World, list[Master]]:
    world = World(folder, namesrv_addr="one:9876")
    found: list[Master] = []
    world.announce.found_master.subscribe(found.append)
    world.announce.looks_for_master = looks
    return world, found


@virtual_time
async def test_a_slave_asks_soon_until_it_knows_its_master(tmp_path: Path) -> None:
    world, found = virtual_slave(tmp_path, lambda: not found)
    await world.announce.start(SLAVE)
    await asyncio.sleep(20)
    server = world.servers["one"]
    assert 4 <= len(server.asked) <= 10
    assert found == []
    server.master = MASTER
    await asyncio.sleep(module.LOOK_SECONDS_MAX)
    assert found == [MASTER]
    count = len(server.asked)
    await asyncio.sleep(25)
    assert len(server.asked) <= count + 1  # once per period again
    await world.announce.stop()


@virtual_time
async def test_a_slave_that_lost_its_master_asks_before_the_period_is_over(tmp_path: Path) -> None:
    lost = False
    world, found = virtual_slave(tmp_path, lambda: lost)
    world.prepare = lambda server: setattr(server, "master", MASTER)
    await world.announce.start(SLAVE)
    await asyncio.sleep(1)
    assert found == [MASTER]
    lost = True
    world.servers["one"].master = moved = Master("192.0.2.10:1", "192.0.2.10:2")
    await asyncio.sleep(2 * module.WATCH_SECONDS)
    assert found[-1] == moved
    await world.announce.stop()


@virtual_time
async def test_a_master_does_not_follow(tmp_path: Path) -> None:
    world, found = virtual_slave(tmp_path, lambda: False)
    world.prepare = lambda server: setattr(server, "master", MASTER)
    await world.announce.start(IDENTITY)
    await asyncio.sleep(1)
    assert found == []
    await world.announce.stop()


def test_more_topics_than_fit_into_a_frame() -> None:
    names = [f"{number:06d}".ljust(TOPIC_BYTES_MAX, "x") for number in range(60_000)]
    whole = TopicConfigSerializeWrapper(
        data_version=DataVersion(counter=3, timestamp=9),
        topic_config_table={name: TopicConfig(topic_name=name) for name in names},
    )
    assert len(bodies.encode(whole)) > FRAME_BYTES_MAX
    seen = 0
    for part in parts_of(whole):
        seen += len(part.topic_config_table)
        body = registration_body(part, broker_permission=6, compressed=False)
        assert len(body) < module.PART_BYTES + 1000
    assert seen == len(names)
