"""Changing a store from outside: build derived data again, or make a damaged store open.

Theory of operation: nothing here knows how to build queues or index; it brings the files into
a state from which an ordinary start does. That state is a log of whole files, the marker
`abort`, and a checkpoint that vouches for nothing derived: such a start walks the whole log.
Marker and checkpoint come first, so being killed at any later moment does no harm.

A repair copies everything it is about to change, synced, before it changes anything. It gives
up messages only at an offset that the operator names.
"""

from __future__ import annotations

import dataclasses
import functools
import os.path
import time
from collections import Counter
from collections.abc import Callable

from cosmodrome.env.base import Disk, Env
from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import StoreCorrupt, StoreError
from cosmodrome.findings import Finding
from cosmodrome.layout import INDEX_HEADER, QUEUE_ENTRY, QUEUE_FILLER_SIZE
from cosmodrome.store.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from cosmodrome.store.commit_log.cut import Cut, plan_cut
from cosmodrome.store.commit_log.segment import segment_path
from cosmodrome.store.offline.check import (
    Progress,
    ReadJson,
    check_log_files,
    checkpoint_fault,
    odd_only_file,
    read_table,
)
from cosmodrome.store.offline.files import PIECE_BYTES, LogWalk, StoreFiles
from cosmodrome.store.offline.findings import Findings, problem
from cosmodrome.store.store import Store
from cosmodrome.wire.message import INNER_MULTI_DISPATCH
from cosmodrome.wire.record import decode_record

CHECKPOINT_NAME = "checkpoint"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One change: what happens to which file, and why."""

    file: str
    what: str
    why: str
    act: Callable[[Copies], None]


@dataclasses.dataclass(slots=True)
class Plan:
    steps: list[Step] = dataclasses.field(default_factory=list)
    undecided: list[Finding] = dataclasses.field(default_factory=list)
    lost: Counter[str] = dataclasses.field(default_factory=Counter)  # messages by topic
    lost_unread: int = 0  # messages that queues know of, but the log no longer has
    end: int = 0  # where the log will end

    @property
    def reopens(self) -> bool:
        """Whether a store has to be opened afterwards to build derived data again."""
        return any(step.file == CHECKPOINT_NAME for step in self.steps)

    @property
    def blocked(self) -> bool:
        """Someone has to decide about the log first: opening it now would lose messages."""
        return any(finding.code == "log" for finding in self.undecided)


class Copies:
    """The directory that receives a file's content before the file is changed."""

    def __init__(self, files: StoreFiles, now_ms: int) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_ms // 1000))
        self.root = files.path(f"repair-{stamp}")
        again = 1
        while files.disk.exists(self.root):
            again += 1
            self.root = files.path(f"repair-{stamp}-{again}")
        self._files = files

    def keep(self, path: str) -> str:
        """Copy a file, unless it was copied before; the copy's path."""
        name = self._files.name(path)
        if os.path.isabs(name):
            name = os.path.join("commitlog", os.path.basename(name))
        target = os.path.join(self.root, name)
        if not self._files.disk.exists(target):
            _copy(self._files.disk, path, target, self._files.disk.size(path))
        return target


# --- rebuilding --------------------------------------------------------------------------------
def prove_log(files: StoreFiles, progress: Progress = lambda done, total: None) -> int:
    """Number of messages; StoreCorrupt when anything readable lies behind a damaged place."""
    findings = Findings()
    check_log_files(files, findings)
    if findings.problems:
        first = findings.problems[0]
        raise StoreCorrupt(f"{first.subject} {first.sentence}; {first.remedy}")
    walk, count = LogWalk(files, files.log_min), 0
    total = len(files.log_bases) * files.log_file_bytes
    for entries in walk:
        count += len(entries)
        for entry in entries:
            _refuse_copies(files, entry[0], entry[1])
        progress(walk.end - files.log_min, total)
    if any(files.salvage(walk.end)):
        raise StoreCorrupt(
            f"no good record at log offset {walk.end}, but good ones behind it: a rebuild would"
            " lose them. Run `cosmo store check`, then `cosmo store repair`"
        )
    progress(total, total)
    return count


