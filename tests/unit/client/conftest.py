"""A name server and a broker in this process, on free ports, that client tests talk to."""

from __future__ import annotations

import asyncio
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
from cosmodrome.nameserver.app import NameServer, build_nameserver

SMALL = {
    "mapped_file_size_commit_log": 4 << 20,
    "mapped_file_size_consume_queue": 6000,
    "max_hash_slot_num": 1000,
    "max_index_num": 4000,
}


class Node:
    """`stop_broker` and `start_broker` keep the port and the data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nameserver: NameServer = build_nameserver(
            NameServerOptions(listen_port=0), SocketOptions(), real_env()
        )
        self.brokers: dict[str, Broker] = {}
        self._ports: dict[str, int] = {}

    @property
    def namesrv(self) -> str:
        return self.nameserver.address

    @property
    def broker(self) -> Broker:
        return self.brokers["broker-a"]

    async def start_broker(self, name: str = "broker-a", **changes: Any) -> Broker:
        options = {
            "broker_name": name,
            "listen_port": self._ports.get(name, 0),
            "namesrv_addr": self.namesrv,
            "broker_ip1": "127.0.0.1",
        }
        store = {"store_path_root_dir": str(self.folder / name), **SMALL}
        for key, value in changes.items():
            (store if key in StoreOptions.__struct_fields__ else options)[key] = value
        broker = build_broker(
            BrokerOptions(**options),  # type: ignore[arg-type]
            StoreOptions(**store),  # type: ignore[arg-type]
            SocketOptions(),
            real_env(seed=1),
        )
        await broker.start()
        self.brokers[name] = broker
        self._ports[name] = broker.port
        async with asyncio.timeout(10):
            while not broker.ready()[0]:
                await asyncio.sleep(0.01)
        return broker

    async def stop_broker(self, name: str = "broker-a") -> None:
        broker = self.brokers.pop(name, None)
        if broker is not None:
            await broker.stop()

    async def stop(self) -> None:
        for name in list(self.brokers):
            await self.stop_broker(name)
        await self.nameserver.stop()


@pytest.fixture
async def bare_node(tmp_path: Path) -> AsyncIterator[Node]:
    """Without broker: a test starts the ones it wants."""
    node = Node(tmp_path)
    await node.nameserver.start()
    yield node
    await node.stop()


@pytest.fixture
async def node(bare_node: Node) -> Node:
    await bare_node.start_broker()
    return bare_node
