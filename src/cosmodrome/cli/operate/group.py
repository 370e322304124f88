"""`cosmo group …`: consumer groups as operators see them: who is in them, how far they are.

Changes are in `group_changes.py`, moves of offsets in `group_moves.py`, and why a group is idle
in `group_explain.py`.
"""

from __future__ import annotations

import click

from cosmodrome.cli.support.arguments import GROUP, TOPIC, cluster_option
from cosmodrome.cli.support.exits import NotFound, PartlyDone
from cosmodrome.cli.support.lazy import LazyGroup
from cosmodrome.cli.support.operating import note, similar, watch_option, with_admin
from cosmodrome.cli.support.output import FOR_PEOPLE, UNKNOWN, Column, output_option, show, show_one
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import attempt
from cosmodrome.client.operate.flows import at_once
from cosmodrome.client.operate.standing import BROADCASTING, GroupStanding, QueueStanding, standing
from cosmodrome.errors import CosmodromeError
from cosmodrome.wire.bodies import ConsumerConnection, SubscriptionGroupConfig
from cosmodrome.wire.names import RETRY_PREFIX, is_system_group

AT_CLIENTS = "its members keep their offsets themselves (broadcasting): brokers know no lag"
GROUPS_AT_ONCE = 8

LISTED = (
    Column("group"),
    Column("members", right=True),
    Column("mode"),
    Column("topics"),
    Column("lag", right=True),
    Column("age_s", "AGE S", right=True),
    Column("out_per_s", "OUT/S", right=True),
    Column("lag_at_least", wide=True, right=True),
    Column("consume_enabled", wide=True),
    Column("brokers", wide=True),
)
LAGGED = (
    Column("topic"),
    Column("broker"),
    Column("queue", right=True),
    Column("offset", right=True),
    Column("end", right=True),
    Column("lag", right=True),
    Column("age_s", "AGE S", right=True),
    Column("unknown_because"),
    Column("first", wide=True, right=True),
    Column("client_id", wide=True),
    Column("group", wide=True),
)
MEMBERS = (
    Column("client_id"),
    Column("address"),
    Column("language"),
    Column("queues", right=True),
    Column("brokers"),
)
SUBSCRIBED = (Column("topic"), Column("type"), Column("filter"))
SETTINGS = (
    Column("consume_enabled"),
    Column("broadcast_enabled"),
    Column("retry_max_times", right=True),
    Column("retry_queues", right=True),
)


@click.group(
    cls=LazyGroup,
    homes={
        "alter": ("operate.group_changes:alter", "Change the settings of a group."),
        "clone": ("operate.group_moves:clone", "Give one group the progress of another."),
        "create": ("operate.group_changes:create", "Make a group."),
        "delete": ("operate.group_changes:delete", "Remove a group and its progress."),
        "explain": ("operate.group_explain:explain", "Say why a group is idle or slow."),
        "reset": ("operate.group_moves:reset", "Move a group to a time, an offset or an end."),
        "skip": ("operate.group_moves:skip", "Skip everything that a group has not consumed."),
    },
)
def group() -> None:
    """Consumer groups: show their lag, explain why they are idle; move, copy, delete them."""


@group.command("list")
@click.option("-a", "--all", "everything", is_flag=True, help="Also list groups of the system.")
@click.option("-t", "--topic", type=TOPIC, help="Only groups that consume this topic.")
@cluster_option
@output_option
@watch_option
@with_admin
async def list_groups(
    admin: Admin, everything: bool, topic: str | None, cluster: str | None, output: str
) -> None:
    """List groups with their lag, in messages and in seconds.

    If a part of a group's lag is unknown, the whole is unknown; `-o wide` has the known part.
    """
    configs = await admin.groups.configs(cluster=cluster, partial=True)
    names = sorted(configs)
    if topic is not None:
        await admin.topics.route(topic)
        consuming = set(await admin.topics.consumers(topic))
        names = [name for name in names if name in consuming]
    if not everything:
        names = [name for name in names if not is_system_group(name)]
    found = await at_once(
        lambda name: attempt(standing(admin.fleet, name, topic)), names, GROUPS_AT_ONCE
    )
    show(
        output,
        LISTED,
        (_listed(name, one, configs[name]) for name, one in zip(names, found, strict=True)),
    )
    silent = {
        broker: why
        for one in found
        if isinstance(one, GroupStanding)
        for broker, why in one.silent.items()
    }
    if silent:
        raise PartlyDone("no answer: " + "; ".join(silent.values()))


