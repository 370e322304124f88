"""What was sent and pulled, summed up for the statistics.

Both lanes add to the same sums, the compiled one without a Python call per topic or queue. Whoever
keeps the statistics takes the sums when they are asked for, and before a tick of its clock ends; so
there are at most as many as topics, or queues of groups, were used within one tick.
"""

from __future__ import annotations

GetKey = tuple[str, str, int]  # group, topic, queue id


class PutCounts:
    """Messages that were stored, by topic, until somebody takes the sums."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[int, int, int]] = {}

    def add(self, topic: str, requests: int, messages: int, size: int) -> None:
        """So many requests brought messages of `size` bytes together."""
        known = self._sums.get(topic)
        if known is not None:
            requests, messages, size = known[0] + requests, known[1] + messages, known[2] + size
        self._sums[topic] = (requests, messages, size)

    def take(self) -> list[tuple[str, int, int, int]]:
        """Topic, requests, messages and bytes of all that was counted since the last time."""
        sums, self._sums = self._sums, {}
        return [(topic, *total) for topic, total in sums.items()]


class GetCounts:
    """Messages that were pulled, by group, topic and queue, until somebody takes the sums."""

    def __init__(self) -> None:
        self.pulls_total = self.messages_total = self.bytes_total = 0  # ever
        self._sums: dict[GetKey, tuple[int, int, int, float, float, int]] = {}

    def add(
        self, key: GetKey, pulls: int, messages: int, size: int, ms: float, next_offset: int
    ) -> None:
        """Pulls of a group (`key`: group, topic, queue id) brought messages and took `ms` each."""
        self.pulls_total += pulls
        self.messages_total += messages
        self.bytes_total += size
        all_ms, longest_ms = ms * pulls, ms
        known = self._sums.get(key)
        if known is not None:
            pulls, messages, size = known[0] + pulls, known[1] + messages, known[2] + size
            all_ms, longest_ms = known[3] + all_ms, max(known[4], ms)
        self._sums[key] = (pulls, messages, size, all_ms, longest_ms, next_offset)

    def take(self) -> list[tuple[GetKey, int, int, int, float, float, int]]:
        """Key, pulls, messages, bytes, ms, ms of the longest and next offset of all since then."""
        sums, self._sums = self._sums, {}
        return [(key, *total) for key, total in sums.items()]
