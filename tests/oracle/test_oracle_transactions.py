"""Transactions and request-reply with the Java client, on servers that ask soon."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from peers.clients import Client, Consumer, Letter, Line, run
from peers.java import JavaCluster, mqadmin
from peers.node import CosmoNode
from peers.process import free_port
from peers.raw import create_topic
from tests.oracle.oracle_checks import Cluster, body

SETTINGS = {"transactionCheckInterval": "1000", "transactionTimeOut": "1000"}


def words_of(settings: dict[str, str]) -> list[str]:
    return [word for pair in settings.items() for word in ("--set", "=".join(pair))]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("soon")
    server: CosmoNode | JavaCluster
    if os.environ.get("ORACLE_TARGET") == "java":
        server = JavaCluster(folder, free_port(), free_port(-2, 1), settings=SETTINGS)
    else:
        server = CosmoNode(folder / "data", options=words_of(SETTINGS))
    server.start()
    yield Cluster(server)
    server.stop()


@pytest.fixture
def topic(cluster: Cluster, name: str) -> str:
    create_topic(cluster.namesrv_port, cluster.broker_port, f"T_{name}", 2)
    return f"T_{name}"


def transact(
    java: Client, cluster: Cluster, topic: str, *outcomes: str, wait_s: int = 60
) -> list[Line]:
    letters = [
        Letter(
            f"{number} {outcome}".encode(),
            tags="Pay",
            keys=f"k{number}",
            properties={"outcome": outcome},
        )
        for number, outcome in enumerate(outcomes)
    ]
    text = "".join(f"{letter.line()}\n" for letter in letters)
    words = ["transact", cluster.namesrv, topic, f"p_{topic}", str(wait_s)]
    return run(java, words, text, timeout_s=120)


def test_producers_decide(java: Client, cluster: Cluster, topic: str, group: str) -> None:
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        lines = transact(java, cluster, topic, "commit", "rollback", "commit", "rollback")
        received = consumer.receive(2)
        consumer.listen(3)
    assert len(consumer.messages) == 2
    sent = [line for line in lines if line["event"] == "sent"]
    assert [line["state"] for line in sent] == [
        *("COMMIT_MESSAGE", "ROLLBACK_MESSAGE", "COMMIT_MESSAGE", "ROLLBACK_MESSAGE"),
    ]
    assert {line["status"] for line in sent} == {"SEND_OK"}
    assert [line["event"] for line in lines if line["event"] != "sent"] == []
    by_id = {line["msg_id"]: line for line in received}
    for number in (0, 2):
        line = by_id[sent[number]["msg_id"]]
        assert body(line) == f"{number} commit".encode()
        assert (line["tags"], line["keys"]) == ("Pay", f"k{number}")
        assert line["queue_id"] == sent[number]["queue_id"]
        assert line["sys_flag"] & 0xC == 8
        assert line["properties"]["REAL_TOPIC"] == topic
        assert line["properties"]["PGROUP"] == f"p_{topic}"


def test_producers_are_asked(java: Client, cluster: Cluster, topic: str, group: str) -> None:
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        lines = transact(java, cluster, topic, "later:commit", "later:rollback", "commit")
        received = consumer.receive(2)
        consumer.listen(4)  # several looks later nobody was asked again
    assert len(consumer.messages) == 2
    assert sorted(body(line) for line in received) == [b"0 later:commit", b"2 commit"]
    checked = [line for line in lines if line["event"] == "checked"]
    assert sorted(body(line) for line in checked) == [b"0 later:commit", b"1 later:rollback"]
    sent = {line["index"]: line for line in lines if line["event"] == "sent"}
    for line in checked:
        assert line["topic"] == topic
        assert line["properties"]["TRANSACTION_CHECK_TIMES"] == "1"
        number = int(body(line)[:1])
        assert line["transaction_id"] == sent[number]["msg_id"]


def test_another_member_of_the_group_is_asked(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    """The first producer leaves before it is asked; a later one of its group decides."""
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        lines = transact(java, cluster, topic, "later:commit", wait_s=0)
        assert [line["event"] for line in lines] == ["sent"]
        lines = transact(java, cluster, topic, "later:rollback", "later:rollback")
        assert b"0 later:commit" in [body(line) for line in lines if line["event"] == "checked"]
        received = consumer.receive(1)
    assert [body(line) for line in received] == [b"0 later:commit"]


def test_request_and_reply(java: Client, cluster: Cluster, topic: str, group: str) -> None:
    questions = [Letter(f"question {number} 问".encode()) for number in range(5)]
    with Consumer(java, cluster.namesrv, topic, group, mode="replying") as consumer:
        text = "".join(f"{letter.line()}\n" for letter in questions)
        words = ["request", cluster.namesrv, topic, f"p_{group}"]
        replies = run(java, words, text, timeout_s=120)
        consumer.receive(5)
    assert [body(line) for line in replies] == [b"re: " + letter.body for letter in questions]
    for asked, reply in zip(consumer.messages, replies, strict=True):
        for name in ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL"):
            assert reply["properties"][name] == asked["properties"][name]
        assert reply["properties"]["MSG_TYPE"] == "reply"
        assert int(reply["properties"]["PUSH_REPLY_TIME"]) > 0


def test_operators_reach_consumers(java: Client, cluster: Cluster, topic: str, group: str) -> None:
    transact(java, cluster, topic, *["commit"] * 4)
    of_group = ["-g", group, "-t", topic]
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        consumer.receive(4)
        consumer.listen(6)  # until its offsets are committed

        printed = mqadmin(cluster.namesrv, "consumerConnection", "-g", group)
        (client_id,) = re.findall(r"^(\S+@\S+) ", printed, re.MULTILINE)
        printed = mqadmin(cluster.namesrv, "consumerStatus", "-g", group, "-i", client_id)
        assert "#Consumer MQ Detail#" in printed
        assert topic in printed

        printed = mqadmin(
            cluster.namesrv, "queryCq", "-t", topic, "-q", "0", "-i", "0", *of_group[:2]
        )
        assert re.search(r"max: \d, min: 0", printed)

        printed = mqadmin(
            cluster.namesrv, "cloneGroupOffset", "-s", group, "-d", f"d{group}", *of_group[2:]
        )
        assert "clone group offset success" in printed

        printed = mqadmin(cluster.namesrv, "resetOffsetByTime", *of_group, "-s", "0")
        assert re.search(rf"^{cluster.broker_name} +\d +0", printed, re.MULTILINE)
        consumer.receive(8)


@pytest.mark.parametrize("first", ["ours", "upstream"])
def test_what_one_broker_began_the_other_ends(java: Client, tmp_path: Path, first: str) -> None:
    ports = free_port(), free_port(-2, 1)
    settings = {**SETTINGS, "mappedFileSizeCommitLog": str(1 << 20), "maxIndexNum": "1000"}
    upstream = JavaCluster(tmp_path, *ports, settings=settings)
    named = {**settings, "brokerName": JavaCluster.broker_name}
    ours = CosmoNode(upstream.store, *ports, options=words_of(named))
    servers: list[CosmoNode | JavaCluster] = [ours, upstream]
    if first == "upstream":
        servers.reverse()
    with servers[0]:
        cluster = Cluster(servers[0])
        create_topic(cluster.namesrv_port, cluster.broker_port, "T", 2)
        transact(java, cluster, "T", "commit", "rollback", "later:commit", wait_s=0)
        # Asked without an answer: nobody is there. The copy is what the other one finds.
        transact(java, cluster, "Elsewhere", "later:rollback")
    with servers[1]:
        cluster = Cluster(servers[1])
        with Consumer(java, cluster.namesrv, "T", "g") as consumer:
            transact(java, cluster, "T", "later:rollback", "later:rollback")
            received = consumer.receive(2)
            consumer.listen(4)
    assert sorted(body(line) for line in received) == [b"0 commit", b"2 later:commit"]
    assert len(consumer.messages) == 2
