"""Rows of a DataFrame as text: a table for people, CSV and JSON for programs.

Binary values are shown as text when they are UTF-8. Otherwise CSV has base64, JSON has base64 under
`NAME_base64` (as `cosmo consume` has bodies), and a table shows the first bytes in hexadecimal.
Timestamps are UTC. Rows come one partition at a time, so a long result needs little memory.
"""

from __future__ import annotations

import base64
import csv
import datetime
import decimal
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TABLE, CSV, JSON, JSONL = "table", "csv", "json", "jsonl"
FORMS = (TABLE, CSV, JSON, JSONL)
CELL_CHARACTERS = 60
_ISO = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


def write(
    frame: DataFrame,
    form: str,
    echo: Callable[[str], object],
    *,
    cell_characters: int = CELL_CHARACTERS,
    rows_max: int | None = None,
) -> int:
    """Give the text to `echo` piece by piece; returns the number of rows that there were.

    `cell_characters` 0 leaves the cells of a table whole; it shows at most `rows_max` rows.
    """
    names = frame.columns
    rows = (
        tuple(row) for row in _plain_times(frame, form).toLocalIterator(prefetchPartitions=True)
    )
    if form == TABLE:
        # Widths depend on every cell, so a table is the one form that is held as a whole.
        cells = [[cell(value, cell_characters) for value in row] for row in rows]
        for line in table_lines(names, cells[:rows_max]):
            echo(line)
        return len(cells)
    lines = _csv_lines(names, rows) if form == CSV else _json_lines(names, rows)
    count = -1 if form == CSV else 0  # the heading is not a row
    for line in lines:
        if form == JSON:
            line = ("[\n" if not count else ",\n") + line
        elif form == JSONL:
            line += "\n"
        echo(line)
        count += 1
    if form == JSON:
        echo("[]\n" if not count else "\n]\n")
    return count


def table_lines(names: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with padded columns under their names."""
    widths = [
        max(len(name), *(len(row[at]) for row in rows)) if rows else len(name)
        for at, name in enumerate(names)
    ]
    for row in (list(names), ["─" * width for width in widths], *rows):
        padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield "  ".join(padded).rstrip() + "\n"


def cell(value: Any, characters: int = CELL_CHARACTERS) -> str:
    """A value in a table, on one line and not longer than asked."""
    if value is None:
        return "NULL"
    if isinstance(value, bytes | bytearray):
        try:
            text = bytes(value).decode()
        except UnicodeDecodeError:
            shown = value[:characters] if characters else value
            text = f"0x{bytes(shown).hex()}"
    elif isinstance(value, str):
        text = value
    elif isinstance(value, bool | int | float | decimal.Decimal | datetime.date):
        text = str(value).lower() if isinstance(value, bool) else str(value)
    else:
        text = json.dumps(plain(value), ensure_ascii=False)
    text = "".join(one if one.isprintable() else "\N{MIDDLE DOT}" for one in text)
    if characters and len(text) > characters:
        text = text[: characters - 1] + "…"
    return text


def plain(value: Any) -> Any:
    """A value as JSON has it; binary inside of others is text, or base64."""
    if isinstance(value, bytes | bytearray):
        return _text_or_base64(bytes(value))[0]
    if hasattr(value, "asDict"):
        return _object(value.asDict(recursive=False).items())
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, datetime.datetime):
        # Spark hands out the machine's local time for timestamps inside of other values.
        return value.astimezone(datetime.UTC).isoformat(timespec="microseconds")
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def _json_lines(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    for row in rows:
        yield json.dumps(_object(zip(names, row, strict=True)), ensure_ascii=False)


def _object(items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in items:
        if isinstance(value, bytes | bytearray):
            text, is_base64 = _text_or_base64(bytes(value))
            made[f"{name}_base64" if is_base64 else name] = text
        else:
            made[name] = plain(value)
    return made


def _csv_lines(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        yield _drain(buffer)
        writer.writerow([_csv_cell(value) for value in row])
    yield _drain(buffer)


def _drain(buffer: io.StringIO) -> str:
    text = buffer.getvalue()
    buffer.seek(0)
    buffer.truncate()
    return text


def _csv_cell(value: Any) -> Any:
    made = plain(value)
    if isinstance(made, dict | list):
        return json.dumps(made, ensure_ascii=False)
    if isinstance(made, bool):
        return str(made).lower()
    return made  # None is an empty cell


def _text_or_base64(value: bytes) -> tuple[str, bool]:
    try:
        return value.decode(), False
    except UnicodeDecodeError:
        return base64.b64encode(value).decode(), True


def _plain_times(frame: DataFrame, form: str) -> DataFrame:
    """Timestamps as text of the session's zone: Python would get them in the machine's own."""
    from pyspark.sql import functions
    from pyspark.sql.types import TimestampType

    columns = []
    for field in frame.schema.fields:
        column = functions.col(f"`{field.name.replace('`', '``')}`")
        if isinstance(field.dataType, TimestampType):
            column = column.cast("string") if form == TABLE else functions.date_format(column, _ISO)
            column = column.alias(field.name)
        columns.append(column)
    if len(set(frame.columns)) != len(frame.columns):
        return frame  # two columns of one name cannot be told apart by it
    return frame.select(*columns)
