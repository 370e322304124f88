"""The code itself is in order: rooms, banned calls, sizes, generated documents."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "cosmodrome"
FILES = sorted(SOURCE.rglob("*.py"))
LINES_MAX = 600
FUNCTION_LINES_MAX = 80


def room_table() -> dict[str, set[str]]:
    """The import table printed in ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.split("## 3. The rooms")[1].split("## 4.")[0]
    table: dict[str, set[str]] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 3 or cells[0] in {"room", ""} or set(cells[0]) <= {"-"}:
            continue
        table[cells[0]] = {name.strip() for name in cells[1].split(",") if name.strip()}
    return table


def imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports, without the leading package name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "cosmodrome":
                yield from (alias.name for alias in node.names if alias.name != "__version__")
            elif node.module.startswith("cosmodrome."):
                yield node.module.removeprefix("cosmodrome.")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("cosmodrome."):
                    yield alias.name.removeprefix("cosmodrome.")


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_the_table_names_every_room() -> None:
    rooms = {room_of(path) for path in FILES} - {"__init__"}
    assert rooms == set(room_table())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    allowed = room_table()[room]
    for module in imports(path):
        target = module.split(".")[0]
        if target == room:
            continue
        assert target in allowed or any(
            module == name or module.startswith(name + ".") for name in allowed if "." in name
        ), f"{path.name} of room {room} may not import {module}"


STORE_DOORS = {"store.store", "store.offline"}


def test_only_the_store_doors_are_imported_from_outside() -> None:
    for path in FILES:
        if room_of(path) != "store":
            for module in imports(path):
                if module.startswith("store"):
                    assert module in STORE_DOORS, f"{path.name} imports {module}"


BANNED_CALLS = {"open": "files are reached through env.disk", "print": "use click.echo or a logger"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_banned_calls(path: Path) -> None:
    if path.relative_to(SOURCE).as_posix() == "env/real.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in BANNED_CALLS, (
                f"{path.name}:{node.lineno} {BANNED_CALLS[node.func.id]}"
            )
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.dump(node):
            raise AssertionError(f"{path.name}:{node.lineno} is unfinished")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_fit_the_reader(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= LINES_MAX, f"{path.name} is long: look for the second idea"
    tree = ast.parse(text)
    if text.strip():
        assert ast.get_docstring(tree), f"{path.name} does not say what it hides"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno
            assert length <= FUNCTION_LINES_MAX, f"{path.name}: {node.name} has {length} lines"


def test_settings_document_is_current() -> None:
    from cosmodrome.env.document import render

    assert (ROOT / "docs" / "settings.md").read_text() == render(), "run `make docs`"


def test_no_machine_or_registry_is_named() -> None:
    """Paths of one machine and hosts of registries do not belong into a repository."""
    machine = re.compile(r"(?<![\w.])/(?:work|farm|root|home)/")
    registry = re.compile(r"index[-]url|https?://[^ \"]*/(?:simple|maven[2]|npm|packages)/")
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if not path.is_file() or parts[0] in {".git", ".venv", "build", "node_modules"}:
            continue
        if any(part in {"node_modules", "__pycache__", "target"} for part in parts):
            continue
        if path.suffix in {".py", ".md", ".toml", ".lock", ".xml", ".json", ".mod", ".sum", ".js"}:
            text = path.read_text(errors="replace")
            if path == Path(__file__):
                continue
            assert not machine.search(text), f"{path} names a path of one machine"
            assert not registry.search(text), f"{path} names a registry"
