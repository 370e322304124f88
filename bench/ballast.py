"""Memory as a machine has it that has run for a while: full of files.

A virtual machine may give memory that is free back to its host. Touching a page of it for the
first time then costs many times what the page itself does, and whoever happens to append to a
file pays for it. Where a broker has run for an hour there is no such memory: every page of its
log held something else before. So memory is filled before each sample with pages of an empty
file, which cost nothing to drop; every server that is measured finds the same.
"""

from __future__ import annotations

import os
from pathlib import Path

STEP_BYTES = 256 * 1024 * 1024
STEADY_BYTES = STEP_BYTES // 4  # free memory that falls by less than that per step is steady
STEPS_MAX = 1024

_BUFFER_BYTES = 4 * 1024 * 1024


class Ballast:
    """A file of zeros without blocks, read on and on; what was read last is in memory."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "ballast"
        self._position = 0
        self._buffer = bytearray(_BUFFER_BYTES)

    def top_up(self) -> int:
        """Read until memory is full; how many bytes that took."""
        began = self._position
        with self._path.open("a+b", buffering=0) as file:
            steady = 0
            for _ in range(STEPS_MAX):
                before = free_bytes()
                os.ftruncate(file.fileno(), self._position + STEP_BYTES)
                file.seek(self._position)
                while file.tell() < self._position + STEP_BYTES:
                    file.readinto(self._buffer)
                self._position += STEP_BYTES
                steady = steady + 1 if before - free_bytes() < STEADY_BYTES else 0
                if steady == 2:
                    break
        return self._position - began


def free_bytes() -> int:
    """Memory that nothing is in, not even a file."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemFree:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not tell MemFree")
