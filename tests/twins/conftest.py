"""Both twins of the lane's inner loops take the tests of the lane."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest

from cosmodrome import speed
from cosmodrome.broker.lane import lane, replies
from cosmodrome.speed.lane import pure as lane_pure


@pytest.fixture(params=["native", "pure"])
def lane_core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The inner loops that brokers use in this test."""
    core: ModuleType = lane_pure
    if request.param == "native":
        try:
            core = importlib.import_module("cosmodrome.speed.lane.native")
        except ImportError:
            if os.environ.get("COSMODROME_REQUIRE_NATIVE"):
                raise
            pytest.skip("the compiled lane is not built")
        if speed.FLAVOUR == "pure":
            pytest.skip("the compiled lane needs the queue ends of the compiled core")
    for user in (lane, replies):
        monkeypatch.setattr(user, "core", core)
    return core
