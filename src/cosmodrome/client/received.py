"""From a stored record to the message that a user sees."""

from __future__ import annotations

from cosmodrome.client.namespace import unwrap
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.layout import SYS_COMPRESSED
from cosmodrome.wire.message import decompress
from cosmodrome.wire.record import Record, iter_records

# What one message may grow to; brokers take 4 MiB unless they are told otherwise.
BODY_BYTES_MAX = 64 << 20


def received(
    record: Record,
    broker_name: str,
    *,
    namespace: str = "",
    min_offset: int = -1,
    max_offset: int = -1,
) -> ReceivedMessage:
    """Unpacked, under the name that the user knows."""
    body = record.body
    if record.sys_flag & SYS_COMPRESSED:
        body = decompress(body, record.sys_flag, BODY_BYTES_MAX)
    return ReceivedMessage(
        record,
        broker_name,
        topic=unwrap(namespace, record.topic) if namespace else record.topic,
        body=body,
        min_offset=min_offset,
        max_offset=max_offset,
    )


def received_all(
    data: bytes,
    broker_name: str,
    *,
    namespace: str = "",
    min_offset: int = -1,
    max_offset: int = -1,
) -> list[ReceivedMessage]:
    """The messages of the body of an answer."""
    return [
        received(
            record,
            broker_name,
            namespace=namespace,
            min_offset=min_offset,
            max_offset=max_offset,
        )
        for record in iter_records(data)
    ]
