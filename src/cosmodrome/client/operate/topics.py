"""Topics, for operators: made, changed, deleted, looked at."""

from __future__ import annotations

import msgspec

from cosmodrome.client.operate.fleet import Fleet, queue_order
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.errors import Code, Refused
from cosmodrome.layout import TOPIC_UNIT, TOPIC_UNIT_SUBSCRIPTION
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    PERM_READ,
    PERM_WRITE,
    GroupList,
    TopicConfig,
    TopicConfigSerializeWrapper,
    TopicList,
    TopicOffset,
    TopicRouteData,
    TopicStatsTable,
)
from cosmodrome.wire.commands.kv import DeleteKvConfig, PutKvConfig
from cosmodrome.wire.commands.route import (
    DeleteTopicInNamesrv,
    GetAllTopicListFromNameserver,
    GetTopicsByCluster,
)
from cosmodrome.wire.commands.topic import (
    DeleteTopicInBroker,
    GetAllTopicConfig,
    GetTopicConfig,
    GetTopicStatsInfo,
    QueryTopicConsumeByWho,
    UpdateAndCreateTopic,
)
from cosmodrome.wire.names import AUTO_CREATE_TOPIC, check_topic

ORDER_NAMESPACE = "ORDER_TOPIC_CONFIG"
QUEUES_DEFAULT = 8
UNIT, UNIT_SUBSCRIBED = TOPIC_UNIT, TOPIC_UNIT_SUBSCRIPTION  # bits of a topic's flags


