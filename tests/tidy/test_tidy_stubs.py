"""What a stub of compiled code declares is in the module; checked where it is built."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.tidy.tree import SOURCE, named, parsed

from cosmodrome.speed.choice import compiled

STUBS = sorted(SOURCE.rglob("*.pyi"))


def missing(body: list[ast.stmt], found: object) -> Iterator[str]:
    """Names that a stub declares, or exports again, and `found` does not have.

    A Protocol says what others have to offer, so it is for type checkers only.
    """
    for node in body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.asname for alias in node.names if alias.asname]
        elif isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases):
            names = [node.name]
            if hasattr(found, node.name):
                inside = missing(node.body, getattr(found, node.name))
                yield from (f"{node.name}.{name}" for name in inside)
        yield from (name for name in names if not hasattr(found, name))


@pytest.mark.parametrize("path", STUBS, ids=named)
def test_a_stub_declares_what_its_module_has(path: Path) -> None:
    module = compiled("cosmodrome." + ".".join(path.relative_to(SOURCE).with_suffix("").parts))
    if module is None:
        pytest.skip("it is not compiled here")
    assert list(missing(parsed(path).body, module)) == []


def test_a_name_that_is_not_there_is_found() -> None:
    stub = """
from somewhere import Type
from twin import here as here, gone as gone
FULL: int
class Asked(Protocol):
    def anything(self) -> int: ...
class Held:
    count: int
    end: int
    def serve(self) -> int: ...
"""
    module = SimpleNamespace(here=1, Held=SimpleNamespace(count=1))
    assert list(missing(ast.parse(stub).body, module)) == ["gone", "FULL", "Held.end", "Held.serve"]
