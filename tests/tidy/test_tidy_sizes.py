"""Files, functions and folders fit the reader."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.tidy.tree import FILES, SOURCE, named, parsed

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
FOLDER_MODULES_MAX = 16


def long_functions(tree: ast.AST) -> Iterator[str]:
    """Functions with more lines than a screen has, from `def` to the last one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.name} in line {node.lineno} has {lines} lines"


def full_folders(files: Iterable[Path]) -> list[str]:
    """Folders in which a newcomer would have to search."""
    counts = Counter(path.parent for path in files if path.name != "__init__.py")
    return [
        f"{named(folder)} has {count} modules: look for the rooms in it"
        for folder, count in counts.items()
        if count > FOLDER_MODULES_MAX
    ]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_a_file_has_one_idea_and_says_it(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES_MAX, "it is long: look for the second idea"
    assert not text.strip() or ast.get_docstring(parsed(path)), "it does not say what it hides"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_functions_fit_a_screen(path: Path) -> None:
    assert list(long_functions(parsed(path))) == []


def test_folders_are_rooms_not_stores() -> None:
    assert full_folders(FILES) == []


def test_what_is_too_long_or_too_full_is_found() -> None:
    lines = FUNCTION_LINES_MAX - 1
    fits = "def fits():\n" + "    pass\n" * lines
    long = "async def long():\n" + "    pass\n" * (lines + 1)
    assert list(long_functions(ast.parse(fits + long))) == ["long in line 61 has 61 lines"]
    many = [SOURCE / "room" / f"m{number}.py" for number in range(FOLDER_MODULES_MAX + 1)]
    assert full_folders(many[1:]) == [] and len(full_folders(many)) == 1
