"""Asks producers about transactions that have not ended, and gives up after many times.

Every `transactionCheckInterval` the halves between the saved offset and the end of their queue are
looked through in order. A half that no op record names and that is old enough is appended again,
with its counter raised, and a live producer of its group is asked about the copy. The question
carries the message, so only who may publish to its topic is asked. The look ends at the first half
that is not old enough. A half with a time of its own is the exception: it moves to the end without
a question, because others behind it may be due. So the saved offset can pass every open
transaction, and those that are open lie near the end of the queue.

Two offsets in `consumerOffset.json` (group `CID_RMQ_SYS_TRANS`) hold the progress: every half below
the first is decided, copied or given up, and every op below the second names such halves only. They
move when the log is synced beyond what they promise. After a crash the broker asks again; nothing
is forgotten.
"""

from __future__ import annotations

import array
import asyncio
import dataclasses
import enum
import logging
from collections.abc import Sequence

from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.later.delivery import stored_record
from cosmodrome.broker.later.delivery_progress import STOP_POLLS_MAX, SYNC_POLL_SECONDS
from cosmodrome.broker.later.halves import (
    QUEUE_ID,
    TRANSACTION_GROUP,
    Decision,
    Decisions,
    copied,
    decided_by,
    destination_of,
)
from cosmodrome.broker.members.clients import Member
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.topics import PERM_READ_WRITE
from cosmodrome.errors import MessageTooLarge, StoreUnwritable
from cosmodrome.store.store import Draft, Store, Stored
from cosmodrome.wire.commands.transaction import CheckTransactionState
from cosmodrome.wire.message import (
    CHECK_IMMUNITY_SECONDS,
    PRODUCER_GROUP,
    REAL_TOPIC,
    TRANSACTION_CHECK_TIMES,
    TRANSACTION_PREPARED_QUEUE_OFFSET,
    UNIQ_KEY,
    offset_message_id,
)
from cosmodrome.wire.names import CHECK_MAX_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from cosmodrome.wire.needs import PUB, Topic
from cosmodrome.wire.record import Record, encode_record

log = logging.getLogger(__name__)

CHECK_MAX_QUEUES = 1
# Halves looked at with one reading of the op queue; one byte each.
WINDOW_MAX = 1 << 22
OPS_PER_TURN = 256
EARLY_MAX = 1 << 20
# One batch is one turn of the loop, so it bounds how long other requests wait for it.
BATCH_COUNT = 256
BATCH_BYTES = 4 << 20
PRODUCERS_TRIED_MAX = 3


class Verdict(enum.Enum):
    DONE = "done"  # nothing to do
    LATER = "later"  # too young: the look ends here
    KEEP = "keep"  # too young by a time of its own: copied, not asked about
    ASK = "ask"
    GIVE_UP = "give up"


@dataclasses.dataclass(slots=True)
class Step:
    """One half that moves: a copy of it, or what goes to the topic of those given up."""

    half_offset: int
    record: Record
    pairs: dict[str, str]
    verdict: Verdict
    stored: Stored | None = None

    def draft(self) -> Draft:
        topic = CHECK_MAX_TOPIC if self.verdict is Verdict.GIVE_UP else HALF_TOPIC
        return copied(self.record, self.pairs, topic)


