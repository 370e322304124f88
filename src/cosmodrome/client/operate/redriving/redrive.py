"""Redrive: messages of a dead letter topic, or of any other, sent once more.

    redrive = Redrive(admin.fleet, env)
    plan = await redrive.planned("%DLQ%billing")
    run = await redrive.start(plan)
    run = await redrive.resume(run.plan.run)  # after whatever happened

A redriven message has an id that follows from the run and its place in the source. An intent with
these ids is in the audit before anything is sent; where no result followed, a resumed run looks
for them in the target before it sends again. The messages stay in the source, as nothing is ever
deleted there: what one run has redriven, a later one leaves out. Progress is also committed as the
offsets of the group `redrive-RUN`, for other tools to see.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable

from cosmodrome.client.operate.fleet import Fleet, NoBrokers, NotThere
from cosmodrome.client.operate.reading import Span, page, spans
from cosmodrome.client.operate.redriving.audit import (
    CANCELLED,
    FINISHED,
    NOT_SENT,
    OPEN,
    REFUSED,
    SENT,
    UNCERTAIN,
    UNKNOWN,
    Audit,
    Entry,
    Item,
    Outcome,
    Position,
    Run,
    Runs,
)
from cosmodrome.client.operate.redriving.plan import Filter, Part, Plan, check_run_id
from cosmodrome.client.operate.redriving.sends import Sends
from cosmodrome.client.values import MessageQueue, NoRoute, ReceivedMessage
from cosmodrome.env.base import Env
from cosmodrome.errors import Code, ConfigError, CosmodromeError, Refused, TimedOut, Unreachable
from cosmodrome.wire.commands.offset import UpdateConsumerOffset

BATCH_COUNT = 32
# A batch is given up this long after its intent was written, and what was not answered by then is
# left to a look into the target. Whoever takes over waits longer than that.
BATCH_S = 3.0
ARRIVE_MS = 5_000
GIVE_UP_AFTER_S = 60.0
RETRY_S = 1.0
OWNER_BITS = 64
# Answers of a broker that cannot at the moment.
PASSING = frozenset({Code.SYSTEM_BUSY, Code.SERVICE_NOT_AVAILABLE, Code.FLOW_CONTROL})

Report = Callable[[Outcome], None]


class Interrupted(CosmodromeError):
    """A run stopped before its end; the audit knows how far it came."""


class TakenOver(CosmodromeError):
    """Another command has resumed or cancelled the run that this one was working on."""


class Busy(ConfigError):
    """There is an open run for the same source."""


class Redrive:
    def __init__(self, fleet: Fleet, env: Env, *, give_up_after_s: float = GIVE_UP_AFTER_S) -> None:
        self._fleet = fleet
        self._env = env
        self._give_up_after_s = give_up_after_s
        self._audit = Audit(fleet, env.clock)
        self._owner = f"{env.random.getrandbits(OWNER_BITS):016x}"

    # --- planning --------------------------------------------------------------------------------

    async def planned(
        self,
        source: str,
        *,
        target: str | None = None,
        group: str | None = None,
        filter: Filter | None = None,
        rate: float | None = None,
        most: int | None = None,
        again: bool = False,
    ) -> Plan:
        """A plan over all that the source holds now. Nothing is written."""
        source = self._fleet.full(source)
        parts = [
            Part(part.queue.broker_name, part.queue.queue_id, part.begin, part.end)
            for part in await spans(self._fleet, source)
            if part.length
        ]
        now_s = self._env.clock.now_ms() / 1000
        moment = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
        plan = Plan(
            run=f"{moment:%Y%m%d-%H%M%S}-{self._env.random.getrandbits(24):06x}",
            source=source,
            parts=tuple(parts),
            target=None if target is None else self._fleet.full(target),
            group=None if group is None else self._fleet.full(group),
            filter=filter or Filter(),
            rate=rate,
            most=most,
            again=again,
        )
        plan.check()
        return plan

    async def runs(self) -> list[Run]:
        """Every run that the audit knows, oldest first."""
        if not await self._audit.open(create=False):
            await self._fleet.masters()  # or there is nobody who could know
            return []
        return list((await self._all()).by_id.values())

    async def run(self, run_id: str) -> Run:
        check_run_id(run_id)
        for run in await self.runs():
            if run.plan.run == run_id:
                return run
        raise NotThere(f"there is no run {run_id}; `cosmo dlq redrive list` shows them")

    async def preview(self, plan: Plan, most: int) -> list[tuple[Position, Outcome]]:
        """What a run of this plan would do to its first messages."""
        taken: set[Position] = set()
        if not plan.again and await self._audit.open(create=False):
            taken = (await self._all()).redriven(plan.source)
        work = _Work(self._fleet, self._env, self._audit, Run(plan, 0), taken, self._owner)
        return await work.preview(min(most, plan.most or most))

    # --- doing -----------------------------------------------------------------------------------

    async def start(self, plan: Plan, report: Report | None = None) -> Run:
        """Begin a run and work until it is finished."""
        await self._audit.open(create=True)
        self._refuse_second(await self._all(), plan)
        begun = await self._audit.append(Entry("begin", plan.run, owner=self._owner, plan=plan))
        # Two that began at the same time: the second one withdraws.
        try:
            self._refuse_second(await self._all(until=begun.offset), plan)
        except Busy:
            await self._audit.append(Entry("end", plan.run, owner=self._owner, state=CANCELLED))
            raise
        return await self._persist(plan.run, report)

    async def resume(self, run_id: str, report: Report | None = None) -> Run:
        """Go on with a run that is not finished, whoever worked on it before."""
        run = await self.run(run_id)
        if run.state != OPEN:
            raise ConfigError(f"run {run_id} is {run.state}; there is nothing to resume")
        return await self._persist(run_id, report)

    async def cancel(self, run_id: str) -> Run:
        """End a run where it is. A command that works on it stops; what it was just sending is
        looked for, and nothing more is sent."""
        run = await self.run(run_id)
        if run.state != OPEN:
            raise ConfigError(f"run {run_id} is {run.state} already")
        work = await self._take_over(run_id)
        await work.find_out(send=False)
        await work.end(CANCELLED)
        return work.run

    async def _persist(self, run_id: str, report: Report | None) -> Run:
        """Work until the end; brokers that are away for a while are waited for."""
        loop = asyncio.get_running_loop()
        progress_at = loop.time()
        while True:
            work: _Work | None = None
            try:
                work = await self._take_over(run_id)
                work.report = report
                await work.find_out(send=True)
                await work.go_on()
                await work.end(FINISHED)
                return work.run
            except CosmodromeError as error:
                if not _passes(error):
                    raise
                if work is not None and work.moved:
                    progress_at = loop.time()
                if loop.time() - progress_at > self._give_up_after_s:
                    raise Interrupted(
                        f"{error}. The run is not finished; `cosmo dlq redrive resume {run_id}`"
                        " goes on with it"
                    ) from error
            await asyncio.sleep(RETRY_S)

    async def _take_over(self, run_id: str) -> _Work:
        """Say that it is ours now, and read what was done."""
        if not await self._audit.open(create=False):
            raise Unreachable("no name server shows the audit topic at the moment")
        resumed = await self._audit.append(Entry("resume", run_id, owner=self._owner))
        runs = Runs()
        seen = 0
        async for written in self._audit.read():
            runs.take(written)
            seen = written.offset + 1
        run = runs.by_id.get(run_id)
        if run is None:
            raise ConfigError(f"the beginning of run {run_id} has expired; start a new one")
        if run.owner != self._owner or run.state != OPEN:
            raise TakenOver(f"run {run_id} is {run.state}; another command has taken it over")
        assert resumed.offset < seen, "what was answered can be read"
        taken = set() if run.plan.again else runs.redriven(run.plan.source)
        work = _Work(self._fleet, self._env, self._audit, run, taken, self._owner)
        work.seen = seen
        return work

    async def _all(self, until: int | None = None) -> Runs:
        runs = Runs()
        async for written in self._audit.read():
            if until is None or written.offset < until:
                runs.take(written)
        return runs

    def _refuse_second(self, runs: Runs, plan: Plan) -> None:
        for other in runs.open_on(plan.source):
            if other.plan.run != plan.run:
                raise Busy(
                    f"run {other.plan.run} of {plan.source} is not finished; `cosmo dlq redrive"
                    f" resume {other.plan.run}` goes on with it, `cancel` ends it"
                )


class _Work:
    """One stretch of work on a run, by the command that took it over last."""

    def __init__(
        self, fleet: Fleet, env: Env, audit: Audit, run: Run, taken: set[Position], owner: str
    ) -> None:
        self.run = run
        self.seen = 0  # how far the audit was read
        self.moved = False  # whether anything was done
        self.report: Report | None = None
        self._plan = run.plan
        self._fleet = fleet
        self._audit = audit
        self._taken = taken
        self._owner = owner
        self._sends = Sends(fleet, env.clock, run.plan)
        self._deadline = 0.0  # of what was announced last
        self._taken_in: set[int] = set()  # entries of ours that need not be read
        self._next_at = 0.0
        self._skipped = 0
        rate = run.plan.rate
        self._batch_max = BATCH_COUNT if rate is None else max(1, min(BATCH_COUNT, int(rate / 2)))

    # --- what was left over ----------------------------------------------------------------------

    async def find_out(self, *, send: bool) -> None:
        """Find out about messages that were announced and of which nothing more was heard."""
        for written in list(self.run.pending.values()):
            entry = written.entry
            wait_ms = written.store_ms + ARRIVE_MS - self.run.owned_ms
            if wait_ms > 0:
                await asyncio.sleep(wait_ms / 1000)
            known = await asyncio.gather(*(self._sends.look(item) for item in entry.items))
            outcomes = [outcome for outcome in known if outcome.outcome not in (NOT_SENT, UNKNOWN)]
            missing = [
                (item, outcome)
                for item, outcome in zip(entry.items, known, strict=True)
                if outcome.outcome in (NOT_SENT, UNKNOWN)
            ]
            if missing and send:
                # Announced again: who takes over from us must know that this is recent.
                await self._announce(entry)
                again = await self._send_all(entry, [item for item, _ in missing])
                for (_, looked), outcome in zip(missing, again, strict=True):
                    unsure = looked.outcome == UNKNOWN and outcome.outcome == SENT
                    outcomes.append(_doubtful(outcome, looked.why) if unsure else outcome)
            else:
                outcomes += [outcome for _, outcome in missing]
            await self._conclude(entry, outcomes)

    # --- going on --------------------------------------------------------------------------------

    async def go_on(self) -> None:
        for part in self._plan.parts:
            at = max(part.begin, self.run.position.get((part.broker, part.queue), 0))
            address = await self._fleet.broker(part.broker)
            queue = MessageQueue(
                topic=self._plan.source, broker_name=part.broker, queue_id=part.queue
            )
            while at < part.end and not self._enough():
                end, chosen = await self._choose(Span(queue, address, at, part.end))
                if chosen:
                    await self._pace(len(chosen))
                    await self._batch(part, at, end, chosen)
                elif end == at:
                    break  # the rest has expired
                await self._commit(queue, address, end)
                at = end

    async def end(self, state: str) -> None:
        written = await self._audit.append(
            Entry("end", self._plan.run, owner=self._owner, state=state, skipped=self._skipped)
        )
        self.run.take(written)

    async def preview(self, most: int) -> list[tuple[Position, Outcome]]:
        found: list[tuple[Position, Outcome]] = []
        for part in self._plan.parts:
            queue = MessageQueue(
                topic=self._plan.source, broker_name=part.broker, queue_id=part.queue
            )
            address = await self._fleet.broker(part.broker)
            at = part.begin
            while at < part.end and len(found) < most:
                end, chosen = await self._choose(Span(queue, address, at, part.end))
                for message in chosen:
                    item = await self._sends.item(message)
                    if isinstance(item, Item):
                        item = Outcome(item.offset, item.msg_id, "would_be_sent", item.topic)
                    found.append((Position(part.broker, part.queue, item.offset), item))
                if end == at:
                    break
                at = end
        return found[:most]

    def _enough(self) -> bool:
        return self._plan.most is not None and len(self.run.results) >= self._plan.most

    async def _choose(self, rest: Span) -> tuple[int, list[ReceivedMessage]]:
        """Messages to redrive from the next ones of a queue, and where to go on."""
        found = await page(self._fleet, rest.queue, rest.address, rest.begin)
        most = self._batch_max
        if self._plan.most is not None:
            most = min(most, self._plan.most - len(self.run.results))
        chosen: list[ReceivedMessage] = []
        for message in found.messages:
            at = message.queue_offset
            if at >= rest.end:
                return rest.end, chosen
            if len(chosen) == most:
                return at, chosen
            position = Position(rest.queue.broker_name, rest.queue.queue_id, at)
            if position in self._taken or not self._plan.filter.takes(message):
                self._skipped += 1
            else:
                chosen.append(message)
        return min(found.next_offset, rest.end), chosen

    async def _batch(self, part: Part, begin: int, end: int, chosen: list[ReceivedMessage]) -> None:
        items: list[Item] = []
        outcomes: list[Outcome] = []
        for message in chosen:
            item = await self._sends.item(message)
            if isinstance(item, Outcome):
                outcomes.append(item)
            else:
                items.append(item)
        entry = Entry(
            "intent",
            self._plan.run,
            owner=self._owner,
            broker=part.broker,
            queue=part.queue,
            begin=begin,
            end=end,
            items=tuple(items),
        )
        if items:
            await self._announce(entry)
            outcomes += await self._send_all(entry, items, chosen)
        await self._conclude(entry, outcomes)

    async def _announce(self, entry: Entry) -> None:
        """Write an intent, and make sure that it counts."""
        intent = Entry(
            "intent",
            entry.run,
            self._owner,
            broker=entry.broker,
            queue=entry.queue,
            begin=entry.begin,
            end=entry.end,
            items=entry.items,
        )
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + BATCH_S
        written = await self._audit.append(intent)
        async for other in self._audit.read(self.seen, through=written.offset):
            if other.entry.run == self._plan.run and other.offset not in self._taken_in:
                self.run.take(other)
            self.seen = other.offset + 1
        self._taken_in.clear()
        if self.run.owner != self._owner or self.run.state != OPEN or self.seen <= written.offset:
            raise TakenOver(
                f"another command has taken over run {self._plan.run}; this one has stopped"
            )

    async def _send_all(
        self, entry: Entry, items: list[Item], messages: list[ReceivedMessage] | None = None
    ) -> list[Outcome]:
        """All at once; when one is not answered in time, all are left to a later look."""
        known = {message.queue_offset: message for message in messages or ()}
        try:
            async with asyncio.timeout_at(self._deadline):
                return list(
                    await asyncio.gather(
                        *(self._send(entry, item, known.get(item.offset)) for item in items)
                    )
                )
        except TimeoutError:
            raise TimedOut(f"not all of {len(items)} messages were answered in time") from None

    async def _send(self, entry: Entry, item: Item, message: ReceivedMessage | None) -> Outcome:
        if message is None:
            queue = MessageQueue(
                topic=self._plan.source, broker_name=entry.broker, queue_id=entry.queue
            )
            address = await self._fleet.broker(entry.broker)
            found = (await page(self._fleet, queue, address, item.offset, 1)).messages
            if not found or found[0].queue_offset != item.offset:
                return Outcome(
                    item.offset, item.msg_id, REFUSED, item.topic, why="expired in the source"
                )
            message = found[0]
        return await self._sends.send(item, message)

    async def _conclude(self, entry: Entry, outcomes: list[Outcome]) -> None:
        done = Entry(
            "done",
            entry.run,
            self._owner,
            broker=entry.broker,
            queue=entry.queue,
            begin=entry.begin,
            end=entry.end,
            outcomes=tuple(outcomes),
            skipped=self._skipped,
        )
        written = await self._audit.append(done)
        self.run.take(written)
        self._taken_in.add(written.offset)
        self._skipped = 0
        self.moved = True
        if self.report is not None:
            for outcome in outcomes:
                self.report(outcome)

    async def _commit(self, queue: MessageQueue, address: str, offset: int) -> None:
        await self._fleet.call(
            address,
            UpdateConsumerOffset(
                consumer_group=f"redrive-{self._plan.run}",
                topic=queue.topic,
                queue_id=queue.queue_id,
                commit_offset=offset,
            ),
        )

    async def _pace(self, count: int) -> None:
        if self._plan.rate is None:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        begin = max(now, self._next_at)
        self._next_at = begin + count / self._plan.rate
        if begin > now:
            await asyncio.sleep(begin - now)


def _passes(error: CosmodromeError) -> bool:
    """Whether waiting may help: servers that are away, or only just back."""
    if isinstance(error, Refused):
        return error.code in PASSING
    return isinstance(error, Unreachable | TimedOut | NoBrokers | NotThere | NoRoute)


def _doubtful(outcome: Outcome, why: str | None) -> Outcome:
    return Outcome(
        outcome.offset,
        outcome.msg_id,
        UNCERTAIN,
        outcome.topic,
        outcome.new_id,
        place=outcome.place,
        why=why,
    )
