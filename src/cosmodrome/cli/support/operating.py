"""What the operator's commands share: a started `Admin`, questions, repetition.

    @group.command("list")
    @output_option
    @watch_option
    @with_admin
    async def list_things(admin: Admin, output: str) -> None: ...

Exit codes are in `exits.py`. Data goes to stdout, everything else to stderr. `--watch` is
handled here: the command itself is called again and again, and what it prints is caught and drawn
in one piece.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import difflib
import functools
import io
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import click

from cosmodrome.cli.support.arguments import ParamType
from cosmodrome.cli.support.connection import client_options
from cosmodrome.cli.support.context import namesrv_option
from cosmodrome.cli.support.exits import (
    EXIT_PARTLY,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    Failure,
    NotFound,
    exit_code,
)
from cosmodrome.cli.support.running import EXIT_INTERRUPTED, run
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.values import NoRoute
from cosmodrome.errors import CosmodromeError

CONNECT_TIMEOUT_MS_MAX = 3_000
WATCH_SECONDS = 2.0
CLEAR_SCREEN = "\x1b[H\x1b[2J"

F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T = TypeVar("T")


# --- the cluster -----------------------------------------------------------------------------


def timeout_option(command: F) -> F:
    """`--timeout`: how long one request may take, in seconds."""
    return click.option(
        "--timeout",
        type=click.FloatRange(min=0, min_open=True),
        default=5.0,
        show_default=True,
        metavar="SECONDS",
        help="How long a server may take to answer one request.",
    )(command)


@asynccontextmanager
async def opened(namesrv: str, timeout: float) -> AsyncIterator[Admin]:
    """A started Admin; the timeout is in seconds."""
    timeout_ms = max(1, round(timeout * 1000))
    connect_timeout_ms = min(timeout_ms, CONNECT_TIMEOUT_MS_MAX)
    options = client_options(namesrv, connect_timeout_ms=connect_timeout_ms)
    async with Admin(namesrv, client=options, timeout_ms=timeout_ms) as admin:
        try:
            yield admin
        except NoRoute:
            # Without any broker no topic has a route: that is the thing to say.
            await admin.brokers.addresses()
            raise


def finish(work: Coroutine[Any, Any, T]) -> T:
    """Run a command's coroutine; errors of ours end the program with their exit code."""
    try:
        return run(work)
    except CosmodromeError as error:
        raise Failure(str(error), exit_code(error)) from error


def with_admin(
    command: Callable[Concatenate[Admin, P], Awaitable[None]],
) -> Callable[..., None]:
    """Make a click callback of a coroutine function that takes a started Admin first.

    Adds `-n` and `--timeout`, and obeys `--watch` where the command has it.
    """

    @functools.wraps(command)
    def callback(*args: Any, **kwargs: Any) -> None:
        namesrv, timeout = kwargs.pop("namesrv"), kwargs.pop("timeout")
        every: float | None = kwargs.pop("watch", None)

        async def once() -> None:
            async with opened(namesrv, timeout) as admin:
                await command(admin, *args, **kwargs)

        async def again_and_again() -> None:
            assert every is not None
            async with opened(namesrv, timeout) as admin:
                await repeat(
                    lambda: command(admin, *args, **kwargs), every, kwargs.get("output", "table")
                )

        if every is None:
            finish(once())
            return
        try:
            finish(again_and_again())
        except click.exceptions.Exit as ended:
            # Ctrl-C is how watching ends.
            raise click.exceptions.Exit(
                0 if ended.exit_code == EXIT_INTERRUPTED else ended.exit_code
            ) from None

    return namesrv_option(timeout_option(callback))


