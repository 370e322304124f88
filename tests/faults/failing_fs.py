"""A file system that hands everything through, but fails to sync while a mark exists.

    python failing_fs.py ROOT MOUNT          syncing fails while ROOT.failing exists

Needs the PyPI package mfusepy and Debian's fuse3. Runs in a process of its own.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import mfusepy


class FailingSync(mfusepy.Operations):  # type: ignore[misc]
    use_ns = True

    def __init__(self, root: str) -> None:
        self._root = root

    def _real(self, path: str) -> str:
        return self._root + path

    def _sync(self) -> None:
        if os.path.exists(self._root + ".failing"):
            raise mfusepy.FuseOSError(errno.EIO)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._real(path))
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_blocks")
        return {name: getattr(found, name) for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._real(path))]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._real(path))
        names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_namemax")
        return {name: getattr(found, name) for name in names}

    def open(self, path: str, flags: int) -> int:
        return os.open(self._real(path), flags)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        return os.open(self._real(path), os.O_RDWR | os.O_CREAT, mode)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._real(path), length)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        self._sync()
        os.fsync(fh)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> None:
        self._sync()

    def flush(self, path: str, fh: int) -> None:
        """Nothing: the handle's data is with the real file already."""

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def unlink(self, path: str) -> None:
        os.unlink(self._real(path))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._real(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._real(path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._real(old), self._real(new))


if __name__ == "__main__":
    mfusepy.FUSE(FailingSync(sys.argv[1]), sys.argv[2], foreground=True, nothreads=True)
