"""`cosmo topic …`: topics as operators see them. Changes are in `topic_changes.py`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import click

from cosmodrome.cli.support.arguments import TOPIC, cluster_option, kind_of_topic, permission_text
from cosmodrome.cli.support.exits import NotFound, PartlyDone
from cosmodrome.cli.support.lazy import LazyGroup
from cosmodrome.cli.support.operating import similar, watch_option, with_admin
from cosmodrome.cli.support.output import UNKNOWN, Column, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import PartlyFailed
from cosmodrome.client.operate.flows import Flow, topic_flows
from cosmodrome.client.values import NoRoute
from cosmodrome.wire.bodies import MASTER_ID, ClusterInfo, TopicConfig
from cosmodrome.wire.names import REPLY_TOPIC_SUFFIX

SHAPE = (  # what `shape` has
    Column("read_queues", right=True),
    Column("write_queues", right=True),
    Column("perm"),
    Column("order"),
)
LISTED = (
    Column("topic"),
    Column("kind"),
    Column("brokers", right=True),
    *SHAPE,
    Column("broker_names", wide=True),
)
DESCRIBED = (
    Column("broker"),
    Column("cluster"),
    *SHAPE,
    Column("messages", right=True),
    Column("last_store_ms", time=True),
    Column("groups"),
    Column("topic", wide=True),
    Column("address", wide=True),
    Column("filter_type", wide=True),
    Column("attributes", wide=True),
)
QUEUES = (
    Column("broker"),
    Column("queue", right=True),
    Column("min_offset", right=True),
    Column("max_offset", right=True),
    Column("messages", right=True),
    Column("last_store_ms", time=True),
    Column("topic", wide=True),
)
ROUTED = (
    Column("broker"),
    Column("cluster"),
    Column("id", right=True),
    Column("role"),
    Column("address"),
    Column("read_queues", right=True),
    Column("write_queues", right=True),
    Column("perm"),
    Column("topic", wide=True),
    Column("order_config", wide=True),
)
FLOWS = (
    Column("topic"),
    Column("group"),
    Column("in_per_s", "IN/S", right=True),
    Column("out_per_s", "OUT/S", right=True),
    Column("in_24h", right=True),
    Column("out_24h", right=True),
)


@click.group(
    cls=LazyGroup,
    homes={
        "create": ("operate.topic_changes:create", "Make a topic."),
        "alter": ("operate.topic_changes:alter", "Change queues or permissions of a topic."),
        "delete": ("operate.topic_changes:delete", "Remove a topic and its messages."),
    },
)
def topic() -> None:
    """Topics: list, make, look at, change and delete them."""


@topic.command("list")
@click.option(
    "-a",
    "--all",
    "everything",
    is_flag=True,
    help="Also list retry, dead-letter and system topics.",
)
@cluster_option
@output_option
@watch_option
@with_admin
async def list_topics(admin: Admin, everything: bool, cluster: str | None, output: str) -> None:
    """List topics.

    If brokers have different numbers of queues for a topic, the highest numbers are shown.
    """
    info = await admin.brokers.cluster()
    names = await admin.topics.names(cluster=cluster)
    silent = ""
    configs: dict[str, dict[str, TopicConfig]] = {}
    if info.broker_addr_table:
        try:
            configs = await admin.topics.configs(cluster=cluster)
        except PartlyFailed as failure:
            if not failure.results:
                raise
            # The calls are made again, one by one: the answers there are not decoded.
            for name in failure.results:
                configs.update(await admin.topics.configs(broker=name))
            silent = ", ".join(failure.failures)
    rows = []
    for name in sorted({*names, *(one for table in configs.values() for one in table)}):
        kind = _kind(name, info)
        if everything or kind == "normal":
            rows.append(_listed(name, kind, configs, known=not silent))
    show(output, LISTED, rows)
    if silent:
        raise PartlyDone(f"not everything is known: no answer from {silent}")


@topic.command()
@click.argument("topic", type=TOPIC)
@click.option("--queues", is_flag=True, help="One row per queue, with its offsets.")
@output_option
@watch_option
@with_admin
async def describe(admin: Admin, topic: str, queues: bool, output: str) -> None:
    """Show TOPIC as each of its brokers holds it."""
    async with named(admin, topic):
        bounds = await admin.topics.status(topic)
        if queues:
            rows: list[dict[str, object]] = [
                {
                    "topic": topic,
                    "broker": queue.broker_name,
                    "queue": queue.queue_id,
                    "min_offset": row.min_offset,
                    "max_offset": row.max_offset,
                    "messages": row.max_offset - row.min_offset,
                    "last_store_ms": row.last_update_timestamp or None,
                }
                for queue, row in bounds.items()
            ]
            show(output, QUEUES, rows)
            return
        configs = await admin.topics.describe(topic)
        groups = await admin.topics.consumers(topic)
        route = await admin.topics.route(topic)
    brokers = {data.broker_name: data for data in route.broker_datas}
    rows = []
    for name, config in configs.items():
        mine = [row for queue, row in bounds.items() if queue.broker_name == name]
        rows.append(
            {
                "topic": topic,
                "broker": name,
                "cluster": brokers[name].cluster,
                "address": brokers[name].broker_addrs[MASTER_ID],
                **shape(config),
                "messages": sum(row.max_offset - row.min_offset for row in mine),
                "last_store_ms": max((row.last_update_timestamp for row in mine), default=0)
                or None,
                "groups": groups,
                "filter_type": config.topic_filter_type,
                "attributes": config.attributes or None,
            }
        )
    show(output, DESCRIBED, rows)


@topic.command()
@click.argument("topic", type=TOPIC)
@output_option
@watch_option
@with_admin
async def route(admin: Admin, topic: str, output: str) -> None:
    """Show where producers and consumers of TOPIC are sent."""
    async with named(admin, topic):
        found = await admin.topics.route(topic)
    queues = {data.broker_name: data for data in found.queue_datas}
    rows = []
    for data in sorted(found.broker_datas, key=lambda data: data.broker_name):
        mine = queues.get(data.broker_name)
        for number, address in sorted(data.broker_addrs.items()):
            rows.append(
                {
                    "topic": topic,
                    "broker": data.broker_name,
                    "cluster": data.cluster,
                    "id": number,
                    "role": "master" if number == MASTER_ID else "slave",
                    "address": address,
                    "read_queues": None if mine is None else mine.read_queue_nums,
                    "write_queues": None if mine is None else mine.write_queue_nums,
                    "perm": None if mine is None else permission_text(mine.perm),
                    "order_config": found.order_topic_conf or None,
                }
            )
    show(output, ROUTED, rows)


@topic.command()
@click.argument("topics", metavar="[TOPIC]...", nargs=-1, type=TOPIC)
@cluster_option
@output_option
@watch_option
@with_admin
async def stats(admin: Admin, topics: tuple[str, ...], cluster: str | None, output: str) -> None:
    """Show how much goes into topics and out to each group.

    Rates are means of the last minute; brokers count in steps of ten seconds. Without TOPIC every
    ordinary topic is shown.
    """
    names = list(topics)
    if not names:
        info = await admin.brokers.cluster()
        known = await admin.topics.names(cluster=cluster)
        names = [name for name in known if _kind(name, info) == "normal"]
    else:
        for name in names:
            async with named(admin, name):
                await admin.topics.route(name)
    rows = []
    silent = False
    for flow in await topic_flows(admin, names):
        silent = silent or flow.incoming is None
        incoming = _figures("in", flow.incoming)
        for group, outgoing in flow.groups.items():
            rows.append(
                {"topic": flow.topic, "group": group, **incoming, **_figures("out", outgoing)}
            )
        if not flow.groups:
            rows.append({"topic": flow.topic, **incoming})
    show(output, FLOWS, rows)
    if silent:
        raise PartlyDone("a broker is silent: `cosmo cluster status` says which")


# --- for this and the changes ----------------------------------------------------------------


@asynccontextmanager
async def named(admin: Admin, topic: str) -> AsyncIterator[None]:
    """Calls about a topic that the user named: if it is not there, says what to do."""
    try:
        yield
    except NoRoute:
        await admin.brokers.addresses()  # without any broker that is what is wrong
        close = similar(topic, await admin.topics.names())
        raise NotFound(
            f"no broker has topic {topic}{close or ';'} `cosmo topic list` shows all topics,"
            f" `cosmo topic create {topic}` makes it"
        ) from None


def shape(config: TopicConfig) -> dict[str, object]:
    return {
        "read_queues": config.read_queue_nums,
        "write_queues": config.write_queue_nums,
        "perm": permission_text(config.perm),
        "order": config.order,
    }


def _listed(
    name: str, kind: str, configs: dict[str, dict[str, TopicConfig]], *, known: bool
) -> dict[str, object]:
    mine = {broker: table[name] for broker, table in configs.items() if name in table}
    if not mine:
        unknown = dict.fromkeys(
            ("brokers", "read_queues", "write_queues", "perm", "order"), UNKNOWN
        )
        return {"topic": name, "kind": kind, **unknown, "broker_names": UNKNOWN}
    return {
        "topic": name,
        "kind": kind,
        "brokers": len(mine) if known else UNKNOWN,
        "broker_names": sorted(mine),
        "read_queues": max(config.read_queue_nums for config in mine.values()),
        "write_queues": max(config.write_queue_nums for config in mine.values()),
        "perm": "/".join(sorted({permission_text(config.perm) for config in mine.values()})),
        "order": any(config.order for config in mine.values()),
    }


def _kind(name: str, info: ClusterInfo) -> str:
    """Brokers have topics called like themselves and their cluster, for tools."""
    own = {*info.broker_addr_table, *info.cluster_addr_table}
    if name in own or name.removesuffix(REPLY_TOPIC_SUFFIX) in own:
        return "system"
    return kind_of_topic(name)


def _figures(direction: str, flow: Flow | None) -> dict[str, object]:
    if flow is None:
        return {f"{direction}_per_s": UNKNOWN, f"{direction}_24h": UNKNOWN}
    return {f"{direction}_per_s": flow.per_s, f"{direction}_24h": flow.last_day}
