"""The part of the law about stored records: hashes, the encoder, the walk, many records at once."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Callable, Collection
from typing import Any

from cosmodrome.errors import MessageTooLarge, StoreError
from cosmodrome.layout import (
    CRC_MASK,
    HOST_V4_BYTES,
    HOST_V6_BYTES,
    INDEX_KEY,
    MAGIC_BLANK,
    MAGIC_RECORD,
    MAGIC_RECORD_V2,
    PROPERTIES_BYTES_MAX,
    QUEUE_ENTRY,
    QUEUE_OFFSET_LIMIT,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
    RECORD_MIDDLE,
    SECTOR_BYTES,
    SYS_BORN_V6,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_STORE_V6,
    SYS_TRANSACTION_MASK,
    TOPIC_BYTES_MAX,
    WALK_BLANK,
    WALK_CORRUPT,
    WALK_EMPTY,
    WALK_MORE,
)
from cosmodrome.speed.core.tails import QueueEnd, Run, put_back

# log_offset, size, topic, queue_id, queue_offset, sys_flag, store_ms, tags_code, delay_level, keys
Entry = tuple[int, int, str, int, int, int, int, int, int, tuple[str, ...]]

SCHEDULE_TOPIC = "SCHEDULE_TOPIC_XXXX"
_IN_NO_QUEUE = (SYS_PREPARED, SYS_ROLLBACK)


# --- hash ----------------------------------------------------------------------------------


def java_hash(text: str) -> int:
    """Java's String.hashCode: signed 32 bits, over UTF-16 units."""
    value = 0
    if text.isascii():
        units: tuple[int, ...] | bytes = text.encode()
    else:
        encoded = text.encode("utf-16-be", "surrogatepass")
        units = struct.unpack(f">{len(encoded) // 2}H", encoded)
    for unit in units:
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


def key_hash(topic: str, key: str) -> int:
    """The hash under which the index keeps a key of a topic."""
    value = abs(java_hash(f"{topic}#{key}"))
    return 0 if value > 0x7FFFFFFF else value  # Compat: Java's abs of the smallest int


# --- record --------------------------------------------------------------------------------


def encode_record(
    out: bytearray,
    log_offset: int,
    queue_offset: int,
    store_ms: int,
    topic: bytes,
    queue_id: int,
    flag: int,
    sys_flag: int,
    born_ms: int,
    born_host: bytes,
    store_host: bytes,
    reconsume_times: int,
    prepared_offset: int,
    body: bytes,
    properties: bytes,
) -> int:
    """Append one record to `out` and return its size; on an error `out` is unchanged.

    The address-family bits of `sys_flag` follow from the lengths of the hosts.
    """
    sys_flag &= ~(SYS_BORN_V6 | SYS_STORE_V6)
    sys_flag |= SYS_BORN_V6 if _is_v6("born", born_host) else 0
    sys_flag |= SYS_STORE_V6 if _is_v6("store", store_host) else 0
    if len(topic) > TOPIC_BYTES_MAX:
        raise MessageTooLarge(f"topic of {len(topic)} bytes; at most {TOPIC_BYTES_MAX} fit")
    if len(properties) > PROPERTIES_BYTES_MAX:
        raise MessageTooLarge(
            f"properties of {len(properties)} bytes; at most {PROPERTIES_BYTES_MAX} fit,"
            " shorten keys, tags or user properties"
        )
    size = RECORD_BYTES_MIN - 2 * HOST_V4_BYTES + len(born_host) + len(store_host)
    size += len(body) + len(topic) + len(properties)
    crc = zlib.crc32(body) & CRC_MASK
    try:
        head = RECORD_HEAD.pack(
            size, MAGIC_RECORD, crc, queue_id, flag, queue_offset, log_offset, sys_flag, born_ms
        )
        stored = store_ms.to_bytes(8, "big", signed=True)
        middle = RECORD_MIDDLE.pack(reconsume_times, prepared_offset, len(body))
    except (struct.error, OverflowError) as error:
        raise ValueError(f"a record field does not fit: {error}") from None
    out += b"".join(
        (
            head,
            born_host,
            stored,
            store_host,
            middle,
            body,
            len(topic).to_bytes(1, "big"),
            topic,
            len(properties).to_bytes(2, "big"),
            properties,
        )
    )
    return size


def _is_v6(whose: str, host: bytes) -> bool:
    if len(host) not in (HOST_V4_BYTES, HOST_V6_BYTES):
        raise ValueError(f"{whose} host of {len(host)} bytes; expected 8 or 20")
    return len(host) == HOST_V6_BYTES


