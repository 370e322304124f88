"""The sink as Spark calls it: writers are made on the driver, run in tasks, and hear the outcome.

A message that was sent cannot be taken back, so commit has nothing left to do and abort only logs
what stays. What makes a repeated task harmless is in `repeats` (writing) and `dedupe` (reading).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from cosmodrome.client.instance import acquire, release
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.spark.write.options import WriteOptions
from cosmodrome.spark.write.repeats import Context, Origin, write_part
from cosmodrome.spark.write.row_messages import RowLayout, RowMessages
from cosmodrome.spark.write.sending import Outbox

log = logging.getLogger(__name__)

ROWS_AT_ONCE = 1_024  # turned into Python values at a time


@dataclasses.dataclass(frozen=True, slots=True)
class Sent(WriterCommitMessage):
    """What a task did."""

    partition: int
    rows: int
    resent: int  # rows that took more than one request


class Task:
    """The part of a writer that travels to the tasks."""

    def __init__(self, options: WriteOptions, layout: RowLayout, origin: Origin) -> None:
        self._options = options
        self._layout = layout
        self._origin = origin

    def send(self, batches: Iterable[pa.RecordBatch], context: Context) -> Sent:
        """Send all rows; every one is acknowledged when this returns."""
        return asyncio.run(self._send(batches, context))

    async def _send(self, batches: Iterable[pa.RecordBatch], context: Context) -> Sent:
        options = self._options
        part = write_part(self._origin, context)
        rows = RowMessages(self._layout, options, part)
        instance = await acquire(options.connection.namesrv, options.client_options(), real_env())
        try:
            outbox = Outbox(instance, options, part)
            try:
                for batch in batches:
                    # Answers, or the end of a connection, may have come while this one was made.
                    await outbox.hand_over()
                    for begin in range(0, batch.num_rows, ROWS_AT_ONCE):
                        await outbox.add(rows.packed(batch.slice(begin, ROWS_AT_ONCE)))
                    # The next one may take its time, and nothing else runs meanwhile.
                    await outbox.hand_over()
                await outbox.finish()
            except BaseException:
                await outbox.give_up()
                raise
        finally:
            await release(instance)
        return Sent(part.partition, outbox.sent, outbox.resent)


class BatchWriter(DataSourceArrowWriter):
    def __init__(self, task: Task) -> None:
        self._task = task

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        return self._task.send(iterator, _context())

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        log.info("write done: %s", _describe(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        log.warning("write failed; messages that were sent stay: %s", _describe(messages))


class StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, task: Task) -> None:
        self._task = task

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Sent:
        return self._task.send(iterator, _context())

    # Compat: Spark calls it with these names.
    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        log.info("micro-batch done: batch=%d %s", batchId, _describe(messages))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        log.warning(
            "micro-batch failed; messages that were sent stay, and those sent again are marked:"
            " batch=%d %s",
            batchId,
            _describe(messages),
        )


def make_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchWriter:
    if overwrite:
        raise ConfigError(
            'a topic cannot be overwritten, only added to; use mode("append"), or delete the'
            " topic first"
        )
    return BatchWriter(_task(options, schema, streaming=False))


def make_stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> StreamWriter:
    """`overwrite` is Spark's word for output mode complete."""
    if overwrite:
        raise ConfigError('a topic cannot be overwritten, only added to; use outputMode("append")')
    return StreamWriter(_task(options, schema, streaming=True))


def _task(options: Mapping[str, str], schema: StructType, *, streaming: bool) -> Task:
    parsed = WriteOptions.parse(options)
    env = real_env()
    origin = Origin(
        job_id=f"{env.random.getrandbits(128):032x}",
        planned_ms=env.clock.now_ms(),
        idempotence_id=parsed.idempotence_id,
        streaming=streaming,
    )
    return Task(parsed, RowLayout.of(schema, parsed), origin)


def _context() -> Context:
    context = TaskContext.get()
    if context is None:
        raise ConfigError("this writer runs inside a Spark task; use df.write or df.writeStream")
    return context


def _describe(messages: Sequence[WriterCommitMessage | None]) -> str:
    sent = [message for message in messages if isinstance(message, Sent)]
    rows, resent = sum(done.rows for done in sent), sum(done.resent for done in sent)
    lost = len(messages) - len(sent)
    return f"rows={rows} resent={resent} tasks={len(sent)} unfinished_tasks={lost}"
