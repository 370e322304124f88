"""Whether the consume queues are exactly what the log says, in both directions.

Records come in log order; each must find its entry, and offsets of one queue must follow each
other. One cursor per queue is all that is kept. Neighbouring faults of one kind are one finding.
Afterwards every place in the files that no record claimed must hold nothing, a filler, or an
entry of a record that has expired. A queue that begins anew in the log (its topic was deleted
and created again) makes everything found for its former life void.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from cosmodrome import speed
from cosmodrome.layout import (
    QUEUE_ENTRY,
    QUEUE_ENTRY_BYTES,
    QUEUE_FILLER_SIZE,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_TRANSACTION_MASK,
)
from cosmodrome.store.commit_log.segment import segment_path
from cosmodrome.store.delays import DelayLevels
from cosmodrome.store.dispatch import DELAY_UNKNOWN_MS, SCHEDULE_TOPIC
from cosmodrome.store.offline.files import QueueFiles, StoreFiles
from cosmodrome.store.offline.findings import (
    RUN_REBUILD,
    RUN_REPAIR,
    UNFINISHED,
    Findings,
    note,
    problem,
)
from cosmodrome.wire.message import INNER_MULTI_DISPATCH
from cosmodrome.wire.record import decode_record

# Tags codes at or below this are addresses in consumequeue_ext.
EXTENSION_ADDRESS_MAX = -(1 << 31) - 1

QueueEntry = tuple[int, int, int]  # log offset, size, tags code


@dataclasses.dataclass(slots=True)
class _Run:
    """Neighbouring faults of one kind."""

    fault: str  # "missing" or "wrong"
    first: int
    last: int
    log_offset: int  # of the first record concerned
    has: QueueEntry | None
    wants: QueueEntry


class _Cursor:
    __slots__ = ("end", "files", "findings", "first", "key", "run")

    def __init__(self, key: tuple[str, int], files: QueueFiles | None, limit: int) -> None:
        self.key = key
        self.files = files
        self.first = -1  # queue offset of the first record the log has
        self.end = 0  # queue offset the next record should have
        self.run: _Run | None = None
        self.findings = Findings(limit)


class QueueCheck:
    def __init__(
        self,
        files: StoreFiles,
        limit: int,
        delays: DelayLevels,
        *,
        cured_from: int | None,
        topics: Collection[str] | None,
    ) -> None:
        self.entry_count = 0
        self.file_count = 0
        self._files = files
        self._limit = limit
        self._delays = delays
        self._cured_from = cured_from  # the next start builds entries of records from here on
        self._topics = topics  # configured ones, None when that is not known
        self._cursors: dict[tuple[str, int], _Cursor] = {}
        self._findings = Findings(limit)
        sizes: set[int] = set()
        for queue in files.queues():
            self._cursors[queue.topic, queue.queue_id] = _Cursor(
                (queue.topic, queue.queue_id), queue, limit
            )
            self.file_count += len(queue.bases)
            sizes.update(queue.sizes[: queue.good])
            self._check_files(queue)
        if len(sizes) > 1:
            self._findings.add(
                note(
                    "queue",
                    "consumequeue",
                    f"queue files have {len(sizes)} different lengths: {sorted(sizes)}",
                    "nothing for this broker; the Java broker wants one length: run `cosmo store"
                    " rebuild --mapped-file-size-consume-queue N`",
                )
            )

    def __len__(self) -> int:
        return len(self._cursors)

    @property
    def topic_count(self) -> int:
        return len({topic for topic, _ in self._cursors})

    def take(self, entry: speed.Entry) -> None:
        log_offset, size, topic, queue_id, queue_offset, sys_flag, store_ms, tags, level, _ = entry
        if sys_flag & SYS_TRANSACTION_MASK in (SYS_PREPARED, SYS_ROLLBACK):
            return  # in no queue
        key = (topic, queue_id)
        cursor = self._cursors.get(key)
        if cursor is None:
            cursor = self._cursors[key] = _Cursor(key, None, self._limit)
        if cursor.first < 0:
            cursor.first = queue_offset
        elif queue_offset != cursor.end:
            self._jump(cursor, queue_offset, log_offset)
        cursor.end = queue_offset + 1
        self.entry_count += 1
        has = None
        if cursor.files is not None:
            has = self._files.queue_entry(cursor.files, queue_offset)
        if (
            has is not None
            and has[0] == log_offset
            and has[1] == size
            and (has[2] == tags or self._tags_fit(topic, level, store_ms, has[2]))
        ):
            if cursor.run is not None:
                self._end_run(cursor)
            return
        wants = (log_offset, size, tags)
        fault = "missing" if has is None or has[1] <= 0 else "wrong"
        run = cursor.run
        if run is None or run.fault != fault:
            self._end_run(cursor)
            cursor.run = _Run(fault, queue_offset, queue_offset, log_offset, has, wants)
        else:
            run.last = queue_offset

    def finish(self, log_end: int, *, damaged: bool) -> Findings:
        """Look at what no record claimed. `log_end` is where the walk ended."""
        for cursor in self._cursors.values():
            self._end_run(cursor)
            if cursor.files is not None:
                self._check_unclaimed(cursor, cursor.files, log_end, damaged=damaged)
            self._findings.take(cursor.findings)
        return self._findings

    # --- inside ------------------------------------------------------------------------------
    def _cured(self, log_offset: int) -> bool:
        return self._cured_from is not None and log_offset >= self._cured_from

    def _tags_fit(self, topic: str, level: int, store_ms: int, has: int) -> bool:
        if has <= EXTENSION_ADDRESS_MAX:
            return True
        if topic != SCHEDULE_TOPIC or level <= 0:
            return False
        # The time of delivery; a table of levels that was unknown to the writer counts 1 s.
        return has - store_ms in (self._delays.delay_ms(level), DELAY_UNKNOWN_MS)

    def _position(self, queue: QueueFiles, number: int) -> tuple[str, int]:
        """File and position of an entry."""
        position = number * QUEUE_ENTRY_BYTES
        base = position - position % queue.file_bytes if queue.file_bytes else 0
        return self._files.name(segment_path(queue.directory, base)), position - base

    def _jump(self, cursor: _Cursor, queue_offset: int, log_offset: int) -> None:
        topic, queue_id = cursor.key
        base = self._files.log_base(log_offset)
        file, position = self._files.name(self._files.log_path(base)), log_offset - base
        if queue_offset < cursor.end:
            # Rebuilding drops what was there: the log is the truth.
            before, cursor.findings, cursor.run = cursor.end, Findings(self._limit), None
            cursor.first = queue_offset
            made = note if queue_offset == 0 else problem
            cursor.findings.add(
                made(
                    "log",
                    file,
                    f"queue {queue_id} of topic {topic!r} begins anew at offset {queue_offset}"
                    f" after {before} messages",
                    "nothing if the topic was deleted and created again",
                    position,
                )
            )
            return
        self._end_run(cursor)
        cursor.findings.add(
            problem(
                "log",
                file,
                f"queue {queue_id} of topic {topic!r} jumps from offset {cursor.end} to"
                f" {queue_offset}: the log lacks {queue_offset - cursor.end} of its messages",
                "restore them from a replica if there is one; consumers step over the gap",
                position,
            )
        )

    def _end_run(self, cursor: _Cursor) -> None:
        run, cursor.run = cursor.run, None
        if run is None:
            return
        topic, queue_id = cursor.key
        count = run.last - run.first + 1
        which = f"entry {run.first}" if count == 1 else f"{count} entries from {run.first} on"
        cured = self._cured(run.log_offset)
        if cursor.files is None or not cursor.files.bases:
            folder = f"consumequeue/{topic}/{queue_id}"
            text = f"there are no files for {which}, which the log has"
            if not cured and self._topics is not None and topic not in self._topics:
                cursor.findings.add(note("queue", folder, text, "nothing if the topic was deleted"))
            else:
                cursor.findings.add(problem("queue", folder, text, RUN_REBUILD), cured=cured)
            return
        file, position = self._position(cursor.files, run.first)
        if run.fault == "missing":
            what = f"{which} missing; the log has the first one's message at {run.log_offset}"
        else:
            what = (
                f"{which} wrong; the first is (offset, size, tags code) {run.has} and should be"
                f" {run.wants}"
            )
        cursor.findings.add(problem("queue", file, what, RUN_REBUILD, position), cured=cured)

    def _check_files(self, queue: QueueFiles) -> None:
        for base, size in zip(queue.bases[queue.good :], queue.sizes[queue.good :], strict=True):
            path = segment_path(queue.directory, base)
            if base == queue.bases[-1] and self._files.holds_nothing(path):
                self._findings.add(
                    note(
                        "queue",
                        self._files.name(path),
                        f"was being made when the broker ended: {size} bytes, all zero",
                        UNFINISHED,
                    )
                )
                continue
            self._findings.add(
                problem(
                    "queue",
                    self._files.name(path),
                    f"a queue file of {size} bytes that does not fit its neighbours: lengths are"
                    " equal, whole entries of 20 bytes, and names follow each other",
                    RUN_REPAIR,
                )
            )

    def _check_unclaimed(
        self, cursor: _Cursor, queue: QueueFiles, log_end: int, *, damaged: bool
    ) -> None:
        first = cursor.first if cursor.first >= 0 else queue.end
        ranges = [(queue.first, min(first, queue.end))]
        if cursor.first >= 0:
            ranges.append((max(cursor.end, queue.first), queue.end))
        for start, end in ranges:
            extra: list[tuple[int, QueueEntry]] = []
            count = 0
            for number, data in self._files.queue_entries(queue, start, end):
                if not any(data):
                    continue
                for at, has in enumerate(QUEUE_ENTRY.iter_unpack(data)):
                    if self._may_stay(has, queue.topic, log_end, damaged=damaged):
                        continue
                    count += 1
                    if not extra:
                        extra.append((number + at, has))
            if extra:
                number, has = extra[0]
                file, position = self._position(queue, number)
                cursor.findings.add(
                    problem(
                        "queue",
                        file,
                        f"{count} entries from {number} on that no message of the log claims; the"
                        f" first is (offset, size, tags code) {has}",
                        RUN_REBUILD,
                        position,
                    ),
                    cured=self._cured(has[0]),
                )

    def _may_stay(self, has: QueueEntry, topic: str, log_end: int, *, damaged: bool) -> bool:
        log_offset, size, tags_code = has
        if not (log_offset or size or tags_code):
            return True  # never written
        if log_offset == 0 and size == QUEUE_FILLER_SIZE:
            return True
        if log_offset < 0 or size <= 0:
            return False
        if log_offset < self._files.log_min:
            return True  # its record has expired
        if damaged and log_offset >= log_end:
            return True  # behind the damage, which is a finding of its own
        record = self._files.record_at(log_offset)
        if record is None or len(record) != size:
            return False
        # Compat: 4.9 puts one message into further queues that a property names.
        return topic in decode_record(record).pairs().get(INNER_MULTI_DISPATCH, "").split(",")
