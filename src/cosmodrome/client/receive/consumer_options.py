"""How a push consumer behaves, checked once."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from cosmodrome.client.receive.engine.options import ReadOptions, ReadSettings
from cosmodrome.client.receive.rebalance import Strategy
from cosmodrome.client.values import MessageQueue, ReceivedMessage

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


class ConsumerSettings(ReadSettings, total=False):
    """The fields of ConsumerOptions, for constructors that take them by name."""

    strategy: Strategy
    orderly: bool
    concurrency: int
    batch: int
    max_reconsume_times: int
    suspend_queue_ms: int
    consume_timeout_ms: int
    close_timeout_ms: int
    hooks: tuple[ConsumeHook, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions(ReadOptions):
    orderly: bool = False
    concurrency: int = 20  # calls of an async handler at once
    batch: int = 1  # messages per call of a handler

    max_reconsume_times: int = -1  # -1: sixteen, or for ever when orderly
    suspend_queue_ms: int = 1_000  # orderly: between two attempts at one message
    consume_timeout_ms: int = 15 * 60_000  # then a message is given back though it still runs
    close_timeout_ms: int = 10_000  # for handlers that run, when the consumer closes

    hooks: tuple[ConsumeHook, ...] = ()

    def __post_init__(self) -> None:
        ReadOptions.__post_init__(self)
        self.check("concurrency", 1, 1_000)
        self.check("batch", 1, 1_024)
        self.check("suspend_queue_ms", 1)
        self.check("consume_timeout_ms", 1)
        self.check("close_timeout_ms", 0)

    @property
    def in_order(self) -> bool:
        return self.orderly

    @property
    def locks_queues(self) -> bool:
        return self.orderly and self.clustering

    @property
    def retries_max(self) -> int:
        """Attempts after the first, in words that a broker understands."""
        return RETRIES_DEFAULT if self.max_reconsume_times < 0 else self.max_reconsume_times

    def running_properties(self) -> dict[str, str]:
        return {
            "PROP_THREADPOOL_CORE_SIZE": str(self.concurrency),
            "PROP_CONSUMEORDERLY": "true" if self.orderly else "false",
        }
