"""JSON bodies of reports: the progress of consumers and slaves, and what members are told.

Read and written by `bodies.decode` and `bodies.encode`.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType, field

from cosmodrome.wire.bodies import Body, MessageQueue, SubscriptionData


class ResetOffsetBody(Body, kw_only=True):
    """Where the members of a group go on."""

    object_keys = True

    offset_table: dict[MessageQueue, int] = field(default_factory=dict)


class MessageQueueForC(Body, kw_only=True):
    broker_name: str
    offset: int
    queue_id: int
    topic: str


class ResetOffsetBodyForC(Body, kw_only=True):
    """ResetOffsetBody for C++ clients, which cannot read objects as keys."""

    offset_table: list[MessageQueueForC] = field(default_factory=list)


class GetConsumerStatusBody(Body, kw_only=True):
    """Offsets as consumers see them: a member's own, or by client id."""

    object_keys = True

    consumer_table: dict[str, dict[MessageQueue, int]] = field(default_factory=dict)
    message_queue_table: dict[MessageQueue, int] = field(default_factory=dict)


class QueryCorrectionOffsetBody(Body, kw_only=True):
    bare_keys = True

    correction_offsets: dict[int, int] = field(default_factory=dict)


class QueueTimeSpan(Body, kw_only=True):
    """Store times in one queue: of its ends, and of where a group is; each also as text."""

    consume_time_stamp: int = 0
    consume_time_stamp_str: str = ""
    delay_time: int = 0
    max_time_stamp: int = 0
    max_time_stamp_str: str = ""
    message_queue: MessageQueue
    min_time_stamp: int = 0
    min_time_stamp_str: str = ""


class QueryConsumeTimeSpanBody(Body, kw_only=True):
    consume_time_span_set: list[QueueTimeSpan] = field(default_factory=list)


class ConsumeQueueData(Body, kw_only=True):
    bit_map: str | UnsetType = UNSET
    eval: bool = False
    extend_data_json: str | UnsetType = UNSET
    msg: str | UnsetType = UNSET
    physic_offset: int = 0
    physic_size: int = 0
    tags_code: int = 0


class QueryConsumeQueueResponseBody(Body, kw_only=True):
    filter_data: str | UnsetType = UNSET
    max_queue_index: int = 0
    min_queue_index: int = 0
    queue_data: list[ConsumeQueueData] = field(default_factory=list)
    subscription_data: SubscriptionData | UnsetType = UNSET


class PendingTimer(Body, kw_only=True):
    """A timed message that waits; the handle calls it back and is empty when nothing can."""

    topic: str
    queue_id: int
    deliver_ms: int
    msg_id: str
    recall_handle: str
    size: int


class PendingTimers(Body, kw_only=True):
    pending: list[PendingTimer] = field(default_factory=list)


class HAConnectionRuntimeInfo(Body, kw_only=True):
    """A slave, as its master sees it. What follows `transferred_byte_in_second` is ours."""

    addr: str = ""
    diff: int = 0
    in_sync: bool = False
    slave_ack_offset: int = 0
    transfer_from_where: int = 0
    transferred_byte_in_second: int = 0
    node: str | UnsetType = UNSET  # broker name and id; a classic slave does not say who it is
    classic: bool | UnsetType = UNSET
    lag_seconds: float | UnsetType = UNSET
    silent_seconds: float | UnsetType = UNSET


class HAClientRuntimeInfo(Body, kw_only=True):
    """A slave, as it sees itself. What follows `transferred_byte_in_second` is ours."""

    last_read_timestamp: int = 0
    last_write_timestamp: int = 0
    master_addr: str | UnsetType | None = UNSET
    master_flush_offset: int = 0
    max_offset: int = 0
    transferred_byte_in_second: int = 0
    state: str | UnsetType = UNSET
    why: str | UnsetType = UNSET
    classic: bool | UnsetType = UNSET
    master_max_offset: int | UnsetType = UNSET
    lag_bytes: int | UnsetType = UNSET
    lag_seconds: float | UnsetType = UNSET
    silent_seconds: float | UnsetType = UNSET
    copied_percent: float | UnsetType = UNSET
    links_made: int | UnsetType = UNSET


class HARuntimeInfo(Body, kw_only=True):
    """How replication stands at one broker. What follows `master_commit_log_max_offset` is ours."""

    ha_client_runtime_info: HAClientRuntimeInfo = field(default_factory=HAClientRuntimeInfo)
    ha_connection_info: list[HAConnectionRuntimeInfo] = field(default_factory=list)
    in_sync_slave_nums: int = 0
    master: bool = False
    master_commit_log_max_offset: int = 0
    broker_role: str | UnsetType = UNSET
    refused_links: int | UnsetType = UNSET
    refused_why: str | UnsetType = UNSET


class AccountInfo(Body, kw_only=True):
    """An account without its secret."""

    access_key: str
    white_remote_address: str = ""
    admin: bool = False
    peer: bool = False
    default_topic_perm: str = "DENY"
    default_group_perm: str = "DENY"
    topic_perms: list[str] = field(default_factory=list)
    group_perms: list[str] = field(default_factory=list)


class AccountList(Body, kw_only=True):
    accounts: list[AccountInfo] = field(default_factory=list)
    global_white_remote_addresses: list[str] = field(default_factory=list)
