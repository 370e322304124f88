"""Statistics and clean-ups, as upstream's own admin tool shows and starts them."""

from __future__ import annotations

import time

from oracle_checks import Cluster
from peers.clients import Client, Letter, send
from peers.java import mqadmin

DEADLINE_S = 60


def test_stats_all(java: Client, cluster: Cluster, topic: str) -> None:
    send(java, cluster.namesrv, topic, "p_stats", "sync", [Letter(b"%d" % at) for at in range(7)])
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        printed = mqadmin(cluster.namesrv, "statsAll", "-t", topic)
        rows = [line.split() for line in printed.splitlines() if line.startswith(topic)]
        # Topic, accumulation, messages per second, messages of the day, NO_CONSUMER.
        if rows and rows[0][-2:] == ["7", "NO_CONSUMER"]:
            return
        time.sleep(2)
    raise AssertionError(printed)


def test_broker_consume_stats(java: Client, cluster: Cluster) -> None:
    printed = mqadmin(cluster.namesrv, "brokerConsumeStats", "-b", cluster.broker)
    assert "#Consumer Offset" in printed
    assert "Diff Total:" in printed


def test_broker_status_has_latencies(java: Client, cluster: Cluster, topic: str) -> None:
    send(java, cluster.namesrv, topic, "p_stats", "sync", [Letter(b"x")])
    printed = mqadmin(cluster.namesrv, "brokerStatus", "-b", cluster.broker)
    shown = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in printed.splitlines())
    }
    assert float(shown["putLatency99"]) >= 0
    # Upstream has none during its first minute.
    assert shown["putMessageDistributeTime"].startswith(("[<=0ms]:", "null"))
    assert int(shown["putMessageTimesTotal"]) >= 1


def test_clean_ups(java: Client, cluster: Cluster) -> None:
    for verb in ("cleanExpiredCQ", "cleanUnusedTopic", "deleteExpiredCommitLog"):
        assert "success" in mqadmin(cluster.namesrv, verb, "-b", cluster.broker), verb
