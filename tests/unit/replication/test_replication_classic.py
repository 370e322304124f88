"""The classic stream: scripted slaves at our master, our slave at a classic master."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.replication.pair_kit import (
    FILE_BYTES,
    HA_PORT,
    KnownMaster,
    Master,
    Raw,
    RawMaster,
    Slave,
    on_net,
    raw_slave,
    same_logs,
    until,
)

from cosmodrome.replication import frames
from cosmodrome.replication.values import FollowerState
from cosmodrome.sim.net import NetLoop
from cosmodrome.store.store import PutStatus


def log_of(peer: Raw) -> bytes:
    return b"".join(data for _, data in peer.classic())


def test_a_slave_that_reports_0_gets_the_last_file() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop, ha_transfer_batch_size=1000)
        await master.start()
        await master.put(60, b"x" * 700)
        peer = await raw_slave(loop)
        peer.say(0)
        last = master.store.log_end - master.store.log_end % FILE_BYTES
        assert last > 0
        await until(lambda: log_of(peer) == master.log()[last:])
        assert peer.classic()[0][0] == last
        assert all(len(data) <= 1000 for _, data in peer.classic())
        (link,) = master.source.facts().links
        assert link.classic and link.node == "" and link.acked_end == 0
        await master.stop()
        await until(lambda: peer.closed)

    on_net(scenario)


def test_a_frame_never_crosses_a_file_and_the_blank_is_sent_as_it_is() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.start()
        await master.put(100, b"x" * 900)
        peer = await raw_slave(loop)
        first = int.from_bytes(master.log()[:4], "big")
        peer.say(first)  # behind the first record
        await until(lambda: log_of(peer) == master.log()[first:])
        for offset, data in peer.classic():
            assert offset // FILE_BYTES == (offset + len(data) - 1) // FILE_BYTES
        await master.put(2)
        await until(lambda: log_of(peer) == master.log()[first:])
        await master.stop()

    on_net(scenario)


def test_a_report_is_the_acknowledgement() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop, slave_timeout=3000)
        master.store.require_acks(master.source.available)
        await master.start()
        peer = await raw_slave(loop)
        peer.say(0)
        await until(lambda: master.source.available(0))
        end = master.send()
        waiting = master.store.durable(end)
        await until(lambda: len(log_of(peer)) == end)
        assert not waiting.done()
        peer.say(end)
        assert await waiting is PutStatus.OK
        began = loop.time()
        assert await master.store.durable(master.send()) is PutStatus.FLUSH_SLAVE_TIMEOUT
        assert loop.time() - began >= 3
        await master.stop()

    on_net(scenario)


def test_heartbeats_and_silence() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.start()
        await master.put(1)
        peer = await raw_slave(loop)
        peer.say(master.store.log_end)
        began = loop.time()
        await until(lambda: len(peer.classic()) == 2)
        assert peer.classic() == [(master.store.log_end, b"")] * 2
        assert 9.5 < loop.time() - began < 11.5
        await until(lambda: peer.closed)
        assert 20 <= loop.time() - began < 21.5  # nothing was read from it
        assert not master.source.facts().links and not master.source.available(0)
        await master.stop()

    on_net(scenario)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("report", [1 << 40, 97, -1])
def test_a_report_above_the_end_closes_and_counts_for_nothing(
    report: int, late: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        master.store.require_acks(master.source.available)
        await master.start()
        await master.put(1)
        end = master.store.log_end
        assert end == 96
        peer = await raw_slave(loop)
        if late:
            peer.say(end)
            await until(lambda: len(master.source.facts().links) == 1)
        peer.say(report)
        await until(lambda: peer.closed)
        assert not master.source.facts().links and not master.source.available(end)
        assert await master.store.durable(master.send()) is PutStatus.SLAVE_NOT_AVAILABLE
        await master.stop()

    on_net(scenario)
    lines = [line.getMessage() for line in caplog.records if line.name.endswith("source")]
    assert any("peer=127.0.0.1" in line for line in lines)
    if report > 0:
        assert any(str(report) in line and "96" in line and "cut-at" in line for line in lines)


def test_a_classic_slave_behind_the_first_file_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.store.start()
        master.store.begin_at(FILE_BYTES)
        await master.source.start("127.0.0.1", HA_PORT)
        await master.put(3)
        peer = await raw_slave(loop)
        peer.say(100)
        await until(lambda: peer.closed)
        facts = master.source.facts()
        assert facts.refused_links == 1 and "ends at 100" in facts.refused_why
        assert f"begins at {FILE_BYTES}" in facts.refused_why
        await master.stop()

    on_net(scenario)
    assert "ha_slave_refused" in caplog.text


# --- our slave at a classic master ---------------------------------------------------------------


class ClassicMasterPort:
    """Serves the log of a store as Apache RocketMQ does: it reads 8 bytes and begins there."""

    def __init__(self, machine: Master, batch: int = 3000) -> None:
        self.machine = machine
        self.batch = batch
        self.port = RawMaster()
        self.first: list[int] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, loop: NetLoop) -> None:
        await self.port.start(loop, self._serve)

    def _serve(self, peer: Raw) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._feed(peer)))

    async def _feed(self, peer: Raw) -> None:
        loop = asyncio.get_running_loop()
        while len(peer.got) < 8 and not peer.closed:
            await asyncio.sleep(0.01)
        if peer.closed:
            return
        report = int.from_bytes(peer.got[:8], "big", signed=True)
        self.first.append(report)
        store = self.machine.store
        at = report if report else store.log_end - store.log_end % FILE_BYTES
        beat_at = loop.time() + 5
        while not peer.closed:
            data = store.log_bytes(at, self.batch) if at >= 0 else None
            if data is not None:
                peer.write(frames.classic_head(at, len(data)) + bytes(data))
                at += len(data)
                beat_at = loop.time() + 5
            elif loop.time() >= beat_at:
                peer.write(frames.classic_head(at, 0))
                beat_at = loop.time() + 5
            await asyncio.sleep(0.001 if data is not None else 0.1)

    async def stop(self) -> None:
        self.port.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def reports(self) -> list[int]:
        got = self.port.heard[-1].got
        return [int.from_bytes(got[at : at + 8], "big") for at in range(0, len(got) - 7, 8)]


@pytest.mark.parametrize("batch", [7, 3000, 32768])
def test_our_slave_copies_all_from_a_classic_master(batch: int) -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.store.start()
        await master.put(60, b"x" * 700)
        port = ClassicMasterPort(master, batch)
        await port.start(loop)
        slave = Slave(loop, classic_master=KnownMaster(master.store))
        await slave.start()
        await same_logs(master, slave)
        first = int.from_bytes(master.log()[:4], "big")
        assert port.first == [frames.HELLO, first]  # the record at 0 was fetched, then the rest
        await until(lambda: slave.state is FollowerState.IN_STEP)
        facts = slave.follower.facts()
        assert facts.classic and facts.lag_bytes == 0 and facts.why == ""
        await master.put(5)
        await same_logs(master, slave)
        await until(lambda: port.reports()[-1] == master.store.log_end)
        count = len(port.reports())
        await asyncio.sleep(11)
        assert port.reports()[count:] == [master.store.log_end] * 2  # heartbeats
        await slave.stop()
        await port.stop()
        await master.store.stop()

    on_net(scenario)


def test_a_master_that_was_asked_gets_no_hello() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.store.start()
        await master.put(3)
        port = ClassicMasterPort(master)
        await port.start(loop)
        slave = Slave(loop, classic_master=KnownMaster(master.store, ours=False))
        await slave.start()
        await same_logs(master, slave)
        assert frames.HELLO not in port.first
        await slave.stop()
        await port.stop()
        await master.store.stop()

    on_net(scenario)


def test_our_slave_begins_where_a_classic_master_begins() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.store.start()
        master.store.begin_at(FILE_BYTES)
        await master.put(40, b"x" * 700)
        port = ClassicMasterPort(master)
        await port.start(loop)
        slave = Slave(loop, classic_master=KnownMaster(master.store))
        await slave.start()
        await same_logs(master, slave)
        assert slave.store.log_start == FILE_BYTES == port.first[-1]
        await slave.stop()
        await port.stop()
        await master.store.stop()

    on_net(scenario)


def test_our_slave_may_begin_with_the_last_file_of_a_classic_master() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.store.start()
        await master.put(40, b"x" * 700)
        port = ClassicMasterPort(master)
        await port.start(loop)
        slave = Slave(loop, sync_from_last_file=True)
        await slave.start()
        await same_logs(master, slave)
        assert slave.store.log_start == master.store.log_end // FILE_BYTES * FILE_BYTES
        assert port.first[-1] == 0
        await slave.stop()
        await port.stop()
        await master.store.stop()

    on_net(scenario)


def test_our_slave_waits_at_a_classic_master_that_is_empty() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.store.start()
        port = ClassicMasterPort(master)
        await port.start(loop)
        slave = Slave(loop, classic_master=KnownMaster(master.store))
        await slave.start()
        await until(lambda: slave.state is FollowerState.IN_STEP)
        await master.put(30, b"x" * 700)
        await same_logs(master, slave)
        await slave.stop()
        await port.stop()
        await master.store.stop()

    on_net(scenario)


class FixedMaster:
    def __init__(self, *bounds: int) -> None:
        self._bounds = bounds[0], bounds[1]

    async def speaks_ours(self) -> bool | None:
        return None

    async def bounds(self) -> tuple[int, int]:
        return self._bounds

    async def first_record(self) -> bytes:
        return b""


@pytest.mark.parametrize(("bounds", "text"), [((0, 50), "ahead"), ((FILE_BYTES, 99_999), "behind")])
def test_a_classic_master_whose_log_does_not_fit_is_told_from_one_in_step(
    bounds: tuple[int, int], text: str
) -> None:
    """Such a master sends heartbeats for ever, with the very offset that the slave reported."""

    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.store.start()
        await master.put(3)
        port = ClassicMasterPort(master)
        await port.start(loop)
        known: Any = KnownMaster(master.store)
        slave = Slave(loop, classic_master=known)
        await slave.start()
        await same_logs(master, slave)
        await until(lambda: slave.state is FollowerState.IN_STEP)
        slave.follower._classic_master = FixedMaster(*bounds)
        loop.cut(HA_PORT)
        await until(lambda: slave.state is FollowerState.REFUSED)
        assert text in slave.follower.facts().why
        slave.follower._classic_master = known
        await until(lambda: slave.state is FollowerState.IN_STEP)  # asked again after 30 s
        await slave.stop()
        await port.stop()
        await master.store.stop()

    on_net(scenario)


def test_a_master_that_was_upgraded_is_greeted_again() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.store.start()
        await master.put(3)
        port = ClassicMasterPort(master)
        await port.start(loop)
        slave = Slave(loop, classic_master=KnownMaster(master.store))
        await slave.start()
        await until(lambda: slave.state is FollowerState.IN_STEP)
        loop.cut(HA_PORT)
        await until(lambda: slave.follower.facts().links_made == 2)
        assert slave.follower.facts().classic and port.first.count(frames.HELLO) == 1
        await port.stop()
        await asyncio.sleep(3)  # connections are refused meanwhile
        await master.source.start("127.0.0.1", HA_PORT)
        await until(lambda: slave.follower.facts().links_made == 3)
        assert not slave.follower.facts().classic
        await slave.stop()
        await master.stop()

    on_net(scenario)
