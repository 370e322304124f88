"""`cosmo topic create|alter|delete`: what they did, broker by broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec

from cosmodrome.cli.operate.config_options import field_type, topic_options, used
from cosmodrome.cli.operate.topic import SHAPE, named, shape
from cosmodrome.cli.support.arguments import TOPIC, broker_option, cluster_option, kind_of_topic
from cosmodrome.cli.support.exits import NotFound, PartlyDone
from cosmodrome.cli.support.operating import (
    confirm,
    dry_run_option,
    masters,
    note,
    with_admin,
    yes_option,
)
from cosmodrome.cli.support.output import Column, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.operate.topics import QUEUES_DEFAULT
from cosmodrome.client.values import NoRoute
from cosmodrome.errors import ConfigError, CosmodromeError
from cosmodrome.wire.bodies import TopicConfig

BOTH_KINDS = ("read_queue_nums", "write_queue_nums")
QUEUES = field_type(TopicConfig, "write_queue_nums")
CHANGED = (
    Column("topic"),
    Column("broker"),
    Column("outcome"),
    *SHAPE,
)
DELETED = (
    Column("topic"),
    Column("broker"),
    Column("outcome"),
    Column("messages", right=True),
    Column("groups"),
)


@click.command()
@click.argument("topic", type=TOPIC)
@click.option(
    "-q",
    "--queues",
    type=QUEUES,
    default=QUEUES_DEFAULT,
    show_default=True,
    help="Queues on each broker, for consumers and producers.",
)
@topic_options({**dict.fromkeys(BOTH_KINDS, "as --queues"), "perm": "RW"})
@click.option("--if-not-exists", is_flag=True, help="Make it only where it is missing.")
@broker_option
@cluster_option
@dry_run_option
@output_option
@with_admin
async def create(
    admin: Admin,
    /,
    topic: str,
    queues: int,
    if_not_exists: bool,
    broker: str | None,
    cluster: str | None,
    dry_run: bool,
    output: str,
    **settings: Any,
) -> None:
    """Make TOPIC on every master, on those of a cluster, or on one broker.

    A topic that is there already stays as it is: `cosmo topic alter` changes it.
    """
    targets = await masters(admin, broker=broker, cluster=cluster)
    there = {
        name: config for name, config in (await _held(admin, topic)).items() if name in targets
    }
    if there and not if_not_exists:
        raise ConfigError(
            f"topic {topic} exists already on {', '.join(there)}; `cosmo topic alter {topic}`"
            " changes it, --if-not-exists makes it where it is missing"
        )
    config = TopicConfig(topic_name=topic, **_fields(queues, settings))
    missing = [name for name in targets if name not in there]
    failed: dict[str, CosmodromeError] = {}
    if not dry_run:
        failed = await _make(admin, config, missing)
        made = {name: config for name in missing if name not in failed}
        if config.order and made:
            await _fix_order(admin, topic, {**there, **made})
    rows = []
    for name in targets:
        if name in there:
            rows.append(_row(topic, name, "exists", there[name]))
        else:
            made_there = "would be created" if dry_run else "created"
            rows.append(_row(topic, name, "failed" if name in failed else made_there, config))
    show(output, CHANGED, rows)
    if failed:
        listed = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise PartlyDone(f"topic {topic} was not made everywhere: {listed}")


@click.command()
@click.argument("topic", type=TOPIC)
@click.option(
    "-q", "--queues", type=QUEUES, help="Queues on each broker, for consumers and producers."
)
@topic_options({})
@broker_option
@dry_run_option
@yes_option
@output_option
@with_admin
async def alter(
    admin: Admin,
    /,
    topic: str,
    queues: int | None,
    broker: str | None,
    dry_run: bool,
    yes: bool,
    output: str,
    **settings: Any,
) -> None:
    """Change the settings of TOPIC that options name, and leave the rest.

    To give up queues without losing what is in them, lower --write-queues first and --read-queues
    when they are empty.
    """
    changes = _fields(queues, settings)
    if not changes:
        raise click.UsageError("nothing to change; give --queues, --perm or --order, for example")
    if broker is not None:
        broker = next(iter(await masters(admin, broker=broker)))
    async with named(admin, topic):
        held = await admin.topics.describe(topic)
    if broker is not None and broker not in held:
        raise NotFound(f"broker {broker} does not have topic {topic}; it is on {', '.join(held)}")
    before = {name: config for name, config in held.items() if broker in (None, name)}
    after = {name: msgspec.structs.replace(config, **changes) for name, config in before.items()}
    if not dry_run:
        _confirm_fewer(before, after, yes=yes)
        after = await _change(admin, topic, broker, changes)
    rows = []
    for name, config in before.items():
        if shape(after[name]) == shape(config):
            outcome = "unchanged"
        else:
            outcome = "would be changed" if dry_run else "changed"
        rows.append(_row(topic, name, outcome, after[name]))
        note(f"{topic} on {name}: {_difference(shape(config), shape(after[name]))}")
    show(output, CHANGED, rows)


@click.command()
@click.argument("topic", type=TOPIC)
@cluster_option
@dry_run_option
@yes_option
@output_option
@with_admin
async def delete(
    admin: Admin, topic: str, cluster: str | None, dry_run: bool, yes: bool, output: str
) -> None:
    """Remove TOPIC and its messages from the brokers, then from the name servers."""
    if kind_of_topic(topic) == "system":
        raise ConfigError(f"{topic} belongs to the system; brokers need it")
    async with named(admin, topic):
        bounds = await admin.topics.status(topic)
        groups = await admin.topics.consumers(topic)
        holders = {data.broker_name for data in (await admin.topics.route(topic)).broker_datas}
    targets = set(await masters(admin, cluster=cluster))
    if not holders & targets:
        raise NotFound(f"no broker of {cluster} has topic {topic}; it is on {', '.join(holders)}")
    counts = dict.fromkeys(sorted(holders & targets), 0)
    for queue, row in bounds.items():
        if queue.broker_name in counts:
            counts[queue.broker_name] += row.max_offset - row.min_offset
    if not dry_run:
        readers = f", which {', '.join(groups)} consume," if groups else ""
        confirm(
            f"topic {topic} with {sum(counts.values())} messages{readers} will be deleted on"
            f" {', '.join(counts)}",
            yes=yes,
        )
        await admin.topics.delete(topic, cluster=cluster)
    outcome = "would be deleted" if dry_run else "deleted"
    show(
        output,
        DELETED,
        (
            {
                "topic": topic,
                "broker": name,
                "outcome": outcome,
                "messages": count,
                "groups": groups,
            }
            for name, count in counts.items()
        ),
    )


# --- inside ----------------------------------------------------------------------------------


def _fields(queues: int | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that options set; --queues sets both kinds unless they are named."""
    both = {} if queues is None else dict.fromkeys(BOTH_KINDS, queues)
    return both | used(settings)


