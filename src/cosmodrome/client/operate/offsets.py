"""How far groups have come, for operators: read it, move it, copy it."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from typing import Literal

from cosmodrome.client.operate.fleet import Fleet, queue_order
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.errors import Code, ConfigError, CosmodromeError, Refused
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import ConsumeStats
from cosmodrome.wire.commands.client import GetConsumerConnectionList
from cosmodrome.wire.commands.group import GetConsumeStats, QueryConsumeTimeSpan
from cosmodrome.wire.commands.offset import (
    CloneGroupOffset,
    GetMaxOffset,
    GetMinOffset,
    InvokeBrokerToGetConsumerStatus,
    InvokeBrokerToResetOffset,
    QueryConsumerOffset,
    SearchOffsetByTimestamp,
    UpdateConsumerOffset,
)
from cosmodrome.wire.names import retry_topic
from cosmodrome.wire.report_bodies import (
    GetConsumerStatusBody,
    QueryConsumeTimeSpanBody,
    QueueTimeSpan,
    ResetOffsetBody,
)

THE_END = -1  # as a time, in a request
# Answers that may mean that nobody can be told; then offsets are written instead.
_UNTOLD = frozenset({Code.CONSUMER_NOT_ONLINE, Code.SYSTEM_ERROR, Code.REQUEST_CODE_NOT_SUPPORTED})

Moment = datetime.datetime | int | Literal["begin", "end"]


class NotMoved(CosmodromeError):
    """A group is not where it was put."""


@dataclasses.dataclass(frozen=True, slots=True)
class QueueProgress:
    """Where a group is in one queue."""

    broker_offset: int  # of the next message
    consumer_offset: int  # that the group will read next
    last_store_ms: int  # of the last message the group has read

    @property
    def lag(self) -> int:
        return max(0, self.broker_offset - self.consumer_offset)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupProgress:
    """Where a group is in all its queues."""

    queues: dict[MessageQueue, QueueProgress]
    consume_tps: float

    @property
    def lag(self) -> int:
        """Messages that the group has not read yet."""
        return sum(progress.lag for progress in self.queues.values())


class GroupOffsets:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def progress(self, group: str, topic: str | None = None) -> GroupProgress:
        """Progress against the queue ends, in one topic or in all that the group consumes."""
        full = self._fleet.full(group)
        try:
            targets = await self._fleet.masters_of(retry_topic(full))
        except NoRoute:
            targets = await self._fleet.masters()
        replies = await self._fleet.each(
            targets,
            GetConsumeStats(
                consumer_group=full, topic=None if topic is None else self._fleet.full(topic)
            ),
        )
        queues = {}
        tps = 0.0
        for reply in replies.values():
            stats = bodies.decode(ConsumeStats, reply.body)
            tps += stats.consume_tps
            for queue, row in stats.offset_table.items():
                queues[self._fleet.plain_queue(queue)] = QueueProgress(
                    row.broker_offset, row.consumer_offset, row.last_timestamp
                )
        return GroupProgress(
            dict(sorted(queues.items(), key=lambda item: queue_order(item[0]))), tps
        )

    async def lag(self, group: str, topic: str | None = None) -> int:
        return (await self.progress(group, topic)).lag

    async def time_spans(self, group: str, topic: str) -> list[QueueTimeSpan]:
        """Store times of each queue's ends and of where the group is."""
        full = self._fleet.full(topic)
        replies = await self._fleet.each(
            await self._fleet.masters_of(full),
            QueryConsumeTimeSpan(topic=full, group=self._fleet.full(group)),
        )
        return [
            span
            for reply in replies.values()
            for span in bodies.decode(QueryConsumeTimeSpanBody, reply.body).consume_time_span_set
        ]

    async def of_members(self, group: str, topic: str) -> dict[str, dict[MessageQueue, int]]:
        """Offsets as the members themselves see them, by client id."""
        full = self._fleet.full(topic)
        replies = await self._fleet.each(
            await self._fleet.masters_of(full),
            InvokeBrokerToGetConsumerStatus(topic=full, group=self._fleet.full(group)),
        )
        members: dict[str, dict[MessageQueue, int]] = {}
        for reply in replies.values():
            table = bodies.decode(GetConsumerStatusBody, reply.body).consumer_table
            for client_id, offsets in table.items():
                mine = members.setdefault(client_id, {})
                mine.update({self._fleet.plain_queue(q): at for q, at in offsets.items()})
        return members

    # --- moving ----------------------------------------------------------------------------------

    async def reset(
        self, group: str, topic: str, to: Moment, *, force: bool = True
    ) -> dict[MessageQueue, int]:
        """Move a group to a time, to the beginning or to the end of a topic's queues.

        Members that are online are told by their brokers; where there is none, the offsets are
        written instead. Without `force` a group moves only backwards.
        """
        full_topic, full_group = self._fleet.full(topic), self._fleet.full(group)
        timestamp = _timestamp(to)
        command = InvokeBrokerToResetOffset(
            topic=full_topic, group=full_group, timestamp=timestamp, is_force=force
        )
        moved: dict[MessageQueue, int] = {}
        for name, address in (await self._fleet.masters_of(full_topic)).items():
            try:
                reply = await self._fleet.call(address, command)
            except Refused as refusal:
                if refusal.code not in _UNTOLD or await self._has_members(address, full_group):
                    raise
                moved.update(
                    await self._write(name, address, full_topic, full_group, timestamp, force=force)
                )
            else:
                moved.update(bodies.decode(ResetOffsetBody, reply.body).offset_table)
        return {
            self._fleet.plain_queue(q): at
            for q, at in sorted(moved.items(), key=lambda item: queue_order(item[0]))
        }

    async def _has_members(self, address: str, group: str) -> bool:
        """Members would go on from where they are, whatever is written."""
        try:
            await self._fleet.call(address, GetConsumerConnectionList(consumer_group=group))
        except Refused as refusal:
            if refusal.code != Code.CONSUMER_NOT_ONLINE:
                raise
            return False
        return True

    async def skip(self, group: str, topic: str) -> dict[MessageQueue, int]:
        """Leave everything out that was not consumed yet."""
        return await self.reset(group, topic, "end")

    async def set(self, group: str, queue: MessageQueue, offset: int) -> None:
        """Write one queue's offset. Members that are online go on from where they are and may
        overwrite it: stop them first, or use `reset`. NotMoved when the broker has another one
        afterwards."""
        if offset < 0:
            raise ConfigError(f"offset {offset} is negative; the first message has 0")
        address = await self._fleet.broker(queue.broker_name)
        full_group, full_topic = self._fleet.full(group), self._fleet.full(queue.topic)
        await self._fleet.call(
            address,
            UpdateConsumerOffset(
                consumer_group=full_group,
                topic=full_topic,
                queue_id=queue.queue_id,
                commit_offset=offset,
            ),
        )
        kept = await self._fleet.call(
            address,
            QueryConsumerOffset(
                consumer_group=full_group, topic=full_topic, queue_id=queue.queue_id
            ),
        )
        if kept.offset != offset:
            # Compat: 5.x takes no offsets between a reset and the group's next pull.
            raise NotMoved(
                f"group {group} is at {kept.offset} of queue {queue.queue_id} of {queue.topic} on"
                f" {queue.broker_name}, not at {offset}: a member is online, or a reset has to take"
                " effect first; stop the members, or use `reset`"
            )

    async def clone(self, source: str, target: str, topic: str) -> None:
        """Give one group the progress of another."""
        full = self._fleet.full(topic)
        await self._fleet.each(
            await self._fleet.masters_of(full),
            CloneGroupOffset(
                src_group=self._fleet.full(source),
                dest_group=self._fleet.full(target),
                topic=full,
                offline=False,
            ),
        )

    async def _write(
        self, broker: str, address: str, topic: str, group: str, timestamp: int, *, force: bool
    ) -> dict[MessageQueue, int]:
        route = await self._fleet.route(topic)
        count = max(
            (row.read_queue_nums for row in route.queue_datas if row.broker_name == broker),
            default=0,
        )
        known: dict[MessageQueue, int] = {}
        if not force:
            stats = await self._fleet.call(
                address, GetConsumeStats(consumer_group=group, topic=topic)
            )
            table = bodies.decode(ConsumeStats, stats.body).offset_table
            known = {queue: row.consumer_offset for queue, row in table.items()}

        async def move(queue: MessageQueue) -> int:
            offset = await self.at_time(queue, timestamp, address=address)
            if not force:
                offset = min(offset, known.get(queue, offset))
            await self._fleet.call(
                address,
                UpdateConsumerOffset(
                    consumer_group=group,
                    topic=topic,
                    queue_id=queue.queue_id,
                    commit_offset=offset,
                ),
            )
            return offset

        queues = [
            MessageQueue(topic=topic, broker_name=broker, queue_id=number)
            for number in range(count)
        ]
        offsets = await asyncio.gather(*(move(queue) for queue in queues))
        return dict(zip(queues, offsets, strict=True))

    # --- bounds ----------------------------------------------------------------------------------

    async def bounds(self, queue: MessageQueue) -> tuple[int, int]:
        """Offsets of the oldest message that is kept and of the next one."""
        address = await self._fleet.broker(queue.broker_name)
        topic = self._fleet.full(queue.topic)
        first = await self._fleet.call(address, GetMinOffset(topic=topic, queue_id=queue.queue_id))
        end = await self._fleet.call(address, GetMaxOffset(topic=topic, queue_id=queue.queue_id))
        return first.offset, end.offset

    async def at_time(
        self, queue: MessageQueue, time_ms: int, *, address: str | None = None
    ) -> int:
        """Offset of the first message stored at or after a time; -1 asks for the end."""
        at = address or await self._fleet.broker(queue.broker_name)
        topic = self._fleet.full(queue.topic)
        if time_ms == THE_END:
            end = await self._fleet.call(at, GetMaxOffset(topic=topic, queue_id=queue.queue_id))
            return end.offset
        found = await self._fleet.call(
            at,
            SearchOffsetByTimestamp(topic=topic, queue_id=queue.queue_id, timestamp=time_ms),
        )
        return found.offset


def _timestamp(to: Moment) -> int:
    if to == "begin":
        return 0
    if to == "end":
        return THE_END
    if isinstance(to, datetime.datetime):
        return int(to.timestamp() * 1000)
    if isinstance(to, bool) or not isinstance(to, int) or to < 0:
        raise ConfigError(
            f'{to!r} is not a moment; give a datetime, ms since 1970, "begin" or "end"'
        )
    return to
