"""Java consumers that subscribe with the name of a filter class, against `cosmo filtersrv`."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from peers.clients import JAVA, JAVA_BINARY, Client, Consumer, Letter, send
from peers.node import CosmoNode
from peers.process import Process, accepts, free_port
from peers.resolve import BUILD, ROOT
from tests.oracle.oracle_checks import Cluster, body, check_arrived, letters, names

Ready = Callable[[Client], Client]

BOTH = [JAVA, JAVA_BINARY]
FILTERS = """
def even(message):
    return message.properties.get("parity") == "even"

def large(message):
    return len(message.body) > 10_000

FILTERS = {"com.acme.Even": even, "com.acme.Large": large}
"""


class FilterServer:
    """One `cosmo filtersrv` beside the broker under test, on the same port after a restart."""

    def __init__(self, folder: Path, broker: str) -> None:
        self.filters = folder / "filters"
        self.filters.mkdir()
        (self.filters / "some.py").write_text(FILTERS)
        self.port = free_port()
        self.process = Process(
            "cosmo filtersrv",
            [
                *(sys.executable, "-m", "cosmodrome.cli", "filtersrv", "run"),
                *("--broker", broker, "--port", str(self.port), "--filters", str(self.filters)),
            ],
            folder / "filtersrv.log",
            env={"PYTHONPATH": str(ROOT / "src")},
        )

    def start(self) -> None:
        seen = self._log_text().count(" is ready on ")
        self.process.start()
        self.process.wait_until(
            lambda: accepts(self.port) and self._log_text().count(" is ready on ") > seen, 30
        )
        time.sleep(0.5)  # until the name server has heard of it

    def _log_text(self) -> str:
        return self.process.log.read_text() if self.process.log.exists() else ""


@pytest.fixture
def filter_server(cluster: Cluster, tmp_path: Path) -> Iterator[FilterServer]:
    if not isinstance(cluster.server, CosmoNode):
        pytest.skip("upstream removed filter servers from its broker in 4.9.6")
    server = FilterServer(tmp_path, cluster.broker)
    server.start()
    yield server
    server.process.stop()


def some_letters(count: int, label: str = "letter") -> list[Letter]:
    return [
        replace(
            letter,
            body=letter.body + b"x" * (20_000 if number % 3 == 0 else 0),
            properties={**letter.properties, "parity": "odd" if number % 2 else "even"},
        )
        for number, letter in enumerate(letters(count, label=label))
    ]


@pytest.mark.parametrize("client", BOTH, ids=names(BOTH))
@pytest.mark.parametrize(
    ("wanted", "step"),
    [("com.acme.Even", 2), ("com.acme.Large", 3)],  # large bodies are stored compressed
)
def test_only_wanted_messages_arrive(
    client: Client,
    wanted: str,
    step: int,
    ready: Ready,
    cluster: Cluster,
    topic: str,
    group: str,
    filter_server: FilterServer,
) -> None:
    ready(client)
    sent = some_letters(24)
    acknowledged = send(client, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    with Consumer(client, cluster.namesrv, topic, group, expression=f"class:{wanted}") as consumer:
        consumer.receive(24 // step)
        later = some_letters(12, "later")  # for pulls that wait
        acknowledged += send(client, cluster.namesrv, topic, f"p_{group}", "sync", later)
        consumer.receive(36 // step)
        received = consumer.listen(1)
    check_arrived([*sent, *later][::step], acknowledged[::step], received)


def test_two_groups_use_two_filters(
    java: Client, cluster: Cluster, topic: str, group: str, filter_server: FilterServer
) -> None:
    sent = some_letters(12)
    acknowledged = send(java, cluster.namesrv, topic, f"p_{group}", "sync", sent)
    for name, step in (("com.acme.Even", 2), ("com.acme.Large", 3)):
        with Consumer(
            java, cluster.namesrv, topic, f"{group}_{step}", expression=f"class:{name}"
        ) as consumer:
            consumer.receive(12 // step)
            check_arrived(sent[::step], acknowledged[::step], consumer.listen(1))


def test_a_filter_that_is_not_installed_is_explained_to_the_client(
    java: Client, cluster: Cluster, topic: str, group: str, filter_server: FilterServer
) -> None:
    missing = f"com.acme.Missing_{group}"
    send(java, cluster.namesrv, topic, f"p_{group}", "sync", some_letters(4))
    log = BUILD / "home" / "logs" / "rocketmqlogs" / "rocketmq_client.log"
    with Consumer(java, cluster.namesrv, topic, group, expression=f"class:{missing}") as consumer:
        explained = re.compile(
            rf"MQBrokerException: CODE: 1 +DESC: Filter '{missing}' is not installed.*SIGHUP"
        )
        deadline = time.monotonic() + 60
        while not (log.exists() and explained.search(log.read_text(errors="replace"))):
            assert consumer.listen(0.5) == []
            assert time.monotonic() < deadline, "the client's log says nothing"
        # The operator installs it, and what was sent before arrives without a new subscription.
        (filter_server.filters / "more.py").write_text(
            f"FILTERS = {{{missing!r}: lambda message: True}}\n"
        )
        os.kill(filter_server.process.pid, signal.SIGHUP)
        assert len(consumer.receive(4)) == 4


def test_a_filter_server_that_is_killed_loses_nothing(
    java: Client, cluster: Cluster, topic: str, group: str, filter_server: FilterServer
) -> None:
    first, second, third = (some_letters(12, label) for label in ("first", "second", "third"))

    def post(some: list[Letter]) -> None:
        send(java, cluster.namesrv, topic, f"p_{group}", "sync", some)

    post(first)
    with Consumer(
        java,
        cluster.namesrv,
        topic,
        group,
        expression="class:com.acme.Even",
        mode="push+poll=1000",
    ) as consumer:
        consumer.receive(6)
        filter_server.process.kill9()
        post(second)
        assert len(consumer.listen(3)) == 6
        filter_server.start()
        consumer.receive(12, timeout_s=120)  # the client names its filter every 30 s
        post(third)
        consumer.receive(18)
        received = consumer.listen(1)
    wanted = [letter.body for some in (first, second, third) for letter in some[::2]]
    assert sorted(map(body, received)) == sorted(wanted)
