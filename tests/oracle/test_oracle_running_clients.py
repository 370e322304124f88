"""Questions an operator asks a running consumer through the broker."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable

import pytest
from peers.clients import GO, JAVA, Client, Consumer, Letter, send
from peers.mqadmin import AdminTool
from peers.raw import call
from tests.oracle.oracle_checks import Cluster, body, names

Ready = Callable[[Client], Client]

CLIENTS = (JAVA, GO)
DEADLINE_S = 60


def _members(cluster: Cluster, group: str, count: int = 1) -> list[str]:
    """Client ids; a client that has started has not always told the broker already."""
    end = time.monotonic() + DEADLINE_S
    while True:
        code, _, _, found = call(cluster.broker_port, 38, {"consumerGroup": group})
        members = list(json.loads(found)["consumerIdList"]) if code == 0 else []
        if len(members) == count:
            return members
        assert time.monotonic() < end, members
        time.sleep(0.1)


def _check_subscription(printed: str, topic: str, expression: str) -> None:
    found = re.search(rf"Topic: {topic}\s.*SubExpression: (.*?)\s*$", printed, re.MULTILINE)
    assert found is not None, printed
    assert found[1] == expression


@pytest.mark.parametrize("client", CLIENTS, ids=names(CLIENTS))
def test_running_info_and_direct_consumption(
    client: Client,
    ready: Ready,
    java: Client,
    tool: AdminTool,
    cluster: Cluster,
    topic: str,
    group: str,
) -> None:
    ready(client)
    with Consumer(client, cluster.namesrv, topic, group, expression="TagA || TagB") as consumer:
        (answer, _) = send(
            java,
            cluster.namesrv,
            topic,
            f"p_{group}",
            "sync",
            [Letter(b"letter", tags="TagA"), Letter(b"other", tags="TagB")],
        )
        consumer.receive(2)
        (client_id,) = _members(cluster, group)

        printed = tool("consumerConnection", "-g", group)
        assert client_id in printed
        assert re.search(rf"^{topic}\s+TagA \|\| TagB", printed, re.MULTILINE), printed
        assert re.search("MessageModel: CLUSTERING", printed)

        # A Go client fails to describe itself for ten seconds: its first rate is 0 / 0.
        printed = tool.until(
            lambda text: "#Consumer MQ Detail#" in text,
            "consumerStatus",
            "-g",
            group,
            "-i",
            client_id,
        )
        _check_subscription(printed, topic, "TagA || TagB")
        detail = printed.partition("#Consumer MQ Detail#")[2]
        queues = re.findall(rf"^{topic}\s+\S+\s+(\d)\s+ProcessQueueInfo", detail, re.MULTILINE)
        assert sorted(queues) == ["0", "1", "2", "3"], printed

        words = ["-i", answer["offset_msg_id"], "-g", group, "-d", client_id]
        printed = tool("queryMsgById", *words)
        assert "consumeResult=CR_SUCCESS" in printed, printed
        received = consumer.receive(3)
    assert [body(line) for line in received].count(b"letter") == 2


def test_members_that_subscribe_differently_are_told_apart(
    java: Client, tool: AdminTool, cluster: Cluster, topic: str, group: str
) -> None:
    """Each tells its own subscription, the broker keeps the newest.

    The tool itself compares only members that have been running for two minutes.
    """
    with Consumer(java, cluster.namesrv, topic, group, expression="TagA"):
        (first,) = _members(cluster, group)
        with Consumer(java, cluster.namesrv, topic, group, expression="TagB"):
            (second,) = set(_members(cluster, group, 2)) - {first}
            printed = tool("consumerStatus", "-g", group)
            for client_id in (first, second):
                assert re.search(rf"^\d\s+{client_id}\s+V4_9_8", printed, re.MULTILINE), printed
            for client_id, expression in ((first, "TagA"), (second, "TagB")):
                printed = tool("consumerStatus", "-g", group, "-i", client_id)
                _check_subscription(printed, topic, expression)
            printed = tool("consumerConnection", "-g", group)
            # Members make theirs new whenever their queues change, so either may be the newest.
            assert len(re.findall(rf"^{topic}\s+Tag[AB]\s*$", printed, re.MULTILINE)) == 1, printed
