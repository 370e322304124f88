"""Which twin runs is decided once, and can be forced."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from cosmodrome import speed
from cosmodrome.speed import pure

ASK = "from cosmodrome import speed; print(speed.FLAVOUR, speed.walk.__module__)"


def answer(**variables: str) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k != "COSMODROME_PURE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


def test_pure_can_be_forced() -> None:
    assert answer(COSMODROME_PURE="1") == ["pure", "cosmodrome.speed.pure"]


def test_native_is_preferred() -> None:
    if importlib.util.find_spec("cosmodrome.speed.native") is None:
        pytest.skip("the compiled twin is not built")
    assert answer() == ["native", "cosmodrome.speed.native"]


def test_every_name_is_there_in_both_forms() -> None:
    assert speed.FLAVOUR in ("native", "pure")
    for name in ("decode_header", "encode_header", "encode_record", "java_hash", "walk"):
        assert callable(getattr(speed, name))
        assert callable(getattr(pure, name))
