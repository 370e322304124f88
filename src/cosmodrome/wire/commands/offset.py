"""Offsets: a queue's bounds, a group's progress, and how to move it."""

from __future__ import annotations

from cosmodrome.wire.commands.fields import Int32, Int64, OffsetReply, TimestampReply
from cosmodrome.wire.table import BROKER, CLIENT, Command, Reply, command

_DROPPED = "dropped upstream: never sent by any client"


@command(14, "QUERY_CONSUMER_OFFSET", served_by=BROKER)
class QueryConsumerOffset(Command[OffsetReply]):
    """How far a group has come in a queue."""

    consumer_group: str
    topic: str
    queue_id: Int32


@command(15, "UPDATE_CONSUMER_OFFSET", served_by=BROKER)
class UpdateConsumerOffset(Command[Reply]):
    """Record how far a group has come in a queue; a smaller value is taken too."""

    consumer_group: str
    topic: str
    queue_id: Int32
    commit_offset: Int64


@command(29, "SEARCH_OFFSET_BY_TIMESTAMP", served_by=BROKER)
class SearchOffsetByTimestamp(Command[OffsetReply]):
    """Offset of the message stored at or after a time."""

    topic: str
    queue_id: Int32
    timestamp: Int64


@command(30, "GET_MAX_OFFSET", served_by=BROKER)
class GetMaxOffset(Command[OffsetReply]):
    """Offset that the next message of this queue will receive."""

    topic: str
    queue_id: Int32


@command(31, "GET_MIN_OFFSET", served_by=BROKER)
class GetMinOffset(Command[OffsetReply]):
    """Offset of the oldest message of this queue that is still kept."""

    topic: str
    queue_id: Int32


@command(32, "GET_EARLIEST_MSG_STORETIME", served_by=BROKER)
class GetEarliestMsgStoretime(Command[TimestampReply]):
    """Store time of the oldest message of this queue that is still kept."""

    topic: str
    queue_id: Int32


@command(43, "GET_ALL_CONSUMER_OFFSET", served_by=BROKER)
class GetAllConsumerOffset(Command[Reply]):
    """Progress of every group, as a replica copies it; answers ConsumerOffsetSerializeWrapper."""


@command(45, "GET_ALL_DELAY_OFFSET", served_by=BROKER)
class GetAllDelayOffset(Command[Reply]):
    """Progress of every delay level, as a replica copies it."""


@command(13, "QUERY_BROKER_OFFSET", served_by=BROKER, planned=_DROPPED)
class QueryBrokerOffset(Command[Reply]):
    """Unused."""


@command(211, "RESET_CONSUMER_OFFSET_IN_CONSUMER", served_by=BROKER, planned=_DROPPED)
class ResetConsumerOffsetInConsumer(Command[Reply]):
    """Unused."""


@command(212, "RESET_CONSUMER_OFFSET_IN_BROKER", served_by=BROKER, planned=_DROPPED)
class ResetConsumerOffsetInBroker(Command[Reply]):
    """Unused."""


@command(220, "RESET_CONSUMER_CLIENT_OFFSET", served_by=CLIENT)
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


@command(222, "INVOKE_BROKER_TO_RESET_OFFSET", served_by=BROKER)
class InvokeBrokerToResetOffset(Command[Reply]):
    """Move a group's progress to a time (-1: the end) and tell its consumers."""

    topic: str
    group: str
    timestamp: Int64
    is_force: bool


@command(223, "INVOKE_BROKER_TO_GET_CONSUMER_STATUS", served_by=BROKER)
class InvokeBrokerToGetConsumerStatus(Command[Reply]):
    """Offsets as the consumers of a group see them; answers GetConsumerStatusBody."""

    topic: str
    group: str
    client_addr: str | None = None


@command(308, "QUERY_CORRECTION_OFFSET", served_by=BROKER)
class QueryCorrectionOffset(Command[Reply], kw_only=True):
    """Smallest progress of some groups against that of another."""

    filter_groups: str | None = None
    compare_group: str
    topic: str


@command(314, "CLONE_GROUP_OFFSET", served_by=BROKER)
class CloneGroupOffset(Command[Reply]):
    """Give one group the progress of another."""

    src_group: str
    dest_group: str
    topic: str | None = None
    offline: bool | None = None
