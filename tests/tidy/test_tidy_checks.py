"""`make check` and the hooks before a commit run the same things."""

from __future__ import annotations

import re

from tests.tidy.tree import ROOT


def recipe(makefile: str, target: str) -> list[str]:
    """The commands of a target, with the tools where they are."""
    (lines,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in lines.splitlines()]


def entries(hooks: str) -> list[str]:
    return re.findall(r"^ +entry: (.*)$", hooks, re.MULTILINE)


def test_both_run_the_same() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert entries(hooks) == recipe((ROOT / "Makefile").read_text(), "check")


def test_hooks_come_from_here_and_look_at_everything() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (.*)", hooks) == ["local"]
    for setting in ("language: system", "pass_filenames: false", "always_run: true"):
        assert hooks.count(setting) == len(entries(hooks))


def test_a_recipe_is_read_to_its_end() -> None:
    makefile = "check: a ## b\n\t$(BIN)/ruff check .\n\t$(BIN)/mypy\n\nnext:\n\ttrue\n"
    assert recipe(makefile, "check") == [".venv/bin/ruff check .", ".venv/bin/mypy"]
