"""`cosmo mqadmin COMMAND …`: upstream's commands and flags, done by the verbs of `cosmo`.

What each command does is in `table.py`; this module makes click commands of its rows, on
demand, and runs the verb or the call of a row. Names are found whatever their case, as upstream
does. The flags are upstream's, so the form of the output is `--output`: `-o` means other things.
"""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Mapping
from typing import Any

import click
import msgspec
from click.shell_completion import CompletionItem

from cosmodrome.cli.mqadmin.table import BY_NAME, ROWS, Flag, Row
from cosmodrome.cli.operate.config_options import field_type
from cosmodrome.cli.support.arguments import GROUP, TOPIC, ParamType
from cosmodrome.cli.support.context import NAMESRV_HELP, find_name_servers
from cosmodrome.cli.support.exits import EXIT_USAGE, Failure
from cosmodrome.cli.support.output import FORMATS, iso
from cosmodrome.wire.bodies import SubscriptionGroupConfig, TopicConfig

MS_DIGITS_MIN = 12  # a number this long is a time in milliseconds
_TIME_FORMAT = "%Y-%m-%d#%H:%M:%S:%f"
_PLACEHOLDER = re.compile(r"\{(\w)\}")


class Moment(int):
    """Milliseconds since 1970, written as our verbs read times. A negative one is the end."""

    def __str__(self) -> str:
        return "latest" if self < 0 else iso(self)


class _Moment(ParamType):
    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Moment:
        text = str(value).strip()
        if text == "now":
            return Moment(-1)
        if text.isascii() and text.isdigit() and MS_DIGITS_MIN <= len(text) < 15:
            return Moment(text)
        try:
            moment = datetime.datetime.strptime(text, _TIME_FORMAT)
        except ValueError:
            self.fail(
                f"{value!r} is no time; write 2026-11-15#08:00:00:000, milliseconds since 1970, or"
                " now",
                param,
                ctx,
            )
        return Moment(moment.timestamp() * 1000)


_MOMENT = _Moment()
_WHOLE = click.IntRange(0)
_COUNT = click.IntRange(1)

_TRUTH = click.Choice(["true", "false"], case_sensitive=False)


def _field_types(config: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        field.encode_name: kind
        for field in msgspec.structs.fields(config)
        if (kind := _TRUTH if isinstance(field.default, bool) else field_type(config, field.name))
    }


# By upstream's long names. Whatever is not here is text.
_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("topic", "traceTopic"), TOPIC),
    **dict.fromkeys(
        ("groupName", "consumerGroup", "producerGroup", "group", "srcGroup", "destGroup"), GROUP
    ),
    "consumer": GROUP,
    **dict.fromkeys(("timestamp", "beginTimestamp", "endTimestamp"), _MOMENT),
    **dict.fromkeys(("amount", "count", "MessageNumber", "size", "messageSize"), _COUNT),
    **dict.fromkeys(("queueId", "queue", "qid", "offset", "index", "level"), _WHOLE),
    "method": click.Choice(["get", "put", "delete"]),
    **dict.fromkeys(
        (
            "unit",
            "hasUnitSub",
            "notifyConsumerIdsChanged",
            "removeOffset",
            "offline",
            "force",
            "showClientIP",
            "sendMessage",
            "msgTraceEnable",
        ),
        _TRUTH,
    ),
    **_field_types(TopicConfig),
    **_field_types(SubscriptionGroupConfig),
}
_MEANINGS: Mapping[str, str] = {
    "brokerAddr": "A broker: HOST:PORT, or its name.",
    "broker": "A broker: HOST:PORT, or its name.",
    "brokerName": "A broker, by its name.",
    "clusterName": "The masters of this cluster.",
    "cluster": "The masters of this cluster.",
    "ipList": "Names of clients, with commas between them.",
    "subExpression": 'Tags: "A || B".',
    "level": "Only queues that are at least this many messages behind.",
}


