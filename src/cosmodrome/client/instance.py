"""One client of the cluster: an id, connections, routes, heartbeats, and what brokers ask of it.

Producers and consumers of one event loop with equal options share an instance, so a program
has one connection per broker however many of them it makes. An instance starts with its
first member and stops with its last. A group has at most one consumer per instance, because the
members of a group are told apart by client id; a second one gets an instance of its own.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Mapping
from typing import Protocol

from cosmodrome.client.identity import ClientId, MessageIds
from cosmodrome.client.links import Links
from cosmodrome.client.options import DEFAULT_INSTANCE, ClientOptions, name_servers
from cosmodrome.client.routes import Routes
from cosmodrome.client.values import MessageQueue
from cosmodrome.env.base import Env
from cosmodrome.errors import Code, ConfigError, CosmodromeError, Refused
from cosmodrome.transport.router import Router
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import MASTER_ID, ConsumerData, HeartbeatData, ProducerData
from cosmodrome.wire.commands.client import (
    GetConsumerRunningInfo,
    HeartBeat,
    NotifyConsumerIdsChanged,
    UnregisterClient,
)
from cosmodrome.wire.commands.consume import ConsumeMessageDirectly
from cosmodrome.wire.commands.offset import GetConsumerStatusFromClient, ResetConsumerClientOffset
from cosmodrome.wire.commands.produce import PushReplyMessageToClient
from cosmodrome.wire.commands.transaction import CheckTransactionState
from cosmodrome.wire.message import CORRELATION_ID, PRODUCER_GROUP, join_address, parse_properties
from cosmodrome.wire.record import record_properties
from cosmodrome.wire.report_bodies import GetConsumerStatusBody, ResetOffsetBody
from cosmodrome.wire.table import CLIENT, Call, Reply

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 3.0


class ProducerMember(Protocol):
    """A producer as its instance sees it; the group name is the full one."""

    @property
    def group(self) -> str: ...

    def check_transaction(self, ask: CheckTransactionState, address: str) -> None:
        """A broker asks about a half message; the answer goes to `address`, one-way, later."""


class ConsumerMember(Protocol):
    """A consumer as its instance sees it; group and topic names are the full ones."""

    @property
    def group(self) -> str: ...

    def heartbeat(self) -> ConsumerData: ...

    def rebalance_soon(self) -> None:
        """The members of the group changed."""

    def reset_offsets(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Go on from these offsets."""

    def offsets(self, topic: str) -> dict[MessageQueue, int]:
        """How far it has come, for operators."""

    def running_info(self, *, stacks: bool) -> bytes:
        """The JSON of a ConsumerRunningInfo."""

    def consume_directly(self, ask: ConsumeMessageDirectly) -> Awaitable[bytes]:
        """Process one record now; the JSON of a ConsumeMessageDirectlyResult."""


