"""`cosmo namesrv kv` and `cosmo namesrv config`: what name servers keep for operators."""

from __future__ import annotations

import click

from cosmodrome.cli.operate.server_settings import ServerSettings
from cosmodrome.cli.support.arguments import SETTING
from cosmodrome.cli.support.exits import NotFound
from cosmodrome.cli.support.operating import (
    confirm,
    dry_run_option,
    note,
    similar,
    with_admin,
    yes_option,
)
from cosmodrome.cli.support.output import Column, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.topics import ORDER_NAMESPACE

ENTRIES = (Column("namespace"), Column("key"), Column("value"))
OF_NAME_SERVERS = ServerSettings(
    "name server", "name_server", "`cosmo namesrv config get` shows all"
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
    """List the entries of NAMESPACE (by default ORDER_TOPIC_CONFIG)."""
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
    """Show all settings, or only those with these KEYs."""
    OF_NAME_SERVERS.show(output, await admin.name_servers.config(), keys)


@config.command("set")
@click.argument("settings", metavar="KEY=VALUE...", nargs=-1, required=True, type=SETTING)
@dry_run_option
@output_option
@with_admin
async def set_settings(
    admin: Admin, settings: tuple[tuple[str, str], ...], dry_run: bool, output: str
) -> None:
    """Change settings of every name server."""
    changes = dict(settings)
    before = await admin.name_servers.config()
    OF_NAME_SERVERS.refuse_unknown(changes, before)
    after = None
    if not dry_run:
        await admin.name_servers.update_config(changes)
        after = await admin.name_servers.config()
    OF_NAME_SERVERS.show_changes(output, before, after, changes)


async def _missing(admin: Admin, namespace: str, key: str) -> NotFound:
    known = await admin.name_servers.entries(namespace)
    if not known:
        note("the namespace is empty")
    return NotFound(
        f"namespace {namespace} has no entry {key}{similar(key, known) or ';'}"
        f" `cosmo namesrv kv list {namespace}` shows all"
    )
