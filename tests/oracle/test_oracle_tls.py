"""Java clients with `tls.enable=true` and a node that takes TLS besides plain, or TLS only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peers.clients import JAVA, Client, Consumer, Failed, send
from peers.node import CosmoNode
from tests import tls_kit
from tests.oracle.oracle_checks import check_arrived, letters

TLS = {"tls.enable": "true"}


def with_properties(client: Client, properties: dict[str, str]) -> Client:
    """The client in a JVM with these system properties."""

    def command() -> list[str]:
        java, *words = client.command()
        return [java, *(f"-D{name}={value}" for name, value in properties.items()), *words]

    return dataclasses.replace(client, command=command)


def checking(certs: Path, authority: str = "ca.pem") -> dict[str, str]:
    """Properties of a client that checks the server and shows a certificate."""
    return {
        **TLS,
        "tls.test.mode.enable": "false",
        "tls.client.authServer": "true",
        "tls.client.trustCertPath": str(certs / authority),
        "tls.client.certPath": str(certs / "client.pem"),
        "tls.client.keyPath": str(certs / "client.key"),
    }


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tls_kit.certificates(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="module", params=["permissive", "enforcing", "mutual"])
def node(
    request: pytest.FixtureRequest, certs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, CosmoNode]]:
    chosen = {
        "tls.server.mode": "permissive" if request.param == "permissive" else "enforcing",
        "tls.server.certPath": certs / "server.pem",
        "tls.server.keyPath": certs / "server.key",
        "tls.server.trustCertPath": certs / "ca.pem",
        "tls.client.certPath": certs / "client.pem",
        "tls.client.keyPath": certs / "client.key",
        "tls.server.need.client.auth": "require" if request.param == "mutual" else "none",
    }
    words = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
    folder = tmp_path_factory.mktemp("node")
    server = CosmoNode(folder / "data", options=words, tls=tls_kit.client(certs, shows=certs))
    server.start()
    yield request.param, server
    server.stop()


def exchange(client: Client, node: CosmoNode, topic: str, group: str) -> None:
    sent = letters(24)
    acknowledged = send(client, node.namesrv_address, topic, f"p_{group}", "sync", sent)
    with Consumer(client, node.namesrv_address, topic, group) as consumer:
        received = consumer.receive(len(sent))
    check_arrived(sent, acknowledged, received)


def test_a_java_client_that_checks(
    node: tuple[str, CosmoNode], certs: Path, ready: Callable[[Client], Client], name: str
) -> None:
    client = with_properties(ready(JAVA), checking(certs))
    exchange(client, node[1], f"T_{name}", f"g_{name}")


def test_a_java_client_as_it_comes(
    node: tuple[str, CosmoNode], ready: Callable[[Client], Client], name: str
) -> None:
    """It accepts any certificate and shows none."""
    mode, server = node
    client = with_properties(ready(JAVA), TLS)
    if mode != "mutual":
        exchange(client, server, f"T_{name}", f"g_{name}")
        return
    with pytest.raises(Failed):
        send(client, server.namesrv_address, f"T_{name}", f"g_{name}", "sync", letters(1))


def test_a_java_client_without_tls(
    node: tuple[str, CosmoNode], ready: Callable[[Client], Client], name: str
) -> None:
    mode, server = node
    if mode == "permissive":
        exchange(ready(JAVA), server, f"T_{name}", f"g_{name}")
        return
    with pytest.raises(Failed):
        send(ready(JAVA), server.namesrv_address, f"T_{name}", f"g_{name}", "sync", letters(1))
