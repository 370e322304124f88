"""The machine: wall clock, files, worker threads. The only module that touches them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import logging
import mmap
import os
import queue
import random
import shutil
import stat
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import ClassVar, Protocol, TypeVar

from cosmodrome.env.base import (
    MEMORY_BYTES_ASSUMED,
    DiskUsage,
    Done,
    Env,
    FileLock,
    SegmentFile,
    Syncer,
)
from cosmodrome.errors import DirectoryInUse

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Where a container's memory limit is found, new and old style.
CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)
OFFLOAD_THREADS = 4  # blocking disk work at once: a sync, a segment being made, a save, one spare

sync_data: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class WallClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class MappedSegment:
    """`pwrite` for writing, a shared read-only map for reading: the page cache joins them."""

    __slots__ = ("_closed", "_fd", "_lent", "_read_only", "_view", "path", "size")

    def __init__(self, path: str, fd: int, size: int, *, read_only: bool = False) -> None:
        self.path = path
        self.size = size
        self._fd = fd
        self._read_only = read_only
        self._view: memoryview | None = None
        self._lent = False
        self._closed = False

    @property
    def view(self) -> memoryview:
        if self._view is None:
            if self.size == 0:
                return memoryview(b"")
            self._view = memoryview(
                mmap.mmap(self._fd, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            )
            if self._read_only:
                self._close_fd()  # the map has a descriptor of its own; two would be a waste
        return self._view

    def write(self, data: bytes | bytearray | memoryview, position: int) -> None:
        size = len(data)
        if position < 0 or position + size > self.size:
            raise ValueError(
                f"{self.path}: {size} bytes at {position} do not fit {self.size} bytes"
            )
        written = os.pwrite(self._fd, data, position)
        while written < size:
            written += os.pwrite(self._fd, memoryview(data)[written:], position + written)

    def next_data(self, position: int) -> int:
        if position >= self.size:
            return self.size
        try:
            return min(self.size, os.lseek(self._fd, position, os.SEEK_DATA))
        except OSError as error:
            # ENXIO: only a hole follows. Others: this file system does not tell.
            return self.size if error.errno == errno.ENXIO else position

    def sync(self) -> None:
        sync_data(self._fd)

    def lend(self) -> int:
        """The descriptor, which stays open until `give_back`, whoever closes the file."""
        self._lent = True
        return self._fd

    def give_back(self) -> None:
        self._lent = False
        if self._closed:
            self._close_fd()

    def close(self) -> None:
        # The map is dropped, not closed: slices handed out keep it alive on their own.
        self._view = None
        self._closed = True
        if not self._lent:
            self._close_fd()

    def _close_fd(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _Lock:
    __slots__ = ("_fd", "_path")

    # fcntl locks belong to the process, so two stores inside one are told apart here.
    held: ClassVar[set[str]] = set()

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        self.held.add(path)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.held.discard(self._path)


class RealDisk:
    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_dir(self, path: str) -> bool:
        return os.path.isdir(path)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    def size(self, path: str) -> int:
        return os.stat(path).st_size

    def mtime_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000

    def make_dirs(self, path: str) -> None:
        missing = []
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path) or "."
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            _sync_directory(os.path.dirname(directory) or ".")

    def remove(self, path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except (IsADirectoryError, PermissionError):
            os.rmdir(path)

    def read(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def replace(self, path: str, data: bytes, *, keep: bool = True) -> None:
        directory = os.path.dirname(path) or "."
        self.make_dirs(directory)
        fresh = path + ".tmp"
        _write_synced(fresh, data, _mode_of(path))
        if keep and os.path.exists(path):
            # A hard link under a third name first, so that at every moment both `path` and a
            # previous generation exist under names that recovery looks for.
            old, kept = path + ".old", path + ".bak"
            with contextlib.suppress(FileNotFoundError):
                os.unlink(old)
            try:
                os.link(path, old)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                _write_synced(old, self.read(path))  # a file system without hard links
            os.replace(old, kept)
        os.replace(fresh, path)
        _sync_directory(directory)

    def create_segment(self, path: str, size: int) -> SegmentFile:
        self.make_dirs(os.path.dirname(path) or ".")
        fd = _create_file(path, size)
        try:
            _sync_directory(os.path.dirname(path) or ".")
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
        return MappedSegment(path, fd, size)

    def open_segment(self, path: str, *, read_only: bool = False) -> SegmentFile:
        fd = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
        return MappedSegment(path, fd, os.fstat(fd).st_size, read_only=read_only)

    def lock(self, path: str) -> FileLock:
        import fcntl  # here, because clients run on systems that do not have it

        path = os.path.realpath(path)
        taken = DirectoryInUse(
            f"{os.path.dirname(path)} is in use by another broker; stop that one,"
            " or choose another directory with --data"
        )
        if path in _Lock.held:
            raise taken
        self.make_dirs(os.path.dirname(path))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Compat: Java locks byte 0 with fcntl; flock would not see it.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            raise taken from None
        os.pwrite(fd, b"lock", 0)
        return _Lock(fd, path)

    def usage(self, path: str) -> DiskUsage:
        while not os.path.exists(path) and os.path.dirname(path) != path:
            path = os.path.dirname(path) or "."
        usage = shutil.disk_usage(path)
        return DiskUsage(used_bytes=usage.used, free_bytes=usage.free)


class ThreadOffload:
    """Blocking work in a few threads. They start with the first work, not before."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(
            OFFLOAD_THREADS, thread_name_prefix="cosmo-disk"
        )

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, work)


