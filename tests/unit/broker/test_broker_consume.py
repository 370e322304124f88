from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.goldens import Golden, each_golden
from tests.unit.broker.broker_fakes import (
    STORE_HOST,
    FakeConnection,
    FakeStore,
    call_of,
    foundation,
    open_store,
)

from cosmodrome.broker.members.groups import Groups
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.topics import Topics
from cosmodrome.broker.receive.consume import Consume
from cosmodrome.broker.receive.expressions import Expressions
from cosmodrome.broker.receive.filters import Filters
from cosmodrome.broker.receive.offset_moves import OffsetMoves
from cosmodrome.broker.receive.waiters import Waiters
from cosmodrome.broker.role import MASTER, SLAVE, Role
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, Refused
from cosmodrome.layout import PULL_COMMIT, PULL_SUBSCRIPTION, PULL_SUSPEND
from cosmodrome.store.store import Batch, Draft, ReadStatus, Store
from cosmodrome.wire import table
from cosmodrome.wire.bodies import SubscriptionData, SubscriptionGroupConfig, TopicConfig
from cosmodrome.wire.commands.consume import LitePullMessage, PullMessage, PullReply
from cosmodrome.wire.record import iter_records


@dataclasses.dataclass
class Online:
    """A group as its heartbeats describe it."""

    subscriptions: dict[str, SubscriptionData]
    message_model: str = "CLUSTERING"


class FakeClients:
    def __init__(self) -> None:
        self.groups: dict[str, Online] = {}

    def group(self, name: str) -> Online | None:
        return self.groups.get(name)


class FakeOffsets:
    def __init__(self) -> None:
        self.commits: list[tuple[str, str, int, int]] = []

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        self.commits.append((group, topic, queue_id, offset))


class Rig:
    def __init__(
        self,
        path: Path,
        store: FakeStore | Store | None = None,
        role: Role = MASTER,
        **changes: Any,
    ) -> None:
        self.options = BrokerOptions(**{"broker_name": "b0", **changes})
        env = real_env(seed=1)
        self.store = cast(Any, store or FakeStore())
        self.topics = Topics(self.options, str(path / "topics.json"), env)
        self.groups = Groups(self.options, str(path / "subscriptionGroup.json"), env)
        self.clients = FakeClients()
        self.expressions = Expressions(str(path / "consumerFilter.json"), env, keep_dead_ms=1000)
        self.offsets = FakeOffsets()
        self.waiters: Waiters[PullReply] = Waiters(self.store.arrivals, self.options.pulls_held_max)
        self.connection = FakeConnection()
        base = foundation(self.options, env, self.store, role)
        members = Members(self.topics, self.groups, cast(Any, self.offsets), cast(Any, None))
        filters = Filters(self.options, self.clients, self.expressions)
        self.consume = Consume(base, members, filters, self.waiters, OffsetMoves(base))

    async def start(self) -> Rig:
        await self.topics.start()
        await self.groups.start()
        self.topics.put(TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2))
        return self

    async def stop(self) -> None:
        await self.waiters.stop()
        await self.topics.stop()
        await self.groups.stop()

    def subscribe(self, text: str = "*", version: int = 1, **changes: Any) -> None:
        data = SubscriptionData(topic="T", sub_string=text, sub_version=version, **changes)
        self.clients.groups["G"] = Online({"T": data})

    def pull(self, **changes: Any) -> Any:
        return self.consume.pull(ask(**changes), call_of(self.connection, code=11))


def ask(row: Any = PullMessage, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "consumer_group": "G",
        "topic": "T",
        "queue_id": 0,
        "queue_offset": 0,
        "max_msg_nums": 32,
        "sys_flag": PULL_SUBSCRIPTION,
        "commit_offset": 0,
        "suspend_timeout_millis": 60_000,
        "subscription": "*",
        "sub_version": 0,
    }
    return row(**{**fields, **changes})


HOLD = PULL_SUBSCRIPTION | PULL_SUSPEND


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = await Rig(tmp_path).start()
    yield rig
    await rig.stop()


async def other_rig(path: Path, **changes: Any) -> Rig:
    return await Rig(path, **changes).start()


async def soon(held: Any) -> PullReply:
    assert isinstance(held, asyncio.Future)
    reply: PullReply = await asyncio.wait_for(held, 60)
    return reply


# --- answers ---------------------------------------------------------------------------------


