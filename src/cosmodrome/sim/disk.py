"""A disk in memory that can lose power, fill up and fail to sync, the same way for one seed.

What is written lands in a page cache and is visible at once; only `sync` makes it stable. A power
cut keeps any mixture of old and new sectors of pages that were not synced, and a file that was
never synced may be shorter, and then empty. Directory changes become stable when their directory is
synced (`create_segment`, `make_dirs` and `replace` do that, `remove` does not); of the others a
power cut keeps a prefix, as a journal does. A kill keeps the page cache.

Every step counts. `cut_after` picks the step that ends this life: it is done in part, raises
`PowerCut`, and so does every step after it until `restart`.
"""

from __future__ import annotations

import dataclasses
import errno
import os.path
import random
from collections.abc import Callable

from cosmodrome.env.base import DiskUsage, FileLock, SegmentFile
from cosmodrome.errors import DirectoryInUse
from cosmodrome.layout import SECTOR_BYTES

PAGE_BYTES = 4096


class PowerCut(BaseException):
    """The machine, or the process, is gone. Not an Exception: nobody may carry on."""


@dataclasses.dataclass(slots=True)
class Faults:
    """Switches for faults of a disk that goes on working."""

    capacity_pages: int | None = None  # writing to further pages is ENOSPC
    sync_error: str | None = None  # syncing a file whose path contains this is EIO
    used_ratio: float = 0.1  # what `usage` answers while there is no capacity


