"""Reports on consumer groups (times, entries, comparisons), and copies of their progress."""

from __future__ import annotations

import asyncio
import logging
import time

from msgspec import UNSET, UnsetType

from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.members.offsets import INT64_MAX
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.topics import existing_topic
from cosmodrome.broker.operate.query import ANSWER_BYTES_MAX
from cosmodrome.broker.operate.sliced import encode_list, written
from cosmodrome.broker.receive.expressions import Expressions
from cosmodrome.errors import Code, Refused
from cosmodrome.transport.audit_log import changed as audited
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import MessageQueue, SubscriptionData
from cosmodrome.wire.commands.broker import QueryConsumeQueue
from cosmodrome.wire.commands.group import QueryConsumeTimeSpan
from cosmodrome.wire.commands.offset import CloneGroupOffset, QueryCorrectionOffset
from cosmodrome.wire.names import check_group, check_topic
from cosmodrome.wire.report_bodies import (
    ConsumeQueueData,
    QueryConsumeQueueResponseBody,
    QueryConsumeTimeSpanBody,
    QueryCorrectionOffsetBody,
    QueueTimeSpan,
)
from cosmodrome.wire.table import Call, Reply

log = logging.getLogger(__name__)

ENTRIES_LISTED_MAX = 10_000
GROUPS_COMPARED_MAX = 1000


