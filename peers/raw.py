"""The least of the remoting protocol needed to prepare and observe a cluster.

One request per connection, JSON header. Independent of `cosmodrome` on purpose.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import time


class CallFailed(Exception):
    """A server answered with something else than success."""


def call(
    port: int, code: int, fields: dict[str, str] | None = None, body: bytes = b""
) -> tuple[int, dict[str, str], str | None, bytes]:
    """Sends one request to a loopback port; returns code, fields, remark and body."""
    header = json.dumps(
        {
            "code": code,
            "flag": 0,
            "language": "OTHER",
            "opaque": 1,
            "version": 0,
            "extFields": fields or {},
        }
    ).encode()
    frame = struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body
    with socket.create_connection(("127.0.0.1", port), timeout=5) as link:
        link.sendall(frame)
        with link.makefile("rb") as reader:
            start = reader.read(8)
            if len(start) < 8:
                raise ConnectionError(f"port {port} closed the connection without an answer")
            size, mark = struct.unpack(">II", start)
            data = reader.read(size - 4)
    header_size = mark & 0xFFFFFF
    answer = json.loads(data[:header_size])
    return (
        answer["code"],
        answer.get("extFields") or {},
        answer.get("remark"),
        data[header_size:],
    )


def registered_brokers(namesrv_port: int) -> list[str]:
    """Broker names a name server knows; empty when it does not answer."""
    try:
        _, _, _, body = call(namesrv_port, 106)
    except (OSError, ValueError):
        return []
    # The body has bare integer keys, which a strict parser refuses; this part of it is plain.
    found = re.search(rb'"clusterAddrTable":(\{[^{}]*\})', body)
    if found is None:
        return []
    return sorted({name for members in json.loads(found[1]).values() for name in members})


def create_topic(namesrv_port: int, broker_port: int, topic: str, queues: int) -> None:
    """Creates a topic on the broker and returns when the name server has its route."""
    code, _, remark, _ = call(
        broker_port,
        17,
        {
            "topic": topic,
            "defaultTopic": "TBW102",
            "readQueueNums": str(queues),
            "writeQueueNums": str(queues),
            "perm": "6",
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        },
    )
    if code != 0:
        raise CallFailed(f"creating {topic} was answered {code} {remark}")
    deadline = time.monotonic() + 10
    while call(namesrv_port, 105, {"topic": topic})[0] != 0:
        if time.monotonic() > deadline:
            raise CallFailed(f"no route to {topic} after 10 s")
        time.sleep(0.05)
