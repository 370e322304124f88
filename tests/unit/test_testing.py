"""The pytest plugin, in a test run of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import asyncio
from cosmodrome.blocking import Producer
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.values import Message

seen = []

def test_plain(cosmo_node, cosmo_topic):
    seen.append((cosmo_node.namesrv, cosmo_topic))
    with Producer(cosmo_node.namesrv, group="p") as producer:
        producer.send(Message(cosmo_topic, b"x"))

def test_async(cosmo_node, cosmo_topic):
    async def ask():
        async with Admin(cosmo_node.namesrv) as admin:
            return await admin.topics.names()
    assert seen[0][0] == cosmo_node.namesrv
    assert seen[0][1] != cosmo_topic
    assert seen[0][1] in asyncio.run(ask())
"""


def test_fixtures_give_one_node_and_a_topic_per_test(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-p", "cosmodrome.testing", "-W", "error", "-p", "no:asyncio", str(tmp_path)),
        ],
        env={"PYTHONPATH": str(source), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