async def masters(
    admin: Admin, *, broker: str | None = None, cluster: str | None = None
) -> dict[str, str]:
    """The masters that `--broker` or `--cluster` means, or all: name → address."""
    found = await admin.brokers.addresses(cluster=cluster)
    if broker is None:
        return found
    chosen = {name: at for name, at in found.items() if broker in (name, at)}
    if not chosen:
        close = similar(broker, found) or ";"
        raise NotFound(f"there is no broker {broker}{close} known are: {', '.join(found)}")
    return chosen


# --- repetition ------------------------------------------------------------------------------


class _Seconds(ParamType):
    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0.1 <= seconds <= 86_400:
            self.fail(
                f"{value!r} is no number of seconds from 0.1 on; write --watch=2, or --watch last",
                param,
                ctx,
            )
        return seconds


def watch_option(command: F) -> F:
    """`--watch [SECONDS]`; `with_admin` does the rest."""
    return click.option(
        "--watch",
        type=_Seconds(),
        is_flag=False,
        flag_value=WATCH_SECONDS,
        default=None,
        metavar="[SECONDS]",
        help=f"Show it again every SECONDS ({WATCH_SECONDS:g}) until Ctrl-C.",
    )(command)


async def repeat(show: Callable[[], Awaitable[None]], every: float, output: str) -> None:
    """Call `show` for ever. A terminal is redrawn; elsewhere one round follows the other.

    A cluster that cannot be reached for a while is waited for; other errors end it.
    """
    terminal = sys.stdout.isatty()
    first = True
    while True:
        problem = ""
        with _caught() as text:
            try:
                await show()
            except CosmodromeError as error:
                if exit_code(error) not in (EXIT_UNREACHABLE, EXIT_PARTLY):
                    raise
                problem = str(error)
        if terminal:
            now = datetime.datetime.fromtimestamp(_now_s()).strftime("%H:%M:%S")
            head = f"{now}, every {every:g} s, Ctrl-C ends\n\n"
            click.echo(CLEAR_SCREEN + head + text.getvalue(), nl=False, color=True)
        elif text.getvalue():
            head = "" if first else _SEPARATORS.get(output, "")
            click.echo(head + text.getvalue(), nl=False, color=True)
            first = False
        if problem:
            click.echo(f"cosmo: {problem}", err=True)
        await asyncio.sleep(every)


_SEPARATORS = {"table": "\n", "wide": "\n", "csv": "\n", "yaml": "---\n"}


class _Caught(io.StringIO):
    """What is printed meanwhile, as coloured as where it will go."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@contextlib.contextmanager
def _caught() -> Iterator[_Caught]:
    text = _Caught(sys.stdout.isatty())
    with contextlib.redirect_stdout(text):
        yield text


def _now_s() -> float:
    from cosmodrome.env.real import WallClock

    return WallClock().now_ms() / 1000


# --- changes ---------------------------------------------------------------------------------


def yes_option(command: F) -> F:
    """`--yes`: do it without being asked; see `confirm`."""
    return click.option("--yes", is_flag=True, help="Do not ask.")(command)


def dry_run_option(command: F) -> F:
    """`--dry-run`: say what would be done and change nothing."""
    return click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")(
        command
    )


def confirm(what: str, *, yes: bool) -> None:
    """Ask before something that cannot be undone. `what` is a sentence without its full stop.

    Where nobody can be asked, it is refused unless `--yes` was given.
    """
    if yes:
        return
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        raise Failure(f"{what}. There is no terminal to ask on: use --yes to do it", EXIT_USAGE)
    # The event loop has its own handler, which cannot end a question.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        agreed = click.confirm(f"{what}. Go on?", err=True)
    except click.Abort:
        note("")
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    finally:
        signal.signal(signal.SIGINT, before)
    if not agreed:
        raise click.Abort


def note(text: str) -> None:
    """A remark for the person at the terminal; never data."""
    click.echo(text, err=True)


def similar(name: str, known: Iterable[str]) -> str:
    """`; did you mean …?` when something is called nearly so, or nothing."""
    lowered = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return f"; did you mean {lowered[close[0]]}?" if close else ""
