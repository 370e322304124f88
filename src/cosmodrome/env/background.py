"""Work beside what is asked: tasks between the start and the stop of their owner, and long work.

Long work is a generator that yields after a few rows, so that others can have a turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Generator
from typing import NoReturn, TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Steps = Generator[None, None, Result]


class Background:
    """At most one task at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Between `start` and `stop`, also when the work has ended by itself."""
        return self._task is not None

    def start(self, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Nothing happens when it runs already."""
        if self._task is None:
            self._task = asyncio.create_task(work(), name=self._name)

    def repeat(self, seconds: float | Callable[[], float], work: Callable[[], None]) -> None:
        """Start doing `work` every so many seconds, for the first time after one such pause.

        Seconds that may change are asked for before each pause. An error does not end the work.
        """

        async def again_and_again() -> NoReturn:
            while True:
                await asyncio.sleep(seconds() if callable(seconds) else seconds)
                try:
                    work()
                except Exception:
                    log.exception("background work failed; it is tried again at its next turn")

        self.start(again_and_again)

    async def stop(self) -> bool:
        """Cancel the work and wait for its end; false when there was none."""
        task, self._task = self._task, None
        if task is None:
            return False
        task.cancel()
        # Not `await task`: whoever stops it may be cancelled too, which must not look like its end.
        await asyncio.wait((task,))
        if not task.cancelled():
            task.result()
        return True


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
