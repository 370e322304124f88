"""The simulated world around a store: a clock that may jump, and work off the loop with delays.

Work runs at once when its turn comes, never beside other code, but its turn comes after a
seeded delay and its result arrives after another: a sync that is under way, seen from the loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cosmodrome.env.base import Env
from cosmodrome.sim.disk import PowerCut, SimDisk

T = TypeVar("T")

BEGIN_MS = 1_700_000_000_000


class SimClock:
    """Wall time follows the loop's time; `skew_ms` makes it jump, in either direction."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.skew_ms = 0

    def now_ms(self) -> int:
        return BEGIN_MS + int(self._loop.time() * 1000) + self.skew_ms


class SimOffload:
    def __init__(self, chance: random.Random, delay_ms_max: int) -> None:
        self.delay_ms_max = delay_ms_max  # of a disk that is slow for a while: more
        self._chance = chance

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        return self._run(work, self._delay(), self._delay())

    def _delay(self) -> float:
        if self._chance.random() < 0.4:
            return 0.0
        return self._chance.randint(0, self.delay_ms_max) / 1000

    async def _run(self, work: Callable[[], T], before: float, after: float) -> T:
        await asyncio.sleep(before)
        try:
            result = work()
        except PowerCut:
            await asyncio.Future()  # a machine without power delivers nothing
            raise
        except OSError:
            await asyncio.sleep(after)
            raise
        await asyncio.sleep(after)
        return result


def sim_env(disk: SimDisk, clock: SimClock, seed: int | str, *, delay_ms_max: int = 20) -> Env:
    chance = random.Random(seed)
    return Env(
        clock=clock,
        disk=disk,
        random=random.Random(chance.random()),
        offload=SimOffload(chance, delay_ms_max),
    )
