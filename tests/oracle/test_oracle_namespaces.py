"""Namespaces: a client wraps its names, the broker sees them as names like any other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from peers.clients import GO, JAVA, NODE, Client, Consumer, Letter, run, send
from peers.raw import create_topic, max_offset
from tests.oracle.oracle_checks import Cluster, body, names

Ready = Callable[[Client], Client]

CLIENTS = (JAVA, GO, NODE)


@pytest.mark.parametrize("client", CLIENTS, ids=names(CLIENTS))
def test_send_consume_and_retry(
    client: Client, ready: Ready, java: Client, cluster: Cluster, name: str, group: str
) -> None:
    ready(client)
    space, topic = f"S{name}", f"T_{name}"
    create_topic(cluster.namesrv_port, cluster.broker_port, f"{space}%{topic}", 4)
    create_topic(cluster.namesrv_port, cluster.broker_port, topic, 4)
    inside = f"+namespace={space}"
    # The Node client cannot choose when a message comes again; it would be ten seconds later.
    failing = client is not NODE
    mode = f"failing:1:1{inside}" if failing else f"push{inside}"
    with Consumer(client, cluster.namesrv, topic, group, mode=mode) as consumer:
        sent = [Letter(b"one"), Letter(b"two")]
        send(client, cluster.namesrv, topic, f"p_{group}", f"sync{inside}", sent)
        send(client, cluster.namesrv, topic, f"p_{group}", "sync", [Letter(b"outside")])
        consumer.receive(4 if failing else 2)
        received = consumer.listen(1)
    times = [0, 1] if failing else [0]
    assert sorted((body(line), line["reconsume_times"]) for line in received) == sorted(
        (letter.body, time) for letter in sent for time in times
    )
    # The Java client takes its namespace off again, the Go client does not.
    if client is not NODE:
        shown = topic if client is JAVA else f"{space}%{topic}"
        assert {line["topic"] for line in received} == {shown}
    for line in received:
        if line["reconsume_times"]:
            assert line["properties"]["RETRY_TOPIC"] == f"{space}%{topic}"

    def stored(topic: str, queues: int = 4) -> int:
        return sum(max_offset(cluster.broker_port, topic, queue) for queue in range(queues))

    assert stored(f"{space}%{topic}") == 2
    assert stored(topic) == 1
    assert stored(f"%RETRY%{space}%{group}", 1) == (2 if failing else 0)
    assert stored(f"%DLQ%{space}%{group}", 1) == (2 if failing else 0)
    assert stored(f"%RETRY%{group}", 1) == 0
    lines = run(java, ["pull", cluster.namesrv, f"{space}%{topic}", f"{group}_pull", "*"])
    plain = [line for line in lines if line["event"] == "message"]
    assert {body(line) for line in plain} == {b"one", b"two"}
    if client is JAVA:
        assert {line["properties"]["INSTANCE_ID"] for line in plain} == {space}
