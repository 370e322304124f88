"""What operators ask a cluster, as typed calls.

    async with Admin("127.0.0.1:9876") as admin:
        await admin.topics.create("orders", queues=8)
        print(await admin.offsets.lag("billing"))

Each part is one thin layer over the table of commands. A call that concerns several brokers goes to
all of them, and `PartlyFailed` says which of them did not do it. Nothing is cached. An `Admin`
joins no group and sends no heartbeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from cosmodrome.client.instance import Instance, acquire, release
from cosmodrome.client.operate.accounts import Accounts
from cosmodrome.client.operate.fleet import Fleet
from cosmodrome.client.operate.groups import Groups
from cosmodrome.client.operate.messages import Messages
from cosmodrome.client.operate.offsets import GroupOffsets
from cosmodrome.client.operate.topics import Topics
from cosmodrome.client.options import ClientOptions
from cosmodrome.env.base import Env
from cosmodrome.env.lifecycle import AsyncLifecycle
from cosmodrome.env.real import real_env
from cosmodrome.errors import Code, ConfigError, Refused
from cosmodrome.wire import bodies, properties_text
from cosmodrome.wire.bodies import BrokerStatsData, ClusterInfo, ConsumeStatsList, KVTable
from cosmodrome.wire.commands.broker import (
    CleanExpiredConsumequeue,
    DeleteExpiredCommitlog,
    GetBrokerConfig,
    GetBrokerRuntimeInfo,
    UpdateBrokerConfig,
    ViewBrokerStatsData,
)
from cosmodrome.wire.commands.group import GetBrokerConsumeStats
from cosmodrome.wire.commands.kv import (
    DeleteKvConfig,
    GetKvConfig,
    GetKvlistByNamespace,
    GetNamesrvConfig,
    PutKvConfig,
    UpdateNamesrvConfig,
)
from cosmodrome.wire.commands.route import AddWritePermOfBroker, WipeWritePermOfBroker
from cosmodrome.wire.commands.topic import CleanUnusedTopic


class Brokers:
    """Brokers: their settings, figures and housekeeping. A broker is named, or given as
    host:port."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def cluster(self) -> ClusterInfo:
        """All clusters, brokers and addresses."""
        return await self._fleet.cluster()

    async def addresses(self, *, cluster: str | None = None) -> dict[str, str]:
        """The masters: name → address."""
        return await self._fleet.masters(cluster=cluster)

    async def runtime(self, broker: str) -> dict[str, str]:
        """Figures of a running broker."""
        reply = await self._fleet.call(await self._fleet.broker(broker), GetBrokerRuntimeInfo())
        return bodies.decode(KVTable, reply.body).table

    async def config(self, broker: str) -> dict[str, str]:
        reply = await self._fleet.call(await self._fleet.broker(broker), GetBrokerConfig())
        return properties_text.loads(reply.body)

    async def update_config(
        self, settings: Mapping[str, str], *, broker: str | None = None, cluster: str | None = None
    ) -> None:
        """Change settings of one broker, of a cluster, or of all."""
        await self._fleet.each(
            await self._fleet.chosen(cluster=cluster, broker=broker),
            UpdateBrokerConfig(body=properties_text.dumps(settings)),
        )

    async def stats(self, broker: str, name: str, key: str) -> BrokerStatsData:
        """One statistic, for example TOPIC_PUT_NUMS of a topic."""
        reply = await self._fleet.call(
            await self._fleet.broker(broker), ViewBrokerStatsData(stats_name=name, stats_key=key)
        )
        return bodies.decode(BrokerStatsData, reply.body)

    async def consume_stats(self, broker: str, *, ordered: bool = False) -> ConsumeStatsList:
        """Progress of every group of a broker."""
        reply = await self._fleet.call(
            await self._fleet.broker(broker), GetBrokerConsumeStats(is_order=ordered)
        )
        return bodies.decode(ConsumeStatsList, reply.body)

    async def wipe_write_perm(self, broker: str) -> int:
        """Take a broker out of the routes for writing, before it is stopped; how many topics
        that were."""
        replies = await self._fleet.name_servers(WipeWritePermOfBroker(broker_name=broker))
        return max(reply.wipe_topic_count for reply in replies.values())

    async def add_write_perm(self, broker: str) -> int:
        """Put a broker back into the routes for writing."""
        replies = await self._fleet.name_servers(AddWritePermOfBroker(broker_name=broker))
        return max(reply.add_topic_count for reply in replies.values())

    async def clean_queues(self, *, broker: str | None = None, cluster: str | None = None) -> None:
        """Drop queue files whose messages are gone."""
        await self._fleet.each(
            await self._fleet.chosen(cluster=cluster, broker=broker), CleanExpiredConsumequeue()
        )

    async def clean_topics(self, *, broker: str | None = None, cluster: str | None = None) -> None:
        """Drop queues on disk that belong to no known topic."""
        await self._fleet.each(
            await self._fleet.chosen(cluster=cluster, broker=broker), CleanUnusedTopic()
        )

    async def delete_expired(
        self, *, broker: str | None = None, cluster: str | None = None
    ) -> None:
        """Drop expired log files now."""
        await self._fleet.each(
            await self._fleet.chosen(cluster=cluster, broker=broker), DeleteExpiredCommitlog()
        )


