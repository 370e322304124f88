"""Options that several commands about messages take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

COUNT_MAX = 100_000


def most_option(
    flag: str = "--count",
    name: str = "count",
    *,
    default: int | None = None,
    most: int | None = None,
) -> Callable[[F], F]:
    return click.option(
        flag,
        name,
        type=click.IntRange(1, most),
        default=default,
        show_default=default is not None,
        help="At most this many messages.",
    )


def stored_options(command: F) -> F:
    """`--since` and `--until`; `msg.moment` reads their values."""
    for flag, text in (
        ("--until", "Stored before."),
        ("--since", "Stored at or after: 2026-11-15T08:00:00, -2h."),
    ):
        command = click.option(flag, metavar="TIME|-AGO", help=text)(command)
    return command


def tags_option(command: F) -> F:
    text = "Only messages with this tag; may be repeated."
    return click.option("--tag", "tags", multiple=True, help=text)(command)


def content_options(of: str) -> Callable[[F], F]:
    """Tag, keys and properties of what is sent; `of` says what that is."""

    def add(command: F) -> F:
        repeated = f"of {of}; may be repeated."
        command = click.option(
            "--property", "pairs", multiple=True, metavar="NAME=VALUE", help=f"Property {repeated}"
        )(command)
        command = click.option("--key", "keys", multiple=True, help=f"Key {repeated}")(command)
        return click.option("--tag", help=f"Tag of {of}.")(command)

    return add