async def test_messages_are_answered_with_all_offsets(rig: Rig) -> None:
    for _ in range(3):
        rig.store.arrive("T", 0)
    reply = rig.pull(queue_offset=1)
    assert (reply.code, reply.remark, reply.body) == (Code.SUCCESS, "FOUND", b"bodybody")
    assert table.encode(reply) == {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": "3",
        "minOffset": "0",
        "maxOffset": "3",
    }
    counts = rig.consume.stats.get_counts
    assert (counts.messages_total, counts.bytes_total) == (2, 8)
    assert (counts.pulls_total, rig.consume.missed_total) == (1, 0)


@pytest.mark.parametrize(
    ("status", "requested", "code"),
    [
        (ReadStatus.FOUND, 5, 0),
        (ReadStatus.NO_MATCHED_MESSAGE, 5, 20),
        (ReadStatus.MESSAGE_WAS_REMOVING, 5, 20),
        (ReadStatus.OFFSET_FOUND_NULL, 5, 19),
        (ReadStatus.OFFSET_OVERFLOW_ONE, 5, 19),
        (ReadStatus.OFFSET_OVERFLOW_BADLY, 5, 21),
        (ReadStatus.OFFSET_TOO_SMALL, 5, 21),
        (ReadStatus.NO_MESSAGE_IN_QUEUE, 0, 19),
        (ReadStatus.NO_MESSAGE_IN_QUEUE, 5, 21),
        (ReadStatus.NO_MATCHED_LOGIC_QUEUE, 0, 19),
        (ReadStatus.NO_MATCHED_LOGIC_QUEUE, 5, 21),
    ],
)
async def test_each_outcome_of_the_store_has_its_code(
    rig: Rig, status: ReadStatus, requested: int, code: int
) -> None:
    rig.store.outcome = Batch(status, 11, 12, 13)
    reply = rig.pull(queue_offset=requested)
    assert (reply.code, reply.remark) == (code, status.name)
    assert table.encode(reply) == {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": "11",
        "minOffset": "12",
        "maxOffset": "13",
    }


def test_every_outcome_was_tried() -> None:
    marks = test_each_outcome_of_the_store_has_its_code.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == set(ReadStatus)


@pytest.mark.parametrize("asked", [0, -3, 1])
async def test_at_least_one_message_is_asked_for(rig: Rig, asked: int) -> None:
    rig.store.arrive("T", 0)
    rig.store.arrive("T", 0)
    assert rig.pull(max_msg_nums=asked).body == b"body"


@pytest.mark.parametrize(
    ("slave_read", "behind", "suggested"),
    [(False, True, 0), (False, False, 0), (True, True, 3), (True, False, 2)],
)
async def test_which_broker_is_suggested(
    tmp_path: Path, slave_read: bool, behind: bool, suggested: int
) -> None:
    rig = await other_rig(tmp_path, slave_read_enable=slave_read)
    rig.groups.put(
        SubscriptionGroupConfig(group_name="G", broker_id=2, which_broker_when_consume_slowly=3)
    )
    rig.store.outcome = Batch(ReadStatus.FOUND, 1, 0, 1, b"x", 1, behind)
    assert rig.pull().suggest_which_broker_id == suggested
    await rig.stop()


async def test_lite_pull_is_a_pull(rig: Rig) -> None:
    rig.store.arrive("T", 0)
    request = ask(LitePullMessage, sys_flag=PULL_SUBSCRIPTION | 0x10)
    reply: Any = rig.consume.lite_pull(request, call_of(rig.connection, code=361))
    assert reply.body == b"body"


# --- subscriptions ---------------------------------------------------------------------------


async def test_the_filter_comes_with_the_pull_or_with_the_heartbeat(rig: Rig) -> None:
    rig.store.arrive("T", 0, "A")
    rig.store.arrive("T", 0, "B")
    assert rig.pull(subscription="A || B").body == b"bodybody"
    assert rig.pull(subscription="B").body == b"body"
    assert rig.pull(subscription="C").code == Code.PULL_RETRY_IMMEDIATELY
    assert rig.pull(subscription="C").next_begin_offset == 2
    rig.subscribe("A")
    assert rig.pull(sys_flag=0, sub_version=1, subscription="B").body == b"body"
    rig.subscribe("C")
    assert rig.pull(sys_flag=0).code == Code.PULL_RETRY_IMMEDIATELY


# --- refusals --------------------------------------------------------------------------------


