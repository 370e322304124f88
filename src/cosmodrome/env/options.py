"""Every setting that takes effect, once: name, type, default, meaning.

Names are RocketMQ's own (snake case here, camel case in files and on the command line), so a
`broker.conf` or `namesrv.conf` is read unchanged. Where a default differs from upstream's the
meaning says so. `config.py` reads files, environment and flags into these; nothing else here.
Objects are immutable, except that fields marked `live` change on request (see `reload.py`): read
those where they are used, copy the others as you like.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MIB = 1024 * 1024


def _said(
    text: str, *, least: int | None = None, most: int | None = None, live: bool = False
) -> Meta:
    return Meta(description=text, ge=least, le=most, extra={"live": True} if live else None)


class Options(msgspec.Struct, rename="camel", kw_only=True, frozen=True):
    """A group of settings; fields are documented by `Meta(description=...)`."""


class SocketOptions(Options, frozen=True, kw_only=True):
    """Limits of a listening server."""

    server_channel_max_idle_time_seconds: Annotated[
        int, _said("a connection that is silent in both directions this long is closed", least=1)
    ] = 120
    server_socket_backlog: Annotated[int, _said("connections the kernel may queue", least=1)] = 1024
    server_connections_max: Annotated[
        int, _said("connections served at once; further ones are closed (ours)", least=1)
    ] = 20_000
    server_held_bytes_max: Annotated[
        int,
        _said(
            "bytes of unfinished requests and unread replies that all connections together may hold"
            " before the one that adds to them is closed (ours)",
            least=1,
        ),
    ] = 512 * MIB
    server_requests_in_flight_max: Annotated[
        int, _said("unanswered requests per connection before reading pauses (ours)", least=1)
    ] = 16_384


class StoreOptions(Options, frozen=True, kw_only=True):
    """The message store."""

    store_path_root_dir: Annotated[str, _said("root of the store")] = ""
    store_path_commit_log: Annotated[
        str, _said("directory of the commit log; default is commitlog below the root")
    ] = ""
    mapped_file_size_commit_log: Annotated[int, _said("bytes per commit-log file", least=4096)] = (
        1024 * MIB
    )
    mapped_file_size_consume_queue: Annotated[
        int, _said("bytes per consume-queue file, rounded up to whole entries of 20", least=20)
    ] = 6_000_000
    flush_disk_type: Annotated[
        Literal["SYNC_FLUSH", "ASYNC_FLUSH"],
        _said(
            "SYNC_FLUSH: an acknowledgement means synced (the default here; upstream's is"
            " ASYNC_FLUSH: acknowledged once the kernel has the bytes)"
        ),
    ] = "SYNC_FLUSH"
    sync_flush_timeout: Annotated[
        int, _said("ms a send waits for its sync before it is answered FLUSH_DISK_TIMEOUT", least=1)
    ] = 5000
    os_page_cache_busy_time_out_mills: Annotated[
        int,
        _said(
            "ms one sync may take while more than 64 MiB wait for it, before sends are answered"
            " busy; above 256 MiB they are in any case (SYNC_FLUSH)",
            least=1,
            live=True,
        ),
    ] = 1000
    flush_interval_commit_log: Annotated[
        int, _said("ms between syncs with ASYNC_FLUSH", least=1)
    ] = 500
    flush_interval_consume_queue: Annotated[
        int, _said("ms between writes of queue and index data held in memory", least=1)
    ] = 1000
    flush_consume_queue_thorough_interval: Annotated[
        int, _said("ms between syncs of queues and index followed by a checkpoint", least=1)
    ] = 60_000
    max_message_size: Annotated[int, _said("bytes of one message body", least=1)] = 4 * MIB
    message_index_enable: Annotated[bool, _said("index messages by key")] = True
    max_hash_slot_num: Annotated[int, _said("hash slots per index file", least=1)] = 5_000_000
    max_index_num: Annotated[int, _said("entries per index file", least=2)] = 20_000_000
    max_msgs_num_batch: Annotated[
        int, _said("messages one key query returns at most", least=1, live=True)
    ] = 64
    message_delay_level: Annotated[
        str,
        _said(
            "delays of the levels from 1 on, each a number with s, m, h or d; a change re-times"
            " messages that wait already"
        ),
    ] = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
    check_crc_on_recover: Annotated[bool, _said("verify body checksums while recovering")] = True
    access_message_in_memory_max_ratio: Annotated[
        int,
        _said(
            "percent of RAM behind the log's end that counts as being in memory", least=0, most=100
        ),
    ] = 40
    max_transfer_bytes_on_message_in_memory: Annotated[
        int, _said("bytes per pull, warm", least=1, live=True)
    ] = 262_144
    # Upstream's is 32. The bytes bound a pull too, and only who asks for more gets more.
    max_transfer_count_on_message_in_memory: Annotated[
        int,
        _said("messages per pull, warm; fewer when the client asks for fewer", least=1, live=True),
    ] = 1_024
    max_transfer_bytes_on_message_in_disk: Annotated[
        int, _said("bytes per pull, cold", least=1, live=True)
    ] = 65_536
    max_transfer_count_on_message_in_disk: Annotated[
        int, _said("messages per pull, cold", least=1, live=True)
    ] = 8
    flush_delay_offset_interval: Annotated[
        int, _said("ms between saves of how far delayed messages were delivered", least=1)
    ] = 10_000
    timer_max_delay_sec: Annotated[
        int, _said("seconds a message with a delivery time of its own may wait", least=1)
    ] = 259_200
    offset_check_in_slave: Annotated[
        bool,
        _said(
            "a slave too tells consumers that their offset is outside of a queue; otherwise they"
            " ask again, because the slave may only lag behind"
        ),
    ] = False
    broker_role: Annotated[
        Literal["ASYNC_MASTER", "SYNC_MASTER", "SLAVE"],
        _said("ASYNC_MASTER or SYNC_MASTER take sends, SLAVE refuses them"),
    ] = "ASYNC_MASTER"
    file_reserved_time: Annotated[
        int,
        _said(
            "hours a commit-log file is kept after its last write; queues and index follow the"
            " log; one time for all topics",
            least=0,
            live=True,
        ),
    ] = 72
    delete_when: Annotated[
        str,
        _said("hours of the day, separated by ;, in which expired files are removed", live=True),
    ] = "04"
    disk_max_used_space_ratio: Annotated[
        int,
        _said(
            "percent of the disk used above which expired files are removed at any hour; held"
            " between 10 and 95",
            live=True,
        ),
    ] = 75
    disk_space_clean_forcibly_ratio: Annotated[
        int,
        _said(
            "percent of the disk used above which the oldest files are removed even if they have"
            " not expired",
            least=10,
            most=100,
            live=True,
        ),
    ] = 85
    clean_file_forcibly_enable: Annotated[
        bool,
        _said("allow the removal of files that have not expired when the disk is full", live=True),
    ] = True
    disk_space_warning_level_ratio: Annotated[
        int,
        _said("percent of the disk used at which sends are refused", least=10, most=100, live=True),
    ] = 90
    clean_resource_interval: Annotated[
        int,
        _said(
            "ms between looks for files to remove; the first comes after 60 s", least=1, live=True
        ),
    ] = 10_000
    delete_commit_log_files_interval: Annotated[
        int, _said("ms between the removals of two commit-log files", least=0, live=True)
    ] = 100
    delete_consume_queue_files_interval: Annotated[
        int, _said("ms between the removals of two queue files", least=0, live=True)
    ] = 100
    delete_file_batch_max: Annotated[
        int, _said("commit-log files removed per look", least=1, live=True)
    ] = 10
    redelete_hanged_file_interval: Annotated[
        int, _said("ms until the removal of a file that failed is tried again", least=1, live=True)
    ] = 120_000
    transient_store_pool_enable: Annotated[
        bool,
        _said(
            "acknowledge messages while they are in this process's memory only: a kill -9 or crash"
            " of the broker loses up to commitIntervalCommitLog of acknowledged messages, in no"
            " other mode it does; takes effect on a master with ASYNC_FLUSH"
        ),
    ] = False
    transient_store_pool_size: Annotated[
        int,
        _said(
            "times mappedFileSizeCommitLog, 256 MiB at most: bytes held in memory before sends are"
            " answered busy",
            least=1,
        ),
    ] = 5
    commit_interval_commit_log: Annotated[
        int, _said("ms between writes of what transientStorePoolEnable holds in memory", least=1)
    ] = 200
    fast_fail_if_no_buffer_in_store_pool: Annotated[
        bool,
        _said("answer busy at once when the next commit-log file is not ready, instead of waiting"),
    ] = False
    warm_maped_file_enable: Annotated[
        bool,
        _said(
            "fill the next commit-log file with zeros ahead of time, so that appends never allocate"
            " disk blocks; not when the disk is nearly full"
        ),
    ] = False
    commit_log_zeros_ahead: Annotated[
        int,
        _said(
            "with SYNC_FLUSH: bytes of zeros that are written behind the data from time to time, so"
            " that a sync need not note new blocks in the file system's journal; everything is"
            " written twice for it. 0 where that gains nothing: file systems that copy on write"
        ),
    ] = 1 * MIB


class BrokerOptions(Options, frozen=True, kw_only=True):
    """The broker's services."""

    namesrv_addr: Annotated[str, _said("name servers, host:port;host:port")] = ""
    broker_cluster_name: Annotated[str, _said("cluster this broker joins")] = "DefaultCluster"
    broker_name: Annotated[
        str, _said("name shared by a master and its slaves; default is the host name")
    ] = ""
    broker_id: Annotated[int, _said("0 is the master, larger is a slave", least=0)] = 0
    broker_ip1: Annotated[
        str, _said("address that clients are told; default is the bind address")
    ] = msgspec.field(name="brokerIP1", default="")
    broker_ip2: Annotated[str, _said("address that slaves are told")] = msgspec.field(
        name="brokerIP2", default=""
    )
    listen_port: Annotated[
        int, _said("main port; −2 is the VIP port, +1 the HA port", least=0, most=65535)
    ] = 10911
    bind_address: Annotated[str, _said("address to listen on")] = "127.0.0.1"
    broker_permission: Annotated[
        int, _said("4 read + 2 write, for all topics", least=0, most=7, live=True)
    ] = 6
    register_name_server_period: Annotated[
        int, _said("ms between registrations, held between 10000 and 60000", least=1)
    ] = 30_000
    register_broker_timeout_mills: Annotated[
        int, _said("ms for one registration", least=1, live=True)
    ] = 6000
    compressed_register: Annotated[bool, _said("send registrations compressed", live=True)] = False
    force_register: Annotated[
        bool,
        _said(
            "send the whole topic table each time instead of asking whether it changed", live=True
        ),
    ] = True
    auto_create_topic_enable: Annotated[
        bool, _said("a send to an unknown topic creates it from TBW102", live=True)
    ] = True
    auto_create_subscription_group: Annotated[
        bool, _said("a consumer of an unknown group creates it", live=True)
    ] = True
    default_topic_queue_nums: Annotated[int, _said("queues of TBW102", least=1)] = 8
    cluster_topic_enable: Annotated[bool, _said("the topic named like the cluster is usable")] = (
        True
    )
    broker_topic_enable: Annotated[bool, _said("the topic named like the broker is usable")] = True
    trace_topic_enable: Annotated[bool, _said("create the trace topic at start")] = False
    msg_trace_topic_name: Annotated[str, _said("name of the trace topic")] = "RMQ_SYS_TRACE_TOPIC"
    trace_on: Annotated[bool, _said("tell clients that tracing is on", live=True)] = True
    region_id: Annotated[str, _said("region told to clients")] = "DefaultRegion"
    reject_transaction_message: Annotated[bool, _said("refuse transactional sends", live=True)] = (
        False
    )
    transaction_time_out: Annotated[
        int,
        _said("ms after which a producer is asked how its transaction ended", least=0, live=True),
    ] = 6000
    transaction_check_max: Annotated[
        int,
        _said("times a producer is asked before a transaction is given up", least=1, live=True),
    ] = 15
    transaction_check_interval: Annotated[
        int, _said("ms between looks for transactions without an end", least=1, live=True)
    ] = 60_000
    store_reply_message_enable: Annotated[
        bool,
        _said("store the replies of request-reply messaging besides delivering them", live=True),
    ] = True
    slave_read_enable: Annotated[
        bool, _said("suggest a slave to consumers far behind", live=True)
    ] = False
    enable_property_filter: Annotated[
        bool,
        _said("consumers may filter by SQL92 expressions (on by default here; upstream's is off)"),
    ] = True
    filter_support_retry: Annotated[
        bool,
        _said(
            "retried messages pass the SQL92 filter of their original topic once more", live=True
        ),
    ] = False
    filter_data_clean_time_span: Annotated[
        int, _said("ms that the SQL92 filter of a group without members is kept", least=1)
    ] = 86_400_000
    long_polling_enable: Annotated[bool, _said("hold pulls that find nothing", live=True)] = True
    short_polling_time_mills: Annotated[
        int, _said("ms a pull is held without long polling", least=1, live=True)
    ] = 1000
    pulls_held_max: Annotated[
        int,
        _said("held pulls at once; further ones are answered 'not found' at once (ours)", least=0),
    ] = 100_000
    notify_consumer_ids_changed_enable: Annotated[
        bool, _said("tell group members when the membership changes", live=True)
    ] = True
    flush_consumer_offset_interval: Annotated[
        int, _said("ms between saves of offsets", least=1)
    ] = 5000
    start_accept_send_request_time_stamp: Annotated[
        int, _said("sends before this wall time (ms) are refused", live=True)
    ] = 0
    enable_detail_stat: Annotated[bool, _said("keep statistics of each queue, too", live=True)] = (
        True
    )
    fast_lane_enable: Annotated[
        bool,
        _said(
            "serve plain sends and pulls by a short way of their own; the answers are the same,"
            " only the cost is not (ours)"
        ),
    ] = True
    broker_fast_failure_enable: Annotated[
        bool, _said("answer busy while the broker is overloaded", live=True)
    ] = True
    wait_time_mills_in_send_queue: Annotated[
        int,
        _said(
            "ms that requests wait for their turn, ten looks in a row, from which on sends are"
            " answered busy",
            least=1,
            live=True,
        ),
    ] = 200
    default_query_max_num: Annotated[
        int, _said("messages a unique-key query returns", least=1, live=True)
    ] = 32
    slow_request_millis: Annotated[
        int,
        _said(
            "ms from which on a request is counted and logged as slow; 0 logs none (ours)",
            least=0,
            live=True,
        ),
    ] = 1000
    metrics_series_max: Annotated[
        int,
        _said(
            "series that one scrape of /metrics tells at most; the others are left out and counted"
            " (ours)",
            least=100,
            most=1_000_000,
            live=True,
        ),
    ] = 50_000
    metrics_label: Annotated[
        str, _said("further labels of all metrics, name:value,name:value; see docs/metrics.md")
    ] = ""


