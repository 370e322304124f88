"""A replay is cut so that every offset is sent once and in order."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest

from cosmodrome.errors import ConfigError, StoreCorrupt
from cosmodrome.spark.lake import replaying
from cosmodrome.spark.lake.replaying import (
    Bucket,
    Day,
    ReplayPlan,
    ReplayState,
    Slice,
    Span,
    choose_run,
    cut,
    dated,
    replay_name,
)


class MemoryFiles:
    """Files of a dict, with the names of `LakeFiles`."""

    def __init__(self, spark: Any = None, root: str = "m") -> None:
        self.spark = spark if spark is not None else {}
        self.root = root

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def read_json(self, name: str) -> Any:
        return copy.deepcopy(self.spark.get(self.path(name)))

    def write_json(self, name: str, document: Any) -> None:
        self.spark[self.path(name)] = json.loads(json.dumps(document))

    def list(self, name: str = "") -> list[Any]:
        start = self.path(name) if name else f"{self.root}/"
        names = {path.removeprefix(start).split("/")[0] for path in self.spark}
        return [type("Entry", (), {"name": found})() for found in sorted(names)]


def offsets_of(slices: tuple[Slice, ...]) -> dict[tuple[str, int], list[int]]:
    taken: dict[tuple[str, int], list[int]] = {}
    for one in slices:
        for span in one.spans:
            taken.setdefault((span.broker, span.queue_id), []).extend(range(span.low, span.end))
    return taken


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("rows_max", [1, 7, 1_000])
def test_every_offset_is_taken_once_and_in_order(seed: int, rows_max: int) -> None:
    chance = random.Random(seed)
    buckets: list[Bucket] = []
    whole: dict[tuple[str, int], list[int]] = {}
    for queue in [("a", 0), ("a", 1), ("b", 0)]:
        at = chance.randrange(100)
        first = at
        steps = sorted(chance.sample(range(30), chance.randrange(1, 10)))
        if chance.random() < 0.5:
            chance.shuffle(steps)  # a clock that jumps
        for step in steps:
            size = chance.randrange(1, 40)
            buckets.append(Bucket(step, queue, at, at + size, size))
            at += size
        whole[queue] = list(range(first, at))
    chance.shuffle(buckets)
    slices = cut(buckets, rows_max)
    assert offsets_of(slices) == whole
    assert slices == cut(list(reversed(buckets)), rows_max)
    if rows_max == 1_000:
        assert len(slices) <= 2


def test_slices_are_small_and_follow_time() -> None:
    buckets = [
        Bucket(step, ("a", q), step * 10, step * 10 + 10, 10) for step in range(4) for q in (0, 1)
    ]
    slices = cut(buckets, 20)
    assert [one.rows for one in slices] == [20, 20, 20, 20]
    assert slices[1].spans == (Span("a", 0, 10, 20), Span("a", 1, 10, 20))
    assert [one.rows for one in cut(buckets, 5)] == [5] * 16
    assert cut([], 5) == ()


def test_a_plan_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "SPANS_MAX", 10)
    assert len(cut([Bucket(0, ("a", 0), 0, 1_000, 1_000)], 1)) <= 10


def test_slices_know_their_dates() -> None:
    slices = [Slice((Span("a", 0, 0, 5),), 5), Slice((Span("a", 0, 5, 9),), 4), Slice((), 0)]
    days = [Day(("a", 0), "2026-01-01", 0, 5), Day(("a", 0), "2026-01-02", 6, 8)]
    found = [one.dates for one in dated(slices, days)]
    assert found == [("2026-01-01", "2026-01-01"), ("2026-01-01", "2026-01-02"), None]


def test_state_is_kept_and_a_run_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaying, "LakeFiles", MemoryFiles)
    runs: Any = MemoryFiles()
    name = replay_name(["archive", "topic"])
    assert name == replay_name(["archive", "topic"]) != replay_name(["archive", "other"])
    with pytest.raises(ConfigError, match="no such replay"):
        choose_run(runs, name, resume=True)
    first = choose_run(runs, name, resume=False)
    assert first == f"{name}-1"
    state = ReplayState(MemoryFiles(runs.spark, runs.path(first)))  # type: ignore[arg-type]
    assert (state.plan(), state.done(), state.finished()) == (None, (0, 0), False)
    plan = ReplayPlan(
        id="x",
        source="s",
        target="t",
        partitions=2,
        rows=9,
        slices=(Slice((Span("a", 0, 0, 5),), 5, ("2026-01-01", "2026-01-01")), Slice((), 4)),
    )
    state.begin(plan)
    assert state.plan() == plan
    state.record(1, 5)
    with pytest.raises(ConfigError, match="1 of 2 slices done"):
        choose_run(runs, name, resume=False)
    assert choose_run(runs, name, resume=True) == first
    state.record(2, 9)
    assert state.finished()
    assert choose_run(runs, name, resume=False) == f"{name}-2"
    for file in ("plan.json", "done.json"):
        runs.spark[state.files.path(file)] = {"slices": "?"}
    for broken in (state.plan, state.done):
        with pytest.raises(StoreCorrupt, match="is damaged"):
            broken()
