"""Consumers that ask for what they want: pull and lite pull, sizes of answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

import pytest
from peers.clients import GO, Client, Letter, Line, run, send
from peers.raw import call, committed_offset, create_topic
from tests.oracle.oracle_checks import Cluster, body

FOUND = "FOUND"
ON_JAVA = os.environ.get("ORACLE_TARGET") == "java"


def _steps(
    client: Client, cluster: Cluster, verb: list[str], steps: list[dict[str, object]]
) -> list[Line]:
    words = [verb[0], cluster.namesrv, *verb[1:]]
    return run(client, words, "".join(f"{json.dumps(step)}\n" for step in steps))


def _pull(queue: int, offset: int, count: int) -> dict[str, object]:
    return {"do": "pull", "queue": queue, "offset": offset, "count": count}


def _fill(java: Client, cluster: Cluster, topic: str, group: str) -> None:
    """Queue 0: 100 small ones; 1: 24 of 30 KiB; 2: one of 300 KiB, then a small one."""
    sent = [Letter(b"small %d" % number, shard=0) for number in range(100)]
    sent += [Letter(os.urandom(30 * 1024), shard=1) for _ in range(24)]
    sent += [Letter(os.urandom(300 * 1024), shard=2), Letter(b"after", shard=2)]
    send(java, cluster.namesrv, topic, f"p_{group}", "orderly+plain", sent)


def test_sizes_of_pulls(java: Client, cluster: Cluster, topic: str, group: str) -> None:
    _fill(java, cluster, topic, group)
    counts = [_pull(0, 0, 1), _pull(0, 0, 32), _pull(0, 1, 1000), _pull(0, 90, 32)]
    sizes = [_pull(1, 0, 1000), _pull(1, 0, 3), _pull(2, 0, 32), _pull(2, 1, 32)]
    edges = [_pull(0, 100, 32), _pull(0, 105, 32), _pull(3, 0, 32), _pull(3, 5, 32)]
    lines = _steps(java, cluster, ["pulls", topic, group], counts + sizes + edges)
    shown = [(line["status"], line["count"], line["first"], line["next"]) for line in lines]
    # Who asks for more than 32 gets more from this broker (ARCHITECTURE.md, Decisions).
    many = (FOUND, 32, 1, 33) if ON_JAVA else (FOUND, 99, 1, 100)
    assert shown[:4] == [
        *((FOUND, 1, 0, 1), (FOUND, 32, 0, 32), many, (FOUND, 10, 90, 100)),
    ]
    assert {(line["min"], line["max"]) for line in lines[:4]} == {(0, 100)}
    # Not more than 256 KiB; a larger message comes alone.
    assert shown[4:8] == [
        *((FOUND, 8, 0, 8), (FOUND, 3, 0, 3)),
        *((FOUND, 1, 0, 1), (FOUND, 1, 1, 2)),
    ]
    assert 240 * 1024 < lines[4]["bytes"] <= 256 * 1024 < lines[6]["bytes"]
    assert shown[8:] == [
        *(("NO_NEW_MSG", 0, None, 100), ("OFFSET_ILLEGAL", 0, None, 100)),
        *(("NO_NEW_MSG", 0, None, 0), ("OFFSET_ILLEGAL", 0, None, 0)),
    ]


def test_sizes_of_pulls_from_disk(java: Client, cold: Cluster, name: str, group: str) -> None:
    topic = f"T_{name}"
    create_topic(cold.namesrv_port, cold.broker_port, topic, 4)
    _fill(java, cold, topic, group)
    asks = [_pull(0, 0, 32), _pull(0, 8, 1000), _pull(0, 0, 3), _pull(1, 0, 32), _pull(2, 0, 32)]
    lines = _steps(java, cold, ["pulls", topic, group], asks)
    # Eight messages or 64 KiB.
    assert [(line["status"], line["count"], line["next"]) for line in lines] == [
        *((FOUND, 8, 8), (FOUND, 8, 16), (FOUND, 3, 3), (FOUND, 2, 2), (FOUND, 1, 1)),
    ]


def test_pull_consumer_keeps_its_place(
    java: Client, ready: Callable[[Client], Client], cluster: Cluster, topic: str, group: str
) -> None:
    send(
        java,
        cluster.namesrv,
        topic,
        f"p_{group}",
        "orderly",
        [Letter(b"%d" % number, shard=1) for number in range(9)],
    )
    time.sleep(2)  # upstream's broker takes the message nearest to a time
    between_ms = int(time.time() * 1000)
    late = [Letter(b"late %d" % number, shard=1) for number in range(3)]
    send(ready(GO), cluster.namesrv, topic, f"p_{group}", "orderly", late)
    steps: list[dict[str, object]] = [
        {"do": "min", "queue": 1},
        {"do": "max", "queue": 1},
        {"do": "search", "queue": 1, "at_ms": between_ms},
        {"do": "search", "queue": 1, "at_ms": 1},
        {"do": "commit", "queue": 1, "offset": 7},
        {"do": "fetch", "queue": 1},
        {"do": "commit", "queue": 1, "offset": 4},
        {"do": "fetch", "queue": 1},
    ]
    lines = _steps(java, cluster, ["pulls", topic, group], steps)
    assert [line.get("offset") for line in lines] == [0, 12, 9, 0, None, 7, None, 4]
    assert committed_offset(cluster.broker_port, group, topic, 1) == 4


@pytest.mark.parametrize("mode", ["assign", "subscribe"])
def test_lite_pull_seeks_and_commits(
    mode: str, java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    sent = [Letter(b"%d" % number, shard=0) for number in range(20)]
    send(java, cluster.namesrv, topic, f"p_{group}", "orderly", sent)
    poll: dict[str, object] = {"do": "poll", "ms": 10_000}
    seek: dict[str, object] = {"do": "seek", "queue": 0, "offset": 15}
    committed: dict[str, object] = {"do": "committed", "queue": 0}
    steps: list[dict[str, object]] = [
        {"do": "queues"},
        poll,
        poll,  # ten at a time
        {"do": "commit"},
        committed,
        seek,
        poll,
        {"do": "commit"},
        committed,
        {"do": "begin", "queue": 0},
        poll,
        {"do": "end", "queue": 0},
        {"do": "poll", "ms": 1_000},
    ]
    lines = _steps(java, cluster, ["lite", topic, group, mode], steps)
    answers = [line for line in lines if line["event"] not in ("message", "started")]
    assert answers[0]["count"] == 4
    polls = [line["count"] for line in answers if line["event"] == "poll"]
    assert polls == [10, 10, 5, 10, 0]
    assert [body(line) for line in lines if line["event"] == "message"] == [
        b"%d" % number for number in [*range(20), *range(15, 20), *range(10)]
    ]
    assert [line["offset"] for line in answers if line["event"] == "committed"] == [20, 20]
    assert committed_offset(cluster.broker_port, group, topic, 0) == 20


def test_lite_pull_of_a_newer_client_is_a_pull(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    """Clients from 5.0 on send code 361; a 4.9 broker does not know it."""
    if ON_JAVA:
        pytest.skip("upstream's broker knows code 361 from 5.0 on")
    sent = [Letter(b"%d" % number, shard=0) for number in range(5)]
    send(java, cluster.namesrv, topic, f"p_{group}", "orderly", sent)
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": "0",
        "queueOffset": "1",
        "maxMsgNums": "32",
        "sysFlag": str(4 | 16),
        "commitOffset": "0",
        "suspendTimeoutMillis": "1000",
        "subscription": "*",
        "subVersion": "1",
    }
    lite = call(cluster.broker_port, 361, fields)
    assert lite[0] == 0
    assert lite[1]["nextBeginOffset"] == "5"
    assert len(lite[3]) > 0
    assert lite == call(cluster.broker_port, 11, fields)
