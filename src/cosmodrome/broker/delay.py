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
from typing import NamedTuple

from cosmodrome.broker.defer import hand_over, restored
from cosmodrome.broker.progress import Progress
from cosmodrome.broker.stats import Stats
from cosmodrome.broker.tables import Document
from cosmodrome.env.base import Env
from cosmodrome.errors import ProtocolError, StoreCorrupt
from cosmodrome.store.store import Arrival, DelayLevels, Draft, Store
from cosmodrome.wire import fastjson
from cosmodrome.wire.commands.offset import GetAllDelayOffset
from cosmodrome.wire.names import SCHEDULE_TOPIC
from cosmodrome.wire.record import decode_record
from cosmodrome.wire.table import Call, Reply

log = logging.getLogger(__name__)

TABLE = "offsetTable"
# One batch is one turn of the loop, so it bounds how long other requests wait for it.
BATCH_COUNT = 256
BATCH_BYTES = 4 << 20
# Also the longest sleep: the wall clock may jump while the loop's clock does not.
SLEEP_SECONDS_MAX = 1.0
BACK_OFF_SECONDS = (0.1, 5.0)


class Look(NamedTuple):
    """What the head of a queue holds."""

    due: list[tuple[int, int, int]]  # entries
    wait_ms: int | None  # until more is due; None when nothing is there


class Waiting(NamedTuple):
    """How many messages wait in a level, and when the next one is due, if that is known."""

    level: int
    messages: int
    due_ms: int | None


class Level:
    """One level: `offset` is the next entry to deliver, below it all are delivered."""

    __slots__ = ("delay_ms", "idle", "noticed_end", "noticed_until", "number", "offset", "wake")

    def __init__(self, number: int, offset: int, delay_ms: int | None) -> None:
        self.number = number
        self.offset = offset
        self.delay_ms = delay_ms  # None: no longer configured, entries keep their times
        self.idle = False
        self.wake = asyncio.Event()
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
                *(self.number, offset, wait_ms - self.delay_ms),
            )
        return math.ceil((self.noticed_until - loop_s) * 1000)

    async def sleep(self, seconds: float | None) -> None:
        self.wake.clear()
        try:
            async with asyncio.timeout(seconds):
                await self.wake.wait()
        except TimeoutError:
            pass


