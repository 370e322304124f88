"""How many messages, and bytes of them, may be on their way at once."""

from __future__ import annotations

import asyncio
from collections import deque

from cosmodrome.errors import ConfigError

BYTES_MAX = 16 << 20


class Window:
    """Room is given in the order in which it was asked for. One message always fits into an
    empty window, however big it is."""

    def __init__(self, messages_max: int, bytes_max: int = BYTES_MAX) -> None:
        if messages_max <= 0 or bytes_max <= 0:
            raise ConfigError(f"in_flight_max must be positive, not {messages_max}")
        self.messages_max = messages_max
        self.bytes_max = bytes_max
        self.messages = 0
        self.bytes = 0
        self._asking: deque[tuple[asyncio.Future[None], int, int]] = deque()

    @property
    def full(self) -> bool:
        return (
            self.messages >= self.messages_max or self.bytes >= self.bytes_max or bool(self._asking)
        )

    def take(self, count: int, size: int) -> None:
        self.messages += count
        self.bytes += size

    def give(self, count: int, size: int) -> None:
        self.messages -= count
        self.bytes -= size
        while self._asking and self.messages < self.messages_max and self.bytes < self.bytes_max:
            granted, count, size = self._asking.popleft()
            if not granted.done():
                self.take(count, size)
                granted.set_result(None)

    async def wait(self, count: int = 0, size: int = 0) -> None:
        """Return with room taken for so many messages and bytes."""
        if not self.full:
            self.take(count, size)
            return
        granted = asyncio.get_running_loop().create_future()
        self._asking.append((granted, count, size))
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.give(count, size)
            raise
