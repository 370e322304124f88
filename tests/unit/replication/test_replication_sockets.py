"""The same over real sockets and files, where buffers are views of maps."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tests.unit.replication.pair_kit import NoClassicMaster
from tests.unit.store.store_kit import draft, eventually

from cosmodrome.env.base import Env
from cosmodrome.env.options import StoreOptions
from cosmodrome.env.real import RealDisk, ThreadOffload, WallClock
from cosmodrome.replication.follower import Follower
from cosmodrome.replication.source import Source
from cosmodrome.replication.tables import AppliedTables
from cosmodrome.replication.values import FollowerState, Node
from cosmodrome.store.store import PutStatus, Store


def store_in(root: Path, role: str) -> tuple[Store, StoreOptions, Env]:
    options = StoreOptions(
        store_path_root_dir=str(root),
        broker_role=role,  # type: ignore[arg-type]
        mapped_file_size_commit_log=1 << 20,
        disk_space_warning_level_ratio=100,
        max_hash_slot_num=100,
        max_index_num=1000,
    )
    env = Env(clock=WallClock(), disk=RealDisk(), random=random.Random(1), offload=ThreadOffload())
    return Store(options, env), options, env


@pytest.mark.parametrize("loops", ["asyncio", "uvloop"])
def test_a_pair_over_sockets(tmp_path: Path, loops: str) -> None:
    async def scenario() -> None:
        there, master_options, _ = store_in(tmp_path / "m", "SYNC_MASTER")
        here, slave_options, env = store_in(tmp_path / "s", "SLAVE")
        source = Source(there, master_options, (), Node("c", "b", 0, "m"))
        there.require_acks(source.available)
        applied = AppliedTables((), (), lambda: here.log_end)
        follower = Follower(
            here, slave_options, applied, Node("c", "b", 1, "s"), env, NoClassicMaster()
        )
        await there.start()
        await here.start()
        port = await source.start("127.0.0.1", 0)
        chance = random.Random(3)
        bodies = [chance.randbytes(chance.choice((1, 100, 5000, 400_000))) for _ in range(60)]
        for body in bodies[:50]:
            await there.durable(there.append(draft(body)).end)
        await follower.start()
        follower.follow(f"127.0.0.1:{port}")
        await eventually(lambda: follower.facts().state is FollowerState.IN_STEP)
        for body in bodies[50:]:
            assert await there.durable(there.append(draft(body)).end) is PutStatus.OK
        assert here.durable_end == there.log_end > 5 << 20
        await follower.stop()
        await source.stop()
        await here.stop()
        await there.stop()

    if loops == "uvloop":
        uvloop = pytest.importorskip("uvloop")
        uvloop.run(scenario())
    else:
        asyncio.run(scenario())
    files = sorted((tmp_path / "m" / "commitlog").iterdir())
    for path in files:
        copy = tmp_path / "s" / "commitlog" / path.name
        if copy.exists() or any(path.read_bytes()):
            assert copy.read_bytes() == path.read_bytes(), path.name