class _Commands(click.Group):
    """Makes a command when it is used; 56 of them would be slow to list."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [row.name for row in ROWS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name.lower() == "help":
            return _help
        row = BY_NAME.get(cmd_name.lower())
        return None if row is None else _command(row)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0].lower() not in (*BY_NAME, "help") and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0].lower(), BY_NAME, n=1)
            hint = f" Did you mean {BY_NAME[close[0]].name!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r} in mqadmin of 4.9.8.{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(row.name, row.does) for row in ROWS])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        mine = [
            CompletionItem(row.name, help=row.does)
            for row in ROWS
            if row.name.lower().startswith(incomplete.lower())
        ]
        return mine + click.Command.shell_complete(self, ctx, incomplete)


@click.group(cls=_Commands)
@click.option("--show", is_flag=True, help="Print the `cosmo` command that would be run.")
@click.pass_context
def mqadmin(ctx: click.Context, show: bool) -> None:
    """Commands of RocketMQ's mqadmin, with its names and flags.

    They do what upstream's do, ask no questions, and print as `cosmo` prints. See docs/mqadmin.md.
    """
    ctx.obj = show


@click.command("help", hidden=True)
@click.argument("command", required=False)
@click.pass_context
def _help(ctx: click.Context, command: str | None) -> None:
    """Show the flags of a COMMAND."""
    parent = ctx.parent
    assert parent is not None
    if command is None:
        click.echo(parent.get_help())
        return
    row = BY_NAME.get(command.lower())
    if row is None:
        raise click.UsageError(
            f"there is no command {command!r}; `cosmo mqadmin` lists all", parent
        )
    with click.Context(_command(row), info_name=row.name, parent=parent) as inner:
        click.echo(inner.get_help())


# --- commands of rows ------------------------------------------------------------------------


def _command(row: Row) -> click.Command:
    def callback(**flags: Any) -> None:
        ctx = click.get_current_context()
        show = bool(ctx.parent is not None and ctx.parent.obj)
        _run(row, flags, show=show)

    return click.Command(
        row.name,
        params=[*(_option(row, flag) for flag in row.flags), *_common()],
        callback=callback,
        help=f"{row.does}\n\n{_explained(row)}",
        short_help=row.does,
    )


def _option(row: Row, flag: Flag) -> click.Option:
    help_text = _MEANINGS.get(flag.name, "")
    if flag.letter in row.unused:
        help_text = f"Changes nothing: {row.unused[flag.letter]}."
    names = [f"-{flag.letter}", f"--{flag.name}", flag.letter]
    if not flag.takes_value:
        return click.Option(names, is_flag=True, default=False, help=help_text)
    # What changes nothing is not checked either.
    kind = None if flag.letter in row.unused else _TYPES.get(flag.name)
    metavar = None if isinstance(kind, click.Choice) else flag.name
    return click.Option(
        names, required=flag.required, type=kind, metavar=metavar, help=help_text or None
    )


def _common() -> list[click.Parameter]:
    return [
        click.Option(
            ["-n", "--namesrvAddr", "namesrv"],
            metavar="HOST:PORT[;HOST:PORT]",
            help=NAMESRV_HELP,
        ),
        click.Option(
            ["--output", "output"],
            type=click.Choice(FORMATS),
            help="Form of the data on stdout.  [default: table]",
        ),
        click.Option(
            ["--timeout", "timeout"],
            type=click.FloatRange(min=0, min_open=True),
            default=5.0,
            show_default=True,
            metavar="SECONDS",
            help="How long a server may take to answer one request.",
        ),
    ]


def _explained(row: Row) -> str:
    if row.instead:
        return f"Not done here: {row.instead}."
    lines = [f"cosmo {template}" for _, template in row.verbs]
    if row.call:
        lines.append("no other cosmo command does this" if not lines else "or directly")
    return "\b\n" + "\n".join(lines)


# --- running ---------------------------------------------------------------------------------


def _run(row: Row, flags: Mapping[str, Any], *, show: bool) -> None:
    if row.instead:
        raise Failure(f"mqadmin {row.name} is not done here: {row.instead}", EXIT_USAGE)
    if row.one_of and sum(flags[letter] is not None for letter in row.one_of) != 1:
        choices = " or ".join(f"-{letter}" for letter in row.one_of)
        raise click.UsageError(f"give the target: {choices}")
    namesrv = find_name_servers(flags["namesrv"])
    verb = chosen_verb(row, flags)
    if verb is None and not row.call:
        missing = ", ".join(f"-{flag.letter}" for flag in row.flags)
        raise click.UsageError(f"these flags do not go together; there are {missing}")
    if verb is None:
        if show:
            click.echo(
                f"mqadmin {row.name} sends its own requests; no other cosmo command does the same"
            )
            return
        from cosmodrome.cli.mqadmin.call import run_call

        run_call(row.call, namesrv, flags)
        return
    common = ["--namesrv", namesrv, "--timeout", str(flags["timeout"])]
    if flags["output"] is not None:
        common += ["--output", flags["output"]]
    for values in _each(row, flags):
        words = filled(verb, values)
        if show:
            click.echo(shlex.join(["cosmo", *words]))
        else:
            at = words.index("--") if "--" in words else len(words)
            _verb([*words[:at], *common, *words[at:]])


def chosen_verb(row: Row, flags: Mapping[str, Any]) -> str | None:
    """The template that the flags choose."""
    return next((verb for when, verb in row.verbs if _holds(when, flags)), None)


def filled(template: str, values: Mapping[str, Any]) -> list[str]:
    """The words of a command. A value is one word, whatever is in it."""
    words: list[str] = []
    for part in re.findall(r"\[[^]]*\]|\S+", template):
        text = part.removeprefix("[").removesuffix("]")
        if part is not text and any(values[name] is None for name in _PLACEHOLDER.findall(text)):
            continue
        for word in text.split():
            words.append(_PLACEHOLDER.sub(lambda found: str(values[found[1]]), word))
    return words


def _holds(when: str, flags: Mapping[str, Any]) -> bool:
    for condition in when.split():
        letter, equals, expected = condition.partition("=")
        value = flags[letter]
        if (value != expected) if equals else value in (None, False):
            return False
    return True


def _each(row: Row, flags: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if not row.each:
        return [flags]
    parts = [part.strip() for part in str(flags[row.each]).split(",")]
    return [{**flags, row.each: part} for part in parts if part]


def _verb(words: list[str]) -> None:
    from cosmodrome.cli.main import cosmo

    before = click.get_current_context().find_root().params  # options of TLS
    with cosmo.make_context("cosmo", words) as ctx:
        ctx.params.update(before)
        cosmo.invoke(ctx)
