"""The map queue → offset and its JSON form: `{"topic": {"broker-a": {"0": 17, "1": -1}}}`.

In what users write, -2 means earliest and -1 latest, as in Spark's Kafka source. What the stream
reader gives to Spark, and so what lies in a checkpoint, holds real offsets only; beside the topics,
`@start` says where queues begin that the offset before does not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cosmodrome.errors import ConfigError, Refused
from cosmodrome.wire.bodies import MessageQueue
from cosmodrome.wire.names import check_topic

EARLIEST = -2
LATEST = -1
STARTS = "@start"  # no topic can be called so
_FORM = '{"topic": {"broker": {"0": 17}}}'

Offsets = dict[MessageQueue, int]


def to_json(offsets: Mapping[MessageQueue, int]) -> dict[str, dict[str, dict[str, int]]]:
    """Sorted, so that equal maps are equal texts: Spark compares offsets as text."""
    document: dict[str, dict[str, dict[str, int]]] = {}
    for queue in sorted(offsets, key=order):
        brokers = document.setdefault(queue.topic, {})
        brokers.setdefault(queue.broker_name, {})[str(queue.queue_id)] = offsets[queue]
    return document


def with_starts(document: dict[str, Any], starts: Offsets) -> dict[str, Any]:
    """The end of a batch that also says where some of its queues begin."""
    return {**document, STARTS: to_json(starts)} if starts else document


def without_starts(given: Mapping[str, Any], *, what: str = "offsets") -> tuple[Offsets, Offsets]:
    """The end of a batch, and where queues begin as far as it says so."""
    document = dict(_table(given, what))
    starts = document.pop(STARTS, {})
    return from_json(document, what=what), from_json(starts, what=what)


def from_json(given: str | Mapping[str, Any], *, what: str = "offsets") -> Offsets:
    """The map of a text or of a decoded document; `what` names it in errors."""
    offsets: Offsets = {}
    for topic, brokers in _table(_document(given, what), what).items():
        for broker, queues in _table(brokers, what).items():
            for number, offset in _table(queues, what).items():
                queue = MessageQueue(
                    topic=topic, broker_name=broker, queue_id=_queue_id(number, what)
                )
                if not isinstance(offset, int) or isinstance(offset, bool) or offset < EARLIEST:
                    raise ConfigError(
                        f"{what}: {offset!r} of {describe(queue)} is no offset;"
                        " write a number, -2 for earliest or -1 for latest"
                    )
                offsets[queue] = offset
        _check_topic(topic, what)
    return offsets


def queues_from_json(given: str, *, what: str = "assign") -> tuple[MessageQueue, ...]:
    """The queues of `{"topic": {"broker": [0, 1]}}`."""
    queues: dict[MessageQueue, None] = {}
    form = f'{what}: write it as {{"topic": {{"broker": [0, 1]}}}}'
    for topic, brokers in _table(_document(given, what), what).items():
        _check_topic(topic, what)
        for broker, numbers in _table(brokers, what).items():
            if not isinstance(numbers, list) or not numbers:
                raise ConfigError(f"{form}; {numbers!r} is no list of queue numbers")
            for number in numbers:
                if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                    raise ConfigError(f"{form}; {number!r} is no queue number")
                queues[MessageQueue(topic=topic, broker_name=broker, queue_id=number)] = None
    if not queues:
        raise ConfigError(f"{form}; it names no queue")
    return tuple(queues)


def describe(queue: MessageQueue) -> str:
    return f"{queue.topic} at {queue.broker_name}, queue {queue.queue_id}"


def order(queue: MessageQueue) -> tuple[str, str, int]:
    """Sorts queues as people list them."""
    return (queue.topic, queue.broker_name, queue.queue_id)


def _document(given: str | Mapping[str, Any], what: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what}: {given[:80]!r} is no JSON ({error}); write {_FORM}") from None


def _table(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}: {str(value)[:80]!r} is no JSON object; write {_FORM}")
    return value


def _queue_id(text: str, what: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{what}: {text!r} is no queue number; write {_FORM}")
    return int(text)


def _check_topic(topic: str, what: str) -> None:
    try:
        check_topic(topic)
    except Refused as error:
        raise ConfigError(f"{what}: {error.remark}") from None
