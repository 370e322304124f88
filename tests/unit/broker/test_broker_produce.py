from __future__ import annotations

import asyncio
import base64
import errno
from collections.abc import AsyncIterator, Callable, Sequence
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
    outcome_of,
)

from cosmodrome.broker.counts.pressure import LATE_BEATS_MAX, Pressure
from cosmodrome.broker.counts.put_times import PutTimes
from cosmodrome.broker.later.deferral import Deferral
from cosmodrome.broker.later.recall import parse_handle
from cosmodrome.broker.members.groups import Groups
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.topics import Topics
from cosmodrome.broker.send.produce import Produce, parse_batch
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.real import MappedSegment, real_env
from cosmodrome.errors import Code, MessageTooLarge, Refused, StoreBusy, StoreUnwritable
from cosmodrome.layout import BATCH_ITEM_HEAD, SYS_COMMIT, SYS_PREPARED
from cosmodrome.store.store import DelayLevels, PutStatus, Store
from cosmodrome.wire import table
from cosmodrome.wire.bodies import SubscriptionGroupConfig, TopicConfig
from cosmodrome.wire.commands.produce import SendBatchMessage, SendMessage, SendMessageV2
from cosmodrome.wire.message import pack_host, parse_properties
from cosmodrome.wire.names import SCHEDULE_TOPIC, SEND_FORBIDDEN_TOPICS
from cosmodrome.wire.record import iter_records

BODY_MAX = 1000


class Rig:
    """A Produce on real tables and a store that the test steers."""

    def __init__(self, path: Path, store: FakeStore | Store | None = None, **changes: Any) -> None:
        defaults = {"broker_name": "b0", "broker_cluster_name": "C0"}
        self.options = BrokerOptions(**{**defaults, **changes})
        self.env: Env = real_env(seed=7)
        self.store = cast(Any, store or FakeStore())
        self.topics = Topics(self.options, str(path / "topics.json"), self.env)
        self.groups = Groups(self.options, str(path / "subscriptionGroup.json"), self.env)
        deferral = Deferral(
            DelayLevels("1s 5s 10s"),
            self.topics,
            self.env.clock,
            timer_delay_seconds_max=60,
            timers_full=lambda: False,
        )
        base = foundation(self.options, self.env, self.store, max_message_size=BODY_MAX)
        members = Members(self.topics, self.groups, cast(Any, None), cast(Any, None))
        pressure = Pressure(self.options)
        self.produce = Produce(base, members, deferral, PutTimes(), pressure)

    async def start(self) -> Rig:
        await self.topics.start()
        await self.groups.start()
        self.topics.put(TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=2))
        return self

    async def stop(self) -> None:
        await self.topics.stop()
        await self.groups.stop()

    async def send(self, *, version: int = 409, peer: Any = None, **changes: Any) -> Any:
        connection = FakeConnection(peer) if peer else None
        outcome = self.produce.send_v2(ask(**changes), call_of(connection, version=version))
        return await outcome_of(outcome)

    async def batch(self, items: Sequence[bytes] | bytes, **changes: Any) -> Any:
        body = items if isinstance(items, bytes) else b"".join(items)
        request = table.decode(
            SendBatchMessage, table.encode(ask(SendBatchMessage, **changes)), body
        )
        return await outcome_of(self.produce.send_batch(request, call_of(code=320)))


def ask(row: Any = SendMessageV2, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "producer_group": "P",
        "topic": "T",
        "default_topic": "TBW102",
        "default_topic_queue_nums": 4,
        "queue_id": 1,
        "sys_flag": 0,
        "born_timestamp": 1_700_000_000_000,
        "flag": 0,
        "body": b"hello",
    }
    return row(**{**fields, **changes})


def item(body: bytes, properties: str = "", flag: int = 0) -> bytes:
    text = properties.encode()
    size = BATCH_ITEM_HEAD.size + len(body) + 2 + len(text)
    head = BATCH_ITEM_HEAD.pack(size, 0, 0, flag, len(body))
    return head + body + len(text).to_bytes(2, "big") + text


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = await Rig(tmp_path).start()
    yield rig
    await rig.stop()


