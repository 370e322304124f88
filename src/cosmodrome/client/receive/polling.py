"""Messages that wait until the user polls. What a poll returned is done when the next one begins.

A queue has three offsets, in this order: `Window.done_to` (may be committed), `position`
(behind what was handed out) and `Window.next_offset` (behind what was pulled).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

from cosmodrome.client.namespace import unwrap
from cosmodrome.client.receive.engine.decoding import Arrivals
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import Code, ProtocolError, Refused

_Batch = tuple[Window, list[ReceivedMessage]]


class Polling:
    """A `Work` of the engine."""

    def __init__(
        self,
        group: str,
        namespace: str,
        share_changed: Callable[[str, list[MessageQueue]], Awaitable[None]],
    ) -> None:
        self.share_changed = share_changed
        self.news = asyncio.Event()  # there may be messages, or it is over
        self._group = group
        self._namespace = namespace
        # In the order of arrival: no queue waits for ever behind another.
        self._ready: deque[_Batch] = deque()
        self._handed_out: list[_Batch] = []
        self._unreadable: tuple[Window, ProtocolError] | None = None

    def take(self, max_count: int | None) -> list[ReceivedMessage]:
        """The batch that arrived first; with `max_count` as many as fit into that number. When
        there is none, ProtocolError if what a broker answered meanwhile made no sense."""
        found: list[ReceivedMessage] = []
        paused: list[_Batch] = []
        while self._ready:
            window, messages = self._ready[0]
            if window.dropped or window.paused:
                self._ready.popleft()
                if not window.dropped:
                    paused.append((window, messages))
                continue
            if found and (max_count is None or len(found) + len(messages) > max_count):
                break
            self._ready.popleft()
            if max_count is not None and len(messages) > max_count:
                self._ready.appendleft((window, messages[max_count:]))
                messages = messages[:max_count]
            self._handed_out.append((window, messages))
            found += messages
        if paused:
            self._ready.extendleft(reversed(paused))
        if not found and self._unreadable is not None:
            (window, error), self._unreadable = self._unreadable, None
            if not window.dropped:
                raise error
        return found

    def position(self, window: Window) -> int:
        """The offset of the next message that is handed out."""
        for ready, messages in self._ready:
            if ready is window:
                return messages[0].queue_offset
        return window.next_offset

    def finish(self) -> None:
        """What was handed out is done."""
        handed_out, self._handed_out = self._handed_out, []
        for window, messages in handed_out:
            window.finish(messages)

    # --- what the engine says --------------------------------------------------------------------

    def opened(self, window: Window) -> None:
        """Its messages come with `arrived`."""

    async def closed(self, window: Window) -> None:
        """What waits of it is not handed out any more."""
        self._ready = deque(batch for batch in self._ready if batch[0] is not window)

    def arrived(self, window: Window, found: Arrivals) -> None:
        self._ready.append((window, found.messages))
        self.news.set()

    def unreadable(self, window: Window, error: ProtocolError) -> None:
        queue = window.queue
        topic = unwrap(self._namespace, queue.topic)
        described = ProtocolError(
            f"queue {queue.queue_id} of {topic} on {queue.broker_name} cannot be read at"
            f" offset {window.next_offset}: {error}; seek to a later offset to leave it out"
        )
        self._unreadable = (window, described)
        self.news.set()

    async def consume_directly(self, message: ReceivedMessage) -> bytes:
        raise cannot_be_handed(self._group)

    def end(self) -> None:
        self.news.set()

    async def stop(self) -> None:
        """Nothing of it runs by itself."""


def cannot_be_handed(group: str) -> Refused:
    """The answer to operators who want to hand a message to a consumer without handlers."""
    return Refused(
        Code.SYSTEM_ERROR, f"Group {group} pulls its messages itself; nothing can be handed to it."
    )
