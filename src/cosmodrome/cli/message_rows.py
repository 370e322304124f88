"""Messages as the command line prints and reads them.

JSON has `body` as text, or `body_base64` when it is not UTF-8; the same names are read back by
`cosmo produce --jsonl`, so what one command prints another can send.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import json
from typing import Any

from cosmodrome.client.values import Message, ReceivedMessage
from cosmodrome.errors import ConfigError
from cosmodrome.wire.message import RESERVED

BODY_CELL_CHARACTERS = 60
COLUMNS = ("TIME", "QUEUE", "OFFSET", "TAGS", "KEYS", "BODY")
_WIDTHS = (23, 12, 8, 10, 16)
_KNOWN = frozenset(
    {
        *("body", "body_base64", "tags", "keys", "properties", "delay", "delay_ms"),
        *("deliver_at_ms", "queue_key", "topic"),
        # What `cosmo consume` prints beside them; a message that is sent gets its own.
        *("broker", "queue_id", "queue_offset", "msg_id", "offset_msg_id", "born_timestamp"),
        *("store_timestamp", "reconsume_times", "born_timestamp_iso", "store_timestamp_iso"),
        *("born_host", "size", "origin_topic", "origin_msg_id", "why"),
    }
)


def message_row(message: ReceivedMessage) -> dict[str, Any]:
    row: dict[str, Any] = {
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
    try:
        row["body"] = message.body.decode()
    except UnicodeDecodeError:
        row["body_base64"] = base64.b64encode(message.body).decode()
    return row


def message_json(message: ReceivedMessage) -> str:
    return json.dumps(message_row(message), ensure_ascii=False)


def table_head() -> str:
    return _line(COLUMNS)


def table_line(message: ReceivedMessage) -> str:
    stored = datetime.datetime.fromtimestamp(message.store_ms / 1000)
    text = message.body[: 4 * BODY_CELL_CHARACTERS].decode(errors="replace")
    text = "".join(one if one.isprintable() else "\N{MIDDLE DOT}" for one in text)
    if len(text) > BODY_CELL_CHARACTERS:
        text = text[: BODY_CELL_CHARACTERS - 1] + "…"
    return _line(
        (
            stored.isoformat(" ", "milliseconds"),
            f"{message.broker_name}:{message.queue_id}",
            str(message.queue_offset),
            message.tags or "-",
            " ".join(message.keys) or "-",
            text,
        )
    )


def _line(cells: tuple[str, ...]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False)]
    return "  ".join((*padded, cells[-1])).rstrip()


def message_from_json(topic: str, line: str | bytes) -> Message:
    """One line of `--jsonl`; ConfigError names the field that is wrong."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ConfigError('not a JSON object; write for example {"body": "hello"}')
    unknown = sorted(set(row) - _KNOWN)
    if unknown:
        raise ConfigError(
            f"unknown field {unknown[0]!r}; known are body, body_base64, tags, keys, properties,"
            " delay, delay_ms, deliver_at_ms and queue_key"
        )
    keys = row.get("keys") or ()
    properties = _strings(row, "properties")
    return Message(
        topic,
        _body(row),
        tags=_text(row, "tags"),
        keys=keys.split() if isinstance(keys, str) else [str(key) for key in keys],
        properties={name: value for name, value in properties.items() if name not in RESERVED},
        delay_level=_number(row, "delay") or 0,
        delay_ms=_number(row, "delay_ms"),
        deliver_at_ms=_number(row, "deliver_at_ms"),
        queue_key=_text(row, "queue_key"),
    )


def _body(row: dict[str, Any]) -> bytes:
    if row.get("body_base64") is not None:
        try:
            return base64.b64decode(row["body_base64"], validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise ConfigError(f"body_base64: {error}") from None
    body = row.get("body")
    if not isinstance(body, str):
        # A document as body is what people mean when they write one there.
        if body is None:
            raise ConfigError("no body; give body (text) or body_base64")
        return json.dumps(body, ensure_ascii=False).encode()
    return body.encode()


def _text(row: dict[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{name}: {value!r} is not text")
    return value


def _number(row: dict[str, Any], name: str) -> int | None:
    value = row.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ConfigError(f"{name}: {value!r} is not a whole number of 0 or more")
    return value


def _strings(row: dict[str, Any], name: str) -> dict[str, str]:
    value = row.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: {value!r} is not an object")
    return {key: one if isinstance(one, str) else json.dumps(one) for key, one in value.items()}
