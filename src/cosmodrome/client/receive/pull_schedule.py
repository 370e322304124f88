"""Pulling on a schedule: the group shares the queues, and a function of the user's is called for
each queue of this member, again and again; it says itself when the next time is.

    schedule = PullSchedule(namesrv, group="nightly")
    async def work(turn: Turn) -> None:
        pulled = await turn.pull(max_count=100)
        ...
        await turn.commit(pulled.next_offset)
        turn.next_in_ms = 0 if pulled.messages else 5_000
    await schedule.register("orders", work)

At most one call per queue runs at a time, and `concurrency` calls in all. A message whose body
cannot be read is a `DamagedMessage` in its place: a function that reads its `body` and does not
expect that fails, and its queue stays where it was.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import ClassVar

from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.base_consumer import BaseConsumer, QueueListener
from cosmodrome.client.receive.engine.decoding import Arrivals
from cosmodrome.client.receive.engine.member import Member
from cosmodrome.client.receive.engine.options import Moment, ReadOptions
from cosmodrome.client.receive.engine.pulling import Pulled
from cosmodrome.client.receive.engine.report import Rates
from cosmodrome.client.receive.engine.subscriptions import Subscription
from cosmodrome.client.receive.engine.tasks import Tasks, cancel
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.receive.handlers import cancelled_within
from cosmodrome.client.receive.polling import cannot_be_handed
from cosmodrome.client.receive.rebalance import Averagely, Strategy
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.env.base import Env
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import PULL_SUBSCRIPTION
from cosmodrome.wire.names import check_topic

log = logging.getLogger(__name__)

NEXT_IN_MS = 200
AFTER_FAILURE_MS = 3_000


class Turn:
    """One call for one queue. `offset` is where the group goes on; `next_in_ms` may be set."""

    def __init__(
        self,
        queue: MessageQueue,
        offset: int,
        pull: Callable[[int, int, int], Awaitable[Pulled]],
        commit: Callable[[int], Awaitable[None]],
    ) -> None:
        self.queue = queue
        self.offset = offset
        self.next_in_ms = NEXT_IN_MS
        self._pull = pull
        self._commit = commit

    async def pull(
        self, offset: int | None = None, *, max_count: int = 32, wait_ms: int = 0
    ) -> Pulled:
        """Messages from `offset`, by default from where the group is. A `DamagedMessage` among
        them is one whose body cannot be read."""
        return await self._pull(self.offset if offset is None else offset, max_count, wait_ms)

    async def commit(self, offset: int) -> None:
        """The group goes on here; the next turn begins with it."""
        await self._commit(offset)
        self.offset = offset


Work = Callable[[Turn], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleOptions(ReadOptions):
    concurrency: int = 20

    interval_ms_min: ClassVar[int] = 10
    consume_type: ClassVar[str] = "CONSUME_ACTIVELY"
    pull_flags: ClassVar[int] = PULL_SUBSCRIPTION

    def __post_init__(self) -> None:
        ReadOptions.__post_init__(self)
        self.check("concurrency", 1, 10_000)

    @property
    def pulls_ahead(self) -> bool:
        return False

    @property
    def commits_by_itself(self) -> bool:
        return False


class Turns:
    """A `Work` of the engine: one task per queue that calls the user's function."""

    def __init__(
        self,
        next_turn: Callable[[Window], Turn],
        functions: Mapping[str, Work],
        share_changed: Callable[[str, list[MessageQueue]], Awaitable[None]],
        concurrency: int,
        tasks: Tasks,
    ) -> None:
        self.share_changed = share_changed
        self._next_turn = next_turn
        self._functions = functions
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks = tasks
        self._running: dict[Window, asyncio.Task[None]] = {}
        self._ended = False

    def opened(self, window: Window) -> None:
        task = self._tasks.spawn(self._run(window))
        self._running[window] = task
        task.add_done_callback(lambda _: self._running.pop(window, None))

    async def closed(self, window: Window) -> None:
        task = self._running.get(window)
        if task is not None:
            await cancel(task)

    async def _run(self, window: Window) -> None:
        queue = window.queue
        while not window.dropped:
            delay_ms = AFTER_FAILURE_MS
            try:
                async with self._slots:
                    if self._ended:
                        return
                    turn = self._next_turn(window)
                    await self._functions[queue.topic](turn)
                    delay_ms = turn.next_in_ms
            except Exception:
                log.exception("a turn failed: group=%s queue=%s", self._tasks.group, queue)
            except asyncio.CancelledError as cancelled:
                log.error(
                    "a turn failed: group=%s queue=%s reason=%s",
                    self._tasks.group,
                    queue,
                    cancelled_within(cancelled),
                )
            await asyncio.sleep(max(0, delay_ms) / 1000)

    def arrived(self, window: Window, found: Arrivals) -> None:
        raise AssertionError("a turn pulls for itself")

    def unreadable(self, window: Window, error: ProtocolError) -> None:
        raise AssertionError("a turn pulls for itself")

    async def consume_directly(self, message: ReceivedMessage) -> bytes:
        raise cannot_be_handed(self._tasks.group)

    def end(self) -> None:
        self._ended = True

    async def stop(self) -> None:
        await cancel(*self._running.values())


