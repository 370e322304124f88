"""Files, functions and folders fit the reader."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from tests.tidy.tree import ALL_PYTHON, COMPILED, FILES, SOURCE, named, parsed

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
# Loops that run for each byte or record keep their state in C variables; cutting them into parts
# would send it through pointers.
COMPILED_FUNCTION_LINES_MAX = 100
COMPILED_FUNCTION = re.compile(
    r"(?P<indent> *)(?:async )?(?:def|cp?def (?!class|struct|enum))\b.*\("
)
FOLDER_MODULES_MAX = 16


def long_functions(tree: ast.AST) -> Iterator[str]:
    """Functions with more lines than a screen has, from `def` to the last one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.name} in line {node.lineno} has {lines} lines"


def long_compiled_functions(text: str) -> Iterator[str]:
    """The same for Cython: a function ends before the next line that is indented no deeper."""
    name, indent, first, last = "", -1, 0, 0
    for number, line in enumerate([*text.splitlines(), "end"], 1):
        depth = len(line) - len(line.lstrip())
        if not line.strip() or (indent >= 0 and (depth > indent or line.lstrip()[0] in ")#")):
            last = number if line.strip() else last
            continue
        if indent >= 0 and last - first + 1 > COMPILED_FUNCTION_LINES_MAX:
            yield f"{name} in line {first} has {last - first + 1} lines"
        indent = -1
        if found := COMPILED_FUNCTION.match(line):
            name, indent, first, last = line.strip(), len(found["indent"]), number, number


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


@pytest.mark.parametrize("path", ALL_PYTHON, ids=named)
def test_functions_fit_a_screen(path: Path) -> None:
    assert list(long_functions(parsed(path))) == []


@pytest.mark.parametrize("path", COMPILED, ids=named)
def test_compiled_functions_fit_the_reader(path: Path) -> None:
    assert list(long_compiled_functions(path.read_text())) == []


def test_folders_are_rooms_not_stores() -> None:
    assert full_folders(FILES) == []


def test_what_is_too_long_or_too_full_is_found() -> None:
    lines = FUNCTION_LINES_MAX - 1
    fits = "def fits():\n" + "    pass\n" * lines
    long = "async def long():\n" + "    pass\n" * (lines + 1)
    assert list(long_functions(ast.parse(fits + long))) == ["long in line 61 has 61 lines"]
    lines = COMPILED_FUNCTION_LINES_MAX - 1
    fits = "    cdef int fits(\n    ):\n" + "        pass\n\n" * ((lines - 1) // 2)
    long = "    def long(self):\n" + "        pass\n" * (lines + 1) + "\ncdef int other\n"
    assert list(long_compiled_functions(f"cdef class A:\n{fits}{long}")) == [
        "def long(self): in line 102 has 101 lines"
    ]
    many = [SOURCE / "room" / f"m{number}.py" for number in range(FOLDER_MODULES_MAX + 1)]
    assert full_folders(many[1:]) == [] and len(full_folders(many)) == 1
