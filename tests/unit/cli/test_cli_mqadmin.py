"""`cosmo mqadmin …`: upstream's names and flags against a node in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
from tests.unit.cli.operating_kit import Done, cosmo, table

from cosmodrome import blocking
from cosmodrome.cli.mqadmin.table import ROWS
from cosmodrome.client.values import Message, ReceivedMessage, SendResult

_numbers = count(1)
BROKER = "embedded"
CLUSTER = "DefaultCluster"
DEADLINE_S = 90


class World:
    """A node with a topic that has messages, a group with a member, and a producer."""

    def __init__(self, node: blocking.Node) -> None:
        self.namesrv = node.namesrv
        self.broker = node.broker_address
        self.topic, self.group, self.idle = "Orders", "billing", "idle"
        self.producer = blocking.Producer(node.namesrv, group="senders", trace=True)
        self.consumer = blocking.Consumer(node.namesrv, group=self.group, consume_from="first")
        self.sent: list[SendResult] = []

    def __enter__(self) -> World:
        assert self("updateTopic", "-c", CLUSTER, "-t", self.topic, "-r", "2", "-w", "2").code == 0
        self.producer.start()
        for at in range(3):
            message = Message(self.topic, b"letter %d" % at, tags="TagA", keys=(f"key{at}",))
            self.sent.append(self.producer.send(message))
        self.consumer.start()
        self.consumer.subscribe(self.topic, handler=self._take)
        # Its retry topic is made when the broker hears of it, and must not come during a test.
        self.until(lambda found: found["members"], "consumerConnection", "-g", self.group)
        done = self("updateSubGroup", "-b", self.broker, "-g", self.idle)
        assert done.code == 0, done
        return self

    def __exit__(self, *_: object) -> None:
        self.consumer.stop()
        self.producer.stop()

    def _take(self, message: ReceivedMessage) -> None:
        pass

    def __call__(self, *words: str) -> Done:
        return cosmo(self.namesrv, "mqadmin", *words)

    def rows(self, *words: str) -> Any:
        """Data of a command that ended well."""
        done = self(*words, "--output", "json")
        assert done.code == 0, (words, done)
        return json.loads(done.out)

    def until(self, expected: Callable[[Any], object], *words: str) -> Any:
        end = time.monotonic() + DEADLINE_S
        while True:
            done = self(*words, "--output", "json")
            if done.code == 0 and expected(json.loads(done.out)):
                return json.loads(done.out)
            assert time.monotonic() < end, (words, done)
            time.sleep(0.05)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with blocking.embedded() as node, World(node) as world:
        yield world


@pytest.fixture
def name() -> str:
    return f"Fresh{next(_numbers)}"


# --- one live call of every command that is done here ----------------------------------------

# Words with {names} of the world; then what the data must say.
CASES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "updateTopic": (
        "-c DefaultCluster -t {name} -r 3 -w 2 -p 4",
        lambda rows: (
            [(r["read_queues"], r["write_queues"], r["perm"]) for r in rows] == [(3, 2, 4)]
        ),
    ),
    "deleteTopic": ("-c DefaultCluster -t {made}", lambda rows: rows[0]["outcome"] == "deleted"),
    "updateTopicPerm": ("-b {broker} -t {made} -p 4", lambda rows: rows[0]["outcome"] == "changed"),
    "topicRoute": ("-t {topic} -l", lambda rows: [r["read_queues"] for r in rows] == [2]),
    "topicStatus": ("-t {topic}", lambda rows: sum(r["messages"] for r in rows) == 3),
    "topicClusterList": ("-t {topic}", lambda rows: rows[0]["cluster"] == "DefaultCluster"),
    "topicList": ("", lambda rows: {"Orders", "TBW102"} <= {r["topic"] for r in rows}),
    "updateOrderConf": (
        "-m put -t {topic} -v embedded:2",
        lambda rows: rows[0]["after"] == "embedded:2",
    ),
    "allocateMQ": (
        "-t {topic} -i 10.0.0.1,10.0.0.2",
        lambda rows: [r["queue"] for r in rows] == [0, 1],
    ),
    "statsAll": ("-a -t {topic}", lambda rows: rows[0]["topic"] == "Orders"),
    "updateSubGroup": ("-c DefaultCluster -g {name}", lambda rows: rows[0]["outcome"] == "done"),
    "deleteSubGroup": (
        "-b {broker} -g {made_group} -r true",
        lambda rows: rows[0]["outcome"] == "deleted",
    ),
    "getConsumerConfig": (
        "-g idle",
        lambda rows: {r["key"]: r["value"] for r in rows}["retryMaxTimes"] == 16,
    ),
    "consumerProgress": (
        "-g billing -s true",
        lambda rows: {r["topic"] for r in rows} >= {"Orders"},
    ),
    "consumerConnection": (
        "-g billing",
        lambda rows: rows["members"] and rows["mode"] == "clustering",
    ),
    "consumerStatus": (
        "-g billing",
        lambda rows: {r["queue"] for r in rows if r["topic"] == "Orders"} == {0, 1},
    ),
    "producerConnection": (
        "-g senders -t {topic}",
        lambda rows: [r["group"] for r in rows] == ["senders"],
    ),
    "producer": (
        "-b {broker}",
        lambda rows: "senders" in {r["group"] for r in rows if r["address"][0] != "/"},
    ),
    "resetOffsetByTime": (
        "-g idle -t {topic} -s 2020-01-01#00:00:00:000",
        lambda rows: [(r["queue"], r["offset"]) for r in rows] == [(0, 0), (1, 0)],
    ),
    "skipAccumulatedMessage": (
        "-g {made_group} -t {topic}",
        lambda rows: sum(r["after"] for r in rows) == 3,
    ),
    "cloneGroupOffset": ("-s billing -d {made_group} -t {topic}", lambda rows: len(rows) == 2),
    "queryMsgById": (
        "-i {offset_id}",
        lambda rows: rows["body"] == "letter 0" and rows["topic"] == "Orders",
    ),
    "queryMsgByKey": ("-t {topic} -k key1", lambda rows: [r["body"] for r in rows] == ["letter 1"]),
    "queryMsgByUniqueKey": ("-t {topic} -i {unique}", lambda rows: rows["body"] == "letter 0"),
    "queryMsgByOffset": (
        "-t {topic} -b embedded -i {queue} -o {offset}",
        lambda rows: [r["body"] for r in rows] == ["letter 0"],
    ),
    "queryMsgTraceById": ("-i {unique}", lambda rows: rows[0]["event"] == "sent"),
    "printMsg": ("-t {topic} -s TagA -d true", lambda rows: len(rows) == 3),
    "printMsgByQueue": (
        "-t {topic} -a embedded -i {queue}",
        lambda rows: rows[0]["body"] == "letter 0",
    ),
    "consumeMessage": (
        "-t {topic} -c 2",
        # Queues are read one after the other, and which of them is first is the producer's chance.
        lambda rows: len({r["body"] for r in rows} & {"letter 0", "letter 1", "letter 2"}) == 2,
    ),
    "sendMessage": (
        "-t {made} -p hello -k k1 -c TagB -b embedded -i 3",
        lambda rows: [(r["queue"], r["status"]) for r in rows] == [(3, "OK")],
    ),
    "sendMsgStatus": (
        "-b embedded -c 2 -s 64",
        lambda rows: [r["status"] for r in rows] == ["OK"] * 2,
    ),
    "checkMsgSendRT": (
        "-t {made} -a 3",
        lambda rows: all(r["ms"] > 0 for r in rows) and len(rows) == 3,
    ),
    "clusterRT": ("-a 2 -i 1", lambda rows: [(r["sent"], r["failed"]) for r in rows] == [(2, 0)]),
    "queryCq": ("-t {topic} -q {queue} -i 0 -c 1", lambda rows: rows[0]["log_offset"] >= 0),
    "clusterList": (
        "-m",
        lambda rows: [(r["broker"], r["state"]) for r in rows] == [("embedded", "up")],
    ),
    "brokerStatus": ("-b {broker}", lambda rows: "putTps" in {r["name"] for r in rows}),
    "brokerConsumeStats": ("-b {broker}", lambda rows: "billing" in {r["group"] for r in rows}),
    "getBrokerConfig": ("-c DefaultCluster", lambda rows: "brokerName" in {r["key"] for r in rows}),
    "updateBrokerConfig": (
        "-b {broker} -k fileReservedTime -v 47",
        lambda rows: [(r["after"], r["outcome"]) for r in rows] == [("47", "changed")],
    ),
    "cleanExpiredCQ": ("-b {broker}", lambda rows: [r["broker"] for r in rows] == ["embedded"]),
    "cleanUnusedTopic": ("-c DefaultCluster", lambda rows: rows[0]["outcome"] == "done"),
    "deleteExpiredCommitLog": ("", lambda rows: rows[0]["outcome"] == "done"),
    "wipeWritePerm": ("-b embedded", lambda rows: rows[0]["topics"] > 0),
    "addWritePerm": ("-b embedded", lambda rows: rows[0]["topics"] > 0),
    "updateKvConfig": ("-s NS -k {name} -v -1", lambda rows: rows[0]["after"] == "-1"),
    "deleteKvConfig": ("-s NS -k {name}", lambda rows: rows[0]["outcome"] == "deleted"),
    "getNamesrvConfig": ("", lambda rows: "orderMessageEnable" in {r["key"] for r in rows}),
    "updateNamesrvConfig": (
        "-k orderMessageEnable -v true",
        lambda rows: rows[0]["after"] == "true",
    ),
}

# What has to be done before a case, and what has to be undone after it.
BEFORE = {
    "skipAccumulatedMessage": (
        "resetOffsetByTime -g {made_group} -t {topic} -s 2020-01-01#00:00:00:000"
    ),
    "deleteKvConfig": "updateKvConfig -s NS -k {name} -v 1",
    "addWritePerm": "wipeWritePerm -b embedded",
}
AFTER = {"wipeWritePerm": "addWritePerm -b embedded"}


# Only brokers with access control do them: tests/unit/cli/test_cli_acl.py.
WITH_ACCOUNTS = {
    "updateAclConfig",
    "deleteAclConfig",
    "clusterAclConfigVersion",
    "updateGlobalWhiteAddr",
}


def test_every_command_that_is_done_here_has_a_case() -> None:
    assert {*CASES, *WITH_ACCOUNTS} == {row.name for row in ROWS if not row.instead}


@pytest.mark.parametrize("command", CASES)
def test_a_command(command: str, world: World, name: str) -> None:
    words, expected = CASES[command]
    if "{made}" in words:
        assert world("updateTopic", "-c", CLUSTER, "-t", f"T_{name}").code == 0
    if "{made_group}" in words:
        assert world("updateSubGroup", "-c", CLUSTER, "-g", f"g_{name}").code == 0
    first = world.sent[0]
    known = {
        "name": name,
        "made": f"T_{name}",
        "made_group": f"g_{name}",
        "topic": world.topic,
        "broker": world.broker,
        "offset_id": first.offset_msg_id,
        "unique": first.msg_id,
        "queue": str(first.queue.queue_id),
        "offset": str(first.queue_offset),
    }
    if command in BEFORE:
        world.rows(*BEFORE[command].format_map(known).split())
    done = [word.format_map(known) for word in words.split()]
    # Members and traces come a moment later; everything else must be right at once.
    later = {"queryMsgTraceById", "consumerStatus", "cloneGroupOffset", "brokerConsumeStats"}
    later |= {"consumerConnection", "producerConnection", "producer", "consumerProgress"}
    if command in later:
        world.until(expected, command, *done)
    else:
        rows = world.rows(command, *done)
        if command in AFTER:
            world.rows(*AFTER[command].format_map(known).split())
        assert expected(rows), rows


# --- what is wrong is text -------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, code, text",
    [
        ("topicRuote -t T", 2, "Did you mean 'topicRoute'?"),
        ("topicRoute", 2, "Missing option '-t'"),
        ("updateTopic -t T", 2, "give the target: -b or -c"),
        ("updateTopic -t T -b 127.0.0.1:1 -c C", 2, "give the target: -b or -c"),
        ("updateTopic -t T -c C -p 9", 2, "is no permission"),
        ("updateTopic -t T -c C -o maybe", 2, "maybe"),
        ("printMsg -t T -b yesterday", 2, "is no time"),
        ("resetOffsetByTime -g G -t T -s 17", 2, "is no time"),
        ("updateOrderConf -m put -t T", 2, "do not go together"),
        ("topicRoute -t bad/name", 2, "bad/name"),
        ("topicRoute -t Missing", 4, "`cosmo topic list`"),
        ("updateTopic -t T -b 127.0.0.1:9", 4, "there is no broker 127.0.0.1:9"),
        ("updateTopic -t T -c Nowhere", 4, "Nowhere"),
        ("getConsumerConfig -g nobody", 4, "no broker knows group nobody"),
        ("consumerStatus -g billing -i nobody", 4, "has no member nobody"),
        ("sendMessage -t Orders -p x -i 1", 1, "-b"),
        ("sendMessage -t Missing -p x", 4, "Missing"),
        ("help nothing", 2, "nothing"),
    ],
)
def test_errors(words: str, code: int, text: str, world: World) -> None:
    done = world(*words.split())
    assert (done.code, done.out) == (code, ""), done
    assert text in done.err


# --- effects ---------------------------------------------------------------------------------


def test_the_name_server_flag_wins(world: World) -> None:
    done = cosmo("127.0.0.1:1", "mqadmin", "topicRoute", "-n", world.namesrv, "-t", world.topic)
    assert done.code == 0, done
    done = cosmo("127.0.0.1:1", "mqadmin", "producer", "-n", world.namesrv, "-b", world.broker)
    assert done.code == 0, done


def test_tables_are_the_default(world: World) -> None:
    (head, row) = table(world.namesrv, "mqadmin", "topicRoute", "-t", world.topic)
    assert (head[0], row[0]) == ("BROKER", BROKER)
    (head, row) = table(world.namesrv, "mqadmin", "cleanExpiredCQ")
    assert (head, row) == (["BROKER", "OUTCOME"], [BROKER, "done"])


def test_a_topic_lives_and_dies(world: World, name: str) -> None:
    world.rows("updateTopic", "-b", world.broker, "-t", name, "-o", "true", "-w", "3", "-r", "3")
    (entry,) = world.rows("updateOrderConf", "-m", "get", "-t", name)
    assert entry["value"] == f"{BROKER}:3"
    world.rows("updateKvConfig", *_order(name), "-v", f"other:7;{BROKER}:3")
    world.rows("updateTopic", "-b", BROKER, "-t", name, "-o", "true", "-w", "5")
    (entry,) = world.rows("updateOrderConf", "-m", "get", "-t", name)
    assert entry["value"] == f"other:7;{BROKER}:5"
    world.rows("updateTopic", "-c", CLUSTER, "-t", name, "-o", "true", "-w", "4")
    (entry,) = world.rows("updateOrderConf", "-m", "get", "-t", name)
    assert entry["value"] == f"{BROKER}:4"
    (described,) = json.loads(cosmo(world.namesrv, "topic", "describe", name, "-o", "json").out)
    # As upstream: what is not given goes back to its default.
    assert (described["read_queues"], described["write_queues"]) == (8, 4)
    assert described["order"] is True
    world.rows("updateTopicPerm", "-c", CLUSTER, "-t", name, "-p", "2")
    assert world.rows("topicRoute", "-t", name)[0]["perm"] == "W"
    world.rows("updateOrderConf", "-m", "delete", "-t", name)
    assert world("updateOrderConf", "-m", "get", "-t", name).code == 4
    world.rows("deleteTopic", "-c", CLUSTER, "-t", name)
    assert world("topicRoute", "-t", name).code == 4


def _order(topic: str) -> list[str]:
    return ["-s", "ORDER_TOPIC_CONFIG", "-k", topic]


def test_unit_flags_reach_the_broker(world: World, name: str) -> None:
    world.rows("updateTopic", "-c", CLUSTER, "-t", name, "-u", "true", "-s", "true")
    with blocking.Admin(world.namesrv) as admin:
        (config,) = admin.topics.describe(name).values()
    assert config.topic_sys_flag == 3


def test_a_group_lives_and_dies(world: World, name: str) -> None:
    flags = "-s false -m true -d true -q 2 -r 5 -i 1 -w 3"
    world.rows("updateSubGroup", "-b", BROKER, "-g", name, *flags.split(), "-a", "false")
    found = {row["key"]: row["value"] for row in world.rows("getConsumerConfig", "-g", name)}
    assert found == {
        "brokerId": 1,
        "consumeBroadcastEnable": True,
        "consumeEnable": False,
        "consumeFromMinEnable": True,
        "groupName": name,
        "notifyConsumerIdsChangedEnable": False,
        "retryMaxTimes": 5,
        "retryQueueNums": 2,
        "whichBrokerWhenConsumeSlowly": 3,
    }
    world.rows("updateSubGroup", "-c", CLUSTER, "-g", name)
    found = {row["key"]: row["value"] for row in world.rows("getConsumerConfig", "-g", name)}
    assert (found["consumeEnable"], found["consumeBroadcastEnable"]) == (True, False)
    world.rows("resetOffsetByTime", "-g", name, "-t", world.topic, "-s", "now")
    lag = world.rows("consumerProgress", "-g", name)
    assert sum(row["offset"] for row in lag if row["topic"] == world.topic) == 3
    world.rows("deleteSubGroup", "-c", CLUSTER, "-g", name, "-r", "true")
    assert world("getConsumerConfig", "-g", name).code == 4
    assert world("consumerProgress", "-g", name).code == 4


def test_a_reset_without_force_only_goes_back(world: World, name: str) -> None:
    world.rows("updateSubGroup", "-c", CLUSTER, "-g", name)
    world.rows("resetOffsetByTime", "-g", name, "-t", world.topic, "-s", "1000000000000")
    moved = world.rows(
        "resetOffsetByTime", "-g", name, "-t", world.topic, "-s", "now", "-f", "false"
    )
    assert [row["offset"] for row in moved] == [0, 0]
    moved = world.rows(
        "resetOffsetByTime", "-g", name, "-t", world.topic, "-s", "now", "-f", "true"
    )
    assert sum(row["offset"] for row in moved) == 3


def test_a_message_is_handed_to_a_member(world: World) -> None:
    (client_id,) = {
        row["client_id"] for row in world.until(len, "consumerStatus", "-g", world.group)
    }
    (row,) = world.rows(
        "queryMsgById", "-i", world.sent[0].offset_msg_id, "-g", world.group, "-d", client_id
    )
    assert row["outcome"] == "CR_SUCCESS"
    (row,) = world.rows(
        "queryMsgByUniqueKey",
        "-t",
        world.topic,
        "-i",
        world.sent[0].msg_id,
        "-g",
        world.group,
        "-d",
        client_id,
    )
    assert row["outcome"] == "CR_SUCCESS"
    done = world("consumerStatus", "-g", world.group, "-s")
    assert done.code == 0 and "File " in done.out, done


def test_messages_by_tag_and_time(world: World, name: str) -> None:
    world.rows("updateTopic", "-c", CLUSTER, "-t", name, "-r", "1", "-w", "1")
    for tag, body in (("A", "one"), ("B", "two"), ("C", "three"), ("A", "four")):
        world.rows("sendMessage", "-t", name, "-p", body, "-c", tag)
    stored = world.rows("printMsg", "-t", name)
    assert [row["body"] for row in stored] == ["one", "two", "three", "four"]
    found = world.rows("printMsg", "-t", name, "-s", "A || C")
    assert [row["body"] for row in found] == ["one", "three", "four"]
    begin = str(stored[0]["store_timestamp"] + 3_600_000)
    assert world.rows("printMsg", "-t", name, "-b", begin) == []
    found = world.rows("printMsgByQueue", "-t", name, "-a", BROKER, "-i", "0", "-e", begin)
    assert len(found) == 4
    found = world.rows("consumeMessage", "-t", name, "-b", BROKER, "-i", "0", "-o", "2", "-c", "1")
    assert [row["body"] for row in found] == ["three"]
    (row,) = json.loads(
        cosmo(world.namesrv, "msg", "print", "-o", "json", "--count", "1", "--tag", "C", name).out
    )
    assert row["body"] == "three"


def test_writing_is_taken_away_and_given_back(world: World) -> None:
    wiped = world.rows("wipeWritePerm", "-b", BROKER)
    assert world.rows("topicRoute", "-t", world.topic)[0]["perm"] == "R"
    assert world.rows("addWritePerm", "-b", BROKER) == wiped
    assert world.rows("topicRoute", "-t", world.topic)[0]["perm"] == "RW"
