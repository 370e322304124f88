"""Planning: offsets, losses, limits, ranges and push-down, without Spark and without a broker."""

from __future__ import annotations

import datetime
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyspark")

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
)

from cosmodrome.spark.read.offsets import from_json, to_json
from cosmodrome.spark.read.plan import (
    Range,
    clamp,
    cut,
    loss_text,
    resolve,
    within_bytes,
    within_rows,
)
from cosmodrome.spark.read.pushdown import TIME_MARGIN_MS, PushedFilters
from cosmodrome.wire.bodies import MessageQueue


def queue(number: int, topic: str = "t", broker: str = "b") -> MessageQueue:
    return MessageQueue(topic=topic, broker_name=broker, queue_id=number)


BOUNDS = {queue(0): (10, 20), queue(1): (0, 5)}


def test_json_of_offsets_is_sorted_and_comes_back() -> None:
    offsets = {queue(10): 7, queue(2): -1, queue(0, "a", "z"): 3}
    document = to_json(offsets)
    assert json.dumps(document) == '{"a": {"z": {"0": 3}}, "t": {"b": {"2": -1, "10": 7}}}'
    assert from_json(document) == from_json(json.dumps(document)) == offsets


def test_resolve() -> None:
    assert resolve("earliest", BOUNDS, unlisted="latest") == {queue(0): 10, queue(1): 0}
    assert resolve("latest", BOUNDS, unlisted="latest") == {queue(0): 20, queue(1): 5}
    option = {queue(0): -1, queue(7): 3, queue(8): -2}
    assert resolve(option, BOUNDS, unlisted="earliest") == {queue(0): 20, queue(1): 0, queue(7): 3}


def test_settle_moves_into_bounds_and_says_what_is_lost() -> None:
    clamped, losses = clamp({queue(0): 4, queue(1): 9, queue(2): 1}, BOUNDS)
    assert clamped == {queue(0): 10, queue(1): 5}
    assert ["expired" in losses[0], "ends at 5" in losses[1], "gone" in losses[2]] == [True] * 3
    assert clamp({queue(0): 10, queue(1): 5}, BOUNDS) == ({queue(0): 10, queue(1): 5}, [])
    assert loss_text([str(number) for number in range(7)]) == "0; 1; 2; 3; 4; and 2 more"


SPANS = st.dictionaries(
    st.integers(0, 12).map(queue), st.tuples(st.integers(0, 1000), st.integers(0, 500)), max_size=9
)


@given(SPANS, st.integers(1, 2000))
def test_a_limit_of_rows_is_met_exactly(
    spans: dict[MessageQueue, tuple[int, int]], rows_max: int
) -> None:
    start = {q: low for q, (low, _) in spans.items()}
    end = {q: low + size for q, (low, size) in spans.items()}
    total = sum(size for _, size in spans.values())
    limited = within_rows(start, end, rows_max)
    assert sum(limited[q] - start[q] for q in end) == min(rows_max, total)
    assert all(start[q] <= limited[q] <= end[q] for q in end)
    if total > rows_max:
        for q, (low, size) in spans.items():  # in proportion, up to rounding
            assert abs((limited[q] - low) - rows_max * size / total) <= 1


def test_a_limit_below_the_number_of_queues_drains_them_all() -> None:
    start = {queue(number): 0 for number in range(5)}
    end = dict.fromkeys(start, 2)
    for step in range(10):
        start = within_rows(start, end, 1)
        assert sum(start.values()) == step + 1
    assert start == end


@given(SPANS, st.integers(1, 10_000))
def test_a_limit_of_bytes_is_met_by_averages(
    spans: dict[MessageQueue, tuple[int, int]], bytes_max: int
) -> None:
    start = {q: low for q, (low, _) in spans.items()}
    end = {q: low + size for q, (low, size) in spans.items()}
    averages = {q: 10.0 + q.queue_id for q in spans}
    limited = within_bytes(start, end, averages, bytes_max)
    rows = sum(limited[q] - start[q] for q in end)
    size = sum((limited[q] - start[q]) * averages[q] for q in end)
    assert size <= bytes_max or rows == 1
    assert rows > 0 or not any(size for _, size in spans.values())


