"""Where a group without progress starts, and that a group with progress ignores its wish."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from peers.clients import CPP, GO, JAVA, NODE, Client, Letter, Line, send
from peers.raw import create_topic
from tests.oracle.oracle_checks import Cluster, body, consumers, letters, names

Ready = Callable[[Client], Client]

CLIENTS = (JAVA, GO, CPP, NODE)


@pytest.fixture
def old_topic(cold: Cluster, name: str) -> str:
    create_topic(cold.namesrv_port, cold.broker_port, f"T_{name}", 4)
    return f"T_{name}"


def _bodies(lines: list[Line]) -> list[bytes]:
    return sorted(body(line) for line in lines)


def _sorted(sent: list[Letter]) -> list[bytes]:
    return sorted(letter.body for letter in sent)


@pytest.mark.parametrize("client", CLIENTS, ids=names(CLIENTS))
def test_a_young_queue_is_read_from_its_beginning_whatever_a_new_group_wants(
    client: Client, ready: Ready, cluster: Cluster, topic: str, group: str
) -> None:
    sent = letters(16)
    send(ready(GO), cluster.namesrv, topic, f"p_{group}", "sync", sent)
    # The C++ binding cannot choose; its default is the last offset.
    modes = {CPP.name: ["push"], NODE.name: ["push+from=last"]}.get(
        client.name, ["push+from=last", "push+from=20990101000000"]
    )
    ready(client)
    groups = [(f"{group}_{at}", mode) for at, mode in enumerate(modes)]
    with consumers(client, cluster, topic, *groups) as running:
        for consumer in running:
            consumer.receive(len(sent))
            assert _bodies(consumer.listen(0.5)) == _sorted(sent)


@pytest.mark.parametrize("client", [JAVA, GO], ids=["java", "go"])
def test_a_new_group_starts_where_it_wants_on_an_old_queue(
    client: Client, ready: Ready, cold: Cluster, old_topic: str, group: str
) -> None:
    def start(name: str, where: str) -> tuple[str, str]:
        return f"{group}_{name}", f"push+from={where}"

    sender = ready(GO)
    ready(client)
    early, late = letters(20, label="early"), letters(16, label="late")
    send(sender, cold.namesrv, old_topic, f"p_{group}", "sync", early)
    # Clients name a time in whole seconds, and upstream's broker takes the message nearest to it.
    between_s = int(time.time()) + 3
    between = time.strftime("%Y%m%d%H%M%S", _clock_of(client)(between_s))
    time.sleep(between_s + 0.05 - time.time())
    send(sender, cold.namesrv, old_topic, f"p_{group}", "sync", late)

    groups = [start("first", "first"), start("timed", between), start("last", "last")]
    with consumers(client, cold, old_topic, *groups) as (first, timed, last):
        first.receive(36)
        timed.receive(16)
        if client is JAVA:
            last.wait(lambda: len(last.assigned) == 4, 60, "get its queues")
        last.listen(2)
        newest = letters(8, label="newest")
        send(sender, cold.namesrv, old_topic, f"p_{group}", "sync", newest)
        first.receive(44)
        timed.receive(24)
        last.receive(8)
        assert _bodies(first.listen(0.5)) == _sorted(early + late + newest)
        assert _bodies(timed.listen(0.5)) == _sorted(late + newest)
        assert _bodies(last.listen(0.5)) == _sorted(newest)

    # A group that has been here goes on where it was.
    again = letters(8, label="again")
    send(sender, cold.namesrv, old_topic, f"p_{group}", "sync", again)
    groups = [start("first", "last"), start("last", "first")]
    with consumers(client, cold, old_topic, *groups) as (first, last):
        for one in (first, last):
            one.receive(8)
            assert _bodies(one.listen(0.5)) == _sorted(again)


def _clock_of(client: Client) -> Callable[[float], time.struct_time]:
    """The Go client reads the text of a time as UTC, the Java client as local time."""
    return time.gmtime if client is GO else time.localtime
