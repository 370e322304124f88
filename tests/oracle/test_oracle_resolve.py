"""The resolver itself: registries hiccup, and nothing is built twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from peers import resolve
from peers.resolve import ResolveFailed, ToolMissing, make_once, require, run_with_tries


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seen: list[float] = []
    monkeypatch.setattr(resolve, "_pause", seen.append)
    return seen


def _fails_until(tries: int, note: Path) -> list[str]:
    """A command that fails until it was run `tries` times."""
    program = (
        "import pathlib, sys; note = pathlib.Path(sys.argv[1]);"
        "note.write_text((note.read_text() if note.exists() else '') + 'x');"
        "print('hiccup', len(note.read_text()));"
        "sys.exit(len(note.read_text()) < int(sys.argv[2]))"
    )
    return [sys.executable, "-c", program, str(note), str(tries)]


def test_two_hiccups_are_survived(tmp_path: Path, pauses: list[float]) -> None:
    assert "hiccup 3" in run_with_tries(_fails_until(3, tmp_path / "note"), cwd=tmp_path)
    assert len(pauses) == 2
    assert pauses[0] < pauses[1]


def test_three_failures_are_reported_with_the_output(tmp_path: Path, pauses: list[float]) -> None:
    with pytest.raises(ResolveFailed, match="failed three times\nhiccup 3"):
        run_with_tries(_fails_until(9, tmp_path / "note"), cwd=tmp_path)


def test_made_again_only_when_a_source_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "BUILD", tmp_path / "build")
    source, product = tmp_path / "source", tmp_path / "product"
    source.write_text("one")
    made: list[str] = []

    def make() -> None:
        made.append(source.read_text())
        product.write_text(made[-1])

    make_once("thing", [source, "word"], product, make)
    make_once("thing", [source, "word"], product, make)
    assert made == ["one"]
    source.write_text("two")
    make_once("thing", [source, "word"], product, make)
    assert made == ["one", "two"]
    product.unlink()
    make_once("thing", [source, "word"], product, make)
    assert made == ["one", "two", "two"]


def test_failed_make_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "BUILD", tmp_path / "build")
    with pytest.raises(ResolveFailed, match="nothing was made"):
        make_once("thing", ["word"], tmp_path / "product", lambda: None)


def test_missing_tool_is_named() -> None:
    with pytest.raises(ToolMissing, match="no-such-tool-here"):
        require("no-such-tool-here")
