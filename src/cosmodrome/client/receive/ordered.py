"""Messages in order: one at a time per queue, and the next only when this one is done.

Each queue has a task of its own. A message that fails is tried again here after a pause, and the
queue waits for it; it is put aside when its attempts are used up. The broker's lock on the
queue has to be valid whenever a handler is called.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque

from cosmodrome.client.receive.consumer_options import ConsumerOptions
from cosmodrome.client.receive.engine.tasks import Tasks, cancel
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.receive.handlers import (
    DELAY_LEVELS_S,
    Calls,
    Handler,
    Listeners,
    Reject,
    RetryLater,
    describe,
)
from cosmodrome.client.receive.handling import Handling
from cosmodrome.client.receive.returns import DEAD_LETTER, Returns
from cosmodrome.client.values import ReceivedMessage

log = logging.getLogger(__name__)

IDLE_S = 30.0  # an idle queue looks again; messages wake it earlier
UNLOCKED_S = 3.0
TURN_S = 0.005
SUSPEND_LEAST_S, SUSPEND_MOST_S = 0.01, 30.0


class Ordered(Handling):
    def __init__(
        self,
        options: ConsumerOptions,
        listeners: Listeners,
        calls: Calls,
        returns: Returns,
        tasks: Tasks,
    ) -> None:
        super().__init__(options, listeners, calls, returns, tasks)
        self._runners: dict[Window, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(options.concurrency)
        self._hand_out = Handler(self._offer_to_user)
        self._handed: deque[ReceivedMessage] = deque()
        self._more: asyncio.Future[None] | None = None  # those in `next` wait for it
        self._answers: set[asyncio.Future[int | None]] = set()
        self._turn = 0.0

    def opened(self, window: Window) -> None:
        # Operators look for this name in stacks; the Java client gives it to its threads.
        name = f"ConsumeMessageThread_{self._tasks.group}_{window.queue.queue_id}"
        runner = self._tasks.spawn(self.run(window), name=name)
        self._runners[window] = runner
        runner.add_done_callback(lambda _: self._runners.pop(window, None))

    async def closed(self, window: Window) -> None:
        runner = self._runners.get(window)
        if runner is not None and runner is not asyncio.current_task():
            await asyncio.wait((runner,), timeout=self._options.close_timeout_ms / 1000)

    def decided(self) -> None:
        for window in self._runners:
            window.changed()

    def offer(self, window: Window, messages: list[ReceivedMessage]) -> None:
        window.waiting.extend(messages)
        window.changed()

    async def run(self, window: Window) -> None:
        """Work until the window is dropped; a call that runs then ends first."""
        loop = asyncio.get_running_loop()
        while not self._over(window):
            if not self._may_run(window):
                await window.wait(UNLOCKED_S)
                continue
            if not window.waiting:
                await window.wait(IDLE_S)
                continue
            handler = self._handler(window.waiting[0])
            if handler is None:
                await window.wait(IDLE_S)
                continue
            # What a user iterates over is refused one by one.
            batch = self._take(window, 1 if handler is self._hand_out else self._options.batch)
            while batch and not self._over(window):
                if not self._may_run(window):
                    await window.wait(UNLOCKED_S)
                    continue
                if handler.inline or handler is self._hand_out:  # no worker is needed for these
                    error = await self._calls.call(handler, window, batch)
                else:
                    async with self._slots:
                        if self._over(window) or not self._may_run(window):
                            continue  # the queue or its lock was lost meanwhile
                        error = await self._calls.call(handler, window, batch)
                if error is not None and self._over(window):
                    return  # not done, so it comes again
                batch = await self._conclude(window, batch, error)
            if loop.time() - self._turn > TURN_S:
                await asyncio.sleep(0)
                self._turn = loop.time()

    def _over(self, window: Window) -> bool:
        return window.dropped or self._closing

    def _may_run(self, window: Window) -> bool:
        now = asyncio.get_running_loop().time()
        return not self._options.clustering or window.is_locked(now)

    def _handler(self, message: ReceivedMessage) -> Handler | None:
        found = self._listeners.find(message.topic)
        if found is None and self._listeners.iterating:
            return self._hand_out
        return found

    def _take(self, window: Window, count_max: int) -> list[ReceivedMessage]:
        """The next messages, all for the same handler."""
        first = window.waiting.popleft()
        batch = [first]
        while window.waiting and len(batch) < count_max and window.waiting[0].topic == first.topic:
            batch.append(window.waiting.popleft())
        return batch

    # --- what becomes of them --------------------------------------------------------------------

    async def _conclude(
        self, window: Window, batch: list[ReceivedMessage], error: Exception | None
    ) -> list[ReceivedMessage]:
        """Pause if need be, and return the messages that must be tried again."""
        if error is None:
            window.finish(batch)
            return []
        if isinstance(error, RetryLater):
            window.finish(batch[: error.done])
            batch = batch[error.done :]
        elif not isinstance(error, Reject):
            log.warning(
                "handler failed, its queue waits: queue=%s offset=%d attempt=%d reason=%s",
                window.queue,
                batch[0].queue_offset,
                batch[0].reconsume_times + 1,
                describe(error),
                exc_info=error,
            )
        left = []
        for message in batch:
            if await self._put_aside(message, error):
                window.finish((message,))
            else:
                message.record.reconsume_times += 1
                left.append(message)
        if left and not window.dropped:
            await self._pause(window, error)
        return left

    async def _put_aside(self, message: ReceivedMessage, error: Exception) -> bool:
        limit = self._options.max_reconsume_times
        if isinstance(error, Reject):
            if not self._options.clustering:
                return True
            return await self._returns.give_back(message, DEAD_LETTER)
        if limit < 0 or message.reconsume_times < limit:
            return False
        if not self._options.clustering:
            log.warning("message dropped: attempts used up: message=%s", message.msg_id)
            return True
        return await self._returns.send_copy(message, message.reconsume_times)

    async def _pause(self, window: Window, error: Exception) -> None:
        pause_s = self._options.suspend_queue_ms / 1000
        if isinstance(error, RetryLater):
            if error.delay_s is not None:
                pause_s = error.delay_s
            elif error.delay_level:
                pause_s = DELAY_LEVELS_S[min(error.delay_level, len(DELAY_LEVELS_S)) - 1]
        loop = asyncio.get_running_loop()
        until = loop.time() + min(max(pause_s, SUSPEND_LEAST_S), SUSPEND_MOST_S)
        while not self._over(window) and loop.time() < until:
            await window.wait(until - loop.time())

    # --- iterating -------------------------------------------------------------------------------

    async def _offer_to_user(self, called: ReceivedMessage | list[ReceivedMessage]) -> None:
        """The handler of a consumer that is iterated: done when the user says so."""
        for message in called if isinstance(called, list) else [called]:
            answer: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
            self._answers.add(answer)
            message._on_answer = functools.partial(_answered, answer)
            self._handed.append(message)
            if self._more is not None and not self._more.done():
                self._more.set_result(None)
            try:
                level = await answer
            finally:
                self._answers.discard(answer)
            if level is not None and level < 0:
                raise Reject
            if level is not None:
                raise RetryLater(level)

    async def next(self) -> ReceivedMessage | None:
        while not self._closing:
            if self._handed:
                return self._handed.popleft()
            if self._more is None or self._more.done():
                self._more = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._more,))
        return None

    # --- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """Begin no more calls and end the iteration."""
        super().end()
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
        for answer in self._answers:
            answer.cancel()  # the message comes again

    async def stop(self) -> None:
        """Let calls that run finish, within `close_timeout_ms`."""
        await super().stop()
        # A handler may stop its own consumer; nobody waits for that call.
        runners = {*self._runners.values()} - {asyncio.current_task()}
        if runners:
            try:
                await asyncio.wait(runners, timeout=self._options.close_timeout_ms / 1000)
            finally:
                await cancel(*runners)


async def _answered(
    answer: asyncio.Future[int | None], message: ReceivedMessage, level: int | None
) -> None:
    if not answer.done():
        answer.set_result(level)
