"""Every snippet of the guide runs as it stands, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmodrome.blocking import embedded

GUIDE = Path(__file__).parents[3] / "docs" / "client.md"
SNIPPETS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def namesrv() -> Iterator[str]:
    with embedded() as node:
        yield node.namesrv


def test_the_guide_has_its_snippets() -> None:
    assert len(SNIPPETS) >= 10


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet(snippet: str, namesrv: str, tmp_path: Path) -> None:
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
