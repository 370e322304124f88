"""A name server and a broker in this process, on free ports, that client tests talk to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
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
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import commands
from cosmodrome.wire.message import format_properties

SMALL = {
    "mapped_file_size_commit_log": 4 << 20,
    "mapped_file_size_consume_queue": 6000,
    "max_hash_slot_num": 1000,
    "max_index_num": 4000,
}


async def until(happened: Callable[[], object], seconds: float = 60.0) -> None:
    """Return when it happened; the bound only keeps a failed test from hanging."""
    async with asyncio.timeout(seconds):
        while not happened():
            await asyncio.sleep(0.01)


class Node:
    """`stop_broker` and `start_broker` keep the port and the data."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nameserver: NameServer = build_nameserver(
            NameServerOptions(listen_port=0), SocketOptions(), real_env()
        )
        self.brokers: dict[str, Broker] = {}
        self._ports: dict[str, int] = {}
        self._channels: dict[str, Channel] = {}

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
        async with asyncio.timeout(60):
            while not broker.ready()[0]:
                await asyncio.sleep(0.01)
        return broker

    async def stop_broker(self, name: str = "broker-a") -> None:
        channel = self._channels.pop(name, None)
        if channel is not None:
            await channel.close()
        broker = self.brokers.pop(name, None)
        if broker is not None:
            await broker.stop()

    async def stop(self) -> None:
        for name in list(self.brokers):
            await self.stop_broker(name)
        await self.nameserver.stop()

    # --- without a client of ours ----------------------------------------------------------------

    async def call(self, command: Any, timeout_ms: int = 5000, broker: str = "broker-a") -> Any:
        """Ask a broker directly."""
        channel = self._channels.get(broker)
        if channel is None:
            channel = self._channels[broker] = Channel("127.0.0.1", self._ports[broker])
        return await channel.call(command, timeout_ms)

    async def create_topic(
        self, topic: str, queues: int = 4, broker: str = "broker-a", **changes: Any
    ) -> None:
        fields: dict[str, Any] = {
            "topic": topic,
            "default_topic": "TBW102",
            "read_queue_nums": queues,
            "write_queue_nums": queues,
            "perm": 6,
            "topic_filter_type": "SINGLE_TAG",
            "topic_sys_flag": 0,
            "order": False,
        }
        await self.call(commands.UpdateAndCreateTopic(**{**fields, **changes}), broker=broker)

    async def send(
        self,
        topic: str,
        body: bytes,
        queue_id: int = 0,
        properties: dict[str, str] | None = None,
        broker: str = "broker-a",
        **changes: Any,
    ) -> Any:
        """Store one message without a producer."""
        fields: dict[str, Any] = {
            "producer_group": "P",
            "topic": topic,
            "default_topic": "TBW102",
            "default_topic_queue_nums": 4,
            "queue_id": queue_id,
            "sys_flag": 0,
            "born_timestamp": int(time.time() * 1000),
            "flag": 0,
            "properties": format_properties(properties or {}),
            "body": body,
        }
        return await self.call(commands.SendMessageV2(**{**fields, **changes}), broker=broker)

    async def committed(self, group: str, topic: str, queue_id: int = 0) -> int:
        """How far a group has come, as the broker knows it."""
        reply = await self.call(
            commands.QueryConsumerOffset(consumer_group=group, topic=topic, queue_id=queue_id)
        )
        offset: int = reply.offset
        return offset


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
