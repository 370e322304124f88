"""Records of the pure lane, with the entries that queues and index need of them."""

from __future__ import annotations

import struct
import zlib

from cosmodrome.layout import (
    CRC_MASK,
    HOST_V4_BYTES,
    HOST_V6_BYTES,
    INDEX_KEY,
    MAGIC_RECORD,
    QUEUE_ENTRY,
    SYS_BORN_V6,
    SYS_STORE_V6,
)
from cosmodrome.speed.lane.messages import Message, Plan
from cosmodrome.speed.lane.replies import Request, Sent

QueueKey = tuple[str, int]
Entries = dict[QueueKey, tuple[int, list[bytes]]]  # first offset, packed entries

# What the constant fields of a send mean: topic and queue, system flags, the message's flag, how
# often it was consumed, the plan, whether it is a batch.
Shape = tuple[QueueKey, int, int, int, Plan, bool]
# One message: shape, born time, request, whether that waits, bytes of all its records, and what
# is the message's own. Those of a batch follow each other; all but the first have no request.
Ask = tuple[Shape, int, Request | None, bool, int, Message]

# All of a record in front of its body, by the lengths of its hosts.
_FRONTS = {
    (born, store): struct.Struct(f">iiiiiqqiq{born}sq{store}siqi")
    for born in (HOST_V4_BYTES, HOST_V6_BYTES)
    for store in (HOST_V4_BYTES, HOST_V6_BYTES)
}


def make_records(
    asks: list[Ask],
    log_offset: int,
    store_ms: int,
    hosts: tuple[bytes, bytes],
    queues: Entries,
    keys: list[bytes],
) -> tuple[list[bytes], list[Sent], list[Sent]]:
    """The records in pieces, and the sends that wait for them to be safe and those that do not.

    `hosts` are of producer and broker, packed. Entries and keys are added to `queues` and `keys`.
    """
    born_host, store_host = hosts
    pack = _FRONTS[len(born_host), len(store_host)].pack
    pack_entry, pack_key, crc32 = QUEUE_ENTRY.pack, INDEX_KEY.pack, zlib.crc32
    host_bits, hosts_bytes = _host_bits(born_host, store_host), len(born_host) + len(store_host)
    waiting: list[Sent] = []
    others: list[Sent] = []
    pieces: list[bytes] = []
    batch: list[int] = []
    for shape, born_ms, request, wait, size, message in asks:
        (_, queue_id), sys_flag, _, times, plan, many = shape
        flag, body, properties, tags_code, hashes = message
        offset, entries = queues[shape[0]]
        queue_offset = offset + len(entries)
        body_bytes = len(body)
        properties_bytes = len(properties)
        record_bytes = plan.fixed_bytes + hosts_bytes + body_bytes + properties_bytes
        front = pack(
            record_bytes,
            MAGIC_RECORD,
            crc32(body) & CRC_MASK,
            queue_id,
            flag,
            queue_offset,
            log_offset,
            sys_flag | host_bits,
            born_ms,
            born_host,
            store_ms,
            store_host,
            times,
            0,
            body_bytes,
        )
        pieces += (front, body, plan.stored_name)
        pieces += (properties_bytes.to_bytes(2, "big"), properties)
        entries.append(pack_entry(log_offset, record_bytes, tags_code))
        keys += [pack_key(hashed, log_offset, store_ms) for hashed in hashes]
        if request is None:
            batch.append(log_offset)
        else:
            batch = [log_offset] if many else batch
            sent = (request, plan, size, queue_id, queue_offset, batch if many else log_offset)
            (waiting if wait else others).append(sent)
        log_offset += record_bytes
    return pieces, waiting, others


def _host_bits(born_host: bytes, store_host: bytes) -> int:
    """What system flags say about the hosts."""
    bits = SYS_BORN_V6 if len(born_host) == HOST_V6_BYTES else 0
    return bits | (SYS_STORE_V6 if len(store_host) == HOST_V6_BYTES else 0)
