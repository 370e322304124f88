"""Consumer and producer groups, for operators: their settings and who is connected."""

from __future__ import annotations

from typing import Any

import msgspec

from cosmodrome.client.operate.fleet import Fleet, PartlyFailed
from cosmodrome.client.values import NoRoute
from cosmodrome.errors import Code, CosmodromeError, Refused, TimedOut, Unreachable
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    Body,
    ConsumerConnection,
    MessageQueue,
    ProducerConnection,
    ProducerInfo,
    ProducerTableInfo,
    SubscriptionData,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
)
from cosmodrome.wire.commands.client import (
    GetAllProducerInfo,
    GetConsumerConnectionList,
    GetConsumerRunningInfo,
    GetProducerConnectionList,
)
from cosmodrome.wire.commands.consume import ConsumeMessageDirectly
from cosmodrome.wire.commands.group import (
    DeleteSubscriptiongroup,
    GetAllSubscriptiongroupConfig,
    UpdateAndCreateSubscriptiongroup,
)
from cosmodrome.wire.commands.route import DeleteTopicInNamesrv
from cosmodrome.wire.commands.topic import DeleteTopicInBroker
from cosmodrome.wire.names import check_group, dlq_topic, retry_topic
from cosmodrome.wire.table import Command, R

RELAY_TIMEOUT_MS = 12_000  # the broker gives the client ten seconds


class RunningInfo(Body, kw_only=True):
    """What a consumer says about itself; the parts of a queue or a topic are as it sent them."""

    object_keys = True

    jstack: str | msgspec.UnsetType = msgspec.UNSET
    mq_table: dict[MessageQueue, dict[str, Any]] = msgspec.field(default_factory=dict)
    properties: dict[str, Any] = msgspec.field(default_factory=dict)
    status_table: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    subscription_set: list[SubscriptionData] = msgspec.field(default_factory=list)


class DirectResult(Body, kw_only=True):
    """How a consumer dealt with one message that it was handed."""

    auto_commit: bool = True
    consume_result: str = ""
    order: bool = False
    remark: str | None = None
    spent_time_mills: int = 0


