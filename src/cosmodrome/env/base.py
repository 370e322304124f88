"""The outside world as the rest of the code sees it: time, disk, chance, and work off the loop.

Only Protocols and one record live here. `env.real` is the machine; a simulator may bring its
own. Network and timers are asyncio itself, so a simulator replaces the event loop.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")

MEMORY_BYTES_ASSUMED = 8 << 30


class Clock(Protocol):
    def now_ms(self) -> int:
        """Wall time, for stored timestamps. Durations use the loop's own clock."""


class SegmentFile(Protocol):
    """A file of fixed size: written at positions, read through a map.

    What was written is visible in `view` as soon as `write` returned. A slice of `view` stays
    valid after `close` and after the file was removed.
    """

    path: str
    size: int

    @property
    def view(self) -> memoryview: ...

    def write(self, data: bytes | bytearray | memoryview, position: int) -> None:
        """All of `data` or OSError; after an error any part of it may be in the file."""

    def next_data(self, position: int) -> int:
        """The first place from `position` on that may hold other bytes than zeros.

        The size of the file when there is none. `position` itself is always a right answer;
        a better one spares reading what was never written.
        """

    def sync(self) -> None:
        """Block until written data is on stable storage. A failure is final for this file."""

    def close(self) -> None: ...


class FileLock(Protocol):
    def release(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class DiskUsage:
    used_bytes: int
    free_bytes: int  # what this process may still use

    @property
    def ratio(self) -> float:
        total = self.used_bytes + self.free_bytes
        return self.used_bytes / total if total else 0.0


class Disk(Protocol):
    def list(self, path: str) -> list[str]:
        """Names in a directory, sorted; empty when there is no such directory."""

    def is_dir(self, path: str) -> bool: ...
    def exists(self, path: str) -> bool: ...
    def size(self, path: str) -> int: ...
    def mtime_ms(self, path: str) -> int: ...
    def make_dirs(self, path: str) -> None: ...
    def remove(self, path: str) -> None:
        """Remove a file, or an empty directory; nothing happens when it is not there."""

    def read(self, path: str) -> bytes: ...
    def replace(self, path: str, data: bytes, *, keep: bool = True) -> None:
        """Atomically: temp file, fsync, rename, directory fsync.

        With `keep`, the content before this call stays readable as `path + ".bak"`.
        """

    def create_segment(self, path: str, size: int) -> SegmentFile:
        """A new zero-filled file of exactly `size` bytes, its directory entry synced."""

    def open_segment(self, path: str, *, read_only: bool = False) -> SegmentFile:
        """An existing file; its size is what the file has."""

    def lock(self, path: str) -> FileLock:
        """Exclusive lock between processes, Java's included; `DirectoryInUse` when taken."""

    def usage(self, path: str) -> DiskUsage: ...


class Offload(Protocol):
    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Run blocking work off the loop; results arrive in the loop."""


Done = Callable[[BaseException | None], None]


class Syncer(Protocol):
    """Syncs files off the loop: thousands of times a second, so without a future or a task.

    It belongs to the loop in which it was made.
    """

    def begin(self, files: Sequence[SegmentFile], failed: Callable[[], None], done: Done) -> None:
        """Sync `files` in order, up to the first that fails; `done` hears in the loop how it ended.

        `failed` is called off the loop as soon as a sync failed, before `done`. One at a time:
        the next may begin in `done`. Files closed meanwhile are synced all the same.
        """

    def close(self) -> None:
        """Leave nothing behind. `done` of a sync under way is not called any more."""


@dataclasses.dataclass(frozen=True, slots=True)
class Env:
    clock: Clock
    disk: Disk
    random: random.Random
    offload: Offload
    syncer: Callable[[], Syncer] | None = None  # makes one; None: syncs use `offload`
    memory_bytes: int = MEMORY_BYTES_ASSUMED  # of the machine, or what this process may use of it
