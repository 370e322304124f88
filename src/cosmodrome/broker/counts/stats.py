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

Both lanes add to the same sums (`put_counts`, `get_counts`), the fast one once per turn.
They are rolled up into the items before anything is told and before a tick ends.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from cosmodrome.speed.lane import GetCounts, PutCounts
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
        "_days",
        "_hours",
        "_minutes",
        "born",
        "calls",
        "messages",
        "ms",
        "next_offset",
        "queues",
        "returned",
        "size",
        "tick",
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

    def count(self, tick: int, calls: int, messages: int, size: int, ms: float = 0.0) -> None:
        if self.tick != tick:
            self.roll(tick)
        self.calls += calls
        self.messages += messages
        self.size += size
        self.ms += ms

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
        self.put_counts = PutCounts()
        self.get_counts = GetCounts()
        self._detailed = detailed
        self._puts = Item(0)
        self._gets = Item(0)
        self._longest_get_ms = 0.0
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
        self._roll_up()
        self._detailed = detailed

    def put(self, topic: str, queue_id: int, count: int, size: int, *, calls: int = 1) -> None:
        """`count` messages of `size` bytes together were stored by so many requests."""
        self.put_counts.add(topic, calls, count, size)
        # Compat: queues are counted only where they are delay levels.
        if topic == SCHEDULE_TOPIC and self._detailed:
            self._roll_up()
            item = self._topics.get(topic)
            queue = None if item is None else self._queue(item, queue_id)
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
        self.get_counts.add((group, topic, queue_id), 1, count, size, took_ms, next_offset)

    def sent_back(self, group: str, topic: str) -> None:
        """A member of `group` gave a message of `topic` back for a retry."""
        self._roll_up()  # what was counted before comes before
        item = self._group(topic, group)
        if item.tick != self.tick:
            item.roll(self.tick)
        item.returned += 1

    def forget_topic(self, topic: str) -> None:
        self._roll_up()
        item = self._topics.pop(topic, None)
        self._queue_count -= 0 if item is None else len(item.queues)
        self._forget([key for key in self._groups if key[0] == topic])

    def forget_group(self, group: str) -> None:
        self._roll_up()
        self._forget([key for key in self._groups if key[1] == group])

    # --- telling -----------------------------------------------------------------------------

    @property
    def puts(self) -> Item:
        self._roll_up()
        return self._puts

    @property
    def gets(self) -> Item:
        self._roll_up()
        return self._gets

    @property
    def longest_get_ms(self) -> float:
        self._roll_up()
        return self._longest_get_ms

    def of_topic(self, topic: str) -> Item | None:
        self._roll_up()
        return self._topics.get(topic)

    def of_group(self, topic: str, group: str) -> Item | None:
        self._roll_up()
        return self._groups.get((topic, group))

    def topics(self) -> list[tuple[str, Item]]:
        """What was put, by topic."""
        self._roll_up()
        return list(self._topics.items())

    def groups(self) -> list[tuple[tuple[str, str], Item]]:
        """What was got, by topic and group."""
        self._roll_up()
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
        self._roll_up()
        self.tick += 1
        if self.tick % DAY[0] == 0:
            self._drop_idle()

    # --- inside ------------------------------------------------------------------------------

    def _roll_up(self) -> None:
        """Bring what was counted since the last time to the items."""
        for topic, calls, count, size in self.put_counts.take():
            for item in (self._topic(topic), self._puts):
                item.count(self.tick, calls, count, size)
        for key, calls, count, size, ms, longest_ms, next_offset in self.get_counts.take():
            group, topic, queue_id = key
            owner = self._group(topic, group)
            items = [owner, self._gets]
            if self._detailed and (topic, group) in self._groups:
                queue = self._queue(owner, queue_id)
                if queue is not None:
                    queue.next_offset = next_offset
                    items.append(queue)
            for item in items:
                item.count(self.tick, calls, count, size, ms)
            self._longest_get_ms = max(self._longest_get_ms, longest_ms)

    def _topic(self, topic: str) -> Item:
        item = self._topics.get(topic)
        if item is None:
            item = Item(self.tick)
            if len(self._topics) < TOPICS_MAX:
                self._topics[topic] = item
        return item

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
