"""Which twin runs is decided once for all modules, and can be forced."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cosmodrome import speed
from cosmodrome.speed import arrow, client, due, lane
from cosmodrome.speed.choice import compiled

DOORS = {
    "speed": "decode_header",
    "speed.lane": "Intake",
    "speed.arrow": "ColumnBuilder",
    "speed.client": "outline",
    "speed.due": "DueMessages",
}
ASK = """
from importlib import import_module
from cosmodrome.speed import FLAVOUR
from cosmodrome.speed.choice import compiled
from cosmodrome.speed.lane import HAS_LANE
print(FLAVOUR, HAS_LANE, compiled("cosmodrome.speed.pulls.native") is not None)
for door, name in {doors}.items():
    print(getattr(import_module("cosmodrome." + door), name).__module__.rpartition(".")[2])
"""
WITHOUT = """
import sys
sys.modules["cosmodrome.speed.{name}"] = None  # cannot be imported
"""


def answer(before: str = "", **variables: str) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k != "COSMODROME_PURE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", before + ASK.format(doors=DOORS)],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


@pytest.fixture
def built() -> None:
    if importlib.util.find_spec("cosmodrome.speed.core.native") is None:
        pytest.skip("the compiled twins are not built")


def test_pure_can_be_forced() -> None:
    assert answer(COSMODROME_PURE="1") == ["pure", "False", "False", *["pure"] * 5]


@pytest.mark.usefixtures("built")
def test_native_is_preferred() -> None:
    assert answer() == ["native", "True", "True", *["native"] * 5]
    assert answer(COSMODROME_PURE="0") == answer()


@pytest.mark.usefixtures("built")
def test_without_the_compiled_core_nothing_compiled_runs() -> None:
    before = WITHOUT.format(name="core.native")
    assert answer(before) == ["pure", "False", "False", *["pure"] * 5]


@pytest.mark.usefixtures("built")
def test_one_missing_module_does_not_stop_the_others() -> None:
    found = answer(WITHOUT.format(name="lane.native"))
    assert found[:2] == ["native", "False"]
    assert found[3:] == ["native", "pure", "native", "native", "native"]


@pytest.mark.parametrize("door", [speed, lane, arrow, client, due], ids=lambda d: d.__name__)
def test_a_door_has_all_its_names(door: ModuleType) -> None:
    assert all(hasattr(door, name) for name in door.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = door.nothing


STUBS = sorted(Path(speed.__file__).parent.rglob("*.pyi"))


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_a_compiled_module_has_what_its_stub_says(stub: Path) -> None:
    source = Path(speed.__file__).parents[2]
    name = ".".join(stub.relative_to(source).with_suffix("").parts)
    module = compiled(name)
    if module is None:
        pytest.skip("the compiled twin is not built")
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ClassDef) and "Protocol" in ast.unparse(node):
            continue  # for type checkers only
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            assert hasattr(module, node.name), node.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.asname is None or hasattr(module, alias.name), alias.name
