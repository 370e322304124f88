"""What the oracle tests share: the cluster under test, letters to send, the comparison."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from peers.clients import Client, Consumer, Letter, Line
from peers.java import JavaCluster
from peers.node import CosmoNode
from peers.raw import clusters

# A client books a message after its listener has returned, by another thread or routine; what is
# not booked when it is closed is not committed. On a busy machine that may take its time.
BOOKED_S = 2.0
USER_PROPERTY = "colour"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the servers under test listen, whichever they are."""

    server: CosmoNode | JavaCluster

    @property
    def namesrv(self) -> str:
        return self.server.namesrv_address

    @property
    def namesrv_port(self) -> int:
        return self.server.namesrv_port

    @property
    def broker_port(self) -> int:
        return self.server.broker_port

    @property
    def broker(self) -> str:
        return self.server.broker_address

    @property
    def cluster_name(self) -> str:
        (name,) = clusters(self.namesrv_port)
        return name

    @property
    def broker_name(self) -> str:
        ((name,),) = clusters(self.namesrv_port).values()
        return name


def letters(count: int, *, label: str = "letter", shards: int | None = None) -> list[Letter]:
    """Letters that differ in everything that has to survive the journey."""
    return [
        Letter(
            body=f"{label} {number} — déjà vu 消息 🚀".encode(),
            tags=(None, "TagA", "标签", "tag-c")[number % 4],
            keys=(None, f"key{number}", f"key{number} 键{number}")[number % 3],
            properties={USER_PROPERTY: f"blå-{number}-色"} if number % 2 else {},
            shard=None if shards is None else number % shards,
        )
        for number in range(count)
    ]


def body(line: Line) -> bytes:
    return base64.b64decode(line["body"])


def check_arrived(
    sent: Sequence[Letter], acknowledged: Sequence[Line], received: Sequence[Line]
) -> None:
    """Each letter arrived exactly once, unchanged, where the acknowledgement said it is."""
    by_body = {body(line): line for line in received}
    assert len(received) == len(sent), f"{len(received)} received of {len(sent)} sent"
    assert set(by_body) == {letter.body for letter in sent}
    for letter, answer in zip(sent, acknowledged, strict=True):
        got = by_body[letter.body]
        assert got["tags"] == letter.tags
        assert got["keys"] == letter.keys
        for key, value in letter.properties.items():
            assert got["properties"].get(key) == value
        if not letter.properties:
            assert USER_PROPERTY not in got["properties"]
        assert got["reconsume_times"] == 0
        assert got["born_ms"] > 0
        assert got["store_ms"] > 0
        assert answer.get("status", "SEND_OK") == "SEND_OK"
        for fact in ("msg_id", "queue_id", "queue_offset"):
            # A client that does not show a fact reports null.
            if answer.get(fact) is not None and got[fact] is not None:
                assert got[fact] == answer[fact], fact


def check_order_per_queue(received: Sequence[Line]) -> None:
    """Messages of one queue came in the order of their offsets, without gaps."""
    last: dict[int, int] = {}
    for line in received:
        queue_id, offset = line["queue_id"], line["queue_offset"]
        assert offset == last.get(queue_id, -1) + 1, f"queue {queue_id}: {offset} out of order"
        last[queue_id] = offset


@contextmanager
def consumers(
    client: Client, cluster: Cluster, topic: str, *groups_and_modes: tuple[str, str]
) -> Iterator[list[Consumer]]:
    """Several consumers of a topic, started side by side."""
    with ExitStack() as running:
        members = [
            running.enter_context(
                Consumer(
                    client,
                    cluster.namesrv,
                    topic,
                    group,
                    mode=mode,
                    properties=[USER_PROPERTY],
                    await_start=False,
                )
            )
            for group, mode in groups_and_modes
        ]
        for member in members:
            member.await_start()
        yield members


def await_all(
    members: Sequence[Consumer], done: Callable[[], bool], timeout_s: float, what: str
) -> None:
    """Collects from all members until it is done."""
    deadline = time.monotonic() + timeout_s
    while not done():
        counts = [(one.assigned, len(one.messages)) for one in members]
        assert time.monotonic() < deadline, f"did not {what} within {timeout_s} s: {counts}"
        for one in members:
            one.listen(0.05)


def names(clients: Sequence[Client]) -> list[str]:
    return [client.name for client in clients]
