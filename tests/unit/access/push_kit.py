"""A broker with accounts over sockets, and clients that note everything it pushes to them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import pathlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from cosmodrome.node import Node, embedded
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.router import Router
from cosmodrome.wire import bodies, commands, table
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.signature import sign
from cosmodrome.wire.table import CLIENT, Call, Command, R, Reply

# Both may consume as the group `shared`, so that they meet there; only one may see `Secret`.
ACCOUNTS = """
accounts:
  - accessKey: the-admin
    secretKey: secret-of-the-admin
    admin: true
    peer: true
  - accessKey: the-owner
    secretKey: secret-of-the-owner
    topicPerms: ["Secret=PUB|SUB", "DefaultCluster_REPLY_TOPIC=PUB"]
    groupPerms: ["shared=SUB", "private=SUB"]
  - accessKey: the-stranger
    secretKey: secret-of-the-stranger
    topicPerms: ["Own=PUB|SUB"]
    groupPerms: ["shared=SUB"]
  - accessKey: the-twin
    secretKey: secret-of-the-twin
    topicPerms: ["Secret=PUB|SUB"]
    groupPerms: ["shared=SUB"]
"""
ADMIN, OWNER, STRANGER, TWIN = "the-admin", "the-owner", "the-stranger", "the-twin"
SECONDS_MAX = 60.0
PUSHED = [
    code
    for code, row in sorted(table.rows().items())
    if CLIENT in row.served_by and not row.planned
]


class Seen:
    """Serves every request that a broker can send to a client, and notes it."""

    def __init__(self) -> None:
        self.asks: dict[int, list[Any]] = collections.defaultdict(list)

    def take(self, ask: Command[Any], call: Call) -> Reply:
        self.asks[call.frame.code].append(ask)
        return Reply()


def _noting(seen: Seen) -> object:
    """A service with one handler for each row."""

    def handler(row: type[Command[Any]]) -> Any:
        def take(self: object, ask: Any, call: Call) -> Reply:
            return seen.take(ask, call)

        return row.handler(take)

    rows = table.rows()
    return type("Noting", (), {f"take_{code}": handler(rows[code]) for code in PUSHED})()


class Client:
    """One connection whose requests are signed by `account`; None signs nothing."""

    def __init__(self, address: str, account: str | None) -> None:
        host, _, port = address.rpartition(":")
        self.seen = Seen()

        def prepare(frame: Frame) -> None:
            if account is not None:
                sign(frame, account, f"secret-of-{account}".encode())

        router = Router(CLIENT, [_noting(self.seen)])
        self.channel = Channel(host, int(port), router=router, prepare=prepare)

    async def call(self, command: Command[R]) -> R:
        return await self.channel.call(command, timeout_ms=int(SECONDS_MAX * 1000))

    async def beat(
        self, client_id: str, *, producer: str = "", consumer: str = "", topics: str = ""
    ) -> None:
        subscriptions = [
            bodies.SubscriptionData(topic=topic, sub_version=1) for topic in topics.split()
        ]
        consumers = [bodies.ConsumerData(group_name=consumer, subscription_data_set=subscriptions)]
        beat = bodies.HeartbeatData(
            client_id=client_id,
            consumer_data_set=consumers if consumer else [],
            producer_data_set=[bodies.ProducerData(group_name=producer)] if producer else [],
        )
        await self.call(commands.HeartBeat(body=bodies.encode(beat)))

    async def send(
        self, topic: str, body: bytes, properties: str = "", **changes: Any
    ) -> commands.SendReply:
        fields: dict[str, Any] = {
            "producer_group": "tx",
            "default_topic": "TBW102",
            "default_topic_queue_nums": 1,
            "queue_id": 0,
            "sys_flag": 0,
            "born_timestamp": int(time.time() * 1000),
            "flag": 0,
        }
        fields |= changes
        return await self.call(
            commands.SendMessageV2(topic=topic, body=body, properties=properties, **fields)
        )

    async def send_half(self, topic: str, body: bytes) -> commands.SendReply:
        return await self.send(topic, body, "TRAN_MSG\x01true\x02PGROUP\x01tx", sys_flag=4)

    async def got(self, code: int) -> list[Any]:
        """What was pushed to it before now: pushes and answers keep their order."""
        await self.call(commands.GetSystemTopicListFromBroker())
        return self.seen.asks[code]


class World:
    def __init__(self, node: Node) -> None:
        self.node = node
        self._clients: list[Client] = []

    def client(self, account: str | None) -> Client:
        client = Client(self.node.broker_address, account)
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.channel.close()


@contextlib.asynccontextmanager
async def world(
    folder: pathlib.Path, accounts: str = ACCOUNTS, **settings: Any
) -> AsyncIterator[World]:
    path = folder / "accounts.yml"
    path.write_text(accounts)
    chosen = {"acl_enable": True, "acl_file": str(path), **settings}
    async with embedded(**chosen) as node:
        world = World(node)
        try:
            yield world
        finally:
            await world.close()


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(SECONDS_MAX):
        while not is_so():
            await asyncio.sleep(0.005)
