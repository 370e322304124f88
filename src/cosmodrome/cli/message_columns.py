"""Messages in tables and in the forms for programs, for commands that show several.

Programs get the names that `cosmo consume` prints and `cosmo produce --jsonl` reads.
"""

from __future__ import annotations

import base64

from cosmodrome.cli.output import FOR_PEOPLE, Column
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.wire.message import ORIGIN_MESSAGE_ID, RETRY_TOPIC

BODY_CELL_CHARACTERS = 60
BODY_WHOLE_CHARACTERS = 4_000

PLACE = (
    Column("store_timestamp", "STORED", time=True),
    Column("broker", wide=True),
    Column("queue_id", "QUEUE", right=True),
    Column("queue_offset", "OFFSET", right=True),
)
_REST = (
    Column("topic", wide=True),
    Column("msg_id", wide=True),
    Column("offset_msg_id", wide=True),
    Column("born_timestamp", "BORN", wide=True, time=True),
    Column("born_host", wide=True),
    Column("size", wide=True, right=True),
    Column("properties", wide=True),
    Column("body_base64", wide=True),
)
MESSAGES = (
    *PLACE,
    Column("tags"),
    Column("keys"),
    Column("body"),
    Column("reconsume_times", wide=True, right=True),
    *_REST,
)
DEAD = (
    *PLACE,
    Column("origin_topic"),
    Column("reconsume_times", "ATTEMPTS", right=True),
    Column("tags"),
    Column("keys"),
    Column("why"),
    Column("body"),
    Column("origin_msg_id", wide=True),
    *_REST,
)


def message_cells(
    message: ReceivedMessage, output: str, *, body: str = "auto", cut: int = BODY_CELL_CHARACTERS
) -> dict[str, object]:
    """One row. `body` is auto, text or base64: how programs get it."""
    text, encoded = body_texts(message.body, output, body, cut)
    return {
        "topic": message.topic,
        "broker": message.broker_name,
        "queue_id": message.queue_id,
        "queue_offset": message.queue_offset,
        "msg_id": message.msg_id,
        "offset_msg_id": message.offset_msg_id,
        "tags": message.tags,
        "keys": list(message.keys),
        "properties": message.properties,
        "born_timestamp": message.born_ms,
        "store_timestamp": message.store_ms,
        "reconsume_times": message.reconsume_times,
        "born_host": message.born_host,
        "size": message.size,
        "body": text,
        "body_base64": encoded,
    }


def dead_cells(message: ReceivedMessage, output: str, *, body: str = "auto") -> dict[str, object]:
    pairs = message.properties
    return {
        **message_cells(message, output, body=body),
        "origin_topic": pairs.get(RETRY_TOPIC) or pairs.get("DLQ_ORIGIN_TOPIC"),
        "origin_msg_id": pairs.get(ORIGIN_MESSAGE_ID) or pairs.get("DLQ_ORIGIN_MESSAGE_ID"),
        "why": why_dead(message),
    }


def why_dead(message: ReceivedMessage) -> str:
    """Brokers keep no exception of a handler; how often it came is all that they know."""
    times = message.reconsume_times
    return f"given back {times} time{'' if times == 1 else 's'}" if times else "sent here directly"


def body_texts(body: bytes, output: str, form: str, cut: int) -> tuple[str | None, str | None]:
    """As text, or as base64 where it is no text."""
    if output in FOR_PEOPLE:
        text = body[: 4 * cut].decode(errors="replace")
        return (text[: cut - 1] + "…" if len(text) > cut else text), None
    if form == "text":
        return body.decode(errors="replace"), None
    if form == "auto":
        try:
            return body.decode(), None
        except UnicodeDecodeError:
            pass
    return None, base64.b64encode(body).decode()