def refused_code(rig: Rig, **changes: Any) -> tuple[int, str]:
    reads = rig.store.reads
    with pytest.raises(Refused) as refused:
        rig.pull(**changes)
    assert rig.store.reads == reads, "nothing is read for a refused pull"
    assert rig.offsets.commits == [], "nothing is committed by a refused pull"
    return refused.value.code, refused.value.remark


async def test_an_unreadable_broker(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, broker_permission=2)
    assert refused_code(rig, topic="Unknown")[0] == Code.NO_PERMISSION
    await rig.stop()


async def test_an_unknown_group(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, auto_create_subscription_group=False)
    assert refused_code(rig, topic="Unknown")[0] == Code.SUBSCRIPTION_GROUP_NOT_EXIST
    await rig.stop()


async def test_a_group_that_may_not_consume(rig: Rig) -> None:
    rig.groups.put(SubscriptionGroupConfig(group_name="G", consume_enable=False))
    code, remark = refused_code(rig, topic="Unknown", sys_flag=PULL_SUBSCRIPTION | PULL_COMMIT)
    assert (code, "consumeEnable" in remark) == (Code.NO_PERMISSION, True)


async def test_an_unknown_topic(rig: Rig) -> None:
    assert refused_code(rig, topic="Unknown", queue_id=99)[0] == Code.TOPIC_NOT_EXIST


async def test_an_unreadable_topic(rig: Rig) -> None:
    rig.topics.put(TopicConfig(topic_name="T", perm=2, read_queue_nums=1))
    assert refused_code(rig, queue_id=99)[0] == Code.NO_PERMISSION


@pytest.mark.parametrize("queue_id", [2, -1])
async def test_a_queue_that_does_not_exist(rig: Rig, queue_id: int) -> None:
    code, remark = refused_code(rig, queue_id=queue_id, subscription="||")
    assert (code, f"Queue {queue_id}" in remark) == (Code.SYSTEM_ERROR, True)


async def test_a_bad_expression(rig: Rig) -> None:
    assert refused_code(rig, subscription="||")[0] == Code.SUBSCRIPTION_PARSE_FAILED
    code, remark = refused_code(rig, subscription="a >", expression_type="SQL92")
    assert (code, "character 4" in remark) == (Code.SUBSCRIPTION_PARSE_FAILED, True)


async def test_a_group_without_heartbeat(rig: Rig) -> None:
    assert refused_code(rig, sys_flag=0)[0] == Code.SUBSCRIPTION_NOT_EXIST


async def test_a_topic_the_group_did_not_subscribe(rig: Rig) -> None:
    rig.clients.groups["G"] = Online({})
    assert refused_code(rig, sys_flag=0)[0] == Code.SUBSCRIPTION_NOT_EXIST


async def test_a_subscription_that_is_still_on_its_way(rig: Rig) -> None:
    rig.subscribe(version=5)
    assert refused_code(rig, sys_flag=0, sub_version=6)[0] == Code.SUBSCRIPTION_NOT_LATEST
    assert rig.pull(sys_flag=0, sub_version=5).code == Code.PULL_NOT_FOUND


async def test_broadcast_where_it_is_off(rig: Rig) -> None:
    rig.groups.put(SubscriptionGroupConfig(group_name="G", consume_broadcast_enable=False))
    rig.subscribe()
    assert rig.pull(sys_flag=0).code == Code.PULL_NOT_FOUND
    rig.clients.groups["G"].message_model = "BROADCASTING"
    code, remark = refused_code(rig, sys_flag=0)
    assert (code, "broadcast" in remark) == (Code.NO_PERMISSION, True)


async def test_refusals_are_counted(rig: Rig) -> None:
    refused_code(rig, topic="Unknown")
    refused_code(rig, subscription="||")
    assert rig.consume.failures_total == 2


# --- commits ---------------------------------------------------------------------------------


async def test_a_pull_may_carry_a_commit(rig: Rig) -> None:
    rig.pull(commit_offset=7)
    assert rig.offsets.commits == []
    rig.pull(sys_flag=PULL_SUBSCRIPTION | PULL_COMMIT, commit_offset=7, queue_id=1)
    assert rig.offsets.commits == [("G", "T", 1, 7)]


async def test_a_held_pull_commits_once(rig: Rig) -> None:
    held = rig.pull(sys_flag=HOLD | PULL_COMMIT, commit_offset=7)
    assert rig.offsets.commits == [("G", "T", 0, 7)]
    rig.store.arrive("T", 0)
    await soon(held)
    assert len(rig.offsets.commits) == 1


