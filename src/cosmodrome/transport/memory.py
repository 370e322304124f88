"""Memory that connections held goes back to the kernel.

The C library keeps what is freed for its own use. After a peer made this process hold much, that
would stay until the process ends. So when the sum of held bytes has fallen far enough below its
peak, the library is asked to give back what it does not need: rarely, and off the loop, because
half a gigabyte takes 25 ms.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cosmodrome.env.base import Offload

FALLEN_BYTES_MIN = 32 << 20
PAUSE_S = 10.0


def give_back() -> bool:
    """Whether the kernel got anything; False where the C library is not glibc."""
    import ctypes  # here, because most servers never need it

    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return False
    return bool(trim(0))


class HeldMemory:
    """Watches one sum of held bytes."""

    def __init__(self, offload: Offload, give_back: Callable[[], object] = give_back) -> None:
        self._offload = offload
        self._give_back = give_back
        self._held_bytes = self._peak_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._giving: asyncio.Future[object] | None = None

    def now_holds(self, held_bytes: int) -> None:
        self._held_bytes = held_bytes
        if held_bytes > self._peak_bytes:
            self._peak_bytes = held_bytes
        elif self._peak_bytes - held_bytes >= FALLEN_BYTES_MIN and self._timer is None:
            # Later: much of it is freed after this, and what else falls is given back with it.
            self._timer = asyncio.get_running_loop().call_later(PAUSE_S, self._give)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give(self) -> None:
        self._timer = None
        self._peak_bytes = self._held_bytes
        self._giving = asyncio.ensure_future(self._offload(self._give_back))
