"""The part of the law about entries: chaining those of the index, following those of a queue."""

from __future__ import annotations

from cosmodrome.layout import (
    INDEX_ENTRY,
    INDEX_KEY,
    INDEX_SLOT,
    MAGIC_RECORD,
    MAGIC_RECORD_V2,
    QUEUE_ENTRY,
    QUEUE_FILLER_SIZE,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
)

# messages and bytes at most; the same for cold ones; the log offset below which they are cold
Limits = tuple[int, int, int, int, int]

SLOT_PAGE_BYTES = 4096


def chain(
    slots: bytearray,
    keys: bytes,
    count: int,
    begin_ms: int,
    limit: int,
    out: bytearray,
    pages: bytearray | None = None,
) -> tuple[int, int]:
    """Give packed INDEX_KEYs their places as entries `count`, `count` + 1, … of an index file.

    `slots` is the file's table of big-endian slots and is updated; packed INDEX_ENTRYs are
    added to `out`. Stops before entry number `limit`. `pages` gets a 1 for every SLOT_PAGE_BYTES
    of the table that changed. Returns how many keys were taken and how many slots were empty
    before.
    """
    slot_count = len(slots) // 4
    if not slot_count:
        raise ValueError("an index file without slots")
    if pages is not None and len(pages) * SLOT_PAGE_BYTES < len(slots):
        raise ValueError(f"{len(pages)} page marks for a table of {len(slots)} bytes")
    read, write, pack = INDEX_SLOT.unpack_from, INDEX_SLOT.pack_into, INDEX_ENTRY.pack
    first, fresh = count, 0
    entries: list[bytes] = []
    last_ms, seconds = begin_ms, 0
    for hashed, log_offset, store_ms in INDEX_KEY.iter_unpack(keys):
        if count >= limit:
            break
        at = hashed % slot_count * 4
        (previous,) = read(slots, at)
        if not 0 < previous < count:
            previous = 0
            fresh += 1
        if store_ms != last_ms:
            last_ms = store_ms
            seconds = min(max(0, (store_ms - begin_ms) // 1000), 0x7FFFFFFF)
        entries.append(pack(hashed, log_offset, seconds, previous))
        write(slots, at, count)
        if pages is not None:
            pages[at // SLOT_PAGE_BYTES] = 1
        count += 1
    out += b"".join(entries)
    return count - first, fresh


def select(
    entries: bytes,
    index: int,
    view: memoryview,
    base: int,
    low: int,
    high: int,
    queue_id: int,
    queue_offset: int,
    codes: frozenset[int] | None,
    count: int,
    taken_bytes: int,
    limits: Limits,
) -> tuple[int, bytes, int, int, int, bool]:
    """Take the records that packed queue entries name, from entry `index` on, out of one file.

    `view` is the log file at `base`; only [low, high) of the log may be read. `queue_offset` is
    the number of the first entry, `codes` the wanted tags codes (None: all), `count` and
    `taken_bytes` what was taken before. Stops where the limits are reached, at the end, and at
    an entry that needs a closer look: its record is elsewhere or is not what the entry says (a
    queue id of -1 allows any queue). Returns the index it stopped at, the records taken, both
    counts, the log offset of the last entry looked at (-1: none) and whether a limit was reached.
    """
    count_max, bytes_max, cold_count_max, cold_bytes_max, cold_below = limits
    low, high = max(low, base), min(high, base + len(view))
    found: list[memoryview] = []
    last = -1
    for log_offset, size, tags_code in QUEUE_ENTRY.iter_unpack(entries[index * QUEUE_ENTRY.size :]):
        if size == QUEUE_FILLER_SIZE and log_offset == 0:
            index += 1
            continue
        if log_offset < low or log_offset + size > high or size < RECORD_BYTES_MIN:
            break
        if count:
            cold = log_offset < cold_below
            full = count >= (cold_count_max if cold else count_max)
            if full or taken_bytes + size > (cold_bytes_max if cold else bytes_max):
                return index, b"".join(found), count, taken_bytes, log_offset, True
        if codes is None or tags_code & 0xFFFFFFFF in codes:
            at = log_offset - base
            head = RECORD_HEAD.unpack_from(view, at)
            if (head[0], head[6]) != (size, log_offset):
                break
            if head[1] not in (MAGIC_RECORD, MAGIC_RECORD_V2):
                break
            if queue_id != -1 and (head[3], head[5]) != (queue_id, queue_offset + index):
                break
            found.append(view[at : at + size])
            count += 1
            taken_bytes += size
        last = log_offset
        index += 1
    return index, b"".join(found), count, taken_bytes, last, False
