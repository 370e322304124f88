"""Counting over a minute, an hour and a day, and the names operators ask by."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from cosmodrome.broker.counts import stats as module
from cosmodrome.broker.counts.put_times import EDGES, SHOWN, SHOWN_NAMES, PutTimes
from cosmodrome.broker.counts.stats import DAY, HOUR, MINUTE, TICK_SECONDS, Item, Stats
from cosmodrome.broker.operate.stats_view import NAMES, StatsView
from cosmodrome.errors import Code, Refused
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import BrokerStatsData
from cosmodrome.wire.commands.broker import ViewBrokerStatsData
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.names import SCHEDULE_TOPIC
from cosmodrome.wire.table import Call

CALL = Call(Frame(code=0, opaque=0), None)  # type: ignore[arg-type]


def got(stats: Stats, count: int = 1, size: int = 100, **place: Any) -> None:
    where = {"group": "G", "topic": "T", "queue_id": 0, "took_ms": 2.0, "next_offset": 1, **place}
    stats.got(count=count, size=size, **where)


def messages(item: Item | None, now: int, span: tuple[int, int]) -> tuple[int, int]:
    assert item is not None
    counted, seconds = item.over(now, span)
    return counted.messages, seconds


# --- spans ------------------------------------------------------------------------------------


def test_a_minute_of_steady_puts() -> None:
    stats = Stats()
    for _ in range(20):
        stats.put("T", 0, 3, 30)
        stats.advance()
    item = stats.of_topic("T")
    assert messages(item, stats.tick, MINUTE) == (18, 60)
    assert messages(item, stats.tick, HOUR) == (60, 200)
    assert messages(item, stats.tick, DAY) == (60, 200)


def test_what_was_counted_since_the_last_boundary_waits_for_the_next() -> None:
    stats = Stats()
    stats.put("T", 0, 1, 10)
    assert messages(stats.of_topic("T"), stats.tick, MINUTE) == (0, 0)
    stats.advance()
    stats.put("T", 0, 5, 10)
    assert messages(stats.of_topic("T"), stats.tick, MINUTE) == (1, 10)
    stats.advance()
    assert messages(stats.of_topic("T"), stats.tick, MINUTE) == (6, 20)


def test_spans_agree_with_a_sample_of_every_boundary() -> None:
    """Whatever the gaps between counts, the answer is that of a full record."""
    chance = random.Random(5)
    for _ in range(20):
        stats = Stats()
        stats.tick = born = chance.randrange(1000)
        totals = {born: 0}
        total = 0
        for _ in range(60):
            for _ in range(chance.randrange(3)):
                stats.put("T", 0, 1, 1)
                total += 1
            item = stats.of_topic("T")
            for _ in range(chance.choice([1, 1, 2, 7, 61, 400])):
                if item is None:
                    born = stats.tick + 1
                    totals[born] = 0
                stats.tick += 1
                totals[stats.tick] = total
            if item is None:
                continue
            for step, back in (MINUTE, HOUR, DAY):
                span = next(one for one in (MINUTE, HOUR, DAY) if one == (step, back))
                start = max((stats.tick // step - back) * step, item.born)
                expected = totals[stats.tick] - totals.get(start, 0)
                assert messages(item, stats.tick, span) == (
                    expected,
                    (stats.tick - start) * TICK_SECONDS,
                )


def test_an_item_stays_small() -> None:
    stats = Stats()
    for _ in range(3 * DAY[0] * DAY[1]):
        stats.put("T", 0, 1, 1)
        stats.advance()
    item = stats.of_topic("T")
    assert item is not None
    assert [len(marks) for marks in (item._minutes, item._hours, item._days)] == [7, 7, 25]


# --- items ------------------------------------------------------------------------------------


def test_gets_are_counted_for_group_queue_and_broker() -> None:
    stats = Stats()
    got(stats, 2, 200, queue_id=0)
    got(stats, 3, 300, queue_id=1, took_ms=7.5, next_offset=9)
    item = stats.of_group("T", "G")
    assert item is not None
    assert (item.messages, item.size, item.calls, item.ms) == (5, 500, 2, 9.5)
    assert {key: (one.messages, one.next_offset) for key, one in item.queues.items()} == {
        0: (2, 1),
        1: (3, 9),
    }
    assert (stats.gets.messages, stats.longest_get_ms) == (5, 7.5)
    stats.advance()
    assert stats.get_rate("G", "T") == 0.5
    assert stats.get_rate("G", "U") == 0.0


def test_without_details_queues_are_not_counted() -> None:
    stats = Stats(detailed=False)
    got(stats)
    stats.put(SCHEDULE_TOPIC, 3, 1, 1)
    for item in (stats.of_group("T", "G"), stats.of_topic(SCHEDULE_TOPIC)):
        assert item is not None and item.queues == {}


def test_the_number_of_items_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOPICS_MAX", "GROUPS_MAX", "QUEUES_MAX"):
        monkeypatch.setattr(module, name, 2)
    stats = Stats()
    for number in range(5):
        stats.put(f"T{number}", 0, 1, 10)
        got(stats, topic=f"T{number}")
        got(stats, topic="T0", queue_id=number)
        stats.sent_back(f"G{number}", "T")
    assert len(stats._topics) == len(stats._groups) == stats._queue_count == 2
    assert (stats.puts.messages, stats.gets.messages) == (5, 10)
    stats.forget_topic("T0")
    got(stats, topic="T0")
    assert stats.of_group("T0", "G") is not None


def test_deleted_topics_and_groups_are_forgotten() -> None:
    stats = Stats()
    stats.put("T", 0, 1, 1)
    stats.put(SCHEDULE_TOPIC, 0, 1, 1)
    for topic, group in (("T", "G"), ("T", "H"), ("U", "G")):
        got(stats, topic=topic, group=group)
    stats.forget_topic("T")
    assert stats.of_topic("T") is None
    assert list(stats._groups) == [("U", "G")]
    stats.forget_group("G")
    stats.forget_topic(SCHEDULE_TOPIC)
    stats.forget_topic("unknown")
    assert (stats._groups, stats._queue_count) == ({}, 0)


def test_idle_items_are_dropped_after_a_day() -> None:
    stats = Stats()
    stats.put("T", 0, 1, 1)
    got(stats)
    got(stats, topic="U")
    for _ in range(DAY[0] * DAY[1] + DAY[0]):
        if stats.tick % 100 == 0:
            got(stats, queue_id=1)
        stats.advance()
    assert stats.of_topic("T") is None
    assert stats.of_group("U", "G") is None
    item = stats.of_group("T", "G")
    assert item is not None and list(item.queues) == [1]
    assert stats._queue_count == 1


async def test_ticks_come_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_SECONDS", 0.001)
    stats = Stats()
    await stats.start()
    await stats.start()
    while stats.tick <= 2:
        await asyncio.sleep(0.001)
    await stats.stop()
    await stats.stop()
    ticks = stats.tick
    await asyncio.sleep(0.01)
    assert stats.tick == ticks


# --- by name ----------------------------------------------------------------------------------


class FakeLog:
    """A queue T/0 whose message at offset n lies at n * 100 and was stored at n * 1000."""

    max_offset = 1000

    def facts(self) -> FakeLog:
        return self

    def entries(self, topic: str, queue_id: int, offset: int, count: int) -> list[Any]:
        return [(offset * 100, 100, 0)] if offset < 10 else []

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        return offset * 1000 if offset < 10 else -1

    def now_ms(self) -> int:
        return 10_000


def view(stats: Stats, name: str, key: str) -> BrokerStatsData:
    log: Any = FakeLog()
    desk = StatsView(stats, log, log, "C")
    reply = desk.view(ViewBrokerStatsData(stats_name=name, stats_key=key), CALL)
    assert not asyncio.iscoroutine(reply)
    return bodies.decode(BrokerStatsData, reply.body)


def busy_stats(*, detailed: bool = True) -> Stats:
    stats = Stats(detailed=detailed)
    stats.put("T", 2, 4, 400)
    stats.put("T", 2, 2, 200)
    stats.put(SCHEDULE_TOPIC, 2, 1, 50)
    got(stats, 5, 500, took_ms=30.0, next_offset=5)
    got(stats, 1, 100, queue_id=1)
    stats.sent_back("G", "T")
    stats.advance()
    return stats


@pytest.mark.parametrize(
    ("name", "key", "total", "average"),
    [
        ("TOPIC_PUT_NUMS", "T", 6, 3.0),
        ("TOPIC_PUT_SIZE", "T", 600, 300.0),
        ("BROKER_PUT_NUMS", "C", 7, 7 / 3),
        ("BROKER_GET_NUMS", "C", 6, 3.0),
        ("GROUP_GET_NUMS", "T@G", 6, 3.0),
        ("GROUP_GET_SIZE", "T@G", 600, 300.0),
        ("GROUP_GET_LATENCY", "0@T@G", 30, 30.0),
        ("SNDBCK_PUT_NUMS", "T@G", 1, 1.0),
        ("QUEUE_GET_NUMS", "T@1@G", 1, 1.0),
        ("QUEUE_GET_SIZE", "T@0@G", 500, 500.0),
        ("QUEUE_PUT_NUMS", f"{SCHEDULE_TOPIC}@2", 1, 1.0),
        ("QUEUE_PUT_SIZE", f"{SCHEDULE_TOPIC}@2", 50, 50.0),
    ],
)
def test_statistics_by_name(name: str, key: str, total: int, average: float) -> None:
    shown = view(busy_stats(), name, key)
    for item in (shown.stats_minute, shown.stats_hour, shown.stats_day):
        assert (item.sum, item.tps, item.avgpt) == (total, total / 10, average)


def test_latency_without_details() -> None:
    assert view(busy_stats(detailed=False), "GROUP_GET_LATENCY", "T@G").stats_minute.sum == 32


@pytest.mark.parametrize(
    ("offset", "size", "ms"), [(5, 500, 6000), (10, 0, 1000), (99, 0, 0)], ids=str
)
def test_how_far_a_group_is_behind(offset: int, size: int, ms: int) -> None:
    stats = Stats()
    got(stats, next_offset=offset)
    for name, behind in (("GROUP_GET_FALL_SIZE", size), ("GROUP_GET_FALL_TIME", ms)):
        shown = view(stats, name, "0@T@G").stats_minute
        assert (shown.sum, shown.avgpt, shown.tps) == (behind, float(behind), 0.0)


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        ("NOPE", "T", "TOPIC_PUT_NUMS"),
        ("TOPIC_PUT_NUMS", "U", "form topic."),
        ("TOPIC_PUT_NUMS", "T@G", "form topic."),
        ("GROUP_GET_NUMS", "T", "form topic@group."),
        ("BROKER_PUT_NUMS", "D", "form cluster."),
        ("GROUP_GET_FALL_TIME", "7@T@G", "form queueId@topic@group."),
        ("QUEUE_GET_NUMS", "T@x@G", "form topic@queueId@group."),
        ("QUEUE_GET_NUMS", "T@99999999999999@G", "form topic@queueId@group."),
        ("QUEUE_PUT_NUMS", "T@2", "form topic@queueId."),
    ],
)
def test_what_was_not_counted_is_refused(name: str, key: str, said: str) -> None:
    with pytest.raises(Refused) as refused:
        view(busy_stats(), name, key)
    assert refused.value.code == Code.SYSTEM_ERROR
    assert said in refused.value.remark


def test_a_refusal_names_every_statistic() -> None:
    with pytest.raises(Refused) as refused:
        view(Stats(), "?", "")
    assert all(name in refused.value.remark for name in NAMES)


# --- times of sends ---------------------------------------------------------------------------


def test_edges_are_sorted_and_hold_upstreams() -> None:
    assert list(EDGES) == sorted(set(EDGES))
    assert set(SHOWN) <= set(EDGES)


def test_distribution_in_upstreams_ranges() -> None:
    times = PutTimes()
    empty = "".join(f"[{name}]:0 " for name in SHOWN_NAMES)
    assert times.distribution() == empty
    for ms in (0.4, 0.9, 1, 10, 11, 50, 60, 999, 1000, 9999, 10_001, 99_000):
        times.add((ms + 0.01) / 1000)
    assert times.distribution() == (
        "[<=0ms]:2 [0~10ms]:2 [10~50ms]:2 [50~100ms]:1 [100~200ms]:0 [200~500ms]:0 [500ms~1s]:2"
        " [1~2s]:0 [2~3s]:0 [3~4s]:0 [4~5s]:0 [5~10s]:1 [10s~]:2 "
    )
    assert times.longest_ms == 99_000
    assert times.percentile_ms(0.999) == 99_000.0


def test_percentiles_speak_of_the_last_two_windows() -> None:
    times = PutTimes()
    assert times.percentile_ms(0.99) == 0.0
    for _ in range(99):
        times.add(0.003)
    times.add(0.4)
    assert (times.percentile_ms(0.99), times.percentile_ms(0.999)) == (3.0, 400.0)
    times.turn()
    assert times.percentile_ms(0.999) == 400.0
    times.turn()
    assert times.percentile_ms(0.999) == 0.0
    assert times.longest_ms == 400


# --- counts of the fast lane -------------------------------------------------------------------


def pulled(stats: Stats, pulls: int, count: int, next_offset: int = 7, ms: float = 0.5) -> None:
    """Count as the fast lane does."""
    stats.get_counts.add(("G", "T", 0), pulls, count, 10 * count, ms, next_offset)


def of_queue(stats: Stats) -> tuple[int, int, int]:
    item = stats._groups["T", "G"].queues[0]
    return item.messages, item.calls, item.next_offset


@pytest.mark.parametrize(
    "ask",
    [
        lambda stats: stats.gets,
        lambda stats: stats.groups(),
        lambda stats: stats.of_group("T", "G"),
        lambda stats: stats.get_rate("G", "T"),
        lambda stats: stats.longest_get_ms,
        lambda stats: stats.advance(),
        lambda stats: setattr(stats, "detailed", False),
    ],
)
def test_nothing_is_told_without_what_was_counted_before(ask: Any) -> None:
    stats = Stats()
    pulled(stats, 3, 40)
    ask(stats)
    assert of_queue(stats) == (40, 3, 7) and not stats.get_counts.take()
    assert (stats._gets.messages, stats._gets.size, stats._gets.calls) == (40, 400, 3)
    assert stats._gets.ms == 1.5 and stats._longest_get_ms == 0.5


def test_what_was_counted_belongs_to_its_tick() -> None:
    stats = Stats()
    pulled(stats, 1, 10)
    stats.advance()
    pulled(stats, 1, 20)
    assert messages(stats.of_group("T", "G"), stats.tick, MINUTE) == (10, 10)
    assert messages(stats.gets, stats.tick, MINUTE) == (10, 10)


def test_the_later_count_says_where_a_group_reads() -> None:
    stats = Stats()
    pulled(stats, 1, 1, next_offset=100)
    got(stats, next_offset=50)
    assert stats.gets and of_queue(stats) == (2, 2, 50)
    pulled(stats, 1, 1, next_offset=60)
    stats.forget_group("nobody")
    assert of_queue(stats) == (3, 3, 60)


def test_a_topic_that_goes_takes_its_counts_along() -> None:
    stats = Stats()
    pulled(stats, 2, 5)
    stats.forget_topic("T")
    assert stats.of_group("T", "G") is None and stats.gets.messages == 5
    assert stats._queue_count == 0


def test_puts_of_a_turn_are_summed_up_by_topic() -> None:
    stats = Stats()
    for topic, requests, count, size in (("T", 2, 40, 400), ("U", 1, 2, 50), ("T", 1, 1, 5)):
        stats.put_counts.add(topic, requests, count, size)
    stats.advance()
    stats.put("T", 0, 5, 60)
    for name, totals in {"T": (46, 465, 4), "U": (2, 50, 1)}.items():
        item = stats.of_topic(name)
        assert item is not None and (item.messages, item.size, item.calls) == totals
    assert (stats.puts.messages, stats.puts.size, stats.puts.calls) == (48, 515, 5)
    assert messages(stats.of_topic("T"), stats.tick, MINUTE) == (41, 10)
    assert messages(stats.puts, stats.tick, MINUTE) == (43, 10)
