"""How much goes into topics and out to groups, as brokers count it.

A figure is the sum over all brokers of a topic; where one of them is silent it is None, because
a part of a sum looks like the whole. Nothing counted is zero.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.values import NoRoute
from cosmodrome.errors import Refused, TimedOut, Unreachable
from cosmodrome.wire.bodies import MASTER_ID

CALLS_AT_ONCE = 32

T = TypeVar("T")
U = TypeVar("U")


class Flow(NamedTuple):
    per_s: float  # over the last minute
    last_day: int  # messages


@dataclasses.dataclass(frozen=True, slots=True)
class TopicFlow:
    topic: str
    incoming: Flow | None
    groups: dict[str, Flow | None]


async def at_once(
    work: Callable[[T], Awaitable[U]], items: Iterable[T], width: int = CALLS_AT_ONCE
) -> list[U]:
    """`work` done for each item, `width` at a time; results in the order of the items."""
    gate = asyncio.Semaphore(width)

    async def one(item: T) -> U:
        async with gate:
            return await work(item)

    return await asyncio.gather(*map(one, items))


async def topic_flows(admin: Admin, topics: Sequence[str]) -> list[TopicFlow]:
    """One answer per topic, in their order; a topic that no broker has is left out."""
    silent: set[str] = set()

    async def counted(addresses: Sequence[str], name: str, key: str) -> Flow | None:
        per_s, last_day = 0.0, 0
        for address in addresses:
            if address in silent:
                return None
            try:
                data = await admin.brokers.stats(address, name, key)
            except Refused:
                continue  # nothing was counted there
            except (Unreachable, TimedOut):
                silent.add(address)  # asking it again for every topic would take for ever
                return None
            per_s += data.stats_minute.tps
            last_day += data.stats_day.sum
        return Flow(per_s, last_day)

    async def of(topic: str) -> TopicFlow | None:
        try:
            route = await admin.topics.route(topic)
        except NoRoute:
            return None  # deleted since it was listed, for example
        addresses = [
            data.broker_addrs[MASTER_ID]
            for data in route.broker_datas
            if MASTER_ID in data.broker_addrs
        ]
        incoming = await counted(addresses, "TOPIC_PUT_NUMS", topic)
        groups: list[str] = []
        if silent.isdisjoint(addresses):
            groups = await admin.topics.consumers(topic)
        return TopicFlow(
            topic,
            incoming,
            {
                group: await counted(addresses, "GROUP_GET_NUMS", f"{topic}@{group}")
                for group in groups
            },
        )

    return [flow for flow in await at_once(of, topics) if flow is not None]
