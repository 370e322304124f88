"""`--sim-seed=N` replays one seed, `--sim-seeds=N` runs more of them than a commit needs.

`--pair-seed` and `--pair-seeds` are the same for pairs of a master and a slave.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sim")
    group.addoption("--sim-seed", type=int, default=None, help="replay this seed alone")
    group.addoption("--sim-seeds", type=int, default=1000, help="how many seeds to run")
    group.addoption("--pair-seed", type=int, default=None, help="replay this seed of a pair alone")
    group.addoption("--pair-seeds", type=int, default=600, help="how many seeds of pairs to run")
