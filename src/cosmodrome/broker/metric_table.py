"""Every metric that a broker tells, once: name, kind, meaning, labels.

Names and labels that begin with `rocketmq_` are those of RocketMQ 5.x, so that its boards and
alerts find them; `cosmodrome_` are our own. `UNSERVED` has the names of 5.x that are not told,
each with its reason; `LEFT_OUT` the labels that a served one lacks. docs/metrics.md is made of
this table.
"""

from __future__ import annotations

from cosmodrome.transport.exposition import Metric

_rows: list[Metric] = []


def _counter(name: str, text: str, *labels: str) -> Metric:
    return _row(Metric(name, "counter", text, labels))


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return _row(Metric(name, "gauge", text, labels))


def _row(metric: Metric) -> Metric:
    _rows.append(metric)
    return metric


_LAG = ("consumer_group", "topic", "is_retry", "is_system")
_STORAGE = ("storage_type", "storage_medium")

# --- the broker as a whole -----------------------------------------------------------------------

READY = _gauge("cosmodrome_ready", "1 when clients can use this broker, as /readyz says.")
PERMISSION = _gauge("rocketmq_broker_permission", "4 read + 2 write, for all topics.")
TOPICS = _gauge("rocketmq_topic_number", "Topics in this broker's table.")
GROUPS = _gauge("rocketmq_consumer_group_number", "Consumer groups in this broker's table.")
WATERMARK = _gauge(
    "rocketmq_processor_watermark",
    "Requests taken and not answered: send, those that wait for the disk; admin, those that run as"
    " tasks. All others are answered in the turn of the loop that reads them.",
    "processor",
)
LOOP_LATE = _gauge(
    "cosmodrome_loop_late_seconds",
    "How late the last beat of the event loop was: the time that a request waits for its turn.",
)
CONNECTIONS = _gauge("cosmodrome_connections", "Open connections of clients and tools.")
IN_FLIGHT = _gauge(
    "cosmodrome_requests_in_flight", "Requests without an answer yet, pulls on hold included."
)
HELD_BYTES = _gauge(
    "cosmodrome_connection_held_bytes", "Unfinished requests and replies that peers do not take."
)
PULLS_HELD = _gauge("cosmodrome_pulls_held", "Pulls that wait for a message.")
REQUESTS = _counter("cosmodrome_requests_total", "Requests by name of their code.", "request_code")
ERRORS = _counter(
    "cosmodrome_request_errors_total",
    "Requests answered with something else than success, by name of their code.",
    "request_code",
)
SLOW = _counter(
    "cosmodrome_slow_requests_total",
    "Requests that took slowRequestMillis or longer; not those of the fast lane.",
    "request_code",
)
RPC_LATENCY = _row(
    Metric(
        "rocketmq_rpc_latency",
        "histogram",
        "Milliseconds from the append of a sent message until its answer could leave; sends of all"
        " codes together, no other requests. Whole milliseconds are counted, and no sum.",
        ("protocol_type", "request_code", "response_code", "is_long_polling", "result"),
    )
)
OVERLOADED = _counter(
    "cosmodrome_sends_refused_overloaded_total", "Sends answered busy because of a late loop."
)
SEND_FAILURES = _counter("cosmodrome_send_failures_total", "Sends that were refused or failed.")
PULLS_FOUND = _counter("cosmodrome_pulls_found_total", "Pulls answered with messages.")
PULLS_MISSED = _counter("cosmodrome_pulls_missed_total", "Pulls that found nothing at first.")
PULL_FAILURES = _counter("cosmodrome_pull_failures_total", "Pulls that were refused.")
PULL_SECONDS = _counter(
    "cosmodrome_pull_seconds_total", "Time spent reading for pulls that brought messages."
)

# --- the store -----------------------------------------------------------------------------------

