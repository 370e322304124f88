"""Every promise of docs/reliability.md names the tests that hold it, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
NO_PROMISE = "everything"


def table_after(heading: str, first_cell: str) -> list[list[str]]:
    """The rows of the first table with this cell that follows the heading; headings are first."""
    _, _, text = PAGE.partition(f"## {heading}\n")
    found = re.search(rf"^\| {re.escape(first_cell)} \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    assert found, heading
    lines = found[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def test_every_cell_of_the_promises_has_a_test() -> None:
    promises = table_after("The promises", "failure of the master")
    held = table_after("The tests", "failure of the master")
    tests = dict(re.findall(r"^\| ([A-Z]) \| `(\S+)` \|", PAGE, re.MULTILINE))
    assert len(promises) == len(held) > 5 and promises[0] == held[0]
    used: set[str] = set()
    for promise, letters in zip(promises[1:], held[1:], strict=True):
        assert promise[0] == letters[0] and len(promise) == len(letters)
        for what, by in zip(promise[1:], letters[1:], strict=True):
            promised = bool(what) and not what.startswith(NO_PROMISE)
            assert bool(by) == promised, (promise[0], what, by)
            used |= set(by.split(", ")) if by else set()
    assert used == set(tests)


def test_the_tests_that_are_named_exist() -> None:
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE))
    assert len(named) >= 20
    for path, name in named:
        source = (ROOT / path).read_text()
        assert not name or re.search(rf"^(?:async )?def {name}\(", source, re.MULTILINE), name
