"""The window of one queue: what was pulled and is not done yet.

Offsets below `done_to` are done and may be committed; from `next_offset` on nothing was pulled.
Messages between them are done in any order, so a commit never jumps over one that is not.
A window that was dropped (the queue went to another member, or its offset was moved) stays
dropped: what still runs for it ends without effect.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from cosmodrome.client.receive.consumer_options import ConsumerOptions
from cosmodrome.client.values import MessageQueue, ReceivedMessage

LOCK_VALID_S = 30.0


class Window:
    """See the module. Times are those of the loop."""

    __slots__ = (
        *("_changed", "_options", "broker_id", "bytes", "consumed_at", "dropped", "finished"),
        *("locked_at", "max_offset", "min_offset", "next_offset", "paused", "pulled_at", "queue"),
        *("started", "unfinished", "waiting", "why_full"),
    )

    def __init__(
        self,
        queue: MessageQueue,
        offset: int,
        options: ConsumerOptions,
        now: float,
        *,
        locked_at: float | None = None,
    ) -> None:
        self.queue = queue
        self.next_offset = offset
        self.dropped = False
        self.paused = False
        self.unfinished: dict[int, ReceivedMessage] = {}  # by offset, in rising order
        self.waiting: deque[ReceivedMessage] = deque()  # orderly: not handed out yet
        self.started: dict[int, float] = {}  # when they were handed out
        self.bytes = 0
        self.finished = 0
        self.broker_id = 0  # where the last answer told us to pull
        self.min_offset = self.max_offset = -1  # of the queue, as far as known
        self.pulled_at = self.consumed_at = now
        self.locked_at = locked_at
        self.why_full = ""
        self._options = options
        self._changed: asyncio.Future[None] | None = None

    @property
    def done_to(self) -> int:
        for offset in self.unfinished:
            return offset
        return self.next_offset

    def is_locked(self, now: float) -> bool:
        return self.locked_at is not None and now - self.locked_at < LOCK_VALID_S

    def add(self, messages: Iterable[ReceivedMessage]) -> None:
        unfinished, size = self.unfinished, 0
        for message in messages:
            unfinished[message.queue_offset] = message
            size += message.size
        self.bytes += size

    def finish(self, messages: Iterable[ReceivedMessage]) -> None:
        """Done, each once: one that was given back meanwhile is not done a second time."""
        unfinished, started = self.unfinished, self.started
        count = size = 0
        for message in messages:
            offset = message.queue_offset
            if unfinished.get(offset) is message:
                del unfinished[offset]
                size += message.size
                count += 1
            if started:
                started.pop(offset, None)
        self.bytes -= size
        self.finished += count
        if self.why_full:
            self.changed()

    def holds(self, message: ReceivedMessage) -> bool:
        return not self.dropped and self.unfinished.get(message.queue_offset) is message

    def full(self) -> bool:
        """Whether to pull no more for now; `why_full` says why."""
        options, count = self._options, len(self.unfinished)
        self.why_full = ""
        if count >= options.prefetch_messages:
            self.why_full = f"{count} messages are not done (prefetch_messages)"
        elif self.bytes >= options.prefetch_bytes:
            self.why_full = f"{self.bytes} bytes are not done (prefetch_bytes)"
        elif not options.orderly and self.next_offset - self.done_to >= options.prefetch_span:
            self.why_full = f"offset {self.done_to} is not done for long (prefetch_span)"
        return bool(self.why_full)

    def drop(self) -> None:
        self.dropped = True
        self.waiting.clear()
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
