"""Long work as a generator: it yields after a few rows, so that others can have a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


def at_once(steps: Steps[Result]) -> Result:
    """Do all of it now."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


async def in_turns(steps: Steps[Result]) -> Result:
    """Do it while the loop serves others between two steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
        await asyncio.sleep(0)
