"""`--sim-seed=N` replays one seed, `--sim-seeds=N` runs more of them than a commit needs."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sim")
    group.addoption("--sim-seed", type=int, default=None, help="replay this seed alone")
    group.addoption("--sim-seeds", type=int, default=1000, help="how many seeds to run")
