"""`cosmo up --workers 2`: a worker killed, the supervisor killed, nothing acknowledged lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from peers.node import CosmoNode
from peers.process import accepts, free_port
from tests.crash.test_crash_node import QUEUES, TOPIC, Link, pull_all

from cosmodrome import Message, Producer
from cosmodrome.errors import CosmodromeError

FIRST, SECOND = "w", "w-1"
OPTIONS = [
    *("--set", f"brokerName={FIRST}", "--set", f"defaultTopicQueueNums={QUEUES}"),
    *("--set", "mappedFileSizeCommitLog=1048576", "--set", "diskSpaceWarningLevelRatio=100"),
    *("--set", "maxHashSlotNum=1000", "--set", "maxIndexNum=4000"),
]
# Of the cluster, by place: broker, queue, offset.
History = dict[tuple[str, int, int], bytes]


class Workers(CosmoNode):
    def __init__(self, data: Path, count: int = 2) -> None:
        super().__init__(
            data,
            broker_port=free_port(-2, 1, 8, 10, 11),
            options=[*OPTIONS, "--workers", str(count)],
        )
        self.ports = {FIRST: self.broker_port, SECOND: self.broker_port + 10}

    def pids(self) -> dict[str, int]:
        """Of each worker's newest life."""
        found = re.findall(r"worker_started name=(\S+) pid=(\d+)", self.process.log.read_text())
        return {name: int(pid) for name, pid in found}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def until(true: Callable[[], object], timeout_s: float = 30) -> float:
    """Seconds until it was true."""
    began = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.02)
    return time.monotonic() - began


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
        timeout=30,
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
            assert (root / "commitlog").is_dir()
            assert not (root / "abort").exists(), f"{root} was not closed cleanly"

        refused = await asyncio.to_thread(alone, node.data)
        assert refused.returncode == 1
        assert str(node.data / "worker-1") in refused.stderr and "--workers 2" in refused.stderr

        await asyncio.to_thread(node.start)
        found = await stored(node.ports)
        assert {place: found.get(place) for place in history} == history
    finally:
        node.stop()
    text = node.process.log.read_text()
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


def test_brokers_of_a_name_server_elsewhere(tmp_path: Path) -> None:
    cosmo = [sys.executable, "-m", "cosmodrome.cli"]
    nameserver = subprocess.Popen(
        [*cosmo, "namesrv", "run", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ROCKETMQ_HOME": str(tmp_path)},
    )
    words = [
        *(*cosmo, "broker", "run", "--workers", "2", "--port", "0", "--http-port", "0"),
        *("--data", str(tmp_path / "data"), *OPTIONS),
    ]
    try:
        assert nameserver.stdout is not None
        address = nameserver.stdout.readline().split()[-1]
        with subprocess.Popen(
            [*words, "-n", address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as brokers:
            try:
                assert brokers.stdout is not None
                line = brokers.stdout.readline()
                assert "2 brokers are ready on" in line
                ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", line)]
                assert len(set(ports)) == 3 and all(accepts(port) for port in ports)

                second = subprocess.run(
                    [*words, "-n", address], capture_output=True, text=True, timeout=30
                )
                assert second.returncode == 1
                assert "in use" in second.stderr and "Traceback" not in second.stderr

                brokers.send_signal(signal.SIGINT)
                _, errors = brokers.communicate(timeout=30)
                assert brokers.returncode == 0, errors
                assert "Traceback" not in errors and "worker_died" not in errors
                assert not any(accepts(port) for port in ports)
            finally:
                brokers.kill()
    finally:
        nameserver.terminate()
        nameserver.communicate(timeout=10)


def test_settings_that_no_worker_takes_end_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "cosmodrome.cli", "up", "--workers", "2"),
            *("--data", str(tmp_path / "d"), "--set", "brokerName=no good"),
            *("--namesrv-port", "0", "--broker-port", "0", "--http-port", "0"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "brokerName is 'no good" in done.stderr
    assert "the workers refuse their settings" in done.stderr
    assert "Traceback" not in done.stderr
