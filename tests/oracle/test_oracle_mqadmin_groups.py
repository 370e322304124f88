"""Upstream's own admin tool: groups, and the consumer and the producer that are connected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from peers.clients import JAVA, Client, Consumer, Letter, Line, send
from peers.mqadmin import AdminTool
from peers.raw import create_topic
from tests.oracle.oracle_checks import Cluster, body

BODIES = [b"first", b"second", b"third"]
PROGRESS = re.compile(r"^(\S+)\s+\S+\s+(\d+)\s+(\d+)\s+(\d+)\s+", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Party:
    """A consumer that has consumed three traced messages, and committed that."""

    topic: str
    group: str
    consumer: Consumer
    sent: list[Line]
    client_id: str


@pytest.fixture(scope="module")
def party(ready: Callable[[Client], Client], cluster: Cluster, tool: AdminTool) -> Iterator[Party]:
    ready(JAVA)
    topic, group = "T_party", "g_party"
    create_topic(cluster.namesrv_port, cluster.broker_port, topic, 4)
    with Consumer(
        JAVA, cluster.namesrv, topic, group, expression="TagA || TagB", mode="push+trace"
    ) as consumer:
        letters = [Letter(text, tags="TagA", keys=f"key{at}") for at, text in enumerate(BODIES)]
        sent = send(JAVA, cluster.namesrv, topic, "p_party", "sync+trace", letters)
        consumer.receive(len(letters))
        # Consumers commit every five seconds.
        tool.until(lambda text: _consumed(text, topic) == 3, "consumerProgress", "-g", group)
        printed = tool("consumerConnection", "-g", group)
        (client_id,) = re.findall(r"^(\S+@\S+)\s", printed, re.MULTILINE)
        yield Party(topic, group, consumer, sent, client_id)


def _consumed(printed: str, topic: str) -> int:
    """Offsets of the group in all queues of a topic together."""
    return sum(int(at) for name, _, _, at in PROGRESS.findall(printed) if name == topic)


# --- who is connected -------------------------------------------------------------------------


def test_consumer_connection(tool: AdminTool, cluster: Cluster, party: Party) -> None:
    for where in ([], ["-b", cluster.broker]):
        printed = tool("consumerConnection", "-g", party.group, *where)
        assert re.search(rf"^{party.client_id}\s+127.0.0.1:\d+\s+JAVA\s+V4_9_8", printed, re.M)
        assert re.search(rf"^{party.topic}\s+TagA \|\| TagB", printed, re.M)
        assert re.search(rf"^%RETRY%{party.group}\s+\*", printed, re.M)
        assert "ConsumeType: CONSUME_PASSIVELY" in printed
        assert "MessageModel: CLUSTERING" in printed


def test_consumer_status(tool: AdminTool, cluster: Cluster, party: Party) -> None:
    printed = tool("consumerStatus", "-g", party.group)
    assert re.search(rf"^1\s+{party.client_id}\s+V4_9_8\s+\d+/{party.client_id}", printed, re.M)
    assert "Same subscription in the same group of consumer" in printed
    assert "Rebalance OK" in printed
    printed = tool("consumerStatus", "-g", party.group, "-i", party.client_id, "-b", cluster.broker)
    assert re.search(rf"Topic: {party.topic}\s.*SubExpression: TagA \|\| TagB", printed)
    detail = printed.partition("#Consumer MQ Detail#")[2]
    queues = re.findall(rf"^{party.topic}\s+\S+\s+(\d)\s+ProcessQueueInfo", detail, re.M)
    assert sorted(queues) == ["0", "1", "2", "3"]
    printed = tool("consumerStatus", "-g", party.group, "-i", party.client_id, "-s")
    assert "#Consumer jstack#" in printed
    assert "ConsumeMessageThread_" in printed or "PullMessageService" in printed


def test_producers(tool: AdminTool, cluster: Cluster, party: Party) -> None:
    """A consumer has a producer for what it gives back; it is a member of a group, too."""
    group = "CLIENT_INNER_PRODUCER"
    printed = tool("producerConnection", "-g", group, "-t", party.topic)
    assert re.search(rf"{party.client_id}\s+127.0.0.1:\d+\s+JAVA\s+V4_9_8", printed)
    printed = tool("producer", "-b", cluster.broker)
    listed = (
        rf"producer group \({group}\) instance : clientId={party.client_id},remoteIP=/127.0.0.1:\d+"
    )
    assert re.search(rf"{listed}, language=JAVA, version=\d+", printed)
    printed = tool("producerConnection", "-g", "nobody", "-t", party.topic, fails=True)
    assert "CODE: 1  DESC:" in printed


def test_topics_with_their_groups(tool: AdminTool, cluster: Cluster, party: Party) -> None:
    rows = [line.split() for line in tool("topicList", "-c").splitlines()]
    assert [cluster.cluster_name, party.topic, party.group] in rows


# --- progress ---------------------------------------------------------------------------------


def test_consumer_progress(tool: AdminTool, cluster: Cluster, party: Party) -> None:
    printed = tool("consumerProgress", "-g", party.group, "-s", "true")
    mine = [line.split() for line in printed.splitlines() if line.startswith(party.topic)]
    assert [row[1:3] for row in mine] == [[cluster.broker_name, str(at)] for at in range(4)]
    assert {row[5] for row in mine} == {party.client_id.partition("@")[0]}
    assert {row[3] == row[4] and row[6] for row in mine} == {"0"}
    assert "Diff Total: 0" in printed
    rows = [line.split() for line in tool("consumerProgress").splitlines()]
    (row,) = [row for row in rows if row and row[0] == party.group]
    assert row[1:5] == ["1", "V4_9_8", "PUSH", "CLUSTERING"] and row[-1] == "0"


def test_broker_consume_stats(tool: AdminTool, cluster: Cluster, party: Party) -> None:
    printed = tool("brokerConsumeStats", "-b", cluster.broker)
    rows = [line.split() for line in printed.splitlines() if line.startswith(f"{party.topic} ")]
    # It leaves out queues of which nothing was ever consumed.
    assert {(row[1], row[2]) for row in rows} == {(party.group, cluster.broker_name)}
    assert sum(int(row[5]) for row in rows) == 3 and {row[6] for row in rows} == {"0"}
    assert re.search(r"^Diff Total: \d+", printed, re.M)
    printed = tool("brokerConsumeStats", "-b", cluster.broker, "-l", "1000000")
    assert party.topic not in printed


def test_clone_and_reset_without_members(
    tool: AdminTool, cluster: Cluster, party: Party, name: str
) -> None:
    copy = f"copy_{name}"
    words = ["-s", party.group, "-d", copy, "-t", party.topic, "-o", "true"]
    printed = tool("cloneGroupOffset", *words)
    names = f"srcGroup[{party.group}], destGroup=[{copy}], topic[{party.topic}]"
    assert f"clone group offset success. {names}" in printed
    create_topic(cluster.namesrv_port, cluster.broker_port, f"%RETRY%{copy}", 1)
    place = ["-g", copy, "-t", party.topic]
    assert _consumed(tool("consumerProgress", "-g", copy), party.topic) == 3

    printed = tool("resetOffsetByTime", *place, "-s", "2020-01-01#00:00:00:000")
    assert "#rollbackOffset" in printed  # the way for groups without members
    assert _consumed(tool("consumerProgress", "-g", copy), party.topic) == 0
    printed = tool("skipAccumulatedMessage", *place)
    assert "#rollbackOffset" in printed
    assert _consumed(tool("consumerProgress", "-g", copy), party.topic) == 3
    printed = tool(
        "resetOffsetByTime", "-g", f"never_{name}", "-t", party.topic, "-s", "now", fails=True
    )
    assert "CODE: 1  DESC:" in printed


# --- settings ---------------------------------------------------------------------------------


def test_a_group_lives_and_dies(tool: AdminTool, cluster: Cluster, group: str) -> None:
    flags = ["-s", "true", "-m", "true", "-d", "true", "-q", "2", "-r", "5", "-i", "1", "-w", "3"]
    printed = tool("updateSubGroup", "-b", cluster.broker, "-g", group, *flags, "-a", "false")
    assert f"create subscription group to {cluster.broker} success." in printed
    assert f"groupName={group}, consumeEnable=true, consumeFromMinEnable=true" in printed
    printed = tool("getConsumerConfig", "-g", group)
    assert f"{cluster.cluster_name}:{cluster.broker_name}" in printed
    assert dict(re.findall(r"^(\w+)\s+=\s+(\S+)", printed, re.M)) == {
        "groupName": group,
        "consumeEnable": "true",
        "consumeFromMinEnable": "true",
        "consumeBroadcastEnable": "true",
        "retryQueueNums": "2",
        "retryMaxTimes": "5",
        "brokerId": "1",
        "whichBrokerWhenConsumeSlowly": "3",
        "notifyConsumerIdsChangedEnable": "false",
    }
    printed = tool("updateSubGroup", "-c", cluster.cluster_name, "-g", group)
    assert "consumeBroadcastEnable=false" in printed
    printed = tool("deleteSubGroup", "-c", cluster.cluster_name, "-g", group, "-r", "true")
    place = f"from broker [{cluster.broker}] in cluster [{cluster.cluster_name}]"
    assert f"delete subscription group [{group}] {place} success." in printed
    assert f"delete topic [%RETRY%{group}] from NameServer success." in printed
    assert f"delete topic [%DLQ%{group}] from NameServer success." in printed
    assert "retryMaxTimes" not in tool("getConsumerConfig", "-g", group)


# --- single messages --------------------------------------------------------------------------


def test_who_has_consumed_a_message(tool: AdminTool, party: Party) -> None:
    tracks = rf"MessageTrack \[consumerGroup={party.group}, trackType=CONSUMED"
    assert re.search(tracks, tool("queryMsgById", "-i", party.sent[0]["offset_msg_id"]))
    words = ["-t", party.topic, "-i", party.sent[0]["msg_id"]]
    assert re.search(tracks, tool("queryMsgByUniqueKey", *words))


def test_a_message_is_handed_to_a_member(tool: AdminTool, party: Party) -> None:
    before = len(party.consumer.messages)
    to = ["-g", party.group, "-d", party.client_id]
    printed = tool("queryMsgById", "-i", party.sent[1]["offset_msg_id"], *to)
    assert "consumeResult=CR_SUCCESS" in printed
    words = ["-t", party.topic, "-i", party.sent[1]["msg_id"]]
    printed = tool("queryMsgByUniqueKey", *words, *to)
    assert "consumeResult=CR_SUCCESS" in printed
    received = party.consumer.receive(before + 2)
    assert [body(line) for line in received[before:]] == [b"second"] * 2


def test_trace(tool: AdminTool, party: Party) -> None:
    def traced(printed: str) -> bool:
        rows = [line.split() for line in printed.splitlines() if "success" in line]
        return [row[:2] for row in rows][:2] == [["Pub", "p_party"], ["Sub", party.group]]

    words = ["-i", party.sent[2]["msg_id"]]
    printed = tool.until(traced, "queryMsgTraceById", *words)
    assert re.search(r"^Pub .*\d+ms", printed, re.M)
    assert traced(tool("queryMsgTraceById", *words, "-t", "RMQ_SYS_TRACE_TOPIC"))


# --- last: it moves the member ----------------------------------------------------------------


def test_reset_and_skip_with_a_member(tool: AdminTool, cluster: Cluster, party: Party) -> None:
    before = len(party.consumer.messages)
    place = ["-g", party.group, "-t", party.topic]
    printed = tool("resetOffsetByTime", *place, "-s", "2020-01-01#00:00:00:000")
    assert f"by specified group[{party.group}], topic[{party.topic}], force[true]" in printed
    rows = [line.split() for line in printed.splitlines() if line.startswith(cluster.broker_name)]
    assert sorted(row[1:] for row in rows) == [[str(at), "0"] for at in range(4)]
    again = party.consumer.receive(before + 3)
    assert sorted(map(body, again[before:])) == sorted(BODIES)
    printed = tool("skipAccumulatedMessage", *place)
    rows = [line.split() for line in printed.splitlines() if line.startswith(cluster.broker_name)]
    assert sum(int(row[2]) for row in rows) == 3
    tool.until(lambda text: _consumed(text, party.topic) == 3, "consumerProgress", *place[:2])
