"""File systems that can be cut off, filled and mounted again. They need root and a free hand."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

SHUTDOWN = 0x8004587D  # the ext4 and xfs request to stop at once
WITHOUT_LOG_FLUSH = 2  # as a power cut does: not even the journal is written


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def need(*tools: str) -> None:
    """Skip where mounting is not possible."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount file systems")
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")


@contextlib.contextmanager
def mounted(path: Path, *words: str) -> Iterator[Path]:
    """`mount WORDS PATH`, undone whatever happens."""
    path.mkdir(exist_ok=True)
    try:
        run("mount", *words, str(path))
    except RuntimeError as error:
        pytest.skip(f"cannot mount here: {error}")
    try:
        yield path
    finally:
        unmount(path)


def unmount(path: Path) -> None:
    """Busy is not final: the last files of a process that was killed close a little later. A file
    system that is only detached would be found again, without power, by the next mount."""
    for _ in range(100):
        try:
            run("umount", str(path))
            return
        except RuntimeError as error:
            busy = error
            time.sleep(0.1)
    run("umount", "--lazy", str(path))
    raise busy


def make_ext4(image: Path, size_mib: int) -> None:
    need("mkfs.ext4", "mount", "umount")
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    run("mkfs.ext4", "-q", "-F", str(image))


def cut_power(mount: Path) -> None:
    """From now on nothing reaches the image; what was not synced is gone."""
    directory = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(directory, SHUTDOWN, struct.pack("I", WITHOUT_LOG_FLUSH))
    finally:
        os.close(directory)
