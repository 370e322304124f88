"""Requests signed by upstream's tool and clients, judged by our access control."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from peers.clients import JAVA, Client
from peers.mqadmin import AdminTool
from tests.oracle.access_kit import ACCOUNTS

from cosmodrome import blocking

PEER = """- accessKey: thisCluster
  secretKey: peer-secret-1
  peer: true
"""


@pytest.fixture(scope="module")
def node(
    ready: Callable[[Client], Client], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[blocking.Node]:
    ready(JAVA)
    path = tmp_path_factory.mktemp("guarded") / "plain_acl.yml"
    path.write_text(ACCOUNTS + PEER)
    with blocking.embedded(acl_enable=True, acl_file=str(path)) as node:
        yield node


def tool_of(node: blocking.Node, home: Path, access_key: str, secret_key: str) -> AdminTool:
    tool = AdminTool(node.namesrv, home)
    keys = f"accessKey: {access_key}\nsecretKey: {secret_key}\n"
    (home / "conf" / "tools.yml").write_text(keys)
    return tool


def test_the_commands_about_accounts(node: blocking.Node, tmp_path: Path) -> None:
    where = ("-b", node.broker_address)
    with tool_of(node, tmp_path, "cosmoAdmin", "admin-secret") as tool:
        words = (
            "-a",
            "newTeam1",
            "-s",
            "new-team-secret",
            "-t",
            "Open=PUB,Other=SUB",
            "-i",
            "DENY",
        )
        printed = tool("updateAclConfig", *where, *words)
        assert f"create or update plain access config to {node.broker_address} success" in printed
        printed = tool("clusterAclConfigVersion", *where)
        assert node.broker_name in printed and "plain_acl.yml" in printed
        printed = tool("updateGlobalWhiteAddr", *where, "-g", "10.0.0.{1,2},10.1.2.*")
        assert "success" in printed
        printed = tool("deleteAclConfig", *where, "-a", "newTeam1")
        assert "success" in printed
        assert "newTeam1" in tool("deleteAclConfig", *where, "-a", "newTeam1", fails=True)


def test_java_clients_send_and_read_what_they_may(node: blocking.Node, tmp_path: Path) -> None:
    with tool_of(node, tmp_path / "admin", "cosmoAdmin", "admin-secret") as tool:
        for topic in ("Open", "Closed"):
            tool("updateTopic", "-b", node.broker_address, "-t", topic, "-r", "1", "-w", "1")
    with tool_of(node, tmp_path / "user", "cosmoUser", "user-secret-1") as tool:
        assert "SEND_OK" in tool("sendMessage", "-t", "Open", "-p", "hello")
        said = tool("sendMessage", "-t", "Closed", "-p", "hello", fails=True)
        assert "no right PUB to topic 'Closed'" in said
        assert "is no administrator" in tool(
            "getBrokerConfig", "-b", node.broker_address, fails=True
        )
    with tool_of(node, tmp_path / "forged", "cosmoUser", "a-wrong-secret") as tool:
        said = tool("sendMessage", "-t", "Open", "-p", "hello", fails=True)
        assert "signature" in said or "No route info" in said
