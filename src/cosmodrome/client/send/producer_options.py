"""How a producer behaves, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypedDict

from cosmodrome.client.send.hooks import Hook
from cosmodrome.client.send.packing import Compression
from cosmodrome.errors import ConfigError


class ProducerSettings(TypedDict, total=False):
    """The fields of ProducerOptions, for constructors that take them by name."""

    send_timeout_ms: int
    retries: int
    retries_async: int
    retry_another_broker_when_not_store_ok: bool
    compress_above_bytes: int
    compression: Compression
    max_message_bytes: int
    latency_fault_avoidance: bool
    in_flight_max: int
    linger_ms: float
    default_topic_queues: int
    close_timeout_ms: int
    hooks: Sequence[Hook]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    send_timeout_ms: int = 3_000  # for all attempts of a send together
    retries: int = 2
    retries_async: int = 2  # of messages that are submitted or gathered
    retry_another_broker_when_not_store_ok: bool = False
    compress_above_bytes: int = 4_096
    compression: Compression = "zlib"
    max_message_bytes: int = 4 << 20
    latency_fault_avoidance: bool = False
    in_flight_max: int = 1_024  # messages that are not acknowledged
    linger_ms: float = 0  # how long a message may wait for others that travel with it
    default_topic_queues: int = 4  # of a topic that its first message creates
    close_timeout_ms: int = 3_000
    hooks: Sequence[Hook] = ()

    def __post_init__(self) -> None:
        for name, value in (
            ("send_timeout_ms", self.send_timeout_ms),
            ("retries", self.retries + 1),
        ):
            if value <= 0:
                raise ConfigError(f"{name} is too small")
        not_negative = (self.linger_ms, self.retries_async, self.close_timeout_ms)
        if min(not_negative) < 0 or self.default_topic_queues < 1:
            raise ConfigError(
                "linger_ms, retries_async and close_timeout_ms cannot be negative,"
                " default_topic_queues is at least 1"
            )
