"""The whole check of a store: log, queues, index, checkpoint, config files.

One walk over the log with checksums feeds both derived checks, so memory does not grow with
the number of messages. A difference is a problem, unless the store was not stopped in order
(its marker `abort` is there, as it is while a broker runs) and the difference lies where the
next start builds anew from the log; then it is a note. The rule is recovery's own: everything
from the newest log file on whose first record is older than what the checkpoint vouches for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from cosmodrome import speed
from cosmodrome.errors import CosmodromeError
from cosmodrome.findings import Finding
from cosmodrome.layout import CHECKPOINT
from cosmodrome.store.checkpoint import Checkpoint, load_checkpoint
from cosmodrome.store.delays import DelayLevels
from cosmodrome.store.offline.files import LOG_FILE_MULTIPLE, LogWalk, StoreFiles
from cosmodrome.store.offline.findings import (
    FINDINGS_MAX,
    RUN_REPAIR,
    START_CURES,
    UNFINISHED,
    Findings,
    note,
    problem,
)
from cosmodrome.store.offline.index import IndexCheck
from cosmodrome.store.offline.queues import QueueCheck

ReadJson = Callable[[bytes], Any]
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclasses.dataclass(slots=True)
class Report:
    """What a check saw; `findings` says what is wrong."""

    root: str
    read_only: bool
    clean_stop: bool
    findings: Findings
    log_files: int = 0
    log_file_bytes: int = 0
    min_offset: int = 0
    max_offset: int = 0
    messages: int = 0
    first_ms: int = 0
    last_ms: int = 0
    topics: int = 0
    queues: int = 0
    queue_files: int = 0
    queue_entries: int = 0
    index_files: int = 0
    index_slots: int = 0
    index_entries_max: int = 0
    index_entries: int = 0
    checkpoint: Checkpoint = dataclasses.field(default_factory=Checkpoint)

    @property
    def ok(self) -> bool:
        return self.findings.problem_count == 0


def check(
    files: StoreFiles,
    *,
    read_json: ReadJson,
    delays: DelayLevels,
    index: bool = True,
    read_only: bool = False,
    limit: int = FINDINGS_MAX,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Look at everything; blocking, and as long as the log is."""
    findings = Findings(limit)
    clean = files.stopped_cleanly
    report = Report(files.root, read_only, clean, findings)
    report.log_files, report.log_file_bytes = len(files.log_bases), files.log_file_bytes
    report.min_offset = report.max_offset = files.log_min
    report.checkpoint = load_checkpoint(files.disk, files.path("checkpoint"))
    check_log_files(files, findings)
    topics = check_config(files, read_json, findings)
    queue_check = QueueCheck(
        files,
        limit,
        delays,
        cured_from=None if clean else recovery_start(files, report.checkpoint),
        topics=topics,
    )
    cured_ms = None if clean else min(report.checkpoint.log_ms, report.checkpoint.index_ms)
    index_check = IndexCheck(files, limit, cured_ms=cured_ms) if index else None
    walk = LogWalk(files, files.log_min)
    total = len(files.log_bases) * files.log_file_bytes
    for entries in walk:
        for entry in entries:
            queue_check.take(entry)
            if index_check is not None:
                index_check.take(entry)
        report.messages += len(entries)
        report.first_ms = report.first_ms or entries[0][6]
        report.last_ms = entries[-1][6]
        progress(walk.end - files.log_min, total)
    report.max_offset = walk.end
    damaged = _check_log_end(files, walk, findings, clean=clean)
    findings.take(queue_check.finish(walk.end, damaged=damaged))
    report.topics, report.queues = queue_check.topic_count, len(queue_check)
    report.queue_files, report.queue_entries = queue_check.file_count, queue_check.entry_count
    if index_check is not None:
        findings.take(index_check.finish(walk.end, damaged=damaged))
        report.index_files, report.index_entries = len(index_check.files), index_check.entry_count
        for file in index_check.files:
            if file.slots:
                report.index_slots, report.index_entries_max = file.slots, file.entries_max
    if not damaged:  # else the last record is not known
        _check_checkpoint(files, report)
    progress(total, total)
    return report


def recovery_start(files: StoreFiles, checkpoint: Checkpoint) -> int:
    """Where the walk of an abnormal start begins."""
    for base in reversed(files.log_run):
        first_ms = files.first_record_ms(base)
        if first_ms and first_ms <= checkpoint.safe_ms:
            return base
    return files.log_min


# --- parts that a repair looks at too ----------------------------------------------------------
def check_log_files(files: StoreFiles, findings: Findings) -> None:
    """Lengths and names of the log's files."""
    size = files.log_file_bytes
    expected: int | None = None
    for base in files.log_bases:
        path = files.log_path(base)
        if base % size or (expected is not None and base != expected):
            findings.add(
                problem(
                    "log",
                    files.name(path),
                    f"does not continue the log: files of {size} bytes begin at multiples of that"
                    " and leave no gap",
                    "restore the missing file from a replica or a copy; to give up everything"
                    " behind the gap, run `cosmo store repair --cut-at OFFSET` with its offset"
                    f" {expected if expected is not None else files.log_min}",
                )
            )
            break
        if (
            files.log_sizes[base] != size
            and base == files.log_bases[-1] != files.log_bases[0]
            and (files.holds_nothing(path))
        ):
            findings.add(
                note(
                    "log",
                    files.name(path),
                    "was being made when the broker ended: too short, all zero",
                    UNFINISHED,
                    files.log_sizes[base],
                )
            )
        elif files.log_sizes[base] != size:
            findings.add(
                problem(
                    "log",
                    files.name(path),
                    f"has {files.log_sizes[base]} bytes instead of {size}; brokers refuse to start",
                    RUN_REPAIR,
                    files.log_sizes[base],
                )
            )
        expected = base + size
    odd = odd_only_file(files)
    if odd is not None:
        findings.add(odd)


