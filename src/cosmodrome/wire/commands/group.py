"""Subscription groups: their settings and their consumption statistics."""

from __future__ import annotations

from cosmodrome.wire.needs import ADMIN, PEER, SUB, group, topic
from cosmodrome.wire.table import BROKER, Command, Reply, command


@command(200, "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP", served_by=BROKER, needs=ADMIN)
class UpdateAndCreateSubscriptiongroup(Command[Reply]):
    """Create or change a group; the body is a SubscriptionGroupConfig."""


@command(201, "GET_ALL_SUBSCRIPTIONGROUP_CONFIG", served_by=BROKER, needs=PEER)
class GetAllSubscriptiongroupConfig(Command[Reply]):
    """All groups with their version; answers SubscriptionGroupWrapper."""


@command(207, "DELETE_SUBSCRIPTIONGROUP", served_by=BROKER, needs=ADMIN)
class DeleteSubscriptiongroup(Command[Reply]):
    """Forget a group, and on request its progress."""

    group_name: str
    remove_offset: bool | None = None
    clean_offset: bool | None = None  # Compat: 5.x name of removeOffset


@command(
    208,
    "GET_CONSUME_STATS",
    served_by=BROKER,
    needs=group("consumer_group", SUB) & topic("topic", SUB),
)
class GetConsumeStats(Command[Reply]):
    """Progress against the queue ends, per queue; answers ConsumeStats."""

    consumer_group: str
    topic: str | None = None


@command(
    303,
    "QUERY_CONSUME_TIME_SPAN",
    served_by=BROKER,
    needs=topic("topic", SUB) & group("group", SUB),
)
class QueryConsumeTimeSpan(Command[Reply]):
    """Store times at a group's progress, per queue; answers QueryConsumeTimeSpanBody."""

    topic: str
    group: str


@command(317, "GET_BROKER_CONSUME_STATS", served_by=BROKER, needs=ADMIN)
class GetBrokerConsumeStats(Command[Reply]):
    """Progress of every group; answers ConsumeStatsList."""

    is_order: bool


@command(352, "GET_SUBSCRIPTIONGROUP_CONFIG", served_by=BROKER, needs=ADMIN)
class GetSubscriptiongroupConfig(Command[Reply]):
    """One group; answers SubscriptionGroupConfig."""

    group: str
