"""What the two ways to call handlers, `concurrent.py` and `ordered.py`, have in common.

A message whose body cannot be read reaches no handler. It goes to the dead letters of the group,
and progress waits until it is there.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod

from cosmodrome.client.receive.consumer_options import ConsumerOptions
from cosmodrome.client.receive.engine.decoding import Arrivals
from cosmodrome.client.receive.engine.tasks import Tasks, cancel
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.receive.handlers import Calls, Listeners
from cosmodrome.client.receive.returns import DEAD_LETTER, Returns
from cosmodrome.client.values import DamagedMessage, MessageQueue, ReceivedMessage
from cosmodrome.errors import ProtocolError

log = logging.getLogger(__name__)

AGAIN_S = 5.0  # before another attempt at a message that the cluster did not take back


class Handling(ABC):
    """A `Work` of the engine."""

    def __init__(
        self,
        options: ConsumerOptions,
        listeners: Listeners,
        calls: Calls,
        returns: Returns,
        tasks: Tasks,
    ) -> None:
        self._options = options
        self._listeners = listeners
        self._calls = calls
        self._returns = returns
        self._tasks = tasks
        self._put_aside_tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    @abstractmethod
    def offer(self, window: Window, messages: list[ReceivedMessage]) -> None:
        """Messages for handlers; they are in the window already."""

    def arrived(self, window: Window, found: Arrivals) -> None:
        messages = found.messages
        if found.damaged:
            messages = [message for message in messages if message.damage is None]
            task = self._tasks.spawn(self._put_damaged_aside(window, found.damaged))
            self._put_aside_tasks.add(task)
            task.add_done_callback(self._put_aside_tasks.discard)
        if messages:
            self.offer(window, messages)

    async def _put_damaged_aside(self, window: Window, damaged: list[DamagedMessage]) -> None:
        for message in damaged:
            now = asyncio.get_running_loop().time()
            self._calls.counted(window, 0, 1, now, now)
            while window.holds(message):
                if not self._options.clustering:
                    # Everybody gets every message once; there is nobody to give one back to.
                    log.error(
                        "message dropped: broadcasting has no dead letters: message=%s reason=%s",
                        message.msg_id,
                        message.damage,
                    )
                elif not await self._returns.give_back(message, DEAD_LETTER):
                    await asyncio.sleep(AGAIN_S)  # progress waits for it, so nothing is lost
                    continue
                window.finish((message,))

    def unreadable(self, window: Window, error: ProtocolError) -> None:  # noqa: B027
        """It was logged, and the same pull is made again: progress waits."""

    async def share_changed(  # noqa: B027
        self, topic: str, queues: list[MessageQueue]
    ) -> None:
        """Handlers need not know."""

    async def consume_directly(self, message: ReceivedMessage) -> bytes:
        return await self._calls.directly(self._listeners.find(message.topic), message)

    def end(self) -> None:
        """Begin no more calls."""
        self._closing = True

    async def stop(self) -> None:
        await cancel(*self._put_aside_tasks)
