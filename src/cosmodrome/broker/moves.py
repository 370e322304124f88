"""Consumers that ask outside of their queue: told where to go on, and written down.

A master stores one message in OFFSET_MOVED_EVENT for it, tagged and keyed with the group, so that
operators can subscribe to it. A consumer that keeps asking wrongly must not fill the log:
one event per second for a queue of a group, and a bounded number in a second for all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cosmodrome.env.base import Clock
from cosmodrome.errors import StoreError
from cosmodrome.store.store import Draft, Store
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import MessageQueue, OffsetMovedEvent
from cosmodrome.wire.message import DELAY, KEYS, TAGS, format_properties
from cosmodrome.wire.names import OFFSET_MOVED_TOPIC

PERIOD_SECONDS = 1.0
EVENTS_PER_PERIOD_MAX = 100

log = logging.getLogger(__name__)


class OffsetMoves:
    """`corrects` says whether consumers are sent elsewhere at all: a slave that may just lag
    behind its master does not, unless `offsetCheckInSlave` tells it to."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        broker_name: str,
        store_host: Callable[[], bytes],
        *,
        writes: bool,
        corrects: bool,
    ) -> None:
        self.corrects = corrects
        self._store = store
        self._clock = clock
        self._broker_name = broker_name
        self._store_host = store_host
        self._writes = writes
        self._period_end = 0.0
        self._told: set[tuple[str, str, int]] = set()
        self.events_total = 0

    def tell(self, group: str, topic: str, queue_id: int, requested: int, new: int) -> None:
        """`group` asked for `requested` and is sent to `new`."""
        if not self._writes or not self._is_new((group, topic, queue_id)):
            return
        log.info(
            "offset_moved group=%s topic=%s queue=%d requested=%d new=%d",
            *(group, topic, queue_id, requested, new),
        )
        event = OffsetMovedEvent(
            consumer_group=group,
            message_queue=MessageQueue(
                broker_name=self._broker_name, queue_id=queue_id, topic=topic
            ),
            offset_new=new,
            offset_request=requested,
        )
        host = self._store_host()
        try:
            self._store.append(
                Draft(
                    topic=OFFSET_MOVED_TOPIC,
                    queue_id=0,
                    body=bodies.encode(event),
                    properties=format_properties({TAGS: group, DELAY: "0", KEYS: group}),
                    born_host=host,
                    store_host=host,
                    born_ms=self._clock.now_ms(),
                )
            )
        except StoreError as error:
            # The consumer is answered all the same: the event is for operators.
            log.warning("offset_moved_not_stored group=%s error=%s", group, error)
            return
        self.events_total += 1

    def _is_new(self, place: tuple[str, str, int]) -> bool:
        now = asyncio.get_running_loop().time()
        if now >= self._period_end:
            self._period_end = now + PERIOD_SECONDS
            self._told.clear()
        if place in self._told or len(self._told) >= EVENTS_PER_PERIOD_MAX:
            return False
        self._told.add(place)
        return True
