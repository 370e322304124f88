"""Where a slave joins the log of its master, or why it cannot. Pure decisions.

Logs are joined only where they fit byte for byte. A slave that is ahead, behind the first file or
different is refused by name, with both offsets and the remedy. Whether a slave with a longer log is
ahead or different only the slave can tell, because it has both: its own log, and with the refusal
the fingerprints of the master's (`told_apart`).
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from cosmodrome.replication.frames import VERSION, Refusal, Who
from cosmodrome.replication.values import Node

MARKED_FILES = 8  # the last ones of a log, at whose ends a slave can compare it with its own
NEW_COPY = (
    "stop the slave, run `cosmo store set-aside DIR` on its store directory and start it: it makes"
    " a new copy"
)
PROMOTE = (
    "if producers may have got SEND_OK for what only the slave has (the master does not use"
    " SYNC_FLUSH, or is an older copy), promote the slave; otherwise"
)


class Log(Protocol):
    """What is asked of the store."""

    @property
    def log_start(self) -> int: ...
    @property
    def log_end(self) -> int: ...
    def fingerprint(self, end: int) -> tuple[int, int]: ...


def join(who: Who, node: Node, log: Log, file_bytes: int) -> int | Refusal:
    """The offset at which the stream to this slave begins, or why there is none."""
    refusal = _strange(who, node, file_bytes)
    if refusal is not None:
        return refusal
    first, end = log.log_start, log.log_end
    if who.first == who.end:
        return first if who.from_first else last_file(first, end, file_bytes)
    if who.end < first:
        return _behind(who.end, first)
    found = _longer(who.end, end) if who.end > end else _compared(who, log)
    if isinstance(found, Refusal):
        return msgspec.structs.replace(found, marks=_marks(log, file_bytes))
    return found


def join_classic(report: int, log: Log, file_bytes: int) -> int | Refusal:
    """The same for a slave that says nothing but the end of its log."""
    first, end = log.log_start, log.log_end
    if report < 0:
        return Refusal(
            why=f"the first report is {report}, which is no offset",
            remedy="check who connects to this port: it is for slaves of this broker",
        )
    if report == 0:
        return last_file(first, end, file_bytes)
    return misfit(report, first, end) or report


def misfit(slave_end: int, first: int, end: int) -> Refusal | None:
    """Why a log that ends at `slave_end` cannot go on with a master's from `first` to `end`."""
    if slave_end > end:
        return _ahead(slave_end, end, "only ends were compared")
    return _behind(slave_end, first) if slave_end < first else None


def told_apart(refusal: Refusal, log: Log) -> Refusal:
    """What a master said to the slave with this log, with what the slave sees by itself."""
    if not refusal.marks:
        return refusal
    master_end = refusal.marks[0][0]
    common = next((mark[0] for mark in refusal.marks if _is_same(log, *mark)), None)
    if common == master_end:
        return _ahead(log.log_end, master_end, "up to there they are the same")
    return _different(log.log_end, master_end, common)


def _marks(log: Log, file_bytes: int) -> tuple[tuple[int, int, int], ...]:
    end = log.log_end
    ends_of_files = range((end - 1) // file_bytes * file_bytes, log.log_start, -file_bytes)
    places = (end, *ends_of_files[:MARKED_FILES])
    return tuple((place, *log.fingerprint(place)) for place in places)


def _is_same(log: Log, place: int, start: int, checksum: int) -> bool:
    if not log.log_start < place <= log.log_end:
        return False
    try:
        return log.fingerprint(place) == (start, checksum)
    except ValueError:
        return False


def last_file(first: int, end: int, file_bytes: int) -> int:
    """Compat: upstream begins there with a slave that has nothing."""
    return max(first, end - end % file_bytes)


def _strange(who: Who, node: Node, file_bytes: int) -> Refusal | None:
    """A slave that has no place here, whatever its log is."""
    if who.version != VERSION:
        return Refusal(
            why=f"the slave speaks version {who.version} of the stream, the master {VERSION}",
            remedy="run the same version of Cosmodrome on both",
        )
    if who.broker != node.broker:
        return Refusal(
            why=f"the slave belongs to broker {who.broker!r}, this is the master of"
            f" {node.broker!r}",
            remedy="check brokerName and haMasterAddress of the slave",
        )
    if who.id <= 0:
        return Refusal(
            why=f"the slave has brokerId {who.id}, which is that of a master",
            remedy="give the slave a brokerId of 1 or more",
        )
    if who.id == node.id:
        return Refusal(
            why=f"the slave has brokerId {who.id}, as this broker has, or follows itself",
            remedy="check haMasterAddress of the slave, and give each slave a brokerId of its own",
        )
    if who.file_bytes != file_bytes:
        return Refusal(
            why=f"the files of the slave's log have {who.file_bytes} bytes, the master's"
            f" {file_bytes}",
            remedy=f"set mappedFileSizeCommitLog of the slave to the master's and {NEW_COPY}",
        )
    if not 0 <= who.first <= who.end:
        return Refusal(
            why=f"the slave says that its log begins at {who.first} and ends at {who.end}",
            remedy="check the slave with `cosmo store check`",
        )
    return None


def _compared(who: Who, log: Log) -> int | Refusal:
    """The same last bytes in both logs: it goes on behind them."""
    if who.end == log.log_start:
        return who.end  # at the edge of a file; nothing is left to compare
    try:
        start, checksum = log.fingerprint(who.end)
    except ValueError:
        start, checksum = -1, -1
    if who.fingerprint is None or who.fingerprint != (start, checksum):
        return Refusal(
            why=f"the logs differ before offset {who.end}: the slave ends there"
            f" (log {who.first} to {who.end}, checksum {_shown(who.fingerprint)}), the master goes"
            f" on to {log.log_end} (checksum {_shown((start, checksum))})",
            remedy="the slave looks for a place up to which both are the same; see what it says in"
            " its log or in `cosmo cluster status`",
        )
    return who.end


def _shown(fingerprint: tuple[int, int] | None) -> str:
    if fingerprint is None or fingerprint[0] < 0:
        return "unknown"
    return f"{fingerprint[1]:08x} from {fingerprint[0]}"


def _longer(slave_end: int, master_end: int) -> Refusal:
    return Refusal(
        why=f"the slave is ahead or differs: its log ends at {slave_end}, the master's at"
        f" {master_end}",
        remedy="the slave compares both; see what it says in its log or in `cosmo cluster status`",
    )


def _ahead(slave_end: int, master_end: int, compared: str) -> Refusal:
    return Refusal(
        why=f"the slave is ahead: its log ends at {slave_end}, the master's at {master_end};"
        f" {compared}",
        remedy=f"{PROMOTE} {_cut(master_end)}, or {NEW_COPY}",
    )


def _different(slave_end: int, master_end: int, common: int | None) -> Refusal:
    until, next_step = "no place was found up to which they are the same", NEW_COPY
    if common is not None:
        until = f"up to {common} they are the same"
        next_step = f"{_cut(common)} (what comes then is copied again), or {NEW_COPY}"
    return Refusal(
        why=f"the logs differ: the slave's ends at {slave_end}, the master's at {master_end};"
        f" {until}",
        remedy=f"{PROMOTE} {next_step}",
    )


def _cut(place: int) -> str:
    return f"stop the slave and run `cosmo store repair DIR --cut-at {place}`"


def _behind(slave_end: int, master_first: int) -> Refusal:
    return Refusal(
        why=f"the slave is behind the master's first file: its log ends at {slave_end}, the"
        f" master's begins at {master_first}",
        remedy=NEW_COPY,
    )
