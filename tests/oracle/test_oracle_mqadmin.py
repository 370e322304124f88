"""Upstream's own admin tool: what it does to topics, and what it prints of messages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from peers.clients import Client, Letter, Line, send
from peers.mqadmin import AdminTool
from peers.raw import call, create_topic
from tests.oracle.oracle_checks import Cluster


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


def test_topic_list(tool: AdminTool, topic: str) -> None:
    listed = tool("topicList").split()
    assert topic in listed
    assert "TBW102" in listed
    assert len(listed) == len(set(listed))


def test_update_route_and_delete_topic(tool: AdminTool, cluster: Cluster, name: str) -> None:
    topic = f"Admin_{name}"
    by_cluster = ["-c", cluster.cluster_name, "-t", topic]
    printed = tool("updateTopic", *by_cluster, "-r", "3", "-w", "2")
    assert f"create topic to {cluster.broker} success." in printed
    assert f"topicName={topic}, readQueueNums=3, writeQueueNums=2, perm=RW-" in printed

    printed = tool("topicRoute", "-t", topic)
    assert _routes(printed) == [("3", "2")]
    assert f'0:"{cluster.broker}"' in printed
    assert f'"brokerName":"{cluster.broker_name}"' in printed
    assert f'"cluster":"{cluster.cluster_name}"' in printed

    printed = tool("updateTopic", *by_cluster, "-r", "5", "-w", "5")
    assert "success." in printed
    assert _routes(tool("topicRoute", "-t", topic)) == [("5", "5")]

    printed = tool("deleteTopic", *by_cluster)
    assert f"delete topic [{topic}] from cluster [{cluster.cluster_name}] success." in printed
    assert f"delete topic [{topic}] from NameServer success." in printed
    printed = tool("topicRoute", "-t", topic, fails=True)
    assert re.search(rf"CODE: 17  DESC: .*{topic}", printed)  # the wording is the server's own
    assert topic not in tool("topicList").split()


def test_deleted_topic_starts_again_at_zero(
    java: Client, tool: AdminTool, cluster: Cluster, topic: str, stored: Line, letter: Letter
) -> None:
    assert stored["queue_offset"] == 0
    tool("deleteTopic", "-c", cluster.cluster_name, "-t", topic)
    create_topic(cluster.namesrv_port, cluster.broker_port, topic, 1)
    (again,) = send(java, cluster.namesrv, topic, "p_admin", "sync", [letter])
    assert (again["queue_id"], again["queue_offset"]) == (0, 0)


def test_topic_status(java: Client, tool: AdminTool, cluster: Cluster, topic: str) -> None:
    letters = [Letter(b"letter %d" % n, shard=n % 3) for n in range(10)]
    send(java, cluster.namesrv, topic, "p_admin", "orderly", letters)
    rows = [line.split() for line in tool("topicStatus", "-t", topic).splitlines()]
    assert [row[:4] for row in rows[1:] if row] == [
        [cluster.broker_name, "0", "0", "4"],
        [cluster.broker_name, "1", "0", "3"],
        [cluster.broker_name, "2", "0", "3"],
        [cluster.broker_name, "3", "0", "0"],
    ]
    updated = [len(row) == 6 and row[4].startswith("20") for row in rows[1:] if row]
    assert updated == [True, True, True, False]


def test_query_message_by_id(
    tool: AdminTool, cluster: Cluster, topic: str, stored: Line, letter: Letter
) -> None:
    printed = tool("queryMsgById", "-i", stored["offset_msg_id"])
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


def test_query_message_by_unique_key(tool: AdminTool, topic: str, stored: Line) -> None:
    printed = tool("queryMsgByUniqueKey", "-t", topic, "-i", stored["msg_id"])
    fields = _fields(printed)
    assert fields["Keys"] == "[admin1 admin2]"
    assert fields["CommitLog Offset"] == str(int(stored["offset_msg_id"][16:], 16))


@pytest.mark.parametrize("key", ["admin1", "admin2"])
def test_query_message_by_key(key: str, tool: AdminTool, topic: str, stored: Line) -> None:
    printed = tool("queryMsgByKey", "-t", topic, "-k", key)
    rows = [line.split() for line in printed.splitlines() if line and not line.startswith("#")]
    assert rows == [[stored["msg_id"], str(stored["queue_id"]), str(stored["queue_offset"])]]


def test_query_message_by_unknown_id(tool: AdminTool, stored: Line) -> None:
    beyond = stored["offset_msg_id"][:16] + "00000000FFFFFFF0"
    printed = tool("queryMsgById", "-i", beyond, fails=True)
    assert "OffsetID" not in printed
    assert "CODE: 1  DESC:" in printed


def test_an_ordered_topic_has_its_configuration(
    tool: AdminTool, cluster: Cluster, name: str
) -> None:
    topic = f"Ordered_{name}"
    words = ["-c", cluster.cluster_name, "-t", topic, "-r", "3", "-w", "3", "-o", "true"]
    printed = tool("updateTopic", *words)
    assert "success" in printed and "order=true" in printed
    # The tool itself writes the entry; brokers and, if they are told so, clients read it.
    entry = {"namespace": "ORDER_TOPIC_CONFIG", "key": topic}
    code, fields, _, _ = call(cluster.namesrv_port, 101, entry)
    assert (code, fields) == (0, {"value": f"{cluster.broker_name}:3"})
    printed = tool("updateOrderConf", "-m", "get", "-t", topic)
    assert f"orderConf=[{cluster.broker_name}:3]" in printed


def test_topic_permissions(tool: AdminTool, cluster: Cluster, topic: str) -> None:
    printed = tool("updateTopicPerm", "-b", cluster.broker, "-t", topic, "-p", "4")
    assert f"update topic perm from 6 to 4 in {cluster.broker} success." in printed
    assert re.findall(r'"perm":(\d)', tool("topicRoute", "-t", topic)) == ["4"]
    printed = tool("updateTopicPerm", "-c", cluster.cluster_name, "-t", topic, "-p", "6")
    assert f"update topic perm from 4 to 6 in {cluster.broker} success." in printed
    assert re.findall(r'"perm":(\d)', tool("topicRoute", "-t", topic)) == ["6"]
    printed = tool("updateTopicPerm", "-b", cluster.broker, "-t", topic, "-p", "6")
    assert "new perm equals to the old one!" in printed


def test_route_as_a_list(tool: AdminTool, cluster: Cluster, topic: str) -> None:
    rows = [line.split() for line in tool("topicRoute", "-t", topic, "-l").splitlines()]
    place = [cluster.cluster_name, cluster.broker_name, f"{{0={cluster.broker}}}"]
    assert [*place, "4", "4", "6"] in rows
    assert ["Total:", "1", "4", "4"] in rows


def test_clusters_of_a_topic(tool: AdminTool, cluster: Cluster, topic: str) -> None:
    assert tool("topicClusterList", "-t", topic).split() == [cluster.cluster_name]


def test_queues_shared_by_clients(tool: AdminTool, cluster: Cluster, topic: str) -> None:
    printed = json.loads(tool("allocateMQ", "-t", topic, "-i", "10.0.0.1,10.0.0.2"))
    shares = {
        client: {(queue["brokerName"], queue["queueId"]) for queue in queues}
        for client, queues in printed["result"].items()
    }
    assert {client: len(share) for client, share in shares.items()} == {
        "10.0.0.1": 2,
        "10.0.0.2": 2,
    }
    assert set.union(*shares.values()) == {(cluster.broker_name, at) for at in range(4)}


# --- messages that the tool sends itself ------------------------------------------------------


def _send(tool: AdminTool, cluster: Cluster, topic: str, body: str, tag: str, queue: int) -> str:
    """Sends a message to a queue; its id."""
    place = ["-b", cluster.broker_name, "-i", str(queue)]
    printed = tool("sendMessage", "-t", topic, "-p", body, "-k", f"k_{body}", "-c", tag, *place)
    (row,) = [line.split() for line in printed.splitlines() if line and line[0] != "#"]
    assert row[:3] == [cluster.broker_name, str(queue), "SEND_OK"]
    return row[3]


@pytest.fixture
def letters(tool: AdminTool, cluster: Cluster, topic: str) -> dict[str, str]:
    """Four messages: what each says, and its id. The first three are in queue 1."""
    sent = [("one", "A", 1), ("two", "B", 1), ("three", "A", 1), ("four", "A", 2)]
    return {body: _send(tool, cluster, topic, body, tag, at) for body, tag, at in sent}


def _printed(text: str) -> dict[str, str]:
    """Bodies and ids of printed messages, in their order."""
    return {
        body: at for at, body in re.findall(r"^MSGID: (\S+) .* BODY: (.*)$", text, re.MULTILINE)
    }


def test_print_messages(tool: AdminTool, topic: str, letters: dict[str, str]) -> None:
    printed = tool("printMsg", "-t", topic, "-d", "true")
    assert _printed(printed) == letters
    ends = re.findall(r"minOffset=(\d+), maxOffset=(\d+), .*queueId=(\d)\]", printed)
    assert sorted(ends, key=lambda end: end[2]) == [
        ("0", "0", "0"),
        ("0", "3", "1"),
        ("0", "1", "2"),
        ("0", "0", "3"),
    ]
    printed = tool("printMsg", "-t", topic, "-d", "true", "-s", "B || C")
    assert _printed(printed) == {"two": letters["two"]}
    printed = tool("printMsg", "-t", topic, "-d", "true", "-e", "2020-01-01#00:00:00:000")
    assert _printed(printed) == {}


def test_print_messages_of_a_queue(
    tool: AdminTool, cluster: Cluster, topic: str, letters: dict[str, str]
) -> None:
    place = ["-a", cluster.broker_name, "-i", "1"]
    printed = tool("printMsgByQueue", "-t", topic, *place, "-p", "true", "-d", "true", "-f", "true")
    assert list(_printed(printed)) == ["one", "two", "three"]
    assert dict(re.findall(r"^Tag: (\S+)\s+Count: (\d+)", printed, re.MULTILINE)) == {
        "A": "2",
        "B": "1",
    }


def test_consume_messages(
    tool: AdminTool, cluster: Cluster, topic: str, letters: dict[str, str]
) -> None:
    place = ["-b", cluster.broker_name, "-i", "1"]
    printed = tool("consumeMessage", "-t", topic, *place, "-o", "1", "-c", "2")
    assert "Consume ok" in printed
    assert list(_printed(printed)) == ["two", "three"]
    assert _printed(tool("consumeMessage", "-t", topic)) == letters


def test_query_message_by_offset(
    tool: AdminTool, cluster: Cluster, topic: str, letters: dict[str, str]
) -> None:
    place = ["-b", cluster.broker_name, "-i", "1", "-o", "2"]
    fields = _fields(tool("queryMsgByOffset", "-t", topic, *place))
    assert (fields["Topic"], fields["Queue Offset"]) == (topic, "2")
    assert f"UNIQ_KEY={letters['three']}" in fields["Properties"]
    assert Path(fields["Message Body Path"]).read_bytes() == b"three"


def test_entries_of_a_consume_queue(
    tool: AdminTool, cluster: Cluster, topic: str, letters: dict[str, str]
) -> None:
    whole = tool("queryCq", "-t", topic, "-q", "1", "-i", "0")
    assert "max: 3, min: 0" in whole
    assert re.findall(r"^idx: (\d+)", whole, re.MULTILINE) == ["0", "1", "2"]
    codes = re.findall(r"physicSize=(\d+), tagsCode=(-?\d+)", whole)
    assert [code for _, code in codes] == ["65", "66", "65"]  # the hash of one letter is its code
    assert all(int(size) > 100 for size, _ in codes)
    part = tool("queryCq", "-t", topic, "-q", "1", "-i", "1", "-c", "1", "-b", cluster.broker)
    assert re.findall(r"^idx: (\d+)", part, re.MULTILINE) == ["1"]


def test_a_message_is_sent_once_more(
    tool: AdminTool, cluster: Cluster, topic: str, letters: dict[str, str]
) -> None:
    place = ["-b", cluster.broker_name, "-i", "1", "-o", "0"]
    first = _fields(tool("queryMsgByOffset", "-t", topic, *place))["OffsetID"]
    printed = tool("queryMsgById", "-i", first, "-s", "true")
    assert f"prepare resend msg. originalMsgId={first}" in printed
    assert "sendStatus=SEND_OK" in printed
    assert re.findall(r"BODY: (.*)", tool("printMsg", "-t", topic, "-d", "true")).count("one") == 2


def test_time_of_sends(tool: AdminTool, cluster: Cluster, topic: str) -> None:
    printed = tool("checkMsgSendRT", "-t", topic, "-a", "8", "-s", "64")
    rows = [line.split() for line in printed.splitlines() if line.startswith(cluster.broker_name)]
    assert [row[1] for row in rows] == ["0", "1", "2", "3"] * 2
    assert {row[2] for row in rows} == {"true"}
    assert re.search(r"^Avg RT: \d+\.\d\d$", printed, re.MULTILINE)
    status = [line.split() for line in tool("topicStatus", "-t", topic).splitlines()[1:]]
    assert [row[3] for row in status if row] == ["2", "2", "2", "2"]