async def other_rig(path: Path, **changes: Any) -> Rig:
    return await Rig(path, **changes).start()


# --- what is stored and answered -------------------------------------------------------------


async def test_a_message_is_stored_as_sent(rig: Rig) -> None:
    reply = await rig.send(
        properties="TAGS\x01A\x02",
        flag=42,
        sys_flag=0x301,
        reconsume_times=3,
        peer=("::ffff:1.2.3.4", 5),
    )
    (draft,) = rig.store.log
    assert (draft.topic, draft.queue_id, draft.body) == ("T", 1, b"hello")
    assert (draft.flag, draft.sys_flag, draft.reconsume_times) == (42, 0x301, 3)
    assert draft.born_ms == 1_700_000_000_000
    assert draft.born_host == pack_host("1.2.3.4", 5)
    assert draft.store_host == STORE_HOST
    assert reply.code == Code.SUCCESS
    assert table.encode(reply) == {
        "msgId": STORE_HOST.hex().upper() + f"{1000:016X}",
        "queueId": "1",
        "queueOffset": "0",
        "MSG_REGION": "DefaultRegion",
        "TRACE_ON": "true",
    }
    assert rig.produce.stats.put_counts.take() == [("T", 1, 1, 100)]


async def test_the_old_header_does_the_same(rig: Rig) -> None:
    reply = await outcome_of(rig.produce.send(ask(SendMessage), call_of(code=10)))
    assert reply.code == Code.SUCCESS
    assert rig.store.log[0].topic == "T"


async def test_messages_of_a_connection_keep_their_order(rig: Rig) -> None:
    call = call_of()
    outcomes = [rig.produce.send_v2(ask(body=b"%d" % number), call) for number in range(10)]
    replies = [await outcome_of(outcome) for outcome in outcomes]
    assert [draft.body for draft in rig.store.log] == [b"%d" % number for number in range(10)]
    assert [reply.queue_offset for reply in replies] == list(range(10))


async def test_the_sender_waits_before_anything_else_can_happen(rig: Rig) -> None:
    """A failed write gives the offsets out again: who is not waiting by then would take the
    next message's safety for its own."""
    batch = ask(SendBatchMessage, batch=True, body=item(b"x"))
    sends: list[Callable[[], Any]] = [
        lambda: rig.produce.send_v2(ask(), call_of()),
        lambda: rig.produce.send_batch(batch, call_of(code=320)),
    ]
    for send in sends:
        seen = len(rig.store.asked_durable)
        outcome = send()  # nothing was awaited yet, and still
        assert len(rig.store.asked_durable) == seen + 1
        await outcome_of(outcome)


@pytest.mark.parametrize(
    ("sent", "stored"),
    [
        (None, "CLUSTER\x01C0"),
        ("", "CLUSTER\x01C0"),
        ("TAGS\x01A", "TAGS\x01A\x02CLUSTER\x01C0"),
        ("TAGS\x01A\x02", "TAGS\x01A\x02CLUSTER\x01C0"),
        ("KEYS\x01k\x02WAIT\x01true\x02TAGS\x01A", "KEYS\x01k\x02TAGS\x01A\x02CLUSTER\x01C0"),
        ("WAIT\x01false", "CLUSTER\x01C0"),
        ("odd\x02TAGS\x01A\x02\x02x\x01\x02\x01y", "TAGS\x01A\x02CLUSTER\x01C0"),
        ("a\x011\x02a\x012", "a\x012\x02CLUSTER\x01C0"),
        ("ключ\x01значение", "ключ\x01значение\x02CLUSTER\x01C0"),
    ],
)
async def test_properties_are_rewritten(rig: Rig, sent: str | None, stored: str) -> None:
    await rig.send(properties=sent)
    assert rig.store.log[0].properties == stored


@pytest.mark.parametrize(
    ("properties", "waits"),
    [(None, True), ("WAIT\x01true", True), ("WAIT\x01TRUE", True), ("WAIT\x01false", False)],
)
async def test_wait_decides_what_the_answer_waits_for(
    rig: Rig, properties: str | None, waits: bool
) -> None:
    await rig.send(properties=properties)
    assert rig.store.asked_durable == [(1100, waits)]


