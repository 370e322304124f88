"""5.x consumption without client-side rebalance: assignments, POP, acknowledgements."""

from __future__ import annotations

from cosmodrome.wire.commands.fields import Int32, Int64
from cosmodrome.wire.table import BROKER, Command, Reply, command

_NO_POP = "there is no POP consumption (5.x) yet"


@command(
    400,
    "QUERY_ASSIGNMENT",
    served_by=BROKER,
    planned="brokers do not assign queues (5.x) yet",
)
class QueryAssignment(Command[Reply]):
    """Which queues a consumer should read; the body names group, topic and strategy."""


@command(401, "SET_MESSAGE_REQUEST_MODE", served_by=BROKER, planned=_NO_POP)
class SetMessageRequestMode(Command[Reply]):
    """Switch a group between PULL and POP; the body names group, topic and mode."""


class PopReply(Reply):
    """Records, and what their receipts are made of."""

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32
    rest_num: Int64
    start_offset_info: str | None = None
    msg_offset_info: str | None = None
    order_count_info: str | None = None


@command(200050, "POP_MESSAGE", served_by=BROKER, planned=_NO_POP)
class PopMessage(Command[PopReply]):
    """Take messages that stay invisible to others until acknowledged or timed out."""

    consumer_group: str
    topic: str
    queue_id: Int32
    max_msg_nums: Int32
    invisible_time: Int64
    poll_time: Int64
    born_time: Int64
    init_mode: Int32
    exp_type: str | None = None
    exp: str | None = None
    order: bool | None = None
    attempt_id: str | None = None


@command(200051, "ACK_MESSAGE", served_by=BROKER, planned=_NO_POP)
class AckMessage(Command[Reply]):
    """Acknowledge one message taken with POP."""

    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: Int64


class ChangeInvisibleTimeReply(Reply):
    """What the new receipt is made of."""

    pop_time: Int64
    invisible_time: Int64
    revive_qid: Int32


@command(200053, "CHANGE_MESSAGE_INVISIBLETIME", served_by=BROKER, planned=_NO_POP)
class ChangeMessageInvisibletime(Command[ChangeInvisibleTimeReply]):
    """Keep one message taken with POP invisible for longer or shorter."""

    consumer_group: str
    topic: str
    queue_id: Int32
    extra_info: str
    offset: Int64
    invisible_time: Int64
