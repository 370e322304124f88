"""Groups of commands: some load code only when it is used, some have a command by default."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import click
from click.shell_completion import CompletionItem


class DefaultGroup(click.Group):
    """A group with a default command: `redrive GROUP` means `redrive start GROUP`.

    Without any word it runs the default if `runs_alone`; otherwise it shows its help.
    """

    def __init__(self, *args: Any, default: str, runs_alone: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._default = default
        self._runs_alone = runs_alone

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else None
        if first is None and not self._runs_alone:
            return super().parse_args(ctx, args)
        if first not in (*self.commands, *ctx.help_option_names):
            args = [self._default, *args]
        return super().parse_args(ctx, args)


class LazyGroup(click.Group):
    """`homes`: name → (where, what help says). `where` is `module:name` in this package."""

    def __init__(
        self, *args: Any, homes: Mapping[str, tuple[str, str]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._homes = homes or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self._homes})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        home = self._homes.get(cmd_name)
        if home is None:
            return super().get_command(ctx, cmd_name)
        module, _, name = home[0].partition(":")
        command: click.Command = getattr(importlib.import_module(f"cosmodrome.cli.{module}"), name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self._homes and args[0] not in self.commands:
            import difflib

            close = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if close and not args[0].startswith("-"):
                ctx.fail(f"No such command {args[0]!r}. Did you mean {close[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        limit = formatter.width - 6 - max(map(len, self.list_commands(ctx)), default=0)
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, self._help(ctx, name, limit)) for name in self.list_commands(ctx)]
            )

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        mine = [
            CompletionItem(name, help=self._help(ctx, name, 100))
            for name in self.list_commands(ctx)
            if name.startswith(incomplete)
        ]
        return mine + click.Command.shell_complete(self, ctx, incomplete)

    def _help(self, ctx: click.Context, name: str, limit: int) -> str:
        if name in self._homes:
            return self._homes[name][1]
        command = self.commands[name]
        return command.get_short_help_str(limit)
