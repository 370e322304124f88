"""Transactional messages: the decision about a half message, and the broker's question."""

from __future__ import annotations

from cosmodrome.wire.commands.fields import Int32, Int64
from cosmodrome.wire.needs import ADMIN, PUB, stored
from cosmodrome.wire.table import ANY_BODY, BROKER, CLIENT, Command, Reply, command


@command(37, "END_TRANSACTION", served_by=BROKER, needs=stored("commit_log_offset", PUB))
class EndTransaction(Command[Reply], kw_only=True):
    """Commit (8) or roll back (12) a half message, or say that it is undecided (0)."""

    producer_group: str
    tran_state_table_offset: Int64
    commit_log_offset: Int64
    commit_or_rollback: Int32
    from_transaction_check: bool | None = None
    msg_id: str
    transaction_id: str | None = None


@command(39, "CHECK_TRANSACTION_STATE", served_by=CLIENT, body_bytes_max=ANY_BODY)
class CheckTransactionState(Command[Reply]):
    """Ask a producer how a half message ended; the body is its record."""

    tran_state_table_offset: Int64
    commit_log_offset: Int64
    msg_id: str | None = None
    transaction_id: str | None = None
    offset_msg_id: str | None = None


@command(323, "RESUME_CHECK_HALF_MESSAGE", served_by=BROKER, needs=ADMIN)
class ResumeCheckHalfMessage(Command[Reply]):
    """Ask producers again about a half message that was given up."""

    msg_id: str | None = None
