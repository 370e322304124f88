"""One seed: a master and its slave live under load and faults, then everything is healed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import re
from typing import Any

import pytest
from tests.sim.sim_machine import DELAY_MS_MAX, Machine
from tests.sim.sim_pair_judge import TURN_S, Judge, Sent, check_derived
from tests.sim.sim_pair_spoil import spoiled
from tests.sim.sim_run import quiet

from cosmodrome.env.base import Env
from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import CosmodromeError, StoreUnwritable
from cosmodrome.layout import SYS_COMMIT, SYS_PREPARED, SYS_ROLLBACK
from cosmodrome.replication import links
from cosmodrome.replication.follower import Follower
from cosmodrome.replication.source import Source
from cosmodrome.replication.tables import AppliedTables, Rows
from cosmodrome.replication.values import FollowerState, Node
from cosmodrome.sim.disk import PowerCut
from cosmodrome.sim.loop import Stuck
from cosmodrome.sim.net import NetLoop
from cosmodrome.store.store import Draft, PutStatus, Store

PORT = 10912
HOST = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
TOPICS = ("A", "B", "SCHEDULE_TOPIC_XXXX")
ROOT = "/store"
LINKED = (FollowerState.COPYING, FollowerState.IN_STEP)
TABLE_LAG_S = 1.0
BEHIND_LOG = ("offsets",)
BUFFER_BYTES = 4096  # of a link to a slave that does not read; small, so that it is reached
JOIN_S = 60.0  # virtual seconds in which a healed pair comes together


class Pair:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.chance = chance = random.Random(f"pair-{seed}")
        self.loop = NetLoop(latency_s=chance.choice((0.0002, 0.002)), pipe_bytes=8192)
        self.loop.set_exception_handler(self.on_error)
        self.errors: list[BaseException] = []
        self.sync = chance.random() < 0.7
        both = chance.choice(("SYNC_FLUSH", "SYNC_FLUSH", "ASYNC_FLUSH", ""))
        self.shared: dict[str, Any] = {
            "mapped_file_size_commit_log": chance.choice((4096, 8192, 20480)),
            "mapped_file_size_consume_queue": chance.choice((60, 400)),
            "max_hash_slot_num": 20,
            "max_index_num": chance.choice((30, 200)),
            "max_message_size": 3000,
            "flush_interval_commit_log": 60,
            "disk_space_warning_level_ratio": 100,
            "file_reserved_time": 0,
            "delete_when": "",  # only when asked to
            "sync_flush_timeout": chance.choice((15, 5000)),
            "slave_timeout": chance.choice((30, 300, 3000)),
            "ha_transfer_batch_size": chance.choice((100, 700, 1 << 20)),
            "ha_slave_fallbehind_max": chance.choice((2000, 1 << 28)),
            "ha_housekeeping_interval": chance.choice((2000, 20_000)),
            "ha_send_heartbeat_interval": 500,
        }
        role = "SYNC_MASTER" if self.sync else "ASYNC_MASTER"
        self.master = Machine(
            "master", self.loop, seed, self.options(role, both), self.serve_master
        )
        self.slave = Machine(
            "slave", self.loop, seed, self.options("SLAVE", both), self.serve_slave
        )
        self.judge = Judge(self.master, self.slave, self.loop.time)
        self.loop.link("slave", "master").heard = self.judge.hear
        self.loop.link("master", "slave").heard = self.judge.hear_master
        self.source: Source | None = None
        self.follower: Follower | None = None
        self.number = 0
        self.load = True
        self.budget = 0  # sends until the next fault; long pauses need no more
        self.faulty: set[str] = set()  # whose disk failed in this life
        self.troubled_at = 0.0  # when the last fault began or ended
        self.changed: dict[tuple[int, str], float] = {}  # rows of tables, and when
        self.table_checks = self.joins = self.refusals = self.cuts = self.flips = 0

    def options(self, role: str, flush: str) -> StoreOptions:
        flush = flush or self.chance.choice(("SYNC_FLUSH", "ASYNC_FLUSH"))
        return StoreOptions(
            store_path_root_dir=ROOT,
            broker_role=role,  # type: ignore[arg-type]
            flush_disk_type=flush,  # type: ignore[arg-type]
            **self.shared,
        )

    # --- the machines ------------------------------------------------------------------------
    async def serve_master(self, machine: Machine, env: Env) -> None:
        store = Store(machine.options, env)
        await store.start()
        self.judge.recovered(machine, store)
        for table in machine.tables:
            table.recovered(store.log_end)
        source = Source(store, machine.options, machine.tables, Node("c", "b", 0, "m"))
        if self.sync:
            store.require_acks(source.available)
        store.hold_back = source.needed_from
        await source.start("", PORT)
        self.source, machine.store = source, store
        node = machine.node
        assert node is not None
        for _ in range(self.chance.randint(1, 2)):
            node.run(self.send(store))
        node.run(self.change_tables(machine, store))

    async def serve_slave(self, machine: Machine, env: Env) -> None:
        store = Store(machine.options, env)
        await store.start()
        self.judge.recovered(machine, store)
        self.applied = AppliedTables(machine.tables, BEHIND_LOG, lambda: store.durable_end)
        for table in machine.tables:
            if table.name in BEHIND_LOG:
                table.watch = functools.partial(self.check_rows, store)
                if machine.synced:
                    table.watch(table.kept)
        await self.applied.start()
        follower = Follower(
            store,
            machine.options,
            self.applied,
            Node("c", "b", 1, f"s{machine.lives}"),
            env,
            Nobody(),
        )
        await follower.start()
        follower.follow(f"127.0.0.1:{PORT}")
        self.follower, machine.store = follower, store

    async def stop(self, machine: Machine) -> None:
        """In order, as an operator does."""
        store, part = machine.store, self.source if machine is self.master else self.follower
        node = machine.node
        if store is None or part is None or node is None:
            return
        if machine is self.master:
            self.load = False

        async def stop() -> None:
            await part.stop()
            if part is self.follower:
                await self.applied.stop()
            await store.stop()

        stopping = node.run(stop())
        await asyncio.wait([stopping], timeout=60)
        if not machine.disk.dead:
            assert stopping.done(), f"{machine.name} does not stop"
            stopping.result()
        self.load = True

    # --- load --------------------------------------------------------------------------------
    def draft(self) -> Draft:
        chance = self.chance
        self.number += 1
        size = chance.choice((0, 20, 100, 300, 1500))
        body = b"%d.%d " % (self.seed, self.number) + chance.randbytes(chance.randint(0, size))
        pairs = []
        if chance.random() < 0.4:
            pairs.append(f"TAGS\x01{chance.choice('tuv')}")
        if chance.random() < 0.4:
            pairs.append(f"UNIQ_KEY\x01u{self.number}")
        if chance.random() < 0.3:
            pairs.append(f"KEYS\x01{chance.choice(('k', 'k l', 'm'))}")
        topic, queue_id = chance.choice(TOPICS), chance.choice((0, 0, 1))
        if topic == TOPICS[2]:
            pairs.append(f"DELAY\x01{queue_id + 1}")
        kind = chance.choice((0,) * 8 + (SYS_COMMIT, SYS_PREPARED, SYS_ROLLBACK))
        return Draft(topic, queue_id, body, "\x02".join(pairs), HOST, HOST, sys_flag=kind)

    async def send(self, store: Store) -> None:
        chance = self.chance
        while True:
            await asyncio.sleep(chance.choice((0.002, 0.02, 0.1)))
            if self.load and self.budget > 0 and not self.master.disk.dead:
                self.budget -= 1
                count, wait = chance.choice((1, 1, 2, 5)), chance.random() < 0.9
                await self.send_once(store, count, wait=wait)

    async def send_once(
        self, store: Store, count: int = 1, *, wait: bool = True
    ) -> PutStatus | None:
        judge = self.judge
        drafts = [self.draft() for _ in range(count)]
        try:
            stored = store.append_batch(drafts)
        except CosmodromeError as error:
            assert not isinstance(error, StoreUnwritable) or self.excused(self.master), error
            return None
        messages = []
        for draft, place in zip(drafts, stored, strict=True):
            message = Sent(
                draft.topic,
                draft.queue_id,
                draft.body,
                place.log_offset,
                place.end,
                stored[-1].end,
                self.loop.time(),
                had_slave=False,
                must_wait=False,
            )
            judge.came(message)
            messages.append(message)
        answer: asyncio.Future[PutStatus | None] = self.loop.create_future()

        def on_answer(_: object, outcome: PutStatus | StoreUnwritable) -> None:
            try:
                status = self.judged(messages, outcome, wait=wait)
            except AssertionError as error:
                self.errors.append(error)
                status = None
            if not answer.done():
                answer.set_result(status)

        store.when_durable(stored[-1].end, on_answer, None, wait=wait)
        store.relieve()
        return await answer

    def judged(
        self, messages: list[Sent], outcome: PutStatus | StoreUnwritable, *, wait: bool
    ) -> PutStatus | None:
        """In the very turn of the answer, so that what is on disks and wires is what decided it."""
        if self.master.disk.dead or self.master.store is None:
            return None
        if isinstance(outcome, StoreUnwritable):
            assert self.excused(self.master), outcome
            return None
        failed = self.excused(self.master)
        for message in messages:
            self.judge.answered(
                message, outcome, wait=wait, waits=self.sync and wait, failed=failed
            )
        return outcome

    def excused(self, machine: Machine) -> bool:
        return machine.name in self.faulty or machine.disk.dead or not self.load

    def check_rows(self, store: Store, rows: Rows) -> None:
        """A slave believes nothing about a log that it does not have."""
        end = store.durable_end
        for name, row in rows.items():
            if row is not None and row[1] > end:
                self.errors.append(AssertionError(f"row {name}: {row}, but the slave is at {end}"))

    async def change_tables(self, machine: Machine, store: Store) -> None:
        chance = self.chance
        while True:
            await asyncio.sleep(chance.choice((0.02, 0.1, 0.5)))
            which = chance.randrange(len(machine.tables))
            name = chance.choice("abcde")
            value = None if chance.random() < 0.2 else [self.loop.time(), store.log_end]
            self.changed[which, name] = self.loop.time()
            machine.tables[which].change({name: value})

    # --- faults ------------------------------------------------------------------------------
    async def disturb(self) -> None:
        """One more fault, or the end of one."""
        chance = self.chance
        machine = chance.choice((self.master, self.slave))
        self.troubled_at = self.loop.time()
        match chance.choice(FAULTS):
            case "part":
                self.loop.part("master", "slave")
            case "silent":
                for way in (("master", "slave"), ("slave", "master")):
                    self.loop.link(*way).silent = chance.random() < 0.6
            case "slow":
                self.loop.link("master", "slave").delay_s = chance.choice((0.01, 0.4))
                self.loop.link("slave", "master").delay_s = chance.choice((0.0, 0.1))
            case "heal":
                self.heal_network()
            case "pause":
                await self.pause(machine)
            case "steps":
                steps = chance.choice((8, 40, 150))
                machine.disk.cut_after(int(chance.expovariate(1 / steps)) + 1)
            case "die":
                await self.kill(machine)
            case "die together":
                await self.kill(self.master, self.slave)
            case "restart":
                await self.stop(machine)
                await self.kill(machine)
            case "empty":
                await self.kill(self.slave, wipe=True)
            case "full" if machine.serves:
                self.faulty.add(machine.name)
                disk = machine.disk
                disk.faults.capacity_pages = disk.used_pages + chance.randrange(3)
                await asyncio.sleep(chance.choice((0.05, 0.5)))
                disk.faults.capacity_pages = None
            case "sync" if machine.serves:
                self.faulty.add(machine.name)
                machine.disk.faults.sync_error = chance.choice(("commitlog", "consumequeue"))
            case "late master":
                await self.leave_master_behind()
            case "slow disk":
                machine.offload.delay_ms_max = chance.choice((100, 400))
            case "expire" if self.master.serves:
                await self.expire()
            case "clock":
                machine.clock.skew_ms += chance.choice((-60_000, -1000, 1000, 60_000))
            case "write back":
                machine.disk.write_back()
            case "flip":
                self.loop.link("master", "slave").spoil = self.flip
            case "calm":
                await asyncio.sleep(2 * TABLE_LAG_S)
                self.check_tables()
                return
        self.troubled_at = self.loop.time()

    async def expire(self) -> None:
        """The master removes files that linked slaves have; of a full disk it removes more."""
        node, store, disk = self.master.node, self.master.store, self.master.disk
        assert node is not None and store is not None
        forced = self.chance.random() < 0.3
        disk.faults.used_ratio = 0.95 if forced else 0.1
        if self.chance.random() < 0.5:
            self.loop.link("master", "slave").delay_s = 0.5
            await self.flood()  # the slave is behind
        self.judge.expired = True
        store._retention.request()
        await asyncio.sleep(0.3)
        disk.faults.used_ratio = 0.1
        if not forced and self.master.store is store:
            self.judge.check_kept()

    async def leave_master_behind(self) -> None:
        """The slave has what the master's disk has not; then something breaks."""
        self.master.offload.delay_ms_max = 400
        await asyncio.sleep(self.chance.choice((0.05, 0.15)))
        match self.chance.randrange(4):
            case 0 | 1:
                self.loop.part("master", "slave")
            case 2:
                await self.kill(self.slave)
            case _:
                self.budget = self.chance.choice((0, 25))  # it stays behind, or writes other bytes
                await self.kill(self.master, power=True)
                await self.master.start()

    def flip(self, data: bytes) -> bytes:
        """One bit of one record, once."""
        changed = spoiled(data, self.chance)
        if changed is None:
            return data
        self.flips += 1
        self.loop.link("master", "slave").spoil = None
        return changed

    async def pause(self, machine: Machine) -> None:
        if machine.node is not None:
            machine.node.pause()
            if machine is self.slave and self.chance.random() < 0.4:
                await self.flood()
            await asyncio.sleep(self.chance.choice((0.05, 0.5, 4.0, 10.0)))
            self.check_bounds()
            machine.node.resume()

    async def flood(self) -> None:
        """More than a slave that does not read may cost."""
        node, store = self.master.node, self.master.store
        if node is None or store is None or node.paused:
            return

        async def send() -> None:
            for _ in range(20):
                await self.send_once(store, 5, wait=False)

        node.run(send())
        await asyncio.sleep(0.05)

    async def kill(self, *machines: Machine, wipe: bool = False, power: bool = False) -> None:
        power = power or self.chance.random() < 0.6
        for machine in machines:
            await machine.end(power=power, wipe=wipe)
            self.judge.ended(machine, wiped=wipe)
            self.faulty.discard(machine.name)
            assert not machine.errors, machine.errors

    def heal_network(self) -> None:
        for way in (("master", "slave"), ("slave", "master")):
            self.loop.heal(*way)

    async def tend(self, *, hurry: bool = False) -> None:
        """Machines that fell are buried; those that are down start again, sooner or later."""
        for machine in (self.master, self.slave):
            if machine.disk.dead:
                await self.kill(machine)
                self.troubled_at = self.loop.time()
            if machine.node is None and (hurry or self.chance.random() < 0.7):
                self.troubled_at = self.loop.time()
                await machine.start()

    # --- a life ------------------------------------------------------------------------------
    async def live(self) -> None:
        chance = self.chance
        await self.tend(hurry=True)
        for _ in range(chance.randint(4, 9)):
            self.budget = chance.choice((0, 4, 10, 25, 25))
            await asyncio.sleep(chance.choice((0.01, 0.05, 0.2, 0.6)))
            await self.disturb()
            await self.tend()
            await asyncio.sleep(TURN_S)
            self.check()
        await self.settle()

    def check(self) -> None:
        """What holds at any time."""
        judge = self.judge
        if not (self.master.serves and self.slave.serves):
            return
        assert self.follower is not None
        state = self.follower.facts().state
        if state in LINKED:
            judge.check_begun()
            if judge.linked():
                judge.check_prefix()
        self.check_bounds()

    def check_bounds(self) -> None:
        """What is held in memory: for a slave that does not read, and of a torn record."""
        file_bytes = self.shared["mapped_file_size_commit_log"]
        self.judge.check_bounds(2 * BUFFER_BYTES + file_bytes)
        link = self.follower._link if self.follower else None
        if link is not None:
            held = link._intake._held_bytes
            assert held <= file_bytes, f"{held} bytes of a torn record are held"

    def check_tables(self) -> None:
        """A healthy link brings rows within a second."""
        now = self.loop.time()
        if not (self.master.serves and self.slave.serves and self.judge.linked()):
            return
        if now - max(self.troubled_at, self.judge.linked_at()) <= TABLE_LAG_S or self.faulty:
            return
        links = [self.loop.link(*way) for way in (("master", "slave"), ("slave", "master"))]
        if any(link.silent or link.delay_s for link in links):
            return
        self.table_checks += 1
        for (which, name), at in self.changed.items():
            if at < now - TABLE_LAG_S:
                here, there = (m.tables[which].kept.get(name) for m in (self.master, self.slave))
                assert here == there, f"row {name}: {here} since {now - at:.3f} s, slave {there}"

    async def settle(self) -> None:
        """Faults end. The logs fit and come together, or the slave says that they do not."""
        self.heal_network()
        for machine in (self.master, self.slave):
            machine.disk.cut_after(None)
            machine.offload.delay_ms_max = DELAY_MS_MAX
            if machine.name in self.faulty:
                await self.stop(machine)  # a failed disk is seen by a restart
                await self.kill(machine)
            machine.disk.faults.sync_error = None
        await self.tend(hurry=True)
        assert self.master.store is not None
        self.master.store._retention._requested = 0
        await asyncio.sleep(1)  # what expires now has gone
        if not self.judge.is_prefix():
            await self.refused()
            await self.kill(self.slave, wipe=True)
            await self.tend(hurry=True)
        await self.joined()
        await self.finish()

    async def refused(self) -> None:
        assert self.slave.store is not None and self.follower is not None
        start, had = self.slave.store.log_start, self.slave.store.log_end
        before = self.slave.log_bytes(start, had)
        await self.until(
            lambda: self.state() is FollowerState.REFUSED or self.judge.is_prefix(), "refused"
        )
        if self.judge.is_prefix():
            return  # ahead by the blank of a file alone, and the master has written it again
        why, end = self.follower.facts().why, self.slave.store.log_end
        assert str(end) in why, why
        assert any(word in why for word in ("ahead", "differ", "behind")), why
        self.check_remedy(why)
        # What the master sent before it died may have come late; nothing was taken away.
        assert end >= had, "a log that does not fit was cut"
        assert self.slave.log_bytes(start, had) == before, "a log that does not fit was changed"
        self.refusals += 1

    def check_remedy(self, why: str) -> None:
        """Where a slave may be cut, both logs are the same."""
        found = re.search(r"--cut-at (\d+)", why)
        assert found or "ahead" not in why, why
        master, slave = self.master.store, self.slave.store
        if found is not None and master is not None and slave is not None:
            start, place = max(master.log_start, slave.log_start), int(found[1])
            here = self.slave.log_bytes(start, place)
            assert here == self.master.log_bytes(start, place), f"cut at {place}: they differ"
            self.cuts += 1

    async def joined(self) -> None:
        """Everything is there, and goes on to be."""
        master, slave = self.master.store, self.slave.store
        assert master is not None and slave is not None
        self.load = False
        await self.until(lambda: self.in_step() and self.tables_equal(), "in step")
        self.judge.check_prefix()
        check_derived(self.slave, slave, anew=self.judge.expired)
        self.joins += 1
        node = self.master.node
        assert node is not None
        for _ in range(3):
            wanted = self.judge.ok
            status = await node.run(self.send_once(master))
            slow = self.shared["sync_flush_timeout"] < 100 or self.shared["slave_timeout"] < 100
            # A record that begins a file is as far behind as the rest of the file before.
            large = self.shared["ha_slave_fallbehind_max"] < 10_000
            assert status is PutStatus.OK or slow or large, f"{status} of a pair in step"
            assert not self.sync or self.judge.ok >= wanted
        await self.until(self.in_step, "in step again")

    async def finish(self) -> None:
        """Both stop, and the logs are the same."""
        for machine in (self.master, self.slave):
            await self.stop(machine)
        store = self.slave.store
        assert store is not None
        assert self.master.store is not None
        start, end = max(store.log_start, self.master.store.log_start), store.log_end
        assert self.master.log_bytes(start, end) == self.slave.log_bytes(start, end)
        await self.kill(self.master, self.slave)
        self.load = False
        await self.tend(hurry=True)
        assert self.slave.store is not None and self.slave.store.log_end == end
        for message in self.judge.sent.values():
            if message.raw and message.log_offset >= self.slave.store.log_start:
                assert self.slave.log_bytes(message.log_offset, message.end) == message.raw
        await self.kill(self.master, self.slave)

    # --- small things ------------------------------------------------------------------------
    def state(self) -> FollowerState:
        assert self.follower is not None
        return self.follower.facts().state

    def in_step(self) -> bool:
        master, slave = self.master.store, self.slave.store
        assert master is not None and slave is not None
        same = master.log_end == slave.log_end == slave.durable_end == master.durable_end
        return same and self.state() is FollowerState.IN_STEP and self.judge.linked()

    def tables_equal(self) -> bool:
        return all(
            here.kept == there.kept
            for here, there in zip(self.master.tables, self.slave.tables, strict=True)
        )

    async def until(self, done: Any, what: str) -> None:
        deadline = self.loop.time() + JOIN_S
        while not done():
            await asyncio.sleep(0.05)
            if self.loop.time() > deadline:
                facts = self.follower.facts() if self.follower else None
                raise AssertionError(f"not {what} after {JOIN_S:g} s: {facts}")

    def on_error(self, _: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, PowerCut):
            self.errors.append(error or AssertionError(context["message"]))

    def run(self) -> None:
        try:
            self.loop.run_until_complete(self.live())
            if self.errors:
                raise self.errors[0]
        finally:
            for machine in (self.master, self.slave):
                if machine.node is not None:
                    machine.node.resume()  # so that all can end
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                with contextlib.suppress(Stuck):  # what failed first is what to tell
                    self.loop.run_until_complete(asyncio.wait(left))
            self.loop.close()


class Nobody:
    """Only a classic master is asked."""

    async def speaks_ours(self) -> bool | None:
        return None

    async def bounds(self) -> tuple[int, int]:
        raise AssertionError("our slave takes our master for a classic one")

    async def first_record(self) -> bytes:
        raise AssertionError("our slave takes our master for a classic one")


FAULTS = (
    ("calm",) * 4
    + ("part", "silent", "slow", "heal", "heal", "pause", "pause")
    + ("slow disk", "late master", "late master", "late master")
    + ("steps", "steps", "steps", "die", "die together", "restart", "empty")
    + ("full", "sync", "clock", "expire", "expire", "write back", "flip", "flip")
)


def run_pair(seed: int) -> Pair:
    pair = Pair(seed)
    with quiet(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(links, "BUFFER_BYTES", BUFFER_BYTES)
        patch.setattr(links, "TURN_BYTES", BUFFER_BYTES)
        pair.run()
    return pair
