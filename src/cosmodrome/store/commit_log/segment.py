"""Runs of fixed-size files, each named by the offset of its first byte in twenty digits.

Two things live here: the names, and `OpenFiles`, which keeps a bounded number of files open
for reading. A slice of a closed file's map stays valid, so closing the least recently used
one never hurts a reader. `write_files` is the way derived data reaches the disk: it runs off
the loop with descriptors of its own and so shares nothing with readers.
"""

from __future__ import annotations

import dataclasses
import os.path
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from cosmodrome.env.base import Disk, SegmentFile

NAME_DIGITS = 20
ZERO_PIECE_BYTES = 64 * 1024
HOLE_BYTES = 4096
WARM_PIECE_BYTES = 1024 * 1024
WARM_SYNC_BYTES = 16 * 1024 * 1024  # bounds what is dirty at once, and so the rate
ZERO_RUN_BYTES = 64 * 1024 * 1024  # far longer than any message, so no data follows


def segment_path(directory: str, offset: int) -> str:
    return os.path.join(directory, f"{offset:0{NAME_DIGITS}d}")


def segment_offsets(disk: Disk, directory: str) -> list[int]:
    """First offsets of all files with a segment's name, ascending; other names are ignored."""
    return [
        int(name)
        for name in disk.list(directory)
        if len(name) == NAME_DIGITS and name.isascii() and name.isdigit()
    ]


class OpenFiles:
    """Files open for reading, at most `limit` of them."""

    def __init__(self, disk: Disk, limit: int) -> None:
        self._disk = disk
        self._limit = limit
        self._files: OrderedDict[str, SegmentFile] = OrderedDict()

    def view(self, path: str) -> memoryview:
        """The whole file; OSError when it is not there."""
        file = self._files.get(path)
        if file is None:
            file = self._disk.open_segment(path, read_only=True)
            self._files[path] = file
            if len(self._files) > self._limit:
                self._files.popitem(last=False)[1].close()
        else:
            self._files.move_to_end(path)
        return file.view

    def forget(self, path: str) -> None:
        file = self._files.pop(path, None)
        if file is not None:
            file.close()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def create_lasting(disk: Disk, path: str, size: int) -> SegmentFile:
    """A new file whose length is on stable storage before anything is written to it.

    So a file that a power cut left short holds nothing, and may be dropped. Blocking.
    """
    file = disk.create_segment(path, size)
    try:
        file.sync()
    except OSError:
        file.close()
        disk.remove(path)
        raise
    return file


@dataclasses.dataclass(frozen=True, slots=True)
class Warming:
    """Fills a file with zeros ahead of its use, so that its blocks are allocated."""

    percent_max: int  # of the disk used, with this file in it, above which nothing is filled

    def fill(self, disk: Disk, file: SegmentFile, enough: Callable[[], bool]) -> int:
        """Write zeros until the file is full or it is `enough`; how many. Blocking."""
        usage = disk.usage(os.path.dirname(file.path))
        total_bytes = usage.used_bytes + usage.free_bytes
        if (usage.used_bytes + file.size) * 100 > total_bytes * self.percent_max:
            return 0
        at = 0
        while at < file.size and not enough():
            size = min(WARM_PIECE_BYTES, file.size - at)
            file.write(bytes(size), at)
            at += size
            if at % WARM_SYNC_BYTES == 0 or at == file.size:
                file.sync()  # or the first sync of a message would wait for all of it
        return at


def data_end(disk: Disk, path: str) -> int:
    """A position behind which a file holds nothing but zeros, to the next page.

    Found without reading: touching holes through a map fills memory with zeros. Blocking.
    """
    file = disk.open_segment(path, read_only=True)
    try:
        low, high = 0, -(-file.size // HOLE_BYTES)
        while low < high:
            middle = (low + high) // 2
            if file.next_data(middle * HOLE_BYTES) < file.size:
                low = middle + 1
            else:
                high = middle
        return min(low * HOLE_BYTES, file.size)
    finally:
        file.close()


def holds_nothing(disk: Disk, path: str, size: int) -> bool:
    """Whether the first `size` bytes of a file, or as many as it has, are zero. Blocking."""
    file = disk.open_segment(path, read_only=True)
    try:
        return not any(bytes(file.view[:size]))
    finally:
        file.close()


@dataclasses.dataclass(frozen=True, slots=True)
class FileWrite:
    """Pieces for one file, which is created with `size` bytes when it is not there."""

    path: str
    size: int
    pieces: Sequence[tuple[int, bytes | memoryview]]  # position, data


def write_files(disk: Disk, writes: Iterable[FileWrite]) -> list[OSError | None]:
    """Write everything, one result per file. Blocking."""
    return [_write_file(disk, write) for write in writes]


def _write_file(disk: Disk, write: FileWrite) -> OSError | None:
    try:
        if disk.exists(write.path):
            file = disk.open_segment(write.path)
        else:
            file = create_lasting(disk, write.path, write.size)
        try:
            for position, data in write.pieces:
                file.write(data, position)
        finally:
            file.close()
    except OSError as error:
        return error
    return None


def sync_files(disk: Disk, paths: Iterable[str]) -> None:
    """Sync files by name; one that was removed meanwhile needs no sync. Blocking."""
    for path in paths:
        try:
            file = disk.open_segment(path)
        except FileNotFoundError:
            continue
        try:
            file.sync()
        finally:
            file.close()


def rewrite_files(disk: Disk, paths: Iterable[str]) -> None:
    """Write what can be read once more, then sync it. Blocking.

    After a failed sync the kernel counts the pages as clean: they are read from memory, are
    not on the disk, and a further sync has nothing to do. Only a new write brings them there.
    """
    for path in paths:
        file = disk.open_segment(path)
        try:
            for start in range(0, file.size, ZERO_PIECE_BYTES):
                piece = bytes(file.view[start : start + ZERO_PIECE_BYTES])
                if any(piece):
                    file.write(piece, start)
            file.sync()
        finally:
            file.close()


def zero_from(disk: Disk, path: str, position: int) -> bool:
    """Zero a file from `position` on, leaving holes alone; True when there was anything.

    Stale bytes behind the end would look like data after the next crash. The search ends after
    a long run of zeros: reading the rest of a zeroed file would fill memory with nothing.
    Blocking.
    """
    file = disk.open_segment(path)
    found = False
    last = position
    try:
        view = file.view
        start = position
        while start < file.size:
            data_at = file.next_data(start)
            if data_at > start:
                start = last = data_at
                continue
            stop = min(start + ZERO_PIECE_BYTES, file.size)
            zeros = bytes(stop - start)
            if bytes(view[start:stop]) != zeros:
                file.write(zeros, start)
                found = True
                last = stop
            elif stop - last >= ZERO_RUN_BYTES:
                break
            start = stop
        if found:
            file.sync()
    finally:
        file.close()
    return found
