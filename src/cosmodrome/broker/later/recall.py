"""Calls back a timed message that is still waiting.

A handle names the message: urlsafe base64 of `v1 topic brokerName deliveryTime uniqueKey`. The
sender got it with the answer to its send. Calling back stores a cancellation next to the
message (see `timers`), so it is as durable as the message itself.
"""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.later.deferral import Deferral
from cosmodrome.broker.members.topics import Topics, existing_topic
from cosmodrome.errors import Code, MessageTooLarge, Refused, StoreUnwritable
from cosmodrome.store.store import Draft
from cosmodrome.wire.bodies import PERM_WRITE
from cosmodrome.wire.commands.produce import RecallMessage, RecallMessageReply
from cosmodrome.wire.message import (
    PRODUCER_GROUP,
    TAGS,
    TIMER_DELETE_UNIQ_KEY,
    TIMER_DELIVER_MS,
    UNIQ_KEY,
    format_properties,
    pack_host,
)
from cosmodrome.wire.table import Call

VERSION = "v1"
# Compat: what 5.x stores for a cancellation.
RECALL_TAG = "_RECALL_TAG_"
RECALL_BODY = b"0"
HANDLE_CHARACTERS_MAX = 2048


class Handle(NamedTuple):
    topic: str
    broker_name: str
    deliver_ms: int
    unique_key: str


def make_handle(handle: Handle) -> str:
    text = f"{VERSION} {handle.topic} {handle.broker_name} {handle.deliver_ms} {handle.unique_key}"
    return base64.urlsafe_b64encode(text.encode()).decode()


def parse_handle(text: str) -> Handle:
    try:
        plain = base64.urlsafe_b64decode(text[:HANDLE_CHARACTERS_MAX] + "==").decode()
        version, topic, broker_name, deliver, unique_key = plain.split(" ")
        if version == VERSION and deliver.isascii() and deliver.isdigit() and unique_key:
            return Handle(topic, broker_name, int(deliver[:19]), unique_key)
    except (binascii.Error, ValueError):
        pass
    raise Refused(
        Code.ILLEGAL_OPERATION,
        f"{text[:64]!r} is not a recall handle; use the one that the answer to the send carried.",
    )


class Recall:
    def __init__(self, base: Foundation, topics: Topics, deferral: Deferral) -> None:
        self._options = base.options
        self._store = base.store
        self._topics = topics
        self._deferral = deferral
        self._clock = base.env.clock
        self._store_host = base.address.store_host
        self._role = base.role

    @RecallMessage.handler
    async def recall(self, ask: RecallMessage, call: Call) -> RecallMessageReply:
        handle = self._checked(ask)
        now_ms = self._clock.now_ms()
        pairs = {
            TIMER_DELETE_UNIQ_KEY: handle.unique_key,
            UNIQ_KEY: handle.unique_key,
            TIMER_DELIVER_MS: str(handle.deliver_ms),
            TAGS: RECALL_TAG,
        }
        if ask.producer_group:
            pairs[PRODUCER_GROUP] = ask.producer_group
        draft = Draft(
            topic=handle.topic,
            queue_id=0,
            body=RECALL_BODY,
            properties="",
            born_host=pack_host(*call.connection.peer[:2]),
            store_host=self._store_host(),
            born_ms=now_ms,
        )
        self._deferral.redirect(draft, pairs)
        draft.properties = format_properties(pairs)
        try:
            # A slow sync is still a cancellation: this process has seen it.
            await self._store.durable(self._store.append(draft).end)
        except (StoreUnwritable, MessageTooLarge) as error:
            raise Refused(Code.SYSTEM_ERROR, f"The recall could not be stored: {error}") from None
        return RecallMessageReply(msg_id=handle.unique_key)

    def _checked(self, ask: RecallMessage) -> Handle:
        options = self._options
        if not self._role.takes_sends:
            raise Refused(
                Code.SLAVE_NOT_AVAILABLE, "This broker is a slave; recall at its master instead."
            )
        opens_ms = options.start_accept_send_request_time_stamp
        if not options.broker_permission & PERM_WRITE or self._clock.now_ms() < opens_ms:
            raise Refused(
                Code.SERVICE_NOT_AVAILABLE,
                f"Broker {options.broker_name} takes no messages now (brokerPermission,"
                " startAcceptSendRequestTimeStamp), so it cannot store a recall.",
            )
        existing_topic(self._topics, ask.topic)
        handle = parse_handle(ask.recall_handle)
        if handle.topic != ask.topic or handle.broker_name != options.broker_name:
            raise Refused(
                Code.ILLEGAL_OPERATION,
                f"The handle belongs to topic {handle.topic[:127]} on broker"
                f" {handle.broker_name[:127]}, not to {ask.topic} on {options.broker_name}; ask the"
                " broker that it names.",
            )
        if handle.deliver_ms <= self._clock.now_ms():
            raise Refused(
                Code.ILLEGAL_OPERATION,
                "The delivery time of the message is over, so it cannot be recalled any more.",
            )
        return handle
