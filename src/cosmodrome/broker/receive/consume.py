"""Pulls: which records a consumer gets, and when it has to wait for them.

A pull is served from plain state in one turn of the loop: checks in upstream's order, the
commit it may carry, one read of the store. When the read says "nothing yet" and the client
allows it, the pull is parked in that same turn and runs once more when it is woken, then
without committing and without being parked again.

A slave may lack what its master has. A pull that lies outside of the slave's queue keeps its offset
and is parked too: answered at once, it would come back at once, again and again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple

from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.receive.filters import Filters, OnlineGroup, PullFilter
from cosmodrome.broker.receive.offset_moves import OffsetMoves
from cosmodrome.broker.receive.waiters import LOOK_COST_PER_TURN as COMPARISONS_PER_LOOK
from cosmodrome.broker.receive.waiters import Waiters
from cosmodrome.errors import Code, Refused
from cosmodrome.layout import PULL_COMMIT, PULL_SUBSCRIPTION, PULL_SUSPEND
from cosmodrome.store.store import Batch, ReadStatus
from cosmodrome.wire.bodies import (
    MASTER_ID,
    PERM_READ,
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from cosmodrome.wire.commands.consume import (
    LitePullMessage,
    PullMessage,
    PullReply,
    PullRequest,
)
from cosmodrome.wire.names import RETRY_PREFIX
from cosmodrome.wire.table import Call

LIGHT_PREFIX = "%LMQ%"
COMPARISONS_PER_READ = 800  # of an expression with messages, about 1 ms; the next pull goes on
NEVER = (1 << 63) - 1  # an offset that no queue reaches

_CODES = {
    ReadStatus.FOUND: Code.SUCCESS,
    ReadStatus.NO_MATCHED_MESSAGE: Code.PULL_RETRY_IMMEDIATELY,
    ReadStatus.MESSAGE_WAS_REMOVING: Code.PULL_RETRY_IMMEDIATELY,
    ReadStatus.OFFSET_FOUND_NULL: Code.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_ONE: Code.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_BADLY: Code.PULL_OFFSET_MOVED,
    ReadStatus.OFFSET_TOO_SMALL: Code.PULL_OFFSET_MOVED,
}
# Outside of the queue; only a slave asks for another try then.
_OUTSIDE = frozenset(
    status.name
    for status in ReadStatus
    if _CODES.get(status, Code.PULL_OFFSET_MOVED) == Code.PULL_OFFSET_MOVED
)


class Verdict(NamedTuple):
    """What holds for every pull that differs in its offsets only, for as long as all of this is
    what the tables have. `online` and `subscription` are those of heartbeats, where they decide."""

    group: SubscriptionGroupConfig
    topic: TopicConfig
    online: OnlineGroup | None
    subscription: SubscriptionData | None
    codes: frozenset[int] | None  # of the tags that are chosen, None for all


class _Parked:
    """A pull that waits and its filter, which may need the records to decide.

    `offset` moves over messages that arrived and were not chosen, so that neither the next
    arrival nor the answer looks at them again.
    """

    __slots__ = ("ask", "offset", "pull_filter")

    def __init__(self, ask: PullRequest, pull_filter: PullFilter) -> None:
        self.ask = ask
        self.pull_filter = pull_filter
        self.offset = ask.queue_offset


class Consume:
    """Serves pulls. The totals count answers that brought messages and those that did not."""

    def __init__(
        self,
        base: Foundation,
        members: Members,
        filters: Filters,
        waiters: Waiters[PullReply],
        moves: OffsetMoves,
    ) -> None:
        self._options = base.options
        self._role = base.role
        self._store = base.store
        self._topics = members.topics
        self._groups = members.groups
        self._filters = filters
        self.online = filters.online
        self._offsets = members.offsets
        self.waiters = waiters
        self.stats = base.stats
        self._moves = moves
        self.missed_total = 0
        self.failures_total = 0

    @PullMessage.handler
    def pull(self, ask: PullMessage, call: Call) -> PullReply | Awaitable[PullReply]:
        return self._serve(ask, call)

    @LitePullMessage.handler
    def lite_pull(self, ask: LitePullMessage, call: Call) -> PullReply | Awaitable[PullReply]:
        return self._serve(ask, call)

    def _serve(self, ask: PullRequest, call: Call) -> PullReply | Awaitable[PullReply]:
        group, pull_filter = self._checked(ask, call)
        reply = self._read(ask, group, pull_filter, ask.queue_offset)
        if ask.sys_flag & PULL_COMMIT and self._role.takes_sends:
            self._offsets.commit(ask.consumer_group, ask.topic, ask.queue_id, ask.commit_offset)
        if not ask.sys_flag & PULL_SUSPEND or not _finds_nothing_yet(reply):
            return reply
        if reply.next_begin_offset != ask.queue_offset:
            return reply  # a hole in the queue: there is something to pull behind it already
        wait_ms = self._hold_ms(ask.suspend_timeout_millis)
        wakes_at = ask.queue_offset
        if ask.queue_offset < reply.min_offset:
            # A slave never gets what is older than its log, so what arrives is of no use.
            wait_ms = min(wait_ms, self._options.short_polling_time_mills)
            wakes_at = NEVER
        parked = _Parked(ask, pull_filter)
        held = self.waiters.hold(
            key=(ask.topic, ask.queue_id),
            offset=wakes_at,
            matches=pull_filter.code,
            timeout_ms=wait_ms,
            connection=call.connection,
            rerun=lambda: self._rerun(parked),
            skip=None if pull_filter.record is None else lambda offset: self._skip(parked, offset),
            look_cost=pull_filter.comparisons,
        )
        return reply if held is None else held

    def verdict(self, ask: PullRequest) -> Verdict | None:
        """What decides about such pulls apart from the read; None unless it is tags only."""
        topic = self._topics.get(ask.topic)
        if topic is None or ask.topic.startswith((RETRY_PREFIX, LIGHT_PREFIX)):
            return None
        if ask.consumer_group not in self._groups.table:
            return None  # it is made where it is known who asks
        try:
            group = self._checked_group(ask)
            pull_filter = self._filters.of(ask, group)
        except Refused:
            return None
        codes = pull_filter.code
        if pull_filter.record is not None or not (codes is None or isinstance(codes, frozenset)):
            return None
        if ask.sys_flag & PULL_SUBSCRIPTION:
            return Verdict(group, topic, None, None, codes)
        online = self._filters.online(ask.consumer_group)
        if online is None:
            return None
        return Verdict(group, topic, online, online.subscriptions[ask.topic], codes)

    @property
    def found_total(self) -> int:
        """Pulls of either lane that found messages."""
        return self.stats.get_counts.pulls_total

    @property
    def messages_total(self) -> int:
        return self.stats.get_counts.messages_total

    def count_missed(self) -> None:
        """A pull of either lane found nothing."""
        self.missed_total += 1

    def rerun(self, ask: PullRequest) -> PullReply:
        """What a pull that was parked is answered: it neither commits nor waits again."""
        group, pull_filter = self._checked(ask)
        return self._read(ask, group, pull_filter, ask.queue_offset)

    def _hold_ms(self, wait_ms: int) -> int:
        if self._options.long_polling_enable:
            return wait_ms
        return self._options.short_polling_time_mills

    def _skip(self, parked: _Parked, offset: int) -> int | None:
        """Where the unwanted messages from `offset` on end; None when there is an answer."""
        ask, pull_filter = parked.ask, parked.pull_filter
        batch = self._store.read(
            ask.topic,
            ask.queue_id,
            offset,
            1,
            matches=pull_filter.code,
            matches_record=pull_filter.record,
            records_max=pull_filter.records_max(COMPARISONS_PER_LOOK),
        )
        if batch.status is not ReadStatus.NO_MATCHED_MESSAGE:
            return None
        parked.offset = batch.next_offset
        return batch.next_offset

    def _rerun(self, parked: _Parked) -> PullReply:
        ask = parked.ask
        group, pull_filter = self._checked(ask)
        if parked.offset == ask.queue_offset or not pull_filter.same_records(parked.pull_filter):
            return self._read(ask, group, pull_filter, ask.queue_offset)
        reply = self._read(ask, group, pull_filter, parked.offset)
        if reply.code == Code.PULL_NOT_FOUND:
            # Compat: there were messages, none of them chosen; say so as one read would have.
            reply.code = Code.PULL_RETRY_IMMEDIATELY
            reply.remark = ReadStatus.NO_MATCHED_MESSAGE.name
        return reply

    # --- reading -----------------------------------------------------------------------------

    def _read(
        self, ask: PullRequest, group: SubscriptionGroupConfig, pull_filter: PullFilter, offset: int
    ) -> PullReply:
        began = asyncio.get_running_loop().time()
        batch = self._store.read(
            ask.topic,
            ask.queue_id,
            offset,
            max(ask.max_msg_nums, 1),
            matches=pull_filter.code,
            matches_record=pull_filter.record,
            records_max=pull_filter.records_max(COMPARISONS_PER_READ),
        )
        return self._answer(ask, group, offset, batch, began)

    def _answer(
        self,
        ask: PullRequest,
        group: SubscriptionGroupConfig,
        offset: int,
        batch: Batch,
        began: float,
    ) -> PullReply:
        if batch.status is ReadStatus.FOUND:
            took_ms = (asyncio.get_running_loop().time() - began) * 1000
            size = len(batch.data)
            self.stats.got(
                group=ask.consumer_group,
                topic=ask.topic,
                queue_id=ask.queue_id,
                count=batch.count,
                size=size,
                took_ms=took_ms,
                next_offset=batch.next_offset,
            )
        else:
            self.count_missed()
        reply = PullReply(
            code=_code(batch.status, offset),
            remark=batch.status.name,
            suggest_which_broker_id=self._suggested_broker(batch, group),
            next_begin_offset=batch.next_offset,
            min_offset=batch.min_offset,
            max_offset=batch.max_offset,
            body=batch.data,
        )
        if reply.code == Code.PULL_OFFSET_MOVED:
            self._moved(ask, group, offset, reply)
        return reply

    def _moved(
        self, ask: PullRequest, group: SubscriptionGroupConfig, offset: int, reply: PullReply
    ) -> None:
        if self._moves.corrects:
            group_name, topic, queue_id = ask.consumer_group, ask.topic, ask.queue_id
            self._moves.tell(group_name, topic, queue_id, offset, reply.next_begin_offset)
            return
        # Compat: a slave may lack what its master has, so the consumer keeps its offset.
        reply.code = Code.PULL_RETRY_IMMEDIATELY
        reply.suggest_which_broker_id = group.broker_id
        reply.next_begin_offset = offset

    def _suggested_broker(self, batch: Batch, group: SubscriptionGroupConfig) -> int:
        if not self._options.slave_read_enable:
            return MASTER_ID
        return group.which_broker_when_consume_slowly if batch.behind else group.broker_id

    # --- checks ------------------------------------------------------------------------------

    def _checked(
        self, ask: PullRequest, call: Call | None = None
    ) -> tuple[SubscriptionGroupConfig, PullFilter]:
        try:
            group = self._checked_group(ask, call)
            return group, self._filters.of(ask, group)
        except Refused:
            self.failures_total += 1
            raise

    def _checked_group(self, ask: PullRequest, call: Call | None = None) -> SubscriptionGroupConfig:
        """Broker, group, topic and queue, in this order; the group's configuration."""
        if not self._options.broker_permission & PERM_READ:
            raise Refused(
                Code.NO_PERMISSION,
                f"Broker {self._options.broker_name} is not readable (brokerPermission"
                f" {self._options.broker_permission}).",
            )
        group = self._groups.existing(ask.consumer_group, call)
        if not group.consume_enable:
            raise Refused(
                Code.NO_PERMISSION,
                f"Consumer group {ask.consumer_group} may not consume; its consumeEnable is off.",
            )
        topic = self._topics.get(ask.topic)
        if topic is None:
            raise Refused(
                Code.TOPIC_NOT_EXIST,
                f"Topic {ask.topic[:255]!r} does not exist on this broker; create it or refresh the"
                " route.",
            )
        if not topic.perm & PERM_READ:
            raise Refused(
                Code.NO_PERMISSION, f"Topic {ask.topic} is not readable (perm {topic.perm})."
            )
        if not 0 <= ask.queue_id < topic.read_queue_nums:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Queue {ask.queue_id} does not exist: {ask.topic} has {topic.read_queue_nums}"
                " queues to read, counted from 0; refresh the route of the topic.",
            )
        return group


def _finds_nothing_yet(reply: PullReply) -> bool:
    if reply.code == Code.PULL_NOT_FOUND:
        return True
    return reply.code == Code.PULL_RETRY_IMMEDIATELY and reply.remark in _OUTSIDE


def _code(status: ReadStatus, requested: int) -> Code:
    known = _CODES.get(status)
    if known is not None:
        return known
    # An empty queue is fine for who starts at its beginning; everybody else is sent there.
    return Code.PULL_NOT_FOUND if requested == 0 else Code.PULL_OFFSET_MOVED
