"""Which queues this member has: computed again when the group or a route changes, and regularly.

Theory of operation. For each topic a round asks for the route and the members, computes our share
and compares it with the open windows. A queue that is no longer ours is dropped at once and leaves
in the background: what runs for it in order ends, its offset is committed and its lock given up.
Until then it does not come back. The window of a new queue opens when its start offset is known
and, if queues are locked, the lock is ours. When something cannot be found out, the topic stays as
it is, and the round is repeated soon, after a pause that grows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Collection, Iterable, Mapping
from typing import Protocol

from cosmodrome.client.instance import Instance
from cosmodrome.client.receive.engine.inflating import Inflated
from cosmodrome.client.receive.engine.locking import QueueLocks
from cosmodrome.client.receive.engine.options import ReadOptions
from cosmodrome.client.receive.engine.progress import Offsets
from cosmodrome.client.receive.engine.queue_calls import end_offset, members_of, offset_at
from cosmodrome.client.receive.engine.subscriptions import Subscription
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.receive.rebalance import sorted_queues
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.env.backoff import Backoff
from cosmodrome.errors import CosmodromeError
from cosmodrome.wire.names import RETRY_PREFIX

log = logging.getLogger(__name__)

STALE_S = 120.0  # a window whose pull loop did nothing for this long is opened again
AGAIN_FIRST_S = 0.2
MOVED_WAIT_S = 10.0


class Host(Protocol):
    """Who works on the windows."""

    def opened(self, window: Window) -> None:
        """Begin to work on it."""

    def closed(self, window: Window) -> Awaitable[None]:
        """It is dropped. Pull no more; done when nothing runs in order for it any more."""

    def share_changed(self, topic: str, queues: list[MessageQueue]) -> Awaitable[None]:
        """A round gave this member other queues of a topic than before."""


class Assignment:
    def __init__(
        self,
        instance: Instance,
        group: str,
        options: ReadOptions,
        subscriptions: Mapping[str, Subscription],
        offsets: Offsets,
        host: Host,
    ) -> None:
        self.windows: dict[MessageQueue, Window] = {}
        self.inflated = Inflated(options.inflated_bytes_max)
        self.locks: QueueLocks | None = None
        if options.locks_queues:
            self.locks = QueueLocks(instance, group, lambda: list(self.windows.values()))
        self._instance = instance
        self._group = group
        self._options = options
        self._subscriptions = subscriptions
        self._offsets = offsets
        self._host = host
        self._all_paused = False
        self._excepted: set[MessageQueue] = set()  # for these the opposite holds
        self._leaving: dict[MessageQueue, asyncio.Task[None]] = {}
        self._shares: dict[str, list[MessageQueue]] = {}  # as the host knows them
        self._round_due = asyncio.Event()
        self._one_round = asyncio.Lock()
        self._ended = False

    # --- rounds ----------------------------------------------------------------------------------

    @property
    def between_rounds(self) -> asyncio.Lock:
        """While it is held, no round runs."""
        return self._one_round

    def rebalance_soon(self) -> None:
        self._round_due.set()

    async def rebalance_forever(self) -> None:
        every_s = self._options.rebalance_every_ms / 1000
        again = Backoff(min(AGAIN_FIRST_S, every_s), every_s)
        while not self._ended:
            self._round_due.clear()
            wait_s = every_s
            if await self.rebalance():
                again.reset()
            else:
                wait_s = again.next_s()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._round_due.wait()

    async def rebalance(self) -> bool:
        """One round; False when something could not be found out."""
        complete = True
        async with self._one_round:
            for window in list(self.windows.values()):
                if window.queue.topic not in self._subscriptions:
                    self._lose(window)
            for topic in list(self._subscriptions):
                complete = await self._rebalance_topic(topic) and complete
            changed = self._changed_shares()
        # Not within the round: the user may want to go elsewhere in the new queues.
        for topic, queues in changed.items():
            await self._host.share_changed(topic, queues)
        return complete

    async def _rebalance_topic(self, topic: str) -> bool:
        try:
            mine = await self._share(topic)
        except NoRoute:
            log.debug("no route yet: group=%s topic=%s", self._group, topic)
            return False
        except CosmodromeError as error:
            # What it has it keeps: the others cannot ask either, or they ask later.
            log.warning(
                "queues not shared anew: group=%s topic=%s reason=%s", self._group, topic, error
            )
            return False
        if mine is None or self._ended:
            return False
        stale_s = max(STALE_S, 2 * self._options.pull_timeout_ms / 1000)
        now = asyncio.get_running_loop().time()
        for window in [w for w in self.windows.values() if w.queue.topic == topic]:
            if window.queue not in mine:
                self._lose(window)
            elif self._options.pulls_ahead and now - window.pulled_at > stale_s:
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

    def _changed_shares(self) -> dict[str, list[MessageQueue]]:
        shares: dict[str, list[MessageQueue]] = {topic: [] for topic in self._shares}
        for queue in sorted_queues(self.windows):
            shares.setdefault(queue.topic, []).append(queue)
        before, self._shares = self._shares, {t: queues for t, queues in shares.items() if queues}
        return {t: queues for t, queues in shares.items() if queues != before.get(t, [])}

    # --- gaining and losing ----------------------------------------------------------------------

    async def _gain(self, queue: MessageQueue) -> bool:
        if queue in self._leaving:
            return False
        if self.locks is None:
            return await self._begin(queue, None)
        locked_at = asyncio.get_running_loop().time()
        try:
            if await self.locks.take(queue):
                return await self._begin(queue, locked_at)
            log.debug("queue is locked by another member: queue=%s", queue)
            return False
        finally:
            if queue not in self.windows:
                # Unasked, the broker would keep it for a minute.
                await self.locks.give_up([queue])

    async def _begin(self, queue: MessageQueue, locked_at: float | None) -> bool:
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

    async def add(self, queue: MessageQueue, offset: int | None = None) -> None:
        """Read this queue too, whatever the group does: from `offset`, or from where the group is.
        CosmodromeError when that cannot be found out."""
        await self._instance.routes.get(queue.topic)
        start = await self._start_offset(queue) if offset is None else offset
        self._open(queue, start, None)

    async def remove(self, queues: Iterable[MessageQueue]) -> None:
        """Read these queues no more; done when their progress is stored."""
        for queue in queues:
            self._lose(self.windows[queue])
        await self.left()

    async def left(self) -> None:
        """Done when the queues that were lost until now are given up."""
        if self._leaving:
            await asyncio.wait(set(self._leaving.values()))

    def _open(self, queue: MessageQueue, offset: int, locked_at: float | None) -> None:
        self._host.opened(self._new_window(queue, offset, locked_at))
        log.info("queue gained: group=%s queue=%s offset=%d", self._group, queue, offset)

    def _new_window(self, queue: MessageQueue, offset: int, locked_at: float | None) -> Window:
        now = asyncio.get_running_loop().time()
        window = Window(queue, offset, self._options, now, self.inflated, locked_at=locked_at)
        window.paused = self._all_paused != (queue in self._excepted)
        self.windows[queue] = window
        return window

    def _lose(self, window: Window) -> None:
        del self.windows[window.queue]
        window.drop()
        log.info("queue lost: group=%s queue=%s", self._group, window.queue)
        task = asyncio.get_running_loop().create_task(self._leave(window))
        self._leaving[window.queue] = task
        task.add_done_callback(lambda done: self._after_leaving(window.queue, done))

    def _after_leaving(self, queue: MessageQueue, task: asyncio.Task[None]) -> None:
        self._leaving.pop(queue, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("leaving a queue failed: queue=%s", queue, exc_info=task.exception())

    async def _leave(self, window: Window) -> None:
        await self._host.closed(window)
        if self._options.commits_by_itself:
            await self._store([window])
        if self.locks is not None:
            await self.locks.give_up([window.queue])

    async def _start_offset(self, queue: MessageQueue) -> int:
        stored = await self._offsets.read(queue)
        if stored is not None:
            return stored
        again = queue.topic.startswith(RETRY_PREFIX)
        from_ms = self._options.from_ms
        if from_ms is not None and not again:
            return await offset_at(self._instance, queue, from_ms)
        if from_ms is None and (again or self._options.consume_from == "first"):
            return 0
        return await end_offset(self._instance, queue)

    # --- offsets ---------------------------------------------------------------------------------

    async def commit_forever(self) -> None:
        while True:
            await asyncio.sleep(self._options.commit_every_ms / 1000)
            await self.commit()

    async def commit(self) -> Collection[MessageQueue]:
        """The queues whose progress was not stored."""
        return await self._store(list(self.windows.values()))

    async def _store(self, windows: list[Window]) -> Collection[MessageQueue]:
        if not self._options.repeats_commits:
            windows = [window for window in windows if window.done_to != window.committed]
        done = {window.queue: window.done_to for window in windows}
        failed = await self._offsets.write(done) if done else ()
        for window in windows:
            if window.queue not in failed:
                window.committed = done[window.queue]
        return failed

    async def restart(self, queue: MessageQueue, offset: int, *, commit: bool = True) -> None:
        """Go on at another offset; what runs for the queue now has no effect on that."""
        async with self._one_round:
            before = self.windows.get(queue)
            if before is None or self._ended:
                return
            before.drop()
            window = self._new_window(queue, offset, before.locked_at)
            window.committed, window.paused = before.committed, before.paused
            try:
                await self._host.closed(before)
                if commit and self._options.commits_by_itself:
                    await self._store([window])
            finally:
                if not self._ended:
                    self._host.opened(window)

    async def moved(self, window: Window, offset: int) -> None:
        """The broker has nothing at the offset of a window."""
        offset = max(0, offset)
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

    def pause(self, queue: MessageQueue, *, paused: bool) -> None:
        """Pull no more from a queue, or pull again; also when it comes back later."""
        excepted = self._excepted
        (excepted.discard if paused == self._all_paused else excepted.add)(queue)
        window = self.windows.get(queue)
        if window is not None:
            window.pause(paused=paused)

    def pause_all(self, *, paused: bool) -> None:
        self._all_paused = paused
        self._excepted.clear()
        for window in self.windows.values():
            window.pause(paused=paused)

    # --- the end ---------------------------------------------------------------------------------

    def end_rounds(self) -> None:
        """Gain nothing any more."""
        self._ended = True

    async def leave_all(self) -> None:
        """Commit and give up everything; nothing works on the windows any more."""
        self._ended = True
        await self.left()
        windows = list(self.windows.values())
        if not windows:
            return
        if self._options.commits_by_itself:
            await self._store(windows)
        self.windows.clear()
        for window in windows:
            window.drop()
        if self.locks is not None:
            await self.locks.give_up([window.queue for window in windows])
