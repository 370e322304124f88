"""A consensus engine in memory, in virtual time, with the faults of real ones; same seed, same run.

`SimConsensus` is the engine: one map, one revision, leases that end by timers of the loop. It runs
beside the simulated machines and belongs to none, so a machine that is paused does not stop it.
`client(node)` is what a machine has of it, and implements `replication.consensus.Consensus`.

Faults are rates (`Faults`), nodes that are `cut_off`, and events: `fail`, `change_leader`,
`end_lease`, `compact`, `empty`. `strike` chooses an event with the engine's own seed. A transaction
whose answer is lost was applied, or was not, or will be when its caller has read again already.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from cosmodrome.errors import ConsensusRefused, ConsensusUnavailable, LeaseGone, ResultUnknown
from cosmodrome.replication.consensus import (
    Changes,
    Compare,
    Delete,
    Entry,
    Lease,
    Outcome,
    Put,
    Reading,
)

HISTORY_MAX = 1000  # transactions; older ones are compacted
TTL_MIN_S = 2  # as etcd with its default timing
ATTEMPT_S = 1.0  # how long a client waits for an engine that does not answer
LATE_S = 3.0  # how much later a transaction may be applied whose answer was lost
OUTAGE_S = 8.0  # the longest that `strike` chooses
EVENTS = ("leader", "lease", "outage", "compact")  # what every user of an engine has to survive

T = TypeVar("T")


@dataclasses.dataclass(slots=True)
class Faults:
    lost_answers: float = 0.0  # the part of all calls that nobody hears the end of
    delay_s: float = 0.002  # the longest way, in each direction


@dataclasses.dataclass(slots=True)
class _Held:
    ttl_s: int
    timer: asyncio.TimerHandle


class SimConsensus:
    def __init__(self, seed: int | str) -> None:
        self.faults = Faults()
        self.cut_off: set[str] = set()  # nodes that do not reach it
        self.revision = 1
        self._chance = random.Random(seed)
        self._loop = asyncio.get_running_loop()
        self._outside = contextvars.Context()  # of no node
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Held] = {}
        self._last_lease = 0
        self._history: list[Changes] = []
        self._compacted = 0  # the highest revision whose changes are gone
        self._down = False
        self._waiting: list[asyncio.Future[None]] = []

    def client(self, node: str = "") -> SimClient:
        return SimClient(self, node)

    # --- events ----------------------------------------------------------------------------------

    def fail(self) -> None:
        """It has no majority any more: it serves nothing, and no lease expires."""
        self._down = True

    def recover(self) -> None:
        """It has a leader again, a new one."""
        self._down = False
        self.change_leader()

    def change_leader(self) -> None:
        """The engine has another leader, which begins the time of every lease again."""
        for lease in list(self._leases):
            self.keep(lease)

    def end_lease(self, lease: int) -> None:
        """It expires, rightly or not."""
        held = self._leases.pop(lease, None)
        if held is not None:
            held.timer.cancel()
            keys = [entry.key for entry in self._entries.values() if entry.lease == lease]
            self._apply([Delete(key) for key in keys])

    def compact(self) -> None:
        """Forget how things became as they are."""
        self._compacted = self.revision
        self._history.clear()
        self.wake()

    def empty(self) -> None:
        """Another engine, without data, is where this one was."""
        for held in self._leases.values():
            held.timer.cancel()
        self._leases.clear()
        self._entries.clear()
        self._history.clear()
        self.revision, self._compacted = 1, 0
        self.wake()

    def strike(self, events: Sequence[str] = EVENTS) -> str:
        """One event that the seed chooses; what it was, for a trace."""
        event = self._chance.choice(events)
        if event == "leader":
            self.change_leader()
        elif event == "lease" and self._leases:
            self.end_lease(self._chance.choice(sorted(self._leases)))
        elif event == "outage":
            self.fail()
            self._later(self._chance.uniform(0, OUTAGE_S), self.recover)
        elif event == "compact":
            self.compact()
        elif event == "empty":
            self.empty()
        return event

    # --- calls, at the moment when the engine serves them ----------------------------------------

    def grant(self, ttl_s: int) -> Lease:
        ttl_s = max(TTL_MIN_S, ttl_s)
        self._last_lease += 1
        lease = self._last_lease
        self._leases[lease] = _Held(ttl_s, self._expire_later(lease, ttl_s))
        return Lease(lease, ttl_s)

    def keep(self, lease: int) -> int:
        held = self._leases.get(lease)
        if held is None:
            raise LeaseGone("the lease has ended")
        held.timer.cancel()
        held.timer = self._expire_later(lease, held.ttl_s)
        return held.ttl_s

    def get(self, key: str) -> Reading:
        found = (self._entries[name] for name in sorted(self._entries) if _covers(key, name))
        return Reading(self.revision, tuple(found))

    def commit(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> Outcome:
        if len({change.key for change in changes}) < len(changes):
            raise ConsensusRefused("a transaction changes a key twice")
        holds = all(self._revision_of(compare.key) == compare.revision for compare in compares)
        if holds:
            for change in changes:
                if isinstance(change, Put) and change.lease and change.lease not in self._leases:
                    raise LeaseGone("the lease has ended")
            self._apply(changes)
        return Outcome(holds, self.revision)

    def _revision_of(self, key: str) -> int:
        return self._entries[key].revision if key in self._entries else 0

    def _apply(self, changes: Sequence[Put | Delete]) -> None:
        changes = [c for c in changes if isinstance(c, Put) or c.key in self._entries]
        if not changes:
            return  # as etcd: what changes nothing has no revision
        self.revision += 1
        put = [
            Entry(change.key, change.value, self.revision, change.lease)
            for change in changes
            if isinstance(change, Put)
        ]
        gone = [change.key for change in changes if isinstance(change, Delete)]
        self._entries.update((entry.key, entry) for entry in put)
        for key in gone:
            del self._entries[key]
        self._history.append(Changes(self.revision, tuple(put), tuple(gone)))
        if len(self._history) > HISTORY_MAX:
            self._compacted = self._history.pop(0).revision
        self.wake()

    # --- for clients -----------------------------------------------------------------------------

    async def call(self, node: str, work: Callable[[], T], lost: type[Exception]) -> T:
        """Serve one call, or do not; `lost` is how its caller hears of a lost answer."""
        await asyncio.sleep(self.delay_s())
        if self.is_away(node):
            await asyncio.sleep(ATTEMPT_S)
            raise ConsensusUnavailable("the engine does not answer")
        if self._chance.random() < self.faults.lost_answers:
            when = self._chance.choice((0.0, None, self._chance.uniform(0, LATE_S)))
            if when is not None:
                self._later(when, lambda: self._unheard(work))
            await asyncio.sleep(ATTEMPT_S)
            raise lost("the answer was lost")
        result = work()
        await asyncio.sleep(self.delay_s())
        if self.is_away(node):
            await asyncio.sleep(ATTEMPT_S)
            raise lost("the answer was lost")
        return result

    def is_away(self, node: str) -> bool:
        return self._down or node in self.cut_off

    def delay_s(self) -> float:
        return self._chance.uniform(0, self.faults.delay_s)

    def since(self, revision: int) -> list[Changes] | None:
        """Changes from a revision on; None when it has no longer, or never had, all of them."""
        if revision <= self._compacted or revision > self.revision + 1:
            return None
        return [changes for changes in self._history if changes.revision >= revision]

    async def next_change(self) -> None:
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._waiting:  # it was cancelled
                self._waiting.remove(waiter)

    def _unheard(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (LeaseGone, ConsensusRefused):
            pass  # nobody is there to be told

    def _expire_later(self, lease: int, ttl_s: int) -> asyncio.TimerHandle:
        return self._later(ttl_s, lambda: None if self._down else self.end_lease(lease))

    def _later(self, seconds: float, work: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(seconds, work, context=self._outside)

    def wake(self) -> None:
        """Everybody who watches looks again."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


