"""Everything about a consumer group that tells why it is idle or slow, asked once.

`gather` asks name servers, brokers and, through the brokers, the members; twice where only a
change tells something. Who does not answer is noted and everything else is still asked. Nothing is
judged here: `explain.py` does that, from this one struct.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
from collections.abc import Sequence

from cosmodrome.client.operate.diagnosis import probes
from cosmodrome.client.operate.diagnosis.probes import FilterFacts, PullRefusal, RetryFacts
from cosmodrome.client.operate.fleet import Fleet, attempt
from cosmodrome.client.operate.groups import RELAY_TIMEOUT_MS, RunningInfo
from cosmodrome.client.operate.standing import GroupStanding, full_standing
from cosmodrome.client.operate.topics import Topics
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.env.base import Clock
from cosmodrome.errors import ConfigError, CosmodromeError, Refused
from cosmodrome.wire import bodies, properties_text
from cosmodrome.wire.bodies import (
    MASTER_ID,
    ConsumerConnection,
    SubscriptionData,
    SubscriptionGroupConfig,
    SubscriptionGroupWrapper,
    TopicConfig,
)
from cosmodrome.wire.commands.broker import GetBrokerConfig
from cosmodrome.wire.commands.client import GetConsumerConnectionList, GetConsumerRunningInfo
from cosmodrome.wire.commands.group import GetAllSubscriptiongroupConfig
from cosmodrome.wire.commands.route import GetAllTopicListFromNameserver
from cosmodrome.wire.names import RETRY_PREFIX


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """How long and how much to look."""

    sample_ms: int = 1_500  # between the two looks
    broker_timeout_ms: int = 2_000
    stuck_after_ms: int = 30_000  # without progress in a queue that has messages at its member
    members_asked_max: int = 20
    filtered_messages: int = 1_000  # per queue, the newest
    queues_probed_max: int = 16


@dataclasses.dataclass(slots=True)
class BrokerFacts:
    name: str
    cluster: str
    address: str  # as it advertises itself
    broker_id: int = MASTER_ID  # of the master, or of the slave that is asked while it is away
    reachable: bool = False
    why: str = ""
    permission: int | None = None
    loopback: bool = False


@dataclasses.dataclass(slots=True)
class MemberFacts:
    client_id: str
    address: str
    language: str
    brokers: set[str] = dataclasses.field(default_factory=set)
    looks: list[RunningInfo] = dataclasses.field(default_factory=list)
    why: str = ""  # it was asked and did not answer

    @property
    def last(self) -> RunningInfo | None:
        return self.looks[-1] if self.looks else None


@dataclasses.dataclass(slots=True)
class GroupFacts:
    """Names of groups and topics are the full ones, as brokers know them."""

    group: str
    topic: str | None  # the one that was asked about
    now_ms: int
    limits: Limits
    name_servers: Sequence[str]
    brokers: dict[str, BrokerFacts] = dataclasses.field(default_factory=dict)
    configs: dict[str, SubscriptionGroupConfig] = dataclasses.field(default_factory=dict)
    group_names: set[str] = dataclasses.field(default_factory=set)
    topic_names: set[str] = dataclasses.field(default_factory=set)
    topics: dict[str, dict[str, TopicConfig]] = dataclasses.field(default_factory=dict)
    routed: set[str] = dataclasses.field(default_factory=set)  # topics that have a route
    connections: dict[str, ConsumerConnection] = dataclasses.field(default_factory=dict)
    disagreement: str = ""  # what a broker says about differing subscriptions
    members: dict[str, MemberFacts] = dataclasses.field(default_factory=dict)
    before: GroupStanding | None = None
    after: GroupStanding | None = None
    apart_ms: int = 0  # between these two
    filters: list[FilterFacts] = dataclasses.field(default_factory=list)
    foreign_locks: set[MessageQueue] = dataclasses.field(default_factory=set)
    # When the oldest message was stored that a member holds, where nothing moved between the looks.
    held_since_ms: dict[MessageQueue, int] = dataclasses.field(default_factory=dict)
    refusals: list[PullRefusal] = dataclasses.field(default_factory=list)
    retries: RetryFacts = dataclasses.field(default_factory=RetryFacts)
    # Members of groups of the same name in other namespaces.
    elsewhere: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def subscriptions(self) -> dict[str, SubscriptionData]:
        """What the group wants, by topic, as brokers keep it."""
        table: dict[str, SubscriptionData] = {}
        for connection in self.connections.values():
            table.update(connection.subscription_table)
        return table

    @property
    def looked_at(self) -> list[str]:
        """The topics that this is about, the retry topic aside."""
        return sorted(name for name in self.topics if not name.startswith(RETRY_PREFIX))

    @property
    def ordered(self) -> bool:
        return any(
            str(member.last.properties.get("PROP_CONSUMEORDERLY", "")).lower() == "true"
            for member in self.members.values()
            if member.last is not None
        )

    @property
    def all_reported(self) -> bool:
        """Whether every member was asked and has answered."""
        return bool(self.members) and all(member.looks for member in self.members.values())

    @property
    def claimed_queues(self) -> set[MessageQueue]:
        """Queues that some member says it has locked."""
        return {
            queue
            for member in self.members.values()
            if member.last is not None
            for queue, info in member.last.mq_table.items()
            if info.get("locked")
        }

    @property
    def broadcasting(self) -> bool:
        return any(one.message_model == "BROADCASTING" for one in self.connections.values())


async def gather(
    fleet: Fleet,
    group: str,
    topic: str | None = None,
    *,
    clock: Clock,
    limits: Limits | None = None,
) -> GroupFacts:
    """Takes a little longer than `limits.sample_ms`."""
    facts = GroupFacts(
        group=fleet.full(group),
        topic=None if topic is None else fleet.full(topic),
        now_ms=clock.now_ms(),
        limits=limits or Limits(),
        name_servers=fleet.name_server_addresses,
    )
    await _find_brokers(fleet, facts)
    await asyncio.gather(*(_ask_broker(fleet, facts, one) for one in _reachable(facts)))
    await _find_topics(fleet, facts)
    if _reachable(facts):
        await _look_twice(fleet, facts)
        await probes.run(fleet, facts)
        if facts.foreign_locks:
            # A member may have taken one meanwhile; then it is no outsider's.
            await _ask_members(fleet, facts)
            facts.foreign_locks -= facts.claimed_queues
    return facts


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


# --- brokers ---------------------------------------------------------------------------------


async def _find_brokers(fleet: Fleet, facts: GroupFacts) -> None:
    info = await fleet.cluster()
    for name, data in sorted(info.broker_addr_table.items()):
        if data.broker_addrs:
            broker_id = min(data.broker_addrs)
            address = data.broker_addrs[broker_id]
            host = address.rpartition(":")[0]
            facts.brokers[name] = BrokerFacts(
                name, data.cluster, address, broker_id, loopback=is_loopback(host)
            )
    names = await attempt(fleet.ask(GetAllTopicListFromNameserver()))
    if not isinstance(names, CosmodromeError):
        facts.topic_names.update(bodies.decode(bodies.TopicList, names.body).topic_list)
    await asyncio.gather(*(_knock(fleet, facts, one) for one in facts.brokers.values()))


async def _knock(fleet: Fleet, facts: GroupFacts, broker: BrokerFacts) -> None:
    try:
        call = fleet.call(broker.address, GetBrokerConfig(), facts.limits.broker_timeout_ms)
        settings = properties_text.loads((await call).body)
        broker.permission = int(settings.get("brokerPermission", "6"))
        broker.reachable = True
    except Refused:
        broker.reachable = True  # it may not tell its settings to everybody
    except (CosmodromeError, ValueError) as error:
        broker.why = str(error)


def _reachable(facts: GroupFacts) -> list[BrokerFacts]:
    return [broker for broker in facts.brokers.values() if broker.reachable]


async def _ask_broker(fleet: Fleet, facts: GroupFacts, broker: BrokerFacts) -> None:
    """The group's settings and members at one broker."""
    reply = await attempt(fleet.call(broker.address, GetAllSubscriptiongroupConfig()))
    if _silent(broker, reply):
        return
    if not isinstance(reply, CosmodromeError):
        table = bodies.decode(SubscriptionGroupWrapper, reply.body).subscription_group_table
        facts.group_names.update(table)
        if facts.group in table:
            facts.configs[broker.name] = table[facts.group]
        for name in _namesakes(facts.group, table):
            count = await _count_members(fleet, broker.address, name)
            facts.elsewhere[name] = max(count, facts.elsewhere.get(name, 0))
    listed = await attempt(
        fleet.call(broker.address, GetConsumerConnectionList(consumer_group=facts.group))
    )
    if _silent(broker, listed) or isinstance(listed, CosmodromeError):
        return  # not known, or nobody is connected to this one
    connection = bodies.decode(ConsumerConnection, listed.body)
    facts.connections[broker.name] = connection
    if listed.remark and "subscribe differently" in listed.remark:
        facts.disagreement = listed.remark
    for one in connection.connection_set:
        member = facts.members.setdefault(
            one.client_id, MemberFacts(one.client_id, one.client_addr, one.language)
        )
        member.brokers.add(broker.name)


