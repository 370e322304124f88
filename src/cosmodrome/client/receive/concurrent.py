"""Messages in any order: workers call handlers, or the user iterates.

Plain functions share one worker, which walks through what a pull brought without a task or a
queue per message. What a handler refuses goes back to the cluster. Everything that waits here is
in a window and so within its limits.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import logging
from collections import deque
from typing import cast

from cosmodrome.client.receive.consumer_options import ConsumerOptions, Consumption
from cosmodrome.client.receive.engine.tasks import Tasks, cancel
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.receive.handlers import (
    Calls,
    Handler,
    Listeners,
    Reject,
    RetryLater,
    cancelled_within,
    describe,
)
from cosmodrome.client.receive.handling import AGAIN_S, Handling
from cosmodrome.client.receive.returns import DEAD_LETTER, FIRST_RETRY_LEVEL, Returns
from cosmodrome.client.values import ReceivedMessage
from cosmodrome.wire.names import RETRY_PREFIX

log = logging.getLogger(__name__)

TURN_S = 0.005  # plain functions have the loop at most this long, and one call
LATE_SWEEP_S = 60.0

_Batch = tuple[Handler, Window, list[ReceivedMessage]]


class Concurrent(Handling):
    def __init__(
        self,
        options: ConsumerOptions,
        listeners: Listeners,
        calls: Calls,
        returns: Returns,
        tasks: Tasks,
    ) -> None:
        super().__init__(options, listeners, calls, returns, tasks)
        self._windows: set[Window] = set()
        self._late_sweep: asyncio.Task[None] | None = None
        self._held: list[tuple[Window, list[ReceivedMessage]]] = []  # until it is known for whom
        self._inline: asyncio.Queue[_Batch] = asyncio.Queue()
        self._batches: asyncio.Queue[_Batch] = asyncio.Queue()
        self._handed: asyncio.Queue[tuple[Window, list[ReceivedMessage]] | None] = asyncio.Queue()
        self._in_hand: deque[tuple[Window, ReceivedMessage]] = deque()
        self._workers: list[asyncio.Task[None]] = []
        self._inline_worker: asyncio.Task[None] | None = None
        self._busy: set[asyncio.Task[None]] = set()

    # --- messages come in ------------------------------------------------------------------------

    def opened(self, window: Window) -> None:
        self._windows.add(window)
        if self._late_sweep is None:
            self._late_sweep = self._tasks.spawn(self._sweep())

    async def closed(self, window: Window) -> None:
        self._windows.discard(window)

    def offer(self, window: Window, messages: list[ReceivedMessage]) -> None:
        """They are in the window already."""
        if not self._listeners.by_topic or not window.queue.topic.startswith(RETRY_PREFIX):
            # All of one topic, or all for one handler: only retry topics mix.
            self._hand_over(self._listeners.find(messages[0].topic), window, messages)
            return
        for topic, run in itertools.groupby(messages, key=lambda message: message.topic):
            self._hand_over(self._listeners.find(topic), window, list(run))

    def decided(self) -> None:
        """There is a new handler, or the user began to iterate."""
        if self._listeners.inline and self._inline_worker is None:
            # Operators look for this name in stacks; the Java client gives it to its threads.
            self._inline_worker = self._tasks.spawn(
                self._work_inline(), name="ConsumeMessageThread_0"
            )
        if self._listeners.waiting and not self._workers:
            self._workers = [
                self._tasks.spawn(self._work(), name=f"ConsumeMessageThread_{number}")
                for number in range(1, self._options.concurrency + 1)
            ]
        held, self._held = self._held, []
        for window, messages in held:
            self.offer(window, messages)

    def _hand_over(
        self, handler: Handler | None, window: Window, messages: list[ReceivedMessage]
    ) -> None:
        if handler is None:
            if self._listeners.iterating:
                self._handed.put_nowait((window, messages))
            else:
                self._held.append((window, messages))
        elif handler.inline:
            self._inline.put_nowait((handler, window, messages))
        else:
            size = self._options.batch
            for at in range(0, len(messages), size):
                self._batches.put_nowait((handler, window, messages[at : at + size]))

    # --- handlers --------------------------------------------------------------------------------

    # Workers keep no name for what they work on: one that waits would hold its last messages.

    async def _work(self) -> None:
        while not self._closing:
            await self._call(*await self._batches.get())

    async def _call(self, handler: Handler, window: Window, batch: list[ReceivedMessage]) -> None:
        if window.dropped:
            return
        task = asyncio.current_task()
        assert task is not None
        now = asyncio.get_running_loop().time()
        for message in batch:
            window.started[message.queue_offset] = now
        self._busy.add(task)
        try:
            await self._conclude(window, batch, await self._calls.call(handler, window, batch))
        finally:
            self._busy.discard(task)

    async def _work_inline(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        time = asyncio.get_running_loop().time
        turn = time()
        simple = self._options.batch == 1 and not self._calls.hooked
        while not self._closing:
            work = await self._inline.get()
            self._busy.add(task)
            try:
                if simple:
                    turn = await self._each(*work, turn)
                else:
                    await self._batched(*work)
                    await asyncio.sleep(0)
            finally:
                del work
                self._busy.discard(task)

    async def _each(
        self, handler: Handler, window: Window, messages: list[ReceivedMessage], turn: float
    ) -> float:
        """One call per message, directly. `turn` is when this worker last let others run; the new
        time is returned."""
        time, call = asyncio.get_running_loop().time, handler.call
        done: list[ReceivedMessage] = []
        failures: list[tuple[ReceivedMessage, Exception]] = []
        began = time()
        for message in messages:
            if window.dropped or self._closing:
                break
            try:
                outcome = call(message)
                if outcome is not None and inspect.isawaitable(outcome):
                    await outcome
                done.append(message)
            except Exception as error:
                failures.append((message, error))
            except asyncio.CancelledError as cancelled:
                failures.append((message, cancelled_within(cancelled)))
            now = time()
            if now - turn > TURN_S:
                window.finish(done)
                self._calls.counted(window, len(done), 0, began, now)
                done.clear()
                await asyncio.sleep(0)
                turn = began = time()
        window.finish(done)
        window.consumed_at = now = time()
        self._calls.counted(window, len(done), len(failures), began, now)
        if failures:
            await asyncio.gather(
                *(self._conclude(window, [message], error) for message, error in failures)
            )
        return turn

    async def _batched(
        self, handler: Handler, window: Window, messages: list[ReceivedMessage]
    ) -> None:
        size = self._options.batch
        for at in range(0, len(messages), size):
            if window.dropped or self._closing:
                return
            batch = messages[at : at + size]
            await self._conclude(window, batch, await self._calls.call(handler, window, batch))

    # --- what becomes of them --------------------------------------------------------------------

    async def _conclude(
        self, window: Window, batch: list[ReceivedMessage], error: Exception | None
    ) -> None:
        level = 0
        if error is None:
            window.finish(batch)
            return
        if isinstance(error, RetryLater):
            window.finish(batch[: error.done])
            batch = batch[error.done :]
            level = error.delay_level
        elif isinstance(error, Reject):
            level = DEAD_LETTER
        elif batch:
            log.warning(
                "handler failed: message=%s offset=%d attempt=%d reason=%s",
                batch[0].msg_id,
                batch[0].queue_offset,
                batch[0].reconsume_times + 1,
                describe(error),
                exc_info=error,
            )
        for message in batch:
            await self.put_back(window, message, level)

    async def put_back(self, window: Window, message: ReceivedMessage, level: int) -> None:
        """It is not done: give it back to the cluster. When the cluster does not take it, try again
        here."""
        window.started.pop(message.queue_offset, None)
        if not window.holds(message):
            return
        if not self._options.clustering:
            # Everybody gets every message once; there is nobody to give one back to.
            log.warning("message dropped: broadcasting has no retries: message=%s", message.msg_id)
            window.finish((message,))
        elif await self._returns.give_back(message, level):
            window.finish((message,))
        else:
            message.record.reconsume_times += 1
            asyncio.get_running_loop().call_later(AGAIN_S, self._again, window, message)

    def _again(self, window: Window, message: ReceivedMessage) -> None:
        if not self._closing and window.holds(message):
            self.offer(window, [message])

    async def _sweep(self) -> None:
        every_s = min(LATE_SWEEP_S, self._options.consume_timeout_ms / 1000)
        while True:
            await asyncio.sleep(every_s)
            for window in list(self._windows):
                await self.give_up_late(window)

    async def give_up_late(self, window: Window) -> None:
        """Give back what is being processed for longer than the timeout."""
        limit = asyncio.get_running_loop().time() - self._options.consume_timeout_ms / 1000
        late = [offset for offset, began in window.started.items() if began < limit]
        for offset in late:
            message = window.unfinished.get(offset)
            if message is None:
                window.started.pop(offset, None)
                continue
            log.warning(
                "message takes too long, giving it back: message=%s limit_ms=%d",
                message.msg_id,
                self._options.consume_timeout_ms,
            )
            await self.put_back(window, message, FIRST_RETRY_LEVEL)

    # --- iterating -------------------------------------------------------------------------------

    async def next(self) -> ReceivedMessage | None:
        """The next message for the user; None when there will be no more."""
        while not self._closing:
            if not self._in_hand:
                handed = await self._handed.get()
                if handed is None:
                    self._handed.put_nowait(None)  # for others that iterate
                    break
                window, messages = handed
                self._in_hand.extend([(window, message) for message in messages])
                continue
            window, message = self._in_hand.popleft()
            if window.dropped:
                continue
            began = asyncio.get_running_loop().time()
            window.started[message.queue_offset] = began
            consumption = None
            if self._calls.hooked:
                consumption = self._calls.begin(window, [message], iterated=True)
            message._on_answer = functools.partial(self._answered, window, consumption, began)
            return message
        return None

    async def _answered(
        self,
        window: Window,
        consumption: Consumption | None,
        began: float,
        message: ReceivedMessage,
        level: int | None,
    ) -> None:
        """The user acknowledged it or wants it again; only the first answer counts."""
        message._on_answer = None
        if level is None:
            window.finish((message,))
            self._calls.end(window, consumption, 1, began, None)
        else:
            error = RetryLater(level) if level >= 0 else Reject()
            self._calls.end(window, consumption, 1, began, error)
            await self.put_back(window, message, level)

    # --- the end ---------------------------------------------------------------------------------

    def end(self) -> None:
        """Begin no more calls and end the iteration."""
        super().end()
        self._handed.put_nowait(None)

    async def stop(self) -> None:
        """Let calls that run finish, within `close_timeout_ms`."""
        self.end()
        await super().stop()
        if self._late_sweep is not None:
            await cancel(self._late_sweep)
        workers = {*self._workers}
        if self._inline_worker is not None:
            workers.add(self._inline_worker)
        self._workers, self._inline_worker = [], None
        # A handler may stop its own consumer; nobody waits for that call.
        workers.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        busy = workers & self._busy
        for task in workers - busy:
            task.cancel()
        try:
            if busy:
                await asyncio.wait(busy, timeout=self._options.close_timeout_ms / 1000)
        finally:
            for task in workers:
                task.cancel()
        if workers:
            await asyncio.wait(workers)  # one that failed has ended the consumer: `Tasks`
