"""The two streams of a link, as bytes and as values; no sockets, files or clocks.

Classic, as Apache RocketMQ speaks it (all numbers are big-endian):

    slave  -> i64 end of its log, again and again
    master -> i64 offset, i32 size, bytes of the log; size 0 is a heartbeat

Ours: the slave says the 8 bytes of HELLO and nothing more until the master has said WELCOME,
because a classic master would read whatever follows as reports. Then both send frames:

    u8 kind, u32 size, payload

HELLO and WELCOME are negative numbers, which no report of a classic slave and no offset of a
classic master is. They differ, because a classic master may send the number of HELLO back as the
offset of its heartbeats.

Readers take bytes as they come, in any pieces. What cannot be right is a ProtocolError that names
it. Bytes of the log are handed on as they arrive, as views of what was read, without waiting for
the whole frame; consecutive frames come as one `Run`. Everything else is gathered until it is
whole, within the limits below.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from cosmodrome.errors import ProtocolError
from cosmodrome.replication.tables import Rows

VERSION = 1

HELLO = int.from_bytes(b"\xc0SMO-HA>", "big", signed=True)
WELCOME = int.from_bytes(b"\xc0SMO-HA<", "big", signed=True)

WHO, BEGIN, REFUSED, DATA, STATE, ACK, BEAT = range(1, 8)
KIND_NAMES = ("", "WHO", "BEGIN", "REFUSED", "DATA", "STATE", "ACK", "BEAT")

DATA_BYTES_MAX = 2 << 20
MASTER_JSON_BYTES_MAX = 16 << 20
SLAVE_JSON_BYTES_MAX = 64 << 10
CLASSIC_BYTES_MAX = 4 << 20
TABLE_BYTES_MAX = 256 << 20  # of all frames that bring one table
STATE_ROWS = 1_000  # per frame; fewer when they are large
STATE_BYTES = 1 << 20  # above it a frame of several rows is divided

NUMBER = struct.Struct(">q")
_HEAD = struct.Struct(">BI")
_DATA = struct.Struct(">BIqqq")  # kind, size, epoch, offset, confirmed end
_ACK = struct.Struct(">BIqq")  # kind, size, epoch, synced end
_BEAT = struct.Struct(">BIqqq")  # kind, size, epoch, end, store time of the last record
_CLASSIC = struct.Struct(">qi")  # offset, size
_DATA_FIELDS = _DATA.size - _HEAD.size
_ACK_FIELDS = _ACK.size - _HEAD.size
_BEAT_FIELDS = _BEAT.size - _HEAD.size


# --- what is said --------------------------------------------------------------------------------


class Who(msgspec.Struct, frozen=True, kw_only=True):
    """A slave introduces itself; everything up to `end` is durable there."""

    version: int
    broker: str
    cluster: str
    id: int
    incarnation: str
    epoch: int
    first: int
    end: int
    file_bytes: int  # of a file of its log
    fingerprint: tuple[int, int] | None  # where it begins, and its checksum; of an empty log None
    from_first: bool  # an empty slave wants the whole log
    access_key: str = ""  # its account, for a master with access control
    signature: str = ""  # of `signed_text`

    def signed_text(self) -> bytes:
        """What the signature is made of: everything else that it says."""
        return msgspec.json.encode(msgspec.structs.replace(self, signature=""))


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """The master goes on with its log at `begin`; `address` is where its clients reach it."""

    version: int
    epoch: int
    first: int
    end: int
    begin: int
    address: str = ""  # empty when it is a slave itself that does not know


class Refusal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """With `marks` the slave can find out where both logs are the same. Each is a place in the
    master's log, and the fingerprint there; the first one is its end, others are lower."""

    why: str
    remedy: str
    marks: tuple[tuple[int, int, int], ...] = ()


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of one table. With `more`, the next frame goes on with them."""

    offset: int
    table: str
    rows: dict[str, Any]
    whole: bool
    more: bool = False


class Ack(msgspec.Struct, frozen=True):
    epoch: int
    end: int


class Beat(msgspec.Struct, frozen=True):
    epoch: int
    end: int
    last_store_ms: int  # -1 when the stream does not say it


class Run(msgspec.Struct):
    """Bytes of the log in one piece; `parts` are views that die with the read they came from."""

    offset: int
    epoch: int
    confirmed: int  # -1 when the stream does not say it
    size: int
    parts: list[memoryview]


FromMaster = Run | Begin | Refusal | State | Beat
FromSlave = Who | Ack | Beat


# --- writing -------------------------------------------------------------------------------------


def number(value: int) -> bytes:
    """A report, HELLO or WELCOME."""
    return NUMBER.pack(value)


def who(value: Who) -> bytes:
    return _json(WHO, value)


def begin(value: Begin) -> bytes:
    return _json(BEGIN, value)


def refused(value: Refusal) -> bytes:
    return _json(REFUSED, value)


def data_head(epoch: int, offset: int, confirmed: int, size: int) -> bytes:
    """What goes before `size` bytes of the log."""
    return _DATA.pack(DATA, _DATA_FIELDS + size, epoch, offset, confirmed)


def ack(epoch: int, end: int) -> bytes:
    return _ACK.pack(ACK, _ACK_FIELDS, epoch, end)


def beat(epoch: int, end: int, last_store_ms: int) -> bytes:
    return _BEAT.pack(BEAT, _BEAT_FIELDS, epoch, end, last_store_ms)


def states(log_end: Callable[[], int], table: str, rows: Rows, *, whole: bool) -> Iterator[bytes]:
    """The frames that carry these rows, each made when it is asked for.

    Each has the end of the log at that moment: rows may be newer than when they were gathered, and
    must not be said to be older than what they speak of.
    """
    names = list(rows)
    if not names and not whole:
        return
    pieces = [names[at : at + STATE_ROWS] for at in range(0, len(names), STATE_ROWS)] or [names]
    pieces.reverse()
    while pieces:
        piece = pieces.pop()
        frame = _json(
            STATE,
            State(
                offset=log_end(),
                table=table,
                rows={name: rows[name] for name in piece},
                whole=whole,
                more=bool(pieces),
            ),
        )
        if len(frame) > STATE_BYTES and len(piece) > 1:
            half = len(piece) // 2
            pieces += (piece[half:], piece[:half])
        elif len(frame) - _HEAD.size > MASTER_JSON_BYTES_MAX:
            raise ProtocolError(
                f"the row {piece[0]!r} of the table {table} takes {len(frame)} bytes;"
                f" a frame may have {MASTER_JSON_BYTES_MAX}"
            )
        else:
            yield frame


def classic_head(offset: int, size: int) -> bytes:
    return _CLASSIC.pack(offset, size)


def _json(kind: int, value: msgspec.Struct) -> bytes:
    payload = msgspec.json.encode(value)
    return _HEAD.pack(kind, len(payload)) + payload


# --- reading: a master hears its slaves ----------------------------------------------------------


class Reports:
    """Ends of the log of a classic slave."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> tuple[int, ...]:
        if self._held:
            data = self._held + data
        whole = len(data) & ~7
        self._held = data[whole:]
        return struct.unpack_from(f">{whole >> 3}q", data)