@pytest.mark.parametrize("status", list(PutStatus)[1:], ids=str)
async def test_a_slow_sync_or_slave_is_answered_as_stored_with_a_warning(
    rig: Rig, status: PutStatus
) -> None:
    rig.store.status = status
    reply = await rig.send()
    assert reply.code == Code[status.name] and reply.remark
    assert rig.produce.unpromised[status] == 1
    assert {"msgId", "queueId", "queueOffset", "MSG_REGION", "TRACE_ON"} == table.encode(
        reply
    ).keys()


async def test_an_empty_body_is_taken(rig: Rig) -> None:
    assert (await rig.send(body=b"")).code == Code.SUCCESS


async def test_a_body_of_exactly_the_limit_is_taken(rig: Rig) -> None:
    assert (await rig.send(body=bytes(BODY_MAX))).code == Code.SUCCESS


async def test_multi_tag_topics_mark_their_messages(rig: Rig) -> None:
    rig.topics.put(TopicConfig(topic_name="M", topic_filter_type="MULTI_TAG"))
    await rig.send(topic="M", sys_flag=1)
    assert rig.store.log[0].sys_flag == 3


async def test_a_committed_flag_is_kept(rig: Rig) -> None:
    assert (await rig.send(sys_flag=SYS_COMMIT)).code == Code.SUCCESS


async def test_a_negative_queue_is_chosen_among_those_to_write(rig: Rig) -> None:
    replies = [await rig.send(queue_id=-1) for _ in range(40)]
    assert {reply.queue_id for reply in replies} == {0, 1}
    assert {draft.queue_id for draft in rig.store.log} == {0, 1}


async def test_queues_between_write_and_read_number_are_taken(rig: Rig) -> None:
    assert (await rig.send(queue_id=3)).queue_id == 3


async def test_region_and_tracing_follow_the_settings(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, region_id="east", trace_on=False)
    said = table.encode(await rig.send())
    assert (said["MSG_REGION"], said["TRACE_ON"]) == ("east", "false")
    await rig.stop()


# --- topics ----------------------------------------------------------------------------------


async def test_an_unknown_topic_is_created(rig: Rig) -> None:
    assert (await rig.send(topic="New", queue_id=3)).code == Code.SUCCESS
    config = rig.topics.get("New")
    assert config is not None
    assert (config.write_queue_nums, config.perm, config.topic_sys_flag) == (4, 6, 0)


async def test_unit_mode_marks_created_topics(rig: Rig) -> None:
    await rig.send(topic="Unit", unit_mode=True)
    await rig.send(topic="%RETRY%G", unit_mode=True, queue_id=0)
    configs = [rig.topics.get("Unit"), rig.topics.get("%RETRY%G")]
    assert [config and config.topic_sys_flag for config in configs] == [1, 2]


async def test_brokers_that_are_not_writable_refuse_order_topics_only(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, broker_permission=4)
    rig.topics.put(TopicConfig(topic_name="Ordered", order=True))
    assert (await rig.send(topic="Ordered")).code == Code.NO_PERMISSION
    assert (await rig.send()).code == Code.SUCCESS
    await rig.stop()


