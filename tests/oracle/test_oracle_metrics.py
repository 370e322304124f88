"""Prometheus' own tool reads our page, our rules and their tests; a Java client is told as one."""

from __future__ import annotations

import os
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from peers.clients import Client, Consumer, send
from peers.node import CosmoNode
from peers.prometheus import promtool
from peers.resolve import ToolMissing
from tests.oracle.oracle_checks import Cluster, letters

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"


@pytest.fixture(autouse=True)
def tool() -> None:
    try:
        promtool("--version")
    except ToolMissing as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))


@pytest.fixture
def node(cluster: Cluster) -> CosmoNode:
    if not isinstance(cluster.server, CosmoNode):
        pytest.skip("upstream's brokers of 4.9 tell no metrics")
    return cluster.server


def scrape(node: CosmoNode) -> str:
    url = f"http://127.0.0.1:{node.http_port}/metrics"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def until(look: Callable[[], bool], timeout_s: float = 30) -> None:
    ends = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < ends, "it did not happen in time"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
        ("check", "config", "prometheus.yml"),
    ],
    ids=lambda words: " ".join(words),
)
def test_rules(words: tuple[str, ...]) -> None:
    status, said = promtool(*words, cwd=DEPLOY)
    assert status == 0, said
    assert "SUCCESS" in said


def test_the_tool_finds_mistakes(tmp_path: Path) -> None:
    wrong = (
        (DEPLOY / "alerts.yml").read_text().replace("cosmodrome_ready == 0", "cosmodrome_ready ==")
    )
    (tmp_path / "alerts.yml").write_text(wrong)
    assert promtool("check", "rules", "alerts.yml", cwd=tmp_path)[0] != 0
    assert promtool("check", "metrics", text="# TYPE x counter\nx 1\n")[0] != 0


def test_a_scrape_with_a_java_client_attached(
    node: CosmoNode, cluster: Cluster, java: Client, topic: str, group: str
) -> None:
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        send(java, cluster.namesrv, topic, f"p_{group}", "sync", letters(8))
        consumer.receive(8)
        lag = re.compile(
            rf'^rocketmq_consumer_lag_messages\{{.*group="{group}",topic="{topic}".*\}} 0$', re.M
        )
        until(lambda: lag.search(scrape(node)) is not None)
        text = scrape(node)
    status, said = promtool("check", "metrics", text=text)
    assert (status, said) == (0, "")
    members = rf'^rocketmq_consumer_connections\{{.*consumer_group="{group}",(.*)\}} 1$'
    found = re.search(members, text, re.M)
    assert found is not None
    for label in ('language="java"', 'version="v4_9_8"', 'consume_mode="push"'):
        assert label in found[1]
    out = rf'^rocketmq_messages_out_total\{{.*topic="{topic}",consumer_group="{group}".*\}} 8$'
    assert re.search(out, text, re.M) is not None
    seconds = rf'^cosmodrome_consumer_lag_seconds\{{.*group="{group}",topic="{topic}".*\}} 0(\.0)?$'
    assert re.search(seconds, text, re.M) is not None


def test_a_scrape_of_workers(node: CosmoNode, tmp_path: Path) -> None:
    with CosmoNode(tmp_path / "data", options=["--workers", "2"]) as workers:
        text = scrape(workers)
    assert text.count("\ncosmodrome_worker_scraped{") == 2
    status, said = promtool("check", "metrics", text=text)
    assert (status, said) == (0, "")
