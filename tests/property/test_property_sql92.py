"""SQL92 filters against an independent evaluator: SQLite, for what both languages share.

SQLite's types are not ours, so each condition is written twice: in the filter language, and in
SQL with the conversions and the rules about missing values spelled out.
"""

from __future__ import annotations

import dataclasses
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmodrome.broker.sql92 import (
    CHARACTERS_MAX,
    Expression,
    Sql92Error,
    compile_expression,
)

NUMBERS = ("n1", "n2", "n3")  # properties that hold integers, when they are there
TEXTS = ("t1", "t2")
KINDS = ["order", "decimal", "names", "between", "in", "null", "bare", "equal", "pair"]
WORDS = ["", "a", "b", "ab", "true", "TRUE", "it's", "中文", "5"]


@dataclasses.dataclass(frozen=True)
class Both:
    ours: str
    sql: str


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


integers = st.integers(-20, 20)
words = st.sampled_from(WORDS)
number_names = st.sampled_from(NUMBERS)
text_names = st.sampled_from(TEXTS)


@st.composite
def conditions(draw: st.DrawFn) -> Both:
    name, other, text = draw(number_names), draw(number_names), draw(text_names)
    number = draw(integers)
    cast = f"CAST({name} AS INTEGER)"
    kind = draw(st.sampled_from(KINDS))
    operator = draw(st.sampled_from([">", ">=", "<", "<=", "=", "<>"]))
    negated = draw(st.sampled_from(["", "NOT "]))
    if kind == "order":
        return Both(f"{name} {operator} {number}", f"{cast} {operator} {number}")
    if kind == "decimal":
        decimal = number + 0.5
        real = f"CAST({name} AS REAL)"
        return Both(f"{name} {operator} {decimal}", f"{real} {operator} {decimal}")
    if kind == "names":
        order = operator if operator in ("<", ">") else "<="
        left, right = f"CAST({name} AS REAL)", f"CAST({other} AS REAL)"
        return Both(f"{name} {order} {other}", f"{left} {order} {right}")
    if kind == "between":
        low, high = sorted((number, draw(integers)))
        between = f"{negated}BETWEEN {low} AND {high}"
        return Both(f"{name} {between}", f"({cast} {between})")
    if kind == "in":
        listed = ", ".join(quoted(word) for word in draw(st.lists(words, min_size=1, max_size=6)))
        return Both(*[f"{text} {negated}IN ({listed})"] * 2)
    if kind == "null":
        return Both(*[f"{text} IS {negated}NULL"] * 2)
    if kind == "bare":
        return Both(text, f"(lower({text}) = 'true')")
    if kind == "equal":
        same = draw(st.sampled_from(["=", "<>"]))
        return Both(*[f"{text} {same} {quoted(draw(words))}"] * 2)
    # Two missing properties are equal; a missing one on the right is merely different.
    pair = f"CASE WHEN {name} IS NULL THEN CASE WHEN {other} IS NULL THEN 1 END"
    pair += f" WHEN {other} IS NULL THEN 0 ELSE {name} = {other} END"
    if operator == "<>":
        return Both(f"{name} <> {other}", f"(NOT ({pair}))")
    return Both(f"{name} = {other}", f"({pair})")


def combined(inner: st.SearchStrategy[Both]) -> st.SearchStrategy[Both]:
    def join(parts: list[Both], operators: list[str]) -> Both:
        ours, sql = parts[0].ours, parts[0].sql
        for operator, part in zip(operators, parts[1:], strict=False):
            ours += f" {operator} {part.ours}"
            sql += f" {operator} {part.sql}"
        return Both(ours, sql)

    joined = st.builds(
        join,
        st.lists(inner, min_size=1, max_size=4),
        st.lists(st.sampled_from(["AND", "OR"]), min_size=3, max_size=3),
    )
    grouped = inner.map(lambda one: Both(f"({one.ours})", f"({one.sql})"))
    negated = inner.map(lambda one: Both(f"NOT ({one.ours})", f"(NOT ({one.sql}))"))
    return joined | grouped | negated


expressions = st.recursive(conditions(), combined, max_leaves=12)
messages = st.fixed_dictionaries(
    {},
    optional={
        **{name: integers.map(str) for name in NUMBERS},
        **{name: words.filter(bool) for name in TEXTS},
    },
)


@pytest.fixture(scope="module")
def sqlite() -> sqlite3.Connection:
    return sqlite3.connect(":memory:")


@settings(max_examples=400, deadline=None)
@given(expression=expressions, properties=messages)
def test_agrees_with_sqlite(
    sqlite: sqlite3.Connection, expression: Both, properties: dict[str, str]
) -> None:
    columns = ", ".join(f"? AS {name}" for name in (*NUMBERS, *TEXTS))
    row = sqlite.execute(
        f"SELECT {expression.sql} FROM (SELECT {columns})",
        [properties.get(name) for name in (*NUMBERS, *TEXTS)],
    ).fetchone()
    assert compile_expression(expression.ours).matches(properties) is (row[0] == 1)


alphabet = st.sampled_from(
    [
        "a",
        "b",
        "TAGS",
        "1",
        "2.5",
        "'x'",
        "''",
        "NULL",
        "TRUE",
        "FALSE",
        "(",
        ")",
        ",",
        "+",
        "-",
        "=",
        "<>",
        "<",
        ">=",
        "AND",
        "OR",
        "NOT",
        "IS",
        "IN",
        "BETWEEN",
        "CONTAINS",
        "--",
        "/*",
        "*/",
        "\n",
        "'",
        "!",
        "é",
        "007",
        "1e999",
    ]
)


@settings(max_examples=400, deadline=None)
@given(text=st.lists(alphabet, max_size=40).map(" ".join) | st.text(max_size=60))
def test_any_text_is_an_expression_or_points_at_its_fault(text: str) -> None:
    try:
        expression = compile_expression(text)
    except Sql92Error as error:
        assert 0 <= error.position <= min(len(text), CHARACTERS_MAX)
        assert str(error).splitlines()[-1].strip() == "^"
    else:
        assert isinstance(expression, Expression)
        assert expression.matches({"a": "1", "b": "x"}) in (True, False)
