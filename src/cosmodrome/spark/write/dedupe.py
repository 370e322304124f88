"""Drops what a repeated write doubled: exactly once for readers that ask for it.

The sink gives every row a unique key that a repetition repeats, and marks every message that may
be a repetition (see `repeats`). A marked message is dropped when the topic holds another one with
the same key and a lower rank, and only then. The rank is the mark's value (none is lowest), then
broker, queue and offset. So exactly one of all copies is kept, the one of the earliest attempt, and
every reader keeps the same one whatever range it reads. Copies are found in what was read before,
else in the key index of every broker of the topic. Unmarked messages are never looked up: they cost
nothing.

Guaranteed, when rows come in the same order in every attempt: each row once, over failed and
repeated tasks, repeated stages, a stream killed between send and commit and started again, sends
repeated after a time-out or a broken connection, and brokers restarted meanwhile.

Not guaranteed:

- A task that goes on sending after its replacement (an executor cut off from the driver, or
  speculation): a reader may have passed the replacement's copy before the older one is
  stored. The same holds for a request that a broker executes after its sender gave it up.
- Input that differs between attempts (order that is not deterministic, a source that changed): the
  same key then names different rows.
- Brokers without key index (messageIndexEnable=false), and copies whose index file has expired:
  the copies are not found and both are kept. Readers must come within the retention time.
- Topics whose brokers cannot all be asked: the read fails instead of guessing.
- Messages that others wrote, and those a writer without idempotenceId wrote in two batch jobs:
  they are different messages.
- Two runs of a stream whose drivers' clocks disagree by more than a restart takes: their marks
  are ordered by the time of planning.
- Delayed rows with equal delivery time may be delivered, and read, in another order than sent.

A copy on the same broker is in the index as soon as the marked message can be read. On other
brokers the index of upstream's follows within milliseconds, while a repetition comes at
least a task start or a back-off later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cosmodrome.spark.write.repeats import MARK as MARK
from cosmodrome.wire.message import UNIQ_KEY

if TYPE_CHECKING:
    from cosmodrome.spark.cluster import StoredCopy

KEYS_MAX = 1_000_000  # keys remembered per range
LOOKUPS_AT_ONCE = 256

Rank = tuple[str, str, int, int]


class Marked(NamedTuple):
    """A row that carries the mark."""

    row: int  # whatever number the caller knows it by
    queue_offset: int
    key: str  # its UNIQ_KEY
    mark: str


class Finder(Protocol):
    """Every stored copy of these keys in a topic, on any of its brokers; an error when one of
    them cannot be asked."""

    def find_by_unique_keys(
        self, topic: str, keys: Sequence[str]
    ) -> Mapping[str, Sequence[StoredCopy]]: ...


class Dedupe:
    """For the rows of one queue, in queue order."""

    def __init__(self, finder: Finder, topic: str, broker: str, queue_id: int) -> None:
        self._finder = finder
        self._topic = topic
        self._broker = broker
        self._queue_id = queue_id
        self._lowest: dict[str, Rank] = {}  # of the copies that were read, by key

    def rows_to_drop(self, rows: Iterable[Marked]) -> set[int]:
        """The row numbers to drop."""
        dropped: set[int] = set()
        asked: dict[str, list[tuple[int, Rank]]] = {}
        for row in rows:
            rank = (row.mark, self._broker, self._queue_id, row.queue_offset)
            before = self._lowest.get(row.key)
            if before is not None and before < rank:
                dropped.add(row.row)
                continue
            if len(self._lowest) >= KEYS_MAX:
                self._lowest.clear()  # costs lookups, nothing else
            self._lowest[row.key] = rank
            asked.setdefault(row.key, []).append((row.row, rank))
        keys = list(asked)
        for begin in range(0, len(keys), LOOKUPS_AT_ONCE):
            part = keys[begin : begin + LOOKUPS_AT_ONCE]
            found = self._finder.find_by_unique_keys(self._topic, part)
            for key in part:
                lowest = _lowest(key, found.get(key, ()))
                if lowest is not None:
                    dropped.update(row for row, rank in asked[key] if lowest < rank)
        return dropped


def _lowest(key: str, copies: Iterable[StoredCopy]) -> Rank | None:
    # The index finds by hash: another key may come along.
    ranks = [
        (properties.get(MARK, ""), broker, queue_id, offset)
        for broker, queue_id, offset, properties in copies
        if properties.get(UNIQ_KEY) == key
    ]
    return min(ranks, default=None)