class _File:
    __slots__ = ("allocated", "data", "dirty", "stable")

    def __init__(self, data: bytearray) -> None:
        self.data = data
        self.stable = bytearray()  # what a power cut cannot take; shorter until the first sync
        self.dirty: set[int] = set()
        self.allocated: set[int] = set()

    def make_stable(self, pages: set[int]) -> None:
        """Make pages stable, and the length."""
        self.stable.extend(bytes(len(self.data) - len(self.stable)))
        for page in pages:
            at = page * PAGE_BYTES
            self.stable[at : at + PAGE_BYTES] = self.data[at : at + PAGE_BYTES]
        self.dirty -= pages

    def after_cut(self, chance: random.Random) -> _File:
        """What is found when power is back."""
        size = len(self.data)
        dirty = self.dirty
        if len(self.stable) < size and chance.random() < 0.5:
            # File systems log a length as a whole: what was not logged has no data either.
            size, dirty = chance.choice((0, chance.randrange(size))), set()
        found = bytearray(self.stable)
        found.extend(bytes(size - len(found)))
        for page in sorted(dirty):
            at = page * PAGE_BYTES
            sectors = [at + step for step in range(0, PAGE_BYTES, SECTOR_BYTES)]
            style = chance.randrange(4)
            if style == 0:
                kept = sectors
            elif style == 1:
                kept = []
            elif style == 2:
                kept = sectors[: chance.randrange(len(sectors))]
            else:
                kept = [sector for sector in sectors if chance.random() < 0.5]
            for sector in kept:
                end = min(sector + SECTOR_BYTES, size)
                if sector < end:
                    found[sector:end] = self.data[sector:end]
        again = _File(found)
        again.stable = bytearray(found)
        pages = -(-size // PAGE_BYTES)
        again.allocated = {page for page in self.allocated if page < pages}
        return again


class _Directory:
    __slots__ = ("names", "pending", "stable")

    def __init__(self) -> None:
        self.names: dict[str, _File | _Directory] = {}
        self.stable: dict[str, _File | _Directory] = {}
        self.pending: list[tuple[str, _File | _Directory | None]] = []

    def put(self, name: str, node: _File | _Directory | None) -> None:
        self.pending.append((name, node))
        _apply(self.names, name, node)

    def sync(self) -> None:
        self.stable = dict(self.names)
        self.pending.clear()

    def after_cut(self, chance: random.Random) -> _Directory:
        found = dict(self.stable)
        for name, node in self.pending[: chance.randint(0, len(self.pending))]:
            _apply(found, name, node)
        again = _Directory()
        again.names = {name: found[name].after_cut(chance) for name in sorted(found)}
        again.stable = dict(again.names)
        return again


def _apply(
    names: dict[str, _File | _Directory], name: str, node: _File | _Directory | None
) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


class SimSegment:
    """One opening of a file."""

    def __init__(self, disk: SimDisk, path: str, file: _File) -> None:
        self.path = path
        self.size = len(file.data)
        self._disk = disk
        self._file: _File | None = file

    @property
    def view(self) -> memoryview:
        return memoryview(self._opened().data).toreadonly()

    def write(self, data: bytes | bytearray | memoryview, position: int) -> None:
        if position < 0 or position + len(data) > self.size:
            raise ValueError(f"{self.path}: {len(data)} bytes at {position} do not fit")
        self._disk.write(self._opened(), data, position)

    def next_data(self, position: int) -> int:
        return position

    def sync(self) -> None:
        self._disk.sync(self._opened(), self.path)

    def close(self) -> None:
        self._file = None

    def _opened(self) -> _File:
        if self._file is None:
            raise OSError(errno.EBADF, "Bad file descriptor", self.path)
        return self._file


class _Lock:
    def __init__(self, held: set[str], path: str) -> None:
        self._held = held
        self._path = path
        held.add(path)

    def release(self) -> None:
        self._held.discard(self._path)


class SimDisk:
    """Implements `env.base.Disk`. Paths are absolute; directories spring from `make_dirs`."""

    def __init__(self, seed: int | str, now_ms: Callable[[], int] = lambda: 0) -> None:
        self.faults = Faults()
        self.dead = False
        self.steps = 0
        self.on_cut: Callable[[], None] = lambda: None
        self._chance = random.Random(seed)
        self._now_ms = now_ms
        self._root = _Directory()
        self._locks: set[str] = set()
        self._steps_left: int | None = None
        self._used_pages = 0

    # --- the end of a life -------------------------------------------------------------------
    def cut_after(self, steps: int | None) -> None:
        """Make the step that many steps from now the last one; None cancels that."""
        self._steps_left = steps

    def cut(self) -> None:
        """End this life now, between two steps."""
        self.dead = True
        self._steps_left = None

    def restart(self, *, power: bool) -> None:
        """Begin the next life: with `power`, after a power cut, else after a kill."""
        self.dead = False
        self._steps_left = None
        self._locks = set()
        self.faults = Faults()
        if power:
            self._root = self._root.after_cut(self._chance)
        self._used_pages = sum(len(file.allocated) for _, file in _files_in("", self._root))

    def write_back(self) -> None:
        """What the kernel does by itself now and then: some dirty pages become stable."""
        for _, file in _files_in("", self._root):
            file.make_stable({page for page in sorted(file.dirty) if self._chance.random() < 0.5})

    def files(self) -> dict[str, bytes]:
        """Every file as a reader sees it now, by path."""
        return {path: bytes(file.data) for path, file in _files_in("", self._root)}

    def stable(self, path: str) -> bytes:
        """What no power cut can take from a file, though the machine may be dead."""
        node = self._find(path)
        return bytes(node.stable) if isinstance(node, _File) else b""

    def visible(self, path: str) -> bytes:
        """What a process reads from a file, though the machine may be dead."""
        node = self._find(path)
        return bytes(node.data) if isinstance(node, _File) else b""

    def wipe(self) -> None:
        """Another disk is in this machine, an empty one. Between two lives."""
        self._root = _Directory()
        self._used_pages = 0

    # --- names -------------------------------------------------------------------------------
    def list(self, path: str) -> list[str]:
        self._alive()
        node = self._find(path)
        return sorted(node.names) if isinstance(node, _Directory) else []

    def is_dir(self, path: str) -> bool:
        self._alive()
        return isinstance(self._find(path), _Directory)

    def exists(self, path: str) -> bool:
        self._alive()
        return self._find(path) is not None

    def size(self, path: str) -> int:
        return len(self._file(path).data)

    def mtime_ms(self, path: str) -> int:
        self._file(path)
        return self._now_ms()

    def make_dirs(self, path: str) -> None:
        self._alive()
        at = self._root
        for name in _parts(path):
            node = at.names.get(name)
            if node is None:
                node = _Directory()
                # One step: file systems log a directory no later than the files made in it.
                self._step()
                at.put(name, node)
                at.sync()
            if not isinstance(node, _Directory):
                raise NotADirectoryError(errno.ENOTDIR, "Not a directory", path)
            at = node

    def remove(self, path: str) -> None:
        self._step()
        node = self._find(path)
        if node is None:
            return
        if isinstance(node, _Directory) and node.names:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", path)
        if isinstance(node, _File):
            self._used_pages -= len(node.allocated)
        self._directory(path).put(os.path.basename(path), None)

    # --- whole files -------------------------------------------------------------------------
    def read(self, path: str) -> bytes:
        return bytes(self._file(path).data)

    def replace(self, path: str, data: bytes, *, keep: bool = True) -> None:
        self.make_dirs(os.path.dirname(path))
        directory, name = self._directory(path), os.path.basename(path)
        fresh = _File(bytearray(data))
        self._step()
        directory.put(name + ".tmp", fresh)
        self.write(fresh, data, 0)
        self.sync(fresh, path + ".tmp")
        old = directory.names.get(name)
        if keep and old is not None:
            directory.put(name + ".bak", old)
            self._step()
        directory.put(name, fresh)
        directory.put(name + ".tmp", None)
        self._step()
        directory.sync()

    # --- segments ----------------------------------------------------------------------------
    def create_segment(self, path: str, size: int) -> SegmentFile:
        self.make_dirs(os.path.dirname(path))
        directory, name = self._directory(path), os.path.basename(path)
        if name in directory.names:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        if self._full():
            raise OSError(errno.ENOSPC, "No space left on device", path)
        self._step()
        directory.put(name, _File(bytearray(size)))
        self._step()
        directory.sync()
        return self.open_segment(path)

    def open_segment(self, path: str, *, read_only: bool = False) -> SegmentFile:
        return SimSegment(self, path, self._file(path))

    def write(self, file: _File, data: bytes | bytearray | memoryview, position: int) -> None:
        """Into the page cache, in part when this is the last step or the disk is full."""
        end = position + len(data)
        if self._last_step():
            # Whole sectors: the kernel copies page by page.
            end = self._chance.randint(position, end) // SECTOR_BYTES * SECTOR_BYTES
            end = max(position, end)
        full = False
        pages = range(position // PAGE_BYTES, -(-end // PAGE_BYTES))
        for page in pages:
            if page not in file.allocated:
                if self._full():
                    end, full = max(position, page * PAGE_BYTES), True
                    break
                file.allocated.add(page)
                self._used_pages += 1
            file.dirty.add(page)
        file.data[position:end] = data[: end - position]
        self._step()
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")

    def sync(self, file: _File, path: str) -> None:
        last = self._last_step()
        failing = self.faults.sync_error is not None and self.faults.sync_error in path
        if last or failing:
            file.make_stable({page for page in sorted(file.dirty) if self._chance.random() < 0.5})
        self._step()
        if failing:
            # As Linux does: the pages count as clean from now on, wherever their data is.
            file.dirty.clear()
            raise OSError(errno.EIO, "Input/output error", path)
        file.make_stable(set(file.dirty))

    # --- the rest ----------------------------------------------------------------------------
    def lock(self, path: str) -> FileLock:
        self._alive()
        if path in self._locks:
            raise DirectoryInUse(f"{os.path.dirname(path)} is in use; stop the other broker")
        return _Lock(self._locks, path)

    def usage(self, path: str) -> DiskUsage:
        self._alive()
        capacity = self.faults.capacity_pages
        if capacity is None:
            used = int(self.faults.used_ratio * 1000)
            return DiskUsage(used_bytes=used, free_bytes=1000 - used)
        used = self._used_pages * PAGE_BYTES
        return DiskUsage(used, max(0, capacity * PAGE_BYTES - used))

    @property
    def used_pages(self) -> int:
        return self._used_pages

    # --- inside ------------------------------------------------------------------------------
    def _alive(self) -> None:
        if self.dead:
            raise PowerCut

    def _last_step(self) -> bool:
        self._alive()
        return self._steps_left is not None and self._steps_left <= 1

    def _step(self) -> None:
        self._alive()
        self.steps += 1
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.cut()
                self.on_cut()
                raise PowerCut

    def _full(self) -> bool:
        capacity = self.faults.capacity_pages
        return capacity is not None and self._used_pages >= capacity

    def _find(self, path: str) -> _File | _Directory | None:
        node: _File | _Directory | None = self._root
        for name in _parts(path):
            if not isinstance(node, _Directory):
                return None
            node = node.names.get(name)
        return node

    def _file(self, path: str) -> _File:
        self._alive()
        node = self._find(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        if not isinstance(node, _File):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", path)
        return node

    def _directory(self, path: str) -> _Directory:
        node = self._find(os.path.dirname(path))
        if not isinstance(node, _Directory):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return node


def _files_in(path: str, at: _Directory) -> list[tuple[str, _File]]:
    found: list[tuple[str, _File]] = []
    for name, node in sorted(at.names.items()):
        if isinstance(node, _File):
            found.append((f"{path}/{name}", node))
        else:
            found += _files_in(f"{path}/{name}", node)
    return found


def _parts(path: str) -> list[str]:
    return [name for name in path.split("/") if name]