class _Frames:
    """Gathers what is not a byte of the log until it is whole."""

    def __init__(self) -> None:
        self._held = bytearray()

    def _gather(self, data: memoryview, at: int) -> tuple[memoryview | None, int]:
        """The frame that begins at `at` or was held, None when it is not whole; where to go on."""
        held = self._held
        if not held and len(data) - at >= _HEAD.size:
            want = self._length(data[at : at + _HEAD.size])
            if len(data) - at >= want:
                return data[at : at + want], at + want
        while at < len(data):
            want = self._length(held) if len(held) >= _HEAD.size else _HEAD.size
            part = data[at : at + want - len(held)]
            held += part
            at += len(part)
            if len(held) == _HEAD.size:
                self._length(held)  # a bad one is known at once
            elif len(held) == want:
                self._held = bytearray()
                return memoryview(held), at
        return None, at

    def _length(self, head: memoryview | bytearray) -> int:
        """Of the part of a frame that is gathered; ProtocolError when there is no such frame."""
        kind, size = _HEAD.unpack_from(head)
        least, most = self._limits(kind)
        if not least <= size <= most:
            if not most:
                raise ProtocolError(f"a frame of kind {kind} ({_name(kind)}) has no place here")
            raise ProtocolError(
                f"a frame {_name(kind)} of {size} bytes; it may have {least} to {most}"
            )
        return _HEAD.size + (_DATA_FIELDS if kind == DATA else size)

    def _limits(self, kind: int) -> tuple[int, int]:
        """Least and most bytes of a payload; (1, 0) for kinds that do not come this way."""
        return 1, 0


