"""Timeouts that are fair after the whole process stood still.

Timers run before sockets are read, so answers that came meanwhile get a moment to be seen.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any

STOOD_STILL_S = 0.1  # a timer this late means that the whole process stood still
CATCH_UP_S = 0.05


def give_up(loop: asyncio.AbstractEventLoop, answered: asyncio.Future[Any], due: float) -> None:
    """For a timer at `due`: whoever still waits gets a TimeoutError."""
    if answered.done():
        return
    if loop.time() - due > STOOD_STILL_S:
        loop.call_later(CATCH_UP_S, give_up, loop, answered, math.inf)
    else:
        answered.set_exception(TimeoutError())
