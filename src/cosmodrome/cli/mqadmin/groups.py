"""Calls of `cosmo mqadmin` about groups and their members."""

from __future__ import annotations

from typing import Any

import msgspec

from cosmodrome.cli.mqadmin.call import Flags, Table
from cosmodrome.cli.support.exits import NotFound
from cosmodrome.cli.support.operating import masters, note
from cosmodrome.cli.support.output import UNKNOWN, Column
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import queue_order
from cosmodrome.wire.bodies import SubscriptionGroupConfig
from cosmodrome.wire.commands.group import DeleteSubscriptiongroup

GROUP_FLAGS = {
    "s": "consume_enable",
    "m": "consume_from_min_enable",
    "d": "consume_broadcast_enable",
    "q": "retry_queue_nums",
    "r": "retry_max_times",
    "i": "broker_id",
    "w": "which_broker_when_consume_slowly",
    "a": "notify_consumer_ids_changed_enable",
}
GROUPS = (Column("group"), Column("broker"), Column("outcome"))
SETTINGS = (Column("group"), Column("broker"), Column("key"), Column("value"))


async def update_group(admin: Admin, flags: Flags) -> Table:
    # Compat: upstream's command switches both off unless it is told otherwise.
    settings: dict[str, Any] = {
        "consume_from_min_enable": False,
        "consume_broadcast_enable": False,
    }
    for letter, name in GROUP_FLAGS.items():
        value = flags[letter]
        if value is not None:
            settings[name] = value == "true" if value in ("true", "false") else value
    targets = await masters(admin, broker=flags["b"], cluster=flags["c"])
    for address in targets.values():
        await admin.groups.create(flags["g"], broker=address, **settings)
    return Table(GROUPS, [_row(flags, name, "done") for name in targets])


async def delete_group(admin: Admin, flags: Flags) -> Table:
    group, offsets = flags["g"], flags["r"] == "true"
    targets = await masters(admin, broker=flags["b"], cluster=flags["c"])
    if flags["c"] is not None:
        await admin.groups.delete(group, cluster=flags["c"], offsets=offsets)
    else:
        full = admin.fleet.full(group)
        command = DeleteSubscriptiongroup(
            group_name=full, remove_offset=offsets, clean_offset=offsets
        )
        await admin.fleet.each(targets, command)
    return Table(GROUPS, [_row(flags, name, "deleted") for name in targets])


async def group_config(admin: Admin, flags: Flags) -> Table:
    found = await admin.groups.describe(flags["g"])
    if not found:
        raise NotFound(f"no broker knows group {flags['g']}; `cosmo group list` shows all groups")
    return Table(
        SETTINGS,
        [
            {"group": flags["g"], "broker": broker, "key": key, "value": value}
            for broker, config in sorted(found.items())
            for key, value in _settings(config).items()
        ],
    )


def _settings(config: SubscriptionGroupConfig) -> dict[str, object]:
    named = {field.name: field.encode_name for field in msgspec.structs.fields(type(config))}
    return {
        named[name]: getattr(config, name)
        for name in sorted(named)
        if getattr(config, name) is not msgspec.UNSET
    }


async def running_info(admin: Admin, flags: Flags) -> Table:
    members = await admin.groups.members(flags["g"])
    if flags["i"] is not None and flags["i"] not in members:
        listed = ", ".join(members)
        raise NotFound(f"group {flags['g']} has no member {flags['i']}; there is: {listed}")
    rows = []
    subscribed: dict[str, set[tuple[str, str]]] = {}
    for client_id in members if flags["i"] is None else [flags["i"]]:
        info = await admin.groups.running_info(flags["g"], client_id)
        subscribed[client_id] = {(one.topic, one.sub_string) for one in info.subscription_set}
        for queue, state in sorted(info.mq_table.items(), key=lambda item: queue_order(item[0])):
            plain = admin.fleet.plain_queue(queue)
            rows.append(
                {
                    "client_id": client_id,
                    "topic": plain.topic,
                    "broker": plain.broker_name,
                    "queue": plain.queue_id,
                    "offset": state.get("commitOffset", UNKNOWN),
                    "cached": state.get("cachedMsgCount", UNKNOWN),
                    "locked": state.get("locked", UNKNOWN),
                    "dropped": state.get("droped", UNKNOWN),
                }
            )
    if len(set(map(frozenset, subscribed.values()))) > 1:
        note(f"members of {flags['g']} subscribe differently; `cosmo group explain {flags['g']}`")
    columns = (
        Column("client_id"),
        Column("topic"),
        Column("broker"),
        Column("queue", right=True),
        Column("offset", right=True),
        Column("cached", right=True),
        Column("locked"),
        Column("dropped"),
    )
    return Table(columns, rows)


async def producers(admin: Admin, flags: Flags) -> Table:
    found = await admin.groups.producers(broker=flags["b"])
    columns = (
        Column("group"),
        Column("client_id"),
        Column("address"),
        Column("language"),
        Column("last_seen_ms", time=True),
    )
    return Table(
        columns,
        [
            {
                "group": group,
                "client_id": one.client_id,
                "address": one.remote_ip.removeprefix("/"),
                "language": one.language,
                "last_seen_ms": one.last_update_timestamp,
            }
            for group, clients in sorted(found.items())
            for one in sorted(clients, key=lambda one: one.client_id)
        ],
    )


async def reset_offset(admin: Admin, flags: Flags) -> Table:
    moment = int(flags["s"])
    moved = await admin.offsets.reset(
        flags["g"], flags["t"], "end" if moment < 0 else moment, force=flags["f"] != "false"
    )
    columns = (
        Column("group"),
        Column("topic"),
        Column("broker"),
        Column("queue", right=True),
        Column("offset", right=True),
    )
    return Table(
        columns,
        [
            {
                "group": flags["g"],
                "topic": queue.topic,
                "broker": queue.broker_name,
                "queue": queue.queue_id,
                "offset": offset,
            }
            for queue, offset in moved.items()
        ],
    )


def _row(flags: Flags, broker: str, outcome: str) -> dict[str, object]:
    return {"group": flags["g"], "broker": broker, "outcome": outcome}
