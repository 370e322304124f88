"""`cosmo filtersrv` as a process beside a node, and its settings."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from cosmodrome.cli.main import cosmo
from cosmodrome.cli.support.settings import for_filterserver
from cosmodrome.env.options import FilterServerOptions
from cosmodrome.errors import ConfigError, Refused
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import commands

WAIT_S = 90
FILTERS = """
import time

def hang(message):
    while True:
        time.sleep(1)

FILTERS = {"acme.All": lambda message: True, "acme.Hang": hang}
"""


class Process:
    def __init__(self, *words: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "cosmodrome.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )

    def say(self, until: str) -> str:
        assert self.child.stdout is not None
        seen = ""
        for line in self.child.stdout:
            seen += line
            if until in line:
                return seen
        raise AssertionError(f"ended early: {seen}\n{self.finish()[1]}")

    def finish(self) -> tuple[int, str]:
        _, errors = self.child.communicate(timeout=WAIT_S)
        return self.child.returncode, errors


@contextlib.contextmanager
def running(*words: str) -> Iterator[Process]:
    process = Process(*words)
    try:
        yield process
    finally:
        if process.child.poll() is None:
            process.child.kill()
        process.child.communicate()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    words = ("up", "--namesrv-port", "0", "--broker-port", "0", "--http-port", "0")
    with running(*words, "--data", str(tmp_path / "data")) as node:
        found = re.search(r"broker\s+(127\.0\.0\.1:\d+)", node.say("Ctrl-C"))
        assert found
        yield found[1]


@pytest.fixture
def filters(tmp_path: Path) -> Path:
    folder = tmp_path / "filters"
    folder.mkdir()
    (folder / "mine.py").write_text(FILTERS)
    return folder


def status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def address_of(text: str) -> str:
    found = re.search(r"ready on (127\.0\.0\.1:\d+)", text)
    assert found, text
    return found[1]


async def choose(address: str, name: str) -> None:
    host, port = address.split(":")
    channel = Channel(host, int(port))
    try:
        await channel.call(
            commands.RegisterMessageFilterClass(
                consumer_group="g", topic="T", class_name=name, class_crc=0
            )
        )
    finally:
        await channel.close()


async def send_and_pull(broker: str, address: str) -> None:
    """One message into the broker, and the pull of it through the filter server."""
    sender, puller = (Channel("127.0.0.1", int(a.split(":")[1])) for a in (broker, address))
    try:
        await sender.call(
            commands.SendMessageV2(
                producer_group="p",
                topic="T",
                default_topic="TBW102",
                default_topic_queue_nums=1,
                queue_id=0,
                sys_flag=0,
                born_timestamp=1,
                flag=0,
                body=b"x",
            )
        )
        await puller.call(
            commands.PullMessage(
                consumer_group="g",
                topic="T",
                queue_id=0,
                queue_offset=0,
                max_msg_nums=1,
                sys_flag=8,
                commit_offset=0,
                suspend_timeout_millis=0,
                sub_version=0,
            ),
            timeout_ms=20_000,
        )
    finally:
        await sender.close()
        await puller.close()


def test_it_says_where_it_is_reloads_and_stops(broker: str, filters: Path) -> None:
    words = ("--broker", broker, "--filters", str(filters), "--http-port", "0")
    with running("filtersrv", *words) as server:  # `run` is understood
        text = server.say("ready")
        address = address_of(text)
        assert "acme.All, acme.Hang" in text
        http = re.search(r"health (http://[^/]+)/readyz", text)
        assert http, text
        assert [status(http[1] + path) for path in ("/livez", "/readyz", "/startupz")] == [200] * 3
        asyncio.run(choose(address, "acme.All"))
        (filters / "more.py").write_text("FILTERS = {'acme.Later': lambda message: True}\n")
        with pytest.raises(Refused, match="not installed"):
            asyncio.run(choose(address, "acme.Later"))
        server.child.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                asyncio.run(choose(address, "acme.Later"))
                break
            except Refused:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        server.child.send_signal(signal.SIGTERM)
        code, errors = server.finish()
    assert code == 0, errors
    assert "Traceback" not in errors


def test_a_filter_that_hangs_does_not_hold_the_process(broker: str, filters: Path) -> None:
    words = ("--broker", broker, "--filters", str(filters), "--set", "filterTimeoutMillis=300")
    with running("filtersrv", "run", *words) as server:
        address = address_of(server.say("ready"))
        asyncio.run(choose(address, "acme.Hang"))
        with pytest.raises(Refused, match=r"acme\.Hang did not answer within 300 ms"):
            asyncio.run(send_and_pull(broker, address))
        server.child.send_signal(signal.SIGTERM)
        code, errors = server.finish()
    assert code == 1
    assert "filters_abandoned count=1" in errors


def test_no_filters_is_only_a_warning(broker: str, tmp_path: Path) -> None:
    with running("filtersrv", "run", "-b", broker, "--filters", str(tmp_path / "no")) as server:
        assert "filters: none" in server.say("ready")
        server.child.send_signal(signal.SIGTERM)
        code, errors = server.finish()
    assert code == 0
    assert "filters_missing" in errors


def test_a_broken_filter_is_explained(filters: Path) -> None:
    (filters / "broken.py").write_text("x = \n")
    code, errors = Process("filtersrv", "run", "--filters", str(filters)).finish()
    assert code == 1
    assert "broken.py, line 1: SyntaxError" in errors and "Traceback" not in errors


def test_settings() -> None:
    chosen = for_filterserver(
        {"ROCKETMQ_HOME": "/srv/rocket", "COSMO_FILTER_SERVER_IP": "192.0.2.5"},
        pairs=["pullsInFlightMax=7"],
        broker="b:1",
        port=4000,
    )
    assert chosen.filterserver is not None
    options = chosen.filterserver.get(FilterServerOptions)
    assert options.filter_path == "/srv/rocket/filters"
    assert options.filter_server_ip == "192.0.2.5"
    assert (options.connect_which_broker, options.listen_port) == ("b:1", 4000)
    assert options.pulls_in_flight_max == 7
    assert "filterPath=/srv/rocket/filters" in chosen.text()


def test_code_of_clients_is_never_enabled() -> None:
    with pytest.raises(ConfigError, match="never run"):
        for_filterserver({}, pairs=["clientUploadFilterClassEnable=true"])
    for_filterserver({}, pairs=["clientUploadFilterClassEnable=false", "fsServerWorkerThreads=9"])


@pytest.mark.parametrize("words", [["filtersrv", "run", "-h"], ["filtersrv", "-h"]])
def test_help(words: list[str]) -> None:
    result = CliRunner().invoke(cosmo, words)
    assert result.exit_code == 0, result.output
    assert ("--filters DIR" in result.output) == ("run" in words)
    assert "filter server" in result.output


@pytest.mark.parametrize("words", [["filtersrv", "-p"], ["filtersrv", "run", "-p"]])
def test_print_config(words: list[str]) -> None:
    result = CliRunner().invoke(cosmo, words)
    assert result.exit_code == 0, result.output
    assert "connectWhichBroker=127.0.0.1\\:10911" in result.output.replace(
        "127.0.0.1:10911", "127.0.0.1\\:10911"
    )
