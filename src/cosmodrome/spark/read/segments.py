"""Walks the records of a byte range of one log file and says what is damaged on the way.

A record proves itself: it has a record's magic, its lengths add up, and it names the log offset
it lies at. So a range that begins anywhere finds its first record by searching, and a walk that
ran into damage goes on at the next record that proves itself.

Who reports what, so that ranges side by side report everything once:
- a record belongs to the range that its first byte lies in, also when only its body is damaged;
- bytes that are no record belong to the range of the record before them, wherever they lie. Nobody
  else can know that a record should begin there: a range that begins inside them searches on.

The log may grow while it is read. A broker writes front to back, so a record is whole when a byte
behind it was written, and only the last one needs a closer look. In the last file that holds data,
zeros, or a record that is not finished with zeros behind it, are the end of the log; anywhere else
they are damage. (A Java broker that recovered from a crash leaves what it cut off in the file: such
bytes behind the end of the log are reported as damage, and what is whole in them is read.)
"""

from __future__ import annotations

import dataclasses
import enum
import os.path
from collections.abc import Iterator

from cosmodrome.env.base import Disk
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import (
    BLANK,
    BLANK_BYTES,
    MAGIC_RECORD,
    MAGIC_RECORD_V2,
    RECORD_BYTES_MIN,
)
from cosmodrome.speed.arrow import (
    STOP_BLANK,
    STOP_CORRUPT,
    STOP_EMPTY,
    STOP_END,
    STOP_FULL,
    STOP_PARTIAL,
    ColumnBuilder,
)
from cosmodrome.store.offline.directory import data_end, segment_offsets, segment_path
from cosmodrome.wire.record import decode_record

FIRST_PIECE_BYTES = 16 << 10  # the next record is near, unless something is wrong
PIECE_BYTES = 1 << 20
HEAD_BYTES = 4096  # of a file that is looked at to know whether it holds anything

_MAGICS = (MAGIC_RECORD, MAGIC_RECORD_V2)
# Both magics share these bytes; the fourth tells them apart.
_MAGIC_START = (MAGIC_RECORD & 0xFFFFFFFF).to_bytes(4, "big")[:3]
_ZEROS = bytes(PIECE_BYTES)
_UNFINISHED = -1  # beside the STOP_*: the last record of the log, still being written


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """The records of one log file whose first byte lies in [start, end) of it."""

    path: str
    base: int  # log offset of the file's first byte
    file_bytes: int  # what the file has, but nothing that the next file has too
    start: int
    end: int
    lost_until: int = 0  # log offset where the next file begins, if bytes are missing before it


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """A part of the log that holds no sound record."""

    path: str
    position: int
    reason: str
    after: str  # what comes next

    def __str__(self) -> str:
        return f"{self.path} at {self.position}: {self.reason}; {self.after}"


class _Found(enum.Enum):
    RECORD = enum.auto()
    END = enum.auto()  # of the file: its last byte, or the marker that fills it up
    FAULT = enum.auto()


