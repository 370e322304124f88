"""Messages as lines: what `cosmo consume` prints and `cosmo produce --jsonl` reads.

JSON has `body` as text, or `body_base64` when it is not UTF-8; the same names are read back by
`cosmo produce --jsonl`, so what one command prints another can send. A message whose body cannot
be read has its stored bytes in `body_base64` and the reason in `damage`; such a row is not sent.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import json
from typing import Any

from cosmodrome.cli.messages.columns import (
    BODY_CELL_CHARACTERS,
    DEAD,
    body_fields,
    body_start,
    message_fields,
)
from cosmodrome.cli.support.output import record_names
from cosmodrome.client.values import Message, ReceivedMessage
from cosmodrome.errors import ConfigError
from cosmodrome.wire.message import RESERVED

COLUMNS = ("TIME", "QUEUE", "OFFSET", "TAGS", "KEYS", "BODY")
_WIDTHS = (23, 12, 8, 10, 16)
# Whatever a command prints of a message may be read again; a message that is sent gets its own
# ids, times and queue.
_KNOWN = {"delay", "delay_ms", "deliver_at_ms", "queue_key", *record_names(DEAD)}


def message_json(message: ReceivedMessage) -> str:
    body = {name: value for name, value in body_fields(message).items() if value is not None}
    return json.dumps(message_fields(message) | body, ensure_ascii=False)


def table_head() -> str:
    return _line(COLUMNS)


def table_line(message: ReceivedMessage) -> str:
    stored = datetime.datetime.fromtimestamp(message.store_ms / 1000)
    text = body_start(message, BODY_CELL_CHARACTERS)
    text = "".join(one if one.isprintable() else "\N{MIDDLE DOT}" for one in text)
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
    if row.get("damage") is not None:
        raise ConfigError(f"damage: {row['damage']}; such a message is not sent")
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
