"""A master is killed: unmodified consumers go on at its slave, and come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from peers.clients import CPP, GO, JAVA_HURRIED, NODE, Client, Consumer, Letter, send
from peers.pair import JAVA, MASTER_ID, SLAVE_ID, Pair
from peers.raw import committed_offset, create_topic, max_offset
from tests.oracle.oracle_checks import body
from tests.oracle.replication_kit import OK, await_status, came, check_same, make_pair, our_kind
from tests.oracle.store_checker import ask

QUEUES = 4
FEW, MANY = 40, 400  # a pull that waits is answered with some of the many, never with all
# Go's client looks for routes every 30 s.
ROUTE_S = 90


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with make_pair(tmp_path, our_kind(), our_kind()) as pair:
        yield pair


def numbered(label: str, count: int) -> list[Letter]:
    return [Letter(f"{label} {number}".encode()) for number in range(count)]


def check_committed(port: int, owner: int, group: str, topic: str) -> None:
    """The group is done with all that `owner` has."""
    for queue in range(QUEUES):
        assert committed_offset(port, group, topic, queue) == max_offset(owner, topic, queue)


def test_consumers_go_on_at_the_slave(
    ready: Callable[[Client], Client], pair: Pair, name: str, group: str
) -> None:
    clients = [ready(each) for each in (JAVA_HURRIED, GO, CPP, NODE)]
    topic, master, slave = f"T_{name}", pair.master, pair.slave
    await_status(pair, OK)
    create_topic(pair.name_server.port, master.port, topic, QUEUES)

    def produce(label: str, count: int) -> None:
        letters = numbered(label, count)
        send(clients[0], pair.namesrv, topic, f"p_{label}_{group}", "sync", letters)

    with ExitStack() as running:
        readers = [
            running.enter_context(Consumer(each, pair.namesrv, topic, f"{each.name}_{group}"))
            for each in clients
        ]
        produce("both", FEW)
        for reader in readers:
            reader.receive(FEW)
            reader.pause()
        produce("unread", MANY)
        check_same(pair)
        came(lambda: ask(slave.port, 21)[1].index(topic.encode()), 30)
        master.kill9()
        for reader in readers:
            reader.resume()
        with Consumer(clients[0], pair.namesrv, topic, f"new_{group}") as newcomer:
            newcomer.receive(FEW + MANY, ROUTE_S)
        check_committed(slave.port, slave.port, f"new_{group}", topic)
        for reader in readers:
            reader.receive(FEW + MANY, ROUTE_S)

        master.start()
        pair.wait_registered(MASTER_ID, SLAVE_ID)
        await_status(pair, OK)
        # What was committed at the slave meanwhile is not lost, though nobody commits it again;
        # upstream's slave takes the older value of its master.
        if our_kind() != JAVA:
            came(lambda: check_committed(master.port, slave.port, f"new_{group}", topic), 30)
        produce("again", FEW)
        for reader in readers:
            reader.receive(2 * FEW + MANY, ROUTE_S)
    for client, reader in zip(clients, readers, strict=True):
        assert len({body(line) for line in reader.messages}) == 2 * FEW + MANY
        # Go's client may share out its queues anew when the master is back, and then begins at
        # what it has committed: a message of each queue may come again, as after any restart.
        assert len(reader.messages) <= 2 * FEW + MANY + (QUEUES if client is GO else 0)
        if client is not NODE:  # which commits now and then, and not when it is stopped
            mine = f"{client.name}_{group}"
            # A client that still asks the slave commits there, and the slave hands it on.
            came(partial(check_committed, master.port, master.port, mine, topic), 30)
    check_same(pair)