def _refuse_copies(files: StoreFiles, log_offset: int, size: int) -> None:
    """A start builds one queue entry per message; queues that hold copies would be lost."""
    base = files.log_base(log_offset)
    data = bytes(files.log_view(base)[log_offset - base : log_offset - base + size])
    marker = INNER_MULTI_DISPATCH
    if marker.encode() in data and marker in decode_record(data).pairs():
        raise StoreError(
            f"the message at log offset {log_offset} is in further queues ({marker}), which only a"
            " Java broker builds: remove consumequeue and index yourself and start that one"
        )


def derived_paths(files: StoreFiles, *, index: bool) -> list[str]:
    """Every file that a rebuild removes."""
    paths = [
        segment_path(queue.directory, base) for queue in files.queues() for base in queue.bases
    ]
    if index:
        paths += [file.path for file in files.index_files()]
    return paths


def drop_derived(files: StoreFiles, *, index: bool) -> None:
    """Remove queues and index so that the next start builds them. Needs the lock."""
    _distrust(files)
    queues = list(files.queues())
    for path in derived_paths(files, index=index):
        files.disk.remove(path)
    for queue in queues:
        for directory in (queue.directory, os.path.dirname(queue.directory)):
            if files.disk.is_dir(directory) and not files.disk.list(directory):
                files.disk.remove(directory)


def store_options(files: StoreFiles, *, index: bool, delay_levels: str = "") -> StoreOptions:
    """Settings with which a store opens these files."""
    slots, entries = files.index_geometry()
    return StoreOptions(
        message_delay_level=delay_levels or StoreOptions().message_delay_level,
        store_path_root_dir=files.root,
        store_path_commit_log=files.hints.log_directory,
        mapped_file_size_commit_log=files.log_file_bytes,
        mapped_file_size_consume_queue=files.queue_file_bytes(),
        max_hash_slot_num=slots,
        max_index_num=entries,
        message_index_enable=index,
        disk_space_warning_level_ratio=100,
    )


async def open_once(options: StoreOptions, env: Env) -> None:
    """Start a store, which recovers, and stop it in order."""
    store = Store(options, env)
    await store.start()
    await store.stop()


# --- repairing ---------------------------------------------------------------------------------
def plan_repair(files: StoreFiles, read_json: ReadJson, cut_at: int | None = None) -> Plan:
    """What a repair would do; changes nothing."""
    plan = Plan()
    walk = LogWalk(files, files.log_min)
    boundary = cut_at is None or cut_at == files.log_min
    last_ms = 0
    for entries in walk:
        for entry in entries:
            # Also behind a record, where the rest of a file may be blank.
            boundary = boundary or cut_at in (entry[0], entry[0] + entry[1])
            if cut_at is None or entry[0] < cut_at:
                last_ms = entry[6]
            else:
                plan.lost[entry[2]] += 1
    if not boundary and cut_at != walk.end:
        raise StoreError(
            f"--cut-at {cut_at}: no record begins there in the good part of the log, which"
            f" reaches from {files.log_min} to {walk.end}; `cosmo store dump` shows where records"
            " begin"
        )
    plan.end = walk.end if cut_at is None else cut_at
    _plan_log(files, plan, walk, cut_at)
    log_changes = bool(plan.steps)
    _plan_derived(files, plan)
    fault = checkpoint_fault(files, last_ms, clean=files.stopped_cleanly)
    if plan.steps or fault is not None:
        why = "queues and index are built again from the log" if fault is None else fault[1]
        log_too = log_changes or fault is not None
        plan.steps.insert(0, _distrust_step(files, why, log_too=log_too))
        plan.lost_unread = max(0, _queue_entries_behind(files, plan.end) - plan.lost.total())
    _plan_config(files, plan, read_json)
    return plan


