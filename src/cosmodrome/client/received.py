"""From a stored record to the message that a user sees."""

from __future__ import annotations

from cosmodrome.client.namespace import unwrap
from cosmodrome.client.values import DamagedMessage, ReceivedMessage
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import SYS_COMPRESSED
from cosmodrome.wire.message import decompress
from cosmodrome.wire.record import Record, iter_records

# What one message may grow to; brokers take 4 MiB unless they are told otherwise.
BODY_BYTES_MAX = 64 << 20
# What those of one answer may grow to together. Whoever looks at messages wants to see all of them,
# so the answer is not cut: bodies beyond this stay as they are.
ANSWER_BYTES_MAX = 256 << 20


def received(
    record: Record,
    broker_name: str,
    *,
    namespace: str = "",
    min_offset: int = -1,
    max_offset: int = -1,
    body_bytes_max: int = BODY_BYTES_MAX,
) -> ReceivedMessage:
    """Unpacked, under the name that the user knows. It is a `DamagedMessage` if the body cannot
    be read, or only in more memory than `body_bytes_max`."""
    message = ReceivedMessage(
        record,
        broker_name,
        topic=unwrap(namespace, record.topic) if namespace else record.topic,
        min_offset=min_offset,
        max_offset=max_offset,
    )
    if record.sys_flag & SYS_COMPRESSED:
        try:
            message.body = decompress(record.body, record.sys_flag, body_bytes_max)
        except ProtocolError as error:
            return DamagedMessage.of(message, error)
    return message


def received_all(
    data: bytes,
    broker_name: str,
    *,
    namespace: str = "",
    min_offset: int = -1,
    max_offset: int = -1,
) -> list[ReceivedMessage]:
    """The messages of the body of an answer."""
    found: list[ReceivedMessage] = []
    room = ANSWER_BYTES_MAX
    for record in iter_records(data):
        message = received(
            record,
            broker_name,
            namespace=namespace,
            min_offset=min_offset,
            max_offset=max_offset,
            body_bytes_max=min(BODY_BYTES_MAX, room),
        )
        if record.sys_flag & SYS_COMPRESSED and message.damage is None:
            room -= len(message.body)
        found.append(message)
    return found
