"""`cosmo group create|alter|delete`: settings of groups, and their end."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from cosmodrome.cli.operate.config_options import group_options, used
from cosmodrome.cli.operate.group import SETTINGS, known, settings_cells
from cosmodrome.cli.support.arguments import GROUP, broker_option, cluster_option
from cosmodrome.cli.support.exits import NotFound
from cosmodrome.cli.support.operating import (
    confirm,
    dry_run_option,
    masters,
    similar,
    with_admin,
    yes_option,
)
from cosmodrome.cli.support.output import UNKNOWN, Column, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.values import NoRoute
from cosmodrome.errors import ConfigError, CosmodromeError, Refused
from cosmodrome.wire.bodies import SubscriptionGroupConfig
from cosmodrome.wire.names import dlq_topic, is_system_group, retry_topic

CHANGED = (
    Column("group"),
    Column("broker"),
    Column("outcome"),
    *SETTINGS,
)
DELETED = (
    Column("what"),
    Column("name"),
    Column("broker"),
    Column("messages", right=True),
    Column("outcome"),
    Column("group", wide=True),
)


@click.command()
@click.argument("group", type=GROUP)
@group_options
@broker_option
@cluster_option
@dry_run_option
@output_option
@with_admin
async def create(
    admin: Admin,
    /,
    group: str,
    broker: str | None,
    cluster: str | None,
    dry_run: bool,
    output: str,
    **settings: Any,
) -> None:
    """Make GROUP on every master, on those of a cluster, or on one broker."""
    there = await admin.groups.describe(group)
    if there:
        raise ConfigError(
            f"group {group} exists already on {', '.join(there)}; `cosmo group alter {group}`"
            " changes it"
        )
    config = SubscriptionGroupConfig(group_name=group, **used(settings))
    targets = await admin.fleet.chosen(cluster=cluster, broker=broker)
    if not dry_run:
        for address in targets.values():
            await _put(admin, config, address)
    outcome = "would be created" if dry_run else "created"
    show(output, CHANGED, (_row(group, name, outcome, config) for name in targets))


@click.command()
@click.argument("group", type=GROUP)
@group_options
@broker_option
@dry_run_option
@output_option
@with_admin
async def alter(
    admin: Admin, /, group: str, broker: str | None, dry_run: bool, output: str, **settings: Any
) -> None:
    """Change the settings of GROUP that options name, and leave the rest."""
    changes = used(settings)
    if not changes:
        raise click.UsageError("nothing to change; give --consume or --retries, for example")
    configs = await admin.groups.describe(group)
    targets = await masters(admin, broker=broker)
    chosen = {name: config for name, config in configs.items() if name in targets}
    if not chosen:
        names = await admin.groups.names()
        raise NotFound(
            f"no broker knows group {group}{similar(group, names) or ';'} `cosmo group create"
            f" {group}` makes it"
        )
    rows = []
    for name, before in chosen.items():
        after = msgspec.structs.replace(before, **changes)
        if after == before:
            outcome = "unchanged"
        elif dry_run:
            outcome = "would be changed"
        else:
            await _put(admin, after, targets[name])
            outcome = "changed"
        rows.append(_row(group, name, outcome, after))
    show(output, CHANGED, rows)


@click.command()
@click.argument("group", type=GROUP)
@click.option("--keep-topics", is_flag=True, help="Keep its retry topic and its dead letters.")
@click.option("--keep-offsets", is_flag=True, help="Keep its progress.")
@click.option("--force", is_flag=True, help="Delete it even if members are connected.")
@dry_run_option
@yes_option
@output_option
@with_admin
async def delete(
    admin: Admin,
    group: str,
    keep_topics: bool,
    keep_offsets: bool,
    force: bool,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    """Remove GROUP: settings, progress, retry topic and dead letters, from every master."""
    if is_system_group(group):
        raise ConfigError(f"group {group} belongs to the system; brokers make it again")
    found = await known(admin, group, None)
    if found.members and not force and not dry_run:
        raise ConfigError(
            f"group {group} has {found.members} member(s) connected, which would make it again;"
            " stop them first, or use --force"
        )
    rows: list[dict[str, object]] = [
        {"what": "settings", "name": group, "broker": name}
        for name in sorted(await admin.groups.describe(group))
    ]
    if not keep_offsets:
        progress = {
            (row.queue.topic, row.queue.broker_name)
            for row in found.queues
            if row.offset is not None
        }
        rows += [
            {"what": "offsets", "name": topic, "broker": name} for topic, name in sorted(progress)
        ]
    dead = 0
    for topic in () if keep_topics else (retry_topic(group), dlq_topic(group)):
        held = await _held(admin, topic)
        rows += [
            {"what": "topic", "name": topic, "broker": name, "messages": count}
            for name, count in held.items()
        ]
        if topic == dlq_topic(group):
            dead = sum(count for count in held.values() if isinstance(count, int))
    if not dry_run:
        lost = f" and {dead} dead letter(s)" if dead else ""
        confirm(f"group {group}, its progress{lost} will be gone", yes=yes)
        await admin.groups.delete(group, offsets=not keep_offsets, topics=not keep_topics)
    outcome = "would be deleted" if dry_run else "deleted"
    show(output, DELETED, ({**row, "group": group, "outcome": outcome} for row in rows))


async def _held(admin: Admin, topic: str) -> dict[str, object]:
    """Messages of a topic by broker; empty when it does not exist."""
    status = await attempt(admin.topics.status(topic))
    if isinstance(status, NoRoute | Refused):
        return {}
    if isinstance(status, CosmodromeError):
        return {"?": UNKNOWN}
    held: dict[str, int] = {}
    for queue, row in status.items():
        held[queue.broker_name] = held.get(queue.broker_name, 0) + row.max_offset - row.min_offset
    return dict(held)


async def _put(admin: Admin, config: SubscriptionGroupConfig, address: str) -> None:
    settings = {
        name: getattr(config, name)
        for name in config.__struct_fields__
        if name != "group_name" and getattr(config, name) is not msgspec.UNSET
    }
    await admin.groups.create(config.group_name, broker=address, **settings)


def _row(
    group: str, broker: str, outcome: str, config: SubscriptionGroupConfig
) -> dict[str, object]:
    return {"group": group, "broker": broker, "outcome": outcome, **settings_cells(config)}
