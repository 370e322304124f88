"""A consumer whose user asks for messages: `poll` for the next ones, or `pull` at an offset.

Queues come from the group (`subscribe`) or are chosen by the user (`assign`). The engine pulls
ahead for each, up to a bound. What earlier polls returned counts as done when `poll` is called
again; only that is committed, so a program that dies in between gets those messages again.

A message whose body cannot be read comes in its place among the others, as a `DamagedMessage`: its
`body` raises `DamagedBody`, its `stored_body` has the bytes as they are stored. It counts as done
like the others, when `poll` is called again. A program that does not expect one ends with the
error, and progress stays before the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import ClassVar, Unpack

from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.base_consumer import BaseConsumer, QueueListener, notify
from cosmodrome.client.receive.engine import queue_calls
from cosmodrome.client.receive.engine.member import Member
from cosmodrome.client.receive.engine.options import ReadOptions, ReadSettings, as_ms
from cosmodrome.client.receive.engine.progress import raise_unless_stored
from cosmodrome.client.receive.engine.pulling import Pulled
from cosmodrome.client.receive.engine.report import Rates
from cosmodrome.client.receive.engine.subscriptions import Subscription
from cosmodrome.client.receive.engine.tasks import Tasks, cancel
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.receive.polling import Polling
from cosmodrome.client.receive.rebalance import Averagely, Strategy, sorted_queues
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.env.base import Env
from cosmodrome.errors import ConfigError, CosmodromeError
from cosmodrome.layout import PULL_LITE, PULL_SUBSCRIPTION
from cosmodrome.wire.names import check_topic

log = logging.getLogger(__name__)


class PullSettings(ReadSettings, total=False):
    """The fields of PullOptions, for constructors that take them by name."""

    auto_commit: bool
    watch_every_ms: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions(ReadOptions):
    auto_commit: bool = True
    watch_every_ms: int = 30_000  # between two looks at the queues of a topic
    pull_batch: int = 10
    suspend_ms: int = 20_000

    interval_ms_min: ClassVar[int] = 10
    consume_type: ClassVar[str] = "CONSUME_ACTIVELY"
    pull_flags: ClassVar[int] = PULL_SUBSCRIPTION | PULL_LITE

    def __post_init__(self) -> None:
        ReadOptions.__post_init__(self)
        self.check("watch_every_ms", self.interval_ms_min)

    @property
    def in_order(self) -> bool:
        return True

    @property
    def commits_by_itself(self) -> bool:
        return self.auto_commit

    @property
    def repeats_commits(self) -> bool:
        return False


class PullConsumer(BaseConsumer):
    """See the module. `async with PullConsumer(namesrv, group=...) as consumer:`. Fields of
    `PullOptions` are given by name."""

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        group: str,
        client: ClientOptions | None = None,
        strategy: Strategy | None = None,
        env: Env | None = None,
        **settings: Unpack[PullSettings],
    ) -> None:
        super().__init__(namesrv, group, client, env)
        self.options = PullOptions(strategy=strategy or Averagely(), **settings)
        self._polling: Polling | None = None
        self._versions = itertools.count(self._env.clock.now_ms())
        self._watches: set[asyncio.Task[None]] = set()

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        async with self._starting:
            if self._running is not None:
                return
            instance = await self._acquire()
            self._polling = Polling(self._full_group, self._client.namespace, self._share_changed)
            self._running = Member(
                instance,
                self._full_group,
                self.options,
                self._polling,
                Tasks(self._full_group),
                Rates(asyncio.get_running_loop().time),
            )
            self._running.start()

    async def stop(self, *, processed: bool = True) -> None:
        """`processed`: what the last poll returned was dealt with."""
        async with self._starting:
            member, self._running = self._running, None
        if member is None or self._polling is None:
            return
        if processed:
            self._polling.finish()
        try:
            await cancel(*self._watches)
        finally:
            await member.stop()

    async def stop_after(self, error: BaseException | None) -> None:
        await self.stop(processed=error is None)

    # --- which queues ----------------------------------------------------------------------------

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The readable queues of a topic."""
        route = await self._live().instance.routes.get(self._full_topic(topic))
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
        member = self._live()
        if member.assigned:
            raise ConfigError("queues are assigned already; use a second consumer to subscribe")
        full = self._full_topic(topic)
        check_topic(full)
        subscription = Subscription.of(full, next(self._versions), tags=tags, sql=sql)
        await member.check(subscription)
        if on_change is not None:
            self._queue_listeners[full] = on_change
        await member.subscribe(subscription)

    async def unsubscribe(self, topic: str) -> None:
        member, full = self._live(), self._full_topic(topic)
        await member.unsubscribe(full)
        await member.assignment.left()
        self._queue_listeners.pop(full, None)

    async def assign(
        self,
        queues: Iterable[MessageQueue],
        *,
        tags: str | None = None,
        sql: str | None = None,
        offsets: Mapping[MessageQueue, int] | None = None,
    ) -> None:
        """Read exactly these queues, whatever the other members of the group do. A queue that is
        new begins at its offset in `offsets`, or else where the group is."""
        member = self._live()
        if member.subscriptions:
            raise ConfigError("topics are subscribed already; use a second consumer to assign")
        chosen = {self._full(queue) for queue in queues}
        for queue in chosen:
            check_topic(queue.topic)
        before = set(member.assignment.windows)
        for queue in before - chosen:
            del member.assigned[queue]
        await member.assignment.remove(before - chosen)
        begins = {self._full(queue): offset for queue, offset in (offsets or {}).items()}
        version = next(self._versions)
        for queue in sorted_queues(chosen - before):
            member.assigned[queue] = Subscription.of(queue.topic, version, tags=tags, sql=sql)
            await member.assignment.add(queue, begins.get(queue))

    async def watch_queues(self, topic: str, listener: QueueListener) -> None:
        """Call `listener(topic, queues)` when the queues of a topic change; for consumers that
        assign themselves."""
        known = await self.queues(topic)
        task = asyncio.get_running_loop().create_task(self._watch(topic, listener, known))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _watch(self, topic: str, listener: QueueListener, known: list[MessageQueue]) -> None:
        while self._running is not None:
            await asyncio.sleep(self.options.watch_every_ms / 1000)
            try:
                await self._live().instance.routes.get(self._full_topic(topic), fresh=True)
                now = await self.queues(topic)
            except CosmodromeError as error:
                log.debug("queues not watched now: topic=%s reason=%s", topic, error)
                continue
            if now != known:
                known = now
                await notify(listener, topic, now)

    # --- messages --------------------------------------------------------------------------------

    async def poll(
        self, timeout_ms: int = 5_000, *, max_count: int | None = None
    ) -> list[ReceivedMessage]:
        """The next messages of one queue, or with `max_count` of several; empty when none comes
        in time. What earlier calls returned is done. A `DamagedMessage` among them is one whose
        body cannot be read. ProtocolError when an answer to a pull makes no sense at all."""
        polling = self._running_polling()
        polling.finish()
        found = polling.take(max_count)
        if found or timeout_ms <= 0:
            return found
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                while not found:
                    polling.news.clear()
                    await polling.news.wait()
                    found = self._running_polling().take(max_count)
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
        """Messages of any queue from an offset on. Positions and commits are left alone. A
        `DamagedMessage` among them is one whose body cannot be read."""
        full = self._full(queue)
        return await self._live().puller.pull(
            full,
            offset,
            Subscription.of(full.topic, 0, tags=tags, sql=sql),
            max_count=max_count,
            hold_ms=wait_ms,
            timeout_ms=max(self.options.pull_timeout_ms, wait_ms + 10_000),
        )

    # --- positions -------------------------------------------------------------------------------

    def position(self, queue: MessageQueue) -> int:
        """Offset of the next message that `poll` returns from a queue."""
        return self._running_polling().position(self._window(queue))

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on from an offset that the queue has."""
        self._window(queue)
        first, end = await self.begin_offset(queue), await self.end_offset(queue)
        if not first <= offset <= end:
            raise ConfigError(
                f"offset {offset} is outside of queue {queue.queue_id} of {queue.topic} on"
                f" {queue.broker_name}, which has {first} to {end}"
            )
        await self._move(queue, offset)

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        await self._move(queue, await self.begin_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        await self._move(queue, await self.end_offset(queue))

    async def seek_to_time(self, queue: MessageQueue, when: datetime.datetime | int) -> None:
        await self._move(queue, await self.offset_for_time(queue, when))

    async def _move(self, queue: MessageQueue, offset: int) -> None:
        self._window(queue)
        await self._live().assignment.restart(self._full(queue), offset, commit=False)

    def pause(self, queues: Collection[MessageQueue]) -> None:
        """Return nothing of these queues until they are resumed, or lost and assigned again."""
        for window in [self._window(queue) for queue in queues]:
            window.pause(paused=True)

    def resume(self, queues: Collection[MessageQueue]) -> None:
        for window in [self._window(queue) for queue in queues]:
            window.pause(paused=False)
        self._running_polling().news.set()

    async def begin_offset(self, queue: MessageQueue) -> int:
        """Offset of the oldest message that is kept."""
        return await queue_calls.begin_offset(self._live().instance, self._full(queue))

    async def end_offset(self, queue: MessageQueue) -> int:
        """Offset that the next message will have."""
        return await queue_calls.end_offset(self._live().instance, self._full(queue))

    async def offset_for_time(self, queue: MessageQueue, when: datetime.datetime | int) -> int:
        """Offset of the first message stored at or after a time."""
        return await queue_calls.offset_at(self._live().instance, self._full(queue), as_ms(when))

    # --- commits ---------------------------------------------------------------------------------

    async def committed(self, queue: MessageQueue) -> int | None:
        """Where the group would go on; None when it was never there."""
        member, full = self._live(), self._full(queue)
        await member.instance.routes.get(full.topic)
        return await member.offset_store.read(full)

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store where the group goes on: everything that `poll` returned, or these offsets."""
        member = self._live()
        if offsets is not None:
            full = {self._full(queue): offset for queue, offset in offsets.items()}
            raise_unless_stored(await member.offset_store.write(full))
            return
        self._running_polling().finish()
        raise_unless_stored(await member.assignment.commit())

    # --- inside ----------------------------------------------------------------------------------

    def _running_polling(self) -> Polling:
        self._live().tasks.raise_failure()
        assert self._polling is not None
        return self._polling

    def _window(self, queue: MessageQueue) -> Window:
        window = self._live().assignment.windows.get(self._full(queue))
        if window is None:
            raise ConfigError(
                f"queue {queue.queue_id} of {queue.topic} on {queue.broker_name} is not assigned"
                " to this consumer"
            )
        return window
