"""Messages with a delivery time of their own: kept in order, handed over when they are due.

They wait in queue 0 of `rmq_sys_wheel_timer` (see `deferral`). One task reads that queue as it
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
from collections.abc import Iterable, Mapping
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
from cosmodrome.layout import PROPERTIES_BYTES_MAX
from cosmodrome.store.store import Draft, Store
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
from cosmodrome.wire.record import Record

log = logging.getLogger(__name__)

QUEUE_ID = 0
WAITING_MAX = 10_000_000
PENDING_LISTED_MAX = 10_000
PAGE_LOOKED_MAX = 1000  # records that one page may read, whether they are shown or not
KEYS_PER_TURN = 50_000
RECORDS_PER_TURN = 100

_OFFSET_BITS = 48
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_KEY_END = 1 << 64 << _OFFSET_BITS  # behind every key
_NAMES = ("scannedOffset", "deliveredMs", "lowOffset")
_ROW = "progress"


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
    """Some of the messages that wait, and the last position looked at, if more follow."""

    pending: list[Pending]
    reached: tuple[int, int] | None  # delivery time, queue offset


class Timers(Delivery):
    """Delivery of timed messages."""

    topic = TIMER_TOPIC
    table = "timerOffset"

    def __init__(self, path: str, store: Store, env: Env, settings: DeliverySettings) -> None:
        super().__init__(path, store, env, settings)
        self._heap: list[int] = []
        self._carried: int | None = None  # first of the batch that is being handed over
        self._listing = asyncio.Lock()
        self._cancelled: set[str] = set()
        self._scanned = 0
        self._low = 0
        self._done = bytearray()  # for each offset from `_low` on: 1 when it is done
        self._known = (0, 0)  # scanned offset and time that the last run had delivered up to
        # On a slave: the three numbers of the master, whatever of its queue is here already.
        self._followed: dict[str, int] = dict.fromkeys(_NAMES, 0)

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

    def _make_lines(self) -> list[Line]:
        return [Line("timed messages")]

    def _arrived(self, queue_id: int) -> None:
        for line in self._lines:
            line.wake.set()

    def _log_failure(self, line: Line) -> None:
        log.exception("timers_failed scanned=%d waiting=%d", self._scanned, self.waiting)

    async def _step(self, line: Line) -> Step:
        if self._scan():
            self._note_progress(line)
            return AGAIN
        if not self._heap:
            return IDLE
        wait_ms = (self._heap[0] >> _OFFSET_BITS) - self._clock.now_ms()
        if wait_ms > 0:
            return Step(wait_ms / 1000)
        if self._store.why_unwritable is not None:
            return BLOCKED
        return AGAIN if await self._deliver_batch(line) else FAILED

    async def _deliver_batch(self, line: Line) -> bool:
        """Hand over what is due, oldest first; false when the store does not take it."""
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
            done = await self._hand_over(line, drafts)
        finally:
            self._carried = None
            for key in keys[done:]:
                heapq.heappush(self._heap, key)
            for key in keys[:done]:
                self._done[(key & _OFFSET_MASK) - self._low] = 1
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
        record = stored_record(self._store, log_offset, size, "timed_unreadable")
        return (None, {}) if record is None else (record, record.pairs())

    def _is_cancelled(self, pairs: dict[str, str]) -> bool:
        if not self._cancelled or UNIQ_KEY not in pairs:
            return False
        return f"{pairs.get(REAL_TOPIC)}+{pairs[UNIQ_KEY]}" in self._cancelled

    # --- the file ----------------------------------------------------------------------------

    def rows(self) -> Document:
        """One row: the three numbers make sense together only."""
        return {_ROW: self._document()}

    def _follow(self, rows: Mapping[str, Any], refused: RefusedRows, *, whole: bool) -> bool:
        if _ROW not in rows:
            return False
        try:
            fresh = {name: int(rows[_ROW][name]) for name in _NAMES}
            if not all(0 <= number < 1 << 63 for number in fresh.values()):
                raise ValueError("a number is out of range")
        except (KeyError, TypeError, ValueError) as error:
            refused.add(_ROW, repr(error))
            return False
        changed, self._followed = fresh != self._followed, fresh
        return changed

    def _document(self) -> Document:
        if not self._role.takes_sends:
            return dict(self._followed)
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
        self._followed = dict(zip(_NAMES, (scanned, delivered_ms, low), strict=True))
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
