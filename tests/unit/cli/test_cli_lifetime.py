"""What a server process does beside serving."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from cosmodrome.cli.serve.lifetime import running
from cosmodrome.errors import StoreUnwritable

SERVER = """
import asyncio, gc
from cosmodrome.cli.serve import lifetime

lifetime.MADE_SECONDS = 0.01

async def serve(stop):
    for _ in range(500):
        if gc.get_freeze_count():
            break
        await asyncio.sleep(0.01)
    print(gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000)

lifetime.run_until_stopped(serve, lifetime.Logs("WARNING"))
"""


def test_the_collector_leaves_what_the_server_is_made_of() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVER], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "True True\n", done.stderr


async def test_a_stop_that_cannot_save_says_what_that_means() -> None:
    class Part:
        async def start(self) -> None: ...

        async def stop(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StoreUnwritable, match=r"not everything.*No space left.*no message is lost"):
        async with running(Part(), flag="--port"):
            pass
