"""Every setting that takes effect, once: name, type, default, meaning.

Names are RocketMQ's own (snake case here, camel case in files and on the command line), so a
`broker.conf` or `namesrv.conf` is read unchanged. Where a default differs from upstream's the
meaning says so. `config.py` reads files, environment and flags into these; nothing else here.
Objects are immutable, except that fields marked `live` change on request (see `reload.py`): read
those where they are used, copy the others as you like. Those marked `DANGEROUS` are `live` too, but
may remove messages or stop every client, so where a request comes from matters.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from cosmodrome.env.option_fields import (
    DANGEROUS,
    DAY_MS,
    INT32_MAX,
    MIB,
    MINUTE_MS,
    YEAR_9999_MS,
    Options,
)
from cosmodrome.env.option_fields import described as _help
from cosmodrome.env.ports import BROKER_DEFAULT, BROKER_PORT, NAMESRV_PORT
from cosmodrome.env.store_options import StoreOptions

__all__ = [
    "AccessOptions",
    "BrokerOptions",
    "FilterServerOptions",
    "NameServerOptions",
    "Options",
    "SocketOptions",
    "StoreOptions",
    "TlsOptions",
]


class SocketOptions(Options, frozen=True, kw_only=True):
    """Limits of a listening server."""

    server_channel_max_idle_time_seconds: Annotated[
        int, _help("a connection that is silent in both directions this long is closed", least=1)
    ] = 120
    server_socket_backlog: Annotated[int, _help("connections the kernel may queue", least=1)] = 1024
    server_connections_max: Annotated[
        int,
        _help(
            "connections served at once; further ones are closed. Fewer are taken where the limit"
            " of open files is lower: a quarter of it, at most 4096, is kept for the store (ours)",
            least=1,
        ),
    ] = 20_000
    server_connections_per_address_max: Annotated[
        int,
        _help(
            "connections that one address may have, loopback excepted; for IPv6, one network of 64"
            " bits (ours)",
            least=1,
        ),
    ] = 5000
    server_held_bytes_max: Annotated[
        int,
        _help(
            "bytes of unfinished requests and unread replies that all connections together may"
            " hold; the connection that goes beyond that is closed (ours)",
            least=1,
        ),
    ] = 512 * MIB
    server_requests_in_flight_max: Annotated[
        int,
        _help(
            "unanswered requests per connection before the server stops reading from it (ours)",
            least=1,
        ),
    ] = 16_384


class TlsOptions(Options, frozen=True, kw_only=True):
    """TLS of every port, and of the connections that a server makes itself (docs/tls.md)."""

    tls_server_mode: Annotated[
        Literal["disabled", "permissive", "enforcing"],
        _help(
            "disabled refuses TLS, permissive takes plain connections and TLS on the same port,"
            " enforcing refuses plain connections"
        ),
    ] = msgspec.field(name="tls.server.mode", default="permissive")
    tls_server_cert_path: Annotated[
        str,
        _help(
            "PEM file with this server's certificate and those between it and its authority."
            " Without it TLS is refused; upstream makes up a certificate then"
        ),
    ] = msgspec.field(name="tls.server.certPath", default="")
    tls_server_key_path: Annotated[
        str, _help("PEM file with its key; when empty, the key is in the certificate's file")
    ] = msgspec.field(name="tls.server.keyPath", default="")
    tls_server_key_password: Annotated[
        str, _help("password of the key, if it has one; never shown", secret=True)
    ] = msgspec.field(name="tls.server.keyPassword", default="")
    tls_server_need_client_auth: Annotated[
        Literal["none", "optional", "require"],
        _help("whether clients show a certificate; one that is shown is always checked"),
    ] = msgspec.field(name="tls.server.need.client.auth", default="none")
    tls_server_trust_cert_path: Annotated[
        str, _help("PEM file with the authorities that sign certificates of clients")
    ] = msgspec.field(name="tls.server.trustCertPath", default="")
    tls_enable: Annotated[
        bool,
        _help("use TLS towards name servers, and a slave towards its master; enforcing implies it"),
    ] = msgspec.field(name="tls.enable", default=False)
    tls_client_auth_server: Annotated[
        bool,
        _help(
            "check certificate and name of the server that is called. Upstream's default is false"
        ),
    ] = msgspec.field(name="tls.client.authServer", default=True)
    tls_client_trust_cert_path: Annotated[
        str,
        _help(
            "PEM file with the authorities that sign certificates of servers; when empty,"
            " tls.server.trustCertPath, or else those of the system"
        ),
    ] = msgspec.field(name="tls.client.trustCertPath", default="")
    tls_client_cert_path: Annotated[
        str, _help("PEM file with the certificate that is shown to servers that ask for one")
    ] = msgspec.field(name="tls.client.certPath", default="")
    tls_client_key_path: Annotated[
        str, _help("PEM file with its key; when empty, the key is in the certificate's file")
    ] = msgspec.field(name="tls.client.keyPath", default="")
    tls_client_key_password: Annotated[
        str, _help("password of the key, if it has one; never shown", secret=True)
    ] = msgspec.field(name="tls.client.keyPassword", default="")
    tls_config_file: Annotated[
        str,
        _help(
            "properties file with settings of this table; it wins over the settings file. Upstream"
            " looks for a file by default, here only a named one is read"
        ),
    ] = msgspec.field(name="tls.config.file", default="")


class AccessOptions(Options, frozen=True, kw_only=True):
    """Who may ask a server for what; see docs/security.md."""

    bind_address: Annotated[str, _help("address to listen on")] = "127.0.0.1"
    acl_enable: Annotated[
        bool,
        _help("serve only requests that are signed by an account with the rights that they need"),
    ] = False
    acl_file: Annotated[
        str,
        _help(
            "file of the accounts; further ones are in the folder acl beside it. Default is"
            " plain_acl.yml in the directory of the server's tables (ours)"
        ),
    ] = ""
    peer_addresses: Annotated[
        str,
        _help(
            "brokers, slaves and filter servers that need not sign what peers ask, such as"
            " 10.1.2.3,10.1.3.*,10.2.0.0/16 (ours)"
        ),
    ] = ""
    protected_mode: Annotated[
        bool,
        _help(
            "without aclEnable and on a network: serve what changes or shows the configuration to"
            " this machine only (ours)"
        ),
    ] = True


class BrokerOptions(AccessOptions, frozen=True, kw_only=True):
    """The broker's services."""

    namesrv_addr: Annotated[str, _help("name servers, host:port;host:port")] = ""
    broker_cluster_name: Annotated[str, _help("cluster this broker joins")] = "DefaultCluster"
    broker_name: Annotated[
        str, _help("name shared by a master and its slaves; default is the host name")
    ] = ""
    broker_access_key: Annotated[
        str, _help("account of this broker at name servers and at its master (ours)")
    ] = ""
    broker_secret_key: Annotated[
        str, _help("secret key of brokerAccessKey; never shown (ours)", secret=True)
    ] = ""
    broker_id: Annotated[int, _help("0 is the master, larger is a slave", least=0)] = 0
    broker_ip1: Annotated[
        str, _help("address that clients are told; default is the bind address")
    ] = msgspec.field(name="brokerIP1", default="")
    broker_ip2: Annotated[str, _help("address that slaves are told")] = msgspec.field(
        name="brokerIP2", default=""
    )
    listen_port: Annotated[
        int, _help("main port; −2 is the VIP port, +1 the HA port", least=0, most=65535)
    ] = BROKER_PORT
    broker_permission: Annotated[
        int, _help("4 read + 2 write, for all topics", least=0, most=7, live=DANGEROUS)
    ] = 6
    register_name_server_period: Annotated[
        int, _help("ms between registrations, held between 10000 and 60000", least=1)
    ] = 30_000
    register_broker_timeout_mills: Annotated[
        int, _help("ms for one registration", least=100, most=10 * MINUTE_MS, live=True)
    ] = 6000
    compressed_register: Annotated[bool, _help("send registrations compressed", live=True)] = False
    force_register: Annotated[
        bool,
        _help(
            "send the whole topic table each time instead of asking whether it changed", live=True
        ),
    ] = True
    auto_create_topic_enable: Annotated[
        bool, _help("a send to an unknown topic creates it from TBW102", live=True)
    ] = True
    auto_create_topics_per_minute: Annotated[
        int,
        _help(
            "topics that sends may create per minute; further sends are answered busy (ours)",
            least=1,
            most=1_000_000,
            live=True,
        ),
    ] = 3_000
    auto_create_topics_per_minute_by_address: Annotated[
        int,
        _help(
            "topics that sends from one address may create per minute (ours)",
            least=1,
            most=1_000_000,
            live=True,
        ),
    ] = 1_000
    auto_create_subscription_group: Annotated[
        bool, _help("a consumer of an unknown group creates it", live=True)
    ] = True
    default_topic_queue_nums: Annotated[int, _help("queues of TBW102", least=1)] = 8
    cluster_topic_enable: Annotated[bool, _help("the topic named like the cluster is usable")] = (
        True
    )
    broker_topic_enable: Annotated[bool, _help("the topic named like the broker is usable")] = True
    trace_topic_enable: Annotated[bool, _help("create the trace topic at start")] = False
    msg_trace_topic_name: Annotated[str, _help("name of the trace topic")] = "RMQ_SYS_TRACE_TOPIC"
    trace_on: Annotated[bool, _help("tell clients that tracing is on", live=True)] = True
    region_id: Annotated[str, _help("region that clients are told")] = "DefaultRegion"
    reject_transaction_message: Annotated[bool, _help("refuse transactional sends", live=True)] = (
        False
    )
    transaction_time_out: Annotated[
        int,
        _help(
            "ms after which a producer is asked how its transaction ended",
            least=0,
            most=INT32_MAX,
            live=True,
        ),
    ] = 6000
    transaction_check_max: Annotated[
        int,
        _help(
            "times a producer is asked before a transaction is given up",
            least=1,
            most=1_000_000,
            live=True,
        ),
    ] = 15
    transaction_check_interval: Annotated[
        int,
        _help(
            "ms between checks for transactions that have not ended",
            least=10,
            most=DAY_MS,
            live=True,
        ),
    ] = 60_000
    store_reply_message_enable: Annotated[
        bool,
        _help(
            "also store the replies of request-reply messaging, besides delivering them", live=True
        ),
    ] = True
    slave_read_enable: Annotated[
        bool, _help("suggest a slave to consumers that are far behind", live=True)
    ] = False
    enable_property_filter: Annotated[
        bool,
        _help("consumers may filter by SQL92 expressions (on by default here; upstream's is off)"),
    ] = True
    filter_support_retry: Annotated[
        bool,
        _help(
            "retried messages pass the SQL92 filter of their original topic once more", live=True
        ),
    ] = False
    filter_data_clean_time_span: Annotated[
        int, _help("ms that the SQL92 filter of a group without members is kept", least=1)
    ] = 86_400_000
    long_polling_enable: Annotated[bool, _help("hold pulls that find nothing", live=True)] = True
    short_polling_time_mills: Annotated[
        int,
        _help(
            "ms a pull is held when long polling is off", least=1, most=10 * MINUTE_MS, live=True
        ),
    ] = 1000
    pulls_held_max: Annotated[
        int,
        _help(
            "pulls that may be held at once; further ones are answered 'not found' at once (ours)",
            least=0,
        ),
    ] = 100_000
    notify_consumer_ids_changed_enable: Annotated[
        bool, _help("tell group members when the membership changes", live=True)
    ] = True
    flush_consumer_offset_interval: Annotated[
        int, _help("ms between saves of offsets", least=1)
    ] = 5000
    start_accept_send_request_time_stamp: Annotated[
        int,
        _help(
            "sends before this wall time (ms) are refused",
            least=0,
            most=YEAR_9999_MS,
            live=DANGEROUS,
        ),
    ] = 0
    dangerous_settings_live: Annotated[
        bool,
        _help(
            "requests from other machines, too, may change the live settings that can remove"
            " messages or stop every client; when off, only requests from this machine may (ours)"
        ),
    ] = False
    enable_detail_stat: Annotated[bool, _help("also keep statistics of each queue", live=True)] = (
        True
    )
    fast_lane_enable: Annotated[
        bool,
        _help("serve plain sends and pulls on a faster path; the answers are the same (ours)"),
    ] = True
    broker_fast_failure_enable: Annotated[
        bool, _help("answer busy while the broker is overloaded", live=True)
    ] = True
    wait_time_mills_in_send_queue: Annotated[
        int,
        _help(
            "sends are answered busy when requests waited longer than this many ms for their"
            " turn, in ten checks in a row",
            least=1,
            most=10 * MINUTE_MS,
            live=True,
        ),
    ] = 200
    default_query_max_num: Annotated[
        int, _help("most messages that a unique-key query returns", least=1, most=1_024, live=True)
    ] = 32
    slow_request_millis: Annotated[
        int,
        _help(
            "a request that takes at least this many ms is counted and logged as slow; 0 turns"
            " this off (ours)",
            least=0,
            most=DAY_MS,
            live=True,
        ),
    ] = 1000
    metrics_series_max: Annotated[
        int,
        _help(
            "most series in one scrape of /metrics; further ones are left out and counted (ours)",
            least=100,
            most=1_000_000,
            live=True,
        ),
    ] = 50_000
    metrics_label: Annotated[
        str, _help("further labels of all metrics, name:value,name:value; see docs/metrics.md")
    ] = ""


