"""Two brokers of one cluster and two name servers, each a process of its own: routes and losses."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from peers.clients import GO, JAVA_HURRIED, Client, Consumer, Letter, Line, send
from peers.flows import Flow
from peers.raw import call, create_topic
from peers.several import Servers
from tests.oracle.oracle_checks import body, check_arrived, letters

Ready = Callable[[Client], Client]
Record = Callable[[str, object], None]

A, B = "broker-a", "broker-b"
NOTICED_S = 3  # a closed connection is noticed at once; the rest is for a busy machine
ALL_SIX = sorted(
    [f"{A}/{number}" for number in range(4)] + [f"{B}/{number}" for number in range(2)]
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("pair")
    kind = os.environ.get("ORACLE_TARGET", "cosmodrome")
    with Servers(folder, kind, brokers=[A, B], name_servers=2) as servers:
        yield servers


@pytest.fixture
def java(ready: Ready) -> Client:
    return ready(JAVA_HURRIED)


def make_topic(servers: Servers, topic: str, **queues: int) -> None:
    """Creates the topic with so many queues on broker a and b; returns when all routes show it."""
    for letter, count in queues.items():
        broker = servers.brokers[f"broker-{letter}"]
        create_topic(servers.name_servers[0].port, broker.port, topic, count)
    wanted = {f"broker-{letter}" for letter in queues}
    deadline = time.monotonic() + 15
    for name_server in servers.name_servers:
        while (found := brokers_of(name_server.port, topic)) != wanted:
            if time.monotonic() > deadline:
                pytest.fail(f"{topic} is routed to {found}, not to {wanted}")
            time.sleep(0.05)


def brokers_of(namesrv_port: int, topic: str) -> set[str]:
    try:
        code, _, _, data = call(namesrv_port, 105, {"topic": topic})
    except OSError:
        return set()
    return {name for name in (A, B) if code == 0 and b'"%s"' % name.encode() in data}


def numbered(label: str, count: int) -> list[Letter]:
    return [Letter(f"{label} {number}".encode()) for number in range(count)]


def place(line: Line) -> str:
    return f"{line['broker']}/{line['queue_id']}"


def repeated(lines: list[Line]) -> int:
    """How many deliveries were not the first of their message."""
    return len(lines) - len({body(line) for line in lines})


@pytest.mark.parametrize("client", [JAVA_HURRIED, GO], ids=["java", "go"])
def test_queues_of_both_brokers_are_used(
    client: Client, ready: Ready, java: Client, servers: Servers, name: str, group: str
) -> None:
    ready(client)
    make_topic(servers, f"T_{name}", a=4, b=2)
    sent = letters(60)
    with Consumer(java, servers.namesrv, f"T_{name}", group) as consumer:
        consumer.wait(lambda: consumer.places == ALL_SIX, 60, "get all six queues")
        answers = send(client, servers.namesrv, f"T_{name}", f"p_{group}", "sync", sent)
        received = consumer.receive(60)
    check_arrived(sent, answers, received)
    assert sorted({place(line) for line in answers}) == ALL_SIX
    by_body = {body(line): line for line in received}
    for letter, answer in zip(sent, answers, strict=True):
        assert place(by_body[letter.body]) == place(answer)
    # Turn by turn over the queues, not over the brokers.
    assert set(Counter(place(line) for line in answers).values()) == {10}


def test_a_topic_of_one_broker_stays_there(
    java: Client, servers: Servers, name: str, group: str
) -> None:
    make_topic(servers, f"T_{name}", b=2)
    sent = letters(12)
    with Consumer(java, servers.namesrv, f"T_{name}", group) as consumer:
        answers = send(java, servers.namesrv, f"T_{name}", f"p_{group}", "sync", sent)
        received = consumer.receive(12)
        assert consumer.places == [f"{B}/0", f"{B}/1"]
    check_arrived(sent, answers, received)
    assert {line["broker"] for line in answers + received} == {B}


def feed_all(flows: dict[str, Flow], when: str, count: int, *, answers: int) -> None:
    """Give each flow so many messages, and wait until it has so many answers in all."""
    for label, flow in flows.items():
        flow.feed(numbered(f"{label} {when}", count))
    for flow in flows.values():
        flow.wait_answers(answers)


def check_flow(label: str, flow: Flow, gone_ms: float, alone_ms: float, *, fails: bool) -> None:
    """It went on with the other broker while b was gone, and to the end."""
    meanwhile = [
        line
        for line in flow.acknowledged
        if gone_ms < line["before_ms"] and line["at_ms"] < alone_ms
    ]
    assert len(meanwhile) >= 60, label
    assert {line["broker"] for line in meanwhile} == {A}, label
    assert fails or flow.failed == [], label
    after = [line for line in flow.answers if body(line).endswith(b"59")][-1]
    assert after["event"] == "sent", label


@pytest.mark.parametrize("end", ["kill9", "stop"])
def test_a_broker_goes_and_comes_back_during_sends(
    end: str,
    java: Client,
    ready: Ready,
    servers: Servers,
    name: str,
    group: str,
    record_property: Record,
) -> None:
    """Three producers go on with the other broker; what was acknowledged is consumed."""
    ready(GO)
    make_topic(servers, f"T_{name}", a=2, b=2)
    where = servers.namesrv, f"T_{name}"
    with ExitStack() as stack:
        consumer = stack.enter_context(Consumer(java, *where, group))
        flows = {
            label: stack.enter_context(Flow(client, *where, f"p_{label}_{group}", mode=mode))
            for label, client, mode in (
                ("java-sync", java, "sync"),
                ("java-async", java, "async"),
                ("go-sync", GO, "sync"),
            )
        }
        consumer.wait(lambda: len(consumer.places) == 4, 60, "get all queues")
        feed_all(flows, "before", 300, answers=100)
        lost = servers.brokers[B]
        lost.kill9() if end == "kill9" else lost.stop()
        gone_ms = time.time() * 1000
        dropped_s = servers.wait_known(A, timeout_s=NOTICED_S)
        feed_all(flows, "without", 60, answers=360)
        alone_ms = time.time() * 1000
        consumer.wait(lambda: {p.split("/")[0] for p in consumer.places} == {A}, 30, "let b go")
        lost.start()
        servers.wait_known(A, B)
        consumer.wait(lambda: len(consumer.places) == 4, 30, "get all queues again")
        feed_all(flows, "after", 60, answers=420)
        for flow in flows.values():
            flow.close()
        kept = {body(line) for flow in flows.values() for line in flow.acknowledged}
        consumer.wait(
            lambda: kept <= {body(line) for line in consumer.messages}, 60, "get all that is kept"
        )
    record_property("dropped_s", round(dropped_s, 2))
    record_property("repeated", repeated(consumer.messages))
    for label, flow in flows.items():
        record_property(f"{label} failed", [line["error"] for line in flow.failed])
        record_property(
            f"{label} slowest_ms", max(line["at_ms"] - line["before_ms"] for line in flow.answers)
        )
        may_fail = label == "java-async" and end == "kill9"
        check_flow(label, flow, gone_ms, alone_ms, fails=may_fail)
    # Progress with the lost broker that was not saved yet is made again, and nothing else.
    of_lost = {body(line) for line in consumer.messages if line["broker"] == B}
    counted = Counter(body(line) for line in consumer.messages)
    assert {text for text, count in counted.items() if count > 1} <= of_lost
    back = [line for line in flows["java-sync"].acknowledged if b"after" in body(line)]
    assert {line["broker"] for line in back} == {A, B}


def test_a_silent_broker_is_avoided(
    java: Client, servers: Servers, name: str, group: str, record_property: Record
) -> None:
    make_topic(servers, f"T_{name}", a=2, b=2)
    silent = servers.brokers[B]
    with Flow(
        java,
        servers.namesrv,
        f"T_{name}",
        f"p_{group}",
        mode="avoiding",
        timeout_ms=1500,
        pause_ms=20,
    ) as flow:
        flow.feed(numbered("usual", 40))
        flow.wait_answers(40)
        assert {line["broker"] for line in flow.acknowledged[20:]} == {A, B}
        silent.pause()
        try:
            flow.feed(numbered("silent", 60))
            flow.wait_answers(100)
        finally:
            silent.resume()
        during = flow.answers[40:]
        # One send runs into its time limit; from then on the other broker gets everything.
        record_property("failed", [line["error"] for line in flow.failed])
        assert 1 <= len(flow.failed) <= 2
        last = max(during.index(line) for line in flow.failed)
        moved = during[last + 1 :]
        assert len(moved) >= 50
        assert {line["broker"] for line in moved} == {A}
        assert max(line["at_ms"] - line["before_ms"] for line in moved) < 1500
        resumed = time.monotonic()
        total = 100
        while {line.get("broker") for line in flow.answers[total - 4 :]} != {A, B}:
            assert time.monotonic() - resumed < 90, "the broker is avoided for ever"
            flow.feed(numbered(f"again {total}", 4))
            total += 4
            flow.wait_answers(total)
        record_property("back_s", round(time.monotonic() - resumed, 1))
    assert not [line for line in flow.failed if b"again" in body(line)]


def test_name_servers_die_one_after_the_other(
    java: Client, ready: Ready, servers: Servers, name: str, group: str, record_property: Record
) -> None:
    ready(GO)
    make_topic(servers, f"T_{name}", a=2, b=2)
    first, second = servers.name_servers
    where = servers.namesrv, f"T_{name}"
    with (
        Consumer(java, *where, group) as consumer,
        Flow(java, *where, f"p_{group}", pause_ms=10) as flow,
    ):
        consumer.wait(lambda: len(consumer.places) == 4, 60, "get all queues")
        flow.feed(numbered("both", 20))
        flow.wait_answers(20)
        first.kill9()
        make_topic_at(servers, f"New_{name}", 1)
        flow.feed(numbered("second", 100))
        # Newcomers find the living one, whichever they try first.
        for newcomer in (java, GO):
            sent = letters(4, label=newcomer.name)
            send(newcomer, servers.namesrv, f"New_{name}", f"p_new_{group}", "sync", sent)
        flow.wait_answers(120)

        first.start()
        record_property("registered_again_s", round(servers.wait_known(A, B, name_servers=[0]), 1))
        second.kill9()
        # The restarted one has heard everything, the topic made in its absence too.
        assert brokers_of(first.port, f"New_{name}") == {A}
        send(java, servers.namesrv, f"New_{name}", f"p_new_{group}", "sync", letters(4))

        first.kill9()
        flow.feed(numbered("none", 100))  # known routes go on
        flow.wait_answers(220)
        consumer.receive(220)
        first.start()
        second.start()
        servers.wait_known(A, B)
        flow.feed(numbered("again", 20))
        flow.wait_answers(240)
        consumer.receive(240)
    assert flow.failed == []
    assert {line["broker"] for line in flow.acknowledged[120:220]} == {A, B}
    assert {body(line) for line in consumer.messages} == {body(line) for line in flow.answers}
    assert repeated(consumer.messages) == 0


def make_topic_at(servers: Servers, topic: str, name_server: int) -> None:
    """Creates the topic on broker a; returns when this name server has its route."""
    create_topic(servers.name_servers[name_server].port, servers.brokers[A].port, topic, 2)