@group.command()
@click.argument("group", type=GROUP)
@click.option("-t", "--topic", type=TOPIC, help="Only this topic.")
@output_option
@watch_option
@with_admin
async def lag(admin: Admin, group: str, topic: str | None, output: str) -> None:
    """Show how far GROUP is behind in every queue.

    AGE S is the age of the oldest message that is not consumed, in seconds.
    """
    found = await known(admin, group, topic)
    owners = await _owners(admin, group)
    rows = [queue_row(group, row, owners) for row in found.queues]
    if output in FOR_PEOPLE and len(rows) > 1:
        rows.append({"topic": "TOTAL", "lag": shown(found.lag), "age_s": seconds(found.age_ms)})
    show(output, LAGGED, rows)
    if found.model == BROADCASTING:
        note(f"{group}: {AT_CLIENTS}")
    if found.silent:
        raise PartlyDone("no answer: " + "; ".join(found.silent.values()))


@group.command()
@click.argument("group", type=GROUP)
@output_option
@watch_option
@with_admin
async def describe(admin: Admin, group: str, output: str) -> None:
    """Show the settings, members and subscriptions of GROUP."""
    found = await known(admin, group, None)
    configs = await admin.groups.describe(group)
    connections = await _connections(admin, group)
    owners = await _owners(admin, group)
    members = _members(connections, owners)
    subscribed = _subscribed(connections)
    first = next(iter(connections.values()), None)
    summary: dict[str, object] = {
        "group": group,
        "mode": mode_of(found),
        "consume_type": None if first is None else first.consume_type,
        "consume_from": None if first is None else first.consume_from_where,
        "lag": shown(found.lag),
        "age_s": seconds(found.age_ms),
        "out_per_s": found.consume_tps,
    }
    settings = [
        {"broker": broker, **settings_cells(config)} for broker, config in sorted(configs.items())
    ]
    if output not in FOR_PEOPLE:
        lists = {"members": members, "subscriptions": subscribed, "settings": settings}
        show_one(output, {**summary, **lists})
        return
    show_one(output, summary)
    for columns, rows in (
        ((Column("broker"), *SETTINGS), settings),
        (SUBSCRIBED, subscribed),
        (MEMBERS, members),
    ):
        click.echo()
        show(output, columns, rows)
    if not members:
        note(f"nobody of {group} is connected; `cosmo group explain {group}` says more")


# --- for these and the changes ---------------------------------------------------------------


async def known(admin: Admin, group: str, topic: str | None) -> GroupStanding:
    """Where a group is; NotFound when nobody has heard of it."""
    found = await standing(admin.fleet, group, topic)
    if found.members or any(row.offset is not None for row in found.queues):
        return found
    names = await attempt(admin.groups.names())
    if isinstance(names, CosmodromeError):
        return found  # a broker is silent: nobody can say that there is no such group
    if group not in names:
        raise NotFound(
            f"no broker knows group {group}{similar(group, names) or ';'} `cosmo group list`"
            " shows all groups"
        )
    return found


def shown(value: object) -> object:
    """What is not known is shown as unknown, not as zero."""
    return UNKNOWN if value is None else value


def seconds(age_ms: int | None) -> object:
    return UNKNOWN if age_ms is None else round(age_ms / 1000, 1)


