"""One suite for the simulated engine and, where the program is found, for a real etcd.

`tests/oracle/test_oracle_etcd.py` runs it with an etcd that it fetches if need be.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest
from peers.etcd import EtcdCluster
from tests.unit.replication.consensus_suite import CASES, Case
from tests.unit.replication.etcd_kit import EtcdEngine, run
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


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    if shutil.which("etcd") is None:
        pytest.skip("there is no program `etcd` here (Debian: etcd-server); `make oracle` has one")
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_real_etcd(case: Case, etcd: EtcdCluster) -> None:
    run(case, EtcdEngine(etcd))
