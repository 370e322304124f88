"""Options that every kind of consumer has, checked once.

Each kind of consumer adds its own options to these, and says in properties how the engine is to
treat it: whether progress is committed by itself, whether queues are locked, how pulls look.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import ClassVar, Final, Literal, Protocol, TypedDict

from cosmodrome.client.receive.rebalance import Averagely, Strategy
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.errors import ConfigError
from cosmodrome.wire.bodies import CONSUME_FROM_WHERE

MIB = 1024 * 1024
CLUSTERING: Final = "clustering"
BROADCASTING: Final = "broadcasting"

Moment = datetime.datetime | int | Literal["first", "last"]


class FilterHook(Protocol):
    """Decides about every message that was pulled; one that is not kept counts as done."""

    def keep(self, group: str, message: ReceivedMessage) -> bool: ...


class ReadSettings(TypedDict, total=False):
    """The fields of ReadOptions, for constructors that take them by name."""

    model: Literal["clustering", "broadcasting"]
    consume_from: Moment
    pull_batch: int
    pull_interval_ms: int
    suspend_ms: int
    pull_timeout_ms: int
    prefetch_messages: int
    prefetch_bytes: int
    prefetch_span: int
    body_bytes_max: int
    inflated_bytes_max: int
    commit_every_ms: int
    rebalance_every_ms: int
    offsets_dir: str | None
    filters: tuple[FilterHook, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    model: Literal["clustering", "broadcasting"] = CLUSTERING
    consume_from: Moment = "last"  # where a group begins in a queue that is new to it
    strategy: Strategy = dataclasses.field(default_factory=Averagely)

    pull_batch: int = 32
    pull_interval_ms: int = 0
    suspend_ms: int = 15_000  # how long a broker may hold a pull
    pull_timeout_ms: int = 30_000
    prefetch_messages: int = 1_000  # per queue, like the next two
    prefetch_bytes: int = 100 * MIB
    prefetch_span: int = 2_000  # offsets between the first and the last that is not done
    # Of a body that was compressed, and of those of one pull together.
    body_bytes_max: int = 64 * MIB
    # Of all those in all queues of a consumer that are not done.
    inflated_bytes_max: int = 256 * MIB

    commit_every_ms: int = 5_000
    rebalance_every_ms: int = 20_000
    offsets_dir: str | None = None  # broadcasting; None: ~/.rocketmq_offsets
    filters: tuple[FilterHook, ...] = ()

    interval_ms_min: ClassVar[int] = 100  # of commits and rebalances
    consume_type: ClassVar[str] = "CONSUME_PASSIVELY"  # upstream's name of push and pull
    pull_flags: ClassVar[int] = 0  # in every pull

    def __post_init__(self) -> None:
        if self.model not in (CLUSTERING, BROADCASTING):
            raise ConfigError(f"model {self.model!r}: use {CLUSTERING!r} or {BROADCASTING!r}")
        if isinstance(self.consume_from, str) and self.consume_from not in ("last", "first"):
            raise ConfigError(
                f"consume_from {self.consume_from!r}: use 'last', 'first', a datetime or"
                " milliseconds"
            )
        self.check("pull_batch", 1, 1_024)
        self.check("prefetch_messages", 1, 65_535)
        self.check("prefetch_span", 1, 65_535)
        self.check("prefetch_bytes", 1, 1 << 40)
        self.check("body_bytes_max", 1, 1 << 31)
        self.check("inflated_bytes_max", 1, 1 << 40)
        self.check("suspend_ms", 1)
        self.check("pull_timeout_ms", 1)
        self.check("commit_every_ms", self.interval_ms_min)
        self.check("rebalance_every_ms", self.interval_ms_min)
        self.check("pull_interval_ms", 0)
        if self.suspend_ms >= self.pull_timeout_ms:
            raise ConfigError(
                f"suspend_ms ({self.suspend_ms}) must be below pull_timeout_ms"
                f" ({self.pull_timeout_ms}): the broker answers when the hold is over"
            )

    def check(self, name: str, least: int, most: int | None = None) -> None:
        """ConfigError when an option is out of its range."""
        value = getattr(self, name)
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"{least} to {most}"
            raise ConfigError(f"{name} is {value}; use {bounds}")

    @property
    def clustering(self) -> bool:
        return self.model == CLUSTERING

    @property
    def in_order(self) -> bool:
        """Whether the messages of a queue are done one after the other."""
        return False

    @property
    def locks_queues(self) -> bool:
        """Whether a queue is read only while the broker has locked it for this member."""
        return False

    @property
    def pulls_ahead(self) -> bool:
        """Whether messages are pulled before anybody asks for them."""
        return True

    @property
    def commits_by_itself(self) -> bool:
        """Whether progress is stored regularly and when a queue is given up."""
        return True

    @property
    def repeats_commits(self) -> bool:
        """Whether progress that did not move is stored again, in case the broker forgot it."""
        return True

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

    def running_properties(self) -> dict[str, str]:
        """What a report says about this kind of consumer, under upstream's names."""
        return {}


def as_ms(when: datetime.datetime | int) -> int:
    """Wall time in milliseconds; a datetime without a zone is local."""
    return int(when.timestamp() * 1000) if isinstance(when, datetime.datetime) else when
