"""Statistics and clean-ups, as upstream's own admin tool shows and starts them."""

from __future__ import annotations

from peers.clients import Client, Letter, send
from peers.mqadmin import AdminTool
from tests.oracle.oracle_checks import Cluster


def test_stats_all(java: Client, tool: AdminTool, cluster: Cluster, topic: str) -> None:
    send(java, cluster.namesrv, topic, "p_stats", "sync", [Letter(b"%d" % at) for at in range(7)])

    def counted(printed: str) -> bool:
        rows = [line.split() for line in printed.splitlines() if line.startswith(topic)]
        # Topic, accumulation, messages per second, messages of the day, NO_CONSUMER.
        return bool(rows) and rows[0][-2:] == ["7", "NO_CONSUMER"]

    assert counted(tool.until(counted, "statsAll", "-t", topic))


def test_broker_status_has_latencies(
    java: Client, tool: AdminTool, cluster: Cluster, topic: str
) -> None:
    send(java, cluster.namesrv, topic, "p_stats", "sync", [Letter(b"x")])
    printed = tool("brokerStatus", "-b", cluster.broker)
    shown = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in printed.splitlines())
    }
    assert float(shown["putLatency99"]) >= 0
    # Upstream has none during its first minute.
    assert shown["putMessageDistributeTime"].startswith(("[<=0ms]:", "null"))
    assert int(shown["putMessageTimesTotal"]) >= 1


def test_clean_ups(tool: AdminTool, cluster: Cluster, topic: str) -> None:
    for where in (["-b", cluster.broker], ["-c", cluster.cluster_name]):
        assert tool("cleanExpiredCQ", *where).strip() == "success"
        assert tool("cleanUnusedTopic", *where).strip() == "success"
        assert tool("deleteExpiredCommitLog", *where).strip() == "success"
    assert topic in tool("topicList").split()
