"""Topics as a broker holds them."""

from __future__ import annotations

from cosmodrome.wire.commands.fields import DROPPED, Int32
from cosmodrome.wire.needs import ADMIN, KNOWN, PEER, SUB, topic
from cosmodrome.wire.table import BROKER, Command, Reply, command


@command(17, "UPDATE_AND_CREATE_TOPIC", served_by=BROKER, needs=ADMIN)
class UpdateAndCreateTopic(Command[Reply], kw_only=True):
    """Create a topic or change its queues and permission."""

    topic: str
    default_topic: str
    read_queue_nums: Int32
    write_queue_nums: Int32
    perm: Int32
    topic_filter_type: str
    topic_sys_flag: Int32 | None = None
    order: bool
    attributes: str | None = None  # Compat: 5.x
    force: bool | None = None  # Compat: 5.x


@command(215, "DELETE_TOPIC_IN_BROKER", served_by=BROKER, needs=ADMIN)
class DeleteTopicInBroker(Command[Reply]):
    """Forget a topic and drop its queues."""

    topic: str


@command(21, "GET_ALL_TOPIC_CONFIG", served_by=BROKER, needs=PEER)
class GetAllTopicConfig(Command[Reply]):
    """All topics with their version; answers TopicConfigSerializeWrapper."""


@command(22, "GET_TOPIC_CONFIG_LIST", served_by=BROKER, planned=DROPPED)
class GetTopicConfigList(Command[Reply]):
    """Unused."""


@command(23, "GET_TOPIC_NAME_LIST", served_by=BROKER, planned=DROPPED)
class GetTopicNameList(Command[Reply]):
    """Unused."""


@command(202, "GET_TOPIC_STATS_INFO", served_by=BROKER, needs=topic("topic", SUB))
class GetTopicStatsInfo(Command[Reply]):
    """Bounds and last store time of each queue; answers TopicStatsTable."""

    topic: str


@command(300, "QUERY_TOPIC_CONSUME_BY_WHO", served_by=BROKER, needs=topic("topic", SUB))
class QueryTopicConsumeByWho(Command[Reply]):
    """Groups that consume a topic; answers GroupList."""

    topic: str


@command(305, "GET_SYSTEM_TOPIC_LIST_FROM_BROKER", served_by=BROKER, needs=KNOWN)
class GetSystemTopicListFromBroker(Command[Reply]):
    """Topics the broker made for itself; answers TopicList."""


@command(316, "CLEAN_UNUSED_TOPIC", served_by=BROKER, needs=ADMIN)
class CleanUnusedTopic(Command[Reply]):
    """Drop queues on disk that belong to no known topic."""


@command(351, "GET_TOPIC_CONFIG", served_by=BROKER, needs=ADMIN)
class GetTopicConfig(Command[Reply]):
    """One topic; answers TopicConfig."""

    topic: str
