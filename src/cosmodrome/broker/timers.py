"""Messages with a delivery time of their own: kept in order, handed over when they are due.

They wait in queue 0 of `rmq_sys_wheel_timer` (see `defer`). One task reads that queue as it
grows and keeps (delivery time, queue offset) of everything that waits in a heap, one integer
each: about 50 bytes per message, and WAITING_MAX bounds them. Nothing is delivered before the
queue was read to its end, so a cancellation that was answered is always seen in time.

A cancellation is a message of the same queue with the same delivery time, behind the one it
cancels; so in the heap it comes right after it, and its key is dropped when it comes.

Three numbers in the file describe the state: every entry below `scannedOffset` whose time is
at most `deliveredMs` is done, and so is everything below `lowOffset`, where a start begins to
read. They lag a little, so a crash repeats messages and loses none; none comes early, because
only the wall clock decides.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Iterable
from typing import NamedTuple

from cosmodrome.broker.defer import hand_over, restored
from cosmodrome.broker.progress import Progress
from cosmodrome.broker.stats import Stats
from cosmodrome.broker.tables import Document
from cosmodrome.env.base import Env
from cosmodrome.errors import ProtocolError, StoreCorrupt
from cosmodrome.layout import PROPERTIES_BYTES_MAX
from cosmodrome.store.store import Arrival, Draft, Store
from cosmodrome.wire.message import (
    REAL_QUEUE_ID,
    REAL_TOPIC,
    TIMER_DELETE_UNIQ_KEY,
    TIMER_DEQUEUE_MS,
    TIMER_OUT_MS,
    UNIQ_KEY,
    format_properties,
)
from cosmodrome.wire.names import TIMER_TOPIC
from cosmodrome.wire.record import Record, decode_record

log = logging.getLogger(__name__)

QUEUE_ID = 0
WAITING_MAX = 10_000_000
BATCH_COUNT = 256
BATCH_BYTES = 4 << 20
# Also the longest sleep: the wall clock may jump while the loop's clock does not.
SLEEP_SECONDS_MAX = 1.0
BACK_OFF_SECONDS = (0.1, 5.0)
PENDING_LISTED_MAX = 10_000
PAGE_LOOKED_MAX = 1000  # records that one page may read, whether they are shown or not
KEYS_PER_TURN = 50_000
RECORDS_PER_TURN = 100

_OFFSET_BITS = 48
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_KEY_END = 1 << 64 << _OFFSET_BITS  # behind every key
_NAMES = ("scannedOffset", "deliveredMs", "lowOffset")


class Pending(NamedTuple):
    """A timed message that waits."""

    topic: str
    queue_id: int
    deliver_ms: int
    unique_key: str
    queue_offset: int
    log_offset: int
    size: int


class Page(NamedTuple):
    """Some of the messages that wait, and the last place looked at if there is more behind it."""

    pending: list[Pending]
    reached: tuple[int, int] | None  # delivery time, queue offset


class Timers:
    """Delivery of timed messages; with `deliver` false (a slave) nothing happens."""

    def __init__(
        self,
        path: str,
        store: Store,
        env: Env,
        *,
        save_interval_ms: int,
        deliver: bool = True,
        sleep_seconds_max: float = SLEEP_SECONDS_MAX,
        stats: Stats | None = None,
    ) -> None:
        self._store = store
        self._clock = env.clock
        self._deliver = deliver
        self._sleep_seconds_max = sleep_seconds_max
        self._stats = stats or Stats()
        self._progress = Progress(path, env, store, save_interval_ms, self._document)
        self._heap: list[int] = []
        self._carried: int | None = None  # first of the batch that is being handed over
        self._listing = asyncio.Lock()
        self._cancelled: set[str] = set()
        self._scanned = 0
        self._low = 0
        self._done = bytearray()  # for each offset from `_low` on: 1 when it is done
        self._known = (0, 0)  # scanned offset and time that the last run had delivered up to
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._subscribed = False

    async def start(self) -> None:
        if self._task is not None or not self._deliver:
            return
        self._stopping = False
        self._restore(await self._progress.load())
        if not self._subscribed:
            self._subscribed = True
            self._store.arrivals.subscribe(self._on_arrival, topic=TIMER_TOPIC)
        self._task = asyncio.create_task(self._run(), name="timed messages")
        self._progress.start()

    async def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        task, self._task = self._task, None
        if task is not None:
            await asyncio.wait([task])
            await self._progress.stop()

    @property
    def waiting(self) -> int:
        return len(self._heap)

    @property
    def scanned(self) -> int:
        """The offset up to which the queue was taken in."""
        return self._scanned

    @property
    def next_due_ms(self) -> int | None:
        """When the next message is due; it may have been long ago."""
        first = self._carried
        if first is None and self._heap:
            first = self._heap[0]
        return None if first is None else first >> _OFFSET_BITS

    def full(self) -> bool:
        """Whether no further message may be added for now."""
        return len(self._heap) >= WAITING_MAX

    def pending(self, limit: int) -> list[Pending]:
        """The messages that are due next, cancelled ones left out."""
        return self._shown(heapq.nsmallest(min(limit, PENDING_LISTED_MAX), self._heap))

    async def page(self, after: tuple[int, int], limit: int, topic: str | None = None) -> Page:
        """Messages behind `after` (delivery time, queue offset), the next due first.

        A page may be short, even empty, and yet have more behind it: cancelled messages and
        those of other topics are looked at and not shown.
        """
        looked_max = PAGE_LOOKED_MAX if topic else max(1, min(limit, PAGE_LOOKED_MAX))
        async with self._listing:  # one copy of the keys at a time
            keys = await self._keys_behind(after, looked_max + 1)
        found: list[Pending] = []
        reached = 0
        for start in range(0, min(len(keys), looked_max), RECORDS_PER_TURN):
            if len(found) >= limit:
                break
            batch = keys[start : min(start + RECORDS_PER_TURN, looked_max)]
            found += (one for one in self._shown(batch) if not topic or one.topic == topic)
            reached = start + len(batch)
            await asyncio.sleep(0)
        if len(found) > limit:
            last = found[limit - 1]
            return Page(found[:limit], (last.deliver_ms, last.queue_offset))
        if reached == len(keys):
            return Page(found, None)
        last_key = keys[reached - 1]
        return Page(found, (last_key >> _OFFSET_BITS, last_key & _OFFSET_MASK))

    async def _keys_behind(self, after: tuple[int, int], count: int) -> list[int]:
        deliver_ms, offset = after
        first = (deliver_ms << _OFFSET_BITS | max(0, offset)) + 1 if deliver_ms >= 0 else 0
        heap = self._heap.copy()
        keys: list[int] = []
        for start in range(0, len(heap), KEYS_PER_TURN):
            part = heap[start : start + KEYS_PER_TURN]
            last = keys[-1] if len(keys) == count else _KEY_END
            keys = sorted(keys + [key for key in part if first <= key < last])[:count]
            await asyncio.sleep(0)
        return keys

    def _shown(self, keys: Iterable[int]) -> list[Pending]:
        found = []
        for key in keys:
            record, pairs = self._record(key & _OFFSET_MASK)
            if record is None or self._is_cancelled(pairs) or TIMER_DELETE_UNIQ_KEY in pairs:
                continue
            queue_id = pairs.get(REAL_QUEUE_ID, "")
            found.append(
                Pending(
                    pairs.get(REAL_TOPIC, ""),
                    int(queue_id) if queue_id.isascii() and queue_id.isdigit() else -1,
                    key >> _OFFSET_BITS,
                    pairs.get(UNIQ_KEY, ""),
                    key & _OFFSET_MASK,
                    record.log_offset,
                    record.size,
                )
            )
        return found

    # --- delivery ----------------------------------------------------------------------------

    async def _run(self) -> None:
        back_off_s = BACK_OFF_SECONDS[0]
        while not self._stopping:
            wait_s: float | None = None
            try:
                if self._scan():
                    await asyncio.sleep(0)
                    continue
                if self._heap:
                    wait_s = ((self._heap[0] >> _OFFSET_BITS) - self._clock.now_ms()) / 1000
                if wait_s is not None and wait_s <= 0:
                    if await self._deliver_batch():
                        back_off_s = BACK_OFF_SECONDS[0]
                        continue
                    wait_s = back_off_s
                    back_off_s = min(back_off_s * 2, BACK_OFF_SECONDS[1])
            except Exception:
                # Whatever it is, the messages stay where they are and are tried again.
                log.exception("timers_failed scanned=%d waiting=%d", self._scanned, self.waiting)
                wait_s = BACK_OFF_SECONDS[1]
            if not self._stopping:
                await self._sleep(wait_s)

    async def _sleep(self, seconds: float | None) -> None:
        if seconds is not None:
            seconds = min(seconds, self._sleep_seconds_max)
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _deliver_batch(self) -> bool:
        """Hand over what is due, oldest first; false when the store does not take it."""
        if self._store.why_unwritable is not None:
            return False
        now_ms = self._clock.now_ms()
        limit = (now_ms + 1) << _OFFSET_BITS
        keys: list[int] = []
        drafts: list[Draft | None] = []
        spent: list[tuple[int, str]] = []  # cancellations of the batch: position, whom they mean
        taken_bytes = 0
        while self._heap and self._heap[0] < limit and len(keys) < BATCH_COUNT:
            record, pairs = self._record(self._heap[0] & _OFFSET_MASK)
            taken_bytes += 0 if record is None else record.size
            if drafts and taken_bytes > BATCH_BYTES:
                break
            key = heapq.heappop(self._heap)
            keys.append(key)
            if TIMER_DELETE_UNIQ_KEY in pairs:
                spent.append((len(drafts), _cancelled_key(pairs)))
                drafts.append(None)
            elif record is None or self._is_cancelled(pairs):
                drafts.append(None)
            else:
                draft = restored(record, pairs)
                if draft is not None:
                    draft.properties = _stamped(record, pairs, now_ms)
                drafts.append(draft)
        if not keys:  # the clock went back in between
            return True
        self._carried = keys[0]
        done = 0
        try:
            done = await hand_over(self._store, drafts, lambda: self._stopping, self._stats)
        finally:
            self._carried = None
            for key in keys[done:]:
                heapq.heappush(self._heap, key)
            for key in keys[:done]:
                self._done[(key & _OFFSET_MASK) - self._low] = 1
            self._progress.changed |= done > 0
        self._cancelled.difference_update(whom for at, whom in spent if at < done)
        return done == len(keys)

    def _scan(self) -> bool:
        """Take in what the queue has gained, a batch at a time; false at its end."""
        least, most = self._store.bounds(TIMER_TOPIC, QUEUE_ID)
        if self._scanned > most:
            self._forget()
        elif self._scanned < least:  # the log was cleaned faster than this could read it
            self._done.extend(b"\1" * (least - self._scanned))
            self._scanned = least
        entries = self._store.entries(TIMER_TOPIC, QUEUE_ID, self._scanned, BATCH_COUNT)
        for offset, (log_offset, size, _) in enumerate(entries, self._scanned):
            self._done.append(not self._take(offset, log_offset, size))
        self._scanned += len(entries)
        self._progress.changed |= bool(entries)
        # Cleared where the queue is known to be read: an arrival from now on sets it again.
        self._wake.clear()
        return bool(entries)

    def _take(self, offset: int, log_offset: int, size: int) -> bool:
        """Add an entry to what waits; false when it is done or not readable."""
        record, pairs = self._decode(log_offset, size)
        if record is None:
            return False
        out = pairs.get(TIMER_OUT_MS, "")
        # Nothing here writes a record without its time; a foreign one is delivered at once.
        deliver_ms = int(out) if out.isascii() and out.isdigit() and len(out) <= 19 else 0
        scanned, delivered_ms = self._known
        if offset < scanned and deliver_ms <= delivered_ms:
            return False
        if TIMER_DELETE_UNIQ_KEY in pairs:
            self._cancelled.add(_cancelled_key(pairs))
        heapq.heappush(self._heap, deliver_ms << _OFFSET_BITS | offset)
        return True

    def _forget(self) -> None:
        """The topic was deleted, and with it everything that waited."""
        log.warning("timers_forgotten waiting=%d scanned=%d", self.waiting, self._scanned)
        self._heap.clear()
        self._cancelled.clear()
        self._done.clear()
        self._known = (0, 0)
        self._low = self._scanned = 0

    def _record(self, offset: int) -> tuple[Record | None, dict[str, str]]:
        entries = self._store.entries(TIMER_TOPIC, QUEUE_ID, offset, 1)
        if not entries:
            return None, {}
        return self._decode(entries[0][0], entries[0][1])

    def _decode(self, log_offset: int, size: int) -> tuple[Record | None, dict[str, str]]:
        data = self._store.record(log_offset, size)
        try:
            record = None if data is None else decode_record(data)
        except ProtocolError as error:
            log.error("timed_unreadable log_offset=%d error=%s", log_offset, error)
            record = None
        return (None, {}) if record is None else (record, record.pairs())

    def _is_cancelled(self, pairs: dict[str, str]) -> bool:
        if not self._cancelled or UNIQ_KEY not in pairs:
            return False
        return f"{pairs.get(REAL_TOPIC)}+{pairs[UNIQ_KEY]}" in self._cancelled

    def _on_arrival(self, arrival: Arrival) -> None:
        if arrival.topic == TIMER_TOPIC:
            self._wake.set()

    # --- the file ----------------------------------------------------------------------------

    def _document(self) -> Document:
        reached = self._done.find(0)
        count = len(self._done) if reached < 0 else reached
        del self._done[:count]
        self._low += count
        first = self._carried
        if first is None and self._heap:
            first = self._heap[0]
        # Without anything that waits, `lowOffset` alone says it all.
        delivered_ms = 0
        if first is not None:
            delivered_ms = min((first >> _OFFSET_BITS) - 1, self._clock.now_ms())
        return dict(zip(_NAMES, (self._scanned, delivered_ms, self._low), strict=True))

    def _restore(self, document: Document | None) -> None:
        try:
            scanned, delivered_ms, low = (int((document or {}).get(name, 0)) for name in _NAMES)
        except (TypeError, ValueError) as error:
            raise StoreCorrupt(
                f"{self._progress.path} is not the state of timed messages ({error}); restore it"
                f" from {self._progress.path}.bak, or move both away to deliver again what was"
                " due in the last days"
            ) from None
        least, most = self._store.bounds(TIMER_TOPIC, QUEUE_ID)
        self._known = (min(scanned, most), delivered_ms)
        self._heap.clear()
        self._cancelled.clear()
        self._done.clear()
        self._low = self._scanned = max(least, min(low, most))


def _stamped(record: Record, pairs: dict[str, str], now_ms: int) -> str:
    text = format_properties({**pairs, TIMER_DEQUEUE_MS: str(now_ms)})
    # A message must not be lost for want of room for a time stamp.
    return text if len(text.encode()) <= PROPERTIES_BYTES_MAX else record.properties


def _cancelled_key(pairs: dict[str, str]) -> str:
    """Topic and unique key of the message that a cancellation means."""
    topic, key = pairs.get(REAL_TOPIC, ""), pairs[TIMER_DELETE_UNIQ_KEY]
    # Compat: newer 5.x clients put the topic in front themselves.
    return key if key.startswith(f"{topic}+") else f"{topic}+{key}"