class GroupReports:
    def __init__(self, base: Foundation, members: Members, expressions: Expressions) -> None:
        self._broker_name = base.options.broker_name
        self._store = base.store
        self._topics = members.topics
        self._offsets = members.offsets
        self._clients = members.clients
        self._expressions = expressions
        self._clock = base.env.clock
        self._answering = asyncio.Lock()  # one report at a time is in the making

    # --- progress of groups --------------------------------------------------------------------

    @CloneGroupOffset.handler
    def clone_offsets(self, ask: CloneGroupOffset, call: Call) -> Reply:
        source, target = ask.src_group, ask.dest_group
        check_group(source)
        check_group(target)
        subscribed = self._clients.subscribed(source)
        for topic in sorted({ask.topic} if ask.topic else self._offsets.topics_of(source)):
            check_topic(topic)
            if self._topics.get(topic) is None:
                log.warning("offsets_not_cloned topic=%s reason='it does not exist'", topic)
                continue
            # Compat: while the source is online only what it subscribes to counts.
            if not ask.offline and subscribed and topic not in subscribed:
                log.warning("offsets_not_cloned topic=%s reason='not subscribed'", topic)
                continue
            before = self._offsets.of(target, topic)
            self._offsets.clone(source, target, topic)
            audited(
                call,
                "offsets_cloned",
                topic=topic,
                group=target,
                source=source,
                before=before,
                after=self._offsets.of(target, topic),
            )
        return Reply()

    @QueryCorrectionOffset.handler
    def correction_offsets(self, ask: QueryCorrectionOffset, call: Call) -> Reply:
        """Per queue, the least offset of all groups except those that are filtered out.

        Compat: the largest number stands for a queue in which the compared group is behind.
        """
        check_topic(ask.topic)
        left_out = set((ask.filter_groups or "").split(",", GROUPS_COMPARED_MAX))
        least: dict[int, int] = {}
        for group in self._offsets.groups_of(ask.topic) - left_out:
            for queue_id, offset in self._offsets.of(group, ask.topic).items():
                if offset >= self._store.bounds(ask.topic, queue_id)[0]:
                    least[queue_id] = min(offset, least.get(queue_id, offset))
        for queue_id, offset in self._offsets.of(ask.compare_group, ask.topic).items():
            if queue_id in least and least[queue_id] > offset:
                least[queue_id] = INT64_MAX
        return Reply(body=bodies.encode(QueryCorrectionOffsetBody(correction_offsets=least)))

    @QueryConsumeTimeSpan.handler
    async def time_spans(self, ask: QueryConsumeTimeSpan, call: Call) -> Reply:
        config = existing_topic(self._topics, ask.topic)
        spans = (
            self._time_span(ask.group, ask.topic, queue_id)
            for queue_id in range(config.write_queue_nums)
        )
        async with self._answering:
            listed = await written(spans, encode_list, ANSWER_BYTES_MAX)
        head, empty, tail = bodies.encode(QueryConsumeTimeSpanBody()).partition(b"[]")
        return Reply(body=b"".join((head, empty[:1], listed, empty[1:], tail)))

    def _time_span(self, group: str, topic: str, queue_id: int) -> QueueTimeSpan:
        first, end = self._store.bounds(topic, queue_id)
        offset = self._offsets.query(group, topic, queue_id)
        first_ms = self._store.store_time(topic, queue_id, first)
        last_ms = self._store.store_time(topic, queue_id, end - 1)
        here_ms = self._store.store_time(topic, queue_id, offset - 1) if offset > 0 else first_ms
        behind_ms = 0
        if max(offset, first) < end:
            next_ms = self._store.store_time(topic, queue_id, max(offset, first))
            behind_ms = max(self._clock.now_ms() - next_ms, 0)
        return QueueTimeSpan(
            message_queue=MessageQueue(
                broker_name=self._broker_name, queue_id=queue_id, topic=topic
            ),
            min_time_stamp=first_ms,
            min_time_stamp_str=_time_text(first_ms),
            max_time_stamp=last_ms,
            max_time_stamp_str=_time_text(last_ms),
            consume_time_stamp=here_ms,
            consume_time_stamp_str=_time_text(here_ms),
            delay_time=behind_ms,
        )

    # --- entries of a queue ----------------------------------------------------------------------

    @QueryConsumeQueue.handler
    def consume_queue(self, ask: QueryConsumeQueue, call: Call) -> Reply:
        topic, queue_id, index = ask.topic or "", ask.queue_id or 0, ask.index or 0
        check_topic(topic)
        if queue_id not in self._store.queues().get(topic, ()):
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Queue {queue_id} of {topic} does not exist on this broker; check topic and"
                " queue id.",
            )
        first, end = self._store.bounds(topic, queue_id)
        entries = self._entries(topic, queue_id, index, min(ask.count or 0, ENTRIES_LISTED_MAX))
        subscription, filter_data = self._subscription(ask.consumer_group, topic)
        body = QueryConsumeQueueResponseBody(
            filter_data=filter_data,
            min_queue_index=first,
            max_queue_index=end,
            queue_data=entries,
            subscription_data=subscription,
        )
        outside = not first <= index < end
        remark = f"Queue {queue_id} of {topic} holds {first} to {end - 1}." if outside else None
        return Reply(body=bodies.encode(body), remark=remark)

    def _entries(self, topic: str, queue_id: int, index: int, count: int) -> list[ConsumeQueueData]:
        entries: list[ConsumeQueueData] = []
        while len(entries) < count:
            at, missing = index + len(entries), count - len(entries)
            more = self._store.entries(topic, queue_id, at, missing)
            if not more:
                break
            entries += [
                ConsumeQueueData(physic_offset=log_offset, physic_size=size, tags_code=code)
                for log_offset, size, code in more
            ]
        return entries

    def _subscription(
        self, group: str | None, topic: str
    ) -> tuple[SubscriptionData | UnsetType, str | UnsetType]:
        """What a group wants of a topic, and its filter as text."""
        if group is None:
            return UNSET, UNSET
        known = self._clients.group(group)
        subscription = known.subscriptions.get(topic) if known else None
        if subscription is None:
            return UNSET, f"{group[:255]}@{topic} is not online!"
        row = self._expressions.find(topic, group)
        return subscription, "null" if row is None else row.text


def _time_text(ms: int) -> str:
    # Compat: local time in the form that tools print as it comes.
    return f"{time.strftime('%Y-%m-%d#%H:%M:%S', time.localtime(ms // 1000))}:{ms % 1000:03d}"
