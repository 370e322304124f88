"""Who imports whom: the table in ARCHITECTURE.md is the law.

A row is a room (`broker`) or a room within one (`broker.lane`), and what it may import: rooms,
rooms within rooms, or single modules (`wire.record`). A file obeys the narrowest row that it
stands in. What a room has inside may import each other freely, unless a row of its own says
what that part may import.

A room whose last cell speaks of doors is entered through them only: the back-ticked paths behind
that word (`store/store.py`) are all that other rooms may import of it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.tidy.tree import COMPILED, FILES, ROOT, SOURCE, named

MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in (*FILES, *SOURCE.rglob("*.pyx"))
} | {".".join(path.relative_to(SOURCE).parts) for path in SOURCE.rglob("*") if path.is_dir()}


@dataclass(frozen=True)
class Table:
    may_import: dict[str, frozenset[str]]
    doors: dict[str, frozenset[str]]

    def row_of(self, module: str) -> str:
        """The narrowest row that a module stands in; "" for none."""
        rows = [row for row in self.may_import if within(module, row)]
        return max(rows, key=len, default="")


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def read_table(text: str) -> Table:
    section = text.split("## 3. The rooms")[1].split("\n## ")[0]
    may_import: dict[str, frozenset[str]] = {}
    doors: dict[str, frozenset[str]] = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 3 or cells[0] in {"room", ""} or set(cells[0]) <= {"-"}:
            continue
        room = cells[0].strip("`")
        may_import[room] = frozenset(name for name in re.split(r"[,\s`]+", cells[1]) if name)
        _, door, behind = cells[-1].partition("door")
        if door:
            paths = re.findall(r"`([\w/]+)\.pyx?`", behind)
            doors[room] = frozenset(path.replace("/", ".") for path in paths)
    return Table(may_import, doors)


def imports(text: str, *, compiled: bool = False) -> Iterator[str]:
    """Modules of ours that a file imports, without the leading package name."""
    if compiled:
        for found in re.finditer(
            r"^\s*(?:from (?P<module>cosmodrome[\w.]*) c?import (?P<names>\([^)]*\)|.*)"
            r"|c?import (?P<plain>cosmodrome\.[\w.]+))",
            text,
            re.MULTILINE,
        ):
            if found["plain"]:
                yield found["plain"].removeprefix("cosmodrome.")
            else:
                yield from _imported(found["module"], re.findall(r"\w+", found["names"]))
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from _imported(node.module, [alias.name for alias in node.names])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("cosmodrome."):
                    yield alias.name.removeprefix("cosmodrome.")


def _imported(module: str, names: Iterable[str]) -> Iterator[str]:
    """`from a.b import c` imports a.b.c if that is a module, else a.b."""
    if module != "cosmodrome" and not module.startswith("cosmodrome."):
        return
    inner = module.removeprefix("cosmodrome").removeprefix(".")
    for name in names:
        longer = f"{inner}.{name}".removeprefix(".")
        if longer in MODULES:
            yield longer
        elif inner:
            yield inner


def broken_rules(table: Table, module: str, imported: Iterable[str]) -> list[str]:
    """What a module imports against its row, or past a door."""
    row = table.row_of(module)
    room = module.split(".")[0]
    broken = []
    for target in imported:
        other = target.split(".")[0]
        if within(target, row) or (other == room and row == room):
            continue
        if not any(within(target, name) for name in table.may_import[row]):
            broken.append(f"{row} may not import {target}")
        for guarded, doors in table.doors.items():
            if within(target, guarded) and not within(module, guarded) and target not in doors:
                broken.append(f"{target} is behind the doors of {guarded}")
    return broken


def module_of(path: Path) -> str:
    dotted = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    return dotted.removesuffix(".__init__")


TABLE = read_table((ROOT / "ARCHITECTURE.md").read_text())


def test_the_table_names_every_room_and_nothing_else() -> None:
    rooms = {module_of(path).split(".")[0] for path in FILES} - {"__init__"}
    assert rooms == {row for row in TABLE.may_import if "." not in row}
    for row, names in TABLE.may_import.items():
        assert {row, *names} <= MODULES, f"{row}: not all of these exist: {sorted(names)}"


def test_the_table_has_a_row_for_every_folder() -> None:
    folders = {module_of(path.parent) for path in (*FILES, *COMPILED) if path.parent != SOURCE}
    assert folders - set(TABLE.may_import) == set(), "say what these folders may import"


def test_doors_exist_and_stand_in_their_room() -> None:
    assert TABLE.doors["store"]
    for room, doors in TABLE.doors.items():
        assert doors <= MODULES and all(within(door, room) for door in doors), room


def test_a_room_within_a_room_may_not_import_more_than_the_room() -> None:
    for row, names in TABLE.may_import.items():
        room = row.split(".")[0]
        for name in names:
            assert within(name, room) or any(within(name, o) for o in TABLE.may_import[room]), row


@pytest.mark.parametrize("path", [*FILES, *COMPILED], ids=named)
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    if path.parent == SOURCE and path.name == "__init__.py":
        return
    found = imports(path.read_text(), compiled=path in COMPILED)
    assert broken_rules(TABLE, module_of(path), found) == []


SAMPLE = """
## 3. The rooms

| room | may import | what it hides |
|---|---|---|
| wire | errors | |
| store | wire.record | files; doors: `store/store.py`, `store/source.py` |
| `broker` | store, wire | |
| `broker.lane` | store, `broker.send` | |

## 4. Other
| not | a | row |
"""


@pytest.mark.parametrize(
    ("module", "target", "broken"),
    [
        ("store.log", "wire.record", 0),
        ("store.log", "wire.message", 1),
        ("broker.app", "broker.lane.lane", 0),
        ("broker.app", "wire.message", 0),
        ("broker.app", "store.store", 0),
        ("broker.app", "store.log", 1),
        ("broker.app", "store", 1),
        ("broker.lane.lane", "broker.lane.pulls", 0),
        ("broker.lane.lane", "broker.send.produce", 0),
        ("broker.lane.lane", "broker.receive.consume", 1),
        ("broker.lane.lane", "wire.message", 1),
        ("broker.lane.lane", "store.source", 0),
        ("broker.lane.lane", "store.log", 1),
        ("broker.lanes", "broker.receive.consume", 0),
    ],
)
def test_the_rules_can_be_broken(module: str, target: str, broken: int) -> None:
    assert len(broken_rules(read_table(SAMPLE), module, [target])) == broken


def test_imports_are_seen_in_all_their_forms() -> None:
    text = "import cosmodrome.wire.frame\nfrom cosmodrome import speed, __version__\n"
    text += "from cosmodrome.store import store\nfrom cosmodrome.layout import MAGIC\nimport os\n"
    text += "from cosmodrome.speed.core import (\n    native,\n)\n"
    wanted = ["wire.frame", "speed", "store.store", "layout", "speed.core.native"]
    assert list(imports(text)) == wanted
    assert list(imports(text.replace("import cosmo", "cimport cosmo"), compiled=True)) == wanted
