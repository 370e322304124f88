"""How far a delivery inside the broker has come, on disk.

Invariant: the file never promises more than the disk holds. A copy that was delivered may still
sit in the kernel (ASYNC_FLUSH); if the file said "delivered" and the power went, the message
would be gone although its sender was answered long ago. So a state is written only after the
log was synced beyond everything that the state speaks of. An older state repeats messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cosmodrome.broker.members.table_file import Document, TableFile
from cosmodrome.env.background import Background
from cosmodrome.env.base import Env
from cosmodrome.store.store import Store

# Whoever saves offsets waits for the log like this; a stop waits for so many looks at most.
SYNC_POLL_SECONDS = 0.1
STOP_POLLS_MAX = 20


class Progress:
    """Saves `state()` every `interval_ms` when `changed` is set, and at the stop."""

    def __init__(
        self,
        path: str,
        env: Env,
        store: Store,
        interval_ms: int,
        state: Callable[[], Document],
    ) -> None:
        self.changed = False
        self._store = store
        self._interval_s = interval_ms / 1000
        self._state = state
        self._safe: Document = {}
        self._file = TableFile(path, env, lambda: self._safe)
        self._saver = Background(f"save {path}")

    @property
    def path(self) -> str:
        return self._file.path

    @property
    def running(self) -> bool:
        return self._saver.running

    async def load(self) -> Document | None:
        return await self._file.load()

    def start(self) -> None:
        if not self._saver.running:
            self.changed = False
            self._saver.start(self._save_regularly)

    async def stop(self) -> None:
        """Whatever changes the state has ended before this is called."""
        if not await self._saver.stop():
            return
        # Set again: a save that was cancelled while it waited for a sync has not happened.
        if await self._synced_copy(STOP_POLLS_MAX):
            self._file.save_soon()
        await self._file.stop()

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if self.changed:
                self.changed = False
                if await self._synced_copy(None):
                    self._file.save_soon()

    async def _synced_copy(self, polls_max: int | None) -> bool:
        """Take the state and wait until the log is synced beyond it; false when it was not."""
        state = self._state()
        end = self._store.facts().written_offset
        polls = 0
        while self._store.facts().flushed_offset < end:
            if polls == polls_max:
                return False
            polls += 1
            await asyncio.sleep(SYNC_POLL_SECONDS)
        unchanged, self._safe = state == self._safe, state
        return not unchanged
