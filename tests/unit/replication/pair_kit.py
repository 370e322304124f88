"""What the tests of replication share: stores on simulated disks, a master, slaves, raw peers."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tests.unit.store.store_kit import draft

from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import Unreachable
from cosmodrome.replication import frames
from cosmodrome.replication.follower import Follower
from cosmodrome.replication.source import Source
from cosmodrome.replication.tables import AppliedTables
from cosmodrome.replication.values import FollowerState, Node
from cosmodrome.sim.disk import SimDisk
from cosmodrome.sim.env import SimClock, sim_env
from cosmodrome.sim.net import NetLoop
from cosmodrome.store.store import Store

HA_PORT = 10_912
ADDRESS = f"127.0.0.1:{HA_PORT}"
FILE_BYTES = 16 * 1024

Scenario = Callable[[NetLoop], Awaitable[None]]


def on_net(scenario: Scenario) -> None:
    """Run it on the network in memory, in virtual time."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, NetLoop)
        await scenario(loop)

    with asyncio.Runner(loop_factory=NetLoop) as runner:
        runner.run(run())


class Rows:
    """A table in memory."""

    def __init__(
        self, name: str, rows: Mapping[str, Any] | None = None, *, leads: bool = False
    ) -> None:
        self.name = name
        self.leads = leads
        self.table: dict[str, Any] = dict(rows or {})
        self.applied: list[tuple[dict[str, Any], bool]] = []
        self.listeners: list[Callable[[Mapping[str, Any]], None]] = []

    def rows(self) -> Mapping[str, Any]:
        return dict(self.table)

    def on_change(self, changed: Callable[[Mapping[str, Any]], None]) -> Callable[[], None]:
        self.listeners.append(changed)
        return lambda: self.listeners.remove(changed)

    def apply(self, rows: Mapping[str, Any], *, whole: bool) -> None:
        self.applied.append((dict(rows), whole))
        if whole:
            self.table.clear()
        self.table.update(rows)
        self.table = {name: row for name, row in self.table.items() if row is not None}

    def put(self, **rows: Any) -> None:
        self.table.update(rows)
        for changed in self.listeners:
            changed(rows)


class NoClassicMaster:
    async def speaks_ours(self) -> bool | None:
        return None

    async def bounds(self) -> tuple[int, int]:
        raise Unreachable("there is no remoting port in this test")

    async def first_record(self) -> bytes:
        raise Unreachable("there is no remoting port in this test")


class KnownMaster:
    """A classic master whose store is at hand."""

    def __init__(self, store: Store, ours: bool | None = None) -> None:
        self.store = store
        self.ours = ours

    async def speaks_ours(self) -> bool | None:
        return self.ours

    async def bounds(self) -> tuple[int, int]:
        return self.store.log_start, self.store.log_end

    async def first_record(self) -> bytes:
        return self.store.record(0) or b""


class Machine:
    """`disk` is that of an earlier life."""

    def __init__(
        self,
        loop: NetLoop,
        name: str,
        broker_id: int,
        *,
        disk: SimDisk | None = None,
        **changes: Any,
    ) -> None:
        self.loop = loop
        self.name = name
        self.clock = SimClock(loop)
        self.disk = disk or SimDisk(f"disk-{name}", self.clock.now_ms)
        self.env = sim_env(self.disk, self.clock, name, delay_ms_max=3)
        self.node = Node("C", "b", broker_id, f"{name}-1")
        settings: dict[str, Any] = {
            "store_path_root_dir": "/store",
            "flush_disk_type": "SYNC_FLUSH",
            "broker_role": "SLAVE" if broker_id else "SYNC_MASTER",
            "mapped_file_size_commit_log": FILE_BYTES,
            "mapped_file_size_consume_queue": 2000,
            "max_hash_slot_num": 7,
            "max_index_num": 100,
            "max_message_size": 8000,
            "disk_space_warning_level_ratio": 100,
        }
        self.options = StoreOptions(**(settings | changes))
        self.store = Store(self.options, self.env)

    def send(self, count: int = 1, body: bytes = b"body") -> int:
        """Stage messages; the end of the log behind them."""
        end = 0
        for _ in range(count):
            end = self.store.append(draft(body)).end
        return end

    async def put(self, count: int = 1, body: bytes = b"body") -> None:
        await self.store.durable(self.send(count, body))

    def log(self) -> bytes:
        """All of it, from its first offset on."""
        found = []
        at = self.store.log_start
        while (data := self.store.log_bytes(at, 1 << 20)) is not None:
            found.append(bytes(data))
            at += len(data)
        return b"".join(found)


