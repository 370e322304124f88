"""Logs slow sends and pulls of the fast lane, from what is counted anyway.

The router sees the requests that it serves itself, with their peers. What the fast lane serves is
only in histograms and maxima; a look at them once a second tells how many were slow, not whose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cosmodrome.broker.counts.put_times import PutTimes
from cosmodrome.broker.counts.stats import Stats

log = logging.getLogger(__name__)


class SlowSends:
    """`slow_ms` is asked each time; 0 logs nothing."""

    def __init__(self, put_times: PutTimes, stats: Stats, slow_ms: Callable[[], int]) -> None:
        self._put_times = put_times
        self._stats = stats
        self._slow_ms = slow_ms
        self._limit_ms = slow_ms()
        self._sends = 0
        self._longest_pull_ms = 0.0

    def look(self) -> None:
        """To be called once a second or so."""
        limit_ms = self._slow_ms()
        if not limit_ms:
            return
        sends = self._put_times.longer_than(limit_ms)
        more, self._sends = sends - self._sends, sends
        # With another limit there is nothing to compare with.
        if more > 0 and limit_ms == self._limit_ms:
            log.warning(
                "slow_sends count=%d longer_than_ms=%d longest_ms=%d",
                more,
                limit_ms,
                self._put_times.longest_ms,
            )
        self._limit_ms = limit_ms
        longest_ms = self._stats.longest_get_ms
        if longest_ms > self._longest_pull_ms:
            self._longest_pull_ms = longest_ms
            if longest_ms >= limit_ms:
                log.warning("slow_pull took_ms=%d; the longest read since the start", longest_ms)
