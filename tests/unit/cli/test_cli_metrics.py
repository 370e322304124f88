"""/metrics and logs of real processes: `cosmo up`, with workers, and a name server alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.test_cli_serve import running
from tests.unit.cli.workers_kit import FIRST, SECOND, Workers, until

from cosmodrome.cli.serve import worker_metrics
from cosmodrome.cli.serve.worker_link import Report
from cosmodrome.cli.serve.worker_metrics import WorkerMetrics
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.http.exposition import Exposition, Metric, Page, Sample
from cosmodrome.transport.http.health import HealthServer
from cosmodrome.wire import commands

OPEN = "application/openmetrics-text; version=1.0.0"


def scrape(port: int | str, accept: str = "") -> tuple[str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def families(text: str) -> list[str]:
    return re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)


async def send(address: tuple[str, int]) -> None:
    channel = Channel(*address)
    try:
        await channel.call(
            commands.SendMessageV2(
                producer_group="p",
                topic="T",
                default_topic="TBW102",
                default_topic_queue_nums=4,
                queue_id=0,
                sys_flag=0,
                born_timestamp=1,
                flag=0,
                body=b"hello",
            )
        )
    finally:
        await channel.close()


async def test_workers_are_shown_together(tmp_path: Path) -> None:
    node = Workers(tmp_path / "data")
    node.process._command += ["--log-format", "json"]
    with node:
        for port in node.ports.values():
            await send(("127.0.0.1", port))
        for accept in ("", OPEN):
            kind, text = await asyncio.to_thread(scrape, node.http_port, accept)
            assert kind.startswith("application/openmetrics" if accept else "text/plain")
            assert text.endswith("# EOF\n") == bool(accept) and text.count("# EOF") <= 1
            assert len(families(text)) == len(set(families(text))), "a family stands together"
            for name in (FIRST, SECOND):
                assert re.search(rf'^rocketmq_messages_in_total.*node_id="{name}".* 1$', text, re.M)
                assert f'cosmodrome_worker_scraped{{worker="{name}"}} 1\n' in text
                assert f'cosmodrome_worker_starts_total{{worker="{name}"}} 1\n' in text
            assert "cosmodrome_nameserver_brokers{" in text
            assert text.count("\nprocess_cpu_seconds_total{") == 3, "two workers and the supervisor"
        # Lines of the supervisor and of workers are objects, those of workers say whose.
        log = node.log_text()
        made = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        audits = [line for line in made if line.get("event") == "audit"]
        assert {line["worker"] for line in audits} == {FIRST, SECOND}
        assert all(line["fields"]["action"] == "topic_created" for line in audits)
        assert " | " not in log

        os.kill(node.pids()[SECOND], signal.SIGKILL)
        await until(lambda: "worker_died" in node.log_text())
        _, text = await asyncio.to_thread(scrape, node.http_port)
        assert f'cosmodrome_worker_scraped{{worker="{SECOND}"}} 0\n' in text
        assert f'cosmodrome_worker_scraped{{worker="{FIRST}"}} 1\n' in text


def test_a_name_server_alone(tmp_path: Path) -> None:
    home = {"ROCKETMQ_HOME": str(tmp_path)}
    words = ["namesrv", "run", "--port", "0", "--http-port", "0"]
    with running(*words, env=home) as namesrv:
        found = re.search(r"health http://127.0.0.1:(\d+)/readyz", namesrv.say("ready"))
        assert found is not None
        _, text = scrape(found[1])
        assert re.search(r'^cosmodrome_ready\{cluster="",node_type="nameserver".* 1$', text, re.M)
        with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/readyz", timeout=60) as answer:
            assert answer.status == 200


def test_a_broker_alone_logs_objects(tmp_path: Path) -> None:
    words = ["broker", "run", "--port", "0", "--http-port", "0", "--data", str(tmp_path / "d")]
    with running(*words, "-n", "127.0.0.1:1", "--log-format", "json") as broker:
        found = re.search(r"health http://127.0.0.1:(\d+)/readyz", broker.say("ready"))
        assert found is not None
        _, text = scrape(found[1])
        assert re.search(r'^cosmodrome_ready\{.*node_type="broker".* 0$', text, re.M), (
            "it is not registered anywhere"
        )
        broker.child.terminate()
        code, errors = broker.finish()
    assert code == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    started = next(line for line in lines if line.get("event") == "broker_started")
    assert started["fields"]["id"] == 0


# --- the supervisor's page, with workers that misbehave ------------------------------------------


class Child:
    def __init__(self, name: str, http: int) -> None:
        self.name = name
        self.starts = 2
        self.report = Report(True, "ready", http=http) if http >= 0 else None


class WorkerPage:
    """A worker's page as it comes."""

    def __init__(self, text: str) -> None:
        self.health = HealthServer({}, pages={"/metrics": self.page})
        self.text = text
        self.accepted = ""

    async def page(self, accept: str) -> Page:
        self.accepted = accept
        return Page("text/plain", [self.text.encode()])


def page_of(worker: str) -> str:
    return (
        "# HELP app_x Xs.\n# TYPE app_x gauge\n"
        f'app_x{{node_id="{worker}"}} 1\n'
        "# HELP app_y Ys.\n# TYPE app_y gauge\n"
        f'app_y{{node_id="{worker}"}} 2\n'
    )


class Own:
    def __init__(self) -> None:
        self.labels = {"node_id": "own"}

    async def prepare(self) -> None:
        pass

    def walk(self) -> Any:
        yield Sample(Metric("app_y", "gauge", "Ys."), (), 3)


async def test_pages_are_merged_by_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_metrics, "ASK_SECONDS", 3.0)
    pages = [WorkerPage(page_of("a")), WorkerPage(page_of("b"))]
    writers: list[asyncio.StreamWriter] = []
    hanging = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    ports = [await one.health.listen("127.0.0.1", 0) for one in pages]
    children: list[Any] = [
        Child("a", ports[0]),
        Child("dead", 1),
        Child("b", ports[1]),
        Child("young", -1),
        Child("hangs", hanging.sockets[0].getsockname()[1]),
    ]
    own = Exposition(lambda: [Own()], lambda: 100)
    try:
        page = await WorkerMetrics(children, own).page(OPEN)
        text = b"".join(page.chunks).decode()
        assert 'TYPE app_x gauge\napp_x{node_id="a"} 1\napp_x{node_id="b"} 1\n' in text
        merged = 'app_y{node_id="own"} 3\napp_y{node_id="a"} 2\napp_y{node_id="b"} 2\n'
        assert f"# HELP app_y Ys.\n# TYPE app_y gauge\n{merged}" in text
        assert text.endswith("# EOF\n") and text.count("# EOF") == 1
        scraped = re.findall(r'cosmodrome_worker_scraped\{worker="(\w+)"\} (\d)', text)
        assert dict(scraped) == {"a": "1", "dead": "0", "b": "1", "young": "0", "hangs": "0"}
        assert pages[0].accepted.startswith("application/openmetrics-text")

        monkeypatch.setattr(worker_metrics, "TEXT_BYTES_MAX", len(page_of("a")) + 10)
        page = await WorkerMetrics(children, None).page()
        text = b"".join(page.chunks).decode()
        assert 'app_x{node_id="a"} 1' in text and 'app_x{node_id="b"}' not in text
        assert 'cosmodrome_worker_scraped{worker="b"} 0' in text, "too much is said to be left out"
    finally:
        for writer in writers:
            writer.transport.abort()
        hanging.close()
        await hanging.wait_closed()
        for one in pages:
            await one.health.stop()
