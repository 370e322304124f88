"""What a message carries beside its body: properties, ids, host addresses, compression.

Properties travel as one text, `name SOH value STX name SOH value`; a host is its IP address
(4 or 16 bytes) followed by the port as a 32-bit integer.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from cosmodrome import speed
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import (
    HOST_V4_BYTES,
    HOST_V6_BYTES,
    NAME_END,
    PAIR_END,
)
from cosmodrome.speed.packing import BodyTooBig as BodyTooBig
from cosmodrome.speed.packing import compress as compress
from cosmodrome.speed.packing import decompress as decompress

# --- property names ------------------------------------------------------------------------
KEYS = "KEYS"
TAGS = "TAGS"
WAIT = "WAIT"
DELAY = "DELAY"
RETRY_TOPIC = "RETRY_TOPIC"
REAL_TOPIC = "REAL_TOPIC"
REAL_QUEUE_ID = "REAL_QID"
TRANSACTION_PREPARED = "TRAN_MSG"
PRODUCER_GROUP = "PGROUP"
MIN_OFFSET = "MIN_OFFSET"
MAX_OFFSET = "MAX_OFFSET"
BUYER_ID = "BUYER_ID"
ORIGIN_MESSAGE_ID = "ORIGIN_MESSAGE_ID"
TRANSFER_FLAG = "TRANSFER_FLAG"
CORRECTION_FLAG = "CORRECTION_FLAG"
MQ2_FLAG = "MQ2_FLAG"
RECONSUME_TIME = "RECONSUME_TIME"
MSG_REGION = "MSG_REGION"
TRACE_ON = "TRACE_ON"
UNIQ_KEY = "UNIQ_KEY"
MAX_RECONSUME_TIMES = "MAX_RECONSUME_TIMES"
CONSUME_START_TIME = "CONSUME_START_TIME"
INSTANCE_ID = "INSTANCE_ID"
CORRELATION_ID = "CORRELATION_ID"
REPLY_TO_CLIENT = "REPLY_TO_CLIENT"
TTL = "TTL"
ARRIVE_TIME = "ARRIVE_TIME"
PUSH_REPLY_TIME = "PUSH_REPLY_TIME"
CLUSTER = "CLUSTER"
MSG_TYPE = "MSG_TYPE"
INNER_MULTI_QUEUE_OFFSET = "INNER_MULTI_QUEUE_OFFSET"

# Names that user properties may not take.
RESERVED = frozenset(
    {
        KEYS,
        TAGS,
        WAIT,
        DELAY,
        RETRY_TOPIC,
        REAL_TOPIC,
        REAL_QUEUE_ID,
        TRANSACTION_PREPARED,
        PRODUCER_GROUP,
        MIN_OFFSET,
        MAX_OFFSET,
        BUYER_ID,
        ORIGIN_MESSAGE_ID,
        TRANSFER_FLAG,
        CORRECTION_FLAG,
        MQ2_FLAG,
        RECONSUME_TIME,
        MSG_REGION,
        TRACE_ON,
        UNIQ_KEY,
        MAX_RECONSUME_TIMES,
        CONSUME_START_TIME,
        INSTANCE_ID,
        CORRELATION_ID,
        REPLY_TO_CLIENT,
        TTL,
        ARRIVE_TIME,
        PUSH_REPLY_TIME,
        CLUSTER,
        MSG_TYPE,
        INNER_MULTI_QUEUE_OFFSET,
    }
)

TRANSACTION_PREPARED_QUEUE_OFFSET = "TRAN_PREPARED_QUEUE_OFFSET"
TRANSACTION_CHECK_TIMES = "TRANSACTION_CHECK_TIMES"
CHECK_IMMUNITY_SECONDS = "CHECK_IMMUNITY_TIME_IN_SECONDS"
INNER_MULTI_DISPATCH = "INNER_MULTI_DISPATCH"
# Compat: 5.x clients ask for an exact delivery time with these.
TIMER_DELAY_SECONDS = "TIMER_DELAY_SEC"
TIMER_DELAY_MS = "TIMER_DELAY_MS"
TIMER_DELIVER_MS = "TIMER_DELIVER_MS"
TIMER_OUT_MS = "TIMER_OUT_MS"  # the time the broker worked out; its presence means "timed already"
TIMER_DEQUEUE_MS = "TIMER_DEQUEUE_MS"  # when the broker handed the message over
TIMER_DELETE_UNIQ_KEY = "TIMER_DEL_UNIQKEY"  # cancels the timed message with this UNIQ_KEY


def parse_properties(text: str) -> dict[str, str]:
    """The pairs of a properties text. Malformed and empty ones vanish; the last duplicate wins."""
    pairs: dict[str, str] = {}
    for pair in text.split(PAIR_END):
        name, _, value = pair.partition(NAME_END)
        if name and value:
            pairs[name] = value
    return pairs


def format_properties(pairs: Mapping[str, str]) -> str:
    """The text of these pairs, without a separator behind the last one (as 4.9.8 writes it)."""
    return PAIR_END.join([f"{name}{NAME_END}{value}" for name, value in pairs.items()])


def whole_number(text: str) -> int | None:
    """The number that a peer wrote in plain digits; None for anything else, and for one that no
    64 bits hold. (`int` takes other scripts and fails on thousands of digits.)"""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def tags_code(tags: str) -> int:
    """The number that stands for a tag in a queue entry; different tags may share one."""
    return speed.java_hash(tags)


def offset_message_id(store_host: bytes, log_offset: int) -> str:
    """The id that names where a message is stored: host and log offset in hexadecimal."""
    return (store_host + log_offset.to_bytes(8, "big", signed=True)).hex().upper()


def parse_offset_message_id(text: str) -> tuple[bytes, int]:
    """Store host and log offset of an id made by `offset_message_id`."""
    try:
        data = bytes.fromhex(text) if text.isalnum() else b""
    except ValueError:
        data = b""
    host = data[:-8]
    if len(host) not in (HOST_V4_BYTES, HOST_V6_BYTES) or len(text) != 2 * len(data):
        raise ProtocolError(
            f"{text[:64]!r} is not an offset message id; it has 32 or 56 hexadecimal digits"
        )
    return host, int.from_bytes(data[-8:], "big", signed=True)


def join_address(host: str, port: int) -> str:
    """`host:port` as people write it, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def pack_host(ip: str, port: int) -> bytes:
    """Address and port as stored; an IPv4 address in IPv6 clothes becomes plain IPv4."""
    try:
        address = ipaddress.ip_address(ip.partition("%")[0])
        tail = port.to_bytes(4, "big")
    except (ValueError, OverflowError):
        raise ValueError(f"{ip!r}, port {port}: not an IP address and port") from None
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.packed + tail


def unpack_host(host: bytes) -> tuple[str, int]:
    if len(host) not in (HOST_V4_BYTES, HOST_V6_BYTES):
        raise ProtocolError(f"a host of {len(host)} bytes; expected 8 or 20")
    return str(ipaddress.ip_address(bytes(host[:-4]))), int.from_bytes(host[-4:], "big")


def host_text(host: bytes) -> str:
    """A stored host as people write it."""
    return join_address(*unpack_host(host))
