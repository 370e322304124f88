"""Calls of `cosmo mqadmin` about brokers and what name servers say of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cosmodrome.cli.mqadmin.call import Flags, Table
from cosmodrome.cli.support.operating import masters, note
from cosmodrome.cli.support.output import Column
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.fleet import queue_order

DONE = (Column("broker"), Column("outcome"))


async def consume_stats(admin: Admin, flags: Flags) -> Table:
    found = await admin.brokers.consume_stats(flags["b"], ordered=flags["o"] == "true")
    rows = [
        {
            "topic": admin.fleet.plain(queue.topic),
            "group": admin.fleet.plain(group),
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "end": row.broker_offset,
            "offset": row.consumer_offset,
            "lag": row.broker_offset - row.consumer_offset,
            "last_consumed_ms": row.last_timestamp or None,
        }
        for groups in found.consume_stats_list
        for group, tables in groups.items()
        for table in tables
        for queue, row in sorted(table.offset_table.items(), key=lambda item: queue_order(item[0]))
        if row.broker_offset - row.consumer_offset >= (flags["l"] or 0)
    ]
    note(f"{found.total_diff} messages are not consumed")
    columns = (
        Column("topic"),
        Column("group"),
        Column("broker"),
        Column("queue", right=True),
        Column("end", right=True),
        Column("offset", right=True),
        Column("lag", right=True),
        Column("last_consumed_ms", time=True),
    )
    return Table(columns, rows)


async def clean_queues(admin: Admin, flags: Flags) -> Table:
    return await _housekeeping(admin, flags, admin.brokers.clean_queues)


async def clean_topics(admin: Admin, flags: Flags) -> Table:
    return await _housekeeping(admin, flags, admin.brokers.clean_topics)


async def delete_expired(admin: Admin, flags: Flags) -> Table:
    return await _housekeeping(admin, flags, admin.brokers.delete_expired)


async def _housekeeping(admin: Admin, flags: Flags, work: Callable[..., Awaitable[None]]) -> Table:
    targets = await masters(admin, broker=flags["b"], cluster=flags["c"])
    await work(broker=flags["b"], cluster=flags["c"])
    return Table(DONE, [{"broker": name, "outcome": "done"} for name in targets])


async def wipe_write_perm(admin: Admin, flags: Flags) -> Table:
    return await _write_perm(admin, flags, admin.brokers.wipe_write_perm)


async def add_write_perm(admin: Admin, flags: Flags) -> Table:
    return await _write_perm(admin, flags, admin.brokers.add_write_perm)


async def _write_perm(admin: Admin, flags: Flags, work: Callable[[str], Awaitable[int]]) -> Table:
    name = next(iter(await masters(admin, broker=flags["b"])))
    columns = (Column("broker"), Column("topics", right=True))
    return Table(columns, [{"broker": name, "topics": await work(name)}])
