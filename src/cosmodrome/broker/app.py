"""The broker put together: the only file that knows all its services.

Start: store, tables, clients, sockets, registration. Stop undoes it in reverse: clients are sent
elsewhere first, requests in flight get their answers, offsets are saved, the store closes last.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os.path
import re
import socket
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from cosmodrome.broker.admin import Admin
from cosmodrome.broker.announce import Announce, Identity
from cosmodrome.broker.audit import Audit
from cosmodrome.broker.check_back import CheckBack
from cosmodrome.broker.cleaning import Cleaning
from cosmodrome.broker.clients import Clients
from cosmodrome.broker.consume import Consume
from cosmodrome.broker.defer import Deferral
from cosmodrome.broker.delay import Delays
from cosmodrome.broker.expressions import Expressions
from cosmodrome.broker.filter_servers import FilterServers
from cosmodrome.broker.filters import Filters
from cosmodrome.broker.groups import GroupDeleted, Groups
from cosmodrome.broker.halves import Decisions
from cosmodrome.broker.lag import Lags
from cosmodrome.broker.locks import Locks
from cosmodrome.broker.metrics import BrokerMetrics, Traffic, extra_labels
from cosmodrome.broker.moves import OffsetMoves
from cosmodrome.broker.offsets import Offsets
from cosmodrome.broker.pending import PendingList
from cosmodrome.broker.pressure import Pressure
from cosmodrome.broker.produce import Produce
from cosmodrome.broker.put_times import PutTimes
from cosmodrome.broker.query import Query
from cosmodrome.broker.recall import Recall
from cosmodrome.broker.relays import Relays
from cosmodrome.broker.replies import Replies
from cosmodrome.broker.retry import Retry
from cosmodrome.broker.settings import Settings
from cosmodrome.broker.slow_sends import SlowSends
from cosmodrome.broker.stats import Stats
from cosmodrome.broker.stats_view import StatsView
from cosmodrome.broker.timers import Timers
from cosmodrome.broker.topics import Topics
from cosmodrome.broker.transaction_counts import TransactionCounts
from cosmodrome.broker.transactions import Transactions
from cosmodrome.broker.waiters import Waiters
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.errors import ConfigError
from cosmodrome.layout import TOPIC_BYTES_MAX
from cosmodrome.store.store import DelayLevels, Store, hours_of
from cosmodrome.transport.exposition import Source
from cosmodrome.transport.ports import (
    HA_OFFSET,
    VIP_OFFSET,
    advertised_host,
    broker_name_of_machine,
    free_base_port,
)
from cosmodrome.transport.request_metrics import RequestMetrics
from cosmodrome.transport.router import Router
from cosmodrome.transport.server import Server
from cosmodrome.wire.commands.consume import PullReply
from cosmodrome.wire.message import pack_host
from cosmodrome.wire.names import REPLY_TOPIC_SUFFIX
from cosmodrome.wire.table import BROKER

if TYPE_CHECKING:
    from cosmodrome.broker.lane import Lane

log = logging.getLogger(__name__)

MASTERS = ("ASYNC_MASTER", "SYNC_MASTER")
SLAVE = "SLAVE"

_LABEL = re.compile(r"[%|a-zA-Z0-9_.-]+\Z")


class Place:
    """Where clients reach this broker; known once its ports are chosen."""

    def __init__(self, options: BrokerOptions) -> None:
        self._options = options
        self.host = ""
        self.port = options.listen_port
        self.packed = b""

    async def settle(self, port: int) -> None:
        self.port = port
        self.host = self._options.broker_ip1 or advertised_host(self._options.bind_address)
        self.packed = await _pack(self.host, port)

    @property
    def address(self) -> str:
        return _joined(self.host, self.port)

    @property
    def ha_address(self) -> str:
        return _joined(self._options.broker_ip2 or self.host, self.port + HA_OFFSET)


class Broker:
    """A running broker as its process sees it."""

    def __init__(
        self,
        options: BrokerOptions,
        place: Place,
        store: Store,
        topics: Topics,
        groups: Groups,
        offsets: Offsets,
        expressions: Expressions,
        clients: Clients,
        admin: Admin,
        delays: Delays,
        timers: Timers,
        stats: Stats,
        pressure: Pressure,
        check_back: CheckBack,
        filter_servers: FilterServers,
        waiters: Waiters[PullReply],
        announce: Announce,
        server: Server,
        *,
        metrics: Callable[[Callable[[], tuple[bool, str]]], Source],
        takes_sends: bool,
    ) -> None:
        self.name = options.broker_name
        self.cluster = options.broker_cluster_name
        self._options = options
        self._place = place
        self._store = store
        self._state = (
            *(topics, groups, offsets, expressions, clients, admin),
            *(delays, timers, check_back),
        )
        self._watches = (stats, pressure, filter_servers)
        self._metrics = metrics(self.ready)
        self._waiters = waiters
        self._announce = announce
        self._server = server
        self._takes_sends = takes_sends
        self._stopping: contextlib.AsyncExitStack | None = None
        self._running = False

    @property
    def port(self) -> int:
        return self._place.port

    @property
    def vip_port(self) -> int:
        return self._place.port + VIP_OFFSET

    @property
    def address(self) -> str:
        """host:port as clients are told."""
        return self._place.address

    async def start(self) -> None:
        if self._stopping is not None:
            return
        self._stopping = contextlib.AsyncExitStack()
        try:
            await self._start(self._stopping)
        except BaseException:
            await self.stop()
            raise
        self._running = True
        log.info(
            "broker_started name=%s cluster=%s id=%d address=%s",
            *(self.name, self.cluster, self._options.broker_id, self.address),
        )

    async def stop(self) -> None:
        self._running = False
        stopping, self._stopping = self._stopping, None
        if stopping is not None:
            await stopping.aclose()

    def ready(self) -> tuple[bool, str]:
        """Whether clients can use this broker, and why not."""
        if not self._running:
            return False, "starting" if self._stopping is not None else "stopped"
        why = self._store.why_unwritable
        if why is not None and self._takes_sends:
            return False, f"sends are refused: {why}"
        return self._announce.ready()

    def metrics(self) -> list[Source]:
        """What to scrape: nothing while the tables are being read or closed."""
        return [self._metrics] if self._running else []

    @property
    def labels(self) -> Mapping[str, str]:
        """What its metrics have in common."""
        return self._metrics.labels

    @property
    def series_max(self) -> int:
        return self._options.metrics_series_max

    def alive(self) -> bool:
        """Whether this process should be left alone; false means that a restart helps."""
        return self._running or self._stopping is not None

    async def _start(self, stopping: contextlib.AsyncExitStack) -> None:
        stopping.push_async_callback(self._store.stop)
        await self._store.start()
        for service in (*self._state, *self._watches):
            stopping.push_async_callback(service.stop)
            await service.start()
        stopping.push_async_callback(self._server.stop)
        # Parked pulls end first, or they would hold up the answers in flight.
        stopping.push_async_callback(self._waiters.stop)
        await self._listen()
        stopping.push_async_callback(self._announce.stop)
        await self._announce.start(
            Identity(
                cluster=self.cluster,
                broker_name=self.name,
                broker_id=self._options.broker_id,
                address=self._place.address,
                ha_address=self._place.ha_address,
            )
        )

    async def _listen(self) -> None:
        host = self._options.bind_address
        port = self._options.listen_port or free_base_port(host)
        # First of all: the first request may be a send, whose message id holds the address.
        await self._place.settle(port)
        await self._server.listen(host, port + VIP_OFFSET)
        await self._server.listen(host, port)


def build_broker(
    broker: BrokerOptions, store: StoreOptions, sockets: SocketOptions, env: Env
) -> Broker:
    options = _checked(broker, store)
    takes_sends = store.broker_role != SLAVE
    root = store.store_path_root_dir
    config = os.path.join(root, "config")
    log_path = store.store_path_commit_log or os.path.join(root, "commitlog")
    place = Place(options)
    messages = Store(store, env, memory_bytes=env.memory_bytes)
    topics, groups, offsets, expressions = _tables(
        options, config, messages, env, writable=takes_sends
    )
    clients = Clients(options, topics, groups, env.clock)
    filters = Filters(options, clients, expressions)
    waiters: Waiters[PullReply] = Waiters(messages.arrivals, options.pulls_held_max)
    stats = Stats(detailed=options.enable_detail_stat)
    delays, timers, deferral = _for_later(
        *(store, config, messages, topics, env, stats), deliver=takes_sends
    )
    put_times, pressure = PutTimes(), Pressure(options)
    moves = OffsetMoves(
        *(messages, env.clock, options.broker_name, lambda: place.packed),
        writes=takes_sends,
        corrects=takes_sends or store.offset_check_in_slave,
    )
    produce = Produce(
        *(options, messages, topics, groups, deferral, env, lambda: place.packed),
        body_bytes_max=store.max_message_size,
        stats=stats,
        put_times=put_times,
        pressure=pressure,
    )
    consume = Consume(options, messages, topics, groups, filters, offsets, waiters, stats, moves)
    retry = Retry(options, messages, topics, groups, deferral, env, stats)
    recall = Recall(options, messages, topics, deferral, env.clock, lambda: place.packed)
    admin = Admin(
        *(options, log_path, env, messages, topics, clients, offsets, consume),
        lambda: {**delays.figures(), **pressure.figures()},
        groups=groups.table,
        stats=stats,
        put_times=put_times,
        address=lambda: place.address,
        each_second=SlowSends(put_times, stats, lambda: options.slow_request_millis).look,
    )
    filter_servers = FilterServers(options)
    announce = Announce(options, topics, filter_servers=filter_servers.addresses)
    filter_servers.changed.subscribe(lambda _: announce.renew())
    ends = TransactionCounts()
    transactions, check_back = _transactions(
        *(options, store, messages, topics, offsets, clients, deferral, env, stats, ends),
        lambda: place.packed,
        takes_sends=takes_sends,
    )
    _follow_deletions(topics, groups, messages, offsets, stats)
    settings = _settings(options, store, sockets, env, config, topics, stats)
    _follow_members(clients, expressions)
    topics.announced = announce.announced
    services = (
        *(topics, groups, offsets, clients, Locks(), produce, consume),
        *(delays, retry, recall, PendingList(options.broker_name, timers), transactions),
        Replies(options, produce, clients, env.clock, lambda: place.packed),
        Relays(options, messages, topics, offsets, clients),
        Audit(options, messages, topics, offsets, clients, expressions, env.clock),
        *(Query(options, messages), admin, settings),
        StatsView(stats, messages, env.clock, options.broker_cluster_name),
        *(Cleaning(messages, topics), filter_servers),
    )
    router = Router(BROKER, services)
    router.watch_slow(lambda: options.slow_request_millis)
    parts = (messages, topics, groups, produce, consume, offsets, put_times, router, place)
    server = Server(router, sockets, "broker", lane=_lane(options, store, *parts))
    traffic = Traffic(*(produce, consume, retry, ends, check_back, stats, put_times, pressure))
    counted = (messages, topics, groups, offsets, clients, delays, timers, traffic)
    return Broker(
        *(options, place, messages, topics, groups, offsets, expressions, clients, admin),
        *(delays, timers, stats, pressure, check_back, filter_servers, waiters, announce, server),
        metrics=_metrics(options, *counted, env, waiters, RequestMetrics(router, lambda: server)),
        takes_sends=takes_sends,
    )


def _tables(
    options: BrokerOptions, config: str, store: Store, env: Env, *, writable: bool
) -> tuple[Topics, Groups, Offsets, Expressions]:
    topics = Topics(options, os.path.join(config, "topics.json"), env, writable=writable)
    groups = Groups(options, os.path.join(config, "subscriptionGroup.json"), env, writable=writable)
    offsets = Offsets(options, os.path.join(config, "consumerOffset.json"), store, env)
    expressions = Expressions(
        os.path.join(config, "consumerFilter.json"),
        env,
        keep_dead_ms=options.filter_data_clean_time_span,
    )
    return topics, groups, offsets, expressions


def _metrics(
    options: BrokerOptions,
    store: Store,
    topics: Topics,
    groups: Groups,
    offsets: Offsets,
    clients: Clients,
    delays: Delays,
    timers: Timers,
    traffic: Traffic,
    env: Env,
    waiters: Waiters[PullReply],
    requests: RequestMetrics,
) -> Callable[[Callable[[], tuple[bool, str]]], Source]:
    """What is told when scraped, once it is known who says whether the broker is ready."""
    lags = Lags(store, topics, offsets, clients, traffic.stats, env.clock)
    topics.deleted.subscribe(lags.forget_topic)
    topics.deleted.subscribe(traffic.transactions.forget_topic)
    return lambda ready: BrokerMetrics(
        *(options, store, topics, groups.table, clients, delays, timers, traffic, lags, env.clock),
        ready=ready,
        requests=requests,
        pulls_held=lambda: waiters.held,
    )


def _lane(
    options: BrokerOptions,
    store_options: StoreOptions,
    store: Store,
    topics: Topics,
    groups: Groups,
    produce: Produce,
    consume: Consume,
    offsets: Offsets,
    put_times: PutTimes,
    router: Router,
    place: Place,
) -> Lane | None:
    """The short way for plain requests, where it is wanted and of use."""
    if not options.fast_lane_enable or store_options.broker_role == SLAVE:
        return None
    from cosmodrome.broker.lane import Lane

    return Lane(
        *(options, store, topics, groups, produce, consume, offsets, put_times, router),
        lambda: place.packed,
        body_bytes_max=store_options.max_message_size,
        segment_bytes=store_options.mapped_file_size_commit_log,
    )


def _follow_deletions(
    topics: Topics, groups: Groups, store: Store, offsets: Offsets, stats: Stats
) -> None:
    """What is kept about a topic or a group goes with it."""

    def forget_group(gone: GroupDeleted) -> None:
        stats.forget_group(gone.group)
        if gone.remove_offsets:
            offsets.remove(gone.group)

    topics.deleted.subscribe(store.delete_topic)
    topics.deleted.subscribe(offsets.remove_topic)
    topics.deleted.subscribe(stats.forget_topic)
    groups.deleted.subscribe(forget_group)


def _follow_members(clients: Clients, expressions: Expressions) -> None:
    """The SQL92 filters of a group live with its members."""
    clients.told.subscribe(lambda told: expressions.heard(told.group, told.subscriptions))
    clients.left.subscribe(expressions.left)


def _settings(
    options: BrokerOptions,
    store: StoreOptions,
    sockets: SocketOptions,
    env: Env,
    config: str,
    topics: Topics,
    stats: Stats,
) -> Settings:
    """Most live settings are read where they are used; some have to be carried somewhere."""

    def follow(keys: frozenset[str]) -> None:
        stats.detailed = options.enable_detail_stat
        if keys & {"autoCreateTopicEnable", "brokerPermission"}:
            topics.follow_settings()

    settings = Settings((options, store, sockets), env, config, {"deleteWhen": hours_of})
    settings.changed.subscribe(follow)
    return settings


def _for_later(
    options: StoreOptions,
    config: str,
    store: Store,
    topics: Topics,
    env: Env,
    stats: Stats,
    *,
    deliver: bool,
) -> tuple[Delays, Timers, Deferral]:
    """What lets messages wait: by level, by time of their own, and the way there."""
    levels = DelayLevels(options.message_delay_level)
    delays = Delays(
        levels,
        os.path.join(config, "delayOffset.json"),
        store,
        env,
        save_interval_ms=options.flush_delay_offset_interval,
        deliver=deliver,
        stats=stats,
    )
    timers = Timers(
        os.path.join(config, "timerOffset.json"),
        store,
        env,
        save_interval_ms=options.flush_delay_offset_interval,
        deliver=deliver,
        stats=stats,
    )
    deferral = Deferral(
        levels,
        topics,
        env.clock,
        timer_delay_seconds_max=options.timer_max_delay_sec,
        timers_full=timers.full,
    )
    return delays, timers, deferral


def _transactions(
    options: BrokerOptions,
    store_options: StoreOptions,
    store: Store,
    topics: Topics,
    offsets: Offsets,
    clients: Clients,
    deferral: Deferral,
    env: Env,
    stats: Stats,
    ends: TransactionCounts,
    store_host: Callable[[], bytes],
    *,
    takes_sends: bool,
) -> tuple[Transactions, CheckBack]:
    """How transactions end, and how their producers are asked."""
    decisions = Decisions()
    transactions = Transactions(
        *(store, topics, deferral, decisions, env.clock, store_host),
        takes_sends=takes_sends,
        stats=stats,
        counts=ends,
    )
    check_back = CheckBack(
        *(options, store, topics, offsets, clients, decisions, env),
        age_ms_max=lambda: store_options.file_reserved_time * 3_600_000,
        enabled=takes_sends,
    )
    return transactions, check_back


def _checked(options: BrokerOptions, store: StoreOptions) -> BrokerOptions:
    """The options with their defaults filled in, or ConfigError."""
    if not store.store_path_root_dir:
        raise ConfigError("storePathRootDir is empty; say where the messages are kept")
    broker_id = options.broker_id
    if store.broker_role == SLAVE:
        if broker_id <= 0:
            raise ConfigError(
                f"brokerRole is SLAVE and brokerId is {broker_id}; give the slave an id above 0"
            )
    elif store.broker_role not in MASTERS:
        raise ConfigError(
            f"brokerRole is {store.broker_role!r}; use one of {', '.join((*MASTERS, SLAVE))}"
        )
    elif broker_id != 0:
        # Compat: a master always has id 0, whatever its file says.
        log.warning("broker_id_ignored id=%d role=%s; a master is 0", broker_id, store.broker_role)
        broker_id = 0
    port = options.listen_port
    if port and not 0 < port + VIP_OFFSET < port + HA_OFFSET <= 65_535:
        raise ConfigError(
            f"listenPort is {port}; it must leave room for the VIP port {VIP_OFFSET:+d} and the HA"
            f" port {HA_OFFSET:+d}, or be 0 for any free one"
        )
    name = options.broker_name or broker_name_of_machine()
    _check_label("brokerName", name, TOPIC_BYTES_MAX)
    _check_label(
        "brokerClusterName",
        options.broker_cluster_name,
        TOPIC_BYTES_MAX - len(REPLY_TOPIC_SUFFIX),
    )
    extra_labels(options.metrics_label)
    return msgspec.structs.replace(options, broker_name=name, broker_id=broker_id)


def _check_label(key: str, name: str, length_max: int) -> None:
    # The broker makes topics of these names, and a topic becomes a directory.
    if not _LABEL.match(name) or not name.strip(".") or len(name) > length_max:
        raise ConfigError(
            f"{key} is {name[:64]!r}; use 1 to {length_max} letters, digits and the characters"
            " % | _ - ."
        )


async def _pack(host: str, port: int) -> bytes:
    """The address as message ids hold it; a host name is looked up."""
    try:
        return pack_host(str(ipaddress.ip_address(host)), port)
    except ValueError:
        pass
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"brokerIP1: {host!r} has no address ({error}); set it to an address of this machine"
        ) from None
    found.sort(key=lambda item: item[0] != socket.AF_INET)
    return pack_host(str(found[0][4][0]), port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