class PullSchedule(BaseConsumer):
    """See the module. Use it with `async with`."""

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        group: str,
        client: ClientOptions | None = None,
        consume_from: Moment = "last",
        concurrency: int = 20,
        rebalance_every_ms: int = 20_000,
        strategy: Strategy | None = None,
        env: Env | None = None,
    ) -> None:
        super().__init__(namesrv, group, client, env)
        self.options = ScheduleOptions(
            consume_from=consume_from,
            concurrency=concurrency,
            rebalance_every_ms=rebalance_every_ms,
            strategy=strategy or Averagely(),
        )
        self._work: dict[str, Work] = {}  # by full topic name
        self._versions = itertools.count(self._env.clock.now_ms())

    async def start(self) -> None:
        async with self._starting:
            if self._running is not None:
                return
            instance = await self._acquire()
            tasks = Tasks(self._full_group)
            turns = Turns(
                self._turn, self._work, self._share_changed, self.options.concurrency, tasks
            )
            self._running = Member(
                instance,
                self._full_group,
                self.options,
                turns,
                tasks,
                Rates(asyncio.get_running_loop().time),
            )
            self._running.start()

    async def stop(self) -> None:
        """Turns that run are cancelled; commits that were made stay."""
        async with self._starting:
            member, self._running = self._running, None
        if member is not None:
            await member.stop()

    async def register(
        self,
        topic: str,
        work: Work,
        *,
        tags: str | None = None,
        sql: str | None = None,
        on_queues: QueueListener | None = None,
    ) -> None:
        """Call `work` for this member's queues of a topic, from now on. `on_queues(topic, queues)`
        is called when the share changes."""
        member, full = self._live(), self._full_topic(topic)
        check_topic(full)
        subscription = Subscription.of(full, next(self._versions), tags=tags, sql=sql)
        await member.check(subscription)
        self._work[full] = work
        self._queue_listeners.pop(full, None)
        if on_queues is not None:
            self._queue_listeners[full] = on_queues
        await member.subscribe(subscription)

    def _turn(self, window: Window) -> Turn:
        """The next turn of a queue, from where the group is."""
        member, queue = self._live(), window.queue
        subscription = member.subscriptions[queue.topic]

        async def pull(offset: int, max_count: int, wait_ms: int) -> Pulled:
            window.pulled_at = asyncio.get_running_loop().time()
            return await member.puller.pull(
                queue,
                offset,
                subscription,
                max_count=max_count,
                hold_ms=wait_ms,
                timeout_ms=wait_ms + 10_000,
            )

        async def commit(offset: int) -> None:
            window.next_offset = offset
            await member.offset_store.write({queue: offset})

        return Turn(self._plain(queue), window.done_to, pull, commit)
