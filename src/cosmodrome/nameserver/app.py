"""The name server: its handlers, what runs in the background, and how it is put together.

Name servers share nothing: each learns from the brokers that register with it and answers from
memory. Handlers are grouped by what they need; only `NameServer` opens a socket.
"""

from __future__ import annotations

import asyncio
import logging
import os.path
import zlib
from collections.abc import Awaitable

from cosmodrome.access.gate import Gate, build_gate
from cosmodrome.env.background import Background, Steps, at_once, in_turns
from cosmodrome.env.base import Env, Offload
from cosmodrome.env.options import NameServerOptions, SocketOptions
from cosmodrome.errors import Code, ConfigError, ProtocolError, Refused
from cosmodrome.layout import CRC_MASK, TOPIC_UNIT, TOPIC_UNIT_SUBSCRIPTION
from cosmodrome.nameserver.kv import ORDER_TOPIC_CONFIG, KeyValues
from cosmodrome.nameserver.metrics import NameServerMetrics
from cosmodrome.nameserver.routes import (
    TOPICS_PER_STEP,
    Broker,
    Identity,
    Registration,
    Route,
    Routes,
    TopicRow,
    Version,
)
from cosmodrome.nameserver.settings import Settings
from cosmodrome.transport.audit_log import changed as audited
from cosmodrome.transport.http.request_metrics import RequestMetrics
from cosmodrome.transport.ports import is_own_address
from cosmodrome.transport.router import LogLimit, Router
from cosmodrome.transport.server import Server
from cosmodrome.transport.tls import Door
from cosmodrome.wire import bodies, commands, registration
from cosmodrome.wire.message import join_address
from cosmodrome.wire.table import NAMESERVER, Call, Connection, Reply

log = logging.getLogger(__name__)

STANDARD_JSON_SINCE = 401  # request version 4.9.4
KV_LOG_INTERVAL_S = 600.0
SMALL_BYTES = 32 * 1024  # a registration of that size is read and taken over at once
ANY_ADDRESS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


class Announcements:
    """What brokers send: who they are and that they are alive."""

    def __init__(self, routes: Routes, values: KeyValues, env: Env) -> None:
        self._routes = routes
        self._values = values
        self._offload = env.offload
        self._one_at_a_time = asyncio.Lock()  # of large registrations
        self._watched: set[Connection] = set()
        self._log_limit = LogLimit()

    @commands.RegisterBroker.handler
    def register(
        self, ask: commands.RegisterBroker, call: Call
    ) -> commands.RegisterBrokerReply | Awaitable[commands.RegisterBrokerReply]:
        if ask.compressed or len(ask.body) > SMALL_BYTES:
            return self._register_slowly(ask, call)
        try:
            news = at_once(_reading(ask, call.frame.version))
            master = self._routes.register(news, call.connection)
        except (Refused, ProtocolError) as error:
            self._log_refusal(ask, call, error)
            raise
        return self._registered(master, call)

    async def _register_slowly(
        self, ask: commands.RegisterBroker, call: Call
    ) -> commands.RegisterBrokerReply:
        """A large registration: inflated off the loop, read and taken over in steps."""
        reading = _reading(ask, call.frame.version)
        try:
            async with self._one_at_a_time:
                await self._offload(lambda: next(reading))
                news = await in_turns(reading)
                master = await in_turns(self._routes.registering(news, call.connection))
        except (Refused, ProtocolError) as error:
            self._log_refusal(ask, call, error)
            raise
        return self._registered(master, call)

    def _registered(
        self, master: tuple[str, str] | None, call: Call
    ) -> commands.RegisterBrokerReply:
        self._watch(call.connection)
        reply = commands.RegisterBrokerReply()
        if master is not None:
            reply.master_addr, reply.ha_server_addr = master
        ordered = self._values.namespace(ORDER_TOPIC_CONFIG)
        if ordered is not None:
            reply.body = bodies.encode(bodies.KVTable(table=dict(ordered)))
        return reply

    @commands.UnregisterBroker.handler
    def unregister(self, ask: commands.UnregisterBroker, call: Call) -> Reply:
        if not self._routes.unregister(_identity(ask)):
            log.info(
                "unregistration of an unknown broker: name=%r address=%r peer=%s:%d",
                ask.broker_name[:64],
                ask.broker_addr[:64],
                *call.connection.peer,
            )
        return Reply()

    @commands.QueryDataVersion.handler
    def confirm(self, ask: commands.QueryDataVersion, call: Call) -> commands.QueryDataVersionReply:
        version = None
        if ask.body:
            version = _version(bodies.decode(bodies.DataVersion, ask.body))
        changed, known = self._routes.confirm(_identity(ask), version)
        reply = commands.QueryDataVersionReply(changed=changed)
        if known is not None:
            reply.body = bodies.encode(
                bodies.DataVersion(counter=known.counter, timestamp=known.timestamp)
            )
        return reply

    def _watch(self, connection: Connection) -> None:
        if connection not in self._watched:
            self._watched.add(connection)
            connection.on_close(lambda: self._gone(connection))

    def _gone(self, connection: Connection) -> None:
        self._watched.discard(connection)
        self._routes.connection_closed(connection)

    def _log_refusal(self, ask: commands.RegisterBroker, call: Call, error: Exception) -> None:
        held = self._log_limit.admit("refused")
        if held is not None:
            log.warning(
                "registration refused: name=%r address=%r peer=%s:%d reason=%s held_back=%d",
                ask.broker_name[:64],
                ask.broker_addr[:64],
                *call.connection.peer,
                error,
                held,
            )


