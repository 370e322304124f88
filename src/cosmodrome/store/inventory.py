"""What a clean stop leaves behind: the extent of every queue and index file.

A clean start trusts queues and index instead of walking the log, so it must be able to tell
that some of their files were lost meanwhile. The list is compared with what is found: more
than it says is fine (another broker may have worked on the store since), less is loss.
"""

from __future__ import annotations

import logging
import os.path

import msgspec

from cosmodrome.env.base import Disk
from cosmodrome.store.index import Index
from cosmodrome.store.queue import Queues

_log = logging.getLogger(__name__)


class Inventory(msgspec.Struct, rename="camel"):
    log_min: int
    log_end: int
    queues: dict[str, dict[str, tuple[int, int]]]  # topic -> queue id -> first position, end
    index: dict[str, tuple[int, int]]  # file -> entries, log offset of the last one

    def lost_queue(self, queues: Queues, log_min: int) -> str | None:
        """A queue that has less than it had; None when all are whole."""
        for topic, ends in self.queues.items():
            for name, (first, end) in ends.items():
                queue = queues.get(topic, int(name))
                if queue is None or queue.max_offset < end:
                    return f"{topic}/{name}"
                if log_min == self.log_min and queue.first > first:
                    return f"{topic}/{name}"
        return None

    def lost_index(self, index: Index, log_min: int) -> str | None:
        """An index file that is gone or shorter, although the log still has its records."""
        found = index.extents()
        for name, (count, last_offset) in self.index.items():
            if last_offset >= log_min and found.get(name, (0, 0))[0] < count:
                return name
        return None


def take_inventory(log_min: int, log_end: int, queues: Queues, index: Index | None) -> Inventory:
    table: dict[str, dict[str, tuple[int, int]]] = {}
    for queue in queues:
        table.setdefault(queue.topic, {})[str(queue.queue_id)] = (queue.first, queue.max_offset)
    return Inventory(log_min, log_end, table, {} if index is None else index.extents())


def load_inventory(disk: Disk, root: str) -> Inventory | None:
    path = _path(root)
    if not disk.exists(path):
        return None
    try:
        return msgspec.json.decode(disk.read(path), type=Inventory)
    except (msgspec.DecodeError, OSError) as error:
        _log.warning("inventory_unreadable path=%s error=%s", path, error)
        return None


def save_inventory(disk: Disk, root: str, inventory: Inventory) -> None:
    """Without it the next start only looks at more of the log, so a full disk is no reason."""
    try:
        disk.replace(_path(root), msgspec.json.encode(inventory), keep=False)
    except OSError as error:
        _log.warning("inventory_not_saved path=%s error=%s", _path(root), error)


def _path(root: str) -> str:
    return os.path.join(root, "storeInventory.json")
