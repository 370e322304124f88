"""The broker put together: the only file that knows all its rooms.

Start: store, tables, clients, what runs beside them, sockets, the HA port, registration. Stop
undoes it in reverse: a slave lets go of its master and clients are sent elsewhere first, requests
in flight get their answers, offsets are saved. A master feeds its slaves until nothing is written
any more. The store closes last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cosmodrome.broker.announce import Announce, Identity
from cosmodrome.broker.checked_options import checked_options
from cosmodrome.broker.foundation import Foundation, Room, lay_foundation
from cosmodrome.broker.later.room import Later, build_later
from cosmodrome.broker.members.room import Members, build_members
from cosmodrome.broker.operate.metrics import BrokerMetrics
from cosmodrome.broker.operate.room import Operate, build_operate
from cosmodrome.broker.receive.room import Receive, build_receive
from cosmodrome.broker.replicate.room import Replicate, build_replicate
from cosmodrome.broker.send.room import Send, build_send
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.transport.certificates import Tls
from cosmodrome.transport.http.exposition import Source
from cosmodrome.transport.http.request_metrics import RequestMetrics
from cosmodrome.transport.ports import VIP_OFFSET, free_base_port
from cosmodrome.transport.router import Router
from cosmodrome.transport.server import Server
from cosmodrome.wire.table import BROKER

if TYPE_CHECKING:
    from cosmodrome.transport.peers import Lane

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Rooms:
    members: Members
    receive: Receive
    later: Later
    send: Send
    operate: Operate
    replicate: Replicate

    @property
    def in_order(self) -> tuple[Room, ...]:
        """As they are started."""
        return (self.members, self.receive, self.later, self.send, self.operate)


class Broker:
    """A running broker as its process sees it."""

    def __init__(
        self,
        base: Foundation,
        rooms: Rooms,
        announce: Announce,
        server: Server,
        requests: RequestMetrics,
    ) -> None:
        self.name = base.options.broker_name
        self.cluster = base.options.broker_cluster_name
        self._base = base
        self._rooms = rooms
        self._metrics = BrokerMetrics(
            base,
            rooms.members,
            rooms.receive,
            rooms.later,
            rooms.send,
            replication=rooms.operate.replication,
            requests=requests,
            ready=self.ready,
        )
        self._announce = announce
        self._server = server
        self._stopping: contextlib.AsyncExitStack | None = None
        self._running = False

    @property
    def port(self) -> int:
        return self._base.address.port

    @property
    def vip_port(self) -> int:
        return self._base.address.vip_port

    @property
    def ha_port(self) -> int:
        return self._base.address.ha_port

    @property
    def address(self) -> str:
        """host:port as clients are told."""
        return self._base.address.text

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
            self.name,
            self.cluster,
            self._base.options.broker_id,
            self.address,
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
        why = self._base.store.why_not_ready
        if why is not None and self._base.role.takes_sends:
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
        return self._base.options.metrics_series_max

    def alive(self) -> bool:
        """Whether this process should be left alone; false means that a restart helps."""
        return self._running or self._stopping is not None

    async def _start(self, stopping: contextlib.AsyncExitStack) -> None:
        stopping.push_async_callback(self._base.gate.stop)
        await self._base.gate.start()
        stopping.push_async_callback(self._base.store.stop)
        await self._base.store.start()
        replicate = self._rooms.replicate
        stopping.push_async_callback(replicate.source.stop)
        for room in self._rooms.in_order:
            for service in room.services:
                stopping.push_async_callback(service.stop)
                await service.start()
        stopping.push_async_callback(self._server.stop)
        # Parked pulls end first, or they would hold up the answers in flight.
        stopping.push_async_callback(self._rooms.receive.waiters.stop)
        await self._listen()
        await replicate.source.start(self._base.options.bind_address, self._base.address.ha_port)
        stopping.push_async_callback(self._announce.stop)
        if replicate.slave is not None:
            stopping.push_async_callback(replicate.slave.stop)
            await replicate.slave.start()
        await self._announce.start(
            Identity(
                cluster=self.cluster,
                broker_name=self.name,
                broker_id=self._base.options.broker_id,
                address=self._base.address.text,
                ha_address=self._base.address.ha_text,
            )
        )

    async def _listen(self) -> None:
        host = self._base.options.bind_address
        port = self._base.options.listen_port or free_base_port(host)
        # First of all: the first request may be a send, whose message id holds the address.
        await self._base.address.choose(port)
        await self._server.listen(host, port + VIP_OFFSET)
        await self._server.listen(host, port)


def build_broker(
    broker: BrokerOptions,
    store: StoreOptions,
    sockets: SocketOptions,
    env: Env,
    tls: Tls | None = None,
) -> Broker:
    """`tls` belongs to the process, which starts and stops it."""
    options = checked_options(broker, store)
    base = lay_foundation(options, store, sockets, env, tls)
    rooms = _build_rooms(base)
    handlers = [service for room in rooms.in_order for service in room.handlers]
    router = Router(BROKER, handlers, gate=base.gate)
    router.watch_slow(lambda: options.slow_request_millis)
    announce = _build_announce(base, rooms)
    server = Server(
        router,
        sockets,
        "broker",
        lane=_build_lane(base, rooms, router),
        door=base.tls.door,
        offload=env.offload,
    )
    return Broker(base, rooms, announce, server, RequestMetrics(router, lambda: server))


def _build_rooms(base: Foundation) -> Rooms:
    members = build_members(base)
    receive = build_receive(base, members)
    later = build_later(base, members)
    send = build_send(base, members, later.deferral)
    operate = build_operate(base, members, receive, later, send)
    replicate = build_replicate(base, members, receive, later, operate)
    operate.replication.facts = replicate.facts
    return Rooms(members, receive, later, send, operate, replicate)


def _build_announce(base: Foundation, rooms: Rooms) -> Announce:
    topics, filter_servers = rooms.members.topics, rooms.receive.filter_servers
    announce = Announce(base.options, topics, base.connect, filter_servers=filter_servers.addresses)
    filter_servers.changed.subscribe(lambda _: announce.renew())
    topics.announced = announce.announced
    slave = rooms.replicate.slave
    if slave is not None:
        announce.found_master.subscribe(
            lambda master: slave.found_master(master.address, master.ha_address)
        )
        announce.looks_for_master = slave.looks_for_master
    return announce


def _build_lane(base: Foundation, rooms: Rooms, router: Router) -> Lane | None:
    """The short way for plain requests, where it is wanted and of use."""
    if not base.options.fast_lane_enable or not base.role.takes_sends:
        return None
    from cosmodrome.broker.lane.guarded import GuardedLane
    from cosmodrome.broker.lane.lane import Lane

    lane = Lane(base, rooms.members, rooms.send, rooms.receive.consume, router)
    return GuardedLane(lane, base.gate) if base.gate.enabled else lane