class Lookups:
    """What clients and operators ask."""

    def __init__(self, routes: Routes, values: KeyValues, settings: Settings) -> None:
        self._routes = routes
        self._values = values
        self._settings = settings

    @commands.GetRouteinfoByTopic.handler
    def route(self, ask: commands.GetRouteinfoByTopic, call: Call) -> Reply:
        route = self._routes.route(ask.topic)
        if route is None:
            raise Refused(
                Code.TOPIC_NOT_EXIST,
                f"No broker has registered topic {ask.topic[:128]!r} here; create the topic, or"
                " check that its broker runs and that its namesrvAddr names this server.",
            )
        data = _route_data(route)
        if self._settings.options.order_message_enable:
            order = self._values.get(ORDER_TOPIC_CONFIG, ask.topic)
            if order is not None:
                data.order_topic_conf = order
        standard = call.frame.version >= STANDARD_JSON_SINCE or ask.accept_standard_json_only
        return Reply(body=bodies.encode(data, standard=bool(standard)))

    @commands.GetBrokerClusterInfo.handler
    def cluster_info(self, ask: commands.GetBrokerClusterInfo, call: Call) -> Reply:
        info = bodies.ClusterInfo(
            broker_addr_table={b.name: _broker_data(b) for b in self._routes.brokers()},
            cluster_addr_table=self._routes.clusters(),
        )
        # Compat: broker ids are bare here for clients of every version.
        return Reply(body=bodies.encode(info))

    @commands.GetAllTopicListFromNameserver.handler
    def all_topics(self, ask: commands.GetAllTopicListFromNameserver, call: Call) -> Reply:
        return _topic_list(self._routes.topics())

    @commands.GetTopicsByCluster.handler
    def topics_of_cluster(self, ask: commands.GetTopicsByCluster, call: Call) -> Reply:
        return _topic_list(self._routes.topics_of_cluster(ask.cluster))

    @commands.GetSystemTopicListFromNs.handler
    def system_topics(self, ask: commands.GetSystemTopicListFromNs, call: Call) -> Reply:
        clusters = self._routes.clusters()
        names = dict.fromkeys([*clusters, *(n for names in clusters.values() for n in names)])
        return _topic_list(list(names), self._routes.any_address())

    @commands.GetUnitTopicList.handler
    def unit_topics(self, ask: commands.GetUnitTopicList, call: Call) -> Reply:
        return _topic_list(self._routes.topics_flagged(TOPIC_UNIT))

    @commands.GetHasUnitSubTopicList.handler
    def unit_sub_topics(self, ask: commands.GetHasUnitSubTopicList, call: Call) -> Reply:
        return _topic_list(self._routes.topics_flagged(TOPIC_UNIT_SUBSCRIPTION))

    @commands.GetHasUnitSubUnunitTopicList.handler
    def unit_sub_only_topics(self, ask: commands.GetHasUnitSubUnunitTopicList, call: Call) -> Reply:
        return _topic_list(self._routes.topics_flagged(TOPIC_UNIT_SUBSCRIPTION, TOPIC_UNIT))


