"""Where a slave joins the log of its master, or why it cannot. Pure decisions.

Logs are joined only where they fit byte for byte. A slave that is ahead, behind the first file or
different is refused by name, with both offsets and the remedy.
"""

from __future__ import annotations

from typing import Protocol

from cosmodrome.replication.frames import VERSION, Refusal, Who
from cosmodrome.replication.values import Node

NEW_COPY = "empty the slave's store directory, so that it makes a new copy"


class MasterLog(Protocol):
    """What is asked of the store."""

    @property
    def log_start(self) -> int: ...
    @property
    def log_end(self) -> int: ...
    def fingerprint(self, end: int) -> tuple[int, int]: ...


def join(who: Who, node: Node, log: MasterLog, file_bytes: int) -> int | Refusal:
    """The offset at which the stream to this slave begins, or why there is none."""
    refusal = _strange(who, node, file_bytes)
    if refusal is not None:
        return refusal
    first, end = log.log_start, log.log_end
    if who.first == who.end:
        return first if who.from_first else last_file(first, end, file_bytes)
    return misfit(who.end, first, end) or _compared(who, log)


def join_classic(report: int, log: MasterLog, file_bytes: int) -> int | Refusal:
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
        return _ahead(slave_end, end)
    return _behind(slave_end, first) if slave_end < first else None


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


def _compared(who: Who, log: MasterLog) -> int | Refusal:
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
            remedy=f"the logs were written by two masters: {NEW_COPY}",
        )
    return who.end


def _shown(fingerprint: tuple[int, int] | None) -> str:
    if fingerprint is None or fingerprint[0] < 0:
        return "unknown"
    return f"{fingerprint[1]:08x} from {fingerprint[0]}"


def _ahead(slave_end: int, master_end: int) -> Refusal:
    return Refusal(
        why=f"the slave is ahead: its log ends at {slave_end}, the master's at {master_end}",
        remedy=f"stop the slave and run `cosmo store repair --cut-at {master_end}` on its store"
        f" directory, or {NEW_COPY}",
    )


def _behind(slave_end: int, master_first: int) -> Refusal:
    return Refusal(
        why=f"the slave is behind the master's first file: its log ends at {slave_end}, the"
        f" master's begins at {master_first}",
        remedy=NEW_COPY,
    )