def _silent(broker: BrokerFacts, answer: object) -> bool:
    """A broker that stops answering is noted: silence must not look like "none"."""
    if isinstance(answer, CosmodromeError) and not isinstance(answer, Refused):
        broker.reachable, broker.why = False, str(answer)
        return True
    return False


def _namesakes(group: str, known: dict[str, SubscriptionGroupConfig]) -> list[str]:
    """The same name in another namespace, or without one."""
    plain = group.rpartition("%")[2]
    return [name for name in known if name != group and name.rpartition("%")[2] == plain][:10]


async def _count_members(fleet: Fleet, address: str, group: str) -> int:
    reply = await attempt(fleet.call(address, GetConsumerConnectionList(consumer_group=group)))
    if isinstance(reply, CosmodromeError):
        return 0
    return len(bodies.decode(ConsumerConnection, reply.body).connection_set)


# --- topics and progress -----------------------------------------------------------------------


async def _find_topics(fleet: Fleet, facts: GroupFacts) -> None:
    """The topic that was named, or what the group subscribes to or has consumed."""
    if facts.topic is not None:
        names = {facts.topic}
    else:
        names = set(facts.subscriptions)
        if _reachable(facts):
            known = await attempt(full_standing(fleet, facts.group, None))
            if not isinstance(known, CosmodromeError):
                names.update(known.topics)
    for name in sorted(names):
        facts.topics[name] = {}
        try:
            route = await fleet.route(name)
        except (NoRoute, Refused):
            continue
        facts.routed.add(name)
        for data in route.broker_datas:
            broker = facts.brokers.get(data.broker_name)
            if broker is None or not broker.reachable:
                continue
            config = await attempt(Topics(fleet).config_at(broker.address, name))
            if isinstance(config, TopicConfig):
                facts.topics[name][broker.name] = config


