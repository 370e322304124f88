"""What was written to the log lately, in memory until it is dispatched.

Reading it back through the map would cost a page fault for every page.
"""

from __future__ import annotations

from collections import deque

RECENT_BYTES_MAX = 16 * 1024 * 1024


class Recent:
    """Pieces of the log in their order; the oldest go first when they are too much."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[int, int, bytearray]] = deque()  # start, end in the log, data
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def add(self, start: int, end: int, data: bytearray) -> None:
        """`end` may lie behind the data: a file that is full ends with nothing."""
        self._pieces.append((start, end, data))
        self.size_bytes += len(data)
        while self.size_bytes > RECENT_BYTES_MAX:
            self.size_bytes -= len(self._pieces.popleft()[2])

    def find(self, offset: int) -> tuple[memoryview, int] | None:
        """What was written from `offset` on, if it is here, and where its data begins."""
        for start, end, data in self._pieces:
            if end > offset:
                return (memoryview(data), start) if start <= offset else None
        return None

    def let_go(self, offset: int) -> None:
        """What lies before `offset` was dispatched."""
        while self._pieces and self._pieces[0][1] <= offset:
            self.size_bytes -= len(self._pieces.popleft()[2])

    def clear(self) -> None:
        self._pieces.clear()
        self.size_bytes = 0
