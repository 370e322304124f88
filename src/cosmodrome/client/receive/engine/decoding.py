"""From the body of a pull answer to messages: decoded, filtered, decompressed, named.

A message whose body cannot be decompressed keeps its place among the others, as a
`DamagedMessage`: whoever reads the queue decides what becomes of it, and nobody skips it unseen.

The compressed bodies of one answer may take so much memory together and no more. Where the next one
would not fit, the answer is cut: what is behind that offset is pulled again, when there is room.
"""

from __future__ import annotations

import dataclasses
import logging

from cosmodrome.client.namespace import unwrap
from cosmodrome.client.receive.engine.options import FilterHook
from cosmodrome.client.receive.engine.subscriptions import Subscription
from cosmodrome.client.values import DamagedMessage, ReceivedMessage
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import SYS_COMPRESSED
from cosmodrome.speed.client import outline
from cosmodrome.wire.message import RETRY_TOPIC, BodyTooBig, decompress
from cosmodrome.wire.names import RETRY_PREFIX
from cosmodrome.wire.record import Record, decode_record

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Arrivals:
    messages: list[ReceivedMessage]  # in the order of the queue, the damaged ones among them
    damaged: list[DamagedMessage]
    size: int  # bytes of the records of all messages
    room: int  # bytes that bodies may still grow to
    # What the bodies that were compressed take, by message.
    inflated: dict[ReceivedMessage, int] = dataclasses.field(default_factory=dict)
    cut_at: int | None = None  # offset of the first message for which there was no room


class Decoder:
    def __init__(
        self, group: str, namespace: str, body_bytes_max: int, filters: tuple[FilterHook, ...]
    ) -> None:
        self._group = group
        self._namespace = namespace
        self._body_bytes_max = body_bytes_max
        self._filters = filters

    def decode(
        self,
        data: bytes,
        broker_name: str,
        subscription: Subscription,
        *,
        min_offset: int = -1,
        max_offset: int = -1,
        room: int | None = None,
    ) -> Arrivals:
        """The messages that a pull of this subscription asked for. What was compressed takes at
        most `room` bytes, if that is less than `body_bytes_max`."""
        messages: list[ReceivedMessage] = []
        found = Arrivals(messages, [], len(data), self._body_bytes_max if room is None else room)
        topic = unwrap(self._namespace, subscription.topic)
        again = subscription.topic.startswith(RETRY_PREFIX)
        chosen = bool(subscription.tags)
        plain = not (again or chosen)  # then nothing but the outlines is looked at
        at, make = 0, ReceivedMessage.outlined
        while at < len(data) and found.cut_at is None:
            outlines, at = outline(data, at)
            for begin, size, offset, sys_flag, _, _ in outlines:
                message = make(
                    data, begin, size, offset, broker_name, topic, min_offset, max_offset
                )
                if plain and not sys_flag & SYS_COMPRESSED:
                    messages.append(message)
                elif not self._add(message, sys_flag, subscription, found):
                    break
            if at < len(data) and found.cut_at is None:
                # Not an ordinary record, or a damaged one: this knows both.
                record = decode_record(data, at)
                at += record.size
                message = ReceivedMessage(
                    record, broker_name, topic=topic, min_offset=min_offset, max_offset=max_offset
                )
                self._add(message, record.sys_flag, subscription, found)
        if self._filters:
            found.messages = [message for message in messages if self._kept(message)]
            for message in set(found.inflated).difference(found.messages):
                del found.inflated[message]
        if chosen or self._filters or found.cut_at is not None:
            found.size = sum(message.size for message in found.messages)
        return found

    def _add(
        self, message: ReceivedMessage, sys_flag: int, subscription: Subscription, found: Arrivals
    ) -> bool:
        """Among the others, if its tags are asked for; False when there is no room for it."""
        if subscription.topic.startswith(RETRY_PREFIX):
            self._restore(message)
        if subscription.tags and not subscription.wants(message):
            return True
        if sys_flag & SYS_COMPRESSED:
            limit = min(found.room, self._body_bytes_max)
            try:
                message = self._decompressed(message, limit)
            except BodyTooBig:
                found.cut_at = message.queue_offset
                return False
            if isinstance(message, DamagedMessage):
                found.damaged.append(message)
            else:
                found.inflated[message] = len(message.body)
                found.room -= len(message.body)
        found.messages.append(message)
        return True

    def one(self, record: Record, broker_name: str) -> ReceivedMessage:
        """A message that came without a pull."""
        message = ReceivedMessage(record, broker_name, topic=unwrap(self._namespace, record.topic))
        self._restore(message)
        return self._decompressed(message, self._body_bytes_max)

    def _decompressed(self, message: ReceivedMessage, limit: int) -> ReceivedMessage:
        """BodyTooBig when it is beyond a limit that is lower than that of every body."""
        record = message.record
        try:
            message.body = decompress(record.body, record.sys_flag, limit)
        except ProtocolError as error:
            if limit < self._body_bytes_max and isinstance(error, BodyTooBig):
                raise
            log.error(
                "message cannot be read: topic=%s broker=%s queue=%d offset=%d reason=%s",
                record.topic,
                message.broker_name,
                record.queue_id,
                record.queue_offset,
                error,
            )
            return DamagedMessage.of(message, error)
        return message

    def _restore(self, message: ReceivedMessage) -> None:
        """A message that comes again appears under the topic it was sent to."""
        origin = message.properties.get(RETRY_TOPIC)
        if origin and message.record.topic.startswith(RETRY_PREFIX):
            message.topic = unwrap(self._namespace, origin)

    def _kept(self, message: ReceivedMessage) -> bool:
        if message.damage is not None:
            return True  # a filter could not read it either
        for hook in self._filters:
            try:
                if not hook.keep(self._group, message):
                    return False
            except Exception:
                # In doubt the message is kept: a broken filter must not lose messages.
                log.exception("filter hook failed: group=%s hook=%r", self._group, hook)
        return True
