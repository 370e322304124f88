"""Pairs of every kind that are stopped in order, killed, or lose their master, under load.

`test_crash_pair.py` kills the pair that promises most; here are clean stops, and the pairs that
promise less: an ASYNC_MASTER may lose its lag, but only with its machine.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from tests.crash.test_crash_node import QUEUES, pull_all
from tests.crash.test_crash_pair import Machine, Places, check, killed_at_the_end, load

ROUNDS = max(1, int(os.environ.get("CRASH_CYCLES", "3")) // 3)
PATIENCE_S = 60.0


async def settled(senders: list[asyncio.Task[None]]) -> None:
    for sender in senders:
        sender.cancel()
    outcomes = await asyncio.gather(*senders, return_exceptions=True)
    assert not [one for one in outcomes if isinstance(one, Exception)]


@pytest.mark.timeout(300 + 60 * ROUNDS)
async def test_a_pair_that_is_stopped_in_order_loses_nothing(tmp_path: Path) -> None:
    master, slave = Machine(tmp_path / "m"), Machine(tmp_path / "s")
    acknowledged: Places = {}
    with killed_at_the_end(master, slave):
        await asyncio.gather(master.start("SYNC_MASTER"), slave.start("SLAVE", master))
        for number, victims in enumerate([(slave,), (master,), (master, slave)] * ROUNDS):
            await slave.until_in_step()
            senders = await load(master, f"{number}", acknowledged)
            await asyncio.gather(*(victim.stop() for victim in victims))
            await settled(senders)
            if master in victims:
                await master.start("SYNC_MASTER")
            if slave in victims:
                await slave.start("SLAVE", master)
        await slave.until_in_step()
        await check(master, acknowledged)
        await check(slave, acknowledged)


MODES = [
    ("ASYNC_MASTER", "SYNC_FLUSH"),
    ("ASYNC_MASTER", "ASYNC_FLUSH"),
    ("SYNC_MASTER", "ASYNC_FLUSH"),
]


@pytest.mark.timeout(300 + 60 * ROUNDS)
@pytest.mark.parametrize(("role", "flush"), MODES)
async def test_a_pair_that_promises_less_keeps_that(tmp_path: Path, role: str, flush: str) -> None:
    """Both are killed, both are stopped, and at last the master is lost with its disk."""
    chance = random.Random(f"{role}-{flush}")
    master, slave = Machine(tmp_path / "m", flush), Machine(tmp_path / "s", flush)
    acknowledged: Places = {}
    with killed_at_the_end(master, slave):
        await asyncio.gather(master.start(role), slave.start("SLAVE", master))
        for number, ends in enumerate(["killed", "stopped"] * ROUNDS):
            await slave.until_in_step()
            senders = await load(master, f"{number}", acknowledged)
            await asyncio.sleep(chance.uniform(0.0, 0.3))
            if ends == "killed":
                master.kill()
                slave.kill()
            else:
                await asyncio.gather(master.stop(), slave.stop())
            await settled(senders)
            await asyncio.gather(master.start(role), slave.start("SLAVE", master))
        await until_it_has_all(master)
        await slave.until_it_serves_the_topic()
        await check(master, acknowledged)
        await check(slave, acknowledged)

        copied = dict(acknowledged)
        senders = await load(master, "last", acknowledged)
        master.kill()
        master.lose_disk()
        await settled(senders)
        slave.kill()
        await slave.start(role)
        if role == "SYNC_MASTER":
            await check(slave, acknowledged)
        else:
            await check(slave, copied)
            await check_only_the_end_is_missing(slave, acknowledged)


async def until_it_has_all(master: Machine) -> None:
    """Return when its one slave has all of a log that does not grow."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            links = (await master.status()).ha_connection_info
            if len(links) == 1 and links[0].diff == 0:
                return
            await asyncio.sleep(0.05)


async def check_only_the_end_is_missing(machine: Machine, acknowledged: Places) -> None:
    """What a slave had not received is lost, and nothing in between."""
    async with machine.link() as link:
        for queue_id in range(QUEUES):
            kept = {record.queue_offset: record.body for record in await pull_all(link, queue_id)}
            assert sorted(kept) == list(range(len(kept)))
            sent = {place[1]: body for place, body in acknowledged.items() if place[0] == queue_id}
            assert all(kept[at] == body for at, body in sent.items() if at < len(kept))
