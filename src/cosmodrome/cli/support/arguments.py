"""Arguments that several commands take, checked before a server sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from cosmodrome.errors import CosmodromeError, Refused
from cosmodrome.wire.bodies import PERM_READ, PERM_WRITE
from cosmodrome.wire.names import (
    DLQ_PREFIX,
    RETRY_PREFIX,
    check_group,
    check_topic,
    is_system_topic,
)

F = TypeVar("F", bound=Callable[..., Any])

COMPLETE_SECONDS_MAX = 0.5

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # not generic in every release that will do

PERMISSIONS = {
    "RW": PERM_READ | PERM_WRITE,
    "R": PERM_READ,
    "W": PERM_WRITE,
    "NONE": 0,
}


class _Name(ParamType):
    """A topic or group; shells complete it with those that there are."""

    def __init__(self, name: str, check: Callable[[str], None]) -> None:
        self.name = name
        self._check = check

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        namesrv = ctx.params.get("namesrv")
        return [
            CompletionItem(name)
            for name in _existing(self.name, namesrv if isinstance(namesrv, str) else None)
            if name.startswith(incomplete)
        ]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            self._check(value)
        except Refused as refusal:
            self.fail(refusal.remark, param, ctx)
        return str(value)


class _Permission(ParamType):
    name = "permission"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).upper()
        if text in PERMISSIONS:
            return PERMISSIONS[text]
        # Compat: upstream's tools write the number.
        if text in {str(number) for number in PERMISSIONS.values()}:
            return int(text)
        self.fail(f"{value!r} is no permission; write RW, R, W, NONE or 6, 4, 2, 0", param, ctx)


class _Setting(ParamType):
    """KEY=VALUE as a pair."""

    name = "key=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, equals, text = str(value).partition("=")
        if not equals or not key.strip():
            self.fail(f"{value!r} is no setting; write KEY=VALUE", param, ctx)
        return key.strip(), text


def _existing(kind: str, namesrv: str | None) -> list[str]:
    """Names that the cluster knows; none if it does not answer at once."""
    from cosmodrome.cli.support.context import find_name_servers
    from cosmodrome.cli.support.operating import opened
    from cosmodrome.cli.support.running import run

    async def ask() -> list[str]:
        async with opened(namesrv or find_name_servers(None), COMPLETE_SECONDS_MAX) as admin:
            names = admin.topics.names() if kind == "topic" else admin.groups.names()
            async with asyncio.timeout(COMPLETE_SECONDS_MAX):
                return await names

    try:
        return run(ask())
    except (CosmodromeError, TimeoutError, OSError):
        return []  # whoever completes a word wants no messages


TOPIC = _Name("topic", check_topic)
GROUP = _Name("group", check_group)
PERMISSION = _Permission()
SETTING = _Setting()


def permission_text(perm: int) -> str:
    """In the words that the options take."""
    words = ("R" if perm & PERM_READ else "") + ("W" if perm & PERM_WRITE else "")
    return words or "NONE"


def kind_of_topic(name: str) -> str:
    if name.startswith(RETRY_PREFIX):
        return "retry"
    if name.startswith(DLQ_PREFIX):
        return "dlq"
    return "system" if is_system_topic(name) else "normal"


def cluster_option(command: F) -> F:
    return click.option("-c", "--cluster", help="Only this cluster.  [default: all]")(command)


def broker_option(command: F) -> F:
    return click.option(
        "-b", "--broker", help="Only this broker: its name or HOST:PORT.  [default: every master]"
    )(command)
