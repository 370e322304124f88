"""Giving up the end of a log, while no store runs on it.

What was cut must not come back. A stale record behind the new end is a good one again as soon as
the log has grown up to it. So everything behind the cut is zeroed or removed, and synced, from the
old end backwards: whenever this is interrupted, by a power cut too, what is left is a log that ends
somewhere between the cut and the old end, with nothing behind it, and the cut can be made again.

Queues and index are not touched. The caller has marked the store as not stopped in order and taken
back what the checkpoint said of the log. So the next start makes them agree with the log, and drops
a file whose removal a power cut has undone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from cosmodrome.env.base import Disk, SegmentFile
from cosmodrome.store.commit_log.segment import segment_offsets, segment_path

PIECE_BYTES = 64 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Which files of a log a cut at `offset` changes; a record begins there, or the log ends."""

    directory: str
    offset: int
    removed: list[int]  # first offsets of files that lie behind it, ascending
    zeroed: int | None  # of the file in which it lies

    def run(self, disk: Disk, keep: Callable[[str], object]) -> None:
        """Make the cut; `keep` saves a file, synced, before it is changed. Blocking."""
        for base in reversed(self.removed):
            path = segment_path(self.directory, base)
            keep(path)
            disk.remove(path)
        if self.zeroed is not None:
            path = segment_path(self.directory, self.zeroed)
            keep(path)
            _zero_backwards(disk, path, self.offset - self.zeroed)


def plan_cut(disk: Disk, directory: str, segment_bytes: int, offset: int) -> Cut:
    """The first file stays, even when nothing of it is left: it says where the log begins."""
    bases = segment_offsets(disk, directory)
    removed = [base for base in bases[1:] if base >= offset]
    holding = [base for base in bases if base <= offset < base + segment_bytes]
    zeroed = holding[0] if holding and holding[0] not in removed else None
    return Cut(directory, offset, removed, zeroed)


def _zero_backwards(disk: Disk, path: str, position: int) -> None:
    """Each piece is on the disk before the one in front of it is touched."""
    file = disk.open_segment(path)
    try:
        for start in reversed(range(position, file.size, PIECE_BYTES)):
            _zero(file, start, min(start + PIECE_BYTES, file.size))
    finally:
        file.close()


def _zero(file: SegmentFile, start: int, stop: int) -> None:
    if file.next_data(start) >= stop:
        return  # a hole: reading it would fill memory with zeros
    zeros = bytes(stop - start)
    if bytes(file.view[start:stop]) != zeros:
        file.write(zeros, start)
        file.sync()
