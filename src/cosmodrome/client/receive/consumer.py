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
import datetime
from collections.abc import AsyncIterator, Callable
from typing import Any, Unpack

from cosmodrome.client.instance import Instance
from cosmodrome.client.namespace import unwrap
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.base_consumer import BaseConsumer
from cosmodrome.client.receive.concurrent import Concurrent
from cosmodrome.client.receive.consumer_options import (
    ConsumerOptions,
    ConsumerSettings,
    Consumption,
)
from cosmodrome.client.receive.engine.member import Member
from cosmodrome.client.receive.engine.options import as_ms
from cosmodrome.client.receive.engine.progress import raise_unless_stored
from cosmodrome.client.receive.engine.queue_calls import offset_at
from cosmodrome.client.receive.engine.report import Rates
from cosmodrome.client.receive.engine.subscriptions import Subscription
from cosmodrome.client.receive.engine.tasks import Tasks
from cosmodrome.client.receive.handlers import Calls, Handler, Listeners, Reject, RetryLater
from cosmodrome.client.receive.ordered import Ordered
from cosmodrome.client.receive.returns import Returns
from cosmodrome.client.trace import Consumption as Traced
from cosmodrome.client.trace import TraceRecorder
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.env.base import Env
from cosmodrome.errors import ConfigError
from cosmodrome.wire.names import TRACE_TOPIC, check_topic, retry_topic

RESERVED_GROUP = "DEFAULT_CONSUMER"
TRACE_RAISED, TRACE_FAILED = 2, 4  # context codes of trace records


class Consumer(BaseConsumer):
    """A member of a consumer group. Fields of `ConsumerOptions` are given by name.

    A message whose body cannot be read (it does not decompress, say) reaches no handler and no
    iteration: it goes to the dead letters of the group. Broadcasting has none; there it is
    dropped, with an error in the log.
    """

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
        super().__init__(namesrv, group, client, env)
        self._trace: TraceRecorder | None = None
        if trace:
            self._trace = TraceRecorder(
                namesrv, group, "CONSUME", self._client, self._env, trace_topic
            )
            settings["hooks"] = (*settings.get("hooks", ()), _TraceHook(self._trace))
        self.options = ConsumerOptions(**settings)
        if group == RESERVED_GROUP:
            raise ConfigError(f"the group name {group} is reserved; choose another one")
        self._listeners = Listeners()
        self._work: Concurrent | Ordered | None = None
        self._closed = False

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the group. `async with` does this."""
        async with self._starting:
            if self._closed:
                raise ConfigError("this consumer was closed; make a new one")
            if self._running is not None:
                return
            member = self._member(await self._acquire())
            if self.options.clustering:
                topic = retry_topic(self._full_group)
                member.subscriptions[topic] = Subscription.of(topic, self._env.clock.now_ms())
            try:
                if self._trace is not None:
                    await self._trace.start()
                member.start()
                await member.join()
            except BaseException:
                await member.stop()
                if self._trace is not None:
                    await self._trace.stop()
                raise
            self._running = member

    def _member(self, instance: Instance) -> Member:
        tasks = Tasks(self._full_group)
        rates = Rates(asyncio.get_running_loop().time)
        shown = unwrap(self._client.namespace, self._full_group)
        calls = Calls(shown, self.options, rates, self._env.clock)
        returns = Returns(instance, self._full_group, self.options)
        kind = Ordered if self.options.orderly else Concurrent
        self._work = kind(self.options, self._listeners, calls, returns, tasks)
        return Member(instance, self._full_group, self.options, self._work, tasks, rates)

    async def stop(self) -> None:
        """Let handlers that run finish, commit, and leave the group."""
        self._closed = True
        async with self._starting:
            running, self._running = self._running, None
        if running is not None:
            await running.stop()
        if self._trace is not None:
            await self._trace.stop()

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
        full = self._full_topic(topic)
        check_topic(full)
        member = self._live()
        before = member.subscriptions.get(full)
        version = max(self._env.clock.now_ms(), before.version + 1 if before else 0)
        subscription = Subscription.of(full, version, tags=tags, sql=sql)
        await member.check(subscription)
        if handler is not None:
            self._listeners.by_topic[unwrap(self._client.namespace, full)] = Handler(handler)
            self._decided()
        await member.subscribe(subscription)

    async def unsubscribe(self, topic: str) -> None:
        if self._running is not None:
            await self._running.unsubscribe(self._full_topic(topic))
        # Last: what was pulled before is not for the handlers of other topics.
        self._listeners.by_topic.pop(topic, None)

    async def run(self, handler: Callable[[Any], Any] | None = None) -> None:
        """Call a handler with every message (a list of them when `batch` is above 1) until the
        consumer is closed. None: for topics whose handlers were given to `subscribe`."""
        await self.start()
        member = self._live()
        if handler is not None:
            if self._listeners.iterating or self._listeners.default is not None:
                raise ConfigError(
                    "this consumer already has a handler or is iterated; use one of the two"
                )
            self._listeners.default = Handler(handler)
            self._decided()
        elif not self._listeners.by_topic and self._listeners.default is None:
            raise ConfigError("there is no handler; give one to run or to subscribe")
        await asyncio.shield(member.tasks.ended)

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        if self._listeners.default is not None:
            raise ConfigError("this consumer has a handler; it cannot be iterated too")
        return self

    async def __anext__(self) -> ReceivedMessage:
        member, work = self._running, self._work
        if member is None or work is None:
            raise StopAsyncIteration
        if not self._listeners.iterating:
            self._listeners.iterating = True
            self._decided()
        message = await work.next()
        if message is None:
            member.tasks.raise_failure()
            raise StopAsyncIteration
        return message

    def _decided(self) -> None:
        """There is a new handler, or the user began to iterate."""
        if self._work is not None:
            self._work.decided()

    # --- queues ----------------------------------------------------------------------------------

    def pause(self, *queues: MessageQueue) -> None:
        """Pull no more from these queues, or from all when none is named. What was pulled before
        still comes."""
        self._pause(queues, paused=True)

    def resume(self, *queues: MessageQueue) -> None:
        self._pause(queues, paused=False)

    def lag(self) -> dict[MessageQueue, int]:
        """Messages per queue that are stored and not done, as of the last answer to a pull."""
        windows = {} if self._running is None else self._running.assignment.windows
        return {
            self._plain(queue): max(0, window.max_offset - window.done_to)
            for queue, window in windows.items()
        }

    async def commit(self) -> None:
        """Store the progress now; it happens regularly anyway. Unreachable when some was not."""
        raise_unless_stored(await self._live().assignment.commit())

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
        full = self._full_topic(topic)
        member = self._live()
        for queue in [queue for queue in member.assignment.windows if queue.topic == full]:
            offset = await offset_at(member.instance, queue, as_ms(since))
            await member.assignment.restart(queue, offset)

    def _pause(self, queues: tuple[MessageQueue, ...], *, paused: bool) -> None:
        assignment = self._live().assignment
        if queues:
            for queue in queues:
                assignment.pause(self._full(queue), paused=paused)
        else:
            assignment.pause_all(paused=paused)


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
