"""The offline source: commit log files of any RocketMQ store as batches, without a broker.

`plan_splits` cuts the files into byte ranges, `read_split` reads one of them in a task; together
they give every record exactly once, whatever the size of the ranges. The log is read as it is:
messages of topics that were deleted since are there too, those that expired are gone with their
files. A broker may run on the directory; nothing here writes or locks.

The option `mode` decides what damage becomes: a row that says where and why (permissive), a log
line (dropMalformed), or an error (failFast). `segments` finds it.
"""

from __future__ import annotations

import logging
import os.path
import re
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc

from cosmodrome.env.base import Disk
from cosmodrome.env.real import RealDisk
from cosmodrome.errors import ConfigError, StoreCorrupt, StoreError
from cosmodrome.spark.read.options import DROP_MALFORMED, FAIL_FAST, ReadOptions
from cosmodrome.spark.read.rows import arrow_schema, batch, corrupt_batch
from cosmodrome.spark.read.segments import Damage, Split, SplitWalk
from cosmodrome.spark.runtime.memory import freeze_worker, keep_freed_memory
from cosmodrome.speed.arrow import ColumnBuilder
from cosmodrome.store.offline.directory import data_end, segment_offsets, segment_path
from cosmodrome.wire.names import DLQ_PREFIX, RETRY_PREFIX, is_system_topic

__all__ = ["Split", "plan_splits", "read_split"]

SPLITS_MAX = 1_000_000
DAMAGE_ROWS_MAX = 1024  # kept before they become a batch
DAMAGE_LINES_MAX = 20  # logged per split
TIME_MIN_MS, TIME_MAX_MS = -(1 << 63), (1 << 63) - 1

log = logging.getLogger("cosmodrome.spark.read.splits")

# Which queues of a topic are read: all, none, or these.
_Choice = Callable[[str], bool | frozenset[int]]


def plan_splits(options: ReadOptions, disk: Disk | None = None) -> list[Split]:
    """The ranges that cover everything written so far, in log order."""
    disk = disk or RealDisk()
    assert options.store_path is not None
    root = os.path.abspath(options.store_path)
    try:
        return _planned(disk, _log_directory(disk, root), options.split_bytes)
    except OSError as error:
        raise _unreadable(error, root) from None


