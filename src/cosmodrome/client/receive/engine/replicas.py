"""Which broker of a broker name a queue is pulled from: the master or one of its slaves.

Brokers suggest one with each answer: a slave to who is far behind, else the master. One that
cannot be reached is left aside for a while, and another replica stands in for it. Then a single
pull tries it again, so that a machine that is gone does not hold up every queue each time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cosmodrome.client.routes import Routes
from cosmodrome.client.values import MessageQueue
from cosmodrome.errors import CosmodromeError
from cosmodrome.wire.bodies import MASTER_ID

log = logging.getLogger(__name__)

ASIDE_S = 10.0


class Replicas:
    def __init__(self, routes: Routes, now: Callable[[], float]) -> None:
        self._routes = routes
        self._now = now
        self._suggested: dict[MessageQueue, int] = {}  # where it is not the master
        self._aside: dict[str, float] = {}  # address → when it is tried again
        self._version = -1  # of the routes, when `_aside` was filled

    def address(self, queue: MessageQueue) -> str | None:
        """Where to pull; None when no route has the broker name."""
        name = queue.broker_name
        wanted = self._suggested.get(queue, MASTER_ID) if self._suggested else MASTER_ID
        preferred = self._routes.address(name, wanted)
        if preferred is not None and (not self._aside or self._may_try(preferred)):
            return preferred
        others = [one for one in self._routes.replicas(name).values() if one != preferred]
        return next(filter(self._may_try, others), preferred or next(iter(others), None))

    def suggest(self, queue: MessageQueue, broker_id: int) -> None:
        """A broker said whom to ask next."""
        if broker_id == MASTER_ID:
            self._suggested.pop(queue, None)
        else:
            self._suggested[queue] = broker_id

    def answered(self, address: str) -> None:
        if self._aside and self._aside.pop(address, None) is not None:
            log.info("pulling again: broker=%s", address)

    def failed(self, queue: MessageQueue, address: str, error: CosmodromeError) -> None:
        """Nobody answers there: leave it aside if there is another replica."""
        if len(self._routes.replicas(queue.broker_name)) < 2:
            return
        if address not in self._aside:
            log.warning(
                "pulling from another replica: broker=%s away=%s reason=%s",
                queue.broker_name,
                address,
                error,
            )
        self._version = self._routes.version
        self._aside[address] = self._now() + ASIDE_S

    def _may_try(self, address: str) -> bool:
        if self._version != self._routes.version:
            self._aside.clear()  # a name server knows better by now
        until = self._aside.get(address)
        if until is None:
            return True
        if self._now() < until:
            return False
        self._aside[address] = self._now() + ASIDE_S  # this pull tries, others wait for it
        return True
