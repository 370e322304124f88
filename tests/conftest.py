"""What holds for every test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


def _levels() -> dict[str, int]:
    """Levels that were set; a logger that appears meanwhile inherits its own."""
    known = logging.root.manager.loggerDict.items()
    levels = {name: logger.level for name, logger in known if isinstance(logger, logging.Logger)}
    set_here = {name: level for name, level in levels.items() if level and name.startswith("cosmo")}
    return {**set_here, "everything": logging.root.manager.disable}


@pytest.fixture(autouse=True)
def log_levels_are_left_as_found() -> Iterator[None]:
    """A test that silences a logger would blind another one, in an order that seldom comes."""
    before = _levels()
    yield
    assert _levels() == before, "this test left a logger silenced; restore its level"
