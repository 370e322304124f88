"""The client and the embedded node without `await`; see `client/blocking.py`.

from cosmodrome.blocking import Consumer, Producer, embedded

with embedded() as node, Producer(node.namesrv, group="orders") as producer:
    producer.send(Message("orders", b"..."))
"""

from __future__ import annotations

from typing import Any

from cosmodrome.client.blocking import (
    Admin,
    Consumer,
    Producer,
    PullConsumer,
    ReceivedMessage,
    TransactionProducer,
)
from cosmodrome.client.portal import Portal
from cosmodrome.env.lifecycle import Lifecycle
from cosmodrome.node import Node as AsyncNode
from cosmodrome.node import embedded as async_embedded

__all__ = [
    "Admin",
    "Consumer",
    "Node",
    "Producer",
    "PullConsumer",
    "ReceivedMessage",
    "TransactionProducer",
    "embedded",
]


class Node(Lifecycle):
    """`cosmodrome.embedded` in a thread of its own."""

    def __init__(self, inner: AsyncNode) -> None:
        self._inner = inner
        self._portal: Portal | None = None

    @property
    def namesrv(self) -> str:
        """The address to give to clients."""
        return self._inner.namesrv

    @property
    def broker_address(self) -> str:
        return self._inner.broker_address

    @property
    def broker_name(self) -> str:
        return self._inner.broker_name

    @property
    def data(self) -> str:
        """The directory of the store."""
        return self._inner.data

    def start(self) -> None:
        if self._portal is not None:
            return
        portal = Portal("cosmodrome-node")
        portal.start()
        try:
            portal.call(self._inner.start())
        except BaseException:
            portal.stop()
            raise
        self._portal = portal

    def stop(self) -> None:
        portal, self._portal = self._portal, None
        if portal is not None:
            try:
                portal.call(self._inner.stop())
            finally:
                portal.stop()

    def restart(self) -> None:
        """A clean stop and a new start on the same ports and the same directory."""
        if self._portal is None:
            self.start()
        else:
            self._portal.call(self._inner.restart())

    def stop_broker(self) -> None:
        if self._portal is not None:
            self._portal.call(self._inner.stop_broker())

    def start_broker(self) -> None:
        if self._portal is not None:
            self._portal.call(self._inner.start_broker())


def embedded(*, data: str | None = None, **settings: Any) -> Node:
    """A name server and broker in a background thread; settings as in `cosmodrome.embedded`."""
    return Node(async_embedded(data=data, **settings))
