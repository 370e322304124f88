"""The audit topic of redrives: every step of every run, and the truth about what was done.

All entries lie in queue 0 of one broker, so they have one order. An *intent* names messages before
they are sent, with the ids they will have; a *done* says what became of them. Whoever works on a
run says so first (`begin`, `resume`): an intent counts only when its writer was the last to do so.
So of two commands that work on one run, the older one finds out before it sends anything more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import msgspec

from cosmodrome.client.operate.fleet import Fleet
from cosmodrome.client.operate.reading import page, span
from cosmodrome.client.operate.redriving.plan import Plan
from cosmodrome.client.operate.topics import Topics
from cosmodrome.client.values import DamagedBody, MessageQueue, NoRoute
from cosmodrome.env.base import Clock
from cosmodrome.errors import CosmodromeError, Unreachable
from cosmodrome.wire.commands.produce import SendMessageV2
from cosmodrome.wire.message import KEYS, TAGS, format_properties
from cosmodrome.wire.names import AUTO_CREATE_TOPIC

AUDIT_TOPIC = "COSMO_REDRIVE_AUDIT"
PRODUCER = "cosmo_redrive"
ROUTE_POLLS_MAX = 100
ROUTE_POLL_S = 0.05

SENT, FOUND, UNCERTAIN = "sent", "found", "uncertain"
REFUSED, NO_TARGET = "refused", "no_target"
NOT_SENT, UNKNOWN = "not_sent", "unknown"  # of what was under way when a run was cancelled
ARRIVED = frozenset({SENT, FOUND, UNCERTAIN})
OPEN, FINISHED, CANCELLED = "open", "finished", "cancelled"


class Item(msgspec.Struct, frozen=True):
    """One message that is about to be sent."""

    offset: int  # in the source
    msg_id: str
    topic: str
    broker: str
    queue: int
    new_id: str
    look_from: int  # nothing of this run lies below this offset of the target queue


class Outcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of one message; `place` is where it is now."""

    offset: int
    msg_id: str
    outcome: str
    topic: str | None = None
    new_id: str | None = None
    place: str | None = None
    why: str | None = None


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: str  # begin, resume, intent, done, end
    run: str
    owner: str = ""
    plan: Plan | None = None
    broker: str = ""  # of the source
    queue: int = 0
    begin: int = 0
    end: int = 0
    items: tuple[Item, ...] = ()
    outcomes: tuple[Outcome, ...] = ()
    skipped: int = 0
    state: str = ""


class Written(NamedTuple):
    offset: int
    store_ms: int
    entry: Entry


class Position(NamedTuple):
    """Where a message is in the source."""

    broker: str
    queue: int
    offset: int


class Run:
    """What the audit says about one run."""

    def __init__(self, plan: Plan, begun_ms: int) -> None:
        self.plan = plan
        self.begun_ms = self.last_ms = begun_ms
        self.owner = ""
        self.owned_ms = begun_ms
        self.state = OPEN
        self.skipped = 0
        self.position: dict[tuple[str, int], int] = {}
        self.pending: dict[tuple[str, int, int], Written] = {}
        self.results: dict[Position, Outcome] = {}
        self._senders: dict[Position, str] = {}

    @property
    def counts(self) -> Counter[str]:
        return Counter(outcome.outcome for outcome in self.results.values())

    @property
    def unanswered(self) -> int:
        """Messages that are being sent, or were when their sender ended."""
        return sum(len(written.entry.items) for written in self.pending.values())

    def take(self, written: Written) -> None:
        entry = written.entry
        self.last_ms = max(self.last_ms, written.store_ms)
        part = (entry.broker, entry.queue)
        if entry.kind in ("begin", "resume"):
            self.owner, self.owned_ms = entry.owner, written.store_ms
        elif entry.kind == "intent":
            if entry.owner == self.owner and self.state == OPEN:
                self.pending[(*part, entry.begin)] = written
        elif entry.kind == "done":
            self.pending.pop((*part, entry.begin), None)
            self.position[part] = max(entry.end, self.position.get(part, 0))
            self.skipped += entry.skipped
            for outcome in entry.outcomes:
                self._conclude(Position(*part, outcome.offset), outcome, entry.owner)
        elif entry.kind == "end" and entry.owner == self.owner:
            self.state = entry.state
            self.skipped += entry.skipped

    def _conclude(self, position: Position, outcome: Outcome, owner: str) -> None:
        known = self.results.get(position)
        if known is None or known.outcome not in ARRIVED:
            self.results[position] = outcome
            self._senders[position] = owner
        elif known.outcome == outcome.outcome == SENT and self._senders[position] != owner:
            self.results[position] = msgspec.structs.replace(
                outcome, outcome=UNCERTAIN, why="two commands sent it"
            )


