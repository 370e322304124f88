"""Headers and bodies that no server must stumble over, made from the table of commands."""

from __future__ import annotations

from typing import Any

from cosmodrome.wire import table
from cosmodrome.wire.table import Command

GARBAGE = (b"\xff\xfe\x00garbage", b"{", b"[" * 5000, b"null", b"[]", b'{"a":{}}', b"5", b'"text"')
NO_NUMBERS = ("", "x", "1.5", "99999999999999999999", "-99999999999999999999", "0x10")
# Compat: a producer that has not decided gets no answer, so nothing can be seen there.
COMMIT = "commitOrRollback"


def header_of(row: type[Command[Any]]) -> dict[str, str]:
    """A header that the row takes, with values that mean little."""
    values: dict[str, str] = {}
    for field in table.header_fields(row):
        text = str(field.type)
        if "bool" in text:
            values[field.encode_name] = "false"
        else:
            values[field.encode_name] = "1" if "int" in text else "T"
    return values | ({COMMIT: "8"} if COMMIT in values else {})


def numbers_of(row: type[Command[Any]]) -> list[str]:
    return [field.encode_name for field in table.header_fields(row) if "int" in str(field.type)]
