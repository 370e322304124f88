"""How commands print what they found: one set of rows in six forms.

    show(output, (Column("topic"), Column("messages", right=True)), rows)

Tables are for people: times are written out, control characters are escaped, so that nothing that
a client named itself can move the cursor. The other forms are for programs: names in snake case,
every column, nothing left out. What is not known is `UNKNOWN`, never 0; what does not exist is
None. Everything goes to stdout, in one piece.
"""

from __future__ import annotations

import base64
import csv
import datetime
import io
import json
import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

import click

from cosmodrome.cli.support import yaml_text

F = TypeVar("F", bound=Callable[..., Any])

FORMATS = ("table", "wide", "json", "jsonl", "csv", "yaml")
FOR_PEOPLE = frozenset({"table", "wide"})
GAP = "  "


class Unknown:
    """The type of `UNKNOWN`: there is a value, and nobody who could be asked knows it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "unknown"

    def __bool__(self) -> bool:
        return False


UNKNOWN: Final = Unknown()


class Time(int):
    """Milliseconds since 1970 in a record of `show_one`; see `Column.time`."""


class Column(NamedTuple):
    """One column. A `time` holds milliseconds since 1970 and is called `…_ms`; tables write it
    out, and programs get both: `stored_ms` as it is and `stored` in ISO form."""

    name: str
    title: str = ""
    wide: bool = False  # not in a table, but in all other forms
    right: bool = False
    time: bool = False

    @property
    def heading(self) -> str:
        name = self.name.removesuffix("_ms") if self.time else self.name
        return self.title or name.upper().replace("_", " ")


def output_option(command: F) -> F:
    """`-o`: the same for every command that prints data."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(FORMATS),
        default="table",
        show_default=True,
        help="Form of the data on stdout.",
    )(command)


def show(output: str, columns: Sequence[Column], rows: Iterable[Mapping[str, object]]) -> None:
    """Print rows; a row that lacks a column has nothing there."""
    if output in FOR_PEOPLE:
        head, *lines = table_lines(columns, rows, wide=output == "wide")
        _write("".join(f"{line}\n" for line in (paint(head, bold=True), *lines)))
        return
    records = [as_record(columns, row) for row in rows]
    if output == "json":
        _write(_json(records, indent=2))
    elif output == "jsonl":
        _write("".join(_json(record) for record in records))
    elif output == "csv":
        _write(_csv(record_names(columns), records))
    else:
        _write(yaml_text.dumps(records))


def show_one(output: str, record: Mapping[str, object]) -> None:
    """Print one record: a table of two columns, or one object."""
    if output in FOR_PEOPLE:
        cells = [
            {"key": name.removesuffix("_ms") if isinstance(value, Time) else name, "value": value}
            for name, value in record.items()
        ]
        show(output, (Column("key"), Column("value")), cells)
        return
    plain = dict(pair for name, value in record.items() for pair in _members(name, value))
    if output == "json":
        _write(_json(plain, indent=2))
    elif output == "jsonl":
        _write(_json(plain))
    elif output == "csv":
        _write(_csv(list(plain), [plain]))
    else:
        _write(yaml_text.dumps(plain))


def table_lines(
    columns: Sequence[Column], rows: Iterable[Mapping[str, object]], *, wide: bool = False
) -> list[str]:
    """A table line by line, the headings first, without colours."""
    shown = [column for column in columns if wide or not column.wide]
    cells = [
        [column.heading for column in shown],
        *([_cell(_seen(column, row)) for column in shown] for row in rows),
    ]
    widths = [max(map(text_width, column)) for column in zip(*cells, strict=True)]
    lines = []
    for line in cells:
        padded = []
        for cell, width, column in zip(line, widths, shown, strict=True):
            space = " " * (width - text_width(cell))
            padded.append(space + cell if column.right else cell + space)
        lines.append(GAP.join(padded).rstrip())
    return lines


