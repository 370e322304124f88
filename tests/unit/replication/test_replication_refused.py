"""Logs that do not fit: a slave is refused by name, and the remedy that it is told works."""

from __future__ import annotations

import json
import re

import pytest
from tests.unit.replication.pair_kit import Master, Slave, on_net, same_logs, until

from cosmodrome.replication import frames, joining
from cosmodrome.replication.values import FollowerState
from cosmodrome.sim.net import NetLoop
from cosmodrome.store.offline import directory as offline


async def refused(master: Master, slave: Slave) -> str:
    """What the slave says; nothing is discarded, and the master knows of it."""
    await slave.start()
    before = slave.log()
    await until(lambda: slave.state is FollowerState.REFUSED)
    why = slave.follower.facts().why
    facts = master.source.facts()
    assert facts.refused_links >= 1 and facts.refused_why and not facts.links
    assert not master.source.available(0)
    assert slave.log() == before
    await slave.stop()
    return why


async def write(machine: Master | Slave, count: int, body: bytes = b"body") -> None:
    """A log that another master has written goes on."""
    other = Master(machine.loop, name=machine.name, disk=machine.disk)
    await other.store.start()
    await other.put(count, body)
    await other.store.stop()


async def common(loop: NetLoop, count: int, body: bytes = b"body") -> tuple[Master, Slave]:
    """A master that runs, and its slave, which does not; both have the same log."""
    master, slave = Master(loop), Slave(loop)
    await master.start()
    await slave.start()
    await master.put(count, body)
    await same_logs(master, slave)
    await slave.stop()
    return master, Slave(loop, disk=slave.disk)


async def cut_as_told(slave: Slave, why: str) -> Slave:
    """What the operator does then; the slave of the next start."""
    found = re.search(r"`cosmo store repair DIR --cut-at (\d+)`", why)
    assert found is not None, why
    with offline.opened("/store", slave.disk) as files:
        plan = offline.plan_repair(files, json.loads, int(found[1]))
        assert not plan.undecided
        offline.run_plan(files, plan, slave.clock.now_ms())
    return Slave(slave.loop, disk=slave.disk)


@pytest.mark.parametrize(("count", "size"), [(10, 4), (22, 600)])  # or at the end of a file
def test_a_slave_that_is_ahead_is_refused_and_can_be_cut(count: int, size: int) -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = await common(loop, count, b"x" * size)
        await write(slave, 3, b"y" * 3000)
        end = master.store.log_end
        why = await refused(master, slave)
        assert f"ahead: its log ends at {slave.store.log_end}, the master's at {end};" in why
        assert f"--cut-at {end}`" in why and "promote" in why and "set-aside" in why
        slave = await cut_as_told(slave, why)
        await slave.start()
        await same_logs(master, slave)
        await slave.stop()
        await master.stop()

    on_net(scenario)


def test_a_slave_that_differs_behind_a_common_file_can_be_cut_there() -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = await common(loop, 100, b"x" * 700)
        end = master.store.log_end
        await write(slave, 5, b"mine")
        await master.put(1, b"your")  # shorter than the slave, and no record of it begins there
        why = await refused(master, slave)
        assert f"differ: the slave's ends at {slave.store.log_end}" in why
        assert f"the master's at {master.store.log_end};" in why
        assert f"up to {end - end % 16384} they are the same" in why and "promote" in why
        slave = await cut_as_told(slave, why)
        await slave.start()
        await same_logs(master, slave)
        await slave.stop()
        await master.stop()

    on_net(scenario)


@pytest.mark.parametrize("count", [1, 20])  # shorter than the slave's, and longer
def test_a_slave_that_differs_in_its_only_file_is_refused(count: int) -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = await common(loop, 3)
        await write(slave, 5, b"mine")
        await master.put(count, b"your")
        why = await refused(master, slave)
        assert f"differ: the slave's ends at {slave.store.log_end}" in why
        assert "no place was found" in why and "--cut-at" not in why
        assert "`cosmo store set-aside DIR`" in why and "promote" in why
        await master.stop()

    on_net(scenario)


def test_a_master_that_has_nothing_left_names_promotion() -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop)
        await write(slave, 3)
        await master.start()
        why = await refused(master, slave)
        assert "the master's at 0; no place was found" in why and "promote the slave" in why
        await master.stop()

    on_net(scenario)


def test_strange_marks_are_no_common_place() -> None:
    async def scenario(loop: NetLoop) -> None:
        master, _ = await common(loop, 3)
        for place in (-(1 << 62), -1, 0, 1 << 62):
            refusal = frames.Refusal(why="w", remedy="r", marks=((1 << 50, 0, 0), (place, 0, 0)))
            assert "no place was found" in joining.told_apart(refusal, master.store).why
        plain = frames.Refusal(why="w", remedy="r")
        assert joining.told_apart(plain, master.store) is plain
        await master.stop()

    on_net(scenario)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"broker_id": 0}, "brokerId 0"),
        ({"mapped_file_size_commit_log": 8192}, "mappedFileSizeCommitLog"),
    ],
)
def test_a_slave_with_wrong_settings_is_refused(changes: dict[str, int], text: str) -> None:
    async def scenario(loop: NetLoop) -> None:
        master, slave = Master(loop), Slave(loop, **changes)  # type: ignore[arg-type]
        await master.start()
        assert text in await refused(master, slave)
        await master.stop()

    on_net(scenario)
