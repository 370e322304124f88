"""Pulling on a schedule: the group shares the queues, and a function of the user's is called for
each queue of this member, again and again; it says itself when the next time is.

    schedule = PullSchedule(namesrv, group="nightly")
    async def work(turn: Turn) -> None:
        pulled = await turn.pull(max_count=100)
        ...
        await turn.commit(pulled.next_offset)
        turn.next_in_ms = 0 if pulled.messages else 5_000
    await schedule.register("orders", work)

At most one call per queue runs at a time, and `concurrency` calls in all.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Self

from cosmodrome.client.instance import Instance, acquire, release
from cosmodrome.client.namespace import unwrap, wrap
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.handlers import cancelled_within
from cosmodrome.client.receive.membership import Membership
from cosmodrome.client.receive.progress import BrokerOffsets
from cosmodrome.client.receive.queue_reader import Moment, Pulled, QueueReader
from cosmodrome.client.receive.rebalance import Averagely, Strategy, sorted_queues
from cosmodrome.client.receive.subscriptions import Subscription
from cosmodrome.client.values import MessageQueue
from cosmodrome.env.base import Env
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.wire.bodies import CONSUME_FROM_WHERE
from cosmodrome.wire.names import check_group, check_topic

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
        """Messages from `offset`, by default from where the group is."""
        return await self._pull(self.offset if offset is None else offset, max_count, wait_ms)

    async def commit(self, offset: int) -> None:
        """The group goes on here; the next turn begins with it."""
        await self._commit(offset)
        self.offset = offset


Work = Callable[[Turn], Awaitable[None]]
Listener = Callable[[str, list[MessageQueue]], Awaitable[None] | None]


class PullSchedule:
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
        if not 1 <= concurrency <= 10_000:
            raise ConfigError(f"concurrency is {concurrency}; use 1 to 10000")
        self._namesrv = namesrv
        self._options = client or ClientOptions()
        self._group = wrap(self._options.namespace, group)
        check_group(self._group)
        self._policy = consume_from
        self._rebalance_every_ms = rebalance_every_ms
        self._strategy = strategy or Averagely()
        self._env = env or real_env()
        self._slots = asyncio.Semaphore(concurrency)
        self._instance: Instance | None = None
        self._membership: Membership | None = None
        self._work: dict[str, tuple[Work, Listener | None]] = {}
        self._tasks: dict[MessageQueue, asyncio.Task[None]] = {}
        self._offsets: dict[MessageQueue, int] = {}
        self._versions = itertools.count(self._env.clock.now_ms())

    async def start(self) -> None:
        if self._instance is not None:
            return
        self._instance = instance = await acquire(
            self._namesrv, self._options, self._env, consumer_group=self._group
        )
        self._reader = QueueReader(instance, self._group, lite=False)
        self._stored = BrokerOffsets(instance, self._group)
        self._membership = Membership(
            *(instance, self._group, self),
            strategy=self._strategy,
            clustering=True,
            from_where=CONSUME_FROM_WHERE[{"last": 0, "first": 4}.get(str(self._policy), 5)],
            rebalance_every_ms=self._rebalance_every_ms,
        )

    async def stop(self) -> None:
        """Turns that run are cancelled; commits that were made stay."""
        instance, self._instance = self._instance, None
        if instance is None:
            return
        assert self._membership is not None
        try:
            await self._membership.halt()
            await self._end(set(self._tasks))
            await self._membership.leave()
        finally:
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
        await self.stop()

    async def register(
        self,
        topic: str,
        work: Work,
        *,
        tags: str | None = None,
        sql: str | None = None,
        on_queues: Listener | None = None,
    ) -> None:
        """Call `work` for this member's queues of a topic, from now on. `on_queues(topic, queues)`
        is told when the share changes."""
        if self._membership is None or self._instance is None:
            raise ConfigError("the schedule is not started; use `async with PullSchedule(...)`")
        full = wrap(self._options.namespace, topic)
        check_topic(full)
        self._work[full] = (work, on_queues)
        await self._membership.subscribe(
            Subscription.of(full, next(self._versions), tags=tags, sql=sql)
        )

    @property
    def assignment(self) -> list[MessageQueue]:
        return [self._plain(queue) for queue in sorted_queues(self._tasks)]

    # --- turns -----------------------------------------------------------------------------------

    async def _turns(self, queue: MessageQueue) -> None:
        work = self._work[queue.topic][0]
        while True:
            delay_ms = AFTER_FAILURE_MS
            try:
                async with self._slots:
                    turn = await self._turn(queue)
                    await work(turn)
                    delay_ms = turn.next_in_ms
            except Exception:
                log.exception("a turn failed: group=%s queue=%s", self._group, queue)
            except asyncio.CancelledError as cancelled:
                error = cancelled_within(cancelled)
                log.error("a turn failed: group=%s queue=%s reason=%s", self._group, queue, error)
            await asyncio.sleep(max(0, delay_ms) / 1000)

    async def _turn(self, queue: MessageQueue) -> Turn:
        if queue not in self._offsets:
            self._offsets[queue] = await self._reader.first_position(
                queue, self._stored, self._policy
            )
        assert self._membership is not None
        subscription = self._membership.subscriptions[queue.topic]

        async def pull(offset: int, max_count: int, wait_ms: int) -> Pulled:
            return await self._reader.pull(
                queue,
                offset,
                subscription,
                max_count=max_count,
                hold_ms=wait_ms,
                timeout_ms=wait_ms + 10_000,
            )

        async def commit(offset: int) -> None:
            self._offsets[queue] = offset
            await self._stored.write({queue: offset}, sure=True)

        return Turn(self._plain(queue), self._offsets[queue], pull, commit)

    async def _end(self, queues: set[MessageQueue]) -> None:
        tasks = [self._tasks.pop(queue) for queue in queues]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for queue in queues:
            self._offsets.pop(queue, None)
            self._reader.forget(queue)

    # --- what the membership asks ----------------------------------------------------------------

    async def share_changed(self, topic: str, queues: set[MessageQueue]) -> None:
        mine = {queue for queue in self._tasks if queue.topic == topic}
        await self._end(mine - queues)
        for queue in sorted_queues(queues - mine):
            self._tasks[queue] = asyncio.get_running_loop().create_task(self._turns(queue))
        listener = self._work[topic][1]
        if queues != mine and listener is not None:
            plain = [self._plain(queue) for queue in sorted_queues(queues)]
            try:
                outcome = listener(unwrap(self._options.namespace, topic), plain)
                if inspect.isawaitable(outcome):
                    await outcome
            except Exception:
                log.exception("queue listener failed: topic=%s", topic)

    def move(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            if queue in self._tasks and queue.topic == topic:
                self._offsets[queue] = max(offset, 0)

    def positions(self, topic: str | None) -> dict[MessageQueue, int]:
        return {
            queue: offset
            for queue, offset in self._offsets.items()
            if topic is None or queue.topic == topic
        }

    def _plain(self, queue: MessageQueue) -> MessageQueue:
        return MessageQueue(
            topic=unwrap(self._options.namespace, queue.topic),
            broker_name=queue.broker_name,
            queue_id=queue.queue_id,
        )