def mode_of(found: GroupStanding) -> str | None:
    return None if found.model is None else found.model.lower()


def queue_row(
    group: str, row: QueueStanding, owners: dict[tuple[str, str, int], str]
) -> dict[str, object]:
    queue = row.queue
    return {
        "group": group,
        "topic": queue.topic,
        "broker": queue.broker_name,
        "queue": queue.queue_id,
        "first": shown(row.first),
        "end": shown(row.end),
        "offset": shown(row.offset),
        "lag": shown(row.lag),
        "age_s": seconds(row.age_ms),
        "client_id": owners.get((queue.topic, queue.broker_name, queue.queue_id)),
        "unknown_because": row.why or None,
    }


# --- inside ----------------------------------------------------------------------------------


def _listed(
    name: str,
    found: GroupStanding | CosmodromeError,
    configs: dict[str, SubscriptionGroupConfig],
) -> dict[str, object]:
    row: dict[str, object] = {
        "group": name,
        "brokers": sorted(configs),
        "consume_enabled": all(config.consume_enable for config in configs.values()),
    }
    if isinstance(found, CosmodromeError):
        return row | dict.fromkeys(("members", "lag", "age_s", "out_per_s"), UNKNOWN)
    topics = [one for one in found.topics if not one.startswith(RETRY_PREFIX)]
    return row | {
        "members": shown(found.members),
        "mode": mode_of(found),
        "topics": topics or None,
        "lag": shown(found.lag if found.queues else None),
        "age_s": seconds(found.age_ms),
        "out_per_s": shown(found.consume_tps),
        "lag_at_least": found.lag_known,
    }


async def _connections(admin: Admin, group: str) -> dict[str, ConsumerConnection]:
    found = await attempt(admin.groups.connections(group))
    return {} if isinstance(found, CosmodromeError) else found


async def _owners(admin: Admin, group: str) -> dict[tuple[str, str, int], str]:
    """Which member works on which queue, as the members say."""
    ids = {
        member.client_id
        for connection in (await _connections(admin, group)).values()
        for member in connection.connection_set
    }
    infos = await at_once(
        lambda client_id: attempt(admin.groups.running_info(group, client_id)), sorted(ids)
    )
    owners = {}
    for client_id, info in zip(sorted(ids), infos, strict=True):
        if not isinstance(info, CosmodromeError):
            for queue in info.mq_table:
                plain = admin.fleet.plain_queue(queue)
                owners[plain.topic, plain.broker_name, plain.queue_id] = client_id
    return owners


def _members(
    connections: dict[str, ConsumerConnection], owners: dict[tuple[str, str, int], str]
) -> list[dict[str, object]]:
    rows: dict[str, dict[str, object]] = {}
    brokers: dict[str, set[str]] = {}
    for broker, connection in sorted(connections.items()):
        for member in connection.connection_set:
            brokers.setdefault(member.client_id, set()).add(broker)
            rows.setdefault(
                member.client_id,
                {
                    "client_id": member.client_id,
                    "address": member.client_addr,
                    "language": member.language,
                    "queues": sum(owner == member.client_id for owner in owners.values()),
                },
            )
    return [{**rows[name], "brokers": sorted(brokers[name])} for name in sorted(rows)]


def _subscribed(connections: dict[str, ConsumerConnection]) -> list[dict[str, object]]:
    table = {}
    for connection in connections.values():
        table.update(connection.subscription_table)
    return [
        {"topic": topic, "type": data.expression_type, "filter": data.sub_string}
        for topic, data in sorted(table.items())
    ]


def settings_cells(config: SubscriptionGroupConfig) -> dict[str, object]:
    """What `SETTINGS` shows of a group."""
    return {
        "consume_enabled": config.consume_enable,
        "broadcast_enabled": config.consume_broadcast_enable,
        "retry_max_times": config.retry_max_times,
        "retry_queues": config.retry_queue_nums,
    }