# --- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"topic": "bad name"}, 1, "not allowed"),
        ({"topic": "../../etc"}, 1, "not allowed"),
        ({"topic": ""}, 1, "empty"),
        ({"topic": "x" * 128}, 1, "128"),
        ({"queue_id": 4}, 1, "Queue 4"),
        ({"topic": "Unknown", "default_topic": "T"}, 17, "Unknown"),
        ({"topic": "Unknown", "default_topic": "nothing"}, 17, "Unknown"),
        ({"body": bytes(BODY_MAX + 1)}, 13, "1001 bytes"),
        ({"properties": "a\x01" + "x" * 32767}, 13, "properties"),
        ({"properties": "a\x01" + "ф" * 16384}, 13, "properties"),
        ({"properties": "a\x01\ud800"}, 13, "Unicode"),
        ({"properties": "DELAY\x01soon"}, 13, "soon"),
        ({"properties": "TIMER_DELAY_SEC\x0161"}, 13, "timerMaxDelaySec 60"),
        ({"properties": "TIMER_DELIVER_MS\x01noon"}, 13, "TIMER_DELIVER_MS is 'noon'"),
        ({"sys_flag": SYS_PREPARED}, 13, "TRAN_MSG is not true"),
        ({"properties": "TRAN_MSG\x01true\x02DELAY\x01soon"}, 13, "soon"),
        ({"properties": "TRAN_MSG\x01true\x02TIMER_DELAY_SEC\x0161"}, 13, "timerMaxDelaySec 60"),
        ({"properties": "TRAN_MSG\x01true\x02a\x01" + "x" * 32500}, 13, "more than 32511"),
    ],
)
async def test_refusals_name_their_reason(
    rig: Rig, changes: dict[str, Any], code: int, word: str
) -> None:
    reply = await rig.send(**changes)
    assert reply.code == code
    assert word in reply.remark
    assert table.encode(reply) == {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
    assert rig.store.log == []
    assert rig.produce.failures_total == 1


async def test_a_delayed_message_waits_but_is_answered_as_sent(rig: Rig) -> None:
    await rig.send(properties="DELAY\x012")
    reply = await rig.send(properties="DELAY\x012\x02WAIT\x01false\x02UNIQ_KEY\x01K")
    draft = rig.store.log[1]
    assert (draft.topic, draft.queue_id) == ("SCHEDULE_TOPIC_XXXX", 1)
    assert parse_properties(draft.properties) == {
        "DELAY": "2",
        "UNIQ_KEY": "K",
        "CLUSTER": "C0",
        "REAL_TOPIC": "T",
        "REAL_QID": "1",
        "WAIT": "false",
    }
    assert (reply.code, reply.queue_id, reply.queue_offset) == (0, 1, 1)
    assert reply.recall_handle is None
    assert rig.store.asked_durable[1][1] is False


async def test_a_retry_of_a_client_waits_too(rig: Rig) -> None:
    await rig.send(topic="%RETRY%G", queue_id=0, properties="DELAY\x013", reconsume_times=1)
    assert rig.store.log[0].topic == "SCHEDULE_TOPIC_XXXX"
    assert parse_properties(rig.store.log[0].properties)["REAL_TOPIC"] == "%RETRY%G"


async def test_a_timed_message_comes_with_a_handle(rig: Rig) -> None:
    reply = await rig.send(properties="TIMER_DELAY_SEC\x0130\x02UNIQ_KEY\x01K")
    draft = rig.store.log[0]
    assert (draft.topic, draft.queue_id) == ("rmq_sys_wheel_timer", 0)
    handle = parse_handle(reply.recall_handle)
    assert (handle.topic, handle.broker_name, handle.unique_key) == ("T", "b0", "K")
    assert str(handle.deliver_ms) == parse_properties(draft.properties)["TIMER_OUT_MS"]
    assert (await rig.send(properties="TIMER_DELAY_SEC\x0130")).recall_handle is None


async def test_properties_that_have_no_room_for_a_wait(rig: Rig) -> None:
    long = "a\x01" + "x" * 32_740
    assert (await rig.send(properties=long)).code == 0
    reply = await rig.send(properties=f"DELAY\x011\x02{long}")
    assert (reply.code, "32767" in reply.remark) == (Code.MESSAGE_ILLEGAL, True)


@pytest.mark.parametrize("topic", sorted(SEND_FORBIDDEN_TOPICS))
async def test_topics_of_the_broker_take_no_messages(rig: Rig, topic: str) -> None:
    assert (await rig.send(topic=topic, queue_id=0)).code == Code.NO_PERMISSION


async def test_before_its_time_nothing_is_taken(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, start_accept_send_request_time_stamp=9_000_000_000_000)
    reply = await rig.send(topic="also wrong")
    assert reply.code == Code.SYSTEM_ERROR
    assert "startAcceptSendRequestTimeStamp" in reply.remark
    await rig.stop()


async def test_rejected_transactions_have_their_own_reason(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, reject_transaction_message=True)
    reply = await rig.send(properties="TRAN_MSG\x01true")
    assert reply.code == Code.NO_PERMISSION
    assert "rejectTransactionMessage" in reply.remark
    await rig.stop()


async def test_without_auto_creation_a_topic_must_exist(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, auto_create_topic_enable=False)
    assert (await rig.send(topic="New")).code == Code.TOPIC_NOT_EXIST
    await rig.stop()


async def test_a_topic_without_queues_to_write_refuses_a_free_choice(rig: Rig) -> None:
    rig.topics.put(TopicConfig(topic_name="R", read_queue_nums=1, write_queue_nums=0))
    reply = await rig.send(topic="R", queue_id=-1)
    assert (reply.code, "writeQueueNums" in reply.remark) == (Code.SYSTEM_ERROR, True)


@pytest.mark.parametrize(
    ("error", "code", "remark"),
    [
        (StoreUnwritable("disk full"), Code.SERVICE_NOT_AVAILABLE, "disk full"),
        (StoreBusy("disk behind"), Code.SYSTEM_BUSY, "[REJECTREQUEST] disk behind"),
        (MessageTooLarge("too long"), Code.MESSAGE_ILLEGAL, "too long"),
    ],
)
async def test_what_the_store_refuses(rig: Rig, error: Exception, code: int, remark: str) -> None:
    rig.store.error = error
    for reply in (await rig.send(), await rig.batch([item(b"x")])):
        assert (reply.code, reply.remark) == (code, remark)
    assert rig.produce.stats.of_topic("T") is None
    assert rig.produce._put_times.percentile_ms(0.99) == 0.0


async def test_sends_are_counted_where_they_are_stored(rig: Rig) -> None:
    await rig.send()
    await rig.batch([item(b"x"), item(b"y")])
    await rig.send(properties="DELAY\x012")
    stats = rig.produce.stats
    plain, delayed = stats.of_topic("T"), stats.of_topic(SCHEDULE_TOPIC)
    assert plain is not None and delayed is not None
    assert (plain.messages, plain.calls) == (3, 2)
    assert (delayed.messages, {key: item.calls for key, item in delayed.queues.items()}) == (
        1,
        {1: 1},
    )
    assert (stats.puts.messages, stats.puts.size) == (4, plain.size + delayed.size)
    assert sum(rig.produce._put_times._sum()) == 3


async def test_an_overloaded_broker_answers_busy(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, wait_time_mills_in_send_queue=100)
    for _ in range(LATE_BEATS_MAX):
        rig.produce._pressure.beat(0.25)
    for reply in (await rig.send(), await rig.batch([item(b"x")])):
        assert reply.code == Code.SYSTEM_BUSY
        assert reply.remark.startswith("[OVERLOAD] ") and "250 ms" in reply.remark
    assert rig.store.log == []
    rig.produce._pressure.beat(0.0)
    assert (await rig.send()).code == Code.SUCCESS
    await rig.stop()


async def test_bytes_that_did_not_make_it_are_not_acknowledged(rig: Rig) -> None:
    rig.store.durable_error = StoreUnwritable("a sync failed")
    reply = await rig.send()
    assert (reply.code, reply.remark) == (Code.SERVICE_NOT_AVAILABLE, "a sync failed")
    assert (rig.produce.stats.put_counts.take(), rig.produce.failures_total) == ([], 1)


async def test_before_its_address_is_known_a_broker_takes_nothing(rig: Rig) -> None:
    rig.produce._store_host = lambda: b""
    for reply in (await rig.send(), await rig.batch([item(b"x")])):
        assert (reply.code, "starting" in reply.remark) == (Code.SERVICE_NOT_AVAILABLE, True)
    assert rig.store.log == []


# --- retry topics ----------------------------------------------------------------------------


async def test_a_retry_topic_needs_its_group(tmp_path: Path) -> None:
    rig = await other_rig(tmp_path, auto_create_subscription_group=False)
    reply = await rig.send(topic="%RETRY%Nobody", queue_id=0)
    assert reply.code == Code.SUBSCRIPTION_GROUP_NOT_EXIST
    await rig.stop()


@pytest.mark.parametrize(
    ("version", "own_limit", "times", "target"),
    [
        (409, None, 1, "%RETRY%G"),
        (409, None, 2, "%DLQ%G"),
        (409, 5, 4, "%RETRY%G"),
        (409, 5, 5, "%DLQ%G"),
        (121, 1, 1, "%DLQ%G"),
        (63, 1, 1, "%RETRY%G"),
        (63, 9, 2, "%DLQ%G"),
        (409, None, None, "%RETRY%G"),
    ],
)
async def test_used_up_messages_become_dead_letters(
    rig: Rig, version: int, own_limit: int | None, times: int | None, target: str
) -> None:
    rig.groups.put(SubscriptionGroupConfig(group_name="G", retry_max_times=2))
    rig.topics.put(TopicConfig(topic_name="%RETRY%G", read_queue_nums=3, write_queue_nums=3))
    reply = await rig.send(
        topic="%RETRY%G",
        queue_id=2,
        version=version,
        max_reconsume_times=own_limit,
        reconsume_times=times,
    )
    dead = target.startswith("%DLQ%")
    assert (reply.code, reply.queue_id) == (Code.SUCCESS, 2)
    assert (rig.store.log[0].topic, rig.store.log[0].queue_id) == (target, 0 if dead else 2)
    if dead:
        config = rig.topics.get("%DLQ%G")
        assert config is not None
        assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (1, 1, 6)


async def test_a_dead_letter_is_not_delayed_any_more(rig: Rig) -> None:
    reply = await rig.send(
        topic="%RETRY%G", queue_id=0, properties="DELAY\x013\x02WAIT\x01true", reconsume_times=16
    )
    assert reply.code == Code.SUCCESS
    assert rig.store.log[0].properties == "DELAY\x010\x02CLUSTER\x01C0"


# --- batches ---------------------------------------------------------------------------------


async def test_a_batch_is_stored_whole(rig: Rig) -> None:
    reply = await rig.batch(
        [item(b"one", "TAGS\x01A\x02WAIT\x01true", 7), item(b"", "k\x01v\x02"), item(b"three")],
        properties="WAIT\x01true",
        sys_flag=0,
        flag=99,
    )
    tail = "WAIT\x01true\x02CLUSTER\x01C0"
    assert [(d.body, d.flag, d.properties) for d in rig.store.log] == [
        (b"one", 7, f"TAGS\x01A\x02WAIT\x01true\x02{tail}"),
        (b"", 0, f"k\x01v\x02{tail}"),
        (b"three", 0, tail),
    ]
    assert {(d.topic, d.queue_id, d.born_ms) for d in rig.store.log} == {
        ("T", 1, 1_700_000_000_000)
    }
    host = STORE_HOST.hex().upper()
    assert reply.msg_id == ",".join(f"{host}{offset:016X}" for offset in (1000, 1100, 1200))
    assert (reply.queue_id, reply.queue_offset) == (1, 0)
    assert rig.store.asked_durable == [(1300, True)]
    assert [one[2] for one in rig.produce.stats.put_counts.take()] == [3]


async def test_a_batch_need_not_wait(rig: Rig) -> None:
    await rig.batch([item(b"x")], properties="WAIT\x01false")
    assert rig.store.asked_durable == [(1100, False)]


async def test_a_single_code_with_the_batch_mark_is_a_batch(rig: Rig) -> None:
    reply = await rig.send(batch=True, body=item(b"a") + item(b"b"))
    assert reply.msg_id.count(",") == 1


def test_the_known_batch_item() -> None:
    data = bytes.fromhex(
        "00000027000000000000000000000007000000017800105741495401747275650254414753" + "0141"
    )
    assert [tuple(one) for one in parse_batch(data)] == [(7, b"x", "WAIT\x01true\x02TAGS\x01A")]


GOOD = item(b"good", "TAGS\x01A")


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (GOOD + b"\x00" * 10, "item 1 at byte 32"),
        (GOOD + item(b"cut")[:-1], "item 1"),
        (BATCH_ITEM_HEAD.pack(0, 0, 0, 0, 0) + b"\x00\x00", "item 0 at byte 0"),
        (BATCH_ITEM_HEAD.pack(-5, 0, 0, 0, 0) + b"\x00\x00", "item 0"),
        (BATCH_ITEM_HEAD.pack(22, 0, 0, 0, -1) + b"\x00\x00", "body of -1"),
        (BATCH_ITEM_HEAD.pack(22, 0, 0, 0, 2**31 - 1) + b"\x00\x00", "item 0"),
        (BATCH_ITEM_HEAD.pack(2**31 - 1, 0, 0, 0, 0) + b"\x00\x00", "item 0"),
        (BATCH_ITEM_HEAD.pack(22, 0, 0, 0, 0) + b"\x00\x01", "properties"),
        (BATCH_ITEM_HEAD.pack(22, 0, 0, 0, 0) + b"\xff\xff", "properties"),
        (BATCH_ITEM_HEAD.pack(23, 0, 0, 0, 0) + b"\x00\x01\xff", "UTF-8"),
        (b"", "no message"),
        (item(b"x", "DELAY\x011"), "item 0 has a delay"),
        (item(b"x", "TIMER_DELAY_MS\x011"), "item 0 has a delay level or a delivery time"),
        (GOOD + item(b"x", "TRAN_MSG\x01true"), "item 1 is transactional"),
        (item(b"x", "k\x01" + "v" * 32760), "item 0"),
        (bytes(BODY_MAX + 1), "1001 bytes"),
    ],
)
async def test_a_bad_batch_stores_nothing(rig: Rig, body: bytes, where: str) -> None:
    if len(body) > BODY_MAX + 1:
        rig.produce._body_bytes_max = 1 << 20
    reply = await rig.batch(body)
    assert reply.code == Code.MESSAGE_ILLEGAL
    assert where in reply.remark
    assert rig.store.log == []


