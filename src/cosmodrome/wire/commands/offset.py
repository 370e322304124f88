"""Offsets: a queue's bounds, a group's progress, and how to move it."""

from __future__ import annotations

from cosmodrome.layout import CODE_COMMIT
from cosmodrome.wire.commands.fields import DROPPED, Int32, Int64, OffsetReply, TimestampReply
from cosmodrome.wire.needs import ADMIN, PEER, SUB, group, topic
from cosmodrome.wire.table import ANY_BODY, BROKER, CLIENT, Command, Reply, command


@command(
    14,
    "QUERY_CONSUMER_OFFSET",
    served_by=BROKER,
    needs=topic("topic", SUB) & group("consumer_group", SUB),
)
class QueryConsumerOffset(Command[OffsetReply]):
    """Ask for the offset that a group has committed in a queue."""

    consumer_group: str
    topic: str
    queue_id: Int32


@command(
    CODE_COMMIT,
    "UPDATE_CONSUMER_OFFSET",
    served_by=BROKER,
    needs=topic("topic", SUB) & group("consumer_group", SUB),
)
class UpdateConsumerOffset(Command[Reply]):
    """Commit an offset of a group in a queue. It may be smaller than the one before."""

    consumer_group: str
    topic: str
    queue_id: Int32
    commit_offset: Int64


@command(29, "SEARCH_OFFSET_BY_TIMESTAMP", served_by=BROKER, needs=topic("topic", SUB))
class SearchOffsetByTimestamp(Command[OffsetReply]):
    """Offset of the message stored at or after a time."""

    topic: str
    queue_id: Int32
    timestamp: Int64


@command(30, "GET_MAX_OFFSET", served_by=BROKER, needs=topic("topic", SUB))
class GetMaxOffset(Command[OffsetReply]):
    """Offset that the next message of this queue will receive."""

    topic: str
    queue_id: Int32


@command(31, "GET_MIN_OFFSET", served_by=BROKER, needs=topic("topic", SUB))
class GetMinOffset(Command[OffsetReply]):
    """Offset of the oldest message of this queue that is still kept."""

    topic: str
    queue_id: Int32


@command(32, "GET_EARLIEST_MSG_STORETIME", served_by=BROKER, needs=topic("topic", SUB))
class GetEarliestMsgStoretime(Command[TimestampReply]):
    """Store time of the oldest message of this queue that is still kept."""

    topic: str
    queue_id: Int32


@command(43, "GET_ALL_CONSUMER_OFFSET", served_by=BROKER, needs=PEER)
class GetAllConsumerOffset(Command[Reply]):
    """Progress of every group, as a replica copies it; answers ConsumerOffsetSerializeWrapper."""


@command(45, "GET_ALL_DELAY_OFFSET", served_by=BROKER, needs=PEER)
class GetAllDelayOffset(Command[Reply]):
    """Progress of every delay level, as a replica copies it."""


@command(13, "QUERY_BROKER_OFFSET", served_by=BROKER, planned=DROPPED)
class QueryBrokerOffset(Command[Reply]):
    """Unused."""


@command(211, "RESET_CONSUMER_OFFSET_IN_CONSUMER", served_by=BROKER, planned=DROPPED)
class ResetConsumerOffsetInConsumer(Command[Reply]):
    """Unused."""


@command(212, "RESET_CONSUMER_OFFSET_IN_BROKER", served_by=BROKER, planned=DROPPED)
class ResetConsumerOffsetInBroker(Command[Reply]):
    """Unused."""


@command(220, "RESET_CONSUMER_CLIENT_OFFSET", served_by=CLIENT, body_bytes_max=ANY_BODY)
class ResetConsumerClientOffset(Command[Reply]):
    """Tell a consumer to go on from other offsets; the body lists them."""

    topic: str
    group: str
    timestamp: Int64
    is_force: bool | None = None


@command(221, "GET_CONSUMER_STATUS_FROM_CLIENT", served_by=CLIENT)
class GetConsumerStatusFromClient(Command[Reply]):
    """Ask a consumer for its offsets; answers GetConsumerStatusBody."""

    topic: str
    group: str
    client_addr: str | None = None


@command(222, "INVOKE_BROKER_TO_RESET_OFFSET", served_by=BROKER, needs=ADMIN)
class InvokeBrokerToResetOffset(Command[Reply]):
    """Move a group's progress to a time (-1: the end) and tell its consumers."""

    topic: str
    group: str
    timestamp: Int64
    is_force: bool


@command(223, "INVOKE_BROKER_TO_GET_CONSUMER_STATUS", served_by=BROKER, needs=ADMIN)
class InvokeBrokerToGetConsumerStatus(Command[Reply]):
    """Offsets as the consumers of a group see them; answers GetConsumerStatusBody."""

    topic: str
    group: str
    client_addr: str | None = None


@command(308, "QUERY_CORRECTION_OFFSET", served_by=BROKER, needs=ADMIN)
class QueryCorrectionOffset(Command[Reply], kw_only=True):
    """Smallest progress of some groups against that of another."""

    filter_groups: str | None = None
    compare_group: str
    topic: str


@command(314, "CLONE_GROUP_OFFSET", served_by=BROKER, needs=ADMIN)
class CloneGroupOffset(Command[Reply]):
    """Give one group the progress of another."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool | None = None