class SyncThread(Protocol):
    """A thread that syncs files: `begin`, wait for the bell, `end`, and so on; `close` at last."""

    @property
    def bell(self) -> int:
        """Readable when the sync under way has ended."""

    def begin(self, descriptors: Sequence[int], failed: Callable[[], None]) -> None:
        """Sync these in order, up to the first that fails; then call `failed` before the bell."""

    def end(self) -> int | None:
        """The error number, 0 when all is synced, or None while that is not known."""

    def close(self) -> None:
        """No thread and no descriptor are left. A sync under way goes on and takes them along."""


_Work = tuple[Sequence[int], Callable[[], None]]


class PythonSyncThread:
    """The pure twin of `speed.syncer`: takes turns with the loop, as all threads of Python do."""

    def __init__(self) -> None:
        self.bell, ring = os.pipe()
        os.set_blocking(self.bell, False)
        self._busy = False
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        # It does not know this object, so that it ends with it when nobody calls `close`.
        self._thread = threading.Thread(
            target=_sync_all_work,
            args=(self._work, self._ended, self.bell, ring),
            name="cosmo-sync",
            daemon=True,
        )
        self._thread.start()
        self._leave = weakref.finalize(self, self._work.put, None)
        self._leave.atexit = False  # a daemon: nobody waits for it

    def begin(self, descriptors: Sequence[int], failed: Callable[[], None]) -> None:
        if self._busy or not self._leave.alive:
            raise RuntimeError("one sync at a time, and none after close")
        self._busy = True
        self._work.put((descriptors, failed))

    def end(self) -> int | None:
        if not self._leave.alive:
            return None
        try:
            os.read(self.bell, 1)
        except BlockingIOError:
            return None
        self._busy = False
        return self._ended.get()

    def close(self) -> None:
        self._leave()
        if not self._busy:
            self._thread.join()


def _sync_all_work(
    todo: queue.SimpleQueue[_Work | None], ended: queue.SimpleQueue[int], bell: int, ring: int
) -> None:
    while (work := todo.get()) is not None:
        descriptors, failed = work
        error_number = 0
        try:
            for descriptor in descriptors:
                sync_data(descriptor)
        except OSError as error:
            error_number = error.errno or errno.EIO
            try:
                failed()
            except Exception:
                _log.exception("failed_sync_listener_failed")  # the loop must hear all the same
        ended.put(error_number)
        os.write(ring, b"!")
        del work, failed
    os.close(ring)
    os.close(bell)


class LoopSyncer:
    """Lends the descriptors of files to a thread and hears in the loop what became of them."""

    def __init__(self, thread: SyncThread) -> None:
        self._thread = thread
        self._lent: Sequence[MappedSegment] = ()
        self._done: Done | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(thread.bell, self._hear)

    def begin(self, files: Sequence[SegmentFile], failed: Callable[[], None], done: Done) -> None:
        lent = [file for file in files if isinstance(file, MappedSegment)]
        if len(lent) < len(files):
            raise TypeError("files of another disk cannot be synced here")
        self._thread.begin([file.lend() for file in lent], failed)
        self._lent, self._done = lent, done

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._done = None
        if not self._loop.is_closed():
            self._loop.remove_reader(self._thread.bell)
        self._thread.close()

    def _hear(self) -> None:
        error_number = self._thread.end()
        if error_number is None:
            return
        for file in self._lent:
            file.give_back()
        done, self._done, self._lent = self._done, None, ()
        if done is not None:
            done(OSError(error_number, os.strerror(error_number)) if error_number else None)


def new_syncer() -> Syncer:
    return LoopSyncer(_new_sync_thread())


def _new_sync_thread() -> SyncThread:
    from cosmodrome.speed.choice import compiled  # here, because clients sync nothing

    # With one core, a thread that needs no turn only gets in the loop's way: measured, the one
    # that waits for the GIL is faster there, and slower everywhere else.
    if _cores() > 1 and compiled("cosmodrome.speed.syncer") is not None:
        from cosmodrome.speed.syncer import SyncThread as CompiledSyncThread

        return CompiledSyncThread()
    return PythonSyncThread()


def _create_file(path: str, size: int) -> int:
    """The descriptor of a new file, which gets its name when it has its size.

    A process that is killed while it makes one leaves nothing: upstream's broker does not start
    beside a file of another size.
    """
    try:
        fd = os.open(os.path.dirname(path) or ".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except (OSError, AttributeError):  # not every file system and not every system has these
        return _create_named_file(path, size)
    try:
        os.ftruncate(fd, size)
        # The directory is not used; without one the link itself would be linked, not its file.
        os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)
    except FileNotFoundError:  # there is no /proc
        os.close(fd)
        return _create_named_file(path, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create_named_file(path: str, size: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def _cores() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def real_env(seed: int | None = None) -> Env:
    return Env(
        clock=WallClock(),
        disk=RealDisk(),
        random=random.Random(seed),
        offload=ThreadOffload(),
        syncer=new_syncer,
        memory_bytes=_memory_bytes(),
    )


def _memory_bytes() -> int:
    try:
        of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return MEMORY_BYTES_ASSUMED
    for path in CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            return min(of_machine, int(file.read()))  # "max" is no number: no limit
    return of_machine


def _mode_of(path: str) -> int:
    """Who may read it: a file with secrets stays closed when it is replaced."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        return 0o644


def _write_synced(path: str, data: bytes, mode: int = 0o644) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