def _confirm_fewer(
    before: Mapping[str, TopicConfig], after: Mapping[str, TopicConfig], *, yes: bool
) -> None:
    fewer = [name for name in before if after[name].read_queue_nums < before[name].read_queue_nums]
    if fewer:
        now = ", ".join(f"{before[name].read_queue_nums} on {name}" for name in fewer)
        confirm(
            f"consumers will not see queues beyond the first {after[fewer[0]].read_queue_nums} any"
            f" more (now: {now})",
            yes=yes,
        )


async def _change(
    admin: Admin, topic: str, broker: str | None, changes: Mapping[str, Any]
) -> dict[str, TopicConfig]:
    """The topic on each broker after the change, as the brokers tell it."""
    order = changes.get("order")
    await admin.topics.update(
        topic,
        read_queues=changes.get("read_queue_nums"),
        write_queues=changes.get("write_queue_nums"),
        perm=changes.get("perm"),
        order=order,
        broker=broker,
    )
    after = await admin.topics.describe(topic)
    if order is not None:
        await _fix_order(admin, topic, after if order else None)
    return after


async def _make(
    admin: Admin, config: TopicConfig, targets: Sequence[str]
) -> dict[str, CosmodromeError]:
    """Make a topic on each of the brokers; those where it failed. The error if all failed."""
    failed = {}
    for name in targets:
        outcome = await attempt(
            admin.topics.create(
                config.topic_name,
                read_queues=config.read_queue_nums,
                write_queues=config.write_queue_nums,
                perm=config.perm,
                order=config.order,
                broker=name,
            )
        )
        if isinstance(outcome, CosmodromeError):
            failed[name] = outcome
    if failed and len(failed) == len(targets):
        raise next(iter(failed.values()))
    return failed


async def _held(admin: Admin, topic: str) -> Mapping[str, TopicConfig]:
    try:
        return await admin.topics.describe(topic)
    except NoRoute:
        return {}


async def _fix_order(admin: Admin, topic: str, configs: Mapping[str, TopicConfig] | None) -> None:
    """Tell the name servers which queues an ordered topic has."""
    if configs is None:
        await admin.topics.set_order(topic, None)
        return
    counts = {name: config.write_queue_nums for name, config in configs.items()}
    await admin.topics.set_order(topic, counts)
    for name, settings in (await admin.name_servers.config()).items():
        if settings.get("orderMessageEnable") == "false":
            note(
                f"name server {name} does not tell clients of ordered topics; `cosmo namesrv config"
                " set orderMessageEnable=true` changes that"
            )


def _row(topic: str, broker: str, outcome: str, config: TopicConfig) -> dict[str, object]:
    return {"topic": topic, "broker": broker, "outcome": outcome, **shape(config)}


def _difference(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    changes = [
        f"{name} {before[name]} → {after[name]}" for name in before if before[name] != after[name]
    ]
    return ", ".join(changes) or "nothing changes"
