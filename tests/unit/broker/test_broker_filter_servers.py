"""Who filters beside this broker."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.broker.broker_fakes import FakeConnection
from tests.virtual_time import virtual_time

from cosmodrome.broker.receive import filter_servers as module
from cosmodrome.broker.receive.filter_servers import FilterServers
from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import Code, Refused
from cosmodrome.wire.commands.filter import RegisterFilterServer, RegisterFilterServerReply
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.table import Call

ONE, TWO = "192.0.2.1:4000", "192.0.2.2:4000"


class World:
    def __init__(self, **changes: float) -> None:
        self.servers = FilterServers(BrokerOptions(broker_name="b", broker_id=0), **changes)
        self.lists: list[list[str]] = []
        self.servers.changed.subscribe(lambda _: self.lists.append(self.servers.addresses()))

    def register(self, connection: FakeConnection, address: str) -> RegisterFilterServerReply:
        call = Call(Frame(code=301, opaque=0), connection)
        return self.servers.register(RegisterFilterServer(filter_server_addr=address), call)


async def test_each_change_is_told_once() -> None:
    world = World()
    first, second = FakeConnection(), FakeConnection()
    reply = world.register(first, ONE)
    assert (reply.broker_name, reply.broker_id) == ("b", 0)
    world.register(first, ONE)
    world.register(second, TWO)
    world.register(second, TWO)
    assert world.lists == [[ONE], [ONE, TWO]]
    assert len(first.callbacks) == 1
    first.close("gone")
    assert world.lists[2:] == [[TWO]]
    world.register(second, ONE)
    assert world.lists[3:] == [[ONE]]


async def test_a_new_connection_of_the_same_server() -> None:
    world = World()
    old, new = FakeConnection(), FakeConnection()
    world.register(old, ONE)
    world.register(new, ONE)
    old.close("gone")
    assert world.servers.addresses() == [ONE]
    assert world.lists == [[ONE]]


@virtual_time
async def test_a_silent_one_is_dropped() -> None:
    world = World(silence_s=0.3, scan_s=0.02)
    await world.servers.start()
    await world.servers.start()
    silent, alive = FakeConnection(), FakeConnection()
    world.register(silent, ONE)
    async with asyncio.timeout(60):
        while not silent.closed:
            world.register(alive, TWO)
            await asyncio.sleep(0.02)
    assert world.servers.addresses() == [TWO]
    assert not alive.closed
    await world.servers.stop()
    await world.servers.stop()


@pytest.mark.parametrize(
    "address", ["", "host", "host:0", "host:70000", "ho st:1", "a:1\nb:2", "x" * 300 + ":1"]
)
async def test_bad_addresses(address: str) -> None:
    world = World()
    with pytest.raises(Refused, match="host:port"):
        world.register(FakeConnection(), address)
    assert world.servers.addresses() == []


async def test_the_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILTER_SERVERS_MAX", 1)
    world = World()
    known = FakeConnection()
    world.register(known, ONE)
    with pytest.raises(Refused) as caught:
        world.register(FakeConnection(), TWO)
    assert caught.value.code == Code.SYSTEM_BUSY
    world.register(known, ONE)
