"""A name server, a master and its slaves in one process, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
    TlsOptions,
)
from cosmodrome.env.real import real_env
from cosmodrome.nameserver.app import build_nameserver
from cosmodrome.replication.values import FollowerFacts, FollowerState, SourceFacts
from cosmodrome.transport.certificates import Tls
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import commands

SMALL: dict[str, Any] = {
    "mapped_file_size_commit_log": 1 << 16,
    "mapped_file_size_consume_queue": 20 * 100,
    "max_hash_slot_num": 100,
    "max_index_num": 400,
    "disk_space_warning_level_ratio": 100,
    "clean_file_forcibly_enable": False,
}


class Member:
    """One broker of the pair, which can be stopped, killed and started in another role."""

    def __init__(self, folder: Path, namesrv: str, broker_id: int, settings: dict[str, Any]):
        self.folder = folder
        self._namesrv = namesrv
        self._id = broker_id
        self._settings = settings
        self._port = 0
        self._broker: Broker | None = None
        self._channel: Channel | None = None

    @property
    def broker(self) -> Broker:
        assert self._broker is not None
        return self._broker

    @property
    def store(self) -> Any:
        return self.broker._base.store

    @property
    def source(self) -> SourceFacts:
        return self.broker._rooms.replicate.source.facts()

    @property
    def follower(self) -> FollowerFacts:
        facts = self.broker._rooms.replicate.facts()
        assert isinstance(facts, FollowerFacts)
        return facts

    @property
    def in_step(self) -> bool:
        return self.follower.state is FollowerState.IN_STEP

    async def start(self, role: str | None = None, **changes: Any) -> None:
        settings = {**SMALL, **self._settings, **changes}
        if role is not None:
            self._id = 0 if role != "SLAVE" else max(self._id, 1)
        role = role or ("SLAVE" if self._id else settings.pop("broker_role", "ASYNC_MASTER"))
        settings["broker_role"] = role
        tls = {key: settings.pop(key) for key in tuple(settings) if key.startswith("tls_")}
        broker_fields, store_fields = set(BrokerOptions.__struct_fields__), settings
        self._broker = build_broker(
            BrokerOptions(
                listen_port=settings.pop("listen_port", self._port),
                bind_address="127.0.0.1",
                broker_name="pair",
                broker_id=self._id,
                namesrv_addr=self._namesrv,
                **{key: value for key, value in settings.items() if key in broker_fields},
            ),
            StoreOptions(
                store_path_root_dir=str(self.folder),
                **{k: value for k, value in store_fields.items() if k not in broker_fields},
            ),
            SocketOptions(),
            real_env(),
            Tls(TlsOptions(**tls), real_env()),
        )
        await self._broker.start()
        self._port = self._broker.port

    async def stop(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.stop()

    async def call(self, command: Any, timeout_ms: int = 10_000) -> Any:
        if self._channel is None:
            self._channel = self.broker._base.connect("127.0.0.1", self.broker.port)
        return await self._channel.call(command, timeout_ms)

    async def send(self, body: bytes = b"x", topic: str = "T", **properties: str) -> Any:
        return await self.call(send(body, topic, **properties))

    def end(self, topic: str = "T", queue_id: int = 0) -> int:
        end: int = self.store.bounds(topic, queue_id)[1]
        return end

    async def has(self, count: int, topic: str = "T") -> None:
        """Return when it has so many messages in a queue that it knows."""
        topics = self.broker._rooms.members.topics
        await until(lambda: self.end(topic) == count and topics.get(topic) is not None)


class Pair:
    def __init__(self, namesrv: str, master: Member, slaves: list[Member]) -> None:
        self.namesrv = namesrv
        self.master = master
        self.slaves = slaves

    @property
    def slave(self) -> Member:
        return self.slaves[0]


def send(body: bytes = b"x", topic: str = "T", **properties: str) -> commands.SendMessageV2:
    return commands.SendMessageV2(
        producer_group="p",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=2,
        queue_id=0,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties="\x02".join(f"{name}\x01{value}" for name, value in properties.items()),
        body=body,
    )


async def until(check: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def pair(folder: Path, *, slaves: int = 1, **settings: Any) -> AsyncIterator[Pair]:
    """All of them started, the slaves in step."""
    tls = {key: value for key, value in settings.items() if key.startswith("tls_")}
    nameserver = build_nameserver(
        NameServerOptions(listen_port=0, bind_address="127.0.0.1"),
        SocketOptions(),
        real_env(),
        Tls(TlsOptions(**tls), real_env()).door,
    )
    await nameserver.start()
    members = [
        Member(folder / str(number), nameserver.address, number, settings)
        for number in range(slaves + 1)
    ]
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(nameserver.stop)
        for member in members:
            stack.push_async_callback(member.stop)
            await member.start()
        for member in members[1:]:
            await until(lambda member=member: member.in_step)  # type: ignore[misc]
        yield Pair(nameserver.address, members[0], members[1:])
