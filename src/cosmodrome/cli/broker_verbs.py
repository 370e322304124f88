"""`cosmo broker config` and `cosmo broker stats`: settings and figures of running brokers."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click

from cosmodrome.cli.arguments import SETTING, broker_option, cluster_option
from cosmodrome.cli.operating import (
    NotFound,
    PartlyDone,
    dry_run_option,
    exit_code,
    similar,
    watch_option,
    with_admin,
)
from cosmodrome.cli.output import UNKNOWN, Column, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.operate.flows import at_once
from cosmodrome.errors import CosmodromeError

SETTINGS = (Column("broker"), Column("key"), Column("value"))
CHANGES = (
    Column("broker"),
    Column("key"),
    Column("before"),
    Column("after"),
    Column("outcome"),
)
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
SECRET = re.compile(r"secret|password|passwd|accesskey|token", re.IGNORECASE)
MASK = "********"


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
    """Show settings, all or those with these KEYs."""
    found, silent = await _settings(admin, broker, cluster)
    known = {key for table in found.values() for key in table}
    for key in keys:
        if key not in known:
            raise NotFound(
                f"no broker has a setting {key}{similar(key, known) or ';'}"
                " `cosmo broker config get` shows all"
            )
    rows = [
        {"broker": name, "key": key, "value": masked(key, value)}
        for name, table in found.items()
        for key, value in sorted(table.items())
        if not keys or key in keys
    ]
    show(output, SETTINGS, rows)
    _complain(silent)


@config.command("set")
@click.argument("settings", metavar="KEY=VALUE...", nargs=-1, required=True, type=SETTING)
@broker_option
@cluster_option
@click.option("--all", "everywhere", is_flag=True, help="On every master.")
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
    """Change settings of running brokers: of one, of a cluster, or with --all of every one."""
    if (broker is None) + (cluster is None) + (not everywhere) != 2:
        raise click.UsageError("say where: --broker NAME, --cluster NAME or --all")
    wanted = dict(settings)
    before, silent = await _settings(admin, broker, cluster)
    _complain(silent)
    known = {key for table in before.values() for key in table}
    for key in wanted:
        if key not in known:
            raise NotFound(f"no broker has a setting {key}{similar(key, known)}")
    if not dry_run:
        await admin.brokers.update_config(wanted, broker=broker, cluster=cluster)
        after, silent = await _settings(admin, broker, cluster)
    else:
        after = {name: {**table, **wanted} for name, table in before.items()}
    rows = []
    for name, table in before.items():
        for key in wanted:
            now = after[name].get(key) if name in after else UNKNOWN
            same = now == table.get(key)
            rows.append(
                {
                    "broker": name,
                    "key": key,
                    "before": masked(key, table.get(key)),
                    "after": masked(key, now),
                    "outcome": "unchanged"
                    if same
                    else ("would be changed" if dry_run else "changed"),
                }
            )
    show(output, CHANGES, rows)
    _complain(silent)


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@broker_option
@cluster_option
@click.option("--key", help="NAME is a statistic such as TOPIC_PUT_NUMS, and this is its key.")
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
    """Show figures of running brokers, all or those with these NAMEs.

    With --key a statistic over the last minute, hour and day, for example
    `cosmo broker stats TOPIC_PUT_NUMS --key orders`.
    """
    targets = await _targets(admin, broker, cluster)
    if key is not None:
        if len(names) != 1:
            raise click.UsageError("--key goes with one NAME, for example TOPIC_PUT_NUMS")
        await _show_counted(admin, targets, names[0], key, output)
        return
    answers = await at_once(lambda at: attempt(admin.brokers.runtime(at)), targets.values())
    found: dict[str, dict[str, str]] = {}
    silent: dict[str, CosmodromeError] = {}
    for name, answer in zip(targets, answers, strict=True):
        if isinstance(answer, CosmodromeError):
            silent[name] = answer
        else:
            found[name] = answer
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


def masked(key: str, value: object) -> object:
    return MASK if isinstance(value, str) and value and SECRET.search(key) else value


async def _show_counted(
    admin: Admin, targets: Mapping[str, str], statistic: str, key: str, output: str
) -> None:
    answers = await at_once(
        lambda at: attempt(admin.brokers.stats(at, statistic, key)), targets.values()
    )
    rows: list[dict[str, object]] = []
    failures: dict[str, CosmodromeError] = {}
    for name, answer in zip(targets, answers, strict=True):
        if isinstance(answer, CosmodromeError):
            failures[name] = answer
            continue
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
    if not rows:
        raise next(iter(failures.values()))
    show(output, COUNTED, rows)
    _complain(failures)


async def _targets(admin: Admin, broker: str | None, cluster: str | None) -> dict[str, str]:
    masters = await admin.brokers.addresses(cluster=cluster)
    if broker is None:
        return masters
    if ":" in broker:
        return {next((name for name, at in masters.items() if at == broker), broker): broker}
    if broker not in masters:
        raise NotFound(
            f"there is no broker {broker}{similar(broker, masters) or ';'} known are:"
            f" {', '.join(masters)}"
        )
    return {broker: masters[broker]}


async def _settings(
    admin: Admin, broker: str | None, cluster: str | None
) -> tuple[dict[str, dict[str, str]], dict[str, CosmodromeError]]:
    """Settings by broker, and those that do not answer; if none does, its error."""
    targets = await _targets(admin, broker, cluster)
    answers = await at_once(lambda at: attempt(admin.brokers.config(at)), targets.values())
    found: dict[str, dict[str, str]] = {}
    silent: dict[str, CosmodromeError] = {}
    for name, answer in zip(targets, answers, strict=True):
        if isinstance(answer, CosmodromeError):
            silent[name] = answer
        else:
            found[name] = answer
    if not found:
        raise min(silent.values(), key=exit_code)
    return found, silent


def _complain(silent: Mapping[str, CosmodromeError]) -> None:
    if silent:
        listed = "; ".join(f"{name}: {error}" for name, error in silent.items())
        raise PartlyDone(f"not all brokers answered: {listed}")