class Instance:
    """Made by `acquire`, given back with `release`."""

    def __init__(
        self, servers: tuple[tuple[str, int], ...], options: ClientOptions, env: Env
    ) -> None:
        self.options = options
        self.env = env
        self._id = ClientId(options)
        self.client_id = self._id.text
        self.message_ids = MessageIds(env, self.client_id.partition("@")[0])
        # Answers that request-reply producers wait for, by correlation id.
        self.replies: dict[str, asyncio.Future[PushReplyMessageToClient]] = {}
        self.links = Links(options, Router(CLIENT, (_Pushed(self),), partial=True))
        self.routes = Routes(servers, self.links, options)
        self.routes.changed.subscribe(self._route_changed)
        self.producers: dict[str, list[ProducerMember]] = {}
        self.consumers: dict[str, ConsumerMember] = {}
        self._claimed: set[str] = set()  # groups that have, or will have, a consumer here
        self._users = 0
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._heartbeat_due = asyncio.Event()
        self._beaten: set[str] = set()  # addresses that know this client
        self._beaten_over: dict[str, object] = {}  # and the connections over which they know it

    # --- members -------------------------------------------------------------------------------

    def add_producer(self, producer: ProducerMember) -> None:
        self.producers.setdefault(producer.group, []).append(producer)
        self._heartbeat_due.set()

    async def remove_producer(self, producer: ProducerMember) -> None:
        members = self.producers.get(producer.group, [])
        if producer in members:
            members.remove(producer)
            if not members:
                del self.producers[producer.group]
                await self._unregister(producer_group=producer.group)

    async def add_consumer(self, consumer: ConsumerMember) -> None:
        """Brokers know the consumer when this returns, as far as they can be reached."""
        if self.consumers.setdefault(consumer.group, consumer) is not consumer:
            raise ConfigError(
                f"this client already has a consumer of group {consumer.group};"
                " give each its own instance_name"
            )
        await self.heartbeat()

    async def remove_consumer(self, consumer: ConsumerMember) -> None:
        if self.consumers.get(consumer.group) is consumer:
            del self.consumers[consumer.group]
            await self._unregister(consumer_group=consumer.group)

    async def _unregister(
        self, *, producer_group: str | None = None, consumer_group: str | None = None
    ) -> None:
        """Tell every broker; one that does not hear it notices when the connection closes."""
        command = UnregisterClient(
            client_id=self.client_id, producer_group=producer_group, consumer_group=consumer_group
        )
        calls = [self.links.call(address, command, 1000) for address in self._beaten]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, CosmodromeError):
                log.debug("not unregistered: %s", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome

    # --- heartbeats ------------------------------------------------------------------------------

    async def heartbeat(self) -> None:
        """Tell every known broker about all members. Slaves matter to consumers only."""
        if not self.producers and not self.consumers:
            return
        data = HeartbeatData(
            client_id=self.client_id,
            consumer_data_set=[consumer.heartbeat() for consumer in self.consumers.values()],
            producer_data_set=[ProducerData(group_name=group) for group in self.producers],
        )
        command = HeartBeat(body=bodies.encode(data))
        addresses = [
            address
            for replicas in self.routes.brokers().values()
            for number, address in replicas.items()
            if number == MASTER_ID or self.consumers
        ]
        outcomes = await asyncio.gather(
            *(self.links.call(address, command) for address in addresses), return_exceptions=True
        )
        for address, outcome in zip(addresses, outcomes, strict=True):
            if isinstance(outcome, CosmodromeError):
                self._beaten.discard(address)
                log.warning("heartbeat failed: broker=%s reason=%s", address, outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                self._beaten.add(address)
                self._beaten_over[address] = self.links.channel(address).live

    def heartbeat_soon(self) -> None:
        """A broker turned out not to know us: it was restarted, or the connection broke."""
        self._heartbeat_due.set()

    async def be_known(self) -> None:
        """Return when every broker that can be reached knows the members: what it pushes, such
        as replies, then finds this client."""
        for replicas in self.routes.brokers().values():
            address = replicas.get(MASTER_ID)
            # The broker forgot what it heard over a connection that closed.
            if address is not None and (
                (live := self.links.channel(address).live) is None
                or self._beaten_over.get(address) is not live
            ):
                await self.heartbeat()
                return

    def _route_changed(self, topic: str) -> None:
        # A broker that is new to us must know our groups before it can push anything.
        self._heartbeat_due.set()
        for consumer in self.consumers.values():
            consumer.rebalance_soon()

    async def _beat_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self.options.heartbeat_ms / 1000):
                    await self._heartbeat_due.wait()
            except TimeoutError:
                pass
            self._heartbeat_due.clear()
            try:
                await self.links.drop_others(self._needed_addresses())
                await self.heartbeat()
            except Exception:  # a hook of the user's, for one; without heartbeats all would end
                log.exception("heartbeat failed: client=%s", self.client_id)

    def _needed_addresses(self) -> set[str]:
        needed = set(self.routes.name_servers)
        for replicas in self.routes.brokers().values():
            needed.update(replicas.values())
        return needed

    # --- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        if self._heartbeat_task is None:
            await self.routes.start()
            self._heartbeat_task = asyncio.get_running_loop().create_task(self._beat_forever())

    async def stop(self) -> None:
        task, self._heartbeat_task = self._heartbeat_task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        await self.routes.stop()
        await self.links.close()
        self._id.give_back()


_Key = tuple[tuple[tuple[str, int], ...], ClientOptions]
_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, list[Instance]]] = (
    weakref.WeakKeyDictionary()
)


