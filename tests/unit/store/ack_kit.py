"""A store of a master in virtual time whose syncs end when the test says so."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from tests.unit.store.store_kit import HOST, T

from cosmodrome.env.base import Done, Env, SegmentFile
from cosmodrome.env.options import StoreOptions
from cosmodrome.sim.disk import SimDisk
from cosmodrome.sim.env import SimClock, SimOffload
from cosmodrome.store.store import Draft, Store

__all__ = ["AckRig", "HandSyncer", "T"]


class HandSyncer:
    """One sync at a time, as the real one; `end` is what the test calls."""

    def __init__(self) -> None:
        self.at_once = False
        self._done: Done | None = None

    def begin(self, files: Sequence[SegmentFile], failed: Callable[[], None], done: Done) -> None:
        assert self._done is None
        self._done = done
        if self.at_once:
            asyncio.get_running_loop().call_soon(self.end)

    def end(self, error: BaseException | None = None) -> bool:
        """Whether one was under way."""
        done, self._done = self._done, None
        if done is not None:
            done(error)
        return done is not None

    def close(self) -> None:
        self._done = None


class AckRig:
    """`heard` has who was told what, and when."""

    def __init__(self, disk: SimDisk | None = None, **changes: Any) -> None:
        loop = asyncio.get_running_loop()
        self.disk = disk or SimDisk(1)
        self.syncer = HandSyncer()
        self.env = Env(
            clock=SimClock(loop),
            disk=self.disk,
            random=random.Random(1),
            offload=SimOffload(random.Random(1), 0),
            syncer=lambda: self.syncer,
        )
        settings: dict[str, Any] = {
            "store_path_root_dir": "/store",
            "mapped_file_size_commit_log": 65536,
            "max_hash_slot_num": 100,
            "max_index_num": 100,
            "sync_flush_timeout": 5000,
            "slave_timeout": 3000,
            "flush_disk_type": "SYNC_FLUSH",
            "broker_role": "SYNC_MASTER",
        }
        self.store = Store(StoreOptions(**(settings | changes)), self.env)
        self.slave = True  # whether one can be waited for
        self.asked: list[int] = []
        self.heard: list[tuple[list[Any], object, float]] = []
        self.began = 0.0

    async def __aenter__(self) -> AckRig:
        await self.store.start()
        self.store.require_acks(self._available)
        self.began = asyncio.get_running_loop().time()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.syncer.at_once = True
        self.syncer.end()
        await self.store.stop()

    def _available(self, end: int) -> bool:
        self.asked.append(end)
        return self.slave

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time() - self.began

    def listen(self, who: list[Any], outcome: object) -> None:
        self.heard.append((who, outcome, round(self.now, 3)))

    def stage(self, body: bytes = b"body") -> int:
        return self.store.append(Draft("T", 0, body, "", HOST, HOST)).end

    def wait(self, end: int, who: object, *, wait: bool = True) -> None:
        self.store.when_durable(end, self.listen, who, wait=wait)
        self.store.relieve()

    async def send(self, who: object, *, wait: bool = True) -> int:
        """Stage, wait in line, have it written."""
        end = self.stage()
        self.wait(end, who, wait=wait)
        await asyncio.sleep(0)
        return end

    async def until(self, seconds: float) -> None:
        """Let time pass, up to `seconds` since the begin."""
        await asyncio.sleep(self.began + seconds - asyncio.get_running_loop().time())