class Operations:
    """What operators change: routes, the KV table, settings."""

    def __init__(self, routes: Routes, values: KeyValues, settings: Settings) -> None:
        self._routes = routes
        self._values = values
        self._settings = settings

    @commands.WipeWritePermOfBroker.handler
    def wipe_write_perm(
        self, ask: commands.WipeWritePermOfBroker, call: Call
    ) -> commands.WipeWritePermReply:
        count = self._routes.wipe_write_perm(ask.broker_name)
        audited(call, "write_permission_wiped", broker=ask.broker_name, topics=count)
        return commands.WipeWritePermReply(wipe_topic_count=count)

    @commands.AddWritePermOfBroker.handler
    def add_write_perm(
        self, ask: commands.AddWritePermOfBroker, call: Call
    ) -> commands.AddWritePermReply:
        count = self._routes.add_write_perm(ask.broker_name)
        audited(call, "write_permission_added", broker=ask.broker_name, topics=count)
        return commands.AddWritePermReply(add_topic_count=count)

    @commands.DeleteTopicInNamesrv.handler
    def delete_topic(self, ask: commands.DeleteTopicInNamesrv, call: Call) -> Reply:
        self._routes.delete_topic(ask.topic, ask.cluster_name or None)
        audited(call, "route_deleted", topic=ask.topic, cluster=ask.cluster_name or "")
        return Reply()

    @commands.PutKvConfig.handler
    async def put_value(self, ask: commands.PutKvConfig, call: Call) -> Reply:
        before = self._values.get(ask.namespace, ask.key)
        await self._values.put(ask.namespace, ask.key, ask.value)
        what = {"namespace": ask.namespace, "key": ask.key}
        audited(call, "kv_put", before=before, after=ask.value, **what)
        return Reply()

    @commands.GetKvConfig.handler
    def get_value(self, ask: commands.GetKvConfig, call: Call) -> commands.GetKvConfigReply:
        value = self._values.get(ask.namespace, ask.key)
        if value is None:
            raise Refused(
                Code.QUERY_NOT_FOUND,
                f"Namespace {ask.namespace[:64]!r} has no key {ask.key[:64]!r}.",
            )
        return commands.GetKvConfigReply(value=value)

    @commands.DeleteKvConfig.handler
    async def delete_value(self, ask: commands.DeleteKvConfig, call: Call) -> Reply:
        before = self._values.get(ask.namespace, ask.key)
        await self._values.delete(ask.namespace, ask.key)
        audited(call, "kv_deleted", namespace=ask.namespace, key=ask.key, before=before)
        return Reply()

    @commands.GetKvlistByNamespace.handler
    def list_values(self, ask: commands.GetKvlistByNamespace, call: Call) -> Reply:
        values = self._values.namespace(ask.namespace)
        if values is None:
            raise Refused(Code.QUERY_NOT_FOUND, f"There is no KV namespace {ask.namespace[:64]!r}.")
        return Reply(body=bodies.encode(bodies.KVTable(table=dict(values))))

    @commands.UpdateNamesrvConfig.handler
    async def update_settings(self, ask: commands.UpdateNamesrvConfig, call: Call) -> Reply:
        for key, before, after in await self._settings.update(ask.body):
            audited(call, "setting_changed", key=key, before=before, after=after)
        return Reply()

    @commands.GetNamesrvConfig.handler
    def get_settings(self, ask: commands.GetNamesrvConfig, call: Call) -> Reply:
        return Reply(body=self._settings.text())


class NameServer:
    """Listens, drops silent brokers, and tells the log what the KV table holds."""

    def __init__(
        self,
        settings: Settings,
        sockets: SocketOptions,
        routes: Routes,
        values: KeyValues,
        router: Router,
        gate: Gate,
        door: Door | None,
        *,
        offload: Offload,
    ) -> None:
        self._settings = settings
        self._offload = offload
        self._sockets = sockets
        self._gate = gate
        self._door = door
        self._routes = routes
        self._values = values
        self._router = router
        self._server: Server | None = None
        self._scanner = Background("drop silent brokers")
        self._kv_log = Background("log the KV table")
        self.port = settings.options.listen_port
        self.metrics = NameServerMetrics(
            lambda: self.address,
            routes,
            values,
            RequestMetrics(router, lambda: self._server),
            ready=lambda: self.ready,
        )

    @property
    def ready(self) -> bool:
        """Whether requests are served."""
        return self._scanner.running

    @property
    def address(self) -> str:
        """host:port as a process on this machine reaches it."""
        host = self._settings.options.bind_address
        host = ANY_ADDRESS.get(host, host)
        return join_address(host, self.port)

    async def start(self) -> None:
        if self._server is not None:
            return
        options = self._settings.options
        await self._gate.start()
        await self._values.load()
        self._server = Server(
            self._router, self._sockets, "name server", door=self._door, offload=self._offload
        )
        try:
            self.port = await self._server.listen(options.bind_address, options.listen_port)
        except BaseException:
            self._server = None
            raise
        self._scanner.repeat(self._scan_interval_s, self._drop_silent_brokers)
        self._kv_log.repeat(KV_LOG_INTERVAL_S, self._values.write_to_log)

    async def stop(self) -> None:
        await self._scanner.stop()
        await self._kv_log.stop()
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
        await self._gate.stop()

    def _scan_interval_s(self) -> float:
        return self._settings.options.scan_not_active_broker_interval / 1000

    def _drop_silent_brokers(self) -> None:
        silence_ms_max = self._settings.options.broker_expired_time
        for connection in self._routes.expire(silence_ms_max):
            connection.close(f"no registration within {silence_ms_max} ms")


