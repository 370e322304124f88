"""Sums for the statistics: the compiled and the pure ones agree, whoever adds to them."""

from __future__ import annotations

import random
from types import ModuleType

from cosmodrome.speed.lane import counts as lane_counts


def test_puts_are_summed_up_by_topic(lane_core: ModuleType) -> None:
    chance, counts, pure = random.Random(1), lane_core.PutCounts(), lane_counts.PutCounts()
    for _ in range(200):
        one = (
            chance.choice("abc"),
            chance.randrange(9),
            chance.randrange(99),
            chance.randrange(999),
        )
        counts.add(*one)
        pure.add(*one)
        if chance.random() < 0.05:
            assert counts.take() == pure.take()
            assert counts.take() == []
    assert counts.take() == pure.take()


def test_pulls_are_summed_up_by_group_and_queue(lane_core: ModuleType) -> None:
    chance, counts, pure = random.Random(2), lane_core.GetCounts(), lane_counts.GetCounts()
    for _ in range(200):
        key = (chance.choice("gh"), chance.choice("tu"), chance.randrange(3))
        sums = (chance.randrange(1, 9), chance.randrange(99), chance.randrange(999))
        for one in (counts, pure):
            one.add(key, *sums, sums[1] / 8, sums[2])
        if chance.random() < 0.05:
            assert counts.take() == pure.take()
            assert counts.take() == []
    assert counts.take() == pure.take()


def test_the_last_one_says_where_a_group_reads(lane_core: ModuleType) -> None:
    counts, key = lane_core.GetCounts(), ("g", "t", 0)
    counts.add(key, 2, 20, 200, 1.5, 70)
    counts.add(key, 1, 1, 10, 0.5, 50)
    assert counts.take() == [(key, 3, 21, 210, 3.5, 1.5, 50)]
