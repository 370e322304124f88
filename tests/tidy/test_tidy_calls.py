"""What code may not say, wherever it stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.tidy.tree import ALL_PYTHON, FILES, named, parsed

BANNED_CALLS = {"open": "files are reached through env.disk", "print": "use click.echo or a logger"}


def banned(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            why = BANNED_CALLS.get(node.func.id)
            if why is not None:
                yield f"line {node.lineno}: {why}"
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node):
            yield f"line {node.lineno} is unfinished"


def starred_literals(tree: ast.AST) -> Iterator[str]:
    """`f(*(a, b))`: arguments packed only to be unpacked, which hides how many there are."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        for word in node.args:
            if isinstance(word, ast.Starred) and isinstance(word.value, ast.Tuple | ast.List):
                yield f"line {word.lineno}: pass keywords, or a dataclass where there are many"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_banned_calls(path: Path) -> None:
    if named(path) != "src/cosmodrome/env/real.py":
        assert list(banned(parsed(path))) == []


@pytest.mark.parametrize("path", ALL_PYTHON, ids=named)
def test_arguments_are_not_packed_to_be_unpacked(path: Path) -> None:
    assert list(starred_literals(parsed(path))) == []


@pytest.mark.parametrize("code", ["open('f')", "print(1)", "def f():\n  raise NotImplementedError"])
def test_a_banned_call_is_found(code: str) -> None:
    assert len(list(banned(ast.parse(code)))) == 1
    assert list(banned(ast.parse("disk.open('f'); print"))) == []


def test_a_starred_literal_is_found() -> None:
    assert len(list(starred_literals(ast.parse("f(*(a, b), *[c], d)")))) == 2
    plain = "f(*args, *some(), *(x for x in y), **{'a': 1}); [*(a, b), c]; print(*map(str, z))"
    assert list(starred_literals(ast.parse(plain))) == []
