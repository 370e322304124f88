"""Sends: from a request to stored messages and the answer that promises them.

Every check happens before the store is asked, in upstream's order, because clients react to
the code: 1, 14, 16 and 17 make a producer try another broker, 13 does not. A send runs in one
turn of the loop, from its first check until the store knows that somebody waits for the
message. So messages of one connection keep their order, and a write that fails cannot take a
message back before its sender is registered to hear of it.

A transactional message becomes a half message here (see `halves`); its end comes later.

Properties are stored rewritten (Compat: 4.9.8): malformed pairs vanish, `CLUSTER` is added,
there is no separator behind the last pair, and `WAIT`, which only steers this send, is left
out of plain messages (those that wait for a later time or for a commit keep it). Messages of
a batch keep their text and get the batch's appended.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cosmodrome.broker.counts.pressure import Pressure
from cosmodrome.broker.counts.put_times import PutTimes
from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.later.deferral import Deferral, delay_level, is_timed
from cosmodrome.broker.later.halves import COPY_PROPERTIES_BYTES, HALF_QUEUES, make_half
from cosmodrome.broker.later.recall import Handle, make_handle
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.topics import PERM_READ_WRITE
from cosmodrome.errors import Code, MessageTooLarge, Refused, StoreBusy, StoreUnwritable
from cosmodrome.layout import (
    BATCH_ITEM_HEAD,
    PAIR_END,
    PROPERTIES_BYTES_MAX,
    SYS_MULTI_TAGS,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_TRANSACTION_MASK,
    TOPIC_UNIT,
    TOPIC_UNIT_SUBSCRIPTION,
)
from cosmodrome.store.store import Draft, PutStatus, Stored
from cosmodrome.transport.router import PendingReply
from cosmodrome.wire.bodies import PERM_WRITE, TopicConfig
from cosmodrome.wire.commands.produce import (
    SendBatchMessage,
    SendMessage,
    SendMessageV2,
    SendReply,
    SendRequest,
)
from cosmodrome.wire.message import (
    CLUSTER,
    DELAY,
    PRODUCER_GROUP,
    TRANSACTION_PREPARED,
    UNIQ_KEY,
    WAIT,
    format_properties,
    offset_message_id,
    pack_host,
    parse_properties,
)
from cosmodrome.wire.names import (
    HALF_TOPIC,
    RETRY_PREFIX,
    SEND_FORBIDDEN_TOPICS,
    check_topic,
    dlq_topic,
)
from cosmodrome.wire.table import Call

# Compat: clients from 3.4.9 on say themselves how often a message may be retried.
VERSION_WITH_OWN_RETRY_LIMIT = 121
MULTI_TAG = "MULTI_TAG"
DLQ_QUEUES = 1
# Each message of a batch gets the properties of the batch, so a small request could fill the log.
BATCH_GROWTH_MAX = 16
TIMER = "TIMER_"  # how the properties begin that ask for a delivery time


class SendRefusal(SendReply):
    """A refused send has no queue and offset, but still has region and tracing."""

    msg_id: str | None = None  # type: ignore[assignment]
    queue_id: int | None = None  # type: ignore[assignment]
    queue_offset: int | None = None  # type: ignore[assignment]


class Accepted(NamedTuple):
    topic: str  # where it is stored
    stored: Sequence[Stored]
    queue_id: int  # what the sender is told, also when the message went to the dead letters
    wait: bool
    recall_handle: str | None = None


class BatchItem(NamedTuple):
    flag: int
    body: bytes
    properties: str


_UNPROMISED = {
    PutStatus.FLUSH_DISK_TIMEOUT: (
        Code.FLUSH_DISK_TIMEOUT,
        "The message is stored, but its sync to disk is still running after"
        " syncFlushTimeout; check the disk of the broker.",
    ),
    PutStatus.SLAVE_NOT_AVAILABLE: (
        Code.SLAVE_NOT_AVAILABLE,
        "The message is stored on the master only: no slave is linked, or it is further behind"
        " than haSlaveFallbehindMax; check the slave.",
    ),
    PutStatus.FLUSH_SLAVE_TIMEOUT: (
        Code.FLUSH_SLAVE_TIMEOUT,
        "The message is stored, but no slave reported it within slaveTimeout; check the slave"
        " and the network between.",
    ),
}


class Produce:
    """Takes messages. The totals count what was stored and what was refused."""

    def __init__(
        self,
        base: Foundation,
        members: Members,
        deferral: Deferral,
        put_times: PutTimes,
        pressure: Pressure,
    ) -> None:
        self._options = base.options
        self._role = base.role
        self._store = base.store
        self._topics = members.topics
        self._groups = members.groups
        self._deferral = deferral
        self._env = base.env
        self._store_host = base.address.store_host
        self._body_bytes_max = base.store_options.max_message_size
        self.stats = base.stats
        self._put_times = put_times
        self._pressure = pressure
        self.failures_total = 0
        self.unpromised = dict.fromkeys(_UNPROMISED, 0)  # sends that were stored, not promised

    @SendMessage.handler
    def send(self, ask: SendMessage, call: Call) -> SendReply | PendingReply[SendReply]:
        return self._answer(ask, call)

    @SendMessageV2.handler
    def send_v2(self, ask: SendMessageV2, call: Call) -> SendReply | PendingReply[SendReply]:
        return self._answer(ask, call)

    @SendBatchMessage.handler
    def send_batch(self, ask: SendBatchMessage, call: Call) -> SendReply | PendingReply[SendReply]:
        ask.batch = True
        return self._answer(ask, call)

    # --- answering ---------------------------------------------------------------------------

    def _answer(self, ask: SendRequest, call: Call) -> SendReply | PendingReply[SendReply]:
        # Compat: a single-message code with the batch mark set carries a batch too.
        accept = self._accept_batch if ask.batch else self._accept_one
        try:
            return self._when_durable(accept(ask, call), self._reply_or_refusal)
        except (Refused, MessageTooLarge, StoreUnwritable) as error:
            return self.refusal(error)

    async def keep(
        self, ask: SendRequest, call: Call, topic: TopicConfig, queue_id: int, text: str
    ) -> SendReply:
        """Store a message that was checked, with the properties `text`, just as it is."""
        draft = self._draft(ask, call, topic, queue_id)
        draft.body, draft.properties = ask.body, text
        draft.sys_flag &= ~SYS_TRANSACTION_MASK
        stored = (self._store.append(draft),)
        accepted = Accepted(draft.topic, stored, queue_id, True)
        return await self._when_durable(accepted, self._reply)

    def _when_durable(
        self,
        accepted: Accepted,
        make: Callable[[Accepted, float, asyncio.Future[PutStatus]], SendReply],
    ) -> PendingReply[SendReply]:
        """The answer, once the promise can be made; to be called in the turn of the append."""
        began = asyncio.get_running_loop().time()
        durable = self._store.durable(accepted.stored[-1].end, wait=accepted.wait)
        return PendingReply(durable, functools.partial(make, accepted, began))

    def _reply_or_refusal(
        self, accepted: Accepted, began: float, durable: asyncio.Future[PutStatus]
    ) -> SendReply:
        try:
            return self._reply(accepted, began, durable)
        except StoreUnwritable as error:
            return self.refusal(error)

    def _reply(
        self, accepted: Accepted, began: float, durable: asyncio.Future[PutStatus]
    ) -> SendReply:
        topic, stored, queue_id, _, recall_handle = accepted
        status = durable.result()
        if status is not PutStatus.OK:
            self.unpromised[status] += 1
        self._put_times.add(asyncio.get_running_loop().time() - began)
        size = sum(one.size for one in stored)
        self.stats.put(topic, stored[0].queue_id, len(stored), size)
        host = self._store_host()
        msg_id = ",".join([offset_message_id(host, one.log_offset) for one in stored])
        reply = self.answer(status, msg_id, queue_id, stored[0].queue_offset)
        reply.recall_handle = recall_handle
        return reply

    def answer(self, status: PutStatus, msg_id: str, queue_id: int, queue_offset: int) -> SendReply:
        reply = SendReply(
            msg_id=msg_id,
            queue_id=queue_id,
            queue_offset=queue_offset,
            region=self._options.region_id,
            trace_on=self._options.trace_on,
        )
        if status is not PutStatus.OK:
            reply.code, reply.remark = _UNPROMISED[status]
        return reply

    def refusal(self, error: Refused | MessageTooLarge | StoreUnwritable) -> SendReply:
        self.failures_total += 1
        if isinstance(error, Refused):
            code, remark = error.code, error.remark
        elif isinstance(error, MessageTooLarge):
            code, remark = Code.MESSAGE_ILLEGAL, str(error)
        else:
            busy = isinstance(error, StoreBusy)
            code = Code.SYSTEM_BUSY if busy else Code.SERVICE_NOT_AVAILABLE
            remark = f"[REJECTREQUEST] {error}" if busy else str(error)
        return SendRefusal(
            code=code,
            remark=remark,
            region=self._options.region_id,
            trace_on=self._options.trace_on,
        )

    # --- for the fast lane -------------------------------------------------------------------

    @property
    def takes_plainly(self) -> bool:
        """Whether nothing but topic, queue and the message itself decides about a send."""
        return (
            not self._pressure.overloaded
            and bool(self._options.broker_permission & PERM_WRITE)
            and not (self._options.start_accept_send_request_time_stamp and self._opens_later_ms)
        )

    def plain_topic(self, name: str) -> TopicConfig | None:
        """The topic, if a plain message with a good queue id may go to it without more ado."""
        if name.startswith(RETRY_PREFIX) or name in SEND_FORBIDDEN_TOPICS:
            return None
        try:
            check_topic(name)
        except Refused:
            return None
        return self._topics.get(name)

    # --- accepting ---------------------------------------------------------------------------

    def checked(self, ask: SendRequest, call: Call) -> tuple[TopicConfig, int]:
        """Topic and queue of a message that may be stored; Refused otherwise."""
        topic = self._checked_topic(ask, call)
        queue_id = self._checked_queue(ask, topic)
        self._checked_body(ask.body)
        return topic, queue_id

    def _accept_one(self, ask: SendRequest, call: Call) -> Accepted:
        topic, queue_id = self.checked(ask, call)
        target, target_queue_id = topic.topic_name, queue_id
        properties = parse_properties(ask.properties or "")
        if target.startswith(RETRY_PREFIX) and self._is_dead(ask, call):
            dead = dlq_topic(target.removeprefix(RETRY_PREFIX))
            topic = self._topics.ensure(dead, DLQ_QUEUES, PERM_READ_WRITE, call=call)
            target, target_queue_id = dead, 0
            if DELAY in properties:
                properties[DELAY] = "0"  # a dead letter is not delivered again
        half = self._is_half(ask, properties)
        wait_text = properties.pop(WAIT, None)
        properties[CLUSTER] = self._options.broker_cluster_name
        draft = self._draft(ask, call, topic, target_queue_id)
        draft.topic = target
        draft.body = ask.body
        deliver_ms = None
        if half:
            self._make_half(ask, draft, properties)
        else:
            deliver_ms = self._deferral.redirect(draft, properties)
        if draft.topic != target and wait_text is not None:
            properties[WAIT] = wait_text
        draft.properties = _checked_text(
            format_properties(properties),
            "The properties text has",
            PROPERTIES_BYTES_MAX - (COPY_PROPERTIES_BYTES if half else 0),
        )
        handle = None
        if deliver_ms is not None and UNIQ_KEY in properties:
            handle = make_handle(
                Handle(target, self._options.broker_name, deliver_ms, properties[UNIQ_KEY])
            )
        # The producer's word about a half can be taken only when the half is safe.
        wait = half or wait_text is None or _truth(wait_text)
        return Accepted(draft.topic, (self._store.append(draft),), queue_id, wait, handle)

    def _accept_batch(self, ask: SendRequest, call: Call) -> Accepted:
        topic = self._checked_topic(ask, call)
        queue_id = self._checked_queue(ask, topic)
        if topic.topic_name.startswith(RETRY_PREFIX):
            raise Refused(
                Code.MESSAGE_ILLEGAL,
                f"A batch cannot go to the retry topic {topic.topic_name}; send its messages"
                " one by one.",
            )
        if ask.sys_flag & SYS_TRANSACTION_MASK:
            raise Refused(Code.MESSAGE_ILLEGAL, "A batch cannot be transactional; send it plain.")
        shared = parse_properties(ask.properties or "")
        _check_batch_pairs(shared, "The batch")
        shared[CLUSTER] = self._options.broker_cluster_name
        shared_text = format_properties(shared)
        drafts = []
        left_bytes = BATCH_GROWTH_MAX * self._body_bytes_max
        for number, item in enumerate(parse_batch(self._checked_body(ask.body))):
            draft = self._draft(ask, call, topic, queue_id)
            draft.flag = item.flag
            draft.body = item.body
            draft.properties = _checked_text(
                _joined(item.properties, shared_text), f"Batch item {number}: its properties have"
            )
            drafts.append(draft)
            left_bytes -= len(draft.body) + len(draft.properties)
            if left_bytes < 0:
                raise Refused(
                    Code.MESSAGE_ILLEGAL,
                    f"With the properties of the batch its messages have more than"
                    f" {BATCH_GROWTH_MAX} times maxMessageSize {self._body_bytes_max} bytes; send"
                    " fewer at once, or move shared properties into the bodies.",
                )
        if not drafts:
            raise Refused(Code.MESSAGE_ILLEGAL, "The batch holds no message; send at least one.")
        stored = self._store.append_batch(drafts)
        return Accepted(topic.topic_name, stored, queue_id, _truth(shared.get(WAIT, "true")))

    def _draft(self, ask: SendRequest, call: Call, topic: TopicConfig, queue_id: int) -> Draft:
        store_host = self._store_host()
        if not store_host:
            raise StoreUnwritable("This broker is still starting; send to another or try again.")
        sys_flag = ask.sys_flag
        if sys_flag & SYS_TRANSACTION_MASK in (SYS_PREPARED, SYS_ROLLBACK):
            sys_flag &= ~SYS_TRANSACTION_MASK  # no queue would show it; a half has no mark either
        if topic.topic_filter_type == MULTI_TAG:
            sys_flag |= SYS_MULTI_TAGS
        return Draft(
            topic=topic.topic_name,
            queue_id=queue_id,
            body=b"",
            properties="",
            born_host=packed_host(*call.connection.peer[:2]),
            store_host=store_host,
            flag=ask.flag,
            sys_flag=sys_flag,
            born_ms=ask.born_timestamp,
            reconsume_times=ask.reconsume_times or 0,
        )

    # --- checks ------------------------------------------------------------------------------

    @property
    def _opens_later_ms(self) -> int:
        """From when on messages are taken, 0 when they are taken now."""
        opens_ms = self._options.start_accept_send_request_time_stamp
        return opens_ms if opens_ms and self._env.clock.now_ms() < opens_ms else 0

    def _checked_topic(self, ask: SendRequest, call: Call) -> TopicConfig:
        if not self._role.takes_sends:
            raise Refused(Code.SERVICE_NOT_AVAILABLE, "This broker is a slave; send to its master.")
        self._pressure.check()
        options = self._options
        opens_ms = self._opens_later_ms
        if opens_ms:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"This broker takes messages from {opens_ms} (ms since 1970) on, as its"
                " startAcceptSendRequestTimeStamp says; send to another broker until then.",
            )
        topic = self._topics.get(ask.topic)
        if not options.broker_permission & PERM_WRITE and topic is not None and topic.order:
            # Compat: other topics are still taken; name servers hide an unwritable broker.
            raise Refused(
                Code.NO_PERMISSION,
                f"Broker {options.broker_name} is not writable (brokerPermission"
                f" {options.broker_permission}) and {ask.topic} is an order topic.",
            )
        check_topic(ask.topic)
        if ask.topic in SEND_FORBIDDEN_TOPICS:
            raise Refused(
                Code.NO_PERMISSION,
                f"Topic {ask.topic} belongs to the broker and takes no messages from clients;"
                " send to a topic of your own.",
            )
        if topic is not None:
            return topic
        unit_flag = 0
        if ask.unit_mode:
            retry = ask.topic.startswith(RETRY_PREFIX)
            unit_flag = TOPIC_UNIT_SUBSCRIPTION if retry else TOPIC_UNIT
        return self._topics.create_on_send(
            ask.topic, ask.default_topic, ask.default_topic_queue_nums, unit_flag, call
        )

    def _checked_queue(self, ask: SendRequest, topic: TopicConfig) -> int:
        queues = max(topic.read_queue_nums, topic.write_queue_nums)
        if ask.queue_id >= queues:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Queue {ask.queue_id} does not exist: {topic.topic_name} has {queues} queues,"
                " counted from 0; refresh the route of the topic.",
            )
        if ask.queue_id >= 0:
            return ask.queue_id
        if topic.write_queue_nums <= 0:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Topic {topic.topic_name} has no queue to write to; give it writeQueueNums.",
            )
        return self._env.random.randrange(topic.write_queue_nums)

    def _is_dead(self, ask: SendRequest, call: Call) -> bool:
        """Whether a message on its way to a retry topic has used up its attempts."""
        group = ask.topic.removeprefix(RETRY_PREFIX)
        config = self._groups.find(group, call)
        if config is None:
            raise Refused(
                Code.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"Consumer group {group} does not exist on this broker; create it first, for"
                " example with `mqadmin updateSubGroup`.",
            )
        limit = config.retry_max_times
        own_limit = ask.max_reconsume_times
        if own_limit is not None and call.frame.version >= VERSION_WITH_OWN_RETRY_LIMIT:
            limit = own_limit
        return (ask.reconsume_times or 0) >= limit

    def _is_half(self, ask: SendRequest, properties: dict[str, str]) -> bool:
        """Whether the message waits for the end of its transaction."""
        # Compat: retries of a transactional message still have the marks of the first send.
        if ask.topic.startswith(RETRY_PREFIX) or (
            ask.reconsume_times and delay_level(properties) > 0
        ):
            return False
        if _truth(properties.get(TRANSACTION_PREPARED, "")):
            if self._options.reject_transaction_message:
                raise Refused(
                    Code.NO_PERMISSION,
                    f"Broker {self._options.broker_name} rejects transactional messages, as its"
                    " rejectTransactionMessage says; send them to another broker.",
                )
            return True
        if ask.sys_flag & SYS_TRANSACTION_MASK in (SYS_PREPARED, SYS_ROLLBACK):
            # No queue would ever show such a record, so taking it would lose it.
            raise Refused(
                Code.MESSAGE_ILLEGAL,
                f"sysFlag {ask.sys_flag} marks a transaction, but the property"
                f" {TRANSACTION_PREPARED} is not true; send it with both or with neither.",
            )
        return False

    def _make_half(self, ask: SendRequest, draft: Draft, properties: dict[str, str]) -> None:
        properties.setdefault(PRODUCER_GROUP, ask.producer_group)
        # A delay that the commit could not keep is refused now, while somebody listens.
        self._deferral.redirect(dataclasses.replace(draft), dict(properties))
        make_half(draft, properties)
        self._topics.ensure(HALF_TOPIC, HALF_QUEUES, PERM_READ_WRITE)

    def _checked_body(self, body: bytes) -> bytes:
        if len(body) > self._body_bytes_max:
            raise Refused(
                Code.MESSAGE_ILLEGAL,
                f"The body has {len(body)} bytes, more than maxMessageSize"
                f" {self._body_bytes_max}; send less at once or raise the limit.",
            )
        return body


def parse_batch(body: bytes) -> Iterator[BatchItem]:
    """The items of a batch body; Refused with the item and position of the first bad one.

    Magic and checksum of an item mean nothing: clients write zeros and the log has its own.
    """
    position = number = 0
    while position < len(body):
        left = len(body) - position
        if left < BATCH_ITEM_HEAD.size + 2:
            raise _bad_item(number, position, f"only {left} bytes are left for its lengths")
        size, _, _, flag, body_bytes = BATCH_ITEM_HEAD.unpack_from(body, position)
        if not BATCH_ITEM_HEAD.size + 2 <= size <= left:
            raise _bad_item(number, position, f"its size {size} does not fit {left} bytes")
        if not 0 <= body_bytes <= size - BATCH_ITEM_HEAD.size - 2:
            raise _bad_item(number, position, f"its body of {body_bytes} bytes does not fit")
        body_at = position + BATCH_ITEM_HEAD.size
        length_at = body_at + body_bytes
        text_at = length_at + 2
        end = position + size
        text_bytes = int.from_bytes(body[length_at:text_at], "big", signed=True)
        if text_bytes != end - text_at:
            room = end - text_at
            why = f"its properties have {text_bytes} bytes, its size {size} leaves {room}"
            raise _bad_item(number, position, why)
        try:
            text = body[text_at:end].decode()
        except UnicodeDecodeError as error:
            raise _bad_item(number, position, f"its properties are not UTF-8: {error}") from None
        if DELAY in text or TRANSACTION_PREPARED in text or TIMER in text:
            _check_batch_pairs(parse_properties(text), f"Batch item {number}")
        yield BatchItem(flag, body[body_at:length_at], text)
        position = end
        number += 1


def _bad_item(number: int, position: int, why: str) -> Refused:
    return Refused(
        Code.MESSAGE_ILLEGAL,
        f"Batch item {number} at byte {position} is malformed: {why}; nothing was stored.",
    )


def _check_batch_pairs(pairs: dict[str, str], who: str) -> None:
    if delay_level(pairs) > 0 or is_timed(pairs):
        raise Refused(
            Code.MESSAGE_ILLEGAL,
            f"{who} has a delay level or a delivery time; messages of a batch cannot be delayed.",
        )
    if _truth(pairs.get(TRANSACTION_PREPARED, "")):
        raise Refused(
            Code.MESSAGE_ILLEGAL, f"{who} is transactional; messages of a batch cannot be."
        )


def _joined(own: str, shared: str) -> str:
    # Compat: the item's text stays as it is; duplicates of the batch's pairs do occur.
    return own + shared if not own or own.endswith(PAIR_END) else own + PAIR_END + shared


def _checked_text(text: str, who: str, bytes_max: int = PROPERTIES_BYTES_MAX) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise Refused(Code.MESSAGE_ILLEGAL, f"{who} characters that are not Unicode.") from None
    if size > bytes_max:
        raise Refused(
            Code.MESSAGE_ILLEGAL,
            f"{who} {size} bytes, more than {bytes_max}; move data into the body.",
        )
    return text


def _truth(text: str) -> bool:
    return text.lower() == "true"


@functools.lru_cache(maxsize=4096)
def packed_host(ip: str, port: int) -> bytes:
    return pack_host(ip, port)
