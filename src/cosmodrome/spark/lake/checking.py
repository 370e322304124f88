"""Checks messages for gaps, duplicates, wrong order and damage.

The source is scanned once, without bodies (the scan verifies their checksums), and Spark keeps the
rows until the report is made. Counts are exact; the first findings of each kind are listed.

Per queue it looks for offsets that are missing between the first and the last one (as found, or as
the broker or the progress of an archive states them), offsets that are there twice, store times
that step back by more than a tolerance, and log offsets that do not grow with queue offsets. Per
topic it looks for message ids that are there twice, and in store directories for damage in the log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark import StorageLevel
from pyspark.sql import Window
from pyspark.sql import functions as F

from cosmodrome.findings import Finding, Severity
from cosmodrome.spark.read.rows import CORRUPT as CORRUPT_COLUMN
from cosmodrome.wire.names import DLQ_PREFIX, RETRY_PREFIX, SYSTEM_PREFIX, SYSTEM_TOPICS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

COLUMNS = (
    "topic",
    "broker",
    "queue_id",
    "queue_offset",
    "msg_id",
    "store_time",
    "commit_log_offset",
)
GAP, DUPLICATE, TIME, LOG = "gap", "duplicate offset", "time order", "log order"
DUPLICATE_ID, CORRUPT = "duplicate id", "corrupt"
KINDS = (GAP, DUPLICATE, DUPLICATE_ID, TIME, LOG, CORRUPT)
_QUEUE = ("topic", "broker", "queue_id")

Queue = tuple[str, str, int]  # topic, broker or "", queue id
Bounds = Mapping[Queue, tuple[int | None, int]]  # first offset and the one behind the last


@dataclasses.dataclass(frozen=True, slots=True)
class QueueReport:
    topic: str
    broker: str
    queue_id: int
    first: int | None  # None: no message is there
    last: int | None
    messages: int
    gaps: int = 0
    missing: int = 0  # offsets inside the gaps
    duplicates: int = 0
    time_steps: int = 0
    log_steps: int = 0

    @property
    def ok(self) -> bool:
        return not (self.gaps or self.duplicates or self.time_steps or self.log_steps)


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    source: str
    queues: tuple[QueueReport, ...]
    counts: dict[str, int]  # by kind, exact
    findings: tuple[Finding, ...]  # the first of each kind
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not any(self.counts.values())

    @property
    def messages(self) -> int:
        return sum(queue.messages for queue in self.queues)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        findings = [{"kind": f.code, **f.evidence, "what": f.sentence} for f in self.findings]
        fields = dataclasses.asdict(self) | {"findings": findings}
        return {"ok": self.ok, "messages": self.messages, **fields}


@dataclasses.dataclass(frozen=True, slots=True)
class Scan:
    """What is checked: COLUMNS and, for a store directory, the corrupt column."""

    source: str
    frame: DataFrame
    bounds: Bounds = dataclasses.field(default_factory=dict)
    gaps: bool = True  # whether all offsets should be there
    notes: tuple[str, ...] = ()


def examine(scan: Scan, *, ids: bool = True, tolerance_ms: int = 1000, limit: int = 100) -> Report:
    """The report about a scan."""
    gaps = scan.gaps
    kept = scan.frame.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        good = kept
        counts = dict.fromkeys(KINDS, 0)
        findings: list[Finding] = []
        if CORRUPT_COLUMN in kept.columns:
            good = kept.where(F.col(CORRUPT_COLUMN).isNull())
            counts[CORRUPT], damaged = _damage(kept, limit)
            findings += damaged
        judged = _judged(good, tolerance_ms, gaps=gaps)
        queues = _queues(judged)
        ends = list(_gaps_at_ends(queues, scan.bounds)) if gaps else []
        queues = _with_ends(queues, ends)
        counts[GAP] = sum(queue.gaps for queue in queues)
        counts[DUPLICATE] = sum(queue.duplicates for queue in queues)
        counts[TIME] = sum(queue.time_steps for queue in queues)
        counts[LOG] = sum(queue.log_steps for queue in queues)
        inside = _first_of_each(judged, limit) if any(not queue.ok for queue in queues) else []
        at_ends = [finding for _, _, finding in ends]
        findings += sorted([*at_ends, *inside], key=_order)
        if ids:
            counts[DUPLICATE_ID], repeated = _repeated_ids(good, limit)
            findings += repeated
        listed = _bounded(findings, limit)
        return Report(scan.source, tuple(queues), counts, listed, scan.notes)
    finally:
        kept.unpersist()


# --- within queues -------------------------------------------------------------------------------
def _judged(good: DataFrame, tolerance_ms: int, *, gaps: bool) -> DataFrame:
    """Every message beside the one before it in its queue: what is wrong between the two."""
    rows = good.select(
        "topic",
        F.coalesce("broker", F.lit("")).alias("broker"),
        "queue_id",
        F.col("queue_offset").alias("offset"),
        F.col("commit_log_offset").alias("log"),
        F.unix_millis("store_time").alias("ms"),
    )
    order = Window.partitionBy(*_QUEUE).orderBy("offset", "log")
    for name in ("offset", "log", "ms"):
        rows = rows.withColumn(f"{name}_before", F.lag(name).over(order))
    offset, before = F.col("offset"), F.col("offset_before")
    step_back = F.col("ms_before") - F.col("ms")
    missing = offset - before - 1 if gaps else F.lit(0)
    return rows.select(
        *_QUEUE,
        "offset",
        "offset_before",
        "log",
        "log_before",
        F.coalesce(F.greatest(missing, F.lit(0)), F.lit(0)).alias("missing"),
        _true(offset == before).alias("duplicate"),
        F.when(step_back > tolerance_ms, step_back).otherwise(0).alias("back_ms"),
        _true((offset > before) & (F.col("log") <= F.col("log_before"))).alias("log_step"),
    )


def _true(condition: Column) -> Column:
    return F.coalesce(condition, F.lit(False))


def _queues(judged: DataFrame) -> list[QueueReport]:
    found = (
        judged.groupBy(*_QUEUE)
        .agg(
            F.min("offset").alias("first"),
            F.max("offset").alias("last"),
            F.count("*").alias("messages"),
            F.count_if(F.col("missing") > 0).alias("gaps"),
            F.sum("missing").alias("missing"),
            F.count_if("duplicate").alias("duplicates"),
            F.count_if(F.col("back_ms") > 0).alias("time_steps"),
            F.count_if("log_step").alias("log_steps"),
        )
        .orderBy(*_QUEUE)
        .collect()
    )
    return [QueueReport(**row.asDict()) for row in found]


def _first_of_each(judged: DataFrame, limit: int) -> list[Finding]:
    """The first findings of every kind, in one look."""
    kinds = F.array_compact(
        F.array(
            F.when(F.col("missing") > 0, F.lit(GAP)),
            F.when(F.col("duplicate"), F.lit(DUPLICATE)),
            F.when(F.col("back_ms") > 0, F.lit(TIME)),
            F.when(F.col("log_step"), F.lit(LOG)),
        )
    )
    number = F.row_number().over(Window.partitionBy("kind").orderBy(*_QUEUE, "offset", "log"))
    rows = (
        judged.select("*", F.explode(kinds).alias("kind"))
        .withColumn("number", number)
        .where(F.col("number") <= limit)
        .collect()
    )
    return [
        _finding(row.kind, _words(row), row.topic, row.broker, row.queue_id, row.offset)
        for row in rows
    ]


def _words(row: Row) -> str:
    if row.kind == GAP:
        return _missing(row.offset_before + 1, row.offset)
    if row.kind == DUPLICATE:
        return f"offset {row.offset} is there twice, at log offsets {row.log_before} and {row.log}"
    if row.kind == TIME:
        return f"stored {row.back_ms} ms before the message at offset {row.offset_before}"
    return (
        f"lies at log offset {row.log}, the message at offset {row.offset_before} at"
        f" {row.log_before}"
    )


def _missing(start: int, end: int) -> str:
    if end == start + 1:
        return f"offset {start} is missing"
    return f"offsets {start} to {end - 1} are missing ({end - start})"


def _gaps_at_ends(
    queues: Sequence[QueueReport], bounds: Bounds
) -> Iterator[tuple[Queue, int, Finding]]:
    """What is missing before the first and behind the last message of a queue."""
    known = {(queue.topic, queue.broker, queue.queue_id): queue for queue in queues}
    for queue, (low, high) in sorted(bounds.items()):
        report = known.get(queue)
        spans = []
        if report is None or report.first is None or report.last is None:
            # Where an archive begins is known only by its first message.
            spans.append((high if low is None else low, high))
        else:
            spans.append((report.first if low is None else low, report.first))
            spans.append((report.last + 1, high))
        for start, end in spans:
            if start < end:
                finding = _finding(GAP, _missing(start, end), *queue, start)
                yield queue, end - start, finding


def _with_ends(
    queues: Sequence[QueueReport], ends: Sequence[tuple[Queue, int, Finding]]
) -> list[QueueReport]:
    known = {(queue.topic, queue.broker, queue.queue_id): queue for queue in queues}
    for name, missing, _ in ends:
        queue = known.get(name) or QueueReport(*name, None, None, 0)
        known[name] = dataclasses.replace(
            queue, gaps=queue.gaps + 1, missing=queue.missing + missing
        )
    return [known[name] for name in sorted(known)]


# --- ids and damage ------------------------------------------------------------------------------
def _repeated_ids(good: DataFrame, limit: int) -> tuple[int, list[Finding]]:
    """Messages that share their id with another one of their topic. A message that is retried keeps
    its id, so topics of retries and of the broker itself are left out."""
    topic = F.col("topic")
    ordinary = ~topic.isin(*SYSTEM_TOPICS)
    for prefix in (RETRY_PREFIX, DLQ_PREFIX, SYSTEM_PREFIX):
        ordinary &= ~topic.startswith(prefix)
    position = F.struct("broker", "queue_id", "queue_offset")
    repeated = (
        good.where(ordinary)
        .groupBy("topic", "msg_id")
        .agg(
            F.count("*").alias("times"),
            F.min(position).alias("first"),
            F.max(position).alias("last"),
        )
        .where(F.col("times") > 1)
    )
    rows = repeated.orderBy("topic", "first", "msg_id").limit(limit).collect()
    count = sum(row.times - 1 for row in rows)
    if len(rows) == limit:  # there may be more than are listed
        total = F.coalesce(F.sum(F.col("times") - 1), F.lit(0)).alias("more")
        count = int(repeated.agg(total).collect()[0].more)
    return count, [
        _finding(
            DUPLICATE_ID,
            f"id {row.msg_id} is there {row.times} times, the last in queue"
            f" {row['last'].queue_id} at offset {row['last'].queue_offset}",
            row.topic,
            row["first"].broker,
            row["first"].queue_id,
            row["first"].queue_offset,
        )
        for row in rows
    ]


def _damage(kept: DataFrame, limit: int) -> tuple[int, list[Finding]]:
    damaged = kept.where(F.col(CORRUPT_COLUMN).isNotNull())
    rows = damaged.orderBy("commit_log_offset").limit(limit).collect()
    count = damaged.count() if len(rows) == limit else len(rows)
    return count, [_finding(CORRUPT, row[CORRUPT_COLUMN], broker=row.broker) for row in rows]


def _finding(
    kind: str,
    sentence: str,
    topic: str | None = None,
    broker: str | None = None,
    queue_id: int | None = None,
    queue_offset: int | None = None,
) -> Finding:
    position = {
        "topic": topic,
        "broker": broker or None,
        "queue_id": queue_id,
        "queue_offset": queue_offset,
    }
    return Finding(kind, topic or "", Severity.ERROR, sentence, evidence=position)


def _order(finding: Finding) -> tuple[Any, ...]:
    at = finding.evidence
    kind = KINDS.index(finding.code)
    return kind, finding.subject, at["broker"] or "", at["queue_id"], at["queue_offset"]


def _bounded(findings: Sequence[Finding], limit: int) -> tuple[Finding, ...]:
    taken = dict.fromkeys(KINDS, 0)
    kept: list[Finding] = []
    for finding in sorted(findings, key=lambda finding: KINDS.index(finding.code)):
        taken[finding.code] += 1
        if taken[finding.code] <= limit:
            kept.append(finding)
    return tuple(kept)
