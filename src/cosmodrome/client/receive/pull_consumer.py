"""A consumer whose user asks for messages: `poll` for the next ones, or `pull` at an offset.

Queues come from the group (`subscribe`) or are chosen by the user (`assign`). Each has a task that
pulls ahead, up to a bound, and a position: the offset behind the last message that `poll` returned.
What earlier polls returned counts as done when `poll` is called again; only that is committed, so
a program that dies in between gets those messages again.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import inspect
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from types import TracebackType
from typing import Literal, Self

from cosmodrome.client.instance import Instance, acquire, release
from cosmodrome.client.namespace import unwrap, wrap
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.consumer_options import BROADCASTING, CLUSTERING
from cosmodrome.client.receive.membership import Membership
from cosmodrome.client.receive.progress import (
    BrokerOffsets,
    LocalOffsets,
    Offsets,
    offsets_path,
    raise_unless_stored,
)
from cosmodrome.client.receive.queue_reader import Moment, Pulled, QueueReader
from cosmodrome.client.receive.read_ahead import Limits, ReadAhead, Reading
from cosmodrome.client.receive.rebalance import Averagely, Strategy, sorted_queues
from cosmodrome.client.receive.subscriptions import Subscription
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.env.base import Env
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError, CosmodromeError
from cosmodrome.wire.bodies import CONSUME_FROM_WHERE
from cosmodrome.wire.names import check_group, check_topic

log = logging.getLogger(__name__)


QueueListener = Callable[[str, list[MessageQueue]], Awaitable[None] | None]


class PullConsumer:
    """See the module. `async with PullConsumer(namesrv, group=...) as consumer:`"""

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        group: str,
        client: ClientOptions | None = None,
        model: Literal["clustering", "broadcasting"] = CLUSTERING,
        consume_from: Moment = "last",
        auto_commit: bool = True,
        commit_every_ms: int = 5_000,
        pull_batch: int = 10,
        prefetch_messages: int = 1_000,
        suspend_ms: int = 20_000,
        pull_timeout_ms: int = 30_000,
        rebalance_every_ms: int = 20_000,
        watch_every_ms: int = 30_000,
        strategy: Strategy | None = None,
        offsets_dir: str | None = None,
        env: Env | None = None,
    ) -> None:
        for name, value, most in (
            ("pull_batch", pull_batch, 1_024),
            ("prefetch_messages", prefetch_messages, 65_535),
        ):
            if not 1 <= value <= most:
                raise ConfigError(f"{name} is {value}; use 1 to {most}")
        for name, value in (
            ("commit_every_ms", commit_every_ms),
            ("rebalance_every_ms", rebalance_every_ms),
            ("watch_every_ms", watch_every_ms),
        ):
            if value < 10:
                raise ConfigError(f"{name} is {value}; use at least 10")
        if not 0 < suspend_ms < pull_timeout_ms:
            raise ConfigError(
                f"suspend_ms ({suspend_ms}) must be positive and below pull_timeout_ms"
                f" ({pull_timeout_ms}): the broker answers when the hold is over"
            )
        if model not in (CLUSTERING, BROADCASTING):
            raise ConfigError(f"model {model!r}: use {CLUSTERING!r} or {BROADCASTING!r}")
        if isinstance(consume_from, str) and consume_from not in ("first", "last"):
            raise ConfigError(
                f"consume_from {consume_from!r}: use 'first', 'last', a datetime or milliseconds"
            )
        self._namesrv = namesrv
        self._options = client or ClientOptions()
        self._group = self._full(group)
        check_group(self._group)
        self._model = model
        self._policy = consume_from
        self._auto_commit = auto_commit
        self._commit_every_s = commit_every_ms / 1000
        self._limits = Limits(pull_batch, prefetch_messages, suspend_ms, pull_timeout_ms)
        self._rebalance_every_ms = rebalance_every_ms
        self._watch_every_s = watch_every_ms / 1000
        self._strategy = strategy or Averagely()
        self._offsets_dir = offsets_dir
        self._env = env or real_env()

        self._instance: Instance | None = None
        self._reader: QueueReader | None = None
        self._stored: Offsets | None = None
        self._membership: Membership | None = None
        self._ahead: ReadAhead | None = None
        self._listeners: dict[str, QueueListener] = {}
        self._assigned = False
        self._versions = itertools.count(self._env.clock.now_ms())
        self._commit_task: asyncio.Task[None] | None = None
        self._watches: set[asyncio.Task[None]] = set()

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._instance is not None:
            return
        self._instance = instance = await acquire(
            self._namesrv, self._options, self._env, consumer_group=self._group
        )
        self._reader = QueueReader(instance, self._group, lite=True)
        self._ahead = ReadAhead(instance, self._reader, self._group, self._limits)
        if self._model == CLUSTERING:
            self._stored = BrokerOffsets(instance, self._group)
        else:
            path = offsets_path(self._offsets_dir, self._options, instance.client_id, self._group)
            self._stored = LocalOffsets(path, self._env)
        from_where = CONSUME_FROM_WHERE[{"last": 0, "first": 4}.get(str(self._policy), 5)]
        self._membership = Membership(
            *(instance, self._group, self),
            strategy=self._strategy,
            clustering=self._model == CLUSTERING,
            from_where=from_where,
            rebalance_every_ms=self._rebalance_every_ms,
        )
        if self._auto_commit:
            self._commit_task = asyncio.get_running_loop().create_task(self._commit_forever())

    async def stop(self, *, processed: bool = True) -> None:
        """`processed`: what the last poll returned was dealt with."""
        instance = self._instance
        if instance is None:
            return
        tasks = {*self._watches, *([self._commit_task] if self._commit_task else [])}
        self._commit_task = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        assert self._membership is not None
        ahead = self._parts()[0]
        try:
            await self._membership.halt()
            if processed:
                ahead.settle()
            await self._end(list(ahead.readings))
            await self._membership.leave()
        finally:
            self._instance = None
            ahead.arrived.set()  # whoever polls now learns that it is over
            await release(instance, consumer_group=self._group)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop(processed=error is None)

    # --- which queues ----------------------------------------------------------------------------

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic."""
        route = await self._started().routes.get(self._full(topic))
        return [self._plain(queue) for queue in route.read_queues]

    async def subscribe(
        self,
        topic: str,
        *,
        tags: str | None = None,
        sql: str | None = None,
        on_change: QueueListener | None = None,
    ) -> None:
        """Join the group for a topic. `on_change(topic, queues)` is called with the share that
        this consumer has, whenever it changes."""
        self._started()
        if self._assigned:
            raise ConfigError("queues are assigned already; use a second consumer to subscribe")
        full = self._full(topic)
        check_topic(full)
        if on_change is not None:
            self._listeners[full] = on_change
        assert self._membership is not None
        await self._membership.subscribe(
            Subscription.of(full, next(self._versions), tags=tags, sql=sql)
        )

    async def unsubscribe(self, topic: str) -> None:
        self._started()
        assert self._membership is not None
        await self._membership.unsubscribe(self._full(topic))
        self._listeners.pop(self._full(topic), None)

    async def assign(
        self, queues: Iterable[MessageQueue], *, tags: str | None = None, sql: str | None = None
    ) -> None:
        """Read exactly these queues, whatever the other members of the group do."""
        self._started()
        assert self._membership is not None
        if self._membership.subscriptions:
            raise ConfigError("topics are subscribed already; use a second consumer to assign")
        self._assigned = True
        wanted = {self._whole(queue) for queue in queues}
        readings = self._parts()[0].readings
        await self._end([queue for queue in readings if queue not in wanted])
        version = next(self._versions)
        for queue in sorted_queues(wanted):
            if queue not in readings:
                check_topic(queue.topic)
                await self._begin(queue, Subscription.of(queue.topic, version, tags=tags, sql=sql))

    @property
    def assignment(self) -> list[MessageQueue]:
        readings = () if self._ahead is None else self._ahead.readings
        return [self._plain(queue) for queue in sorted_queues(readings)]

    async def watch_queues(self, topic: str, listener: QueueListener) -> None:
        """Call `listener(topic, queues)` when the queues of a topic change; for consumers that
        assign themselves."""
        known = await self.queues(topic)
        task = asyncio.get_running_loop().create_task(self._watch(topic, listener, known))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _watch(self, topic: str, listener: QueueListener, known: list[MessageQueue]) -> None:
        while True:
            await asyncio.sleep(self._watch_every_s)
            try:
                await self._started().routes.get(self._full(topic), fresh=True)
                now = await self.queues(topic)
            except CosmodromeError as error:
                log.debug("queues not watched now: topic=%s reason=%s", topic, error)
                continue
            if now != known:
                known = now
                await _told(listener, topic, now)

    # --- messages --------------------------------------------------------------------------------

    async def poll(
        self, timeout_ms: int = 5_000, *, max_count: int | None = None
    ) -> list[ReceivedMessage]:
        """The next messages of one queue, or with `max_count` of several; empty when none comes
        in time. What earlier calls returned is done."""
        self._started()
        ahead = self._parts()[0]
        ahead.settle()
        found = ahead.take(max_count)
        if found or timeout_ms <= 0:
            return found
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                while not found:
                    ahead.arrived.clear()
                    await ahead.arrived.wait()
                    self._started()
                    found = ahead.take(max_count)
        return found

    async def pull(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        max_count: int = 32,
        wait_ms: int = 0,
        tags: str | None = None,
        sql: str | None = None,
    ) -> Pulled:
        """Messages of any queue from an offset on. Positions and commits are left alone."""
        whole = self._whole(queue)
        return await self._parts()[1].pull(
            whole,
            offset,
            Subscription.of(whole.topic, 0, tags=tags, sql=sql),
            max_count=max_count,
            hold_ms=wait_ms,
            timeout_ms=max(self._limits.pull_timeout_ms, wait_ms + 10_000),
        )

    # --- positions -------------------------------------------------------------------------------

    def position(self, queue: MessageQueue) -> int:
        """Offset of the next message that `poll` returns from a queue."""
        return self._reading(queue).position

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on from an offset that the queue has."""
        reading = self._reading(queue)
        first, end = await self.begin_offset(queue), await self.end_offset(queue)
        if not first <= offset <= end:
            raise ConfigError(
                f"offset {offset} is outside of queue {queue.queue_id} of {queue.topic} on"
                f" {queue.broker_name}, which has {first} to {end}"
            )
        self._parts()[0].move(reading, offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        self._parts()[0].move(self._reading(queue), await self.begin_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        self._parts()[0].move(self._reading(queue), await self.end_offset(queue))

    async def seek_to_time(self, queue: MessageQueue, when: datetime.datetime | int) -> None:
        offset = await self.offset_for_time(queue, when)
        self._parts()[0].move(self._reading(queue), offset)

    def pause(self, queues: Collection[MessageQueue]) -> None:
        """Return nothing of these queues for now; they stay assigned."""
        for queue in queues:
            self._reading(queue).paused = True

    def resume(self, queues: Collection[MessageQueue]) -> None:
        for queue in queues:
            self._parts()[0].resume(self._reading(queue))

    async def begin_offset(self, queue: MessageQueue) -> int:
        """Offset of the oldest message that is kept."""
        return await self._parts()[1].begin(self._whole(queue))

    async def end_offset(self, queue: MessageQueue) -> int:
        """Offset that the next message will have."""
        return await self._parts()[1].end(self._whole(queue))

    async def offset_for_time(self, queue: MessageQueue, when: datetime.datetime | int) -> int:
        """Offset of the first message stored at or after a time."""
        return await self._parts()[1].at(self._whole(queue), when)

    # --- commits ---------------------------------------------------------------------------------

    async def committed(self, queue: MessageQueue) -> int | None:
        """Where the group would go on; None when it was never there."""
        await self._started().routes.get(self._full(queue.topic))
        return await self._parts()[2].read(self._whole(queue))

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store where the group goes on: everything that `poll` returned, or these offsets."""
        self._started()
        ahead, _, stored = self._parts()
        if offsets is not None:
            whole = {self._whole(queue): offset for queue, offset in offsets.items()}
            raise_unless_stored(await stored.write(whole, sure=True))
            return
        ahead.settle()
        raise_unless_stored(await self._commit_done(list(ahead.readings.values()), sure=True))

    async def _commit_done(
        self, readings: list[Reading], *, sure: bool
    ) -> Collection[MessageQueue]:
        moved = {
            reading.queue: reading.done for reading in readings if reading.done != reading.committed
        }
        if not moved:
            return ()
        failed = await self._parts()[2].write(moved, sure=sure)
        for reading in readings:
            if reading.queue in moved and reading.queue not in failed:
                reading.committed = moved[reading.queue]
        return failed

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(self._commit_every_s)
            await self._commit_done(list(self._parts()[0].readings.values()), sure=False)

    # --- what the membership asks ----------------------------------------------------------------

    async def share_changed(self, topic: str, queues: set[MessageQueue]) -> None:
        readings = self._parts()[0].readings
        mine = {queue for queue in readings if queue.topic == topic}
        await self._end(list(mine - queues))
        assert self._membership is not None
        for queue in sorted_queues(queues - mine):
            try:
                await self._begin(queue, self._membership.subscriptions[topic])
            except CosmodromeError as error:
                # The next rebalance tries again.
                log.warning(
                    "queue not begun: group=%s queue=%s reason=%s", self._group, queue, error
                )
        for queue in mine & queues:
            readings[queue].subscription = self._membership.subscriptions[topic]
        now = {queue for queue in readings if queue.topic == topic}
        if now != mine and topic in self._listeners:
            plain = [self._plain(queue) for queue in sorted_queues(now)]
            await _told(self._listeners[topic], unwrap(self._options.namespace, topic), plain)

    def move(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            reading = self._parts()[0].readings.get(queue)
            if reading is not None and queue.topic == topic:
                self._parts()[0].move(reading, max(offset, 0))

    def positions(self, topic: str | None) -> dict[MessageQueue, int]:
        return {
            queue: reading.position
            for queue, reading in self._parts()[0].readings.items()
            if topic is None or queue.topic == topic
        }

    async def _begin(self, queue: MessageQueue, subscription: Subscription) -> None:
        ahead, reader, stored = self._parts()
        await self._started().routes.get(queue.topic)
        offset = await reader.first_position(queue, stored, self._policy)
        ahead.begin(queue, offset, subscription)

    async def _end(self, queues: list[MessageQueue]) -> None:
        ended = await self._parts()[0].end(queues)
        if self._auto_commit:
            await self._commit_done(ended, sure=True)

    # --- names -----------------------------------------------------------------------------------

    def _started(self) -> Instance:
        if self._instance is None:
            raise ConfigError(
                "this consumer is not started, or closed; use `async with PullConsumer(...)`"
            )
        return self._instance

    def _parts(self) -> tuple[ReadAhead, QueueReader, Offsets]:
        if self._ahead is None or self._reader is None or self._stored is None:
            self._started()
            raise AssertionError("started without its parts")
        return self._ahead, self._reader, self._stored

    def _reading(self, queue: MessageQueue) -> Reading:
        reading = self._parts()[0].readings.get(self._whole(queue))
        if reading is None:
            raise ConfigError(
                f"queue {queue.queue_id} of {queue.topic} on {queue.broker_name} is not assigned"
                " to this consumer"
            )
        return reading

    def _full(self, name: str) -> str:
        return wrap(self._options.namespace, name)

    def _whole(self, queue: MessageQueue) -> MessageQueue:
        if not self._options.namespace:
            return queue
        return MessageQueue(
            topic=self._full(queue.topic), broker_name=queue.broker_name, queue_id=queue.queue_id
        )

    def _plain(self, queue: MessageQueue) -> MessageQueue:
        if not self._options.namespace:
            return queue
        return MessageQueue(
            topic=unwrap(self._options.namespace, queue.topic),
            broker_name=queue.broker_name,
            queue_id=queue.queue_id,
        )


async def _told(listener: QueueListener, topic: str, queues: list[MessageQueue]) -> None:
    """A listener's failure is its own."""
    try:
        outcome = listener(topic, queues)
        if inspect.isawaitable(outcome):
            await outcome
    except Exception:
        log.exception("queue listener failed: topic=%s", topic)
