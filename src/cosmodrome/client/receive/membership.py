"""Membership in a consumer group for those who pull: heartbeats, and who reads which queue.

Shares are computed again when the members change, when a topic's queues change and every 20 s.
The owner is told the share of each topic; it compares, begins and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Protocol

from cosmodrome.client.instance import Instance
from cosmodrome.client.operate.groups import RunningInfo
from cosmodrome.client.receive.progress import broker_address
from cosmodrome.client.receive.rebalance import Strategy, sorted_queues
from cosmodrome.client.receive.subscriptions import Subscription, check
from cosmodrome.client.routes import Route
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.errors import Code, CosmodromeError, Refused, Unreachable
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import ConsumerData, GetConsumerListByGroupResponseBody
from cosmodrome.wire.commands.client import GetConsumerListByGroup
from cosmodrome.wire.commands.consume import ConsumeMessageDirectly

log = logging.getLogger(__name__)

ACTIVELY = "CONSUME_ACTIVELY"


class Owner(Protocol):
    """Who pulls. Topics and queues are the full ones."""

    async def share_changed(self, topic: str, queues: set[MessageQueue]) -> None:
        """Read these queues of the topic and no others. Called also when nothing changed."""

    def move(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """An operator moved the group."""

    def positions(self, topic: str | None) -> dict[MessageQueue, int]:
        """Where it is, in one topic or in all."""


class Membership:
    """A member of the group as the instance sees it (`ConsumerMember`)."""

    def __init__(
        self,
        instance: Instance,
        group: str,
        owner: Owner,
        *,
        strategy: Strategy,
        clustering: bool,
        from_where: str,
        rebalance_every_ms: int,
    ) -> None:
        self.group = group
        self.subscriptions: dict[str, Subscription] = {}
        self._instance = instance
        self._owner = owner
        self._strategy = strategy
        self._clustering = clustering
        self._from_where = from_where
        self._rebalance_every_s = rebalance_every_ms / 1000
        self._wanted = asyncio.Event()
        self._one_at_a_time = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._started_ms = instance.env.clock.now_ms()

    async def subscribe(self, subscription: Subscription) -> None:
        """Member when this returns, with a first share if the topic exists already."""
        with contextlib.suppress(NoRoute):
            await self._instance.routes.get(subscription.topic)
            await check(self._instance, self.group, subscription)
        self.subscriptions[subscription.topic] = subscription
        if self._task is None:
            await self._instance.add_consumer(self)
            self._task = asyncio.get_running_loop().create_task(self._rebalance_forever())
        else:
            await self._instance.heartbeat()
        await self._rebalance(subscription.topic)

    async def unsubscribe(self, topic: str) -> None:
        if self.subscriptions.pop(topic, None) is not None:
            await self._owner.share_changed(topic, set())
            await self._instance.heartbeat()

    async def halt(self) -> None:
        """Shares change no more. Call `leave` when progress is stored: others take over then."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    async def leave(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await self._instance.remove_consumer(self)

    # --- shares ----------------------------------------------------------------------------------

    async def _rebalance_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rebalance_every_s):
                    await self._wanted.wait()
            self._wanted.clear()
            for topic in list(self.subscriptions):
                try:
                    await self._rebalance(topic)
                except Exception:
                    log.exception("rebalance failed: group=%s topic=%s", self.group, topic)

    async def _rebalance(self, topic: str) -> None:
        async with self._one_at_a_time:
            try:
                route = await self._instance.routes.get(topic)
                queues = list(route.read_queues)
                if self._clustering:
                    members = await members_of(self.group, self._instance, route)
                    if self._instance.client_id not in members:
                        await self._instance.heartbeat()
                        return
                    queues = self._strategy.share(self._instance.client_id, members, queues)
            except CosmodromeError as error:
                # What it has it keeps: the others cannot ask either, or they ask later.
                log.warning(
                    "no share computed: group=%s topic=%s reason=%s", self.group, topic, error
                )
                return
            if topic in self.subscriptions:
                await self._owner.share_changed(topic, set(queues))

    # --- what the instance asks ------------------------------------------------------------------

    def heartbeat(self) -> ConsumerData:
        return ConsumerData(
            group_name=self.group,
            consume_type=ACTIVELY,
            message_model="CLUSTERING" if self._clustering else "BROADCASTING",
            consume_from_where=self._from_where,
            subscription_data_set=[wanted.data() for wanted in self.subscriptions.values()],
        )

    def rebalance_soon(self) -> None:
        self._wanted.set()

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        self._owner.move(topic, offsets)

    def offsets(self, topic: str) -> dict[MessageQueue, int]:
        return self._owner.positions(topic)

    def running_info(self, *, stacks: bool) -> bytes:
        positions = self._owner.positions(None)
        return bodies.encode(
            RunningInfo(
                properties={
                    "PROP_CONSUME_TYPE": ACTIVELY,
                    "PROP_NAMESERVER_ADDR": ";".join(self._instance.routes.name_servers),
                    "PROP_CONSUMER_START_TIMESTAMP": str(self._started_ms),
                },
                subscription_set=[wanted.data() for wanted in self.subscriptions.values()],
                mq_table={
                    queue: {"commitOffset": positions[queue], "droped": False}
                    for queue in sorted_queues(positions)
                },
            )
        )

    async def consume_directly(self, ask: ConsumeMessageDirectly) -> bytes:
        raise Refused(
            Code.SYSTEM_ERROR,
            f"Group {self.group} pulls its messages itself; nothing can be handed to it.",
        )


async def members_of(group: str, instance: Instance, route: Route) -> list[str]:
    """The client ids of a group; any broker of the topic knows them."""
    names = list(route.addresses)
    instance.env.random.shuffle(names)
    failure: CosmodromeError | None = None
    for name in names:
        try:
            reply = await instance.links.call(
                broker_address(instance.routes, name), GetConsumerListByGroup(consumer_group=group)
            )
            return bodies.decode(GetConsumerListByGroupResponseBody, reply.body).consumer_id_list
        except CosmodromeError as error:
            failure = error
    raise failure or Unreachable(f"topic {route.topic} has no brokers")
