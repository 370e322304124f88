"""A whole broker over real sockets, and clients that answer what it asks them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.router import Router
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.record import Record, iter_records
from cosmodrome.wire.table import CLIENT


class BrokerClient:
    """One client: it beats for a producer group and, with topics, for a consumer group."""

    def __init__(self, port: int, client_id: str, *services: object) -> None:
        self.client_id = client_id
        self.channel = Channel("127.0.0.1", port, router=Router(CLIENT, services, partial=True))

    async def join(self, *topics: str, group: str = "g", producer: str = "P") -> BrokerClient:
        consumers = [
            bodies.ConsumerData(
                group_name=group,
                subscription_data_set=[
                    bodies.SubscriptionData(topic=topic, sub_version=1) for topic in topics
                ],
            )
        ]
        beat = bodies.HeartbeatData(
            client_id=self.client_id,
            consumer_data_set=consumers if topics else [],
            producer_data_set=[bodies.ProducerData(group_name=producer)],
        )
        await self.channel.call(commands.HeartBeat(body=bodies.encode(beat)))
        return self

    async def call(self, command: Any, timeout_ms: int = 5000) -> Any:
        return await self.channel.call(command, timeout_ms=timeout_ms)

    async def send(
        self, body: bytes = b"hello", row: Any = commands.SendMessageV2, **changes: Any
    ) -> Any:
        fields: dict[str, Any] = {
            "producer_group": "P",
            "topic": "T",
            "default_topic": "TBW102",
            "default_topic_queue_nums": 2,
            "queue_id": 0,
            "sys_flag": 0,
            "born_timestamp": int(time.time() * 1000),
            "flag": 0,
            "body": body,
        }
        return await self.call(row(**{**fields, **changes}))

    async def pull(self, topic: str = "T", queue_id: int = 0, offset: int = 0) -> list[Record]:
        reply = await self.call(
            commands.PullMessage(
                consumer_group="readers",
                topic=topic,
                queue_id=queue_id,
                queue_offset=offset,
                max_msg_nums=32,
                sys_flag=4,  # the subscription comes with the request
                commit_offset=0,
                suspend_timeout_millis=0,
                subscription="*",
                sub_version=0,
            )
        )
        return list(iter_records(reply.body))

    async def commit(self, offset: int, queue_id: int = 0, **names: str) -> None:
        await self.call(
            commands.UpdateConsumerOffset(
                consumer_group=names.get("group", "g"),
                topic=names.get("topic", "T"),
                queue_id=queue_id,
                commit_offset=offset,
            )
        )


class RunningBroker:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._clients: list[BrokerClient] = []

    def client(self, client_id: str = "c1", *services: object) -> BrokerClient:
        client = BrokerClient(self.broker.port, client_id, *services)
        self._clients.append(client)
        return client

    async def leave(self) -> None:
        for client in self._clients:
            await client.channel.close()


@contextlib.asynccontextmanager
async def running_broker(path: Path, **changes: Any) -> AsyncIterator[RunningBroker]:
    broker = build_broker(
        BrokerOptions(**(dict[str, Any](broker_name="b0", listen_port=0) | changes)),
        StoreOptions(
            store_path_root_dir=str(path),
            mapped_file_size_commit_log=1 << 20,
            mapped_file_size_consume_queue=6000,
            max_hash_slot_num=100,
            max_index_num=400,
        ),
        SocketOptions(),
        real_env(seed=1),
    )
    await broker.start()
    here = RunningBroker(broker)
    try:
        yield here
    finally:
        await here.leave()
        await broker.stop()


async def until(done: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not done():
            await asyncio.sleep(0.005)
