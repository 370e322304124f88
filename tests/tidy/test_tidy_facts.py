"""Numbers that several languages and rooms need are defined once, in `layout`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmodrome import layout
from cosmodrome.wire.commands.consume import PullMessage
from cosmodrome.wire.commands.offset import UpdateConsumerOffset
from cosmodrome.wire.commands.produce import SendBatchMessage, SendMessage, SendMessageV2

SOURCE = Path(__file__).parents[2] / "src" / "cosmodrome"
COMPILED = sorted(path for kind in ("pyx", "pxd", "pxi") for path in SOURCE.rglob(f"*.{kind}"))
PYTHON = sorted(path for kind in ("py", "pyi") for path in SOURCE.rglob(f"*.{kind}"))
COMPILED_LINES_MAX = 1100  # one extension module may include any number of such files

FACTS = {name: value for name, value in vars(layout).items() if isinstance(value, int)}
# Whatever has such a name is a fact of `layout`, or is called otherwise.
FAMILIES = ("CODE_", "LANE_", "PULL_", "STOP_", "WALK_")
IN_COMPILED_CODE = {"PULL_COMMIT", "PULL_SUSPEND", "PULL_SUBSCRIPTION"} | {
    name for name in FACTS if name.startswith(("CODE_", "LANE_", "STOP_", "WALK_"))
}


def c_constants(text: str) -> Iterator[tuple[str, int]]:
    """Names and values of the members of all enums."""
    for block in re.findall(r"^cdef enum[^:]*:.*\n((?:[ \t]+.*\n|\n)*)", text, re.MULTILINE):
        for name, value in re.findall(r"^\s+(\w+) *= *(-?\w+)", block, re.MULTILINE):
            yield name, int(value, 0)


def wrong_constants(text: str) -> list[str]:
    return [
        f"{name} = {value}"
        for name, value in c_constants(text)
        if FACTS.get(name, None if name.startswith(FAMILIES) else value) != value
    ]


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: str(path.relative_to(SOURCE)))
def test_constants_of_compiled_code_are_those_of_layout(path: Path) -> None:
    assert wrong_constants(path.read_text()) == []


def test_a_constant_that_differs_is_found() -> None:
    text = (SOURCE / "speed" / "lane" / "native.pyx").read_text()
    assert wrong_constants(text.replace("    LANE_PULL = 1", "    LANE_PULL = 2")) == [
        "LANE_PULL = 2"
    ]
    assert wrong_constants("cdef enum:\n    SLOTS = 16\n    WALK_ELSEWHERE = 9\n") == [
        "WALK_ELSEWHERE = 9"
    ]


def test_the_constants_are_where_they_are_looked_for() -> None:
    found = {name for path in COMPILED for name, _ in c_constants(path.read_text())}
    assert found >= IN_COMPILED_CODE


def test_the_command_table_and_the_lane_mean_the_same_requests() -> None:
    assert SendMessage.request_code == layout.CODE_SEND
    assert SendMessageV2.request_code == layout.CODE_SEND_V2
    assert SendBatchMessage.request_code == layout.CODE_SEND_BATCH
    assert PullMessage.request_code == layout.CODE_PULL
    assert UpdateConsumerOffset.request_code == layout.CODE_COMMIT


def definitions(text: str) -> Iterator[str]:
    """Names that get a literal number, wherever that is."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from _numbered(target, node.value)


def _numbered(target: ast.expr, value: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            yield from _numbered(one, its)
    elif isinstance(target, ast.Name) and not any(
        isinstance(part, ast.Name | ast.Call | ast.Attribute | ast.Constant)
        and not (isinstance(part, ast.Constant) and isinstance(part.value, int))
        for part in ast.walk(value)
    ):
        yield target.id.lstrip("_")


@pytest.mark.parametrize("path", PYTHON, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_fact_of_layout_is_defined_again(path: Path) -> None:
    if path != SOURCE / "layout.py":
        again = sorted(FACTS.keys() & set(definitions(path.read_text())))
        assert again == [], f"{path.name}: import them from layout"


def test_a_second_definition_is_found() -> None:
    text = (
        "A = 1\n_WALK_MORE = 0\nclass Some:\n    PULL_COMMIT: int = 1 << 0\nx, LANE_PULL = 2, 1\n"
    )
    assert FACTS.keys() & set(definitions(text)) == {"WALK_MORE", "PULL_COMMIT", "LANE_PULL"}
    assert not FACTS.keys() & set(definitions("from x import WALK_MORE\nA = WALK_MORE\n"))


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: str(path.relative_to(SOURCE)))
def test_compiled_files_fit_the_reader(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= COMPILED_LINES_MAX, f"{path.name} has {lines} lines: include parts of it"
