"""JSON bodies about the progress of consumers: what operators ask for and what members are told.

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
