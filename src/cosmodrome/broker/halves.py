"""Half messages: how a transaction lies in the store, and what is known about its end.

A transactional message is stored as a *half* first, in queue 0 of `RMQ_SYS_TRANS_HALF_TOPIC`,
with its real topic and queue as properties. The commit stores it again where it belongs. An *op*
record in queue 0 of `RMQ_SYS_TRANS_OP_HALF_TOPIC` names the queue offsets of halves that are
decided. A half whose producer is asked is appended again, and the copy takes its place.

`Decisions` keeps what the op queue cannot say: ends that are on their way to the disk, and which
copy took the place of which half. So one transaction is decided once, also when its producer
answers twice or for an older copy. It is memory only and bounded: what falls out of it, or is
lost with the process, may be decided a second time, never left undecided.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final, NamedTuple, TypeVar

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
REMEMBERED_MAX: Final = 100_000

_DECIDED_TAG = "d"
_OP_PROPERTIES = format_properties({WAIT: "true", TAGS: _DECIDED_TAG})

V = TypeVar("V")


class RealPlace(NamedTuple):
    """Where a half goes when it is committed."""

    topic: str
    queue_id: int


def make_half(draft: Draft, pairs: dict[str, str]) -> None:
    """Turn a message into its half; the caller writes the text of `pairs` into the draft."""
    pairs[REAL_TOPIC] = draft.topic
    pairs[REAL_QUEUE_ID] = str(draft.queue_id)
    draft.topic, draft.queue_id = HALF_TOPIC, QUEUE_ID
    draft.sys_flag &= ~SYS_TRANSACTION_MASK


def real_place(pairs: dict[str, str]) -> RealPlace | None:
    topic, queue_id = pairs.get(REAL_TOPIC), pairs.get(REAL_QUEUE_ID, "")
    if not topic or not queue_id.isascii() or not queue_id.isdigit() or len(queue_id) > 9:
        return None
    return RealPlace(topic, int(queue_id))


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


def committed(record: Record, place: RealPlace) -> Draft:
    """The message of a half. Compat: it keeps every property of the half."""
    return Draft(
        topic=place.topic,
        queue_id=place.queue_id,
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

    __slots__ = ("commit", "failed", "finished")

    def __init__(self, *, commit: bool) -> None:
        self.commit = commit
        self.failed = False
        self.finished = asyncio.Event()


class Decisions:
    """Recent decisions by the queue offset of the newest copy of a half."""

    def __init__(self, remembered_max: int = REMEMBERED_MAX) -> None:
        self._remembered_max = remembered_max
        self._decisions: OrderedDict[int, Decision] = OrderedDict()
        self._copies: OrderedDict[int, int] = OrderedDict()  # half -> the copy that replaced it

    def newest(self, half_offset: int) -> int:
        """The offset of the copy that stands for this half now."""
        newest = half_offset
        while newest in self._copies:  # copies only point forward
            newest = self._copies[newest]
        if half_offset in self._copies:
            self._copies[half_offset] = newest
        return newest

    def moved(self, half_offset: int, copy_offset: int) -> None:
        self._copies[half_offset] = copy_offset
        _shrink(self._copies, self._remembered_max)

    def unmoved(self, half_offset: int) -> None:
        """The copy was not stored after all."""
        self._copies.pop(half_offset, None)

    def find(self, half_offset: int) -> Decision | None:
        return self._decisions.get(self.newest(half_offset))

    def begin(self, half_offset: int, *, commit: bool) -> Decision:
        decision = self._decisions[self.newest(half_offset)] = Decision(commit=commit)
        _shrink(self._decisions, self._remembered_max)
        return decision

    def end(self, half_offset: int, decision: Decision, *, failed: bool) -> None:
        if failed:
            decision.failed = True
            newest = self.newest(half_offset)
            if self._decisions.get(newest) is decision:
                del self._decisions[newest]
        decision.finished.set()


def _shrink(table: OrderedDict[int, V], count_max: int) -> None:
    while len(table) > count_max:
        table.popitem(last=False)