WRITABLE = _gauge("cosmodrome_store_writable", "1 while the store takes messages.")
STORAGE_SIZE = _gauge("rocketmq_storage_size", "Bytes of the commit log.", *_STORAGE)
FLUSH_BEHIND = _gauge(
    "rocketmq_storage_flush_behind_bytes", "Bytes written and not known to be synced.", *_STORAGE
)
DISPATCH_BEHIND = _gauge(
    "rocketmq_storage_dispatch_behind_bytes", "Bytes written and in no queue yet.", *_STORAGE
)
RESERVE_TIME = _gauge(
    "rocketmq_storage_message_reserve_time",
    "Milliseconds since the oldest message was stored; absent without a message.",
    *_STORAGE,
)
DISK_RATIO = _gauge("cosmodrome_disk_used_ratio", "Share of the store's disk that is used, 0 to 1.")
LOG_END = _counter(
    "cosmodrome_log_bytes_total", "Bytes that the log has ever taken: the offset of its end."
)
PUTS = _counter("cosmodrome_store_messages_total", "Messages stored, for whatever reason.")
PUT_FAILURES = _counter("cosmodrome_store_failures_total", "Messages that were not stored.")
QUEUES = _gauge("cosmodrome_queues", "Queues that have files or messages.")

# --- messages that wait --------------------------------------------------------------------------

DELAYED = _gauge("cosmodrome_delay_level_messages", "Messages that wait in a delay level.", "level")
DELAY_LATE = _gauge(
    "cosmodrome_delay_level_late_seconds",
    "How long the next message of a delay level is overdue, 0 when it is not.",
    "level",
)
TIMED = _gauge("rocketmq_timing_messages", "Messages that wait for a delivery time of their own.")
TIMER_ENQUEUE_LAG = _gauge(
    "rocketmq_timer_enqueue_lag", "Timed messages stored and not taken in yet."
)
TIMER_ENQUEUE_LATENCY = _gauge(
    "rocketmq_timer_enqueue_latency",
    "Milliseconds since the first of those was stored; absent when that is not known.",
)
TIMER_DEQUEUE_LATENCY = _gauge(
    "rocketmq_timer_dequeue_latency", "Milliseconds by which the next timed message is overdue."
)
TIMER_ENQUEUED = _counter(
    "rocketmq_timer_enqueue_total", "Timed messages ever stored, cancellations included."
)
TRANSACTIONS_ASKED = _counter(
    "cosmodrome_transaction_checks_total", "Questions to producers how a transaction ended."
)
TRANSACTIONS_GIVEN_UP = _counter(
    "cosmodrome_transactions_given_up_total", "Transactions that nobody decided in time."
)
COMMITS = _counter("rocketmq_commit_messages_total", "Transactions committed.", "topic")
ROLLBACKS = _counter("rocketmq_rollback_messages_total", "Transactions rolled back.", "topic")
FINISH_LATENCY = _row(
    Metric(
        "rocketmq_finish_message_latency",
        "histogram",
        "Milliseconds from the half of a transaction until its end was stored.",
        ("topic",),
    )
)
RETRIED = _counter("cosmodrome_messages_retried_total", "Messages given back and tried again.")

# --- clients -------------------------------------------------------------------------------------

PRODUCERS = _gauge(
    "rocketmq_producer_connections",
    "Members of producer groups.",
    *("language", "version", "protocol_type"),
)
CONSUMERS = _gauge(
    "rocketmq_consumer_connections",
    "Members of a consumer group.",
    *("consumer_group", "language", "version", "consume_mode", "protocol_type", "is_system"),
)

# --- by topic and group --------------------------------------------------------------------------

