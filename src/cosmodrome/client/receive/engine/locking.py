"""Locks on queues, which let one member alone process a queue in order.

A lock belongs to a client id. The broker forgets it after 60 s, the owner stops trusting it
after 30 s (`Window.is_locked`), and it is renewed every 20 s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable

from cosmodrome.client.instance import Instance
from cosmodrome.client.receive.engine.progress import master_address
from cosmodrome.client.receive.engine.window import Window
from cosmodrome.client.values import MessageQueue
from cosmodrome.errors import CosmodromeError
from cosmodrome.transport.router import LogLimit
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    MASTER_ID,
    LockBatchRequestBody,
    LockBatchResponseBody,
    UnlockBatchRequestBody,
)
from cosmodrome.wire.commands.client import LockBatchMq, UnlockBatchMq

log = logging.getLogger(__name__)

RENEW_FIRST_S = 1.0
RENEW_EVERY_S = 20
LOOK_EVERY_S = 2  # for masters that are away
TOPICS_LOOKED_MAX = 16
LOCK_TIMEOUT_MS = 1_000
LOG_INTERVAL_S = 10.0  # between lines about one broker
WAITING = "ordered consumers wait"


class QueueLocks:
    def __init__(
        self, instance: Instance, group: str, windows: Callable[[], Collection[Window]]
    ) -> None:
        self._instance = instance
        self._group = group
        self._windows = windows
        self._log_limit = LogLimit(LOG_INTERVAL_S)
        self._waiting: set[str] = set()  # topics with queues whose master is away

    async def take(self, queue: MessageQueue) -> bool:
        """Lock one queue for us; False when another member has it or nobody answers."""
        return queue in await self._lock(queue.broker_name, [queue])

    async def renew_forever(self) -> None:
        await asyncio.sleep(RENEW_FIRST_S)
        while True:
            await self.renew()
            for _ in range(RENEW_EVERY_S // LOOK_EVERY_S):
                await asyncio.sleep(LOOK_EVERY_S)
                await self._look_for_masters()

    async def renew(self) -> None:
        """Ask every broker for all our queues at once."""
        by_broker: dict[str, list[Window]] = {}
        for window in self._windows():
            by_broker.setdefault(window.queue.broker_name, []).append(window)
        now = asyncio.get_running_loop().time()  # before asking: a lock must not seem younger
        held = await asyncio.gather(
            *(
                self._lock(name, [window.queue for window in windows])
                for name, windows in by_broker.items()
            )
        )
        for (name, windows), mine in zip(by_broker.items(), held, strict=True):
            for window in windows:
                if window.queue in mine:
                    window.locked_at = now
                    window.changed()
                elif window.locked_at is not None:
                    log.warning(
                        "queue lock lost: group=%s broker=%s queue=%s",
                        self._group,
                        name,
                        window.queue,
                    )
                    window.locked_at = None

    async def _look_for_masters(self) -> None:
        """A route that changed lets the consumer try its queues again."""
        topics, self._waiting = self._waiting, set()
        for topic in sorted(topics)[:TOPICS_LOOKED_MAX]:
            try:
                route = await self._instance.routes.get(topic, fresh=True)
            except CosmodromeError:
                self._waiting.add(topic)
                continue
            if not all(MASTER_ID in replicas for replicas in route.addresses.values()):
                self._waiting.add(topic)

    async def give_up(self, queues: Iterable[MessageQueue]) -> None:
        by_broker: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            by_broker.setdefault(queue.broker_name, []).append(queue)
        for name, mine in by_broker.items():
            body = UnlockBatchRequestBody(
                client_id=self._instance.client_id, consumer_group=self._group, mq_set=mine
            )
            try:
                address = master_address(self._instance.routes, name, WAITING)
                await self._instance.links.call(
                    address, UnlockBatchMq(body=bodies.encode(body)), LOCK_TIMEOUT_MS
                )
            except CosmodromeError as error:
                # The broker forgets the lock by itself.
                log.warning(
                    "queues not unlocked: group=%s broker=%s reason=%s", self._group, name, error
                )

    async def _lock(self, broker_name: str, queues: list[MessageQueue]) -> set[MessageQueue]:
        body = LockBatchRequestBody(
            client_id=self._instance.client_id, consumer_group=self._group, mq_set=queues
        )
        try:
            if self._instance.routes.address(broker_name) is None:
                self._waiting.update(queue.topic for queue in queues)
            address = master_address(self._instance.routes, broker_name, WAITING)
            reply = await self._instance.links.call(
                address, LockBatchMq(body=bodies.encode(body)), LOCK_TIMEOUT_MS
            )
            return set(bodies.decode(LockBatchResponseBody, reply.body).lock_ok_mq_set)
        except CosmodromeError as error:
            held = self._log_limit.admit(f"queues not locked {broker_name}")
            if held is not None:
                log.warning(
                    "queues not locked: group=%s broker=%s reason=%s held_back=%d",
                    self._group,
                    broker_name,
                    error,
                    held,
                )
            return set()
