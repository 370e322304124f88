"""Transactions that nobody has decided: half messages that wait, and those that were given up.

Which halves are decided stands in the op queue, which no pull may read; it is read entry by entry
through the requests that tools have for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.reading import Span, span, spans, walk
from cosmodrome.client.values import MessageQueue, NoRoute, ReceivedMessage
from cosmodrome.errors import Code, Refused
from cosmodrome.wire.commands.consume import ViewMessageById
from cosmodrome.wire.commands.offset import QueryConsumerOffset
from cosmodrome.wire.message import (
    PRODUCER_GROUP,
    REAL_TOPIC,
    TAGS,
    TRANSACTION_CHECK_TIMES,
    TRANSACTION_PREPARED_QUEUE_OFFSET,
    whole_number,
)
from cosmodrome.wire.names import CHECK_MAX_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from cosmodrome.wire.record import decode_record

# Compat: the group whose offsets say how far brokers have looked through transactions.
TRANSACTION_GROUP = "CID_RMQ_SYS_TRANS"
DECIDED_TAG = "d"
OPS_MAX = 50_000
OPS_AT_ONCE = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """A transaction without an end."""

    state: str  # waiting, given up
    message: ReceivedMessage

    @property
    def topic(self) -> str | None:
        return self.message.properties.get(REAL_TOPIC)

    @property
    def group(self) -> str | None:
        return self.message.properties.get(PRODUCER_GROUP)

    @property
    def checks(self) -> int:
        """How often producers were asked."""
        return whole_number(self.message.properties.get(TRANSACTION_CHECK_TIMES, "")) or 0


async def waiting(admin: Admin, broker: str | None = None) -> AsyncIterator[Waiting]:
    """Halves that wait, the oldest first on each broker."""
    for name, address in (await admin.fleet.chosen(cluster=None, broker=broker)).items():
        queue = MessageQueue(topic=HALF_TOPIC, broker_name=name, queue_id=0)
        whole = await span(admin.fleet, queue, address)
        begin = max(whole.begin, await _saved(admin, address, HALF_TOPIC))
        if begin >= whole.end:
            continue
        decided = await _decided(admin, name, address)
        async for half in walk(admin.fleet, Span(queue, address, begin, whole.end)):
            earlier = whole_number(half.properties.get(TRANSACTION_PREPARED_QUEUE_OFFSET, ""))
            if half.queue_offset not in decided and earlier not in decided:
                yield Waiting("waiting", half)


async def given_up(admin: Admin, broker: str | None = None) -> AsyncIterator[Waiting]:
    """Halves whose producers were asked for too long, the oldest first on each broker."""
    try:
        parts = await spans(admin.fleet, CHECK_MAX_TOPIC)
    except NoRoute:
        return
    for part in parts:
        if broker in (None, part.queue.broker_name, part.address):
            async for half in walk(admin.fleet, part):
                yield Waiting("given up", half)


async def _saved(admin: Admin, address: str, topic: str) -> int:
    try:
        reply = await admin.fleet.call(
            address,
            QueryConsumerOffset(consumer_group=TRANSACTION_GROUP, topic=topic, queue_id=0),
        )
    except Refused as refusal:
        if refusal.code != Code.QUERY_NOT_FOUND:
            raise
        return 0
    return max(0, reply.offset)


async def _decided(admin: Admin, broker: str, address: str) -> set[int]:
    """Queue offsets of halves that op records name."""
    queue = MessageQueue(topic=OP_HALF_TOPIC, broker_name=broker, queue_id=0)
    whole = await span(admin.fleet, queue, address)
    at = max(whole.begin, await _saved(admin, address, OP_HALF_TOPIC))
    stop = min(whole.end, at + OPS_MAX)
    found: set[int] = set()
    while at < stop:
        # By address: the name would be looked up again for each.
        queue = MessageQueue(topic=OP_HALF_TOPIC, broker_name=address, queue_id=0)
        entries = (
            await admin.messages.queue_entries(queue, at, min(OPS_AT_ONCE, stop - at))
        ).queue_data
        if not entries:
            break
        replies = await asyncio.gather(
            *(
                admin.fleet.call(address, ViewMessageById(offset=entry.physic_offset))
                for entry in entries
            )
        )
        for reply in replies:
            record = decode_record(reply.body)
            if record.pairs().get(TAGS) == DECIDED_TAG:
                # Compat: 5.x names several in one record.
                found |= {
                    number
                    for word in record.body.split(b",")
                    if (number := whole_number(word.decode("latin-1"))) is not None
                }
        at += len(entries)
    return found