def read_split(
    split: Split, options: ReadOptions, disk: Disk | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of one split that the options select."""
    keep_freed_memory()
    freeze_worker()
    chosen = _RowFilter(options)
    builder = chosen.builder()
    faults = _DamageReport(options)
    try:
        for damage in SplitWalk(split, disk or RealDisk(), builder):
            if damage is None:
                yield from chosen.taken(builder)
            else:
                yield from faults.met(damage, split.base + damage.position)
    except OSError as error:
        raise _unreadable(error, split.path) from None
    yield from chosen.taken(builder)
    yield from faults.rest()


# --- planning ----------------------------------------------------------------------------------
def _log_directory(disk: Disk, root: str) -> str:
    inside = os.path.join(root, "commitlog")
    if disk.is_dir(inside):
        return inside
    if segment_offsets(disk, root):
        return root
    if not disk.is_dir(root):
        raise StoreError(f"storePath {root} is not a directory here; give the root of a store")
    raise StoreError(
        f"storePath {root} is not a store: it has no commitlog and no log files; give the directory"
        " that storePathRootDir or storePathCommitLog names"
    )


def _planned(disk: Disk, directory: str, split_bytes: int) -> list[Split]:
    bases = segment_offsets(disk, directory)
    paths = [segment_path(directory, base) for base in bases]
    sizes = [disk.size(path) for path in paths]
    written = [data_end(disk, path) for path in paths]
    while written and not written[-1]:  # made ahead, never used
        written.pop()
    if sum(max(1, -(-size // split_bytes)) for size in written) > SPLITS_MAX:
        raise ConfigError(
            f"splitBytes={split_bytes} cuts {directory} into more than {SPLITS_MAX} parts; raise it"
        )
    splits: list[Split] = []
    for number, written_bytes in enumerate(written):
        base, size, lost_until = bases[number], sizes[number], 0
        if number + 1 < len(written):
            next_base = bases[number + 1]
            size = min(size, next_base - base)
            lost_until = next_base if base + size < next_base else 0
        end = max(min(written_bytes, size), 1)  # a file before others is looked at in any case
        starts = range(0, end, split_bytes)
        splits += [
            Split(
                path=paths[number],
                base=base,
                file_bytes=size,
                start=start,
                end=min(start + split_bytes, end),
                lost_until=lost_until if start == starts[-1] else 0,
            )
            for start in starts
        ]
    return splits


def _unreadable(error: OSError, path: str) -> StoreError:
    name = error.filename or path
    if isinstance(error, FileNotFoundError):
        return StoreError(
            f"{name} is not there: a broker removed it because it expired, or this machine does not"
            " see the directory; run it again, or read a copy or snapshot of the store"
        )
    if isinstance(error, PermissionError):
        return StoreError(f"{name} may not be read: run as the broker's user, or read a copy")
    return StoreError(f"{name}: {error.strerror or error}")


# --- which rows --------------------------------------------------------------------------------
class _RowFilter:
    """Which rows are kept. The builder leaves out what it can; the rest is left out here."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._topics: frozenset[str] | None = frozenset(options.topics) or None
        self._queue_ids: frozenset[int] | None = None
        self._choice: _Choice | None = None
        if options.assign:
            self._assigned(options)
        elif options.pattern is not None:
            self._choice = _matches(options.pattern, options)
        elif not options.topics and not options.include_system:
            self._choice = _is_ordinary
        extra: tuple[str, ...] = ()
        if self._choice is not None:
            extra = ("topic", "queue_id") if options.assign else ("topic",)
        self._columns = (*options.columns, *(n for n in extra if n not in options.columns))
        self._asked = arrow_schema(options.columns, options.corrupt).names
        self._choices: dict[str, bool | frozenset[int]] = {}

    def _assigned(self, options: ReadOptions) -> None:
        queues: dict[str, set[int]] = {}
        for queue in options.assign:
            if options.broker_name in (None, queue.broker_name):
                queues.setdefault(queue.topic, set()).add(queue.queue_id)
        chosen = {topic: frozenset(ids) for topic, ids in queues.items()}
        self._topics = frozenset(chosen)
        self._queue_ids = frozenset().union(*chosen.values())
        if any(ids != self._queue_ids for ids in chosen.values()):
            self._choice = chosen.__getitem__

    def builder(self) -> ColumnBuilder:
        options = self._options
        return ColumnBuilder(
            self._columns,
            broker=options.broker_name,
            check_crc=options.check_crc,
            topics=self._topics,
            queue_ids=self._queue_ids,
            tags=frozenset(options.tags) or None,
            since_ms=TIME_MIN_MS if options.starting_ms is None else options.starting_ms,
            until_ms=TIME_MAX_MS if options.ending_ms is None else options.ending_ms,
            skip_unseen=not options.include_system,
        )

    def taken(self, builder: ColumnBuilder) -> Iterator[pa.RecordBatch]:
        if not builder.rows:
            return
        rows, buffers, _ = builder.take()
        found = batch(rows, buffers, self._columns, corrupt=self._options.corrupt)
        if self._choice is not None:
            mask = self._mask(found, self._choice)
            if mask is not None:
                found = found.filter(mask)
            if len(self._columns) > len(self._options.columns):
                found = found.select(self._asked)
        if found.num_rows:
            yield found

    def _mask(self, found: pa.RecordBatch, choice: _Choice) -> pa.Array | None:
        """Which rows to keep; None for all of them."""
        topics = found.column("topic")
        names = pc.unique(topics).to_pylist()
        for name in names:
            if name not in self._choices:
                self._choices[name] = choice(name)
        choices = {name: self._choices[name] for name in names}
        if all(queues is True for queues in choices.values()):
            return None
        whole = [name for name, queues in choices.items() if queues is True]
        mask = pc.is_in(topics, pa.array(whole, pa.string()))
        for name, queues in choices.items():
            if isinstance(queues, frozenset):
                ids = pa.array(sorted(queues), pa.int32())
                of_queues = pc.is_in(found.column("queue_id"), ids)
                mask = pc.or_(mask, pc.and_(pc.equal(topics, name), of_queues))
        return mask


def _is_ordinary(topic: str) -> bool:
    return not is_system_topic(topic)


def _matches(pattern: str, options: ReadOptions) -> _Choice:
    fullmatch = re.compile(pattern).fullmatch

    def matches(topic: str) -> bool:
        if not options.include_retry and topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            return False
        return (options.include_system or _is_ordinary(topic)) and fullmatch(topic) is not None

    return matches


# --- damage ------------------------------------------------------------------------------------
class _DamageReport:
    """What damage becomes, by the option `mode`."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._count = 0
        self._reasons: list[str] = []
        self._offsets: list[int] = []

    def met(self, damage: Damage, log_offset: int) -> Iterator[pa.RecordBatch]:
        mode = self._options.mode
        if mode == FAIL_FAST:
            raise StoreCorrupt(
                f"{damage}. Read on with mode=permissive or dropMalformed; `cosmo store check`"
                " looks at the whole store"
            )
        self._count += 1
        silent = mode != DROP_MALFORMED and self._options.corrupt  # the rows say it
        if not silent and self._count <= DAMAGE_LINES_MAX:
            log.warning("damaged place skipped: %s", damage)
        if mode == DROP_MALFORMED:
            return
        self._reasons.append(str(damage))
        self._offsets.append(log_offset)
        if len(self._reasons) >= DAMAGE_ROWS_MAX:
            yield self._rows()

    def rest(self) -> Iterator[pa.RecordBatch]:
        if self._reasons:
            yield self._rows()
        elif self._count > DAMAGE_LINES_MAX:
            log.warning("%d damaged places skipped in all", self._count)

    def _rows(self) -> pa.RecordBatch:
        options = self._options
        rows = corrupt_batch(
            self._reasons,
            options.columns,
            {
                "commit_log_offset": self._offsets,
                "broker": [options.broker_name] * len(self._reasons),
            },
        )
        self._reasons, self._offsets = [], []
        return rows if options.corrupt else rows.select(list(options.columns))
