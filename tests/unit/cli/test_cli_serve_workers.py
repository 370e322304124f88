"""`--workers` as a user meets it: ports, signals, settings, one supervisor per directory."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

from peers.process import accepts
from tests.unit.cli.workers_kit import FIRST, OPTIONS, SECOND, Workers, is_running, until

from cosmodrome.cli.serve.lifetime import EXIT_SECOND_SIGNAL, SAME_SIGNAL_SECONDS


def test_brokers_of_a_name_server_elsewhere(tmp_path: Path) -> None:
    cosmo = [sys.executable, "-m", "cosmodrome.cli"]
    nameserver = subprocess.Popen(
        [*cosmo, "namesrv", "run", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "ROCKETMQ_HOME": str(tmp_path)},
    )
    words = [
        *cosmo,
        "broker",
        "run",
        "--workers",
        "2",
        "--port",
        "0",
        "--http-port",
        "0",
        "--data",
        str(tmp_path / "data"),
        *OPTIONS,
    ]
    try:
        assert nameserver.stdout is not None
        address = nameserver.stdout.readline().split()[-1]
        with subprocess.Popen(
            [*words, "-n", address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as brokers:
            try:
                assert brokers.stdout is not None
                line = brokers.stdout.readline()
                assert "2 brokers are ready on" in line
                ports = [int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", line)]
                assert len(set(ports)) == 3 and all(accepts(port) for port in ports)

                second = subprocess.run(
                    [*words, "-n", address], capture_output=True, text=True, timeout=90
                )
                assert second.returncode == 1
                assert "in use" in second.stderr and "Traceback" not in second.stderr

                brokers.send_signal(signal.SIGINT)
                _, errors = brokers.communicate(timeout=90)
                assert brokers.returncode == 0, errors
                assert "Traceback" not in errors and "worker_died" not in errors
                assert not any(accepts(port) for port in ports)
            finally:
                brokers.kill()
    finally:
        nameserver.terminate()
        nameserver.communicate(timeout=60)


async def test_a_worker_whose_port_is_taken_waits_for_it(tmp_path: Path) -> None:
    node = Workers(tmp_path / "data")
    try:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", node.ports[SECOND]))
            taken.listen()
            node.process.start()
            await until(lambda: f"worker_died name={SECOND}" in node.log_text())
            await until(lambda: accepts(node.ports[FIRST]))
            assert not node.is_ready()
        await until(node.is_ready)
        text = node.log_text()
        assert re.search(rf"{SECOND} \| cosmo: .*in use.*--broker-port", text)
        assert f"worker_died name={FIRST} " not in text
    finally:
        assert node.stop() == 0


async def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    node = Workers(tmp_path / "data")
    try:
        await asyncio.to_thread(node.start)
        pids = node.pids()
        os.kill(pids[SECOND], signal.SIGSTOP)  # it cannot stop cleanly
        os.kill(node.pid, signal.SIGTERM)
        await until(lambda: not is_running(pids[FIRST]))
        await asyncio.sleep(SAME_SIGNAL_SECONDS + 0.2)
        assert node.process.running and is_running(pids[SECOND])
        os.kill(node.pid, signal.SIGTERM)
        await until(lambda: not node.process.running and not is_running(pids[SECOND]))
    finally:
        assert node.stop() == EXIT_SECOND_SIGNAL


def test_settings_that_no_worker_takes_end_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "cosmodrome.cli",
            "up",
            "--workers",
            "2",
            "--data",
            str(tmp_path / "d"),
            "--set",
            "brokerName=no good",
            "--namesrv-port",
            "0",
            "--broker-port",
            "0",
            "--http-port",
            "0",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "brokerName is 'no good" in done.stderr
    assert "the workers refuse their settings" in done.stderr
    assert "Traceback" not in done.stderr
