"""`cosmo up --workers 2` as a subprocess, and ways to watch it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

from peers.node import CosmoNode
from peers.process import free_port

QUEUES = 4
FIRST, SECOND = "w", "w-1"
LOG_FILE_BYTES = 1 << 20
OPTIONS = [
    "--set",
    f"brokerName={FIRST}",
    "--set",
    f"defaultTopicQueueNums={QUEUES}",
    "--set",
    f"mappedFileSizeCommitLog={LOG_FILE_BYTES}",
    "--set",
    "diskSpaceWarningLevelRatio=100",
    "--set",
    "maxHashSlotNum=1000",
    "--set",
    "maxIndexNum=4000",
]


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
        found = re.findall(r"worker_started name=(\S+) pid=(\d+)", self.log_text())
        return {name: int(pid) for name, pid in found}

    def log_text(self) -> str:
        return self.process.log.read_text() if self.process.log.exists() else ""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def until(true: Callable[[], object], timeout_s: float = 90) -> float:
    """Seconds until it was true."""
    began = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.02)
    return time.monotonic() - began
