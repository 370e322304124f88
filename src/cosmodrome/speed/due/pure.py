"""Messages that waited, put once more under the topic and queue that their properties name.

A delayed message waits as an ordinary record whose properties have its real topic and queue. What
is delivered is the same record elsewhere: head, hosts, body and properties are copied, topic and
queue offset are new. `DueMessages` does that for many records at once; the log stages it
(`Log.stage`).

It takes records from the front for as long as nothing about them is unusual. What comes behind
(damage, a transaction, no destination or two of them, text that is not UTF-8) is for those who
look closer and can say what is wrong. The checksum of a body is copied: damage stays damage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from cosmodrome.layout import (
    HOST_V4_BYTES,
    HOST_V6_BYTES,
    MAGIC_RECORD,
    RECORD_BYTES_MIN,
    RECORD_HEAD,
    RECORD_MIDDLE,
    SYS_BORN_V6,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_STORE_V6,
    SYS_TRANSACTION_MASK,
    TOPIC_BYTES_MAX,
)
from cosmodrome.speed.core.tails import QueueEnd, put_back

REAL_TOPIC, REAL_QUEUE = b"REAL_TOPIC", b"REAL_QID"
HALF_TOPIC = b"RMQ_SYS_TRANS_HALF_TOPIC"  # no message may be brought there
QUEUE_DIGITS_MAX = 9


class _Waiting(NamedTuple):
    """Where the parts of a record lie in the data, and where it goes to."""

    start: int
    store_ms_at: int
    middle_at: int
    body_end: int
    properties_at: int  # of their length
    end: int
    topic: str
    stored_topic: bytes  # with its length
    queue_id: int

    @property
    def size(self) -> int:
        """Of the record that is delivered."""
        return self.body_end - self.start + len(self.stored_topic) + self.end - self.properties_at


class DueMessages:
    """See the module. `taken` tells how many records were plain, `staged` how many are copied."""

    def __init__(self, data: bytes, record_bytes_max: int, body_bytes_max: int) -> None:
        """`data` is records, one behind the other. Those beyond the limits are not plain."""
        self.staged = 0
        self.end = 0  # of what is staged, in the log
        self._data = data
        self._counts: dict[tuple[str, int], tuple[int, int]] = {}
        self._waiting: list[_Waiting] = []
        at = 0
        while at < len(data):
            found = _look(data, at, body_bytes_max)
            if found is None or found.size > record_bytes_max:
                break
            self._waiting.append(found)
            at = found.end

    @property
    def taken(self) -> int:
        return len(self._waiting)

    @property
    def left(self) -> int:
        """Those that are not copied yet."""
        return len(self._waiting) - self.staged

    @property
    def next_bytes(self) -> int:
        """How much room the next one needs, contiguous in one file."""
        return self._waiting[self.staged].size if self.left else 0

    def counts(self) -> list[tuple[str, int, int, int]]:
        """Topic, queue, messages and bytes of what is staged."""
        return [(topic, queue, *sums) for (topic, queue), sums in self._counts.items()]

    def encode(
        self,
        out: bytearray,
        log_offset: int,
        room: int,
        store_ms: int,
        queue_end: Callable[[str, int], QueueEnd],
        undo: list[Callable[[], None]],
    ) -> tuple[int, int, None, bytes]:
        """Append as many as fit into `room` bytes. See `staging.Stageable`."""
        mark, first, start = len(out), self.staged, log_offset
        moved: list[tuple[QueueEnd, int]] = []
        number = first
        try:
            while number < len(self._waiting):
                one = self._waiting[number]
                if log_offset - start + one.size > room:
                    break
                to = queue_end(one.topic, one.queue_id)
                moved.append((to, to.next))
                self._copy(out, one, log_offset, to.next, store_ms)
                to.next += 1
                log_offset += one.size
                number += 1
        except BaseException:
            del out[mark:]
            put_back(moved)
            raise
        undo.append(functools.partial(put_back, moved))
        for one in self._waiting[first:number]:
            count, size = self._counts.get((one.topic, one.queue_id), (0, 0))
            self._counts[one.topic, one.queue_id] = (count + 1, size + one.size)
        self.staged = number
        self.end = log_offset
        return log_offset - start, number - first, None, b""

    def _copy(
        self, out: bytearray, one: _Waiting, log_offset: int, queue_offset: int, store_ms: int
    ) -> None:
        data, at = self._data, len(out)
        _, magic, crc, _, flag, _, _, sys_flag, born_ms = RECORD_HEAD.unpack_from(data, one.start)
        times, _, body_bytes = RECORD_MIDDLE.unpack_from(data, one.middle_at)
        out += RECORD_HEAD.pack(
            one.size,
            magic,
            crc,
            one.queue_id,
            flag,
            queue_offset,
            log_offset,
            sys_flag,
            born_ms,
        )
        out += data[one.start + RECORD_HEAD.size : one.store_ms_at]
        out += store_ms.to_bytes(8, "big", signed=True)
        out += data[one.store_ms_at + 8 : one.middle_at]
        out += RECORD_MIDDLE.pack(times, 0, body_bytes)
        out += data[one.middle_at + RECORD_MIDDLE.size : one.body_end]
        out += one.stored_topic
        out += data[one.properties_at : one.end]
        assert len(out) - at == one.size


def _look(data: bytes, start: int, body_bytes_max: int) -> _Waiting | None:
    """The parts of the record at `start`, None unless it is plain."""
    if len(data) - start < RECORD_BYTES_MIN:
        return None
    size, magic, _, _, _, _, _, sys_flag, _ = RECORD_HEAD.unpack_from(data, start)
    if magic != MAGIC_RECORD or not RECORD_BYTES_MIN <= size <= len(data) - start:
        return None
    if sys_flag & SYS_TRANSACTION_MASK in (SYS_PREPARED, SYS_ROLLBACK):
        return None
    end = start + size
    store_ms_at = start + RECORD_HEAD.size
    store_ms_at += HOST_V6_BYTES if sys_flag & SYS_BORN_V6 else HOST_V4_BYTES
    middle_at = store_ms_at + 8
    middle_at += HOST_V6_BYTES if sys_flag & SYS_STORE_V6 else HOST_V4_BYTES
    body_at = middle_at + RECORD_MIDDLE.size
    if body_at + 3 > end:
        return None
    _, _, body_bytes = RECORD_MIDDLE.unpack_from(data, middle_at)
    if not 0 <= body_bytes <= min(end - body_at - 3, body_bytes_max):
        return None
    body_end = body_at + body_bytes
    properties_at = body_end + 1 + data[body_end]
    if data[body_end] > TOPIC_BYTES_MAX or properties_at + 2 > end:
        return None
    properties = data[properties_at + 2 : end]
    if int.from_bytes(data[properties_at : properties_at + 2], "big", signed=True) != len(
        properties
    ):
        return None
    target = _target(properties)
    if target is None:
        return None
    name, queue_id = target
    return _Waiting(
        start=start,
        store_ms_at=store_ms_at,
        middle_at=middle_at,
        body_end=body_end,
        properties_at=properties_at,
        end=end,
        topic=name.decode(),
        stored_topic=bytes([len(name)]) + name,
        queue_id=queue_id,
    )


def _target(properties: bytes) -> tuple[bytes, int] | None:
    """Where a message with these properties goes to, None when that needs a closer look."""
    if b"\0" in properties:
        return None
    try:
        properties.decode()
    except UnicodeDecodeError:
        return None
    found: dict[bytes, bytes] = {}
    for pair in properties.split(b"\2"):
        name, _, value = pair.partition(b"\1")
        if value and name in (REAL_TOPIC, REAL_QUEUE):
            if name in found:
                return None
            found[name] = value
    topic, queue = found.get(REAL_TOPIC, b""), found.get(REAL_QUEUE, b"")
    if not 0 < len(topic) <= TOPIC_BYTES_MAX or topic == HALF_TOPIC:
        return None
    if not queue.isdigit() or len(queue) > QUEUE_DIGITS_MAX:
        return None
    return topic, int(queue)
