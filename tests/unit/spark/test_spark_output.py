"""`jobs/output.py`, `views.py` and the flags of `query`, as far as no Spark is needed."""

from __future__ import annotations

import datetime
import decimal
from typing import Any

import pytest

from cosmodrome.errors import ConfigError
from cosmodrome.spark.jobs import output
from cosmodrome.spark.jobs.query import _limit, _topic_name
from cosmodrome.spark.views import TableSource, missing_name, quoted


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NULL"),
        (bytearray("ü\n".encode()), "ü·"),
        (b"\xff\x00", "0xff00"),
        (True, "true"),
        (decimal.Decimal("1.50"), "1.50"),
        ({"a": b"\xff"}, '{"a": "/w=="}'),
        ([1, None], "[1, null]"),
        ("x" * 70, "x" * 59 + "…"),
    ],
)
def test_cells_of_a_table(value: Any, text: str) -> None:
    assert output.cell(value) == text


def test_a_whole_cell() -> None:
    assert output.cell("x" * 70, 0) == "x" * 70
    assert output.cell(b"\xff" * 70, 0) == "0x" + "ff" * 70


def test_a_table_is_as_wide_as_its_cells() -> None:
    assert list(output.table_lines(["a", "name"], [["long", "x"], ["b", ""]])) == [
        "a     name\n",
        "────  ────\n",
        "long  x\n",
        "b\n",
    ]
    assert list(output.table_lines(["a"], [])) == ["a\n", "─\n"]


def test_values_as_json() -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5, 600, tzinfo=datetime.UTC)
    assert output.plain({"t": moment, 1: decimal.Decimal("2")}) == {
        "t": "2026-01-02T03:04:05.000600+00:00",
        "1": 2,
    }
    lines = list(output._json_lines(["body", "other"], [(b"ok", b"\xff"), (None, "x")]))
    assert lines == [
        '{"body": "ok", "other_base64": "/w=="}',
        '{"body": null, "other": "x"}',
    ]


def test_csv_quotes_what_needs_it() -> None:
    rows = [(b"a,b", {"k": "v"}, True, None), ("\n", 1, 2.5, "x")]
    assert list(output._csv_lines(["w", "x", "y", "z"], rows)) == [
        "w,x,y,z\n",
        '"a,b","{""k"": ""v""}",true,\n',
        '"\n",1,2.5,x\n',
    ]
    assert list(output._csv_lines(["w"], [])) == ["w\n"]


@pytest.mark.parametrize(
    ("condition", "relation", "name"),
    [
        ("TABLE_OR_VIEW_NOT_FOUND", "`orders`", "orders"),
        ("TABLE_OR_VIEW_NOT_FOUND", "`%DLQ%a.b`", "%DLQ%a.b"),
        ("TABLE_OR_VIEW_NOT_FOUND", "`a``b`", "a`b"),
        ("TABLE_OR_VIEW_NOT_FOUND", "`db`.`orders`", None),
        ("TABLE_OR_VIEW_NOT_FOUND", "orders", "orders"),
        ("UNRESOLVED_COLUMN", "`orders`", None),
        (None, "`orders`", None),
    ],
)
def test_the_name_that_spark_misses(condition: str | None, relation: str, name: str) -> None:
    assert missing_name(condition, {"relationName": relation}) == name


def test_a_name_is_quoted() -> None:
    assert quoted("a`b-c") == "`a``b-c`"


def test_places_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="read alone"):
        TableSource(store="/s", archive="/a")
    with pytest.raises(ConfigError, match="nothing to read"):
        TableSource()
    with pytest.raises(ConfigError, match="no topic has such a name"):
        TableSource(store="/s")._topic(None, "a b")  # type: ignore[arg-type]


def test_limits_and_names_of_the_command() -> None:
    assert _limit(None, "table").fetched == 101 and _limit(None, "csv").fetched is None
    assert _limit(0, "table").fetched is None and _limit(5, "csv").fetched == 5
    assert _topic_name("orders-v2=o") == ("o", "orders-v2")
    assert _topic_name("orders") == ("orders", "orders")
    with pytest.raises(ConfigError, match="NAME=VIEW"):
        _topic_name("orders=")
