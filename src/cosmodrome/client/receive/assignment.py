"""Which queues this member has: computed again when the group or a route changes, and regularly.

Theory of operation. A round asks, per topic, for the route and the members, computes our share and
compares it with the windows that are open. A queue that is ours no more is dropped at once and
leaves in the background: what runs for it in order ends, its offset is committed, its lock is given
up; until then it does not come back. A new queue gets (when ordered, a lock and) its start offset
before its window opens. Whatever cannot be found out leaves the topic as it is, and a round that
was not complete is repeated soon, later each time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection, Mapping
from typing import Protocol

from cosmodrome.client.instance import Instance
from cosmodrome.client.receive.consumer_options import ConsumerOptions
from cosmodrome.client.receive.locking import QueueLocks
from cosmodrome.client.receive.membership import members_of
from cosmodrome.client.receive.prefetch import Window
from cosmodrome.client.receive.progress import Offsets, broker_address
from cosmodrome.client.receive.subscriptions import Subscription
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.errors import CosmodromeError
from cosmodrome.wire.commands.offset import GetMaxOffset, SearchOffsetByTimestamp
from cosmodrome.wire.names import RETRY_PREFIX

log = logging.getLogger(__name__)

STALE_S = 120.0  # a window whose loop did not even look for this long is opened again
AGAIN_FIRST_S = 0.2
MOVED_WAIT_S = 10.0


class Host(Protocol):
    """Who works on the windows."""

    def opened(self, window: Window) -> None:
        """Begin to pull."""

    def closed(self, window: Window) -> Awaitable[None]:
        """It is dropped. Pull no more; done when nothing runs in order for it any more."""


class Assignment:
    def __init__(
        self,
        instance: Instance,
        group: str,
        options: ConsumerOptions,
        subscriptions: Mapping[str, Subscription],
        offsets: Offsets,
        host: Host,
    ) -> None:
        self.windows: dict[MessageQueue, Window] = {}
        self.paused: set[MessageQueue] = set()
        self.all_paused = False
        self.locks: QueueLocks | None = None
        if options.orderly and options.clustering:
            self.locks = QueueLocks(instance, group, lambda: list(self.windows.values()))
        self._instance = instance
        self._group = group
        self._options = options
        self._subscriptions = subscriptions
        self._offsets = offsets
        self._host = host
        self._leaving: dict[MessageQueue, asyncio.Task[None]] = {}
        self._wanted = asyncio.Event()
        self._one_round = asyncio.Lock()
        self._ended = False

    # --- rounds ----------------------------------------------------------------------------------

    @property
    def between_rounds(self) -> asyncio.Lock:
        """While it is held, no round runs."""
        return self._one_round

    def rebalance_soon(self) -> None:
        self._wanted.set()

    async def rebalance_forever(self) -> None:
        every_s = self._options.rebalance_every_ms / 1000
        again_s = AGAIN_FIRST_S
        while True:
            self._wanted.clear()
            if await self.rebalance():
                again_s = AGAIN_FIRST_S
                wait_s = every_s
            else:
                wait_s = again_s
                again_s = min(again_s * 2, every_s)
            try:
                async with asyncio.timeout(wait_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    async def rebalance(self) -> bool:
        """One round; False when something could not be found out."""
        complete = True
        async with self._one_round:
            for window in list(self.windows.values()):
                if window.queue.topic not in self._subscriptions:
                    self._lose(window)
            for topic in list(self._subscriptions):
                complete = await self._settle(topic) and complete
        return complete

    async def _settle(self, topic: str) -> bool:
        try:
            mine = await self._share(topic)
        except NoRoute:
            log.debug("no route yet: group=%s topic=%s", self._group, topic)
            return False
        except CosmodromeError as error:
            log.warning(
                "queues not shared anew: group=%s topic=%s reason=%s", self._group, topic, error
            )
            return False
        if mine is None or self._ended:
            return False
        now = asyncio.get_running_loop().time()
        for window in [w for w in self.windows.values() if w.queue.topic == topic]:
            if window.queue not in mine:
                self._lose(window)
            elif now - window.pulled_at > STALE_S:
                log.error("a queue is not pulled, opening it again: queue=%s", window.queue)
                self._lose(window)
        gains = [self._gain(queue) for queue in mine if queue not in self.windows]
        return all(await asyncio.gather(*gains))

    async def _share(self, topic: str) -> set[MessageQueue] | None:
        """Our queues; None when the brokers do not know us as a member yet."""
        route = await self._instance.routes.get(topic)
        if not self._options.clustering:
            return set(route.read_queues)
        members = await members_of(self._group, self._instance, route)
        if self._instance.client_id not in members:
            self._instance.heartbeat_soon()
            return None
        return set(
            self._options.strategy.share(self._instance.client_id, members, route.read_queues)
        )

    # --- gaining and losing ----------------------------------------------------------------------

    async def _gain(self, queue: MessageQueue) -> bool:
        if queue in self._leaving:
            return False
        locked_at = asyncio.get_running_loop().time() if self.locks is not None else None
        if self.locks is not None and not await self.locks.take(queue):
            log.debug("queue is locked by another member: queue=%s", queue)
            return False
        try:
            offset = await self._start_offset(queue)
        except CosmodromeError as error:
            log.warning(
                "start offset unknown: group=%s queue=%s reason=%s", self._group, queue, error
            )
            return False
        if not self._ended and queue not in self.windows and queue.topic in self._subscriptions:
            self._open(queue, offset, locked_at)
        return True

    def _open(self, queue: MessageQueue, offset: int, locked_at: float | None) -> None:
        now = asyncio.get_running_loop().time()
        window = Window(queue, offset, self._options, now, locked_at=locked_at)
        window.paused = self.all_paused or queue in self.paused
        self.windows[queue] = window
        log.info("queue gained: group=%s queue=%s offset=%d", self._group, queue, offset)
        self._host.opened(window)

    def _lose(self, window: Window) -> None:
        del self.windows[window.queue]
        window.drop()
        log.info("queue lost: group=%s queue=%s", self._group, window.queue)
        task = asyncio.get_running_loop().create_task(self._leave(window))
        self._leaving[window.queue] = task
        task.add_done_callback(lambda done: self._left(window.queue, done))

    def _left(self, queue: MessageQueue, task: asyncio.Task[None]) -> None:
        self._leaving.pop(queue, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("leaving a queue failed: queue=%s", queue, exc_info=task.exception())

    async def _leave(self, window: Window) -> None:
        await self._host.closed(window)
        await self._offsets.write({window.queue: window.done_to}, sure=True)
        if self.locks is not None:
            await self.locks.give_up([window.queue])

    async def _start_offset(self, queue: MessageQueue) -> int:
        stored = await self._offsets.read(queue)
        if stored is not None:
            return stored
        again = queue.topic.startswith(RETRY_PREFIX)
        from_ms = self._options.from_ms
        if from_ms is not None:
            return await self.end(queue) if again else await self.offset_at(queue, from_ms)
        if self._options.consume_from == "first" or again:
            return 0
        return await self.end(queue)

    async def end(self, queue: MessageQueue) -> int:
        reply = await self._instance.links.call(
            broker_address(self._instance.routes, queue.broker_name),
            GetMaxOffset(topic=queue.topic, queue_id=queue.queue_id),
        )
        return reply.offset

    async def offset_at(self, queue: MessageQueue, when_ms: int) -> int:
        """Of the first message that was stored at or after a time."""
        reply = await self._instance.links.call(
            broker_address(self._instance.routes, queue.broker_name),
            SearchOffsetByTimestamp(topic=queue.topic, queue_id=queue.queue_id, timestamp=when_ms),
        )
        return reply.offset

    # --- offsets ---------------------------------------------------------------------------------

    async def commit_forever(self) -> None:
        while True:
            await asyncio.sleep(self._options.commit_every_ms / 1000)
            await self.commit(sure=False)

    async def commit(self, *, sure: bool) -> Collection[MessageQueue]:
        """The queues whose progress was not stored."""
        done = {queue: window.done_to for queue, window in self.windows.items()}
        return await self._offsets.write(done, sure=sure) if done else ()

    async def restart(self, queue: MessageQueue, offset: int) -> None:
        """Go on at another offset; what runs for the queue now has no effect on that."""
        async with self._one_round:
            window = self.windows.pop(queue, None)
            if window is None:
                return
            window.drop()
            await self._host.closed(window)
            await self._offsets.write({queue: offset}, sure=True)
            if not self._ended:
                self._open(queue, offset, window.locked_at)

    async def moved(self, window: Window, offset: int) -> None:
        """The broker has nothing at the offset of a window."""
        if offset > window.next_offset:
            window.next_offset = offset  # what was pulled before is still to be done
            return
        # The queue became shorter, so offsets come again; the last messages end first.
        loop = asyncio.get_running_loop()
        until = loop.time() + MOVED_WAIT_S
        while window.unfinished and not window.dropped and loop.time() < until:
            window.pulled_at = loop.time()
            await window.wait(0.05)
        if self.windows.get(window.queue) is window:
            # Those that did not end are pulled again, as far as they are still there.
            await self.restart(window.queue, min(offset, window.done_to))

    # --- the end ---------------------------------------------------------------------------------

    def end_rounds(self) -> None:
        """Gain nothing any more."""
        self._ended = True

    async def leave_all(self) -> None:
        """Commit and give up everything; nothing works on the windows any more."""
        self._ended = True
        if self._leaving:
            await asyncio.wait(set(self._leaving.values()))
        windows = list(self.windows.values())
        if not windows:
            return
        await self._offsets.write({w.queue: w.done_to for w in windows}, sure=True)
        self.windows.clear()
        for window in windows:
            window.drop()
        if self.locks is not None:
            await self.locks.give_up([window.queue for window in windows])
