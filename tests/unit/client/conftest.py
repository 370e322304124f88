"""A real name server and a real broker in this process, for the tests of clients."""

from __future__ import annotations

import asyncio
import time
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
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import commands
from cosmodrome.wire.message import format_properties

SMALL = {
    "mapped_file_size_commit_log": 8 << 20,
    "mapped_file_size_consume_queue": 60_000,
    "max_hash_slot_num": 1000,
    "max_index_num": 4000,
    "flush_disk_type": "ASYNC_FLUSH",
}


class Node:
    """A name server and one broker; the broker can go away and come back where it was."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self._folder = folder
        self._changes = {"broker_name": "broker-a", "listen_port": 0} | changes
        self._nameserver: NameServer | None = None
        self._channel: Channel | None = None
        self.broker: Broker | None = None
        self.port = 0

    @property
    def namesrv(self) -> str:
        assert self._nameserver is not None
        return self._nameserver.address

    async def start(self) -> None:
        self._nameserver = build_nameserver(
            NameServerOptions(listen_port=0), SocketOptions(), real_env(seed=1)
        )
        await self._nameserver.start()
        await self.start_broker()

    async def start_broker(self) -> None:
        """On the port and the data it had before, if it ran before."""
        options = {**self._changes, "namesrv_addr": self.namesrv}
        if self.port:
            options["listen_port"] = self.port
        self.broker = build_broker(
            BrokerOptions(**options),
            StoreOptions(store_path_root_dir=str(self._folder), **SMALL),
            SocketOptions(),
            real_env(seed=1),
        )
        await self.broker.start()
        self.port = self.broker.port
        async with asyncio.timeout(10):
            while not self.broker.ready()[0]:
                await asyncio.sleep(0.005)

    async def stop_broker(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None
        if self.broker is not None:
            await self.broker.stop()
            self.broker = None

    async def stop(self) -> None:
        await self.stop_broker()
        if self._nameserver is not None:
            await self._nameserver.stop()

    # --- without a client of ours ----------------------------------------------------------------

    async def call(self, command: Any, timeout_ms: int = 5000) -> Any:
        """Ask the broker directly."""
        if self._channel is None:
            self._channel = Channel("127.0.0.1", self.port)
        return await self._channel.call(command, timeout_ms)

    async def create_topic(self, topic: str, queues: int = 4, **changes: Any) -> None:
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
        await self.call(commands.UpdateAndCreateTopic(**{**fields, **changes}))

    async def send(
        self,
        topic: str,
        body: bytes,
        queue_id: int = 0,
        properties: dict[str, str] | None = None,
        **changes: Any,
    ) -> Any:
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
        return await self.call(commands.SendMessageV2(**{**fields, **changes}))

    async def committed(self, group: str, topic: str, queue_id: int = 0) -> int:
        reply = await self.call(
            commands.QueryConsumerOffset(consumer_group=group, topic=topic, queue_id=queue_id)
        )
        offset: int = reply.offset
        return offset


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    await node.start()
    yield node
    await node.stop()
