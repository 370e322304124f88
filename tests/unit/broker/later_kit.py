"""A store whose clock the test sets, and the services that let messages wait in it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.broker_fakes import STORE_HOST

from cosmodrome.broker.later import delivery
from cosmodrome.broker.later.deferral import Deferral
from cosmodrome.broker.later.delay import Delays
from cosmodrome.broker.later.delivery import DeliverySettings
from cosmodrome.broker.later.timers import Timers
from cosmodrome.broker.members.topics import Topics
from cosmodrome.broker.role import MASTER, Role
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.store.store import DelayLevels, Draft, Store
from cosmodrome.wire.message import format_properties, parse_properties
from cosmodrome.wire.record import Record, iter_records

START_MS = 1_800_000_000_000
# Short enough that a test which moves the clock sees the effect at once.
SLEEP_SECONDS = 0.005
NEVER_MS = 3_600_000


class SetClock:
    def __init__(self) -> None:
        self.ms = START_MS

    def now_ms(self) -> int:
        return self.ms


class Later:
    """One life of a store directory; open the next one after `close` or `crash`."""

    def __init__(
        self,
        path: Path,
        clock: SetClock,
        *,
        levels: str = "1s 5s 10s",
        save_interval_ms: int = NEVER_MS,
        role: Role = MASTER,
        **changes: Any,
    ) -> None:
        self.clock = clock
        self.env: Env = dataclasses.replace(real_env(seed=1), clock=clock)
        options = StoreOptions(
            store_path_root_dir=str(path),
            **{
                "mapped_file_size_commit_log": 1 << 22,
                "mapped_file_size_consume_queue": 60_000,
                "max_hash_slot_num": 100,
                "max_index_num": 400,
                "message_delay_level": levels,
                "message_index_enable": False,
                **changes,
            },
        )
        self.store = Store(options, self.env)
        config = path / "config"
        self.options = BrokerOptions(broker_name="b0", broker_cluster_name="C0")
        self.topics = Topics(self.options, str(config / "topics.json"), self.env)
        self.path = config
        settings = DeliverySettings(
            save_interval_ms=save_interval_ms, role=role, sleep_seconds_max=SLEEP_SECONDS
        )
        self.delays = Delays(
            DelayLevels(levels), str(config / "delayOffset.json"), self.store, self.env, settings
        )
        self.timers = Timers(str(config / "timerOffset.json"), self.store, self.env, settings)
        self.deferral = Deferral(
            DelayLevels(levels),
            self.topics,
            clock,
            timer_delay_seconds_max=3 * 86_400,
            timers_full=self.timers.full,
        )

    async def open(self, *, deliver: bool = True) -> Later:
        await self.store.start()
        await self.topics.start()
        if deliver:
            await self.delays.start()
            await self.timers.start()
        return self

    async def close(self) -> None:
        await self.timers.stop()
        await self.delays.stop()
        await self.topics.stop()
        await self.store.stop()

    async def crash(self) -> None:
        """What a killed process leaves: the log as it is, and the last saved progress."""
        for service in (self.timers, self.delays):
            progress = service._progress
            await progress._saver.stop()
            await progress._file.stop()
            await service.stop()  # without a saver nothing more is saved
        await self.topics.stop()
        await self.store.abandon()

    async def put(self, body: bytes, properties: str = "", topic: str = "T", queue: int = 0) -> int:
        """Store a message as a send does; its delivery time if it has one of its own."""
        pairs = parse_properties(properties)
        draft = Draft(topic, queue, body, "", STORE_HOST, STORE_HOST, born_ms=5, flag=7)
        deliver_ms = self.deferral.redirect(draft, pairs)
        draft.properties = format_properties(pairs)
        await self.store.durable(self.store.append(draft).end)
        return deliver_ms or 0

    def delivered(self, topic: str = "T", queue: int = 0) -> list[Record]:
        records: list[Record] = []
        while True:
            batch = self.store.read(topic, queue, len(records), 1000)
            if not batch.count:
                return records
            records += iter_records(batch.data)

    def bodies(self, topic: str = "T", queue: int = 0) -> list[bytes]:
        return [record.body for record in self.delivered(topic, queue)]

    async def until(self, done: Callable[[], bool], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not done():
                await asyncio.sleep(0.002)

    async def pause(self) -> None:
        """Long enough for every sleeper to have looked at the clock again."""
        await asyncio.sleep(SLEEP_SECONDS * 6)


@contextlib.asynccontextmanager
async def later(path: Path, clock: SetClock, **changes: Any) -> AsyncIterator[Later]:
    kit = await Later(path, clock, **changes).open()
    try:
        yield kit
    finally:
        await kit.close()


def counted_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many messages each batch of a delivery took, from now on."""
    batches: list[int] = []
    hand_over = delivery.hand_over

    async def counted(*args: Any, **kwargs: Any) -> int:
        done = await hand_over(*args, **kwargs)
        batches.append(done)
        return done

    monkeypatch.setattr(delivery, "hand_over", counted)
    return batches