class Groups:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def create(
        self,
        group: str,
        *,
        cluster: str | None = None,
        broker: str | None = None,
        **settings: Any,
    ) -> None:
        """Make a group, or set what an existing one has. `settings` are fields of
        SubscriptionGroupConfig, such as `retry_max_times` and `consume_enable`."""
        full = self._fleet.full(group)
        check_group(full)
        config = SubscriptionGroupConfig(group_name=full, **settings)
        targets = await self._fleet.chosen(cluster=cluster, broker=broker)
        await self._fleet.each(
            targets, UpdateAndCreateSubscriptiongroup(body=bodies.encode(config))
        )

    async def delete(
        self, group: str, *, cluster: str | None = None, offsets: bool = True, topics: bool = True
    ) -> None:
        """Remove a group; with it how far it has come, its retry topic and its dead letters."""
        full = self._fleet.full(group)
        check_group(full)
        targets = await self._fleet.masters(cluster=cluster)
        await self._fleet.each(
            targets,
            DeleteSubscriptiongroup(group_name=full, remove_offset=offsets, clean_offset=offsets),
        )
        for topic in (retry_topic(full), dlq_topic(full)) if topics else ():
            await self._fleet.each(targets, DeleteTopicInBroker(topic=topic))
            await self._fleet.name_servers(DeleteTopicInNamesrv(topic=topic, cluster_name=cluster))

    async def names(self, *, cluster: str | None = None, partial: bool = False) -> list[str]:
        """Names of all groups that brokers have settings for; with `partial` those of the brokers
        that answer."""
        tables = await self._tables(cluster, partial=partial)
        return sorted({self._fleet.plain(name) for table in tables.values() for name in table})

    async def describe(self, group: str) -> dict[str, SubscriptionGroupConfig]:
        """The group's settings by broker; empty when no broker has it."""
        full = self._fleet.full(group)
        return {
            name: table[full] for name, table in (await self._tables(None)).items() if full in table
        }

    async def configs(
        self, *, cluster: str | None = None, partial: bool = False
    ) -> dict[str, dict[str, SubscriptionGroupConfig]]:
        """Every group's settings: by full name, then by broker."""
        found: dict[str, dict[str, SubscriptionGroupConfig]] = {}
        for broker, table in (await self._tables(cluster, partial=partial)).items():
            for name, config in table.items():
                found.setdefault(name, {})[broker] = config
        return found

    async def _tables(
        self, cluster: str | None, *, partial: bool = False
    ) -> dict[str, dict[str, SubscriptionGroupConfig]]:
        targets = await self._fleet.masters(cluster=cluster)
        replies = await self._each(targets, GetAllSubscriptiongroupConfig(), partial=partial)
        return {
            name: bodies.decode(SubscriptionGroupWrapper, reply.body).subscription_group_table
            for name, reply in replies.items()
        }

    # --- who is connected --------------------------------------------------------------------

    async def connections(
        self, group: str, *, partial: bool = False
    ) -> dict[str, ConsumerConnection]:
        """The members of a group and what they subscribe to, by broker. Refused when no broker
        has a member. With `partial` brokers that do not answer are left out."""
        replies = await self._reachable(
            await self._brokers_of(group),
            GetConsumerConnectionList(consumer_group=self._fleet.full(group)),
            partial=partial,
        )
        return {
            name: bodies.decode(ConsumerConnection, reply.body) for name, reply in replies.items()
        }

    async def members(self, group: str) -> list[str]:
        """Client ids of a group's members."""
        return sorted(
            {
                member.client_id
                for connection in (await self.connections(group)).values()
                for member in connection.connection_set
            }
        )

    async def producer_connections(self, group: str, topic: str) -> dict[str, ProducerConnection]:
        """The members of a producer group, by broker of a topic that they send to."""
        replies = await self._reachable(
            await self._fleet.masters_of(self._fleet.full(topic)),
            GetProducerConnectionList(producer_group=self._fleet.full(group)),
        )
        return {
            name: bodies.decode(ProducerConnection, reply.body) for name, reply in replies.items()
        }

    async def producers(
        self, *, broker: str | None = None, partial: bool = False
    ) -> dict[str, list[ProducerInfo]]:
        """Every connected producer, by group; with `partial` of the brokers that answer."""
        targets = await self._fleet.chosen(cluster=None, broker=broker)
        replies = await self._each(targets, GetAllProducerInfo(), partial=partial)
        found: dict[str, list[ProducerInfo]] = {}
        for reply in replies.values():
            for group, producers in bodies.decode(ProducerTableInfo, reply.body).data.items():
                found.setdefault(self._fleet.plain(group), []).extend(producers)
        return found

    async def running_info(
        self, group: str, client_id: str, *, stacks: bool = False
    ) -> RunningInfo:
        """What one consumer says about itself, through a broker that it is connected to."""
        reply = await self._relayed(
            group,
            GetConsumerRunningInfo(
                consumer_group=self._fleet.full(group), client_id=client_id, jstack_enable=stacks
            ),
        )
        return bodies.decode(RunningInfo, reply.body)

    async def consume_directly(
        self, group: str, client_id: str, offset_msg_id: str, *, broker: str
    ) -> DirectResult:
        """Let one consumer process one message now. The broker is the one that has it."""
        reply = await self._fleet.call(
            await self._fleet.broker(broker),
            ConsumeMessageDirectly(
                consumer_group=self._fleet.full(group),
                client_id=client_id,
                msg_id=offset_msg_id,
                broker_name=broker,
            ),
            RELAY_TIMEOUT_MS,
        )
        return bodies.decode(DirectResult, reply.body)

    # --- ways to brokers -------------------------------------------------------------------------

    async def _brokers_of(self, group: str) -> dict[str, str]:
        """Those that have the group's retry topic; before it has one, all."""
        try:
            return await self._fleet.masters_of(retry_topic(self._fleet.full(group)))
        except NoRoute:
            return await self._fleet.masters()

    async def _each(
        self, targets: dict[str, str], command: Command[R], *, partial: bool
    ) -> dict[str, R]:
        """Answers of all, or with `partial` of some at least."""
        try:
            return await self._fleet.each(targets, command)
        except PartlyFailed as failure:
            if not partial or not failure.results:
                raise
            return failure.results

    async def _reachable(
        self, targets: dict[str, str], command: Command[R], *, partial: bool = False
    ) -> dict[str, R]:
        """Answers of those that have a member; the refusal when none has."""
        try:
            return await self._fleet.each(targets, command)
        except PartlyFailed as failure:
            for error in failure.failures.values():
                if partial and isinstance(error, Unreachable | TimedOut):
                    continue
                if not isinstance(error, Refused) or (
                    error.code not in (Code.CONSUMER_NOT_ONLINE, Code.SYSTEM_ERROR)
                ):
                    raise
            if not failure.results:
                raise next(iter(failure.failures.values())) from None
            return failure.results

    async def _relayed(self, group: str, command: Command[R]) -> R:
        last: CosmodromeError | None = None
        for address in (await self._brokers_of(group)).values():
            try:
                return await self._fleet.call(address, command, RELAY_TIMEOUT_MS)
            except Refused as error:
                last = error  # the client may be connected to another broker
        raise last or NoRoute(f"no broker knows group {group}")
