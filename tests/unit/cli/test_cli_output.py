"""Rows in six forms."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.cli.operating_kit import read_yaml

from cosmodrome.cli.support import yaml_text
from cosmodrome.cli.support.output import (
    FORMATS,
    UNKNOWN,
    Column,
    Time,
    iso,
    paint,
    show,
    show_one,
    table_lines,
)

COLUMNS = (
    Column("topic"),
    Column("messages", right=True),
    Column("stored_ms", time=True),
    Column("ok"),
    Column("labels", "TAGS", wide=True),
)
ROWS: list[dict[str, object]] = [
    {"topic": "a", "messages": 12, "stored_ms": 0, "ok": True, "labels": ["x", "y"]},
    {"topic": "日本", "messages": UNKNOWN, "ok": False, "labels": {"k": "v"}},
    {"topic": None, "messages": 1.5, "stored_ms": UNKNOWN, "labels": []},
]
EPOCH = iso(0)


def printed(capsys: pytest.CaptureFixture[str], output: str, rows: Any = ROWS) -> str:
    show(output, COLUMNS, rows)
    return capsys.readouterr().out


def test_a_table_is_aligned_and_says_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    gap = " " * (len(EPOCH) - 6)
    assert printed(capsys, "table") == (
        f"TOPIC  MESSAGES  STORED{gap}  OK\n"
        f"a            12  {EPOCH}  yes\n"
        f"日本    unknown  -{' ' * (len(EPOCH) - 1)}  no\n"
        f"-          1.50  unknown{' ' * (len(EPOCH) - 7)}  -\n"
    )


def test_wide_has_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "wide").splitlines()
    assert lines[0].endswith("OK   TAGS")
    assert [line.split()[-1] for line in lines[1:]] == ["x,y", "k=v", "-"]


def test_programs_get_every_column_and_moments_twice(capsys: pytest.CaptureFixture[str]) -> None:
    expected = [
        {
            "topic": "a",
            "messages": 12,
            "stored_ms": 0,
            "stored": EPOCH,
            "ok": True,
            "labels": ["x", "y"],
        },
        {
            "topic": "日本",
            "messages": None,
            "stored_ms": None,
            "stored": None,
            "ok": False,
            "labels": {"k": "v"},
        },
        {
            "topic": None,
            "messages": 1.5,
            "stored_ms": None,
            "stored": None,
            "ok": None,
            "labels": [],
        },
    ]
    assert json.loads(printed(capsys, "json")) == expected
    lines = printed(capsys, "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == expected
    assert read_yaml(printed(capsys, "yaml")) == expected
    from_csv = list(csv.DictReader(io.StringIO(printed(capsys, "csv"))))
    assert from_csv[0] == {
        "topic": "a",
        "messages": "12",
        "stored_ms": "0",
        "stored": EPOCH,
        "ok": "true",
        "labels": '["x", "y"]',
    }
    assert from_csv[1]["messages"] == from_csv[1]["stored"] == ""


@pytest.mark.parametrize("output", FORMATS)
def test_no_rows_are_an_empty_list_of_the_same_form(
    output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, output, [])
    expected = {
        "table": "TOPIC  MESSAGES  STORED  OK\n",
        "wide": "TOPIC  MESSAGES  STORED  OK  TAGS\n",
        "json": "[]\n",
        "jsonl": "",
        "csv": "topic,messages,stored_ms,stored,ok,labels\n",
        "yaml": "[]\n",
    }
    assert text == expected[output]


@pytest.mark.parametrize("output", FORMATS)
def test_one_record(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_one(output, {"name": "x", "at_ms": Time(0), "lag": UNKNOWN, "parts": [{"a": 1}]})
    text = capsys.readouterr().out
    plain = {"name": "x", "at_ms": 0, "at": EPOCH, "lag": None, "parts": [{"a": 1}]}
    if output in ("table", "wide"):
        assert [line.split(None, 1) for line in text.splitlines()] == [
            ["KEY", "VALUE"],
            ["name", "x"],
            ["at", EPOCH],
            ["lag", "unknown"],
            ["parts", '[{"a": 1}]'],
        ]
    elif output == "csv":
        assert text.splitlines()[0] == "name,at_ms,at,lag,parts"
        assert next(csv.DictReader(io.StringIO(text)))["parts"] == '[{"a": 1}]'
    else:
        read = read_yaml if output == "yaml" else json.loads
        assert read(text) == plain
        assert output != "jsonl" or text.count("\n") == 1


def test_a_name_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "x\x1b[2J\r\ny\x9b\u202e"
    assert "\x1b" not in printed(capsys, "table", [{"topic": evil}])
    line = table_lines(COLUMNS, [{"topic": evil}])[1]
    assert line.startswith("x\\x1b[2J\\r\\ny\\x9b\\u202e")
    assert json.loads(printed(capsys, "json", [{"topic": evil}]))[0]["topic"] == evil
    assert read_yaml(printed(capsys, "yaml", [{"topic": evil}]))[0]["topic"] == evil
    rows = csv.DictReader(io.StringIO(printed(capsys, "csv", [{"topic": evil}]), newline=""))
    assert next(rows)["topic"] == evil


def test_half_a_character_does_not_end_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys, "json", [{"topic": "\ud800"}]))[0]["topic"] == "\ud800"


def test_a_moment_beyond_calendars_is_its_number() -> None:
    assert iso(2**62) == str(2**62)


def test_colours_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert paint("x", bold=True) == "x"
    monkeypatch.setattr("sys.stdout", Terminal())
    assert paint("x", bold=True) == "\x1b[1mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", bold=True) == "x"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert paint("x", bold=True) == "x"


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "No",
        "null",
        "~",
        "",
        " ",
        "1",
        "1e3",
        "0x1f",
        ".5",
        "-",
        "- a",
        "a: b",
        "a #b",
        "2026-11-16",
        "on",
        "TRUE",
        "nan",
        ".inf",
        "%TAG",
        "@x",
        "`",
        "[",
        "{",
        "a,b",
        "a\tb",
        "'",
        "#",
        '"',
        "\\",
        "\U0001f680",
        "\u2028",
        "é",
        "=",
        "<<",
        "!x",
        "&a",
        "*a",
        "|",
        ">",
        "?",
        ":",
    ],
)
def test_yaml_text_that_looks_like_something_else_is_quoted(text: str) -> None:
    written = yaml_text.dumps({"v": text})
    assert read_yaml(written) == {"v": text}
    plain = written.removeprefix("v: ").rstrip("\n")
    assert plain.startswith('"') or plain == "a,b"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), min_size=1), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_yaml_gives_the_same_values_back(value: Any) -> None:
    assert read_yaml(yaml_text.dumps(value)) == value
