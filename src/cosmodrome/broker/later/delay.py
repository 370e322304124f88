"""Delay levels: hands messages of `SCHEDULE_TOPIC_XXXX` over to their real topics in time.

Queue n of that topic holds the messages of level n + 1 in the order in which they become due;
the tags code of an entry is its delivery time. Each level has one task, which looks at the head
of its queue only: it hands over what is due in batches, sleeps until the next entry is due, and
without any entry waits for an arrival. An offset moves after the copies are safe in the log, so
a crash repeats messages and loses none.

The wall clock may go back; delivery times noted before are then too far in the future. Such an
entry is delivered one delay of its level, by the loop's clock, after it was noticed: it is not
stranded, and it did not wait less than its delay. (Upstream delivers it at once.)

`delayOffset.json` is upstream's: level -> next offset to deliver.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cosmodrome.broker.later.delivery import (
    AGAIN,
    BATCH_BYTES,
    BATCH_COUNT,
    BLOCKED,
    FAILED,
    IDLE,
    Delivery,
    DeliverySettings,
    Line,
    Step,
    restored,
    stored_record,
)
from cosmodrome.broker.members.table_file import Document, RefusedRows
from cosmodrome.env.base import Env
from cosmodrome.errors import StoreCorrupt
from cosmodrome.store.store import DelayLevels, Draft, Store
from cosmodrome.wire import fastjson
from cosmodrome.wire.commands.offset import GetAllDelayOffset
from cosmodrome.wire.names import SCHEDULE_TOPIC
from cosmodrome.wire.table import Call, Reply

log = logging.getLogger(__name__)

TABLE = "offsetTable"
LEVELS_MAX = 65_535
OFFSET_MAX = (1 << 63) - 1

Entry = tuple[int, int, int]  # log offset, size, delivery time


class Waiting(NamedTuple):
    """How many messages wait in a level, and when the next one is due, if that is known."""

    level: int
    messages: int
    due_ms: int | None


class Level(Line):
    """One level: `offset` is the next entry to deliver, below it all are delivered."""

    def __init__(self, number: int, offset: int, delay_ms: int | None) -> None:
        super().__init__(f"delay level {number}")
        self.number = number
        self.offset = offset
        self.delay_ms = delay_ms  # None: no longer configured, entries keep their times
        # Entries below `noticed_end` have waited long enough when the loop's clock shows this.
        self.noticed_end = 0
        self.noticed_until = 0.0

    def wait_ms(self, offset: int, end: int, due_ms: int, now_ms: int) -> int:
        """How long the entry at `offset` still waits; `end` is the end of its queue now."""
        wait_ms = due_ms - now_ms
        if self.delay_ms is None or wait_ms <= self.delay_ms:
            return wait_ms
        loop_s = asyncio.get_running_loop().time()
        if offset >= self.noticed_end:
            self.noticed_end = end
            self.noticed_until = loop_s + self.delay_ms / 1000
            log.warning(
                "clock_went_back level=%d offset=%d ahead_ms=%d",
                self.number,
                offset,
                wait_ms - self.delay_ms,
            )
        return math.ceil((self.noticed_until - loop_s) * 1000)


class Delays(Delivery):
    """Delivery of all levels; on a slave only the table is served."""

    topic = SCHEDULE_TOPIC
    table = "delayOffset"

    def __init__(
        self, levels: DelayLevels, path: str, store: Store, env: Env, settings: DeliverySettings
    ) -> None:
        super().__init__(path, store, env, settings)
        self._delays = levels
        self._saved: dict[int, int] = {}
        self._levels: dict[int, Level] = {}

    async def stop(self) -> None:
        await super().stop()
        self._saved = self._offsets()
        self._levels = {}

    def figures(self) -> Mapping[str, str]:
        """For the runtime information: delivered and stored messages of the levels in use."""
        return {
            f"scheduleMessageOffset_{number}": f"{offset},{self._end(number)}"
            for number, offset in self._offsets().items()
        }

    def waiting(self) -> list[Waiting]:
        """What each level holds; nothing on a slave, which delivers nothing."""
        found = []
        for number, level in self._levels.items():
            messages = max(0, self._end(number) - level.offset)
            entries = (
                self._store.entries(SCHEDULE_TOPIC, number - 1, level.offset, 1) if messages else ()
            )
            found.append(Waiting(number, messages, entries[0][2] if entries else None))
        return found

    @GetAllDelayOffset.handler
    def get_all_delay_offset(self, ask: GetAllDelayOffset, call: Call) -> Reply:
        return Reply(body=fastjson.dumps(self._document()))

    # --- delivery ----------------------------------------------------------------------------

    def _make_lines(self) -> list[Line]:
        # A level that is no longer configured may still have messages waiting.
        left = {queue_id + 1 for queue_id in self._store.queues().get(SCHEDULE_TOPIC, ())}
        for number in sorted(left | set(range(1, len(self._delays) + 1))):
            known = number <= len(self._delays)
            least, most = self._store.bounds(SCHEDULE_TOPIC, number - 1)
            offset = max(least, min(self._saved.get(number, 0), most))
            delay_ms = self._delays.delay_ms(number) if known else None
            self._levels[number] = Level(number, offset, delay_ms)
        return list(self._levels.values())

    async def _step(self, line: Line) -> Step:
        assert isinstance(line, Level)
        least, most = self._store.bounds(SCHEDULE_TOPIC, line.number - 1)
        line.offset = max(least, min(line.offset, most))
        if line.offset == most:
            return IDLE
        if self._store.why_unwritable is not None:
            return BLOCKED
        entries = self._store.entries(SCHEDULE_TOPIC, line.number - 1, line.offset, BATCH_COUNT)
        if not entries:  # its file cannot be read at the moment
            return BLOCKED
        due, wait_ms = self._due(line, entries, most)
        if not due:
            return Step(wait_ms / 1000)
        done = await self._hand_over_level(line, due)
        line.offset += done
        return AGAIN if done == len(due) else FAILED

    def _due(self, level: Level, entries: list[Entry], most: int) -> tuple[list[Entry], int]:
        """Those of the entries that go into the next batch; without any, ms until one is due."""
        now_ms = self._clock.now_ms()
        taken_bytes = 0
        for number, (_, size, due_ms) in enumerate(entries):
            if due_ms > now_ms:
                wait_ms = level.wait_ms(level.offset + number, most, due_ms, now_ms)
                if wait_ms > 0:
                    return entries[:number], wait_ms
            taken_bytes += size
            if number and taken_bytes > BATCH_BYTES:
                return entries[:number], 0
        return entries, 0

    async def _hand_over_level(self, level: Level, due: list[Entry]) -> int:
        """Plain messages go together; from the first that is not plain on, they go one by one."""
        plain = self._store.due_messages(
            SCHEDULE_TOPIC, level.number - 1, level.offset, len(due), BATCH_BYTES
        )

        def others() -> Iterator[Draft | None]:
            for log_offset, size, _ in due[plain.staged :]:
                record = stored_record(self._store, log_offset, size, "delayed_unreadable")
                yield None if record is None else restored(record, record.pairs())

        return await self._hand_over(level, others(), before=plain)

    def _arrived(self, queue_id: int) -> None:
        level = self._levels.get(queue_id + 1)
        # Behind the head of a queue nothing is due earlier, so a sleeper may sleep on.
        if level is not None and level.idle:
            level.wake.set()

    def _log_failure(self, line: Line) -> None:
        assert isinstance(line, Level)
        log.exception("delay_level_failed level=%d offset=%d", line.number, line.offset)

    # --- the table ---------------------------------------------------------------------------

    def _offsets(self) -> dict[int, int]:
        """Level -> next offset, for every level that ever delivered or holds messages."""
        table = dict(self._saved)
        for number, level in self._levels.items():
            if level.offset or number in table:
                table[number] = level.offset
        return dict(sorted(table.items()))

    def rows(self) -> Document:
        """Level -> next offset."""
        return {str(number): offset for number, offset in self._offsets().items()}

    def _follow(self, rows: Mapping[str, Any], refused: RefusedRows, *, whole: bool) -> bool:
        fresh = {} if whole else dict(self._saved)
        for name, row in rows.items():
            try:
                number, offset = int(name), 0 if row is None else int(row)
                if not 1 <= number <= LEVELS_MAX or not 0 <= offset <= OFFSET_MAX:
                    raise ValueError("level or offset is out of range")
            except (TypeError, ValueError) as error:
                refused.add(name, error)
                continue
            fresh[number] = offset
            if row is None:
                del fresh[number]
        changed, self._saved = fresh != self._saved, fresh
        return changed

    def _document(self) -> Document:
        return {TABLE: self._offsets()}

    def _end(self, number: int) -> int:
        return self._store.bounds(SCHEDULE_TOPIC, number - 1)[1]

    def _restore(self, document: Document | None) -> None:
        try:
            rows = (document or {}).get(TABLE) or {}
            self._saved = {int(number): int(offset) for number, offset in rows.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreCorrupt(
                f"{self._progress.path}: {TABLE} is not a table of offsets ({error}); restore it"
                f" from {self._progress.path}.bak or from a copy"
            ) from None
