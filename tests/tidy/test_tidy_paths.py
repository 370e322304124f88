"""Documents name files and modules that exist, in sentences and in commands.

ARCHITECTURE.md has a stricter rule of its own in `test_tidy_names.py`; CHANGELOG.md and its
fragments speak of files that are gone, too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.tidy.source_names import names
from tests.tidy.tree import ROOT, SOURCE, named

FOLDERS = ("src", "tests", "docs", "bench", "tools", "peers", "deploy", "examples")
PAGES = sorted(
    path
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "changes/README.md",
        "docs/*.md",
        "bench/*.md",
        "tests/*/*.md",
        "deploy/**/*.yml",
        "examples/**/*.py",
    )
    for path in ROOT.glob(pattern)
)
# Source files wherever they are said to be, and whatever is said to be in a folder of this tree.
SOURCE_FILE = re.compile(r"(?<![\w./*-])((?:[\w.-]+/)*\w+\.(?:pyx|pxd|pxi|pyi|py))(?![\w/])")
IN_FOLDER = re.compile(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)")
MODULE = re.compile(r"(?<![\w./-])((?:cosmodrome|bench|tools|peers|tests)(?:\.\w+)+)(?![\w/])")

NOT_OURS = {"filters/colours.py"}  # what readers write themselves


def paths(text: str) -> set[str]:
    return {*SOURCE_FILE.findall(text), *IN_FOLDER.findall(text)}


def path_exists(word: str) -> bool:
    """Below the root or the package; a bare name is a file anywhere in the source."""
    if "/" not in word and word in names().files:
        return True
    return any((folder / word).exists() for folder in (ROOT, SOURCE))


def module_exists(word: str) -> bool:
    """A module or package, or something that one of them binds; a logger or an entry point."""
    if word in names().strings:
        return True
    first, *rest = word.removesuffix(".NAME").split(".")
    place = SOURCE if first == "cosmodrome" else ROOT / first
    for number, part in enumerate(rest):
        if (place / part).is_dir():
            place = place / part
            continue
        if place.joinpath(part).with_suffix(".py").exists():
            return _binds(part, rest[number + 1 :])
        if place.joinpath(part).with_suffix(".pyx").exists():
            return True
        return _binds(place.name, rest[number:])
    return True


def _binds(module: str, rest: list[str]) -> bool:
    """Whether a module has a name; what follows that name is not looked at."""
    return not rest or rest[0] in names().members[module]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_files_in_documents_exist(page: Path) -> None:
    missing = {word for word in paths(page.read_text()) - NOT_OURS if not path_exists(word)}
    assert not missing, f"{named(page)} names files that are not there: {sorted(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_modules_in_documents_exist(page: Path) -> None:
    words = set(MODULE.findall(page.read_text()))
    missing = {word for word in words if not module_exists(word)}
    assert not missing, f"{named(page)} names modules that are not there: {sorted(missing)}"


def test_there_is_something_to_look_at() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    assert len(paths(text)) >= 30
    assert len(set(MODULE.findall(text))) >= 20


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("see `client/receive/consumer.py`.", {"client/receive/consumer.py"}),
        ("(`pure.py` is the law)", {"pure.py"}),
        ("`tests/tidy` and `docs/client.md#receive`", {"tests/tidy", "docs/client.md"}),
        (".venv/bin/python examples/spark/00_make_orders.py", {"examples/spark/00_make_orders.py"}),
        ("`/etc/tests/x` and `config/topics.json` are elsewhere", set()),
    ],
)
def test_paths_are_found_in_text(text: str, found: set[str]) -> None:
    assert paths(text) == found


@pytest.mark.parametrize(
    "word", ["client/receive/consumer.py", "pure.py", "tests/tidy", "deploy/prometheus/alerts.yml"]
)
def test_a_path_that_exists(word: str) -> None:
    assert path_exists(word)


@pytest.mark.parametrize("word", ["client/consumer.py", "purer.py", "tests/tidies", "docs/x.md"])
def test_a_path_that_does_not_exist(word: str) -> None:
    assert not path_exists(word)


@pytest.mark.parametrize(
    "word",
    [
        "cosmodrome.client.receive.rebalance",
        "cosmodrome.blocking",
        "cosmodrome.spark.user_properties",
        "cosmodrome.speed.core.native",
        "cosmodrome.errors.CosmodromeError",
        "bench.loadgen",
        "tests.unit.store.store_kit",
    ],
)
def test_a_module_that_exists(word: str) -> None:
    assert module_exists(word)


@pytest.mark.parametrize(
    "word",
    [
        "cosmodrome.client.receive.rebalances",
        "cosmodrome.blockings",
        "cosmodrome.spark.user_property",
        "cosmodrome.speed.native",
        "cosmodrome.errors.NoSuchError",
        "bench.loads",
        "tests.unit.store.kit",
    ],
)
def test_a_module_that_does_not_exist(word: str) -> None:
    assert not module_exists(word)
