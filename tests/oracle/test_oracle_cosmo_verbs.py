"""The operators' commands against all kinds of clusters, with a real client attached."""

from __future__ import annotations

import json
import time
from typing import Any

from click.testing import CliRunner
from tests.oracle.client_kit import Target

from cosmodrome import blocking
from cosmodrome.cli.main import cosmo as program
from cosmodrome.client.values import Message


def cosmo(target: Target, *words: str, code: int = 0) -> Any:
    """What a command printed as JSON."""
    done = CliRunner().invoke(program, [*words, "-n", target.namesrv, "-o", "json"])
    assert done.exit_code == code, (words, done.stderr, done.exception)
    return json.loads(done.stdout) if done.stdout else done.stderr


def test_topics(target: Target, name: str) -> None:
    topic = f"V_{name}"
    made = cosmo(target, "topic", "create", topic, "-q", "3")
    assert [row["outcome"] for row in made] == ["created"]
    (broker,) = (row["broker"] for row in made)
    deadline = time.monotonic() + 60
    while topic not in {row["topic"] for row in cosmo(target, "topic", "list")}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    listed = {row["topic"]: row for row in cosmo(target, "topic", "list", "--all")}
    assert (listed[topic]["kind"], listed[topic]["read_queues"]) == ("normal", 3)
    assert listed["TBW102"]["kind"] == listed[broker]["kind"] == "system"
    described = cosmo(target, "topic", "describe", topic)
    assert [(row["broker"], row["write_queues"], row["messages"]) for row in described] == [
        (broker, 3, 0)
    ]
    assert [row["role"] for row in cosmo(target, "topic", "route", topic)] == ["master"]
    assert cosmo(target, "topic", "alter", topic, "--write-queues", "5")[0]["write_queues"] == 5
    assert "exists already" in cosmo(target, "topic", "create", topic, code=1)
    assert cosmo(target, "topic", "delete", topic, "--yes")[0]["outcome"] == "deleted"
    assert "`cosmo topic list`" in cosmo(target, "topic", "route", topic, code=4)


def test_cluster_brokers_and_name_servers(target: Target, name: str) -> None:
    (status,) = cosmo(target, "cluster", "status")
    assert (status["state"], status["role"]) == ("up", "master")
    assert status["version"][0] in "45"
    assert status["disk_used_percent"] is not None
    deadline = time.monotonic() + 60
    while status["in_per_s"] is None or status["out_per_s"] is None:  # upstream's are late
        assert time.monotonic() < deadline, status
        time.sleep(0.5)
        (status,) = cosmo(target, "cluster", "status")
    assert status["in_today"] >= 0 and status["out_today"] >= 0
    assert status["booted_ms"] > 1_700_000_000_000
    (setting,) = cosmo(target, "broker", "config", "get", "brokerName")
    assert setting["value"] == status["broker"]
    change = cosmo(target, "broker", "config", "set", "fileReservedTime=49", "--all")
    assert change[0]["after"] == "49"
    assert cosmo(target, "broker", "stats", "putTps")
    put = cosmo(target, "namesrv", "kv", "set", f"NS_{name}", "k", "v")
    assert put[0]["outcome"] == "set"
    assert cosmo(target, "namesrv", "kv", "list", f"NS_{name}")[0]["value"] == "v"
    assert cosmo(target, "namesrv", "kv", "delete", f"NS_{name}", "k", "--yes")
    assert "no entry" in cosmo(target, "namesrv", "kv", "get", f"NS_{name}", "k", code=4)
    assert cosmo(target, "namesrv", "config", "get")


def test_clients_and_flows(target: Target, name: str) -> None:
    topic, group = f"F_{name}", f"g_{name}"
    cosmo(target, "topic", "create", topic, "-q", "2")
    producer = blocking.Producer(target.namesrv, group=f"p_{name}")
    consumer = blocking.Consumer(target.namesrv, group=group, consume_from="first")
    with producer, consumer:
        for _ in range(5):
            producer.send(Message(topic, b"x"))
        consumer.subscribe(topic)
        for number, message in enumerate(consumer, start=1):
            message.ack()
            if number == 5:
                break
        clients = cosmo(target, "client", "list", "--group", group)
        assert [(row["role"], row["topics"]) for row in clients] == [("consumer", [topic])]
        stack = cosmo(target, "client", "stack", group)
        assert "Task" in stack["stack"]
        flows = cosmo(target, "topic", "stats", topic)
        assert [row["topic"] for row in flows] == [topic]
        assert flows[0]["in_per_s"] is not None
        seen = cosmo(target, "top")
        assert group in {row["group"] for row in seen["groups"]}
        assert topic in {row["topic"] for row in seen["topics"]}
