"""A SYNC_MASTER and its slave as processes, killed under load: no answered send is lost."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
from peers.node import CosmoNode
from tests.crash.test_crash_node import QUEUES, SETTINGS, TOPIC, Link, pull_all

CYCLES = int(os.environ.get("CRASH_CYCLES", "3"))
CLIENTS = 4
SENDING = (0, 10, 11, 12)  # stored; only 0 is a promise of two disks

History = dict[tuple[int, int], bytes]  # answered 0, by queue and offset


class Sender:
    """Sends to one port for ever, through connections that break."""

    def __init__(self, port: int, name: str, history: History) -> None:
        self.codes: dict[int, int] = {}
        self._port = port
        self._name = name
        self._number = 0
        self._history = history

    async def run(self) -> None:
        while True:
            link = Link(self._port)
            try:
                await link.open()
                while True:
                    await self.send(link)
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(0.05)  # killed; it comes back
            finally:
                link.close()

    async def send(self, link: Link) -> None:
        self._number += 1
        name = f"{self._name}-{self._number}"
        seed = hashlib.sha256(name.encode()).digest()
        body = f"{name} ".encode() + seed * (1 + seed[0] % 30)
        code, fields, remark, _ = await link.call(
            10,
            {
                "producerGroup": "g",
                "topic": TOPIC,
                "defaultTopic": "TBW102",
                "defaultTopicQueueNums": QUEUES,
                "queueId": self._number % QUEUES,
                "sysFlag": 0,
                "bornTimestamp": 1,
                "flag": 0,
                "reconsumeTimes": 0,
                "properties": f"KEYS\x01{name}\x02TAGS\x01t",
            },
            body,
        )
        assert code in SENDING, (code, remark)
        self.codes[code] = self.codes.get(code, 0) + 1
        if code == 0:
            place = (int(fields["queueId"]), int(fields["queueOffset"]))
            assert place not in self._history, f"two sends were told {place}"
            self._history[place] = body


def node(data: Path, settings: dict[str, str]) -> CosmoNode:
    words = [
        word
        for key, value in (SETTINGS | {"flushDiskType": "SYNC_FLUSH"} | settings).items()
        for word in ("--set", f"{key}={value}")
    ]
    return CosmoNode(data, options=[*words, "--log-level", "info"])


async def lost(port: int, history: History) -> list[tuple[int, int]]:
    """Answered sends that are not served there."""
    link = Link(port)
    await link.open()
    try:
        found: History = {}
        for queue_id in range(QUEUES):
            for record in await pull_all(link, queue_id):
                assert record.body_is_intact()
                found[queue_id, record.queue_offset] = record.body
    finally:
        link.close()
    return [place for place, body in history.items() if found.get(place) != body]


@pytest.mark.timeout(300 + 60 * CYCLES)
async def test_a_killed_pair_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    chance = random.Random("pair")
    master = node(
        tmp_path / "master", {"brokerRole": "SYNC_MASTER", "brokerName": "p", "brokerId": "0"}
    )
    slave = node(
        tmp_path / "slave",
        {
            "brokerRole": "SLAVE",
            "brokerName": "p",
            "brokerId": "1",
            "haMasterAddress": f"127.0.0.1:{master.broker_port + 1}",
        },
    )
    history: History = {}
    senders = [Sender(master.broker_port, f"c{at}", history) for at in range(CLIENTS)]

    async def acknowledged_more() -> None:
        async with asyncio.timeout(60):
            before = len(history)
            while len(history) < before + 20:
                await asyncio.sleep(0.05)

    running: list[asyncio.Future[None]] = []
    try:
        for one in (master, slave):
            await asyncio.to_thread(one.start)
        running = [asyncio.ensure_future(sender.run()) for sender in senders]
        for cycle in range(CYCLES):
            await acknowledged_more()
            await asyncio.sleep(chance.uniform(0.1, 0.6))
            victims = [[slave], [master], [master, slave]][cycle % 3]
            for victim in victims:
                victim.kill9()
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            for victim in chance.sample(victims, len(victims)):
                await asyncio.to_thread(victim.start)
        await acknowledged_more()
        # The machine of the master is gone, with its disk: all that was promised is at the slave,
        # which did not read for a while before. What waited in its sockets is gone with it.
        os.kill(slave.pid, signal.SIGSTOP)
        await asyncio.sleep(0.5)
        master.kill9()
        slave.kill9()
        shutil.rmtree(master.data)
        await asyncio.to_thread(slave.start)
        for task in running:
            assert not task.done(), task.result()
        codes = {code: sum(s.codes.get(code, 0) for s in senders) for code in SENDING}
        print(f"{len(history)} answered 0, codes {codes}")
        assert await lost(slave.broker_port, history) == []
        assert len(history) > 20 * CYCLES
    finally:
        for task in running:
            task.cancel()
        for one in (master, slave):
            one.stop()
