"""What the tests of our own client share: the clusters it is tried against, and small waits.

The same scenarios run against Cosmodrome and against two generations of upstream's servers; where
those differ from each other a test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from peers.java import JavaCluster
from peers.node import CosmoNode
from peers.process import free_port
from peers.resolve import ToolMissing
from tests import tls_kit
from tests.oracle.oracle_checks import Cluster

from cosmodrome import Consumer, Message, ReceivedMessage

T = TypeVar("T")
Server = CosmoNode | JavaCluster

OURS = "cosmodrome"
JAVA_49 = "java-4.9"
JAVA_53 = "java-5.3"
TARGETS = (OURS, JAVA_49, JAVA_53)
ARTIFACTS = {JAVA_49: "server", JAVA_53: "server53"}

# Open transactions are asked about after a second instead of a minute.
SETTINGS = {
    "enablePropertyFilter": "true",
    "transactionCheckInterval": "1000",
    "transactionTimeOut": "1000",
}
# Recalls have to be allowed; a broker on a busy machine must not refuse what waited 200 ms; 5.3
# notes ended transactions only every 3 s, and would ask about them after all; and it goes through
# its whole timer wheel every second to flush it, which takes a quarter of a core from the tests.
JAVA_SETTINGS = {
    "recallMessageEnable": "true",
    "brokerFastFailureEnable": "false",
    "transactionOpBatchInterval": "100",
    "timerFlushIntervalMs": "600000",
}


@dataclass(frozen=True, slots=True)
class Target:
    """One cluster of which every test of the session uses its own topics and groups."""

    kind: str
    cluster: Cluster

    @property
    def namesrv(self) -> str:
        return self.cluster.namesrv

    @property
    def has_timers(self) -> bool:
        return self.kind != JAVA_49


class Clusters:
    """Starts what is wanted; upstream's servers are slow, so they start side by side."""

    def __init__(self, folder: Path, kinds: Iterable[str]) -> None:
        self._servers: dict[str, Server] = {}
        self._missing: dict[str, ToolMissing] = {}
        for kind in kinds:
            try:
                self._servers[kind] = _server(folder / kind, kind)
            except ToolMissing as error:
                self._missing[kind] = error
        for server in self._servers.values():
            if isinstance(server, JavaCluster):
                server.begin()

    def target(self, kind: str) -> Target:
        """Returns when it is up; ToolMissing when this machine cannot run it."""
        if kind in self._missing:
            raise self._missing[kind]
        self._servers[kind].start()
        return Target(kind, Cluster(self._servers[kind]))

    def stop(self) -> None:
        for server in self._servers.values():
            server.kill9()


def _server(folder: Path, kind: str) -> Server:
    if kind == OURS:
        # Upstream's servers sign a certificate for themselves; ours are given one.
        certs = tls_kit.certificates(folder / "tls")
        paths = {"certPath": certs / "server.pem", "keyPath": certs / "server.key"}
        settings = SETTINGS | {f"tls.server.{name}": str(path) for name, path in paths.items()}
        words = [word for pair in settings.items() for word in ("--set", "=".join(pair))]
        return CosmoNode(folder / "data", options=words)
    return JavaCluster(
        folder,
        free_port(),
        free_port(-2, 1),
        settings={**SETTINGS, **JAVA_SETTINGS},
        artifacts=ARTIFACTS[kind],
    )


async def until(done: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    """Polls; for conditions that no event announces."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.02)


async def eventually(
    ask: Callable[[], Awaitable[T]], good: Callable[[T], bool], timeout_s: float = 20
) -> T:
    """Asks until the answer is good; returns the last answer, for the test to judge."""
    deadline = time.monotonic() + timeout_s
    while not good(answer := await ask()) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return answer


class Inbox:
    """Takes messages as the handler of a consumer."""

    def __init__(self) -> None:
        self.messages: list[ReceivedMessage] = []
        self.at_ms: list[float] = []

    def __call__(self, message: ReceivedMessage) -> None:
        self.messages.append(message)
        self.at_ms.append(time.time() * 1000)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    async def receive(self, count: int, timeout_s: float = 30) -> list[ReceivedMessage]:
        """All that came, when at least so many did."""
        await until(
            lambda: len(self.messages) >= count,
            f"{count} messages; there are {len(self.messages)}: {self.bodies[:20]}",
            timeout_s,
        )
        return self.messages


@contextlib.asynccontextmanager
async def running(
    consumer: Consumer, topic: str, inbox: Callable[[ReceivedMessage], object], **choice: str
) -> AsyncIterator[Consumer]:
    """A consumer of one topic with a handler."""
    async with consumer:
        await consumer.subscribe(topic, handler=inbox, **choice)
        yield consumer


def messages(topic: str, count: int, label: str = "message") -> list[Message]:
    """Messages that differ in everything that has to survive the journey."""
    return [
        Message(
            topic,
            f"{label} {number} — déjà vu 消息 🚀",
            tags=(None, "TagA", "标签", "tag-c")[number % 4],
            keys=((), f"key{number}", (f"key{number}", f"键{number}"))[number % 3],
            properties={"colour": f"blå-{number}-色"} if number % 2 else None,
            flag=number,
        )
        for number in range(count)
    ]


def check_same(sent: Sequence[Message], received: Sequence[ReceivedMessage]) -> None:
    """Each message came exactly once and unchanged."""
    by_body = {message.body: message for message in received}
    assert len(received) == len(sent), f"{len(received)} received of {len(sent)} sent"
    assert set(by_body) == {message.body for message in sent}
    for message in sent:
        got = by_body[message.body]
        assert got.topic == message.topic
        assert (got.tags, got.keys) == (message.tags, message.keys)
        assert got.properties.get("colour") == message.properties.get("colour")
        assert got.record.flag == message.flag
        assert got.reconsume_times == 0
        assert got.born_host.startswith("127.0.0.1:")
        assert abs(got.store_ms - got.born_ms) < 60_000
