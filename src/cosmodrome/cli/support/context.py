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

from cosmodrome.cli.support.connection import TlsChoice, tls_options
from cosmodrome.cli.support.exits import NotFound
from cosmodrome.cli.support.output import FOR_PEOPLE, Column, output_option, show
from cosmodrome.client.options import NAMESRV_DEFAULT, NAMESRV_VARIABLES, name_servers
from cosmodrome.env.real import RealDisk
from cosmodrome.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])

FILE_NAME = "contexts.json"
COLUMNS = (
    Column("current", " "),
    Column("name"),
    Column("namesrv", "NAME SERVERS"),
    Column("tls", "TLS", wide=True),
)


class Contexts(msgspec.Struct):
    """The whole file."""

    current: str | None = None
    contexts: dict[str, str] = {}  # name → name servers
    tls: dict[str, TlsChoice] = {}  # name → how to connect, where it is not plain


NAMESRV_HELP = f"Name servers.  [default: COSMO_NAMESRV, the context in use, or {NAMESRV_DEFAULT}]"


def namesrv_option(command: F) -> F:
    """`-n`: the same flag, help and fallbacks for every command that talks to a cluster."""
    return click.option(
        "-n",
        "--namesrv",
        metavar="HOST:PORT[;HOST:PORT]",
        callback=lambda _context, _option, value: find_name_servers(value),
        help=NAMESRV_HELP,
    )(command)


def find_name_servers(text: str | None) -> str:
    """The addresses to use, checked; ConfigError says what is wrong with them."""
    for variable in NAMESRV_VARIABLES:
        text = text or os.environ.get(variable, "").strip()
    if not text:
        stored = load()
        if stored.current is not None:
            text = stored.contexts.get(stored.current)
    text = text or NAMESRV_DEFAULT
    name_servers(text)
    return text


def tls_of(namesrv: str) -> TlsChoice:
    """How to connect to these name servers, as their context says."""
    stored = load()
    names = (name for name, addresses in stored.contexts.items() if addresses == namesrv)
    return next((stored.tls[name] for name in names if name in stored.tls), TlsChoice())


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
    """Names for clusters, so that you need not type -n."""


@context.command()
@click.argument("name")
@click.argument("namesrv")
@click.option(
    "--use/--no-use", default=None, help="Use it from now on.  [default: only if it is the first]"
)
@tls_options(environment=False)
def add(name: str, namesrv: str, use: bool | None, **tls: Any) -> None:
    """Remember the name servers NAMESRV (HOST:PORT[;HOST:PORT]) as NAME."""
    name_servers(namesrv)
    stored = load()
    stored.contexts[name] = namesrv
    stored.tls.pop(name, None)
    choice = TlsChoice(**{key: _absolute(value) for key, value in tls.items() if value})
    if choice.wanted:
        stored.tls[name] = choice
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
    stored.tls.pop(name, None)
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
            {
                "current": _mark(name == stored.current, people),
                "name": name,
                "namesrv": addresses,
                "tls": name in stored.tls,
            }
            for name, addresses in sorted(stored.contexts.items())
        ),
    )


def _absolute(value: Any) -> Any:
    """A file is found again from every folder."""
    return os.path.abspath(value) if isinstance(value, str) else value


def _mark(used: bool, people: bool) -> object:
    if not people:
        return used
    return "*" if used else " "
