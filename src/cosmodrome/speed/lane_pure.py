"""The inner loops of the fast lane in plain Python: the twin of `lane.pyx`, with its names.

The theory is told there: `Intake.feed` notes the sends of a buffer, has them staged by the log,
which calls back `encode` once per log file, and `Ticket`s answer them. Whatever is unusual goes to
the slow lane untouched. Here the art is to run few operations per message:

- a header is decoded by one call, and what its constant fields mean (topic, queue, flags) is
  looked up under all of them at once (`_Shape`);
- a record is packed by one call, and its queue entry and keys are made at the same time, from what
  is known anyway, so that nobody has to take the record apart again;
- the hash of a key goes on from where that of its front ended (`lane_messages`): keys of one
  producer differ in their last few letters.

Caches are bounded, and those that follow the table of topics are in `Intake.known`, which whoever
changes that table clears.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

from cosmodrome.layout import (
    CRC_MASK,
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    FRAME_BYTES_MAX,
    FRAME_PREFIX,
    HEADER_LENGTH_MASK,
    HOST_V4_BYTES,
    HOST_V6_BYTES,
    INDEX_KEY,
    MAGIC_RECORD,
    NAME_END,
    PROPERTIES_BYTES_MAX,
    QUEUE_ENTRY,
    SYS_BORN_V6,
    SYS_STORE_V6,
    SYS_TRANSACTION_MASK,
    TOPIC_BYTES_MAX,
)
from cosmodrome.speed.lane_heads import (
    CODE_COMMIT,
    CODE_PULL,
    CODE_SEND,
    CODE_SEND_BATCH,
    CODE_SEND_V2,
    Head,
    read_any,
    read_json,
    read_number,
    read_number32,
)
from cosmodrome.speed.lane_heads import read_commit as read_commit
from cosmodrome.speed.lane_heads import read_pull as read_pull
from cosmodrome.speed.lane_messages import (
    Message,
    Plan,
    read_facts,
    read_properties,
    split_batch,
)
from cosmodrome.speed.lane_replies import Sent, Ticket
from cosmodrome.speed.lane_replies import Template as Template
from cosmodrome.speed.pure import Run

# Why a walk ended: nothing (whole) is left, or the frame there is a pull, a commit of an offset,
# or something for the slow lane. FULL: as many requests as were allowed.
NOTHING = 0
PULL = 1
COMMIT = 2
OTHER = 3
FULL = 4

SHAPES_MAX = 4096
SHAPE_CHARACTERS_MAX = 1024  # of all its fields together
PIECE_BYTES = 16_384  # of a buffer that are looked at together

_PREFIX_BYTES = FRAME_PREFIX.size
_LENGTH_MAX = FRAME_BYTES_MAX - 4
# All of a record in front of its body, by the lengths of its hosts.
_FRONTS = {
    (born, store): struct.Struct(f">iiiiiqqiq{born}sq{store}siqi")
    for born in (HOST_V4_BYTES, HOST_V6_BYTES)
    for store in (HOST_V4_BYTES, HOST_V6_BYTES)
}

_SENDS = (CODE_SEND_V2, CODE_SEND_BATCH, CODE_SEND)

QueueKey = tuple[str, int]


class _Shape(NamedTuple):
    """What the constant fields of a send mean."""

    plan: Plan
    place: QueueKey
    sys_flag: int
    flag: int
    reconsume_times: int
    batch: bool


# shape, bytes of its records, born time, code, opaque, serialize, one-way, wait, messages
_Ask = tuple[_Shape, int, int, int, int, int, bool, bool, list[Message]]


class Intake:
    """Reads sends out of buffers and writes them as records; see the module's theory."""

    def __init__(
        self,
        find: Callable[[bytes], Plan | None],
        cluster: str,
        body_bytes_max: int,
        record_bytes_max: int,
    ) -> None:
        """`find` gives the plan of a topic, or None for one that needs the slow lane."""
        self.known: dict[Any, Any] = {}  # plans by the name of their topic, shapes by fields
        self.saw_binary = False  # in the last buffer
        self._find = find
        self._cluster = f"CLUSTER{NAME_END}{cluster}"
        self._body_bytes_max = body_bytes_max
        self._record_bytes_max = record_bytes_max
        self._asks: list[_Ask] = []
        self._starts: list[int] = []  # of their frames in the buffer
        self._encoded = 0  # requests that are staged
        self._portions: list[tuple[list[Sent], list[Sent], int]] = []  # waiting or not, end
        self._busy = False
        self._born_host = self._store_host = b""
        self._born = ("0", 0)  # the last born time as text and number

    # --- the walk ----------------------------------------------------------------------------

    def feed(
        self,
        view: memoryview,
        at: int,
        limit: int,
        born_host: bytes,
        store_host: bytes,
        stage: Callable[[Intake], object],
    ) -> tuple[int, int]:
        """Take sends from `at` on, at most `limit`, and have them staged by `stage(self)`.

        Returns where the first frame begins that was not taken and what it is, for instance OTHER
        for the slow lane. `tickets` has what was staged. With an empty `store_host` no send is
        taken.
        """
        if self._busy:
            raise RuntimeError("the intake is in use")
        self._busy = True
        try:
            self._asks, self._starts, self._portions = [], [], []
            self._encoded = 0
            self.saw_binary = False
            self._born_host, self._store_host = born_host, store_host
            at, why = self._walk(view, at, limit)
            if self._asks:
                stage(self)
                if self._encoded < len(self._asks):
                    at, why = self._starts[self._encoded], OTHER
            return at, why
        finally:
            self._busy = False

    def _walk(self, view: memoryview, at: int, limit: int) -> tuple[int, int]:
        starts, take = self._starts, self._take
        unpack = FRAME_PREFIX.unpack_from
        end = len(view)
        data, base, pos, size, stop = b"", at, 0, 0, 0
        header: Head | None
        while True:
            if size - pos >= _PREFIX_BYTES:
                length, word = unpack(data, pos)
                stop = pos + 4 + length
            else:
                stop = size + 1
            if stop > size:
                at = base + pos
                if end - at < _PREFIX_BYTES:
                    return at, NOTHING
                length, word = unpack(view, at)
                if length > _LENGTH_MAX:
                    return at, OTHER
                if end - at - 4 < length:
                    return at, NOTHING
                data, base, pos = bytes(view[at : at + max(PIECE_BYTES, 4 + length)]), at, 0
                size, stop = len(data), 4 + length
            header_at = pos + _PREFIX_BYTES
            body_at = header_at + (word & HEADER_LENGTH_MASK)
            if body_at > stop:
                return base + pos, OTHER
            if len(starts) >= limit:
                return base + pos, FULL
            serialize = word >> 24
            header = None
            if not serialize:
                try:
                    header = read_json(data[header_at:body_at])
                    if header.code == CODE_SEND:
                        header = None
                except (ValueError, RecursionError):
                    pass
            if header is None:
                header = read_any(serialize, data[header_at:body_at])
                if header is None:
                    return base + pos, OTHER
            code = header.code
            if code in _SENDS:
                if not take(header, serialize, data[body_at:stop]):
                    return base + pos, OTHER
            elif header.flag & FLAG_RESPONSE:
                return base + pos, OTHER
            else:
                why = PULL if code == CODE_PULL else COMMIT if code == CODE_COMMIT else OTHER
                return base + pos, why
            starts.append(base + pos)
            if serialize:
                self.saw_binary = True
            pos = stop

    def _take(self, header: Head, serialize: int, body: bytes) -> bool:
        """Note a send; False, with nothing changed, when the slow lane has to look at it."""
        fields = header.extFields
        flag = header.flag
        if fields is None or flag & FLAG_RESPONSE or len(body) > self._body_bytes_max:
            return False
        code = header.code
        key = (
            code,
            fields.a,
            fields.b,
            fields.c,
            fields.d,
            fields.e,
            fields.f,
            fields.h,
            fields.j,
            fields.k,
            fields.l,
            fields.m,
        )
        shape: _Shape | None = self.known.get(key)
        if shape is None:
            shape = self._shape(key)
            if shape is None:
                return False
        if not self._store_host:
            return False
        born_text, born_ms = self._born
        if fields.g != born_text:
            number = read_number(fields.g)
            if number is None:
                return False
            born_ms = number
            self._born = (fields.g or "", born_ms)
        read = read_properties(fields.i or "", shape.batch, self._cluster)
        if read is None:
            return False
        properties, wait, found = read
        plan = shape.plan
        hosts_bytes = len(self._born_host) + len(self._store_host)
        if shape.batch:
            split = split_batch(plan, body, properties)
            if not split:
                return False
            messages = split
            size = 0
            for message in messages:
                if len(message[2]) > PROPERTIES_BYTES_MAX:
                    return False
                size += plan.fixed_bytes + hosts_bytes + len(message[1]) + len(message[2])
        else:
            if len(properties) > PROPERTIES_BYTES_MAX:
                return False
            size = plan.fixed_bytes + hosts_bytes + len(body) + len(properties)
            tags_code, hashes = read_facts(plan, found)
            messages = [(shape.flag, body, properties, tags_code, hashes)]
        if size > self._record_bytes_max:
            return False
        oneway = flag & FLAG_ONEWAY != 0
        self._asks.append(
            (shape, size, born_ms, code, header.opaque, serialize, oneway, wait, messages)
        )
        return True

    def _shape(self, key: tuple[Any, ...]) -> _Shape | None:
        code, group, topic, default, queues, queue, sys, flag, times, unit, most, batch = key
        queue_id, sys_flag, number = read_number32(queue), read_number32(sys), read_number32(flag)
        if group is None or not topic or default is None or read_number32(queues) is None:
            return None
        if sum(len(field) for field in key[1:] if field) > SHAPE_CHARACTERS_MAX:
            return None
        if queue_id is None or sys_flag is None or number is None:
            return None
        if sys_flag & SYS_TRANSACTION_MASK:
            return None
        reconsume_times = 0 if times is None else read_number32(times)
        if reconsume_times is None or (most is not None and read_number32(most) is None):
            return None
        if unit not in (None, "true", "false") or batch not in (None, "true", "false"):
            return None
        plan = self._plan(topic.encode())
        if plan is None or not 0 <= queue_id < plan.queues:
            return None
        shape = _Shape(
            plan,
            (plan.topic, queue_id),
            sys_flag & ~(SYS_BORN_V6 | SYS_STORE_V6) | plan.sys_flag,
            number,
            reconsume_times,
            code == CODE_SEND_BATCH or batch == "true",
        )
        if len(self.known) >= SHAPES_MAX:
            self.known.clear()
        self.known[key] = shape
        return shape

    def _plan(self, name: bytes) -> Plan | None:
        if len(name) > TOPIC_BYTES_MAX:
            return None
        plan: Plan | None = self.known.get(name)
        if plan is None:
            plan = self._find(name)
            if plan is not None:
                self.known[name] = plan
        return plan

    # --- staging -----------------------------------------------------------------------------

    @property
    def left(self) -> int:
        """Requests that are not encoded yet."""
        return len(self._asks) - self._encoded

    @property
    def next_bytes(self) -> int:
        """How much room the records of the next request need, contiguous in one file."""
        return self._asks[self._encoded][1] if self._encoded < len(self._asks) else 0

    def encode(
        self,
        out: bytearray,
        log_offset: int,
        room: int,
        store_ms: int,
        next_offsets: dict[QueueKey, int],
        before: dict[QueueKey, int | None],
        queue_end: Callable[[str, int], int],
    ) -> tuple[int, int, list[Run], bytes]:
        """Append the records of as many requests as fit into `room` bytes.

        They begin at `log_offset`. Queue offsets are taken from `next_offsets`, or from
        `queue_end` for a queue that is not there; `before` keeps what was there before. Returns
        bytes, messages, and what dispatch needs of them: queue entries in runs, packed keys.
        """
        asks, first = self._asks, self._encoded
        born_host, store_host = self._born_host, self._store_host
        host_bits = SYS_BORN_V6 if len(born_host) == HOST_V6_BYTES else 0
        host_bits |= SYS_STORE_V6 if len(store_host) == HOST_V6_BYTES else 0
        pack = _FRONTS[len(born_host), len(store_host)].pack
        pack_entry, pack_key, crc32 = QUEUE_ENTRY.pack, INDEX_KEY.pack, zlib.crc32
        hosts_bytes = len(born_host) + len(store_host)
        queues: dict[QueueKey, tuple[int, list[bytes]]] = {}  # first offset, entries
        pieces: list[bytes] = []
        keys: list[bytes] = []
        waiting: list[Sent] = []
        others: list[Sent] = []
        start, limit, count, stop = log_offset, log_offset + room, 0, first
        for ask in asks if not first else asks[first:]:
            shape, size, born_ms, code, opaque, serialize, oneway, wait, messages = ask
            if log_offset + size > limit:
                break
            plan, place, sys_flag, _, reconsume_times, batch = shape
            queue = queues.get(place)
            if queue is None:
                old = next_offsets.get(place)
                queue = (queue_end(*place) if old is None else old, [])
                queues[place] = queue
            entries = queue[1]
            queue_id = place[1]
            sys_flag |= host_bits
            fixed_bytes = plan.fixed_bytes + hosts_bytes
            queue_offset = first_offset = queue[0] + len(entries)
            places: list[int] = []
            for flag, body, properties, tags_code, hashes in messages:
                body_bytes = len(body)
                record_bytes = fixed_bytes + body_bytes + len(properties)
                pieces += (
                    pack(
                        record_bytes,
                        MAGIC_RECORD,
                        crc32(body) & CRC_MASK,
                        queue_id,
                        flag,
                        queue_offset,
                        log_offset,
                        sys_flag,
                        born_ms,
                        born_host,
                        store_ms,
                        store_host,
                        reconsume_times,
                        0,
                        body_bytes,
                    ),
                    body,
                    plan.stored_name,
                    len(properties).to_bytes(2, "big"),
                    properties,
                )
                entries.append(pack_entry(log_offset, record_bytes, tags_code))
                for hashed in hashes:
                    keys.append(pack_key(hashed, log_offset, store_ms))
                places.append(log_offset)
                log_offset += record_bytes
                queue_offset += 1
            count += len(places)
            stop += 1
            (waiting if wait else others).append(
                (
                    plan.topic,
                    len(places),
                    size,
                    code,
                    opaque,
                    serialize,
                    oneway,
                    queue_id,
                    first_offset,
                    tuple(places) if batch else places[0],
                )
            )
        out += b"".join(pieces)
        runs: list[Run] = []
        for place, (offset, entries) in queues.items():
            before.setdefault(place, offset)
            next_offsets[place] = offset + len(entries)
            runs.append((*place, offset, b"".join(entries)))
        self._encoded = stop
        if stop > first:
            self._portions.append((waiting, others, log_offset))
        return log_offset - start, count, runs, b"".join(keys)

    def tickets(self) -> tuple[list[tuple[int, int]], list[tuple[int, bool, Ticket]]]:
        """What was encoded: requests by code; and end in the log, wait and ticket of each part."""
        out: list[tuple[int, bool, Ticket]] = []
        for waiting, others, end in self._portions:
            if waiting:
                out.append((end, True, Ticket(waiting)))
            if others:
                out.append((end, False, Ticket(others)))
        counts: dict[int, int] = {}
        for ask in self._asks[: self._encoded]:
            counts[ask[3]] = counts.get(ask[3], 0) + 1
        return list(counts.items()), out
