"""Prometheus' own tool, from Debian: what it says about a page of metrics or about rules.

promtool("check", "rules", "alerts.yml")
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from peers.debian import program


def promtool(*words: str, text: str = "", cwd: Path | None = None) -> tuple[int, str]:
    """Exit status and everything it says."""
    path, env = program("promtool", ("prometheus",))
    done = subprocess.run(
        [path, *words],
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
        cwd=cwd,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout
