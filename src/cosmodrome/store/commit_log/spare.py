"""The next file of the commit log, made off the loop before it is needed.

Whoever takes the token makes the file, so that loop and worker never make it both.
"""

from __future__ import annotations

import asyncio
import logging
import time

from cosmodrome.env.base import Disk, Offload, SegmentFile
from cosmodrome.errors import StoreBusy
from cosmodrome.store.commit_log.segment import Warming, create_lasting

WAIT_STEPS = 200  # the loop stands still meanwhile: longer would be felt by everybody
STEP_SECONDS = 0.001

_log = logging.getLogger(__name__)


class Spare:
    """`wanted` tells a worker that is filling the file with zeros to hand it over."""

    def __init__(
        self, disk: Disk, path: str, base: int, size_bytes: int, warming: Warming | None
    ) -> None:
        self.base = base
        self.wanted = False
        self.made: list[SegmentFile | OSError] = []
        self.done: asyncio.Future[None] | None = None
        self._disk = disk
        self._path = path
        self._size_bytes = size_bytes
        self._warming = warming
        self._token = [True]

    def begin(self, offload: Offload) -> None:
        self.done = asyncio.ensure_future(offload(self._make))

    def take(self, *, wait: bool) -> SegmentFile:
        """The file; made now when no worker has begun, waited for a little when one has.

        StoreBusy when it is not ready: ask again. OSError when it could not be made.
        """
        if self._token_taken():
            return create_lasting(self._disk, self._path, self._size_bytes)
        # The worker has begun, so this ends soon. It happens only when a file is filled faster
        # than the next one is made; the alternative is to refuse the message at once.
        self.wanted = True
        for _ in range(WAIT_STEPS if wait else 0):
            if self.made:
                break
            time.sleep(STEP_SECONDS)
        if not self.made:
            raise StoreBusy(
                f"the next commit-log file {self._path} is still being made; send again, and check"
                " the disk if this lasts"
            )
        made = self.made[0]
        if isinstance(made, OSError):
            raise made
        return made

    async def give_up(self) -> SegmentFile | None:
        """The file, if it was made, once nobody works on it any more."""
        self.wanted = True
        if self.done is not None:
            await self.done
        made = self.made[0] if self.made else None
        return None if isinstance(made, OSError) else made

    def _make(self) -> None:
        if not self._token_taken():
            return
        try:
            file = create_lasting(self._disk, self._path, self._size_bytes)
        except OSError as error:
            self.made.append(error)
            return
        try:
            if self._warming is not None:
                self._warming.fill(self._disk, file, lambda: self.wanted)
        except OSError as error:
            _log.warning("log_file_not_filled_ahead path=%s error=%s", self._path, error)
        self.made.append(file)

    def _token_taken(self) -> bool:
        """Whether it was there, and is the caller's now; safe from two threads at once."""
        try:
            self._token.pop()
        except IndexError:
            return False
        return True
