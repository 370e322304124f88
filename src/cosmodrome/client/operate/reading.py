"""Messages of queues in their order, for tools. No group's progress is read or moved.

Topics are full names here, as brokers know them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from cosmodrome.client.operate.fleet import Fleet
from cosmodrome.client.received import received_all
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import Code, Refused
from cosmodrome.layout import PULL_SUBSCRIPTION
from cosmodrome.wire.bodies import EVERYTHING, TAG, SubscriptionData
from cosmodrome.wire.commands.consume import PullMessage
from cosmodrome.wire.commands.offset import GetMaxOffset, GetMinOffset
from cosmodrome.wire.names import TOOLS_GROUP

PAGE_COUNT = 32


class Span(NamedTuple):
    """What a queue holds: the messages from `begin` to before `end`."""

    queue: MessageQueue
    address: str  # of its broker
    begin: int
    end: int

    @property
    def length(self) -> int:
        return max(0, self.end - self.begin)


class Page(NamedTuple):
    messages: list[ReceivedMessage]
    next_offset: int  # where to go on; as asked when there was nothing


async def spans(fleet: Fleet, topic: str) -> list[Span]:
    """Every readable queue of a topic, by broker and number. NoRoute when there is no topic."""
    route = await fleet.route(topic)
    masters = await fleet.masters_of(topic)
    queues = [
        MessageQueue(topic=topic, broker_name=row.broker_name, queue_id=number)
        for row in sorted(route.queue_datas, key=lambda row: row.broker_name)
        if row.broker_name in masters
        for number in range(row.read_queue_nums)
    ]
    return list(
        await asyncio.gather(*(span(fleet, queue, masters[queue.broker_name]) for queue in queues))
    )


async def span(fleet: Fleet, queue: MessageQueue, address: str) -> Span:
    topic, number = queue.topic, queue.queue_id
    first = await fleet.call(address, GetMinOffset(topic=topic, queue_id=number))
    end = await fleet.call(address, GetMaxOffset(topic=topic, queue_id=number))
    return Span(queue, address, max(0, first.offset), max(0, end.offset))


def pull_request(
    queue: MessageQueue,
    offset: int,
    count: int,
    group: str = TOOLS_GROUP,
    subscription: SubscriptionData | None = None,
) -> PullMessage:
    """A pull that is answered at once and moves nobody's progress; without a subscription it
    brings everything."""
    return PullMessage(
        consumer_group=group,
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=offset,
        max_msg_nums=count,
        sys_flag=PULL_SUBSCRIPTION,
        commit_offset=0,
        suspend_timeout_millis=0,
        subscription=EVERYTHING if subscription is None else subscription.sub_string,
        expression_type=TAG if subscription is None else subscription.expression_type,
        sub_version=0,
    )


async def page(
    fleet: Fleet, queue: MessageQueue, address: str, offset: int, count: int = PAGE_COUNT
) -> Page:
    """Some messages from an offset on; none at the end of the queue."""
    try:
        reply = await fleet.call(address, pull_request(queue, offset, count))
    except Refused as refusal:
        if refusal.code == Code.NO_PERMISSION:
            # Compat: upstream makes dead letter topics that nobody may read.
            raise Refused(
                refusal.code,
                f"{refusal.remark} `cosmo topic alter '{queue.topic}' --perm RW` lets it be read.",
            ) from None
        raise
    if reply.code == Code.SUCCESS:
        found = received_all(
            reply.body, queue.broker_name, min_offset=reply.min_offset, max_offset=reply.max_offset
        )
        messages = [message for message in found if message.queue_offset >= offset]
        return Page(messages, max(reply.next_begin_offset, offset))
    return Page([], max(reply.next_begin_offset, offset))


async def walk(fleet: Fleet, part: Span) -> AsyncIterator[ReceivedMessage]:
    """The messages of a span, oldest first; ones that have expired meanwhile are left out."""
    at = part.begin
    while at < part.end:
        count = min(PAGE_COUNT, part.end - at)
        found = await page(fleet, part.queue, part.address, at, count)
        if found.next_offset <= at:
            return
        for message in found.messages:
            if message.queue_offset < part.end:
                yield message
        at = found.next_offset
