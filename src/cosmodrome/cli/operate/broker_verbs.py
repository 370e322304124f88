"""`cosmo broker config` and `cosmo broker stats`: settings and figures of running brokers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import click

from cosmodrome.cli.operate.server_settings import ServerSettings
from cosmodrome.cli.support.arguments import SETTING, broker_option, cluster_option
from cosmodrome.cli.support.exits import NotFound, PartlyDone, exit_code
from cosmodrome.cli.support.operating import (
    dry_run_option,
    masters,
    similar,
    watch_option,
    with_admin,
)
from cosmodrome.cli.support.output import Column, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.operate.flows import at_once
from cosmodrome.errors import CosmodromeError

T = TypeVar("T")

OF_BROKERS = ServerSettings("broker", "broker", "`cosmo broker config get` shows all")
FIGURES = (Column("broker"), Column("name"), Column("value"))
COUNTED = (
    Column("broker"),
    Column("span"),
    Column("sum", right=True),
    Column("per_s", "PER S", right=True),
    Column("per_call", right=True),
    Column("statistic", wide=True),
    Column("key", wide=True),
)


@click.group()
def config() -> None:
    """Settings of running brokers."""


@config.command()
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@broker_option
@cluster_option
@output_option
@with_admin
async def get(
    admin: Admin, keys: tuple[str, ...], broker: str | None, cluster: str | None, output: str
) -> None:
    """Show all settings, or only those with these KEYs."""
    found, silent = await _settings(admin, broker, cluster)
    OF_BROKERS.show(output, found, keys)
    _complain(silent)


@config.command("set")
@click.argument("settings", metavar="KEY=VALUE...", nargs=-1, required=True, type=SETTING)
@click.option("-b", "--broker", help="Change this broker: its name or HOST:PORT.")
@click.option("-c", "--cluster", help="Change every master of this cluster.")
@click.option("--all", "everywhere", is_flag=True, help="Change every master.")
@dry_run_option
@output_option
@with_admin
async def set_settings(
    admin: Admin,
    settings: tuple[tuple[str, str], ...],
    broker: str | None,
    cluster: str | None,
    everywhere: bool,
    dry_run: bool,
    output: str,
) -> None:
    """Change settings of running brokers. Give one of --broker, --cluster and --all."""
    if (broker is None) + (cluster is None) + (not everywhere) != 2:
        raise click.UsageError("give the target: --broker NAME, --cluster NAME or --all")
    changes = dict(settings)
    before, silent = await _settings(admin, broker, cluster)
    _complain(silent)
    OF_BROKERS.refuse_unknown(changes, before)
    after = None
    if not dry_run:
        await admin.brokers.update_config(changes, broker=broker, cluster=cluster)
        after, silent = await _settings(admin, broker, cluster)
    OF_BROKERS.show_changes(output, before, after, changes)
    _complain(silent)


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@broker_option
@cluster_option
@click.option("--key", help="Key of the statistic NAME, such as a topic for TOPIC_PUT_NUMS.")
@output_option
@watch_option
@with_admin
async def stats(
    admin: Admin,
    names: tuple[str, ...],
    broker: str | None,
    cluster: str | None,
    key: str | None,
    output: str,
) -> None:
    """Show all figures of running brokers, or only those with these NAMEs.

    With --key, show a statistic over the last minute, hour and day, for example
    `cosmo broker stats TOPIC_PUT_NUMS --key orders`.
    """
    targets = await _targets(admin, broker, cluster)
    if key is not None:
        if len(names) != 1:
            raise click.UsageError("--key goes with one NAME, for example TOPIC_PUT_NUMS")
        await _show_counted(admin, targets, names[0], key, output)
        return
    found, silent = await _asked(targets, admin.brokers.runtime)
    if not found:
        raise next(iter(silent.values()))
    known = {figure for table in found.values() for figure in table}
    for name in names:
        if name not in known:
            raise NotFound(f"no broker has a figure {name}{similar(name, known)}")
    show(
        output,
        FIGURES,
        (
            {"broker": name, "name": figure, "value": value}
            for name, table in found.items()
            for figure, value in sorted(table.items())
            if not names or figure in names
        ),
    )
    _complain(silent)


# --- inside ----------------------------------------------------------------------------------


async def _show_counted(
    admin: Admin, targets: Mapping[str, str], statistic: str, key: str, output: str
) -> None:
    found, silent = await _asked(targets, lambda at: admin.brokers.stats(at, statistic, key))
    if not found:
        raise next(iter(silent.values()))
    rows: list[dict[str, object]] = []
    for name, answer in found.items():
        for span in ("minute", "hour", "day"):
            item = getattr(answer, f"stats_{span}")
            rows.append(
                {
                    "broker": name,
                    "span": span,
                    "sum": item.sum,
                    "per_s": item.tps,
                    "per_call": item.avgpt,
                    "statistic": statistic,
                    "key": key,
                }
            )
    show(output, COUNTED, rows)
    _complain(silent)


async def _targets(admin: Admin, broker: str | None, cluster: str | None) -> dict[str, str]:
    """As `masters`, but an address may also be that of a slave."""
    if broker is None or ":" not in broker:
        return await masters(admin, broker=broker, cluster=cluster)
    known = await admin.brokers.addresses(cluster=cluster)
    return {next((name for name, at in known.items() if at == broker), broker): broker}


async def _asked(
    targets: Mapping[str, str], ask: Callable[[str], Awaitable[T]]
) -> tuple[dict[str, T], dict[str, CosmodromeError]]:
    """The answers of brokers, and the errors of those that gave none."""
    answers = await at_once(lambda at: attempt(ask(at)), targets.values())
    found: dict[str, T] = {}
    silent: dict[str, CosmodromeError] = {}
    for name, answer in zip(targets, answers, strict=True):
        if isinstance(answer, CosmodromeError):
            silent[name] = answer
        else:
            found[name] = answer
    return found, silent


async def _settings(
    admin: Admin, broker: str | None, cluster: str | None
) -> tuple[dict[str, dict[str, str]], dict[str, CosmodromeError]]:
    """Settings by broker, and those that do not answer; if none does, its error."""
    targets = await _targets(admin, broker, cluster)
    found, silent = await _asked(targets, admin.brokers.config)
    if not found:
        raise min(silent.values(), key=exit_code)
    return found, silent


def _complain(silent: Mapping[str, CosmodromeError]) -> None:
    if silent:
        listed = "; ".join(f"{name}: {error}" for name, error in silent.items())
        raise PartlyDone(f"not all brokers answered: {listed}")
