"""Reading messages: pull, look one up, search by key, and hand one back for a retry."""

from __future__ import annotations

from msgspec import field

from cosmodrome.errors import Code
from cosmodrome.layout import CODE_PULL
from cosmodrome.wire.commands.fields import Int32, Int64
from cosmodrome.wire.needs import ADMIN, SUB, group, stored, topic
from cosmodrome.wire.table import ANY_BODY, BROKER, CLIENT, FILTERSERVER, Command, Reply, command

# Each of these carries the four offsets, whether or not it brings messages.
PULLED = (
    Code.SUCCESS,
    Code.PULL_NOT_FOUND,
    Code.PULL_RETRY_IMMEDIATELY,
    Code.PULL_OFFSET_MOVED,
)


class PullReply(Reply):
    """Records as they lie in the log, and where to pull next."""

    suggest_which_broker_id: Int64
    next_begin_offset: Int64
    min_offset: Int64
    max_offset: Int64
    group_sys_flag: Int32 | None = None  # Compat: 5.x
    topic_sys_flag: Int32 | None = None  # Compat: 5.x


class PullRequest(Command[PullReply], kw_only=True):
    """What every pull carries."""

    consumer_group: str
    topic: str
    queue_id: Int32
    queue_offset: Int64
    max_msg_nums: Int32
    sys_flag: Int32
    commit_offset: Int64
    suspend_timeout_millis: Int64
    subscription: str | None = None
    sub_version: Int64
    expression_type: str | None = None  # absent means TAG
    max_msg_bytes: Int32 | None = None  # Compat: 5.x


@command(
    CODE_PULL,
    "PULL_MESSAGE",
    served_by=(BROKER, FILTERSERVER),
    needs=topic("topic", SUB) & group("consumer_group", SUB),
    success=PULLED,
)
class PullMessage(PullRequest):
    """Messages of one queue from an offset on; may wait for the first to arrive."""


@command(
    361,
    "LITE_PULL_MESSAGE",
    served_by=BROKER,
    needs=topic("topic", SUB) & group("consumer_group", SUB),
    success=PULLED,
)
class LitePullMessage(PullRequest):
    """PULL_MESSAGE as 5.x lite-pull consumers send it."""


class QueryMessageReply(Reply):
    """Matching records, and how far the key index has come."""

    index_last_update_timestamp: Int64
    index_last_update_phyoffset: Int64


@command(12, "QUERY_MESSAGE", served_by=BROKER, needs=topic("topic", SUB))
class QueryMessage(Command[QueryMessageReply]):
    """Messages of a topic that carry a key, stored between two times."""

    topic: str
    key: str
    max_num: Int32
    begin_timestamp: Int64
    end_timestamp: Int64
    unique_key_query: bool | None = field(default=None, name="_UNIQUE_KEY_QUERY")


@command(33, "VIEW_MESSAGE_BY_ID", served_by=BROKER, needs=stored("offset", SUB))
class ViewMessageById(Command[Reply]):
    """The record at a log offset."""

    offset: Int64


@command(
    36,
    "CONSUMER_SEND_MSG_BACK",
    served_by=BROKER,
    needs=group("group", SUB) & stored("offset", SUB),
)
class ConsumerSendMsgBack(Command[Reply]):
    """Give a message that could not be processed back for a later attempt."""

    offset: Int64
    group: str
    delay_level: Int32
    origin_msg_id: str | None = None
    origin_topic: str | None = None
    unit_mode: bool | None = None
    max_reconsume_times: Int32 | None = None


@command(
    309,
    "CONSUME_MESSAGE_DIRECTLY",
    served_by=(BROKER, CLIENT),
    needs=ADMIN,
    body_bytes_max=ANY_BODY,
)
class ConsumeMessageDirectly(Command[Reply]):
    """Let one consumer process one message now; the broker relays to the client."""

    consumer_group: str
    client_id: str | None = None
    msg_id: str | None = None
    broker_name: str | None = None
    topic: str | None = None  # Compat: 5.x
    topic_sys_flag: Int32 | None = None  # Compat: 5.x
    group_sys_flag: Int32 | None = None  # Compat: 5.x