class Ops:
    """What the op queue from `begin` on says about the halves of [first, end)."""

    def __init__(self, store: Store, begin: int, first: int, end: int) -> None:
        self._store = store
        self._begin = begin
        self._next = begin
        self._first = first
        self._end = end
        self._decided = bytearray(end - first)
        self._early: set[int] = set()  # named halves below `first`: copies may refer to them
        # Per op the largest half it names, up to the first op that names one beyond the window.
        self._reach = array.array("q")

    def read(self) -> bool:
        """Take in some more; false at the end of the queue."""
        entries = self._store.entries(OP_HALF_TOPIC, QUEUE_ID, self._next, OPS_PER_TURN)
        for log_offset, size, _ in entries:
            record = _read(self._store, log_offset, size)
            named = [] if record is None else decided_by(record)
            for half_offset in named:
                self._take(half_offset)
            if not self._reach or self._reach[-1] < self._end:
                self._reach.append(max(named, default=-1))
        self._next += len(entries)
        return bool(entries)

    def names(self, half_offset: int) -> bool:
        if self._first <= half_offset < self._end:
            return self._decided[half_offset - self._first] != 0
        return half_offset in self._early

    def next_open(self, half_offset: int) -> int:
        """The first half from there on that no op names, or the end."""
        found = self._decided.find(0, half_offset - self._first)
        return self._end if found < 0 else self._first + found

    def needed_from(self, half_offset: int) -> int:
        """The first op that says something about a half from `half_offset` on."""
        for at, reach in enumerate(self._reach, self._begin):
            if reach >= half_offset:
                return at
        return self._next

    def _take(self, half_offset: int) -> None:
        if half_offset < self._first:
            if len(self._early) < EARLY_MAX:
                self._early.add(half_offset)
        elif half_offset < self._end:
            self._decided[half_offset - self._first] = 1


