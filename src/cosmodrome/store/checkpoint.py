"""The checkpoint file: up to which store times log, queues and index are known to be synced.

It may say less than the truth, never more: an abnormal start trusts it to decide where the
walk through the log begins and which derived data can be kept.
"""

from __future__ import annotations

import dataclasses

from cosmodrome.env.base import Disk
from cosmodrome.layout import CHECKPOINT, CHECKPOINT_BYTES

# Compat: upstream steps back this far from the smallest time; records may share a time.
MARGIN_MS = 3000


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    log_ms: int = 0
    queue_ms: int = 0
    index_ms: int = 0

    @property
    def safe_ms(self) -> int:
        """Records stored before this time are synced and have synced queue entries."""
        return max(0, min(self.log_ms, self.queue_ms) - MARGIN_MS)


def load_checkpoint(disk: Disk, path: str) -> Checkpoint:
    """What the file says; zeros, which claim nothing, when it is missing or too short."""
    if not disk.exists(path):
        return Checkpoint()
    data = disk.read(path)
    if len(data) < CHECKPOINT.size:
        return Checkpoint()
    log_ms, queue_ms, index_ms = (max(0, value) for value in CHECKPOINT.unpack_from(data))
    return Checkpoint(log_ms, queue_ms, index_ms)


def save_checkpoint(disk: Disk, path: str, checkpoint: Checkpoint) -> None:
    """Rewrite in place and sync. Blocking."""
    if disk.exists(path) and disk.size(path) < CHECKPOINT_BYTES:
        disk.remove(path)
    file = (
        disk.open_segment(path)
        if disk.exists(path)
        else disk.create_segment(path, CHECKPOINT_BYTES)
    )
    try:
        # 24 bytes at the start of one sector: written whole or not at all.
        file.write(CHECKPOINT.pack(checkpoint.log_ms, checkpoint.queue_ms, checkpoint.index_ms), 0)
        file.sync()
    finally:
        file.close()
