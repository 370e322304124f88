"""A running consumer: its parts wired together, its tasks, and what brokers ask of it.

Implements `instance.ConsumerMember`, and is the host of the assignment and of the pull loops. A
part that fails unexpectedly ends the whole, loudly: a consumer that silently does half of its
work is worse than none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any

from cosmodrome.client.instance import Instance, release
from cosmodrome.client.namespace import unwrap
from cosmodrome.client.receive.arrivals import Decoder
from cosmodrome.client.receive.assignment import Assignment
from cosmodrome.client.receive.concurrent import AGAIN_S, Concurrent
from cosmodrome.client.receive.consumer_options import ConsumerOptions
from cosmodrome.client.receive.handlers import Calls, Listeners
from cosmodrome.client.receive.ordered import Ordered
from cosmodrome.client.receive.prefetch import Window
from cosmodrome.client.receive.progress import BrokerOffsets, LocalOffsets, Offsets, offsets_path
from cosmodrome.client.receive.pulling import Puller
from cosmodrome.client.receive.returns import DEAD_LETTER, Returns
from cosmodrome.client.receive.running import Rates, report, running_properties
from cosmodrome.client.receive.subscriptions import Subscription
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.wire.bodies import ConsumerData
from cosmodrome.wire.commands.consume import ConsumeMessageDirectly
from cosmodrome.wire.record import decode_record

log = logging.getLogger(__name__)

LATE_SWEEP_S = 60.0


class Member:
    """See the module. `ended` is done when the consumer is, with the error that ended it."""

    def __init__(
        self,
        instance: Instance,
        group: str,
        options: ConsumerOptions,
        subscriptions: Mapping[str, Subscription],
        listeners: Listeners,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.instance = instance
        self.group = group
        self.ended: asyncio.Future[None] = loop.create_future()
        self._options = options
        self._subscriptions = subscriptions
        self._listeners = listeners
        self._rates = Rates(loop.time)
        self._returns = Returns(instance, group, options)
        shown = unwrap(instance.options.namespace, group)
        self._calls = Calls(shown, options, self._rates, instance.env.clock)
        self.work: Concurrent | Ordered = (Ordered if options.orderly else Concurrent)(
            options, listeners, self._calls, self._returns
        )
        self._decoder = Decoder(
            shown, instance.options.namespace, options.body_bytes_max, options.filters
        )
        self._puller = Puller(instance, group, options, self._decoder, self._rates, self)
        self.assignment = Assignment(
            instance, group, options, subscriptions, self._offset_store(), self
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulls: dict[Window, asyncio.Task[None]] = {}
        self._runners: dict[Window, asyncio.Task[None]] = {}
        self._started_ms = instance.env.clock.now_ms()
        self._stopped = False

    def _offset_store(self) -> Offsets:
        instance, options = self.instance, self._options
        if options.clustering:
            return BrokerOffsets(instance, self.group)
        path = offsets_path(options.offsets_dir, instance.options, instance.client_id, self.group)
        return LocalOffsets(path, instance.env)

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.instance.add_consumer(self)
        self._spawn(self.assignment.rebalance_forever())
        self._spawn(self.assignment.commit_forever())
        if self.assignment.locks is not None:
            self._spawn(self.assignment.locks.renew_forever())
        if isinstance(self.work, Concurrent):
            self.work.worker_ended = self._task_ended
            self._spawn(self._sweep(self.work))

    async def stop(self) -> None:
        """Safe to call again; the second call has nothing left to do."""
        if self._stopped:
            return
        self._stopped = True
        timeout_s = self._options.close_timeout_ms / 1000
        self.assignment.end_rounds()
        self.work.end()
        for window in self.assignment.windows.values():
            window.changed()
        try:
            try:
                await self._end_work(timeout_s)
            finally:
                # Even if nobody waits any more: a member that stays would keep its queues.
                await self.assignment.leave_all()
                await self.instance.remove_consumer(self)
        finally:
            await release(self.instance, consumer_group=self.group)
            if not self.ended.done():
                self.ended.set_result(None)
            elif not self.ended.cancelled():
                self.ended.exception()  # it was logged when it happened

    async def _end_work(self, timeout_s: float) -> None:
        await _cancelled(*self._tasks, *self._pulls.values())
        if isinstance(self.work, Concurrent):
            await self.work.stop(timeout_s)
        # A handler may stop its own consumer; nobody waits for that call.
        runners = set(self._runners.values()) - {asyncio.current_task()}
        if runners:
            try:
                await asyncio.wait(runners, timeout=timeout_s)
            finally:
                await _cancelled(*runners)

    def decided(self) -> None:
        """There is a new handler, or the user began to iterate."""
        if isinstance(self.work, Concurrent):
            self.work.decided()
        for window in self.assignment.windows.values():
            window.changed()

    def raise_failure(self) -> None:
        """The error that ended this consumer, if one did."""
        if self.ended.done() and not self.ended.cancelled():
            error = self.ended.exception()
            if error is not None:
                raise error

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.error("the consumer failed: group=%s", self.group, exc_info=error)
        if not self.ended.done():
            self.ended.set_exception(error)
        self.work.end()

    async def _sweep(self, work: Concurrent) -> None:
        every_s = min(LATE_SWEEP_S, self._options.consume_timeout_ms / 1000)
        while True:
            await asyncio.sleep(every_s)
            for window in list(self.assignment.windows.values()):
                await work.give_up_late(window)

    # --- what the assignment asks ----------------------------------------------------------------

    def opened(self, window: Window) -> None:
        pull = self._spawn(self._puller.run(window))
        self._pulls[window] = pull
        pull.add_done_callback(lambda _: self._pulls.pop(window, None))
        if isinstance(self.work, Ordered):
            runner = self._spawn(self.work.run(window))
            runner.set_name(f"ConsumeMessageThread_{self.group}_{window.queue.queue_id}")
            self._tasks.discard(runner)  # it ends by itself, when its call is done
            self._runners[window] = runner
            runner.add_done_callback(lambda _: self._runners.pop(window, None))

    async def closed(self, window: Window) -> None:
        here = asyncio.current_task()
        pull, runner = self._pulls.get(window), self._runners.get(window)
        if pull is not None and pull is not here:
            await _cancelled(pull)
        if runner is not None and runner is not here:
            await asyncio.wait((runner,), timeout=self._options.close_timeout_ms / 1000)

    # --- what the pull loops say -----------------------------------------------------------------

    def subscription(self, topic: str) -> Subscription | None:
        return self._subscriptions.get(topic)

    def arrived(self, window: Window, messages: list[ReceivedMessage]) -> None:
        self.work.offer(window, messages)

    def damaged(self, window: Window, messages: list[ReceivedMessage]) -> None:
        self._spawn(self._put_aside(window, messages))

    async def _put_aside(self, window: Window, messages: list[ReceivedMessage]) -> None:
        for message in messages:
            while window.holds(message):
                if not self._options.clustering or await self._returns.give_back(
                    message, DEAD_LETTER
                ):
                    window.finish((message,))
                else:
                    await asyncio.sleep(AGAIN_S)  # progress waits for it, so nothing is lost

    async def moved(self, window: Window, offset: int) -> None:
        await self.assignment.moved(window, offset)

    # --- what brokers ask ------------------------------------------------------------------------

    def heartbeat(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type="CONSUME_PASSIVELY",
            message_model=self._options.model.upper(),
            consume_from_where=self._options.from_where,
            subscription_data_set=[wanted.data() for wanted in self._subscriptions.values()],
        )

    def rebalance_soon(self) -> None:
        self.assignment.rebalance_soon()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        log.warning("offsets reset by an operator: group=%s topic=%s", self.group, topic)
        self._spawn(self._reset({q: o for q, o in offsets.items() if q.topic == topic}))

    async def _reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            await self.assignment.restart(queue, offset)

    def offsets(self, topic: str) -> dict[MessageQueue, int]:
        windows = self.assignment.windows.items()
        return {queue: window.done_to for queue, window in windows if queue.topic == topic}

    def running_info(self, *, stacks: bool) -> bytes:
        return report(
            self.assignment.windows.values(),
            [wanted.data() for wanted in self._subscriptions.values()],
            self._rates,
            now_ms=self.instance.env.clock.now_ms(),
            properties=running_properties(
                self._options,
                namesrv=";".join(self.instance.routes.name_servers),
                started_ms=self._started_ms,
            ),
            stacks=stacks,
        )

    async def consume_directly(self, ask: ConsumeMessageDirectly) -> bytes:
        message = self._decoder.one(decode_record(ask.body), ask.broker_name or "")
        return await self._calls.directly(self._listeners.find(message.topic), message)


async def _cancelled(*tasks: asyncio.Task[None]) -> None:
    """Cancel these and wait until they ended, whatever they say."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
