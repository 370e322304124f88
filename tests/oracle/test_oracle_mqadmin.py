"""Upstream's own admin tool: what it prints about the cluster under test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from oracle_checks import Cluster
from peers.clients import Client, Letter, Line, send
from peers.java import mqadmin
from peers.raw import call, create_topic


@pytest.fixture
def letter() -> Letter:
    return Letter("a letter 🚀".encode(), tags="TagA", keys="admin1 admin2", properties={"p": "v"})


@pytest.fixture
def stored(java: Client, cluster: Cluster, topic: str, letter: Letter) -> Line:
    (line,) = send(java, cluster.namesrv, topic, "p_admin", "sync", [letter])
    return line


def _fields(printed: str) -> dict[str, str]:
    """The `name:   value` lines of a printed message."""
    return dict(re.findall(r"^([A-Z][A-Za-z ]+):[ \t]+(.*?)[ \t]*$", printed, re.MULTILINE))


def _routes(printed: str) -> list[tuple[str, str]]:
    """Read and write queue counts of every row of a printed route."""
    return list(
        zip(
            re.findall(r'"readQueueNums":(\d+)', printed),
            re.findall(r'"writeQueueNums":(\d+)', printed),
            strict=True,
        )
    )


def test_cluster_list(java: Client, cluster: Cluster) -> None:
    rows = [line.split() for line in mqadmin(cluster.namesrv, "clusterList").splitlines()]
    assert rows[0][:2] == ["#Cluster", "Name"]
    (row,) = [row for row in rows[1:] if row]
    assert row[:4] == [cluster.cluster_name, cluster.broker_name, "0", cluster.broker]
    assert re.fullmatch(r"V\d+_\d+_\d+(_\w+)?", row[4])
    # Rates, wait, hours and disk share were really reported: all are numbers.
    assert re.fullmatch(r"\d+\.\d\d\(\d+,\d+ms\)", row[5])
    assert re.fullmatch(r"\d+\.\d\d\(\d+,\d+ms\)", row[6])
    assert 0 <= float(row[-1]) < 1


def test_topic_list(java: Client, cluster: Cluster, topic: str) -> None:
    listed = mqadmin(cluster.namesrv, "topicList").split()
    assert topic in listed
    assert "TBW102" in listed
    assert len(listed) == len(set(listed))


def test_update_route_and_delete_topic(java: Client, cluster: Cluster, name: str) -> None:
    topic = f"Admin_{name}"
    by_cluster = ["-c", cluster.cluster_name, "-t", topic]
    printed = mqadmin(cluster.namesrv, "updateTopic", *by_cluster, "-r", "3", "-w", "2")
    assert f"create topic to {cluster.broker} success." in printed
    assert f"topicName={topic}, readQueueNums=3, writeQueueNums=2, perm=RW-" in printed

    printed = mqadmin(cluster.namesrv, "topicRoute", "-t", topic)
    assert _routes(printed) == [("3", "2")]
    assert f'0:"{cluster.broker}"' in printed
    assert f'"brokerName":"{cluster.broker_name}"' in printed
    assert f'"cluster":"{cluster.cluster_name}"' in printed

    printed = mqadmin(cluster.namesrv, "updateTopic", *by_cluster, "-r", "5", "-w", "5")
    assert "success." in printed
    assert _routes(mqadmin(cluster.namesrv, "topicRoute", "-t", topic)) == [("5", "5")]

    printed = mqadmin(cluster.namesrv, "deleteTopic", *by_cluster)
    assert f"delete topic [{topic}] from cluster [{cluster.cluster_name}] success." in printed
    assert f"delete topic [{topic}] from NameServer success." in printed
    printed = mqadmin(cluster.namesrv, "topicRoute", "-t", topic)
    assert re.search(rf"CODE: 17  DESC: .*{topic}", printed)  # the wording is the server's own
    assert topic not in mqadmin(cluster.namesrv, "topicList").split()


def test_deleted_topic_starts_again_at_zero(
    java: Client, cluster: Cluster, topic: str, stored: Line, letter: Letter
) -> None:
    assert stored["queue_offset"] == 0
    mqadmin(cluster.namesrv, "deleteTopic", "-c", cluster.cluster_name, "-t", topic)
    create_topic(cluster.namesrv_port, cluster.broker_port, topic, 1)
    (again,) = send(java, cluster.namesrv, topic, "p_admin", "sync", [letter])
    assert (again["queue_id"], again["queue_offset"]) == (0, 0)


def test_topic_status(java: Client, cluster: Cluster, topic: str) -> None:
    letters = [Letter(b"letter %d" % n, shard=n % 3) for n in range(10)]
    send(java, cluster.namesrv, topic, "p_admin", "orderly", letters)
    rows = [
        line.split() for line in mqadmin(cluster.namesrv, "topicStatus", "-t", topic).splitlines()
    ]
    assert [row[:4] for row in rows[1:] if row] == [
        [cluster.broker_name, "0", "0", "4"],
        [cluster.broker_name, "1", "0", "3"],
        [cluster.broker_name, "2", "0", "3"],
        [cluster.broker_name, "3", "0", "0"],
    ]
    updated = [len(row) == 6 and row[4].startswith("20") for row in rows[1:] if row]
    assert updated == [True, True, True, False]


def test_query_message_by_id(
    java: Client, cluster: Cluster, topic: str, stored: Line, letter: Letter
) -> None:
    printed = mqadmin(cluster.namesrv, "queryMsgById", "-i", stored["offset_msg_id"])
    fields = _fields(printed)
    assert fields["OffsetID"] == stored["offset_msg_id"]
    assert fields["Topic"] == topic
    assert fields["Tags"] == "[TagA]"
    assert fields["Keys"] == "[admin1 admin2]"
    assert fields["Queue ID"] == str(stored["queue_id"])
    assert fields["Queue Offset"] == str(stored["queue_offset"])
    assert fields["CommitLog Offset"] == str(int(stored["offset_msg_id"][16:], 16))
    assert fields["Store Host"] == cluster.broker
    assert fields["Born Host"].startswith("127.0.0.1:")
    assert f"UNIQ_KEY={stored['msg_id']}" in fields["Properties"]
    assert "p=v" in fields["Properties"]
    assert Path(fields["Message Body Path"]).read_bytes() == letter.body


def test_query_message_by_unique_key(
    java: Client, cluster: Cluster, topic: str, stored: Line
) -> None:
    printed = mqadmin(cluster.namesrv, "queryMsgByUniqueKey", "-t", topic, "-i", stored["msg_id"])
    fields = _fields(printed)
    assert fields["Keys"] == "[admin1 admin2]"
    assert fields["CommitLog Offset"] == str(int(stored["offset_msg_id"][16:], 16))


@pytest.mark.parametrize("key", ["admin1", "admin2"])
def test_query_message_by_key(
    key: str, java: Client, cluster: Cluster, topic: str, stored: Line
) -> None:
    printed = mqadmin(cluster.namesrv, "queryMsgByKey", "-t", topic, "-k", key)
    rows = [line.split() for line in printed.splitlines() if line and not line.startswith("#")]
    assert rows == [[stored["msg_id"], str(stored["queue_id"]), str(stored["queue_offset"])]]


def test_query_message_by_unknown_id(java: Client, cluster: Cluster, stored: Line) -> None:
    beyond = stored["offset_msg_id"][:16] + "00000000FFFFFFF0"
    printed = mqadmin(cluster.namesrv, "queryMsgById", "-i", beyond)
    assert "OffsetID" not in printed
    assert "CODE: 1  DESC:" in printed


def test_update_broker_config(java: Client, cluster: Cluster) -> None:
    by_broker = ["-b", cluster.broker]

    def shown(key: str) -> str:
        printed = mqadmin(cluster.namesrv, "getBrokerConfig", *by_broker)
        found = re.search(rf"^{key}\s+=\s+(\S+)", printed, re.MULTILINE)
        assert found, printed
        return found[1]

    before = shown("fileReservedTime")
    for value in ("47", before):
        words = ["-k", "fileReservedTime", "-v", value]
        printed = mqadmin(cluster.namesrv, "updateBrokerConfig", *by_broker, *words)
        assert f"update broker config success, {cluster.broker}" in printed
        assert shown("fileReservedTime") == value


def test_an_ordered_topic_has_its_configuration(java: Client, cluster: Cluster, name: str) -> None:
    topic = f"Ordered_{name}"
    words = ["-c", cluster.cluster_name, "-t", topic, "-r", "3", "-w", "3", "-o", "true"]
    printed = mqadmin(cluster.namesrv, "updateTopic", *words)
    assert "success" in printed and "order=true" in printed
    # The tool itself writes the entry; brokers and, if they are told so, clients read it.
    entry = {"namespace": "ORDER_TOPIC_CONFIG", "key": topic}
    code, fields, _, _ = call(cluster.namesrv_port, 101, entry)
    assert (code, fields) == (0, {"value": f"{cluster.broker_name}:3"})
    printed = mqadmin(cluster.namesrv, "updateOrderConf", "-m", "get", "-t", topic)
    assert f"orderConf=[{cluster.broker_name}:3]" in printed