async def test_a_slave_commits_nothing(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, role=SLAVE)
    rig.pull(sys_flag=PULL_SUBSCRIPTION | PULL_COMMIT, commit_offset=7)
    assert rig.offsets.commits == []
    await rig.stop()


# --- a slave that lacks what its master has --------------------------------------------------


async def test_a_pull_beyond_a_slaves_end_waits_until_the_slave_has_more(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, role=SLAVE)
    held = rig.pull(sys_flag=HOLD, queue_offset=2)  # the slave has nothing of this queue
    rig.store.arrive("T", 0)
    beyond = rig.pull(sys_flag=HOLD, queue_offset=3)  # and now one message
    rig.store.arrive("T", 0)
    await asyncio.sleep(0)
    assert rig.waiters.held == 2
    rig.store.arrive("T", 0)
    reply = await soon(held)
    assert (reply.code, reply.next_begin_offset) == (Code.SUCCESS, 3)
    assert rig.waiters.held == 1
    rig.store.arrive("T", 0)
    assert (await soon(beyond)).code == Code.SUCCESS
    await rig.stop()


async def test_beyond_a_slaves_end_the_deadline_leaves_the_offset(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, role=SLAVE)
    rig.store.arrive("T", 0)
    held = rig.pull(sys_flag=HOLD, queue_offset=9, suspend_timeout_millis=5)
    reply = await soon(held)
    assert (reply.code, reply.next_begin_offset) == (Code.PULL_RETRY_IMMEDIATELY, 9)
    at_once = rig.pull(queue_offset=9)
    assert (at_once.code, at_once.next_begin_offset) == (Code.PULL_RETRY_IMMEDIATELY, 9)
    await rig.stop()


async def test_a_pull_before_a_slaves_first_message_waits_a_moment(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, role=SLAVE, short_polling_time_mills=20)
    rig.store.outcome = Batch(ReadStatus.OFFSET_TOO_SMALL, 50, 50, 60)
    held = rig.pull(sys_flag=HOLD, queue_offset=3)
    rig.store.arrive("T", 0)
    await asyncio.sleep(0)
    assert not held.done()  # what arrives is not what it wants
    reply = await soon(held)
    assert (reply.code, reply.next_begin_offset) == (Code.PULL_RETRY_IMMEDIATELY, 3)
    assert reply.suggest_which_broker_id == 0
    await rig.stop()


# --- waiting ---------------------------------------------------------------------------------


async def test_a_pull_waits_for_the_first_message(rig: Rig) -> None:
    held = rig.pull(sys_flag=HOLD)
    assert rig.waiters.held == 1
    rig.store.arrive("T", 1)
    await asyncio.sleep(0.01)
    assert not held.done()
    rig.store.arrive("T", 0)
    reply = await soon(held)
    assert (reply.code, reply.body, reply.next_begin_offset) == (Code.SUCCESS, b"body", 1)
    assert rig.store.reads == 2


async def test_only_messages_the_filter_wants_wake(rig: Rig) -> None:
    held = rig.pull(sys_flag=HOLD, subscription="B")
    rig.store.arrive("T", 0, "A")
    await asyncio.sleep(0.01)
    assert not held.done()
    rig.store.arrive("T", 0, "B")
    assert (await soon(held)).next_begin_offset == 2


async def test_the_deadline_answers_what_is_there_then(rig: Rig) -> None:
    nothing = rig.pull(sys_flag=HOLD, suspend_timeout_millis=5)
    assert (await soon(nothing)).code == Code.PULL_NOT_FOUND
    filtered = rig.pull(sys_flag=HOLD, suspend_timeout_millis=20, subscription="B")
    rig.store.arrive("T", 0, "A")
    reply = await soon(filtered)
    assert (reply.code, reply.next_begin_offset) == (Code.PULL_RETRY_IMMEDIATELY, 1)
    assert rig.waiters.held == 0


async def test_short_polling_has_its_own_time(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, long_polling_enable=False, short_polling_time_mills=5)
    assert (await soon(rig.pull(sys_flag=HOLD))).code == Code.PULL_NOT_FOUND
    await rig.stop()


async def test_only_not_found_waits(rig: Rig) -> None:
    rig.store.arrive("T", 0, "A")
    assert rig.pull(sys_flag=HOLD).code == Code.SUCCESS
    assert rig.pull(sys_flag=HOLD, subscription="B").code == Code.PULL_RETRY_IMMEDIATELY
    assert rig.pull(sys_flag=HOLD, queue_offset=9).code == Code.PULL_OFFSET_MOVED
    assert rig.pull(sys_flag=PULL_SUBSCRIPTION, queue_offset=1).code == Code.PULL_NOT_FOUND
    assert isinstance(rig.pull(sys_flag=HOLD, queue_offset=1), asyncio.Future)


