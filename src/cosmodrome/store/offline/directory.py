"""The second door of the store: a directory looked at, or mended, while no broker runs on it.

    with opened(root, disk) as files:            # locked, unless read_only
        report = check(files, ...)               # or records(files, ...), plan_repair(files, ...)

Works on directories of any RocketMQ broker with 4.x files. Everything blocks; only `open_once`,
which starts a store, is asynchronous.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from cosmodrome import speed
from cosmodrome.env.base import Disk
from cosmodrome.errors import DirectoryInUse, StoreError
from cosmodrome.layout import QUEUE_ENTRY, QUEUE_FILLER_SIZE
from cosmodrome.store.commit_log.segment import data_end, segment_offsets, segment_path
from cosmodrome.store.delays import DelayLevels
from cosmodrome.store.offline.check import Report, check
from cosmodrome.store.offline.files import Hints, LogWalk, QueueFiles, StoreFiles, start_of_walk
from cosmodrome.store.offline.findings import FINDINGS_MAX, Findings
from cosmodrome.store.offline.index import IndexEntry, index_entries
from cosmodrome.store.offline.repair import (
    Plan,
    derived_paths,
    drop_derived,
    open_once,
    plan_repair,
    prove_log,
    run_plan,
    store_options,
)
from cosmodrome.wire.record import Record, decode_record

__all__ = [
    "FINDINGS_MAX",
    "DelayLevels",
    "Findings",
    "Hints",
    "IndexEntry",
    "Plan",
    "QueueRow",
    "Report",
    "Selection",
    "StoreFiles",
    "all_index_entries",
    "check",
    "data_end",
    "derived_paths",
    "drop_derived",
    "open_once",
    "opened",
    "plan_repair",
    "prove_log",
    "queue_rows",
    "records",
    "run_plan",
    "segment_offsets",
    "segment_path",
    "store_options",
]

OFFSET_MAX = (1 << 63) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Selection:
    """Which messages: [start, end) are log offsets, times are store times, both included."""

    topic: str | None = None
    queue_id: int | None = None
    start: int = 0
    end: int = OFFSET_MAX
    since_ms: int = 0
    until_ms: int = OFFSET_MAX

    def takes(self, entry: speed.Entry) -> bool:
        return (
            self.start <= entry[0] < self.end
            and (self.topic is None or entry[2] == self.topic)
            and (self.queue_id is None or entry[3] == self.queue_id)
            and self.since_ms <= entry[6] <= self.until_ms
        )


@dataclasses.dataclass(frozen=True, slots=True)
class QueueRow:
    topic: str
    queue_id: int
    queue_offset: int
    log_offset: int
    size: int
    tags_code: int

    @property
    def is_filler(self) -> bool:
        return self.log_offset == 0 and self.size == QUEUE_FILLER_SIZE


@contextlib.contextmanager
def opened(
    root: str, disk: Disk, hints: Hints | None = None, *, read_only: bool = False
) -> Iterator[StoreFiles]:
    """The files of a store, held by its lock unless `read_only`."""
    files = StoreFiles(root, disk, hints)
    lock = None
    try:
        if not read_only:
            try:
                lock = disk.lock(files.path("lock"))
            except DirectoryInUse:
                raise DirectoryInUse(
                    f"{root} is in use by a broker; stop it first. `check --read-only`, `dump` and"
                    " `export` also work while it runs"
                ) from None
            except OSError as error:
                raise StoreError(
                    f"{root} cannot be locked ({error.strerror}); run as the broker's user, or"
                    " only look with --read-only"
                ) from None
            # What was listed before the lock was taken may have changed in between.
            files.close()
            files = StoreFiles(root, disk, hints)
        yield files
    finally:
        files.close()
        if lock is not None:
            lock.release()


def records(
    files: StoreFiles,
    selection: Selection,
    *,
    on_damage: Callable[[int, int], None] = lambda end, resumed: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Record]:
    """Messages in log order. Behind a damaged place every record that still stands alone is
    found too; `on_damage` gets the offset where reading stopped and the one where it resumed."""
    walk = LogWalk(files, start_of_walk(files, selection.start))
    total = len(files.log_bases) * files.log_file_bytes
    for entries in walk:
        yield from _picked(files, entries, selection)
        progress(walk.end - files.log_min, total)
        if entries[-1][0] >= selection.end:
            return
    reported = False
    for entries in files.salvage(walk.end):
        if entries[0][0] >= selection.end:
            break
        if not reported:
            on_damage(walk.end, entries[0][0])
            reported = True
        yield from _picked(files, entries, selection)
    progress(total, total)


def queue_rows(files: StoreFiles, selection: Selection) -> Iterator[QueueRow]:
    """Entries of the queue files, queue by queue; times are not looked at."""
    for queue in files.queues():
        if selection.topic not in (None, queue.topic) or selection.queue_id not in (
            None,
            queue.queue_id,
        ):
            continue
        for row in _queue_rows(files, queue):
            if selection.start <= row.log_offset < selection.end:
                yield row


def all_index_entries(files: StoreFiles) -> Iterator[IndexEntry]:
    """Entries of all index files whose geometry is known, oldest first."""
    for file in files.index_files():
        if file.slots:
            yield from index_entries(files, file)


def _picked(
    files: StoreFiles, entries: list[speed.Entry], selection: Selection
) -> Iterator[Record]:
    for entry in entries:
        if selection.takes(entry):
            base = files.log_base(entry[0])
            yield decode_record(files.log_view(base), entry[0] - base)


def _queue_rows(files: StoreFiles, queue: QueueFiles) -> Iterator[QueueRow]:
    for number, data in files.queue_entries(queue, queue.first, queue.end):
        if not any(data):
            continue
        for at, (log_offset, size, tags_code) in enumerate(QUEUE_ENTRY.iter_unpack(data)):
            if log_offset or size or tags_code:
                yield QueueRow(
                    queue.topic, queue.queue_id, number + at, log_offset, size, tags_code
                )
