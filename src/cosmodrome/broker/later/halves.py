"""Half messages: how a transaction lies in the store, and what is known about its end.

A transactional message is stored as a *half* first, in queue 0 of `RMQ_SYS_TRANS_HALF_TOPIC`,
with its real topic and queue as properties. The commit stores it again where it belongs. An *op*
record in queue 0 of `RMQ_SYS_TRANS_OP_HALF_TOPIC` names the queue offsets of halves that are
decided. A half whose producer is asked is appended again, and the copy replaces it.

`Decisions` keeps what the op queue cannot say: ends that are on their way to the disk, and which
copy replaced which half. So one transaction is decided once, also when its producer
answers twice or for an older copy. It is memory only and bounded: what falls out of it, or is
lost with the process, may be decided a second time, never left undecided.
"""

from __future__ import annotations

import asyncio
from typing import Final, Generic, NamedTuple, TypeVar

from cosmodrome.layout import SYS_COMMIT, SYS_TRANSACTION_MASK
from cosmodrome.store.store import Draft
from cosmodrome.wire.message import (
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TAGS,
    WAIT,
    format_properties,
)
from cosmodrome.wire.names import HALF_TOPIC, OP_HALF_TOPIC
from cosmodrome.wire.record import Record

# Compat: the group whose offsets say how far transactions were looked through.
TRANSACTION_GROUP: Final = "CID_RMQ_SYS_TRANS"
QUEUE_ID: Final = 0
HALF_QUEUES: Final = 1
# What later copies add to the properties of a half must still fit.
COPY_PROPERTIES_BYTES: Final = 256
REMEMBERED_MAX: Final = 100_000  # decisions, and as many copies

_DECIDED_TAG = "d"
_OP_PROPERTIES = format_properties({WAIT: "true", TAGS: _DECIDED_TAG})

V = TypeVar("V")


class Destination(NamedTuple):
    """Where a half goes when it is committed."""

    topic: str
    queue_id: int


def make_half(draft: Draft, pairs: dict[str, str]) -> None:
    """Turn a message into its half; the caller writes the text of `pairs` into the draft."""
    pairs[REAL_TOPIC] = draft.topic
    pairs[REAL_QUEUE_ID] = str(draft.queue_id)
    draft.topic, draft.queue_id = HALF_TOPIC, QUEUE_ID
    draft.sys_flag &= ~SYS_TRANSACTION_MASK


def destination_of(pairs: dict[str, str]) -> Destination | None:
    topic, queue_id = pairs.get(REAL_TOPIC), pairs.get(REAL_QUEUE_ID, "")
    if not topic or not queue_id.isascii() or not queue_id.isdigit() or len(queue_id) > 9:
        return None
    return Destination(topic, int(queue_id))


def copied(record: Record, pairs: dict[str, str], topic: str = HALF_TOPIC) -> Draft:
    """The half once more, with other properties, for the end of its queue or another topic."""
    return Draft(
        topic=topic,
        queue_id=QUEUE_ID,
        body=record.body,
        properties=format_properties(pairs),
        born_host=record.born_host,
        store_host=record.store_host,
        flag=record.flag,
        sys_flag=record.sys_flag & ~SYS_TRANSACTION_MASK,
        born_ms=record.born_ms,
        reconsume_times=record.reconsume_times,
    )


def committed(record: Record, destination: Destination) -> Draft:
    """The message of a half. Compat: it keeps every property of the half."""
    return Draft(
        topic=destination.topic,
        queue_id=destination.queue_id,
        body=record.body,
        properties=record.properties,
        born_host=record.born_host,
        store_host=record.store_host,
        flag=record.flag,
        sys_flag=record.sys_flag & ~SYS_TRANSACTION_MASK | SYS_COMMIT,
        born_ms=record.born_ms,
        reconsume_times=record.reconsume_times,
        prepared_offset=record.log_offset,
    )


def op(half_offset: int, host: bytes, now_ms: int) -> Draft:
    """The record that says that a half is decided."""
    return Draft(
        topic=OP_HALF_TOPIC,
        queue_id=QUEUE_ID,
        body=b"%d" % half_offset,
        properties=_OP_PROPERTIES,
        born_host=host,
        store_host=host,
        born_ms=now_ms,
    )


