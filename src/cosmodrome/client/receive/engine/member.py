"""A running consumer of any kind: its parts wired together, and what brokers ask of it.

Implements `instance.ConsumerMember`, and is the host of the assignment and of the pull loops. What
becomes of the messages is the business of its `Work`: to call handlers, to wait for a poll, or to
take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Coroutine, Mapping
from typing import Any, Protocol

from cosmodrome.client.instance import Instance, release
from cosmodrome.client.namespace import unwrap
from cosmodrome.client.receive.engine.assignment import Assignment
from cosmodrome.client.receive.engine.decoding import Arrivals, Decoder
from cosmodrome.client.receive.engine.options import ReadOptions
from cosmodrome.client.receive.engine.progress import (
    BrokerOffsets,
    LocalOffsets,
    Offsets,
    offsets_path,
)
from cosmodrome.client.receive.engine.pulling import Puller
from cosmodrome.client.receive.engine.report import Rates, report, running_properties
from cosmodrome.client.receive.engine.subscriptions import Subscription, check
from cosmodrome.client.receive.engine.tasks import Tasks, cancel
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.values import MessageQueue, NoRoute, ReceivedMessage
from cosmodrome.errors import Code, ProtocolError, Refused
from cosmodrome.wire.bodies import ConsumerData
from cosmodrome.wire.commands.consume import ConsumeMessageDirectly
from cosmodrome.wire.record import decode_record

log = logging.getLogger(__name__)

DIRECT_MAX = 16  # messages that brokers push at once, each in memory while its handler runs


class Work(Protocol):
    """What a kind of consumer does with its windows."""

    def opened(self, window: Window) -> None: ...

    def closed(self, window: Window) -> Awaitable[None]:
        """It is dropped; done when nothing runs in order for it any more."""

    def arrived(self, window: Window, found: Arrivals) -> None:
        """They are in the window already."""

    def unreadable(self, window: Window, error: ProtocolError) -> None:
        """What a broker answered cannot be taken apart into messages; it was logged."""

    def share_changed(self, topic: str, queues: list[MessageQueue]) -> Awaitable[None]: ...

    def consume_directly(self, message: ReceivedMessage) -> Awaitable[bytes]:
        """Process one message for an operator; the JSON of how it went."""

    def end(self) -> None:
        """Begin nothing more; whoever waits for messages learns that it is over."""

    def stop(self) -> Awaitable[None]:
        """End what runs."""


class Member:
    def __init__(
        self,
        instance: Instance,
        group: str,
        options: ReadOptions,
        work: Work,
        tasks: Tasks,
        rates: Rates,
    ) -> None:
        self.instance = instance
        self.group = group
        self.subscriptions: dict[str, Subscription] = {}  # by full topic name
        self.assigned: dict[MessageQueue, Subscription] = {}  # instead, when the user chose
        self.tasks = tasks
        self.offset_store: Offsets = self._offset_store(options)
        self.assignment = Assignment(
            instance, group, options, self.subscriptions, self.offset_store, self
        )
        self._options = options
        self._work = work
        self._rates = rates
        namespace = instance.options.namespace
        self._decoder = Decoder(
            unwrap(namespace, group), namespace, options.body_bytes_max, options.filters
        )
        self.puller = Puller(instance, group, options, self._decoder, rates, self)
        self._loops: set[asyncio.Task[None]] = set()
        self._pulls: dict[Window, asyncio.Task[None]] = {}
        self._started_ms = instance.env.clock.now_ms()
        self._joined = False
        self._stopped = False
        self._direct = 0  # messages that are consumed for operators right now
        tasks.ended.add_done_callback(lambda _: work.end())

    def _offset_store(self, options: ReadOptions) -> Offsets:
        instance = self.instance
        if options.clustering:
            return BrokerOffsets(instance, self.group)
        path = offsets_path(options.offsets_dir, instance.options, instance.client_id, self.group)
        return LocalOffsets(path, instance.env)

    # --- life ------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._options.commits_by_itself:
            self._loop(self.assignment.commit_forever())
        if self.assignment.locks is not None:
            self._loop(self.assignment.locks.renew_forever())

    async def join(self) -> None:
        """Be a member of the group, with a share of the queues of the subscriptions."""
        if self._stopped:
            return  # a member that nobody removes any more would keep its queues
        if self._joined:
            await self.instance.heartbeat()
            return
        await self.instance.add_consumer(self)
        self._joined = True  # not before: an attempt that was cancelled is made again
        self._loop(self.assignment.rebalance_forever())

    async def stop(self) -> None:
        """Safe to call again; the second call has nothing left to do."""
        if self._stopped:
            return
        self._stopped = True
        self.assignment.end_rounds()
        self._work.end()
        for window in self.assignment.windows.values():
            window.changed()
        try:
            try:
                await cancel(*self._loops)
                await self._work.stop()
            finally:
                # Even if nobody waits any more: a member that stays would keep its queues.
                await self.assignment.leave_all()
                await self.instance.remove_consumer(self)
        finally:
            await release(self.instance, consumer_group=self.group)
            self.tasks.end()

    def _loop(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the consumer at the latest."""
        task = self.tasks.spawn(work)
        self._loops.add(task)
        task.add_done_callback(self._loops.discard)
        return task

    # --- what to read ----------------------------------------------------------------------------

    async def check(self, subscription: Subscription) -> None:
        """Refused when a broker says that an SQL expression is wrong."""
        with contextlib.suppress(NoRoute):  # a topic may come later
            await check(self.instance, self.group, subscription)

    async def subscribe(self, subscription: Subscription) -> None:
        """Member when this returns, with a first share if the topic exists already."""
        # Brokers have to know the member before one of them is asked for the members.
        async with self.assignment.between_rounds:
            self.subscriptions[subscription.topic] = subscription
            with contextlib.suppress(NoRoute):
                await self.instance.routes.get(subscription.topic)
            await self.join()
        if not await self.assignment.rebalance():
            self.assignment.rebalance_soon()

    async def unsubscribe(self, topic: str) -> None:
        if self.subscriptions.pop(topic, None) is not None:
            await self.instance.heartbeat()
            await self.assignment.rebalance()

    def subscription(self, queue: MessageQueue) -> Subscription | None:
        return self.assigned.get(queue) or self.subscriptions.get(queue.topic)

    # --- what the assignment and the pull loops say ----------------------------------------------

    def opened(self, window: Window) -> None:
        if self._options.pulls_ahead:
            pull = self._loop(self.puller.run(window))
            self._pulls[window] = pull
            pull.add_done_callback(lambda _: self._pulls.pop(window, None))
        self._work.opened(window)

    async def closed(self, window: Window) -> None:
        pull = self._pulls.get(window)
        if pull is not None:
            await cancel(pull)
        await self._work.closed(window)

    def share_changed(self, topic: str, queues: list[MessageQueue]) -> Awaitable[None]:
        return self._work.share_changed(topic, queues)

    def arrived(self, window: Window, found: Arrivals) -> None:
        self._work.arrived(window, found)

    def unreadable(self, window: Window, error: ProtocolError) -> None:
        self._work.unreadable(window, error)

    async def moved(self, window: Window, offset: int) -> None:
        await self.assignment.moved(window, offset)

    # --- what brokers ask ------------------------------------------------------------------------

    def heartbeat(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=self._options.consume_type,
            message_model=self._options.model.upper(),
            consume_from_where=self._options.from_where,
            subscription_data_set=[one.data() for one in self.subscriptions.values()],
        )

    def rebalance_soon(self) -> None:
        self.assignment.rebalance_soon()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        log.warning("offsets reset by an operator: group=%s topic=%s", self.group, topic)
        mine = [queue for queue in self.assignment.windows if queue.topic == topic]
        self._loop(self._reset({queue: offsets[queue] for queue in mine if queue in offsets}))

    async def _reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            await self.assignment.restart(queue, max(offset, 0))

    def offsets(self, topic: str) -> dict[MessageQueue, int]:
        windows = self.assignment.windows.items()
        return {queue: window.done_to for queue, window in windows if queue.topic == topic}

    def running_info(self, *, stacks: bool) -> bytes:
        return report(
            self.assignment.windows.values(),
            [one.data() for one in self.subscriptions.values()],
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
        if self._direct >= DIRECT_MAX:
            raise Refused(
                Code.FLOW_CONTROL,
                f"{DIRECT_MAX} messages are consumed directly at this client already; try again",
            )
        message = self._decoder.one(decode_record(ask.body), ask.broker_name or "")
        self._direct += 1
        try:
            return await self._work.consume_directly(message)
        finally:
            self._direct -= 1
