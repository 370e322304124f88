"""The map queue → offset and its JSON form: `{"topic": {"broker-a": {"0": 17, "1": -1}}}`.

In what users write, -2 means earliest and -1 latest, as in Spark's Kafka source. What the stream
reader gives to Spark, and so what lies in a checkpoint, holds real offsets only; beside the topics,
`@start` says where those queues begin that the previous offset does not have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cosmodrome.errors import ConfigError
from cosmodrome.spark.option_values import require_name
from cosmodrome.wire.bodies import MessageQueue
from cosmodrome.wire.names import check_topic

EARLIEST = -2
LATEST = -1
STARTS = "@start"  # not a valid topic name
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


def without_starts(value: Mapping[str, Any], *, what: str = "offsets") -> tuple[Offsets, Offsets]:
    """The end of a batch, and the beginnings of queues that it states."""
    document = dict(_table(value, what))
    starts = document.pop(STARTS, {})
    return from_json(document, what=what), from_json(starts, what=what)


def from_json(value: str | Mapping[str, Any], *, what: str = "offsets") -> Offsets:
    """The map of a text or of a decoded document; `what` names it in errors."""
    offsets: Offsets = {}
    for topic, brokers in _table(_document(value, what), what).items():
        for broker, queues in _table(brokers, what).items():
            for number, offset in _table(queues, what).items():
                queue = MessageQueue(
                    topic=topic, broker_name=broker, queue_id=_queue_id(number, what)
                )
                if not isinstance(offset, int) or isinstance(offset, bool) or offset < EARLIEST:
                    raise ConfigError(
                        f"{what}: {offset!r} of {describe(queue)} is not an offset;"
                        " write a number, -2 for earliest or -1 for latest"
                    )
                offsets[queue] = offset
        require_name(check_topic, topic, what)
    return offsets


def queues_from_json(value: str, *, what: str = "assign") -> tuple[MessageQueue, ...]:
    """The queues of `{"topic": {"broker": [0, 1]}}`."""
    queues: dict[MessageQueue, None] = {}
    form = f'{what}: write it as {{"topic": {{"broker": [0, 1]}}}}'
    for topic, brokers in _table(_document(value, what), what).items():
        require_name(check_topic, topic, what)
        for broker, numbers in _table(brokers, what).items():
            if not isinstance(numbers, list) or not numbers:
                raise ConfigError(f"{form}; {numbers!r} is not a list of queue numbers")
            for number in numbers:
                if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                    raise ConfigError(f"{form}; {number!r} is not a queue number")
                queues[MessageQueue(topic=topic, broker_name=broker, queue_id=number)] = None
    if not queues:
        raise ConfigError(f"{form}; it names no queue")
    return tuple(queues)


def describe(queue: MessageQueue) -> str:
    return f"{queue.topic} at {queue.broker_name}, queue {queue.queue_id}"


def order(queue: MessageQueue) -> tuple[str, str, int]:
    """Sort key: topic, broker, queue."""
    return (queue.topic, queue.broker_name, queue.queue_id)


def _document(value: str | Mapping[str, Any], what: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what}: {value[:80]!r} is not JSON ({error}); write {_FORM}") from None


def _table(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{what}: {str(value)[:80]!r} is not a JSON object; write {_FORM}")
    return value


def _queue_id(text: str, what: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{what}: {text!r} is not a queue number; write {_FORM}")
    return int(text)
