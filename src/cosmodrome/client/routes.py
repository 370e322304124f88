"""Which brokers and queues a topic has, as the name servers say; asked again every 30 s.

A route that is known stays in use while no name server answers. Invariant: the queue lists of a
`Route` are sorted the same way in every client of a group, because shares are computed from them.

Name servers tell what brokers registered, and anybody may register. So a route that would cost this
client more than a cluster needs is refused as a whole, and the one that was known stays in use.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from cosmodrome.client.links import Links
from cosmodrome.client.options import ClientOptions, split_address
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.env.signal import Signal
from cosmodrome.errors import (
    Code,
    ConfigError,
    CosmodromeError,
    ProtocolError,
    Refused,
    TimedOut,
    Unreachable,
)
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import MASTER_ID, PERM_READ, PERM_WRITE, TopicRouteData
from cosmodrome.wire.commands.route import GetRouteinfoByTopic
from cosmodrome.wire.message import join_address, whole_number
from cosmodrome.wire.names import AUTO_CREATE_TOPIC
from cosmodrome.wire.table import Command, R

log = logging.getLogger(__name__)

DEFAULT_QUEUES = 4  # of a topic that its first message creates
# More than these in one route are refused: each queue costs a pull, each address a connection.
QUEUES_MAX = 65_536
ADDRESSES_MAX = 4_096


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    topic: str
    write_queues: tuple[MessageQueue, ...]  # on brokers that have a master
    read_queues: tuple[MessageQueue, ...]
    addresses: dict[str, dict[int, str]]  # by broker name and broker id
    data: TopicRouteData
    borrowed: bool = False  # the topic does not exist yet: queues of the template topic


class Routes:
    """Routes of the topics that were asked for. `changed` fires with the topic's name."""

    def __init__(
        self, name_servers: tuple[tuple[str, int], ...], links: Links, options: ClientOptions
    ) -> None:
        self.changed: Signal[str] = Signal()
        self._name_servers = [join_address(host, port) for host, port in name_servers]
        self._links = links
        self._options = options
        self._known: dict[str, Route] = {}
        self._asking: dict[str, asyncio.Task[Route]] = {}
        self._addresses: dict[str, dict[int, str]] = {}
        self.version = 0  # moves whenever an address may be another one
        self._task: asyncio.Task[None] | None = None

    @property
    def name_servers(self) -> list[str]:
        """The one that answered last comes first."""
        return list(self._name_servers)

    async def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._refresh_forever())

    async def stop(self) -> None:
        tasks = [task for task in (self._task, *self._asking.values()) if task is not None]
        self._task = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def ask(self, command: Command[R], timeout_ms: int | None = None) -> R:
        """Ask the name servers in turn until one answers; Refused is an answer too."""
        failures: list[CosmodromeError] = []
        for address in list(self._name_servers):
            try:
                answer = await self._links.call(address, command, timeout_ms)
            except (Unreachable, TimedOut) as error:
                failures.append(error)
                # The next one is asked first from now on, here and by everybody else.
                if self._name_servers[0] == address:
                    self._name_servers.append(self._name_servers.pop(0))
                continue
            return answer
        reasons = "; ".join(map(str, failures))
        cause = failures[-1] if failures else None
        raise Unreachable(f"no name server answers: {reasons}") from cause

    # --- routes --------------------------------------------------------------------------------

    def known(self, topic: str) -> Route | None:
        return self._known.get(topic)

    async def get(self, topic: str, *, fresh: bool = False) -> Route:
        """The route of a topic that exists; NoRoute otherwise."""
        route = self._known.get(topic)
        if route is not None and not route.borrowed and not fresh:
            return route
        return await self._shared_ask(topic)

    async def for_sending(self, topic: str) -> Route:
        """The same, or for an unknown topic the queues on which its first message creates it."""
        route = self._known.get(topic)
        if route is not None and route.write_queues:
            return route
        try:
            return await self._shared_ask(topic)
        except NoRoute as missing:
            try:
                template = (await self._ask_name_server(AUTO_CREATE_TOPIC)).data
            except NoRoute:
                raise missing from None
        route = route_from(topic, _limited(template), borrowed=True)
        self._learn(route)
        return route

    def address(self, broker_name: str, broker_id: int = MASTER_ID) -> str | None:
        """Where a broker is called. While a slave is not there, another replica stands in for
        it; nobody stands in for the master."""
        replicas = self._addresses.get(broker_name, {})
        found = replicas.get(broker_id)
        if found is None and broker_id != MASTER_ID:
            found = replicas.get(broker_id + 1) or next(iter(replicas.values()), None)
        return None if found is None else self._links.broker_address(found)

    def replicas(self, broker_name: str) -> dict[int, str]:
        """Master and slaves of a broker name: id → address as it is called."""
        found = self._addresses.get(broker_name, {})
        return {
            number: self._links.broker_address(address) for number, address in sorted(found.items())
        }

    def brokers(self) -> dict[str, dict[int, str]]:
        """Every broker of every known route: name → id → address as it is called."""
        return {
            name: {number: self._links.broker_address(address) for number, address in ids.items()}
            for name, ids in self._addresses.items()
        }

    def forget(self, topic: str) -> None:
        """Ask no more about a topic."""
        if self._known.pop(topic, None) is not None:
            self._collect_addresses()

    # --- asking --------------------------------------------------------------------------------

    async def _shared_ask(self, topic: str) -> Route:
        task = self._asking.get(topic)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask_and_learn(topic))
            self._asking[topic] = task
            task.add_done_callback(lambda done: self._asked(topic, done))
        return await asyncio.shield(task)

    def _asked(self, topic: str, task: asyncio.Task[Route]) -> None:
        self._asking.pop(topic, None)
        if not task.cancelled():
            task.exception()  # whoever waited may have been cancelled

    async def _ask_and_learn(self, topic: str) -> Route:
        route = await self._ask_name_server(topic)
        self._learn(route)
        return route

    async def _ask_name_server(self, topic: str) -> Route:
        try:
            reply = await self.ask(GetRouteinfoByTopic(topic=topic))
        except Refused as refusal:
            if refusal.code != Code.TOPIC_NOT_EXIST:
                raise
            raise NoRoute(
                f"no broker has topic {topic}; check its name, create it, or allow brokers to"
                f" create topics (autoCreateTopicEnable); asked {self._name_servers[0]}"
            ) from None
        return route_from(topic, decode_route(topic, reply.body))

    def _learn(self, route: Route) -> None:
        before = self._known.get(route.topic)
        self._known[route.topic] = route
        if before is not None and before.data == route.data and before.borrowed == route.borrowed:
            return
        self._collect_addresses()
        self.changed.fire(route.topic)

    def _collect_addresses(self) -> None:
        collected: dict[str, dict[int, str]] = {}
        for route in self._known.values():
            for name, replicas in route.addresses.items():
                collected.setdefault(name, {}).update(replicas)
        self._addresses = collected
        self.version += 1

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(self._options.route_refresh_ms / 1000)
            for topic in list(self._known):
                await self._refresh(topic)

    async def _refresh(self, topic: str) -> None:
        try:
            await self._shared_ask(topic)
        except NoRoute:
            # Kept: a broker that restarts is gone for a moment, and its consumers go on.
            log.debug("route not found: topic=%s", topic)
        except CosmodromeError as error:
            log.warning("routes are not refreshed: topic=%s reason=%s", topic, error)
        except Exception:  # a hook of the user's, for one; the next refresh may go well
            log.exception("routes are not refreshed: topic=%s", topic)


