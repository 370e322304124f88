"""One range of one queue as Arrow batches: what a task does.

Rows come in queue order and each offset once. The *position* is the first offset that is not in a
batch or in the builder yet, and it moves only when a whole answer was taken apart; so whatever
breaks, pulling again from the position loses and repeats nothing. Attempts without progress are
bounded and spaced; each one asks the name servers again where the broker is.

Offsets that are gone (expired, or a queue that is shorter than planned) end the read, or, with
failOnDataLoss=false, are skipped with a line in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa

from cosmodrome.client.namespace import wrap
from cosmodrome.errors import Code, CosmodromeError, Refused, Unreachable
from cosmodrome.layout import RECORD_QUEUE_OFFSET_AT
from cosmodrome.spark import links
from cosmodrome.spark.cluster import BROKEN, GROUP, Cluster
from cosmodrome.spark.read import rows
from cosmodrome.spark.read.offsets import describe
from cosmodrome.spark.read.options import ReadOptions
from cosmodrome.spark.read.plan import DataLoss, Range
from cosmodrome.spark.read.pulls import Pulled, Pulls, Selection
from cosmodrome.spark.runtime.memory import freeze_worker, keep_freed_memory
from cosmodrome.spark.write.dedupe import MARK, Dedupe, Marked
from cosmodrome.speed.arrow import STOP_END, STOP_FULL, ColumnBuilder
from cosmodrome.transport.plain import PlainConnection
from cosmodrome.wire.bodies import EVERYTHING, SQL92, TAG, MessageQueue
from cosmodrome.wire.names import RETRY_PREFIX

log = logging.getLogger(__name__)

# Refusals that may pass in a moment.
_BUSY = frozenset({Code.SYSTEM_BUSY, Code.SERVICE_NOT_AVAILABLE, Code.FLOW_CONTROL})
_FOR_DEDUPE = ("queue_offset", "msg_id")


class DamagedRecord(CosmodromeError):
    """A broker keeps sending a message that cannot be read."""


class LookupFailed(CosmodromeError):
    """Not every broker could say whether a message is a repetition."""


def read_range(span: Range, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """The messages [start, end) of a queue, in batches of some thousand rows."""
    keep_freed_memory()
    freeze_worker()
    reader = _RangeReader(span, options)
    try:
        yield from reader.batches()
    finally:
        reader.close()


class _RangeReader:
    def __init__(self, span: Range, options: ReadOptions) -> None:
        self._span = span
        self._queue = span.queue
        self._options = options
        self._selection = _selection(span.queue, options)
        self._position = span.start
        self._addresses = span.addresses
        self._address = ""
        self._link: PlainConnection | None = None
        self._attempts = links.Attempts(options.connection.retries)
        self._damaged_at = -1
        self._columns = options.columns
        if options.dedupe:
            missing = [name for name in _FOR_DEDUPE if name not in options.columns]
            self._columns = (*options.columns, *missing)
        self._builder = ColumnBuilder(
            self._columns,
            broker=span.queue.broker_name,
            check_crc=options.check_crc,
            tags=frozenset(options.tags) if options.tags else None,
            marked=MARK if options.dedupe else None,
        )
        self._cluster = Cluster(options.connection)
        self._dedupe: Dedupe | None = None
        if options.dedupe:
            queue = span.queue
            self._dedupe = Dedupe(self._cluster, queue.topic, queue.broker_name, queue.queue_id)

    def batches(self) -> Iterator[pa.RecordBatch]:
        while self._position < self._span.end:
            try:
                yield from self._until_failure()
            except BROKEN as error:
                self._try_again(error)
            except Refused as refusal:
                if refusal.code == Code.TOPIC_NOT_EXIST:
                    self._lose(self._span.end, f"the topic is gone: {refusal.remark}")
                elif refusal.code in _BUSY:
                    self._try_again(refusal)
                else:
                    words = f"{describe(self._queue)}: {refusal.remark}"
                    raise links.explained(
                        Refused(refusal.code, words), self._options.connection
                    ) from None
        if self._builder.rows:
            yield from self._batch()

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            links.give_back(self._address, self._options.connection, link)
        self._cluster.close()

    # --- pulling -------------------------------------------------------------------------------

    def _until_failure(self) -> Iterator[pa.RecordBatch]:
        options, end = self._options, self._span.end
        timeout_ms = options.connection.timeout_ms
        link = self._connected()
        self._selection.check(link, timeout_ms)
        pulls = Pulls(
            link,
            self._selection,
            end,
            ahead=options.pulls_ahead,
            bytes_max=options.pull_bytes,
            timeout_ms=timeout_ms,
        )
        while self._position < end and self._link is not None:
            before = self._position
            pulled = pulls.next(before)
            if pulled.code == Code.SUCCESS:
                yield from self._take(pulled, pulls)
            else:
                self._nothing(pulled)
            if self._position > before:
                self._attempts.reset()

    def _take(self, pulled: Pulled, pulls: Pulls) -> Iterator[pa.RecordBatch]:
        """The rows of an answer into the builder; full batches come out."""
        if pulled.next_offset <= self._position:
            raise Unreachable(
                f"{self._address} answers offset {self._position} with the next one being"
                f" {pulled.next_offset}; look into the broker's log"
            )
        builder, body = self._builder, pulled.body
        end = min(self._span.end, pulled.next_offset)
        before, at, size = builder.records, 0, len(pulled.body)
        held, taken = builder.rows, 0
        at, why = builder.add(body, 0, size, low=self._position, high=end)
        while why == STOP_FULL:
            held, taken = 0, taken + builder.rows - held
            yield from self._batch()
            at, why = builder.add(body, at, size, low=self._position, high=end)
        taken += builder.rows - held
        if why != STOP_END:
            self._damaged(pulled, at, builder.records - before)
            pulls.again()
            return
        missing = end - self._position - taken
        if missing > 0 and not self._selection.filtered:
            self._lose(
                end,
                f"{missing} of the offsets {self._position} to {end - 1} are not in"
                " the broker's answer (removed while being read, or damaged at the broker)",
            )
        self._position = end

    def _damaged(self, pulled: Pulled, at: int, count: int) -> None:
        """Pull a message that cannot be read once more; DamagedRecord the second time."""
        builder = self._builder
        if count:
            self._position = max(self._position, builder.last_offset + 1)
        offset = self._position
        if builder.fault_size:
            field = pulled.body[at + RECORD_QUEUE_OFFSET_AT : at + RECORD_QUEUE_OFFSET_AT + 8]
            offset = max(offset, int.from_bytes(field, "big"))
        if offset >= self._span.end:
            self._position = self._span.end  # not ours to read
            return
        fault = builder.fault or "it is cut short"
        if self._damaged_at == offset:
            raise DamagedRecord(
                f"{describe(self._queue)}: the message at offset {offset} cannot be read, also when"
                f" it is pulled again: {fault}; check the broker's store (`cosmo store check`), or"
                " read around it with startingOffsets and endingOffsets"
            )
        self._damaged_at = offset
        log.warning(
            "a damaged message is pulled again: queue=%s offset=%d reason=%s",
            describe(self._queue),
            offset,
            fault,
        )

    def _nothing(self, pulled: Pulled) -> None:
        """An answer without messages: go on behind it, or report what is lost."""
        position = self._position
        if position < pulled.min_offset:
            self._lose(
                pulled.min_offset, f"the first offset there is {pulled.min_offset} (expired)"
            )
        elif position >= pulled.max_offset:
            self._too_short(pulled)
        elif pulled.next_offset > position:
            if self._selection.filtered and pulled.code == Code.PULL_RETRY_IMMEDIATELY:
                self._position = min(pulled.next_offset, self._span.end)
            else:
                self._lose(pulled.next_offset, f"the broker has none before {pulled.next_offset}")
        else:
            raise Unreachable(
                f"{self._address} has offsets {pulled.min_offset} to {pulled.max_offset} but"
                f" answers code {pulled.code} at {position}; look into the broker's log"
            )

    def _too_short(self, pulled: Pulled) -> None:
        """The queue ends before the range. A replica, or a broker that just started, may lag."""
        what = f"the queue ends at {pulled.max_offset} (made anew, or its broker lost messages)"
        of_replica = self._address != self._addresses[0]
        try:
            self._try_again(Unreachable(f"{self._address}: {what}"))
        except Unreachable:
            if of_replica:
                raise  # its master may have the rest
            self._lose(self._span.end, what)

    # --- what goes wrong -----------------------------------------------------------------------

    def _lose(self, upto: int, why: str) -> None:
        upto = min(upto, self._span.end)
        loss = f"{describe(self._queue)}: wanted offset {self._position}, {why}"
        if self._options.fail_on_data_loss:
            raise DataLoss(
                f"{loss}; the messages are lost to this query. Set failOnDataLoss=false to go on"
                " without them, or start from other offsets"
            )
        log.warning("skipped to offset %d because messages are gone: %s", upto, loss)
        self._position = max(self._position, upto)

    def _try_again(self, error: CosmodromeError) -> None:
        """Wait and find out where the broker is by now, or give up."""
        link, self._link = self._link, None
        if link is not None:
            link.close()
        if not self._attempts.failed(links.explained(error, self._options.connection)):
            raise Unreachable(
                f"{describe(self._queue)}: reading ended at offset {self._position},"
                f" {self._attempts.describe()}"
            ) from error
        log.info("pulled again: queue=%s reason=%s", describe(self._queue), error)
        self._attempts.wait()
        try:
            fresh = self._cluster.addresses(self._queue)
        except CosmodromeError as failure:
            log.info("addresses stay as they are: reason=%s", failure)
        else:
            self._addresses = fresh or self._addresses

    def _connected(self) -> PlainConnection:
        if self._link is None:
            if not self._addresses:
                self._addresses = self._cluster.addresses(self._queue)
            if not self._addresses:
                raise Unreachable(f"no name server knows broker {self._queue.broker_name}")
            # The master first, then each of its replicas in turn.
            tried = len(self._attempts.failures) % len(self._addresses)
            self._address = self._addresses[tried]
            self._link = links.take(self._address, self._options.connection)
        return self._link

    # --- batches -------------------------------------------------------------------------------

    def _batch(self) -> Iterator[pa.RecordBatch]:
        count, buffers, marked = self._builder.take()
        if not count:
            return
        batch = rows.batch(count, buffers, self._columns, required=self._options.required)
        if marked and self._dedupe is not None:
            try:
                batch = _without_repeats(batch, marked, self._dedupe)
            except CosmodromeError as error:
                # This kind ends the read: the rows are out of the builder already.
                raise LookupFailed(
                    f"{describe(self._queue)}: not every broker of the topic can be asked for"
                    f" repeated messages, as dedupe=true needs: {error}"
                ) from error
        if self._columns is not self._options.columns:
            batch = batch.select(list(self._options.columns))
        if self._options.connection.namespace and "topic" in self._options.columns:
            at = self._options.columns.index("topic")
            names = pa.repeat(pa.scalar(self._queue.topic, pa.string()), batch.num_rows)
            batch = batch.set_column(at, batch.schema.field(at), names)
        if batch.num_rows:
            yield batch


def _without_repeats(
    batch: pa.RecordBatch, marked: list[tuple[int, str]], dedupe: Dedupe
) -> pa.RecordBatch:
    offsets, keys = batch.column("queue_offset"), batch.column("msg_id")
    dropped = dedupe.rows_to_drop(
        Marked(row, offsets[row].as_py(), keys[row].as_py(), mark) for row, mark in marked
    )
    if not dropped:
        return batch
    return batch.filter(pa.array([row not in dropped for row in range(batch.num_rows)]))


def _selection(queue: MessageQueue, options: ReadOptions) -> Selection:
    topic = wrap(options.connection.namespace, queue.topic)
    group = wrap(options.connection.namespace, options.consumer_group or GROUP)
    # Compat: brokers may apply the filter of a group to its retry topic.
    filtered = topic.startswith(RETRY_PREFIX)
    if options.sql is not None:
        return Selection(topic, queue.queue_id, group, options.sql, SQL92, filtered=True)
    if options.tags:
        expression = " || ".join(options.tags)
        return Selection(topic, queue.queue_id, group, expression, TAG, filtered=True)
    return Selection(topic, queue.queue_id, group, EVERYTHING, TAG, filtered=filtered)
