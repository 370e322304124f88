"""The `cosmo` command: its words and flags. The work is in `serve/` and in what `COMMANDS` names.

Exit codes are in `exits.py`. Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from cosmodrome import __version__
from cosmodrome.cli.support.connection import tls_options
from cosmodrome.cli.support.exits import exit_code
from cosmodrome.cli.support.lazy import DefaultGroup, LazyGroup
from cosmodrome.env.ports import BROKER_DEFAULT, BROKER_PORT, HEALTH_PORT, NAMESRV_PORT
from cosmodrome.errors import CosmodromeError

if TYPE_CHECKING:
    from cosmodrome.cli.serve.lifetime import Logs
    from cosmodrome.cli.support.settings import Chosen

WORKERS_MAX = 64

# Commands that bring much code with them: where each is, imported when it is used, and its help.
COMMANDS = {
    "acl": (
        "operate.acl:acl",
        "Accounts of brokers with access control: list, set, delete, check.",
    ),
    "bench": ("diagnose.bench:bench", "Measure this cluster with this client."),
    "bundle": (
        "diagnose.bundle:bundle",
        "Write one archive with what support needs, secrets masked.",
    ),
    "check": (
        "diagnose.check:check",
        "Check the cluster, for monitors: table, json, nagios, prometheus.",
    ),
    "client": (
        "operate.clients:client",
        "Connected producers and consumers: list them, see their stacks.",
    ),
    "cluster": (
        "operate.cluster:cluster",
        "The cluster as a whole: which brokers answer, and how busy.",
    ),
    "completion": (
        "completion:completion",
        "Print a script that completes cosmo commands in bash, zsh or fish.",
    ),
    "consume": ("messages.consume:consume", "Print messages of a topic."),
    "context": ("support.context:context", "Names for clusters, so that you need not type -n."),
    "dlq": ("messages.dlq:dlq", "Dead letters: list, peek, send once more (redrive), export."),
    "doctor": ("diagnose.doctor:doctor", "Look at this machine and the cluster; say what to do."),
    "group": (
        "operate.group:group",
        "Consumer groups: their lag, why they are idle; move, copy, delete.",
    ),
    "mqadmin": (
        "mqadmin.command:mqadmin",
        "Commands of RocketMQ's mqadmin, with its names and flags.",
    ),
    "msg": ("messages.msg:msg", "Single messages: get, find, print, resend, track, trace."),
    "pipeline": ("pipeline:pipeline", "Spark over topics: archive them, query them, replay them."),
    "produce": (
        "messages.produce:produce",
        "Send one message per line of stdin (or --file) to a topic.",
    ),
    "request": ("messages.produce:request", "Send a message and print the reply of its consumer."),
    "store": (
        "offline.store_tools:store",
        "Check, read or repair a store directory without a broker.",
    ),
    "tail": ("messages.consume:tail", "Print messages of a topic as they arrive, until Ctrl-C."),
    "timer": ("messages.timer:timer", "Messages with a delivery time of their own: list, cancel."),
    "tls": ("tls:tls", "Certificates for TLS: make some to try it with."),
    "top": ("diagnose.top:top", "Watch the cluster live: brokers, busiest topics, groups behind."),
    "topic": ("operate.topic:topic", "Topics: list, make, look at, change and delete them."),
    "tx": ("messages.tx:tx", "Transactions that nobody has decided yet: list, resume."),
}


@click.group(
    cls=LazyGroup,
    homes=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="cosmo")
@tls_options(environment=True)
def cosmo(**_tls: Any) -> None:
    """A message system that speaks the RocketMQ remoting protocol.

    `cosmo up` starts a name server and a broker in one process; point any RocketMQ client at it.

    Options of TLS are for commands that talk to a cluster; servers have settings (docs/tls.md).
    """


NAMESRV_COMMANDS = {
    "config": ("operate.namesrv_verbs:config", "Settings of running name servers: get, set."),
    "kv": ("operate.namesrv_verbs:kv", "The table of the name servers: get, set, delete, list."),
}
BROKER_COMMANDS = {
    "config": ("operate.broker_verbs:config", "Settings of running brokers: get, set."),
    "stats": ("operate.broker_verbs:stats", "Figures of running brokers."),
}


@cosmo.group(cls=LazyGroup, homes=NAMESRV_COMMANDS)
def namesrv() -> None:
    """Name servers: start one, look into running ones."""


@cosmo.group(cls=LazyGroup, homes=BROKER_COMMANDS)
def broker() -> None:
    """Brokers: start one, look into running ones."""


@cosmo.group(cls=DefaultGroup, default="run", runs_alone=True)
def filtersrv() -> None:
    """Filter servers: run Python filters for the consumers of a broker."""


_host_option = click.option("--host", help="Address to listen on.  [default: 127.0.0.1]")
_http_port_option = click.option(
    "--http-port",
    type=int,
    help="Port for health checks and metrics; 0 picks one.  [default: none]",
)


def _config_option(usual_name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    text = f"Read settings from this properties file, for example {usual_name}."
    return click.option("-c", "--config", "file", metavar="FILE", help=text)


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of every server. `--log-level` and `--log-format` arrive as `logs`."""

    @functools.wraps(command)
    def run(*, log_level: str, log_format: str, **rest: Any) -> None:
        from cosmodrome.cli.serve.lifetime import Logs

        command(logs=Logs(log_level, log_format), **rest)

    for option in (
        click.option(
            "--log-level",
            type=click.Choice(["debug", "info", "warning", "error"]),
            default="info",
            show_default=True,
            help="Lowest level that is logged, on stderr.",
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
            help="Any RocketMQ setting; may be repeated. It wins over file and environment.",
        ),
    ):
        run = option(run)
    return run


