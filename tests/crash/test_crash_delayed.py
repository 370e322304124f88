"""A process that delivers delayed and timed messages, really killed: all come, none early."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.store.store_kit import HOST, records

from cosmodrome.broker.later.deferral import Deferral
from cosmodrome.broker.later.delay import Delays
from cosmodrome.broker.later.delivery import DeliverySettings
from cosmodrome.broker.later.timers import Timers
from cosmodrome.broker.members.topics import Topics
from cosmodrome.env.options import BrokerOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.store.store import DelayLevels, Draft, Store
from cosmodrome.wire.message import format_properties

CYCLES = int(os.environ.get("CRASH_CYCLES", "4"))
REPOSITORY = Path(__file__).parents[2]
LEVELS = "1s 2s"
SAVE_INTERVAL_MS = 50


class Node:
    """The part of a broker that lets messages wait."""

    def __init__(self, root: str, mode: str) -> None:
        self.env = real_env()
        options = StoreOptions(
            store_path_root_dir=root,
            flush_disk_type=cast(Any, mode),
            mapped_file_size_commit_log=256 * 1024,
            mapped_file_size_consume_queue=2000,
            message_index_enable=False,
            message_delay_level=LEVELS,
            flush_interval_commit_log=30,
            disk_space_warning_level_ratio=100,
        )
        config = os.path.join(root, "config")
        broker = BrokerOptions(broker_name="b", broker_cluster_name="c")
        self.store = Store(options, self.env)
        self.topics = Topics(broker, os.path.join(config, "topics.json"), self.env)
        levels = DelayLevels(LEVELS)
        settings = DeliverySettings(save_interval_ms=SAVE_INTERVAL_MS)
        self.delays = Delays(
            levels, os.path.join(config, "delayOffset.json"), self.store, self.env, settings
        )
        self.timers = Timers(
            os.path.join(config, "timerOffset.json"), self.store, self.env, settings
        )
        self.deferral = Deferral(
            levels,
            self.topics,
            self.env.clock,
            timer_delay_seconds_max=60,
            timers_full=self.timers.full,
        )

    async def start(self) -> None:
        for service in (self.store, self.topics, self.delays, self.timers):
            await service.start()

    async def stop(self) -> None:
        for service in (self.timers, self.delays, self.topics, self.store):
            await service.stop()


async def child(root: str, mode: str, life: int) -> None:
    node = Node(root, mode)
    await node.start()
    said = sys.stdout.fileno()

    async def sender(lane: int) -> None:
        chance = random.Random(f"{life}-{lane}")
        for number in itertools.count():
            name = f"{life}-{lane}-{number}"
            if lane:
                wait_ms = chance.choice((10, 100, 400, 1500))
                pairs = {"TIMER_DELAY_MS": str(wait_ms)}
            else:
                wait_ms, pairs = 1000, {"DELAY": "1"}
            pairs["due"] = str(node.env.clock.now_ms() + wait_ms)
            draft = Draft("T", 0, name.encode(), "", HOST, HOST)
            node.deferral.redirect(draft, pairs)
            draft.properties = format_properties(pairs)
            await node.store.durable(node.store.append(draft).end)
            os.write(said, f"{name}\n".encode())

    await asyncio.gather(*(sender(lane) for lane in range(3)))


async def killed_run(root: str, mode: str, life: int, seconds: float) -> list[str]:
    """What a child acknowledged before it was killed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        root,
        mode,
        str(life),
        stdout=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}{os.pathsep}{REPOSITORY}"},
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        first = await process.stdout.readline()
        assert first, "the child ended by itself"
        collecting = asyncio.ensure_future(process.stdout.read())
        await asyncio.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        said = first + await collecting
        await process.wait()
    return said.decode().split("\n")[:-1]


@pytest.mark.timeout(300 + 20 * CYCLES)
@pytest.mark.parametrize("mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_waiting_messages_survive_kills(tmp_path: Path, mode: str) -> None:
    chance = random.Random(f"later-{mode}")
    acknowledged: set[str] = set()
    for life in range(CYCLES):
        # Longer than the waits of most, so that deliveries are under way at the kill.
        acknowledged.update(await killed_run(str(tmp_path), mode, life, chance.uniform(0.8, 1.6)))
    node = Node(str(tmp_path), mode)
    await node.start()

    def missing() -> set[str]:
        return acknowledged - {record.body.decode() for record in records(node.store, "T", 0)}

    async with asyncio.timeout(40):
        while missing():
            await asyncio.sleep(0.2)
    got = records(node.store, "T", 0)
    for record in got:
        due_ms = int(record.pairs()["due"])
        assert record.store_ms >= due_ms, f"{record.body!r} was {due_ms - record.store_ms} ms early"
    times = Counter(record.body for record in got)
    print(f"{mode}: {len(acknowledged)} waited, {len(got) - len(times)} came twice")
    assert max(times.values()) <= 1 + CYCLES
    await node.stop()


if __name__ == "__main__":
    asyncio.run(child(sys.argv[1], sys.argv[2], int(sys.argv[3])))
