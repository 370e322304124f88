"""`cosmo dlq redrive` and its broker killed midway: after a resume every message is there once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from peers.node import CosmoNode
from peers.resolve import ROOT

from cosmodrome import blocking
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.reading import page, spans, walk
from cosmodrome.client.operate.redriving.audit import AUDIT_TOPIC
from cosmodrome.client.values import Message

CYCLES = int(os.environ.get("CRASH_CYCLES", "1"))
COUNT = 400
RATE = 200
SOURCE, TARGET = "Letters", "Orders"
SETTINGS = {
    "mappedFileSizeCommitLog": "1048576",
    "mappedFileSizeConsumeQueue": "20000",
    "maxHashSlotNum": "1000",
    "maxIndexNum": "4000",
    "diskSpaceWarningLevelRatio": "100",
}


def node_in(folder: Path) -> CosmoNode:
    options = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    return CosmoNode(folder / "data", options=options)


def command(namesrv: str, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "cosmodrome.cli", "dlq", "redrive", *words, "-n", namesrv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )


def data_of(namesrv: str, *words: str) -> list[dict[str, object]]:
    process = command(namesrv, *words, "-o", "json")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    found: list[dict[str, object]] = json.loads(out)
    return found


def fill(namesrv: str) -> None:
    with blocking.Admin(namesrv) as admin:
        admin.topics.create(SOURCE, queues=2)
        admin.topics.create(TARGET, queues=3)
    with blocking.Producer(namesrv, group="senders") as producer:
        for number in range(COUNT):
            producer.send(Message(SOURCE, b"%d" % number))


def arrived(namesrv: str) -> Counter[bytes]:
    async def read() -> Counter[bytes]:
        async with Admin(namesrv) as admin:
            found: Counter[bytes] = Counter()
            for part in await spans(admin.fleet, TARGET):
                async for message in walk(admin.fleet, part):
                    found[message.body] += 1
            return found

    return asyncio.run(read())


def wait_for(namesrv: str, number: int) -> int:
    """Until so many have arrived; how many there are then."""

    async def wait() -> int:
        async with Admin(namesrv) as admin, asyncio.timeout(60):
            while (count := sum(part.length for part in await spans(admin.fleet, TARGET))) < number:
                await asyncio.sleep(0.02)
            return count

    return asyncio.run(wait())


def wait_for_intent(namesrv: str) -> None:
    """Until a batch is announced: then its messages are on their way."""

    async def wait() -> None:
        async with Admin(namesrv) as admin, asyncio.timeout(60):
            (part,) = await spans(admin.fleet, AUDIT_TOPIC)
            at = part.end
            while True:
                found = await page(admin.fleet, part.queue, part.address, at)
                if any(message.tags == "intent" for message in found.messages):
                    return
                at = found.next_offset

    asyncio.run(wait())


@pytest.mark.parametrize("killed", ["command", "both"])
def test_killed_and_resumed(tmp_path: Path, killed: str) -> None:
    chance = random.Random(20261116)
    for cycle in range(CYCLES):
        folder = tmp_path / str(cycle)
        with node_in(folder) as node:
            namesrv = node.namesrv_address
            fill(namesrv)
            words = ("start", "--from", SOURCE, "--to", TARGET, "--rate", str(RATE), "--yes")
            work = command(namesrv, *words)
            kills = 0
            begun = 0
            try:
                while True:
                    begun = wait_for(namesrv, min(COUNT, begun + chance.randrange(20, 100)))
                    if begun >= COUNT or work.poll() is not None or kills == 2:
                        break
                    wait_for_intent(namesrv)
                    time.sleep(chance.random() / 50)
                    work.send_signal(signal.SIGKILL)
                    work.communicate()
                    kills += 1
                    if killed == "both":
                        node.kill9()
                        node.start()
                    (run,) = [one for one in data_of(namesrv, "list") if one["state"] == "open"]
                    work = command(namesrv, "resume", str(run["run"]))
                _, err = work.communicate(timeout=60)
                assert work.returncode == 0, err
                assert kills, "it was too fast to be killed"
                (run,) = data_of(namesrv, "list")
                found = arrived(namesrv)
                outcomes = Counter(
                    one["outcome"] for one in data_of(namesrv, "show", str(run["run"]))
                )
                print(f"killed {kills} times: {dict(outcomes)}")
            finally:
                if work.poll() is None:
                    work.kill()
                    work.communicate()
        assert run["state"] == "finished" and run["arrived"] == COUNT, run
        missing = [n for n in range(COUNT) if not found[b"%d" % n]]
        assert not missing, "never lost"
        doubled = sum(found.values()) - COUNT
        assert doubled == 0 == run["uncertain"], "none twice, none in doubt"


def test_the_broker_alone_is_killed(tmp_path: Path) -> None:
    """The command waits for it and goes on."""
    with node_in(tmp_path) as node:
        namesrv = node.namesrv_address
        fill(namesrv)
        words = ("start", "--from", SOURCE, "--to", TARGET, "--rate", str(RATE), "--yes")
        work = command(namesrv, *words)
        try:
            wait_for(namesrv, 100)
            node.kill9()
            node.start()
            _, err = work.communicate(timeout=60)
            assert work.returncode == 0, err
        finally:
            if work.poll() is None:
                work.kill()
                work.communicate()
        found = arrived(namesrv)
    assert found == Counter(b"%d" % number for number in range(COUNT))