MESSAGES_IN = _counter(
    "rocketmq_messages_in_total",
    "Messages stored in a topic.",
    *("topic", "message_type", "is_system"),
)
BYTES_IN = _counter(
    "rocketmq_throughput_in_total",
    "Bytes stored in a topic, as records.",
    *("topic", "message_type", "is_system"),
)
DEAD = _counter(
    "rocketmq_send_to_dlq_messages_total",
    "Messages ever put aside as dead letters of a group.",
    *("consumer_group", "topic", "is_system"),
)
MESSAGES_OUT = _counter(
    "rocketmq_messages_out_total",
    "Messages that a group pulled.",
    *("topic", "consumer_group", "is_system", "is_retry"),
)
BYTES_OUT = _counter(
    "rocketmq_throughput_out_total",
    "Bytes that a group pulled, as records.",
    *("topic", "consumer_group", "is_system", "is_retry"),
)
LAG_MESSAGES = _gauge(
    "rocketmq_consumer_lag_messages",
    "Messages that a group has not consumed, in the queues where that is known.",
    *_LAG,
)
LAG_SECONDS = _gauge(
    "cosmodrome_consumer_lag_seconds",
    "Age of the oldest message that a group has not consumed; absent when that is not known.",
    *_LAG,
)
LAG_UNKNOWN = _gauge(
    "cosmodrome_consumer_unknown_queues",
    "Queues with messages in which a group has committed no offset, or one beyond the end.",
    *_LAG,
)
LAG_LATENCY = _gauge(
    "rocketmq_consumer_lag_latency", "The same as the lag in seconds, in milliseconds.", *_LAG
)
IN_FLIGHT_MESSAGES = _gauge(
    "rocketmq_consumer_inflight_messages",
    "Messages pulled and not committed; absent unless all queues were pulled since the start.",
    *_LAG,
)
READY_MESSAGES = _gauge(
    "rocketmq_consumer_ready_messages", "Messages not pulled yet; absent likewise.", *_LAG
)
QUEUEING_LATENCY = _gauge(
    "rocketmq_consumer_queueing_latency",
    "Age in milliseconds of the oldest message not pulled yet; absent likewise.",
    *_LAG,
)

TABLE: tuple[Metric, ...] = tuple(_rows)

# Labels of 5.x that a metric lacks here, and why.
_NO_TOPIC = ("topic", "kept for all topics together; by topic it would mean to read each record")
LEFT_OUT: dict[str, tuple[str, str]] = {
    metric.name: _NO_TOPIC
    for metric in (
        *(TIMED, TIMER_ENQUEUE_LAG, TIMER_ENQUEUE_LATENCY, TIMER_DEQUEUE_LATENCY, TIMER_ENQUEUED),
    )
}

_REASONS = {
    "it would mean to count each message on its way in; divide rocketmq_throughput_in_total by"
    " rocketmq_messages_in_total for the average": "rocketmq_message_size",
    "halves are not kept by topic; `cosmo tx list` shows them and"
    " cosmodrome_transactions_given_up_total those that nobody decided": "rocketmq_half_messages",
    "changes by administrators are in the audit log, slow ones in the slow-request log": """
        rocketmq_topic_create_execution_time rocketmq_consumer_group_create_execution_time
    """,
    "rocketmq_timer_dequeue_latency says whether anything is due and waits; delivered messages"
    " count as messages in of their topics": """
        rocketmq_timer_dequeue_lag rocketmq_timer_dequeue_total rocketmq_timer_message_snapshot
    """,
    "cosmodrome_delay_level_late_seconds says how late deliveries are now": (
        "rocketmq_delay_message_latency"
    ),
    "POP consumption is not served": """
        rocketmq_pop_revive_in_message_total rocketmq_pop_revive_out_message_total
        rocketmq_pop_revive_retry_messages_total rocketmq_pop_revive_lag
        rocketmq_pop_revive_latency rocketmq_pop_offset_buffer_size
        rocketmq_pop_checkpoint_buffer_size rocketmq_pop_buffer_scan_time_consume
    """,
    "there is no gRPC proxy": "rocketmq_proxy_up",
    "there is no tiered storage": """
        rocketmq_tiered_store_api_latency rocketmq_tiered_store_dispatch_behind
        rocketmq_tiered_store_dispatch_latency rocketmq_tiered_store_messages_dispatch_total
        rocketmq_tiered_store_messages_out_total
        rocketmq_tiered_store_get_message_fallback_total rocketmq_tiered_store_provider_rpc_latency
        rocketmq_tiered_store_provider_upload_bytes rocketmq_tiered_store_provider_download_bytes
        rocketmq_tiered_store_read_ahead_cache_count rocketmq_tiered_store_read_ahead_cache_bytes
        rocketmq_tiered_store_read_ahead_cache_access_total
        rocketmq_tiered_store_read_ahead_cache_hit_total
    """,
    "there is no controller": """
        role dledger_disk_usage active_broker_num request_total request_latency dledger_op_total
        dledger_op_latency election_total
    """,
}
UNSERVED: dict[str, str] = {
    name: reason for reason, names in _REASONS.items() for name in names.split()
}
