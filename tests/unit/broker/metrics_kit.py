"""A name server and a broker in this process, some traffic of every kind, and scrapes of both."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.cli.serve import scraping
from cosmodrome.env.base import Clock, Env
from cosmodrome.env.options import BrokerOptions, NameServerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.nameserver.app import NameServer, build_nameserver
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.message import format_properties, parse_offset_message_id

_LINE = re.compile(r"([a-z_0-9]+)(?:\{(.*)\})? (\S+)\Z")
_LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"(?:,|\Z)')
PREPARED, COMMIT, ROLLBACK = 4, 8, 12


class Scrape:
    """A page taken apart: every line must be one of the format."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: list[tuple[str, dict[str, str], float]] = []
        for line in text.splitlines():
            if line.startswith("#"):
                assert re.match(r"# (HELP|TYPE|EOF)\b", line), line
                continue
            found = _LINE.match(line)
            assert found is not None, line
            labels = dict(_LABEL.findall(found[2] or ""))
            assert len(labels) == len(_LABEL.findall(found[2] or "")), line
            self.samples.append((found[1], labels, float(found[3])))

    @property
    def names(self) -> set[str]:
        return {name for name, _, _ in self.samples}

    def get(self, name: str, **labels: str) -> float | None:
        """The one value with these labels, among others; None when there is none."""
        found = [
            value
            for one, has, value in self.samples
            if one == name and labels.items() <= has.items()
        ]
        assert len(found) <= 1, f"{name} {labels} is not one: {found}"
        return found[0] if found else None


class Node:
    def __init__(self, nameserver: NameServer, broker: Broker, channel: Channel, env: Env) -> None:
        self.nameserver = nameserver
        self.broker = broker
        self.channel = channel
        self.page = scraping.of_node(env, nameserver, lambda: broker).page

    async def scrape(self, accept: str = "") -> Scrape:
        page = await self.page(accept)
        return Scrape(b"".join(page.chunks).decode())

    async def send(self, topic: str, queue_id: int = 0, **more: Any) -> commands.SendReply:
        ask: dict[str, Any] = {"sys_flag": 0, "body": b"hello", "properties": ""} | more
        return await self.channel.call(
            commands.SendMessageV2(
                producer_group="p",
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=queue_id,
                born_timestamp=1,
                flag=0,
                **ask,
            )
        )

    async def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        await self.channel.call(
            commands.UpdateConsumerOffset(
                consumer_group=group, topic=topic, queue_id=queue_id, commit_offset=offset
            )
        )

    async def pull(self, group: str, topic: str, queue_id: int, offset: int, count: int) -> None:
        await self.channel.call(
            commands.PullMessage(
                consumer_group=group,
                topic=topic,
                queue_id=queue_id,
                queue_offset=offset,
                max_msg_nums=count,
                sys_flag=4,  # the pull carries its subscription
                commit_offset=0,
                suspend_timeout_millis=0,
                subscription="*",
                sub_version=0,
            )
        )

    async def heart_beat(self, group: str, *topics: str, model: str = "CLUSTERING") -> None:
        subscribed = [
            bodies.SubscriptionData(topic=topic, sub_string="*", sub_version=1) for topic in topics
        ]
        beat = bodies.HeartbeatData(
            client_id="client",
            producer_data_set=[bodies.ProducerData(group_name="p")],
            consumer_data_set=[
                bodies.ConsumerData(
                    group_name=group,
                    consume_type="CONSUME_PASSIVELY",
                    message_model=model,
                    consume_from_where="CONSUME_FROM_LAST_OFFSET",
                    subscription_data_set=subscribed,
                )
            ],
        )
        await self.channel.call(commands.HeartBeat(body=bodies.encode(beat)))

    async def transaction(self, topic: str, how: int) -> None:
        pairs = {"TRAN_MSG": "true", "PGROUP": "p", "UNIQ_KEY": "u"}
        properties = format_properties(pairs)
        half = await self.send(topic, sys_flag=PREPARED, properties=properties)
        _, log_offset = parse_offset_message_id(half.msg_id)
        await self.channel.call(
            commands.EndTransaction(
                producer_group="p",
                tran_state_table_offset=half.queue_offset,
                commit_log_offset=log_offset,
                commit_or_rollback=how,
                msg_id="u",
            )
        )

    async def everything(self) -> None:
        """Traffic after which every metric has something to tell."""
        await self.heart_beat("G", "T")
        sent = [await self.send("T") for _ in range(5)]
        await self.send("T", properties=format_properties({"DELAY": "18"}))
        await self.send("T", properties=format_properties({"TIMER_DELAY_SEC": "3600"}))
        await self.pull("G", "T", 0, 0, 3)
        await self.commit("G", "T", 0, 2)
        await self.transaction("T", COMMIT)
        await self.transaction("T", ROLLBACK)
        _, log_offset = parse_offset_message_id(sent[0].msg_id)
        for level in (-1, 18):
            await self.channel.call(
                commands.ConsumerSendMsgBack(offset=log_offset, group="G", delay_level=level)
            )


@contextlib.asynccontextmanager
async def node(folder: Path, clock: Clock | None = None, **changes: Any) -> AsyncIterator[Node]:
    env = real_env(seed=1)
    if clock is not None:
        env = dataclasses.replace(env, clock=clock)
    nameserver = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), env)
    await nameserver.start()
    broker = build_broker(
        BrokerOptions(broker_name="b", listen_port=0, namesrv_addr=nameserver.address, **changes),
        StoreOptions(
            store_path_root_dir=str(folder),
            mapped_file_size_commit_log=1 << 20,
            mapped_file_size_consume_queue=6000,
            max_hash_slot_num=100,
            max_index_num=400,
            disk_space_warning_level_ratio=100,
        ),
        SocketOptions(),
        env,
    )
    await broker.start()
    channel = Channel("127.0.0.1", broker.port)
    try:
        while not broker.ready()[0]:
            await asyncio.sleep(0.01)
        yield Node(nameserver, broker, channel, env)
    finally:
        await channel.close()
        await broker.stop()
        await nameserver.stop()
