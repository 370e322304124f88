"""Failed writes, logged now and then: the log file may be on the same full disk."""

from __future__ import annotations

import asyncio
import logging
import math

APART_SECONDS = 1.0
# Without another try nobody knows whether it would go well by now: after this it may be tried.
RECENT_SECONDS = 15.0

_log = logging.getLogger(__name__)


class Failures:
    """The first one is logged at once, the next ones together. `recent` is for readiness."""

    def __init__(self) -> None:
        self._held_back = 0
        self._logged_at = -math.inf
        self._failed_at = -math.inf
        self.why: str | None = None  # the last one; whoever succeeds sets it back to None

    @property
    def recent(self) -> str | None:
        """What failed a moment ago and did not go well since."""
        if self.why is None:
            return None
        past = asyncio.get_running_loop().time() - self._failed_at
        return self.why if past < RECENT_SECONDS else None

    def log(self, path: str, offset: int, error: Exception) -> None:
        now = self._failed_at = asyncio.get_running_loop().time()
        if now - self._logged_at < APART_SECONDS:
            self._held_back += 1
            return
        _log.error(
            "log_write_failed path=%s offset=%d held_back=%d error=%s",
            path,
            offset,
            self._held_back,
            error,
        )
        self._held_back, self._logged_at = 0, now
