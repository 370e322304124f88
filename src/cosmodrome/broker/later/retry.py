"""Messages that a consumer could not process: tried again later, or put aside as dead letters.

A consumer hands a message back by its log offset. A copy goes to `%RETRY%group`, through
a delay level that grows with the number of attempts, or to `%DLQ%group` when the attempts are
used up or the consumer says so. Newer clients may send such copies themselves; `produce` serves
those.
"""

from __future__ import annotations

from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.later.deferral import Deferral
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.topics import PERM_READ_WRITE
from cosmodrome.errors import Code, MessageTooLarge, ProtocolError, Refused, StoreUnwritable
from cosmodrome.layout import PROPERTIES_BYTES_MAX, TOPIC_UNIT_SUBSCRIPTION
from cosmodrome.store.store import Draft
from cosmodrome.wire.bodies import PERM_WRITE
from cosmodrome.wire.commands.consume import ConsumerSendMsgBack
from cosmodrome.wire.message import (
    DELAY,
    ORIGIN_MESSAGE_ID,
    RETRY_TOPIC,
    WAIT,
    format_properties,
)
from cosmodrome.wire.names import dlq_topic, retry_topic
from cosmodrome.wire.record import Record, decode_record
from cosmodrome.wire.table import Call, Reply

# Compat: clients from 3.4.9 on say themselves how often a message may be retried.
VERSION_WITH_OWN_RETRY_LIMIT = 121
DLQ_QUEUES = 1
FIRST_RETRY_LEVEL = 3  # Compat: the first retry waits this level, each further one the next


class Retry:
    """The totals count what was given back, and how much of it was put aside."""

    def __init__(self, base: Foundation, members: Members, deferral: Deferral) -> None:
        self._options = base.options
        self._role = base.role
        self._store = base.store
        self._topics = members.topics
        self._groups = members.groups
        self._deferral = deferral
        self._random = base.env.random
        self._stats = base.stats
        self.retried_total = 0
        self.dead_total = 0

    @ConsumerSendMsgBack.handler
    async def send_back(self, ask: ConsumerSendMsgBack, call: Call) -> Reply:
        self._role.check_takes_changes("take messages back")
        config = self._groups.existing(ask.group, call)
        if not self._options.broker_permission & PERM_WRITE:
            raise Refused(
                Code.NO_PERMISSION,
                f"Broker {self._options.broker_name} is not writable (brokerPermission"
                f" {self._options.broker_permission}).",
            )
        if config.retry_queue_nums <= 0:
            return Reply()  # Compat: a group without retry queues wants its failures dropped
        topic = self._writable(retry_topic(ask.group), config.retry_queue_nums, ask, call)
        record = self._found(ask.offset)
        limit = config.retry_max_times
        own_limit = ask.max_reconsume_times
        if own_limit is not None and call.frame.version >= VERSION_WITH_OWN_RETRY_LIMIT:
            limit = own_limit
        dead = record.reconsume_times >= limit or ask.delay_level < 0
        if dead:
            topic = self._writable(dlq_topic(ask.group), DLQ_QUEUES, ask, call)
            queue_id, level = 0, 0
        else:
            queue_id = self._random.randrange(config.retry_queue_nums)
            level = ask.delay_level or FIRST_RETRY_LEVEL + record.reconsume_times
        await self._put(self._draft(record, topic, queue_id, level))
        self._stats.sent_back(ask.group, record.pairs().get(RETRY_TOPIC, record.topic))
        self.retried_total += not dead
        self.dead_total += dead
        return Reply()

    def _writable(self, topic: str, queues: int, ask: ConsumerSendMsgBack, call: Call) -> str:
        unit_flag = TOPIC_UNIT_SUBSCRIPTION if ask.unit_mode else 0
        config = self._topics.ensure(topic, queues, PERM_READ_WRITE, unit_flag, call=call)
        if not config.perm & PERM_WRITE:
            raise Refused(
                Code.NO_PERMISSION,
                f"Topic {topic} is not writable (perm {config.perm}); give it the permission"
                f" {config.perm | PERM_WRITE}, for example with `mqadmin updateTopicPerm`.",
            )
        return topic

    def _found(self, log_offset: int) -> Record:
        data = self._store.record(log_offset)
        try:
            if data is not None:
                return decode_record(data)
        except ProtocolError:
            pass
        raise Refused(
            Code.SYSTEM_ERROR,
            f"There is no message at log offset {log_offset}; it has been removed, or another"
            " broker stored it.",
        )

    def _draft(self, record: Record, topic: str, queue_id: int, level: int) -> Draft:
        pairs = record.pairs()
        pairs.setdefault(RETRY_TOPIC, record.topic)
        pairs.setdefault(ORIGIN_MESSAGE_ID, record.message_id)
        pairs[WAIT] = "false"
        pairs[DELAY] = str(level)
        draft = Draft(
            topic=topic,
            queue_id=queue_id,
            body=record.body,
            properties="",
            born_host=record.born_host,
            store_host=record.store_host,
            flag=record.flag,
            sys_flag=record.sys_flag,
            born_ms=record.born_ms,
            reconsume_times=record.reconsume_times + 1,
        )
        if level > 0:
            self._deferral.redirect(draft, pairs)
        draft.properties = format_properties(pairs)
        if len(draft.properties.encode()) > PROPERTIES_BYTES_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                "With what a retry adds, the properties of the message have more than"
                f" {PROPERTIES_BYTES_MAX} bytes; process it without a retry.",
            )
        return draft

    async def _put(self, draft: Draft) -> None:
        try:
            # Although WAIT says false: the consumer moves on, so the copy has to be safe first.
            await self._store.durable(self._store.append(draft).end)
        except (StoreUnwritable, MessageTooLarge) as error:
            raise Refused(
                Code.SYSTEM_ERROR, f"The message could not be stored for a retry: {error}"
            ) from None