def walk(
    view: memoryview,
    base: int,
    start: int,
    end: int,
    check_crc: bool,
    limit: int,
    whole_ms: int = 0,
) -> tuple[list[Entry], int, int]:
    """Walk the records in view[start:end], where view[0] has log offset `base`.

    Returns the entries of good records (at most `limit`), the position behind the last of them
    and why the walk ended (WALK_*). A record is good only when all its lengths add up to its
    size and it holds its own log offset. Any bytes may be given; none of them raise.

    With `check_crc` the body must match its checksum, which covers nothing else, so the rest
    is examined for what a power cut leaves: a zero byte in the topic, or a sector of zeros,
    counted from view[0], in the properties unless the record was stored before `whole_ms`.
    """
    if not 0 <= start <= end <= len(view):
        raise ValueError(f"walk from {start} to {end} outside a view of {len(view)} bytes")
    entries: list[Entry] = []
    at = start
    while at < end and len(entries) < limit:
        if end - at < 8:
            return entries, at, WALK_CORRUPT if any(view[at:end]) else WALK_EMPTY
        size = int.from_bytes(view[at : at + 4], "big", signed=True)
        magic = int.from_bytes(view[at + 4 : at + 8], "big", signed=True)
        if magic == MAGIC_BLANK and size >= 8:
            return entries, at, WALK_BLANK
        if not size and not magic:
            return entries, at, WALK_EMPTY
        entry = None
        if size <= end - at:
            entry = _entry(view, base, at, size, magic, check_crc, whole_ms)
        if entry is None:
            return entries, at, WALK_CORRUPT
        entries.append(entry)
        at += size
    return entries, at, WALK_MORE


def _entry(
    view: memoryview, base: int, at: int, size: int, magic: int, check_crc: bool, whole_ms: int
) -> Entry | None:
    if size < RECORD_BYTES_MIN or magic not in (MAGIC_RECORD, MAGIC_RECORD_V2):
        return None
    _, _, crc, queue_id, _, queue_offset, log_offset, sys_flag, _ = RECORD_HEAD.unpack_from(
        view, at
    )
    if log_offset != base + at:
        return None
    end = at + size
    store_at = at + RECORD_HEAD.size + (HOST_V6_BYTES if sys_flag & SYS_BORN_V6 else HOST_V4_BYTES)
    middle_at = store_at + 8 + (HOST_V6_BYTES if sys_flag & SYS_STORE_V6 else HOST_V4_BYTES)
    body_at = middle_at + RECORD_MIDDLE.size
    topic_width = 1 if magic == MAGIC_RECORD else 2
    if body_at + topic_width + 2 > end:
        return None
    store_ms = int.from_bytes(view[store_at : store_at + 8], "big", signed=True)
    body_bytes = int.from_bytes(view[body_at - 4 : body_at], "big", signed=True)
    if not 0 <= body_bytes <= end - body_at - topic_width - 2:
        return None
    topic_at = body_at + body_bytes + topic_width
    topic_bytes = int.from_bytes(view[topic_at - topic_width : topic_at], "big", signed=True)
    if not 0 <= topic_bytes <= end - topic_at - 2:
        return None
    properties_at = topic_at + topic_bytes + 2
    properties_bytes = int.from_bytes(view[properties_at - 2 : properties_at], "big", signed=True)
    if properties_bytes != end - properties_at:
        return None
    if check_crc and (
        zlib.crc32(view[body_at : body_at + body_bytes]) & CRC_MASK != crc
        or 0 in view[topic_at : topic_at + topic_bytes]
        or (store_ms >= whole_ms and _lost_sector(view, properties_at, end))
    ):
        return None
    topic = str(view[topic_at : topic_at + topic_bytes], "utf-8", "replace")
    tags_code, delay_level, keys = _facts(bytes(view[properties_at:end]))
    return (
        log_offset,
        size,
        topic,
        queue_id,
        queue_offset,
        sys_flag,
        store_ms,
        tags_code,
        delay_level,
        keys,
    )


