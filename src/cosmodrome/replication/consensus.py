"""What a broker group asks of a consensus engine: few calls, so that a simulated one is small.

The engine is a map from keys to bytes with one revision for all of it. Each transaction that
changes something raises the revision by one, and a key carries the revision that changed it last.
Leases end by themselves unless they are kept, and take their keys with them. `etcd.EtcdConsensus`
is the real engine, `sim.consensus.SimConsensus` the simulated one; both pass one suite.

A key that ends with `/` names everything below it, wherever keys are read or watched.

Reads and transactions are linearizable. Leases are not locks: a holder may be paused, and an engine
may end a lease without reason. Whatever must be safe compares a revision or an epoch.

Errors are `ConsensusError`s. `ResultUnknown` comes from `commit` only: the caller has to read
again. All other calls may be repeated when they fail, because a lease that nobody heard of ends by
itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    id: int
    ttl_s: int  # what the engine granted: etcd raises what is below its minimum


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    key: str
    value: bytes
    revision: int  # of the transaction that changed it last
    lease: int = 0  # id; 0: it stays until somebody deletes it


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """All that was asked for, as it was at one revision of the engine."""

    revision: int
    entries: tuple[Entry, ...]  # in the order of their keys

    def entry(self, key: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.key == key), None)


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """What one or more transactions changed, the last of them with `revision`."""

    revision: int
    entries: tuple[Entry, ...]  # as they are after it
    deleted: tuple[str, ...]  # keys that are gone after it


@dataclasses.dataclass(frozen=True, slots=True)
class Compare:
    """A key was last changed by this revision; 0: there is no such key."""

    key: str
    revision: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    succeeded: bool  # every compare held, and every change was made
    revision: int  # of the engine afterwards; of what was put, when something was


class Consensus(Protocol):
    async def grant(self, ttl_s: int) -> Lease:
        """A new lease."""

    async def keep(self, lease: int) -> int:
        """Begin the time of a lease again; how many seconds it has. `LeaseGone` when it ended.

        They count from before the call: the engine may have begun long before the answer came.
        """

    async def revoke(self, lease: int) -> None:
        """End a lease and delete its keys. Nothing happens when it has ended already."""

    async def get(self, key: str) -> Reading:
        """One key, or everything below one that ends with `/`."""

    async def commit(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> Outcome:
        """Make all changes if all compares hold, else none. A key may be changed once.

        `LeaseGone` when a lease of a put has ended; `ResultUnknown` when the answer was lost.
        """

    def watch(self, key: str, revision: int) -> AsyncGenerator[Reading | Changes, None]:
        """What changes from `revision` on, for as long as the caller listens.

        A `Reading` in between replaces all that was known: the engine no longer has the changes
        since then, or it was emptied or replaced and its revision is a lower one. While nobody
        answers, nothing comes; calls fail meanwhile and say why. It ends with `ConsensusRefused`
        only. Close it (`contextlib.aclosing`) when it is not needed any more.
        """

    async def close(self) -> None:
        """Close connections. Leases go on until they end: revoke them first."""