def iso(time_ms: int) -> str:
    """A moment in local time with its distance to UTC."""
    try:
        moment = datetime.datetime.fromtimestamp(time_ms / 1000).astimezone()
    except (OverflowError, ValueError, OSError):
        return str(time_ms)  # beyond the year 9999
    return moment.isoformat("T", "milliseconds")


def colourful() -> bool:
    """Whether stdout is a terminal that may be coloured (https://no-color.org)."""
    return (
        sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM", "") != "dumb"
    )


def paint(text: str, **style: Any) -> str:
    """Text in a style of `click.style`, where that is wanted."""
    return click.style(text, **style) if colourful() else text


# --- values ----------------------------------------------------------------------------------


def _seen(column: Column, row: Mapping[str, object]) -> object:
    value = row.get(column.name)
    if column.time and isinstance(value, int):
        return Time(value)
    return value


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, Unknown):
        return "unknown"
    if isinstance(value, Time):
        return iso(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.2f}"
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        if any(isinstance(item, Mapping | list | tuple) for item in items):
            return printable(json.dumps(_plain(items), ensure_ascii=False))
        return ",".join(_cell(item) for item in items) or "-"
    if isinstance(value, Mapping):
        if any(isinstance(item, Mapping | list | tuple) for item in value.values()):
            return printable(json.dumps(_plain(value), ensure_ascii=False))
        return ",".join(f"{_cell(name)}={_cell(item)}" for name, item in value.items()) or "-"
    return printable(str(value))


def _plain(value: object) -> Any:
    """What JSON knows."""
    if value is None or isinstance(value, Unknown):
        return None
    if isinstance(value, str | bool | float):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, Mapping):
        pairs = (_members(str(name), item) for name, item in value.items())
        return {name: item for members in pairs for name, item in members}
    if isinstance(value, set | frozenset):
        return [_plain(item) for item in sorted(value)]
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


def _members(name: str, value: object) -> list[tuple[str, Any]]:
    """A value under its name; a moment under two."""
    if isinstance(value, Time):
        return [(name, int(value)), (_iso_name(name), iso(value))]
    return [(name, _plain(value))]


def as_record(columns: Sequence[Column], row: Mapping[str, object]) -> dict[str, Any]:
    """One row with all its members, also those of moments that are missing."""
    record: dict[str, Any] = {}
    for column in columns:
        value = _seen(column, row)
        if column.time and not isinstance(value, Time):
            record.update({column.name: _plain(value), _iso_name(column.name): None})
        else:
            record.update(_members(column.name, value))
    return record


def record_names(columns: Sequence[Column]) -> list[str]:
    """The members that `as_record` gives a row."""
    return [
        name
        for column in columns
        for name in ((column.name, _iso_name(column.name)) if column.time else (column.name,))
    ]


def _iso_name(name: str) -> str:
    return name.removesuffix("_ms") if name.endswith("_ms") else f"{name}_iso"


# --- text ------------------------------------------------------------------------------------


def _write(text: str) -> None:
    # Half a surrogate pair has no UTF-8; its escape is right in JSON and harmless elsewhere.
    text = text.encode(errors="backslashreplace").decode()
    click.echo(text, nl=False, color=True)  # nothing is stripped: `paint` has decided already


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent) + "\n"


def _csv(names: Sequence[str], records: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_csv_cell(record.get(name)) for name in names] for record in records)
    return text.getvalue()


def _csv_cell(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    return value


def printable(text: str) -> str:
    """Control characters as escapes: a name must not be able to act on the terminal."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def text_or_base64(body: bytes) -> tuple[str | None, str | None]:
    """Bytes as text, or as base64 if they are not UTF-8."""
    try:
        return body.decode(), None
    except UnicodeDecodeError:
        return None, base64.b64encode(body).decode()


def text_width(text: str) -> int:
    """Columns on a terminal: East Asian characters take two, marks above others none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1
        for one in text
    )
