"""The faults of the simulated consensus engine. What it does without them is in the suite of
tests/unit/replication."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from tests.virtual_time import virtual_time

from cosmodrome.errors import ConsensusUnavailable, LeaseGone, ResultUnknown
from cosmodrome.replication.consensus import Compare, Put, Reading
from cosmodrome.sim.consensus import ATTEMPT_S, EVENTS, HISTORY_MAX, LATE_S, OUTAGE_S, SimConsensus
from cosmodrome.sim.net import NetLoop
from cosmodrome.sim.node import Node

SEEDS = range(40)


async def lost(seed: int) -> tuple[bool, bool]:
    """Whether a transaction was there when its answer was known to be lost, and at last."""
    engine = SimConsensus(seed)
    client = engine.client()
    engine.faults.lost_answers = 1.0
    with pytest.raises(ResultUnknown):
        await client.commit([Compare("k")], [Put("k", b"")])
    engine.faults.lost_answers = 0.0
    soon = bool((await client.get("k")).entries)
    await asyncio.sleep(LATE_S)
    return soon, bool((await client.get("k")).entries)


@virtual_time
async def test_a_transaction_without_an_answer_was_applied_or_not_or_will_be() -> None:
    found = [await lost(seed) for seed in SEEDS]
    assert set(found) == {(True, True), (False, False), (False, True)}
    assert found == [await lost(seed) for seed in SEEDS]


@virtual_time
async def test_a_late_transaction_loses_against_another_change() -> None:
    for seed in SEEDS:
        engine = SimConsensus(seed)
        client = engine.client()
        engine.faults.lost_answers = 1.0
        with pytest.raises(ResultUnknown):
            await client.commit([Compare("k")], [Put("k", b"first")])
        engine.faults.lost_answers = 0.0
        if (await client.commit([Compare("k")], [Put("k", b"second")])).succeeded:
            await asyncio.sleep(LATE_S)
            assert (await client.get("k")).entries[0].value == b"second"


@virtual_time
async def test_other_calls_without_an_answer_may_be_repeated() -> None:
    engine = SimConsensus(1)
    engine.faults.lost_answers = 1.0
    client = engine.client()
    for call in (client.get("k"), client.grant(3), client.keep(1), client.revoke(1)):
        with pytest.raises(ConsensusUnavailable):
            await call


@virtual_time
async def test_an_outage_serves_nothing_and_ends_no_lease() -> None:
    engine = SimConsensus(1)
    client = engine.client()
    lease = await client.grant(3)
    await client.commit([], [Put("k", b"", lease.id)])
    engine.fail()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    with pytest.raises(ConsensusUnavailable):
        await client.commit([], [Put("k", b"2")])
    assert loop.time() - begun >= ATTEMPT_S
    await asyncio.sleep(100)
    engine.recover()  # every lease has its whole time again
    await asyncio.sleep(2.5)
    assert (await client.get("k")).entries[0].value == b""
    await asyncio.sleep(0.5)
    assert (await client.get("k")).entries == ()


@virtual_time
async def test_an_outage_while_a_transaction_is_out_makes_its_result_unknown() -> None:
    engine = SimConsensus(1)
    engine.faults.delay_s = 1.0
    client = engine.client()
    call = asyncio.ensure_future(client.commit([], [Put("k", b"")]))
    while not engine.get("k").entries:
        await asyncio.sleep(0.01)
    assert not call.done()
    engine.fail()
    with pytest.raises(ResultUnknown):
        await call


@virtual_time
async def test_a_new_leader_begins_the_time_of_leases_again() -> None:
    engine = SimConsensus(1)
    client = engine.client()
    lease = await client.grant(3)
    for _ in range(5):
        await asyncio.sleep(2)
        engine.change_leader()
    assert await client.keep(lease.id) == 3


@virtual_time
async def test_a_lease_may_end_without_reason() -> None:
    engine = SimConsensus(1)
    client = engine.client()
    lease = await client.grant(3600)
    await client.commit([], [Put("k", b"", lease.id)])
    async with aclosing(client.watch("k", engine.revision + 1)) as watch:
        engine.end_lease(lease.id)
        assert (await anext(watch)).deleted == ("k",)
    with pytest.raises(LeaseGone):
        await client.keep(lease.id)


@virtual_time
async def test_a_node_that_is_cut_off_hears_later_what_it_missed() -> None:
    engine = SimConsensus(1)
    here, there = engine.client("a"), engine.client("b")
    async with aclosing(here.watch("k", 2)) as watch:
        engine.cut_off.add("a")
        await there.commit([], [Put("k", b"1")])
        with pytest.raises(ConsensusUnavailable):
            await here.get("k")
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(50)
        assert not waiting.done()
        engine.cut_off.clear()
        assert (await waiting).entries[0].value == b"1"


@virtual_time
async def test_old_changes_are_forgotten() -> None:
    engine = SimConsensus(1)
    for number in range(HISTORY_MAX + 10):
        engine.commit([], [Put("k", b"%d" % number)])
    client = engine.client()
    async with aclosing(client.watch("k", 2)) as watch:
        assert await anext(watch) == Reading(engine.revision, engine.get("k").entries)
    async with aclosing(client.watch("k", engine.revision)) as watch:
        assert (await anext(watch)).revision == engine.revision


async def life(seed: int) -> list[object]:
    """What a client sees while the seed chooses what happens to it."""
    engine = SimConsensus(seed)
    engine.faults.lost_answers = 0.1
    client = engine.client()
    trace: list[object] = []
    for turn in range(60):
        if turn % 3 == 0:
            trace.append(engine.strike((*EVENTS, "empty")))
        try:
            lease = await client.grant(2)
            trace.append(await client.commit([], [Put(f"k{turn % 5}", b"", lease.id)]))
            trace.append(await client.get("k1"))
        except (ConsensusUnavailable, ResultUnknown, LeaseGone) as error:
            trace.append(type(error))
        trace.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.3)
    await asyncio.sleep(OUTAGE_S)
    trace.append(engine.get("k1"))
    return trace


def test_one_seed_is_one_life() -> None:
    def run(seed: int) -> list[object]:
        with asyncio.Runner(loop_factory=NetLoop) as runner:
            return runner.run(life(seed))

    lives = [run(seed) for seed in range(10)]
    assert lives == [run(seed) for seed in range(10)]
    assert lives[0] != lives[1]
    seen = {step for trace in lives for step in trace if isinstance(step, str | type)}
    assert {"leader", "lease", "outage", "compact", "empty"} <= seen
    assert {ConsensusUnavailable, ResultUnknown} <= seen


def test_a_machine_that_is_paused_does_not_stop_the_engine() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        engine = SimConsensus(1)
        node = Node("a", loop)

        async def hold() -> None:
            client = engine.client("a")
            lease = await client.grant(2)
            await client.commit([], [Put("k", b"", lease.id)])

        await node.run(hold())
        node.pause()
        other = engine.client("b")
        assert (await other.get("k")).entries
        await asyncio.sleep(2)
        assert not (await other.get("k")).entries

    with asyncio.Runner(loop_factory=NetLoop) as runner:
        runner.run(scenario())
