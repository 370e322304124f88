"""The inner loops of the fast lane in plain Python: the twin of `native.pyx`, with its names.

The theory is told there: `Intake.gather` notes the sends of a buffer, those of many are staged in
the log together, which calls back `encode` once per log file, and `Ticket`s answer them. Whatever
is unusual goes to the slow lane untouched. Here the art is to run few operations per message:

- a header is decoded by one call, and what its constant fields mean (topic, queue, flags) is
  looked up under all of them at once (`Shape`);
- a record is packed by one call, and its queue entry and keys are made at the same time, from what
  is known anyway, so that nobody has to take the record apart again;
- the hash of a key goes on from where that of its front ended (`messages`): keys of one
  producer differ in their last few letters.

Caches are bounded, and those that follow the table of topics are in `Intake.known`, which whoever
changes that table clears.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from cosmodrome.layout import (
    CODE_COMMIT,
    CODE_PULL,
    CODE_SEND,
    CODE_SEND_BATCH,
    CODE_SEND_V2,
    FLAG_ONEWAY,
    FLAG_RESPONSE,
    FRAME_BYTES_MAX,
    FRAME_PREFIX,
    HEADER_BYTES_MAX,
    HEADER_LENGTH_MASK,
    LANE_COMMIT,
    LANE_FULL,
    LANE_NOTHING,
    LANE_OTHER,
    LANE_PULL,
    PROPERTIES_BYTES_MAX,
    SYS_BORN_V6,
    SYS_STORE_V6,
    SYS_TRANSACTION_MASK,
    TOPIC_BYTES_MAX,
)
from cosmodrome.speed.core.tails import QueueEnd, Run, put_back
from cosmodrome.speed.lane.counts import GetCounts as GetCounts
from cosmodrome.speed.lane.counts import PutCounts as PutCounts
from cosmodrome.speed.lane.heads import (
    Head,
    read_any,
    read_json,
    read_number,
    read_number32,
)
from cosmodrome.speed.lane.messages import Plan as Plan
from cosmodrome.speed.lane.messages import PropertyReader, split_batch
from cosmodrome.speed.lane.records import Ask, Entries, Shape, make_records
from cosmodrome.speed.lane.replies import Part, Request
from cosmodrome.speed.lane.replies import Template as Template
from cosmodrome.speed.lane.replies import Ticket as Ticket
from cosmodrome.speed.lane.replies import answer as answer

SHAPES_MAX = 4096
SHAPE_CHARACTERS_MAX = 1024  # of all its fields together
PIECE_BYTES = 16_384  # of a buffer that are looked at together

_PREFIX_BYTES = FRAME_PREFIX.size
_LENGTH_MAX = FRAME_BYTES_MAX - 4
_SENDS = (CODE_SEND_V2, CODE_SEND_BATCH, CODE_SEND)
_LEFT_TO_OTHERS = {CODE_PULL: LANE_PULL, CODE_COMMIT: LANE_COMMIT}


@dataclasses.dataclass(slots=True)
class _Lot:
    """The sends of one buffer."""

    connection: Any
    born_host: bytes
    asks: list[Ask]
    starts: list[int]  # of their frames
    frames: bytes


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
        self.kept_bytes = 0
        self._find = find
        self._properties = PropertyReader(cluster)
        self._body_bytes_max = body_bytes_max
        self._record_bytes_max = record_bytes_max
        self._asks: list[Ask] = []
        self._starts: list[int] = []  # of their frames in the buffer
        self._lots: list[_Lot] = []
        self._lot = self._done = 0  # the lot that is encoded next, and how many messages of it were
        self.left = 0  # messages that are not encoded yet
        # By log file: sends that wait to be safe and those that do not, and where they end.
        self._portions: list[tuple[list[Part], list[Part], int]] = []
        self._busy = False
        self._born_host = self._store_host = b""
        self._hosts_bytes = 0
        self._born: tuple[str | None, int] = ("0", 0)  # the last born time as text and number

    # --- the walk ----------------------------------------------------------------------------

    def gather(
        self,
        connection: Any,
        view: memoryview,
        at: int,
        limit: int,
        born_host: bytes,
        store_host: bytes,
    ) -> tuple[int, int, int]:
        """Note the sends from `at` on, at most `limit`, behind those that are noted already.

        Returns where the first frame begins that was not taken, what it is, for instance LANE_OTHER
        for the slow lane, and how many sends were taken. With an empty `store_host` none is.
        """
        if self._busy or self._lot or self._done:
            raise RuntimeError("the intake is in use")
        if self._lots and store_host != self._store_host:
            raise ValueError("sends that are gathered together have one store host")
        self._busy = True
        try:
            self._asks, self._starts = [], []
            self.saw_binary = False
            self._born_host, self._store_host = born_host, store_host
            self._hosts_bytes = len(born_host) + len(store_host)
            end, why = self._walk(view, at, limit)
        finally:
            self._busy = False
        asks = self._asks
        if asks:
            starts = [start - at for start in self._starts]
            self._lots.append(_Lot(connection, born_host, asks, starts, bytes(view[at:end])))
            self.left += len(asks)
            self.kept_bytes += end - at
        return end, why, len([1 for ask in asks if ask[2] is not None])

    def clear(self) -> None:
        """Forget what was gathered; the next gathering begins."""
        self._lots, self._portions = [], []
        self._lot = self._done = self.left = self.kept_bytes = 0

    def left_over(self) -> list[tuple[Any, int, bytes]]:
        """Connection, number of requests and their frames, of what was not encoded."""
        out: list[tuple[Any, int, bytes]] = []
        done = self._done
        for lot in self._lots[self._lot :]:
            count = len([1 for ask in lot.asks[done:] if ask[2] is not None])
            out.append((lot.connection, count, lot.frames[lot.starts[done] :]))
            done = 0
        return out

    def _walk(self, view: memoryview, at: int, limit: int) -> tuple[int, int]:
        take = self._take
        unpack = FRAME_PREFIX.unpack_from
        end = len(view)
        data, base, pos, size, stop = b"", at, 0, 0, 0
        while True:
            if size - pos >= _PREFIX_BYTES:
                length, word = unpack(data, pos)
                stop = pos + 4 + length
            else:
                stop = size + 1
            if stop > size:
                at = base + pos
                if end - at < _PREFIX_BYTES:
                    return at, LANE_NOTHING
                length, word = unpack(view, at)
                if length > _LENGTH_MAX:
                    return at, LANE_OTHER
                if end - at - 4 < length:
                    return at, LANE_NOTHING
                data, base, pos = bytes(view[at : at + max(PIECE_BYTES, 4 + length)]), at, 0
                size, stop = len(data), 4 + length
            header_at = pos + _PREFIX_BYTES
            body_at = header_at + (word & HEADER_LENGTH_MASK)
            if body_at > stop or body_at - header_at > HEADER_BYTES_MAX:
                return base + pos, LANE_OTHER
            if not limit:
                return base + pos, LANE_FULL
            limit -= 1
            serialize = word >> 24
            text = data[header_at:body_at]
            header = _read_head(serialize, text)
            if header is None:
                return base + pos, LANE_OTHER
            code = header.code
            if code in _SENDS:
                body = data[body_at:stop]
                if not self._store_host or not take(header, serialize, body, base + pos):
                    return base + pos, LANE_OTHER
            elif header.flag & FLAG_RESPONSE:
                return base + pos, LANE_OTHER
            else:
                return base + pos, _LEFT_TO_OTHERS.get(code, LANE_OTHER)
            if serialize:
                self.saw_binary = True
            pos = stop

    def _take(self, header: Head, serialize: int, body: bytes, start: int) -> bool:
        """Note a send; False, with nothing changed, when the slow lane has to look at it."""
        fields = header.extFields
        if fields is None:
            return False
        code = header.code
        a, b, c, d, e, f = fields.a, fields.b, fields.c, fields.d, fields.e, fields.f
        key = (code, a, b, c, d, e, f, fields.h, fields.j, fields.k, fields.l, fields.m)
        shape: Shape | None = self.known.get(key) or self._shape(key)
        flag = header.flag
        if shape is None or flag & FLAG_RESPONSE or len(body) > self._body_bytes_max:
            return False
        born_text, born_ms = self._born
        if fields.g != born_text:
            number = read_number(fields.g)
            if number is None:
                return False
            born_ms = number
            self._born = (fields.g, born_ms)
        plan = shape[4]
        fixed_bytes = plan.fixed_bytes + self._hosts_bytes
        request = (code, header.opaque, serialize, flag & FLAG_ONEWAY != 0)
        if shape[5]:
            return self._take_batch(shape, born_ms, request, fields.i or "", body, start)
        read = self._properties.read(plan, fields.i or "")
        if read is None:
            return False
        properties, wait, tags_code, hashes = read
        size = fixed_bytes + len(body) + len(properties)
        if size > self._record_bytes_max or len(properties) > PROPERTIES_BYTES_MAX:
            return False
        message = (shape[2], body, properties, tags_code, hashes)
        self._asks.append((shape, born_ms, request, wait, size, message))
        self._starts.append(start)
        return True

    def _remember(self, key: object, value: object) -> None:
        if len(self.known) >= SHAPES_MAX:
            self.known.clear()
        self.known[key] = value

    def _take_batch(
        self, shape: Shape, born_ms: int, request: Request, text: str, body: bytes, start: int
    ) -> bool:
        plan = shape[4]
        shared = self._properties.read_shared(text)
        messages = None if shared is None else split_batch(plan, body, shared[0])
        if shared is None or not messages:
            return False
        fixed_bytes = plan.fixed_bytes + self._hosts_bytes
        size = sum([fixed_bytes + len(one[1]) + len(one[2]) for one in messages])
        longest = max([len(one[2]) for one in messages])
        if size > self._record_bytes_max or longest > PROPERTIES_BYTES_MAX:
            return False
        first, *others = messages
        self._asks.append((shape, born_ms, request, shared[1], size, first))
        self._asks += [(shape, born_ms, None, False, 0, one) for one in others]
        self._starts += [start] * len(messages)
        return True

    def _shape(self, key: tuple[Any, ...]) -> Shape | None:
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
        sys_flag = sys_flag & ~(SYS_BORN_V6 | SYS_STORE_V6) | plan.sys_flag
        many = code == CODE_SEND_BATCH or batch == "true"
        shape = ((plan.topic, queue_id), sys_flag, number, reconsume_times, plan, many)
        self._remember(key, shape)
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
    def next_bytes(self) -> int:
        """How much room the records of the next request need, contiguous in one file."""
        return self._lots[self._lot].asks[self._done][4] if self.left else 0

    def encode(
        self,
        out: bytearray,
        log_offset: int,
        room: int,
        store_ms: int,
        queue_end: Callable[[str, int], QueueEnd],
        undo: list[Callable[[], None]],
    ) -> tuple[int, int, list[Run], bytes]:
        """Append the records of as many requests as fit into `room` bytes.

        They begin at `log_offset`. `queue_end` gives the end of a queue; `undo` gets what takes the
        moves of ends back. Returns bytes, messages, and what dispatch needs of them: queue
        entries in runs, packed keys.
        """
        mark, encoded = len(out), (self._lot, self._done)
        try:
            return self._encode(out, log_offset, room, store_ms, queue_end, undo)
        except BaseException:
            del out[mark:]
            self._lot, self._done = encoded
            raise

    def _encode(
        self,
        out: bytearray,
        log_offset: int,
        room: int,
        store_ms: int,
        queue_end: Callable[[str, int], QueueEnd],
        undo: list[Callable[[], None]],
    ) -> tuple[int, int, list[Run], bytes]:
        queues: Entries = {}
        keys: list[bytes] = []
        waiting: list[Part] = []
        others: list[Part] = []
        size = messages = 0
        while self._lot < len(self._lots):
            lot = self._lots[self._lot]
            asks = _fitting(lot.asks[self._done :] if self._done else lot.asks, room - size)
            for key in dict.fromkeys([ask[0][0] for ask in asks]):
                if key not in queues:
                    queues[key] = (queue_end(*key).next, [])
            hosts = (lot.born_host, self._store_host)
            pieces, waits, rest = make_records(
                asks, log_offset + size, store_ms, hosts, queues, keys
            )
            records = b"".join(pieces)
            out += records
            size += len(records)
            messages += len(asks)
            if waits:
                waiting.append((lot.connection, waits))
            if rest:
                others.append((lot.connection, rest))
            self._done += len(asks)
            if self._done < len(lot.asks):
                break
            self._lot, self._done = self._lot + 1, 0
        self.left -= messages
        if messages:
            self._portions.append((waiting, others, log_offset + size))
        runs: list[Run] = []
        moved: list[tuple[QueueEnd, int]] = []
        for key, (offset, entries) in queues.items():
            kept = queue_end(*key)
            moved.append((kept, offset))
            kept.next = offset + len(entries)
            runs.append((*key, offset, b"".join(entries)))
        undo.append(functools.partial(put_back, moved))
        return size, messages, runs, b"".join(keys)

    def tickets(self) -> tuple[list[tuple[int, int]], list[tuple[int, bool, Ticket]]]:
        """What was encoded: requests by code; and end in the log, wait and ticket of each part."""
        out: list[tuple[int, bool, Ticket]] = []
        codes: list[int] = []
        for waiting, others, end in self._portions:
            for parts, wait in ((waiting, True), (others, False)):
                if parts:
                    out.append((end, wait, Ticket(parts)))
                    codes += [one[0][0] for _, sent in parts for one in sent]
        return [(code, codes.count(code)) for code in set(codes)], out


def _read_head(serialize: int, text: bytes) -> Head | None:
    """A header, read the quick way where that is possible; None when none can be read."""
    if not serialize:
        try:
            header = read_json(text)
            if header.code != CODE_SEND:
                return header
        except (ValueError, RecursionError):
            pass
    return read_any(serialize, text)


def _fitting(asks: list[Ask], room: int) -> list[Ask]:
    """The first of these messages whose records fit into so many bytes."""
    if sum([ask[4] for ask in asks]) <= room:
        return asks
    for number, ask in enumerate(asks):
        room -= ask[4]
        if room < 0:
            return asks[:number]
    return asks
