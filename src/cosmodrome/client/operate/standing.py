"""How far a group is behind, in messages and in time, without pretending.

What is not known is None, with the reason beside it; it is never shown as 0. Not known is a queue
in which the group has committed nothing, one that ends before the group's offset, one of
a broker that does not answer, and everything of a broadcasting group, whose members keep their
offsets themselves.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping
from typing import TypeVar

from cosmodrome.client.operate.fleet import Fleet, attempt
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.errors import Code, CosmodromeError, Refused
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    ConsumerConnection,
    ConsumerOffsetSerializeWrapper,
    ConsumeStats,
    TopicStatsTable,
)
from cosmodrome.wire.commands.client import GetConsumerConnectionList
from cosmodrome.wire.commands.group import GetConsumeStats, QueryConsumeTimeSpan
from cosmodrome.wire.commands.offset import GetAllConsumerOffset, GetMaxOffset, GetMinOffset
from cosmodrome.wire.commands.topic import GetTopicStatsInfo
from cosmodrome.wire.names import RETRY_PREFIX
from cosmodrome.wire.report_bodies import QueryConsumeTimeSpanBody

T = TypeVar("T")

BROADCASTING = "BROADCASTING"
NO_OFFSET = "the group has committed no offset here yet"
BEYOND_END = "the group's offset is beyond the end of the queue"
AT_CLIENTS = "broadcasting: each member keeps its offsets itself"
# A broker that does not find the message answers with the whole time since 1970.
AGE_MS_MAX = 20 * 365 * 24 * 3_600_000


@dataclasses.dataclass(frozen=True, slots=True)
class QueueStanding:
    """Where a group is in one queue."""

    queue: MessageQueue
    first: int | None  # offset of the oldest message that is kept
    end: int | None  # offset that the next message will get
    offset: int | None  # what the group reads next
    next_age_ms: int | None = None  # since the message at that offset was stored
    why: str = ""  # something is not known

    @property
    def lag(self) -> int | None:
        """Messages that are there and not consumed."""
        if self.first is None or self.end is None or self.why == AT_CLIENTS:
            return None
        if self.end <= self.first and (self.offset is None or self.offset <= self.end):
            return 0  # an empty queue has nothing to consume, whoever asks
        if self.offset is None or self.offset > self.end:
            return None
        return self.end - max(self.offset, self.first)

    @property
    def age_ms(self) -> int | None:
        """Age of the oldest message that is not consumed."""
        return self.next_age_ms if self.lag else self.lag


@dataclasses.dataclass(frozen=True, slots=True)
class GroupStanding:
    """Where a group is in all its queues."""

    group: str
    queues: list[QueueStanding]
    model: str | None  # as its members say; None when nobody is connected
    members: int | None
    consume_tps: float | None
    silent: Mapping[str, str]  # brokers that did not answer, and why

    @property
    def lag(self) -> int | None:
        """None as soon as one queue is not known; see `lag_known`."""
        return _sum(queue.lag for queue in self.queues) if not self.silent else None

    @property
    def lag_known(self) -> int:
        """At least so much."""
        return sum(queue.lag or 0 for queue in self.queues)

    @property
    def age_ms(self) -> int | None:
        ages = [queue.age_ms for queue in self.queues]
        if self.silent or None in ages:
            return None
        return max((age for age in ages if age is not None), default=None)

    @property
    def topics(self) -> list[str]:
        return sorted({queue.queue.topic for queue in self.queues})


async def standing(fleet: Fleet, group: str, topic: str | None = None) -> GroupStanding:
    """In one topic, or in all that the group has consumed or subscribes to. NoRoute when the
    given topic does not exist."""
    found = await full_standing(
        fleet, fleet.full(group), None if topic is None else fleet.full(topic)
    )
    plain = [dataclasses.replace(row, queue=fleet.plain_queue(row.queue)) for row in found.queues]
    return dataclasses.replace(found, group=group, queues=plain)


async def full_standing(fleet: Fleet, group: str, topic: str | None) -> GroupStanding:
    """The same with names as brokers know them, in question and answer."""
    brokers = await fleet.readable()
    silent: dict[str, str] = {}
    asked = await asyncio.gather(
        *(_look(fleet, address, group, topic) for address in brokers.values())
    )
    looks: dict[str, _Look] = {}
    for name, look in zip(brokers, asked, strict=True):
        if isinstance(look, CosmodromeError):
            silent[name] = str(look)
        else:
            looks[name] = look
    topics = {topic} if topic is not None else _topics(looks.values())
    queues: list[QueueStanding] = []
    for name in sorted(topics):
        try:
            queues += await _in_topic(fleet, name, group, looks)
        except NoRoute:
            if topic is not None:
                raise
    rates = [look.stats.consume_tps for look in looks.values()]
    online = [look.online for look in looks.values() if look.online is not None]
    ids = {member.client_id for one in online for member in one.connection_set}
    return GroupStanding(
        group=group,
        queues=queues,
        model=online[0].message_model if online else None,
        members=None if silent and not ids else len(ids),
        consume_tps=sum(rates) if rates else None,
        silent=silent,
    )


@dataclasses.dataclass(slots=True)
class _Look:
    """What one broker says about a group."""

    address: str
    stats: ConsumeStats
    online: ConsumerConnection | None
    committed: dict[str, dict[int, int]] | None = None  # topic → queue → offset, once asked
    untold: str = ""  # why the offsets are not known though they were asked for

    def offset(self, queue: MessageQueue) -> int | None:
        row = self.stats.offset_table.get(queue)
        if row is not None and row.consumer_offset > 0:
            return row.consumer_offset
        return (self.committed or {}).get(queue.topic, {}).get(queue.queue_id)

    def unsure(self, queue: MessageQueue) -> bool:
        """A 0 may be an offset and may be none."""
        row = self.stats.offset_table.get(queue)
        return self.committed is None and (row is None or row.consumer_offset <= 0)


async def _look(
    fleet: Fleet, address: str, group: str, topic: str | None
) -> _Look | CosmodromeError:
    stats = await attempt(fleet.call(address, GetConsumeStats(consumer_group=group, topic=topic)))
    if isinstance(stats, CosmodromeError) and not isinstance(stats, Refused):
        return stats
    # Compat: upstream refuses where a topic or the group is unknown; nothing was consumed there.
    table = (
        ConsumeStats() if isinstance(stats, Refused) else bodies.decode(ConsumeStats, stats.body)
    )
    online = await attempt(fleet.call(address, GetConsumerConnectionList(consumer_group=group)))
    if isinstance(online, CosmodromeError) and not isinstance(online, Refused):
        return online  # silence is not "nobody is connected"
    known = None
    if not isinstance(online, CosmodromeError):
        known = bodies.decode(ConsumerConnection, online.body)
    return _Look(address, table, known)


def _topics(looks: Iterable[_Look]) -> set[str]:
    found: set[str] = set()
    for look in looks:
        found.update(queue.topic for queue in look.stats.offset_table)
        if look.online is not None:
            found.update(look.online.subscription_table)
    return found


async def _in_topic(
    fleet: Fleet, topic: str, group: str, looks: Mapping[str, _Look]
) -> list[QueueStanding]:
    route = await fleet.route(topic)
    rows = sorted(route.queue_datas, key=lambda row: row.broker_name)
    parts = await asyncio.gather(
        *(
            _at_broker(
                fleet,
                [
                    MessageQueue(topic=topic, broker_name=row.broker_name, queue_id=number)
                    for number in range(row.read_queue_nums)
                ],
                group,
                looks.get(row.broker_name),
            )
            for row in rows
        )
    )
    return [queue for part in parts for queue in part]


async def _at_broker(
    fleet: Fleet, queues: list[MessageQueue], group: str, look: _Look | None
) -> list[QueueStanding]:
    """The queues of one topic that one broker has."""
    if not queues:
        return []
    if look is None:
        why = f"broker {queues[0].broker_name} does not answer"
        return [QueueStanding(queue, None, None, None, why=why) for queue in queues]
    topic = queues[0].topic
    bounds, ages = await asyncio.gather(
        _bounds(fleet, look.address, queues), _ages(fleet, look.address, topic, group)
    )
    broadcasting = look.online is not None and look.online.message_model == BROADCASTING
    filled = [queue for queue, (first, end) in bounds.items() if end > first]
    if not broadcasting and any(look.unsure(queue) for queue in filled):
        await _ask_committed(fleet, look, group)
    rows = []
    for queue in queues:
        first, end = bounds.get(queue, (None, None))
        offset = look.offset(queue)
        why = ""
        if broadcasting and not topic.startswith(RETRY_PREFIX):
            offset, why = None, AT_CLIENTS
        elif first is None or end is None:
            why = f"broker {queue.broker_name} does not tell the ends of the queue"
        elif offset is None and end > first:
            why = look.untold or NO_OFFSET
        elif offset is not None and offset > end:
            why = BEYOND_END
        rows.append(QueueStanding(queue, first, end, offset, ages.get(queue), why))
    return rows


async def _bounds(
    fleet: Fleet, address: str, queues: list[MessageQueue]
) -> dict[MessageQueue, tuple[int, int]]:
    found: dict[MessageQueue, tuple[int, int]] = {}
    reply = await attempt(fleet.call(address, GetTopicStatsInfo(topic=queues[0].topic)))
    if not isinstance(reply, CosmodromeError):
        table = bodies.decode(TopicStatsTable, reply.body).offset_table
        found = {queue: (row.min_offset, row.max_offset) for queue, row in table.items()}
    # The table has the queues that are written; a topic that shrinks has others to be read.
    for queue in queues:
        if queue not in found:
            topic, number = queue.topic, queue.queue_id
            first = await attempt(fleet.call(address, GetMinOffset(topic=topic, queue_id=number)))
            end = await attempt(fleet.call(address, GetMaxOffset(topic=topic, queue_id=number)))
            if not isinstance(first, CosmodromeError) and not isinstance(end, CosmodromeError):
                found[queue] = (first.offset, end.offset)
    return found


async def _ages(
    fleet: Fleet, address: str, topic: str, group: str
) -> dict[MessageQueue, int | None]:
    reply = await attempt(fleet.call(address, QueryConsumeTimeSpan(topic=topic, group=group)))
    if isinstance(reply, CosmodromeError):
        return {}
    spans = bodies.decode(QueryConsumeTimeSpanBody, reply.body).consume_time_span_set
    return {
        span.message_queue: span.delay_time if 0 <= span.delay_time < AGE_MS_MAX else None
        for span in spans
    }


async def _ask_committed(fleet: Fleet, look: _Look, group: str) -> None:
    """Only the whole table tells a committed 0 from no offset."""
    look.committed = {}
    reply = await attempt(fleet.call(look.address, GetAllConsumerOffset()))
    if isinstance(reply, CosmodromeError):
        # Compat: upstream answers a system error when nobody has committed anything.
        if not isinstance(reply, Refused) or reply.code != Code.SYSTEM_ERROR:
            look.untold = f"the broker does not tell its offsets: {reply}"
        return
    table = bodies.decode(ConsumerOffsetSerializeWrapper, reply.body).offset_table
    for key, offsets in table.items():
        topic, _, owner = key.partition("@")
        if owner == group:
            look.committed[topic] = {queue: at for queue, at in offsets.items() if at >= 0}


def _sum(lags: Iterable[int | None]) -> int | None:
    total = 0
    for lag in lags:
        if lag is None:
            return None
        total += lag
    return total
