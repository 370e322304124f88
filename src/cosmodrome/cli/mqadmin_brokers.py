"""Calls of `cosmo mqadmin` about brokers and what name servers say of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cosmodrome.cli.mqadmin_call import Given, Table, masters, place
from cosmodrome.cli.operating import note
from cosmodrome.cli.output import Column
from cosmodrome.client.operate.admin import Admin

DONE = (Column("broker"), Column("outcome"))


async def consume_stats(admin: Admin, given: Given) -> Table:
    found = await admin.brokers.consume_stats(given["b"], ordered=given["o"] == "true")
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
        for queue, row in sorted(table.offset_table.items(), key=lambda item: place(item[0]))
        if row.broker_offset - row.consumer_offset >= (given["l"] or 0)
    ]
    note(f"{found.total_diff} messages are not consumed")
    columns = (
        *(Column("topic"), Column("group"), Column("broker"), Column("queue", right=True)),
        *(Column("end", right=True), Column("offset", right=True), Column("lag", right=True)),
        Column("last_consumed_ms", time=True),
    )
    return Table(columns, rows)


async def clean_queues(admin: Admin, given: Given) -> Table:
    return await _housekeeping(admin, given, admin.brokers.clean_queues)


async def clean_topics(admin: Admin, given: Given) -> Table:
    return await _housekeeping(admin, given, admin.brokers.clean_topics)


async def delete_expired(admin: Admin, given: Given) -> Table:
    return await _housekeeping(admin, given, admin.brokers.delete_expired)


async def _housekeeping(admin: Admin, given: Given, work: Callable[..., Awaitable[None]]) -> Table:
    targets = await masters(admin, broker=given["b"], cluster=given["c"])
    await work(broker=given["b"], cluster=given["c"])
    return Table(DONE, [{"broker": name, "outcome": "done"} for name in targets])


async def wipe_write_perm(admin: Admin, given: Given) -> Table:
    return await _write_perm(admin, given, admin.brokers.wipe_write_perm)


async def add_write_perm(admin: Admin, given: Given) -> Table:
    return await _write_perm(admin, given, admin.brokers.add_write_perm)


async def _write_perm(admin: Admin, given: Given, work: Callable[[str], Awaitable[int]]) -> Table:
    name = next(iter(await masters(admin, broker=given["b"])))
    columns = (Column("broker"), Column("topics", right=True))
    return Table(columns, [{"broker": name, "topics": await work(name)}])
