"""Memory is filled until it does not get fuller, with a file that takes no room on the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import ballast

MIB = 1024 * 1024


def steps_of(monkeypatch: pytest.MonkeyPatch, free_mib: list[int]) -> None:
    """Free memory as it is looked at, before and after each step of 1 MiB."""
    seen: Iterator[int] = iter(free_mib)
    monkeypatch.setattr(ballast, "free_bytes", lambda: next(seen) * MIB)
    monkeypatch.setattr(ballast, "STEP_BYTES", 4 * MIB)
    monkeypatch.setattr(ballast, "STEADY_BYTES", MIB)


def test_reads_until_free_memory_is_steady(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps_of(monkeypatch, [100, 96, 96, 92, 92, 92, 92, 90, 90, 90, 90, 90])
    filled = ballast.Ballast(tmp_path)
    assert filled.top_up() == 6 * 4 * MIB  # two falls, one steady, one fall, two steady

    steps_of(monkeypatch, [90, 90, 90, 90])
    assert filled.top_up() == 2 * 4 * MIB
    stat = (tmp_path / "ballast").stat()
    assert stat.st_size == 8 * 4 * MIB
    assert stat.st_blocks == 0


def test_gives_up_where_memory_never_fills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ballast, "STEPS_MAX", 3)
    steps_of(monkeypatch, [100, 90, 90, 80, 80, 70])
    assert ballast.Ballast(tmp_path).top_up() == 3 * 4 * MIB


def test_the_machine_tells_its_free_memory() -> None:
    assert ballast.free_bytes() > 0
