"""Request and reply over topics: a producer asks, whoever consumes the message answers.

The request carries the id of the asking client. The replier sends its answer to the broker's reply
topic, and the broker pushes it over the connection on which it knows that client, so a client
must be known to a broker (by heartbeat) before it asks there.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Mapping
from typing import Protocol

from cosmodrome.client.instance import Instance
from cosmodrome.client.received import received as from_record
from cosmodrome.client.send.delivery import Delivery
from cosmodrome.client.send.failures import BadMessage, RequestTimedOut
from cosmodrome.client.send.packing import Packed
from cosmodrome.client.values import Message, MessageQueue, ReceivedMessage, SendResult
from cosmodrome.layout import MAGIC_RECORD
from cosmodrome.wire.commands.produce import PushReplyMessageToClient, SendReplyMessageV2
from cosmodrome.wire.message import (
    ARRIVE_TIME,
    CLUSTER,
    CORRELATION_ID,
    MSG_TYPE,
    REPLY_TO_CLIENT,
    TTL,
    format_properties,
    pack_host,
    parse_properties,
    whole_number,
)
from cosmodrome.wire.names import REPLY_TOPIC_SUFFIX
from cosmodrome.wire.record import Record

REPLY_KIND = "reply"
HOST_UNKNOWN = bytes(8)


class ReplyDelivery(Delivery):
    code = SendReplyMessageV2.request_code
    __slots__ = ()


class Pack(Protocol):
    def __call__(
        self, message: Message, *, reserved: Mapping[str, str] | None = None
    ) -> Awaitable[Packed]: ...


class Send(Protocol):
    def __call__(
        self,
        packed: Packed,
        deadline: float,
        *,
        queue: MessageQueue | None = None,
        kind: type[Delivery] = Delivery,
    ) -> Awaitable[SendResult]: ...


class Requests:
    """Both sides; a producer lends its packing and its sending."""

    def __init__(self, instance: Instance, pack: Pack, send: Send) -> None:
        self._instance = instance
        self._pack = pack
        self._send = send
        self._namespace = instance.options.namespace

    async def request(self, message: Message, timeout_ms: int) -> ReceivedMessage:
        instance = self._instance
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1000
        correlation = str(uuid.UUID(int=instance.env.random.getrandbits(128), version=4))
        packed = await self._pack(
            message,
            reserved={
                CORRELATION_ID: correlation,
                REPLY_TO_CLIENT: instance.client_id,
                TTL: str(timeout_ms),
            },
        )
        arrived: asyncio.Future[PushReplyMessageToClient] = loop.create_future()
        instance.replies[correlation] = arrived
        try:
            async with asyncio.timeout_at(deadline):
                await instance.routes.for_sending(packed.topic)
                await instance.be_known()
                await self._send(packed, deadline)
                pushed = await arrived
        except TimeoutError:
            raise RequestTimedOut(
                f"nobody replied to the request {packed.msg_id} on {message.topic} within"
                f" {timeout_ms} ms; check that a consumer of it runs and replies"
            ) from None
        finally:
            del instance.replies[correlation]
        return self._received(pushed)

    def _received(self, pushed: PushReplyMessageToClient) -> ReceivedMessage:
        pairs = parse_properties(pushed.properties or "")
        pairs[ARRIVE_TIME] = str(self._instance.env.clock.now_ms())
        record = Record(
            size=0,
            magic=MAGIC_RECORD,
            body_crc=0,
            queue_id=pushed.queue_id,
            flag=pushed.flag,
            queue_offset=0,
            log_offset=0,
            sys_flag=pushed.sys_flag,
            born_ms=pushed.born_timestamp,
            born_host=_host(pushed.born_host),
            store_ms=pushed.store_timestamp,
            store_host=_host(pushed.store_host),
            reconsume_times=pushed.reconsume_times or 0,
            prepared_offset=0,
            body=pushed.body,
            topic=pushed.topic,
            properties=format_properties(pairs),
        )
        return from_record(record, "", namespace=self._namespace)

    async def reply(
        self, received: ReceivedMessage, body: bytes | str, properties: Mapping[str, str] | None
    ) -> SendResult:
        asked = received.properties
        missing = [name for name in (CORRELATION_ID, REPLY_TO_CLIENT, CLUSTER) if name not in asked]
        if missing:
            raise BadMessage(
                f"message {received.msg_id} expects no reply: it has no property"
                f" {', '.join(missing)}; only messages sent with `request` can be answered"
            )
        topic = asked[CLUSTER] + REPLY_TOPIC_SUFFIX
        kept = (CORRELATION_ID, REPLY_TO_CLIENT, TTL)
        reserved = {name: asked[name] for name in kept if name in asked}
        reserved[MSG_TYPE] = REPLY_KIND
        message = Message(topic, body, properties=properties)
        packed = await self._pack(message, reserved=reserved)
        # Reply topics belong to the brokers, not to a namespace.
        packed.topic = topic
        timeout_ms = self._instance.options.call_timeout_ms
        timeout_ms = min(timeout_ms, whole_number(asked.get(TTL, "")) or timeout_ms)
        deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
        queue = None
        if received.broker_name:
            # The asking client is certainly known to the broker that took the request.
            route = await self._instance.routes.for_sending(topic)
            queues = [q for q in route.write_queues if q.broker_name == received.broker_name]
            queue = queues[0] if queues else None
        return await self._send(packed, deadline, queue=queue, kind=ReplyDelivery)


def _host(text: str) -> bytes:
    ip, _, port = text.rpartition(":")
    try:
        return pack_host(ip.strip("[]/"), int(port))
    except ValueError:
        return HOST_UNKNOWN
