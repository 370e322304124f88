"""Delivery inside the broker: what waited goes to its real topic when it is due.

Theory of operation: a `Delivery` has one or more lines, each with a task of its own. A line takes
steps. A step hands over what is due and says when the next one makes sense; in between the line
sleeps, until an arrival wakes it or its time has come. What could not be handed over stays where
it is and is tried again after a pause that grows. Progress is saved behind the disk (see
`delivery_progress`), so a crash repeats messages and loses none.
"""

from __future__ import annotations

import abc
import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from cosmodrome.broker.counts.stats import Stats
from cosmodrome.broker.later.delivery_progress import Progress
from cosmodrome.broker.members.table_file import Document, RefusedRows
from cosmodrome.broker.role import MASTER, Role
from cosmodrome.env.backoff import Backoff
from cosmodrome.env.base import Env
from cosmodrome.env.signal import Signal
from cosmodrome.errors import MessageTooLarge, ProtocolError, StoreUnwritable
from cosmodrome.speed.due import DueMessages
from cosmodrome.store.store import Arrival, Draft, PutStatus, Store
from cosmodrome.wire.message import REAL_QUEUE_ID, REAL_TOPIC
from cosmodrome.wire.names import HALF_TOPIC
from cosmodrome.wire.record import Record, decode_record

log = logging.getLogger(__name__)

# One batch is one turn of the loop, so it bounds how long other requests wait for it.
BATCH_COUNT = 256
BATCH_BYTES = 4 << 20
# Also the longest sleep: the wall clock may jump while the loop's clock does not.
SLEEP_SECONDS_MAX = 1.0
BACK_OFF_SECONDS = (0.1, 5.0)


class Step(NamedTuple):
    """How a step ended, and when the next one makes sense."""

    wait_s: float | None = 0.0  # None: when something arrives
    failed: bool = False  # not all that is due was taken: pause, then try the rest again


AGAIN = Step()
IDLE = Step(None)
BLOCKED = Step(SLEEP_SECONDS_MAX)  # the store takes or shows nothing at the moment
FAILED = Step(failed=True)


class Line:
    """One task of a delivery."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wake = asyncio.Event()
        self.idle = False  # sleeps until something arrives
        self.moved = False  # the step under way made progress
        self.back_off = Backoff(*BACK_OFF_SECONDS)


@dataclasses.dataclass(frozen=True, slots=True)
class DeliverySettings:
    save_interval_ms: int
    role: Role = MASTER
    stats: Stats = dataclasses.field(default_factory=Stats)
    sleep_seconds_max: float = SLEEP_SECONDS_MAX


class Delivery(abc.ABC):
    """`Delays` or `Timers`. A slave delivers nothing: it keeps and saves what its master says, so
    that it goes on there when it becomes the master.

    `moved` fires after each step that made progress, and when a slave follows.
    """

    topic: ClassVar[str]  # where the messages wait
    table: ClassVar[str]  # the name of its file, without the ending

    def __init__(self, path: str, store: Store, env: Env, settings: DeliverySettings) -> None:
        self._store = store
        self._clock = env.clock
        self._role = settings.role
        self._stats = settings.stats
        self._sleep_seconds_max = settings.sleep_seconds_max
        self._progress = Progress(path, env, store, settings.save_interval_ms, self._document)
        self.moved: Signal[None] = Signal()
        self._lines: list[Line] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._subscribed = False

    async def start(self) -> None:
        if self._progress.running:
            return
        self._stopping = False
        self._restore(await self._progress.load())
        self._progress.start()
        if not self._role.takes_sends:
            return
        if not self._subscribed:
            self._subscribed = True
            self._store.arrivals.subscribe(self._on_arrival, topic=self.topic)
        self._lines = self._make_lines()
        self._tasks = [asyncio.create_task(self._run(line), name=line.name) for line in self._lines]

    async def stop(self) -> None:
        """Batches under way are finished, so that nothing of them is delivered again."""
        self._stopping = True
        for line in self._lines:
            line.wake.set()
        tasks, self._tasks = self._tasks, []
        if tasks:
            await asyncio.wait(tasks)
        await self._progress.stop()

    def follow(self, rows: Mapping[str, Any], *, whole: bool) -> None:
        """Take over rows of the master's progress; see `rows`."""
        refused = RefusedRows(self.table)
        if self._role.takes_sends:
            refused.add("*", "this broker is a master and delivers itself")
        elif self._follow(rows, refused, whole=whole):
            self._progress.changed = True
            self.moved.fire(None)
        refused.close()

    # --- what differs ------------------------------------------------------------------------

    @abc.abstractmethod
    def _document(self) -> Document:
        """The progress as its file has it."""

    @abc.abstractmethod
    def _restore(self, document: Document | None) -> None:
        """Take the progress over from the file; StoreCorrupt when that is not what it holds."""

    @abc.abstractmethod
    def rows(self) -> Document:
        """The progress as a slave takes it over."""

    @abc.abstractmethod
    def _follow(self, rows: Mapping[str, Any], refused: RefusedRows, *, whole: bool) -> bool:
        """Take over those of the rows that can be; whether anything is different now."""

    @abc.abstractmethod
    def _make_lines(self) -> list[Line]: ...

    @abc.abstractmethod
    async def _step(self, line: Line) -> Step: ...

    @abc.abstractmethod
    def _arrived(self, queue_id: int) -> None:
        """Wake the line that cares about a message that began to wait."""

    @abc.abstractmethod
    def _log_failure(self, line: Line) -> None:
        """Log the exception that is being handled."""

    # --- what is the same --------------------------------------------------------------------

    async def _run(self, line: Line) -> None:
        while not self._stopping:
            line.wake.clear()  # before the step looks: what arrives from now on sets it again
            try:
                step = await self._step(line)
            except Exception:
                # Whatever it is, the messages stay where they are and are tried again.
                self._log_failure(line)
                step = FAILED
            if line.moved:
                line.moved = False
                self.moved.fire(None)
            if self._is_stopping():
                return
            if step.failed:
                await self._sleep(line, line.back_off.next_s())
                continue
            line.back_off.reset()
            if step.wait_s is None:
                await self._sleep(line, None)
            else:
                await self._sleep(line, min(step.wait_s, self._sleep_seconds_max))

    async def _sleep(self, line: Line, seconds: float | None) -> None:
        if seconds == 0:
            await asyncio.sleep(0)
            return
        line.idle = seconds is None
        try:
            async with asyncio.timeout(seconds):
                await line.wake.wait()
        except TimeoutError:
            pass
        line.idle = False

    def _note_progress(self, line: Line) -> None:
        self._progress.changed = True
        line.moved = True

    def _is_stopping(self) -> bool:
        return self._stopping

    def _on_arrival(self, arrival: Arrival) -> None:
        if arrival.topic == self.topic:
            self._arrived(arrival.queue_id)

    async def _hand_over(
        self, line: Line, drafts: Iterable[Draft | None], *, before: DueMessages | None = None
    ) -> int:
        """Like `hand_over`; a batch of which something was done counts as progress."""
        done = await hand_over(self._store, drafts, self._is_stopping, self._stats, before=before)
        if done:
            self._note_progress(line)
            line.back_off.reset()
        return done


