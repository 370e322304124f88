"""`cosmo` as a user meets it: a process that starts, says where it is, and stops when told."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

END_TIMEOUT_S = 60
UP = ["up", "--namesrv-port", "0", "--broker-port", "0", "--http-port", "0"]


class Cosmo:
    def __init__(self, *words: str, env: dict[str, str] | None = None) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "cosmodrome.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )

    def say(self, until: str) -> str:
        """Output up to the line that has `until`."""
        assert self.child.stdout is not None
        seen = ""
        for line in self.child.stdout:
            seen += line
            if until in line:
                return seen
        raise AssertionError(f"ended early: {seen}\n{self.finish()[1]}")

    def finish(self) -> tuple[int, str]:
        _, errors = self.child.communicate(timeout=END_TIMEOUT_S)
        return self.child.returncode, errors


@contextlib.contextmanager
def running(*words: str, env: dict[str, str] | None = None) -> Iterator[Cosmo]:
    cosmo = Cosmo(*words, env=env)
    try:
        yield cosmo
    finally:
        if cosmo.child.poll() is None:
            cosmo.child.kill()
        cosmo.child.communicate()


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_up_says_where_it_is_and_stops_cleanly(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with running(*UP, "--data", str(data)) as cosmo:
        text = cosmo.say("Ctrl-C")
        http = re.search(r"health\s+(http://[^/]+)/readyz", text)
        broker = re.search(r"broker\s+127\.0\.0\.1:(\d+)", text)
        vip = re.search(r"VIP port (\d+)", text)
        assert http and broker and vip, text
        assert int(vip[1]) == int(broker[1]) - 2
        for path in ("/livez", "/readyz", "/startupz"):
            assert get(http[1] + path)[0] == 200, path
        assert get(http[1] + "/nothing")[0] == 404
        for port in (int(broker[1]), int(vip[1])):
            socket.create_connection(("127.0.0.1", port), timeout=30).close()
        assert {"commitlog", "config", "lock", "abort"} <= {path.name for path in data.iterdir()}

        second = Cosmo(*UP, "--data", str(data))
        code, errors = second.finish()
        assert code == 1
        assert "in use" in errors and str(data) in errors and "Traceback" not in errors

        cosmo.child.send_signal(signal.SIGTERM)
        cosmo.child.send_signal(signal.SIGINT)  # as a supervisor does that signals the group too
        code, errors = cosmo.finish()
        assert code == 0, errors
        assert not (data / "abort").exists()
        assert "Traceback" not in errors


def test_a_taken_port_is_explained(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = ["up", "--namesrv-port", port, "--broker-port", "0", "--http-port", "0"]
        code, errors = Cosmo(*words, "--data", str(tmp_path / "d")).finish()
    assert code == 1
    assert "--namesrv-port" in errors and "Traceback" not in errors


def test_parts_alone(tmp_path: Path) -> None:
    home = {"ROCKETMQ_HOME": str(tmp_path)}
    with running("namesrv", "run", "--port", "0", env=home) as namesrv:
        address = namesrv.say("ready").strip().rsplit(" ", 1)[1]
        words = ["broker", "run", "--port", "0", "--data", str(tmp_path / "store")]
        with running(*words, "-n", address) as broker:
            assert "127.0.0.1:" in broker.say("ready")
            broker.child.send_signal(signal.SIGINT)
            assert broker.finish()[0] == 0
        namesrv.child.send_signal(signal.SIGTERM)
        assert namesrv.finish()[0] == 0


def test_broker_without_name_server_says_what_to_do(tmp_path: Path) -> None:
    env = {"NAMESRV_ADDR": ""}
    code, errors = Cosmo("broker", "run", "--data", str(tmp_path), env=env).finish()
    assert code == 1
    assert "-n HOST:PORT" in errors


@pytest.mark.parametrize("pure", ["", "1"])
def test_the_pure_twin_warns_once(tmp_path: Path, pure: str) -> None:
    with running(*UP, "--data", str(tmp_path / "d"), env={"COSMODROME_PURE": pure}) as cosmo:
        text = cosmo.say("Ctrl-C")
        cosmo.child.send_signal(signal.SIGTERM)
        _, errors = cosmo.finish()
    if pure:
        assert "core         pure" in text
        assert errors.count("compiled core is not loaded") == 1
        assert "unset COSMODROME_PURE" in errors and "CPU per message" in errors