class CheckBack:
    """The totals count questions that were sent and transactions that were given up."""

    def __init__(self, base: Foundation, members: Members, decisions: Decisions) -> None:
        self._store = base.store
        self._topics = members.topics
        self._offsets = members.offsets
        self._clients = members.clients
        self._decisions = decisions
        self._clock = base.env.clock
        self._options = base.options
        self._store_options = base.store_options
        self._role = base.role
        self._gate = base.gate
        self._turn = 0  # which producer of a group is asked next
        self._stop = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.asked_total = 0
        self.given_up_total = 0

    async def start(self) -> None:
        if self._task is None and self._role.takes_sends:
            self._stop.clear()
            self._task = asyncio.create_task(self._run(), name="check transactions")

    async def stop(self) -> None:
        """A batch under way is finished, so that nobody is asked about it a second time."""
        self._stop.set()
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait([task])

    async def _run(self) -> None:
        while not self._stop.is_set():
            try:
                async with asyncio.timeout(self._options.transaction_check_interval / 1000):
                    await self._stop.wait()
            except TimeoutError:
                pass
            try:
                while not self._stop.is_set() and await self.look():
                    pass
            except StoreUnwritable as error:
                log.warning("transactions_not_checked reason=%r", str(error))
            except Exception:
                # Whatever it is, the halves stay where they are and are looked at again.
                log.exception("transaction_check_failed")

    # --- one look ----------------------------------------------------------------------------

    async def look(self) -> bool:
        """Look through the halves once; true when a window was full and more may follow."""
        start_ms = self._clock.now_ms()
        first, most = self._saved(HALF_TOPIC)
        end = min(most, first + WINDOW_MAX)
        if first == end:
            return False
        ops = Ops(self._store, self._saved(OP_HALF_TOPIC)[0], first, end)
        at = first
        while at < end and not self._stop.is_set():
            more = ops.read()
            while more:
                await asyncio.sleep(0)
                more = ops.read()
            # In the turn in which the last op was read: nothing can be decided in between.
            before = at
            steps: list[Step] = []
            at, ended = self._judge(at, end, ops, start_ms, steps)
            refused_at = await self._carry_out(steps)
            if refused_at is not None:
                at, ended = refused_at, True
            if at != before:
                if not await self._synced():
                    return False
                self._offsets.commit(TRANSACTION_GROUP, HALF_TOPIC, QUEUE_ID, at)
                self._offsets.commit(
                    TRANSACTION_GROUP, OP_HALF_TOPIC, QUEUE_ID, ops.needed_from(at)
                )
                self._ask_all(steps)
            if isinstance(ended, Decision):
                await ended.finished.wait()
            elif ended:
                return False
            await asyncio.sleep(0)
        return at == end < most

    def _judge(
        self, at: int, end: int, ops: Ops, start_ms: int, steps: list[Step]
    ) -> tuple[int, bool | Decision]:
        """Fill `steps`. Returns the first half that is left over, and whether the look ends there.

        A decision instead of true or false is one that has to be waited for.
        """
        taken_bytes = looked = 0
        while (at := ops.next_open(at)) < end:
            decision = self._decisions.find(at)
            if decision is not None and not decision.finished.is_set():
                return at, decision
            looked += 1
            if looked > BATCH_COUNT or taken_bytes > BATCH_BYTES:
                return at, False
            entries = self._store.entries(HALF_TOPIC, QUEUE_ID, at, 1)
            if not entries:  # its file cannot be read at the moment
                return at, True
            record = _read(self._store, *entries[0][:2])
            # A decision whose op is not in its queue yet is as good as the op; a half that was
            # copied by a look which could not note it must not be copied again.
            open_still = decision is None and self._decisions.newest(at) == at
            if record is not None and open_still:
                taken_bytes += record.size
                step = self._step(at, record, ops, start_ms)
                if step.verdict is Verdict.LATER:
                    return at, True
                if step.verdict is not Verdict.DONE:
                    steps.append(step)
            at += 1
        return end, False

    def _step(self, at: int, record: Record, ops: Ops, start_ms: int) -> Step:
        pairs = record.pairs()
        verdict = self._verdict(record, pairs, ops, start_ms)
        if verdict is Verdict.ASK:
            pairs[TRANSACTION_CHECK_TIMES] = str(_number(pairs, TRANSACTION_CHECK_TIMES, 0) + 1)
        elif verdict is Verdict.KEEP:
            # Compat: the name under which the producer will end it.
            pairs.setdefault(TRANSACTION_PREPARED_QUEUE_OFFSET, str(at))
        return Step(at, record, pairs, verdict)

    def _verdict(self, record: Record, pairs: dict[str, str], ops: Ops, start_ms: int) -> Verdict:
        if not pairs.get(PRODUCER_GROUP) or destination_of(pairs) is None:
            log.error("half_without_origin log_offset=%d; dropped", record.log_offset)
            return Verdict.DONE
        if ops.names(_number(pairs, TRANSACTION_PREPARED_QUEUE_OFFSET, -1)):
            return Verdict.DONE
        age_ms = self._clock.now_ms() - record.born_ms
        times = _number(pairs, TRANSACTION_CHECK_TIMES, 0)
        age_ms_max = self._store_options.file_reserved_time * 3_600_000
        if times >= self._options.transaction_check_max or age_ms > age_ms_max:
            return Verdict.GIVE_UP
        if record.store_ms >= start_ms:
            return Verdict.LATER
        if CHECK_IMMUNITY_SECONDS in pairs:
            own_s = _number(pairs, CHECK_IMMUNITY_SECONDS, -1)
            quiet_ms = self._options.transaction_time_out if own_s < 0 else own_s * 1000
            return Verdict.KEEP if age_ms < quiet_ms else Verdict.ASK
        # Compat: a half from the future is asked about at once; its age says nothing.
        return Verdict.LATER if 0 <= age_ms < self._options.transaction_time_out else Verdict.ASK

    # --- carrying out ------------------------------------------------------------------------

    async def _carry_out(self, steps: Sequence[Step]) -> int | None:
        """Store what moves. Returns the first half that could not be stored, None when all were."""
        refused_at = None
        for step in steps:
            try:
                self._append(step)
            except StoreUnwritable as error:
                log.warning("transactions_not_checked reason=%r", str(error))
                refused_at = step.half_offset
                break
        ends = [step.stored.end for step in steps if step.stored is not None]
        if not ends:
            return refused_at
        try:
            await self._store.durable(ends[-1])
        except StoreUnwritable:
            # Other messages will get the queue offsets of the copies.
            for step in steps:
                self._decisions.unmoved(step.half_offset)
            raise
        return refused_at

    def _append(self, step: Step) -> None:
        if step.verdict is Verdict.GIVE_UP:
            self._topics.ensure(CHECK_MAX_TOPIC, CHECK_MAX_QUEUES, PERM_READ_WRITE)
        try:
            step.stored = self._store.append(step.draft())
        except MessageTooLarge as error:
            # No later attempt can go better, and those behind it must not wait for ever.
            log.error("half_dropped log_offset=%d error=%s", step.record.log_offset, error)
            return
        if step.verdict is Verdict.GIVE_UP:
            self.given_up_total += 1
            log.warning(
                "transaction_given_up group=%s message=%s topic=%s",
                step.pairs[PRODUCER_GROUP],
                step.pairs.get(UNIQ_KEY),
                CHECK_MAX_TOPIC,
            )
        else:
            self._decisions.moved(step.half_offset, step.stored.queue_offset)

    async def _synced(self) -> bool:
        """Wait until the log is synced beyond all that the offsets will promise."""
        end = self._store.facts().written_offset
        polls = 0
        while self._store.facts().flushed_offset < end:
            if self._store.why_unwritable is not None or polls > STOP_POLLS_MAX:
                return False
            polls += self._stop.is_set()
            await asyncio.sleep(SYNC_POLL_SECONDS)
        return True

    # --- asking ------------------------------------------------------------------------------

    def _ask_all(self, steps: Sequence[Step]) -> None:
        askable: dict[tuple[str, str], list[Member]] = {}  # by group and topic
        absent: set[str] = set()
        for step in steps:
            stored = step.stored
            if step.verdict is not Verdict.ASK or stored is None:
                continue
            if self._decisions.find(stored.queue_offset) is not None:
                continue  # the producer was quicker
            group, question = step.pairs[PRODUCER_GROUP], _question(step, stored)
            key = group, step.pairs[REAL_TOPIC]
            if key not in askable:
                askable[key] = self._askable(*key)
            if not self._ask(askable[key], question):
                absent.add(group)
        for group in sorted(absent):
            log.warning("transaction_without_producer group=%s; asked again later", group)

    def _askable(self, group: str, topic: str) -> list[Member]:
        """Members that may see a message of this topic: anybody can join a producer group."""
        return [
            member
            for member in self._clients.producers(group)
            if self._gate.may_get(member.host, member.access_key, Topic(topic, PUB))
        ]

    def _ask(self, members: Sequence[Member], question: CheckTransactionState) -> bool:
        for _ in range(min(len(members), PRODUCERS_TRIED_MAX)):
            self._turn += 1
            connection = members[self._turn % len(members)].connection
            if not connection.closed:
                connection.push(question)
                self.asked_total += 1
                return True
        return False

    # --- progress ----------------------------------------------------------------------------

    def _saved(self, topic: str) -> tuple[int, int]:
        """The saved offset, kept inside the queue, and the end of the queue."""
        least, most = self._store.bounds(topic, QUEUE_ID)
        saved = self._offsets.query(TRANSACTION_GROUP, topic, QUEUE_ID)
        return max(least, min(saved, most)), most


def _read(store: Store, log_offset: int, size: int) -> Record | None:
    return stored_record(store, log_offset, size, "transaction_record_unreadable")


def _question(step: Step, stored: Stored) -> CheckTransactionState:
    destination = destination_of(step.pairs)
    assert destination is not None, step
    key = step.pairs.get(UNIQ_KEY)
    record = dataclasses.replace(
        step.record,
        topic=destination.topic,
        queue_id=destination.queue_id,
        log_offset=stored.log_offset,
        queue_offset=stored.queue_offset,
        properties=step.draft().properties,
    )
    return CheckTransactionState(
        tran_state_table_offset=stored.queue_offset,
        commit_log_offset=stored.log_offset,
        msg_id=key,
        transaction_id=key,
        offset_msg_id=offset_message_id(record.store_host, stored.log_offset),
        body=encode_record(record),
    )


def _number(pairs: dict[str, str], name: str, otherwise: int) -> int:
    text = pairs.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else otherwise
