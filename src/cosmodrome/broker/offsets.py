"""How far each group has read each queue, and where queues begin and end.

This service is the only writer of the group offsets. They live in memory, change with every
commit and reach `consumerOffset.json` every `flushConsumerOffsetInterval` and at the stop, so
a crash makes consumers repeat a few seconds, never miss anything.

The file is upstream's: `topic@group` -> queue id -> next offset to read. Neither a topic nor a
group name can hold an `@`, so the key is unambiguous.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from cosmodrome.broker.tables import Document, TableFile, with_unknown
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions
from cosmodrome.errors import Code, Refused, StoreCorrupt
from cosmodrome.store.store import Store
from cosmodrome.wire import bodies
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
INT32_MAX = (1 << 31) - 1
INT64_MAX = (1 << 63) - 1

# Bounds of the table: a client may commit for names that nobody ever created.
KEYS_MAX = 1_000_000
QUEUES_PER_KEY_MAX = 65_536

QueueOffsets = dict[int, int]


class Offsets:
    """The table of group offsets and the handlers that ask for offsets of any kind."""

    def __init__(self, options: BrokerOptions, path: str, store: Store, env: Env) -> None:
        self._store = store
        self._interval_s = max(options.flush_consumer_offset_interval, 1) / 1000
        self._file = TableFile(path, env, self._document)
        self._table: dict[str, QueueOffsets] = {}
        self._unknown: Document | None = None  # members of the file that are not ours
        self._changed = False
        self._saver: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._saver is not None:
            return
        document = await self._file.load()
        if document is not None:
            self._table = self._read_table(document)
            self._unknown = {name: document[name] for name in document if name != TABLE}
        self._changed = False
        self._saver = asyncio.create_task(self._save_regularly(), name="save consumer offsets")

    async def stop(self) -> None:
        if self._saver is None:
            return
        self._saver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._saver
        self._saver = None
        if self._changed:
            self._changed = False
            self._file.save_soon()
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
            if len(self._table) >= KEYS_MAX:
                raise Refused(
                    Code.SYSTEM_ERROR,
                    f"This broker already keeps offsets for {KEYS_MAX} pairs of topic and group;"
                    " delete unused groups with their offsets first.",
                )
        if not 0 <= queue_id <= INT32_MAX or not -1 <= offset <= INT64_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Queue id {queue_id} with offset {offset} is out of range; a queue id has at most"
                " 31 bits, an offset at most 63.",
            )
        if queue_id not in queues and len(queues) >= QUEUES_PER_KEY_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Group {group} already has offsets for {QUEUES_PER_KEY_MAX} queues of {topic};"
                " more are not kept.",
            )
        before = queues.get(queue_id, -1)
        if offset == before:
            return
        if offset < before:
            # Compat: a consumer may move itself back, for example after a reset.
            log.info(
                "offset_moved_back topic=%s group=%s queue=%d from=%d to=%d",
                *(topic, group, queue_id, before, offset),
            )
        queues[queue_id] = offset
        self._table[key] = queues
        self._changed = True

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
        return {topic for topic, owner in map(_split, self._table) if owner == group}

    def topics_by_group(self) -> dict[str, set[str]]:
        """`topics_of` for all groups at once."""
        table: dict[str, set[str]] = {}
        for topic, group in map(_split, self._table):
            table.setdefault(group, set()).add(topic)
        return table

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Topic and group of all that is kept now; the table may change during the walk."""
        return map(_split, list(self._table))

    def groups_of(self, topic: str) -> set[str]:
        return {group for name, group in map(_split, self._table) if name == topic}

    def remove(self, group: str) -> None:
        """Forget what a deleted group has read."""
        self._remove([key for key in self._table if _split(key)[1] == group])

    def remove_topic(self, topic: str) -> None:
        """Forget what all groups have read of a deleted topic."""
        self._remove([key for key in self._table if _split(key)[0] == topic])

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
    def get_all_consumer_offset(self, ask: GetAllConsumerOffset, call: Call) -> Reply:
        wrapper = bodies.ConsumerOffsetSerializeWrapper(offset_table=self._table)
        return Reply(body=bodies.encode(wrapper))

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
            del self._table[key]
            self._changed = True

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if self._changed:
                self._changed = False
                self._file.save_soon()

    def _document(self) -> Document:
        table = {key: dict(queues) for key, queues in self._table.items()}
        return with_unknown({TABLE: table}, self._unknown)

    def _read_table(self, document: Mapping[str, Any]) -> dict[str, QueueOffsets]:
        try:
            return {
                str(key): {int(queue_id): int(offset) for queue_id, offset in queues.items()}
                for key, queues in (document.get(TABLE) or {}).items()
            }
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreCorrupt(
                f"{self._file.path}: {TABLE} is not a table of offsets ({error}); restore it from"
                f" {self._file.path}.bak or from a copy."
            ) from None


def _split(key: str) -> tuple[str, str]:
    topic, _, group = key.partition("@")
    return topic, group
