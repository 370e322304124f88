"""`cosmo up --workers 2`: a worker killed, the supervisor killed, nothing acknowledged lost."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

from peers.process import accepts
from tests.crash.test_crash_node import TOPIC, Link, pull_all
from tests.unit.cli.workers_kit import (
    FIRST,
    LOG_FILE_BYTES,
    QUEUES,
    SECOND,
    Workers,
    is_running,
    until,
)

from cosmodrome import Message, Producer
from cosmodrome.errors import CosmodromeError

# Of the cluster, by place: broker, queue, offset.
History = dict[tuple[str, int, int], bytes]


async def send_on(producer: Producer, name: str, history: History) -> None:
    """Send until cancelled; what is answered goes into the history."""
    number = 0
    while True:
        number += 1
        body = f"{name}-{number}".encode()
        try:
            result = await producer.send(Message(TOPIC, body))
        except CosmodromeError:
            continue
        place = (result.queue.broker_name, result.queue.queue_id, result.queue_offset)
        assert history.setdefault(place, body) == body, f"two sends were told {place}"


async def stored(ports: dict[str, int]) -> History:
    found: History = {}
    for name, port in ports.items():
        link = Link(port)
        await link.open()
        for queue_id in range(QUEUES):
            for record in await pull_all(link, queue_id):
                found[name, queue_id, record.queue_offset] = record.body
        link.close()
    return found


def count_of(history: History, name: str) -> int:
    return Counter(place[0] for place in history)[name]


async def end_senders(senders: list[asyncio.Task[None]]) -> None:
    for sender in senders:
        sender.cancel()
    for outcome in await asyncio.gather(*senders, return_exceptions=True):
        assert isinstance(outcome, asyncio.CancelledError), outcome


def alone(data: Path) -> subprocess.CompletedProcess[str]:
    """`cosmo up` without --workers on the same directory."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "cosmodrome.cli", "up", "--data", str(data)),
            *("--namesrv-port", "0", "--broker-port", "0", "--http-port", "0"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )


async def test_one_worker_dies_and_the_other_goes_on(tmp_path: Path) -> None:
    node = Workers(tmp_path / "data")
    history: History = {}
    try:
        await asyncio.to_thread(node.start)
        pids = node.pids()
        assert set(pids) == {FIRST, SECOND}
        async with Producer(node.namesrv_address, group="p", send_timeout_ms=2000) as producer:
            senders = [
                asyncio.create_task(send_on(producer, f"a{lane}", history)) for lane in range(4)
            ]
            await until(lambda: min(count_of(history, name) for name in node.ports) > 50)

            os.kill(pids[SECOND], signal.SIGKILL)
            await until(lambda: not node.is_ready())
            before = count_of(history, FIRST)
            await until(lambda: count_of(history, FIRST) > before + 50)
            seconds = await until(lambda: node.is_ready())
            print(f"the killed worker is back after {seconds:.1f} s")
            assert node.pids()[FIRST] == pids[FIRST] != node.pids()[SECOND] != pids[SECOND]
            await end_senders(senders)

        # A client that comes now finds both again.
        async with Producer(node.namesrv_address, group="q") as producer:
            before = count_of(history, SECOND)
            sender = asyncio.create_task(send_on(producer, "b", history))
            await until(lambda: count_of(history, SECOND) > before + 10)
            await end_senders([sender])

        pids = node.pids()
        assert node.stop() == 0
        assert not any(is_running(pid) for pid in pids.values())
        for root in (node.data, node.data / "worker-1"):
            sizes = {file.stat().st_size for file in (root / "commitlog").iterdir()}
            assert sizes == {LOG_FILE_BYTES}, "settings reach every worker"
            assert not (root / "abort").exists(), f"{root} was not closed cleanly"

        refused = await asyncio.to_thread(alone, node.data)
        assert refused.returncode == 1
        assert str(node.data / "worker-1") in refused.stderr and "--workers 2" in refused.stderr

        await asyncio.to_thread(node.start)
        found = await stored(node.ports)
        assert {place: found.get(place) for place in history} == history
    finally:
        node.stop()
    text = node.log_text()
    assert f"{SECOND} | " in text and "killed by SIGKILL" in text
    assert "Traceback" not in text


async def test_the_end_of_the_supervisor_is_the_end_of_its_workers(tmp_path: Path) -> None:
    node = Workers(tmp_path / "data")
    history: History = {}
    try:
        await asyncio.to_thread(node.start)
        pids = node.pids()
        async with Producer(node.namesrv_address, group="p", send_timeout_ms=1000) as producer:
            sender = asyncio.create_task(send_on(producer, "a", history))
            await until(lambda: min(count_of(history, name) for name in node.ports) > 20)
            node.kill9()
            await until(lambda: not any(is_running(pid) for pid in pids.values()))
            await end_senders([sender])
        assert not any(accepts(port) for port in node.ports.values())
        for root in (node.data, node.data / "worker-1"):
            assert not (root / "abort").exists(), f"{root} was not closed cleanly"

        await asyncio.to_thread(node.start)
        pids = node.pids()
        # Started again at once, while the workers of the last one may still be stopping.
        node.kill9()
        await asyncio.to_thread(node.start)
        assert not set(pids.values()) & set(node.pids().values())
        found = await stored(node.ports)
        assert {place: found.get(place) for place in history} == history
    finally:
        node.stop()


async def test_a_store_of_one_worker_is_that_of_the_first(tmp_path: Path) -> None:
    node = Workers(tmp_path / "data", count=1)
    history: History = {}
    try:
        await asyncio.to_thread(node.start)
        async with Producer(node.namesrv_address, group="p") as producer:
            sender = asyncio.create_task(send_on(producer, "a", history))
            await until(lambda: len(history) > 20)
            await end_senders([sender])
        assert node.stop() == 0
        assert not (node.data / "worker-1").exists()
    finally:
        node.stop()
    more = Workers(tmp_path / "data")
    try:
        await asyncio.to_thread(more.start)
        found = await stored({FIRST: more.ports[FIRST]})
        assert {place: found.get(place) for place in history} == history
    finally:
        assert more.stop() == 0