async def test_a_hole_in_the_queue_is_not_waited_for(rig: Rig) -> None:
    rig.store.outcome = Batch(ReadStatus.OFFSET_FOUND_NULL, 300, 0, 400)
    assert rig.pull(sys_flag=HOLD, queue_offset=250).next_begin_offset == 300


async def test_without_room_the_answer_comes_at_once(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, pulls_held_max=1)
    first = rig.pull(sys_flag=HOLD)
    assert rig.pull(sys_flag=HOLD).code == Code.PULL_NOT_FOUND
    assert not first.done()
    await rig.stop()


async def test_who_left_is_not_answered(rig: Rig) -> None:
    held = rig.pull(sys_flag=HOLD)
    rig.connection.close("left")
    assert held.cancelled()
    rig.store.arrive("T", 0)
    await asyncio.sleep(0.01)
    assert rig.store.reads == 1


async def test_a_woken_pull_is_checked_again(rig: Rig) -> None:
    held = rig.pull(sys_flag=HOLD)
    rig.topics.delete("T")
    rig.store.arrive("T", 0)
    with pytest.raises(Refused) as refused:
        await soon(held)
    assert refused.value.code == Code.TOPIC_NOT_EXIST


async def test_a_woken_pull_is_not_parked_again(rig: Rig) -> None:
    held = rig.pull(sys_flag=HOLD)
    rig.store.outcome = Batch(ReadStatus.OFFSET_OVERFLOW_ONE, 0, 0, 0)
    rig.store.arrive("T", 0)
    assert (await soon(held)).code == Code.PULL_NOT_FOUND
    assert rig.waiters.held == 0


# --- against the real store and upstream's data ----------------------------------------------


async def test_a_message_wakes_its_consumer_through_the_real_store(tmp_path: Path) -> None:
    async with open_store(tmp_path / "store") as store:
        rig = await Rig(tmp_path, store).start()
        draft = Draft("T", 0, b"x", "TAGS\x01A", STORE_HOST, STORE_HOST)
        other = rig.pull(sys_flag=HOLD, subscription="B")
        held = rig.pull(sys_flag=HOLD, subscription="A")
        await store.durable(store.append(draft).end)
        reply = await soon(held)
        (record,) = iter_records(reply.body)
        assert (reply.code, record.body, reply.next_begin_offset) == (Code.SUCCESS, b"x", 1)
        assert not other.done()
        assert rig.pull(queue_offset=1).code == Code.PULL_NOT_FOUND
        assert rig.pull(queue_offset=5).code == Code.PULL_OFFSET_MOVED
        assert rig.pull(queue_offset=5).next_begin_offset == 1
        assert rig.pull(queue_offset=-1).next_begin_offset == 0
        await rig.stop()


@pytest.mark.parametrize(
    "name", ["pull_found", "pull_not_found", "pull_offset_illegal", "pull_tag_filtered"]
)
@each_golden
async def test_upstream_clients_are_answered_as_upstream_answers(
    golden: Golden, rig: Rig, name: str
) -> None:
    lines = golden.wire("json", name)
    # What queue 0 held when the frames were captured.
    ends = [line["header"].get("extFields", {}).get("maxOffset") for line in lines]
    held = max(int(end) for end in ends if end is not None)
    rig.topics.put(TopicConfig(topic_name="GNormal", read_queue_nums=4, write_queue_nums=4))
    for _ in range(held):
        rig.store.arrive("GNormal", 0, "TagA")
    asked: dict[int, dict[str, str]] = {}
    checked = 0
    for line in lines:
        header = line["header"]
        if line["kind"] == "request" and line["code"] == 11:
            asked[header["opaque"]] = header["extFields"]
        elif line["kind"] == "response" and header["opaque"] in asked:
            request = table.decode(PullMessage, asked.pop(header["opaque"]), b"")
            reply: Any = rig.consume.pull(request, call_of(rig.connection, code=11))
            theirs = header["extFields"]
            if line["code"] == Code.SUCCESS:
                theirs["nextBeginOffset"] = str(held)  # the stand-in counts matches, not entries
            assert (reply.code, reply.remark) == (line["code"], header["remark"])
            assert table.encode(reply) == theirs
            checked += 1
    assert checked
