"""What the store tools print: messages, entries and reports as plain rows and as text.

Names are those of RocketMQ's own message objects. A body is text when its plain form is UTF-8,
base64 otherwise; `bodyEncoding` says which.
"""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Iterable, Iterator
from typing import Any

from cosmodrome.cli.support.output import text_or_base64
from cosmodrome.errors import ProtocolError
from cosmodrome.findings import Finding
from cosmodrome.store.offline.directory import IndexEntry, Plan, QueueRow, Report
from cosmodrome.wire.message import KEYS, TAGS, UNIQ_KEY, decompress, host_text
from cosmodrome.wire.record import Record

PLAIN_BODY_BYTES_MAX = 64 * 1024 * 1024

CSV_COLUMNS = (
    "commitLogOffset",
    "topic",
    "queueId",
    "queueOffset",
    "storeTimestamp",
    "bornTimestamp",
    "msgId",
    "offsetMsgId",
    "tags",
    "keys",
    "bornHost",
    "storeHost",
    "flag",
    "sysFlag",
    "reconsumeTimes",
    "preparedTransactionOffset",
    "storeSize",
    "bodySize",
    "bodyEncoding",
    "body",
    "properties",
)


def message_row(record: Record, *, body: bool = True) -> dict[str, Any]:
    properties = record.pairs()
    row: dict[str, Any] = {
        "commitLogOffset": record.log_offset,
        "storeSize": record.size,
        "topic": record.topic,
        "queueId": record.queue_id,
        "queueOffset": record.queue_offset,
        "storeTimestamp": record.store_ms,
        "bornTimestamp": record.born_ms,
        "storeHost": host_text(record.store_host),
        "bornHost": host_text(record.born_host),
        "flag": record.flag,
        "sysFlag": record.sys_flag,
        "reconsumeTimes": record.reconsume_times,
        "preparedTransactionOffset": record.prepared_offset,
        "msgId": properties.get(UNIQ_KEY),
        "offsetMsgId": record.message_id,
        "tags": properties.get(TAGS),
        "keys": properties.get(KEYS, "").split(),
        "properties": properties,
        "bodySize": len(record.body),
    }
    if body:
        row["bodyEncoding"], row["body"] = _body(record)
    return row


def queue_row(row: QueueRow) -> dict[str, Any]:
    return {
        "topic": row.topic,
        "queueId": row.queue_id,
        "queueOffset": row.queue_offset,
        "commitLogOffset": row.log_offset,
        "size": row.size,
        "tagsCode": row.tags_code,
        "filler": row.is_filler,
    }


def index_row(entry: IndexEntry, file: str) -> dict[str, Any]:
    return {
        "file": file,
        "number": entry.number,
        "keyHash": entry.hashed,
        "slot": entry.hashed % entry.file.slots,
        "commitLogOffset": entry.log_offset,
        "timestamp": entry.file.begin_ms + entry.seconds * 1000,
        "previous": entry.previous,
    }


def json_line(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n"


def csv_lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A head line, then one row per message; properties are one JSON object."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        flat = row | {
            "keys": " ".join(row["keys"]),
            "properties": json.dumps(row["properties"], ensure_ascii=False),
        }
        writer.writerow([flat.get(column) for column in CSV_COLUMNS])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
    yield buffer.getvalue()


# --- reports -----------------------------------------------------------------------------------
def report_document(report: Report) -> dict[str, Any]:
    findings = report.findings
    return {
        "root": report.root,
        "ok": report.ok,
        "readOnly": report.read_only,
        "cleanStop": report.clean_stop,
        "log": {
            "files": report.log_files,
            "fileBytes": report.log_file_bytes,
            "minOffset": report.min_offset,
            "maxOffset": report.max_offset,
            "messages": report.messages,
            "firstStoreTimestamp": report.first_ms,
            "lastStoreTimestamp": report.last_ms,
        },
        "queues": {
            "topics": report.topics,
            "queues": report.queues,
            "files": report.queue_files,
            "entries": report.queue_entries,
        },
        "index": {
            "files": report.index_files,
            "slots": report.index_slots,
            "entriesMax": report.index_entries_max,
            "entries": report.index_entries,
        },
        "checkpoint": {
            "log": report.checkpoint.log_ms,
            "queues": report.checkpoint.queue_ms,
            "index": report.checkpoint.index_ms,
        },
        "problemCount": findings.problem_count,
        "problems": [_finding(finding) for finding in findings.problems],
        "noteCount": findings.note_count,
        "notes": [_finding(finding) for finding in findings.notes],
    }


