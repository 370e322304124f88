"""An event loop without waiting: when nothing is ready, time jumps to the next timer.

Same program, same order, every time. A loop with nothing ready and no timer can never go on;
it says so instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors


class Stuck(Exception):
    """Nothing is ready and no timer is set."""


class _JumpSelector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck("nothing is ready and no timer is set: the program waits forever")
        self.now_seconds += max(0.0, timeout)
        return []


class JumpLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _JumpSelector()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_seconds