def stored_record(store: Store, log_offset: int, size: int | None, event: str) -> Record | None:
    """The record at a log offset; None, and a log line `event`, when it cannot be read."""
    data = store.record(log_offset, size)
    try:
        return None if data is None else decode_record(data)
    except ProtocolError as error:
        log.error("%s log_offset=%d error=%s", event, log_offset, error)
        return None


def restored(record: Record, pairs: dict[str, str]) -> Draft | None:
    """The message that waited as `record`, None when it does not say where it has to go."""
    topic, queue_id = pairs.get(REAL_TOPIC, ""), pairs.get(REAL_QUEUE_ID, "")
    if topic == HALF_TOPIC:
        log.error("deferred_half_dropped log_offset=%d", record.log_offset)
        return None
    if not topic or not queue_id.isascii() or not queue_id.isdigit():
        log.error(
            "deferred_without_destination log_offset=%d topic=%r queue=%r",
            record.log_offset,
            topic,
            queue_id,
        )
        return None
    return Draft(
        topic=topic,
        queue_id=int(queue_id),
        body=record.body,
        properties=record.properties,
        born_host=record.born_host,
        store_host=record.store_host,
        flag=record.flag,
        sys_flag=record.sys_flag,
        born_ms=record.born_ms,
        reconsume_times=record.reconsume_times,
    )


async def hand_over(
    store: Store,
    drafts: Iterable[Draft | None],
    stopping: Callable[[], bool],
    stats: Stats,
    *,
    before: DueMessages | None = None,
) -> int:
    """Store the messages. Returns how many of them, counted from the first, are done for good.

    None stands for a message that is left out. A result below their number means that the rest
    has to be tried again later. The messages of `before` go first and are counted too; `drafts`
    gives all the others, and is asked only after those of `before` were staged.
    """
    end = taken = 0
    counts: list[tuple[str, int, int, int]] = []
    if before is not None and before.taken:
        store.stage(before)
        taken, end, counts = before.staged, before.end, before.counts()
    for draft in drafts:
        if draft is not None:
            try:
                stored = store.append(draft)
                counts.append((draft.topic, stored.queue_id, 1, stored.size))
                end = stored.end
            except MessageTooLarge as error:
                # No later attempt can go better, and those behind it must not wait for ever.
                log.error("deferred_undeliverable topic=%s error=%s", draft.topic, error)
            except StoreUnwritable:
                break
        taken += 1
    if not end:
        return taken
    try:
        # A slow disk or slave is no reason to store a message twice. What this disk has is done:
        # a slave that lacks the delivery lacks the note of it, too.
        while await store.durable(end) is not PutStatus.OK and store.durable_end < end:
            if stopping():
                return 0
    except StoreUnwritable:
        return 0
    for topic, queue_id, count, size in counts:
        stats.put(topic, queue_id, count, size, calls=count)
    return taken