class SplitWalk:
    """Iterate it: None means that the builder is full and must be taken; else it is damage."""

    def __init__(self, split: Split, disk: Disk, builder: ColumnBuilder) -> None:
        self._split = split
        self._disk = disk
        self._builder = builder
        # The same code decides what proves itself, here and in the walk.
        self._probe = ColumnBuilder(("commit_log_offset",), check_crc=False, rows_max=1)
        file = disk.open_segment(split.path, read_only=True)
        try:
            self._view = file.view[: split.file_bytes]
        finally:
            file.close()  # the map lives as long as the view

    def __iter__(self) -> Iterator[Damage | None]:
        end = min(self._split.end, len(self._view))
        at = 0 if self._split.start == 0 else self._find(self._split.start, end)
        tried = -1
        while 0 <= at < end:
            limit = self._written_end(at, end)
            while at < limit:
                at, why = self._add(at, limit)
                if why == STOP_FULL:
                    yield None
                elif why == STOP_CORRUPT and self._builder.fault_size:
                    behind = at + self._builder.fault_size
                    yield self._damage(at, self._builder.fault, f"resumed at {behind}")
                    at = behind
                elif why == _UNFINISHED:
                    return
                elif why != STOP_END:
                    break
            found, reason = self._look(at)
            if found is _Found.END or (found is _Found.RECORD and at >= limit):
                break  # a record here is another range's, or newer than this walk
            if found is _Found.RECORD:  # it was completed while the walk looked at it
                assert tried != at, f"{self._split.path} at {at}: {self._builder.fault}"
                tried = at
            else:
                damage, at = self._mend(at, reason)
                if damage is not None:
                    yield damage
        if self._split.lost_until:
            yield self._lost()

    # --- walking -----------------------------------------------------------------------------
    def _add(self, at: int, limit: int) -> tuple[int, int]:
        """Records from `at` on that begin before `limit`, also when the last ends behind it."""
        base = self._split.base
        at, why = self._builder.add(self._view, at, limit, base=base)
        if why == STOP_PARTIAL or (why == STOP_EMPTY and limit - at < BLANK_BYTES):
            behind = self._record_end(at)
            if self._half_written(at, behind):
                return at, _UNFINISHED
            at, why = self._builder.add(self._view, at, behind, base=base)
        return at, why

    def _record_end(self, at: int) -> int:
        """Where the record at `at` says it ends; the end of the file when that makes no sense."""
        size = int.from_bytes(self._view[at : at + 4], "big", signed=True)
        sensible = RECORD_BYTES_MIN <= size <= len(self._view) - at
        return at + size if sensible else len(self._view)

    def _written_end(self, at: int, end: int) -> int:
        """Up to where this walk may go: `end`, or the last record that is written whole."""
        if any(self._view[end : end + HEAD_BYTES]) or self._next_file() is not None:
            return end
        view, size_of_file = self._view, len(self._view)
        while at < end and size_of_file - at >= RECORD_BYTES_MIN:
            size, magic = BLANK.unpack_from(view, at)
            behind = at + size
            if magic not in _MAGICS or not RECORD_BYTES_MIN <= size <= size_of_file - at:
                break
            if not any(view[behind : behind + BLANK_BYTES]):
                return at if self._half_written(at, behind) else behind
            at = behind
        return end

    def _half_written(self, at: int, behind: int) -> bool:
        """Whether the log ends with this record and its last parts may still be missing.

        No checksum covers them, and the lengths before them add up already.
        """
        if any(self._view[behind : behind + BLANK_BYTES]):
            return False
        try:
            record = decode_record(self._view, at)
        except ProtocolError:
            return False  # the walk says what is wrong
        missing = "\0" in record.topic or record.properties.endswith("\0")
        return missing and self._next_file() is None

    # --- what lies there -----------------------------------------------------------------------
    def _look(self, at: int) -> tuple[_Found, str]:
        """What begins at `at`, and what is wrong with it."""
        view = self._view
        if at >= len(view):
            return _Found.END, ""
        _, why = self._probe.add(view, at, self._record_end(at), base=self._split.base)
        if self._probe.rows:
            self._probe.take()
            return _Found.RECORD, ""
        left = len(view) - at
        if why == STOP_BLANK:
            (size, _) = BLANK.unpack_from(view, at)
            if size == left or self._find(at + 1, len(view)) < 0:
                return _Found.END, ""
            return _Found.FAULT, f"an end-of-file marker of {size} bytes, but {left} are left"
        if why == STOP_EMPTY:
            return _Found.FAULT, "zeros where a record should begin"
        if why == STOP_PARTIAL:
            size = int.from_bytes(view[at : at + 4], "big", signed=True)
            return _Found.FAULT, f"a record of {size} bytes, but only {left} are left in the file"
        return _Found.FAULT, self._probe.fault

    def _find(self, start: int, end: int) -> int:
        """The first record that begins in [start, end), -1 when there is none."""
        stop = min(end + len(_MAGIC_START) + 3, len(self._view))
        at, length = start + 4, FIRST_PIECE_BYTES
        while at < stop:
            piece = bytes(self._view[at : min(at + length, stop)])
            hit = piece.find(_MAGIC_START)
            while hit >= 0:
                position = at + hit - 4
                if self._look(position)[0] is _Found.RECORD:
                    return position
                hit = piece.find(_MAGIC_START, hit + 1)
            if at + len(piece) >= stop:
                break
            at += len(piece) - len(_MAGIC_START) + 1
            length = min(2 * length, PIECE_BYTES)
        return -1

    # --- damage --------------------------------------------------------------------------------
    def _mend(self, at: int, reason: str) -> tuple[Damage | None, int]:
        """What the fault at `at` means, and where the walk goes on; -1 when it does not."""
        # In this order: if a record stands behind `at` by now, `at` itself is written by now.
        next_file = self._next_file()
        written = len(self._view)
        if next_file is None:
            written = min(written, data_end(self._disk, self._split.path))
        resumed = self._find(at + 1, written)
        if self._look(at)[0] is _Found.RECORD:
            return None, at
        if resumed >= 0:
            return self._damage(at, reason, f"resumed at {resumed}"), resumed
        if next_file is not None:
            return self._damage(at, reason, f"resumed at {next_file} at 0"), -1
        if self._is_end_of_log(at, written):
            return None, -1
        return self._damage(at, reason, "no record follows"), -1

    def _is_end_of_log(self, at: int, written: int) -> bool:
        """Whether nothing is behind `at` but zeros, or a record that was not finished."""
        view = self._view
        if self._zeros(at, written):
            return True
        if len(view) - at < RECORD_BYTES_MIN:
            return False
        size, magic = BLANK.unpack_from(view, at)
        if magic & 0xFF == 0 and self._zeros(at + BLANK_BYTES, written):
            return True  # not even its magic is whole
        if magic not in _MAGICS or not RECORD_BYTES_MIN <= size <= len(view) - at:
            return False
        # What ends with something was written whole, and is damaged.
        return not view[at + size - 1] and self._zeros(at + size, written)

    def _zeros(self, at: int, end: int) -> bool:
        for start in range(at, end, PIECE_BYTES):
            piece = bytes(self._view[start : min(start + PIECE_BYTES, end)])
            if piece != (_ZEROS if len(piece) == PIECE_BYTES else bytes(len(piece))):
                return False
        return True

    def _next_file(self) -> str | None:
        """The name of the next file that holds anything; files are made ahead of their use."""
        directory = os.path.dirname(self._split.path)
        for base in segment_offsets(self._disk, directory):
            if base > self._split.base:
                path = segment_path(directory, base)
                try:
                    file = self._disk.open_segment(path, read_only=True)
                except FileNotFoundError:
                    continue  # a broker removed it since it was listed
                try:
                    if any(bytes(file.view[:HEAD_BYTES])):
                        return os.path.basename(path)
                finally:
                    file.close()
        return None

    def _lost(self) -> Damage:
        split = self._split
        begin = split.base + split.file_bytes
        return self._damage(
            split.file_bytes,
            f"the log from {begin} to {split.lost_until} is missing: a file was lost or cut short",
            f"resumed at {os.path.basename(segment_path('', split.lost_until))} at 0",
        )

    def _damage(self, position: int, reason: str, after: str) -> Damage:
        return Damage(self._split.path, position, reason, after)
