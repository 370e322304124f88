"""Settings that operators change often take effect, from a file's text to what clients see."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.env.config import Source, resolve
from cosmodrome.env.options import (
    BrokerOptions,
    NameServerOptions,
    SocketOptions,
    StoreOptions,
)
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, ConfigError, Refused
from cosmodrome.nameserver.app import NameServer, build_nameserver
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.ports import free_base_port
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.message import parse_offset_message_id, unpack_host

SMALL = {
    "listenPort": "0",
    "brokerName": "broker-a",
    "mappedFileSizeCommitLog": "65536",
    "maxHashSlotNum": "100",
    "maxIndexNum": "400",
}


class Node:
    """A broker made from texts, and a channel to it and to its name server."""

    def __init__(self, broker: Broker, nameserver: NameServer, folder: Path) -> None:
        self.broker = broker
        self.folder = folder
        self._channel = Channel("127.0.0.1", broker.port)
        self._to_nameserver = Channel("127.0.0.1", nameserver.port)
        self.call = self._channel.call

    async def route(self, topic: str) -> bodies.TopicRouteData:
        ask = commands.GetRouteinfoByTopic(topic=topic)
        return bodies.decode(bodies.TopicRouteData, (await self._to_nameserver.call(ask)).body)

    async def topics(self) -> dict[str, bodies.TopicConfig]:
        data = (await self.call(commands.GetAllTopicConfig())).body
        return bodies.decode(bodies.TopicConfigSerializeWrapper, data).topic_config_table

    async def send(self, topic: str = "T", body: bytes = b"x", **fields: str) -> commands.SendReply:
        properties = "\x02".join(f"{name}\x01{value}" for name, value in fields.items())
        return await self.call(
            commands.SendMessageV2(
                producer_group="p",
                topic=topic,
                default_topic="TBW102",
                default_topic_queue_nums=16,
                queue_id=0,
                sys_flag=0,
                born_timestamp=1,
                flag=0,
                properties=properties,
                body=body,
            )
        )

    async def close(self) -> None:
        await self._channel.close()
        await self._to_nameserver.close()


@contextlib.asynccontextmanager
async def node(folder: Path, **settings: str) -> AsyncIterator[Node]:
    env = real_env(seed=1)
    nameserver = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), env)
    await nameserver.start()
    texts = {"namesrvAddr": nameserver.address, "storePathRootDir": str(folder / "store")}
    groups = (BrokerOptions, StoreOptions, SocketOptions)
    chosen = resolve(groups, [Source("broker.conf", SMALL | texts | settings)])
    broker = build_broker(
        chosen.get(BrokerOptions), chosen.get(StoreOptions), chosen.get(SocketOptions), env
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(nameserver.stop)
        await broker.start()
        stack.push_async_callback(broker.stop)
        async with asyncio.timeout(60):
            while not broker.ready()[0]:
                await asyncio.sleep(0.01)
        made = Node(broker, nameserver, folder)
        stack.push_async_callback(made.close)
        yield made


@contextlib.contextmanager
def refused(code: Code, match: str | None = None) -> Iterator[None]:
    with pytest.raises(Refused, match=match) as caught:
        yield
    assert caught.value.code == code


async def test_namesrv_addr_cluster_name_and_broker_name(tmp_path: Path) -> None:
    async with node(tmp_path, brokerClusterName="C1", brokerName="b1") as it:
        await it.send()
        (broker,) = (await it.route("T")).broker_datas
        assert (broker.cluster, broker.broker_name) == ("C1", "b1")
        assert broker.broker_addrs == {0: it.broker.address}


async def test_broker_ip1_is_told_to_clients_and_put_into_ids(tmp_path: Path) -> None:
    async with node(tmp_path, brokerIP1="192.0.2.7") as it:
        reply = await it.send()
        (broker,) = (await it.route("T")).broker_datas
        assert broker.broker_addrs == {0: f"192.0.2.7:{it.broker.port}"}
        host, _ = parse_offset_message_id(reply.msg_id)
        assert unpack_host(host) == ("192.0.2.7", it.broker.port)


async def test_broker_ip2_is_told_to_slaves(tmp_path: Path) -> None:
    async with node(tmp_path, brokerIP2="192.0.2.8") as it:
        register = commands.RegisterBroker(
            broker_name="broker-a",
            broker_addr="127.0.0.1:1",
            cluster_name="DefaultCluster",
            ha_server_addr="127.0.0.1:2",
            broker_id=1,
        )
        reply = await it._to_nameserver.call(register)
        assert reply.ha_server_addr == f"192.0.2.8:{it.broker.port + 1}"


async def test_listen_port(tmp_path: Path) -> None:
    port = free_base_port("127.0.0.1")
    async with node(tmp_path, listenPort=str(port)) as it:
        assert (it.broker.port, it.broker.vip_port) == (port, port - 2)


async def test_broker_id_and_role_of_a_slave(tmp_path: Path) -> None:
    async with node(tmp_path, brokerRole="SLAVE", brokerId="2") as it:
        with refused(Code.SERVICE_NOT_AVAILABLE, "(?i)slave"):
            await it.send("SELF")
    async with node(tmp_path / "m", brokerRole="SYNC_MASTER", brokerId="2") as it:
        await it.send()
        assert list((await it.route("T")).broker_datas[0].broker_addrs) == [0]


async def test_auto_create_topic_enable(tmp_path: Path) -> None:
    async with node(tmp_path, autoCreateTopicEnable="false") as it:
        assert "TBW102" not in await it.topics()
        with refused(Code.TOPIC_NOT_EXIST):
            await it.send()


async def test_default_topic_queue_nums(tmp_path: Path) -> None:
    async with node(tmp_path, defaultTopicQueueNums="3") as it:
        await it.send()
        assert (await it.topics())["T"].write_queue_nums == 3


async def test_auto_create_subscription_group(tmp_path: Path) -> None:
    pull = functools.partial(
        commands.PullMessage,
        consumer_group="newcomers",
        topic="T",
        queue_id=0,
        queue_offset=0,
        max_msg_nums=1,
        sys_flag=4,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription="*",
        sub_version=0,
    )
    async with node(tmp_path, autoCreateSubscriptionGroup="false") as it:
        await it.send()
        with refused(Code.SUBSCRIPTION_GROUP_NOT_EXIST, "newcomers"):
            await it.call(pull())
    async with node(tmp_path / "on") as it:
        await it.send()
        assert (await it.call(pull())).code == Code.SUCCESS


async def test_trace_topic_enable(tmp_path: Path) -> None:
    async with node(tmp_path) as it:
        assert "RMQ_SYS_TRACE_TOPIC" not in await it.topics()
    async with node(tmp_path / "on", traceTopicEnable="true", msgTraceTopicName="Trace") as it:
        assert "Trace" in await it.topics()


async def test_reject_transaction_message(tmp_path: Path) -> None:
    async with node(tmp_path, rejectTransactionMessage="true") as it:
        with refused(Code.NO_PERMISSION, "rejectTransactionMessage"):
            await it.send(TRAN_MSG="true")


async def test_store_paths_and_file_size(tmp_path: Path) -> None:
    log = tmp_path / "elsewhere" / "log"
    async with node(tmp_path, storePathCommitLog=str(log), mappedFileSizeCommitLog="131072") as it:
        await it.send()
        first = log / ("0" * 20)
        assert first.stat().st_size == 131072
        assert (tmp_path / "store" / "config" / "topics.json").exists()
        assert not (tmp_path / "store" / "commitlog").exists()


@pytest.mark.parametrize("mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_flush_disk_type(tmp_path: Path, mode: str) -> None:
    async with node(tmp_path, flushDiskType=mode, flushIntervalCommitLog="600000") as it:
        await it.send()
        data = (await it.call(commands.GetBrokerRuntimeInfo())).body
        unsynced = bodies.decode(bodies.KVTable, data).table["remainHowManyDataToFlush"]
        assert (unsynced == "0 B") == (mode == "SYNC_FLUSH"), unsynced


async def test_max_message_size(tmp_path: Path) -> None:
    async with node(tmp_path, maxMessageSize="100") as it:
        await it.send(body=b"x" * 100)
        with refused(Code.MESSAGE_ILLEGAL, "maxMessageSize"):
            await it.send(body=b"x" * 101)


async def test_message_index_enable(tmp_path: Path) -> None:
    query = commands.QueryMessage(
        topic="T", key="k", max_num=9, begin_timestamp=0, end_timestamp=1 << 62
    )
    async with node(tmp_path, messageIndexEnable="false") as it:
        await it.send(KEYS="k")
        with refused(Code.QUERY_NOT_FOUND):
            await it.call(query)
    async with node(tmp_path / "on") as it:
        await it.send(KEYS="k")
        assert (await it.call(query)).body


async def test_message_delay_level_and_flush_delay_offset_interval(tmp_path: Path) -> None:
    settings = {"messageDelayLevel": "2s 1s", "flushDelayOffsetInterval": "50"}
    async with node(tmp_path, **settings) as it:
        loop = asyncio.get_running_loop()
        began = loop.time()
        reply = await it.send(body=b"later", DELAY="7")
        assert (reply.queue_id, reply.queue_offset, reply.recall_handle) == (0, 0, None)
        end = commands.GetMaxOffset(topic="T", queue_id=0)
        async with asyncio.timeout(60):
            while (await it.call(end)).offset == 0:
                await asyncio.sleep(0.01)
            assert loop.time() - began > 0.99
            saved = it.folder / "store" / "config" / "delayOffset.json"
            while not saved.exists() or b"2:1" not in saved.read_bytes():
                await asyncio.sleep(0.01)
        assert (await it.call(commands.GetAllDelayOffset())).body == b'{"offsetTable":{2:1}}'
        info = bodies.decode(
            bodies.KVTable, (await it.call(commands.GetBrokerRuntimeInfo())).body
        ).table
        assert info["scheduleMessageOffset_2"] == "1,1"


def test_a_bad_message_delay_level_stops_the_start(tmp_path: Path) -> None:
    store = StoreOptions(store_path_root_dir=str(tmp_path), message_delay_level="1s soon")
    with pytest.raises(ConfigError, match=r"messageDelayLevel.*'soon'"):
        build_broker(BrokerOptions(), store, SocketOptions(), real_env(seed=1))


async def test_timer_max_delay_sec(tmp_path: Path) -> None:
    async with node(tmp_path, timerMaxDelaySec="10") as it:
        with refused(Code.MESSAGE_ILLEGAL, "timerMaxDelaySec 10"):
            await it.send(TIMER_DELAY_SEC="11")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await it.send(body=b"kept", TIMER_DELAY_MS="400", UNIQ_KEY="K1")
        reply = await it.send(body=b"recalled", TIMER_DELAY_MS="400", UNIQ_KEY="K2")
        assert reply.recall_handle is not None
        ask = commands.RecallMessage(topic="T", recall_handle=reply.recall_handle)
        assert (await it.call(ask)).msg_id == "K2"
        end = commands.GetMaxOffset(topic="T", queue_id=0)
        async with asyncio.timeout(60):
            while (await it.call(end)).offset == 0:
                await asyncio.sleep(0.01)
        assert loop.time() - began > 0.39
        await asyncio.sleep(0.1)
        assert (await it.call(end)).offset == 1


async def test_a_message_given_back_comes_again(tmp_path: Path) -> None:
    async with node(tmp_path, messageDelayLevel="1s") as it:
        reply = await it.send(body=b"bad")
        _, log_offset = parse_offset_message_id(reply.msg_id)
        back = commands.ConsumerSendMsgBack(
            offset=log_offset, group="G", delay_level=0, max_reconsume_times=3
        )
        await it.call(back)
        end = commands.GetMaxOffset(topic="%RETRY%G", queue_id=0)
        async with asyncio.timeout(60):
            while (await it.call(end)).offset == 0:
                await asyncio.sleep(0.01)
        back.delay_level = -1
        await it.call(back)
        assert (await it.call(commands.GetMaxOffset(topic="%DLQ%G", queue_id=0))).offset == 1
