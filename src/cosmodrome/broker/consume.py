"""Pulls: which records a consumer gets, and when it has to wait for them.

A pull is served from plain state in one turn of the loop: checks in upstream's order, the
commit it may carry, one read of the store. When the read says "nothing yet" and the client
allows it, the pull is parked in that same turn and runs once more when it is woken, then
without committing and without being parked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol

from cosmodrome.broker.filters import PULL_SUBSCRIPTION, Filters, OnlineGroup, Wanted
from cosmodrome.broker.groups import Groups
from cosmodrome.broker.moves import OffsetMoves
from cosmodrome.broker.stats import Stats
from cosmodrome.broker.topics import Topics
from cosmodrome.broker.waiters import Waiters
from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import Code, Refused
from cosmodrome.store.store import Batch, ReadStatus, Store
from cosmodrome.wire.bodies import (
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

# Group, topic, queue, pulls, messages, bytes, ms, ms of the longest, next offset
Counted = tuple[str, str, int, int, int, int, float, float, int]

PULL_COMMIT = 0x1
PULL_SUSPEND = 0x2
LIGHT_PREFIX = "%LMQ%"

MASTER_ID = 0

_CODES = {
    ReadStatus.FOUND: Code.SUCCESS,
    ReadStatus.NO_MATCHED_MESSAGE: Code.PULL_RETRY_IMMEDIATELY,
    ReadStatus.MESSAGE_WAS_REMOVING: Code.PULL_RETRY_IMMEDIATELY,
    ReadStatus.OFFSET_FOUND_NULL: Code.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_ONE: Code.PULL_NOT_FOUND,
    ReadStatus.OFFSET_OVERFLOW_BADLY: Code.PULL_OFFSET_MOVED,
    ReadStatus.OFFSET_TOO_SMALL: Code.PULL_OFFSET_MOVED,
}


class Commits(Protocol):
    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None: ...


class Verdict(NamedTuple):
    """What holds for every pull that differs in its offsets only, for as long as all of this is
    what the tables have. The last two but one are what heartbeats said, where they decide."""

    group: SubscriptionGroupConfig
    topic: TopicConfig
    online: OnlineGroup | None
    subscription: SubscriptionData | None
    codes: frozenset[int] | None  # of the tags that are wanted, None for all


class _Parked:
    """A pull that waits and its filter, which may need the records to decide.

    `offset` moves over messages that arrived and were not wanted, so that neither the next
    arrival nor the answer looks at them again.
    """

    __slots__ = ("ask", "offset", "wanted")

    def __init__(self, ask: PullRequest, wanted: Wanted) -> None:
        self.ask = ask
        self.wanted = wanted
        self.offset = ask.queue_offset


class Consume:
    """Serves pulls. The totals count answers that brought messages and those that did not."""

    def __init__(
        self,
        options: BrokerOptions,
        store: Store,
        topics: Topics,
        groups: Groups,
        filters: Filters,
        offsets: Commits,
        waiters: Waiters[PullReply],
        stats: Stats | None = None,
        moves: OffsetMoves | None = None,
    ) -> None:
        self._options = options
        self._store = store
        self._topics = topics
        self._groups = groups
        self._filters = filters
        self.online = filters.online
        self._offsets = offsets
        self.waiters = waiters
        self._stats = stats or Stats()
        self._moves = moves
        self._elsewhere: Callable[[], Iterable[Counted]] = tuple
        self._messages_total = 0
        self._bytes_total = 0
        self._found_total = 0
        self.missed_total = 0
        self.failures_total = 0

    @property
    def messages_total(self) -> int:
        self._stats.settle()
        return self._messages_total

    @property
    def bytes_total(self) -> int:
        self._stats.settle()
        return self._bytes_total

    @property
    def found_total(self) -> int:
        self._stats.settle()
        return self._found_total

    @PullMessage.handler
    def pull(self, ask: PullMessage, call: Call) -> PullReply | Awaitable[PullReply]:
        return self._serve(ask, call)

    @LitePullMessage.handler
    def lite_pull(self, ask: LitePullMessage, call: Call) -> PullReply | Awaitable[PullReply]:
        return self._serve(ask, call)

    def _serve(self, ask: PullRequest, call: Call) -> PullReply | Awaitable[PullReply]:
        group, wanted = self._checked(ask)
        reply = self._read(ask, group, wanted, ask.queue_offset)
        if ask.sys_flag & PULL_COMMIT and self._options.broker_id == MASTER_ID:
            self._offsets.commit(ask.consumer_group, ask.topic, ask.queue_id, ask.commit_offset)
        if reply.code != Code.PULL_NOT_FOUND or not ask.sys_flag & PULL_SUSPEND:
            return reply
        if reply.next_begin_offset != ask.queue_offset:
            return reply  # a hole in the queue: there is something to pull behind it already
        parked = _Parked(ask, wanted)
        held = self.waiters.hold(
            topic=ask.topic,
            queue_id=ask.queue_id,
            offset=ask.queue_offset,
            matches=wanted.code,
            timeout_ms=self._hold_ms(ask.suspend_timeout_millis),
            connection=call.connection,
            rerun=lambda: self._rerun(parked),
            skip=None if wanted.record is None else lambda offset: self._skip(parked, offset),
        )
        return reply if held is None else held

    def at_once(self, ask: PullRequest) -> tuple[int, Batch] | None:
        """What a pull finds by tag, and the broker to suggest; None, with nothing done, otherwise.

        For the fast lane: whatever has no plain answer goes through `pull`.
        """
        began = asyncio.get_running_loop().time()
        try:
            group = self._checked_group(ask)
            wanted = self._filters.of(ask, group)
            if wanted.record is not None:
                return None
            batch = self._store.read(
                *(ask.topic, ask.queue_id, ask.queue_offset, max(ask.max_msg_nums, 1)),
                matches=wanted.code,
            )
            if batch.status is not ReadStatus.FOUND:
                return None
            if ask.sys_flag & PULL_COMMIT and self._options.broker_id == MASTER_ID:
                self._offsets.commit(ask.consumer_group, ask.topic, ask.queue_id, ask.commit_offset)
        except Refused:
            return None
        self._count_found(ask, batch, began)
        return self._suggested_broker(batch, group), batch

    def verdict(self, ask: PullRequest) -> Verdict | None:
        """What `at_once` found out before it read; None when a record has to be looked at."""
        topic = self._topics.get(ask.topic)
        if topic is None or ask.topic.startswith((RETRY_PREFIX, LIGHT_PREFIX)):
            return None
        try:
            group = self._checked_group(ask)
            wanted = self._filters.of(ask, group)
        except Refused:
            return None
        codes = wanted.code
        if wanted.record is not None or not (codes is None or isinstance(codes, frozenset)):
            return None
        if ask.sys_flag & PULL_SUBSCRIPTION:
            return Verdict(group, topic, None, None, codes)
        online = self._filters.online(ask.consumer_group)
        if online is None:
            return None
        return Verdict(group, topic, online, online.subscriptions[ask.topic], codes)

    def counts_from(self, elsewhere: Callable[[], Iterable[Counted]]) -> None:
        """`elsewhere` gives what the fast lane has served since it was last asked."""
        self._elsewhere = elsewhere
        self._stats.counts_from(self._settle)

    def _settle(self) -> None:
        for counted in self._elsewhere():
            self._found_total += counted[3]
            self._messages_total += counted[4]
            self._bytes_total += counted[5]
            self._stats.add(*counted)

    def again(self, ask: PullRequest) -> PullReply:
        """What a pull that was parked is answered."""
        group, wanted = self._checked(ask)
        return self._read(ask, group, wanted, ask.queue_offset)

    def _hold_ms(self, wait_ms: int) -> int:
        if self._options.long_polling_enable:
            return wait_ms
        return self._options.short_polling_time_mills

    def _skip(self, parked: _Parked, offset: int) -> int | None:
        """Where the unwanted messages from `offset` on end; None when there is an answer."""
        ask, wanted = parked.ask, parked.wanted
        batch = self._store.read(
            *(ask.topic, ask.queue_id, offset, 1),
            matches=wanted.code,
            matches_record=wanted.record,
        )
        if batch.status is not ReadStatus.NO_MATCHED_MESSAGE:
            return None
        parked.offset = batch.next_offset
        return batch.next_offset

    def _rerun(self, parked: _Parked) -> PullReply:
        ask = parked.ask
        group, wanted = self._checked(ask)
        if parked.offset == ask.queue_offset or not wanted.same_records(parked.wanted):
            return self._read(ask, group, wanted, ask.queue_offset)
        reply = self._read(ask, group, wanted, parked.offset)
        if reply.code == Code.PULL_NOT_FOUND:
            # Compat: there were messages, none of them wanted; say so as one read would have.
            reply.code = Code.PULL_RETRY_IMMEDIATELY
            reply.remark = ReadStatus.NO_MATCHED_MESSAGE.name
        return reply

    # --- reading -----------------------------------------------------------------------------

    def _read(
        self, ask: PullRequest, group: SubscriptionGroupConfig, wanted: Wanted, offset: int
    ) -> PullReply:
        began = asyncio.get_running_loop().time()
        batch = self._store.read(
            *(ask.topic, ask.queue_id, offset, max(ask.max_msg_nums, 1)),
            matches=wanted.code,
            matches_record=wanted.record,
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
            self._count_found(ask, batch, began)
        else:
            self.missed_total += 1
        reply = PullReply(
            code=_code(batch.status, offset),
            remark=batch.status.name,
            suggest_which_broker_id=self._suggested_broker(batch, group),
            next_begin_offset=batch.next_offset,
            min_offset=batch.min_offset,
            max_offset=batch.max_offset,
            body=batch.data,
        )
        if reply.code == Code.PULL_OFFSET_MOVED and self._moves is not None:
            self._moved(self._moves, ask, group, offset, reply)
        return reply

    def _count_found(self, ask: PullRequest, batch: Batch, began: float) -> None:
        size = len(batch.data)
        self._found_total += 1
        self._messages_total += batch.count
        self._bytes_total += size
        self._stats.got(
            *(ask.consumer_group, ask.topic, ask.queue_id, batch.count, size),
            took_ms=(asyncio.get_running_loop().time() - began) * 1000,
            next_offset=batch.next_offset,
        )

    def _moved(
        self,
        moves: OffsetMoves,
        ask: PullRequest,
        group: SubscriptionGroupConfig,
        offset: int,
        reply: PullReply,
    ) -> None:
        if moves.corrects:
            place = (ask.consumer_group, ask.topic, ask.queue_id)
            moves.tell(*place, offset, reply.next_begin_offset)
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

    def _checked(self, ask: PullRequest) -> tuple[SubscriptionGroupConfig, Wanted]:
        try:
            group = self._checked_group(ask)
            return group, self._filters.of(ask, group)
        except Refused:
            self.failures_total += 1
            raise

    def _checked_group(self, ask: PullRequest) -> SubscriptionGroupConfig:
        """Broker, group, topic and queue, in this order; the group's configuration."""
        if not self._options.broker_permission & PERM_READ:
            raise Refused(
                Code.NO_PERMISSION,
                f"Broker {self._options.broker_name} is not readable (brokerPermission"
                f" {self._options.broker_permission}).",
            )
        group = self._groups.find(ask.consumer_group)
        if group is None:
            raise Refused(
                Code.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"Consumer group {ask.consumer_group} does not exist on this broker; create it"
                " first, for example with `mqadmin updateSubGroup`.",
            )
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


def _code(status: ReadStatus, requested: int) -> Code:
    known = _CODES.get(status)
    if known is not None:
        return known
    # An empty queue is fine for who starts at its beginning; everybody else is sent there.
    return Code.PULL_NOT_FOUND if requested == 0 else Code.PULL_OFFSET_MOVED
