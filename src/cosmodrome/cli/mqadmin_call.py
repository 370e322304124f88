"""What the calls of `cosmo mqadmin` share: how one is found and run, what it gives, whom it asks.

A call is a coroutine in one of the modules `mqadmin_topics`, `mqadmin_groups`, `mqadmin_messages`
and `mqadmin_brokers`. It takes a started Admin and the flags by their letters.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cosmodrome.cli.operating import NotFound, finish, opened
from cosmodrome.cli.output import Column, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.values import MessageQueue

Given = Mapping[str, Any]


class Table(NamedTuple):
    """What a call gives, to be shown."""

    columns: Sequence[Column]
    rows: Iterable[Mapping[str, object]]


Call = Callable[[Admin, Given], Awaitable[Table]]


def find_call(name: str) -> Call:
    """`groups:producers` is `producers` in `mqadmin_groups.py`."""
    module, _, function = name.partition(":")
    found: Call = getattr(importlib.import_module(f"cosmodrome.cli.mqadmin_{module}"), function)
    return found


def run_call(name: str, namesrv: str, given: Given) -> None:
    """Do it, and show what it gives."""

    async def once() -> None:
        async with opened(namesrv, given["timeout"]) as admin:
            columns, rows = await find_call(name)(admin, {**given, "namesrv": namesrv})
            show(given["output"] or "table", columns, rows)

    finish(once())


async def masters(
    admin: Admin, *, broker: str | None = None, cluster: str | None = None
) -> dict[str, str]:
    """The masters that -b or -c mean, or all: name → address."""
    found = await admin.brokers.addresses(cluster=cluster)
    if broker is None:
        return found
    chosen = {name: at for name, at in found.items() if broker in (name, at)}
    if not chosen:
        raise NotFound(f"there is no broker {broker}; known are: {', '.join(found)}")
    return chosen


def place(queue: MessageQueue) -> tuple[str, str, int]:
    return queue.topic, queue.broker_name, queue.queue_id
