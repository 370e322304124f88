"""Upstream's own admin tool: brokers, name servers, and what it writes to files."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peers.mqadmin import AdminTool, start_tool
from peers.raw import call, create_topic
from tests.oracle.oracle_checks import Cluster

MONITOR_DEADLINE_S = 180
MONITOR_GROUP = "__MONITOR_CONSUMER"
SETTING = re.compile(r"^(\w+)[ \t]+=[ \t]+(.*?)[ \t]*$", re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def monitor(cluster: Cluster, tool: AdminTool, tmp_path_factory: Any) -> Iterator[Path]:
    """`startMonitoring`, which looks for the first time after 20 seconds: its log.

    It begins before the other tests here and is looked at in the last one.
    """
    home = tmp_path_factory.mktemp("monitor")
    child = start_tool(
        cluster.namesrv, home, "org.apache.rocketmq.tools.command.MQAdminStartup", "startMonitoring"
    )
    try:
        # What it makes at its start, topics among it, must not happen during a test.
        tool.until(lambda text: "@" in text, "consumerConnection", "-g", MONITOR_GROUP)
        tool.until(lambda text: f"%RETRY%{MONITOR_GROUP}" in text.split(), "topicList")
        yield home / "logs" / "rocketmqlogs" / "rocketmq_client.log"
    finally:
        child.kill()
        child.communicate()


def _rows(printed: str) -> list[list[str]]:
    return [line.split() for line in printed.splitlines() if line and not line.startswith("#")]


# --- brokers ----------------------------------------------------------------------------------


def test_cluster_list(tool: AdminTool, cluster: Cluster) -> None:
    printed = tool("clusterList")
    assert printed.split()[:2] == ["#Cluster", "Name"]
    (row,) = _rows(printed)
    assert row[:4] == [cluster.cluster_name, cluster.broker_name, "0", cluster.broker]
    assert re.fullmatch(r"V\d+_\d+_\d+(_\w+)?", row[4])
    # Rates, wait, hours and disk share were really reported: all are numbers.
    assert re.fullmatch(r"\d+\.\d\d\(\d+,\d+ms\)", row[5])
    assert re.fullmatch(r"\d+\.\d\d\(\d+,\d+ms\)", row[6])
    assert 0 <= float(row[-1]) < 1


def test_cluster_list_with_totals(tool: AdminTool, cluster: Cluster) -> None:
    printed = tool("clusterList", "-m")
    assert "#InTotalYest" in printed and "#OutTotalToday" in printed
    (row,) = _rows(printed)
    assert row[:2] == [cluster.cluster_name, cluster.broker_name]
    assert [figure.isdecimal() for figure in row[2:]] == [True] * 4


def test_cluster_list_again_and_again(tool: AdminTool, cluster: Cluster) -> None:
    printed = tool("clusterList", "-i", "1", until=rf"(?s)({cluster.broker_name}\s.*){{2}}")
    assert len(re.findall(r"^#Cluster Name", printed, re.MULTILINE)) >= 2


def test_broker_status_of_a_cluster(tool: AdminTool, cluster: Cluster) -> None:
    rates = ("putTps", "getTotalTps", "getFoundTps")

    def shown(printed: str) -> dict[str, str]:
        return dict(re.findall(rf"^{cluster.broker}\s+(\w+)\s*: (.*)$", printed, re.MULTILINE))

    # Over ten seconds, a minute and ten minutes; upstream leaves out what it does not know yet.
    printed = tool.until(
        lambda text: all(shown(text)[rate].split(" ")[0] for rate in rates),
        "brokerStatus",
        "-c",
        cluster.cluster_name,
    )
    figures = shown(printed)
    assert all(len(figures[rate].split(" ")) == 3 for rate in rates)
    assert all(float(figures[rate].split(" ")[0]) >= 0 for rate in rates)
    assert int(figures["bootTimestamp"]) > 1_600_000_000_000
    assert int(figures["commitLogMaxOffset"]) >= int(figures["commitLogMinOffset"])


def test_update_broker_config(tool: AdminTool, cluster: Cluster) -> None:
    before = dict(SETTING.findall(tool("getBrokerConfig", "-b", cluster.broker)))
    old = before["fileReservedTime"]
    for value, where in (("47", ["-b", cluster.broker]), (old, ["-c", cluster.cluster_name])):
        words = ["-k", "fileReservedTime", "-v", value]
        printed = tool("updateBrokerConfig", *where, *words)
        assert f"update broker config success, {cluster.broker}" in printed
        printed = tool("getBrokerConfig", "-c", cluster.cluster_name)
        assert f"Master: {cluster.broker}" in printed
        assert dict(SETTING.findall(printed))["fileReservedTime"] == value


def test_times_of_sends_to_brokers(tool: AdminTool, cluster: Cluster) -> None:
    printed = tool("sendMsgStatus", "-b", cluster.broker_name, "-c", "3", "-s", "64")
    place = rf"topic={cluster.broker_name}, brokerName={cluster.broker_name}"
    assert len(re.findall(rf"^rt=\d+ms, .*sendStatus=SEND_OK.*{place}", printed, re.MULTILINE)) == 3
    row = rf"{cluster.cluster_name}\s+{cluster.broker_name}\s+(\d+\.\d\d)\s+2\s+0\s"
    printed = tool("clusterRT", "-a", "2", "-s", "64", "-i", "1", until=row)
    assert "#successCount" in printed
    assert re.search(row, printed)


# --- name servers -----------------------------------------------------------------------------


def _entry(cluster: Cluster, namespace: str, key: str) -> tuple[int, dict[str, str]]:
    code, fields, _, _ = call(cluster.namesrv_port, 101, {"namespace": namespace, "key": key})
    return code, fields


def test_entries_of_name_servers(tool: AdminTool, cluster: Cluster, name: str) -> None:
    place = ["-s", f"NS_{name}", "-k", "key"]
    for value in ("first", "second"):
        printed = tool("updateKvConfig", *place, "-v", value)
        assert "create or update kv config to namespace success." in printed
        assert _entry(cluster, f"NS_{name}", "key") == (0, {"value": value})
    assert "delete kv config from namespace success." in tool("deleteKvConfig", *place)
    assert _entry(cluster, f"NS_{name}", "key")[0] == 22


def test_queues_of_ordered_topics(tool: AdminTool, cluster: Cluster, topic: str) -> None:
    conf = f"{cluster.broker_name}:4"
    printed = tool("updateOrderConf", "-m", "put", "-t", topic, "-v", conf)
    assert f"update orderConf success. topic=[{topic}], orderConf=[{conf}]" in printed
    assert f"orderConf=[{conf}]" in tool("updateOrderConf", "-m", "get", "-t", topic)
    printed = tool("updateOrderConf", "-m", "delete", "-t", topic)
    assert f"delete orderConf success. topic=[{topic}]" in printed
    assert _entry(cluster, "ORDER_TOPIC_CONFIG", topic)[0] == 22


def test_settings_of_name_servers(tool: AdminTool, cluster: Cluster) -> None:
    printed = tool("getNamesrvConfig")
    assert f"============{cluster.namesrv}============" in printed
    old = dict(SETTING.findall(printed))["orderMessageEnable"]
    for value in ("false" if old == "true" else "true", old):
        printed = tool("updateNamesrvConfig", "-k", "orderMessageEnable", "-v", value)
        assert "update name server config success!" in printed
        assert f"orderMessageEnable : {value}" in printed
        assert dict(SETTING.findall(tool("getNamesrvConfig")))["orderMessageEnable"] == value


def test_writing_is_taken_away_and_given_back(
    tool: AdminTool, cluster: Cluster, topic: str
) -> None:
    place = rf"broker\[{cluster.broker_name}\] in name server\[{cluster.namesrv}\] OK, (\d+)"
    try:
        wiped = re.search(
            f"wipe write perm of {place}", tool("wipeWritePerm", "-b", cluster.broker_name)
        )
        assert wiped and int(wiped[1]) > 1
        assert re.findall(r'"perm":(\d)', tool("topicRoute", "-t", topic)) == ["4"]
    finally:
        printed = tool("addWritePerm", "-b", cluster.broker_name)
    added = re.search(f"add write perm of {place}", printed)
    assert added and wiped and added[1] == wiped[1]
    assert re.findall(r'"perm":(\d)', tool("topicRoute", "-t", topic)) == ["6"]


# --- files ------------------------------------------------------------------------------------


def test_exports(tool: AdminTool, cluster: Cluster, topic: str, group: str, tmp_path: Path) -> None:
    tool("updateSubGroup", "-c", cluster.cluster_name, "-g", group, "-r", "7")
    where = ["-c", cluster.cluster_name, "-f", str(tmp_path)]
    assert f"export {tmp_path}/metadata.json success" in tool("exportMetadata", *where)
    exported = json.loads((tmp_path / "metadata.json").read_text())
    assert exported["topicConfigTable"][topic]["readQueueNums"] == 4
    assert exported["subscriptionGroupTable"][group]["retryMaxTimes"] == 7
    assert f"export {tmp_path}/configs.json success" in tool("exportConfigs", *where)
    exported = json.loads((tmp_path / "configs.json").read_text())
    assert exported["clusterScale"] == {
        "namesrvSize": 1,
        "masterBrokerSize": 1,
        "slaveBrokerSize": 0,
    }
    settings = exported["brokerConfigs"][cluster.broker_name]
    assert settings["brokerName"] == cluster.broker_name
    assert settings["flushDiskType"] in ("SYNC_FLUSH", "ASYNC_FLUSH")
    assert f"export {tmp_path}/metrics.json success" in tool("exportMetrics", *where)
    exported = json.loads((tmp_path / "metrics.json").read_text())
    report = exported["evaluateReport"][cluster.broker_name]
    assert int(report["runtimeEnv"]["cpuNum"]) >= 1
    assert {"runtimeQuota", "runtimeVersion"} <= set(report)
    assert report["runtimeQuota"]["topicSize"] > 1
    assert exported["totalData"]["totalTps"]["totalNormalInTps"] >= 0


# --- the monitor, which needs time: last ------------------------------------------------------


def test_monitoring(
    monitor: Path, tool: AdminTool, cluster: Cluster, name: str, topic: str
) -> None:
    """It finds its own group, and says what groups have not consumed."""
    create_topic(cluster.namesrv_port, cluster.broker_port, f"Later_{name}", 1)
    wanted = re.compile(
        r"\[MONITOR\] reportUndoneMsgs: UndoneMsgs \[consumerGroup=(\w+), topic=([^,]+),"
        r" undoneMsgsTotal=\d+, undoneMsgsSingleMQ=\d+"
    )
    end = time.monotonic() + MONITOR_DEADLINE_S
    text = ""
    while not (wanted.search(text) and "endRound" in text):
        assert time.monotonic() < end, text[-2000:]
        time.sleep(0.5)
        text = monitor.read_text() if monitor.exists() else ""
    groups = {group for group, _ in wanted.findall(text)}
    assert MONITOR_GROUP in groups, groups
    members = tool("consumerConnection", "-g", MONITOR_GROUP)
    assert re.search(r"^OFFSET_MOVED_EVENT\s+\*", members, re.MULTILINE)
