"""Every snippet of the guide, and the first one of the README, runs in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmodrome.blocking import embedded

ROOT = Path(__file__).parents[3]
FENCED = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
SNIPPETS = FENCED.findall((ROOT / "docs" / "client.md").read_text())


@pytest.fixture(scope="module")
def namesrv() -> Iterator[str]:
    with embedded() as node:
        yield node.namesrv


def test_the_guide_has_its_snippets() -> None:
    assert len(SNIPPETS) >= 10


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet(snippet: str, namesrv: str, tmp_path: Path) -> None:
    run(snippet, namesrv, tmp_path)


def test_the_first_message_of_the_readme(namesrv: str, tmp_path: Path) -> None:
    snippet = FENCED.findall((ROOT / "README.md").read_text())[0]
    assert "127.0.0.1:9876" in snippet
    assert run(snippet.replace("127.0.0.1:9876", namesrv), namesrv, tmp_path).endswith("b'hello'\n")


def run(snippet: str, namesrv: str, tmp_path: Path) -> str:
    """What it prints; it must end well and say nothing on stderr."""
    environment = dict(os.environ, COSMO_NAMESRV=namesrv, HOME=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", snippet],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout
