"""Names for rows that a repeated task repeats, and the mark of messages that may be repetitions.

A row's unique key is a function of who writes it, never of when or where: 32 hexadecimal digits,

    0-11   hash of the writer: idempotenceId, else the stream's query id, else one per batch write
    12-17  micro-batch (0 where there is none)
    18-23  partition
    24-31  number of the row in its partition, from 0

so a second attempt, in this run of the program or the next, gives the same rows the same keys.
What does not fit its digits goes into the hash.

The mark is a property whose value orders attempts: when the driver planned the write, the task's
number, the try within the task, in fixed-width digits. Texts compare as attempts followed each
other. A message is left unmarked only when it cannot be a repetition, when all of these hold:

- The attempt is the task's first.
- A batch write chose its own id, or a stream's batch is not the first of its run. A worker process
  knows the latter when it saw an earlier batch of the same run; otherwise it assumes the first.
- The first row was looked for in the topic and not found. Spark may run a whole stage again with
  attempt numbers from 0 without telling Python tasks. Nothing else is sent before the first row is
  acknowledged, so if that row is not there, nothing is.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Protocol

MARK = "SPARK_RESEND"  # property name

QUERY_ID, RUN_ID = "sql.streaming.queryId", "spark.jobGroup.id"
BATCH_ID = "streaming.sql.batchId"
_RUNS_MAX = 1_000
_LOW = (1 << 24) - 1
_ROWS = 1 << 32
_HASH_DIGITS = 12

# The first batch that this process saw of a run, by query and run.
_first_seen: dict[tuple[str, str], int] = {}


class Context(Protocol):
    """The part of pyspark's TaskContext that is used."""

    def partitionId(self) -> int: ...

    def attemptNumber(self) -> int: ...

    def taskAttemptId(self) -> int: ...

    def getLocalProperty(self, key: str) -> str | None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Chosen once on the driver for a write (of a stream: for each micro-batch)."""

    job_id: str  # of this write alone
    planned_ms: int
    idempotence_id: str | None = None
    streaming: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class WritePart:
    """Which part of which write a task is."""

    writer: str
    batch: int
    partition: int
    task: int
    planned_ms: int
    may_repeat: bool  # certainly or possibly; False excludes all but a repeated stage

    def stamp(self, tries: int) -> str:
        """The mark's value for the first (0) or a later try to send within this task."""
        return f"{self.planned_ms:012X}{self.task:012X}{min(tries, 0xFFF):03X}"


def write_part(origin: Origin, context: Context) -> WritePart:
    query, run = context.getLocalProperty(QUERY_ID), context.getLocalProperty(RUN_ID)
    batch = context.getLocalProperty(BATCH_ID)
    known = origin.idempotence_id is not None or origin.streaming
    number = int(batch) if known and batch is not None and batch.isdigit() else 0
    writer = origin.idempotence_id or (query if origin.streaming else None) or origin.job_id
    return WritePart(
        writer=writer,
        batch=number,
        partition=context.partitionId(),
        task=context.taskAttemptId(),
        planned_ms=origin.planned_ms,
        may_repeat=context.attemptNumber() > 0
        or (known and not _is_later_batch(query, run, batch)),
    )


def _is_later_batch(query: str | None, run: str | None, batch: str | None) -> bool:
    """Whether a batch before this one ran in the same run of the stream: then this one is new."""
    if query is None or run is None or batch is None or not batch.isdigit():
        return False
    if len(_first_seen) >= _RUNS_MAX:
        _first_seen.clear()  # costs marks, nothing else
    return _first_seen.setdefault((query, run), int(batch)) < int(batch)


class RowKeys:
    """Unique keys of the rows of a task, one after the other."""

    def __init__(self, part: WritePart) -> None:
        self._part = part
        self._row = -1
        self._prefix = ""

    def next(self) -> str:
        self._row += 1
        row = self._row & (_ROWS - 1)
        if not row:
            self._prefix = self._make_prefix(self._row >> 32)
        return f"{self._prefix}{row:08X}"

    def _make_prefix(self, rows_high: int) -> str:
        part = self._part
        beyond = (part.batch >> 24, part.partition >> 24, rows_high)
        text = part.writer if not any(beyond) else f"{part.writer}\0{beyond}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS].upper()
        return f"{digest}{part.batch & _LOW:06X}{part.partition & _LOW:06X}"
