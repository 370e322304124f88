"""Connected clients: joining, leaving, expiring, and who is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.goldens import Golden, each_golden, frames

from cosmodrome.broker.members import clients as module
from cosmodrome.broker.members.clients import Clients
from cosmodrome.broker.members.groups import Groups
from cosmodrome.broker.members.topics import Topics
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, ProtocolError, Refused
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    ConsumerConnection,
    GetConsumerListByGroupResponseBody,
    ProducerConnection,
    ProducerTableInfo,
    SubscriptionGroupConfig,
)
from cosmodrome.wire.commands.client import (
    CheckClientConfig,
    GetAllProducerInfo,
    GetConsumerConnectionList,
    GetConsumerListByGroup,
    GetProducerConnectionList,
    HeartBeat,
    HeartBeatReply,
    NotifyConsumerIdsChanged,
    UnregisterClient,
)
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.table import Call, Command


class Link:
    """A connection that remembers what was pushed over it."""

    def __init__(self, port: int = 1) -> None:
        self.peer = ("192.0.2.1", port)
        self.closed = False
        self.gone = asyncio.Event()
        self.pushed: list[Command[Any]] = []
        self._callbacks: list[Callable[[], None]] = []

    def push(self, command: Command[Any]) -> None:
        self.pushed.append(command)

    def on_close(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def close(self, reason: str) -> None:
        self.closed = True
        self.gone.set()
        for callback in self._callbacks:
            callback()

    @property
    def notices(self) -> list[str]:
        return [
            item.consumer_group
            for item in self.pushed
            if isinstance(item, NotifyConsumerIdsChanged)
        ]


class Broker:
    """The service under test with the real tables behind it."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        env = real_env()
        options = BrokerOptions(broker_name="broker-a", **settings)
        self.topics = Topics(options, str(folder / "topics.json"), env)
        self.groups = Groups(options, str(folder / "groups.json"), env)
        self.clients = Clients(options, self.topics, self.groups, env.clock)

    async def start(self) -> None:
        for service in (self.topics, self.groups, self.clients):
            await service.start()

    async def stop(self) -> None:
        for service in (self.clients, self.groups, self.topics):
            await service.stop()

    def beat(self, link: Link, body: dict[str, Any] | bytes, **frame: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        reply = self.clients.heart_beat(HeartBeat(body=data), call(link, **frame))
        assert isinstance(reply, HeartBeatReply), "it is not served at once"


def call(link: Link | None = None, **frame: Any) -> Call:
    return Call(Frame(code=0, opaque=0, **frame), link or Link())  # type: ignore[arg-type]


def subscription(topic: str, text: str = "*", version: int = 1, **more: Any) -> dict[str, Any]:
    return {"topic": topic, "subString": text, "subVersion": version, **more}


def consumer(client: str, *subscriptions: dict[str, Any], group: str = "g") -> dict[str, Any]:
    return {
        "clientID": client,
        "consumerDataSet": [
            {
                "groupName": group,
                "consumeType": "CONSUME_PASSIVELY",
                "messageModel": "CLUSTERING",
                "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
                "subscriptionDataSet": list(subscriptions),
            }
        ],
        "producerDataSet": [{"groupName": "CLIENT_INNER_PRODUCER"}],
    }


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    broker = Broker(tmp_path)
    await broker.start()
    yield broker
    await broker.stop()


async def turn() -> None:
    await asyncio.sleep(0)


# --- joining ----------------------------------------------------------------------------------


async def test_heartbeat_makes_group_retry_topic_and_membership(broker: Broker) -> None:
    link = Link()
    changes: list[str] = []
    broker.clients.changes.subscribe(changes.append)
    broker.beat(link, consumer("c1", subscription("T", "A || B")), language=0, version=409)
    await turn()
    group = broker.clients.group("g")
    assert group is not None
    assert set(group.subscriptions) == {"T"}
    assert group.subscriptions["T"].code_set == [65, 66]
    assert (group.consume_type, group.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert group.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
    assert [member.client_id for member in group.members.values()] == ["c1"]
    retry = broker.topics.table["%RETRY%g"]
    assert (retry.read_queue_nums, retry.perm, retry.topic_sys_flag) == (1, 6, 0)
    assert "g" in broker.groups.table
    assert changes == ["g"]
    assert link.notices == ["g"]
    assert [member.client_id for member in broker.clients.producers("CLIENT_INNER_PRODUCER")] == [
        "c1"
    ]
    assert broker.clients.consumer_groups_of("T") == {"g"}
    assert broker.clients.counts() == (1, 1)


async def test_retry_topic_follows_the_group(broker: Broker) -> None:
    broker.groups.put(SubscriptionGroupConfig(group_name="g", retry_queue_nums=3))
    broker.groups.put(SubscriptionGroupConfig(group_name="none", retry_queue_nums=0))
    body = consumer("c", subscription("T"))
    body["consumerDataSet"][0]["unitMode"] = True
    broker.beat(Link(), body)
    broker.beat(Link(), consumer("c", subscription("T"), group="none"))
    assert broker.topics.table["%RETRY%g"].write_queue_nums == 3
    assert broker.topics.table["%RETRY%g"].topic_sys_flag == 2
    assert "%RETRY%none" not in broker.topics.table


async def test_unknown_group_without_auto_create_still_joins(tmp_path: Path) -> None:
    broker = Broker(tmp_path, auto_create_subscription_group=False)
    await broker.start()
    link = Link()
    broker.beat(link, consumer("c", subscription("T")))
    await turn()
    assert broker.clients.group("g") is not None
    assert "%RETRY%g" not in broker.topics.table
    assert link.notices == ["g"]
    await broker.stop()


async def test_everyone_is_told_once_per_turn(broker: Broker) -> None:
    links = [Link(port) for port in range(5)]
    for index, link in enumerate(links):
        broker.beat(link, consumer(f"c{index}", subscription("T")))
    await turn()
    assert [link.notices for link in links] == [["g"]] * 5
    for index, link in enumerate(links):
        broker.beat(link, consumer(f"c{index}", subscription("T")))
    await turn()
    assert [len(link.notices) for link in links] == [1] * 5  # nothing changed


async def test_a_new_sub_version_alone_is_no_change(broker: Broker) -> None:
    link = Link()
    broker.beat(link, consumer("c", subscription("T", "A", 5)))
    await turn()
    broker.beat(link, consumer("c", subscription("T", "B", 6)))
    await turn()
    group = broker.clients.group("g")
    assert group is not None and group.subscriptions["T"].sub_string == "B"
    broker.beat(link, consumer("c", subscription("T", "C", 6)))
    assert group.subscriptions["T"].sub_string == "B"  # not newer
    assert len(link.notices) == 1


async def test_topics_come_and_go_with_the_newest_heartbeat(broker: Broker) -> None:
    link = Link()
    broker.beat(link, consumer("c", subscription("T"), subscription("U")))
    await turn()
    broker.beat(link, consumer("c", subscription("U"), subscription("V")))
    await turn()
    group = broker.clients.group("g")
    assert group is not None and set(group.subscriptions) == {"U", "V"}
    assert len(link.notices) == 2


@pytest.mark.parametrize("by", ["broker", "group"])
async def test_notices_can_be_turned_off(tmp_path: Path, by: str) -> None:
    broker = Broker(tmp_path, notify_consumer_ids_changed_enable=by != "broker")
    await broker.start()
    if by == "group":
        broker.groups.put(
            SubscriptionGroupConfig(group_name="g", notify_consumer_ids_changed_enable=False)
        )
    changes: list[str] = []
    broker.clients.changes.subscribe(changes.append)
    link = Link()
    broker.beat(link, consumer("c", subscription("T")))
    await turn()
    assert link.notices == []
    assert changes == ["g"]
    await broker.stop()


async def test_disagreeing_members_are_logged_once(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = Link(1), Link(2)
    broker.beat(one, consumer("c1", subscription("T", "A", 1)))
    broker.beat(two, consumer("c2", subscription("T", "B", 2)))
    broker.beat(one, consumer("c1", subscription("T", "A", 1)))
    broker.beat(two, consumer("c2", subscription("U", "B", 3)))
    warnings = [record for record in caplog.records if "subscriptions_differ" in record.message]
    assert len(warnings) == 1
    assert "c1" in warnings[0].message and "c2" in warnings[0].message


async def test_a_renamed_client_is_a_change(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link()
    broker.beat(link, consumer("c1", subscription("T")))
    await turn()
    broker.beat(link, consumer("c2", subscription("T")))
    await turn()
    assert len(link.notices) == 2
    assert "client_renamed" in caplog.text


# --- every client's form ----------------------------------------------------------------------


async def test_cpp_heartbeat(broker: Broker) -> None:
    body = {
        "clientID": "c",
        "consumerDataSet": [
            {
                "groupName": "g",
                "consumeType": 1,
                "messageModel": 1,
                "consumeFromWhere": 4,
                "subscriptionDataSet": [
                    {"topic": "T", "subString": "中文", "subVersion": "7", "tagsSet": ["中文"]},
                    {"topic": "U", "subString": "*", "subVersion": "7"},
                ],
            }
        ],
    }
    broker.beat(Link(), json.dumps(body).encode() + b"\n", language=1)
    group = broker.clients.group("g")
    assert group is not None
    assert (group.consume_type, group.message_model, group.consume_from_where) == (
        "CONSUME_PASSIVELY",
        "CLUSTERING",
        "CONSUME_FROM_FIRST_OFFSET",
    )
    assert group.subscriptions["T"].code_set == [646394]
    assert group.subscriptions["U"].code_set == []
    assert group.subscriptions["T"].sub_version == 7


async def test_go_heartbeat(broker: Broker) -> None:
    nanoseconds = 1_794_771_755_126_000_000
    item = subscription("T", "TagA", nanoseconds, tagsSet=["TagA"], codeSet=["1"])
    broker.beat(Link(), consumer("c", item), language=9, version=317)
    group = broker.clients.group("g")
    assert group is not None
    assert group.subscriptions["T"].code_set == [2598919]
    assert group.subscriptions["T"].sub_version == nanoseconds


@each_golden
async def test_captured_heartbeats_are_understood(golden: Golden, broker: Broker) -> None:
    count = 0
    for path in golden.captures():
        for frame in frames(path):
            if frame["kind"] != "response" and frame.get("code") == 34:
                broker.beat(Link(count), frame["body_text"].encode())
                count += 1
    assert count > (20 if golden.is_own else 50)
    assert broker.clients.group("g_live") is not None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"clientID": ""}, "clientID has 0"),
        ({"clientID": "c" * 1025}, "1025"),
        (consumer("c", group="a/b"), "not allowed"),
        ({"clientID": "c", "producerDataSet": [{"groupName": ""}]}, "empty"),
        (consumer("c", group="g" * 125), "shorten"),
        (consumer("c", *(subscription(f"T{n}") for n in range(4097))), "4097 topics"),
    ],
)
async def test_bad_heartbeats_are_refused(broker: Broker, body: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        broker.beat(Link(), body)
    assert broker.clients.counts() == (0, 0)


async def test_large_heartbeats_join_a_turn_later(broker: Broker) -> None:
    many = [subscription(f"Topic{n}") for n in range(1000)]
    data = json.dumps(consumer("c", *many)).encode()
    link, gone = Link(1), Link(2)
    joins = [broker.clients.heart_beat(HeartBeat(body=data), call(one)) for one in (link, gone)]
    assert broker.clients.counts() == (0, 0)
    gone.close("gone")
    for join in joins:
        assert not isinstance(join, HeartBeatReply)
        await join
    group = broker.clients.group("g")
    assert group is not None and len(group.members) == 1 and len(group.subscriptions) == 1000


async def test_heartbeat_that_is_no_json(broker: Broker) -> None:
    with pytest.raises(ProtocolError, match="HeartbeatData"):
        broker.beat(Link(), b"{")


async def test_groups_per_connection_are_bounded(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GROUPS_PER_CONNECTION_MAX", 2)
    link = Link()
    broker.beat(link, consumer("c", subscription("T")))  # a consumer and a producer group
    broker.beat(link, consumer("c", subscription("T")))
    with pytest.raises(Refused, match="spread"):
        broker.beat(link, consumer("c", subscription("T"), group="h"))


async def test_closed_connections_do_not_join(broker: Broker) -> None:
    link = Link()
    link.closed = True
    broker.beat(link, consumer("c", subscription("T")))
    assert broker.clients.counts() == (0, 0)


# --- leaving ----------------------------------------------------------------------------------


async def test_close_leaves_at_once_and_tells_the_rest(broker: Broker) -> None:
    one, two = Link(1), Link(2)
    broker.beat(one, consumer("c1", subscription("T")))
    broker.beat(two, consumer("c2", subscription("T")))
    await turn()
    one.close("gone")
    await turn()
    assert len(two.notices) == 2
    group = broker.clients.group("g")
    assert group is not None and len(group.members) == 1
    changes: list[str] = []
    broker.clients.changes.subscribe(changes.append)
    two.close("gone")
    await turn()
    assert broker.clients.group("g") is None
    assert broker.clients.counts() == (0, 0)
    assert changes == ["g"]
    assert broker.clients._joined == {}


async def test_unregister(broker: Broker) -> None:
    one, two = Link(1), Link(2)
    broker.beat(one, consumer("c1", subscription("T")))
    broker.beat(two, consumer("c2", subscription("T")))
    await turn()
    leave = UnregisterClient(
        client_id="c1", consumer_group="g", producer_group="CLIENT_INNER_PRODUCER"
    )
    assert broker.clients.unregister_client(leave, call(one)).code == 0
    assert broker.clients.unregister_client(leave, call(one)).code == 0
    await turn()
    assert broker.clients.counts() == (1, 1)
    assert len(two.notices) == 2
    assert len(one.notices) == 1
    broker.clients.unregister_client(leave, call(Link(9)))  # a stranger
    assert broker.clients.counts() == (1, 1)


async def test_silence_ends_membership(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Link(1), Link(2)
    broker.beat(one, consumer("c1", subscription("T")))
    broker.beat(two, consumer("c2", subscription("T")))
    await turn()
    broker.clients.expire()
    assert broker.clients.counts() == (2, 2)
    for member in list(broker.clients._consumers["g"].members.values()) + list(
        broker.clients.producers("CLIENT_INNER_PRODUCER")
    ):
        if member.client_id == "c1":
            member.seen_at -= module.EXPIRY_SECONDS + 1
    broker.clients.expire()
    await turn()
    assert one.closed and not two.closed
    assert broker.clients.counts() == (1, 1)
    assert len(two.notices) == 2


async def test_a_silent_group_does_not_close_a_busy_connection(broker: Broker) -> None:
    link = Link()
    broker.beat(link, consumer("c", subscription("T")))
    broker.clients.producers("CLIENT_INNER_PRODUCER")[0].seen_at -= module.EXPIRY_SECONDS + 1
    broker.clients.expire()
    assert not link.closed
    assert broker.clients.counts() == (1, 0)


async def test_the_scan_runs(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCAN_SECONDS", 0.001)
    await broker.clients.stop()
    await broker.clients.start()
    await broker.clients.start()
    link = Link()
    broker.beat(link, consumer("c", subscription("T")))
    monkeypatch.setattr(module, "EXPIRY_SECONDS", -1.0)
    async with asyncio.timeout(60):
        await link.gone.wait()


# --- questions --------------------------------------------------------------------------------


async def test_consumer_list(broker: Broker) -> None:
    with pytest.raises(Refused) as refused:
        broker.clients.get_consumer_list(GetConsumerListByGroup(consumer_group="g"), call())
    assert refused.value.code == Code.SYSTEM_ERROR
    for port, client in enumerate(("c1", "c2", "c1")):
        broker.beat(Link(port), consumer(client, subscription("T")))
    reply = broker.clients.get_consumer_list(GetConsumerListByGroup(consumer_group="g"), call())
    assert json.loads(reply.body) == {"consumerIdList": ["c1", "c2"]}
    decoded = bodies.decode(GetConsumerListByGroupResponseBody, reply.body)
    assert decoded.consumer_id_list == ["c1", "c2"]


async def test_consumer_connections(broker: Broker) -> None:
    ask = GetConsumerConnectionList(consumer_group="g")
    with pytest.raises(Refused) as refused:
        broker.clients.get_consumer_connections(ask, call())
    assert refused.value.code == Code.CONSUMER_NOT_ONLINE
    broker.beat(Link(7), consumer("c1", subscription("T")), language=9, version=317)
    reply = broker.clients.get_consumer_connections(ask, call())
    shown = bodies.decode(ConsumerConnection, reply.body)
    assert [(item.client_addr, item.language, item.version) for item in shown.connection_set] == [
        ("192.0.2.1:7", "GO", 317)
    ]
    assert shown.consume_from_where == "CONSUME_FROM_FIRST_OFFSET"
    assert set(shown.subscription_table) == {"T"}
    assert reply.remark is None


async def test_operators_see_that_members_disagree(broker: Broker) -> None:
    ask = GetConsumerConnectionList(consumer_group="g")
    one, two = Link(1), Link(2)
    broker.beat(one, consumer("c1", subscription("T", "A", 1), subscription("U", "*", 1)))
    broker.beat(two, consumer("c2", subscription("T", "B", 2), subscription("U", "*", 1)))
    remark = broker.clients.get_consumer_connections(ask, call()).remark
    assert remark is not None and "c1 and c2 (topics T)" in remark
    broker.beat(two, consumer("c2", subscription("T", "A", 3), subscription("U", "*", 1)))
    assert broker.clients.get_consumer_connections(ask, call()).remark is None


async def test_producer_connections(broker: Broker) -> None:
    ask = GetProducerConnectionList(producer_group="p")
    with pytest.raises(Refused) as refused:
        broker.clients.get_producer_connections(ask, call())
    assert refused.value.code == Code.SYSTEM_ERROR
    body = {"clientID": "c", "producerDataSet": [{"groupName": "p"}]}
    broker.beat(Link(3), body, language=0, version=409)
    shown = bodies.decode(
        ProducerConnection, broker.clients.get_producer_connections(ask, call()).body
    )
    assert [item.client_id for item in shown.connection_set] == ["c"]
    table = bodies.decode(
        ProducerTableInfo, broker.clients.get_all_producers(GetAllProducerInfo(), call()).body
    )
    (info,) = table.data["p"]
    assert (info.client_id, info.language) == ("c", "JAVA")
    assert info.remote_ip == f"/{shown.connection_set[0].client_addr}"
    assert info.remote_ip.startswith("/192.0.2.1:")
    assert info.last_update_timestamp > 1_600_000_000_000


async def test_check_client_config(broker: Broker) -> None:
    def check(kind: str | None, text: str = "a > 1") -> None:
        item = subscription("T", text, expressionType=kind)
        body = json.dumps({"clientId": "c", "group": "g", "subscriptionData": item}).encode()
        broker.clients.check_client_config(CheckClientConfig(body=body), call())

    check("TAG")
    check(None)
    check("SQL92")
    with pytest.raises(Refused, match="character 5") as refused:
        check("SQL92", "a > AND b")
    assert refused.value.code == Code.SUBSCRIPTION_PARSE_FAILED
    with pytest.raises(Refused, match="'JS' is unknown") as refused:
        check("JS")
    assert refused.value.code == Code.SUBSCRIPTION_PARSE_FAILED


# --- finding one client -----------------------------------------------------------------------


async def test_a_producer_is_found_by_its_id(broker: Broker) -> None:
    def beat(link: Link, client: str, *groups: str) -> None:
        data = [{"groupName": group} for group in groups]
        broker.beat(link, {"clientID": client, "producerDataSet": data})

    clients, link, other = broker.clients, Link(1), Link(2)
    assert clients.producer("a") is None
    beat(link, "a", "p", "q")
    assert clients.producer("a") is link
    beat(other, "a", "p")  # connected again; the newer one counts
    assert clients.producer("a") is other
    link.close("gone")
    assert clients.producer("a") is other
    beat(other, "b", "p")  # renamed
    assert (clients.producer("a"), clients.producer("b")) == (None, other)
    beat(other, "b", "q")
    ask = UnregisterClient(client_id="b", producer_group="p")
    clients.unregister_client(ask, call(other))
    assert clients.producer("b") is other  # still in q
    ask.producer_group = "q"
    clients.unregister_client(ask, call(other))
    assert clients.producer("b") is None


async def test_a_consumer_is_found_by_group_and_id(broker: Broker) -> None:
    link = Link()
    broker.beat(link, consumer("c", subscription("T")))
    member = broker.clients.consumer("g", "c")
    assert member is not None and member.connection is link
    assert broker.clients.consumer("g", "d") is None
    assert broker.clients.consumer("h", "c") is None
