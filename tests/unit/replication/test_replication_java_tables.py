"""A slave of Apache RocketMQ's broker asks for the tables that it is not sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.goldens import Golden, each_golden
from tests.unit.broker.test_broker_app import channel_to, running
from tests.unit.replication.tables_kit import Side, handlers, pair, served, side, until

from cosmodrome.broker.replicate import java_tables
from cosmodrome.broker.replicate.java_tables import JavaTables
from cosmodrome.wire import bodies, fastjson
from cosmodrome.wire.bodies import SubscriptionGroupConfig, TopicConfig
from cosmodrome.wire.commands.broker import GetBrokerRuntimeInfo
from cosmodrome.wire.commands.group import GetAllSubscriptiongroupConfig
from cosmodrome.wire.commands.offset import GetAllConsumerOffset, GetAllDelayOffset
from cosmodrome.wire.commands.topic import GetAllTopicConfig
from cosmodrome.wire.table import Call, Reply


def asking(slave: Side) -> JavaTables:
    members = slave.rooms.members
    return JavaTables(slave.applied, members.topics, members.groups)


class JavaMaster:
    """Answers with these bodies; what it has none for is refused."""

    def __init__(self, **answers: bytes) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def _answer(self, name: str) -> Reply:
        self.asked.append(name)
        return Reply(body=self.answers[name])

    @GetAllTopicConfig.handler
    def topics(self, ask: GetAllTopicConfig, call: Call) -> Reply:
        return self._answer("topics")

    @GetAllSubscriptiongroupConfig.handler
    def groups(self, ask: GetAllSubscriptiongroupConfig, call: Call) -> Reply:
        return self._answer("groups")

    @GetAllConsumerOffset.handler
    def offsets(self, ask: GetAllConsumerOffset, call: Call) -> Reply:
        return self._answer("offsets")

    @GetAllDelayOffset.handler
    def delays(self, ask: GetAllDelayOffset, call: Call) -> Reply:
        return self._answer("delays")

    @GetBrokerRuntimeInfo.handler
    def info(self, ask: GetBrokerRuntimeInfo, call: Call) -> Reply:
        return self._answer("info")


def info(end: int) -> bytes:
    return b'{"table":{"commitLogMaxOffset":"%d"}}' % end


TOPICS = (
    b'{"dataVersion":{"counter":30,"timestamp":5},"topicConfigTable":{"GOrder":{"order":true,'
    b'"perm":6,"readQueueNums":3,"topicFilterType":"SINGLE_TAG","topicName":"GOrder",'
    b'"topicSysFlag":0,"writeQueueNums":3}}}'
)
GROUPS = (
    b'{"dataVersion":{"counter":14,"timestamp":6},"subscriptionGroupTable":{"g":{"brokerId":0,'
    b'"consumeEnable":true,"groupName":"g","retryMaxTimes":9,"retryQueueNums":1}}}'
)


async def test_tables_of_a_java_master(tmp_path: Path) -> None:
    java = JavaMaster(
        topics=TOPICS,
        groups=GROUPS,
        offsets=b'{"offsetTable":{"T@g":{0:9,1:8},"%RETRY%g@g":{0:0}}}',
        delays=b'{"offsetTable":{1:3,2:1}}',
        info=info(0),
    )
    async with side(tmp_path, slave=True) as slave, served(java) as port:
        members = slave.rooms.members
        slave.applied.take("consumerOffset", {"T@other": {"0": 4}}, whole=False)
        tables = asking(slave)
        await tables.linked("127.0.0.1", port)
        await until(lambda: slave.tables["delayOffset"].rows() == {"1": 3, "2": 1})
        assert set(members.topics.table) == {"GOrder"}
        assert members.topics.table["GOrder"].order
        assert members.topics.version.counter == 30
        assert members.groups.table["g"].retry_max_times == 9
        # Merged: what the master has no row for stays.
        assert members.offsets.rows() == {
            "T@g": {0: 9, 1: 8},
            "%RETRY%g@g": {0: 0},
            "T@other": {0: 4},
        }
        await tables.stop()


async def test_tables_of_an_equal_version_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(java_tables, "PERIOD_SECONDS", 0.01)
    java = JavaMaster(
        topics=TOPICS,
        groups=GROUPS,
        offsets=b'{"offsetTable":{}}',
        delays=b'{"offsetTable":{}}',
        info=info(0),
    )
    async with side(tmp_path, slave=True) as slave, served(java) as port:
        topics = slave.rooms.members.topics
        tables = asking(slave)
        await tables.linked("127.0.0.1", port)
        await until(lambda: topics.version.counter == 30)
        java.answers["topics"] = TOPICS.replace(b'"readQueueNums":3', b'"readQueueNums":5')
        count = java.asked.count("topics")
        await until(lambda: java.asked.count("topics") > count + 3)
        assert topics.table["GOrder"].read_queue_nums == 3
        java.answers["topics"] = java.answers["topics"].replace(b":30", b":31")
        await until(lambda: topics.table["GOrder"].read_queue_nums == 5)
        await tables.stop()


async def test_offsets_wait_for_the_log(tmp_path: Path) -> None:
    java = JavaMaster(
        topics=TOPICS,
        groups=GROUPS,
        offsets=b'{"offsetTable":{"T@g":{0:9}}}',
        delays=b'{"offsetTable":{1:3}}',
        info=info(1000),
    )
    async with side(tmp_path, slave=True) as slave, served(java) as port:
        tables = asking(slave)
        await tables.linked("127.0.0.1", port)
        await until(lambda: java.asked.count("info") == 2)
        await tables.stop()
        assert slave.tables["delayOffset"].rows() == {}
        assert slave.tables["consumerOffset"].rows() == {}
        slave.applied._log_end = lambda: 1000
        await until(lambda: slave.tables["delayOffset"].rows() == {"1": 3})
        assert slave.tables["consumerOffset"].rows() == {"T@g": {0: 9}}


async def test_a_bad_answer_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(java_tables, "PERIOD_SECONDS", 0.01)
    java = JavaMaster(
        topics=b"garbage",
        groups=b"[1,2]",
        offsets=b'{"offsetTable":{"T@g":{0:9}}}',
        delays=b"",
        info=info(0),
    )
    async with side(tmp_path, slave=True) as slave, served(java) as port:
        offsets = slave.rooms.members.offsets
        tables = asking(slave)
        await tables.linked("127.0.0.1", port)
        await until(lambda: java.asked.count("delays") > 5)
        assert offsets.query("g", "T", 0) == 9
        lines = [line for line in caplog.messages if line.startswith("table_not_asked")]
        assert len(lines) == 3  # each kind once per minute
        java.answers |= {"topics": TOPICS, "delays": b'{"offsetTable":{1:3}}'}
        await until(lambda: slave.tables["delayOffset"].rows() == {"1": 3})
        assert "GOrder" in slave.rooms.members.topics.table
        await tables.unlinked()


async def test_our_master_answers_as_javas_does(tmp_path: Path) -> None:
    """Ours serves the four codes too, so a classic slave of ours or Java's follows it."""
    async with pair(tmp_path) as (master, slave), served(*handlers(master)) as port:
        theirs, ours = master.rooms.members, slave.rooms.members
        theirs.topics.put(TopicConfig(topic_name="T"))
        theirs.groups.put(SubscriptionGroupConfig(group_name="g"))
        theirs.offsets.commit("g", "T", 3, 9)
        tables = asking(slave)
        await tables.linked("127.0.0.1", port)
        await until(lambda: ours.offsets.rows() == theirs.offsets.rows())
        assert dict(ours.topics.table) == dict(theirs.topics.table)
        assert dict(ours.groups.table) == dict(theirs.groups.table)
        await tables.stop()