def report_text(report: Report) -> str:
    findings = report.findings
    if report.clean_stop:
        state = "stopped in order"
    elif report.read_only:
        state = "a broker runs here or was killed; read without the lock, newest data may differ"
    else:
        state = "not stopped in order (there is a file abort); the next start recovers"
    problems, notes = findings.problem_count, findings.note_count
    verdict = _counted(problems, "problem") if problems else "no problems" if notes else "clean"
    lines = [
        ("store", report.root),
        ("state", state),
        (
            "log",
            f"{_counted(report.messages, 'message')} from offset {report.min_offset} to"
            f" {report.max_offset}, {_counted(report.log_files, 'file')} of"
            f" {report.log_file_bytes} bytes",
        ),
        (
            "queues",
            f"{report.queue_entries} entries due in {_counted(report.queues, 'queue')} of"
            f" {_counted(report.topics, 'topic')}, {_counted(report.queue_files, 'file')}",
        ),
        (
            "index",
            f"{report.index_entries} entries in {_counted(report.index_files, 'file')}"
            + (
                f" of {report.index_slots} slots and {report.index_entries_max} entries"
                if report.index_slots
                else ""
            ),
        ),
        ("result", verdict + (f", {_counted(notes, 'note')}" if notes else "")),
    ]
    text = "".join(f"{name:<8} {value}\n" for name, value in lines)
    text += _findings_text("PROBLEM", findings.problems, problems)
    return text + _findings_text("NOTE", findings.notes, notes)


def plan_text(plan: Plan) -> str:
    text = ""
    if plan.steps:
        width = max(len(step.file) for step in plan.steps)
        text += f"{'FILE':<{width}}  CHANGE\n"
        for step in plan.steps:
            text += f"{step.file:<{width}}  {step.what}: {step.why}\n"
    lost = plan.lost.total()
    if lost or plan.lost_unread:
        text += f"the log will end at offset {plan.end}; given up:\n"
        for topic, count in sorted(plan.lost.items()):
            text += f"  {_counted(count, 'message')} of topic {topic}\n"
        if plan.lost_unread:
            text += (
                f"  {_counted(plan.lost_unread, 'message')} that queues know of but the log no"
                " longer has\n"
            )
    return text + _findings_text("UNDECIDED", plan.undecided, len(plan.undecided))


def plan_document(plan: Plan) -> dict[str, Any]:
    return {
        "steps": [{"file": step.file, "what": step.what, "why": step.why} for step in plan.steps],
        "endOffset": plan.end,
        "lost": dict(sorted(plan.lost.items())),
        "lostUnread": plan.lost_unread,
        "undecided": [_finding(finding) for finding in plan.undecided],
    }


def _findings_text(word: str, findings: list[Finding], count: int) -> str:
    if not findings:
        return ""
    width = max(len(finding.subject) for finding in findings)
    text = f"\n{'FILE':<{width}}  {'POSITION':>10}  {word}\n"
    for finding in findings:
        position = finding.evidence["position"]
        at = "" if position is None else str(position)
        text += f"{finding.subject:<{width}}  {at:>10}  {finding.sentence}\n"
        text += f"{'':<{width}}  {'next':>10}  {finding.remedy}\n"
    if count > len(findings):
        text += f"… and {count - len(findings)} more; raise --limit to see them\n"
    return text


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.code,
        "file": finding.subject,
        "position": finding.evidence["position"],
        "what": finding.sentence,
        "next": finding.remedy,
    }


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _body(record: Record) -> tuple[str, str | None]:
    try:
        plain = decompress(record.body, record.sys_flag, PLAIN_BODY_BYTES_MAX)
    except ProtocolError:
        # Not what its flags say: the stored bytes are all there is to show.
        return "base64-stored", base64.b64encode(record.body).decode()
    text, encoded = text_or_base64(plain)
    return ("text", text) if encoded is None else ("base64", encoded)