def odd_only_file(files: StoreFiles) -> Finding | None:
    """A log of one file says its own size, so that a short one looks whole; unless it is odd."""
    size = files.log_file_bytes
    if len(files.log_bases) != 1 or files.hints.log_file_bytes or not size % LOG_FILE_MULTIPLE:
        return None
    return problem(
        "log",
        files.name(files.log_path(files.log_bases[0])),
        f"the only log file has {size} bytes, which nobody configures: it was cut",
        "run `cosmo store repair --mapped-file-size-commit-log N` with the broker's"
        " mappedFileSizeCommitLog (1073741824 unless it was changed)",
        size,
    )


def check_config(files: StoreFiles, read_json: ReadJson, findings: Findings) -> set[str] | None:
    """Read every table; the configured topics, None when that table is not there."""
    topics: set[str] | None = None
    names = files.disk.list(files.path("config"))
    for name in names:
        path = files.path("config", name)
        if name.endswith((".json.tmp", ".json.old")):
            findings.add(
                note(
                    "config",
                    files.name(path),
                    "is left from a save that did not end",
                    "nothing; `cosmo store repair` removes it",
                )
            )
        if not name.endswith((".json", ".json.bak")):
            continue
        document, why = read_table(files, path, read_json)
        if document is None and name.endswith(".bak"):
            findings.add(
                note(
                    "config",
                    files.name(path),
                    f"the previous generation cannot be read: {why}",
                    "nothing; the next save replaces it",
                )
            )
        elif document is None:
            unreadable = f"cannot be read as JSON: {why}"
            findings.add(problem("config", files.name(path), unreadable, RUN_REPAIR))
        elif name == "topics.json" and isinstance(document.get("topicConfigTable"), dict):
            topics = set(document["topicConfigTable"])
    return topics


def read_table(
    files: StoreFiles, path: str, read_json: ReadJson
) -> tuple[dict[str, Any] | None, str]:
    """A config file as a document, or why it is none."""
    try:
        data = files.disk.read(path)
        if not data.strip(b"\0 \t\r\n"):
            return None, "it is empty"
        document = read_json(data)
    except (OSError, ValueError, CosmodromeError) as error:
        return None, str(error)
    if not isinstance(document, dict):
        return None, "it does not hold a JSON object"
    return document, ""


def checkpoint_fault(files: StoreFiles, last_ms: int, *, clean: bool) -> tuple[int, str] | None:
    """Position and text of what is wrong with the checkpoint, if the last record is `last_ms`."""
    path = files.path("checkpoint")
    if not files.disk.exists(path):
        return None
    data = files.disk.read(path)
    if len(data) < CHECKPOINT.size:
        return len(data), f"has {len(data)} bytes; three times need {CHECKPOINT.size}"
    for at, (what, time_ms) in enumerate(
        zip(("log", "queues", "index"), CHECKPOINT.unpack_from(data), strict=True)
    ):
        # After a crash only the log's time counts: recovery takes the smallest one.
        if time_ms < 0 or (time_ms > last_ms and (clean or what == "log")):
            return (
                at * 8,
                f"vouches for the {what} up to {time_ms}, the last record is of {last_ms}",
            )
    return None


# --- inside ------------------------------------------------------------------------------------
def _check_log_end(files: StoreFiles, walk: LogWalk, findings: Findings, *, clean: bool) -> bool:
    """Judge the place where the walk ended; True when records lie behind it."""
    if walk.why == speed.WALK_MORE and (not files.log_bases or walk.end > files.log_bases[-1]):
        return False
    behind = sum(len(entries) for entries in files.salvage(walk.end))
    base = files.log_base(walk.end)
    file, position = files.name(files.log_path(base)), walk.end - base
    if behind:
        findings.add(
            problem(
                "log",
                file,
                f"no good record at log offset {walk.end}, although {behind} good ones lie behind"
                " it",
                "restore the file from a replica; or save what lies behind with `cosmo store"
                " export`, then give it up with `cosmo store repair --cut-at"
                f" {walk.end}`",
                position,
            )
        )
        return True
    if walk.why == speed.WALK_CORRUPT:
        findings.add(
            problem(
                "log",
                file,
                f"the last record, at log offset {walk.end}, is torn or damaged",
                f"restore it from a replica; a start, or `cosmo store repair --cut-at {walk.end}`,"
                " gives it up",
                position,
            ),
            cured=not clean,
        )
    return False


def _check_checkpoint(files: StoreFiles, report: Report) -> None:
    path = files.path("checkpoint")
    name = files.name(path)
    if not files.disk.exists(path):
        if report.messages:
            missing = "is missing; a crash means a longer start"
            report.findings.add(note("checkpoint", name, missing, START_CURES))
        return
    fault = checkpoint_fault(files, report.last_ms, clean=report.clean_stop)
    if fault is None:
        return
    position, text = fault
    # While a broker runs it may vouch for records that came behind the end of this walk.
    live = report.read_only and not report.clean_stop
    report.findings.add(problem("checkpoint", name, text, RUN_REPAIR, position), cured=live)
