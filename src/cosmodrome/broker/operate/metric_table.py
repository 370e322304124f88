"""Every metric of a broker, once: name, kind, meaning, labels.

Names and labels that begin with `rocketmq_` are those of RocketMQ 5.x, so that its boards and
alerts find them; `cosmodrome_` are our own. `UNSERVED` has the names of 5.x that are not
served, each with its reason; `LEFT_OUT` has the labels that a served one lacks. docs/metrics.md is
made from this table.
"""

from __future__ import annotations

from cosmodrome.transport.http.exposition import Metric

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
PERMISSION = _gauge(
    "rocketmq_broker_permission", "Permissions of the broker for all topics: 4 (read) + 2 (write)."
)
TOPICS = _gauge("rocketmq_topic_number", "Topics in this broker's table.")
GROUPS = _gauge("rocketmq_consumer_group_number", "Consumer groups in this broker's table.")
WATERMARK = _gauge(
    "rocketmq_processor_watermark",
    "Requests that are not answered yet. Processor send counts those that wait for the disk, admin"
    " those that run as tasks. All others are answered at once.",
    "processor",
)
LOOP_LATE = _gauge(
    "cosmodrome_loop_late_seconds",
    "How late the last tick of the event loop was. A request waits about as long for its turn.",
)
CERTIFICATE = _gauge(
    "cosmodrome_tls_certificate_seconds",
    "Seconds until the certificate of this server ends; only with TLS.",
)
CONNECTIONS = _gauge("cosmodrome_connections", "Open connections of clients and tools.")
IN_FLIGHT = _gauge(
    "cosmodrome_requests_in_flight", "Requests that are not answered yet, including pulls on hold."
)
HELD_BYTES = _gauge(
    "cosmodrome_connection_held_bytes",
    "Bytes of incomplete requests, and of replies that peers do not read.",
)
PULLS_HELD = _gauge("cosmodrome_pulls_held", "Pulls that wait for a message.")
REQUESTS = _counter(
    "cosmodrome_requests_total", "Requests, by the name of their code.", "request_code"
)
ERRORS = _counter(
    "cosmodrome_request_errors_total",
    "Requests that were not answered with success, by the name of their code.",
    "request_code",
)
SLOW = _counter(
    "cosmodrome_slow_requests_total",
    "Requests that took slowRequestMillis or longer. Requests of the fast lane are not counted.",
    "request_code",
)
RPC_LATENCY = _row(
    Metric(
        "rocketmq_rpc_latency",
        "histogram",
        "Milliseconds from the append of a sent message until its answer could be sent. Sends of"
        " all codes are counted together, and no other requests. Times are whole milliseconds."
        " There is no sum.",
        ("protocol_type", "request_code", "response_code", "is_long_polling", "result"),
    )
)
OVERLOADED = _counter(
    "cosmodrome_sends_refused_overloaded_total",
    "Sends that were answered with busy because the event loop was late.",
)
SEND_FAILURES = _counter("cosmodrome_send_failures_total", "Sends that were refused or failed.")
SENDS_UNPROMISED = _counter(
    "cosmodrome_sends_unpromised_total",
    "Sends that were stored and answered with a status other than SEND_OK: this disk or a slave was"
    " late, or there was no slave.",
    "status",
)
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
    "rocketmq_storage_flush_behind_bytes",
    "Bytes of the log that may not be synced to disk yet.",
    *_STORAGE,
)
DISPATCH_BEHIND = _gauge(
    "rocketmq_storage_dispatch_behind_bytes",
    "Bytes of the log that are in no queue yet.",
    *_STORAGE,
)
RESERVE_TIME = _gauge(
    "rocketmq_storage_message_reserve_time",
    "Milliseconds since the oldest message was stored; absent without a message.",
    *_STORAGE,
)
DISK_RATIO = _gauge("cosmodrome_disk_used_ratio", "Share of the store's disk that is used, 0 to 1.")
LOG_END = _counter(
    "cosmodrome_log_bytes_total", "Bytes ever written to the log: the offset of its end."
)
PUTS = _counter(
    "cosmodrome_store_messages_total",
    "Messages stored, including those that the broker stores itself.",
)
PUT_FAILURES = _counter("cosmodrome_store_failures_total", "Messages that were not stored.")
QUEUES = _gauge("cosmodrome_queues", "Queues that have files or messages.")

