"""Every change is in the audit log: who asked, what it was before, what it is now."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.env.options import BrokerOptions, NameServerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import CosmodromeError
from cosmodrome.layout import PULL_SUBSCRIPTION
from cosmodrome.nameserver.app import build_nameserver
from cosmodrome.transport.audit_log import AUDIT, changed
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies, commands, table
from cosmodrome.wire.bodies import ConsumerData, HeartbeatData, SubscriptionGroupConfig
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.table import BROKER, NAMESERVER, Call, Command

# Requests that change what an administrator looks after.
AUDITED = {
    commands.UpdateAndCreateTopic,
    commands.DeleteTopicInBroker,
    commands.UpdateAndCreateSubscriptiongroup,
    commands.DeleteSubscriptiongroup,
    commands.UpdateBrokerConfig,
    commands.UpdateAndCreateAclConfig,
    commands.DeleteAclConfig,
    commands.UpdateGlobalWhiteAddrsConfig,
    commands.InvokeBrokerToResetOffset,
    commands.CloneGroupOffset,
    commands.DeleteExpiredCommitlog,
    commands.CleanExpiredConsumequeue,
    commands.CleanUnusedTopic,
    commands.ConsumeMessageDirectly,
    commands.ResumeCheckHalfMessage,
    commands.PutKvConfig,
    commands.DeleteKvConfig,
    commands.DeleteTopicInNamesrv,
    commands.WipeWritePermOfBroker,
    commands.AddWritePermOfBroker,
    commands.UpdateNamesrvConfig,
}
# What clients and brokers do all the time.
TRAFFIC = {
    commands.SendMessage,
    commands.SendMessageV2,
    commands.SendBatchMessage,
    commands.SendReplyMessage,
    commands.SendReplyMessageV2,
    commands.PullMessage,
    commands.LitePullMessage,
    commands.UpdateConsumerOffset,
    commands.ConsumerSendMsgBack,
    commands.HeartBeat,
    commands.UnregisterClient,
    commands.EndTransaction,
    commands.LockBatchMq,
    commands.UnlockBatchMq,
    commands.RegisterFilterServer,
    commands.RecallMessage,
    commands.RegisterBroker,
    commands.UnregisterBroker,
}
READING = ("GET_", "QUERY_", "SEARCH_", "VIEW_", "CHECK_", "LIST_", "INVOKE_BROKER_TO_GET_")


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.changes: list[dict[str, Any]] = []
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.changes.append(record.fields)  # type: ignore[attr-defined]
        self.lines.append(record.getMessage())

    def last(self, action: str) -> dict[str, Any]:
        found = [change for change in self.changes if change["action"] == action]
        assert found, f"{action} is not among {[change['action'] for change in self.changes]}"
        return found[-1]


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler = Heard()
    logger = logging.getLogger(AUDIT)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@contextlib.asynccontextmanager
async def broker_of(folder: Path) -> AsyncIterator[tuple[Broker, Channel]]:
    broker = build_broker(
        BrokerOptions(broker_name="b", listen_port=0),
        StoreOptions(
            store_path_root_dir=str(folder),
            mapped_file_size_commit_log=1 << 20,
            max_hash_slot_num=100,
            max_index_num=400,
        ),
        SocketOptions(),
        real_env(seed=1),
    )
    await broker.start()
    channel = Channel("127.0.0.1", broker.port)
    try:
        yield broker, channel
    finally:
        await channel.close()
        await broker.stop()


def topic(name: str, queues: int) -> commands.UpdateAndCreateTopic:
    return commands.UpdateAndCreateTopic(
        topic=name,
        default_topic="TBW102",
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=6,
        topic_filter_type="SINGLE_TAG",
        topic_sys_flag=0,
        order=False,
    )


def send(name: str, reconsume_times: int = 0) -> commands.SendMessageV2:
    return commands.SendMessageV2(
        producer_group="p",
        topic=name,
        default_topic="TBW102",
        default_topic_queue_nums=4,
        queue_id=0,
        sys_flag=0,
        born_timestamp=1,
        flag=0,
        reconsume_times=reconsume_times,
        body=b"hello",
    )


def test_every_served_request_is_audited_read_only_or_traffic() -> None:
    undecided = [
        row.name
        for row in table.rows().values()
        if (BROKER in row.served_by or NAMESERVER in row.served_by)
        and not row.planned
        and row not in AUDITED
        and row not in TRAFFIC
        and not row.name.startswith(READING)
    ]
    assert undecided == []


async def test_topics(tmp_path: Path, heard: Heard) -> None:
    async with broker_of(tmp_path) as (_, channel):
        await channel.call(topic("T", 4))
        made = heard.last("topic_updated")
        assert made["topic"] == "T" and "before" not in made
        assert made["after"]["writeQueueNums"] == 4
        assert made["peer"].startswith("127.0.0.1:")
        await channel.call(topic("T", 8))
        changed_ = heard.last("topic_updated")
        assert changed_["before"]["writeQueueNums"] == 4
        assert changed_["after"]["writeQueueNums"] == 8
        await channel.call(commands.DeleteTopicInBroker(topic="T"))
        assert heard.last("topic_deleted")["before"]["writeQueueNums"] == 8
        count = len(heard.changes)
        await channel.call(commands.DeleteTopicInBroker(topic="T"))
        assert len(heard.changes) == count, "nothing was there to delete"
        with contextlib.suppress(CosmodromeError):
            await channel.call(topic("T", 0))
        assert len(heard.changes) == count, "what is refused changes nothing"
        await channel.call(send("Fresh"))
        fresh = heard.last("topic_created")
        assert (fresh["topic"], fresh["by"]) == ("Fresh", "send")
        assert fresh["peer"] == made["peer"]


async def test_what_clients_make_in_passing_names_them(tmp_path: Path, heard: Heard) -> None:
    consumer = ConsumerData(group_name="G1", subscription_data_set=[])
    beat = HeartbeatData(client_id="me", consumer_data_set=[consumer], producer_data_set=[])
    pull = commands.PullMessage(
        consumer_group="G2",
        topic="T",
        queue_id=0,
        queue_offset=0,
        max_msg_nums=1,
        sys_flag=PULL_SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription="*",
        sub_version=0,
    )
    async with broker_of(tmp_path) as (_, channel):
        await channel.call(topic("T", 1))
        peer = heard.last("topic_updated")["peer"]
        await channel.call(commands.HeartBeat(body=bodies.encode(beat)))
        await channel.call(pull)
        await channel.call(send("T"))
        await channel.call(
            commands.ConsumerSendMsgBack(group="G3", offset=0, delay_level=0, origin_topic="T")
        )
        await channel.call(send("%RETRY%G4", reconsume_times=17))
    made = [line for line in heard.changes if line["action"] in ("topic_created", "group_created")]
    named = {line.get("topic") or line["group"]: line.get("peer") for line in made}
    assert set(named) == {"G1", "%RETRY%G1", "G2", "G3", "%RETRY%G3", "G4", "%RETRY%G4", "%DLQ%G4"}
    assert set(named.values()) == {peer}


async def test_groups_offsets_and_settings(tmp_path: Path, heard: Heard) -> None:
    async with broker_of(tmp_path) as (_, channel):
        for limit in (16, 3):
            config = SubscriptionGroupConfig(group_name="G", retry_max_times=limit)
            await channel.call(
                commands.UpdateAndCreateSubscriptiongroup(body=bodies.encode(config))
            )
        group = heard.last("group_updated")
        assert group["before"]["retryMaxTimes"] == 16 and group["after"]["retryMaxTimes"] == 3

        await channel.call(topic("T", 1))
        await channel.call(
            commands.UpdateConsumerOffset(
                consumer_group="G", topic="T", queue_id=0, commit_offset=7
            )
        )
        await channel.call(
            commands.CloneGroupOffset(src_group="G", dest_group="H", topic="T", offline=True)
        )
        cloned = heard.last("offsets_cloned")
        assert (cloned["group"], cloned["source"]) == ("H", "G")
        assert (cloned["before"], cloned["after"]) == ({}, {"0": 7})

        await channel.call(commands.DeleteSubscriptiongroup(group_name="G", remove_offset=True))
        gone = heard.last("group_deleted")
        assert gone["before"]["retryMaxTimes"] == 3 and gone["offsets_removed"] is True

        await channel.call(commands.UpdateBrokerConfig(body=b"traceOn=false\n"))
        setting = heard.last("setting_changed")
        assert (setting["key"], setting["before"], setting["after"]) == ("traceOn", "true", "false")

        for ask, action in (
            (commands.DeleteExpiredCommitlog(), "expired_log_cleaned"),
            (commands.CleanExpiredConsumequeue(), "queues_cleaned"),
            (commands.CleanUnusedTopic(), "unused_topics_cleaned"),
        ):
            await channel.call(ask)
            assert heard.last(action)["peer"]


async def test_resets_are_told_with_the_offsets_before(tmp_path: Path, heard: Heard) -> None:
    async with broker_of(tmp_path) as (_, channel):
        await channel.call(topic("T", 1))
        for _ in range(3):
            await channel.call(send("T"))
        beat = bodies.HeartbeatData(
            client_id="c",
            consumer_data_set=[
                bodies.ConsumerData(
                    group_name="G",
                    consume_type="CONSUME_PASSIVELY",
                    message_model="CLUSTERING",
                    consume_from_where="CONSUME_FROM_LAST_OFFSET",
                    subscription_data_set=[
                        bodies.SubscriptionData(topic="T", sub_string="*", sub_version=1)
                    ],
                )
            ],
        )
        await channel.call(commands.HeartBeat(body=bodies.encode(beat)))
        await channel.call(
            commands.UpdateConsumerOffset(
                consumer_group="G", topic="T", queue_id=0, commit_offset=3
            )
        )
        await channel.call(
            commands.InvokeBrokerToResetOffset(topic="T", group="G", timestamp=0, is_force=True)
        )
        reset = heard.last("offset_reset")
        assert (reset["before"], reset["after"]) == ({"0": 3}, {"0": 0})
        assert reset["clients"] == 1


async def test_the_name_server_tells_its_changes(heard: Heard) -> None:
    server = build_nameserver(NameServerOptions(listen_port=0), SocketOptions(), real_env())
    await server.start()
    channel = Channel("127.0.0.1", server.port)
    asks: list[Command[Any]] = [
        commands.PutKvConfig(namespace="N", key="k", value="1"),
        commands.PutKvConfig(namespace="N", key="k", value="2\nX"),
        commands.DeleteKvConfig(namespace="N", key="k"),
        commands.UpdateNamesrvConfig(body=b"brokerExpiredTime=90000\n"),
        commands.DeleteTopicInNamesrv(topic="T"),
        commands.WipeWritePermOfBroker(broker_name="b"),
        commands.AddWritePermOfBroker(broker_name="b"),
    ]
    try:
        for ask in asks:
            await channel.call(ask)
    finally:
        await channel.close()
        await server.stop()
    put, again, deleted, setting, *others = heard.changes
    assert "before" not in put and put["after"] == "1"
    assert (again["before"], again["after"]) == ("1", "2\nX")
    assert all("\n" not in line for line in heard.lines), "one change is one line"
    assert (deleted["action"], deleted["before"]) == ("kv_deleted", "2\nX")
    assert (setting["before"], setting["after"]) == ("120000", "90000")
    assert [other["action"] for other in others] == [
        "route_deleted",
        "write_permission_wiped",
        "write_permission_added",
    ]


class FakeConnection:
    peer = ("::1", 5)


def test_who_it_was(heard: Heard) -> None:
    call = Call(Frame(17, 1, ext={"AccessKey": "key one"}), FakeConnection())  # type: ignore[arg-type]
    changed(call, "topic_updated", topic="T", after={"a": "x" * 5000})
    change = heard.last("topic_updated")
    assert change["peer"] == "[::1]:5" and change["access_key"] == "key one"
    assert len(change["after"]) < 2100, "a value may be cut"
    assert 'peer=[::1]:5 access_key="key one" after=' in heard.lines[-1]
