"""What a query's filters say about topics, queues, offsets and times, so that less is read.

Filters that the choice of ranges decides exactly are taken over; Spark applies all others itself.
Times are only a hint: brokers search for them in a queue whose store times are nearly, but not
always, in order (a clock may be set back), hence the margin.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from cosmodrome.spark.read.rows import NEVER_NULL
from cosmodrome.wire.bodies import MessageQueue

TIME_MARGIN_MS = 60_000
OFFSET_MAX = (1 << 63) - 1
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_COMPARISONS = (EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


@dataclasses.dataclass(slots=True)
class PushedFilters:
    """Bounds on what has to be read. They start as everything and only shrink."""

    sets: dict[str, frozenset[Any]] = dataclasses.field(default_factory=dict)
    low: int = 0  # queue offsets [low, high)
    high: int = OFFSET_MAX
    since_ms: int | None = None  # store times [since, until)
    until_ms: int | None = None

    def take(self, filters: Iterable[Filter]) -> list[Filter]:
        """Narrows by every filter it understands; gives back those Spark must still apply."""
        return [one for one in filters if not self._take(one)]

    def admits(self, queue: MessageQueue) -> bool:
        values = {"topic": queue.topic, "broker": queue.broker_name, "queue_id": queue.queue_id}
        return all(values[name] in allowed for name, allowed in self.sets.items())

    @property
    def since_floor_ms(self) -> int | None:
        """Where a search for the first message may safely begin."""
        return None if self.since_ms is None else max(self.since_ms - TIME_MARGIN_MS, 0)

    @property
    def until_ceiling_ms(self) -> int | None:
        return None if self.until_ms is None else max(self.until_ms + TIME_MARGIN_MS, 0)

    def _take(self, filter_: Filter) -> bool:
        """True if `filter_` is decided by these bounds alone."""
        attribute: tuple[str, ...] = getattr(filter_, "attribute", ())
        if len(attribute) != 1:
            return False
        column = attribute[0]
        if isinstance(filter_, IsNotNull):
            return column in NEVER_NULL
        if isinstance(filter_, In):
            return self._among(column, filter_.value)
        if not isinstance(filter_, _COMPARISONS) or filter_.value is None:
            return False
        if column == "queue_offset":
            return self._compare_offset(filter_)
        if column == "store_time":
            self._compare_time(filter_)
            return False
        if isinstance(filter_, EqualTo | EqualNullSafe):
            return self._among(column, (filter_.value,))
        return False

    def _among(self, column: str, values: Iterable[Any]) -> bool:
        if column == "queue_offset":
            numbers = [value for value in values if isinstance(value, int)]
            self.low = max(self.low, min(numbers, default=OFFSET_MAX))
            self.high = min(self.high, max(numbers, default=-1) + 1)
            return False
        kinds: dict[str, type] = {"topic": str, "broker": str, "queue_id": int}
        if column not in kinds:
            return False
        allowed = frozenset(value for value in values if isinstance(value, kinds[column]))
        self.sets[column] = self.sets[column] & allowed if column in self.sets else allowed
        return True

    def _compare_offset(self, filter_: Any) -> bool:
        value = filter_.value
        if not isinstance(value, int):
            return False
        if isinstance(filter_, EqualTo | EqualNullSafe | GreaterThanOrEqual):
            self.low = max(self.low, value)
        if isinstance(filter_, EqualTo | EqualNullSafe | LessThanOrEqual):
            self.high = min(self.high, value + 1)
        if isinstance(filter_, GreaterThan):
            self.low = max(self.low, value + 1)
        if isinstance(filter_, LessThan):
            self.high = min(self.high, value)
        return True

    def _compare_time(self, filter_: Any) -> None:
        moment_ms = _milliseconds(filter_.value)
        if moment_ms is None:
            return
        if not isinstance(filter_, LessThan | LessThanOrEqual):
            self.since_ms = max(moment_ms, self.since_ms if self.since_ms is not None else 0)
        if not isinstance(filter_, GreaterThan | GreaterThanOrEqual):
            later = moment_ms + 1  # the rest of the millisecond
            self.until_ms = later if self.until_ms is None else min(later, self.until_ms)


def _milliseconds(value: Any) -> int | None:
    """Whole milliseconds at or before a timestamp; None for anything else."""
    if not isinstance(value, datetime.datetime):
        return None
    moment = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
    return (moment - _EPOCH) // datetime.timedelta(milliseconds=1)