class SimClient:
    """Implements `replication.consensus.Consensus` for one node."""

    def __init__(self, engine: SimConsensus, node: str) -> None:
        self._engine = engine
        self._node = node
        self._closed = False

    async def grant(self, ttl_s: int) -> Lease:
        return await self._call(lambda: self._engine.grant(ttl_s))

    async def keep(self, lease: int) -> int:
        return await self._call(lambda: self._engine.keep(lease))

    async def revoke(self, lease: int) -> None:
        await self._call(lambda: self._engine.end_lease(lease))

    async def get(self, key: str) -> Reading:
        return await self._call(lambda: self._engine.get(key))

    async def commit(self, compares: Sequence[Compare], changes: Sequence[Put | Delete]) -> Outcome:
        return await self._call(lambda: self._engine.commit(compares, changes), ResultUnknown)

    async def watch(self, key: str, revision: int) -> AsyncGenerator[Reading | Changes, None]:
        engine = self._engine
        while True:
            await asyncio.sleep(engine.delay_s())
            while engine.is_away(self._node):
                self._check_open()
                await asyncio.sleep(ATTEMPT_S)
            self._check_open()
            found = engine.since(revision)
            if found is None:
                reading = engine.get(key)
                revision = reading.revision + 1
                yield reading
                continue
            if not found:
                await engine.next_change()
            for changes in found:
                revision = changes.revision + 1
                seen = _below(key, changes)
                if seen.entries or seen.deleted:
                    yield seen

    async def close(self) -> None:
        self._closed = True
        self._engine.wake()

    async def _call(self, work: Callable[[], T], lost: type[Exception] = ConsensusUnavailable) -> T:
        self._check_open()
        return await self._engine.call(self._node, work, lost)

    def _check_open(self) -> None:
        if self._closed:
            raise ConsensusUnavailable("this client was closed")


def _covers(key: str, name: str) -> bool:
    return name.startswith(key) if key.endswith("/") else name == key


def _below(key: str, changes: Changes) -> Changes:
    return Changes(
        changes.revision,
        tuple(entry for entry in changes.entries if _covers(key, entry.key)),
        tuple(name for name in changes.deleted if _covers(key, name)),
    )
