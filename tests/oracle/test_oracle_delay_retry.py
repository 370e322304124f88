"""Messages that come later, come again, or are put aside."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from peers.clients import CPP, GO, JAVA, Client, Consumer, Letter, Line, run, send
from peers.flows import Flow
from peers.raw import max_offset
from tests.oracle.oracle_checks import Cluster, body, names

Ready = Callable[[Client], Client]

DELAY_MS = {1: 1_000, 2: 5_000, 3: 10_000}
# Upstream looks every 100 ms, and after its start only a second later; the next level is further.
LATE_MS = 3_500
CLIENTS = (JAVA, GO, CPP)
SHOWN = ("DELAY", "REAL_TOPIC", "RETRY_TOPIC", "ORIGIN_MESSAGE_ID")


def waited_ms(line: Line) -> int:
    return int(line["store_ms"]) - int(line["born_ms"])


def dead_letters(java: Client, cluster: Cluster, group: str) -> list[Line]:
    lines = run(java, ["pull", cluster.namesrv, f"%DLQ%{group}", f"dead_{group}", "*"])
    return [line for line in lines if line["event"] == "message"]


@pytest.mark.parametrize("client", CLIENTS, ids=names(CLIENTS))
def test_delayed_messages_come_in_time(
    client: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(client)
    sent = [Letter(b"level %d" % level, delay=level) for level in (3, 2, 1)]
    sent.append(Letter(b"plain"))
    with Consumer(client, cluster.namesrv, topic, group, properties=SHOWN) as consumer:
        answers = send(client, cluster.namesrv, topic, f"p_{group}", "sync", sent)
        received = consumer.receive(len(sent))
    assert [body(line) for line in received] == [b"plain", b"level 1", b"level 2", b"level 3"]
    for line, answer in zip(received[1:], reversed(answers[:3]), strict=True):
        level = int(body(line)[-1:])
        assert 0 <= waited_ms(line) - DELAY_MS[level] < LATE_MS
        assert 0 <= line["at_ms"] - line["store_ms"] < LATE_MS
        # The answer names the queue that was asked for, where the message then is.
        assert answer["queue_id"] in (line["queue_id"], None)
        assert line["properties"]["DELAY"] == str(level)
        assert line["properties"]["REAL_TOPIC"] == topic
        assert line["reconsume_times"] == 0


def test_delays_are_precise_at_low_load(
    java: Client,
    cluster: Cluster,
    topic: str,
    group: str,
    record_property: Callable[[str, object], None],
) -> None:
    with (
        Consumer(java, cluster.namesrv, topic, group) as consumer,
        Flow(java, cluster.namesrv, topic, f"p_{group}", pause_ms=100) as flow,
    ):
        consumer.wait(lambda: len(consumer.assigned) == 4, 90, "get all queues")
        flow.feed([Letter(b"warm %d" % number) for number in range(4)])
        consumer.receive(4)
        flow.feed([Letter(b"timed %d" % number, delay=1) for number in range(20)])
        consumer.receive(24)
    timed = [line for line in consumer.messages if body(line).startswith(b"timed")]
    assert len({body(line) for line in timed}) == len(timed) == 20
    # From the time the client made the message, so the way to the broker counts as well.
    late_ms = sorted(line["at_ms"] - line["born_ms"] - DELAY_MS[1] for line in timed)
    record_property("late_ms", late_ms)
    assert late_ms[0] >= 0
    assert late_ms[18] < LATE_MS  # a hundred on a quiet machine


def test_a_failing_message_is_retried_and_then_put_aside(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    with Consumer(java, cluster.namesrv, topic, group, mode="failing:2:1") as consumer:
        (answer,) = send(
            java,
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
        assert 0 <= later["store_ms"] - earlier["at_ms"] - DELAY_MS[1] < LATE_MS
        assert later["msg_id"] == answer["msg_id"]
        assert later["properties"]["ORIGIN_MESSAGE_ID"] == answer["offset_msg_id"]
        assert later["properties"]["RETRY_TOPIC"] == topic
        assert later["properties"]["DELAY"] == "1"
        assert (later["tags"], later["keys"]) == ("Bad", "k1")
        assert later["properties"]["colour"] == "red"
    (dead,) = dead_letters(java, cluster, group)
    assert body(dead) == b"bad"
    assert dead["reconsume_times"] == 3
    assert (dead["queue_id"], dead["queue_offset"]) == (0, 0)
    shown = {name: dead["properties"].get(name) for name in (*SHOWN, "REAL_QID", "WAIT")}
    assert shown == {
        "DELAY": "0",
        "REAL_TOPIC": f"%RETRY%{group}",
        "REAL_QID": "0",
        "RETRY_TOPIC": topic,
        "ORIGIN_MESSAGE_ID": answer["offset_msg_id"],
        "WAIT": "false",
    }
    assert max_offset(cluster.broker_port, f"%RETRY%{group}", 0) == 2


@pytest.mark.parametrize("client", CLIENTS, ids=names(CLIENTS))
def test_the_first_retry_waits_ten_seconds(
    client: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(client)
    with Consumer(
        client, cluster.namesrv, topic, group, mode="failing:16:0", properties=SHOWN
    ) as consumer:
        send(client, cluster.namesrv, topic, f"p_{group}", "sync", [Letter(b"bad")])
        first, again = consumer.receive(2)
    assert (first["reconsume_times"], again["reconsume_times"]) == (0, 1)
    assert 0 <= again["store_ms"] - first["at_ms"] - DELAY_MS[3] < LATE_MS
    assert again["properties"]["DELAY"] == "3"
    assert again["properties"]["RETRY_TOPIC"] == topic


def test_a_client_may_put_aside_at_once(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    with Consumer(java, cluster.namesrv, topic, group, mode="failing:16:-1") as consumer:
        send(java, cluster.namesrv, topic, f"p_{group}", "sync", [Letter(b"hopeless")])
        consumer.receive(1)
        consumer.listen(2)
    assert len(consumer.messages) == 1
    (dead,) = dead_letters(java, cluster, group)
    assert body(dead) == b"hopeless"
    assert dead["reconsume_times"] == 1
