"""Giving a message back to the cluster, so that the group gets it again later, or never.

The broker that stored a message makes the copy itself (code 36). When it cannot, the copy is sent
like any message to the group's retry topic, on any broker.
"""

from __future__ import annotations

import logging

from cosmodrome.client.instance import Instance
from cosmodrome.client.receive.consumer_options import ConsumerOptions
from cosmodrome.client.receive.engine.progress import broker_address
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.errors import CosmodromeError, Unreachable
from cosmodrome.layout import SYS_COMPRESSED, SYS_COMPRESSION_MASK, SYS_MULTI_TAGS
from cosmodrome.wire.commands.consume import ConsumerSendMsgBack
from cosmodrome.wire.commands.produce import SendMessageV2
from cosmodrome.wire.message import (
    DELAY,
    MAX_RECONSUME_TIMES,
    ORIGIN_MESSAGE_ID,
    RECONSUME_TIME,
    RETRY_TOPIC,
    TRANSACTION_PREPARED,
    format_properties,
)
from cosmodrome.wire.names import AUTO_CREATE_TOPIC, retry_topic

log = logging.getLogger(__name__)

RETURN_TIMEOUT_MS = 5_000
FIRST_RETRY_LEVEL = 3
DEAD_LETTER = -1  # as a delay level
# Compat: upstream's name for the producer inside a client.
INNER_PRODUCER_GROUP = "CLIENT_INNER_PRODUCER"
KEPT_FLAGS = SYS_COMPRESSED | SYS_MULTI_TAGS | SYS_COMPRESSION_MASK


class Returns:
    def __init__(self, instance: Instance, group: str, options: ConsumerOptions) -> None:
        self._instance = instance
        self._group = group
        self._options = options

    async def give_back(self, message: ReceivedMessage, level: int) -> bool:
        """Let it come again after the delay of a level. 0: longer with every attempt; -1: put
        it aside as a dead letter. False when the cluster did not take it."""
        record = message.record
        command = ConsumerSendMsgBack(
            offset=record.log_offset,
            group=self._group,
            delay_level=level,
            origin_msg_id=message.msg_id,
            origin_topic=record.topic,
            unit_mode=False,
            max_reconsume_times=self._options.retries_max,
        )
        try:
            address = broker_address(self._instance.routes, message.broker_name)
            await self._instance.links.call(address, command, RETURN_TIMEOUT_MS)
        except CosmodromeError as error:
            log.warning(
                "message not given back, sending a copy: group=%s message=%s reason=%s",
                self._group,
                message.msg_id,
                error,
            )
            # An attempt number at the limit is how a copy becomes a dead letter.
            dead = level == DEAD_LETTER
            attempts = self._options.retries_max if dead else record.reconsume_times + 1
            return await self.send_copy(message, attempts)
        return True

    async def send_copy(self, message: ReceivedMessage, attempts: int) -> bool:
        """Send a copy to the retry topic; brokers put it aside when the attempts are used up."""
        record = message.record
        pairs = dict(message.properties)
        for name in (TRANSACTION_PREPARED, RECONSUME_TIME, MAX_RECONSUME_TIMES):
            pairs.pop(name, None)
        pairs.setdefault(RETRY_TOPIC, record.topic)
        pairs.setdefault(ORIGIN_MESSAGE_ID, message.msg_id)
        pairs.pop(DELAY, None)
        # Compat: upstream 4.9 would delay even a dead letter.
        if attempts < self._options.retries_max:
            pairs[DELAY] = str(FIRST_RETRY_LEVEL + record.reconsume_times)
        topic = retry_topic(self._group)
        try:
            route = await self._instance.routes.for_sending(topic)
            if not route.write_queues:
                raise Unreachable(f"no queue of {topic} can be written to")
            queue = self._instance.env.random.choice(route.write_queues)
            await self._instance.links.call(
                broker_address(self._instance.routes, queue.broker_name),
                SendMessageV2(
                    producer_group=INNER_PRODUCER_GROUP,
                    topic=topic,
                    default_topic=AUTO_CREATE_TOPIC,
                    default_topic_queue_nums=1,
                    queue_id=queue.queue_id,
                    sys_flag=record.sys_flag & KEPT_FLAGS,
                    born_timestamp=self._instance.env.clock.now_ms(),
                    flag=record.flag,
                    properties=format_properties(pairs),
                    reconsume_times=attempts,
                    unit_mode=False,
                    max_reconsume_times=self._options.retries_max,
                    batch=False,
                    body=record.body,
                ),
                RETURN_TIMEOUT_MS,
            )
        except CosmodromeError as error:
            log.error(
                "message not given back: group=%s message=%s reason=%s",
                self._group,
                message.msg_id,
                error,
            )
            return False
        return True
