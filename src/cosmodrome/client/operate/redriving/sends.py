"""Single messages of a redrive: to which queue each goes, sending it, and looking for it.

A message goes to one queue, named before it is sent, and to no other: so a look knows where.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from cosmodrome.client.operate.fleet import Fleet
from cosmodrome.client.operate.messages import Messages
from cosmodrome.client.operate.reading import Span, span, walk
from cosmodrome.client.operate.redriving.audit import (
    FOUND,
    NO_TARGET,
    NOT_SENT,
    PRODUCER,
    REFUSED,
    SENT,
    UNKNOWN,
    Item,
    Outcome,
)
from cosmodrome.client.operate.redriving.plan import Plan, sys_flag_of
from cosmodrome.client.values import MessageQueue, NoRoute, ReceivedMessage
from cosmodrome.env.base import Clock
from cosmodrome.errors import Code, Refused
from cosmodrome.wire.bodies import PERM_WRITE
from cosmodrome.wire.commands.produce import SendMessageV2
from cosmodrome.wire.message import UNIQ_KEY, format_properties
from cosmodrome.wire.names import AUTO_CREATE_TOPIC, SEND_FORBIDDEN_TOPICS

LOOK_COUNT_MAX = 20_000
BUSY_WAIT_S = 0.1
_BUSY = frozenset({Code.SYSTEM_BUSY, Code.SERVICE_NOT_AVAILABLE, Code.FLOW_CONTROL})


class _Target(NamedTuple):
    queue: MessageQueue
    address: str


class Sends:
    """`copies`: a message may go to the topic that it is in."""

    def __init__(self, fleet: Fleet, clock: Clock, plan: Plan, *, copies: bool = False) -> None:
        self._fleet = fleet
        self._clock = clock
        self._plan = plan
        self._forbidden = SEND_FORBIDDEN_TOPICS | (set() if copies else {plan.source})
        self._messages = Messages(fleet, "")
        self._targets: dict[str, list[_Target]] = {}
        self._ends: dict[MessageQueue, int] = {}  # each queue is at least so long

    async def item(self, message: ReceivedMessage) -> Item | Outcome:
        """What will be sent for a message, or why nothing will."""
        offset = message.queue_offset
        topic = self._plan.topic_of(message)
        if topic is None:
            why = "it does not say where it comes from; name a target"
            return Outcome(offset, message.msg_id, NO_TARGET, why=why)
        try:
            targets = await self._queues(topic)
        except NoRoute as error:
            return Outcome(offset, message.msg_id, NO_TARGET, topic, why=str(error))
        why = f"topic {topic} cannot be written to"
        if not targets or topic in self._forbidden:
            return Outcome(offset, message.msg_id, NO_TARGET, topic, why=why)
        # Spread over the queues, and at the same one however often this is worked out.
        queue, address = targets[offset % len(targets)]
        if queue not in self._ends:
            self._ends[queue] = (await span(self._fleet, queue, address)).end
        return Item(
            offset=offset,
            msg_id=message.msg_id,
            topic=topic,
            broker=queue.broker_name,
            queue=queue.queue_id,
            new_id=self._plan.new_id(message.broker_name, message.queue_id, offset),
            look_from=self._ends[queue],
        )

    async def send(self, item: Item, message: ReceivedMessage) -> Outcome:
        """Unreachable and TimedOut mean that nobody knows; a refusal is an outcome."""
        request = SendMessageV2(
            producer_group=PRODUCER,
            topic=item.topic,
            default_topic=AUTO_CREATE_TOPIC,
            default_topic_queue_nums=4,
            queue_id=item.queue,
            sys_flag=sys_flag_of(message),
            born_timestamp=self._clock.now_ms(),
            flag=message.record.flag,
            properties=format_properties(self._plan.properties_of(message, item.new_id)),
            reconsume_times=0,
            body=message.record.body,
        )
        address = await self._fleet.broker(item.broker)
        while True:
            try:
                reply = await self._fleet.call(address, request)
            except Refused as refusal:
                if refusal.code in _BUSY:
                    await asyncio.sleep(BUSY_WAIT_S)  # the deadline of the batch ends this
                    continue
                return self._outcome(item, REFUSED, why=str(refusal))
            queue = _queue(item)
            self._ends[queue] = max(reply.queue_offset, self._ends.get(queue, item.look_from))
            place = f"{item.broker}/{reply.queue_id}/{reply.queue_offset}"
            return self._outcome(item, SENT, place=place)

    async def look(self, item: Item) -> Outcome:
        """Whether a message with the id of this item is in the target: FOUND, NOT_SENT, or
        UNKNOWN when not everything could be looked through."""
        known = await self._messages.by_unique_key(item.topic, item.new_id)
        if known is not None:
            return self._outcome(item, FOUND, place=_position_text(known))
        # The index may be off or behind; the queue itself knows.
        address = await self._fleet.broker(item.broker)
        queue = _queue(item)
        whole = await span(self._fleet, queue, address)
        stop = min(whole.end, item.look_from + LOOK_COUNT_MAX)
        async for message in walk(self._fleet, Span(queue, address, item.look_from, stop)):
            if message.properties.get(UNIQ_KEY) == item.new_id:
                return self._outcome(item, FOUND, place=_position_text(message))
        if stop < whole.end or whole.begin > item.look_from:
            why = "the target was too long to look through, or its older messages have expired"
            return self._outcome(item, UNKNOWN, why=why)
        return self._outcome(item, NOT_SENT)

    def _outcome(
        self, item: Item, outcome: str, *, place: str | None = None, why: str | None = None
    ) -> Outcome:
        return Outcome(
            item.offset, item.msg_id, outcome, item.topic, item.new_id, place=place, why=why
        )

    async def _queues(self, topic: str) -> list[_Target]:
        if topic not in self._targets:
            route = await self._fleet.route(topic)
            masters = await self._fleet.masters_of(topic)
            self._targets[topic] = [
                _Target(
                    MessageQueue(topic=topic, broker_name=row.broker_name, queue_id=number),
                    masters[row.broker_name],
                )
                for row in sorted(route.queue_datas, key=lambda row: row.broker_name)
                if row.broker_name in masters and row.perm & PERM_WRITE
                for number in range(row.write_queue_nums)
            ]
        return self._targets[topic]


def _queue(item: Item) -> MessageQueue:
    return MessageQueue(topic=item.topic, broker_name=item.broker, queue_id=item.queue)


def _position_text(message: ReceivedMessage) -> str:
    return f"{message.broker_name}/{message.queue_id}/{message.queue_offset}"