async def test_a_java_slave_finds_the_topics_at_the_fast_port(tmp_path: Path) -> None:
    async with running(tmp_path) as broker:
        for port in (broker.port, broker.vip_port):
            async with channel_to(port) as channel:
                for ask in (
                    GetAllTopicConfig(),
                    GetAllConsumerOffset(),
                    GetAllDelayOffset(),
                    GetAllSubscriptiongroupConfig(),
                ):
                    assert isinstance(fastjson.loads((await channel.call(ask)).body), dict)
        assert broker.vip_port == broker.port - 2


@each_golden
def test_bodies_have_the_form_of_javas(golden: Golden) -> None:
    """What Java's broker answers is read and written again without a difference in form."""
    golden.skip_without("wire/json/slave_sync_ha.jsonl")
    kinds: dict[int, type[bodies.Body]] = {
        43: bodies.ConsumerOffsetSerializeWrapper,
        201: bodies.SubscriptionGroupWrapper,
    }
    seen = set()
    for frame in golden.wire("json", "slave_sync_ha"):
        kind = kinds.get(frame.get("request_code", 0))
        if kind is None or frame["kind"] != "response":
            continue
        text = frame["body_text"]
        again = bodies.encode(bodies.decode(kind, text.encode())).decode()
        if kind is bodies.ConsumerOffsetSerializeWrapper:
            assert again == text
        else:
            assert json.loads(again) == json.loads(text)
        seen.add(frame["request_code"])
    assert seen == {43, 201}