@pytest.mark.parametrize(
    "changes",
    [
        {"topic": "%RETRY%G", "queue_id": 0},
        {"sys_flag": SYS_COMMIT},
        {"properties": "DELAY\x011"},
        {"properties": "TRAN_MSG\x01true"},
    ],
)
async def test_what_a_batch_cannot_be(rig: Rig, changes: dict[str, Any]) -> None:
    assert (await rig.batch([item(b"x")], **changes)).code == Code.MESSAGE_ILLEGAL
    assert rig.store.log == []


async def test_garbage_never_breaks_out_of_the_batch_parser() -> None:
    env = real_env(seed=3)
    whole = item(b"abc", "TAGS\x01A") * 3
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(env.random.randrange(1, 4)):
            data[env.random.randrange(len(data))] = env.random.randrange(256)
        del data[env.random.randrange(len(data)) :]
        try:
            list(parse_batch(bytes(data)))
        except Refused as refused:
            assert refused.code == Code.MESSAGE_ILLEGAL


# --- against the real store and upstream's data ----------------------------------------------


async def test_what_was_answered_can_be_read(tmp_path: Path) -> None:
    async with open_store(tmp_path / "store") as store:
        rig = await Rig(tmp_path, store).start()
        for number in range(3):
            reply = await rig.send(body=b"%d" % number, properties="TAGS\x01A")
            assert (reply.code, reply.queue_offset) == (Code.SUCCESS, number)
        reply = await rig.batch([item(b"x", "KEYS\x01k"), item(b"y")])
        assert reply.queue_offset == 3
        batch = store.read("T", 1, 0, 32)
        records = list(iter_records(batch.data))
        assert [record.body for record in records] == [b"0", b"1", b"2", b"x", b"y"]
        assert [record.message_id for record in records][3:] == reply.msg_id.split(",")
        assert records[0].properties == "TAGS\x01A\x02CLUSTER\x01C0"
        assert records[3].properties == "KEYS\x01k\x02CLUSTER\x01C0"
        await rig.stop()


