"""Progress moved from outside: messages come again, or are skipped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack

from peers.clients import CPP, GO, JAVA, Client, Consumer, Letter, run, send
from peers.java import mqadmin
from peers.raw import committed_offset, create_topic, max_offset
from tests.oracle.oracle_checks import Cluster, body, letters

Ready = Callable[[Client], Client]

RUNNING = (JAVA, GO, CPP)


def _committed(cluster: Cluster, group: str, topic: str) -> list[int | None]:
    return [committed_offset(cluster.broker_port, group, topic, queue) for queue in range(4)]


def _ends(cluster: Cluster, topic: str) -> list[int]:
    return [max_offset(cluster.broker_port, topic, queue) for queue in range(4)]


def test_running_consumers_go_back_in_time(
    java: Client, ready: Ready, cluster: Cluster, name: str
) -> None:
    """Every client waits ten seconds before it obeys, so all are asked at once."""
    sender = ready(GO)
    early, late = letters(12, label="early"), letters(8, label="late")
    with ExitStack() as running:
        consumers = {}
        for client in RUNNING:
            topic = f"T_{client.name}_{name}"
            create_topic(cluster.namesrv_port, cluster.broker_port, topic, 4)
            send(sender, cluster.namesrv, topic, f"p_{name}", "sync", early)
            consumers[client] = running.enter_context(
                Consumer(ready(client), cluster.namesrv, topic, f"g_{client.name}_{name}")
            )
        for consumer in consumers.values():
            consumer.receive(len(early))
        time.sleep(3)  # upstream's broker takes the message nearest to a time
        between_ms = {}
        for client, consumer in consumers.items():
            between_ms[client] = int(time.time() * 1000)
            send(sender, cluster.namesrv, f"T_{client.name}_{name}", f"p_{name}", "sync", late)
            consumer.receive(len(early + late))
        for client in RUNNING:
            since_ms = between_ms[client] - (0 if client is GO else 3_600_000)
            printed = mqadmin(
                cluster.namesrv,
                "resetOffsetByTime",
                "-f",
                "true",
                "-s",
                str(since_ms),
                "-g",
                f"g_{client.name}_{name}",
                "-t",
                f"T_{client.name}_{name}",
                *(["-c"] if client is CPP else []),
            )
            assert printed.count(cluster.broker_name) == 4, printed
        for client, consumer in consumers.items():
            again = late if client is GO else early + late
            count = len(early + late + again)
            consumer.receive(count)
            received = consumer.listen(0.5)
            assert len(received) == count, client.name
            assert sorted(body(line) for line in received[20:]) == sorted(
                letter.body for letter in again
            ), client.name


def test_progress_of_an_absent_group(
    java: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    """Without a consumer the tool moves the offsets itself, queue by queue."""
    sender = ready(GO)
    sent = [Letter(b"%d" % number, shard=number % 4) for number in range(20)]
    send(sender, cluster.namesrv, topic, f"p_{group}", "orderly", sent)
    of_group = ["-g", group, "-t", topic]
    # What the first heartbeat of a push consumer makes; the tool asks for its route.
    create_topic(cluster.namesrv_port, cluster.broker_port, f"%RETRY%{group}", 1)
    steps = [json.dumps({"do": "commit", "queue": queue, "offset": 5}) for queue in range(4)]
    run(java, ["pulls", cluster.namesrv, topic, group], "\n".join(steps))
    assert _committed(cluster, group, topic) == [5, 5, 5, 5]

    clone = f"{group}_clone"
    printed = mqadmin(
        cluster.namesrv, "cloneGroupOffset", "-s", group, "-d", clone, "-t", topic, "-o", "true"
    )
    assert "success" in printed, printed
    assert _committed(cluster, clone, topic) == [5, 5, 5, 5]

    printed = mqadmin(
        cluster.namesrv,
        "resetOffsetByTime",
        *of_group,
        "-s",
        "2020-01-01#00:00:00:000",
        "-f",
        "true",
    )
    assert printed.count(cluster.broker_name) == 4, printed
    assert _committed(cluster, group, topic) == [0, 0, 0, 0]
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        consumer.receive(20)
        received = consumer.listen(0.5)
    assert sorted(map(body, received)) == sorted(letter.body for letter in sent)

    # The clone did not go back.
    more = [Letter(b"more %d" % number, shard=number % 4) for number in range(8)]
    send(sender, cluster.namesrv, topic, f"p_{group}", "orderly", more)
    with Consumer(java, cluster.namesrv, topic, clone) as consumer:
        consumer.receive(8)
        assert {body(line) for line in consumer.listen(0.5)} == {letter.body for letter in more}

    printed = mqadmin(cluster.namesrv, "skipAccumulatedMessage", *of_group, "-f", "true")
    assert printed.count(cluster.broker_name) == 4, printed
    assert _committed(cluster, group, topic) == _ends(cluster, topic) == [7, 7, 7, 7]
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        consumer.wait(lambda: len(consumer.assigned) == 4, 90, "get its queues")
        send(sender, cluster.namesrv, topic, f"p_{group}", "sync", [Letter(b"new")])
        consumer.receive(1)
        assert [body(line) for line in consumer.listen(0.5)] == [b"new"]
