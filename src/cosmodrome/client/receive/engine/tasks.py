"""The tasks of a consumer. One that fails unexpectedly ends the consumer, loudly: a consumer that
silently does half of its work is worse than none."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """`ended` is done when the consumer is, with the error that ended it."""

    def __init__(self, group: str) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running: set[asyncio.Task[None]] = set()
        self.group = group

    def spawn(
        self, work: Coroutine[Any, Any, None], *, name: str | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self.running.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def end(self) -> None:
        """Nothing runs any more."""
        if not self.ended.done():
            self.ended.set_result(None)
        elif not self.ended.cancelled():
            self.ended.exception()  # it was logged when it happened

    def raise_failure(self) -> None:
        """The error that ended the consumer, if one did."""
        if self.ended.done() and not self.ended.cancelled():
            error = self.ended.exception()
            if error is not None:
                raise error

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.error("the consumer failed: group=%s", self.group, exc_info=error)
        if not self.ended.done():
            self.ended.set_exception(error)


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """Cancel these and wait until they ended, whatever they say. The caller's own task is left
    out: a user's function may close the consumer that calls it."""
    others = [task for task in tasks if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)
