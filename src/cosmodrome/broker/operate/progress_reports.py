"""How far messages and consumers are: the ends of queues, and what groups have read of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import msgspec

from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.topics import existing_topic
from cosmodrome.broker.operate.query import ANSWER_BYTES_MAX
from cosmodrome.broker.operate.sliced import written
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    ConsumeStats,
    ConsumeStatsList,
    GroupList,
    MessageQueue,
    OffsetWrapper,
    TopicOffset,
    TopicStatsTable,
)
from cosmodrome.wire.commands.group import GetBrokerConsumeStats, GetConsumeStats
from cosmodrome.wire.commands.topic import GetTopicStatsInfo, QueryTopicConsumeByWho
from cosmodrome.wire.names import check_group, check_topic
from cosmodrome.wire.table import Call, Reply


class ProgressReports:
    def __init__(self, base: Foundation, members: Members) -> None:
        self._options = base.options
        self._store = base.store
        self._topics = members.topics
        self._clients = members.clients
        self._offsets = members.offsets
        self._groups = members.groups
        self._stats = base.stats
        self._address = base.address
        self._answering = asyncio.Lock()  # one report at a time is in the making

    @GetTopicStatsInfo.handler
    async def get_topic_stats(self, ask: GetTopicStatsInfo, call: Call) -> Reply:
        config = existing_topic(self._topics, ask.topic)
        async with self._answering:
            rows = self._ends(ask.topic, config.write_queue_nums)
            table = await written(rows, _table_rows, ANSWER_BYTES_MAX)
        return Reply(body=_with_table(TopicStatsTable(), table))

    @GetConsumeStats.handler
    async def get_consume_stats(self, ask: GetConsumeStats, call: Call) -> Reply:
        group = ask.consumer_group
        check_group(group)
        tables: list[bytes] = []
        rate, left = 0.0, ANSWER_BYTES_MAX
        subscribed = self._clients.subscribed(group)
        async with self._answering:
            for topic in sorted({ask.topic} if ask.topic else self._offsets.topics_of(group)):
                config = self._topics.get(topic)
                # Compat: while the group is online only what it subscribes to counts.
                if config is None or (subscribed and topic not in subscribed):
                    continue
                rows = self._progress(group, topic, config.read_queue_nums)
                table = await written(rows, _table_rows, left)
                left -= len(table)
                tables += [table] if table else []
                rate += self._stats.get_rate(group, topic)
        stats = ConsumeStats(consume_tps=rate)
        return Reply(body=_with_table(stats, b",".join(tables)))

    @GetBrokerConsumeStats.handler
    async def get_broker_consume_stats(self, ask: GetBrokerConsumeStats, call: Call) -> Reply:
        """Every group, also those without progress; `isOrder` leaves only order topics."""
        listed: list[bytes] = []
        left, behind = ANSWER_BYTES_MAX, 0
        async with self._answering:
            known = self._offsets.topics_by_group()
            for group in sorted(self._groups.table):
                await asyncio.sleep(0)  # there may be thousands; others want to be served between
                reports: list[bytes] = []
                for topic in sorted(known.get(group, ())):
                    if self._is_reported(group, topic, order_only=ask.is_order):
                        report, more = await self._topic_report(group, topic, left)
                        reports.append(report)
                        left -= len(report)
                        behind += more
                listed.append(b"{%b:[%b]}" % (msgspec.json.encode(group), b",".join(reports)))
        answer = ConsumeStatsList(broker_addr=self._address.text, total_diff=behind)
        head, empty, tail = bodies.encode(answer).partition(b'"consumeStatsList":[]')
        return Reply(body=b"".join((head, empty[:-1], b",".join(listed), b"]", tail)))

    @QueryTopicConsumeByWho.handler
    def query_who(self, ask: QueryTopicConsumeByWho, call: Call) -> Reply:
        check_topic(ask.topic)
        groups = self._clients.consumer_groups_of(ask.topic) | self._offsets.groups_of(ask.topic)
        return Reply(body=bodies.encode(GroupList(group_list=sorted(groups))))

    # --- inside -----------------------------------------------------------------------------

    def _is_reported(self, group: str, topic: str, *, order_only: bool) -> bool:
        config = self._topics.get(topic)
        if config is None or (order_only and not config.order):
            return False
        subscribed = self._clients.subscribed(group)
        return not subscribed or topic in subscribed

    async def _topic_report(self, group: str, topic: str, bytes_max: int) -> tuple[bytes, int]:
        """A `ConsumeStats` as text, and how many messages the group is behind."""
        config = self._topics.get(topic)
        queues = 0 if config is None else config.write_queue_nums
        behind = 0

        def counted() -> Iterator[tuple[MessageQueue, OffsetWrapper]]:
            nonlocal behind
            for queue, row in self._progress(group, topic, queues):
                behind += row.broker_offset - row.consumer_offset
                yield queue, row

        table = await written(counted(), _table_rows, bytes_max)
        stats = ConsumeStats(consume_tps=self._stats.get_rate(group, topic))
        return _with_table(stats, table), behind

    def _queue(self, topic: str, queue_id: int) -> MessageQueue:
        return MessageQueue(topic=topic, broker_name=self._options.broker_name, queue_id=queue_id)

    def _ends(self, topic: str, queues: int) -> Iterator[tuple[MessageQueue, TopicOffset]]:
        for queue_id in range(queues):
            first, end = self._store.bounds(topic, queue_id)
            last_ms = self._store.store_time(topic, queue_id, end - 1) if end > first else 0
            yield (
                self._queue(topic, queue_id),
                TopicOffset(
                    min_offset=first, max_offset=end, last_update_timestamp=max(last_ms, 0)
                ),
            )

    def _progress(
        self, group: str, topic: str, queues: int
    ) -> Iterator[tuple[MessageQueue, OffsetWrapper]]:
        for queue_id in range(queues):
            first, end = self._store.bounds(topic, queue_id)
            offset = max(self._offsets.query(group, topic, queue_id), 0)
            last_ms = self._store.store_time(topic, queue_id, offset - 1) if offset > first else 0
            yield (
                self._queue(topic, queue_id),
                OffsetWrapper(
                    broker_offset=end, consumer_offset=offset, last_timestamp=max(last_ms, 0)
                ),
            )


def _table_rows(rows: Sequence[tuple[MessageQueue, TopicOffset | OffsetWrapper]]) -> bytes:
    return bodies.encode_rows(dict(rows))


def _with_table(empty: TopicStatsTable | ConsumeStats, table: bytes) -> bytes:
    """The text of a body whose table, the last member, has these rows."""
    return b"".join((bodies.encode(empty).removesuffix(b"}}"), table, b"}}"))
