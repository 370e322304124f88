"""How messages are consumed: order, filters, waiting, progress, sharing."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from peers.clients import (
    ALL,
    CPP,
    GO,
    JAVA,
    JAVA_BINARY,
    Client,
    Consumer,
    Failed,
    Letter,
    run,
    send,
)
from peers.raw import committed_offset, max_offset
from tests.oracle.oracle_checks import (
    BOOKED_S,
    USER_PROPERTY,
    Cluster,
    body,
    check_arrived,
    check_order_per_queue,
    letters,
    names,
)

Ready = Callable[[Client], Client]

ORDERLY = [client for client in ALL if "orderly" in client.consume_modes]


@pytest.mark.parametrize("client", ORDERLY, ids=names(ORDERLY))
def test_orderly_consumer_keeps_order_per_queue(
    client: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(client)
    sent = letters(80, shards=4)
    acknowledged = send(client, cluster.namesrv, topic, f"p_{group}", "orderly", sent)
    with Consumer(
        client, cluster.namesrv, topic, group, mode="orderly", properties=[USER_PROPERTY]
    ) as consumer:
        received = consumer.receive(len(sent))
    check_arrived(sent, acknowledged, received)
    check_order_per_queue(received)
    for shard in range(4):
        assert [body(line) for line in received if line["queue_id"] == shard] == [
            letter.body for letter in sent if letter.shard == shard
        ]


@pytest.mark.parametrize("client", ALL, ids=names(ALL))
def test_tag_filter(client: Client, ready: Ready, cluster: Cluster, topic: str, group: str) -> None:
    ready(client)
    # Aa and BB have the same hash, which is all that the broker compares.
    tags = ["Aa", "BB", "TagA", None, "TagB"]
    sent = [Letter(f"letter {n}".encode(), tags=tags[n % 5]) for n in range(25)]
    acknowledged = send(client, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    wanted = [n for n, letter in enumerate(sent) if letter.tags in ("Aa", "TagB")]
    with Consumer(client, cluster.namesrv, topic, group, expression="Aa || TagB") as consumer:
        consumer.receive(len(wanted))
        received = consumer.listen(1)
    check_arrived([sent[n] for n in wanted], [acknowledged[n] for n in wanted], received)


@pytest.mark.parametrize("client", ALL, ids=names(ALL))
def test_waiting_consumer_gets_a_message_at_once(
    client: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(client)
    sender = ready(GO)  # the quickest to start
    send(sender, cluster.namesrv, topic, f"p_{group}", "sync", letters(8, label="first"))
    with Consumer(client, cluster.namesrv, topic, group) as consumer:
        consumer.receive(8)
        consumer.listen(1.5)  # until its pulls wait in the broker
        late = letters(4, label="late")
        send(sender, cluster.namesrv, topic, f"p_{group}", "sync", late)
        received = consumer.receive(12)[8:]
    assert {body(line) for line in received} == {letter.body for letter in late}
    # A pull that is not woken waits 15 s.
    assert max(line["at_ms"] - line["store_ms"] for line in received) < 10_000


@pytest.mark.parametrize("client", ALL, ids=names(ALL))
def test_restarted_consumer_continues(
    client: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(client)
    before = letters(20, label="before")
    send(client, cluster.namesrv, topic, f"p_{group}", "sync", before)
    with Consumer(client, cluster.namesrv, topic, group) as consumer:
        consumer.receive(len(before))
        consumer.listen(BOOKED_S)
    _await_committed(cluster, group, topic)
    after = letters(12, label="after")
    acknowledged = send(client, cluster.namesrv, topic, f"p_{group}", "sync", after)
    with Consumer(client, cluster.namesrv, topic, group, properties=[USER_PROPERTY]) as consumer:
        consumer.receive(len(after))
        received = consumer.listen(BOOKED_S)
    check_arrived(after, acknowledged, received)
    _await_committed(cluster, group, topic)


def _await_committed(cluster: Cluster, group: str, topic: str) -> None:
    """A client's last commit is one-way, so it may arrive a little after its end."""
    expected = [max_offset(cluster.broker_port, topic, queue_id) for queue_id in range(4)]
    deadline = time.monotonic() + 30
    while True:
        committed = [
            committed_offset(cluster.broker_port, group, topic, queue_id) for queue_id in range(4)
        ]
        if committed == expected:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"committed {committed}, expected {expected}")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("other", "leaves"),
    [(JAVA_BINARY, "close"), (JAVA, "kill9"), (GO, "kill9"), (CPP, "close")],
    ids=["java-binary", "java", "go", "cpp"],
)
def test_two_members_share_and_take_over(
    other: Client,
    leaves: str,
    java: Client,
    ready: Ready,
    cluster: Cluster,
    topic: str,
    group: str,
) -> None:
    ready(other)
    sender = ready(GO)
    with Consumer(java, cluster.namesrv, topic, group) as first:
        first.wait(lambda: len(first.assigned) == 4, 90, "get all queues")
        with Consumer(other, cluster.namesrv, topic, group) as second:
            first.wait(lambda: len(first.assigned) == 2, 90, "give two queues away")
            if other.name.startswith("java"):
                second.wait(lambda: len(second.assigned) == 2, 90, "get two queues")
                assert sorted(first.assigned + second.assigned) == [0, 1, 2, 3]
            shared = letters(40, label="shared", shards=4)
            send(sender, cluster.namesrv, topic, f"p_{group}", "orderly", shared)
            second.receive(20)
            first.receive(20)
            mine = {line["queue_id"] for line in first.listen(0.5)}
            theirs = {line["queue_id"] for line in second.listen(BOOKED_S)}
            assert mine == set(first.assigned)
            assert theirs == {0, 1, 2, 3} - mine
            if leaves == "kill9":
                second.kill9()
        first.wait(lambda: len(first.assigned) == 4, 90, "take over all queues")
        alone = letters(20, label="alone", shards=4)
        send(sender, cluster.namesrv, topic, f"p_{group}", "orderly", alone)
        first.receive(40)
        received = first.listen(0.5)
    everything = [body(line) for line in received + second.messages]
    assert set(everything) == {letter.body for letter in shared + alone}
    # What the lost member had not committed yet is delivered again, and nothing else.
    twice = {one for one in everything if everything.count(one) > 1}
    assert twice <= {body(line) for line in second.messages if leaves == "kill9"}


def test_pull_consumer_reads_all_queues(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    sent = letters(50)
    acknowledged = send(java, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    lines = run(java, ["pull", cluster.namesrv, topic, group, "*"])
    received = [line for line in lines if line["event"] == "message"]
    check_arrived(sent, acknowledged, received)
    check_order_per_queue(received)
    queues = {line["queue_id"]: line for line in lines if line["event"] == "queue"}
    assert sorted(queues) == [0, 1, 2, 3]
    assert {line["min_offset"] for line in queues.values()} == {0}
    assert sum(line["max_offset"] for line in queues.values()) == 50


def test_lite_pull_consumer(java: Client, cluster: Cluster, topic: str, group: str) -> None:
    sent = letters(30)
    acknowledged = send(java, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    with Consumer(java, cluster.namesrv, topic, group, verb="litepull") as consumer:
        received = consumer.receive(len(sent))
    check_arrived(sent, acknowledged, received)
    check_order_per_queue(received)


def test_unknown_topic_is_refused_to_a_pull_consumer(
    java: Client, cluster: Cluster, name: str, group: str
) -> None:
    with pytest.raises(Failed, match="Can not find Message Queue for this topic"):
        run(java, ["pull", cluster.namesrv, f"Unknown_{name}", group, "*"])
