"""`cosmo group create|alter|delete`: settings of groups, and their end."""

from __future__ import annotations

import click
import msgspec

from cosmodrome.cli.arguments import GROUP, broker_option, cluster_option
from cosmodrome.cli.group import is_system_group, known
from cosmodrome.cli.operating import (
    NotFound,
    confirm,
    dry_run_option,
    similar,
    with_admin,
    yes_option,
)
from cosmodrome.cli.output import UNKNOWN, Column, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.values import NoRoute
from cosmodrome.errors import ConfigError, CosmodromeError, Refused
from cosmodrome.wire.bodies import SubscriptionGroupConfig
from cosmodrome.wire.names import dlq_topic, retry_topic

CHANGED = (
    Column("group"),
    Column("broker"),
    Column("outcome"),
    Column("consume_enabled"),
    Column("broadcast_enabled"),
    Column("retry_max_times", right=True),
    Column("retry_queues", right=True),
)
DELETED = (
    Column("what"),
    Column("name"),
    Column("broker"),
    Column("messages", right=True),
    Column("outcome"),
    Column("group", wide=True),
)
ON_OFF = click.Choice(["on", "off"])


def _settings_options(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        click.option("--retry-queues", type=click.IntRange(0, 65_535), help="0: no retries."),
        click.option("--retries", type=click.IntRange(-1), help="Attempts; -1: the client says."),
        click.option("--broadcast", type=ON_OFF, help="Whether it may consume as broadcast."),
        click.option("--consume", type=ON_OFF, help="Whether it may consume at all."),
    ):
        command = option(command)
    return command


@click.command()
@click.argument("group", type=GROUP)
@_settings_options
@broker_option
@cluster_option
@dry_run_option
@output_option
@with_admin
async def create(
    admin: Admin,
    group: str,
    consume: str | None,
    broadcast: str | None,
    retries: int | None,
    retry_queues: int | None,
    broker: str | None,
    cluster: str | None,
    dry_run: bool,
    output: str,
) -> None:
    """Make GROUP on every master, on those of a cluster, or on one broker."""
    there = await admin.groups.describe(group)
    if there:
        raise ConfigError(
            f"group {group} exists already on {', '.join(there)}; `cosmo group alter {group}`"
            " changes it"
        )
    config = SubscriptionGroupConfig(group_name=group)
    wanted = _changed(config, consume, broadcast, retries, retry_queues)
    targets = await admin.fleet.chosen(cluster=cluster, broker=broker)
    if not dry_run:
        for address in targets.values():
            await _put(admin, wanted, address)
    outcome = "would be created" if dry_run else "created"
    show(output, CHANGED, (_row(group, name, outcome, wanted) for name in targets))


@click.command()
@click.argument("group", type=GROUP)
@_settings_options
@broker_option
@dry_run_option
@output_option
@with_admin
async def alter(
    admin: Admin,
    group: str,
    consume: str | None,
    broadcast: str | None,
    retries: int | None,
    retry_queues: int | None,
    broker: str | None,
    dry_run: bool,
    output: str,
) -> None:
    """Change what is given of GROUP, and leave the rest."""
    if all(one is None for one in (consume, broadcast, retries, retry_queues)):
        raise click.UsageError("nothing to change; give --consume or --retries, for example")
    configs = await admin.groups.describe(group)
    targets = await admin.fleet.chosen(cluster=None, broker=broker)
    chosen = {name: config for name, config in configs.items() if broker in (None, name)}
    if not chosen:
        names = await admin.groups.names()
        raise NotFound(
            f"no broker knows group {group}{similar(group, names) or ';'} `cosmo group create"
            f" {group}` makes it"
        )
    rows = []
    for name, config in chosen.items():
        wanted = _changed(config, consume, broadcast, retries, retry_queues)
        if wanted == config:
            outcome = "unchanged"
        elif dry_run:
            outcome = "would be changed"
        else:
            await _put(admin, wanted, targets[name])
            outcome = "changed"
        rows.append(_row(group, name, outcome, wanted))
    show(output, CHANGED, rows)


@click.command()
@click.argument("group", type=GROUP)
@click.option("--keep-topics", is_flag=True, help="Keep its retry topic and its dead letters.")
@click.option("--keep-offsets", is_flag=True, help="Keep how far it has come.")
@click.option("--force", is_flag=True, help="Even if members are connected.")
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
            " stop them first, or say --force"
        )
    rows: list[dict[str, object]] = [
        {"what": "settings", "name": group, "broker": name}
        for name in sorted(await admin.groups.describe(group))
    ]
    if not keep_offsets:
        places = {
            (row.queue.topic, row.queue.broker_name)
            for row in found.queues
            if row.offset is not None
        }
        rows += [
            {"what": "offsets", "name": topic, "broker": name} for topic, name in sorted(places)
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


def _changed(
    config: SubscriptionGroupConfig,
    consume: str | None,
    broadcast: str | None,
    retries: int | None,
    retry_queues: int | None,
) -> SubscriptionGroupConfig:
    changes = {
        "consume_enable": None if consume is None else consume == "on",
        "consume_broadcast_enable": None if broadcast is None else broadcast == "on",
        "retry_max_times": retries,
        "retry_queue_nums": retry_queues,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    return msgspec.structs.replace(config, **given)


def _row(
    group: str, broker: str, outcome: str, config: SubscriptionGroupConfig
) -> dict[str, object]:
    return {
        "group": group,
        "broker": broker,
        "outcome": outcome,
        "consume_enabled": config.consume_enable,
        "broadcast_enabled": config.consume_broadcast_enable,
        "retry_max_times": config.retry_max_times,
        "retry_queues": config.retry_queue_nums,
    }
