"""Requests about single queues: pull from an offset, bounds, offsets by time.

Queues carry full topic names here. A broker may answer a pull with the id of the replica to pull
from next; that is remembered per queue.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
from typing import Literal

from cosmodrome.client.instance import Instance
from cosmodrome.client.receive.arrivals import Decoder
from cosmodrome.client.receive.consumer_options import as_ms
from cosmodrome.client.receive.progress import Offsets, broker_address
from cosmodrome.client.receive.subscriptions import Subscription
from cosmodrome.client.routes import MASTER
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import Code, Unreachable
from cosmodrome.wire.commands.consume import PullMessage
from cosmodrome.wire.commands.offset import GetMaxOffset, GetMinOffset, SearchOffsetByTimestamp

PULL_SUSPEND, PULL_INLINE, PULL_LITE = 2, 4, 16
BODY_BYTES_MAX = 64 << 20  # of a body that was compressed

Moment = datetime.datetime | int | Literal["first", "last"]


class PullStatus(enum.Enum):
    FOUND = Code.SUCCESS
    NO_NEW = Code.PULL_NOT_FOUND
    NO_MATCH = Code.PULL_RETRY_IMMEDIATELY
    OFFSET_MOVED = Code.PULL_OFFSET_MOVED


@dataclasses.dataclass(slots=True)
class Pulled:
    """What one pull brought, and where the next one begins."""

    status: PullStatus
    messages: list[ReceivedMessage]
    next_offset: int
    min_offset: int
    max_offset: int


class QueueReader:
    def __init__(self, instance: Instance, group: str, *, lite: bool) -> None:
        self._instance = instance
        self._group = group
        self._lite = PULL_LITE if lite else 0
        self._decoder = Decoder(group, instance.options.namespace, BODY_BYTES_MAX, ())
        self._replicas: dict[MessageQueue, int] = {}

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        subscription: Subscription,
        *,
        max_count: int,
        hold_ms: int = 0,
        timeout_ms: int = 30_000,
    ) -> Pulled:
        """With `hold_ms` the broker waits that long for a message to arrive."""
        reply = await self._instance.links.call(
            await self._address(queue, self._replicas.get(queue, MASTER)),
            PullMessage(
                consumer_group=self._group,
                topic=queue.topic,
                queue_id=queue.queue_id,
                queue_offset=offset,
                max_msg_nums=max_count,
                sys_flag=PULL_INLINE | self._lite | (PULL_SUSPEND if hold_ms else 0),
                commit_offset=0,
                suspend_timeout_millis=hold_ms,
                subscription=subscription.expression,
                sub_version=subscription.version,
                expression_type=subscription.kind,
            ),
            timeout_ms,
        )
        self._replicas[queue] = reply.suggest_which_broker_id
        messages: list[ReceivedMessage] = []
        if reply.code == Code.SUCCESS:
            messages = self._decoder.decode(
                reply.body,
                queue.broker_name,
                subscription,
                min_offset=reply.min_offset,
                max_offset=reply.max_offset,
            ).messages
        return Pulled(
            PullStatus(reply.code),
            messages,
            reply.next_begin_offset,
            reply.min_offset,
            reply.max_offset,
        )

    def forget(self, queue: MessageQueue) -> None:
        self._replicas.pop(queue, None)

    async def begin(self, queue: MessageQueue) -> int:
        command = GetMinOffset(topic=queue.topic, queue_id=queue.queue_id)
        return (await self._instance.links.call(await self._address(queue), command)).offset

    async def end(self, queue: MessageQueue) -> int:
        command = GetMaxOffset(topic=queue.topic, queue_id=queue.queue_id)
        return (await self._instance.links.call(await self._address(queue), command)).offset

    async def at(self, queue: MessageQueue, when: datetime.datetime | int) -> int:
        """Offset of the first message stored at or after a time."""
        command = SearchOffsetByTimestamp(
            topic=queue.topic, queue_id=queue.queue_id, timestamp=as_ms(when)
        )
        return (await self._instance.links.call(await self._address(queue), command)).offset

    async def first_position(self, queue: MessageQueue, stored: Offsets, policy: Moment) -> int:
        """Where a group begins in a queue: where it was, or what the policy says."""
        known = await stored.read(queue)
        if known is not None:
            return known
        if isinstance(policy, str):
            return 0 if policy == "first" else await self.end(queue)
        return await self.at(queue, policy)

    async def _address(self, queue: MessageQueue, replica: int = MASTER) -> str:
        routes = self._instance.routes
        if routes.address(queue.broker_name, replica) is None:
            # A queue that the user named: its topic may not have been asked for yet.
            route = await routes.get(queue.topic, fresh=True)
            if queue.broker_name not in route.addresses:
                raise Unreachable(
                    f"topic {queue.topic} has no queue on broker {queue.broker_name!r}; its"
                    f" brokers are {', '.join(sorted(route.addresses)) or 'none'}"
                )
        return routes.address(queue.broker_name, replica) or broker_address(
            routes, queue.broker_name
        )
