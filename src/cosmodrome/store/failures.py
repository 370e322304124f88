"""Writes that fail, told now and then: the log file may be on the same full disk."""

from __future__ import annotations

import asyncio
import logging
import math

APART_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Failures:
    """The first one is told at once, the next ones together."""

    def __init__(self) -> None:
        self._unsaid = 0
        self._said_at = -math.inf

    def say(self, path: str, offset: int, error: OSError) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._said_at < APART_SECONDS:
            self._unsaid += 1
            return
        _log.error(
            "log_write_failed path=%s offset=%d held_back=%d error=%s",
            *(path, offset, self._unsaid, error),
        )
        self._unsaid, self._said_at = 0, now
