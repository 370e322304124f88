"""How a replay is cut into slices, and where the finished ones are recorded.

A slice is a range of offsets per original queue. Slices follow each other in stored time, so every
queue is replayed in its own order and queues keep step roughly. The cut depends only on what
the archive holds at the beginning and is saved before the first message is sent: a slice that
is run again has the same rows in the same order, and the sink gives them the same keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cosmodrome.errors import ConfigError, StoreCorrupt
from cosmodrome.spark.lake.files import LakeFiles

SPANS_MAX = 100_000  # of a plan: it is one small file
_PLAN, _DONE = "plan.json", "done.json"

Queue = tuple[str, int]  # broker, queue id


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """The rows of one queue in one step of time."""

    step: int
    queue: Queue
    low: int
    end: int  # one after the largest offset
    rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    broker: str
    queue_id: int
    low: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    spans: tuple[Span, ...]
    rows: int  # nearly: what lies out of order in time is counted with its neighbours
    dates: tuple[str, str] | None = None  # the first and the last that can hold these rows


@dataclasses.dataclass(frozen=True, slots=True)
class Day:
    """The smallest and the largest offset of a queue on one date."""

    queue: Queue
    date: str
    low: int
    high: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    id: str
    source: str
    target: str
    partitions: int
    rows: int
    slices: tuple[Slice, ...]


def cut(buckets: Iterable[Bucket], rows_max: int) -> tuple[Slice, ...]:
    """Slices of at most about `rows_max` rows; together every offset of every bucket, once."""
    by_step: dict[int, list[Bucket]] = {}
    at: dict[Queue, int] = {}
    total = 0
    for bucket in buckets:
        by_step.setdefault(bucket.step, []).append(bucket)
        at[bucket.queue] = min(bucket.low, at.get(bucket.queue, bucket.low))
        total += bucket.rows
    rows_max = max(1, rows_max, total * len(at) // SPANS_MAX)
    slices: list[Slice] = []
    begun: dict[Queue, tuple[int, int]] = {}
    begun_rows = 0
    for step in sorted(by_step):
        rows = sum(bucket.rows for bucket in by_step[step])
        spans: dict[Queue, tuple[int, int]] = {}
        for bucket in sorted(by_step[step], key=lambda b: b.queue):
            # A clock that went back left offsets in a later step: they are taken already.
            end = max(at[bucket.queue], bucket.end)
            spans[bucket.queue] = (at[bucket.queue], end)
            at[bucket.queue] = end
        if begun and begun_rows + rows > rows_max:
            slices.append(_slice(begun, begun_rows))
            begun, begun_rows = {}, 0
        if rows > rows_max:
            slices.extend(_parts(spans, rows, -(-rows // rows_max)))
            continue
        for queue, (low, end) in spans.items():
            begun[queue] = (begun[queue][0] if queue in begun else low, end)
        begun_rows += rows
    if begun:
        slices.append(_slice(begun, begun_rows))
    return tuple(slices)


def dated(slices: Iterable[Slice], days: Iterable[Day]) -> Iterable[Slice]:
    """Slices that know their dates, so that other partitions of the lake are not opened."""
    of_queue: dict[Queue, list[Day]] = {}
    for day in days:
        of_queue.setdefault(day.queue, []).append(day)
    for one in slices:
        touched = [
            day.date
            for span in one.spans
            for day in of_queue.get((span.broker, span.queue_id), ())
            if day.low < span.end and day.high >= span.low
        ]
        dates = (min(touched), max(touched)) if touched else None
        yield dataclasses.replace(one, dates=dates)


def _slice(spans: Mapping[Queue, tuple[int, int]], rows: int) -> Slice:
    kept = [Span(*queue, low, end) for queue, (low, end) in sorted(spans.items()) if end > low]
    return Slice(tuple(kept), rows)


def _parts(spans: Mapping[Queue, tuple[int, int]], rows: int, count: int) -> Iterable[Slice]:
    for number in range(count):
        part = {
            queue: (
                low + (end - low) * number // count,
                low + (end - low) * (number + 1) // count,
            )
            for queue, (low, end) in spans.items()
        }
        yield _slice(part, rows // count)


def replay_name(parts: Sequence[str]) -> str:
    """The same for the same request, so that a resumed one finds what was done."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


class ReplayState:
    """The plan of one replay and how many of its slices are done, in a directory."""

    def __init__(self, files: LakeFiles) -> None:
        self.files = files

    def plan(self) -> ReplayPlan | None:
        document: Any = self.files.read_json(_PLAN)
        if document is None:
            return None
        try:
            slices = [
                Slice(
                    tuple(Span(*span) for span in one["spans"]),
                    int(one["rows"]),
                    (one["dates"][0], one["dates"][1]) if one["dates"] else None,
                )
                for one in document.pop("slices")
            ]
            return ReplayPlan(slices=tuple(slices), **document)
        except (TypeError, KeyError, ValueError) as error:
            raise StoreCorrupt(f"{self.files.path(_PLAN)} is damaged: {error!r}") from None

    def begin(self, plan: ReplayPlan) -> None:
        document = {
            "id": plan.id,
            "source": plan.source,
            "target": plan.target,
            "partitions": plan.partitions,
            "rows": plan.rows,
            "slices": [
                {
                    "spans": [dataclasses.astuple(span) for span in one.spans],
                    "rows": one.rows,
                    "dates": one.dates,
                }
                for one in plan.slices
            ],
        }
        self.files.write_json(_PLAN, document)

    def done(self) -> tuple[int, int]:
        """Slices and rows that were sent."""
        document: Any = self.files.read_json(_DONE)
        if document is None:
            return 0, 0
        try:
            return int(document["slices"]), int(document["rows"])
        except (TypeError, KeyError, ValueError) as error:
            raise StoreCorrupt(f"{self.files.path(_DONE)} is damaged: {error!r}") from None

    def record(self, slices: int, rows: int) -> None:
        self.files.write_json(_DONE, {"slices": slices, "rows": rows})

    def finished(self) -> bool:
        plan = self.plan()
        return plan is not None and self.done()[0] >= len(plan.slices)


def choose_run(runs: LakeFiles, name: str, *, resume: bool) -> str:
    """The directory of the replay to go on with or to begin; a finished one is never touched."""
    numbers = sorted(
        int(entry.name.rpartition("-")[2])
        for entry in runs.list()
        if entry.name.rpartition("-")[0] == name and entry.name.rpartition("-")[2].isdecimal()
    )
    last = numbers[-1] if numbers else 0
    if last:
        state = ReplayState(LakeFiles(runs.spark, runs.path(f"{name}-{last}")))
        plan, (slices, _) = state.plan(), state.done()
        if plan is not None and slices < len(plan.slices):
            if resume:
                return f"{name}-{last}"
            raise ConfigError(
                f"this replay was begun before and has {slices} of {len(plan.slices)} slices done;"
                f" go on with --resume, or remove {state.files.root} to begin anew"
            )
    if resume:
        raise ConfigError(
            "there is no such replay to resume: the archive, the topics, since, until and where"
            " must be those it was begun with"
        )
    return f"{name}-{last + 1}"
