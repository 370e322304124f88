"""SYNC_MASTER: a send waits for this disk and for a slave, and its status says what was missed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.store.ack_kit import AckRig
from tests.virtual_time import virtual_time

from cosmodrome.errors import StoreBusy, StoreUnwritable
from cosmodrome.store.commit_log import flush
from cosmodrome.store.commit_log.wait_line import WaitLine
from cosmodrome.store.values import PutStatus

OK = PutStatus.OK
DISK = PutStatus.FLUSH_DISK_TIMEOUT
SLAVE = PutStatus.FLUSH_SLAVE_TIMEOUT
NONE = PutStatus.SLAVE_NOT_AVAILABLE


@virtual_time
async def test_the_disk_first_then_the_slave() -> None:
    async with AckRig() as rig:
        end = await rig.send("a")
        await rig.until(1)
        rig.syncer.end()
        assert not rig.heard
        assert rig.store.bounds("T", 0) == (0, 1), "read without the slave"
        await rig.until(2)
        rig.store.acknowledge(end - 1)
        assert not rig.heard
        rig.store.acknowledge(end)
        assert rig.heard == [(["a"], OK, 2)]


@virtual_time
async def test_the_slave_first_then_the_disk() -> None:
    async with AckRig() as rig:
        end = await rig.send("a")
        rig.store.acknowledge(end)
        assert not rig.heard
        await rig.until(2)
        rig.syncer.end()
        assert rig.heard == [(["a"], OK, 2)]


@virtual_time
async def test_the_slave_is_late() -> None:
    async with AckRig() as rig:
        end = await rig.send("a")
        rig.syncer.end()
        await rig.until(2.999)
        assert not rig.heard
        await rig.until(9)
        assert rig.heard == [(["a"], SLAVE, 3)]
        rig.store.acknowledge(end)
        assert len(rig.heard) == 1


@virtual_time
async def test_the_disk_is_late() -> None:
    async with AckRig() as rig:
        end = await rig.send("a")
        rig.store.acknowledge(end)
        await rig.until(9)
        assert rig.heard == [(["a"], DISK, 5)]


@pytest.mark.parametrize(("disk_ms", "slave_ms"), [(5000, 3000), (3000, 5000), (4000, 4000)])
def test_both_are_late(disk_ms: int, slave_ms: int) -> None:
    @virtual_time
    async def check() -> None:
        async with AckRig(sync_flush_timeout=disk_ms, slave_timeout=slave_ms) as rig:
            await rig.send("a")
            await rig.until(9)
            assert rig.heard == [(["a"], SLAVE, max(disk_ms, slave_ms) / 1000)]

    check()


@virtual_time
async def test_the_ack_comes_between_the_two_deadlines() -> None:
    async with AckRig() as rig:
        end = await rig.send("a")
        await rig.until(4)
        rig.store.acknowledge(end)
        await rig.until(9)
        assert rig.heard == [(["a"], DISK, 5)]


@virtual_time
async def test_the_disk_comes_when_the_slave_is_late_already() -> None:
    async with AckRig() as rig:
        await rig.send("a")
        await rig.until(3.2)
        assert not rig.heard
        rig.syncer.end()
        assert rig.heard == [(["a"], SLAVE, 3.2)]


@virtual_time
async def test_who_comes_behind_keeps_its_own_deadline() -> None:
    async with AckRig() as rig:
        await rig.send("a")
        await rig.until(0.5)
        await rig.send("b")
        await rig.until(3.2)
        rig.syncer.end()  # only what was written when it began
        rig.syncer.end()
        await rig.until(9)
        assert rig.heard == [(["a"], SLAVE, 3.2), (["b"], SLAVE, 3.5)]


@virtual_time
async def test_without_a_slave_the_disk_is_waited_for() -> None:
    async with AckRig() as rig:
        rig.slave = False
        end = await rig.send("a")
        rig.store.acknowledge(end)
        assert not rig.heard
        await rig.until(1)
        rig.syncer.end()
        assert rig.heard == [(["a"], NONE, 1)]
        rig.wait(end, "known")
        assert rig.heard[1:] == [(["known"], OK, 1)]
        rig.store.acknowledge(0)
        rig.wait(end, "alone")
        assert rig.heard[2:] == [(["alone"], NONE, 1)]


@virtual_time
async def test_without_a_slave_and_with_a_late_disk() -> None:
    async with AckRig() as rig:
        rig.slave = False
        await rig.send("a")
        await rig.until(9)
        assert rig.heard == [(["a"], NONE, 5)]


@virtual_time
async def test_who_found_no_slave_passes_those_who_wait_for_one() -> None:
    async with AckRig() as rig:
        first = await rig.send("a")
        rig.slave = False
        await rig.send("b")
        rig.slave = True
        last = await rig.send("c")
        rig.syncer.end()
        rig.syncer.end()
        assert rig.heard == [(["b"], NONE, 0)]
        rig.store.acknowledge(first)
        rig.store.acknowledge(last)
        assert rig.heard[1:] == [(["a"], OK, 0), (["c"], OK, 0)]
        assert rig.asked == sorted(rig.asked) and len(rig.asked) == 3, "asked once each"


@virtual_time
async def test_an_ack_that_falls_counts_no_more() -> None:
    async with AckRig() as rig:
        end = await rig.send("a")
        rig.store.acknowledge(end)
        rig.store.acknowledge(0)  # its link went
        rig.syncer.end()
        assert not rig.heard
        await rig.until(9)
        assert rig.heard == [(["a"], SLAVE, 3)]


@virtual_time
async def test_wait_false_waits_for_neither() -> None:
    async with AckRig() as rig:
        rig.slave = False
        await rig.send("a", wait=False)
        assert rig.heard == [(["a"], OK, 0)] and not rig.asked


@virtual_time
async def test_who_leaves_hears_in_the_order_of_the_log_by_status() -> None:
    async with AckRig() as rig:
        other: list[tuple[list[Any], object]] = []
        ends = [rig.stage() for _ in range(4)]
        rig.wait(ends[0], "a")
        rig.store.when_durable(ends[1], lambda who, outcome: other.append((who, outcome)), "b")
        rig.wait(ends[2], "c")
        rig.wait(ends[3], "d")
        await asyncio.sleep(0)
        rig.store.acknowledge(ends[2])
        await rig.until(4)
        rig.syncer.end()
        assert rig.heard == [(["a"], OK, 4), (["c"], OK, 4), (["d"], SLAVE, 4)]
        assert other == [(["b"], OK)]


@virtual_time
async def test_who_asks_later_for_less_gives_up_no_later_than_those_behind() -> None:
    async with AckRig() as rig:
        less, more = rig.stage(), rig.stage()
        rig.wait(more, "more")
        await rig.until(1)
        rig.wait(less, "less")
        rig.syncer.end()
        await rig.until(9)
        assert rig.heard == [(["less", "more"], SLAVE, 3)]


@virtual_time
async def test_async_flush_waits_for_the_slave_only() -> None:
    async with AckRig(flush_disk_type="ASYNC_FLUSH") as rig:
        end = await rig.send("a")
        assert not rig.heard
        rig.store.acknowledge(end)
        assert rig.heard == [(["a"], OK, 0)]
        await rig.send("b")
        rig.slave = False
        await rig.send("c")
        assert rig.heard[1:] == [(["c"], NONE, 0)]
        await rig.until(9)
        assert rig.heard[2:] == [(["b"], SLAVE, 3)]


@virtual_time
async def test_a_pool_is_waited_for_until_it_is_written() -> None:
    pool: dict[str, Any] = {"transient_store_pool_enable": True, "commit_interval_commit_log": 200}
    async with AckRig(flush_disk_type="ASYNC_FLUSH", **pool) as rig:
        end = await rig.send("a")
        rig.slave = False
        await rig.send("b")
        assert not rig.heard
        await rig.until(1)
        assert rig.heard == [(["b"], NONE, 0.2)]
        rig.store.acknowledge(end)
        assert rig.heard[1:] == [(["a"], OK, 1)]


@virtual_time
async def test_who_came_before_acks_were_required_does_not_wait_for_them() -> None:
    rig = AckRig()
    await rig.store.start()
    rig.began = asyncio.get_running_loop().time()
    await rig.send("before")
    async with rig:
        end = await rig.send("behind")
        rig.syncer.end()
        rig.syncer.end()
        assert rig.heard == [(["before"], OK, 0)]
        rig.store.acknowledge(end)
        assert rig.heard[1:] == [(["behind"], OK, 0)]


@virtual_time
async def test_a_failed_sync_lets_everybody_go() -> None:
    async with AckRig() as rig:
        stored = await rig.send("stored")
        rig.syncer.end()
        lost = await rig.send("lost")
        rig.slave = False
        await rig.send("alone")
        rig.syncer.end(OSError(5, "Input/output error"))
        (who, outcome, _), (others, error, _) = rig.heard
        assert (who, outcome) == (["stored"], SLAVE)
        assert others == ["lost", "alone"] and isinstance(error, StoreUnwritable)
        rig.wait(stored, "later")
        rig.wait(lost, "later")
        assert rig.heard[2][:2] == (["later"], SLAVE)
        assert isinstance(rig.heard[3][1], StoreUnwritable)


@virtual_time
async def test_a_stop_lets_everybody_go() -> None:
    rig = AckRig()
    async with rig:
        await rig.send("stored")
    assert [(who, outcome) for who, outcome, _ in rig.heard] == [(["stored"], SLAVE)]


@virtual_time
async def test_a_failed_write_takes_back_those_who_wait_for_slaves_too() -> None:
    async with AckRig(commit_log_zeros_ahead=0) as rig:
        await rig.send("stored")
        rig.disk.faults.capacity_pages = 0
        rig.slave = False
        ends = [rig.stage(bytes(9000)) for _ in range(2)]
        rig.wait(ends[0], "alone")
        rig.slave = True
        rig.wait(ends[1], "lost")
        await asyncio.sleep(0)
        rig.disk.faults.capacity_pages = None
        ((who, error, _),) = rig.heard
        assert who == ["alone", "lost"] and isinstance(error, StoreUnwritable)
        rig.syncer.end()
        rig.store.acknowledge(1 << 40)
        assert rig.heard[1:] == [(["stored"], OK, 0)]


@virtual_time
async def test_too_much_that_waits_for_slaves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flush, "BUSY_BYTES", 1000)
    monkeypatch.setattr(flush, "UNSYNCED_BYTES_MAX", 3000)
    async with AckRig(os_page_cache_busy_time_out_mills=1000) as rig:
        rig.syncer.at_once = True
        ends = [await rig.send("a") for _ in range(16)]
        assert ends[-1] - ends[0] > 1000
        await rig.until(1)
        rig.stage()
        await rig.until(1.1)
        with pytest.raises(StoreBusy, match=r"wait for a slave .* for 1\.1 s"):
            rig.stage()
        rig.store.acknowledge(ends[-1])
        for _ in range(40):
            end = rig.stage()
            rig.wait(end, "b")
            if rig.store.why_unwritable:
                break
        else:
            pytest.fail("unbounded")
        assert end - ends[-1] < 3000 + 300
        rig.store.acknowledge(end)
        await asyncio.sleep(0.001)
        assert rig.store.why_unwritable is None


def test_nobody_waits_for_ever_without_a_timer() -> None:
    line = WaitLine(5, 3)
    line.join_without_slave(10, 2, lambda who, outcome: None, "a")
    assert line.next_deadline(2) == 7
    line.join_slave(10, 2.5, lambda who, outcome: None, "b")
    assert line.next_deadline(2.5) == 5.5
    assert line.next_deadline(5.5) == 7
