"""How a consumer behaves, checked once."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Final, Literal, Protocol, TypedDict

from cosmodrome.client.receive.rebalance import Averagely, Strategy
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import ConfigError
from cosmodrome.wire.bodies import CONSUME_FROM_WHERE

MIB = 1024 * 1024
CLUSTERING: Final = "clustering"
BROADCASTING: Final = "broadcasting"
RETRIES_DEFAULT = 16  # what -1 stands for


@dataclasses.dataclass(slots=True)
class Consumption:
    """One call of a handler. What hooks see before it, and, filled in, after it."""

    group: str
    queue: MessageQueue
    messages: list[ReceivedMessage]
    began_ms: int  # wall time
    took_ms: float = 0.0
    error: BaseException | None = None  # what the handler raised; None when it was content
    iterated: bool = False  # no handler: it ends when the user says so, perhaps in another task
    notes: dict[object, object] = dataclasses.field(default_factory=dict)  # for the hooks


class ConsumeHook(Protocol):
    """Sees every call of a handler, for traces and metrics. Its errors are logged."""

    def before_consume(self, consumption: Consumption) -> None: ...

    def after_consume(self, consumption: Consumption) -> None: ...


class FilterHook(Protocol):
    """Decides about every message that was pulled; one that is not kept counts as done."""

    def keep(self, group: str, message: ReceivedMessage) -> bool: ...


class ConsumerSettings(TypedDict, total=False):
    """The fields of ConsumerOptions, for constructors that take them by name."""

    model: Literal["clustering", "broadcasting"]
    consume_from: Literal["last", "first"] | datetime.datetime | int
    orderly: bool
    concurrency: int
    batch: int
    strategy: Strategy
    pull_batch: int
    pull_interval_ms: int
    suspend_ms: int
    pull_timeout_ms: int
    prefetch_messages: int
    prefetch_bytes: int
    prefetch_span: int
    body_bytes_max: int
    max_reconsume_times: int
    suspend_queue_ms: int
    consume_timeout_ms: int
    commit_every_ms: int
    rebalance_every_ms: int
    close_timeout_ms: int
    offsets_dir: str | None
    hooks: tuple[ConsumeHook, ...]
    filters: tuple[FilterHook, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    model: Literal["clustering", "broadcasting"] = CLUSTERING
    consume_from: Literal["last", "first"] | datetime.datetime | int = "last"
    orderly: bool = False
    concurrency: int = 20  # calls of an async handler at once
    batch: int = 1  # messages per call of a handler
    strategy: Strategy = dataclasses.field(default_factory=Averagely)

    pull_batch: int = 32
    pull_interval_ms: int = 0
    suspend_ms: int = 15_000  # how long a broker may hold a pull
    pull_timeout_ms: int = 30_000
    prefetch_messages: int = 1_000  # per queue, like the next two
    prefetch_bytes: int = 100 * MIB
    prefetch_span: int = 2_000  # offsets between the first and the last that is not done
    body_bytes_max: int = 64 * MIB  # of a body that was compressed

    max_reconsume_times: int = -1  # -1: sixteen, or for ever when orderly
    suspend_queue_ms: int = 1_000  # orderly: between two attempts at one message
    consume_timeout_ms: int = 15 * 60_000  # then a message is given back though it still runs

    commit_every_ms: int = 5_000
    rebalance_every_ms: int = 20_000
    close_timeout_ms: int = 10_000  # for handlers that run, when the consumer closes
    offsets_dir: str | None = None  # broadcasting; ~/.rocketmq_offsets when not given

    hooks: tuple[ConsumeHook, ...] = ()
    filters: tuple[FilterHook, ...] = ()

    def __post_init__(self) -> None:
        if self.model not in (CLUSTERING, BROADCASTING):
            raise ConfigError(f"model {self.model!r}: use {CLUSTERING!r} or {BROADCASTING!r}")
        if isinstance(self.consume_from, str) and self.consume_from not in ("last", "first"):
            raise ConfigError(
                f"consume_from {self.consume_from!r}: use 'last', 'first', a datetime or"
                " milliseconds"
            )
        for name, most in (
            *(("concurrency", 1_000), ("batch", 1_024), ("pull_batch", 1_024)),
            *(("prefetch_messages", 65_535), ("prefetch_span", 65_535)),
            *(("prefetch_bytes", 1 << 40), ("body_bytes_max", 1 << 31)),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} is {getattr(self, name)}; use 1 to {most}")
        for name in ("suspend_ms", "pull_timeout_ms", "suspend_queue_ms", "consume_timeout_ms"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("commit_every_ms", "rebalance_every_ms"):
            if getattr(self, name) < 100:
                raise ConfigError(f"{name} must be at least 100, not {getattr(self, name)}")
        for name in ("pull_interval_ms", "close_timeout_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, not {getattr(self, name)}")
        if self.suspend_ms >= self.pull_timeout_ms:
            raise ConfigError(
                f"suspend_ms ({self.suspend_ms}) must be below pull_timeout_ms"
                f" ({self.pull_timeout_ms}): the broker answers when the hold is over"
            )

    @property
    def clustering(self) -> bool:
        return self.model == CLUSTERING

    @property
    def retries_max(self) -> int:
        """Attempts after the first, in words that a broker understands."""
        return RETRIES_DEFAULT if self.max_reconsume_times < 0 else self.max_reconsume_times

    @property
    def from_ms(self) -> int | None:
        """The time to begin at in a queue that the group does not know."""
        if isinstance(self.consume_from, str):
            return None
        return as_ms(self.consume_from)

    @property
    def from_where(self) -> str:
        """Upstream's name of the policy."""
        if self.from_ms is not None:
            return CONSUME_FROM_WHERE[5]
        return CONSUME_FROM_WHERE[4 if self.consume_from == "first" else 0]


def as_ms(when: datetime.datetime | int) -> int:
    """Wall time in milliseconds; a datetime without a zone is local."""
    return int(when.timestamp() * 1000) if isinstance(when, datetime.datetime) else when
