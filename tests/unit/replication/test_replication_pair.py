"""Two real stores with a link between them: copying, following, coming back, being refused."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.replication.pair_kit import (
    ADDRESS,
    HA_PORT,
    Master,
    RawMaster,
    Rows,
    Slave,
    on_net,
    same_logs,
    until,
)
from tests.unit.store.store_kit import bodies

from cosmodrome.replication import links, master_link
from cosmodrome.replication.values import FollowerState
from cosmodrome.sim.net import NetLoop
from cosmodrome.store.store import PutStatus


def test_an_empty_slave_copies_the_whole_log_and_follows() -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop)
        await master.start()
        await master.put(100, b"x" * 700)  # several files
        assert master.store.log_end > 4 * 16 * 1024
        await slave.start()
        await same_logs(master, slave)
        await master.put(3, b"later")
        await same_logs(master, slave)
        assert bodies(slave.store) == bodies(master.store)
        await until(lambda: slave.state is FollowerState.IN_STEP)
        facts = slave.follower.facts()
        assert facts.why == "" and not facts.classic and facts.links_made == 1
        assert facts.lag_bytes == 0 and facts.end == facts.master_end == master.store.log_end
        await until(lambda: master.source.facts().links[0].acked_end == master.store.log_end)
        (link,) = master.source.facts().links
        assert link.node == "b:1" and link.lag_bytes == 0 and link.lag_seconds == 0
        assert master.source.needed_from() == master.store.log_end
        await slave.stop()
        await until(lambda: not master.source.facts().links)
        assert master.source.needed_from() is None
        await master.stop()

    on_net(scenario)


def test_a_send_is_answered_when_the_slave_has_it_too() -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop)
        master.store.require_acks(master.source.available)
        await master.start()
        assert not master.source.available(0)
        assert await master.store.durable(master.send()) is PutStatus.SLAVE_NOT_AVAILABLE
        await slave.start()
        await until(lambda: master.source.available(master.store.log_end))
        for _ in range(20):
            end = master.send(3)
            assert await master.store.durable(end) is PutStatus.OK
            assert slave.store.durable_end >= end
        await slave.stop()
        await until(lambda: not master.source.available(end))
        assert await master.store.durable(master.send()) is PutStatus.SLAVE_NOT_AVAILABLE
        await master.stop()

    on_net(scenario)


@pytest.mark.parametrize("waits", [False, True])
def test_only_what_no_sender_waits_for_leaves_together(
    monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr(links, "GATHER_BYTES", 4000)

    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop, flush_disk_type="ASYNC_FLUSH"), Slave(loop)
        if waits:
            master.store.require_acks(master.source.available)
        await master.start()
        await slave.start()
        await until(lambda: slave.state is FollowerState.IN_STEP)
        await asyncio.sleep(1)

        async def held_back(body: bytes = b"body") -> int:
            """Of one write, in its turn."""
            end = master.send(1, body)
            while master.store.log_end < end:
                await asyncio.sleep(0)
            return end - master.source.facts().links[0].sent_end

        assert await held_back() == 0  # silence was before it
        begun = loop.time()
        held = [await held_back() for _ in range(10)]
        assert (held == [0] * 10) if waits else (held[0] > 0 and held == sorted(set(held)))
        assert loop.time() == begun
        await asyncio.sleep(links.GATHER_S)
        assert master.source.facts().links[0].sent_end == master.store.log_end
        assert (await held_back() == 0) is waits
        assert await held_back(b"x" * 4000) == 0  # enough at once
        await same_logs(master, slave)
        await slave.stop()
        await master.stop()

    on_net(scenario)


def test_a_slave_comes_back_from_where_it_was() -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop)
        await master.start()
        await slave.start()
        await master.put(10)
        await same_logs(master, slave)
        for _ in range(3):
            loop.cut(HA_PORT)
            await master.put(30, b"y" * 500)
            await same_logs(master, slave)
        assert slave.follower.facts().links_made == 4
        assert slave.links == [True, False] * 3 + [True]
        await slave.stop()
        await master.stop()

    on_net(scenario)


def test_a_master_that_moves_is_found() -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop)
        await master.start()
        await slave.start(None)
        await asyncio.sleep(1)
        assert slave.state is FollowerState.NO_MASTER and slave.follower.facts().why
        slave.follower.follow("127.0.0.1:1")
        await asyncio.sleep(30)
        assert slave.state is FollowerState.CONNECTING
        assert "refused" in slave.follower.facts().why.lower()
        slave.follower.follow(ADDRESS)
        await master.put(5)
        await same_logs(master, slave)
        slave.follower.follow(None)
        await until(lambda: slave.state is FollowerState.NO_MASTER)
        assert not master.source.facts().links
        await slave.stop()
        await master.stop()

    on_net(scenario)


def test_silence_counts_from_what_was_read_last() -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop)
        await master.start()
        await slave.start()
        await until(lambda: slave.state is FollowerState.IN_STEP)
        await asyncio.sleep(5)
        assert slave.follower.facts().silent_seconds < 1  # it beats
        await master.stop()
        gone_at = loop.time()
        deaf = RawMaster()

        async def watch(seconds: float) -> None:
            """Attempts to connect say nothing about the master."""
            until_then = loop.time() + seconds
            while loop.time() < until_then:
                assert slave.follower.facts().silent_seconds >= loop.time() - gone_at
                await asyncio.sleep(0.1)

        await watch(30)
        await deaf.start(loop, lambda peer: None)  # takes connections and never speaks
        await watch(60)
        assert len(deaf.heard) > 1
        await slave.stop()
        deaf.stop()

    on_net(scenario)


def test_several_slaves_and_the_best_report_counts() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        slaves = [Slave(loop, name=f"s{number}", broker_id=number) for number in (1, 2, 3)]
        master.store.require_acks(master.source.available)
        await master.start()
        for slave in slaves:
            await slave.start()
        await until(lambda: len(master.source.facts().links) == 3)
        assert await master.store.durable(master.send(50, b"z" * 300)) is PutStatus.OK
        await same_logs(master, *slaves)
        await slaves[0].stop()
        await slaves[1].stop()
        assert await master.store.durable(master.send(5)) is PutStatus.OK
        await same_logs(master, slaves[2])
        await slaves[2].stop()
        await master.stop()

    on_net(scenario)


def test_tables_follow() -> None:
    async def scenario(loop: NetLoop) -> None:
        there = [Rows("topics", {"a": 1, "b": {"n": 2}}), Rows("offsets")]
        here = [Rows("topics", {"old": 1}), Rows("offsets", {"gone": 2})]
        master, slave = Master(loop, *there), Slave(loop, *here)
        await master.start()
        await slave.start()
        await until(lambda: [table.table for table in here] == [table.table for table in there])
        assert [table.applied for table in here] == [
            [({"a": 1, "b": {"n": 2}}, True)],
            [({}, True)],
        ]
        before = loop.time()
        for number in range(100):
            there[1].put(q=number)
        there[0].put(a=None, c=3)
        there[0].table.pop("a")
        await until(lambda: [table.table for table in here] == [table.table for table in there])
        assert loop.time() - before < 0.3
        assert here[1].applied[1:] == [({"q": 99}, False)]
        loop.cut(HA_PORT)
        there[1].put(q=1000)  # while nobody listens
        await until(lambda: here[1].table == {"q": 1000})
        await slave.stop()
        await until(lambda: not there[0].listeners and not there[1].listeners)
        await master.stop()

    on_net(scenario)


def test_a_row_that_messages_rely_on_comes_before_them() -> None:
    async def scenario(loop: NetLoop) -> None:
        here = Rows("topics", leads=True)
        there = Rows("topics", leads=True)
        master, slave = Master(loop, there), Slave(loop, here)
        await master.start()
        await slave.start()
        await until(lambda: slave.state is FollowerState.IN_STEP)
        known: list[bool] = []
        slave.store.written.subscribe(lambda _: known.append("new" in here.table))
        end = master.send()
        there.put(new=1)  # in the turn in which the message is staged, as when a send makes a topic
        assert await master.store.durable(end) is PutStatus.OK
        assert known == [True]
        there.put(later=2)  # and without a message that follows
        await until(lambda: "later" in here.table)
        await slave.stop()
        await master.stop()

    on_net(scenario)


def test_many_rows_come_in_one_piece() -> None:
    async def scenario(loop: NetLoop) -> None:
        rows = {f"r{number}": "v" * 900 for number in range(5_000)}  # several frames
        here = Rows("offsets")
        master, slave = Master(loop, Rows("offsets", rows)), Slave(loop, here)
        await master.start()
        await slave.start()
        await until(lambda: bool(here.applied))
        assert here.table == rows and len(here.applied) == 1
        await slave.stop()
        await master.stop()

    on_net(scenario)


def test_a_slave_reads_no_further_than_its_disk_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_link, "UNSYNCED_BYTES_MAX", 2_000)

    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop)
        await master.start()
        await slave.start()
        paused = 0
        for _ in range(100):
            await master.put(5, b"x" * 700)
            link = slave.follower._link
            if link is not None and link.paused:
                paused += 1
                assert not link._transport.is_reading()
        assert paused > 5
        await same_logs(master, slave)
        assert slave.follower.facts().links_made == 1
        await slave.stop()
        await master.stop()

    on_net(scenario)
