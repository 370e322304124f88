"""The tables of the guide agree with the code: no option undocumented, none invented."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from cosmodrome.spark.jobs import JOBS
from cosmodrome.spark.read.options import CONNECTION_OPTIONS, READ_OPTIONS
from cosmodrome.spark.read.rows import COLUMNS

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = (DOCS / "pipeline.md").read_text()
SINK = (DOCS / "pipeline-exactly-once.md").read_text()


def first_cells(table: str) -> list[str]:
    """Names in backticks in the first cell of each row."""
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])]


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_options_of_the_source() -> None:
    named = first_cells(GUIDE.split("<!-- options: read -->")[1].split("<!-- end -->")[0])
    assert sorted(named) == sorted(READ_OPTIONS)


def test_columns_of_the_source() -> None:
    named = first_cells(section(GUIDE, "The first table"))
    assert sorted(named) == sorted(COLUMNS)


def test_options_and_columns_of_the_sink() -> None:
    pytest.importorskip("pyarrow")
    from cosmodrome.spark.write.options import WRITE_OPTIONS
    from cosmodrome.spark.write.row_messages import TYPES

    of_spark = {"path", "checkpointLocation"}  # .save(topic), and what every stream has
    named = set(first_cells(section(SINK, "Options")))
    assert named <= set(WRITE_OPTIONS)
    assert set(WRITE_OPTIONS) - named <= set(CONNECTION_OPTIONS) | of_spark
    assert sorted(first_cells(section(SINK, "Columns"))) == sorted(TYPES)


def test_jobs_and_their_flags() -> None:
    """Every job has its heading; a flag that the guide shows exists."""
    flags = {"--help"}
    for name in JOBS:
        assert re.search(rf"^### .*`{name}`", GUIDE, re.MULTILINE), name
        command = importlib.import_module(f"cosmodrome.spark.jobs.{name}").command
        for parameter in command.params:
            flags.update(parameter.opts, parameter.secondary_opts)
    shown = set(re.findall(r"(?<![\w-])(--[a-z][a-z-]+)", GUIDE)) - {"--port"}
    assert shown <= flags, shown - flags


def test_links_lead_somewhere() -> None:
    for page in sorted(DOCS.glob("pipeline*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (DOCS / target).exists(), f"{page.name}: {target}"