def _lost_sector(view: memoryview, start: int, end: int) -> bool:
    """Whether a sector that begins between `start` and `end` holds nothing but zeros there.

    Sectors that also hold other parts of a record need no look: zeros there break its lengths.
    """
    first = -(-start // SECTOR_BYTES) * SECTOR_BYTES
    return any(
        not any(view[at : min(at + SECTOR_BYTES, end)]) for at in range(first, end, SECTOR_BYTES)
    )


def _facts(properties: bytes) -> tuple[int, int, tuple[str, ...]]:
    """What dispatch needs from a properties text: hash of the tags, delay level, keys."""
    found: dict[bytes, bytes] = {}
    for pair in properties.split(b"\x02"):
        name, _, value = pair.partition(b"\x01")
        if value and name in _WANTED:
            found[name] = value
    tags = found.get(b"TAGS")
    unique = found.get(b"UNIQ_KEY")
    words = found.get(b"KEYS")
    keys = [str(unique, "utf-8", "replace")] if unique else []
    if words:
        keys += [str(word, "utf-8", "replace") for word in words.split(b" ") if word]
    return (
        java_hash(str(tags, "utf-8", "replace")) if tags else 0,
        _level(found.get(b"DELAY", b"")),
        tuple(keys),
    )


_WANTED = frozenset({b"TAGS", b"KEYS", b"UNIQ_KEY", b"DELAY"})


def _level(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"+" else text
    if not digits.isdigit() or len(digits) > 10:
        return 0
    level = int(digits)
    return level if level <= 0x7FFFFFFF else 0


# --- many records at once ------------------------------------------------------------------


def gather(
    view: memoryview,
    base: int,
    start: int,
    end: int,
    check_crc: bool,
    limit: int,
    whole_ms: int = 0,
) -> tuple[list[Run], bytes, list[Entry], int, int, int, int]:
    """Walk as `walk` does and return what queues and index need of it, packed.

    Returns runs of queue entries (consecutive offsets of one queue, in log order within it),
    the keys of all records as packed INDEX_KEYs, the entries of delayed messages, whose tags
    code depends on a setting (they are in no run), the number of records, the last store time
    (0 without records), position and why.
    """
    entries, position, why = walk(view, base, start, end, check_crc, limit, whole_ms)
    current: dict[tuple[str, int], tuple[int, bytearray]] = {}
    runs: list[tuple[str, int, int, bytearray]] = []
    keys = bytearray()
    delayed: list[Entry] = []
    for entry in entries:
        log_offset, size, topic, queue_id, queue_offset, sys_flag, store_ms, tags_code = entry[:8]
        kind = sys_flag & SYS_TRANSACTION_MASK
        if kind != SYS_ROLLBACK:
            for key in entry[9]:
                keys += INDEX_KEY.pack(key_hash(topic, key), log_offset, store_ms)
        if topic == SCHEDULE_TOPIC:
            delayed.append(entry)
        elif kind not in (SYS_PREPARED, SYS_ROLLBACK):
            expected, data = current.get((topic, queue_id), (None, None))
            if data is None or expected != queue_offset:
                data = bytearray()
                runs.append((topic, queue_id, queue_offset, data))
            data += QUEUE_ENTRY.pack(log_offset, size, tags_code)
            current[topic, queue_id] = queue_offset + 1, data
    packed = [(topic, queue_id, first, bytes(data)) for topic, queue_id, first, data in runs]
    last_ms = entries[-1][6] if entries else 0
    return packed, bytes(keys), delayed, len(entries), last_ms, position, why


def gather_next(
    view: memoryview,
    base: int,
    end: int,
    whole_ms: int,
    known: dict[bytes, Any],
    queue_end: Callable[[str, int], QueueEnd],
    undo: list[Callable[[], None]],
) -> tuple[Collection[Run], bytes, int, int, int]:
    """What `gather` finds in the records at the front that are plain and the next of their queues.

    Stops before a record that needs a closer look: it is not good, in a transaction, delayed, not
    the next one of its queue, or of a queue that cannot be. `queue_end` gives the end of a queue,
    which is moved behind its records; what moves it back goes to `undo`. Compiled code keeps ends
    in `known`, by queue id and topic. Returns runs, keys, how many, last store time, position.
    """
    entries, _, _ = walk(view, base, 0, end, True, len(view), whole_ms)
    ends: dict[tuple[str, int], tuple[QueueEnd, bytearray]] = {}
    keys = bytearray()
    count = last_ms = position = 0
    for entry in entries:
        log_offset, size, topic, queue_id, queue_offset, sys_flag, store_ms, tags_code = entry[:8]
        if topic == SCHEDULE_TOPIC or sys_flag & SYS_TRANSACTION_MASK in _IN_NO_QUEUE:
            break
        if not 0 <= queue_offset <= QUEUE_OFFSET_LIMIT:
            break
        try:
            found = ends.get((topic, queue_id)) or (queue_end(topic, queue_id), bytearray())
        except StoreError:
            break
        if found[0].next + len(found[1]) // QUEUE_ENTRY.size != queue_offset:
            break
        ends[topic, queue_id] = found
        found[1].extend(QUEUE_ENTRY.pack(log_offset, size, tags_code))
        for key in entry[9]:
            keys += INDEX_KEY.pack(key_hash(topic, key), log_offset, store_ms)
        count, last_ms, position = count + 1, store_ms, log_offset + size - base
    runs = [(*name, end.next, bytes(data)) for name, (end, data) in ends.items()]
    undo.append(functools.partial(put_back, [(end, end.next) for end, _ in ends.values()]))
    for end_of_queue, data in ends.values():
        end_of_queue.next += len(data) // QUEUE_ENTRY.size
    return runs, bytes(keys), count, last_ms, position
