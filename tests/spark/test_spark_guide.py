"""The guide's snippets and the example scripts run as they stand, one after the other."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cosmodrome.blocking import Node

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "pipeline.md"
EXAMPLES = sorted((ROOT / "examples" / "spark").glob("*.py"))
SNIPPETS = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
LINES_MAX = 40
ORDERS = 1000  # that the first example sends


@pytest.fixture(autouse=True)
def few_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session asks the machine into how many parts to shuffle; these are small."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


@pytest.fixture(scope="module")
def orders(cosmo_node: Node) -> Node:
    """A node with what the guide presumes."""
    run_example(EXAMPLES[0], cosmo_node.namesrv)
    return cosmo_node


def run_example(path: Path, *arguments: str) -> dict[str, Any]:
    before = sys.argv
    sys.argv = [str(path), *arguments]
    try:
        return runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before


def test_there_is_something_to_run() -> None:
    assert len(SNIPPETS) >= 9
    assert [path.name[:2] for path in EXAMPLES] == [f"{n:02d}" for n in range(len(EXAMPLES))]
    assert len(EXAMPLES) >= 7


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= LINES_MAX
    assert f"examples/spark/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")


class Notebook:
    """The snippets in one namespace; only addresses and directories are others."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.names: dict[str, Any] = {}
        self._node = node
        self._folder = folder
        self._next = 0

    def run(self, number: int) -> None:
        """This one, after those before it."""
        while self._next <= number:
            at, self._next = self._next, self._next + 1
            code = SNIPPETS[at].replace("127.0.0.1:9876", self._node.namesrv)
            code = code.replace('"/lake', f'"{self._folder}/lake')
            code = code.replace('"/data/store', f'"{self._node.data}')
            exec(compile(code, f"{GUIDE.name}, snippet {at}", "exec"), self.names)


@pytest.fixture(scope="module")
def notebook(
    spark: SparkSession, orders: Node, tmp_path_factory: pytest.TempPathFactory
) -> Notebook:
    return Notebook(orders, tmp_path_factory.mktemp("guide"))


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet(number: int, notebook: Notebook) -> None:
    notebook.run(number)


def test_the_snippets_did_what_they_say(spark: SparkSession, notebook: Notebook) -> None:
    notebook.run(len(SNIPPETS) - 1)
    names = notebook.names
    assert names["spark"] is spark
    assert names["everything"].count() == ORDERS
    assert names["values"].columns == ["store_time", "amount", "customer", "id"]
    assert names["decoded"].columns == ["value"]
    if importlib.util.find_spec("fastavro") is not None:
        import fastavro

        buffer = names["io"].BytesIO()
        fastavro.schemaless_writer(buffer, names["AVRO"], {"id": 7})
        frame = spark.createDataFrame([(buffer.getvalue(),)], "body binary")
        assert frame.select(names["decode"]("body").alias("v")).first().v.id == 7


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("01_read_a_topic", "order-"),
        ("02_stream_orders", "tags='paid'"),
        ("03_json_bodies", "struct<amount:bigint,customer:string,id:bigint>"),
        ("04_archive_and_live", "of them stored after the archive: 1\n"),
        ("05_write_back", " invoices\n"),
        ("06_offline_store", "0 damaged places\n"),
    ],
)
def test_an_example(
    name: str,
    says: str,
    spark: SparkSession,
    orders: Node,
    capfd: pytest.CaptureFixture[str],
) -> None:
    argument = orders.data if "store" in name else orders.namesrv
    run_example(ROOT / "examples" / "spark" / f"{name}.py", argument)
    assert says in capfd.readouterr().out
