"""Peers that lie, break or flood: bounded memory, a line in the log, and everything goes on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from tests.unit.replication.pair_kit import (
    HA_PORT,
    Master,
    Raw,
    RawMaster,
    Rows,
    Slave,
    on_net,
    raw_slave,
    same_logs,
    until,
    who,
)

from cosmodrome.replication import frames, links, source
from cosmodrome.replication.values import FollowerState
from cosmodrome.sim.net import NetLoop

HELLO = frames.number(frames.HELLO)
WELCOME = frames.number(frames.WELCOME)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("cosmodrome.replication") and record.levelname != "INFO"
    ]


# --- at a master ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xffGARBAGE and more of it", "neither a report nor HELLO"),
        (frames.number(frames.WELCOME), "neither a report nor HELLO"),
        (HELLO + b"\x04\0\0\0\x20", "kind 4"),
        (HELLO + b"\x01\xff\xff\xff\xff", "WHO of 4294967295"),
        (HELLO + b"\x01\0\0\0\x02{}", "WHO that cannot be read"),
        (HELLO + frames.ack(0, 0), "before the slave said who it is"),
        (HELLO + who() + who(), "said twice"),
        (HELLO + who() + frames.ack(0, 1 << 40), "1099511627776, but this log ends at 96"),
        (HELLO + who() + frames.ack(0, -1), "reports -1"),
        (HELLO + who() + frames.ack(3, 0), "epoch 3"),
        (HELLO + who(version=9), "version 9"),
        (HELLO + who(broker="other"), "'other'"),
        (HELLO + who(id=0), "brokerId 0"),
        (HELLO + who(first=5, end=4), "begins at 5 and ends at 4"),
        (HELLO + who(first=0, end=96), "differ before offset 96"),
        (HELLO + who(first=0, end=96, fingerprint=(0, 1)), "checksum 00000001 from 0"),
        (HELLO + who(first=0, end=1 << 40), "ahead"),
    ],
)
def test_what_a_slave_may_not_say(data: bytes, text: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop, broker_id=2)
        await master.start()
        await master.put(1)
        peer = await raw_slave(loop)
        for byte in data:  # in the smallest pieces
            peer.write(bytes((byte,)))
        await until(lambda: peer.closed)
        assert not master.source.facts().links and not master.source.available(0)
        assert master.source.needed_from() is None
        await slave.start()
        await master.put(3)
        await same_logs(master, slave)
        await slave.stop()
        await master.stop()

    on_net(scenario)
    assert any(text in line for line in lines(caplog)), lines(caplog)


def test_a_half_word_and_silence_are_closed_in_time() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.start()
        began = loop.time()
        peers = [await raw_slave(loop) for _ in range(3)]
        peers[1].write(b"\0\0\0")
        peers[2].write(HELLO)

        async def drip() -> None:
            while not peers[1].closed:
                await asyncio.sleep(6)
                peers[1].write(b"\0")

        dripping = asyncio.create_task(drip())
        await until(lambda: all(peer.closed for peer in peers))
        assert 20 <= loop.time() - began < 22
        await dripping
        await master.stop()

    on_net(scenario)


def test_a_thousand_connections(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop)
        await master.start()
        await slave.start()
        await until(lambda: slave.state is FollowerState.IN_STEP)
        peers = [await raw_slave(loop) for _ in range(1000)]
        await asyncio.sleep(1)
        assert sum(not peer.closed for peer in peers) == source.SILENT_MAX
        await master.put(10)
        await same_logs(master, slave)
        await until(lambda: all(peer.closed for peer in peers))
        await asyncio.sleep(30)
        assert len(master.source.facts().links) == 1
        await slave.stop()
        await master.stop()

    on_net(scenario)
    assert 1 <= len(lines(caplog)) < 20
    assert "have not said anything yet" in lines(caplog)[0]


def test_silent_connections_keep_no_slave_out() -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop)
        await master.start()
        peers = [await raw_slave(loop) for _ in range(source.SILENT_MAX)]
        began = loop.time()
        await slave.start()
        await until(lambda: slave.state is FollowerState.IN_STEP)
        assert loop.time() - began < 1
        assert [peer.closed for peer in peers] == [True] + [False] * (len(peers) - 1)
        await slave.stop()
        await master.stop()

    on_net(scenario)


def test_strangers_take_no_place_of_those_who_may_come_in() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        listed = True
        master.source = source.Source(
            master.store, master.options, (), master.node, admits=lambda host: listed
        )
        await master.start()
        friends = [await raw_slave(loop) for _ in range(4)]
        listed = False
        strangers = [await raw_slave(loop) for _ in range(100)]
        await asyncio.sleep(0.1)
        assert not any(peer.closed for peer in friends)
        assert [peer.closed for peer in strangers] == [True] * 40 + [False] * 60
        listed = True
        friends += [await raw_slave(loop) for _ in range(60)]
        await asyncio.sleep(0.1)
        assert all(peer.closed for peer in strangers)
        assert not any(peer.closed for peer in friends)
        listed = False
        stranger = await raw_slave(loop)
        await asyncio.sleep(0.1)
        assert stranger.closed and not any(peer.closed for peer in friends)
        await master.stop()

    on_net(scenario)


def test_many_slaves(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.start()
        await master.put(1)
        peers = [await raw_slave(loop) for _ in range(60)]
        for number, peer in enumerate(peers):
            if number % 2:
                peer.say(96)
            else:
                peer.write(HELLO + who(id=number + 1))
        await asyncio.sleep(1)
        assert len(master.source.facts().links) == source.LINKS_MAX
        assert sum(not peer.closed for peer in peers) == source.LINKS_MAX
        await master.stop()

    on_net(scenario)
    assert any("32 slaves are linked" in line for line in lines(caplog))


def test_the_newer_link_of_a_slave_wins(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.start()
        old, new = await raw_slave(loop), await raw_slave(loop)
        old.write(HELLO + who(incarnation="a"))
        await until(lambda: len(master.source.facts().links) == 1)
        new.write(HELLO + who(incarnation="b"))
        await until(lambda: old.closed)
        assert not new.closed and len(master.source.facts().links) == 1
        await master.stop()

    on_net(scenario)
    assert any("give each its own brokerId" in line for line in lines(caplog))


@pytest.mark.parametrize("own", [False, True])
def test_a_slave_that_never_reads_costs_no_more_than_a_buffer(own: bool) -> None:
    async def scenario(loop: NetLoop) -> None:
        table = Rows("offsets", {f"r{number}": "v" * 500 for number in range(20_000)})
        master = Master(loop, table, mapped_file_size_commit_log=1 << 20)
        await master.start()
        await master.put(2000, b"x" * 7000)
        assert master.store.log_end > 13 << 20
        peer = await raw_slave(loop)
        peer.transport.pause_reading()
        if own:
            peer.write(HELLO + who(file_bytes=1 << 20))
        else:
            peer.say(7092)
        await until(lambda: len(master.source.facts().links) == 1)
        (link,) = master.source._links
        most = 0
        for number in range(200):
            master.send(1, b"x" * 5000)
            table.put(**{f"n{number}-{row}": "v" * 100 for row in range(200)})
            await asyncio.sleep(0.05)
            assert link._transport is not None
            most = max(most, link._transport.get_write_buffer_size())
        assert 0 < most <= 4 << 20
        if isinstance(link.stream, links.OwnStream):
            rows = (link.stream._gathered, link.stream._ready)
            assert all(len(kept or ()) <= links.ROWS_MAX for part in rows for kept in part.values())
        assert link.sent_end < master.store.log_end
        # A report of what was not sent is a lie, even below the end.
        end = master.store.log_end
        peer.write(frames.ack(0, end) if own else frames.number(end))
        await until(lambda: not master.source.facts().links, seconds=2)
        await master.stop()

    on_net(scenario)


def test_a_report_below_the_end_counts_as_far_as_it_goes_and_goes_with_its_link() -> None:
    async def scenario(loop: NetLoop) -> None:
        master = Master(loop)
        await master.start()
        await master.put(10)
        one, two = await raw_slave(loop), await raw_slave(loop)
        one.say(96)
        two.say(192)
        await until(lambda: len(master.source.facts().links) == 2)
        assert master.source.needed_from() == 96
        one.say(480)
        await until(lambda: master.source.needed_from() == 192)
        assert master.store._flush.acked_end == 480
        one.transport.abort()
        await until(lambda: master.store._flush.acked_end == 192)
        two.transport.abort()
        await until(lambda: master.store._flush.acked_end == 0)
        await master.stop()

    on_net(scenario)


# --- at a slave ----------------------------------------------------------------------------------

Say = Callable[[bytes], bytes]


def begin(end: int = 1000, **changes: int | str) -> bytes:
    said: dict[str, Any] = {"version": 1, "epoch": 0, "first": 0, "end": end, "begin": 0}
    return frames.begin(frames.Begin(**(said | changes)))


def data(offset: int, log: bytes, epoch: int = 0) -> bytes:
    return frames.data_head(epoch, offset, 0, len(log)) + log


def flipped(log: bytes, at: int) -> bytes:
    return log[:at] + bytes((log[at] ^ 1,)) + log[at + 1 :]


@pytest.mark.parametrize(
    ("say", "text"),
    [
        (lambda log: b"garbage, and then more garbage", "kind 103"),
        (lambda log: begin() + b"\x04\xff\xff\xff\xff", "DATA of 4294967295"),
        (lambda log: begin() + b"\x05\x7f\xff\xff\xff", "STATE of 2147483647"),
        (lambda log: data(0, log), "before BEGIN"),
        (lambda log: begin() + begin(), "began twice"),
        (lambda log: begin(version=2), "version 2"),
        (lambda log: begin(epoch=2), "epoch 2"),
        (lambda log: begin(first=-5, begin=-5), "begins at -5"),
        (lambda log: begin(address="nowhere"), "clients reach it at 'nowhere'"),
        (lambda log: begin() + data(96, log), "stands at 96, this log goes on at 0"),
        (lambda log: begin() + data(0, log[:96]) + data(0, log), "this log goes on at 96"),
        (lambda log: begin() + data(0, log, epoch=7), "epoch 7"),
        (lambda log: begin() + data(0, flipped(log, 88)), "checksum"),
        (lambda log: begin() + data(0, flipped(log, 4)), "magic number"),
        (lambda log: begin() + data(0, flipped(log, 1)), "a record of 65632 bytes"),
        (lambda log: begin() + data(0, flipped(log, 35)), "belongs to"),
        (lambda log: begin() + data(0, log) + frames.beat(4, 9, 9), "epoch 4"),
        (lambda log: begin() + data(0, b"\x7f\xff\xff\xff"), "record of 2147483647 bytes"),
    ],
)
def test_what_a_master_may_not_say(say: Say, text: str, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(loop: NetLoop) -> None:
        real = Master(loop)
        await real.store.start()
        await real.put(3)
        bad, slave = RawMaster(), Slave(loop)
        await bad.start(loop, lambda peer: peer.write(WELCOME + say(real.log())))
        await slave.start()
        await until(lambda: text in slave.follower.facts().why)
        await until(lambda: len(bad.heard) >= 4)
        assert slave.state is FollowerState.CONNECTING
        assert slave.log() == real.log()[: slave.store.log_end]
        assert slave.store.log_end % 96 == 0
        bad.stop()
        await real.source.start("127.0.0.1", HA_PORT)
        await same_logs(real, slave)  # and everything goes on
        await slave.stop()
        await real.stop()

    on_net(scenario)
    assert any(text in line and "master=127.0.0.1:10912" in line for line in lines(caplog))


def test_a_master_that_flips_bits_is_left_each_time_and_nothing_wrong_is_kept() -> None:
    """Where the format has a checksum or a structure; see store/commit_log/copy.py."""

    async def scenario(loop: NetLoop) -> None:
        real = Master(loop)
        await real.store.start()
        await real.put(30, b"0123456789" * 20)
        chance = random.Random(5)
        size = real.store.log_end // 30
        good = real.log()

        def greet(peer: Raw) -> None:
            at = slave.store.log_end
            rest = bytearray(good[at:])
            if rest:
                victim = chance.randrange(len(rest) // size) * size
                rest[victim + 88 + chance.randrange(200)] ^= 1 << chance.randrange(8)  # of the body
            said = begin(len(good), begin=at)
            peer.write(WELCOME + said + (data(at, bytes(rest)) if rest else b""))

        bad, slave = RawMaster(), Slave(loop)
        await bad.start(loop, greet)
        await slave.start()
        await asyncio.sleep(120)
        assert 5 < len(bad.heard) < 200
        assert slave.log() == good[: slave.store.log_end]
        await slave.stop()
        bad.stop()
        await real.store.stop()

    on_net(scenario)


def test_a_silent_master_is_left() -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop)
        await master.start()
        await slave.start()
        await master.put(5)
        await same_logs(master, slave)
        loop.silent.add(HA_PORT)
        began = loop.time()
        await until(lambda: slave.state is FollowerState.CONNECTING)
        assert 19.5 < loop.time() - began < 21.5
        assert "haHousekeepingInterval" in slave.follower.facts().why
        await until(lambda: not master.source.facts().links)
        assert loop.time() - began < 22
        await until(lambda: "no connection within 5 s" in slave.follower.facts().why)
        await master.put(5)
        loop.silent.clear()
        await same_logs(master, slave)
        await slave.stop()
        await master.stop()

    on_net(scenario)


def test_a_slave_whose_disk_is_full_says_so_and_goes_on() -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop)
        await master.start()
        await slave.start()
        await master.put(5)
        await same_logs(master, slave)
        slave.disk.faults.capacity_pages = slave.disk._used_pages
        await master.put(60, b"x" * 700)
        await until(lambda: slave.state is FollowerState.CONNECTING)
        assert slave.follower.facts().why
        slave.disk.faults.capacity_pages = None
        await same_logs(master, slave)
        await slave.stop()
        await master.stop()

    on_net(scenario)


def test_a_table_that_fails_does_not_stop_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Rows):
        def apply(self, rows: Any, *, whole: bool) -> None:
            raise ValueError("no such row")

    async def scenario(loop: NetLoop) -> None:
        master = Master(loop, Rows("a", {"x": 1}), Rows("b", {"x": 1}), Rows("c", {"x": 1}))
        good = Rows("b")
        slave = Slave(loop, Failing("a"), good)
        await master.start()
        await slave.start()
        await master.put(5)
        await same_logs(master, slave)
        await until(lambda: good.table == {"x": 1})
        await slave.stop()
        await master.stop()

    on_net(scenario)
    assert any("table_not_applied name=a" in line for line in lines(caplog))
    assert any("table_unknown name='c'" in line for line in lines(caplog))
