"""Soak and abuse judge what they measured as they say; measuring itself is not tested here."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from bench import abuse, attacks, soak

from cosmodrome.env.background import at_once
from cosmodrome.errors import ProtocolError
from cosmodrome.wire import registration
from cosmodrome.wire.bodies import TOPICS_MAX

SECONDS = 400.0


def lived(**changes: object) -> soak.Run:
    """A flat life with samples every five seconds."""
    run = soak.Run()
    for number in range(80):
        run.samples.append(soak.Sample(number * 5.0, 30.0, 60.0, 40, 9))
    for name, value in changes.items():
        setattr(run, name, value)
    return run


def verdict(run: soak.Run, complaints: list[str] | None = None, faults: str = "") -> bool:
    return soak.judge(run, SECONDS, complaints or [], faults)[1]


def test_a_flat_life_passes() -> None:
    assert verdict(lived())


def grown(field: str, by: float) -> Callable[[soak.Run], None]:
    def change(run: soak.Run) -> None:
        for number, one in enumerate(run.samples):
            setattr(one, field, getattr(one, field) + type(getattr(one, field))(number * by))

    return change


@pytest.mark.parametrize(
    "change",
    [
        grown("anonymous_mb", 0.002),  # 1.4 MB/h
        grown("files", 0.5),
        grown("threads", 0.1),
        lambda run: run.errors.update(["send: Busy"]),
        lambda run: run.missing.add("plain-1"),
    ],
    ids=["memory", "files", "threads", "errors", "missing"],
)
def test_what_grows_fails_or_is_missing_is_bad(change: Callable[[soak.Run], None]) -> None:
    run = lived()
    change(run)
    assert not verdict(run)


def test_what_the_log_and_the_checker_say_counts() -> None:
    assert not verdict(lived(), ["… WARNING …"])
    assert not verdict(lived(), faults="queue")


def test_growth_in_the_warm_up_is_not_judged() -> None:
    run = lived()
    for one in run.samples[:15]:
        one.anonymous_mb = one.second / 10
    assert verdict(run)


def test_a_slope() -> None:
    assert soak.slope_per_hour([(0, 1.0), (1800, 2.0), (3600, 3.0)]) == pytest.approx(2.0)


def felt(alone: float, beside: float, **changes: Any) -> abuse.Outcome:
    quiet = abuse.Outcome(
        name="x",
        alone=abuse.Felt(1, alone),
        beside=abuse.Felt(1, beside),
        memory_mb=40,
        lines_per_s=0.0,
        faults=0,
        probed=True,
        ended_s=None,
        note="note",
    )
    return replace(quiet, **changes)


def test_the_bars_of_abuse() -> None:
    assert felt(10, 20).good
    assert not felt(10, 21).good
    assert not felt(10, math.inf).good
    assert not felt(math.inf, 5).good  # nothing was measured
    assert not felt(10, 10, lines_per_s=1.5).good
    assert not felt(10, 10, faults=1).good
    assert not felt(10, 10, memory_mb=abuse.MEMORY_MB_MAX + 1).good
    assert felt(10, 10, ended_s=29.0).good
    assert not felt(10, 10, ended_s=math.inf).good
    assert not felt(10, 10, probed=False).good
    assert "| 2.0 ×" in felt(10, 20).row()


def test_the_largest_registration_is_taken_and_a_larger_one_refused() -> None:
    taken = at_once(registration.reading(attacks.registered(TOPICS_MAX), compressed=True))
    assert len(taken.topic_config_serialize_wrapper.topic_config_table) == TOPICS_MAX
    huge = attacks.registered(600_000)
    with pytest.raises(ProtocolError, match="600000 topics"):
        at_once(registration.reading(huge, compressed=True))


def test_memory_without_mapped_files_is_looked_at() -> None:
    with abuse.Memory(os.getpid()) as memory:
        while not memory.peak_mb:
            time.sleep(0.01)
    assert 1 < memory.peak_mb < 100_000


def test_lines_of_one_cause_are_counted_together() -> None:
    lines = [
        f"2026-01-01 00:00:00.000 WARNING a.b frame broken peer=10.0.0.{number}:5 size={number}"
        for number in range(20)
    ]
    other = ["2026-01-01 00:00:00.000 INFO a.c started"]
    per_second, cause = abuse.most_frequent(lines + other, 10.0)
    assert per_second == 2.0 and "frame broken" in cause
