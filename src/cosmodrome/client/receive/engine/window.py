"""The window of one queue: what was pulled and is not done yet.

Offsets below `done_to` are done and may be committed; from `next_offset` on nothing was pulled.
Messages between them are done in any order, so a commit never jumps over one that is not.

What one pull brought is mostly done as a whole and in turn. So it is kept as one batch until single
messages are asked for; then all batches are taken apart. Those that come later are whole again.

A window that was dropped (the queue went to another member, or its offset was moved) stays
dropped: what still runs for it ends without effect.

Bodies that were compressed count in `bytes` with what they became, and in the budget of the
consumer until they are done. Those of a paused queue do not count there: they must not stop the
others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence

from cosmodrome.client.receive.engine.inflating import Inflated
from cosmodrome.client.receive.engine.options import ReadOptions
from cosmodrome.client.values import MessageQueue, ReceivedMessage

LOCK_VALID_S = 30.0


class Window:
    """See the module. Times are those of the loop."""

    __slots__ = (
        "_batched",
        "_batches",
        "_budget",
        "_changed",
        "_inflated",
        "_options",
        "_single",
        "bytes",
        "committed",
        "consumed_at",
        "dropped",
        "finished",
        "locked_at",
        "max_offset",
        "min_offset",
        "next_offset",
        "paused",
        "pulled_at",
        "queue",
        "started",
        "waiting",
        "why_full",
    )

    def __init__(
        self,
        queue: MessageQueue,
        offset: int,
        options: ReadOptions,
        now: float,
        budget: Inflated,
        *,
        locked_at: float | None = None,
    ) -> None:
        self.queue = queue
        self.next_offset = offset
        self.dropped = False
        self.paused = False
        self.waiting: deque[ReceivedMessage] = deque()  # orderly: no handler was called yet
        self.started: dict[int, float] = {}  # when they were handed out
        self.bytes = 0
        self.finished = 0
        self.committed = -1  # what this member stored of its progress
        self.min_offset = self.max_offset = -1  # of the queue, as far as known
        self.pulled_at = self.consumed_at = now
        self.locked_at = locked_at
        self.why_full = ""
        self._options = options
        self._budget = budget
        self._inflated: dict[ReceivedMessage, int] = {}  # bytes of bodies that were compressed
        # What is not done, all with rising offsets: first the single messages, then the batches.
        self._single: dict[int, ReceivedMessage] = {}
        self._batches: deque[tuple[list[ReceivedMessage], int]] = deque()  # with their bytes
        self._batched = 0  # messages in them
        self._changed: asyncio.Future[None] | None = None

    @property
    def done_to(self) -> int:
        for offset in self._single:
            return offset
        for messages, _ in self._batches:
            return messages[0].queue_offset
        return self.next_offset

    @property
    def unfinished(self) -> dict[int, ReceivedMessage]:
        """By offset, in rising order."""
        if self._batches:
            self._take_apart()
        return self._single

    def is_locked(self, now: float) -> bool:
        return self.locked_at is not None and now - self.locked_at < LOCK_VALID_S

    def add(
        self,
        messages: list[ReceivedMessage],
        size: int,
        inflated: Mapping[ReceivedMessage, int] | None = None,
    ) -> None:
        """They come behind all others and have so many bytes, and as many more as the bodies in
        `inflated` have. Nobody changes the list any more."""
        if inflated:
            self._inflated.update(inflated)
            count = sum(inflated.values())
            self.bytes += count
            if not self.paused:
                self._budget.take(count)
        if messages:
            self._batches.append((messages, size))
            self._batched += len(messages)
            self.bytes += size

    def finish(self, messages: Sequence[ReceivedMessage]) -> None:
        """These are done. One that was given back meanwhile is not counted a second time."""
        started = self.started
        if self._inflated:
            self._deflate(sum(self._inflated.pop(message, 0) for message in messages))
        if self._batched and (started or self._batches[0][0] != messages):
            self._take_apart()
        if self._batched:
            size = self._batches.popleft()[1]
            count = len(messages)
            self._batched -= count
        else:
            single = self._single
            count = size = 0
            for message in messages:
                offset = message.queue_offset
                if single.get(offset) is message:
                    del single[offset]
                    size += message.size
                    count += 1
                if started:
                    started.pop(offset, None)
        self.bytes -= size
        self.finished += count
        if self.why_full:
            self.changed()

    def _deflate(self, count: int) -> None:
        """So many bytes of bodies that were compressed are gone."""
        self.bytes -= count
        if count and not self.paused:
            self._budget.give_back(count)

    def _take_apart(self) -> None:
        single = self._single
        for messages, _ in self._batches:
            for message in messages:
                single[message.queue_offset] = message
        self._batches.clear()
        self._batched = 0

    def holds(self, message: ReceivedMessage) -> bool:
        return not self.dropped and self.unfinished.get(message.queue_offset) is message

    def full(self) -> bool:
        """Whether to pull no more for now; `why_full` says why."""
        options, count = self._options, len(self._single) + self._batched
        self.why_full = ""
        if count >= options.prefetch_messages:
            self.why_full = f"{count} messages are not done (prefetch_messages)"
        elif self.bytes >= options.prefetch_bytes:
            self.why_full = f"{self.bytes} bytes are not done (prefetch_bytes)"
        elif not options.in_order and self.next_offset - self.done_to >= options.prefetch_span:
            self.why_full = f"offset {self.done_to} is not done for long (prefetch_span)"
        elif self._budget.full:
            self.wait_for_room()
        return bool(self.why_full)

    def room(self, wanted: int) -> int:
        """How much of `wanted` may be decompressed for this queue now."""
        return self._budget.room(wanted)

    def wait_for_room(self) -> None:
        """Be woken when the budget of the consumer has room again."""
        self.why_full = (
            f"{self._budget.held} bytes of all queues were decompressed and are not done"
            " (inflated_bytes_max)"
        )
        self._budget.wait(self.changed)

    def pause(self, *, paused: bool) -> None:
        if self._inflated and paused != self.paused:
            count = sum(self._inflated.values())
            (self._budget.give_back if paused else self._budget.take)(count)
        self.paused = paused
        self.changed()

    def drop(self) -> None:
        self.dropped = True
        self.waiting.clear()
        if self._inflated:
            count = sum(self._inflated.values())
            self._inflated.clear()
            self._deflate(count)
        self.changed()

    def changed(self) -> None:
        """Wake whoever waits for room, for messages or for the end."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    async def wait(self, timeout_s: float) -> None:
        """Until something changes, or the time is over."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait((self._changed,), timeout=timeout_s)