def build_nameserver(
    options: NameServerOptions, sockets: SocketOptions, env: Env, door: Door | None = None
) -> NameServer:
    for key, value in (
        ("scanNotActiveBrokerInterval", options.scan_not_active_broker_interval),
        ("brokerExpiredTime", options.broker_expired_time),
    ):
        if value <= 0:
            raise ConfigError(f"{key}={value} must be a positive number of milliseconds")
    settings = Settings(options, sockets, env)
    routes = Routes(_elapsed_ms)
    values = KeyValues(options.kv_config_path, env)
    services = (
        Announcements(routes, values, env),
        Lookups(routes, values, settings),
        Operations(routes, values, settings),
    )
    gate = build_gate(
        "name server",
        options,
        os.path.dirname(options.kv_config_path),
        env,
        is_local=is_own_address,
    )
    router = Router(NAMESERVER, services, gate=gate)
    router.watch_slow(lambda: settings.options.slow_request_millis)
    return NameServer(settings, sockets, routes, values, router, gate, door, offload=env.offload)


def _elapsed_ms() -> int:
    return int(asyncio.get_running_loop().time() * 1000)


def _identity(ask: commands.UnregisterBroker | commands.QueryDataVersion) -> Identity:
    return Identity(ask.cluster_name, ask.broker_name, ask.broker_id, ask.broker_addr)


def _reading(ask: commands.RegisterBroker, version: int) -> Steps[Registration]:
    """What a broker says, in steps. The first one looks at the whole body and touches no table."""
    if ask.body_crc32 and zlib.crc32(ask.body) & CRC_MASK != ask.body_crc32:
        raise Refused(
            Code.SYSTEM_ERROR,
            f"bodyCrc32 is {ask.body_crc32}, the body's checksum is"
            f" {zlib.crc32(ask.body) & CRC_MASK}: it was damaged on its way. Register again.",
        )
    compressed = bool(ask.compressed)
    body = yield from registration.reading(ask.body, compressed=compressed, version=version)
    yield  # also after a body without topics
    wrapper = body.topic_config_serialize_wrapper
    topics = {}
    unread = wrapper.topic_config_table
    for number, key in enumerate(list(unread), 1):
        topic = unread.pop(key)  # all at once they would take long to give back
        if number % TOPICS_PER_STEP == 0:
            yield
        if topic.topic_name != key:
            raise Refused(
                Code.SYSTEM_ERROR,
                f"Topic {topic.topic_name[:64]!r} is listed under the name {key[:64]!r};"
                " the broker's topic table is damaged.",
            )
        topics[key] = TopicRow(
            topic.read_queue_nums, topic.write_queue_nums, topic.perm, topic.topic_sys_flag
        )
    return Registration(
        identity=Identity(ask.cluster_name, ask.broker_name, ask.broker_id, ask.broker_addr),
        ha_address=ask.ha_server_addr,
        version=_version(wrapper.data_version),
        topics=topics,
        filter_servers=tuple(body.filter_server_list),
    )


def _version(body: bodies.DataVersion) -> Version:
    return Version(timestamp=body.timestamp, counter=body.counter)


def _topic_list(topics: list[str], address: str | None = None) -> Reply:
    body = bodies.TopicList(topic_list=topics)
    if address is not None:
        body.broker_addr = address
    return Reply(body=bodies.encode(body))


def _broker_data(broker: Broker) -> bodies.BrokerData:
    return bodies.BrokerData(
        broker_addrs=broker.addresses, broker_name=broker.name, cluster=broker.cluster
    )


def _route_data(route: Route) -> bodies.TopicRouteData:
    return bodies.TopicRouteData(
        broker_datas=[_broker_data(broker) for broker in route.brokers],
        filter_server_table={at: list(servers) for at, servers in route.filter_servers.items()},
        queue_datas=[
            bodies.QueueData(
                broker_name=name,
                perm=row.perm,
                read_queue_nums=row.read_queues,
                topic_sys_flag=row.sys_flag,
                write_queue_nums=row.write_queues,
            )
            for name, row in route.rows
        ],
    )