def run_plan(files: StoreFiles, plan: Plan, now_ms: int) -> str:
    """Carry out a plan under the lock; the directory that has the copies. Blocking."""
    if plan.blocked:
        raise StoreError(f"nothing was changed: {plan.undecided[0].remedy}")
    copies = Copies(files, now_ms)
    for step in plan.steps:
        step.act(copies)
    return copies.root


def _plan_log(files: StoreFiles, plan: Plan, walk: LogWalk, cut_at: int | None) -> None:
    odd = odd_only_file(files)
    if odd is not None:
        plan.undecided.append(odd)
        return
    behind: Counter[str] = Counter()
    for entries in files.salvage(walk.end):
        behind.update(entry[2] for entry in entries)
    if cut_at is None and behind:
        plan.undecided.append(
            problem(
                "log",
                files.name(files.log_path(files.log_base(walk.end))),
                f"no good record at log offset {walk.end}; {behind.total()} good messages lie"
                " behind it",
                "restore the file from a replica; or save them with `cosmo store export` and give"
                f" them up with --cut-at {walk.end}",
                walk.end - files.log_base(walk.end),
            )
        )
        return
    plan.lost.update(behind)
    run = set(files.log_run)
    for base in files.log_bases:
        if base not in run and (cut_at is None or base < cut_at):
            _plan_stray(files, plan, base, cut_at)
        elif cut_at is None or base < cut_at or base == files.log_min:
            _plan_log_file(files, plan, base)
    if cut_at is not None:
        directory = os.path.dirname(files.log_path(files.log_min))
        _plan_cut(files, plan, plan_cut(files.disk, directory, files.log_file_bytes, cut_at))


def _plan_stray(files: StoreFiles, plan: Plan, base: int, cut_at: int | None) -> None:
    """A file whose name does not continue the log: never touched unless that was asked for."""
    path = files.log_path(base)
    if cut_at is not None:
        plan.steps.append(
            Step(files.name(path), "move away", "it does not continue the log", _mover(files, path))
        )
    else:
        plan.undecided.append(
            problem(
                "log",
                files.name(path),
                f"does not continue the log of {files.log_file_bytes}-byte files",
                "check --mapped-file-size-commit-log; restore what is missing in front of it, or"
                f" give it up with --cut-at {plan.end}",
            )
        )


def _plan_log_file(files: StoreFiles, plan: Plan, base: int) -> None:
    """Give a file the length that it should have."""
    path, length, size = files.log_path(base), files.log_sizes[base], files.log_file_bytes
    name = files.name(path)
    if length != size and base >= plan.end:
        why = f"it has {length} bytes instead of {size} and no good record"
        plan.steps.append(Step(name, "move away", why, _mover(files, path)))
        return
    if length == size:
        return
    plan.steps.append(
        Step(
            name,
            f"make it {size} bytes long",
            f"it has {length}; its good records are kept",
            functools.partial(_remake, files, path),
        )
    )
    if base <= plan.end < base + size:
        _plan_cut(files, plan, Cut(os.path.dirname(path), plan.end, [], base))


def _plan_cut(files: StoreFiles, plan: Plan, cut: Cut) -> None:
    what = f"end it at {cut.offset}"
    if cut.removed:
        what += f", move {len(cut.removed)} files away"
    if cut.zeroed is not None:
        name = os.path.basename(files.log_path(cut.zeroed))
        what += f", zero {name} from position {cut.offset - cut.zeroed} on"

    def act(copies: Copies) -> None:
        cut.run(files.disk, copies.keep)

    plan.steps.append(Step(files.name(cut.directory), what, "what lies behind is given up", act))


def _plan_derived(files: StoreFiles, plan: Plan) -> None:
    for queue in files.queues():
        for base, size in zip(queue.bases[queue.good :], queue.sizes[queue.good :], strict=True):
            path = segment_path(queue.directory, base)
            plan.steps.append(
                Step(
                    files.name(path),
                    "move away",
                    f"{size} bytes, does not fit its neighbours; the queue is built again",
                    _mover(files, path),
                )
            )
    for file in files.index_files():
        if file.size < INDEX_HEADER.size or (file.count > 1 and not file.slots):
            plan.steps.append(
                Step(
                    files.name(file.path),
                    "move away",
                    f"{file.size} bytes, makes no sense; the index is built again",
                    _mover(files, file.path),
                )
            )


