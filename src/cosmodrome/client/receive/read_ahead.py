"""Queues that are being read: one task each pulls ahead of the user, up to a bound.

Three offsets per queue, in this order: `done` (may be committed), `position` (behind the last
message handed out), `pull_at` (behind the last message pulled). A move sets all three and ends the
pull that is out.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
from collections.abc import Iterable

from cosmodrome.client.instance import Instance
from cosmodrome.client.receive.queue_reader import Pulled, PullStatus, QueueReader
from cosmodrome.client.receive.subscriptions import Subscription
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import CosmodromeError

log = logging.getLogger(__name__)

FAILED_PAUSE_S = (1.0, 3.0)  # after a pull that failed, by chance in between


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    pull_batch: int
    prefetch_messages: int  # per queue
    suspend_ms: int
    pull_timeout_ms: int


class Reading:
    """One queue."""

    def __init__(self, queue: MessageQueue, offset: int, subscription: Subscription) -> None:
        self.queue = queue
        self.subscription = subscription
        self.done = self.position = self.pull_at = offset
        self.committed = -1  # as far as this consumer wrote it
        self.paused = False
        self.batches: collections.deque[tuple[list[ReceivedMessage], int]] = collections.deque()
        self.cached = 0
        self.room = asyncio.Event()
        self.room.set()
        self.task: asyncio.Task[None] | None = None

    def move(self, offset: int) -> None:
        self.done = self.position = self.pull_at = offset
        self.batches.clear()
        self.cached = 0
        self.room.set()


class ReadAhead:
    def __init__(self, instance: Instance, reader: QueueReader, group: str, limits: Limits) -> None:
        self.readings: dict[MessageQueue, Reading] = {}
        self.arrived = asyncio.Event()
        self._instance = instance
        self._reader = reader
        self._group = group
        self._limits = limits
        # One entry per batch, in the order of arrival: no queue waits for ever behind another.
        self._ready: collections.deque[Reading] = collections.deque()

    def begin(self, queue: MessageQueue, offset: int, subscription: Subscription) -> None:
        reading = Reading(queue, offset, subscription)
        self.readings[queue] = reading
        reading.task = asyncio.get_running_loop().create_task(self._read(reading))

    def move(self, reading: Reading, offset: int) -> None:
        """Go on elsewhere, at once: the pull that a broker holds now would end much later."""
        reading.move(offset)
        if self._is_current(reading) and reading.task is not None:
            reading.task.cancel()
            reading.task = asyncio.get_running_loop().create_task(self._read(reading))

    async def end(self, queues: Iterable[MessageQueue]) -> list[Reading]:
        """Stop reading these queues; what they were at."""
        ended = [self.readings.pop(queue) for queue in queues]
        tasks = [reading.task for reading in ended if reading.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for reading in ended:
            self._reader.forget(reading.queue)
        return ended

    def take(self, max_count: int | None) -> list[ReceivedMessage]:
        """The batch that arrived first; with `max_count` as many as fit into that number."""
        found: list[ReceivedMessage] = []
        while self._ready:
            reading = self._ready[0]
            if reading.paused or not reading.batches or not self._is_current(reading):
                self._ready.popleft()
                continue
            messages, next_offset = reading.batches[0]
            if found and (max_count is None or len(found) + len(messages) > max_count):
                break
            if max_count is not None and len(messages) > max_count:
                rest = messages[max_count:]
                reading.batches[0] = (rest, next_offset)
                messages, next_offset = messages[:max_count], rest[0].queue_offset
            else:
                reading.batches.popleft()
                self._ready.popleft()
            reading.position = next_offset
            reading.cached -= len(messages)
            reading.room.set()
            found += messages
        return found

    def settle(self) -> None:
        """What was handed out is done."""
        for reading in self.readings.values():
            reading.done = reading.position

    def resume(self, reading: Reading) -> None:
        if reading.paused:
            reading.paused = False
            reading.room.set()
            self._ready.extend(reading for _ in reading.batches)
            self.arrived.set()

    def _is_current(self, reading: Reading) -> bool:
        return self.readings.get(reading.queue) is reading

    async def _read(self, reading: Reading) -> None:
        limits = self._limits
        while True:
            await reading.room.wait()
            if reading.paused or reading.cached >= limits.prefetch_messages:
                reading.room.clear()
                continue
            try:
                pulled = await self._reader.pull(
                    reading.queue,
                    reading.pull_at,
                    reading.subscription,
                    max_count=limits.pull_batch,
                    hold_ms=limits.suspend_ms,
                    timeout_ms=limits.pull_timeout_ms,
                )
            except CosmodromeError as error:
                log.warning(
                    "pull failed: group=%s queue=%s reason=%s", self._group, reading.queue, error
                )
                await self._pause_after_failure(reading)
                continue
            self._add(reading, pulled)

    async def _pause_after_failure(self, reading: Reading) -> None:
        await asyncio.sleep(self._instance.env.random.uniform(*FAILED_PAUSE_S))
        with contextlib.suppress(CosmodromeError):
            await self._instance.routes.get(reading.queue.topic, fresh=True)

    def _add(self, reading: Reading, pulled: Pulled) -> None:
        if pulled.status is PullStatus.OFFSET_MOVED:
            log.warning(
                "offset moved: group=%s queue=%s from=%d to=%d",
                *(self._group, reading.queue, reading.pull_at, pulled.next_offset),
            )
        reading.pull_at = pulled.next_offset
        if pulled.messages:
            reading.batches.append((pulled.messages, pulled.next_offset))
            reading.cached += len(pulled.messages)
            self._ready.append(reading)
            self.arrived.set()
        elif not reading.batches:
            # Nothing of interest in between: whoever has done all before has done this too.
            if reading.done == reading.position:
                reading.done = pulled.next_offset
            reading.position = pulled.next_offset