# --- replication ---------------------------------------------------------------------------------

REPLICATION_ROLE = _gauge(
    "cosmodrome_replication_role", "1 for the role that brokerRole names.", "role"
)
REPLICATION_LINKS = _gauge("cosmodrome_replication_links", "Master: slaves that are linked.")
REPLICATION_REFUSED = _counter(
    "cosmodrome_replication_refused_links_total",
    "Master: links that were refused, because logs do not fit or the peer said nonsense.",
)
REPLICATION_SLAVE_LAG_BYTES = _gauge(
    "cosmodrome_replication_slave_lag_bytes",
    "Master: bytes of the log that a linked slave has not reported.",
    "slave",
)
REPLICATION_SLAVE_LAG_SECONDS = _gauge(
    "cosmodrome_replication_slave_lag_seconds",
    "Master: time since the oldest byte that a linked slave lacks was written.",
    "slave",
)
REPLICATION_SLAVE_SILENT = _gauge(
    "cosmodrome_replication_slave_silent_seconds",
    "Master: time since something was read from a linked slave.",
    "slave",
)
REPLICATION_SLAVE_SENT = _gauge(
    "cosmodrome_replication_slave_sent_bytes_per_second",
    "Master: how fast a linked slave is sent the log.",
    "slave",
)
REPLICATION_STATE = _gauge(
    "cosmodrome_replication_state", "Slave: 1 for the state it is in, 0 for the others.", "state"
)
REPLICATION_LINKS_MADE = _counter(
    "cosmodrome_replication_links_made_total", "Slave: links to a master since the start."
)
REPLICATION_TAKEN = _gauge(
    "cosmodrome_replication_taken_bytes_per_second", "Slave: how fast it takes the log."
)
REPLICATION_LAG_BYTES = _gauge(
    "cosmodrome_replication_lag_bytes",
    "Slave: bytes of the master's log that it lacks; absent without a link.",
)
REPLICATION_LAG_SECONDS = _gauge(
    "cosmodrome_replication_lag_seconds",
    "Slave: time since the oldest byte that it lacks was written; absent without a link.",
)
REPLICATION_SILENT = _gauge(
    "cosmodrome_replication_silent_seconds",
    "Slave: time since something was read from its master; absent before the first link.",
)
REPLICATION_COPIED = _gauge(
    "cosmodrome_replication_copied_ratio",
    "Slave: share of the master's log that it has, 0 to 1; absent without a link.",
)

# --- messages that wait --------------------------------------------------------------------------

