"""Request-reply messaging: a reply is pushed to the producer that waits for it.

The reply names its receiver by client id (property REPLY_TO_CLIENT). The replier is answered when
the receiver has taken the reply, and learns whether that went well. The reply is stored as
well, unless `storeReplyMessageEnable` is off, but nobody has to consume it.
"""

from __future__ import annotations

import logging

from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.members.clients import Clients
from cosmodrome.broker.send.produce import Produce, SendRefusal
from cosmodrome.errors import (
    Code,
    MessageTooLarge,
    ProtocolError,
    Refused,
    StoreUnwritable,
    TimedOut,
    Unreachable,
)
from cosmodrome.wire.bodies import TopicConfig
from cosmodrome.wire.commands.produce import (
    PushReplyMessageToClient,
    SendReply,
    SendReplyMessage,
    SendReplyMessageV2,
    SendRequest,
)
from cosmodrome.wire.message import (
    PUSH_REPLY_TIME,
    REPLY_TO_CLIENT,
    format_properties,
    parse_properties,
    unpack_host,
)
from cosmodrome.wire.table import Call

log = logging.getLogger(__name__)

PUSH_TIMEOUT_MS = 10_000
# Compat: clients cannot read an answer without an id.
NO_ID = "0"


class Replies:
    """The totals count replies that were delivered and those that were not."""

    def __init__(self, base: Foundation, clients: Clients, produce: Produce) -> None:
        self._options = base.options
        self._produce = produce
        self._clients = clients
        self._clock = base.env.clock
        self._store_host = base.address.store_host
        self.delivered_total = 0
        self.failures_total = 0

    @SendReplyMessage.handler
    async def send_reply(self, ask: SendReplyMessage, call: Call) -> SendReply:
        return await self._answer(ask, call)

    @SendReplyMessageV2.handler
    async def send_reply_v2(self, ask: SendReplyMessageV2, call: Call) -> SendReply:
        return await self._answer(ask, call)

    async def _answer(self, ask: SendRequest, call: Call) -> SendReply:
        try:
            topic, queue_id = self._produce.checked(ask, call)
        except Refused as error:
            return self._produce.refusal(error)
        pairs = parse_properties(ask.properties or "")
        why_not = await self._push(ask, call, pairs)
        reply = SendReply(
            msg_id=NO_ID,
            queue_id=queue_id,
            queue_offset=0,
            region=self._options.region_id,
            trace_on=self._options.trace_on,
        )
        if self._options.store_reply_message_enable:
            reply = await self._keep(ask, call, topic, pairs, reply)
        if why_not is None:
            self.delivered_total += 1
            return reply
        self.failures_total += 1
        log.warning("reply_not_delivered topic=%s reason=%r", ask.topic, why_not)
        return SendRefusal(
            code=Code.SYSTEM_ERROR,
            remark=why_not,
            msg_id=reply.msg_id,
            queue_id=reply.queue_id,
            queue_offset=reply.queue_offset,
            region=reply.region,
            trace_on=reply.trace_on,
        )

    async def _keep(
        self,
        ask: SendRequest,
        call: Call,
        topic: TopicConfig,
        pairs: dict[str, str],
        otherwise: SendReply,
    ) -> SendReply:
        try:
            text = format_properties(pairs)
            kept = await self._produce.keep(ask, call, topic, otherwise.queue_id, text)
        except (MessageTooLarge, StoreUnwritable) as error:
            # Compat: the delivery counts, the copy is a courtesy.
            log.warning("reply_not_stored topic=%s error=%s", ask.topic, error)
            return otherwise
        kept.code, kept.remark = Code.SUCCESS, None
        return kept

    async def _push(self, ask: SendRequest, call: Call, pairs: dict[str, str]) -> str | None:
        """Deliver; why that was not possible, None when the receiver has it."""
        client_id = pairs.get(REPLY_TO_CLIENT)
        if not client_id:
            return f"The reply has no property {REPLY_TO_CLIENT}, so nobody can receive it."
        connection = self._clients.producer(client_id)
        if connection is None:
            return (
                f"The client {client_id[:255]} that waits for this reply is not connected to this"
                " broker; reply through the broker that the request came from."
            )
        now_ms = self._clock.now_ms()
        try:
            await connection.call(
                PushReplyMessageToClient(
                    producer_group=ask.producer_group,
                    topic=ask.topic,
                    default_topic=ask.default_topic,
                    default_topic_queue_nums=ask.default_topic_queue_nums,
                    queue_id=ask.queue_id,
                    sys_flag=ask.sys_flag,
                    born_timestamp=ask.born_timestamp,
                    flag=ask.flag,
                    properties=format_properties({PUSH_REPLY_TIME: str(now_ms), **pairs}),
                    reconsume_times=ask.reconsume_times,
                    unit_mode=ask.unit_mode,
                    born_host=_joined(*call.connection.peer[:2]),
                    store_host=_joined(*unpack_host(self._store_host())),
                    store_timestamp=now_ms,
                    body=ask.body,
                ),
                timeout_ms=PUSH_TIMEOUT_MS,
            )
        except (Refused, TimedOut, Unreachable, ProtocolError) as error:
            return f"The client {client_id[:255]} did not take the reply: {error}"
        return None


def _joined(host: str, port: int) -> str:
    # Compat: an IPv6 address has no brackets here; clients split at the last colon.
    return f"{host}:{port}"
