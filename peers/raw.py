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


def clusters(namesrv_port: int) -> dict[str, list[str]]:
    """Cluster names and their brokers as a name server knows them; empty without an answer."""
    try:
        _, _, _, body = call(namesrv_port, 106)
    except (OSError, ValueError):
        return {}
    # The body has bare integer keys, which a strict parser refuses; this part of it is plain.
    found = re.search(rb'"clusterAddrTable":(\{[^{}]*\})', body)
    return {} if found is None else {name: sorted(of) for name, of in json.loads(found[1]).items()}


def committed_offset(broker_port: int, group: str, topic: str, queue_id: int) -> int | None:
    """The offset a group has committed for a queue, or None."""
    code, fields, _, _ = call(
        broker_port, 14, {"consumerGroup": group, "topic": topic, "queueId": str(queue_id)}
    )
    return int(fields["offset"]) if code == 0 else None


def max_offset(broker_port: int, topic: str, queue_id: int) -> int:
    """The offset the next message of this queue will get."""
    code, fields, remark, _ = call(broker_port, 30, {"topic": topic, "queueId": str(queue_id)})
    if code != 0:
        raise CallFailed(f"max offset of {topic}/{queue_id} was answered {code} {remark}")
    return int(fields["offset"])


def put_topic(broker_port: int, topic: str, queues: int, read_queues: int | None = None) -> None:
    """Creates or changes a topic at a broker; `queues` to write to."""
    code, _, remark, _ = call(
        broker_port,
        17,
        {
            "topic": topic,
            "defaultTopic": "TBW102",
            "readQueueNums": str(read_queues or queues),
            "writeQueueNums": str(queues),
            "perm": "6",
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        },
    )
    if code != 0:
        raise CallFailed(f"creating {topic} was answered {code} {remark}")


def create_topic(
    namesrv_port: int, broker_port: int, topic: str, queues: int, read_queues: int | None = None
) -> None:
    """Like `put_topic`, and returns when the name server knows."""
    put_topic(broker_port, topic, queues, read_queues)
    deadline = time.monotonic() + 10
    rows = rb'"readQueueNums":%d,.*"writeQueueNums":%d' % (read_queues or queues, queues)
    while not re.search(rows, call(namesrv_port, 105, {"topic": topic})[3]):
        if time.monotonic() > deadline:
            raise CallFailed(f"no route to {topic} after 10 s")
        time.sleep(0.05)
