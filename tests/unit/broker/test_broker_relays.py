from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.broker.broker_clients_kit import RunningBroker, running_broker
from tests.unit.broker.broker_fakes import FakeConnection, FakeStore, call_of, foundation

from cosmodrome.broker.members.clients import Clients
from cosmodrome.broker.members.groups import Groups
from cosmodrome.broker.members.offsets import Offsets
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.topics import Topics
from cosmodrome.broker.operate import relays
from cosmodrome.broker.operate.relays import Relays
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, Refused
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.bodies import MessageQueue, TopicConfig
from cosmodrome.wire.frame import LANGUAGES, VERSION
from cosmodrome.wire.record import decode_record
from cosmodrome.wire.report_bodies import GetConsumerStatusBody, ResetOffsetBody
from cosmodrome.wire.table import Call, Command, Reply

INFO = b'{"mqTable":{{"brokerName":"b0","queueId":0,"topic":"T"}:{"locked":true}}}'


class Member:
    """A consumer that answers, when `wake` is set."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.asked: list[Command[Any]] = []
        self.wake = asyncio.Event()
        self.wake.set()

    @commands.GetConsumerRunningInfo.handler
    async def running(self, ask: commands.GetConsumerRunningInfo, call: Call) -> Reply:
        self.asked.append(ask)
        await self.wake.wait()
        return Reply(body=INFO, remark="not set any response code")

    @commands.ConsumeMessageDirectly.handler
    def consume(self, ask: commands.ConsumeMessageDirectly, call: Call) -> Reply:
        self.asked.append(ask)
        if b"bad" in ask.body:
            return Reply(code=1, remark="the consumer threw")
        return Reply(body=b'{"consumeResult":"CR_SUCCESS"}')

    @commands.ResetConsumerClientOffset.handler
    def reset(self, ask: commands.ResetConsumerClientOffset, call: Call) -> Reply:
        self.asked.append(ask)
        return Reply()

    @commands.GetConsumerStatusFromClient.handler
    async def status(self, ask: commands.GetConsumerStatusFromClient, call: Call) -> Reply:
        self.asked.append(ask)
        if self.offset < 0:
            return Reply(body=b"gibberish")
        queue = MessageQueue(broker_name="b0", queue_id=self.offset, topic="T")
        body = GetConsumerStatusBody(message_queue_table={queue: self.offset})
        return Reply(body=bodies.encode(body))


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[RunningBroker]:
    async with running_broker(tmp_path) as here:
        yield here


def refused(code: int, word: str) -> Any:
    return pytest.raises(Refused, match=rf"(?s)\[{code}\].*{word}")


# --- to one client ---------------------------------------------------------------------------


async def test_a_question_reaches_one_client_and_its_answer_comes_back(here: RunningBroker) -> None:
    one, two = Member(), Member()
    await here.client("one", one).join("T")
    await here.client("two", two).join("T")
    ask = commands.GetConsumerRunningInfo(consumer_group="g", client_id="two", jstack_enable=True)
    reply = await here.client("admin").call(ask)
    assert (reply.body, reply.remark) == (INFO, "not set any response code")
    (asked,) = two.asked
    assert isinstance(asked, commands.GetConsumerRunningInfo)
    assert (asked.consumer_group, asked.client_id, asked.jstack_enable) == ("g", "two", True)
    assert one.asked == []


async def test_a_client_that_is_not_there(here: RunningBroker) -> None:
    await here.client("one", Member()).join("T")
    for group, client in (("g", "two"), ("other", "one")):
        with refused(1, "not online"):
            await here.client("admin").call(
                commands.GetConsumerRunningInfo(consumer_group=group, client_id=client)
            )


async def test_a_client_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "RELAY_TIMEOUT_MS", 30)
    async with running_broker(tmp_path) as here:
        member = Member()
        member.wake.clear()
        await here.client("one", member).join("T")
        with refused(207, "within 30 ms"):
            await here.client("admin").call(
                commands.GetConsumerRunningInfo(consumer_group="g", client_id="one")
            )
        member.wake.set()


async def test_a_client_that_leaves_meanwhile(here: RunningBroker) -> None:
    member = Member()
    member.wake.clear()
    client = await here.client("one", member).join("T")
    asking = asyncio.create_task(
        here.client("admin").call(
            commands.GetConsumerRunningInfo(consumer_group="g", client_id="one")
        )
    )
    while not member.asked:
        await asyncio.sleep(0.005)
    await client.channel.close()
    with refused(1, "broke"):
        await asking
    member.wake.set()


async def test_a_message_is_handed_to_one_client(here: RunningBroker) -> None:
    member = Member()
    client = await here.client("one", member).join("T")
    sent = await client.send(b"look at me")
    ask = commands.ConsumeMessageDirectly(consumer_group="g", client_id="one", msg_id=sent.msg_id)
    reply = await here.client("admin").call(ask)
    assert json.loads(reply.body) == {"consumeResult": "CR_SUCCESS"}
    (asked,) = member.asked
    assert isinstance(asked, commands.ConsumeMessageDirectly)
    assert (asked.broker_name, asked.msg_id) == ("b0", sent.msg_id)
    assert decode_record(asked.body).body == b"look at me"


async def test_the_refusal_of_a_client_comes_back(here: RunningBroker) -> None:
    client = await here.client("one", Member()).join("T")
    sent = await client.send(b"a bad one")
    with refused(1, "the consumer threw"):
        await here.client("admin").call(
            commands.ConsumeMessageDirectly(consumer_group="g", client_id="one", msg_id=sent.msg_id)
        )


@pytest.mark.parametrize("msg_id", ["zz", "7F00000100002A9F00000000000FFFFF"])
async def test_a_message_that_is_not_there(here: RunningBroker, msg_id: str) -> None:
    await here.client("one", Member()).join("T")
    with pytest.raises(Refused) as caught:
        await here.client("admin").call(
            commands.ConsumeMessageDirectly(consumer_group="g", client_id="one", msg_id=msg_id)
        )
    assert caught.value.code == Code.SYSTEM_ERROR


# --- to all members --------------------------------------------------------------------------


async def test_consumer_status(here: RunningBroker) -> None:
    for offset, name in ((0, "zero"), (1, "one"), (-1, "mumbler")):
        await here.client(name, Member(offset)).join("T")
    await here.client("deaf").join("T")  # serves nothing
    admin = here.client("admin")
    ask = commands.InvokeBrokerToGetConsumerStatus(topic="T", group="g", client_addr="")
    table = bodies.decode(GetConsumerStatusBody, (await admin.call(ask)).body).consumer_table
    assert {name: list(row.values()) for name, row in table.items()} == {"zero": [0], "one": [1]}
    ask.client_addr = "one"
    table = bodies.decode(GetConsumerStatusBody, (await admin.call(ask)).body).consumer_table
    assert list(table) == ["one"]
    ask.group = "nobody"
    with refused(1, "online"):
        await admin.call(ask)


async def test_reset_over_the_wire(here: RunningBroker) -> None:
    members = [Member(), Member()]
    for number, member in enumerate(members):
        await here.client(f"c{number}", member).join("T")
    admin = here.client("admin")
    for queue_id in (0, 1):
        for _ in range(3):
            await admin.send(queue_id=queue_id)
        await admin.commit(2, queue_id)
    ask = commands.InvokeBrokerToResetOffset(topic="T", group="g", timestamp=0, is_force=True)
    reply = await admin.call(ask)
    queues = [MessageQueue(broker_name="b0", queue_id=n, topic="T") for n in (0, 1)]
    assert bodies.decode(ResetOffsetBody, reply.body).offset_table == {queues[0]: 0, queues[1]: 0}
    for member in members:
        while not member.asked:
            await asyncio.sleep(0.005)
        (order,) = member.asked
        assert isinstance(order, commands.ResetConsumerClientOffset)
        assert (order.topic, order.group, order.timestamp, order.is_force) == ("T", "g", 0, False)
        assert order.body == reply.body
    # Moving is up to the consumers.
    progress = commands.QueryConsumerOffset(consumer_group="g", topic="T", queue_id=0)
    assert (await admin.call(progress)).offset == 2


class MemberLink(FakeConnection):
    def __init__(self, port: int) -> None:
        super().__init__(("192.0.2.7", port))
        self.orders: list[Any] = []

    def push(self, command: Command[Any]) -> None:
        if isinstance(command, commands.ResetConsumerClientOffset):
            self.orders.append(command)


class Rig:
    """The service with tables behind it, for members of any language and version."""

    def __init__(self, path: Path) -> None:
        options, env = BrokerOptions(broker_name="b0"), real_env(seed=1)
        self.store = cast(Any, FakeStore())
        self.topics = Topics(options, str(path / "topics.json"), env)
        self.groups = Groups(options, str(path / "groups.json"), env)
        self.offsets = Offsets(options, str(path / "offsets.json"), self.store, env)
        self.clients = Clients(options, self.topics, self.groups, env.clock)
        members = Members(self.topics, self.groups, self.offsets, self.clients)
        self.relays = Relays(foundation(options, env, self.store), members)
        self.topics.put(TopicConfig(topic_name="T", read_queue_nums=1, write_queue_nums=1))

    def join(self, port: int, language: str, version: int = VERSION) -> MemberLink:
        link = MemberLink(port)
        call = call_of(link, version=version)
        call.frame.language = LANGUAGES.index(language)
        beat = {
            "clientID": f"c{port}",
            "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "T"}]}],
        }
        self.clients.heart_beat(commands.HeartBeat(body=json.dumps(beat).encode()), call)
        return link

    def reset(self, **changes: Any) -> Any:
        fields = {"topic": "T", "group": "g", "timestamp": 5, "is_force": True}
        ask = commands.InvokeBrokerToResetOffset(**{**fields, **changes})
        return self.relays.reset_offset(ask, call_of())


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    await rig.topics.stop()
    await rig.groups.stop()


INLINE = b'{"offsetTable":{{"brokerName":"b0","queueId":0,"topic":"T"}:17}}'
LIST = b'{"offsetTable":[{"brokerName":"b0","offset":17,"queueId":0,"topic":"T"}]}'


async def test_each_member_is_told_in_the_form_it_reads(rig: Rig) -> None:
    rig.offsets.commit("g", "T", 0, 20)
    java, cpp, go = rig.join(1, "JAVA"), rig.join(2, "CPP"), rig.join(3, "GO")
    assert rig.reset().body == INLINE
    assert [link.orders[0].body for link in (java, cpp, go)] == [INLINE, LIST, INLINE]


@pytest.mark.parametrize(
    ("known", "force", "timestamp", "target"),
    [
        (20, True, 5, 17),
        (10, True, 5, 17),
        (10, False, 5, 10),
        (20, False, 5, 17),
        (2, True, -1, 3),
    ],
)
async def test_where_they_go_on(
    rig: Rig, known: int, force: bool, timestamp: int, target: int
) -> None:
    for _ in range(3):
        rig.store.arrive("T", 0)
    rig.offsets.commit("g", "T", 0, known)
    rig.join(1, "JAVA")
    reply = rig.reset(is_force=force, timestamp=timestamp)
    assert list(bodies.decode(ResetOffsetBody, reply.body).offset_table.values()) == [target]


async def test_why_a_reset_is_refused(rig: Rig) -> None:
    with refused(17, "Unknown does not exist"):
        rig.reset(topic="Unknown")
    with refused(1, "committed no offset"):
        rig.reset()
    rig.offsets.commit("g", "T", 0, 20)
    with refused(206, "online"):
        rig.reset()
    new, old = rig.join(1, "JAVA"), rig.join(2, "JAVA", version=27)
    with refused(1, "c2 has a client of version 27"):
        rig.reset()
    assert (new.orders, old.orders) == ([], [])


async def test_old_clients_are_not_asked(rig: Rig) -> None:
    rig.join(1, "JAVA", version=61)
    with refused(1, "version 61"):
        await rig.relays.running_info(
            commands.GetConsumerRunningInfo(consumer_group="g", client_id="c1"), call_of()
        )
