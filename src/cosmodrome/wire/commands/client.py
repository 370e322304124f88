"""Connected clients: heartbeats, membership, queue locks, and what operators ask about them."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import field

from cosmodrome.wire import bodies
from cosmodrome.wire.commands.fields import DROPPED
from cosmodrome.wire.needs import ADMIN, SUB, Group, Resource, Topic, group, in_body
from cosmodrome.wire.table import (
    BROKER,
    CLIENT,
    LIST_BYTES_MAX,
    SUBSCRIPTION_BYTES_MAX,
    Command,
    Reply,
    command,
)


def _of_heartbeat(heartbeat: bodies.HeartbeatData) -> Iterator[Resource]:
    for consumer in heartbeat.consumer_data_set:
        yield Group(consumer.group_name, SUB)
        for subscription in consumer.subscription_data_set:
            yield Topic(subscription.topic, SUB)


def _of_locks(locks: bodies.LockBatchRequestBody) -> Iterator[Resource]:
    yield Group(locks.consumer_group, SUB)
    for topic in dict.fromkeys(queue.topic for queue in locks.mq_set):
        yield Topic(topic, SUB)


def _of_check(check: bodies.CheckClientRequestBody) -> Iterator[Resource]:
    yield Group(check.group, SUB)
    yield Topic(check.subscription_data.topic, SUB)


_HEARTBEAT = in_body(
    bodies.HeartbeatData, "SUB of each group that consumes and of its topics", _of_heartbeat
)
_LOCKS = in_body(bodies.LockBatchRequestBody, "SUB of the group and of each topic", _of_locks)
_CHECK = in_body(bodies.CheckClientRequestBody, "SUB of the group and of the topic", _of_check)


class HeartBeatReply(Reply):
    """Success; clients take the broker's version from the frame."""

    # Compat: 5.x, sent only by brokers that understand shortened heartbeats.
    is_support_heart_beat_v2: bool | None = field(default=None, name="IS_SUPPORT_HEART_BEAT_V2")
    is_sub_change: bool | None = field(default=None, name="IS_SUB_CHANGE")


@command(34, "HEART_BEAT", served_by=BROKER, needs=_HEARTBEAT, body_bytes_max=LIST_BYTES_MAX)
class HeartBeat(Command[HeartBeatReply]):
    """A client's groups and subscriptions; the body is a HeartbeatData."""


@command(35, "UNREGISTER_CLIENT", served_by=BROKER, needs=group("consumer_group", SUB))
class UnregisterClient(Command[Reply]):
    """A client leaves a producer group, a consumer group, or both."""

    client_id: str = field(name="clientID")
    producer_group: str | None = None
    consumer_group: str | None = None


@command(38, "GET_CONSUMER_LIST_BY_GROUP", served_by=BROKER, needs=group("consumer_group", SUB))
class GetConsumerListByGroup(Command[Reply]):
    """Client ids of a group's members; answers GetConsumerListByGroupResponseBody."""

    consumer_group: str


@command(40, "NOTIFY_CONSUMER_IDS_CHANGED", served_by=CLIENT)
class NotifyConsumerIdsChanged(Command[Reply]):
    """Tell a consumer that its group's members changed."""

    consumer_group: str


@command(41, "LOCK_BATCH_MQ", served_by=BROKER, needs=_LOCKS, body_bytes_max=LIST_BYTES_MAX)
class LockBatchMq(Command[Reply]):
    """Lock queues for ordered consumption; the body is a LockBatchRequestBody."""


@command(42, "UNLOCK_BATCH_MQ", served_by=BROKER, needs=_LOCKS, body_bytes_max=LIST_BYTES_MAX)
class UnlockBatchMq(Command[Reply]):
    """Give queue locks back; the body is an UnlockBatchRequestBody."""


@command(
    46,
    "CHECK_CLIENT_CONFIG",
    served_by=BROKER,
    needs=_CHECK,
    body_bytes_max=SUBSCRIPTION_BYTES_MAX,
)
class CheckClientConfig(Command[Reply]):
    """Check a subscription expression; the body is a CheckClientRequestBody."""


@command(203, "GET_CONSUMER_CONNECTION_LIST", served_by=BROKER, needs=group("consumer_group", SUB))
class GetConsumerConnectionList(Command[Reply]):
    """Connections and subscriptions of a group; answers ConsumerConnection."""

    consumer_group: str


@command(204, "GET_PRODUCER_CONNECTION_LIST", served_by=BROKER, needs=ADMIN)
class GetProducerConnectionList(Command[Reply]):
    """Connections of a producer group; answers ProducerConnection."""

    producer_group: str


@command(307, "GET_CONSUMER_RUNNING_INFO", served_by=(BROKER, CLIENT), needs=ADMIN)
class GetConsumerRunningInfo(Command[Reply]):
    """A consumer's own report; the broker relays to the client."""

    consumer_group: str
    client_id: str
    jstack_enable: bool | None = None


@command(328, "GET_ALL_PRODUCER_INFO", served_by=BROKER, needs=ADMIN)
class GetAllProducerInfo(Command[Reply]):
    """Every connected producer; answers ProducerTableInfo."""


@command(209, "SUSPEND_CONSUMER", served_by=BROKER, planned=DROPPED)
class SuspendConsumer(Command[Reply]):
    """Unused."""


@command(210, "RESUME_CONSUMER", served_by=BROKER, planned=DROPPED)
class ResumeConsumer(Command[Reply]):
    """Unused."""


@command(213, "ADJUST_CONSUMER_THREAD_POOL", served_by=BROKER, planned=DROPPED)
class AdjustConsumerThreadPool(Command[Reply]):
    """Unused."""


@command(214, "WHO_CONSUME_THE_MESSAGE", served_by=BROKER, planned=DROPPED)
class WhoConsumeTheMessage(Command[Reply]):
    """Unused."""
