"""The node inside this process: ports, directories, restarts, settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from cosmodrome.errors import ConfigError, Unreachable
from cosmodrome.node import embedded
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, commands


def send(topic: str = "T") -> commands.SendMessageV2:
    return commands.SendMessageV2(
        producer_group="p",
        topic=topic,
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        properties="TAGS\x01A",
        body=b"hello",
    )


def channel_to(address: str) -> Channel:
    host, _, port = address.partition(":")
    return Channel(host, int(port))


async def end_of(address: str, topic: str = "T") -> int:
    channel = channel_to(address)
    try:
        return (await channel.call(commands.GetMaxOffset(topic=topic, queue_id=0))).offset
    finally:
        await channel.close()


async def test_a_node_is_ready_for_clients_and_leaves_nothing_behind() -> None:
    async with embedded() as node:
        folder = Path(node.data)
        assert folder.is_dir()
        names = channel_to(node.namesrv)
        reply = await names.call(commands.GetRouteinfoByTopic(topic="TBW102"))
        route = bodies.decode(bodies.TopicRouteData, reply.body)
        assert route.broker_datas[0].broker_addrs == {0: node.broker_address}
        assert route.broker_datas[0].broker_name == node.broker_name == "embedded"
        await names.close()
        broker = channel_to(node.broker_address)
        assert (await broker.call(send())).queue_offset == 0
        await broker.close()
    assert not folder.exists()


async def test_a_restart_keeps_ports_and_messages() -> None:
    async with embedded() as node:
        before = (node.namesrv, node.broker_address)
        channel = channel_to(node.broker_address)
        await channel.call(send())
        await channel.close()
        await node.restart()
        assert (node.namesrv, node.broker_address) == before
        assert await end_of(node.broker_address) == 1


async def test_a_given_directory_stays(tmp_path: Path) -> None:
    for offset in range(2):
        async with embedded(data=str(tmp_path / "store")) as node:
            assert node.data == str(tmp_path / "store")
            channel = channel_to(node.broker_address)
            assert (await channel.call(send())).queue_offset == offset
            await channel.close()
    assert (tmp_path / "store" / "commitlog").is_dir()


async def test_the_broker_can_be_stopped_alone() -> None:
    async with embedded() as node:
        await node.stop_broker()
        await node.stop_broker()
        with pytest.raises(Unreachable):
            await end_of(node.broker_address)
        await node.start_broker()
        await node.start_broker()


async def test_two_nodes_do_not_meet() -> None:
    async with embedded() as one, embedded() as other:
        assert one.namesrv != other.namesrv
        assert one.broker_address != other.broker_address


async def test_settings_reach_the_broker() -> None:
    async with embedded(broker_name="b2", default_topic_queue_nums=2) as node:
        channel = channel_to(node.namesrv)
        reply = await channel.call(commands.GetRouteinfoByTopic(topic="TBW102"))
        route = bodies.decode(bodies.TopicRouteData, reply.body)
        assert route.queue_datas[0].broker_name == "b2"
        assert route.queue_datas[0].write_queue_nums == 2
        await channel.close()


def test_wrong_settings_are_named_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="did you mean auto_create_topic_enable"):
        embedded(auto_create_topics_enable=False)
    with pytest.raises(ConfigError, match="listen_port is chosen"):
        embedded(listen_port=1)
    with pytest.raises(ConfigError, match="max_message_size='x'"):
        embedded(max_message_size="x")
    with pytest.raises(ConfigError, match="not started"):
        _ = embedded().namesrv