class Runs:
    """All runs, folded from the entries in their order."""

    def __init__(self) -> None:
        self.by_id: dict[str, Run] = {}

    def take(self, written: Written) -> None:
        entry = written.entry
        if entry.kind == "begin" and entry.plan is not None and entry.run not in self.by_id:
            self.by_id[entry.run] = Run(entry.plan, written.store_ms)
        run = self.by_id.get(entry.run)
        if run is not None:
            run.take(written)

    def open_on(self, source: str) -> Iterator[Run]:
        for run in self.by_id.values():
            if run.state == OPEN and run.plan.source == source:
                yield run

    def redriven(self, source: str) -> set[Position]:
        """Messages of a topic that arrived somewhere by a run."""
        return {
            position
            for run in self.by_id.values()
            if run.plan.source == source
            for position, outcome in run.results.items()
            if outcome.outcome in ARRIVED
        }


class Audit:
    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._topic = fleet.full(AUDIT_TOPIC)
        self._queue: MessageQueue | None = None
        self._address = ""

    async def open(self, *, create: bool) -> bool:
        """Find the topic, or make it; false when it is not there."""
        masters = await self._masters()
        if masters is None and create:
            await Topics(self._fleet).create(AUDIT_TOPIC, queues=1)
            for _ in range(ROUTE_POLLS_MAX):
                masters = await self._masters()
                if masters is not None:
                    break
                await asyncio.sleep(ROUTE_POLL_S)
            else:
                raise Unreachable(f"topic {AUDIT_TOPIC} was made, and no name server shows it")
        if masters is None:
            return False
        # The same broker for everybody.
        name = min(masters)
        self._queue = MessageQueue(topic=self._topic, broker_name=name, queue_id=0)
        self._address = masters[name]
        return True

    async def append(self, entry: Entry) -> Written:
        """Returns when it is stored; on an error it may be."""
        queue = self._here()
        now_ms = self._clock.now_ms()
        reply = await self._fleet.call(
            self._address,
            SendMessageV2(
                producer_group=PRODUCER,
                topic=queue.topic,
                default_topic=AUTO_CREATE_TOPIC,
                default_topic_queue_nums=1,
                queue_id=queue.queue_id,
                sys_flag=0,
                born_timestamp=now_ms,
                flag=0,
                properties=format_properties({KEYS: entry.run, TAGS: entry.kind}),
                body=msgspec.json.encode(entry),
            ),
        )
        return Written(reply.queue_offset, now_ms, entry)

    async def read(self, begin: int = 0, through: int | None = None) -> AsyncIterator[Written]:
        """From an offset to the end, or to an entry that is known to be there."""
        queue = self._here()
        # Entries that were read before are not the oldest any more when they expire.
        at = begin or (await span(self._fleet, queue, self._address)).begin
        while through is None or at <= through:
            found = await page(self._fleet, queue, self._address, at)
            for message in found.messages:
                try:
                    entry = msgspec.json.decode(message.body, type=Entry)
                except (msgspec.MsgspecError, DamagedBody):
                    continue  # somebody else's message
                yield Written(message.queue_offset, message.store_ms, entry)
            if found.next_offset <= at:
                return
            at = found.next_offset

    def _here(self) -> MessageQueue:
        if self._queue is None:
            raise CosmodromeError("the audit is not open")
        return self._queue

    async def _masters(self) -> dict[str, str] | None:
        try:
            return await self._fleet.masters_of(self._topic) or None
        except NoRoute:
            return None
