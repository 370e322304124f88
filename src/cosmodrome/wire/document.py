"""Renders docs/protocol.md from the table of commands.

Run `python -m cosmodrome.wire.document > docs/protocol.md` after changing a row; a test compares.
"""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from cosmodrome.layout import HEADER_BYTES_MAX
from cosmodrome.wire.commands import Int32
from cosmodrome.wire.table import BODY_BYTES_MAX, Command, Role, header_fields, rows

KIB = 1024

_INTRODUCTION = """\
# Protocol

<!-- Written by `python -m cosmodrome.wire.document`; change the rows in wire/commands instead. -->

All request codes, made from the table that the servers use. Header fields are sent as strings. `!`
marks a field that must be present. A field that a row does not name is ignored.
A request whose code is not served is answered with 3 (REQUEST_CODE_NOT_SUPPORTED). What a request
needs is asked for with `aclEnable`; [security.md](security.md) explains it.
"""

_SECTIONS = {
    Role.BROKER: "Served by the broker",
    Role.NAMESERVER: "Served by the name server",
    Role.CLIENT: "Served by clients (sent by the broker)",
    Role.FILTERSERVER: "Served by filter servers",
}


def render() -> str:
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    table = rows()
    yield _INTRODUCTION
    yield _sizes(table)
    yield "| server | codes | served |"
    yield "|---|---|---|"
    for role in (Role.BROKER, Role.NAMESERVER, Role.FILTERSERVER):
        of_role = [row for row in table.values() if role in row.served_by]
        served = sum(not row.planned for row in of_role)
        yield f"| {role.value} | {len(of_role)} | {served} |"
    for role, title in _SECTIONS.items():
        yield f"\n## {title}\n"
        yield "| code | name | class | request header | reply header | needs | meaning | state |"
        yield "|---|---|---|---|---|---|---|---|"
        for code in sorted(table):
            if role in table[code].served_by:
                yield _row(table[code], role)


def _sizes(table: Mapping[int, type[Command[Any]]]) -> str:
    longer: dict[int, list[str]] = {}
    for code, row in sorted(table.items()):
        longer.setdefault(row.body_bytes_max, []).append(str(code))
    del longer[BODY_BYTES_MAX]
    others = "; ".join(f"{size // KIB} KiB: {', '.join(longer[size])}" for size in sorted(longer))
    return (
        f"A header may have {HEADER_BYTES_MAX // KIB} KiB; a longer one ends the connection."
        f" The body of a request may have\n{BODY_BYTES_MAX // KIB} KiB; a longer one is answered"
        f" with 1 (SYSTEM_ERROR). Other limits: {others}.\n"
    )


def _row(row: type[Command[Any]], role: Role) -> str:
    meaning = (row.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")
    if role is Role.CLIENT:
        state = "understood by clients"
    else:
        state = f"not served: {row.planned}" if row.planned else "served"
    cells = (
        str(row.request_code),
        row.name,
        f"`{row.__name__}`",
        _fields(row),
        _fields(row.reply),
        "" if row.needs is None else row.needs.text,
        meaning,
        state,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _fields(kind: type[msgspec.Struct]) -> str:
    return ", ".join(
        f"{field.encode_name}: {_type_name(field.type)}{'!' if field.required else ''}"
        for field in header_fields(kind)
    )


def _type_name(kind: Any) -> str:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    if kind is str:
        return "string"
    if kind is bool:
        return "bool"
    return "int32" if kind == Int32 else "int64"


if __name__ == "__main__":
    sys.stdout.write(render())
