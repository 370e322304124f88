"""`cosmo namesrv kv` and `cosmo namesrv config`: what name servers keep for operators."""

from __future__ import annotations

import click

from cosmodrome.cli.arguments import SETTING
from cosmodrome.cli.broker_verbs import masked
from cosmodrome.cli.operating import (
    NotFound,
    confirm,
    dry_run_option,
    note,
    similar,
    with_admin,
    yes_option,
)
from cosmodrome.cli.output import Column, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.topics import ORDER_NAMESPACE

ENTRIES = (Column("namespace"), Column("key"), Column("value"))
SETTINGS = (Column("name_server"), Column("key"), Column("value"))
CHANGES = (
    Column("name_server"),
    Column("key"),
    Column("before"),
    Column("after"),
    Column("outcome"),
)
ENTRY_CHANGES = (
    Column("namespace"),
    Column("key"),
    Column("before"),
    Column("after"),
    Column("outcome"),
)


@click.group()
def kv() -> None:
    """The table of the name servers: values by namespace and key. Changes go to all of them."""


@kv.command("list")
@click.argument("namespace", default=ORDER_NAMESPACE)
@output_option
@with_admin
async def list_entries(admin: Admin, namespace: str, output: str) -> None:
    """List the entries of NAMESPACE (ORDER_TOPIC_CONFIG if none is given)."""
    entries = await admin.name_servers.entries(namespace)
    show(
        output,
        ENTRIES,
        (
            {"namespace": namespace, "key": key, "value": value}
            for key, value in sorted(entries.items())
        ),
    )


@kv.command()
@click.argument("namespace")
@click.argument("key")
@output_option
@with_admin
async def get(admin: Admin, namespace: str, key: str, output: str) -> None:
    """Show one entry."""
    value = await admin.name_servers.get(namespace, key)
    if value is None:
        raise await _missing(admin, namespace, key)
    show(output, ENTRIES, [{"namespace": namespace, "key": key, "value": value}])


@kv.command("set")
@click.argument("namespace")
@click.argument("key")
@click.argument("value")
@dry_run_option
@output_option
@with_admin
async def set_entry(
    admin: Admin, namespace: str, key: str, value: str, dry_run: bool, output: str
) -> None:
    """Set one entry."""
    before = await admin.name_servers.get(namespace, key)
    if not dry_run:
        await admin.name_servers.put(namespace, key, value)
    outcome = "unchanged" if before == value else ("would be set" if dry_run else "set")
    row = {"namespace": namespace, "key": key, "before": before, "after": value}
    show(output, ENTRY_CHANGES, [{**row, "outcome": outcome}])


@kv.command()
@click.argument("namespace")
@click.argument("key")
@dry_run_option
@yes_option
@output_option
@with_admin
async def delete(
    admin: Admin, namespace: str, key: str, dry_run: bool, yes: bool, output: str
) -> None:
    """Remove one entry."""
    before = await admin.name_servers.get(namespace, key)
    if before is None:
        raise await _missing(admin, namespace, key)
    if not dry_run:
        confirm(f"entry {key} of {namespace} will be removed; its value is {before!r}", yes=yes)
        await admin.name_servers.delete(namespace, key)
    outcome = "would be deleted" if dry_run else "deleted"
    row = {"namespace": namespace, "key": key, "before": before, "after": None}
    show(output, ENTRY_CHANGES, [{**row, "outcome": outcome}])


@click.group()
def config() -> None:
    """Settings of running name servers."""


@config.command("get")
@click.argument("keys", metavar="[KEY]...", nargs=-1)
@output_option
@with_admin
async def get_settings(admin: Admin, keys: tuple[str, ...], output: str) -> None:
    """Show settings, all or those with these KEYs."""
    found = await admin.name_servers.config()
    known = {key for table in found.values() for key in table}
    for key in keys:
        if key not in known:
            raise NotFound(f"no name server has a setting {key}{similar(key, known)}")
    show(
        output,
        SETTINGS,
        (
            {"name_server": name, "key": key, "value": masked(key, value)}
            for name, table in found.items()
            for key, value in sorted(table.items())
            if not keys or key in keys
        ),
    )


@config.command("set")
@click.argument("settings", metavar="KEY=VALUE...", nargs=-1, required=True, type=SETTING)
@dry_run_option
@output_option
@with_admin
async def set_settings(
    admin: Admin, settings: tuple[tuple[str, str], ...], dry_run: bool, output: str
) -> None:
    """Change settings of every name server."""
    wanted = dict(settings)
    before = await admin.name_servers.config()
    known = {key for table in before.values() for key in table}
    for key in wanted:
        if key not in known:
            raise NotFound(f"no name server has a setting {key}{similar(key, known)}")
    if not dry_run:
        await admin.name_servers.update_config(wanted)
        after = await admin.name_servers.config()
    else:
        after = {name: {**table, **wanted} for name, table in before.items()}
    rows = []
    for name, table in before.items():
        for key in wanted:
            same = after[name].get(key) == table.get(key)
            rows.append(
                {
                    "name_server": name,
                    "key": key,
                    "before": masked(key, table.get(key)),
                    "after": masked(key, after[name].get(key)),
                    "outcome": "unchanged"
                    if same
                    else ("would be changed" if dry_run else "changed"),
                }
            )
    show(output, CHANGES, rows)


async def _missing(admin: Admin, namespace: str, key: str) -> NotFound:
    known = await admin.name_servers.entries(namespace)
    if not known:
        note("the namespace is empty")
    return NotFound(
        f"namespace {namespace} has no entry {key}{similar(key, known) or ';'}"
        f" `cosmo namesrv kv list {namespace}` shows all"
    )
