"""Calls that go to several brokers or name servers at once; used by the administrative calls.

A call is made to all of them, whatever happens to some; then either every one has answered or
`PartlyFailed` says which did not and what the others said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, Generic, TypeVar

from cosmodrome.client.instance import Instance
from cosmodrome.client.namespace import unwrap, wrap
from cosmodrome.client.routes import ADDRESSES_MAX, decode_route
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.errors import Code, ConfigError, CosmodromeError, ProtocolError, Refused
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import MASTER_ID, ClusterInfo, TopicRouteData
from cosmodrome.wire.commands.route import GetBrokerClusterInfo, GetRouteinfoByTopic
from cosmodrome.wire.table import Command, R

T = TypeVar("T")


class NotThere(ConfigError):
    """The name servers know no cluster or broker of this name."""


class NoBrokers(ConfigError):
    """The name servers know no broker that could be asked."""


class PartlyFailed(CosmodromeError, Generic[R]):
    """Some of the peers that were asked did not do it. `results` holds those that did."""

    def __init__(
        self, what: str, failures: Mapping[str, CosmodromeError], results: Mapping[str, R]
    ) -> None:
        listed = "; ".join(f"{name}: {error}" for name, error in failures.items())
        done = f" (done by {', '.join(results)})" if results else ""
        super().__init__(
            f"{what} failed at {len(failures)} of {len(failures) + len(results)}: {listed}{done}"
        )
        self.failures = dict(failures)
        self.results = dict(results)


class Fleet:
    """The brokers and name servers of the cluster that an instance knows."""

    def __init__(self, instance: Instance, timeout_ms: int) -> None:
        self._instance = instance
        self._timeout_ms = timeout_ms

    # --- names -----------------------------------------------------------------------------------

    def full(self, name: str) -> str:
        """A topic or group as brokers know it."""
        return wrap(self._instance.options.namespace, name)

    def plain(self, name: str) -> str:
        return unwrap(self._instance.options.namespace, name)

    def full_queue(self, queue: MessageQueue) -> MessageQueue:
        return MessageQueue(
            topic=self.full(queue.topic), broker_name=queue.broker_name, queue_id=queue.queue_id
        )

    def plain_queue(self, queue: MessageQueue) -> MessageQueue:
        return MessageQueue(
            topic=self.plain(queue.topic), broker_name=queue.broker_name, queue_id=queue.queue_id
        )

    # --- who is there ----------------------------------------------------------------------------

    @property
    def name_server_addresses(self) -> tuple[str, ...]:
        return tuple(self._instance.routes.name_servers)

    async def cluster(self) -> ClusterInfo:
        reply = await self._instance.routes.ask(GetBrokerClusterInfo(), self._timeout_ms)
        info = bodies.decode(ClusterInfo, reply.body)
        count = sum(1 + len(data.broker_addrs) for data in info.broker_addr_table.values())
        if count > ADDRESSES_MAX:
            raise ProtocolError(
                f"the name server knows {count} brokers and addresses; a client takes at most"
                f" {ADDRESSES_MAX}. Look for somebody who registers brokers that do not exist"
            )
        return info

    async def masters(self, *, cluster: str | None = None) -> dict[str, str]:
        """Names and addresses of the masters, of one cluster or of all."""
        info = await self.cluster()
        if cluster is not None and cluster not in info.cluster_addr_table:
            known = ", ".join(sorted(info.cluster_addr_table)) or "none"
            raise NotThere(f"there is no cluster {cluster!r}; known are: {known}")
        names = info.broker_addr_table if cluster is None else set(info.cluster_addr_table[cluster])
        found = {
            name: self._called(data.broker_addrs[MASTER_ID])
            for name, data in sorted(info.broker_addr_table.items())
            if name in names and MASTER_ID in data.broker_addrs
        }
        if not found:
            raise NoBrokers("no broker is registered; start one, or check the name servers")
        return found

    async def readable(self) -> dict[str, str]:
        """Names and addresses of the masters; where there is none, of the slave that stands in."""
        info = await self.cluster()
        found = {
            name: self._called(data.broker_addrs[min(data.broker_addrs)])
            for name, data in sorted(info.broker_addr_table.items())
            if data.broker_addrs
        }
        if not found:
            raise NoBrokers("no broker is registered; start one, or check the name servers")
        return found

    async def broker(self, name: str) -> str:
        """The master's address; an address is taken as it is."""
        if ":" in name:
            return name
        masters = await self.masters()
        if name not in masters:
            raise NotThere(f"there is no broker {name!r}; known are: {', '.join(masters)}")
        return masters[name]

    async def chosen(self, *, cluster: str | None, broker: str | None) -> dict[str, str]:
        """The masters that a call is about: one broker, a cluster, or all."""
        if broker is not None:
            return {broker: await self.broker(broker)}
        return await self.masters(cluster=cluster)

    async def route(self, topic: str) -> TopicRouteData:
        """Asked anew each time; NoRoute when no broker has the topic. `topic` is the full name."""
        try:
            reply = await self._instance.routes.ask(
                GetRouteinfoByTopic(topic=topic), self._timeout_ms
            )
        except Refused as refusal:
            if refusal.code != Code.TOPIC_NOT_EXIST:
                raise
            raise NoRoute(f"no broker has topic {self.plain(topic)}; check its name") from None
        return decode_route(topic, reply.body)

    async def masters_of(self, topic: str) -> dict[str, str]:
        """The masters that hold a topic (its full name)."""
        route = await self.route(topic)
        return {
            data.broker_name: self._called(data.broker_addrs[MASTER_ID])
            for data in sorted(route.broker_datas, key=lambda data: data.broker_name)
            if MASTER_ID in data.broker_addrs
        }

    # --- calls -----------------------------------------------------------------------------------

    async def call(self, address: str, command: Command[R], timeout_ms: int | None = None) -> R:
        return await self._instance.links.call(address, command, timeout_ms or self._timeout_ms)

    async def ask(self, command: Command[R]) -> R:
        """Any name server: all of them hold the same."""
        return await self._instance.routes.ask(command, self._timeout_ms)

    async def each(self, targets: Mapping[str, str], command: Command[R]) -> dict[str, R]:
        """The same request to all of `targets` (name → address)."""
        return await self.every(targets, dict.fromkeys(targets, command))

    async def every(
        self, targets: Mapping[str, str], requests: Mapping[str, Command[R]]
    ) -> dict[str, R]:
        """A request of its own to each of `targets` that has one in `requests`."""
        names = [name for name in targets if name in requests]
        outcomes = await asyncio.gather(
            *(self.call(targets[name], requests[name]) for name in names), return_exceptions=True
        )
        results: dict[str, R] = {}
        failures: dict[str, CosmodromeError] = {}
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, CosmodromeError):
                failures[name] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results[name] = outcome
        if failures:
            raise PartlyFailed(_describe(requests), failures, results)
        return results

    async def name_servers(self, command: Command[R]) -> dict[str, R]:
        """The same request to every name server: they tell each other nothing."""
        addresses = self._instance.routes.name_servers
        return await self.each(dict(zip(addresses, addresses, strict=True)), command)

    def _called(self, address: str) -> str:
        return self._instance.links.broker_address(address)


def queue_order(queue: MessageQueue) -> tuple[str, str, int]:
    """The order in which queues are shown."""
    return queue.topic, queue.broker_name, queue.queue_id


def _describe(requests: Mapping[str, Command[Any]]) -> str:
    row = next(iter(requests.values()))
    return f"{row.name} ({row.request_code})"


async def attempt(call: Awaitable[T]) -> T | CosmodromeError:
    """The answer, or what went wrong as a value: other answers are still worth having."""
    try:
        return await call
    except CosmodromeError as error:
        return error
