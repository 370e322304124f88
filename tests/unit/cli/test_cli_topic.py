"""`cosmo topic …` against a node in this process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import count
from typing import get_args

import pytest
from msgspec.structs import fields
from tests.unit.cli.operating_kit import cosmo, ghost, in_all_forms, rows, table

from cosmodrome import blocking
from cosmodrome.cli.operate import config_options
from cosmodrome.client.values import Message
from cosmodrome.errors import CosmodromeError
from cosmodrome.wire.bodies import QUEUES_MAX, Body, SubscriptionGroupConfig, TopicConfig

_numbers = count(1)


@pytest.fixture(scope="module")
def node() -> Iterator[blocking.Node]:
    with blocking.embedded() as node:
        yield node


@pytest.fixture(scope="module")
def namesrv(node: blocking.Node) -> str:
    return node.namesrv


@pytest.fixture
def topic(namesrv: str) -> str:
    name = f"Topic{next(_numbers)}"
    assert cosmo(namesrv, "topic", "create", name, "-q", "4").code == 0
    return name


def send(node: blocking.Node, topic: str, number: int) -> None:
    with blocking.Producer(node.namesrv, group="senders") as producer:
        for _ in range(number):
            producer.send(Message(topic, b"x"))


# --- forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("list",),
        ("list", "--all"),
        ("describe", "{}"),
        ("describe", "{}", "--queues"),
        ("route", "{}"),
        ("stats",),
        ("stats", "{}"),
        ("create", "Another", "--dry-run"),
        ("alter", "{}", "--queues", "9", "--dry-run"),
        ("delete", "{}", "--dry-run"),
    ],
    ids=" ".join,
)
def test_every_form_says_the_same(words: tuple[str, ...], namesrv: str, topic: str) -> None:
    found = in_all_forms(namesrv, "topic", *(word.format(topic) for word in words))
    assert topic in json.dumps(found) or "Another" in json.dumps(found)


# --- looking ---------------------------------------------------------------------------------


def test_list_leaves_out_what_is_not_the_users(namesrv: str, topic: str) -> None:
    shown = {row["topic"]: row for row in rows(namesrv, "topic", "list")}
    assert shown[topic] == {
        "topic": topic,
        "kind": "normal",
        "brokers": 1,
        "read_queues": 4,
        "write_queues": 4,
        "perm": "RW",
        "order": False,
        "broker_names": ["embedded"],
    }
    assert {row["kind"] for row in shown.values()} == {"normal"}
    everything = {row["topic"]: row["kind"] for row in rows(namesrv, "topic", "list", "--all")}
    assert everything["embedded"] == everything["DefaultCluster_REPLY_TOPIC"] == "system"
    assert everything["SCHEDULE_TOPIC_XXXX"] == "system"


def test_the_table_of_topics(namesrv: str) -> None:
    cosmo(namesrv, "topic", "create", "Golden", "-q", "4", "--perm", "R")
    text = cosmo(namesrv, "topic", "list").out
    cosmo(namesrv, "topic", "delete", "Golden", "--yes")
    lines = [line for line in text.splitlines() if re.match("TOPIC|Golden", line)]
    assert [re.sub(" {2,}", "  ", line) for line in lines] == [
        "TOPIC  KIND  BROKERS  READ QUEUES  WRITE QUEUES  PERM  ORDER",
        "Golden  normal  1  4  4  R  no",
    ]


def test_describe_counts_messages(node: blocking.Node, topic: str) -> None:
    send(node, topic, 5)
    found = rows(node.namesrv, "topic", "describe", topic)
    assert len(found) == 1
    row = found[0]
    assert (row["messages"], row["broker"], row["cluster"]) == (5, "embedded", "DefaultCluster")
    assert row["address"] == node.broker_address
    assert row["last_store_ms"] > 1_700_000_000_000
    assert row["last_store"].startswith("20")
    queues = rows(node.namesrv, "topic", "describe", topic, "--queues")
    assert [one["queue"] for one in queues] == [0, 1, 2, 3]
    assert sum(one["max_offset"] - one["min_offset"] for one in queues) == 5
    assert all((one["last_store_ms"] is None) == (one["messages"] == 0) for one in queues)


def test_the_table_of_a_route(node: blocking.Node, topic: str) -> None:
    assert table(node.namesrv, "topic", "route", topic) == [
        ["BROKER", "CLUSTER", "ID", "ROLE", "ADDRESS", "READ QUEUES", "WRITE QUEUES", "PERM"],
        ["embedded", "DefaultCluster", "0", "master", node.broker_address, "4", "4", "RW"],
    ]


def test_stats_have_a_row_for_each_group(node: blocking.Node, topic: str) -> None:
    send(node, topic, 3)
    assert [row["group"] for row in rows(node.namesrv, "topic", "stats", topic)] == [None]
    with blocking.Consumer(node.namesrv, group=f"G_{topic}", consume_from="first") as consumer:
        consumer.subscribe(topic)
        for number, message in enumerate(consumer, start=1):
            message.ack()
            if number == 3:
                break
    found = rows(node.namesrv, "topic", "stats", topic)
    assert [(row["topic"], row["group"]) for row in found] == [(topic, f"G_{topic}")]
    assert found[0].keys() == {"topic", "group", "in_per_s", "out_per_s", "in_24h", "out_24h"}
    described = rows(node.namesrv, "topic", "describe", topic)
    assert described[0]["groups"] == [f"G_{topic}"]


# --- changing --------------------------------------------------------------------------------


def test_create_says_what_it_made_and_leaves_what_is_there(namesrv: str) -> None:
    name = f"Made{next(_numbers)}"
    words = ("topic", "create", name, "--read-queues", "3", "--write-queues", "5", "--perm", "w")
    would = rows(namesrv, *words, "--dry-run")
    assert would[0]["outcome"] == "would be created"
    assert cosmo(namesrv, "topic", "describe", name).code == 4
    made = rows(namesrv, *words)
    assert made == [
        {
            "topic": name,
            "broker": "embedded",
            "outcome": "created",
            "read_queues": 3,
            "write_queues": 5,
            "perm": "W",
            "order": False,
        }
    ]
    again = cosmo(namesrv, "topic", "create", name)
    assert again.code == 1
    assert f"cosmo topic alter {name}" in again.err
    assert again.out == ""
    there = rows(namesrv, "topic", "create", name, "--if-not-exists")
    assert (there[0]["outcome"], there[0]["read_queues"]) == ("exists", 3)


def test_an_ordered_topic_is_known_to_the_name_servers(namesrv: str) -> None:
    name = f"Ordered{next(_numbers)}"
    done = cosmo(namesrv, "topic", "create", name, "-q", "2", "--order")
    assert done.code == 0 and "orderMessageEnable=true" in done.err
    assert rows(namesrv, "topic", "describe", name)[0]["order"] is True
    key = ("namesrv", "kv", "get", "ORDER_TOPIC_CONFIG", name)
    assert rows(namesrv, *key)[0]["value"] == "embedded:2"
    assert rows(namesrv, "topic", "route", name)[0]["order_config"] is None
    assert cosmo(namesrv, "namesrv", "config", "set", "orderMessageEnable=true").code == 0
    assert rows(namesrv, "topic", "route", name)[0]["order_config"] == "embedded:2"
    assert cosmo(namesrv, "topic", "alter", name, "--no-order").code == 0
    assert cosmo(namesrv, *key).code == 4
    assert "orderMessageEnable" not in cosmo(namesrv, "topic", "alter", name, "--order").err
    assert rows(namesrv, *key)[0]["value"] == "embedded:2"


def test_alter_changes_what_options_name(namesrv: str, topic: str) -> None:
    done = cosmo(namesrv, "topic", "alter", topic, "--queues", "6", "--dry-run")
    assert "would be changed" in done.out
    assert "read_queues 4 → 6, write_queues 4 → 6" in done.err
    assert rows(namesrv, "topic", "describe", topic)[0]["read_queues"] == 4
    assert rows(namesrv, "topic", "alter", topic, "--queues", "6")[0]["outcome"] == "changed"
    assert rows(namesrv, "topic", "alter", topic, "--queues", "6")[0]["outcome"] == "unchanged"
    changed = rows(namesrv, "topic", "alter", topic, "--write-queues", "2", "--perm", "4")[0]
    assert (changed["read_queues"], changed["write_queues"], changed["perm"]) == (6, 2, "R")
    described = rows(namesrv, "topic", "describe", topic)[0]
    assert (described["read_queues"], described["write_queues"], described["perm"]) == (6, 2, "R")
    assert cosmo(namesrv, "topic", "alter", topic).code == 2
    assert cosmo(namesrv, "topic", "alter", topic, "-q", "7", "-b", "nobody").code == 4


def test_queues_are_not_hidden_from_consumers_without_a_yes(namesrv: str, topic: str) -> None:
    words = ("topic", "alter", topic, "--read-queues", "2")
    refused = cosmo(namesrv, *words)
    assert refused.code == 2
    assert "beyond the first 2" in refused.err and "--yes" in refused.err
    assert rows(namesrv, "topic", "describe", topic)[0]["read_queues"] == 4
    assert cosmo(namesrv, *words, "--yes").code == 0
    assert rows(namesrv, "topic", "describe", topic)[0]["read_queues"] == 2


def test_delete_needs_a_yes_and_says_what_goes(node: blocking.Node, topic: str) -> None:
    send(node, topic, 2)
    words = ("topic", "delete", topic)
    assert rows(node.namesrv, *words, "--dry-run")[0]["messages"] == 2
    refused = cosmo(node.namesrv, *words)
    assert refused.code == 2
    assert f"topic {topic} with 2 messages will be deleted on embedded" in refused.err
    assert rows(node.namesrv, *words, "--yes")[0]["outcome"] == "deleted"
    gone = cosmo(node.namesrv, *words, "--yes")
    assert gone.code == 4
    system = cosmo(node.namesrv, "topic", "delete", "TBW102", "--yes")
    assert system.code == 1 and "belongs to the system" in system.err


# --- what goes wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["describe", "route", "stats", "alter", "delete"])
def test_an_unknown_topic_ends_with_4_and_the_next_step(verb: str, namesrv: str) -> None:
    cosmo(namesrv, "topic", "create", "Invoices")
    more = ("--perm", "R") if verb == "alter" else ("--yes",) if verb == "delete" else ()
    done = cosmo(namesrv, "topic", verb, "Invoice", *more)
    assert done.code == 4
    assert done.out == ""
    assert "did you mean Invoices?" in done.err
    assert "`cosmo topic list`" in done.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("create", "bad topic"), "not allowed"),
        (("create", "x", "--perm", "read"), "RW, R, W, NONE"),
        (("create", "x", "-q", "0"), "65535"),
        (("describe",), "Missing argument"),
        (("lists",), "list"),
        (("list", "-o", "xml"), "jsonl"),
        (("list", "--watch", "soon"), "--watch=2"),
    ],
)
def test_wrong_usage_ends_with_2(words: tuple[str, ...], text: str, namesrv: str) -> None:
    done = cosmo(namesrv, "topic", *words)
    assert done.code == 2
    assert text in done.err
    assert done.out == ""


def test_the_most_queues_are_those_that_brokers_take(namesrv: str) -> None:
    assert cosmo(namesrv, "topic", "create", "Widest", "-q", str(QUEUES_MAX)).code == 0
    assert cosmo(namesrv, "topic", "create", "Wider", "-q", str(QUEUES_MAX + 1)).code == 2
    with blocking.Admin(namesrv) as admin:
        with pytest.raises(CosmodromeError, match="readQueueNums"):
            admin.topics.create("Wider", queues=QUEUES_MAX + 1)
        admin.topics.delete("Widest")


@pytest.mark.parametrize(
    ("group", "config", "flags"),
    [
        ("topic", TopicConfig, config_options.TOPIC_FLAGS),
        ("group", SubscriptionGroupConfig, config_options.GROUP_FLAGS),
    ],
)
def test_help_of_options_is_what_the_fields_mean(
    group: str, config: type[Body], flags: dict[str, str]
) -> None:
    meant = {field.name: get_args(field.type)[1] for field in fields(config) if field.name in flags}
    for verb in ("create", "alter"):
        text = " ".join(cosmo("127.0.0.1:1", group, verb, "--help").out.split())
        for name, flag in flags.items():
            assert flag.partition("/")[0] in text and meant[name].description in text


def test_an_unknown_cluster_or_broker_is_not_found(namesrv: str) -> None:
    assert cosmo(namesrv, "topic", "create", "Nowhere", "-b", "nobody").code == 4
    done = cosmo(namesrv, "topic", "create", "Nowhere", "-c", "nothing")
    assert done.code == 4 and "DefaultCluster" in done.err


def test_no_name_server_ends_with_3() -> None:
    done = cosmo("127.0.0.1:1", "topic", "list")
    assert done.code == 3
    assert "127.0.0.1:1" in done.err


def test_a_silent_broker_makes_figures_unknown(namesrv: str, topic: str) -> None:
    with ghost(namesrv, topics=(topic, "OnlyThere")):
        listed = cosmo(namesrv, "topic", "list", "-o", "jsonl")
        assert listed.code == 7
        assert "ghost" in listed.err
        found = {row["topic"]: row for row in map(json.loads, listed.out.splitlines())}
        assert found[topic]["brokers"] is None and found[topic]["read_queues"] == 4
        assert found["OnlyThere"]["read_queues"] is None
        shown = cosmo(namesrv, "topic", "list").out
        line = next(line for line in shown.splitlines() if line.startswith("OnlyThere"))
        assert line.split()[2:] == ["unknown"] * 5

        counted = cosmo(namesrv, "topic", "stats", topic, "-o", "json")
        assert counted.code == 7
        assert json.loads(counted.out)[0]["in_per_s"] is None

        described = cosmo(namesrv, "topic", "describe", "OnlyThere")
        assert described.code == 3 and described.out == ""
        partly = cosmo(namesrv, "topic", "create", "HalfMade", "-o", "json")
        assert partly.code == 7 and "ghost" in partly.err
        outcomes = {row["broker"]: row["outcome"] for row in json.loads(partly.out)}
        assert outcomes == {"embedded": "created", "ghost": "failed"}
        assert cosmo(namesrv, "topic", "create", "OnGhost", "-b", "ghost").code == 3


def test_without_a_broker_the_error_says_so() -> None:
    with blocking.embedded() as node:
        namesrv = node.namesrv
        node.stop_broker()
        for words in (("describe", "T"), ("create", "T"), ("delete", "T", "--yes")):
            done = cosmo(namesrv, "topic", *words)
            assert done.code == 3, words
            assert "no broker is registered" in done.err