class Delays:
    """Delivery of all levels; with `deliver` false (a slave) only the table is served."""

    def __init__(
        self,
        levels: DelayLevels,
        path: str,
        store: Store,
        env: Env,
        *,
        save_interval_ms: int,
        deliver: bool = True,
        sleep_seconds_max: float = SLEEP_SECONDS_MAX,
        stats: Stats | None = None,
    ) -> None:
        self._delays = levels
        self._store = store
        self._clock = env.clock
        self._deliver = deliver
        self._sleep_seconds_max = sleep_seconds_max
        self._stats = stats or Stats()
        self._progress = Progress(path, env, store, save_interval_ms, self._document)
        self._saved: dict[int, int] = {}
        self._levels: dict[int, Level] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._subscribed = False

    async def start(self) -> None:
        if self._tasks:
            return
        self._stopping = False
        self._saved = self._read_table(await self._progress.load())
        if not self._deliver:
            return
        if not self._subscribed:
            self._subscribed = True
            self._store.arrivals.subscribe(self._on_arrival, topic=SCHEDULE_TOPIC)
        # A level that is no longer configured may still have messages waiting.
        left = {queue_id + 1 for queue_id in self._store.queues().get(SCHEDULE_TOPIC, ())}
        for number in sorted(left | set(range(1, len(self._delays) + 1))):
            known = number <= len(self._delays)
            least, most = self._store.bounds(SCHEDULE_TOPIC, number - 1)
            offset = max(least, min(self._saved.get(number, 0), most))
            delay_ms = self._delays.delay_ms(number) if known else None
            level = self._levels[number] = Level(number, offset, delay_ms)
            self._tasks.append(asyncio.create_task(self._run(level), name=f"delay level {number}"))
        self._progress.start()

    async def stop(self) -> None:
        """Batches under way are finished, so that nothing of them is delivered again."""
        self._stopping = True
        for level in self._levels.values():
            level.wake.set()
        tasks, self._tasks = self._tasks, []
        if tasks:
            await asyncio.wait(tasks)
            await self._progress.stop()
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

    async def _run(self, level: Level) -> None:
        back_off_s = BACK_OFF_SECONDS[0]
        while not self._stopping:
            try:
                look = self._look(level)
                done = await self._hand_over(level, look.due) if look.due else 0
            except Exception:
                # Whatever it is, the messages stay where they are and are tried again.
                log.exception("delay_level_failed level=%d offset=%d", level.number, level.offset)
                look, done = Look([(0, 0, 0)], None), 0
            if done:
                level.offset += done
                self._progress.changed = True
                back_off_s = BACK_OFF_SECONDS[0]
            if self._is_stopping():
                break
            if done < len(look.due):
                await level.sleep(back_off_s)
                back_off_s = min(back_off_s * 2, BACK_OFF_SECONDS[1])
            elif look.due:
                await asyncio.sleep(0)
            elif look.wait_ms is None:
                level.idle = True
                await level.sleep(None)
                level.idle = False
            else:
                await level.sleep(min(look.wait_ms / 1000, self._sleep_seconds_max))

    def _is_stopping(self) -> bool:
        return self._stopping

    def _look(self, level: Level) -> Look:
        queue_id = level.number - 1
        least, most = self._store.bounds(SCHEDULE_TOPIC, queue_id)
        level.offset = max(least, min(level.offset, most))
        if level.offset == most:
            return Look([], None)
        if self._store.why_unwritable is not None:
            return Look([], int(BACK_OFF_SECONDS[1] * 1000))
        entries = self._store.entries(SCHEDULE_TOPIC, queue_id, level.offset, BATCH_COUNT)
        if not entries:  # its file cannot be read at the moment
            return Look([], int(BACK_OFF_SECONDS[1] * 1000))
        now_ms = self._clock.now_ms()
        taken_bytes = 0
        for number, (_, size, due_ms) in enumerate(entries):
            if due_ms > now_ms:
                wait_ms = level.wait_ms(level.offset + number, most, due_ms, now_ms)
                if wait_ms > 0:
                    return Look(entries[:number], wait_ms)
            taken_bytes += size
            if number and taken_bytes > BATCH_BYTES:
                return Look(entries[:number], 0)
        return Look(entries, 0)

    async def _hand_over(self, level: Level, due: list[tuple[int, int, int]]) -> int:
        """The plain ones together, those behind the first that is not one by one."""
        plain = self._store.deferred(
            SCHEDULE_TOPIC, level.number - 1, level.offset, len(due), BATCH_BYTES
        )

        def others() -> Iterator[Draft | None]:
            for log_offset, size, _ in due[plain.staged :]:
                yield self._draft(log_offset, size)

        return await hand_over(self._store, others(), self._is_stopping, self._stats, before=plain)

    def _draft(self, log_offset: int, size: int) -> Draft | None:
        data = self._store.record(log_offset, size)
        try:
            record = None if data is None else decode_record(data)
        except ProtocolError as error:
            log.error("delayed_unreadable log_offset=%d error=%s", log_offset, error)
            record = None
        return None if record is None else restored(record, record.pairs())

    def _on_arrival(self, arrival: Arrival) -> None:
        if arrival.topic != SCHEDULE_TOPIC:
            return
        level = self._levels.get(arrival.queue_id + 1)
        # Behind the head of a queue nothing is due earlier, so a sleeper may sleep on.
        if level is not None and level.idle:
            level.wake.set()

    # --- the table ---------------------------------------------------------------------------

    def _offsets(self) -> dict[int, int]:
        """Level -> next offset, for every level that ever delivered or holds messages."""
        table = dict(self._saved)
        for number, level in self._levels.items():
            if level.offset or number in table:
                table[number] = level.offset
        return dict(sorted(table.items()))

    def _document(self) -> Document:
        return {TABLE: self._offsets()}

    def _end(self, number: int) -> int:
        return self._store.bounds(SCHEDULE_TOPIC, number - 1)[1]

    def _read_table(self, document: Document | None) -> dict[int, int]:
        try:
            rows = (document or {}).get(TABLE) or {}
            return {int(number): int(offset) for number, offset in rows.items()}
        except (AttributeError, TypeError, ValueError) as error:
            raise StoreCorrupt(
                f"{self._progress.path}: {TABLE} is not a table of offsets ({error}); restore it"
                f" from {self._progress.path}.bak or from a copy"
            ) from None