class Topics:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def create(
        self,
        topic: str,
        *,
        queues: int = QUEUES_DEFAULT,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int = PERM_READ | PERM_WRITE,
        order: bool = False,
        flags: int = 0,
        cluster: str | None = None,
        broker: str | None = None,
    ) -> None:
        """Make a topic, or set what an existing one has, on the masters of a cluster, on one
        broker, or on all masters. With `order` the name servers fix its queues, too. `flags` are
        the topic's system flags: 1 for a topic of a unit, 2 for one that units subscribe to."""
        full = self._fleet.full(topic)
        check_topic(full)
        config = TopicConfig(
            topic_name=full,
            perm=perm,
            read_queue_nums=queues if read_queues is None else read_queues,
            write_queue_nums=queues if write_queues is None else write_queues,
            order=order,
            topic_sys_flag=flags,
        )
        targets = await self._fleet.chosen(cluster=cluster, broker=broker)
        await self._fleet.each(targets, _update(config))
        if order:
            await self.set_order(topic, dict.fromkeys(targets, config.write_queue_nums))

    async def update(
        self,
        topic: str,
        *,
        queues: int | None = None,
        read_queues: int | None = None,
        write_queues: int | None = None,
        perm: int | None = None,
        order: bool | None = None,
        broker: str | None = None,
    ) -> None:
        """Change the settings that are not None, on the brokers that have the topic."""
        configs = await self.describe(topic)
        if broker is not None:
            configs = {name: config for name, config in configs.items() if name == broker}
            if not configs:
                raise NoRoute(f"broker {broker} does not have topic {topic}")
        fields = {
            "topic_name": self._fleet.full(topic),
            "perm": perm,
            "read_queue_nums": queues if read_queues is None else read_queues,
            "write_queue_nums": queues if write_queues is None else write_queues,
            "order": order,
        }
        changes = {name: value for name, value in fields.items() if value is not None}
        requests = {
            name: _update(msgspec.structs.replace(config, **changes))
            for name, config in configs.items()
        }
        targets = await self._fleet.masters_of(self._fleet.full(topic))
        await self._fleet.every(targets, requests)

    async def delete(self, topic: str, *, cluster: str | None = None) -> None:
        """Remove a topic and its messages from the masters, then from the name servers."""
        full = self._fleet.full(topic)
        check_topic(full)
        await self._fleet.each(
            await self._fleet.masters(cluster=cluster), DeleteTopicInBroker(topic=full)
        )
        await self._fleet.name_servers(DeleteTopicInNamesrv(topic=full, cluster_name=cluster))

    async def names(self, *, cluster: str | None = None) -> list[str]:
        """Names of all topics, or of those of one cluster."""
        reply = await self._fleet.ask(
            GetAllTopicListFromNameserver()
            if cluster is None
            else GetTopicsByCluster(cluster=cluster)
        )
        names = bodies.decode(TopicList, reply.body).topic_list
        return sorted(self._fleet.plain(name) for name in names)

    async def configs(
        self, *, cluster: str | None = None, broker: str | None = None
    ) -> dict[str, dict[str, TopicConfig]]:
        """Every topic as each broker holds it: broker → name → settings."""
        replies = await self._fleet.each(
            await self._fleet.chosen(cluster=cluster, broker=broker), GetAllTopicConfig()
        )
        found: dict[str, dict[str, TopicConfig]] = {}
        for name, reply in replies.items():
            table = bodies.decode(TopicConfigSerializeWrapper, reply.body).topic_config_table
            found[name] = {self._fleet.plain(topic): config for topic, config in table.items()}
        return found

    async def describe(self, topic: str) -> dict[str, TopicConfig]:
        """The topic as each of its brokers holds it."""
        full = self._fleet.full(topic)
        found = {}
        for name, address in (await self._fleet.masters_of(full)).items():
            config = await self.config_at(address, full)
            if config is not None:
                config.topic_name = topic
                found[name] = config
        return found

    async def config_at(self, address: str, full: str) -> TopicConfig | None:
        """The topic (its full name) as one broker holds it; None when it does not."""
        try:
            reply = await self._fleet.call(address, GetTopicConfig(topic=full))
            return bodies.decode(TopicConfig, reply.body)
        except Refused as refusal:
            if refusal.code == Code.TOPIC_NOT_EXIST:
                return None
            if refusal.code != Code.REQUEST_CODE_NOT_SUPPORTED:
                raise
        # Compat: brokers before 4.9.4 give only the whole table.
        reply = await self._fleet.call(address, GetAllTopicConfig())
        table = bodies.decode(TopicConfigSerializeWrapper, reply.body).topic_config_table
        return table.get(full)

    async def route(self, topic: str) -> TopicRouteData:
        """Where producers and consumers are sent."""
        return await self._fleet.route(self._fleet.full(topic))

    async def status(self, topic: str) -> dict[MessageQueue, TopicOffset]:
        """Bounds and last store time of every queue."""
        full = self._fleet.full(topic)
        replies = await self._fleet.each(
            await self._fleet.masters_of(full), GetTopicStatsInfo(topic=full)
        )
        merged: dict[MessageQueue, TopicOffset] = {}
        for reply in replies.values():
            merged.update(bodies.decode(TopicStatsTable, reply.body).offset_table)
        return {
            self._fleet.plain_queue(queue): merged[queue]
            for queue in sorted(merged, key=queue_order)
        }

    async def consumers(self, topic: str) -> list[str]:
        """Groups that consume a topic."""
        full = self._fleet.full(topic)
        replies = await self._fleet.each(
            await self._fleet.masters_of(full), QueryTopicConsumeByWho(topic=full)
        )
        names = {
            name
            for reply in replies.values()
            for name in bodies.decode(GroupList, reply.body).group_list
        }
        return sorted(self._fleet.plain(name) for name in names)

    async def set_order(self, topic: str, queues: dict[str, int] | None) -> None:
        """Fix the queues of an ordered topic, by broker name; None removes that."""
        full = self._fleet.full(topic)
        if queues is None:
            await self._fleet.name_servers(DeleteKvConfig(namespace=ORDER_NAMESPACE, key=full))
            return
        text = ";".join(f"{name}:{count}" for name, count in queues.items())
        await self._fleet.name_servers(PutKvConfig(namespace=ORDER_NAMESPACE, key=full, value=text))


def _update(config: TopicConfig) -> UpdateAndCreateTopic:
    return UpdateAndCreateTopic(
        topic=config.topic_name,
        default_topic=AUTO_CREATE_TOPIC,
        read_queue_nums=config.read_queue_nums,
        write_queue_nums=config.write_queue_nums,
        perm=config.perm,
        topic_filter_type=config.topic_filter_type,
        topic_sys_flag=config.topic_sys_flag,
        order=config.order,
    )
