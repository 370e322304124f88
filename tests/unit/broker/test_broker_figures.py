"""Figures and statistics for operators, and the settings text."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.goldens import Golden, each_golden
from tests.unit.broker.broker_fakes import foundation

from cosmodrome.broker.counts.put_times import PutTimes
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.operate import progress_reports, sliced
from cosmodrome.broker.operate import runtime_info as module
from cosmodrome.broker.operate.progress_reports import ProgressReports
from cosmodrome.broker.operate.runtime_info import RuntimeInfo
from cosmodrome.broker.operate.settings import Settings
from cosmodrome.env.base import DiskUsage, Env
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, Refused
from cosmodrome.store.store import StoreFacts
from cosmodrome.wire import bodies, properties_text
from cosmodrome.wire.bodies import (
    Body,
    ConsumeStats,
    ConsumeStatsList,
    GroupList,
    KVTable,
    MessageQueue,
    OffsetWrapper,
    TopicConfig,
    TopicOffset,
    TopicStatsTable,
)
from cosmodrome.wire.commands.broker import GetBrokerConfig, GetBrokerRuntimeInfo
from cosmodrome.wire.commands.group import GetBrokerConsumeStats, GetConsumeStats
from cosmodrome.wire.commands.topic import GetTopicStatsInfo, QueryTopicConsumeByWho
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.table import Call, Reply

CALL = Call(Frame(code=0, opaque=0), None)  # type: ignore[arg-type]
USAGE = DiskUsage(used_bytes=31 << 30, free_bytes=69 << 30)

FACTS = StoreFacts(
    min_offset=100,
    max_offset=5000,
    written_offset=7048,
    flushed_offset=5000,
    dispatch_behind_bytes=48,
    disk_ratio=0.31,
    earliest_ms=77,
    put_count=10,
    put_bytes=2500,
    put_failed_count=2,
    queue_count=3,
    unwritable=None,
)


class World:
    """Everything the service asks, as the test sets it."""

    def __init__(self, **settings: Any) -> None:
        self.stored = FACTS
        self.now = 1_700_000_000_000
        self.messages_total = self.found_total = self.missed_total = 0
        self.queues: dict[tuple[str, int], tuple[int, int]] = {}
        self.committed: dict[tuple[str, str, int], int] = {}
        self.subscriptions: dict[str, set[str]] = {}
        self.topics: dict[str, TopicConfig] = {}
        real = real_env()
        env = Env(clock=self, disk=self, random=real.random, offload=real.offload)  # type: ignore[arg-type]
        options = BrokerOptions(broker_name="b", **settings)
        self.put_times = PutTimes()
        store: Any = self
        base = foundation(options, env, store, store_path_commit_log="/data/log")
        base.address.host = "10.0.0.1"
        self.stats = base.stats
        self.table = {"g": None, "h": None}  # of the groups
        self.runtime = RuntimeInfo(base, store, self.put_times)
        self.progress = ProgressReports(base, Members(store, store, store, store))

    def now_ms(self) -> int:
        return self.now

    def usage(self, path: str) -> DiskUsage:
        assert path == "/data/log"
        return USAGE

    def facts(self) -> StoreFacts:
        return self.stored

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        return self.queues.get((topic, queue_id), (0, 0))

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        first, end = self.bounds(topic, queue_id)
        return 1000 + offset if first <= offset < end else -1

    def get(self, name: str) -> TopicConfig | None:
        return self.topics.get(name)

    def query(self, group: str, topic: str, queue_id: int) -> int:
        return self.committed.get((group, topic, queue_id), -1)

    def topics_of(self, group: str) -> set[str]:
        return {topic for owner, topic, _ in self.committed if owner == group}

    def topics_by_group(self) -> dict[str, set[str]]:
        return {group: self.topics_of(group) for group, _, _ in self.committed}

    def groups_of(self, topic: str) -> set[str]:
        return {group for group, name, _ in self.committed if name == topic}

    def subscribed(self, group: str) -> set[str]:
        return self.subscriptions.get(group, set())

    def consumer_groups_of(self, topic: str) -> set[str]:
        return {group for group, topics in self.subscriptions.items() if topic in topics}


def topic(name: str, read: int, write: int) -> TopicConfig:
    return TopicConfig(topic_name=name, read_queue_nums=read, write_queue_nums=write)


def queue(name: str, queue_id: int) -> MessageQueue:
    return MessageQueue(broker_name="b", queue_id=queue_id, topic=name)


# --- queues and progress ----------------------------------------------------------------------


async def test_topic_stats_have_a_row_per_write_queue() -> None:
    world = World()
    world.topics["T"] = topic("T", 1, 3)
    world.queues = {("T", 0): (5, 9), ("T", 1): (4, 4)}
    reply = await world.progress.get_topic_stats(GetTopicStatsInfo(topic="T"), CALL)
    assert bodies.decode(TopicStatsTable, reply.body).offset_table == {
        queue("T", 0): TopicOffset(min_offset=5, max_offset=9, last_update_timestamp=1008),
        queue("T", 1): TopicOffset(min_offset=4, max_offset=4, last_update_timestamp=0),
        queue("T", 2): TopicOffset(min_offset=0, max_offset=0, last_update_timestamp=0),
    }
    assert reply.body.startswith(b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:{')


async def test_topic_stats_of_unknown_topics() -> None:
    with pytest.raises(Refused) as refused:
        await World().progress.get_topic_stats(GetTopicStatsInfo(topic="T"), CALL)
    assert refused.value.code == Code.TOPIC_NOT_EXIST
    with pytest.raises(Refused) as refused:
        await World().progress.get_topic_stats(GetTopicStatsInfo(topic="../T"), CALL)
    assert refused.value.code == Code.SYSTEM_ERROR


async def stats(world: World, **ask: Any) -> dict[MessageQueue, OffsetWrapper]:
    reply = await world.progress.get_consume_stats(GetConsumeStats(consumer_group="g", **ask), CALL)
    return bodies.decode(ConsumeStats, reply.body).offset_table


async def test_consume_stats_cover_what_the_group_committed() -> None:
    world = World()
    world.topics = {"T": topic("T", 2, 4), "U": topic("U", 1, 1)}
    world.queues = {("T", 0): (0, 9), ("T", 1): (0, 4)}
    world.committed = {("g", "T", 0): 7, ("g", "Gone", 0): 1, ("h", "U", 0): 1}
    assert await stats(world) == {
        queue("T", 0): OffsetWrapper(broker_offset=9, consumer_offset=7, last_timestamp=1006),
        queue("T", 1): OffsetWrapper(broker_offset=4, consumer_offset=0, last_timestamp=0),
    }
    assert set(await stats(world, topic="U")) == {queue("U", 0)}
    assert await stats(world, topic="Unknown") == {}


async def test_an_online_group_shows_only_what_it_subscribes_to() -> None:
    world = World()
    world.topics = {"T": topic("T", 1, 1), "U": topic("U", 1, 1)}
    world.committed = {("g", "T", 0): 1, ("g", "U", 0): 1}
    world.subscriptions = {"g": {"U"}}
    assert set(await stats(world)) == {queue("U", 0)}


async def test_the_rate_of_a_group_is_that_of_the_last_minute() -> None:
    world = World()
    world.topics = {"T": topic("T", 1, 1), "U": topic("U", 1, 1)}
    world.committed = {("g", "T", 0): 1, ("g", "U", 0): 1}
    for name in ("T", "U", "Other"):
        world.stats.got("g", name, 0, 15, 100, took_ms=0.0, next_offset=1)
    world.stats.advance()
    reply = await world.progress.get_consume_stats(GetConsumeStats(consumer_group="g"), CALL)
    assert bodies.decode(ConsumeStats, reply.body).consume_tps == 3.0


async def test_progress_of_all_groups() -> None:
    world = World()
    world.topics = {"T": topic("T", 1, 2), "O": topic("O", 1, 1), "U": topic("U", 1, 1)}
    world.topics["O"].order = True
    world.queues = {("T", 0): (0, 9), ("T", 1): (0, 4), ("O", 0): (0, 3)}
    world.committed = {
        ("g", "T", 0): 7,
        ("g", "O", 0): 1,
        ("g", "U", 0): 0,
        ("g", "Gone", 0): 1,
        ("unknown", "T", 0): 1,
    }
    world.subscriptions = {"g": {"T", "O"}}

    async def listed(*, is_order: bool) -> ConsumeStatsList:
        ask = GetBrokerConsumeStats(is_order=is_order)
        reply = await world.progress.get_broker_consume_stats(ask, CALL)
        return bodies.decode(ConsumeStatsList, reply.body)

    answer = await listed(is_order=False)
    assert (answer.broker_addr, answer.total_diff) == ("10.0.0.1:10911", 2 + 4 + 2)
    ((ordered, plain),) = (groups["g"] for groups in answer.consume_stats_list if "g" in groups)
    assert ordered.offset_table == {
        queue("O", 0): OffsetWrapper(broker_offset=3, consumer_offset=1, last_timestamp=1000)
    }
    assert set(plain.offset_table) == {queue("T", 0), queue("T", 1)}
    assert {"h": []} in answer.consume_stats_list and len(answer.consume_stats_list) == 2
    answer = await listed(is_order=True)
    assert [len(table["g"]) for table in answer.consume_stats_list if "g" in table] == [1]
    assert answer.total_diff == 2


async def test_reports_of_many_queues_let_others_run() -> None:
    world = World()
    world.topics["T"] = topic("T", 1000, 1000)
    world.committed = {("g", "T", 0): 1}
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    asked: list[tuple[Callable[[], Awaitable[Reply]], Body]] = [
        (
            lambda: world.progress.get_topic_stats(GetTopicStatsInfo(topic="T"), CALL),
            TopicStatsTable(
                offset_table={queue("T", n): TopicOffset() for n in range(1000)},
            ),
        ),
        (
            lambda: world.progress.get_consume_stats(GetConsumeStats(consumer_group="g"), CALL),
            ConsumeStats(
                offset_table={
                    queue("T", n): OffsetWrapper(consumer_offset=int(n == 0)) for n in range(1000)
                }
            ),
        ),
    ]
    for ask, body in asked:
        turns = 0
        reply = await ask()
        assert turns >= 1000 // sliced.ROWS_PER_STEP
        assert reply.body == bodies.encode(body)
    counting.cancel()


async def test_a_report_that_fits_no_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_reports, "ANSWER_BYTES_MAX", 500)
    world = World()
    world.topics = {"T": topic("T", 100, 100)}
    world.committed = {("g", "T", 0): 1}
    for ask in (
        world.progress.get_topic_stats(GetTopicStatsInfo(topic="T"), CALL),
        world.progress.get_consume_stats(GetConsumeStats(consumer_group="g"), CALL),
        world.progress.get_broker_consume_stats(GetBrokerConsumeStats(is_order=False), CALL),
    ):
        with pytest.raises(Refused, match="ask for one group and one topic"):
            await ask


def test_who_consumes() -> None:
    world = World()
    world.committed = {("offline", "T", 0): 1, ("other", "U", 0): 1}
    world.subscriptions = {"online": {"T"}}
    reply = world.progress.query_who(QueryTopicConsumeByWho(topic="T"), CALL)
    assert bodies.decode(GroupList, reply.body).group_list == ["offline", "online"]


# --- figures ----------------------------------------------------------------------------------


async def figures(world: World) -> dict[str, str]:
    reply = await world.runtime.get_runtime_info(GetBrokerRuntimeInfo(), CALL)
    return bodies.decode(KVTable, reply.body).table


async def test_figures() -> None:
    world = World(start_accept_send_request_time_stamp=12)
    await world.runtime.start()
    await world.runtime.start()
    world.now += 90_061_000
    world.messages_total = 4
    shown = await figures(world)
    await world.runtime.stop()
    await world.runtime.stop()
    expected = {
        "bootTimestamp": "1700000000000",
        "runtime": "[ 1 days, 1 hours, 1 minutes, 1 seconds ]",
        "putMessageTimesTotal": "10",
        "putMessageSizeTotal": "2500",
        "putMessageFailedTimes": "2",
        "putMessageAverageSize": "250.0",
        "commitLogMinOffset": "100",
        "commitLogMaxOffset": "5000",
        "dispatchBehindBytes": "48",
        "earliestMessageTimeStamp": "77",
        "remainHowManyDataToFlush": "2.0 KiB",
        "commitLogDirCapacity": "Total : 100.0 GiB, Free : 69.0 GiB.",
        "commitLogDiskRatio": "0.31",
        "commitLogDiskRatio_/data/log": "0.31",
        "consumeQueueDiskRatio": "0.31",
        "msgPutTotalTodayNow": "10",
        "msgGetTotalTodayNow": "4",
        "startAcceptSendRequestTimeStamp": "12",
        "brokerVersionDesc": "V4_9_8",
        "brokerVersion": "409",
        "sendThreadPoolQueueCapacity": "10000",
        "remainTransientStoreBufferNumbs": "2147483647",
    }
    assert {name: shown.get(name) for name in expected} == expected


async def test_times_of_sends_and_pulls_are_shown_and_grow_old() -> None:
    world = World()
    for seconds in (0.0, 0.004, 0.3):
        world.put_times.add(seconds)
    world.stats.got("g", "T", 0, 1, 1, took_ms=12.7, next_offset=1)
    shown = world.runtime.runtime_info(USAGE)
    assert shown["putMessageDistributeTime"].startswith("[<=0ms]:1 [0~10ms]:1 [10~50ms]:0 ")
    assert (shown["putLatency99"], shown["putMessageEntireTimeMax"]) == ("300.00", "300")
    assert shown["getMessageEntireTimeMax"] == "12"
    for _ in range(2 * module.PUT_TIMES_SAMPLES):
        world.runtime.sample()
    assert world.runtime.runtime_info(USAGE)["putLatency99"] == "0.00"


@each_golden
async def test_no_figure_of_upstream_is_missing(golden: Golden) -> None:
    for frame in golden.wire("json", "broker_runtime_info"):
        if frame.get("request_code") == 28:
            upstream = json.loads(frame["body_text"])["table"]
    shown = await figures(World())
    missing = {
        name
        for name in upstream
        if name not in shown and not name.startswith(("scheduleMessage", "commitLogDiskRatio_"))
    }
    assert missing == set()


async def test_rates_over_three_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    now = [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    for second in range(700):
        now[0] = float(second)
        fast = max(0, second - 689) * 10  # the last ten seconds are busier
        world.stored = dataclasses.replace(FACTS, put_count=second + fast)
        world.found_total = second
        world.missed_total = second
        world.messages_total = second * 3
        world.runtime.sample()
    monkeypatch.undo()
    shown = world.runtime.runtime_info(USAGE)
    assert [float(part) for part in shown["putTps"].split(" ")] == pytest.approx(
        [11.0, 1 + 100 / 60, 1 + 100 / 600]
    )
    assert shown["getFoundTps"] == "1.0 1.0 1.0"
    assert shown["getMissTps"] == "1.0 1.0 1.0"
    assert shown["getTotalTps"] == "2.0 2.0 2.0"
    assert shown["getTransferedTps"] == "3.0 3.0 3.0"
    assert len(world.runtime._samples) == 601


async def test_rates_before_the_first_second() -> None:
    world = World()
    assert world.runtime.runtime_info(USAGE)["putTps"] == "0.0 0.0 0.0"
    world.runtime.sample()
    assert world.runtime.runtime_info(USAGE)["putTps"] == "0.0 0.0 0.0"


async def test_totals_shift_at_midnight() -> None:
    world = World()
    world.runtime.sample()
    for total in (30, 50):
        world.now += 24 * 3600 * 1000
        world.stored = dataclasses.replace(FACTS, put_count=total)
        world.messages_total = total + 1
        world.runtime.sample()
    shown = world.runtime.runtime_info(USAGE)
    assert [
        shown[f"msg{kind}Total{when}"]
        for kind in ("Put", "Get")
        for when in ("YesterdayMorning", "TodayMorning", "TodayNow")
    ] == ["30", "50", "50", "31", "51", "51"]


async def test_samples_are_taken_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SAMPLE_SECONDS", 0.001)
    world = World()
    await world.runtime.start()
    while len(world.runtime._samples) <= 2:
        await asyncio.sleep(0.001)
    await world.runtime.stop()


# --- settings ---------------------------------------------------------------------------------


def test_settings_are_properties_text() -> None:
    groups = (BrokerOptions(broker_name="b"), StoreOptions(), SocketOptions())
    settings = Settings(groups, real_env(), "unused")
    reply = settings.get_broker_config(GetBrokerConfig(), CALL)
    shown = properties_text.loads(reply.body)
    assert shown["brokerName"] == "b"
    assert shown["autoCreateTopicEnable"] == "true"
    assert shown["mappedFileSizeCommitLog"] == str(1 << 30)
    assert "brokerIP1" in shown and "serverSocketBacklog" in shown
    assert set(json.loads(reply.version)) == {"counter", "timestamp"}
