"""Single messages, for operators: found by id, key or offset."""

from __future__ import annotations

from cosmodrome.client.operate.fleet import Fleet
from cosmodrome.client.operate.reading import pull_request
from cosmodrome.client.options import split_address
from cosmodrome.client.received import received, received_all
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import Code, ConfigError, ProtocolError, Refused
from cosmodrome.wire import bodies
from cosmodrome.wire.commands.broker import QueryConsumeQueue
from cosmodrome.wire.commands.consume import QueryMessage, ViewMessageById
from cosmodrome.wire.commands.produce import ListPendingTimers
from cosmodrome.wire.commands.transaction import ResumeCheckHalfMessage
from cosmodrome.wire.message import UNIQ_KEY, host_text, parse_offset_message_id
from cosmodrome.wire.record import decode_record
from cosmodrome.wire.report_bodies import (
    PendingTimer,
    PendingTimers,
    QueryConsumeQueueResponseBody,
)

EVER_MS = 2**63 - 1


class Messages:
    def __init__(self, fleet: Fleet, namespace: str) -> None:
        self._fleet = fleet
        self._namespace = namespace

    async def by_id(self, msg_id: str, topic: str | None = None) -> ReceivedMessage:
        """A message by its offset id (`offset_msg_id`) or, with its topic, by the unique
        id that its sender gave it."""
        if topic is not None:
            found = await self.by_unique_key(topic, msg_id)
            if found is not None:
                return found
        try:
            host, log_offset = parse_offset_message_id(msg_id)
            address = _address(host)
        except (ProtocolError, ConfigError):
            raise ConfigError(
                f"{msg_id!r} is no offset id; give the topic as well to search by unique id"
            ) from None
        reply = await self._fleet.call(address, ViewMessageById(offset=log_offset))
        return received(
            decode_record(reply.body), await self._name(address), namespace=self._namespace
        )

    async def by_key(
        self,
        topic: str,
        key: str,
        *,
        max_count: int = 64,
        begin_ms: int = 0,
        end_ms: int = EVER_MS,
    ) -> list[ReceivedMessage]:
        """Messages of a topic that carry a key and were stored in a span of time, oldest first."""
        found = await self._query(topic, key, max_count, begin_ms, end_ms, unique=False)
        # The index knows hashes of keys only.
        return [message for message in found if key in message.keys][:max_count]

    async def by_unique_key(self, topic: str, unique: str) -> ReceivedMessage | None:
        """The message with the id that its sender gave it; None when no broker has it."""
        found = await self._query(topic, unique, 32, 0, EVER_MS, unique=True)
        for message in found:
            if message.properties.get(UNIQ_KEY) == unique:
                return message
        return None

    async def by_offset(self, queue: MessageQueue, offset: int) -> ReceivedMessage | None:
        """The message at a queue offset; None when there is none."""
        reply = await self._fleet.call(
            await self._fleet.broker(queue.broker_name),
            pull_request(self._fleet.full_queue(queue), offset, 1),
        )
        if reply.code != Code.SUCCESS:
            return None
        messages = received_all(
            reply.body,
            queue.broker_name,
            namespace=self._namespace,
            min_offset=reply.min_offset,
            max_offset=reply.max_offset,
        )
        return next((message for message in messages if message.queue_offset == offset), None)

    async def queue_entries(
        self, queue: MessageQueue, index: int, count: int = 10, group: str | None = None
    ) -> QueryConsumeQueueResponseBody:
        """Entries of a consume queue; with a group, whether its filter lets them pass."""
        reply = await self._fleet.call(
            await self._fleet.broker(queue.broker_name),
            QueryConsumeQueue(
                topic=self._fleet.full(queue.topic),
                queue_id=queue.queue_id,
                index=index,
                count=count,
                consumer_group=None if group is None else self._fleet.full(group),
            ),
        )
        return bodies.decode(QueryConsumeQueueResponseBody, reply.body)

    async def resume_transaction(self, offset_msg_id: str) -> None:
        """Ask producers again about a half message that was given up."""
        host, _ = parse_offset_message_id(offset_msg_id)
        await self._fleet.call(_address(host), ResumeCheckHalfMessage(msg_id=offset_msg_id))

    async def pending_timers(
        self, broker: str, topic: str | None = None, *, max_count: int = 100
    ) -> list[PendingTimer]:
        """Timed messages that wait at a Cosmodrome broker, the next due first."""
        reply = await self._fleet.call(
            await self._fleet.broker(broker),
            ListPendingTimers(
                topic=None if topic is None else self._fleet.full(topic), max_num=max_count
            ),
        )
        return bodies.decode(PendingTimers, reply.body).pending

    async def _query(
        self, topic: str, key: str, count: int, begin_ms: int, end_ms: int, *, unique: bool
    ) -> list[ReceivedMessage]:
        full = self._fleet.full(topic)
        command = QueryMessage(
            topic=full,
            key=key,
            max_num=count,
            begin_timestamp=begin_ms,
            end_timestamp=end_ms,
            unique_key_query=unique or None,
        )
        found: list[ReceivedMessage] = []
        for name, address in (await self._fleet.masters_of(full)).items():
            try:
                reply = await self._fleet.call(address, command)
            except Refused as refusal:
                if refusal.code == Code.QUERY_NOT_FOUND:
                    continue
                raise
            found += received_all(reply.body, name, namespace=self._namespace)
        return sorted(found, key=lambda message: message.store_ms)

    async def _name(self, address: str) -> str:
        info = await self._fleet.cluster()
        for name, data in info.broker_addr_table.items():
            if address in data.broker_addrs.values():
                return name
        return ""


def _address(host: bytes) -> str:
    address = host_text(host)
    split_address(address)  # an id that is no offset id has no usable port
    return address
