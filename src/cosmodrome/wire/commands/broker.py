"""A broker's settings, runtime figures and housekeeping."""

from __future__ import annotations

from cosmodrome.wire.commands.fields import DROPPED, Int32, Int64
from cosmodrome.wire.needs import ADMIN, PEER
from cosmodrome.wire.table import BROKER, SETTINGS_BYTES_MAX, Command, Reply, command


class GetBrokerConfigReply(Reply):
    """Settings as properties text; `version` is a DataVersion in JSON."""

    version: str


@command(
    25, "UPDATE_BROKER_CONFIG", served_by=BROKER, needs=ADMIN, body_bytes_max=SETTINGS_BYTES_MAX
)
class UpdateBrokerConfig(Command[Reply]):
    """Change settings that are live, all of the request or nothing; the body is properties text."""


@command(26, "GET_BROKER_CONFIG", served_by=BROKER, needs=ADMIN)
class GetBrokerConfig(Command[GetBrokerConfigReply]):
    """All settings as properties text."""


@command(27, "TRIGGER_DELETE_FILES", served_by=BROKER, planned=DROPPED)
class TriggerDeleteFiles(Command[Reply]):
    """Unused."""


@command(28, "GET_BROKER_RUNTIME_INFO", served_by=BROKER, needs=PEER)
class GetBrokerRuntimeInfo(Command[Reply]):
    """Runtime figures as text; answers KVTable."""


@command(907, "GET_BROKER_HA_STATUS", served_by=BROKER, needs=PEER)
class GetBrokerHaStatus(Command[Reply]):
    """How replication stands, seen by a master or by a slave; answers HARuntimeInfo."""


@command(306, "CLEAN_EXPIRED_CONSUMEQUEUE", served_by=BROKER, needs=ADMIN)
class CleanExpiredConsumequeue(Command[Reply]):
    """Drop queue files whose messages are gone; queues keep their offsets."""


@command(329, "DELETE_EXPIRED_COMMITLOG", served_by=BROKER, needs=ADMIN)
class DeleteExpiredCommitlog(Command[Reply]):
    """Drop expired log files now."""


@command(315, "VIEW_BROKER_STATS_DATA", served_by=BROKER, needs=ADMIN)
class ViewBrokerStatsData(Command[Reply]):
    """Sum, rate and average of one statistic; answers BrokerStatsData."""

    stats_name: str
    stats_key: str


@command(321, "QUERY_CONSUME_QUEUE", served_by=BROKER, needs=ADMIN)
class QueryConsumeQueue(Command[Reply]):
    """Entries of a consume queue; answers QueryConsumeQueueResponseBody."""

    topic: str | None = None
    queue_id: Int32 | None = None
    index: Int64 | None = None
    count: Int32 | None = None
    consumer_group: str | None = None