class SlaveFrames(_Frames):
    """What a slave of ours says behind HELLO."""

    def feed(self, data: bytes) -> list[FromSlave]:
        if len(data) == _ACK.size and data[0] == ACK and not self._held:  # as nearly always
            _, size, epoch, end = _ACK.unpack(data)
            if size == _ACK_FIELDS:
                return [Ack(epoch, end)]
        view = memoryview(data)
        found: list[FromSlave] = []
        at = 0
        while at < len(view):
            frame, at = self._gather(view, at)
            if frame is not None:
                found.append(self._decode(frame))
        return found

    def _decode(self, frame: memoryview) -> FromSlave:
        kind = frame[0]
        if kind == ACK:
            return Ack(*_ACK.unpack(frame)[2:])
        if kind == BEAT:
            return Beat(*_BEAT.unpack(frame)[2:])
        return _decoded(frame, Who)

    def _limits(self, kind: int) -> tuple[int, int]:
        if kind == ACK:
            return _ACK_FIELDS, _ACK_FIELDS
        if kind == BEAT:
            return _BEAT_FIELDS, _BEAT_FIELDS
        return (2, SLAVE_JSON_BYTES_MAX) if kind == WHO else (1, 0)


# --- reading: a slave hears its master -----------------------------------------------------------


class _LogBytes:
    """Bytes of the log on their way through one read."""

    def __init__(self) -> None:
        self.left = 0  # bytes that the frame under way still brings
        self._run = Run(0, 0, -1, 0, [])

    def go_on(self, found: list[FromMaster]) -> None:
        """A new read: what the last one brought was used up."""
        if self.left:
            run = self._run
            self._run = Run(run.offset + run.size, run.epoch, run.confirmed, 0, [])
            found.append(self._run)

    def begin(
        self, found: list[FromMaster], offset: int, size: int, epoch: int = 0, confirmed: int = -1
    ) -> None:
        """A frame of `size` bytes; it joins the one before when it follows it directly."""
        run = self._run
        self.left = size
        if found and found[-1] is run and offset == run.offset + run.size and epoch == run.epoch:
            run.confirmed = confirmed
        else:
            self._run = Run(offset, epoch, confirmed, 0, [])
            found.append(self._run)

    def take(self, data: memoryview, at: int) -> int:
        """As much of it as belongs to the frame; where to go on."""
        part = data[at : at + self.left]
        size = len(part)
        self._run.parts.append(part)
        self._run.size += size
        self.left -= size
        return at + size