def decode_route(topic: str, body: bytes) -> TopicRouteData:
    """A name server's answer; ProtocolError when it has more than a client can use."""
    data = bodies.decode(TopicRouteData, body)
    rows = data.queue_datas
    _check_count(topic, "readable queues", sum(max(0, row.read_queue_nums) for row in rows))
    _check_count(topic, "writable queues", sum(max(0, row.write_queue_nums) for row in rows))
    addresses = sum(1 + len(broker.broker_addrs) for broker in data.broker_datas)
    _check_count(topic, "brokers and addresses", addresses, ADDRESSES_MAX)
    return data


def _check_count(topic: str, what: str, count: int, most: int = QUEUES_MAX) -> None:
    if count > most:
        raise ProtocolError(
            f"the route of topic {topic} has {count} {what}; a client takes at most {most}. Look"
            f" at `cosmo topic route {topic}` for a broker that does not belong there"
        )


def route_from(topic: str, data: TopicRouteData, *, borrowed: bool = False) -> Route:
    """A name server's answer about a topic, as clients use it."""
    addresses = {
        broker.broker_name: _callable(broker.broker_name, broker.broker_addrs)
        for broker in data.broker_datas
    }
    rows = sorted(data.queue_datas, key=lambda row: row.broker_name)
    ordered = data.order_topic_conf
    if isinstance(ordered, str) and ordered:
        # An ordered topic says itself on which brokers it has how many queues.
        counts = [part.rpartition(":") for part in ordered.split(";") if part]
        writable = [(name, whole_number(count) or 0) for name, _, count in counts]
    else:
        writable = [
            (row.broker_name, row.write_queue_nums)
            for row in rows
            if row.perm & PERM_WRITE and MASTER_ID in addresses.get(row.broker_name, {})
        ]
    readable = [(row.broker_name, row.read_queue_nums) for row in rows if row.perm & PERM_READ]
    return Route(
        topic, _queues(topic, writable), _queues(topic, readable), addresses, data, borrowed
    )


def _callable(name: str, replicas: Mapping[int, str]) -> dict[int, str]:
    """The addresses that can be called: one that cannot must not spoil the others."""
    found = dict(replicas)
    for number, address in replicas.items():
        try:
            split_address(address)
        except ConfigError as error:
            del found[number]
            log.warning("address left out: broker=%s id=%d reason=%s", name, number, error)
    return found


def _queues(topic: str, counts: list[tuple[str, int]]) -> tuple[MessageQueue, ...]:
    _check_count(topic, "queues", sum(max(0, count) for _, count in counts))
    return tuple(
        MessageQueue(topic=topic, broker_name=name, queue_id=number)
        for name, count in counts
        for number in range(count)
    )


def _limited(template: TopicRouteData) -> TopicRouteData:
    """A topic that its first message creates gets at most `DEFAULT_QUEUES` of the template's."""
    rows: list[Any] = []
    for row in template.queue_datas:
        count = min(DEFAULT_QUEUES, row.read_queue_nums)
        rows.append(
            bodies.QueueData(
                broker_name=row.broker_name,
                perm=row.perm,
                read_queue_nums=count,
                write_queue_nums=count,
                topic_sys_flag=row.topic_sys_flag,
            )
        )
    return TopicRouteData(
        broker_datas=template.broker_datas,
        filter_server_table=template.filter_server_table,
        queue_datas=rows,
    )
