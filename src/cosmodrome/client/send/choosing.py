"""Which queue a message goes to: the caller's choice, its key's, or the next one in turn.

Turns begin at a random queue, so that many producers do not all begin with the first. A second
attempt avoids the broker of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cosmodrome import speed
from cosmodrome.client.namespace import unwrap
from cosmodrome.client.routes import Route
from cosmodrome.client.send.delivery import Delivery
from cosmodrome.client.send.failures import BadMessage
from cosmodrome.client.send.faults import Faults
from cosmodrome.client.send.hooks import SendMode
from cosmodrome.client.values import MessageQueue
from cosmodrome.env.base import Env


class Chooser:
    def __init__(self, env: Env, namespace: str, faults: Faults | None) -> None:
        self._random = env.random
        self._namespace = namespace
        self._faults = faults
        self._turns: dict[str, int] = {}  # by topic, as many as there are routes

    def choose(self, delivery: Delivery, route: Route) -> MessageQueue:
        """One of the route's queues; it has at least one."""
        if delivery.fixed is not None:
            return delivery.fixed
        queues = route.write_queues
        message = delivery.packed.message
        if delivery.selector is not None:
            shown = [self.shown(queue) for queue in queues]
            picked = delivery.selector(shown, message)
            if picked not in shown:
                raise BadMessage(f"the selector chose {picked!r}, which is not one of the queues")
            return queues[shown.index(picked)]
        if message.queue_key is not None:
            # Compat: the same queue as the Java client's selector by hash.
            return queues[abs(speed.java_hash(message.queue_key)) % len(queues)]
        turn = self._turns.get(route.topic)
        if turn is None:
            turn = self._random.getrandbits(16)
        self._turns[route.topic] = turn + 1
        last = delivery.last_broker
        if self._faults is not None:
            return self._available(self._faults, queues, turn, last)
        if last is not None:
            others = [queue for queue in queues if queue.broker_name != last]
            if others:
                return _other(delivery, others, turn)
        return queues[turn % len(queues)]

    def shown(self, queue: MessageQueue) -> MessageQueue:
        """A queue with the topic as the user knows it."""
        if not self._namespace:
            return queue
        topic = unwrap(self._namespace, queue.topic)
        return MessageQueue(topic=topic, broker_name=queue.broker_name, queue_id=queue.queue_id)

    def _available(
        self, faults: Faults, queues: Sequence[MessageQueue], turn: int, last: str | None
    ) -> MessageQueue:
        now = asyncio.get_running_loop().time()
        for step in range(len(queues)):
            queue = queues[(turn + step) % len(queues)]
            if queue.broker_name != last and faults.is_free(queue.broker_name, now):
                return queue
        return faults.least_bad(queues, now)


def _other(delivery: Delivery, others: Sequence[MessageQueue], turn: int) -> MessageQueue:
    """Compat: pipelined sends keep their queue id when they turn to another broker."""
    if delivery.mode is SendMode.ASYNC and delivery.queue is not None:
        number = delivery.queue.queue_id
        others = [queue for queue in others if queue.queue_id == number] or others
    return others[turn % len(others)]
