"""`cosmo topic create|alter|delete`: what they did, broker by broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click

from cosmodrome.cli.arguments import (
    PERMISSION,
    TOPIC,
    broker_option,
    cluster_option,
    kind_of_topic,
)
from cosmodrome.cli.operating import (
    NotFound,
    PartlyDone,
    confirm,
    dry_run_option,
    note,
    with_admin,
    yes_option,
)
from cosmodrome.cli.output import Column, output_option, show
from cosmodrome.cli.topic import named, shape
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.values import NoRoute
from cosmodrome.errors import ConfigError, CosmodromeError
from cosmodrome.wire.bodies import TopicConfig

QUEUES = click.IntRange(1, 65_536)
CHANGED = (
    Column("topic"),
    Column("broker"),
    Column("outcome"),
    Column("read_queues", right=True),
    Column("write_queues", right=True),
    Column("perm"),
    Column("order"),
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
@click.option("-q", "--queues", type=QUEUES, default=8, show_default=True, help="On each broker.")
@click.option("--read-queues", type=QUEUES, help="For consumers.  [default: as --queues]")
@click.option("--write-queues", type=QUEUES, help="For producers.  [default: as --queues]")
@click.option("--perm", type=PERMISSION, default="RW", show_default=True, help="RW, R, W or NONE.")
@click.option("--order", is_flag=True, help="Name servers fix its queues, for strict order.")
@click.option("--if-not-exists", is_flag=True, help="Make it only where it is missing.")
@broker_option
@cluster_option
@dry_run_option
@output_option
@with_admin
async def create(
    admin: Admin,
    topic: str,
    queues: int,
    read_queues: int | None,
    write_queues: int | None,
    perm: int,
    order: bool,
    if_not_exists: bool,
    broker: str | None,
    cluster: str | None,
    dry_run: bool,
    output: str,
) -> None:
    """Make TOPIC on every master, on those of a cluster, or on one broker.

    A topic that is there already stays as it is: `cosmo topic alter` changes it.
    """
    targets = await _targets(admin, broker, cluster)
    there = {
        name: config for name, config in (await _held(admin, topic)).items() if name in targets
    }
    if there and not if_not_exists:
        raise ConfigError(
            f"topic {topic} exists already on {', '.join(there)}; `cosmo topic alter {topic}`"
            " changes it, --if-not-exists makes it where it is missing"
        )
    wanted = TopicConfig(
        topic_name=topic,
        read_queue_nums=read_queues or queues,
        write_queue_nums=write_queues or queues,
        perm=perm,
        order=order,
    )
    missing = [name for name in targets if name not in there]
    failed: dict[str, CosmodromeError] = {}
    if not dry_run:
        failed = await _make(admin, wanted, missing)
        made = {name: wanted for name in missing if name not in failed}
        if order and made:
            await _fix_order(admin, topic, {**there, **made})
    rows = []
    for name in targets:
        if name in there:
            rows.append(_row(topic, name, "exists", there[name]))
        else:
            made_there = "would be created" if dry_run else "created"
            rows.append(_row(topic, name, "failed" if name in failed else made_there, wanted))
    show(output, CHANGED, rows)
    if failed:
        listed = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise PartlyDone(f"topic {topic} was not made everywhere: {listed}")


@click.command()
@click.argument("topic", type=TOPIC)
@click.option("-q", "--queues", type=QUEUES, help="On each broker, for reading and writing.")
@click.option("--read-queues", type=QUEUES, help="For consumers.")
@click.option("--write-queues", type=QUEUES, help="For producers.")
@click.option("--perm", type=PERMISSION, help="RW, R, W or NONE.")
@click.option("--order/--no-order", default=None, help="Whether name servers fix its queues.")
@broker_option
@dry_run_option
@yes_option
@output_option
@with_admin
async def alter(
    admin: Admin,
    topic: str,
    queues: int | None,
    read_queues: int | None,
    write_queues: int | None,
    perm: int | None,
    order: bool | None,
    broker: str | None,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    """Change what is given of TOPIC, and leave the rest.

    To give up queues without losing what is in them, lower --write-queues first and --read-queues
    when they are empty.
    """
    if all(one is None for one in (queues, read_queues, write_queues, perm, order)):
        raise click.UsageError("nothing to change; give --queues, --perm or --order, for example")
    if broker is not None:
        broker = next(iter(await _targets(admin, broker, None)))
    async with named(admin, topic):
        before = await admin.topics.describe(topic)
    if broker is not None and broker not in before:
        raise NotFound(f"broker {broker} does not have topic {topic}; it is on {', '.join(before)}")
    chosen = {name: config for name, config in before.items() if broker in (None, name)}
    fewer = {
        name: config.read_queue_nums
        for name, config in chosen.items()
        if (read_queues or queues or config.read_queue_nums) < config.read_queue_nums
    }
    if fewer and not dry_run:
        now = ", ".join(f"{count} on {name}" for name, count in fewer.items())
        confirm(
            f"consumers will not see queues beyond the first {read_queues or queues} any more"
            f" (now: {now})",
            yes=yes,
        )
    if not dry_run:
        await admin.topics.update(
            topic,
            queues=queues,
            read_queues=read_queues,
            write_queues=write_queues,
            perm=perm,
            order=order,
            broker=broker,
        )
        after = await admin.topics.describe(topic)
        if order is not None:
            await _fix_order(admin, topic, after if order else None)
    else:
        after = {
            name: TopicConfig(
                topic_name=topic,
                read_queue_nums=read_queues or queues or config.read_queue_nums,
                write_queue_nums=write_queues or queues or config.write_queue_nums,
                perm=config.perm if perm is None else perm,
                order=config.order if order is None else order,
            )
            for name, config in chosen.items()
        }
    rows = []
    for name, config in chosen.items():
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
    targets = set(await _targets(admin, None, cluster))
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


async def _targets(admin: Admin, broker: str | None, cluster: str | None) -> dict[str, str]:
    """The masters that are meant: name → address."""
    masters = await admin.brokers.addresses(cluster=cluster)
    if broker is None:
        return masters
    chosen = {name: at for name, at in masters.items() if broker in (name, at)}
    if not chosen:
        raise NotFound(f"there is no broker {broker}; known are: {', '.join(masters)}")
    return chosen


async def _make(
    admin: Admin, wanted: TopicConfig, targets: Sequence[str]
) -> dict[str, CosmodromeError]:
    """Make a topic on each of the brokers; those where it failed. The error if all failed."""
    failed = {}
    for name in targets:
        outcome = await attempt(
            admin.topics.create(
                wanted.topic_name,
                read_queues=wanted.read_queue_nums,
                write_queues=wanted.write_queue_nums,
                perm=wanted.perm,
                order=wanted.order,
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
