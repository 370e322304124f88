"""Move what a store holds out of the way, so that a slave makes a new copy of its master.

Everything is renamed within its file system: nothing is copied, nothing deleted. Tables go before
the log. If this is killed in between, a broker finds a log without tables, which a master refuses
as before, and never tables that speak of a log that is not there.
"""

from __future__ import annotations

import dataclasses
import os
import time

from cosmodrome.errors import StoreError

# What a broker makes, or RocketMQ's; other files of the directory are not the store's.
_DATA = (
    "abort",
    "checkpoint",
    "storeInventory.json",
    "index",
    "consumequeue",
    "consumequeue_ext",
    "timercheck",
    "timerlog",
    "timerwheel",
)
# What belongs to this machine or to its operator. Copies of these (`.bak`) stay too.
_STAYS = ("acl", "brokerOverrides.properties", "kvConfig.json", "plain_acl.yml")


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    source: str
    target: str


def planned(root: str, log_directory: str, now_ms: int) -> list[Move]:
    """What goes where, in this order; StoreError when the target is there already."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_ms // 1000))
    aside = os.path.join(root, f"aside-{stamp}")
    config = os.path.join(root, "config")
    names = [os.path.join("config", name) for name in _listed(config) if not _stays(name)]
    names += [name for name in _DATA if os.path.lexists(os.path.join(root, name))]
    moves = [Move(os.path.join(root, name), os.path.join(aside, name)) for name in names]
    inside = os.path.dirname(log_directory) == root
    log_target = os.path.join(aside, "commitlog") if inside else f"{log_directory}.aside-{stamp}"
    moves.append(Move(log_directory, log_target))
    for taken in (aside, log_target):
        if os.path.lexists(taken):
            raise StoreError(f"{taken} is there already; wait a second and run it again")
    for move in moves:
        if os.path.islink(move.source):
            raise StoreError(
                f"{move.source} is a symbolic link, and its name alone would be moved; move what it"
                " points to yourself, with everything else of the store"
            )
    return moves


def carry_out(moves: list[Move]) -> None:
    """Under the lock of the store; each directory is synced before the log, the last, goes."""
    *tables, log = moves
    for move in tables:
        os.makedirs(os.path.dirname(move.target), exist_ok=True)
        os.rename(move.source, move.target)
    _sync(tables)
    os.makedirs(os.path.dirname(log.target), exist_ok=True)
    os.rename(log.source, log.target)
    _sync([log])


def _listed(directory: str) -> list[str]:
    return sorted(os.listdir(directory)) if os.path.isdir(directory) else []


def _stays(name: str) -> bool:
    return any(name == kept or name.startswith(f"{kept}.") for kept in _STAYS)


def _sync(moves: list[Move]) -> None:
    paths = {os.path.dirname(path) for move in moves for path in (move.source, move.target)}
    for path in sorted(paths):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
