"""What a client sends is what clients receive, in every send mode and every language."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from peers.clients import ALL, CPP, GO, JAVA, NODE, Client, Consumer, Letter, run, send
from tests.oracle.oracle_checks import USER_PROPERTY, Cluster, body, check_arrived, letters, names

Ready = Callable[[Client], Client]

MODES = [(client, mode) for client in ALL for mode in sorted(client.send_modes)]
LANGUAGES = (JAVA, GO, CPP, NODE)
CREATORS = [client for client in ALL if client.creates_topics]


@pytest.mark.parametrize(
    ("client", "mode"), MODES, ids=[f"{client.name}-{mode}" for client, mode in MODES]
)
def test_send_and_consume(
    client: Client, mode: str, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(client)
    sent = letters(24, shards=4)
    acknowledged = send(client, cluster.namesrv, topic, f"p_{group}", mode, sent)
    with Consumer(
        client, cluster.namesrv, topic, group, properties=[USER_PROPERTY, "CLUSTER"]
    ) as consumer:
        consumer.receive(len(sent))
        received = consumer.listen(0.3)
    check_arrived(sent, acknowledged, received)
    assert {line["properties"]["CLUSTER"] for line in received} == {cluster.cluster_name}
    if mode == "batch":
        assert len({line["queue_id"] for line in received}) == 1
    if mode == "orderly":
        by_body = {body(line): line["queue_id"] for line in received}
        assert [by_body[letter.body] for letter in sent] == [letter.shard for letter in sent]


@pytest.mark.parametrize("sender", LANGUAGES, ids=names(LANGUAGES))
def test_every_language_reads_every_other(
    sender: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(sender)
    sent = letters(12)
    acknowledged = send(sender, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    for receiver in LANGUAGES:
        if receiver is sender:
            continue
        ready(receiver)
        with Consumer(
            receiver,
            cluster.namesrv,
            topic,
            f"{group}_{receiver.name}",
            properties=[USER_PROPERTY],
        ) as consumer:
            received = consumer.receive(len(sent))
        check_arrived(sent, acknowledged, received)


@pytest.mark.parametrize("client", ALL, ids=names(ALL))
def test_large_bodies(
    client: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(client)
    dense = "".join(hashlib.sha256(b"%d" % n).hexdigest() for n in range(1600)).encode()
    sent = [
        Letter(b"pressed flat, " * 7_500, tags="flat"),
        Letter(dense[:102_400], tags="dense"),
        Letter(b"x", tags="one"),
    ]
    if client.zero_bytes:
        sent.append(Letter(bytes(range(256)) * 400, tags="binary"))
    acknowledged = send(client, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    with Consumer(client, cluster.namesrv, topic, group) as consumer:
        received = consumer.receive(len(sent))
    check_arrived(sent, acknowledged, received)
    # Other readers unpack it too, and see that it was stored compressed.
    ready(JAVA)
    pulled = run(JAVA, ["pull", cluster.namesrv, topic, f"{group}_pull", "flat"])
    (flat,) = [line for line in pulled if line["event"] == "message"]
    assert body(flat) == sent[0].body
    assert flat["sys_flag"] & 1


@pytest.mark.parametrize("client", CREATORS, ids=names(CREATORS))
def test_first_send_creates_the_topic(
    client: Client, ready: Ready, cluster: Cluster, name: str, group: str
) -> None:
    ready(client)
    topic = f"Auto_{name}"
    sent = letters(8)
    acknowledged = send(client, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    with Consumer(client, cluster.namesrv, topic, group, properties=[USER_PROPERTY]) as consumer:
        received = consumer.receive(len(sent))
    check_arrived(sent, acknowledged, received)
    assert {line["queue_id"] for line in received} == {0, 1, 2, 3}
