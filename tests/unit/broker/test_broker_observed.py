"""What operators see of a broker that works, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.broker.app import build_broker
from cosmodrome.broker.counts import stats as stats_module
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, Refused
from cosmodrome.layout import PULL_SUBSCRIPTION
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.names import OFFSET_MOVED_TOPIC
from cosmodrome.wire.record import iter_records


@contextlib.asynccontextmanager
async def running(folder: Path, *, broker_id: int = 0, **store: Any) -> AsyncIterator[Channel]:
    broker = build_broker(
        BrokerOptions(broker_name="b", listen_port=0, broker_id=broker_id),
        StoreOptions(
            store_path_root_dir=str(folder),
            mapped_file_size_commit_log=1 << 20,
            max_hash_slot_num=100,
            max_index_num=400,
            **store,
        ),
        SocketOptions(),
        real_env(seed=1),
    )
    await broker.start()
    channel = Channel("127.0.0.1", broker.port)
    try:
        yield channel
    finally:
        await channel.close()
        await broker.stop()


def send(topic: str = "T", properties: str = "") -> commands.SendMessageV2:
    return commands.SendMessageV2(
        producer_group="p",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties=properties,
        body=b"hello",
    )


def pull(offset: int, topic: str = "T") -> commands.PullMessage:
    return commands.PullMessage(
        consumer_group="g",
        topic=topic,
        queue_id=0,
        queue_offset=offset,
        max_msg_nums=32,
        sys_flag=PULL_SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription="*",
        sub_version=1,
    )


async def total(channel: Channel, name: str, key: str) -> int:
    ask = commands.ViewBrokerStatsData(stats_name=name, stats_key=key)
    data = bodies.decode(bodies.BrokerStatsData, (await channel.call(ask)).body)
    return data.stats_day.sum


async def test_work_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_module, "TICK_SECONDS", 0.02)
    async with running(tmp_path) as channel:
        for _ in range(3):
            await channel.call(send())
        await channel.call(pull(0))
        async with asyncio.timeout(60):
            while await total(channel, "TOPIC_PUT_NUMS", "T") < 3:
                await asyncio.sleep(0.01)
            while await total(channel, "GROUP_GET_NUMS", "T@g") < 3:
                await asyncio.sleep(0.01)
        assert await total(channel, "BROKER_PUT_NUMS", "DefaultCluster") == 3
        assert await total(channel, "GROUP_GET_FALL_SIZE", "0@T@g") == 0
        table = bodies.decode(
            bodies.KVTable, (await channel.call(commands.GetBrokerRuntimeInfo())).body
        ).table
        counts = [part.partition("]:")[2] for part in table["putMessageDistributeTime"].split()]
        assert sum(map(int, counts)) == 3
        assert float(table["putLatency99"]) <= float(table["putMessageEntireTimeMax"])
        groups = bodies.decode(
            bodies.ConsumeStatsList,
            (await channel.call(commands.GetBrokerConsumeStats(is_order=False))).body,
        )
        assert {"g": []} in groups.consume_stats_list
        await channel.call(commands.DeleteTopicInBroker(topic="T"))
        for name, key in (("TOPIC_PUT_NUMS", "T"), ("GROUP_GET_NUMS", "T@g")):
            with pytest.raises(Refused, match="Nothing was counted"):
                await total(channel, name, key)


async def test_a_delayed_message_is_counted_where_it_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_module, "TICK_SECONDS", 0.02)
    async with running(tmp_path, message_delay_level="1s") as channel:
        await channel.call(send(properties="DELAY\x011"))
        with pytest.raises(Refused):
            await total(channel, "TOPIC_PUT_NUMS", "T")
        async with asyncio.timeout(60):
            while not (await channel.call(pull(0))).body:
                await asyncio.sleep(0.05)
            while await total(channel, "BROKER_PUT_NUMS", "DefaultCluster") < 2:
                await asyncio.sleep(0.01)
        assert await total(channel, "TOPIC_PUT_NUMS", "T") == 1
        assert await total(channel, "QUEUE_PUT_NUMS", "SCHEDULE_TOPIC_XXXX@0") == 1


async def test_a_moved_offset_leaves_an_event(tmp_path: Path) -> None:
    async with running(tmp_path) as channel:
        await channel.call(send())
        for _ in range(3):
            reply = await channel.call(pull(99))
            assert (reply.code, reply.next_begin_offset) == (Code.PULL_OFFSET_MOVED, 1)
        async with asyncio.timeout(60):
            while not (events := (await channel.call(pull(0, OFFSET_MOVED_TOPIC))).body):
                await asyncio.sleep(0.01)
        (event,) = iter_records(events)
        assert json.loads(event.body)["offsetRequest"] == 99
        assert event.pairs()["KEYS"] == "g"


@pytest.mark.parametrize("check", [False, True])
async def test_a_slave_leaves_consumers_where_they_are(tmp_path: Path, check: bool) -> None:
    async with running(tmp_path) as channel:
        await channel.call(send())
        await channel.call(pull(0))  # makes the group known
    slave: dict[str, Any] = {
        "broker_id": 1,
        "broker_role": "SLAVE",
        "ha_master_address": "127.0.0.1:1",
        "offset_check_in_slave": check,
    }
    async with running(tmp_path, **slave) as channel:
        reply = await channel.call(pull(99))
        moved = (Code.PULL_OFFSET_MOVED, 1)
        assert (reply.code, reply.next_begin_offset) == (
            moved if check else (Code.PULL_RETRY_IMMEDIATELY, 99)
        )
        assert not (await channel.call(pull(0, OFFSET_MOVED_TOPIC))).body


async def test_clean_ups_by_hand(tmp_path: Path) -> None:
    async with running(tmp_path) as channel:
        await channel.call(send())
        for ask in (
            commands.CleanUnusedTopic(),
            commands.CleanExpiredConsumequeue(),
            commands.DeleteExpiredCommitlog(),
        ):
            assert (await channel.call(ask)).code == Code.SUCCESS
        assert len(list(iter_records((await channel.call(pull(0))).body))) == 1