async def test_a_failed_write_is_told_to_everyone_it_took_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = MappedSegment.write
    full = True

    def failing(self: MappedSegment, data: bytes, position: int) -> None:
        if full and "commitlog" in self.path:
            raise OSError(errno.ENOSPC, "no space left on device")
        write(self, data, position)

    async with open_store(tmp_path / "store") as store:
        rig = await Rig(tmp_path, store).start()
        monkeypatch.setattr(MappedSegment, "write", failing)
        lost = await asyncio.gather(*(rig.send(body=b"lost") for _ in range(3)))
        assert [reply.code for reply in lost] == [Code.SERVICE_NOT_AVAILABLE] * 3
        assert rig.produce.stats.put_counts.take() == []
        full = False
        reply = await rig.send(body=b"kept")
        assert (reply.code, reply.queue_offset) == (Code.SUCCESS, 0)
        (record,) = iter_records(store.read("T", 1, 0, 32).data)
        assert record.body == b"kept"
        await rig.stop()


@each_golden
@pytest.mark.parametrize(
    "name",
    [
        "send_v2",
        "send_v2_unicode",
        "send_v1_code10",
        "send_async",
        "send_ordered",
        "send_batch_320",
        "send_compressed_lz4",
        "send_autocreate",
        "send_incompressible",
    ],
)
async def test_upstream_clients_are_answered_as_upstream_answers(
    golden: Golden, rig: Rig, name: str
) -> None:
    rows = {10: SendMessage, 310: SendMessageV2, 320: SendBatchMessage}
    handlers: dict[int, Any] = {
        10: rig.produce.send,
        310: rig.produce.send_v2,
        320: rig.produce.send_batch,
    }
    rig.produce._body_bytes_max = 4 << 20
    answers = {
        (line["conn"], line["header"]["opaque"]): line
        for line in golden.wire("json", name)
        if line["kind"] == "response"
    }
    checked = 0
    for line in golden.wire("json", name):
        if line["kind"] != "request" or line["code"] not in rows:
            continue
        data = base64.b64decode(line["frame_b64"])
        body = data[len(data) - line["body_len"] :]
        request = table.decode(rows[line["code"]], line["header"]["extFields"], body)
        reply = await outcome_of(handlers[line["code"]](request, call_of(code=line["code"])))
        answer = answers.get((line["conn"], line["header"]["opaque"]))
        if answer is None:
            continue
        theirs = answer["header"]["extFields"]
        ours = table.encode(reply)
        assert (reply.code, ours.keys()) == (answer["code"], theirs.keys())
        for key in ("queueId", "MSG_REGION", "TRACE_ON"):
            assert ours[key] == theirs[key]
        assert ours["msgId"].count(",") == theirs["msgId"].count(",")
        checked += 1
    assert checked


@each_golden
async def test_stored_properties_equal_upstreams(golden: Golden, rig: Rig) -> None:
    """What clients sent in the captured run, rewritten by us, against what the broker stored in
    its own run of the same scenario: the same names must be there, and none else."""
    walk = golden.manifest("store")["commitlog_walk"]
    stored = {
        (message["topic"], frozenset(message["properties"]))
        for message in walk
        if message["topic"] in ("GNormal", "GBatch", "GOrder")
    }
    checked = 0
    for name in ("send_v2", "send_v2_unicode", "send_ordered"):
        for line in golden.wire("json", name):
            ext = line["header"].get("extFields") or {}
            if line["code"] != 310 or ext.get("b") not in ("GNormal", "GOrder"):
                continue
            request = table.decode(SendMessageV2, ext, b"x")
            await outcome_of(rig.produce.send_v2(request, call_of()))
            names = frozenset(parse_properties(rig.store.log[-1].properties))
            assert (ext["b"], names) in stored
            checked += 1
    assert checked > 10


def test_rows_reach_their_handlers(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    served = {
        row.request_code
        for name in ("send", "send_v2", "send_batch")
        for row in getattr(rig.produce, name).serves
    }
    assert served == {10, 310, 320}
