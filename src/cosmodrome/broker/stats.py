"""Who puts and gets how much: the statistics of topics and consumer groups.

Theory of operation: an item only counts upwards. Time is cut into ticks of ten seconds. The
first count of a tick stores, before it adds, what the totals were: because nothing was counted
since the item's previous tick, that is what they were at every boundary in between. So the
totals at any boundary can be told later, items that are idle cost nothing, and no timer ever
walks through all of them. One such mark is kept per tick for the last minute, per ten minutes
for the last hour and per hour for the last day.

A span ends at the last boundary, so figures are up to ten seconds old. Items are bounded in
number: what a new one would count beyond that shows only in the broker's totals. An item that
was idle for a day has nothing left to tell and is dropped.

The fast lane counts by itself and tells now and then: `settle` asks it to, before anything is told
here and before a tick ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from cosmodrome.wire.names import SCHEDULE_TOPIC

TICK_SECONDS = 10
# Ticks between two marks, and how many marks back a span begins.
MINUTE = (1, 6)
HOUR = (60, 6)
DAY = (360, 24)
IDLE_TICKS_MAX = DAY[0] * DAY[1]
TOPICS_MAX = 20_000
GROUPS_MAX = 20_000  # pairs of topic and group
QUEUES_MAX = 20_000


class Totals(NamedTuple):
    messages: int = 0
    size: int = 0  # bytes
    calls: int = 0
    ms: int = 0  # time that the calls took
    returned: int = 0  # messages given back for a retry


NOTHING = Totals()
Mark = tuple[int, Totals]


class Item:
    """What one topic, group or queue has counted since `born`."""

    __slots__ = (
        *("born", "calls", "messages", "ms", "next_offset", "queues", "returned"),
        *("size", "tick", "_days", "_hours", "_minutes"),
    )

    def __init__(self, tick: int) -> None:
        self.born = self.tick = tick
        self.messages = self.size = self.calls = 0
        self.ms = 0.0
        self.returned = 0
        self.next_offset = 0  # of a queue: where its group reads next
        self.queues: dict[int, Item] = {}
        self._minutes: list[Mark] = []
        self._hours: list[Mark] = []
        self._days: list[Mark] = []

    def roll(self, tick: int) -> None:
        """Keep what was counted before `tick`; call it before the first count in it."""
        mark = (tick, self._totals())
        for marks, (step, back) in (
            (self._minutes, MINUTE),
            (self._hours, HOUR),
            (self._days, DAY),
        ):
            if tick // step != self.tick // step:
                marks.append(mark)
                if len(marks) > back + 1:
                    del marks[0]
        self.tick = tick

    def over(self, now: int, span: tuple[int, int]) -> tuple[Totals, int]:
        """What was counted in a span that ends with the tick before `now`, and its seconds."""
        step, back = span
        marks = self._minutes if span is MINUTE else self._hours if span is HOUR else self._days
        start = max((now // step - back) * step, self.born)
        then = NOTHING if start == self.born else self._at(start, marks)
        last = self._at(now, self._minutes) if now > self.born else NOTHING
        return Totals(*(new - old for new, old in zip(last, then, strict=True))), (
            now - start
        ) * TICK_SECONDS

    def _at(self, boundary: int, marks: list[Mark]) -> Totals:
        for tick, totals in marks:
            if tick >= boundary:
                return totals
        return self._totals()  # nothing was counted since

    def _totals(self) -> Totals:
        return Totals(self.messages, self.size, self.calls, int(self.ms), self.returned)


class Stats:
    """Counts for the services; `puts` and `gets` are the whole broker's."""

    def __init__(self, *, detailed: bool = True) -> None:
        self.tick = 0
        self._puts = Item(0)
        self._detailed = detailed
        self._gets = Item(0)
        self._longest_get_ms = 0.0
        self._elsewhere: list[Callable[[], None]] = []
        self._topics: dict[str, Item] = {}
        self._groups: dict[tuple[str, str], Item] = {}  # (topic, group)
        self._queue_count = 0
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        if self._timer is None:
            self._wake_later()

    async def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- counting ----------------------------------------------------------------------------

    @property
    def detailed(self) -> bool:
        """Whether queues are counted one by one."""
        return self._detailed

    @detailed.setter
    def detailed(self, detailed: bool) -> None:
        self.settle()
        self._detailed = detailed

    def counts_from(self, elsewhere: Callable[[], None]) -> None:
        """`elsewhere` calls `put` or `add` with what it counted since it was last asked to."""
        self._elsewhere.append(elsewhere)

    def settle(self) -> None:
        for tell in self._elsewhere:
            tell()

    def put(self, topic: str, queue_id: int, count: int, size: int, *, calls: int = 1) -> None:
        """`count` messages of `size` bytes together were stored by so many requests."""
        tick = self.tick
        item = self._topics.get(topic)
        if item is None:
            item = Item(tick)
            if len(self._topics) < TOPICS_MAX:
                self._topics[topic] = item
        for one in (item, self._puts):
            if one.tick != tick:
                one.roll(tick)
            one.messages += count
            one.size += size
            one.calls += calls
        # Compat: queues are counted only where they are delay levels.
        if topic == SCHEDULE_TOPIC and self._detailed and topic in self._topics:
            queue = self._queue(item, queue_id)
            if queue is not None:
                queue.messages += count
                queue.size += size
                queue.calls += calls

    def got(
        self,
        group: str,
        topic: str,
        queue_id: int,
        count: int,
        size: int,
        took_ms: float,
        next_offset: int,
    ) -> None:
        """A pull of `group` took `count` messages of `size` bytes together from a queue."""
        self.settle()  # what was counted before comes before
        self.add(group, topic, queue_id, 1, count, size, took_ms, took_ms, next_offset)

    def add(
        self,
        group: str,
        topic: str,
        queue_id: int,
        calls: int,
        count: int,
        size: int,
        took_ms: float,
        longest_ms: float,
        next_offset: int,
    ) -> None:
        """So many pulls of `group` took messages from a queue, all within this tick."""
        tick = self.tick
        item = self._groups.get((topic, group))
        counted = item is not None
        if item is None:
            item = self._group(topic, group)
            counted = (topic, group) in self._groups
        for one in (item, self._gets):
            if one.tick != tick:
                one.roll(tick)
            one.messages += count
            one.size += size
            one.calls += calls
            one.ms += took_ms
        if longest_ms > self._longest_get_ms:
            self._longest_get_ms = longest_ms
        if self._detailed and counted:
            queue = item.queues.get(queue_id)
            if queue is None or queue.tick != tick:
                queue = self._queue(item, queue_id)
            if queue is not None:
                queue.messages += count
                queue.size += size
                queue.calls += calls
                queue.ms += took_ms
                queue.next_offset = next_offset

    def sent_back(self, group: str, topic: str) -> None:
        """A member of `group` gave a message of `topic` back for a retry."""
        item = self._group(topic, group)
        if item.tick != self.tick:
            item.roll(self.tick)
        item.returned += 1

    def forget_topic(self, topic: str) -> None:
        self.settle()
        item = self._topics.pop(topic, None)
        self._queue_count -= 0 if item is None else len(item.queues)
        self._forget([key for key in self._groups if key[0] == topic])

    def forget_group(self, group: str) -> None:
        self.settle()
        self._forget([key for key in self._groups if key[1] == group])

    # --- telling -----------------------------------------------------------------------------

    @property
    def puts(self) -> Item:
        self.settle()
        return self._puts

    @property
    def gets(self) -> Item:
        self.settle()
        return self._gets

    @property
    def longest_get_ms(self) -> float:
        self.settle()
        return self._longest_get_ms

    def of_topic(self, topic: str) -> Item | None:
        self.settle()
        return self._topics.get(topic)

    def of_group(self, topic: str, group: str) -> Item | None:
        self.settle()
        return self._groups.get((topic, group))

    def topics(self) -> list[tuple[str, Item]]:
        """What was put, by topic."""
        self.settle()
        return list(self._topics.items())

    def groups(self) -> list[tuple[tuple[str, str], Item]]:
        """What was got, by topic and group."""
        self.settle()
        return list(self._groups.items())

    def get_rate(self, group: str, topic: str) -> float:
        """Messages per second that a group took of a topic during the last minute."""
        item = self.of_group(topic, group)
        if item is None:
            return 0.0
        counted, seconds = item.over(self.tick, MINUTE)
        return counted.messages / seconds if seconds else 0.0

    def advance(self) -> None:
        """Begin the next tick."""
        self.settle()
        self.tick += 1
        if self.tick % DAY[0] == 0:
            self._drop_idle()

    # --- inside ------------------------------------------------------------------------------

    def _group(self, topic: str, group: str) -> Item:
        item = self._groups.get((topic, group))
        if item is None:
            item = Item(self.tick)
            if len(self._groups) < GROUPS_MAX:
                self._groups[topic, group] = item
        return item

    def _queue(self, owner: Item, queue_id: int) -> Item | None:
        item = owner.queues.get(queue_id)
        if item is None:
            if self._queue_count >= QUEUES_MAX:
                return None
            self._queue_count += 1
            item = owner.queues[queue_id] = Item(self.tick)
        elif item.tick != self.tick:
            item.roll(self.tick)
        return item

    def _forget(self, keys: list[tuple[str, str]]) -> None:
        for key in keys:
            self._queue_count -= len(self._groups.pop(key).queues)

    def _drop_idle(self) -> None:
        oldest = self.tick - IDLE_TICKS_MAX
        self._topics = {key: item for key, item in self._topics.items() if item.tick >= oldest}
        self._groups = {key: item for key, item in self._groups.items() if item.tick >= oldest}
        count = 0
        for item in (*self._topics.values(), *self._groups.values()):
            for queue_id in [key for key, queue in item.queues.items() if queue.tick < oldest]:
                del item.queues[queue_id]
            count += len(item.queues)
        self._queue_count = count

    def _wake_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TICK_SECONDS, self._on_tick)

    def _on_tick(self) -> None:
        self._wake_later()
        self.advance()
