"""Calls of `cosmo mqadmin` about topics."""

from __future__ import annotations

from typing import Any

from cosmodrome.cli.mqadmin.call import Flags, Table
from cosmodrome.cli.support.exits import NotFound
from cosmodrome.cli.support.operating import masters
from cosmodrome.cli.support.output import Column
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.topics import ORDER_NAMESPACE, QUEUES_DEFAULT, UNIT, UNIT_SUBSCRIBED
from cosmodrome.client.receive.rebalance import Averagely
from cosmodrome.client.values import MessageQueue
from cosmodrome.errors import ConfigError
from cosmodrome.wire.bodies import PERM_READ, PERM_WRITE

TOPICS = (
    Column("topic"),
    Column("broker"),
    Column("outcome"),
    Column("read_queues", right=True),
    Column("write_queues", right=True),
    Column("perm", right=True),
    Column("order"),
)


async def update_topic(admin: Admin, flags: Flags) -> Table:
    topic, order = flags["t"], flags["o"] == "true"
    targets = await masters(admin, broker=flags["b"], cluster=flags["c"])
    settings: dict[str, Any] = {
        "read_queues": flags["r"] or QUEUES_DEFAULT,
        "write_queues": flags["w"] or QUEUES_DEFAULT,
        "perm": PERM_READ | PERM_WRITE if flags["p"] is None else flags["p"],
    }
    units = UNIT * (flags["u"] == "true") + UNIT_SUBSCRIBED * (flags["s"] == "true")
    fixed = await _fixed(admin, topic)
    for name in targets:
        await admin.topics.create(topic, broker=name, order=order, flags=units, **settings)
    if order:
        counts = dict.fromkeys(targets, settings["write_queues"])
        if flags["b"] is not None:  # the others keep theirs
            counts = {**fixed, **counts}
        await admin.topics.set_order(topic, counts)
    rows = [
        {"topic": topic, "broker": name, "outcome": "done", "order": order, **settings}
        for name in targets
    ]
    return Table(TOPICS, rows)


async def _fixed(admin: Admin, topic: str) -> dict[str, int]:
    text = await admin.name_servers.get(ORDER_NAMESPACE, admin.fleet.full(topic))
    pairs = (part.rpartition(":") for part in (text or "").split(";"))
    return {name: int(count) for name, _, count in pairs if name and count.isdecimal()}


async def update_topic_perm(admin: Admin, flags: Flags) -> Table:
    topic, perm = flags["t"], flags["p"]
    targets = await masters(admin, broker=flags["b"], cluster=flags["c"])
    held = await admin.topics.describe(topic)
    chosen = [name for name in held if name in targets]
    if not chosen:
        raise NotFound(f"none of {', '.join(targets)} has topic {topic}; {', '.join(held)} does")
    for name in chosen:
        await admin.topics.update(topic, perm=perm, broker=name)
    rows = [
        {
            "topic": topic,
            "broker": name,
            "outcome": "unchanged" if held[name].perm == perm else "changed",
            "read_queues": held[name].read_queue_nums,
            "write_queues": held[name].write_queue_nums,
            "perm": perm,
            "order": held[name].order,
        }
        for name in chosen
    ]
    return Table(TOPICS, rows)


async def allocate(admin: Admin, flags: Flags) -> Table:
    members = [part.strip() for part in flags["i"].split(",") if part.strip()]
    if not members:
        raise ConfigError("-i names no client; write 10.0.0.1,10.0.0.2")
    route = await admin.topics.route(flags["t"])
    queues = [
        MessageQueue(topic=flags["t"], broker_name=row.broker_name, queue_id=number)
        for row in route.queue_datas
        for number in range(row.read_queue_nums)
    ]
    strategy = Averagely()
    columns = (Column("client"), Column("broker"), Column("queue", right=True))
    return Table(
        columns,
        [
            {"client": member, "broker": queue.broker_name, "queue": queue.queue_id}
            for member in members
            for queue in strategy.share(member, members, queues)
        ],
    )
