"""How many topics sends may create: per minute, from one address and in all.

Each is a bucket that holds a minute's worth and fills up evenly, so that a client that starts with
many topics is not slowed down, and one that goes on inventing names is. Buckets that are full again
say nothing and are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable

from cosmodrome.errors import Code, Refused

MINUTE_MS = 60_000
ADDRESSES_MAX = 10_000


class _Bucket:
    """What is left of a minute's worth, as of `at_ms`."""

    __slots__ = ("at_ms", "left")

    def __init__(self, left: float, at_ms: int) -> None:
        self.left = left
        self.at_ms = at_ms

    def fill(self, per_minute: int, now_ms: int) -> None:
        gone_ms = max(0, now_ms - self.at_ms)  # a clock that was set back adds nothing
        self.left = min(per_minute, self.left + per_minute * gone_ms / MINUTE_MS)
        self.at_ms = now_ms


class CreationLimit:
    """`per_address` and `overall` are read for each creation, because they change at run time."""

    def __init__(
        self,
        now_ms: Callable[[], int],
        per_address: Callable[[], int],
        overall: Callable[[], int],
    ) -> None:
        self._now_ms = now_ms
        self._per_address = per_address
        self._overall = overall
        self._all: _Bucket | None = None
        self._addresses: dict[str, _Bucket] = {}

    def take(self, topic: str, address: str) -> None:
        """Count one creation; Refused when there were too many."""
        now_ms = self._now_ms()
        overall, per_address = self._overall(), self._per_address()
        if self._all is None:
            self._all = _Bucket(overall, now_ms)
        mine = self._addresses.get(address)
        if mine is None:
            self._forget_full(per_address, now_ms)
            mine = _Bucket(per_address, now_ms)
        for bucket, per_minute, who, setting in (
            (mine, per_address, f"clients at {address}", "autoCreateTopicsPerMinuteByAddress"),
            (self._all, overall, "all clients together", "autoCreateTopicsPerMinute"),
        ):
            bucket.fill(per_minute, now_ms)
            if bucket.left < 1:
                wait_s = max(1, round((1 - bucket.left) * MINUTE_MS / per_minute / 1000))
                raise Refused(
                    Code.SYSTEM_BUSY,
                    f"Topic {topic} is not created: {who} may create {per_minute} topics per minute"
                    f" by sending to them ({setting}). Send again in {wait_s} s, or create the"
                    " topic first, for example with `mqadmin updateTopic`.",
                )
        mine.left -= 1
        self._all.left -= 1
        self._addresses[address] = mine

    def _forget_full(self, per_address: int, now_ms: int) -> None:
        if len(self._addresses) < ADDRESSES_MAX:
            return
        for address, bucket in list(self._addresses.items()):
            bucket.fill(per_address, now_ms)
            if bucket.left >= per_address:
                del self._addresses[address]
        while len(self._addresses) >= ADDRESSES_MAX:
            del self._addresses[next(iter(self._addresses))]  # the limit for all still holds
