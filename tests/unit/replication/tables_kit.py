"""The rooms of a master and of a slave, and what carries rows from one to the other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from cosmodrome.broker.app import Rooms, _build_rooms
from cosmodrome.broker.foundation import Foundation, lay_foundation
from cosmodrome.broker.replicate.hand_back import HandBack
from cosmodrome.broker.replicate.tables import BEHIND_LOG, replicated_tables
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.replication.tables import AppliedTables, Rows, Table
from cosmodrome.transport.router import Router
from cosmodrome.transport.server import Server
from cosmodrome.wire.table import BROKER

SMALL: dict[str, Any] = {
    "mapped_file_size_commit_log": 1 << 20,
    "mapped_file_size_consume_queue": 6000,
    "max_hash_slot_num": 100,
    "max_index_num": 400,
    "message_delay_level": "1s 5s",
}


@dataclasses.dataclass
class Side:
    """One broker without sockets."""

    base: Foundation
    rooms: Rooms
    hand_back: HandBack
    tables: dict[str, Table]
    applied: AppliedTables

    @property
    def config(self) -> Path:
        return Path(self.base.config_dir)

    def follow(self, master: Side) -> Callable[[], None]:
        """Get all tables of a master, then what changes, as if through a link."""
        stops = []
        for name, table in master.tables.items():
            self._take(master, name, table.rows(), whole=True)
            stops.append(table.on_change(self._taker(master, name)))

        def stop() -> None:
            for one in stops:
                one()

        return stop

    def _taker(self, master: Side, name: str) -> Callable[[Rows], None]:
        return lambda rows: self._take(master, name, rows, whole=False)

    def _take(self, master: Side, name: str, rows: Rows, *, whole: bool) -> None:
        carried = msgspec.json.decode(msgspec.json.encode(rows))
        self.applied.take(name, carried, whole=whole)


def build_side(folder: Path, *, slave: bool = False, **changes: Any) -> Side:
    store_options = StoreOptions(
        store_path_root_dir=str(folder),
        broker_role="SLAVE" if slave else "ASYNC_MASTER",
        **SMALL,
    )
    broker_options = BrokerOptions(
        **{"broker_name": "broker-a", "broker_id": int(slave), "listen_port": 0, **changes}
    )
    base = lay_foundation(broker_options, store_options, SocketOptions(), real_env(seed=1))
    rooms = _build_rooms(base)
    hand_back = HandBack(rooms.members.offsets)
    tables = replicated_tables(
        base.store,
        rooms.members,
        rooms.later,
        rooms.receive.expressions,
        rooms.operate.settings,
        hand_back.kept,
    )
    applied = AppliedTables(tables, BEHIND_LOG, lambda: base.store.facts().written_offset)
    return Side(base, rooms, hand_back, {table.name: table for table in tables}, applied)


@contextlib.asynccontextmanager
async def side(folder: Path, *, slave: bool = False, **changes: Any) -> AsyncIterator[Side]:
    one = build_side(folder, slave=slave, **changes)
    async with contextlib.AsyncExitStack() as stopping:
        stopping.push_async_callback(one.base.store.stop)
        await one.base.store.start()
        for room in one.rooms.in_order:
            for service in room.services:
                stopping.push_async_callback(service.stop)
                await service.start()
        if slave:
            for service in (one.hand_back, one.applied):
                stopping.push_async_callback(service.stop)
                await service.start()
        yield one


@contextlib.asynccontextmanager
async def pair(folder: Path) -> AsyncIterator[tuple[Side, Side]]:
    async with side(folder / "master") as master, side(folder / "slave", slave=True) as slave:
        yield master, slave


@contextlib.asynccontextmanager
async def served(*handlers: object, port: int = 0) -> AsyncIterator[int]:
    """The port at which these services answer."""
    server = Server(Router(BROKER, handlers, partial=True), SocketOptions(), "master")
    try:
        yield await server.listen("127.0.0.1", port)
    finally:
        await server.stop()


def handlers(one: Side) -> tuple[object, ...]:
    return tuple(service for room in one.rooms.in_order for service in room.handlers)


async def until(done: Callable[[], bool], seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not done():
            await asyncio.sleep(0.005)