def decided_by(record: Record) -> list[int]:
    """Queue offsets of the halves that an op record names. Compat: 5.x names several."""
    if record.pairs().get(TAGS) != _DECIDED_TAG:
        return []
    words = record.body.split(b",")
    return [int(word) for word in words if word.isdigit() and len(word) <= 19]


class Decision:
    """The end of one transaction: on its way, or stored once `finished` is set."""

    __slots__ = ("commit", "failed", "finished", "half_offset")

    def __init__(self, half_offset: int, *, commit: bool) -> None:
        self.half_offset = half_offset  # of the newest copy
        self.commit = commit
        self.failed = False
        self.finished = asyncio.Event()


def _stored(*, commit: bool) -> Decision:
    decision = Decision(-1, commit=commit)
    decision.finished.set()
    return decision


class EndedHalves:
    """How the newest halves ended, a byte for each: an object for each would take 500 bytes."""

    def __init__(self, count: int) -> None:
        self._ends = bytearray(count)  # by offset, as a ring: an index into `_DECISIONS`
        self._behind = 0  # the offset behind the newest

    def put(self, offset: int, *, commit: bool) -> None:
        count = len(self._ends)
        if offset >= self._behind + count:
            self._ends = bytearray(count)
        else:
            for skipped in range(self._behind, offset):
                self._ends[skipped % count] = 0
        self._behind = max(self._behind, offset + 1)
        if offset >= self._behind - count:
            self._ends[offset % count] = 1 + commit

    def find(self, offset: int) -> Decision | None:
        if self._behind - len(self._ends) <= offset < self._behind:
            return self._DECISIONS[self._ends[offset % len(self._ends)]]
        return None

    _DECISIONS = (None, _stored(commit=False), _stored(commit=True))


class Decisions:
    """Recent decisions by the queue offset of the newest copy of a half.

    Of one that is stored only its outcome is kept, in a byte.
    """

    def __init__(self, remembered_max: int = REMEMBERED_MAX) -> None:
        self._under_way: dict[int, Decision] = {}  # at most one per request that is not answered
        self._ended = EndedHalves(remembered_max)
        self._copies: Recent[int] = Recent(remembered_max)  # half -> the copy that replaced it

    def newest(self, half_offset: int) -> int:
        """The offset of the copy that stands for this half now."""
        newest = half_offset
        while (copy := self._copies.get(newest)) is not None:  # copies only point forward
            newest = copy
        if newest != half_offset and self._copies.get(half_offset) != newest:
            self._copies.put(half_offset, newest)
        return newest

    def moved(self, half_offset: int, copy_offset: int) -> None:
        self._copies.put(half_offset, copy_offset)

    def unmoved(self, half_offset: int) -> None:
        """The copy was not stored after all."""
        self._copies.remove(half_offset)

    def find(self, half_offset: int) -> Decision | None:
        newest = self.newest(half_offset)
        return self._under_way.get(newest) or self._ended.find(newest)

    def begin(self, half_offset: int, *, commit: bool) -> Decision:
        decision = Decision(self.newest(half_offset), commit=commit)
        self._under_way[decision.half_offset] = decision
        return decision

    def end(self, decision: Decision, *, failed: bool) -> None:
        self._under_way.pop(decision.half_offset, None)
        decision.failed = failed
        if not failed:
            # A look may have copied the half meanwhile.
            for offset in (decision.half_offset, self.newest(decision.half_offset)):
                self._ended.put(offset, commit=decision.commit)
        decision.finished.set()


class Recent(Generic[V]):
    """What was put in last: at least half of `count_max` entries, and never more than all.

    Two plain tables in turn take a quarter of the memory of one that keeps the order of entries.
    """

    def __init__(self, count_max: int) -> None:
        self._half = max(1, count_max // 2)
        self._new: dict[int, V] = {}
        self._old: dict[int, V] = {}

    def get(self, key: int) -> V | None:
        found = self._new.get(key)
        return self._old.get(key) if found is None else found

    def put(self, key: int, value: V) -> None:
        if len(self._new) >= self._half and key not in self._new:
            self._old, self._new = self._new, {}
        self._new[key] = value

    def remove(self, key: int) -> None:
        self._new.pop(key, None)
        self._old.pop(key, None)
