"""Who is connected: producers and consumers by group, as their heartbeats say.

A membership belongs to a connection: it ends when the client unregisters, when the connection
closes, or when no heartbeat came for two minutes. A client id says nothing about who
its client is: with access control it belongs to the account that had it first, as long as that
one is connected. Whenever the members or the subscribed topics
of a consumer group change, all its members are told, once per turn of the loop however many
changes that turn brought.

All members of a group share one set of subscriptions: the newest heartbeat decides about the
topics, the newest `subVersion` about the expression of each. Members that disagree therefore
take messages from each other; that is upstream's behaviour, and it is logged once per group.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from cosmodrome.broker.members.expression_types import expression_of, is_tag_type, not_enabled
from cosmodrome.broker.members.groups import Groups
from cosmodrome.broker.members.topics import PERM_READ_WRITE, Topics
from cosmodrome.env.background import Background
from cosmodrome.env.base import Clock
from cosmodrome.env.options import BrokerOptions
from cosmodrome.env.signal import Signal
from cosmodrome.errors import Code, Refused
from cosmodrome.layout import TOPIC_UNIT_SUBSCRIPTION
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    CheckClientRequestBody,
    ConsumerConnection,
    ConsumerData,
    GetConsumerListByGroupResponseBody,
    HeartbeatData,
    ProducerConnection,
    ProducerInfo,
    ProducerTableInfo,
    SubscriptionData,
)
from cosmodrome.wire.commands.client import (
    CheckClientConfig,
    GetAllProducerInfo,
    GetConsumerConnectionList,
    GetConsumerListByGroup,
    GetProducerConnectionList,
    HeartBeat,
    HeartBeatReply,
    NotifyConsumerIdsChanged,
    UnregisterClient,
)
from cosmodrome.wire.frame import LANGUAGES
from cosmodrome.wire.message import join_address
from cosmodrome.wire.names import check_group, retry_topic
from cosmodrome.wire.table import Call, Connection, Reply

log = logging.getLogger(__name__)

EXPIRY_SECONDS = 120.0
SCAN_SECONDS = 10.0
GROUPS_PER_CONNECTION_MAX = 1000
SUBSCRIPTIONS_MAX = 4096
SMALL_BYTES = 32 * 1024  # a heartbeat of that size is read and taken over at once
CLIENT_ID_CHARACTERS_MAX = 1024
CONSUMER = "consumer"
PRODUCER = "producer"


class Member:
    """One client of one group."""

    __slots__ = (
        "access_key",
        "client_id",
        "connection",
        "language",
        "seen_at",
        "seen_ms",
        "subscriptions",
        "version",
    )

    def __init__(self, client_id: str, connection: Connection) -> None:
        self.client_id = client_id
        self.connection = connection
        self.access_key = ""  # of the account that its last heartbeat got in with
        self.language = 0
        self.version = 0
        self.seen_at = 0.0  # the loop's clock, for expiry
        self.seen_ms = 0  # wall time, for reports
        # Its own pairs of topic and expression.
        self.subscriptions: frozenset[tuple[str, str]] = frozenset()

    @property
    def address(self) -> str:
        return join_address(*self.connection.peer)

    @property
    def host(self) -> str:
        return self.connection.peer[0]


class ConsumerGroup:
    """What the last heartbeats of its members say."""

    __slots__ = (
        "consume_from_where",
        "consume_type",
        "members",
        "message_model",
        "name",
        "subscriptions",
        "warned",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.consume_type = ""
        self.message_model = ""
        self.consume_from_where = ""
        self.subscriptions: dict[str, SubscriptionData] = {}
        self.members: dict[Connection, Member] = {}
        self.warned = False


@dataclasses.dataclass(frozen=True, slots=True)
class HeartbeatSubscriptions:
    """The subscriptions of a group as one heartbeat has them."""

    group: str
    subscriptions: Sequence[SubscriptionData]


class Clients:
    """`changes` fires with the name of a consumer group whose members or topics changed, in the
    next turn of the loop. `heard` fires at once, with every heartbeat of a consumer. `left`
    fires at once, too, with the name of a group whose last member is gone. `account_of` is the
    gate's."""

    def __init__(
        self,
        options: BrokerOptions,
        topics: Topics,
        groups: Groups,
        clock: Clock,
        account_of: Callable[[Call], str] = lambda call: "",
    ) -> None:
        self._options = options
        self._filter_enabled = options.enable_property_filter
        self._topics = topics
        self._groups = groups
        self._clock = clock
        self._account_of = account_of
        self._consumers: dict[str, ConsumerGroup] = {}
        self._producers: dict[str, dict[Connection, Member]] = {}
        self._producer_ids: dict[str, Member] = {}  # who gets what is for a client id
        self._joined: dict[Connection, set[tuple[str, str]]] = {}  # -> (kind, group)
        self._unannounced: set[str] = set()
        self._scanner = Background("expire clients")
        self.changes: Signal[str] = Signal()
        self.heard: Signal[HeartbeatSubscriptions] = Signal()
        self.left: Signal[str] = Signal()

    async def start(self) -> None:
        self._scanner.repeat(SCAN_SECONDS, self.expire)

    async def stop(self) -> None:
        await self._scanner.stop()

    def group(self, name: str) -> ConsumerGroup | None:
        """A consumer group with at least one member."""
        return self._consumers.get(name)

    def producers(self, group: str) -> Sequence[Member]:
        return tuple(self._producers.get(group, {}).values())

    def producer(self, client_id: str) -> Connection | None:
        """How to reach a producer by its client id, whatever its groups are."""
        holder = self._producer_ids.get(client_id)
        return None if holder is None else holder.connection

    def consumer(self, group: str, client_id: str) -> Member | None:
        """Of several with one id the one that had it first."""
        known = self._consumers.get(group)
        members = known.members.values() if known else ()
        return next((member for member in members if member.client_id == client_id), None)

    def subscribed(self, group: str) -> set[str]:
        """Topics that the connected members of a consumer group subscribe to."""
        known = self._consumers.get(group)
        return set(known.subscriptions) if known else set()

    def consumer_groups_of(self, topic: str) -> set[str]:
        """Groups whose members subscribe to `topic` right now."""
        return {name for name, group in self._consumers.items() if topic in group.subscriptions}

    def consumer_groups(self) -> list[ConsumerGroup]:
        """All that have a member."""
        return list(self._consumers.values())

    def producer_members(self) -> list[tuple[Member, ...]]:
        """Of each producer group."""
        return [tuple(members.values()) for members in self._producers.values()]

    def counts(self) -> tuple[int, int]:
        """Members of consumer groups and of producer groups."""
        consumers = sum(len(group.members) for group in self._consumers.values())
        return consumers, sum(map(len, self._producers.values()))

    # --- requests ---------------------------------------------------------------------------

    @HeartBeat.handler
    def heart_beat(self, ask: HeartBeat, call: Call) -> HeartBeatReply | Awaitable[HeartBeatReply]:
        beat = bodies.decode(HeartbeatData, ask.body)
        _check_client_id(beat.client_id)
        for producer in beat.producer_data_set:
            check_group(producer.group_name)
        for consumer in beat.consumer_data_set:
            check_group(consumer.group_name)
            _check_subscriptions(consumer)
        if len(ask.body) > SMALL_BYTES:
            return self._join_later(beat, call)
        return self._join(beat, call)

    async def _join_later(self, beat: HeartbeatData, call: Call) -> HeartBeatReply:
        """A heartbeat with many subscriptions, which took long to read: now others have a turn."""
        await asyncio.sleep(0)
        return self._join(beat, call)

    def _join(self, beat: HeartbeatData, call: Call) -> HeartBeatReply:
        if call.connection.closed:
            return HeartBeatReply()  # nobody is there any more to become a member
        consumers, producers = beat.consumer_data_set, beat.producer_data_set
        self._check_room(
            call.connection,
            {(CONSUMER, data.group_name) for data in consumers}
            | {(PRODUCER, data.group_name) for data in producers},
        )
        for consumer in consumers:
            self._join_consumers(beat.client_id, consumer, call)
        for producer in producers:
            self._join_producers(beat.client_id, producer.group_name, call)
        return HeartBeatReply()

    @UnregisterClient.handler
    def unregister_client(self, ask: UnregisterClient, call: Call) -> Reply:
        if ask.producer_group:
            self._leave(call.connection, PRODUCER, ask.producer_group, "it unregistered")
        if ask.consumer_group:
            self._leave(call.connection, CONSUMER, ask.consumer_group, "it unregistered")
        return Reply()

    @GetConsumerListByGroup.handler
    def get_consumer_list(self, ask: GetConsumerListByGroup, call: Call) -> Reply:
        group = self._consumers.get(ask.consumer_group)
        if group is None:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"No consumer of group {ask.consumer_group[:255]} is connected to this broker.",
            )
        ids = list(dict.fromkeys(member.client_id for member in group.members.values()))
        return Reply(body=bodies.encode(GetConsumerListByGroupResponseBody(consumer_id_list=ids)))

    @GetConsumerConnectionList.handler
    def get_consumer_connections(self, ask: GetConsumerConnectionList, call: Call) -> Reply:
        group = self._consumers.get(ask.consumer_group)
        if group is None:
            raise Refused(
                Code.CONSUMER_NOT_ONLINE,
                f"Consumer group {ask.consumer_group[:255]} is not online at this broker:"
                " none of its members is connected.",
            )
        return Reply(
            remark=_disagreement(group),
            body=bodies.encode(
                ConsumerConnection(
                    connection_set=_connections(group.members.values()),
                    subscription_table=dict(group.subscriptions),
                    consume_type=group.consume_type,
                    message_model=group.message_model,
                    consume_from_where=group.consume_from_where,
                )
            ),
        )

    @GetProducerConnectionList.handler
    def get_producer_connections(self, ask: GetProducerConnectionList, call: Call) -> Reply:
        members = self._producers.get(ask.producer_group)
        if not members:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Producer group {ask.producer_group[:255]} is not online at this broker:"
                " none of its members is connected.",
            )
        return Reply(
            body=bodies.encode(ProducerConnection(connection_set=_connections(members.values())))
        )

    @GetAllProducerInfo.handler
    def get_all_producers(self, ask: GetAllProducerInfo, call: Call) -> Reply:
        table = {
            group: [
                ProducerInfo(
                    client_id=member.client_id,
                    remote_ip=f"/{member.address}",  # Compat: as Java writes an address
                    language=_language(member),
                    version=member.version,
                    last_update_timestamp=member.seen_ms,
                )
                for member in members.values()
            ]
            for group, members in self._producers.items()
        }
        return Reply(body=bodies.encode(ProducerTableInfo(data=table)))

    @CheckClientConfig.handler
    def check_client_config(self, ask: CheckClientConfig, call: Call) -> Reply:
        subscription = bodies.decode(CheckClientRequestBody, ask.body).subscription_data
        kind = subscription.expression_type
        if not is_tag_type(kind):
            if not self._filter_enabled:
                raise not_enabled(kind)
            expression_of(kind, subscription.sub_string)
        return Reply()

    # --- joining ----------------------------------------------------------------------------

    def _join_consumers(self, client_id: str, data: ConsumerData, call: Call) -> None:
        name = data.group_name
        config = self._groups.find(name, call)
        if config is not None and config.retry_queue_nums > 0:
            flag = TOPIC_UNIT_SUBSCRIPTION if data.unit_mode else 0
            queues = config.retry_queue_nums
            self._topics.ensure(retry_topic(name), queues, PERM_READ_WRITE, flag, call=call)
        group = self._consumers.get(name)
        if group is None:
            group = self._consumers[name] = ConsumerGroup(name)
        group.consume_type = data.consume_type
        group.message_model = data.message_model
        group.consume_from_where = data.consume_from_where
        member, changed = self._member(group.members, CONSUMER, name, client_id, call)
        changed |= _merge(group, data.subscription_data_set)
        self._compare(group, member, data)
        self.heard.fire(HeartbeatSubscriptions(name, data.subscription_data_set))
        if changed:
            self._changed(name)

    def _join_producers(self, client_id: str, name: str, call: Call) -> None:
        members = self._producers.setdefault(name, {})
        known = members.get(call.connection)
        if known is not None and known.client_id != client_id:
            self._forget_producer(known)
        member, new = self._member(members, PRODUCER, name, client_id, call)
        holder = self._producer_ids.get(client_id)
        # Compat: the newest heartbeat has the id; that of another account only when it is free.
        if (
            holder is None
            or holder.connection is member.connection
            or holder.access_key == member.access_key
        ):
            self._producer_ids[client_id] = member
        elif new:
            log.warning(
                "client_id_taken client=%s address=%s held_by=%s; replies to this id go to the"
                " client of another account that had it first: give each client its own instance"
                " name",
                client_id,
                member.address,
                holder.address,
            )

    def _member(
        self,
        members: dict[Connection, Member],
        kind: str,
        group: str,
        client_id: str,
        call: Call,
    ) -> tuple[Member, bool]:
        """The membership of this connection, refreshed; and whether it is new."""
        connection = call.connection
        member = members.get(connection)
        new = member is None
        if member is None:
            member = members[connection] = Member(client_id, connection)
            joined = self._joined.get(connection)
            if joined is None:
                joined = self._joined[connection] = set()
                connection.on_close(lambda: self._gone(connection, "its connection closed"))
            joined.add((kind, group))
            log.info(
                "client_joined kind=%s group=%s client=%s address=%s",
                kind,
                group,
                client_id,
                member.address,
            )
        elif member.client_id != client_id:
            log.warning(
                "client_renamed kind=%s group=%s client=%s was=%s address=%s; two clients share"
                " one connection, give each its own instance name",
                kind,
                group,
                client_id,
                member.client_id,
                member.address,
            )
            member.client_id = client_id
            members[connection] = members.pop(connection)  # behind who had the id before
            new = True
        member.access_key = self._account_of(call)
        member.language = call.frame.language
        member.version = call.frame.version
        member.seen_at = asyncio.get_running_loop().time()
        member.seen_ms = self._clock.now_ms()
        return member, new

    def _compare(self, group: ConsumerGroup, member: Member, data: ConsumerData) -> None:
        """Say once when members of a group want different things."""
        own = frozenset((item.topic, item.sub_string) for item in data.subscription_data_set)
        if own == member.subscriptions:
            return
        member.subscriptions = own
        if group.warned or all(other.subscriptions == own for other in group.members.values()):
            return
        other = next(other for other in group.members.values() if other.subscriptions != own)
        group.warned = True
        log.warning(
            "subscriptions_differ group=%s client=%s other=%s topics=%s; members of one group"
            " must subscribe to the same topics and tags, otherwise they lose messages to each"
            " other: use one group per kind of consumer",
            group.name,
            member.client_id,
            other.client_id,
            ",".join(sorted({topic for topic, _ in own ^ other.subscriptions})[:10]),
        )

    def _check_room(self, connection: Connection, named: set[tuple[str, str]]) -> None:
        if len(named | self._joined.get(connection, set())) > GROUPS_PER_CONNECTION_MAX:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"One connection may hold {GROUPS_PER_CONNECTION_MAX} groups;"
                " spread the groups over more clients.",
            )

    # --- leaving ----------------------------------------------------------------------------

    def _leave(self, connection: Connection, kind: str, name: str, why: str) -> None:
        joined = self._joined.get(connection)
        if joined is None or (kind, name) not in joined:
            return
        joined.discard((kind, name))
        if kind == PRODUCER:
            members = self._producers[name]
            member = members.pop(connection)
            if not members:
                del self._producers[name]
            if all(other != PRODUCER for other, _ in joined):
                self._forget_producer(member)
        else:
            group = self._consumers[name]
            member = group.members.pop(connection)
            if not group.members:
                del self._consumers[name]
                self.left.fire(name)
            self._changed(name)
        log.info(
            "client_left kind=%s group=%s client=%s address=%s reason=%r",
            kind,
            name,
            member.client_id,
            member.address,
            why,
        )

    def _forget_producer(self, member: Member) -> None:
        if self.producer(member.client_id) is member.connection:
            del self._producer_ids[member.client_id]

    def _gone(self, connection: Connection, why: str) -> None:
        for kind, name in tuple(self._joined.get(connection, ())):
            self._leave(connection, kind, name, why)
        self._joined.pop(connection, None)

    def expire(self) -> None:
        """End memberships without heartbeat; a connection that has no others is closed."""
        oldest = asyncio.get_running_loop().time() - EXPIRY_SECONDS
        tables = [
            *((PRODUCER, name, members) for name, members in self._producers.items()),
            *((CONSUMER, name, group.members) for name, group in self._consumers.items()),
        ]
        stale = [
            (connection, kind, name)
            for kind, name, members in tables
            for connection, member in members.items()
            if member.seen_at < oldest
        ]
        for connection, kind, name in stale:
            self._leave(connection, kind, name, "it sent no heartbeat")
        for connection in {connection for connection, _, _ in stale}:
            if not self._joined.get(connection):
                connection.close(f"no heartbeat for {EXPIRY_SECONDS:.0f} s")

    # --- telling ----------------------------------------------------------------------------

    def _changed(self, name: str) -> None:
        if not self._unannounced:
            asyncio.get_running_loop().call_soon(self._announce)
        self._unannounced.add(name)

    def _announce(self) -> None:
        names, self._unannounced = self._unannounced, set()
        for name in names:
            self.changes.fire(name)
            group = self._consumers.get(name)
            config = self._groups.table.get(name)
            allowed = config is None or config.notify_consumer_ids_changed_enable
            allowed = allowed and self._options.notify_consumer_ids_changed_enable
            if group is None or not allowed:
                continue
            notice = NotifyConsumerIdsChanged(consumer_group=name)
            for connection in tuple(group.members):
                connection.push(notice)