class MasterFrames(_Frames):
    """What a master of ours says behind WELCOME."""

    def __init__(self) -> None:
        super().__init__()
        self._log = _LogBytes()
        self._state: State | None = None  # of a table of which more comes
        self._state_bytes = 0

    def feed(self, data: memoryview) -> list[FromMaster]:
        found: list[FromMaster] = []
        log = self._log
        if log.left:
            log.go_on(found)
        at, end = 0, len(data)
        while at < end:
            if log.left:
                at = log.take(data, at)
                continue
            if data[at] == DATA and end - at >= _DATA.size and not self._held:
                _, size, epoch, offset, confirmed = _DATA.unpack_from(data, at)
                if _DATA_FIELDS < size <= _DATA_FIELDS + DATA_BYTES_MAX:  # as nearly always
                    at += _DATA.size
                    log.begin(found, offset, size - _DATA_FIELDS, epoch, confirmed)
                    continue
            frame, at = self._gather(data, at)
            if frame is None:
                break
            if frame[0] == DATA:
                _, size, epoch, offset, confirmed = _DATA.unpack(frame)
                log.begin(found, offset, size - _DATA_FIELDS, epoch, confirmed)
            elif frame[0] == STATE:
                self._add_rows(found, frame)
            else:
                found.append(self._decode(frame))
        return found

    def _add_rows(self, found: list[FromMaster], frame: memoryview) -> None:
        """A table comes in one piece, whatever the number of frames."""
        state, before = _decoded(frame, State), self._state
        self._state_bytes += len(frame)
        if before is not None:
            if state.table != before.table:
                raise ProtocolError(
                    f"rows of the table {state.table} before the last ones of {before.table}"
                )
            if self._state_bytes > TABLE_BYTES_MAX:
                raise ProtocolError(
                    f"the table {state.table} takes more than {TABLE_BYTES_MAX} bytes"
                )
            before.rows.update(state.rows)
            state = State(
                offset=max(before.offset, state.offset),
                table=state.table,
                rows=before.rows,
                whole=state.whole,
                more=state.more,
            )
        if state.more:
            self._state = state
        else:
            self._state, self._state_bytes = None, 0
            found.append(state)

    def _decode(self, frame: memoryview) -> FromMaster:
        kind = frame[0]
        if kind == BEAT:
            return Beat(*_BEAT.unpack(frame)[2:])
        return _decoded(frame, Begin) if kind == BEGIN else _decoded(frame, Refusal)

    def _limits(self, kind: int) -> tuple[int, int]:
        if kind == DATA:
            return _DATA_FIELDS + 1, _DATA_FIELDS + DATA_BYTES_MAX
        if kind == BEAT:
            return _BEAT_FIELDS, _BEAT_FIELDS
        return (2, MASTER_JSON_BYTES_MAX) if kind in (BEGIN, REFUSED, STATE) else (1, 0)


class ClassicFrames:
    """What a classic master says. A heartbeat is a `Beat` with the offset that comes next."""

    def __init__(self) -> None:
        self._held = b""
        self._log = _LogBytes()

    def feed(self, data: memoryview) -> list[FromMaster]:
        found: list[FromMaster] = []
        log = self._log
        log.go_on(found)
        at, end = 0, len(data)
        while at < end:
            if log.left:
                at = log.take(data, at)
                continue
            head = self._held + bytes(data[at : at + _CLASSIC.size - len(self._held)])
            at += len(head) - len(self._held)
            self._held = b""
            if len(head) < _CLASSIC.size:
                self._held = head
                break
            offset, size = _CLASSIC.unpack(head)
            if offset < 0 or not 0 <= size <= CLASSIC_BYTES_MAX:
                raise ProtocolError(
                    f"a frame of {size} bytes at offset {offset}; it may have 0 to"
                    f" {CLASSIC_BYTES_MAX} at an offset that is not negative"
                )
            if size:
                log.begin(found, offset, size)
            else:
                found.append(Beat(0, offset, -1))
        return found


V = TypeVar("V", bound=msgspec.Struct)


def _decoded(frame: memoryview, kind: type[V]) -> V:
    try:
        return msgspec.json.decode(frame[_HEAD.size :], type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame {_name(frame[0])} that cannot be read: {error}") from None


def _name(kind: int) -> str:
    return KIND_NAMES[kind] if 0 < kind < len(KIND_NAMES) else "unknown"
