"""What the three kinds of consumers have in common: a group, a client, and a member that runs."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable

from cosmodrome.client.instance import Instance, acquire
from cosmodrome.client.namespace import unwrap, wrap
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.engine.member import Member
from cosmodrome.client.receive.rebalance import sorted_queues
from cosmodrome.client.values import MessageQueue
from cosmodrome.env.base import Env
from cosmodrome.env.lifecycle import AsyncLifecycle
from cosmodrome.env.real import real_env
from cosmodrome.errors import ConfigError
from cosmodrome.wire.names import check_group

log = logging.getLogger(__name__)

QueueListener = Callable[[str, list[MessageQueue]], Awaitable[None] | None]


class BaseConsumer(AsyncLifecycle):
    """Users say plain names; members, brokers and files have full ones, with the namespace."""

    def __init__(
        self, namesrv: str | None, group: str, client: ClientOptions | None, env: Env | None
    ) -> None:
        self.group = group
        self._namesrv = namesrv
        self._client = client or ClientOptions()
        self._env = env or real_env()
        self._full_group = self._full_topic(group)
        check_group(self._full_group)
        self._running: Member | None = None
        self._starting = asyncio.Lock()  # also while it stops
        self._queue_listeners: dict[str, QueueListener] = {}  # by full topic name

    async def _acquire(self) -> Instance:
        return await acquire(
            self._namesrv, self._client, self._env, consumer_group=self._full_group
        )

    def _live(self) -> Member:
        if self._running is None:
            name = type(self).__name__
            raise ConfigError(
                f"this {name} does not run: it is not started, or closed; use"
                f" `async with {name}(...)`"
            )
        return self._running

    @property
    def assignment(self) -> list[MessageQueue]:
        """The queues this member has now."""
        if self._running is None:
            return []
        return [self._plain(queue) for queue in sorted_queues(self._running.assignment.windows)]

    async def _share_changed(self, topic: str, queues: list[MessageQueue]) -> None:
        """The engine gave this member other queues of a topic than before."""
        listener = self._queue_listeners.get(topic)
        if listener is not None:
            await notify(
                listener,
                unwrap(self._client.namespace, topic),
                [self._plain(queue) for queue in queues],
            )

    def _full_topic(self, topic: str) -> str:
        return wrap(self._client.namespace, topic)

    def _full(self, queue: MessageQueue) -> MessageQueue:
        return _renamed(queue, self._full_topic(queue.topic))

    def _plain(self, queue: MessageQueue) -> MessageQueue:
        return _renamed(queue, unwrap(self._client.namespace, queue.topic))


def _renamed(queue: MessageQueue, topic: str) -> MessageQueue:
    if topic == queue.topic:
        return queue
    return MessageQueue(topic=topic, broker_name=queue.broker_name, queue_id=queue.queue_id)


async def notify(listener: QueueListener, topic: str, queues: list[MessageQueue]) -> None:
    """Call a user's function; its failure is logged and changes nothing."""
    try:
        outcome = listener(topic, queues)
        if inspect.isawaitable(outcome):
            await outcome
    except Exception:
        log.exception("queue listener failed: topic=%s", topic)
