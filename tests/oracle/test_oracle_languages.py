"""What the Go and Node clients have besides sending and consuming.

The C++ wheel offers neither transactions nor requests through its C interface, and the Node client
has neither; delays and orderly mode of the wheel are in the neighbouring files.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peers.clients import GO, JAVA, NODE, Client, Consumer, Letter, Line, run, send
from peers.java import JavaCluster
from peers.node import CosmoNode
from peers.process import free_port
from peers.raw import create_topic
from tests.oracle.oracle_checks import Cluster, body

Ready = Callable[[Client], Client]

SETTINGS = {
    "transactionCheckInterval": "1000",
    "transactionTimeOut": "1000",
    "enablePropertyFilter": "true",
}
LATE_MS = 3_500  # less than to the next delay level
PAIRS = [(GO, GO), (GO, JAVA), (JAVA, GO)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    server = _server(tmp_path_factory.mktemp("languages"))
    server.start()
    yield Cluster(server)
    server.stop()


def _server(folder: Path) -> CosmoNode | JavaCluster:
    if os.environ.get("ORACLE_TARGET") == "java":
        return JavaCluster(folder, free_port(), free_port(-2, 1), settings=SETTINGS)
    words = [word for pair in SETTINGS.items() for word in ("--set", "=".join(pair))]
    return CosmoNode(folder / "data", options=words)


@pytest.fixture
def go(ready: Ready) -> Client:
    return ready(GO)


@pytest.fixture
def node(ready: Ready) -> Client:
    return ready(NODE)


def lines_of(letters: list[Letter]) -> str:
    return "".join(f"{letter.line()}\n" for letter in letters)


def dead_letters(java: Client, cluster: Cluster, group: str) -> list[Line]:
    lines = run(java, ["pull", cluster.namesrv, f"%DLQ%{group}", f"dead_{group}", "*"])
    return [line for line in lines if line["event"] == "message"]


def test_go_decides_and_is_asked(go: Client, cluster: Cluster, topic: str, group: str) -> None:
    outcomes = ("commit", "rollback", "later:commit", "later:rollback", "commit")
    letters = [
        Letter(f"{number} {outcome}".encode(), tags="Pay", properties={"outcome": outcome})
        for number, outcome in enumerate(outcomes)
    ]
    with Consumer(go, cluster.namesrv, topic, group) as consumer:
        words = ["transact", cluster.namesrv, topic, f"p_{group}", "60"]
        lines = run(go, words, lines_of(letters), timeout_s=120)
        received = consumer.receive(3)
        consumer.listen(3)  # several looks later nobody was asked again
    assert len(consumer.messages) == 3
    sent = [line for line in lines if line["event"] == "sent"]
    assert [line["state"] for line in sent] == [
        *("COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "UNKNOW", "UNKNOW", "COMMIT_MESSAGE"),
    ]
    assert sorted(body(line) for line in received) == [
        *(b"0 commit", b"2 later:commit", b"4 commit"),
    ]
    checked = [line for line in lines if line["event"] == "checked"]
    assert sorted(body(line) for line in checked) == [b"2 later:commit", b"3 later:rollback"]
    by_id = {line["msg_id"]: line for line in received}
    for number in (0, 2, 4):
        line = by_id[sent[number]["msg_id"]]
        assert body(line) == letters[number].body
        assert line["tags"] == "Pay"
        assert line["queue_id"] == sent[number]["queue_id"]


@pytest.mark.parametrize(("asks", "answers"), PAIRS, ids=lambda client: client.name)
def test_go_and_java_answer_each_other(
    asks: Client, answers: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(asks)
    questions = [Letter(f"question {number} 问".encode()) for number in range(4)]
    with Consumer(ready(answers), cluster.namesrv, topic, group, mode="replying") as consumer:
        words = ["request", cluster.namesrv, topic, f"p_{group}"]
        replies = run(asks, words, lines_of(questions), timeout_s=120)
        consumer.receive(4)
    assert [body(line) for line in replies] == [b"re: " + letter.body for letter in questions]
    for asked, reply in zip(consumer.messages, replies, strict=True):
        correlation = asked["properties"]["CORRELATION_ID"]
        assert reply["properties"]["CORRELATION_ID"] == correlation


def test_go_retries_and_puts_aside(
    go: Client, java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    # A topic that appears after the client's start is noticed by it only 20 s later.
    create_topic(cluster.namesrv_port, cluster.broker_port, f"%RETRY%{group}", 1)
    with Consumer(go, cluster.namesrv, topic, group, mode="failing:2:1") as consumer:
        (answer,) = send(
            go,
            cluster.namesrv,
            topic,
            f"p_{group}",
            "sync",
            [Letter(b"bad", tags="Bad", keys="k1", properties={"colour": "red"})],
        )
        attempts = consumer.receive(3)
        consumer.listen(2)
    assert len(consumer.messages) == 3, "an attempt too many"
    assert [line["reconsume_times"] for line in attempts] == [0, 1, 2]
    for earlier, later in itertools.pairwise(attempts):
        assert 0 <= later["store_ms"] - earlier["at_ms"] - 1_000 < LATE_MS
        assert later["properties"]["ORIGIN_MESSAGE_ID"] == answer["offset_msg_id"]
        assert later["properties"]["RETRY_TOPIC"] == topic
        assert later["properties"]["colour"] == "red"
    (dead,) = dead_letters(java, cluster, group)
    assert body(dead) == b"bad"
    assert dead["reconsume_times"] == 3


def test_go_filters_with_sql92(go: Client, cluster: Cluster, topic: str, group: str) -> None:
    letters = [
        Letter(
            f"letter {number}".encode(),
            properties={"size": str(number), "even": ("yes", "no")[number % 2]},
        )
        for number in range(20)
    ]
    condition = "sql:size BETWEEN 5 AND 15 AND even = 'yes'"
    with Consumer(go, cluster.namesrv, topic, group, expression=condition) as consumer:
        send(go, cluster.namesrv, topic, f"p_{group}", "sync", letters)
        consumer.receive(5)
        received = consumer.listen(1)
    assert sorted(body(line) for line in received) == sorted(
        f"letter {number}".encode() for number in (6, 8, 10, 12, 14)
    )


def test_node_sends_later(node: Client, cluster: Cluster, topic: str, group: str) -> None:
    letters = [Letter(b"5000", delay=2), Letter(b"1000", delay=1), Letter(b"0")]
    with Consumer(node, cluster.namesrv, topic, group) as consumer:
        send(node, cluster.namesrv, topic, f"p_{group}", "sync", letters)
        received = consumer.receive(3)
    assert [body(line) for line in received] == [b"0", b"1000", b"5000"]
    for line in received:
        late_ms = line["store_ms"] - line["born_ms"] - int(body(line))
        assert 0 <= late_ms < LATE_MS
        assert line["properties"].get("REAL_TOPIC") == (None if body(line) == b"0" else topic)


def test_node_gets_a_failed_message_again(
    node: Client, cluster: Cluster, topic: str, group: str
) -> None:
    """The client leaves the level to the broker: the first time it waits ten seconds."""
    with Consumer(node, cluster.namesrv, topic, group, mode="failing:16:0") as consumer:
        send(node, cluster.namesrv, topic, f"p_{group}", "sync", [Letter(b"bad", keys="k1")])
        first, again = consumer.receive(2)
    assert (first["reconsume_times"], again["reconsume_times"]) == (0, 1)
    assert body(again) == b"bad"
    assert again["keys"] == "k1"
    assert 0 <= again["store_ms"] - first["at_ms"] - 10_000 < LATE_MS
    assert again["properties"]["RETRY_TOPIC"] == topic