class Master(Machine):
    def __init__(self, loop: NetLoop, *tables: Rows, name: str = "m", **changes: Any) -> None:
        super().__init__(loop, name, 0, **changes)
        self.source = Source(self.store, self.options, tables, self.node)

    async def start(self, port: int = HA_PORT) -> None:
        await self.store.start()
        await self.source.start("127.0.0.1", port)

    async def stop(self) -> None:
        await self.source.stop()
        await self.store.stop()


class Slave(Machine):
    def __init__(
        self,
        loop: NetLoop,
        *tables: Rows,
        name: str = "s",
        broker_id: int = 1,
        classic_master: Any = None,
        **changes: Any,
    ) -> None:
        super().__init__(loop, name, broker_id, **changes)
        self.follower = Follower(
            self.store,
            self.options,
            AppliedTables(tables, (), lambda: self.store.log_end),
            self.node,
            self.env,
            classic_master or NoClassicMaster(),
        )
        self.links: list[bool] = []
        self.follower.linked.subscribe(self.links.append)

    async def start(self, address: str | None = ADDRESS) -> None:
        await self.store.start()
        await self.follower.start()
        self.follower.follow(address)

    async def stop(self) -> None:
        await self.follower.stop()
        await self.store.stop()

    @property
    def state(self) -> FollowerState:
        return self.follower.facts().state


async def until(check: Callable[[], bool], seconds: float = 120.0) -> None:
    """In virtual time, so a generous bound costs nothing."""
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)


async def same_logs(master: Machine, *slaves: Machine) -> None:
    for slave in slaves:
        await until(lambda slave=slave: slave.store.durable_end == master.store.log_end)  # type: ignore[misc]
        start = slave.store.log_start - master.store.log_start
        assert slave.log() == master.log()[start:]


class Raw(asyncio.Protocol):
    """One end of a connection that does as it is told."""

    def __init__(self) -> None:
        self.got = b""
        self.lost = asyncio.get_running_loop().create_future()
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.got += data

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.set_result(None)

    def say(self, *numbers: int) -> None:
        self.transport.write(struct.pack(f">{len(numbers)}q", *numbers))

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    @property
    def closed(self) -> bool:
        return bool(self.lost.done())

    def classic(self) -> list[tuple[int, bytes]]:
        """Whole classic frames so far."""
        found, at = [], 0
        while len(self.got) - at >= 12:
            offset, size = struct.unpack_from(">qi", self.got, at)
            if len(self.got) - at - 12 < size:
                break
            found.append((offset, self.got[at + 12 : at + 12 + size]))
            at += 12 + size
        return found


async def raw_slave(loop: NetLoop, port: int = HA_PORT) -> Raw:
    _, protocol = await loop.create_connection(Raw, "127.0.0.1", port)
    assert isinstance(protocol, Raw)
    return protocol


class RawMaster:
    """A port that says what a test wants; `heard` has the connections in their order."""

    def __init__(self) -> None:
        self.heard: list[Raw] = []
        self._server: Any = None

    async def start(self, loop: NetLoop, greet: Callable[[Raw], None]) -> None:
        def accept() -> Raw:
            peer = Raw()
            self.heard.append(peer)
            made = peer.connection_made

            def connection_made(transport: asyncio.BaseTransport) -> None:
                made(transport)
                greet(peer)

            peer.connection_made = connection_made
            return peer

        self._server = await loop.create_server(accept, "127.0.0.1", HA_PORT)

    def stop(self) -> None:
        self._server.close()
        for peer in self.heard:
            peer.transport.abort()


def who(**changes: Any) -> bytes:
    said: dict[str, Any] = {
        "version": frames.VERSION,
        "broker": "b",
        "cluster": "C",
        "id": 1,
        "incarnation": "x",
        "epoch": 0,
        "first": 0,
        "end": 0,
        "file_bytes": FILE_BYTES,
        "fingerprint": None,
        "from_first": True,
    }
    return frames.who(frames.Who(**(said | changes)))
