"""Consumers that ask outside of their queue: they are sent elsewhere, and that is written down.

For each of them a master stores one message in OFFSET_MOVED_EVENT, tagged and keyed with the
group, so that operators can subscribe to it. A consumer that keeps asking wrongly must not fill
the log: a queue of a group makes one event per second, and all together a bounded number.
"""

from __future__ import annotations

import asyncio
import logging

from cosmodrome.broker.foundation import Foundation
from cosmodrome.errors import StoreError
from cosmodrome.store.store import Draft
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import MessageQueue, OffsetMovedEvent
from cosmodrome.wire.message import DELAY, KEYS, TAGS, format_properties
from cosmodrome.wire.names import OFFSET_MOVED_TOPIC

PERIOD_SECONDS = 1.0
EVENTS_PER_PERIOD_MAX = 100

log = logging.getLogger(__name__)


class OffsetMoves:
    def __init__(self, base: Foundation) -> None:
        self._store = base.store
        self._clock = base.env.clock
        self._broker_name = base.options.broker_name
        self._store_host = base.address.store_host
        self._role = base.role
        # A slave may just lag behind its master, so it sends consumers elsewhere only if it must.
        self._corrects_on_slave = base.store_options.offset_check_in_slave
        self._period_end = 0.0
        self._noted: set[tuple[str, str, int]] = set()
        self.events_total = 0

    @property
    def corrects(self) -> bool:
        """Whether consumers are sent elsewhere at all."""
        return self._role.takes_sends or self._corrects_on_slave

    def tell(self, group: str, topic: str, queue_id: int, requested: int, new: int) -> None:
        """`group` asked for `requested` and is sent to `new`."""
        if not self._role.takes_sends or not self._is_new((group, topic, queue_id)):
            return
        log.info(
            "offset_moved group=%s topic=%s queue=%d requested=%d new=%d",
            group,
            topic,
            queue_id,
            requested,
            new,
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

    def _is_new(self, queue: tuple[str, str, int]) -> bool:
        now = asyncio.get_running_loop().time()
        if now >= self._period_end:
            self._period_end = now + PERIOD_SECONDS
            self._noted.clear()
        if queue in self._noted or len(self._noted) >= EVENTS_PER_PERIOD_MAX:
            return False
        self._noted.add(queue)
        return True