def _workers(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--workers",
        type=click.IntRange(1, WORKERS_MAX),
        metavar="N",
        default=1,
        show_default=True,
        help="Brokers to start. Each has its own process, port and store; see docs/workers.md.",
    )(command)


@cosmo.command()
@click.option("--data", metavar="DIR", help="Store root.  [default: ./cosmo-data]")
@_host_option
@click.option(
    "--namesrv-port", type=int, help=f"Name server port; 0 picks one.  [default: {NAMESRV_PORT}]"
)
@click.option(
    "--broker-port", type=int, help=f"Broker port; 0 picks one.  [default: {BROKER_PORT}]"
)
@click.option(
    "--http-port",
    type=int,
    default=HEALTH_PORT,
    show_default=True,
    help="Port for health checks and metrics; 0 picks one.",
)
@_config_option("broker.conf")
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
    logs: Logs,
) -> None:
    """Start a name server, a broker and the health port in one process.

    With --workers N, each of N brokers is a process of its own. One that dies is started again.

    A slave (brokerRole=SLAVE) needs the name servers of its master too: --set namesrvAddr=…
    """
    from cosmodrome.cli.support import settings

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
        from cosmodrome.cli.serve import worker_servers

        worker_servers.run_up(chosen, workers, http_port=http_port, logs=logs)
        return
    from cosmodrome.cli.serve import servers

    servers.run_up(chosen, http_port=http_port, logs=logs)


@namesrv.command("run")
@_host_option
@click.option("--port", type=int, help=f"Port; 0 picks one.  [default: {NAMESRV_PORT}]")
@_http_port_option
@_config_option("namesrv.conf")
@_common
def namesrv_run(
    host: str | None,
    port: int | None,
    http_port: int | None,
    file: str | None,
    pairs: tuple[str, ...],
    print_config: bool,
    logs: Logs,
) -> None:
    """Start a name server."""
    from cosmodrome.cli.support import settings

    chosen = settings.for_nameserver(os.environ, file=file, pairs=pairs, host=host, port=port)
    if print_config:
        _print(chosen)
        return
    from cosmodrome.cli.serve import servers

    servers.run_nameserver(chosen, http_port=http_port, logs=logs)


@broker.command("run")
@click.option("-n", "--namesrv", metavar="HOST:PORT[;HOST:PORT]", help="Name servers to join.")
@_host_option
@click.option("--data", metavar="DIR", help="Store root.  [default: ~/store]")
@click.option("--port", type=int, help=f"Port; 0 picks one.  [default: {BROKER_PORT}]")
@_http_port_option
@_config_option("broker.conf")
@click.option(
    "--supervised", hidden=True, metavar="FLAG", help="Set by the supervisor that starts a worker."
)
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
    logs: Logs,
) -> None:
    """Start a broker.

    With --workers N, each of N brokers is a process of its own. One that dies is started again.

    A slave has the brokerName of its master and an id above 0: --set brokerRole=SLAVE --set
    brokerId=1.
    """
    from cosmodrome.cli.support import settings

    chosen = settings.for_broker(
        os.environ, file=file, pairs=pairs, namesrv=namesrv, host=host, data=data, port=port
    )
    if print_config:
        _print(chosen, workers)
        return
    if workers > 1:
        from cosmodrome.cli.serve import worker_servers

        worker_servers.run_broker(chosen, workers, http_port=http_port, logs=logs)
        return
    from cosmodrome.cli.serve import servers

    servers.run_broker(chosen, http_port=http_port, logs=logs, supervised=supervised)


def _print(chosen: Chosen, workers: int = 1) -> None:
    click.echo(chosen.text(), nl=False)
    if workers > 1:
        from cosmodrome.cli.serve import worker_servers

        click.echo(worker_servers.describe(chosen, workers), nl=False)


@filtersrv.command("run")
@click.option(
    "-b", "--broker", metavar="HOST:PORT", help=f"Broker to serve.  [default: {BROKER_DEFAULT}]"
)
@_host_option
@click.option("--port", type=int, help="Port; 0 picks one.  [default: 0]")
@click.option("--filters", metavar="DIR", help="Folder of the filters.  [default: ~/filters]")
@_http_port_option
@_config_option("filtersrv.conf")
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
    logs: Logs,
) -> None:
    """Start a filter server.

    Every *.py file in the folder of the filters defines FILTERS = {"com.acme.Green": function}. A
    consumer subscribes with that name. SIGHUP reads the files again. See docs/filter-server.md.
    """
    from cosmodrome.cli.support import settings

    chosen = settings.for_filterserver(
        os.environ, file=file, pairs=pairs, broker=broker, host=host, port=port, filters=filters
    )
    if print_config:
        _print(chosen)
        return
    from cosmodrome.cli.serve import filter_server

    filter_server.run_filterserver(chosen, http_port=http_port, logs=logs)


def main() -> None:
    try:
        cosmo(prog_name="cosmo")
    except CosmodromeError as error:
        click.echo(f"cosmo: {error}", err=True)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
