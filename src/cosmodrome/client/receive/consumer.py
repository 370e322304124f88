"""A consumer: messages of a group's topics come by themselves, and progress is kept.

    async with Consumer("127.0.0.1:9876", group="billing") as consumer:
        await consumer.subscribe("orders", tags="paid || refunded")
        async for message in consumer:
            ...
            await message.ack()

or, with a handler that is called for every message, `await consumer.run(handler)`. A message is
done when it is acknowledged or its handler returned; until then it comes again after a crash.
Delivery is at least once: after a change of the group a message may come twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self, Unpack

from cosmodrome.client.instance import acquire
from cosmodrome.client.namespace import unwrap, wrap
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.consumer_options import (
    ConsumerOptions,
    ConsumerSettings,
    Consumption,
    as_ms,
)
from cosmodrome.client.receive.handlers import Handler, Listeners, Reject, RetryLater
from cosmodrome.client.receive.member import Member
from cosmodrome.client.receive.progress import raise_unless_stored
from cosmodrome.client.receive.subscriptions import Subscription, check
from cosmodrome.client.trace import Consumption as Traced
from cosmodrome.client.trace import TraceRecorder
from cosmodrome.client.values import MessageQueue, NoRoute, ReceivedMessage
from cosmodrome.env.base import Env
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.wire.names import TRACE_TOPIC, check_group, check_topic, retry_topic

RESERVED_GROUP = "DEFAULT_CONSUMER"
TRACE_RAISED, TRACE_FAILED = 2, 4  # context codes of trace records


class Consumer:
    """A member of a consumer group. Fields of `ConsumerOptions` are given by name."""

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        group: str,
        client: ClientOptions | None = None,
        env: Env | None = None,
        trace: bool = False,
        trace_topic: str = TRACE_TOPIC,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        """`trace` stores what happens to every message in the trace topic, for operators."""
        self._namesrv = namesrv
        self._client = client or ClientOptions()
        self._env = env or real_env()
        self._trace: TraceRecorder | None = None
        if trace:
            self._trace = TraceRecorder(
                *(namesrv, group, "CONSUME", self._client, self._env, trace_topic)
            )
            settings["hooks"] = (*settings.get("hooks", ()), _TraceHook(self._trace))
        self.options = ConsumerOptions(**settings)
        self.group = group
        self._full_group = wrap(self._client.namespace, group)
        check_group(self._full_group)
        if group == RESERVED_GROUP:
            raise ConfigError(f"the group name {group} is reserved; choose another one")
        self._subscriptions: dict[str, Subscription] = {}  # by full topic name
        self._listeners = Listeners()
        self._running: Member | None = None
        self._starting = asyncio.Lock()
        self._closed = False

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the group. `async with` does this."""
        async with self._starting:
            if self._closed:
                raise ConfigError("this consumer was closed; make a new one")
            if self._running is not None:
                return
            instance = await acquire(
                self._namesrv, self._client, self._env, consumer_group=self._full_group
            )
            running = Member(
                instance, self._full_group, self.options, self._subscriptions, self._listeners
            )
            if self.options.clustering:
                topic = retry_topic(self._full_group)
                self._subscriptions[topic] = Subscription.of(topic, self._env.clock.now_ms())
            try:
                if self._trace is not None:
                    await self._trace.start()
                await running.start()
            except BaseException:
                await running.stop()
                if self._trace is not None:
                    await self._trace.stop()
                raise
            self._running = running

    async def stop(self) -> None:
        """Let handlers that run finish, commit, and leave the group."""
        self._closed = True
        async with self._starting:
            running, self._running = self._running, None
        if running is not None:
            await running.stop()
        if self._trace is not None:
            await self._trace.stop()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    # --- what to read ----------------------------------------------------------------------------

    async def subscribe(
        self,
        topic: str,
        *,
        tags: str | None = None,
        sql: str | None = None,
        handler: Callable[[Any], Any] | None = None,
    ) -> None:
        """Read a topic: all of it, messages with one of some tags ("A || B"), or those that an
        SQL92 expression over their properties selects. A handler given here takes this topic's
        messages; the others go to `run` or to the iteration. A topic that does not exist yet is
        read as soon as it does."""
        await self.start()
        full = wrap(self._client.namespace, topic)
        check_topic(full)
        before = self._subscriptions.get(full)
        version = max(self._env.clock.now_ms(), before.version + 1 if before else 0)
        subscription = Subscription.of(full, version, tags=tags, sql=sql)
        running = self._live()
        await check(running.instance, self._full_group, subscription)
        if handler is not None:
            self._listeners.by_topic[unwrap(self._client.namespace, full)] = Handler(handler)
            running.decided()
        # Brokers have to know the member before one of them is asked for the members.
        async with running.assignment.between_rounds:
            self._subscriptions[full] = subscription
            with contextlib.suppress(NoRoute):
                await running.instance.routes.get(full)
            await running.instance.heartbeat()
        if not await running.assignment.rebalance():
            running.assignment.rebalance_soon()

    async def unsubscribe(self, topic: str) -> None:
        full = wrap(self._client.namespace, topic)
        if self._subscriptions.pop(full, None) is not None and self._running is not None:
            await self._running.instance.heartbeat()
            await self._running.assignment.rebalance()
        # Last: what was pulled before is not for the handlers of other topics.
        self._listeners.by_topic.pop(topic, None)

    async def run(self, handler: Callable[[Any], Any] | None = None) -> None:
        """Call a handler with every message (a list of them when `batch` is above 1) until the
        consumer is closed. None: for topics whose handlers were given to `subscribe`."""
        await self.start()
        running = self._live()
        if handler is not None:
            if self._listeners.iterating or self._listeners.default is not None:
                raise ConfigError(
                    "this consumer already has a handler or is iterated; use one of the two"
                )
            self._listeners.default = Handler(handler)
            running.decided()
        elif not self._listeners.by_topic and self._listeners.default is None:
            raise ConfigError("there is no handler; give one to run or to subscribe")
        await asyncio.shield(running.ended)

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        if self._listeners.default is not None:
            raise ConfigError("this consumer has a handler; it cannot be iterated too")
        return self

    async def __anext__(self) -> ReceivedMessage:
        running = self._running
        if running is None:
            raise StopAsyncIteration
        if not self._listeners.iterating:
            self._listeners.iterating = True
            running.decided()
        message = await running.work.next()
        if message is None:
            running.raise_failure()
            raise StopAsyncIteration
        return message

    # --- queues ----------------------------------------------------------------------------------

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues this member has now."""
        running = self._running
        return [] if running is None else [self._shown(q) for q in running.assignment.windows]

    def pause(self, *queues: MessageQueue) -> None:
        """Pull no more from these queues; from all when none is given. What was pulled comes."""
        self._pause(queues, paused=True)

    def resume(self, *queues: MessageQueue) -> None:
        self._pause(queues, paused=False)

    def lag(self) -> dict[MessageQueue, int]:
        """Messages per queue that are stored and not done, as of the last answer to a pull."""
        windows = {} if self._running is None else self._running.assignment.windows
        return {
            self._shown(queue): max(0, window.max_offset - window.done_to)
            for queue, window in windows.items()
        }

    async def commit(self) -> None:
        """Store the progress now; it happens regularly anyway. Unreachable when some was not."""
        raise_unless_stored(await self._live().assignment.commit(sure=True))

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at an offset of a queue that this member has. Messages that were handed out
        before count no more."""
        if offset < 0:
            raise ConfigError(f"offset {offset} is negative")
        full = self._full(queue)
        assignment = self._live().assignment
        if full not in assignment.windows:
            raise ConfigError(f"this member does not have {queue}; see `assignment`")
        await assignment.restart(full, offset)

    async def replay(self, topic: str, *, since: datetime.datetime | int) -> None:
        """Read this member's queues of a topic again from a time on (or skip to it)."""
        full = wrap(self._client.namespace, topic)
        assignment = self._live().assignment
        for queue in [queue for queue in assignment.windows if queue.topic == full]:
            await assignment.restart(queue, await assignment.offset_at(queue, as_ms(since)))

    def _pause(self, queues: tuple[MessageQueue, ...], *, paused: bool) -> None:
        assignment = self._live().assignment
        if not queues:
            assignment.all_paused = paused
            assignment.paused.clear()
        chosen = {self._full(queue) for queue in queues} or set(assignment.windows)
        if queues:
            (assignment.paused.update if paused else assignment.paused.difference_update)(chosen)
        for queue in chosen & set(assignment.windows):
            assignment.windows[queue].paused = paused
            assignment.windows[queue].changed()

    def _live(self) -> Member:
        if self._running is None:
            raise ConfigError("this consumer does not run; use it within `async with`")
        return self._running

    def _full(self, queue: MessageQueue) -> MessageQueue:
        return _renamed(queue, wrap(self._client.namespace, queue.topic))

    def _shown(self, queue: MessageQueue) -> MessageQueue:
        return _renamed(queue, unwrap(self._client.namespace, queue.topic))


class _TraceHook:
    """Shows the calls of handlers to a recorder of traces."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder

    def before_consume(self, consumption: Consumption) -> None:
        consumption.notes[_TraceHook] = self._recorder.sub_before(
            consumption.group, consumption.messages
        )

    def after_consume(self, consumption: Consumption) -> None:
        begun = consumption.notes.get(_TraceHook)
        if isinstance(begun, Traced):
            error = consumption.error
            code = TRACE_FAILED if isinstance(error, RetryLater | Reject) else TRACE_RAISED
            self._recorder.sub_after(
                begun, success=error is None, context_code=0 if error is None else code
            )


def _renamed(queue: MessageQueue, topic: str) -> MessageQueue:
    return MessageQueue(topic=topic, broker_name=queue.broker_name, queue_id=queue.queue_id)