def _merge(group: ConsumerGroup, news: Sequence[SubscriptionData]) -> bool:
    """Bring the group's subscriptions in line with a heartbeat; true if topics came or went."""
    changed = False
    for item in news:
        known = group.subscriptions.get(item.topic)
        if known is None:
            changed = True
        elif item.sub_version <= known.sub_version:
            continue
        group.subscriptions[item.topic] = item
    topics = {item.topic for item in news}
    for topic in [topic for topic in group.subscriptions if topic not in topics]:
        del group.subscriptions[topic]
        changed = True
    return changed


def _disagreement(group: ConsumerGroup) -> str | None:
    """What an operator should know when members of a group want different things."""
    members = list(group.members.values())
    odd = next(
        (member for member in members if member.subscriptions != members[0].subscriptions), None
    )
    if odd is None:
        return None
    topics = sorted({topic for topic, _ in odd.subscriptions ^ members[0].subscriptions})[:10]
    return (
        f"Members of {group.name} subscribe differently, for example {members[0].client_id} and"
        f" {odd.client_id} (topics {', '.join(topics)}), and lose messages to each other; use one"
        " group per kind of consumer."
    )


def _connections(members: Iterable[Member]) -> list[bodies.Connection]:
    return [
        bodies.Connection(
            client_addr=member.address,
            client_id=member.client_id,
            language=_language(member),
            version=member.version,
        )
        for member in members
    ]


def _language(member: Member) -> str:
    return LANGUAGES[member.language] if 0 <= member.language < len(LANGUAGES) else "OTHER"


def _check_client_id(client_id: str) -> None:
    if not client_id or len(client_id) > CLIENT_ID_CHARACTERS_MAX:
        raise Refused(
            Code.SYSTEM_ERROR,
            f"clientID has {len(client_id)} characters; use 1 to {CLIENT_ID_CHARACTERS_MAX}.",
        )


def _check_subscriptions(data: ConsumerData) -> None:
    count = len(data.subscription_data_set)
    if count > SUBSCRIPTIONS_MAX:
        raise Refused(
            Code.SYSTEM_ERROR,
            f"Group {data.group_name} subscribes to {count} topics; {SUBSCRIPTIONS_MAX} is the"
            " limit, use several groups.",
        )
