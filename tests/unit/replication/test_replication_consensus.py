"""The suite of consensus engines, with the simulated one."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.replication.consensus_suite import CASES, Case
from tests.virtual_time import virtual_time

from cosmodrome.replication.consensus import Consensus
from cosmodrome.sim.consensus import SimConsensus


class SimEngine:
    prefix = "/cosmodrome/test/"

    def __init__(self, seed: int) -> None:
        self._engine = SimConsensus(seed)

    def client(self) -> Consensus:
        return self._engine.client()

    async def compact(self) -> None:
        self._engine.compact()

    async def empty(self) -> None:
        self._engine.empty()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("seed", range(5))
@virtual_time
async def test_the_simulated_engine(seed: int, case: Case) -> None:
    before = asyncio.all_tasks()
    await case(SimEngine(seed))
    assert asyncio.all_tasks() == before
