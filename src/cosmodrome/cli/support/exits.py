"""How a command ends: exit codes, and the errors that only the command line knows.

0 done, 1 an error that the message explains, 2 wrong usage, 3 the cluster cannot be reached, 4 what
was named is not there, 5 refused by a server, 6 problems were found, 7 partly done.
"""

from __future__ import annotations

from typing import IO, Any

import click

from cosmodrome.errors import Code, CosmodromeError, Refused, TimedOut, Unreachable

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_NOT_FOUND = 4
EXIT_REFUSED = 5
EXIT_PROBLEMS = 6
EXIT_PARTLY = 7

_ABSENT = frozenset(
    {
        Code.TOPIC_NOT_EXIST,
        Code.QUERY_NOT_FOUND,
        Code.SUBSCRIPTION_NOT_EXIST,
        Code.SUBSCRIPTION_GROUP_NOT_EXIST,
        Code.CONSUMER_NOT_ONLINE,
        Code.NO_MESSAGE,
    }
)


class NotFound(CosmodromeError):
    """What the user named is not there; says what to do next."""


class PartlyDone(CosmodromeError):
    """Some of it was done, and the message says what was not."""


class Failure(click.ClickException):
    """An error of ours on its way out of click: `cosmo: …` on stderr and an exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        vars(self)["exit_code"] = exit_code  # click declares it for the class

    def show(self, file: IO[Any] | None = None) -> None:
        click.echo(f"cosmo: {self.message}", err=True)


def exit_code(error: CosmodromeError) -> int:
    """The documented exit code for an error."""
    from cosmodrome.client.operate.fleet import NoBrokers, NotThere, PartlyFailed
    from cosmodrome.client.send.failures import RequestTimedOut
    from cosmodrome.client.values import NoRoute

    if isinstance(error, PartlyFailed):
        if error.results:
            return EXIT_PARTLY
        codes = {exit_code(one) for one in error.failures.values()}
        return codes.pop() if len(codes) == 1 else EXIT_ERROR
    if isinstance(error, PartlyDone):
        return EXIT_PARTLY
    if isinstance(error, RequestTimedOut):
        return EXIT_ERROR  # it is a consumer that did not reply
    if isinstance(error, Unreachable | TimedOut | NoBrokers):
        return EXIT_UNREACHABLE
    if isinstance(error, NotFound | NoRoute | NotThere):
        return EXIT_NOT_FOUND
    if isinstance(error, Refused):
        return EXIT_NOT_FOUND if error.code in _ABSENT else EXIT_REFUSED
    return EXIT_ERROR
