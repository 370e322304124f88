"""Nodes, messages and connections for tests that read from live brokers."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from cosmodrome import ClientOptions, Message
from cosmodrome.blocking import Node, Producer
from cosmodrome.client.portal import Portal
from cosmodrome.node import embedded as async_embedded
from cosmodrome.spark.read.options import Connection
from cosmodrome.wire.bodies import MessageQueue


def connection(namesrv: str, **more: object) -> Connection:
    base = Connection(namesrv=namesrv, timeout_ms=60_000, retries=0)
    return dataclasses.replace(base, **more)  # type: ignore[arg-type]


def queue_of(topic: str, queue_id: int = 0, broker: str = "embedded") -> MessageQueue:
    return MessageQueue(topic=topic, broker_name=broker, queue_id=queue_id)


def send(
    node: Node, topic: str, count: int, queue_id: int = 0, namespace: str = "", broker: str = ""
) -> list[str]:
    """Plain messages `m0`, `m1`, … with tags A, B, C in turn; their unique keys."""
    messages = [
        Message(topic, b"m%d" % number, tags="ABC"[number % 3], properties={"n": str(number)})
        for number in range(count)
    ]
    return send_all(node.namesrv, messages, queue_id, namespace, broker or node.broker_name)


def send_all(
    namesrv: str,
    messages: list[Message],
    queue_id: int = 0,
    namespace: str = "",
    broker: str = "embedded",
) -> list[str]:
    options = ClientOptions(namespace=namespace)
    with Producer(namesrv, group="writers", client=options) as producer:
        return [
            producer.send(message, queue=queue_of(message.topic, queue_id, broker)).msg_id
            for message in messages
        ]


def dead_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@contextlib.contextmanager
def another_broker(node: Node, name: str, data: Path) -> Iterator[str]:
    """A second broker of the node's name server; its address."""
    inner = async_embedded(data=str(data), broker_name=name, flush_disk_type="ASYNC_FLUSH")
    inner._nameserver_port = int(node.namesrv.rpartition(":")[2])
    portal = Portal("second-broker")
    portal.start()
    try:
        portal.call(inner.start_broker())
        try:
            while inner._broker is not None and not inner._broker.ready()[0]:
                time.sleep(0.01)
            yield inner.broker_address
        finally:
            portal.call(inner.stop_broker())
    finally:
        portal.stop()
