"""How far each group has read each queue, and where queues begin and end.

This service is the only writer of the group offsets. They live in memory, change with every
commit and reach `consumerOffset.json` every `flushConsumerOffsetInterval` and at the stop, so
a crash makes consumers repeat a few seconds, never miss anything.

The file is upstream's: `topic@group` -> queue id -> next offset to read. Neither a topic nor a
group name can hold an `@`, so the key is unambiguous. A slave adds what was committed there and
its master may not know yet (`keep`); upstream ignores that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from cosmodrome.broker.members.offset_table import OffsetTable, QueueOffsets, split
from cosmodrome.broker.members.table_file import (
    Document,
    RefusedRows,
    TableFile,
    with_unknown,
)
from cosmodrome.env.background import Background, Steps, in_turns
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.signal import Signal
from cosmodrome.errors import Code, Refused, StoreCorrupt
from cosmodrome.store.store import Store
from cosmodrome.wire.commands.fields import OffsetReply, TimestampReply
from cosmodrome.wire.commands.offset import (
    GetAllConsumerOffset,
    GetEarliestMsgStoretime,
    GetMaxOffset,
    GetMinOffset,
    QueryConsumerOffset,
    SearchOffsetByTimestamp,
    UpdateConsumerOffset,
)
from cosmodrome.wire.names import check_group, check_topic
from cosmodrome.wire.table import Call, Reply

log = logging.getLogger(__name__)

TABLE = "offsetTable"
KEPT = "committedHere"
INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1

QUEUES_PER_KEY_MAX = 65_536
ROWS_PER_STEP = 1000

Kept = dict[str, QueueOffsets]  # by `topic@group`


class Offsets:
    """The table of group offsets and the handlers that ask for offsets of any kind.

    `committed` fires with every commit that moves an offset, `replaced` with the keys of rows that
    changed in another way or are gone.
    """

    def __init__(self, options: BrokerOptions, path: str, store: Store, env: Env) -> None:
        self._store = store
        self._interval_s = max(options.flush_consumer_offset_interval, 1) / 1000
        self._file = TableFile(path, env, self._document)
        self._bounded = OffsetTable()
        self._table = self._bounded.rows  # to look up, and to change what a row has already
        self._answering = asyncio.Lock()
        self._unknown: Document | None = None  # members of the file that are not ours
        self._kept_before: Kept = {}  # the last time
        self.kept: Kept = {}  # the same object for ever
        self._changed = False
        self._saver = Background("save consumer offsets")
        self.committed: Signal[tuple[str, int, int]] = Signal()  # key, queue id, offset
        self.replaced: Signal[Collection[str]] = Signal()

    async def start(self) -> None:
        if self._saver.running:
            return
        document = await self._file.load()
        if document is not None:
            self._bounded.clear()
            for key, queues in self._read_table(document, TABLE).items():
                self._bounded.put(key, queues)
            self._kept_before = self._read_table(document, KEPT)
            self._unknown = {name: document[name] for name in document if name not in (TABLE, KEPT)}
        self._changed = False
        self._saver.repeat(self._interval_s, self._save_if_changed)

    async def stop(self) -> None:
        if await self._saver.stop():
            self._save_if_changed()
            await self._file.stop()

    # --- for other services ------------------------------------------------------------------

    def query(self, group: str, topic: str, queue_id: int) -> int:
        """The committed offset, or −1."""
        queues = self._table.get(f"{topic}@{group}")
        return -1 if queues is None else queues.get(queue_id, -1)

    def commit(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Overwrite the committed offset, also with a smaller one."""
        key = f"{topic}@{group}"
        queues = self._table.get(key)
        if queues is None:
            check_topic(topic)
            check_group(group)
            queues = {}
        if not 0 <= queue_id <= INT32_MAX or not -1 <= offset <= INT64_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Queue id {queue_id} with offset {offset} is out of range; a queue id has at most"
                " 31 bits, an offset at most 63.",
            )
        if queue_id not in queues:
            if len(queues) >= QUEUES_PER_KEY_MAX:
                raise Refused(
                    Code.SYSTEM_ERROR,
                    f"Group {group} already has offsets for {QUEUES_PER_KEY_MAX} queues of"
                    f" {topic}; more are not kept.",
                )
            self._bounded.check_room(key)
        before = queues.get(queue_id, -1)
        if offset == before:
            return
        if offset < before:
            # Compat: a consumer may move itself back, for example after a reset.
            log.info(
                "offset_moved_back topic=%s group=%s queue=%d from=%d to=%d",
                topic,
                group,
                queue_id,
                before,
                offset,
            )
        if queue_id in queues:
            queues[queue_id] = offset
        else:
            self._bounded.add(key, queue_id, offset)
        self._changed = True
        if self.committed.listeners:
            self.committed.fire((key, queue_id, offset))

    def clone(self, source: str, target: str, topic: str) -> None:
        """Give one group exactly the offsets of another, if that has any."""
        offsets = self.of(source, topic)
        if not offsets or source == target:
            return
        self._remove([key for key in (f"{topic}@{target}",) if key in self._table])
        for queue_id, offset in offsets.items():
            self.commit(target, topic, queue_id, offset)

    def of(self, group: str, topic: str) -> Mapping[int, int]:
        """Queue id -> committed offset; a copy."""
        return dict(self._table.get(f"{topic}@{group}", ()))

    def topics_of(self, group: str) -> set[str]:
        return self._bounded.topics_of(group)

    def topics_by_group(self) -> dict[str, set[str]]:
        """`topics_of` for all groups at once."""
        return self._bounded.topics_by_group()

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Topic and group of all that is kept now; the table may change during the walk."""
        return map(split, list(self._table))

    def groups_of(self, topic: str) -> set[str]:
        return self._bounded.groups_of(topic)

    def remove(self, group: str) -> None:
        """Forget what a deleted group has read."""
        self._remove([f"{topic}@{group}" for topic in self._bounded.topics_of(group)])

    def remove_topic(self, topic: str) -> None:
        """Forget what all groups have read of a deleted topic."""
        self._remove([f"{topic}@{group}" for group in self._bounded.groups_of(topic)])

    # --- for replication ---------------------------------------------------------------------

    def row(self, key: str) -> Mapping[int, int] | None:
        """Offsets by queue of one `topic@group`: the row itself, which goes on changing."""
        return self._table.get(key)

    def rows(self) -> dict[str, QueueOffsets]:
        """A copy of the whole table."""
        return {key: dict(queues) for key, queues in self._table.items()}

    def keep(self) -> Callable[[], None]:
        """Keep what is committed from now on, and what the last stop left of it, until `let_go`;
        what was returned ends that."""
        for key, queues in self._kept_before.items():
            self.kept.setdefault(key, queues)
        self._kept_before = {}
        return self.committed.subscribe(self._keep)

    def let_go(self, key: str, queue_id: int, offset: int) -> None:
        """Keep a commit no longer, unless there is another one meanwhile."""
        queues = self.kept.get(key, {})
        if queues.get(queue_id) == offset:
            del queues[queue_id]
            self._changed = True
            if not queues:
                del self.kept[key]

    def _keep(self, commit: tuple[str, int, int]) -> None:
        key, queue_id, offset = commit
        self.kept.setdefault(key, {})[queue_id] = offset

    def follow(self, rows: Mapping[str, Any], *, whole: bool, kept: Kept) -> None:
        """Take over rows of the master; with `whole` others go.

        What is in `kept` was committed here and the master may not know it: there an older offset
        of the master is not taken. One that is not older ends the keeping, and so does a row that
        the master removed.
        """
        refused = RefusedRows("consumerOffset")
        fresh: list[str] = []
        for key, row in rows.items():
            known = self._table.get(key)
            try:
                queues = {} if row is None else _followed_row(key, row)
                if known is None and queues:
                    self._bounded.check_room(key)
            except (AttributeError, Refused, TypeError, ValueError) as error:
                refused.add(key, error)
                continue
            if row is None and key in kept:
                del kept[key]
                self._changed = True
            queues = self._with_kept(key, queues, kept)
            if queues != (known or {}):
                self._bounded.put(key, queues)
                fresh.append(key)
        if whole:
            for key in [key for key in self._table if key not in rows]:
                queues = self._with_kept(key, {}, kept)
                if queues != self._table[key]:
                    self._bounded.put(key, queues)
                    fresh.append(key)
        refused.close()
        if fresh:
            self._changed = True
            self.replaced.fire(fresh)

    def _with_kept(self, key: str, queues: QueueOffsets, kept: Kept) -> QueueOffsets:
        """The master's row, with those offsets in it that were committed here and are newer."""
        ours = kept.get(key)
        if ours is None:
            return queues
        newer = {at: offset for at, offset in ours.items() if offset > queues.get(at, -1)}
        self._changed |= newer != ours
        if newer:
            kept[key] = newer
        else:
            del kept[key]
        return {**queues, **newer}

    # --- handlers ----------------------------------------------------------------------------

    @QueryConsumerOffset.handler
    def query_consumer_offset(self, ask: QueryConsumerOffset, call: Call) -> OffsetReply:
        offset = self.query(ask.consumer_group, ask.topic, ask.queue_id)
        if offset < 0:
            offset = self._first_offset(ask)
        return OffsetReply(offset=offset)

    @UpdateConsumerOffset.handler
    def update_consumer_offset(self, ask: UpdateConsumerOffset, call: Call) -> Reply:
        self.commit(ask.consumer_group, ask.topic, ask.queue_id, ask.commit_offset)
        return Reply()

    @GetAllConsumerOffset.handler
    async def get_all_consumer_offset(self, ask: GetAllConsumerOffset, call: Call) -> Reply:
        """All rows, as `ConsumerOffsetSerializeWrapper` has them."""
        async with self._answering:  # one answer at a time is in the making
            parts = [f'{{"{TABLE}":'.encode()]
            for piece in self._bounded.pieces():
                parts.append(piece)
                await asyncio.sleep(0)
            return Reply(body=b"".join((*parts, b"}")))

    @SearchOffsetByTimestamp.handler
    def search_offset_by_timestamp(self, ask: SearchOffsetByTimestamp, call: Call) -> OffsetReply:
        return OffsetReply(
            offset=self._store.offset_by_time(ask.topic, ask.queue_id, ask.timestamp)
        )

    @GetMaxOffset.handler
    def get_max_offset(self, ask: GetMaxOffset, call: Call) -> OffsetReply:
        return OffsetReply(offset=self._store.bounds(ask.topic, ask.queue_id)[1])

    @GetMinOffset.handler
    def get_min_offset(self, ask: GetMinOffset, call: Call) -> OffsetReply:
        return OffsetReply(offset=self._store.bounds(ask.topic, ask.queue_id)[0])

    @GetEarliestMsgStoretime.handler
    def get_earliest_msg_storetime(
        self, ask: GetEarliestMsgStoretime, call: Call
    ) -> TimestampReply:
        first = self._store.bounds(ask.topic, ask.queue_id)[0]
        return TimestampReply(timestamp=self._store.store_time(ask.topic, ask.queue_id, first))

    # --- inside ------------------------------------------------------------------------------

    def _first_offset(self, ask: QueryConsumerOffset) -> int:
        # Compat: a new group starts at 0 on a queue from which nothing was deleted and which is
        # still warm, whatever its consumeFromWhere says; the client decides only after a 22.
        first, end = self._store.bounds(ask.topic, ask.queue_id)
        if first <= 0 and (end <= 0 or self._store.in_memory(ask.topic, ask.queue_id, 0)):
            return 0
        raise Refused(
            Code.QUERY_NOT_FOUND,
            f"Group {ask.consumer_group[:255]} has committed no offset for queue {ask.queue_id} of"
            f" {ask.topic[:255]}; the consumer starts where its consumeFromWhere says.",
        )

    def _remove(self, keys: list[str]) -> None:
        for key in keys:
            self._bounded.drop(key)
            self._changed = True
        if keys:
            self.replaced.fire(keys)

    def _save_if_changed(self) -> None:
        if self._changed:
            self._changed = False
            self._file.save_soon()

    async def _document(self) -> Document:
        rows = await in_turns(self._copying())
        document: Document = {TABLE: rows}
        if self.kept:
            document[KEPT] = {key: dict(queues) for key, queues in self.kept.items()}
        return with_unknown(document, self._unknown)

    def _copying(self) -> Steps[dict[str, QueueOffsets]]:
        """`rows` in steps; a row that changes meanwhile is copied as it is when its turn comes."""
        copy: dict[str, QueueOffsets] = {}
        for number, key in enumerate(list(self._table), 1):
            if (queues := self._table.get(key)) is not None:
                copy[key] = dict(queues)
            if number % ROWS_PER_STEP == 0:
                yield
        return copy

    def _read_table(self, document: Mapping[str, Any], member: str) -> dict[str, QueueOffsets]:
        try:
            return {
                str(key): {int(queue_id): int(offset) for queue_id, offset in queues.items()}
                for key, queues in (document.get(member) or {}).items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreCorrupt(
                f"{self._file.path}: {member} is not a table of offsets ({error}); restore it from"
                f" {self._file.path}.bak or from a copy."
            ) from None


def _followed_row(key: str, row: Mapping[Any, Any]) -> QueueOffsets:
    """A row of the master as this table has it; an error when it cannot be one."""
    topic, group = split(key)
    check_topic(topic)
    check_group(group)
    if len(row) > QUEUES_PER_KEY_MAX:
        raise ValueError(f"it has {len(row)} queues")
    queues = {int(queue_id): int(offset) for queue_id, offset in row.items()}
    for queue_id, offset in queues.items():
        if not 0 <= queue_id <= INT32_MAX or not -1 <= offset <= INT64_MAX:
            raise ValueError(f"queue {queue_id} with offset {offset} is out of range")
    return queues
