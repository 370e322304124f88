"""A cluster at one moment: what its brokers, topics and groups do. For live views.

Bounded: of very many topics and groups the first by name are looked at, and `left_out` says how
many were not. What is not known is None.
"""

from __future__ import annotations

import dataclasses

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.operate.flows import Flow, TopicFlow, at_once, topic_flows
from cosmodrome.client.operate.pairs import UP, look
from cosmodrome.client.operate.standing import GroupStanding, standing
from cosmodrome.errors import CosmodromeError
from cosmodrome.wire.names import (
    DLQ_PREFIX,
    REPLY_TOPIC_SUFFIX,
    RETRY_PREFIX,
    is_system_group,
    is_system_topic,
)

TOPICS_MAX = 500
GROUPS_MAX = 200
GROUPS_AT_ONCE = 8  # each is several requests


@dataclasses.dataclass(frozen=True, slots=True)
class BrokerLine:
    cluster: str
    broker: str
    number: int
    address: str
    runtime: dict[str, str] | None  # None: it shows nothing
    state: str = UP  # as in `pairs`


@dataclasses.dataclass(frozen=True, slots=True)
class TopicLine:
    topic: str
    in_per_s: float | None
    out_per_s: float | None
    groups: int


@dataclasses.dataclass(frozen=True, slots=True)
class GroupLine:
    group: str
    members: int | None
    out_per_s: float | None
    lag: int | None
    age_ms: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Overview:
    brokers: list[BrokerLine]
    topics: list[TopicLine]  # the busiest first
    groups: list[GroupLine]  # those farthest behind first
    left_out: int


async def overview(admin: Admin) -> Overview:
    """Ask everybody once. Unreachable when no name server answers."""
    info = await admin.brokers.cluster()
    brokers = [
        BrokerLine(
            seen.cluster,
            seen.name,
            seen.number,
            seen.address,
            None if isinstance(seen.runtime, CosmodromeError) else seen.runtime,
            standing.state,
        )
        for pair in await look(admin.fleet, info)
        for seen, standing in pair.members
    ]
    own = {*info.broker_addr_table, *info.cluster_addr_table}
    topics = [
        name
        for name in await admin.topics.names()
        if not (
            is_system_topic(name)
            or name.startswith((RETRY_PREFIX, DLQ_PREFIX))
            or name.removesuffix(REPLY_TOPIC_SUFFIX) in own
        )
    ]
    groups: list[str] = []
    flows: list[TopicFlow] = []
    if any(line.runtime is not None for line in brokers):
        known = await attempt(admin.groups.names(partial=True))
        every = [] if isinstance(known, CosmodromeError) else known
        groups = [name for name in every if not is_system_group(name)]
        found = await attempt(topic_flows(admin, topics[:TOPICS_MAX]))
        flows = [] if isinstance(found, CosmodromeError) else found
    standings = await at_once(
        lambda group: attempt(standing(admin.fleet, group)), groups[:GROUPS_MAX], GROUPS_AT_ONCE
    )
    return Overview(
        brokers,
        sorted(map(_topic, flows), key=lambda line: (-_busy(line), line.topic)),
        sorted(map(_group, groups, standings), key=_behind),
        max(0, len(topics) - TOPICS_MAX) + max(0, len(groups) - GROUPS_MAX),
    )


def _topic(flow: TopicFlow) -> TopicLine:
    return TopicLine(
        flow.topic, _rate(flow.incoming), _total([*flow.groups.values()]), len(flow.groups)
    )


def _rate(flow: Flow | None) -> float | None:
    return None if flow is None else flow.per_s


def _total(flows: list[Flow | None]) -> float | None:
    rates = [_rate(flow) for flow in flows]
    known = [rate for rate in rates if rate is not None]
    return sum(known, 0.0) if len(known) == len(rates) else None


def _busy(line: TopicLine) -> float:
    return (line.in_per_s or 0.0) + (line.out_per_s or 0.0)


def _group(group: str, found: GroupStanding | CosmodromeError) -> GroupLine:
    if isinstance(found, CosmodromeError):
        return GroupLine(group, None, None, None, None)
    return GroupLine(group, found.members, found.consume_tps, found.lag, found.age_ms)


def _behind(line: GroupLine) -> tuple[bool, int, str]:
    """Not knowing comes between much and nothing."""
    lag = line.lag if line.lag is not None else 0
    return (line.lag == 0, -lag, line.group)