@given(SPANS, st.one_of(st.none(), st.integers(1, 40)))
def test_ranges_cover_exactly_what_was_asked(
    spans: dict[MessageQueue, tuple[int, int]], min_partitions: int | None
) -> None:
    start = {q: low for q, (low, _) in spans.items()}
    end = {q: low + size for q, (low, size) in spans.items()}
    ranges = cut(start, end, {q: (q.broker_name,) for q in spans}, min_partitions)
    rows = [(r.queue, offset) for r in ranges for offset in range(r.start, r.end)]
    wanted = [(q, low + at) for q, (low, size) in spans.items() for at in range(size)]
    assert sorted(rows, key=str) == sorted(wanted, key=str)
    assert all(r.rows > 0 and r.addresses == ("b",) for r in ranges)
    filled = sum(1 for _, size in spans.values() if size)
    assert len(ranges) == max(filled, min(min_partitions or 0, len(wanted)))


def test_long_queues_are_cut_into_even_pieces() -> None:
    ranges = cut({queue(0): 0, queue(1): 0}, {queue(0): 100, queue(1): 10}, {}, 5)
    assert ranges == [
        *(Range(queue(0), low, low + 25, ()) for low in (0, 25, 50, 75)),
        Range(queue(1), 0, 10, ()),
    ]


def pushed(*filters: Filter) -> tuple[PushedFilters, list[Filter]]:
    bounds = PushedFilters()
    return bounds, bounds.take(filters)


def test_push_down_of_topics_brokers_and_queues() -> None:
    filters = [
        IsNotNull(("topic",)),
        EqualTo(("topic",), "t"),
        In(("queue_id",), (0, 1)),
        In(("queue_id",), (1, 2)),
        EqualTo(("broker",), "b"),
    ]
    bounds, residual = pushed(*filters)
    assert residual == []
    assert bounds.admits(queue(1)) and not bounds.admits(queue(0))
    assert not bounds.admits(queue(1, "u")) and not bounds.admits(queue(1, "t", "c"))


def test_push_down_of_offsets() -> None:
    offset = ("queue_offset",)
    bounds, residual = pushed(GreaterThan(offset, 3), LessThanOrEqual(offset, 9))
    assert (bounds.low, bounds.high, residual) == (4, 10, [])
    bounds, _ = pushed(GreaterThanOrEqual(offset, 3), LessThan(offset, 9))
    assert (bounds.low, bounds.high) == (3, 9)
    bounds, _ = pushed(EqualTo(offset, 5))
    assert (bounds.low, bounds.high) == (5, 6)
    among = In(offset, (7, 4))
    bounds, residual = pushed(among)
    assert (bounds.low, bounds.high, residual) == (4, 8, [among])


def test_times_are_hints_with_a_margin() -> None:
    moment = datetime.datetime(2025, 3, 1, 12, 0, 0, 500, tzinfo=datetime.UTC)
    ms = 1_740_830_400_000
    filters = [
        GreaterThan(("store_time",), moment),
        LessThan(("store_time",), moment + datetime.timedelta(seconds=1)),
    ]
    bounds, residual = pushed(*filters)
    assert residual == filters
    assert (bounds.since_ms, bounds.until_ms) == (ms, ms + 1001)
    assert bounds.since_floor_ms == ms - TIME_MARGIN_MS
    assert bounds.until_ceiling_ms == ms + 1001 + TIME_MARGIN_MS


def test_what_is_not_understood_stays_with_spark() -> None:
    filters = [
        Not(EqualTo(("topic",), "t")),
        StringContains(("topic",), "t"),
        EqualTo(("tags",), "A"),
        EqualTo(("properties", "a"), "A"),
        IsNotNull(("tags",)),
        GreaterThan(("queue_id",), 3),
        EqualTo(("topic",), None),
    ]
    bounds, residual = pushed(*filters)
    assert residual == filters
    assert bounds == PushedFilters()
