"""Memory that connections held is given back: after much of it fell, later, and rarely."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from tests.virtual_time import virtual_time

from cosmodrome.env.options import SocketOptions
from cosmodrome.transport import memory
from cosmodrome.transport.memory import FALLEN_BYTES_MIN, PAUSE_S, HeldMemory
from cosmodrome.transport.router import Router
from cosmodrome.transport.server import Server
from cosmodrome.wire.table import BROKER

T = TypeVar("T")
# Blocks in the C library's heap, freed below one that stays: only a trim gives their pages back.
PROGRAM = """
import ctypes
from pathlib import Path
from cosmodrome.transport.memory import give_back

def own_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024

ctypes.CDLL(None).malloc_trim
blocks = [bytes(b"x" * 100_000) for _ in range(1_000)]
kept = blocks[-1]
del blocks
before = own_mb()
give_back()
print(before - own_mb())
"""


class Given:
    """Counts how often memory was given back, as if in a thread."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self) -> None:
        self.times.append(asyncio.get_running_loop().time())


def offload(work: Callable[[], T], /) -> Awaitable[T]:
    async def run() -> T:
        return work()

    return run()


@virtual_time
async def test_much_that_fell_is_given_back_once_and_later() -> None:
    given = Given()
    held = HeldMemory(offload, given)
    began = asyncio.get_running_loop().time()
    for size in (FALLEN_BYTES_MIN, 100, FALLEN_BYTES_MIN, 0):
        held.now_holds(size)
    await asyncio.sleep(PAUSE_S / 2)
    assert not given.times
    await asyncio.sleep(PAUSE_S)
    assert given.times == [began + PAUSE_S]
    await asyncio.sleep(10 * PAUSE_S)
    held.now_holds(0)
    await asyncio.sleep(10 * PAUSE_S)
    assert len(given.times) == 1  # nothing fell since
    for _ in range(100):
        held.now_holds(2 * FALLEN_BYTES_MIN)
        held.now_holds(0)
        await asyncio.sleep(PAUSE_S / 10)
    assert 2 < len(given.times) <= 12  # at most once in ten seconds


@virtual_time
async def test_little_that_comes_and_goes_is_kept() -> None:
    given = Given()
    held = HeldMemory(offload, given)
    for size in range(1_000):
        held.now_holds(FALLEN_BYTES_MIN // 2 + size)
        held.now_holds(size)
    await asyncio.sleep(10 * PAUSE_S)
    assert not given.times


@virtual_time
async def test_a_server_tells_what_it_holds_and_stops() -> None:
    asked: list[object] = []

    def offloaded(work: Callable[[], T], /) -> Awaitable[T]:
        asked.append(work)
        return offload(work)

    router = Router(BROKER, (), partial=True)
    server = Server(router, SocketOptions(), "broker", offload=offloaded)
    server.holds(FALLEN_BYTES_MIN)
    server.holds(-FALLEN_BYTES_MIN)
    await asyncio.sleep(2 * PAUSE_S)
    assert asked == [memory.give_back]
    server.holds(FALLEN_BYTES_MIN)
    server.holds(-FALLEN_BYTES_MIN)
    await server.stop()
    await asyncio.sleep(2 * PAUSE_S)
    assert len(asked) == 1


def test_pages_between_those_in_use_go_back_to_the_kernel() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    if "AttributeError" in done.stderr:
        pytest.skip("this C library gives nothing back")
    assert int(done.stdout) > 50
