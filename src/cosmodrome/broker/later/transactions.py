"""Ends transactions as their producers decide, and revives those that were given up.

A decision is one append of up to three records, all or none: the committed message, and the op
records that close the half it came from and the newest copy of it. They lie one after the other in
the log, so a crash can leave the message without its op (the producer is asked again, the
message may come twice), but never the op without its message.
"""

from __future__ import annotations

import logging

from cosmodrome.broker.counts.transaction_counts import TransactionCounts
from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.later.deferral import Deferral
from cosmodrome.broker.later.delivery import stored_record
from cosmodrome.broker.later.halves import (
    HALF_QUEUES,
    QUEUE_ID,
    Decision,
    Decisions,
    committed,
    copied,
    destination_of,
    op,
)
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.topics import PERM_READ_WRITE
from cosmodrome.errors import Code, Refused, StoreUnwritable
from cosmodrome.layout import SYS_COMMIT, SYS_ROLLBACK
from cosmodrome.store.store import Draft
from cosmodrome.transport.audit_log import changed as audited
from cosmodrome.wire.commands.transaction import EndTransaction, ResumeCheckHalfMessage
from cosmodrome.wire.message import (
    PRODUCER_GROUP,
    TRANSACTION_CHECK_TIMES,
    format_properties,
    parse_offset_message_id,
)
from cosmodrome.wire.names import HALF_TOPIC, check_topic
from cosmodrome.wire.record import Record
from cosmodrome.wire.table import Call, Reply

log = logging.getLogger(__name__)


class Transactions:
    """The totals count ends that were stored."""

    def __init__(
        self,
        base: Foundation,
        members: Members,
        deferral: Deferral,
        decisions: Decisions,
        counts: TransactionCounts,
    ) -> None:
        self._store = base.store
        self._topics = members.topics
        self._deferral = deferral
        self._decisions = decisions
        self._clock = base.env.clock
        self._store_host = base.address.store_host
        self._role = base.role
        self._stats = base.stats
        self._counts = counts
        self.committed_total = 0
        self.rolled_back_total = 0

    @EndTransaction.handler
    async def end(self, ask: EndTransaction, call: Call) -> Reply | None:
        if not self._role.takes_sends:
            raise Refused(
                Code.SLAVE_NOT_AVAILABLE,
                "This broker is a slave and ends no transactions; ask its master.",
            )
        if ask.commit_or_rollback not in (SYS_COMMIT, SYS_ROLLBACK):
            return None  # Compat: "undecided" gets no answer, also when it is not one-way
        record = self._half(ask)
        commit = ask.commit_or_rollback == SYS_COMMIT
        known = self._decisions.find(record.queue_offset)
        if known is not None:
            await self._repeat(known, ask, commit=commit)
        else:
            await self._decide(record, commit=commit)
        return Reply()

    @ResumeCheckHalfMessage.handler
    async def resume(self, ask: ResumeCheckHalfMessage, call: Call) -> Reply:
        """Compat: any message is taken; one that is no half is dropped when it is looked at."""
        _, log_offset = parse_offset_message_id(ask.msg_id or "")
        record = self._record(log_offset)
        if record is None:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"There is no message at log offset {log_offset}; it has been removed, or the"
                " id belongs to another broker.",
            )
        pairs = record.pairs() | {TRANSACTION_CHECK_TIMES: "0"}
        self._topics.ensure(HALF_TOPIC, HALF_QUEUES, PERM_READ_WRITE)
        await self._store.durable(self._store.append(copied(record, pairs)).end)
        audited(call, "transaction_check_resumed", message=ask.msg_id)
        return Reply()

    # --- deciding ----------------------------------------------------------------------------

    async def _decide(self, record: Record, *, commit: bool) -> None:
        # No await until the decision is noted: a second word about this half must find this one.
        half_offset = record.queue_offset
        host = self._store_host()
        now_ms = self._clock.now_ms()
        drafts = [self._message(record)] if commit else []
        closed = {half_offset, self._decisions.newest(half_offset)}
        drafts += [op(offset, host, now_ms) for offset in sorted(closed)]
        stored = self._store.append_batch(drafts)
        durable = self._store.durable(stored[-1].end)
        decision = self._decisions.begin(half_offset, commit=commit)
        failed = True
        try:
            await durable
            failed = False
        finally:
            self._decisions.end(decision, failed=failed)
        if commit:
            message = stored[0]
            self._stats.put(drafts[0].topic, message.queue_id, 1, message.size)
        self.committed_total += commit
        self.rolled_back_total += not commit
        destination = destination_of(record.pairs())
        if destination is not None:
            took_ms = now_ms - record.store_ms
            self._counts.add(destination.topic, commit=commit, took_ms=took_ms)

    async def _repeat(self, known: Decision, ask: EndTransaction, *, commit: bool) -> None:
        """The producer repeats itself: it is answered when its first decision is safe."""
        await known.finished.wait()
        if known.failed:
            raise StoreUnwritable(
                "The end of this transaction could not be stored; it will be asked for again."
            )
        if known.commit is not commit:
            was = "committed" if known.commit else "rolled back"
            log.warning(
                "transaction_ended_twice group=%s message=%s was=%s",
                ask.producer_group,
                ask.msg_id,
                was,
            )
            raise Refused(
                Code.SYSTEM_ERROR,
                f"This transaction was already {was}; the first decision stands.",
            )

    def _message(self, record: Record) -> Draft:
        pairs = record.pairs()
        destination = destination_of(pairs)
        if destination is None:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The half message at log offset {record.log_offset} does not say which topic and"
                " queue it is for; it cannot be committed.",
            )
        check_topic(destination.topic)
        draft = committed(record, destination)
        self._deferral.redirect(draft, pairs)
        if draft.topic != destination.topic:
            draft.properties = format_properties(pairs)
        return draft

    # --- finding -----------------------------------------------------------------------------

    def _half(self, ask: EndTransaction) -> Record:
        record = self._record(ask.commit_log_offset)
        why = None
        if record is None or record.topic != HALF_TOPIC:
            why = f"there is no half message at log offset {ask.commit_log_offset}"
        elif record.pairs().get(PRODUCER_GROUP) != ask.producer_group:
            why = f"it belongs to another producer group than {ask.producer_group[:255]}"
        elif record.queue_offset != ask.tran_state_table_offset:
            why = f"tranStateTableOffset {ask.tran_state_table_offset} is not its queue offset"
        elif not self._is_queued(record):
            why = f"no half message begins at log offset {ask.commit_log_offset}"
        if record is None or why is not None:
            log.warning(
                "transaction_end_refused group=%s message=%s reason=%r",
                ask.producer_group,
                ask.msg_id,
                why,
            )
            raise Refused(
                Code.SYSTEM_ERROR,
                f"The transaction cannot be ended: {why}. Its producer will be asked again.",
            )
        return record

    def _is_queued(self, half: Record) -> bool:
        """Whether the queue of halves has it: the body of any message can look like a half."""
        entries = self._store.entries(HALF_TOPIC, QUEUE_ID, half.queue_offset, 1)
        return bool(entries) and entries[0][0] == half.log_offset

    def _record(self, log_offset: int) -> Record | None:
        if log_offset < 0:
            return None
        return stored_record(self._store, log_offset, None, "half_unreadable")