async def acquire(
    namesrv: str | None, options: ClientOptions, env: Env, *, consumer_group: str | None = None
) -> Instance:
    """A started instance of the running loop; one without a consumer of `consumer_group`."""
    servers = name_servers(namesrv)
    instances = _shared.setdefault(asyncio.get_running_loop(), {}).setdefault(
        (servers, options), []
    )
    for instance in instances:
        if consumer_group is None or consumer_group not in instance._claimed:
            break
    else:
        if instances and options.instance_name != DEFAULT_INSTANCE:
            raise ConfigError(
                f"instance {options.instance_name} already has a consumer of group"
                f" {consumer_group}; give each its own instance_name"
            )
        instance = Instance(servers, options, env)
        instances.append(instance)
    instance._users += 1
    if consumer_group is not None:
        instance._claimed.add(consumer_group)
    await instance.start()
    return instance


async def release(instance: Instance, *, consumer_group: str | None = None) -> None:
    """Give an instance back, with what it was acquired for; the last one to do so stops it."""
    instance._users -= 1
    if consumer_group is not None:
        instance._claimed.discard(consumer_group)
    if instance._users:
        return
    per_loop = _shared.get(asyncio.get_running_loop(), {})
    for key, instances in list(per_loop.items()):
        if instance in instances:
            instances.remove(instance)
            if not instances:
                del per_loop[key]
    await instance.stop()


class _Pushed:
    """Serves what brokers ask a client."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def _consumer(self, group: str) -> ConsumerMember:
        consumer = self._instance.consumers.get(group)
        if consumer is None:
            raise Refused(
                Code.SYSTEM_ERROR, f"The client {self._instance.client_id} has no group {group}."
            )
        return consumer

    @NotifyConsumerIdsChanged.handler
    def members_changed(self, ask: NotifyConsumerIdsChanged, call: Call) -> Reply:
        consumer = self._instance.consumers.get(ask.consumer_group)
        if consumer is not None:
            consumer.rebalance_soon()
        return Reply()

    @ResetConsumerClientOffset.handler
    def reset_offsets(self, ask: ResetConsumerClientOffset, call: Call) -> Reply:
        table = bodies.decode(ResetOffsetBody, ask.body).offset_table
        self._consumer(ask.group).reset_offsets(ask.topic, table)
        return Reply()

    @GetConsumerStatusFromClient.handler
    def status(self, ask: GetConsumerStatusFromClient, call: Call) -> Reply:
        table = self._consumer(ask.group).offsets(ask.topic)
        return Reply(body=bodies.encode(GetConsumerStatusBody(message_queue_table=table)))

    @GetConsumerRunningInfo.handler
    def running_info(self, ask: GetConsumerRunningInfo, call: Call) -> Reply:
        consumer = self._consumer(ask.consumer_group)
        return Reply(body=consumer.running_info(stacks=bool(ask.jstack_enable)))

    @ConsumeMessageDirectly.handler
    async def consume_directly(self, ask: ConsumeMessageDirectly, call: Call) -> Reply:
        return Reply(body=await self._consumer(ask.consumer_group).consume_directly(ask))

    @CheckTransactionState.handler
    def check_transaction(self, ask: CheckTransactionState, call: Call) -> Reply:
        host, port = call.connection.peer
        address = join_address(host, port)
        # Any producer of the group may be asked; the group is in the message.
        group = record_properties(ask.body).get(PRODUCER_GROUP, "")
        members = self._instance.producers.get(group, ())
        if not members:
            log.warning("transaction check for a group without producer: group=%s", group)
        for producer in members[:1]:
            producer.check_transaction(ask, address)
        return Reply()

    @PushReplyMessageToClient.handler
    def reply_arrived(self, ask: PushReplyMessageToClient, call: Call) -> Reply:
        correlation = parse_properties(ask.properties or "").get(CORRELATION_ID, "")
        future = self._instance.replies.get(correlation)
        if future is not None and not future.done():
            future.set_result(ask)
        else:
            log.warning("a reply came too late or to nobody: correlation=%s", correlation)
        return Reply()
