"""Unmodified RocketMQ clients against a running cluster.

The tests do not know what they talk to: ORACLE_TARGET=cosmodrome (default) starts `cosmo up`,
ORACLE_TARGET=java starts upstream's own servers. A test that fails against `java` is wrong.

Without Java, Go or Node the tests that need it are skipped, and fail when CI=true.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path

import pytest
from peers.clients import JAVA, Client
from peers.java import JavaCluster
from peers.mqadmin import AdminTool
from peers.node import CosmoNode
from peers.process import free_port
from peers.raw import create_topic
from peers.resolve import ToolMissing
from tests.oracle.client_kit import TARGETS, Clusters, Target
from tests.oracle.oracle_checks import Cluster

_HERE = Path(__file__).parent
_numbers = count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.oracle)
            # The first use of a client downloads and builds it.
            item.add_marker(pytest.mark.timeout(900))


def _unavailable(error: ToolMissing) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(str(error), pytrace=False)
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def start_cluster() -> Callable[..., Cluster]:
    """Starts a cluster of the chosen kind with its files in a folder, and perhaps settings."""

    def start(folder: Path, settings: Mapping[str, str] | None = None) -> Cluster:
        target = os.environ.get("ORACLE_TARGET", "cosmodrome")
        server: CosmoNode | JavaCluster
        if target == "cosmodrome":
            words = [f"{name}={value}" for name, value in (settings or {}).items()]
            server = CosmoNode(
                folder / "data", options=[part for word in words for part in ("--set", word)]
            )
        elif target == "java":
            try:
                server = JavaCluster(
                    folder,
                    free_port(),
                    free_port(-2, 1),
                    settings={"enablePropertyFilter": "true", **(settings or {})},
                )
            except ToolMissing as error:
                _unavailable(error)
                raise
        else:
            pytest.fail(f"ORACLE_TARGET={target!r} is neither cosmodrome nor java", pytrace=False)
        server.start()
        return Cluster(server)

    return start


@pytest.fixture(scope="session")
def cluster(
    start_cluster: Callable[[Path], Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    cluster = start_cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.server.stop()


@pytest.fixture(scope="session")
def cold(
    start_cluster: Callable[..., Cluster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster that takes every message for one that has left the memory."""
    cluster = start_cluster(tmp_path_factory.mktemp("cold"), {"accessMessageInMemoryMaxRatio": "0"})
    yield cluster
    cluster.server.stop()


@pytest.fixture(scope="session")
def ready() -> Callable[[Client], Client]:
    """Makes sure a client can be run, or skips."""

    def check(client: Client) -> Client:
        try:
            client.command()
        except ToolMissing as error:
            _unavailable(error)
        return client

    return check


@pytest.fixture
def java(ready: Callable[[Client], Client]) -> Client:
    return ready(JAVA)


@pytest.fixture(scope="session")
def tool(
    ready: Callable[[Client], Client], cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AdminTool]:
    """Upstream's admin tool, in a JVM that lives as long as the cluster."""
    ready(JAVA)
    with AdminTool(cluster.namesrv, tmp_path_factory.mktemp("mqadmin")) as tool:
        yield tool


@pytest.fixture
def name() -> str:
    """A fresh name for topics and groups."""
    return f"o{os.getpid()}_{next(_numbers)}"


@pytest.fixture
def topic(cluster: Cluster, name: str) -> str:
    """A fresh topic with four queues."""
    create_topic(cluster.namesrv_port, cluster.broker_port, f"T_{name}", 4)
    return f"T_{name}"


@pytest.fixture
def group(name: str) -> str:
    return f"g_{name}"


# --- our own client -------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def clusters(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clusters]:
    """The clusters that the chosen tests of our own client need, of every kind."""
    chosen = {
        str(item.callspec.params["target"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and "target" in getattr(item, "fixturenames", ())
    }
    clusters = Clusters(tmp_path_factory.mktemp("clusters"), chosen)
    yield clusters
    clusters.stop()


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest, clusters: Clusters) -> Target:
    """One after the other: this node and two generations of upstream's servers."""
    try:
        return clusters.target(request.param)
    except ToolMissing as error:
        _unavailable(error)
        raise


@pytest.fixture
def place(target: Target, name: str) -> str:
    """A fresh topic with four queues at the target."""
    create_topic(target.cluster.namesrv_port, target.cluster.broker_port, f"T_{name}", 4)
    return f"T_{name}"