async def _look_twice(fleet: Fleet, facts: GroupFacts) -> None:
    time = asyncio.get_running_loop().time
    facts.before = await _standing(fleet, facts)
    began = time()
    await _ask_members(fleet, facts)
    left_s = facts.limits.sample_ms / 1000 - (time() - began)
    if facts.members or facts.configs:
        await asyncio.sleep(max(0.0, left_s))
        await _ask_members(fleet, facts)
        facts.after = await _standing(fleet, facts)
    facts.apart_ms = int((time() - began) * 1000)


async def _standing(fleet: Fleet, facts: GroupFacts) -> GroupStanding | None:
    try:
        return await full_standing(fleet, facts.group, facts.topic)
    except (NoRoute, ConfigError):
        return None


async def _ask_members(fleet: Fleet, facts: GroupFacts) -> None:
    asked = sorted(facts.members)[: facts.limits.members_asked_max]
    await asyncio.gather(*(_ask_member(fleet, facts, facts.members[name]) for name in asked))


async def _ask_member(fleet: Fleet, facts: GroupFacts, member: MemberFacts) -> None:
    if member.why:
        return  # once is enough: it costs ten seconds
    broker = facts.brokers[min(member.brokers)]
    ask = GetConsumerRunningInfo(
        consumer_group=facts.group, client_id=member.client_id, jstack_enable=True
    )
    reply = await attempt(fleet.call(broker.address, ask, RELAY_TIMEOUT_MS))
    if isinstance(reply, CosmodromeError):
        member.why = str(reply)
    else:
        try:
            member.looks.append(bodies.decode(RunningInfo, reply.body))
        except CosmodromeError as error:
            member.why = f"its report cannot be read: {error}"