DELAYED = _gauge("cosmodrome_delay_level_messages", "Messages that wait in a delay level.", "level")
DELAY_LATE = _gauge(
    "cosmodrome_delay_level_late_seconds",
    "Seconds by which the next message of a delay level is overdue; 0 when it is not.",
    "level",
)
TIMED = _gauge("rocketmq_timing_messages", "Messages that wait for a delivery time of their own.")
TIMER_ENQUEUE_LAG = _gauge(
    "rocketmq_timer_enqueue_lag", "Timed messages that are stored but not scheduled yet."
)
TIMER_ENQUEUE_LATENCY = _gauge(
    "rocketmq_timer_enqueue_latency",
    "Milliseconds since the oldest message that is not scheduled was stored; absent if unknown.",
)
TIMER_DEQUEUE_LATENCY = _gauge(
    "rocketmq_timer_dequeue_latency", "Milliseconds by which the next timed message is overdue."
)
TIMER_ENQUEUED = _counter(
    "rocketmq_timer_enqueue_total", "Timed messages ever stored, cancellations included."
)
TRANSACTIONS_ASKED = _counter(
    "cosmodrome_transaction_checks_total", "Times a producer was asked how a transaction ended."
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
RETRIED = _counter(
    "cosmodrome_messages_retried_total",
    "Messages that consumers gave back and that are delivered again.",
)

# --- clients -------------------------------------------------------------------------------------

PRODUCERS = _gauge(
    "rocketmq_producer_connections",
    "Members of producer groups.",
    "language",
    "version",
    "protocol_type",
)
CONSUMERS = _gauge(
    "rocketmq_consumer_connections",
    "Members of a consumer group.",
    "consumer_group",
    "language",
    "version",
    "consume_mode",
    "protocol_type",
    "is_system",
)

# --- by topic and group --------------------------------------------------------------------------

MESSAGES_IN = _counter(
    "rocketmq_messages_in_total",
    "Messages stored in a topic.",
    "topic",
    "message_type",
    "is_system",
)
BYTES_IN = _counter(
    "rocketmq_throughput_in_total",
    "Bytes of the records stored in a topic.",
    "topic",
    "message_type",
    "is_system",
)
DEAD = _counter(
    "rocketmq_send_to_dlq_messages_total",
    "Messages that became dead letters of a group.",
    "consumer_group",
    "topic",
    "is_system",
)
MESSAGES_OUT = _counter(
    "rocketmq_messages_out_total",
    "Messages that a group pulled.",
    "topic",
    "consumer_group",
    "is_system",
    "is_retry",
)
BYTES_OUT = _counter(
    "rocketmq_throughput_out_total",
    "Bytes of the records that a group pulled.",
    "topic",
    "consumer_group",
    "is_system",
    "is_retry",
)
LAG_MESSAGES = _gauge(
    "rocketmq_consumer_lag_messages",
    "Messages that a group has not consumed. Queues where this is unknown are not counted.",
    *_LAG,
)
LAG_SECONDS = _gauge(
    "cosmodrome_consumer_lag_seconds",
    "Age of the oldest message that a group has not consumed; absent if unknown.",
    *_LAG,
)
LAG_UNKNOWN = _gauge(
    "cosmodrome_consumer_unknown_queues",
    "Queues with messages where a group has no committed offset, or one beyond the end.",
    *_LAG,
)
LAG_LATENCY = _gauge(
    "rocketmq_consumer_lag_latency",
    "The same as cosmodrome_consumer_lag_seconds, in milliseconds.",
    *_LAG,
)
IN_FLIGHT_MESSAGES = _gauge(
    "rocketmq_consumer_inflight_messages",
    "Messages pulled but not committed; absent until every queue was pulled since the start.",
    *_LAG,
)
READY_MESSAGES = _gauge(
    "rocketmq_consumer_ready_messages",
    "Messages not pulled yet; absent until every queue was pulled since the start.",
    *_LAG,
)
QUEUEING_LATENCY = _gauge(
    "rocketmq_consumer_queueing_latency",
    "Milliseconds since the oldest message that is not pulled yet was stored; absent until every"
    " queue was pulled since the start.",
    *_LAG,
)

TABLE: tuple[Metric, ...] = tuple(_rows)

# Labels of 5.x that a metric lacks here, and why.
_NO_TOPIC = (
    "topic",
    "it is counted for all topics together; a figure per topic would require reading each record",
)
LEFT_OUT: dict[str, tuple[str, str]] = {
    metric.name: _NO_TOPIC
    for metric in (
        TIMED,
        TIMER_ENQUEUE_LAG,
        TIMER_ENQUEUE_LATENCY,
        TIMER_DEQUEUE_LATENCY,
        TIMER_ENQUEUED,
    )
}

_REASONS = {
    "every message would have to be counted when it arrives; divide rocketmq_throughput_in_total by"
    " rocketmq_messages_in_total for the average": "rocketmq_message_size",
    "half messages are not counted by topic; `cosmo tx list` lists them, and"
    " cosmodrome_transactions_given_up_total counts those that nobody decided": (
        "rocketmq_half_messages"
    ),
    "the audit log has the changes by administrators; the slow-request log has slow ones": """
        rocketmq_topic_create_execution_time rocketmq_consumer_group_create_execution_time
    """,
    "rocketmq_timer_dequeue_latency shows whether deliveries are late; delivered messages are"
    " counted in rocketmq_messages_in_total of their topics": """
        rocketmq_timer_dequeue_lag rocketmq_timer_dequeue_total rocketmq_timer_message_snapshot
    """,
    "cosmodrome_delay_level_late_seconds shows how late deliveries are": (
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