def _plan_config(files: StoreFiles, plan: Plan, read_json: ReadJson) -> None:
    names = files.disk.list(files.path("config"))
    for name in names:  # first, because restoring a table uses such a name itself
        path = files.path("config", name)
        if name.endswith((".json.tmp", ".json.old")):
            why = "left from an unfinished save"
            plan.steps.append(Step(files.name(path), "move away", why, _mover(files, path)))
    for name in names:
        path = files.path("config", name)
        shown = files.name(path)
        if not name.endswith(".json"):
            continue
        document, why = read_table(files, path, read_json)
        if document is not None:
            continue
        previous, why_previous = read_table(files, path + ".bak", read_json)
        if previous is None:
            plan.undecided.append(
                problem(
                    "config",
                    shown,
                    f"cannot be read ({why}) and neither can its .bak ({why_previous})",
                    "restore it from a copy, or move both away to start with an empty table",
                )
            )
        else:
            plan.steps.append(
                Step(
                    shown,
                    "restore the previous generation, .bak",
                    f"cannot be read: {why}",
                    functools.partial(_restore, files, path),
                )
            )


# --- changes -----------------------------------------------------------------------------------
def _distrust_step(files: StoreFiles, why: str, *, log_too: bool) -> Step:
    def act(copies: Copies) -> None:
        path = files.path("checkpoint")
        if files.disk.exists(path):
            copies.keep(path)
        _distrust(files, log_too=log_too)

    what = "reset, and mark the store as not stopped in order (abort)"
    return Step(CHECKPOINT_NAME, what, why, act)


def _distrust(files: StoreFiles, *, log_too: bool = False) -> None:
    """From here on a start walks the whole log and builds everything derived again.

    What the checkpoint says of the log stays unless the log itself changes: it keeps a start
    from cutting off synced files behind a damaged place.
    """
    disk = files.disk
    if not disk.exists(files.path("abort")):
        disk.create_segment(files.path("abort"), 0).close()
    path = files.path("checkpoint")
    log_ms = 0 if log_too else load_checkpoint(disk, path).log_ms
    save_checkpoint(disk, path, Checkpoint(log_ms, 0, 0))


def _mover(files: StoreFiles, path: str) -> Callable[[Copies], None]:
    def act(copies: Copies) -> None:
        copies.keep(path)
        files.disk.remove(path)

    return act


def _remake(files: StoreFiles, path: str, copies: Copies) -> None:
    copy = copies.keep(path)
    files.disk.remove(path)
    _copy(files.disk, copy, path, files.log_file_bytes)


def _restore(files: StoreFiles, path: str, copies: Copies) -> None:
    copies.keep(path)
    files.disk.replace(path, files.disk.read(path + ".bak"), keep=False)


def _copy(disk: Disk, source: str, target: str, size: int) -> None:
    """A file of `size` bytes with as much of the source as fits; holes stay holes."""
    old, new = disk.open_segment(source, read_only=True), disk.create_segment(target, size)
    try:
        for start in range(0, min(old.size, size), PIECE_BYTES):
            piece = bytes(old.view[start : min(start + PIECE_BYTES, size)])
            if any(piece):
                new.write(piece, start)
        new.sync()
    finally:
        old.close()
        new.close()


def _queue_entries_behind(files: StoreFiles, log_end: int) -> int:
    """How many messages at or behind this offset the queues know of."""
    count = 0
    for queue in files.queues():
        for _, data in files.queue_entries(queue, queue.first, queue.end):
            if any(data):
                count += sum(
                    1
                    for log_offset, size, _ in QUEUE_ENTRY.iter_unpack(data)
                    if 0 < size < QUEUE_FILLER_SIZE and log_offset >= log_end
                )
    return count
