"""Sending messages: one at a time, in batches, and replies to a request-reply producer.

The five send rows differ in wire names only; `SendRequest` is what a handler works with.
"""

from __future__ import annotations

from msgspec import field

from cosmodrome.errors import Code
from cosmodrome.layout import CODE_SEND, CODE_SEND_BATCH, CODE_SEND_V2
from cosmodrome.wire.commands.fields import Int32, Int64
from cosmodrome.wire.needs import ADMIN, PUB, topic
from cosmodrome.wire.table import ANY_BODY, BROKER, CLIENT, Command, Reply, command

# All of these mean "stored"; the later three add that a further promise was not kept in time.
STORED = (
    Code.SUCCESS,
    Code.FLUSH_DISK_TIMEOUT,
    Code.SLAVE_NOT_AVAILABLE,
    Code.FLUSH_SLAVE_TIMEOUT,
)


class SendReply(Reply):
    """Where the message was stored; a batch has a comma list of ids and the first offset."""

    msg_id: str
    queue_id: Int32
    queue_offset: Int64
    transaction_id: str | None = None
    region: str | None = field(default=None, name="MSG_REGION")
    trace_on: bool | None = field(default=None, name="TRACE_ON")
    recall_handle: str | None = None  # Compat: 5.x, for timer messages


class SendRequest(Command[SendReply], kw_only=True):
    """What every send carries, under the long names of SEND_MESSAGE."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    properties: str | None = None
    reconsume_times: Int32 | None = None
    unit_mode: bool | None = None
    max_reconsume_times: Int32 | None = None
    batch: bool | None = None
    broker_name: str | None = field(default=None, name="bname")


class ShortSendRequest(SendRequest, kw_only=True):
    """The same fields under one-letter names, as all later clients send them."""

    producer_group: str = field(name="a")
    topic: str = field(name="b")
    default_topic: str = field(name="c")
    default_topic_queue_nums: Int32 = field(name="d")
    queue_id: Int32 = field(name="e")
    sys_flag: Int32 = field(name="f")
    born_timestamp: Int64 = field(name="g")
    flag: Int32 = field(name="h")
    properties: str | None = field(default=None, name="i")
    reconsume_times: Int32 | None = field(default=None, name="j")
    unit_mode: bool | None = field(default=None, name="k")
    max_reconsume_times: Int32 | None = field(default=None, name="l")
    batch: bool | None = field(default=None, name="m")
    broker_name: str | None = field(default=None, name="n")


@command(
    CODE_SEND,
    "SEND_MESSAGE",
    served_by=BROKER,
    needs=topic("topic", PUB),
    success=STORED,
    body_bytes_max=ANY_BODY,
)
class SendMessage(SendRequest):
    """Store one message; the body is the message body."""


@command(
    CODE_SEND_V2,
    "SEND_MESSAGE_V2",
    served_by=BROKER,
    needs=topic("topic", PUB),
    success=STORED,
    body_bytes_max=ANY_BODY,
)
class SendMessageV2(ShortSendRequest):
    """Store one message; SEND_MESSAGE with one-letter field names."""


@command(
    CODE_SEND_BATCH,
    "SEND_BATCH_MESSAGE",
    served_by=BROKER,
    needs=topic("topic", PUB),
    success=STORED,
    body_bytes_max=ANY_BODY,
)
class SendBatchMessage(ShortSendRequest):
    """Store several messages of one queue, all or none; the body is a run of batch items."""


@command(
    324,
    "SEND_REPLY_MESSAGE",
    served_by=BROKER,
    needs=topic("topic", PUB),
    success=STORED,
    body_bytes_max=ANY_BODY,
)
class SendReplyMessage(SendRequest):
    """Hand a reply to the producer that waits for it."""


@command(
    325,
    "SEND_REPLY_MESSAGE_V2",
    served_by=BROKER,
    needs=topic("topic", PUB),
    success=STORED,
    body_bytes_max=ANY_BODY,
)
class SendReplyMessageV2(ShortSendRequest):
    """SEND_REPLY_MESSAGE with one-letter field names."""


class RecallMessageReply(Reply):
    """The unique key of the message that was called back."""

    msg_id: str


@command(370, "RECALL_MESSAGE", served_by=BROKER, needs=topic("topic", PUB))
class RecallMessage(Command[RecallMessageReply], kw_only=True):
    """Cancel a timed message that is still waiting; the handle came with the answer to its send."""

    producer_group: str | None = None
    topic: str
    recall_handle: str


class ListPendingTimersReply(Reply):
    """How many timed messages wait in all, and where to go on when there are more."""

    waiting: Int64
    next_deliver_ms: Int64 | None = None
    next_queue_offset: Int64 | None = None


# Ours: upstream has no request for this, and none of its codes is near.
@command(31001, "LIST_PENDING_TIMERS", served_by=BROKER, needs=ADMIN)
class ListPendingTimers(Command[ListPendingTimersReply], kw_only=True):
    """Timed messages that wait, the next due first (ours); answers PendingTimers. Go on with the
    answer's next… as after…; an answer without them was the last."""

    topic: str | None = None
    max_num: Int32 = 100
    after_deliver_ms: Int64 = -1
    after_queue_offset: Int64 = -1


@command(326, "PUSH_REPLY_MESSAGE_TO_CLIENT", served_by=CLIENT, body_bytes_max=ANY_BODY)
class PushReplyMessageToClient(Command[Reply], kw_only=True):
    """Deliver a reply to the producer that asked; the body is the message body."""

    producer_group: str
    topic: str
    default_topic: str
    default_topic_queue_nums: Int32
    queue_id: Int32
    sys_flag: Int32
    born_timestamp: Int64
    flag: Int32
    properties: str | None = None
    reconsume_times: Int32 | None = None
    unit_mode: bool | None = None
    born_host: str
    store_host: str
    store_timestamp: Int64
