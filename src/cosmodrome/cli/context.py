"""Where a command finds the cluster: `-n`, then COSMO_NAMESRV, then the context in use.

A context is a named cluster, kept in `contexts.json` in the user's configuration folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from cosmodrome.cli.exits import NotFound
from cosmodrome.cli.output import FOR_PEOPLE, Column, output_option, show
from cosmodrome.client.options import NAMESRV_DEFAULT, NAMESRV_VARIABLES, name_servers
from cosmodrome.env.real import RealDisk
from cosmodrome.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

FILE_NAME = "contexts.json"
COLUMNS = (Column("current", " "), Column("name"), Column("namesrv", "NAME SERVERS"))


class Contexts(msgspec.Struct):
    """The whole file."""

    current: str | None = None
    contexts: dict[str, str] = {}  # name → name servers


def namesrv_option(command: F) -> F:
    """`-n`: the same flag, help and fallbacks for every command that talks to a cluster."""
    return click.option(
        "-n",
        "--namesrv",
        metavar="HOST:PORT[;HOST:PORT]",
        callback=lambda _context, _option, given: find_name_servers(given),
        help="Name servers.  [default: COSMO_NAMESRV, the context in use, or 127.0.0.1:9876]",
    )(command)


def find_name_servers(given: str | None) -> str:
    """The addresses to use, checked; ConfigError says what is wrong with them."""
    text = given
    for variable in NAMESRV_VARIABLES:
        text = text or os.environ.get(variable, "").strip()
    if not text:
        stored = load()
        if stored.current is not None:
            text = stored.contexts.get(stored.current)
    text = text or NAMESRV_DEFAULT
    name_servers(text)
    return text


def folder() -> str:
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(base, "cosmo")


def load() -> Contexts:
    path = os.path.join(folder(), FILE_NAME)
    disk = RealDisk()
    if not disk.exists(path):
        return Contexts()
    try:
        return msgspec.json.decode(disk.read(path), type=Contexts)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; mend or remove it") from error


def _save(stored: Contexts) -> None:
    path = os.path.join(folder(), FILE_NAME)
    try:
        RealDisk().replace(path, json.dumps(msgspec.to_builtins(stored), indent=2).encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error


@click.group("context")
def context() -> None:
    """Named clusters, so that -n need not be typed."""


@context.command()
@click.argument("name")
@click.argument("namesrv")
@click.option("--use/--no-use", default=None, help="Use it from now on.  [default: if it is first]")
def add(name: str, namesrv: str, use: bool | None) -> None:
    """Remember the name servers NAMESRV (HOST:PORT[;HOST:PORT]) as NAME."""
    name_servers(namesrv)
    stored = load()
    stored.contexts[name] = namesrv
    if use or (use is None and stored.current is None):
        stored.current = name
    _save(stored)
    click.echo(
        f"context {name}: {namesrv}{' (in use)' if stored.current == name else ''}", err=True
    )


@context.command()
@click.argument("name")
def use(name: str) -> None:
    """Use the context NAME from now on."""
    stored = load()
    if name not in stored.contexts:
        known = ", ".join(sorted(stored.contexts)) or "none"
        raise NotFound(f"no context {name}; there is: {known}. `cosmo context add` makes one")
    stored.current = name
    _save(stored)
    click.echo(f"using {name}: {stored.contexts[name]}", err=True)


@context.command()
@click.argument("name")
def remove(name: str) -> None:
    """Forget the context NAME."""
    stored = load()
    if stored.contexts.pop(name, None) is None:
        raise NotFound(f"no context {name}; `cosmo context list` shows all")
    if stored.current == name:
        stored.current = None
    _save(stored)


@context.command("list")
@output_option
def list_contexts(output: str) -> None:
    """List the contexts; * marks the one in use."""
    stored = load()
    people = output in FOR_PEOPLE
    show(
        output,
        COLUMNS,
        (
            {"current": _mark(name == stored.current, people), "name": name, "namesrv": addresses}
            for name, addresses in sorted(stored.contexts.items())
        ),
    )


def _mark(used: bool, people: bool) -> object:
    if not people:
        return used
    return "*" if used else " "
