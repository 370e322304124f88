"""What a query's filters say about topics, queues, offsets and times, so that less is read.

Filters that are decided exactly by the choice of ranges are taken over; all others stay with Spark,
which applies them again. Times are only a hint: brokers find them by search in a queue whose store
times are nearly, not always, in order (a clock may be set back), hence the margin.
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

from cosmodrome.wire.bodies import MessageQueue

TIME_MARGIN_MS = 60_000
OFFSET_MAX = (1 << 63) - 1
_NEVER_NULL = frozenset({"topic", "broker", "queue_id", "queue_offset", "store_time"})
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_COMPARISONS = (EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)


@dataclasses.dataclass(slots=True)
class Wanted:
    """Bounds on what has to be read; starts as everything and only ever shrinks."""

    sets: dict[str, frozenset[Any]] = dataclasses.field(default_factory=dict)
    low: int = 0  # queue offsets [low, high)
    high: int = OFFSET_MAX
    since_ms: int | None = None  # store times [since, until)
    until_ms: int | None = None

    def take(self, filters: Iterable[Filter]) -> list[Filter]:
        """Narrows by every filter it understands; gives back those Spark must still apply."""
        return [given for given in filters if not self._take(given)]

    def wants(self, queue: MessageQueue) -> bool:
        values = {"topic": queue.topic, "broker": queue.broker_name, "queue_id": queue.queue_id}
        return all(values[name] in allowed for name, allowed in self.sets.items())

    @property
    def since_floor_ms(self) -> int | None:
        """Where a search for the first wanted message may safely begin."""
        return None if self.since_ms is None else max(self.since_ms - TIME_MARGIN_MS, 0)

    @property
    def until_ceiling_ms(self) -> int | None:
        return None if self.until_ms is None else max(self.until_ms + TIME_MARGIN_MS, 0)

    def _take(self, given: Filter) -> bool:
        """True if `given` is decided by these bounds alone."""
        attribute: tuple[str, ...] = getattr(given, "attribute", ())
        if len(attribute) != 1:
            return False
        column = attribute[0]
        if isinstance(given, IsNotNull):
            return column in _NEVER_NULL
        if isinstance(given, In):
            return self._among(column, given.value)
        if not isinstance(given, _COMPARISONS) or given.value is None:
            return False
        if column == "queue_offset":
            return self._compare_offset(given)
        if column == "store_time":
            self._compare_time(given)
            return False
        if isinstance(given, EqualTo | EqualNullSafe):
            return self._among(column, (given.value,))
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

    def _compare_offset(self, given: Any) -> bool:
        value = given.value
        if not isinstance(value, int):
            return False
        if isinstance(given, EqualTo | EqualNullSafe | GreaterThanOrEqual):
            self.low = max(self.low, value)
        if isinstance(given, EqualTo | EqualNullSafe | LessThanOrEqual):
            self.high = min(self.high, value + 1)
        if isinstance(given, GreaterThan):
            self.low = max(self.low, value + 1)
        if isinstance(given, LessThan):
            self.high = min(self.high, value)
        return True

    def _compare_time(self, given: Any) -> None:
        moment_ms = _milliseconds(given.value)
        if moment_ms is None:
            return
        if not isinstance(given, LessThan | LessThanOrEqual):
            self.since_ms = max(moment_ms, self.since_ms if self.since_ms is not None else 0)
        if not isinstance(given, GreaterThan | GreaterThanOrEqual):
            later = moment_ms + 1  # the rest of the millisecond
            self.until_ms = later if self.until_ms is None else min(later, self.until_ms)


def _milliseconds(value: Any) -> int | None:
    """Whole milliseconds at or before a timestamp; None for anything else."""
    if not isinstance(value, datetime.datetime):
        return None
    moment = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
    return (moment - _EPOCH) // datetime.timedelta(milliseconds=1)
