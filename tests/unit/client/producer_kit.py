"""Looks at what a broker stored, without any consumer."""

from __future__ import annotations

from cosmodrome.broker.app import Broker
from cosmodrome.transport.channel import Channel
from cosmodrome.wire.commands import GetMaxOffset, PullMessage
from cosmodrome.wire.record import Record, iter_records


async def stored(broker: Broker, topic: str, queues: int = 4) -> list[Record]:
    """Every record of a topic, queue by queue."""
    channel = Channel("127.0.0.1", broker.port)
    found: list[Record] = []
    try:
        for queue_id in range(queues):
            end = (await channel.call(GetMaxOffset(topic=topic, queue_id=queue_id))).offset
            offset = 0
            while offset < end:
                pulled = await channel.call(
                    PullMessage(
                        consumer_group="g",
                        topic=topic,
                        queue_id=queue_id,
                        queue_offset=offset,
                        max_msg_nums=32,
                        sys_flag=4,
                        commit_offset=0,
                        suspend_timeout_millis=0,
                        subscription="*",
                        sub_version=0,
                        expression_type="TAG",
                    )
                )
                records = list(iter_records(pulled.body))
                assert records
                found += records
                offset = pulled.next_begin_offset
    finally:
        await channel.close()
    return found
