"""Java consumers that subscribe by an SQL92 condition."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from peers.clients import JAVA, JAVA_BINARY, Client, Consumer, Failed, Letter, run, send
from tests.oracle.oracle_checks import Cluster, body, check_arrived, names

Ready = Callable[[Client], Client]

BOTH = [JAVA, JAVA_BINARY]
CONDITION = (
    "(a between 3 and 7 and b = 'even') or TAGS is null or a in ('1', '9')"
    " -- and nothing\n and a <> 8"
)


def some_letters(count: int = 24) -> list[Letter]:
    return [
        Letter(
            f"letter {n}".encode(),
            tags=None if n % 12 == 11 else "TagA",
            keys=f"key{n}",
            properties={"a": str(n % 12), "b": "odd" if n % 2 else "even", "text": f"it's {n}"},
        )
        for n in range(count)
    ]


def is_wanted(letter: Letter) -> bool:
    a, b = int(letter.properties["a"]), letter.properties["b"]
    return (3 <= a <= 7 and b == "even") or (letter.tags is None and a != 8) or a in (1, 9)


@pytest.mark.parametrize("client", BOTH, ids=names(BOTH))
@pytest.mark.parametrize("verb", ["consume", "litepull"])
def test_only_wanted_messages_arrive(
    client: Client, verb: str, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    ready(client)
    sent = some_letters()
    acknowledged = send(client, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    wanted = [n for n, letter in enumerate(sent) if is_wanted(letter)]
    assert 0 < len(wanted) < len(sent)
    with Consumer(
        client, cluster.namesrv, topic, group, expression=f"sql:{CONDITION}", verb=verb
    ) as consumer:
        consumer.receive(len(wanted))
        received = consumer.listen(1)
    check_arrived([sent[n] for n in wanted], [acknowledged[n] for n in wanted], received)


@pytest.mark.parametrize(
    ("condition", "wanted"),
    [
        ("a > 9", lambda a: a > 9),
        ("NOT (a < 3) AND a < 5.5", lambda a: 3 <= a < 5.5),
        ("text = 'it''s 7' OR missing > 1", lambda a: a == 7),
        ("missing = 1 OR NOT (missing = 1)", lambda a: False),
        ("b < 1 OR a = 2", lambda a: False),  # b is no number: no match, whatever follows
        ("a = 2 OR b < 1", lambda a: a == 2),
        ("a > -1L AND a BETWEEN 2 AND 4 AND a NOT IN ('3')", lambda a: a in (2, 4)),
    ],
)
def test_conditions_that_come_with_the_pull(
    condition: str,
    wanted: Callable[[int], bool],
    java: Client,
    cluster: Cluster,
    topic: str,
    group: str,
) -> None:
    sent = some_letters(12)
    send(java, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    lines = run(java, ["pull", cluster.namesrv, topic, group, f"sql:{condition}"])
    received = {body(line) for line in lines if line["event"] == "message"}
    assert received == {sent[n].body for n in range(12) if wanted(n)}


def test_a_waiting_consumer_gets_what_it_wants_at_once(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    def post(*values: int) -> None:
        letters = [Letter(b"%d" % a, properties={"a": str(a)}) for a in values]
        send(java, cluster.namesrv, topic, f"p_{group}", "sync", letters)

    post(5, 5, 5, 5)  # one per queue
    with Consumer(java, cluster.namesrv, topic, group, expression="sql:a = 5") as consumer:
        consumer.receive(4)
        consumer.listen(1.5)  # until its pulls wait in the broker
        post(*range(10, 30))
        assert len(consumer.listen(1)) == 4
        posted_at_ms = time.time() * 1000
        post(1, 2, 5, 3)
        (line,) = consumer.receive(5)[4:]
    assert body(line) == b"5"
    # Longer than starting a Java producer takes, shorter than the 15 s a pull waits.
    assert line["at_ms"] - posted_at_ms < 13_000


@pytest.mark.parametrize("condition", ["a >", "a = NULL", "a between 5 and 1", "'x' > 1", "1"])
def test_a_bad_condition_stops_the_start(
    condition: str, java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    with pytest.raises(Failed, match="CODE: 23"):
        run(java, ["consume", cluster.namesrv, topic, group, f"sql:{condition}", "push"])