class FilterServerOptions(Options, frozen=True, kw_only=True):
    """The filter server."""

    listen_port: Annotated[int, _help("port; 0 picks one", least=0, most=65535)] = 0
    bind_address: Annotated[str, _help("address to listen on")] = "127.0.0.1"
    rocketmq_home: Annotated[str, _help("home directory, from ROCKETMQ_HOME")] = ""
    connect_which_broker: Annotated[
        str, _help("the broker whose consumers are served, host:port")
    ] = BROKER_DEFAULT
    filter_server_ip: Annotated[
        str, _help("address that consumers are told; default is the bind address")
    ] = msgspec.field(name="filterServerIP", default="")
    filter_path: Annotated[
        str, _help("folder of the filters, Python files; default is filters below the home (ours)")
    ] = ""
    filter_timeout_millis: Annotated[
        int, _help("ms that a filter may take for the messages of one pull (ours)", least=1)
    ] = 5000
    pulls_in_flight_max: Annotated[
        int, _help("pulls that may wait for the broker or a filter at once (ours)", least=1)
    ] = 1024


class NameServerOptions(AccessOptions, frozen=True, kw_only=True):
    """The name server."""

    listen_port: Annotated[int, _help("port", least=0, most=65535)] = NAMESRV_PORT
    rocketmq_home: Annotated[str, _help("home directory, from ROCKETMQ_HOME")] = ""
    kv_config_path: Annotated[str, _help("file of the KV table")] = ""
    config_store_path: Annotated[str, _help("file that config updates rewrite")] = ""
    product_env_name: Annotated[str, _help("label of this environment", live=True)] = "center"
    order_message_enable: Annotated[
        bool, _help("put order-topic configuration into route answers", live=True)
    ] = False
    scan_not_active_broker_interval: Annotated[
        int, _help("ms between scans for silent brokers", least=1, most=DAY_MS, live=True)
    ] = 10_000
    broker_expired_time: Annotated[
        int,
        _help(
            "a broker that has not registered for this many ms is dropped (ours)",
            least=1,
            most=DAY_MS,
            live=True,
        ),
    ] = 120_000
    slow_request_millis: Annotated[
        int,
        _help(
            "a request that takes at least this many ms is counted and logged as slow; 0 turns"
            " this off (ours)",
            least=0,
            most=DAY_MS,
        ),
    ] = 1000