class FilterServerOptions(Options, frozen=True, kw_only=True):
    """The filter server."""

    listen_port: Annotated[int, _said("port; 0 picks one", least=0, most=65535)] = 0
    bind_address: Annotated[str, _said("address to listen on")] = "127.0.0.1"
    rocketmq_home: Annotated[str, _said("home directory, from ROCKETMQ_HOME")] = ""
    connect_which_broker: Annotated[
        str, _said("the broker whose consumers are served, host:port")
    ] = "127.0.0.1:10911"
    filter_server_ip: Annotated[
        str, _said("address that consumers are told; default is the bind address")
    ] = msgspec.field(name="filterServerIP", default="")
    filter_path: Annotated[
        str, _said("folder of the filters, Python files; default is filters below the home (ours)")
    ] = ""
    filter_timeout_millis: Annotated[
        int, _said("ms a filter has for the messages of one pull (ours)", least=1)
    ] = 5000
    pulls_in_flight_max: Annotated[
        int, _said("pulls that may wait for the broker or a filter at once (ours)", least=1)
    ] = 1024


class NameServerOptions(Options, frozen=True, kw_only=True):
    """The name server."""

    listen_port: Annotated[int, _said("port", least=0, most=65535)] = 9876
    bind_address: Annotated[str, _said("address to listen on")] = "127.0.0.1"
    rocketmq_home: Annotated[str, _said("home directory, from ROCKETMQ_HOME")] = ""
    kv_config_path: Annotated[str, _said("file of the KV table")] = ""
    config_store_path: Annotated[str, _said("file that config updates rewrite")] = ""
    product_env_name: Annotated[str, _said("label of this environment", live=True)] = "center"
    order_message_enable: Annotated[
        bool, _said("put order-topic configuration into route answers", live=True)
    ] = False
    scan_not_active_broker_interval: Annotated[
        int, _said("ms between scans for silent brokers", least=1, live=True)
    ] = 10_000
    broker_expired_time: Annotated[
        int,
        _said("ms without registration after which a broker is dropped (ours)", least=1, live=True),
    ] = 120_000
    slow_request_millis: Annotated[
        int,
        _said(
            "ms from which on a request is counted and logged as slow; 0 logs none (ours)", least=0
        ),
    ] = 1000
