"""Who is served when a read brought more requests than one turn of the loop has time for.

A connection serves what it read for at most `SLICE_S`. What is left waits, unread input stays in
the socket, and the connection stands in this line. Once per turn of the loop those in front get
another slice each, all of them together at most about `TURN_S`. Between two turns everybody else
runs: other connections, timers, signals. So one peer, or many, can make others wait for about a
millisecond, whatever they send.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

SLICE_S = 0.0005
TURN_S = 0.001
# What is charged ahead for a request whose handler runs as a task in a later turn.
TASK_S = 0.00006


class Served(Protocol):
    def serve_slice(self) -> None:
        """Serve for one slice; who has more left joins the line again."""


class Turns:
    """The line. Each server has one for all its connections; `clock` is the loop's by default."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock
        self._line: deque[Served] = deque()
        self._scheduled = False

    def now(self) -> float:
        return (self._clock or asyncio.get_running_loop().time)()

    def join(self, connection: Served) -> None:
        self._line.append(connection)
        self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._scheduled = False
        due = self.now() + TURN_S
        try:
            # Nobody comes twice in one turn.
            for _ in range(len(self._line)):
                self._line.popleft().serve_slice()
                if self.now() >= due:
                    break
        finally:
            if self._line:
                self._schedule()