class NameServers:
    """What name servers keep for operators. Changes go to every one of them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def config(self) -> dict[str, dict[str, str]]:
        """Settings by address."""
        replies = await self._fleet.name_servers(GetNamesrvConfig())
        return {name: properties_text.loads(reply.body) for name, reply in replies.items()}

    async def update_config(self, settings: Mapping[str, str]) -> None:
        await self._fleet.name_servers(UpdateNamesrvConfig(body=properties_text.dumps(settings)))

    async def put(self, namespace: str, key: str, value: str) -> None:
        await self._fleet.name_servers(PutKvConfig(namespace=namespace, key=key, value=value))

    async def get(self, namespace: str, key: str) -> str | None:
        try:
            return (await self._fleet.ask(GetKvConfig(namespace=namespace, key=key))).value
        except Refused as refusal:
            if refusal.code != Code.QUERY_NOT_FOUND:
                raise
            return None

    async def delete(self, namespace: str, key: str) -> None:
        await self._fleet.name_servers(DeleteKvConfig(namespace=namespace, key=key))

    async def entries(self, namespace: str) -> dict[str, str]:
        """All entries of a namespace; empty when there is no such namespace."""
        try:
            reply = await self._fleet.ask(GetKvlistByNamespace(namespace=namespace))
        except Refused as refusal:
            if refusal.code != Code.QUERY_NOT_FOUND:
                raise
            return {}
        return bodies.decode(KVTable, reply.body).table


class _Parts(NamedTuple):
    topics: Topics
    groups: Groups
    offsets: GroupOffsets
    messages: Messages
    brokers: Brokers
    name_servers: NameServers
    accounts: Accounts


class Admin(AsyncLifecycle):
    """`async with Admin(namesrv) as admin:`, then the calls of its parts."""

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        client: ClientOptions | None = None,
        timeout_ms: int = 5_000,
        env: Env | None = None,
    ) -> None:
        if timeout_ms <= 0:
            raise ConfigError(f"timeout_ms must be positive, not {timeout_ms}")
        self._namesrv = namesrv
        self._options = client or ClientOptions()
        self._timeout_ms = timeout_ms
        self._env = env or real_env()
        self._instance: Instance | None = None
        self._fleet: Fleet | None = None
        self._parts: _Parts | None = None

    async def start(self) -> None:
        if self._instance is None:
            self._instance = await acquire(self._namesrv, self._options, self._env)
            self._fleet = fleet = Fleet(self._instance, self._timeout_ms)
            self._parts = _Parts(
                Topics(fleet),
                Groups(fleet),
                GroupOffsets(fleet),
                Messages(fleet, self._options.namespace),
                Brokers(fleet),
                NameServers(fleet),
                Accounts(fleet),
            )

    async def stop(self) -> None:
        instance, self._instance, self._parts = self._instance, None, None
        self._fleet = None
        if instance is not None:
            await release(instance)

    @property
    def fleet(self) -> Fleet:
        """The servers themselves, for what needs calls of several parts."""
        self._started()
        assert self._fleet is not None
        return self._fleet

    @property
    def topics(self) -> Topics:
        return self._started().topics

    @property
    def groups(self) -> Groups:
        return self._started().groups

    @property
    def offsets(self) -> GroupOffsets:
        return self._started().offsets

    @property
    def messages(self) -> Messages:
        return self._started().messages

    @property
    def brokers(self) -> Brokers:
        return self._started().brokers

    @property
    def name_servers(self) -> NameServers:
        return self._started().name_servers

    @property
    def accounts(self) -> Accounts:
        return self._started().accounts

    def _started(self) -> _Parts:
        if self._parts is None:
            raise ConfigError("this Admin is not started; use `async with Admin(...) as admin:`")
        return self._parts
