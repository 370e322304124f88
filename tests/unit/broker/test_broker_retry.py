from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from tests.unit.broker.broker_fakes import STORE_HOST, call_of, foundation, outcome_of
from tests.unit.broker.later_kit import Later, SetClock

from cosmodrome.broker.later.retry import Retry
from cosmodrome.broker.members.groups import Groups
from cosmodrome.broker.members.room import Members
from cosmodrome.errors import Code, Refused
from cosmodrome.store.store import Draft
from cosmodrome.wire.bodies import SubscriptionGroupConfig, TopicConfig
from cosmodrome.wire.commands.consume import ConsumerSendMsgBack
from cosmodrome.wire.message import offset_message_id
from cosmodrome.wire.names import SCHEDULE_TOPIC
from cosmodrome.wire.record import Record, decode_record


class Rig:
    def __init__(self, path: Path, **changes: Any) -> None:
        self.kit = Later(path, SetClock(), levels="1s 5s 10s 30s 1m 2m")
        options = msgspec.structs.replace(self.kit.options, **changes)
        self.groups = Groups(options, str(path / "groups.json"), self.kit.env)
        kit = self.kit
        members = Members(kit.topics, self.groups, cast(Any, None), cast(Any, None))
        self.retry = Retry(foundation(options, kit.env, kit.store), members, kit.deferral)

    async def start(self) -> Rig:
        await self.kit.open()
        await self.groups.start()
        return self

    async def stop(self) -> None:
        await self.groups.stop()
        await self.kit.close()

    async def store(self, topic: str = "T", properties: str = "KEYS\x01k", times: int = 0) -> int:
        draft = Draft(
            topic=topic,
            queue_id=2,
            body=b"body",
            properties=properties,
            born_host=STORE_HOST,
            store_host=STORE_HOST,
            flag=9,
            sys_flag=1,
            born_ms=77,
            reconsume_times=times,
        )
        place = self.kit.store.append(draft)
        await self.kit.store.durable(place.end)
        return place.log_offset

    async def back(self, offset: int, *, version: int = 409, **changes: Any) -> Any:
        fields: dict[str, Any] = {"offset": offset, "group": "G", "delay_level": 0}
        ask = ConsumerSendMsgBack(**{**fields, **changes})
        return await outcome_of(self.retry.send_back(ask, call_of(code=36, version=version)))

    def records(self, topic: str, queue_id: int) -> list[Record]:
        found = self.kit.store.entries(topic, queue_id, 0, 100)
        return [decode_record(self.kit.store.record(*entry[:2]) or b"") for entry in found]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = await Rig(tmp_path).start()
    yield rig
    await rig.stop()


async def test_a_failed_message_comes_again_and_ends_as_a_dead_letter(rig: Rig) -> None:
    """The properties are those that a 4.9.8 broker wrote for the same steps."""
    offset = await rig.store(properties="KEYS\x01retry-0\x02TAGS\x01Bad\x02CLUSTER\x01C")
    origin = offset_message_id(STORE_HOST, offset)
    assert (await rig.back(offset, delay_level=1, max_reconsume_times=1)).code == 0
    waits = {
        "REAL_TOPIC": "%RETRY%G",
        "REAL_QID": "0",
        "ORIGIN_MESSAGE_ID": origin,
        "RETRY_TOPIC": "T",
        "KEYS": "retry-0",
        "TAGS": "Bad",
        "CLUSTER": "C",
        "WAIT": "false",
        "DELAY": "1",
    }
    (scheduled,) = rig.records(SCHEDULE_TOPIC, 0)
    assert scheduled.pairs() == waits
    rig.kit.clock.ms += 1000
    await rig.kit.until(lambda: bool(rig.records("%RETRY%G", 0)))
    (again,) = rig.records("%RETRY%G", 0)
    assert again.pairs() == waits
    assert (again.reconsume_times, again.flag, again.sys_flag & 1, again.born_ms) == (1, 9, 1, 77)
    assert (again.body, again.born_host, again.store_host) == (b"body", STORE_HOST, STORE_HOST)
    assert (await rig.back(again.log_offset, delay_level=1, max_reconsume_times=1)).code == 0
    (dead,) = rig.records("%DLQ%G", 0)
    assert dead.pairs() == {**waits, "DELAY": "0"}
    assert dead.reconsume_times == 2
    topic = rig.kit.topics.get("%DLQ%G")
    assert topic is not None and (topic.perm, topic.write_queue_nums) == (6, 1)
    assert (rig.retry.retried_total, rig.retry.dead_total) == (1, 1)


@pytest.mark.parametrize(("times", "asked", "level"), [(0, 0, 3), (2, 0, 5), (9, 0, 6), (0, 2, 2)])
async def test_the_delay_grows_with_the_attempts(
    rig: Rig, times: int, asked: int, level: int
) -> None:
    await rig.back(await rig.store(times=times), delay_level=asked)
    (record,) = rig.records(SCHEDULE_TOPIC, level - 1)
    assert record.pairs()["DELAY"] == str(level)
    assert record.reconsume_times == times + 1


