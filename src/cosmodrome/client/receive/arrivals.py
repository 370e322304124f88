"""From the body of a pull answer to messages: decoded, filtered, decompressed, named.

A body that cannot be decompressed is not handed out; it is reported beside the others so that
it can be put aside instead of being lost.
"""

from __future__ import annotations

import dataclasses
import logging

from cosmodrome.client.namespace import unwrap
from cosmodrome.client.receive.consumer_options import FilterHook
from cosmodrome.client.receive.subscriptions import Subscription
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import SYS_COMPRESSED
from cosmodrome.speed.clientside import outline
from cosmodrome.wire.message import RETRY_TOPIC, decompress
from cosmodrome.wire.names import RETRY_PREFIX
from cosmodrome.wire.record import Record, decode_record

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Arrivals:
    messages: list[ReceivedMessage]
    damaged: list[ReceivedMessage]  # their bodies are as stored


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
    ) -> Arrivals:
        """The wanted messages of an answer to a pull of this subscription."""
        messages: list[ReceivedMessage] = []
        damaged: list[ReceivedMessage] = []
        topic = unwrap(self._namespace, subscription.topic)
        again = subscription.topic.startswith(RETRY_PREFIX)
        chosen = bool(subscription.tags)
        plain = not (again or chosen)  # then nothing but the outlines is looked at
        at, make = 0, ReceivedMessage.outlined
        while at < len(data):
            found, at = outline(data, at)
            for begin, size, offset, sys_flag, _, _ in found:
                message = make(
                    data, begin, size, offset, broker_name, topic, min_offset, max_offset
                )
                if plain and not sys_flag & SYS_COMPRESSED:
                    messages.append(message)
                else:
                    self._sort(message, sys_flag, subscription, messages, damaged)
            if at < len(data):
                # Not an ordinary record, or a damaged one: this knows both.
                record = decode_record(data, at)
                at += record.size
                message = ReceivedMessage(
                    record, broker_name, topic=topic, min_offset=min_offset, max_offset=max_offset
                )
                self._sort(message, record.sys_flag, subscription, messages, damaged)
        if self._filters:
            messages = [message for message in messages if self._kept(message)]
        return Arrivals(messages, damaged)

    def _sort(
        self,
        message: ReceivedMessage,
        sys_flag: int,
        subscription: Subscription,
        messages: list[ReceivedMessage],
        damaged: list[ReceivedMessage],
    ) -> None:
        """To the messages, to the damaged ones, or nowhere."""
        if sys_flag & SYS_COMPRESSED and not self._inflate(message):
            damaged.append(message)
            return
        if subscription.topic.startswith(RETRY_PREFIX):
            self._restore(message)
        if not subscription.tags or subscription.wants(message):
            messages.append(message)

    def one(self, record: Record, broker_name: str) -> ReceivedMessage:
        """A message that came without a pull; its body stays as stored if it is damaged."""
        message = ReceivedMessage(record, broker_name, topic=unwrap(self._namespace, record.topic))
        self._inflate(message)
        self._restore(message)
        return message

    def _inflate(self, message: ReceivedMessage) -> bool:
        record = message.record
        try:
            message.body = decompress(record.body, record.sys_flag, self._body_bytes_max)
        except ProtocolError as error:
            log.error(
                "message cannot be read: topic=%s broker=%s queue=%d offset=%d reason=%s",
                *(record.topic, message.broker_name, record.queue_id, record.queue_offset, error),
            )
            return False
        return True

    def _restore(self, message: ReceivedMessage) -> None:
        """A message that comes again appears under the topic it was sent to."""
        origin = message.properties.get(RETRY_TOPIC)
        if origin and message.record.topic.startswith(RETRY_PREFIX):
            message.topic = unwrap(self._namespace, origin)

    def _kept(self, message: ReceivedMessage) -> bool:
        for hook in self._filters:
            try:
                if not hook.keep(self._group, message):
                    return False
            except Exception:
                # In doubt the message is kept: a broken filter must not lose messages.
                log.exception("filter hook failed: group=%s hook=%r", self._group, hook)
        return True
