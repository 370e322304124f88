"""The fields of a message as commands show them, in tables and in the forms for programs.

All commands use the same names, and `cosmo produce --jsonl` reads them.
"""

from __future__ import annotations

import base64

from cosmodrome.cli.support.output import FOR_PEOPLE, Column, Time, text_or_base64
from cosmodrome.client.values import DamagedMessage, ReceivedMessage
from cosmodrome.wire.message import ORIGIN_MESSAGE_ID, RETRY_TOPIC

BODY_CELL_CHARACTERS = 60
BODY_WHOLE_CHARACTERS = 4_000
UNREADABLE = "(cannot be read)"

_POSITION = (
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
    Column("damage", wide=True),
)
MESSAGES = (
    *_POSITION,
    Column("tags"),
    Column("keys"),
    Column("body"),
    Column("reconsume_times", wide=True, right=True),
    *_REST,
)
DEAD = (
    *_POSITION,
    Column("origin_topic"),
    Column("reconsume_times", "ATTEMPTS", right=True),
    Column("tags"),
    Column("keys"),
    Column("why"),
    Column("body"),
    Column("origin_msg_id", wide=True),
    *_REST,
)
SINGLE = (  # the record of one message
    "topic",
    "broker",
    "queue_id",
    "queue_offset",
    "msg_id",
    "offset_msg_id",
    "tags",
    "keys",
    "born_timestamp",
    "store_timestamp",
    "born_host",
    "store_host",
    "reconsume_times",
    "size",
    "properties",
    "body",
    "body_base64",
    "damage",
)


def message_fields(message: ReceivedMessage) -> dict[str, object]:
    """What every form of a message has, except its body."""
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
    }


def message_cells(
    message: ReceivedMessage, output: str, *, body: str = "auto", cut: int = BODY_CELL_CHARACTERS
) -> dict[str, object]:
    """One row. `body` is auto, text or base64: how programs get it."""
    return {
        **message_fields(message),
        "born_host": message.born_host,
        "size": message.size,
        **body_fields(message, body),
        **({"body": body_start(message, cut), "body_base64": None} if output in FOR_PEOPLE else {}),
    }


def message_record(message: ReceivedMessage, output: str) -> dict[str, object]:
    """One message alone, with as much of its body as a screen takes."""
    record = {
        **message_cells(message, output, cut=BODY_WHOLE_CHARACTERS),
        "born_timestamp": Time(message.born_ms),
        "store_timestamp": Time(message.store_ms),
        "store_host": message.store_host,
    }
    return {name: record[name] for name in SINGLE}


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


def body_start(message: ReceivedMessage, characters: int) -> str:
    """The first characters of a body, for people."""
    if message.damage is not None:
        return UNREADABLE
    text = message.body[: 4 * characters].decode(errors="replace")
    return text[: characters - 1] + "…" if len(text) > characters else text


def body_fields(message: ReceivedMessage, form: str = "auto") -> dict[str, str | None]:
    """A body for programs, in one of two members. A body that cannot be read is there as it is
    stored, with the reason."""
    if isinstance(message, DamagedMessage):
        damage, body, form = message.damage.reason, message.stored_body, "base64"
    else:
        damage, body = None, message.body
    if form == "auto":
        text, encoded = text_or_base64(body)
    elif form == "text":
        text, encoded = body.decode(errors="replace"), None
    else:
        text, encoded = None, base64.b64encode(body).decode()
    return {"damage": damage, "body": text, "body_base64": encoded}
