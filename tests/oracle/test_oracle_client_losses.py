"""Our client while brokers and name servers go and come back.

The flows use the blocking face: its event loop runs in a thread of its own while the test ends
and starts servers. Delivery is at least once: nothing that was acknowledged is lost, and what is
stored twice was tried twice.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from peers.node import CosmoNode
from peers.raw import call, create_topic
from peers.several import Servers

from cosmodrome import ClientOptions, Message, ReceivedMessage, SendFailed, SendResult, blocking
from cosmodrome.errors import CosmodromeError

Record = Callable[[str, object], None]

A, B = "broker-a", "broker-b"
HURRIED = ClientOptions(route_refresh_ms=500, heartbeat_ms=1_000)
PACE_S = 0.005


def wait(done: Callable[[], object], what: Callable[[], str] | str, timeout_s: float = 40) -> None:
    deadline = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {what if isinstance(what, str) else what()}")
        time.sleep(0.02)


class Tries:
    """A hook that notes which messages were tried more than once."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def before_send(self, context: Any) -> None:
        self.counts.update(context.msg_ids)

    def after_send(self, context: Any) -> None:
        """Only the beginning counts."""


class Flow:
    """A producer that goes on, one message after the other or pipelined, until it is closed."""

    def __init__(self, namesrv: str, topic: str, label: str, *, pipelined: bool = False) -> None:
        self.acknowledged: dict[bytes, SendResult] = {}
        self.failed: dict[bytes, CosmodromeError] = {}
        self.slowest_s = 0.0
        self.tries = Tries()
        self._topic = topic
        self._label = label
        self._pipelined = pipelined
        self._producer = blocking.Producer(
            namesrv, group=f"p_{label}_{topic}", client=HURRIED, hooks=(self.tries,)
        )
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._send)

    @property
    def answers(self) -> int:
        return len(self.acknowledged) + len(self.failed)

    def more(self, count: int, timeout_s: float = 40) -> None:
        """Returns when so many further messages were answered."""
        goal = self.answers + count
        wait(
            lambda: self.answers >= goal or not self._thread.is_alive(),
            lambda: f"{goal} answers; {len(self.failed)} failed: {list(self.failed.values())[-1:]}",
            timeout_s,
        )
        assert self._thread.is_alive()

    def __enter__(self) -> Flow:
        self._producer.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops sending; what is on its way is still answered."""
        self._ending.set()
        self._thread.join()
        self._producer.stop()

    def _send(self) -> None:
        number = 0
        while not self._ending.wait(PACE_S):
            body = f"{self._label} {number}".encode()
            number += 1
            if self._pipelined:
                future = self._producer.submit(Message(self._topic, body))
                future.add_done_callback(
                    partial(lambda body, done: self._note(body, done.result), body)
                )
            else:
                began = time.monotonic()
                self._note(body, partial(self._producer.send, Message(self._topic, body)))
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _note_done(self, body: bytes, done: Future[SendResult]) -> None:
        self._note(body, done.result)

    def _note(self, body: bytes, result: Callable[[], SendResult]) -> None:
        try:
            self.acknowledged[body] = result()
        except CosmodromeError as error:
            self.failed[body] = error


class Reader:
    """A consumer that notes everything."""

    def __init__(self, namesrv: str, topic: str, group: str) -> None:
        self.messages: list[ReceivedMessage] = []
        self._topic = topic
        self.consumer = blocking.Consumer(
            namesrv,
            group=group,
            client=HURRIED,
            consume_from="first",
            rebalance_every_ms=1_000,
            commit_every_ms=500,
        )

    def __enter__(self) -> Reader:
        self.consumer.start()
        self.consumer.subscribe(self._topic, handler=self.messages.append)
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.stop()

    def brokers(self) -> Counter[str]:
        return Counter(q.broker_name for q in self.consumer.assignment if q.topic == self._topic)

    def wait_all(self, *flows: Flow) -> None:
        """Everything that was acknowledged came."""
        kept = {body for flow in flows for body in flow.acknowledged}
        wait(
            lambda: kept <= {message.body for message in self.messages},
            lambda: f"lost: {sorted(kept - {message.body for message in self.messages})[:10]}",
        )

    def check_copies(self, *flows: Flow) -> tuple[int, int]:
        """What is stored twice was tried twice; how much that is, and how much came again."""
        places: dict[bytes, set[tuple[str, int, int]]] = {}
        ids: dict[bytes, str] = {}
        for message in self.messages:
            where = (message.broker_name, message.queue_id, message.queue_offset)
            places.setdefault(message.body, set()).add(where)
            ids[message.body] = message.msg_id
        tries = Counter[str]()
        for flow in flows:
            tries += flow.tries.counts
        stored_again = [body for body, found in places.items() if len(found) > 1]
        assert all(tries[ids[body]] > 1 for body in stored_again)
        return len(stored_again), len(self.messages) - sum(map(len, places.values()))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("losses")
    with Servers(folder, "cosmodrome", brokers=[A, B], name_servers=2) as servers:
        yield servers


@pytest.fixture
def place(servers: Servers, name: str) -> str:
    """A topic with two queues on each broker, known to both name servers."""
    for server in servers.name_servers:
        for broker in servers.brokers.values():
            create_topic(server.port, broker.port, f"T_{name}", 2)
    for server in servers.name_servers:
        wait(partial(_both_routed, server.port, name), "routes")
    return f"T_{name}"


def _both_routed(port: int, name: str) -> bool:
    return all(b'"%s"' % n in _route(port, name) for n in (b"broker-a", b"broker-b"))


def _route(port: int, name: str) -> bytes:
    return call(port, 105, {"topic": f"T_{name}"})[3]


@pytest.mark.parametrize("end", ["kill9", "stop"])
def test_one_of_two_brokers_goes_and_comes_back(
    end: str, servers: Servers, place: str, group: str, record_property: Record
) -> None:
    lost = servers.brokers[B]
    with (
        Reader(servers.namesrv, place, group) as reader,
        Flow(servers.namesrv, place, "sync") as sync,
        Flow(servers.namesrv, place, "pipelined", pipelined=True) as pipelined,
    ):
        flows = (sync, pipelined)
        wait(lambda: reader.brokers() == {A: 2, B: 2}, "all queues")
        for flow in flows:
            flow.more(100)
        lost.kill9() if end == "kill9" else lost.stop()
        for flow in flows:
            flow.more(100)
        servers.wait_known(A)
        alone = len(sync.acknowledged)
        for flow in flows:
            flow.more(100)
        during = list(sync.acknowledged.values())[alone + 20 :]
        assert {result.queue.broker_name for result in during} == {A}
        wait(lambda: set(reader.brokers()) == {A}, "b is let go")
        lost.start()
        servers.wait_known(A, B)
        wait(lambda: reader.brokers() == {A: 2, B: 2}, "all queues again")

        def both(flow: Flow) -> bool:
            last = list(flow.acknowledged.values())[-20:]
            return {result.queue.broker_name for result in last} == {A, B}

        for flow in flows:
            wait(partial(both, flow), "both brokers are used again")
            flow.close()
        reader.wait_all(*flows)
    # Every message had another broker to go to.
    assert sync.failed == {}
    assert pipelined.failed == {}
    stored_again, came_again = reader.check_copies(*flows)
    record_property("stored again", stored_again)
    record_property("came again", came_again)
    record_property("slowest_s", round(sync.slowest_s, 2))


def test_name_servers_go_and_come_back(
    servers: Servers, place: str, group: str, record_property: Record
) -> None:
    first, second = servers.name_servers
    with (
        Reader(servers.namesrv, place, group) as reader,
        Flow(servers.namesrv, place, "flow") as flow,
    ):
        flow.more(50)
        first.kill9()
        flow.more(200)
        # A newcomer finds the living one, whichever it tries first.
        with blocking.Producer(servers.namesrv, group=f"new_{group}") as newcomer:
            newcomer.send(Message(place, b"from a newcomer"))
        second.kill9()
        flow.more(300)  # known routes go on, past several refreshes
        first.start()
        second.start()
        servers.wait_known(A, B)
        flow.more(50)
        with blocking.Producer(servers.namesrv, group=f"late_{group}") as newcomer:
            newcomer.send(Message(place, b"from a late one"))
        flow.close()
        reader.wait_all(flow)
    assert flow.failed == {}
    assert reader.check_copies(flow) == (0, 0)
    assert {b"from a newcomer", b"from a late one"} <= {m.body for m in reader.messages}
    record_property("slowest_s", round(flow.slowest_s, 2))


@pytest.mark.parametrize("end", ["kill9", "stop"])
def test_the_only_broker_restarts(
    end: str, tmp_path: Path, name: str, group: str, record_property: Record
) -> None:
    """In the middle of sends and of consumption; clients need no help to go on."""
    with CosmoNode(tmp_path / "data") as node:
        topic = f"T_{name}"
        create_topic(node.namesrv_port, node.broker_port, topic, 4)
        with (
            Reader(node.namesrv_address, topic, group) as reader,
            Flow(node.namesrv_address, topic, "sync") as sync,
            Flow(node.namesrv_address, topic, "pipelined", pipelined=True) as pipelined,
        ):
            for flow in (sync, pipelined):
                flow.more(200)
            node.kill9() if end == "kill9" else node.stop()
            node.start()
            began = time.monotonic()
            gone = len(reader.messages)
            known = len(sync.acknowledged)
            wait(lambda: len(sync.acknowledged) > known + 100, "sends go on")
            resumed_s = time.monotonic() - began
            wait(lambda: len(reader.messages) > gone + 100, "consumption goes on")
            for flow in (sync, pipelined):
                flow.more(100)
                flow.close()
            reader.wait_all(sync, pipelined)
    stored_again, came_again = reader.check_copies(sync, pipelined)
    # A failure says where the message was tried.
    failures = [*sync.failed.values(), *pipelined.failed.values()]
    assert all(isinstance(failure, SendFailed) for failure in failures), failures[:3]
    record_property("resumed_s", round(resumed_s, 2))
    record_property("failed", len(failures))
    record_property("stored again", stored_again)
    record_property("came again", came_again)


def test_nobody_is_there(group: str) -> None:
    """The error names what was asked; nothing hangs."""
    began = time.monotonic()
    with (
        blocking.Producer("127.0.0.1:1", group=group, send_timeout_ms=1_000) as producer,
        pytest.raises(CosmodromeError, match=r"127\.0\.0\.1:1"),
    ):
        producer.send(Message("T", b"x"))
    assert time.monotonic() - began < 60
