"""What the calls of `cosmo mqadmin` share: how one is found and run, what it gives, whom it asks.

A call is a coroutine in one of the modules `topics`, `groups`, `messages` and
`brokers`. It takes a started Admin and the flags by their letters.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cosmodrome.cli.support.operating import finish, opened
from cosmodrome.cli.support.output import Column, show
from cosmodrome.client.operate.admin import Admin

Flags = Mapping[str, Any]


class Table(NamedTuple):
    """What a call gives, to be shown."""

    columns: Sequence[Column]
    rows: Iterable[Mapping[str, object]]


Call = Callable[[Admin, Flags], Awaitable[Table]]


def find_call(name: str) -> Call:
    """`groups:producers` is `producers` in `groups.py`."""
    module, _, function = name.partition(":")
    found: Call = getattr(importlib.import_module(f"cosmodrome.cli.mqadmin.{module}"), function)
    return found


def run_call(name: str, namesrv: str, flags: Flags) -> None:
    """Do it, and show what it gives."""

    async def once() -> None:
        async with opened(namesrv, flags["timeout"]) as admin:
            columns, rows = await find_call(name)(admin, {**flags, "namesrv": namesrv})
            show(flags["output"] or "table", columns, rows)

    finish(once())
