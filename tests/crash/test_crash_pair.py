"""A pair of broker processes of which one or both are killed, or one loses its disk.

Every send that a SYNC_MASTER answered with SEND_OK is on both, at the same place of its queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.crash.test_crash_node import QUEUES, SETTINGS, TOPIC, Link, pull_all

from cosmodrome.transport.ports import HA_OFFSET, free_base_port
from cosmodrome.wire import bodies
from cosmodrome.wire.report_bodies import HARuntimeInfo

CYCLES = int(os.environ.get("CRASH_CYCLES", "3"))
CLIENTS = 4
PATIENCE_S = 60.0
OK, UNPROMISED, STOPPING = 0, (11, 12), 14

Places = dict[tuple[int, int], bytes]


class Machine:
    """One broker process and its disk. It is restarted on the same port, in any role."""

    def __init__(self, folder: Path, flush: str = "SYNC_FLUSH") -> None:
        self.folder = folder
        self._flush = flush
        self.port = free_base_port("127.0.0.1")
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, role: str, master: Machine | None = None) -> None:
        settings = SETTINGS | {
            "flushDiskType": self._flush,
            "brokerName": "pair",
            "brokerRole": role,
            "brokerId": "1" if role == "SLAVE" else "0",
        }
        if master is not None:
            settings["haMasterAddress"] = f"127.0.0.1:{master.port + HA_OFFSET}"
        words = [sys.executable, "-m", "cosmodrome.cli", "broker", "run", "--log-level", "warning"]
        words += ["--port", str(self.port), "--data", str(self.folder), "-n", "127.0.0.1:1"]
        for key, value in settings.items():
            words += ["--set", f"{key}={value}"]
        self._launch(words)
        async with self.link():
            pass

    def _launch(self, words: list[str]) -> None:
        self._process = subprocess.Popen(words)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    async def stop(self) -> None:
        """In order, as a service is stopped; it must end well."""
        process, self._process = self._process, None
        assert process is not None
        process.terminate()
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0

    def lose_disk(self) -> None:
        shutil.rmtree(self.folder)

    @contextlib.asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        """A connection, made as soon as the broker takes it."""
        link = Link(self.port)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await link.open()
                    break
                except ConnectionError:
                    assert self._process is not None and self._process.poll() is None
                    await asyncio.sleep(0.05)
        try:
            yield link
        finally:
            link.close()

    async def status(self) -> HARuntimeInfo:
        async with self.link() as link:
            code, _, remark, body = await link.call(907, {})
            assert code == OK, remark
            return bodies.decode(HARuntimeInfo, body)

    async def until_it_serves_the_topic(self) -> None:
        """Rows of tables follow a little later than messages."""
        async with asyncio.timeout(PATIENCE_S), self.link() as link:
            while TOPIC.encode() not in (await link.call(21, {}))[3]:
                await asyncio.sleep(0.05)

    async def until_in_step(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await self.status()).ha_client_runtime_info.state != "in step":
                await asyncio.sleep(0.05)


async def send_until_cut(master: Machine, name: str, acknowledged: Places) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        async with master.link() as link:
            number = 0
            while True:
                number += 1
                body = f"{name}-{number} ".encode() * (1 + number % 50)
                fields = {
                    "producerGroup": "g",
                    "topic": TOPIC,
                    "defaultTopic": "TBW102",
                    "defaultTopicQueueNums": QUEUES,
                    "queueId": number % QUEUES,
                    "sysFlag": 0,
                    "bornTimestamp": 1,
                    "flag": 0,
                    "properties": "",
                }
                code, place, remark, _ = await link.call(10, fields, body)
                if code == STOPPING:
                    return
                assert code == OK or code in UNPROMISED, (code, remark)
                if code == OK:
                    acknowledged[int(place["queueId"]), int(place["queueOffset"])] = body


async def check(machine: Machine, acknowledged: Places) -> None:
    async with machine.link() as link:
        kept = {
            (queue_id, record.queue_offset): record.body
            for queue_id in range(QUEUES)
            for record in await pull_all(link, queue_id)
        }
    lost = [place for place in acknowledged if place not in kept]
    assert not lost, f"{len(lost)} of {len(acknowledged)} acknowledged were lost"
    assert all(kept[place] == body for place, body in acknowledged.items())


async def load(master: Machine, name: str, acknowledged: Places) -> list[asyncio.Task[None]]:
    """Clients that send until their connection ends; some sends are answered already."""
    before = len(acknowledged)
    senders = [
        asyncio.create_task(send_until_cut(master, f"{name}.{client}", acknowledged))
        for client in range(CLIENTS)
    ]
    async with asyncio.timeout(PATIENCE_S):
        while len(acknowledged) < before + CLIENTS:
            await asyncio.sleep(0.01)
    return senders


@contextlib.contextmanager
def killed_at_the_end(*machines: Machine) -> Iterator[None]:
    try:
        yield
    finally:
        for machine in machines:
            machine.kill()


@pytest.mark.timeout(300 + 60 * CYCLES)
@pytest.mark.parametrize("victims", ["master", "slave", "both"])
async def test_acknowledged_sends_are_on_both_after_kills(tmp_path: Path, victims: str) -> None:
    chance = random.Random(f"pair-{victims}")
    master, slave = Machine(tmp_path / "m"), Machine(tmp_path / "s")
    acknowledged: Places = {}
    with killed_at_the_end(master, slave):
        await master.start("SYNC_MASTER")
        await slave.start("SLAVE", master)
        for cycle in range(CYCLES):
            await slave.until_in_step()
            senders = await load(master, f"{cycle}", acknowledged)
            await asyncio.sleep(chance.uniform(0.0, 0.3))
            if victims != "master":
                slave.kill()
            if victims != "slave":
                master.kill()
            for sender in senders:
                sender.cancel()
            outcomes = await asyncio.gather(*senders, return_exceptions=True)
            assert not [one for one in outcomes if isinstance(one, Exception)]
            if victims != "slave":
                await master.start("SYNC_MASTER")
            if victims != "master":
                await slave.start("SLAVE", master)
        await slave.until_in_step()
        await check(master, acknowledged)
        await check(slave, acknowledged)
        assert len(acknowledged) >= CYCLES * CLIENTS


@pytest.mark.timeout(300)
async def test_a_lost_machine_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """The slave is promoted; a machine with an empty disk becomes its slave."""
    first, second = Machine(tmp_path / "1"), Machine(tmp_path / "2")
    acknowledged: Places = {}
    with killed_at_the_end(first, second):
        await first.start("SYNC_MASTER")
        await second.start("SLAVE", first)
        await second.until_in_step()
        senders = await load(first, "a", acknowledged)
        await second.until_it_serves_the_topic()
        first.kill()
        first.lose_disk()
        await asyncio.gather(*senders)
        second.kill()
        await second.start("SYNC_MASTER")
        await check(second, acknowledged)
        await first.start("SLAVE", second)
        await first.until_in_step()
        senders = await load(second, "b", acknowledged)
        second.kill()
        await asyncio.gather(*senders)
        await check(first, acknowledged)
