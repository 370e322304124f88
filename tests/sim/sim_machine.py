"""A machine of a simulated pair: its disk and clock outlive its lives, a broker's parts do not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from cosmodrome.env.base import Env
from cosmodrome.env.options import StoreOptions
from cosmodrome.replication.tables import Rows
from cosmodrome.sim.disk import PowerCut, SimDisk
from cosmodrome.sim.env import SimClock, SimOffload, sim_env
from cosmodrome.sim.net import NetLoop
from cosmodrome.sim.node import Node
from cosmodrome.store.store import Store

ROOT = "/store"
LOG = f"{ROOT}/commitlog"
DELAY_MS_MAX = 20

Serve = Callable[["Machine", Env], Coroutine[Any, Any, None]]


class DictTable:
    """A table as the broker has them; its rows outlive a kill, as if each change were saved.

    A row is when it changed, and where the log ended then.
    """

    leads = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept: dict[str, list[Any]] = {}
        self.watch: Callable[[Rows], None] = lambda rows: None  # what is about to be applied
        self._listeners: list[Callable[[Rows], None]] = []

    def rows(self) -> Rows:
        return {name: list(row) for name, row in self.kept.items()}

    def on_change(self, changed: Callable[[Rows], None]) -> Callable[[], None]:
        self._listeners.append(changed)
        return lambda: self._listeners.remove(changed)

    def apply(self, rows: Rows, *, whole: bool) -> None:
        self.watch(rows)
        if whole:
            self.kept.clear()
        self._put(rows)

    def change(self, rows: Rows) -> None:
        self._put(rows)
        for listener in tuple(self._listeners):
            listener({name: self.kept.get(name) for name in rows})  # as they are, no copies

    def recovered(self, log_end: int) -> None:
        """A master saves behind its disk: nothing that it says is ahead of its log."""
        for row in self.kept.values():
            row[1] = min(row[1], log_end)

    def forget_listeners(self) -> None:
        self._listeners.clear()

    def _put(self, rows: Rows) -> None:
        for name, value in rows.items():
            if value is None:
                self.kept.pop(name, None)
            else:
                self.kept.setdefault(name, [])[:] = value


class Machine:
    """`serve` builds what runs on it and sets `store`; it returns when that has started."""

    def __init__(
        self, name: str, loop: NetLoop, seed: int, options: StoreOptions, serve: Serve
    ) -> None:
        self.name = name
        self.loop = loop
        self.options = options
        self.clock = SimClock(loop)
        self.disk = SimDisk(f"disk-{name}-{seed}", self.clock.now_ms)
        self.tables = [DictTable("topics"), DictTable("offsets")]
        self.node: Node | None = None
        self.store: Store | None = None  # while it serves
        self.offload = SimOffload(random.Random(0), 0)
        self.lives = 0
        self.wiped = 0
        self.power = False  # it was cut before this life
        self.synced_end = 0  # when the last life ended
        self.errors: list[BaseException] = []
        self._serve = serve
        self._chance = random.Random(f"{name}-{seed}")
        self._fell = asyncio.Event()

    @property
    def synced(self) -> bool:
        return self.options.flush_disk_type == "SYNC_FLUSH"

    @property
    def serves(self) -> bool:
        return self.store is not None and not self.disk.dead

    async def start(self) -> bool:
        """Whether it serves; it may fall before that."""
        assert self.node is None
        self.lives += 1
        self.node = node = Node(self.name, self.loop)
        self._fell = asyncio.Event()
        self.disk.on_cut = self._fall
        for table in self.tables:
            table.forget_listeners()
        env = sim_env(self.disk, self.clock, self._chance.random().hex(), delay_ms_max=DELAY_MS_MAX)
        assert isinstance(env.offload, SimOffload)
        self.offload = env.offload
        starting = node.run(self._serve(self, env))
        falling = asyncio.ensure_future(self._fell.wait())
        await asyncio.wait([starting, falling], return_when=asyncio.FIRST_COMPLETED)
        falling.cancel()
        if starting.done() and not self.disk.dead:
            starting.result()
        return self.serves

    async def end(self, *, power: bool, wipe: bool = False) -> None:
        """A kill, or with `power` a power cut; `wipe` brings another disk."""
        if self.node is None:
            return
        if self.store is not None:
            self.synced_end = self.store._flush.synced_end
        self.store = None
        self.disk.cut()
        errors = await self.node.bury()
        self.errors += [error for error in errors if not isinstance(error, PowerCut)]
        self.loop.drop(self.node)
        self.node = None
        self.disk.restart(power=power)
        self.power = power
        if wipe:
            self.disk.wipe()
            self.wiped += 1
            self.synced_end = 0
            for table in self.tables:
                table.kept.clear()

    def log_bytes(self, start: int, end: int, *, stable: bool = False) -> bytes:
        """Of the commit log as it is on this disk, whatever the process believes."""
        size = self.options.mapped_file_size_commit_log
        found = b""
        while start < end:
            base = start - start % size
            stop = min(end, base + size)
            path = f"{LOG}/{base:020d}"
            data = self.disk.stable(path) if stable else self.disk.visible(path)
            found += data[start - base : stop - base].ljust(stop - start, b"\xff")
            start = stop
        return found

    def _fall(self) -> None:
        if self.node is not None:
            self.node.dumb = True
        self._fell.set()