@pytest.mark.parametrize(
    ("times", "changes", "dead"),
    [
        (15, {}, False),
        (16, {}, True),
        (16, {"max_reconsume_times": 17}, False),
        (3, {"max_reconsume_times": 3}, True),
        (3, {"max_reconsume_times": 3, "version": 120}, False),
        (0, {"max_reconsume_times": 0}, True),
        (0, {"delay_level": -1}, True),
    ],
)
async def test_when_a_message_is_dead(
    rig: Rig, times: int, changes: dict[str, Any], dead: bool
) -> None:
    await rig.back(await rig.store(times=times), **changes)
    assert len(rig.records("%DLQ%G", 0)) == int(dead)


async def test_the_first_origin_is_kept(rig: Rig) -> None:
    offset = await rig.store(properties="RETRY_TOPIC\x01First\x02ORIGIN_MESSAGE_ID\x01AB")
    await rig.back(offset)
    (record,) = rig.records(SCHEDULE_TOPIC, 2)
    assert record.pairs()["RETRY_TOPIC"] == "First"
    assert record.pairs()["ORIGIN_MESSAGE_ID"] == "AB"


async def test_a_timed_message_is_retried_by_level(rig: Rig) -> None:
    await rig.back(await rig.store(properties="TIMER_DELAY_MS\x019\x02TIMER_OUT_MS\x0188"))
    assert len(rig.records(SCHEDULE_TOPIC, 2)) == 1
    await rig.back(await rig.store(properties="TIMER_DELAY_MS\x019"), delay_level=-1)
    assert len(rig.records("%DLQ%G", 0)) == 1


async def test_retry_queues(rig: Rig) -> None:
    rig.groups.put(SubscriptionGroupConfig(group_name="G", retry_queue_nums=8))
    for _ in range(40):
        await rig.back(await rig.store(), unit_mode=True)
    topic = rig.kit.topics.get("%RETRY%G")
    assert topic is not None
    assert (topic.write_queue_nums, topic.perm, topic.topic_sys_flag) == (8, 6, 2)
    queues = {record.pairs()["REAL_QID"] for record in rig.records(SCHEDULE_TOPIC, 2)}
    assert len(queues) > 3


async def test_a_group_without_retry_queues_drops(rig: Rig) -> None:
    rig.groups.put(SubscriptionGroupConfig(group_name="G", retry_queue_nums=0))
    assert (await rig.back(await rig.store())).code == 0
    assert rig.records(SCHEDULE_TOPIC, 2) == []


async def test_refusals(tmp_path: Path) -> None:
    rig = await Rig(tmp_path, auto_create_subscription_group=False).start()
    offset = await rig.store()
    cases: list[tuple[int, dict[str, Any], Code, str]] = [
        (offset, {"group": "Unknown"}, Code.SUBSCRIPTION_GROUP_NOT_EXIST, "Unknown"),
        (offset, {"group": "../etc"}, Code.SYSTEM_ERROR, "not allowed"),
        (offset + 1, {}, Code.SYSTEM_ERROR, f"offset {offset + 1}"),
        (1 << 40, {}, Code.SYSTEM_ERROR, "no message"),
        (-1, {}, Code.SYSTEM_ERROR, "no message"),
    ]
    rig.groups.put(SubscriptionGroupConfig(group_name="G"))
    for place, changes, code, words in cases:
        with pytest.raises(Refused, match=words) as refused:
            await rig.back(place, **changes)
        assert refused.value.code == code
    rig.kit.topics.put(TopicConfig(topic_name="%RETRY%G", perm=4))
    with pytest.raises(Refused, match="not writable") as refused:
        await rig.back(offset)
    assert refused.value.code == Code.NO_PERMISSION
    await rig.stop()


async def test_a_broker_that_is_not_writable(tmp_path: Path) -> None:
    rig = await Rig(tmp_path, broker_permission=4).start()
    with pytest.raises(Refused) as refused:
        await rig.back(await rig.store())
    assert refused.value.code == Code.NO_PERMISSION
    await rig.stop()


async def test_a_store_that_refuses(rig: Rig) -> None:
    offset = await rig.store()
    rig.kit.store._flush.fail("the disk is gone")
    with pytest.raises(Refused, match="the disk is gone") as refused:
        await rig.back(offset)
    assert refused.value.code == Code.SYSTEM_ERROR


async def test_properties_that_have_no_room_for_a_retry(rig: Rig) -> None:
    offset = await rig.store(properties="a\x01" + "x" * 32_700)
    with pytest.raises(Refused, match="32767"):
        await rig.back(offset)
