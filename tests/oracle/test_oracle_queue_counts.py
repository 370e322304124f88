"""Topics whose queues to write and to read differ, or change while they are used."""

from __future__ import annotations

import time
from collections import Counter

from peers.clients import Client, Consumer, Letter, run, send
from peers.raw import create_topic, max_offset
from tests.oracle.oracle_checks import Cluster, body

QUICK = "poll=500"  # how often routes are asked for; 30 s otherwise


def test_more_queues_to_read_than_to_write(
    java: Client, cluster: Cluster, name: str, group: str
) -> None:
    topic = f"Wide_{name}"
    create_topic(cluster.namesrv_port, cluster.broker_port, topic, 2, 4)
    sent = [Letter(b"%d" % number) for number in range(12)]
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        consumer.wait(lambda: len(consumer.assigned) == 4, 90, "get all queues to read")
        answers = send(java, cluster.namesrv, topic, f"p_{group}", "sync", sent)
        received = consumer.receive(12)
    assert Counter(line["queue_id"] for line in answers) == {0: 6, 1: 6}
    assert {body(line) for line in received} == {letter.body for letter in sent}


def test_queues_not_to_be_read_wait(java: Client, cluster: Cluster, name: str, group: str) -> None:
    topic = f"Narrow_{name}"
    create_topic(cluster.namesrv_port, cluster.broker_port, topic, 4, 2)
    sent = [Letter(b"%d" % number, shard=number % 4) for number in range(12)]
    with Consumer(java, cluster.namesrv, topic, group, mode=f"push+{QUICK}") as consumer:
        send(java, cluster.namesrv, topic, f"p_{group}", "orderly", sent)
        consumer.receive(6)
        received = consumer.listen(1)
        assert consumer.assigned == [0, 1]
        assert Counter(line["queue_id"] for line in received) == {0: 3, 1: 3}
        create_topic(cluster.namesrv_port, cluster.broker_port, topic, 4, 4)
        consumer.receive(12)
        received = consumer.listen(0.5)
    assert sorted(body(line) for line in received) == sorted(letter.body for letter in sent)


def test_queues_grow_and_shrink_under_traffic(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    def resize(write: int, read: int) -> None:
        create_topic(cluster.namesrv_port, cluster.broker_port, topic, write, read)

    def ends() -> list[int]:
        return [max_offset(cluster.broker_port, topic, queue_id) for queue_id in range(8)]

    def await_growth(of: range, before: list[int]) -> None:
        deadline = time.monotonic() + 30
        while any(
            end <= then for end, then in zip(ends()[of.start : of.stop], before, strict=True)
        ):
            assert time.monotonic() < deadline, f"nothing new in queues {of}: {ends()}"
            time.sleep(0.1)

    with (
        Consumer(java, cluster.namesrv, topic, group, mode=f"push+{QUICK}") as consumer,
        Consumer(
            java, cluster.namesrv, topic, f"p_{group}", verb="stream", mode=f"sync+{QUICK}"
        ) as producer,
    ):
        consumer.wait(lambda: len(consumer.assigned) == 4, 90, "get four queues")
        await_growth(range(4), [0] * 4)
        assert ends()[4:] == [0] * 4
        resize(8, 8)
        await_growth(range(4, 8), [0] * 4)
        consumer.wait(lambda: len(consumer.assigned) == 8, 60, "find the new queues")
        resize(4, 8)
        time.sleep(2)  # until the producer has asked again
        settled = ends()
        await_growth(range(4), settled[:4])
        assert ends()[4:] == settled[4:], "a removed queue was written to"
        answers = producer.close()
        consumer.receive(len(answers))
        received = consumer.listen(1)
        resize(4, 4)
        consumer.wait(lambda: len(consumer.assigned) == 4, 60, "leave the removed queues")
    assert {line["status"] for line in answers} == {"SEND_OK"}
    places = Counter((line["queue_id"], line["queue_offset"]) for line in received)
    assert places == Counter((line["queue_id"], line["queue_offset"]) for line in answers)
    assert {queue_id for queue_id, _ in places} == set(range(8))
    # Who asks by number still reads what is in the queues that are gone from the route.
    resize(4, 8)
    lines = run(java, ["pull", cluster.namesrv, topic, f"{group}_pull", "*"])
    assert len([line for line in lines if line["event"] == "message"]) == len(answers)
