"""One machine of several in a simulated process.

`NODE` says on whose behalf code runs. Tasks and callbacks inherit it, as they inherit every context
variable, so a loop that reads it when something is scheduled knows the machine without being told.
A node that is paused keeps its callbacks, as a process that got SIGSTOP does; its connections stay,
and what arrives waits. A node that is gone runs nothing and sends nothing any more.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

NODE: contextvars.ContextVar[Node | None] = contextvars.ContextVar("NODE", default=None)

TASKS_KEPT = 50  # from so many on, those that have ended are forgotten


class Node:
    """One life of a machine. The next one is another node with the same name."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.paused = False
        self.dumb = False  # nothing it sends leaves any more
        self.gone = False
        self._loop = loop
        self._held: list[Gate] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start `work` as a task of this node."""
        context = contextvars.copy_context()
        context.run(NODE.set, self)
        return self._loop.create_task(work, context=context)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """Everything that came due meanwhile happens now, in its order."""
        self.paused = False
        held, self._held = self._held, []
        for gate in held:
            gate.again(self._loop)

    async def bury(self) -> list[BaseException]:
        """End this life. What its tasks still do is seen by nobody; the errors they ended with."""
        self.dumb = True
        self.resume()
        buried: list[asyncio.Task[Any]] = []
        while tasks := [task for task in self._tasks if not task.done()]:  # they may start others
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            buried += tasks
        self.gone = True
        ended = [task.exception() for task in buried if not task.cancelled()]
        return [error for error in ended if error is not None]

    # --- for the loop --------------------------------------------------------------------------
    def adopt(self, task: asyncio.Task[Any]) -> None:
        if len(self._tasks) >= TASKS_KEPT:
            self._tasks = [known for known in self._tasks if not known.done()]
        self._tasks.append(task)

    def hold(self, gate: Gate) -> None:
        self._held.append(gate)


class Gate:
    """A callback of a node, which passes while the node runs."""

    __slots__ = ("args", "callback", "context", "handle", "node")

    def __init__(
        self,
        node: Node,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: contextvars.Context | None,
    ) -> None:
        self.node = node
        self.callback = callback
        self.args = args
        self.context = contextvars.copy_context() if context is None else context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        if self.node.paused:
            self.node.hold(self)
        elif not self.node.gone:
            self.callback(*self.args)

    def again(self, loop: asyncio.AbstractEventLoop) -> None:
        """Into the next turn, unless its owner takes it back until then."""
        loop.call_soon(self._late, context=self.context)

    def _late(self) -> None:
        if self.handle is None or not self.handle.cancelled():
            self()
