"""A name server, a broker and consumers in virtual time: hours pass in seconds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.nameserver.app import build_nameserver
from cosmodrome.sim.disk import SimDisk
from cosmodrome.sim.env import SimClock, sim_env
from cosmodrome.sim.net import NetLoop
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import commands
from cosmodrome.wire.message import format_properties

NAMESRV_PORT, BROKER_PORT = 9876, 10911
NAMESRV = f"127.0.0.1:{NAMESRV_PORT}"


class Cluster:
    def __init__(self, loop: NetLoop, seed: int) -> None:
        self.loop = loop
        self.seed = seed
        self.clock = SimClock(loop)
        self.disk = SimDisk(f"disk-{seed}", self.clock.now_ms)
        self.broker: Broker | None = None
        self._names = 0
        self._channel: Channel | None = None
        self._nameserver = build_nameserver(
            NameServerOptions(listen_port=NAMESRV_PORT), SocketOptions(), self.env("namesrv")
        )
        self._consumers: list[Consumer] = []
        self._hung: list[Any] = []

    def env(self, name: str) -> Any:
        return sim_env(self.disk, self.clock, f"{name}-{self.seed}", delay_ms_max=3)

    async def start(self) -> None:
        await self._nameserver.start()
        await self.start_broker()

    async def stop(self) -> None:
        for consumer in self._consumers:
            await consumer.stop()
        for member in self._hung:
            await member.instance.stop()
        await self.stop_broker()
        await self._nameserver.stop()

    async def start_broker(self) -> None:
        self.broker = build_broker(
            BrokerOptions(broker_name="b", listen_port=BROKER_PORT, namesrv_addr=NAMESRV),
            StoreOptions(
                store_path_root_dir="/store",
                mapped_file_size_commit_log=1 << 20,
                mapped_file_size_consume_queue=6000,
                max_hash_slot_num=100,
                max_index_num=400,
                max_message_size=64 * 1024,
            ),
            SocketOptions(),
            self.env("broker"),
        )
        await self.broker.start()
        while not self.broker.ready()[0]:
            await asyncio.sleep(0.05)

    async def stop_broker(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
        if self.broker is not None:
            await self.broker.stop()
            self.broker = None

    # --- acting ----------------------------------------------------------------------------------

    def consumer(self, group: str = "g", name: str | None = None, **settings: Any) -> Consumer:
        self._names += 1
        client = ClientOptions(
            client_ip="10.0.0.1", instance_name=name or f"c{self.seed}-{self._names}"
        )
        consumer = Consumer(
            NAMESRV,
            group=group,
            client=client,
            env=self.env(f"client-{self._names}"),
            **({"consume_from": "first"} | settings),
        )
        self._consumers.append(consumer)
        return consumer

    async def join(
        self, handler: Callable[[ReceivedMessage], Any], topic: str = "T", **settings: Any
    ) -> Consumer:
        """A consumer that calls `handler` in the background until it is stopped."""
        consumer = self.consumer(**settings)
        await consumer.subscribe(topic, handler=handler)
        return consumer

    async def die(self, consumer: Consumer) -> None:
        """End a consumer as `kill -9` does: its connections close, nothing is said."""
        member = await self.hang(consumer)
        await member.instance.stop()

    async def hang(self, consumer: Consumer) -> Any:
        """End a consumer as a machine that freezes does: its connections stay."""
        member, consumer._running = consumer._running, None
        assert member is not None
        instance = member.instance
        for task in (*member.tasks.running, instance._heartbeat_task, instance.routes._task):
            if task is not None:
                task.cancel()
        instance._heartbeat_task = None
        instance.routes._task = None
        member.assignment.windows.clear()
        self._hung.append(member)
        await asyncio.sleep(0)
        return member

    async def call(self, command: Any) -> Any:
        if self._channel is None:
            self._channel = Channel("127.0.0.1", BROKER_PORT)
        return await self._channel.call(command, 5000)

    async def create_topic(self, topic: str = "T", queues: int = 4) -> None:
        await self.call(
            commands.UpdateAndCreateTopic(
                topic=topic,
                default_topic="TBW102",
                read_queue_nums=queues,
                write_queue_nums=queues,
                perm=6,
                topic_filter_type="SINGLE_TAG",
                topic_sys_flag=0,
                order=False,
            )
        )

    async def send(
        self,
        body: bytes,
        queue_id: int = 0,
        topic: str = "T",
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
            "born_timestamp": self.clock.now_ms(),
            "flag": 0,
            "properties": format_properties(properties or {}),
            "body": body,
        }
        return await self.call(commands.SendMessageV2(**{**fields, **changes}))

    async def committed(self, topic: str = "T", queue_id: int = 0, group: str = "g") -> int:
        reply = await self.call(
            commands.QueryConsumerOffset(consumer_group=group, topic=topic, queue_id=queue_id)
        )
        offset: int = reply.offset
        return offset

    async def end(self, topic: str, queue_id: int = 0) -> int:
        reply = await self.call(commands.GetMaxOffset(topic=topic, queue_id=queue_id))
        offset: int = reply.offset
        return offset

    async def until(self, done: Callable[[], bool], seconds: float) -> None:
        """Virtual seconds."""
        async with asyncio.timeout(seconds):
            while not done():
                await asyncio.sleep(max(0.05, seconds / 5000))


def simulate(scenario: Callable[[Cluster], Awaitable[None]], seed: int = 1) -> Cluster:
    """Run a scenario to its end; errors that nobody saw fail it too."""
    loop = NetLoop()
    unseen: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unseen.append(context))
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    cluster = Cluster(loop, seed)

    async def main() -> None:
        await cluster.start()
        try:
            await scenario(cluster)
        finally:
            await cluster.stop()

    try:
        loop.run_until_complete(main())
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()
    assert not unseen, unseen
    return cluster
