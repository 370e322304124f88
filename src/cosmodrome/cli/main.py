"""The `cosmo` command: its words and flags. The work is in `serve.py` and what `COMMANDS` names.

Exit codes: 0 done, 1 an error that the message explains, 2 wrong usage, 3 the cluster cannot be
reached, 4 what was named is not there, 5 refused by a server, 6 problems were found, 7 partly done.
Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from cosmodrome import __version__
from cosmodrome.cli.exits import exit_code
from cosmodrome.cli.lazy import LazyGroup
from cosmodrome.errors import CosmodromeError

if TYPE_CHECKING:
    from cosmodrome.cli.lifetime import Logs
    from cosmodrome.cli.settings import Chosen

WORKERS_MAX = 64

# Commands that bring much code with them: where each is, imported when it is used, and its help.
COMMANDS = {
    "bench": ("bench:bench", "Measure this cluster with this client."),
    "bundle": ("bundle:bundle", "Write one archive with what support needs, secrets masked."),
    "check": ("check:check", "Check the cluster, for monitors: table, json, nagios, prometheus."),
    "client": ("clients:client", "Connected producers and consumers: list them, see their stacks."),
    "cluster": ("cluster:cluster", "The cluster as a whole: which brokers answer, and how busy."),
    "completion": ("completion:completion", "Make bash, zsh or fish complete words of cosmo."),
    "consume": ("consume:consume", "Print messages of a topic."),
    "context": ("context:context", "Named clusters, so that -n need not be typed."),
    "dlq": ("dlq:dlq", "Dead letters: list, peek, send once more (redrive), export."),
    "doctor": ("doctor:doctor", "Look at this machine and the cluster; say what to mend."),
    "group": ("group:group", "Consumer groups: how far they are, why idle; move, copy, delete."),
    "mqadmin": ("mqadmin:mqadmin", "Commands of RocketMQ's mqadmin, with its names and flags."),
    "msg": ("msg:msg", "Single messages: get, find, print, resend, track, trace."),
    "pipeline": ("pipeline:pipeline", "Spark over topics: archive them, query them, replay them."),
    "produce": ("produce:produce", "Send one message per line of stdin (or --file) to a topic."),
    "request": ("produce:request", "Send a message and print the reply of its consumer."),
    "store": ("store_tools:store", "Look into a store directory, or mend it, without a broker."),
    "tail": ("consume:tail", "Print messages of a topic as they arrive, until Ctrl-C."),
    "timer": ("timer:timer", "Messages with a delivery time of their own: list, cancel."),
    "top": ("top:top", "Watch the cluster live: brokers, busiest topics, groups behind."),
    "topic": ("topic:topic", "Topics: list, make, look at, change and delete them."),
    "tx": ("tx:tx", "Transactions that nobody has decided yet: list, resume."),
}


@click.group(
    cls=LazyGroup,
    homes=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="cosmo")
def cosmo() -> None:
    """A message system that speaks the RocketMQ remoting protocol.

    `cosmo up` starts a name server and a broker in one process; point any RocketMQ client at it.
    """


NAMESRV_COMMANDS = {
    "config": ("namesrv_verbs:config", "Settings of running name servers: get, set."),
    "kv": ("namesrv_verbs:kv", "The table of the name servers: get, set, delete, list."),
}
BROKER_COMMANDS = {
    "config": ("broker_verbs:config", "Settings of running brokers: get, set."),
    "stats": ("broker_verbs:stats", "Figures of running brokers."),
}


@cosmo.group(cls=LazyGroup, homes=NAMESRV_COMMANDS)
def namesrv() -> None:
    """Name servers: start one, look into running ones."""


@cosmo.group(cls=LazyGroup, homes=BROKER_COMMANDS)
def broker() -> None:
    """Brokers: start one, look into running ones."""


class _RunByDefault(click.Group):
    """A group whose name alone means its `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@cosmo.group(cls=_RunByDefault)
def filtersrv() -> None:
    """The filter server, beside a broker: runs installed Python filters for its consumers."""


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            default="info",
            show_default=True,
            help="What to log, on stderr.",
        ),
        click.option(
            "--log-format",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="Lines of text, or one JSON object per line.",
        ),
        click.option(
            "-p", "--print-config", is_flag=True, help="Print the effective settings and exit."
        ),
        click.option(
            "--set",
            "pairs",
            multiple=True,
            metavar="KEY=VALUE",
            help="Any RocketMQ setting; may be repeated and wins over file and environment.",
        ),
    ):
        command = option(command)
    return command


def _workers(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--workers",
        type=click.IntRange(1, WORKERS_MAX),
        metavar="N",
        default=1,
        show_default=True,
        help="Brokers, each a process with name, port and store of its own; see docs/workers.md.",
    )(command)


@cosmo.command()
@click.option("--data", metavar="DIR", help="Store root.  [default: ./cosmo-data]")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--namesrv-port", type=int, help="Name server port; 0 picks one.  [default: 9876]")
@click.option("--broker-port", type=int, help="Broker port; 0 picks one.  [default: 10911]")
@click.option(
    "--http-port", type=int, default=8080, show_default=True, help="Health port; 0 picks one."
)
@click.option("-c", "--config", "file", metavar="FILE", help="A broker.conf properties file.")
@_workers
@_common
def up(
    data: str | None,
    host: str | None,
    namesrv_port: int | None,
    broker_port: int | None,
    http_port: int,
    file: str | None,
    workers: int,
    pairs: tuple[str, ...],
    print_config: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Start a name server, a broker and the health port in one process.

    With --workers N, N brokers run as processes of their own, and start again when they die.
    """
    from cosmodrome.cli import settings

    chosen = settings.for_up(
        os.environ,
        file=file,
        pairs=pairs,
        data=data,
        host=host,
        namesrv_port=namesrv_port,
        broker_port=broker_port,
    )
    if print_config:
        _print(chosen, workers)
        return
    if workers > 1:
        from cosmodrome.cli import serve_workers

        serve_workers.run_up(
            chosen, workers, http_port=http_port, logs=_logs(log_level, log_format)
        )
        return
    from cosmodrome.cli import serve

    serve.run_up(chosen, http_port=http_port, logs=_logs(log_level, log_format))


@namesrv.command("run")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port; 0 picks one.  [default: 9876]")
@click.option("--http-port", type=int, help="Health port; 0 picks one.  [default: none]")
@click.option("-c", "--config", "file", metavar="FILE", help="A namesrv.conf properties file.")
@_common
def namesrv_run(
    host: str | None,
    port: int | None,
    http_port: int | None,
    file: str | None,
    pairs: tuple[str, ...],
    print_config: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Start a name server."""
    from cosmodrome.cli import settings

    chosen = settings.for_nameserver(os.environ, file=file, pairs=pairs, host=host, port=port)
    if print_config:
        click.echo(chosen.text(), nl=False)
        return
    from cosmodrome.cli import serve

    serve.run_nameserver(chosen, http_port=http_port, logs=_logs(log_level, log_format))


@broker.command("run")
@click.option("-n", "--namesrv", metavar="HOST:PORT[;HOST:PORT]", help="Name servers to join.")
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--data", metavar="DIR", help="Store root.  [default: ~/store]")
@click.option("--port", type=int, help="Port; 0 picks one.  [default: 10911]")
@click.option("--http-port", type=int, help="Health port; 0 picks one.  [default: none]")
@click.option("-c", "--config", "file", metavar="FILE", help="A broker.conf properties file.")
@click.option("--supervised", hidden=True, metavar="FLAG", help="This is a worker.")
@_workers
@_common
def broker_run(
    namesrv: str | None,
    host: str | None,
    data: str | None,
    port: int | None,
    http_port: int | None,
    file: str | None,
    supervised: str | None,
    workers: int,
    pairs: tuple[str, ...],
    print_config: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Start a broker, or with --workers N as many, which start again when they die."""
    from cosmodrome.cli import settings

    chosen = settings.for_broker(
        os.environ, file=file, pairs=pairs, namesrv=namesrv, host=host, data=data, port=port
    )
    if print_config:
        _print(chosen, workers)
        return
    if workers > 1:
        from cosmodrome.cli import serve_workers

        serve_workers.run_broker(
            chosen, workers, http_port=http_port, logs=_logs(log_level, log_format)
        )
        return
    from cosmodrome.cli import serve

    serve.run_broker(
        chosen, http_port=http_port, logs=_logs(log_level, log_format), supervised=supervised
    )


def _logs(level: str, form: str) -> Logs:
    from cosmodrome.cli.lifetime import Logs

    return Logs(level, form)


def _print(chosen: Chosen, workers: int) -> None:
    click.echo(chosen.text(), nl=False)
    if workers > 1:
        from cosmodrome.cli import serve_workers

        click.echo(serve_workers.describe(chosen, workers), nl=False)


@filtersrv.command("run")
@click.option(
    "-b", "--broker", metavar="HOST:PORT", help="Broker to serve.  [default: 127.0.0.1:10911]"
)
@click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, help="Port; 0 picks one.  [default: 0]")
@click.option("--filters", metavar="DIR", help="Folder of the filters.  [default: ~/filters]")
@click.option("--http-port", type=int, help="Health port; 0 picks one.  [default: none]")
@click.option("-c", "--config", "file", metavar="FILE", help="A properties file.")
@_common
def filtersrv_run(
    broker: str | None,
    host: str | None,
    port: int | None,
    filters: str | None,
    http_port: int | None,
    file: str | None,
    pairs: tuple[str, ...],
    print_config: bool,
    log_level: str,
    log_format: str,
) -> None:
    """Start a filter server.

    Every *.py file in the folder of the filters says FILTERS = {"com.acme.Green": function};
    a consumer subscribes with the name. SIGHUP reads the files again. See docs/filter-server.md.
    """
    from cosmodrome.cli import settings

    chosen = settings.for_filterserver(
        os.environ, file=file, pairs=pairs, broker=broker, host=host, port=port, filters=filters
    )
    if print_config:
        click.echo(chosen.text(), nl=False)
        return
    from cosmodrome.cli import serve_filters

    serve_filters.run_filterserver(chosen, http_port=http_port, logs=_logs(log_level, log_format))


def main() -> None:
    try:
        cosmo(prog_name="cosmo")
    except CosmodromeError as error:
        click.echo(f"cosmo: {error}", err=True)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
