"""The files that the rules of the house are about."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "cosmodrome"
FILES = sorted(SOURCE.rglob("*.py"))
COMPILED = sorted(path for end in ("pyx", "pxd", "pxi") for path in SOURCE.rglob(f"*.{end}"))
OTHER_FOLDERS = ("tests", "bench", "peers", "tools", "examples")
ALL_PYTHON = [*FILES, *(path for name in OTHER_FOLDERS for path in (ROOT / name).rglob("*.py"))]


def named(path: Path) -> str:
    """A file as messages and test ids name it."""
    return path.relative_to(ROOT).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
