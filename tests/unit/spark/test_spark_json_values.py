"""The schema of JSON bodies only grows."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark")

from pyspark.sql.types import StructType

from cosmodrome.errors import StoreCorrupt
from cosmodrome.spark import json_values
from cosmodrome.spark.json_values import ValueSchema

Fields = dict[str, Any]  # name → type: a word, a list of its element's type, or fields


def struct(fields: Fields) -> StructType:
    """StructType.fromDDL would need a JVM."""
    return StructType.fromJson(_kind(fields))


def _kind(value: Any) -> Any:
    if isinstance(value, dict):
        fields = [
            {"name": name, "type": _kind(kind), "nullable": True, "metadata": {}}
            for name, kind in value.items()
        ]
        return {"type": "struct", "fields": fields}
    if isinstance(value, list):
        return {"type": "array", "elementType": _kind(value[0]), "containsNull": True}
    return value


def grown(*steps: Fields) -> ValueSchema:
    schema = ValueSchema()
    for fields in steps:
        schema = schema.widened(struct(fields))
    return schema


def test_new_fields_are_added_at_every_depth() -> None:
    schema = grown(
        {"a": "long", "s": {"x": "string"}},
        {"s": {"y": [{"p": "long"}]}, "b": "boolean"},
        {"s": {"y": [{"q": "string"}]}},
    )
    assert schema.version == 3 and schema.exact
    assert schema.stored.simpleString() == (
        "struct<a:bigint,s:struct<x:string,y:array<struct<p:bigint,q:string>>>,b:boolean>"
    )
    assert schema.widened(struct({"b": "boolean", "a": "long"})) is schema


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        ("long", "string", "string"),
        ("long", "double", "double"),
        ("double", "long", "double"),
        ("boolean", "long", "string"),
        ({"x": "long"}, "string", "string"),
        (["long"], ["string"], ["string"]),
        (["long"], "long", "string"),
    ],
)
def test_a_conflict_keeps_the_stored_type(first: Any, second: Any, whole: Any) -> None:
    schema = grown({"f": first}, {"f": second})
    assert schema.stored == struct({"f": first})
    assert schema.whole == struct({"f": whole})
    assert schema.exact == (first == whole)


def test_names_differ_by_more_than_case() -> None:
    schema = grown({"Id": "long"}, {"id": "long"})
    assert schema.stored.names == ["Id"] and schema.version == 1


def test_empty_until_something_came() -> None:
    schema = ValueSchema()
    assert schema.column is None and schema.exact
    assert schema.widened(StructType()) is schema


def test_fields_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_values, "FIELDS_MAX", 3)
    schema = grown({"a": "long", "b": "long"})
    assert schema.widened(struct({"c": "long", "d": {"x": "long", "y": ["long"]}})) is schema


def test_names_and_depths_that_no_table_has() -> None:
    found = struct({"a": "long", "A": "long", "b c": "long", "": "long", "e": {}, "f": [{}]})
    assert json_values._cleaned(found, 0).names == ["a"]
    deep: Any = "long"
    for _ in range(30):
        deep = [deep]
    cleaned = json_values._cleaned(struct({"d": deep}), 0).simpleString()
    assert cleaned.count("array") < 20 and "string" in cleaned


class Files:
    def __init__(self, content: object = None) -> None:
        self.content = content

    def path(self, name: str) -> str:
        return name

    def read_json(self, name: str) -> object:
        return self.content

    def write_json(self, name: str, document: object) -> None:
        self.content = document


class Lake:
    def __init__(self, content: object = None) -> None:
        self.files = Files(content)


def test_versions_are_kept() -> None:
    lake = Lake()
    assert json_values.load(lake) == ValueSchema()  # type: ignore[arg-type]
    first = grown({"a": "long"})
    second = first.widened(struct({"a": "string"}))
    json_values.save(lake, first, 3)  # type: ignore[arg-type]
    json_values.save(lake, second, 4)  # type: ignore[arg-type]
    assert json_values.load(lake) == second  # type: ignore[arg-type]
    with pytest.raises(StoreCorrupt, match="damaged"):
        json_values.load(Lake({"versions": []}))  # type: ignore[arg-type]
