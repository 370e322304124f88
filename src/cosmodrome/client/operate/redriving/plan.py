"""What a redrive is to do: which messages, where to, how fast; and what a message becomes.

A plan is fixed when a run begins, the ends of the source's queues included: messages that come
back while it runs are not taken again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

import msgspec

from cosmodrome.client.values import ReceivedMessage
from cosmodrome.errors import ConfigError
from cosmodrome.layout import SYS_COMPRESSED, SYS_LZ4, SYS_ZLIB, SYS_ZSTD
from cosmodrome.wire import message as names
from cosmodrome.wire.message import RETRY_TOPIC, UNIQ_KEY
from cosmodrome.wire.names import retry_topic

RUN_PROPERTY = "REDRIVE_RUN"
FROM_PROPERTY = "REDRIVE_FROM"
SOURCE_ID_PROPERTY = "REDRIVE_MSG_ID"
DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"  # Compat: 5.x
RATE_MAX = 1_000_000.0
_RUN_ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}\Z")
_COMPRESSION = SYS_COMPRESSED | SYS_ZLIB | SYS_LZ4 | SYS_ZSTD

# What belongs to the life that ended, and would be acted on again.
_LEFT_OUT = frozenset(
    {
        names.WAIT,
        names.DELAY,
        names.REAL_TOPIC,
        names.REAL_QUEUE_ID,
        UNIQ_KEY,
        names.TRANSACTION_PREPARED,
        names.PRODUCER_GROUP,
        names.MIN_OFFSET,
        names.MAX_OFFSET,
        names.RECONSUME_TIME,
        names.MAX_RECONSUME_TIMES,
        names.CONSUME_START_TIME,
        names.MSG_REGION,
        names.TRACE_ON,
        names.CLUSTER,
        names.INNER_MULTI_QUEUE_OFFSET,
        names.TRANSACTION_PREPARED_QUEUE_OFFSET,
        names.TRANSACTION_CHECK_TIMES,
        names.TIMER_DELAY_SECONDS,
        names.TIMER_DELAY_MS,
        names.TIMER_DELIVER_MS,
        names.TIMER_OUT_MS,
        names.TIMER_DEQUEUE_MS,
        names.TIMER_DELETE_UNIQ_KEY,
        "TIMER_ENQUEUE_MS",
        "TIMER_ROLL_TIMES",
        "TIMER_DELAY_LEVEL",
        "__STARTDELIVERTIME",
    }
)


class Filter(msgspec.Struct, frozen=True, omit_defaults=True):
    """All conditions that are set must hold; times are store times in the source, in ms."""

    tags: tuple[str, ...] = ()  # any of them
    keys: tuple[str, ...] = ()  # any of them
    properties: dict[str, str] = {}  # all of them
    since_ms: int | None = None
    until_ms: int | None = None

    def takes(self, message: ReceivedMessage) -> bool:
        if self.tags and message.tags not in self.tags:
            return False
        if self.keys and not set(self.keys) & set(message.keys):
            return False
        if self.since_ms is not None and message.store_ms < self.since_ms:
            return False
        if self.until_ms is not None and message.store_ms >= self.until_ms:
            return False
        pairs = message.properties
        return all(pairs.get(name) == value for name, value in self.properties.items())


class Part(msgspec.Struct, frozen=True):
    """One queue of the source, as far as it is to be redriven."""

    broker: str
    queue: int
    begin: int
    end: int


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    run: str
    source: str  # a topic
    parts: tuple[Part, ...]
    target: str | None = None  # None: the topic that each message comes from
    group: str | None = None  # to this group alone, through its retry topic
    filter: Filter = Filter()
    rate: float | None = None  # messages a second
    most: int | None = None
    again: bool = False  # also what earlier runs have redriven

    def check(self) -> None:
        if self.target is not None and self.group is not None:
            raise ConfigError("a redrive goes to a topic or to a group, not to both")
        if self.source in (self.target, self.group and retry_topic(self.group)):
            raise ConfigError(f"source and target are both {self.source}")
        if self.rate is not None and not 0 < self.rate <= RATE_MAX:
            raise ConfigError(f"a rate of {self.rate} per second; use more than 0")
        if self.most is not None and self.most < 1:
            raise ConfigError(f"at most {self.most} messages; use 1 or more")

    def topic_of(self, message: ReceivedMessage) -> str | None:
        """Where a message goes; None when it does not say where it comes from."""
        if self.group is not None:
            return retry_topic(self.group)
        if self.target is not None:
            return self.target
        pairs = message.properties
        return pairs.get(RETRY_TOPIC) or pairs.get(DLQ_ORIGIN_TOPIC)

    def new_id(self, broker: str, queue: int, offset: int) -> str:
        """The unique id of the redriven message: the same however often the run is resumed."""
        position = f"{self.run}\0{self.source}\0{broker}\0{queue}\0{offset}"
        return hashlib.sha256(position.encode()).hexdigest()[:32].upper()

    def properties_of(self, message: ReceivedMessage, new_id: str) -> dict[str, str]:
        pairs = {name: value for name, value in message.properties.items() if name not in _LEFT_OUT}
        if self.group is None:
            pairs.pop(RETRY_TOPIC, None)
        else:  # a consumer shows its handler the topic that this names
            pairs.setdefault(RETRY_TOPIC, pairs.get(DLQ_ORIGIN_TOPIC, self.source))
        position = f"{self.source}/{message.broker_name}/{message.queue_id}/{message.queue_offset}"
        return {
            UNIQ_KEY: new_id,
            **pairs,
            RUN_PROPERTY: self.run,
            FROM_PROPERTY: position,
            SOURCE_ID_PROPERTY: message.msg_id,
        }


def sys_flag_of(message: ReceivedMessage) -> int:
    """How the stored body is compressed; what a transaction left there is over."""
    return message.record.sys_flag & _COMPRESSION


def check_run_id(text: str) -> str:
    if not _RUN_ID.match(text):
        raise ConfigError(f"{text[:64]!r} is no run; `cosmo dlq redrive list` shows them")
    return text


def described(plan: Plan) -> Mapping[str, object]:
    """The plan for people."""
    chosen = {
        "tags": list(plan.filter.tags),
        "keys": list(plan.filter.keys),
        **plan.filter.properties,
        "since_ms": plan.filter.since_ms,
        "until_ms": plan.filter.until_ms,
    }
    return {
        "source": plan.source,
        "target": (plan.group and f"group {plan.group}") or plan.target or "original topic",
        "filter": {name: value for name, value in chosen.items() if value},
        "rate": plan.rate,
        "most": plan.most,
    }
