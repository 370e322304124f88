"""Calls of `cosmo mqadmin` about single messages, and those that send some to take the time."""

from __future__ import annotations

import time

from cosmodrome.cli.mqadmin.call import Flags, Table
from cosmodrome.cli.support.connection import client_options
from cosmodrome.cli.support.operating import masters, note
from cosmodrome.cli.support.output import UNKNOWN, Column
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message, MessageQueue
from cosmodrome.errors import ConfigError, CosmodromeError

SEND_GROUP = "cosmo_mqadmin"
SIZE_BYTES = 128
SENT = (
    Column("broker"),
    Column("queue", right=True),
    Column("status"),
    Column("ms", right=True),
    Column("msg_id"),
)


async def send_message(admin: Admin, flags: Flags) -> Table:
    topic, broker, queue_id = flags["t"], flags["b"], flags["i"]
    if queue_id is not None and broker is None:
        raise ConfigError("-i needs the broker of the queue as well: give -b")
    queue = None
    if broker is not None:
        name = next(iter(await masters(admin, broker=broker)))
        queue = MessageQueue(topic=topic, broker_name=name, queue_id=queue_id or 0)
    keys = tuple((flags["k"] or "").split())
    message = Message(topic, flags["p"].encode(), tags=flags["c"], keys=keys)
    await admin.topics.route(topic)  # nothing is made by sending
    async with Producer(
        flags["namesrv"],
        group=SEND_GROUP,
        trace=flags["m"] == "true",
        retries=0,
        client=client_options(flags["namesrv"]),
    ) as producer:
        return Table(SENT, [await _timed(producer, message, queue)])


async def time_topic(admin: Admin, flags: Flags) -> Table:
    await admin.topics.route(flags["t"])
    count, size = flags["a"] or 100, flags["s"] or SIZE_BYTES
    rows = await _sends(flags["namesrv"], flags["t"], count, size)
    return Table(SENT, _with_mean(rows))


async def time_broker(admin: Admin, flags: Flags) -> Table:
    name = next(iter(await masters(admin, broker=flags["b"])))
    count, size = flags["c"] or 50, flags["s"] or SIZE_BYTES
    return Table(SENT, _with_mean(await _sends(flags["namesrv"], name, count, size)))


async def time_cluster(admin: Admin, flags: Flags) -> Table:
    info = await admin.brokers.cluster()
    targets = await admin.brokers.addresses(cluster=flags["c"])
    count, size = flags["a"] or 100, flags["s"] or SIZE_BYTES
    rows = []
    for name in targets:
        sent = await _sends(flags["namesrv"], name, count, size)
        well = [row for row in sent if row["status"] == "OK"]
        times = [float(str(row["ms"])) for row in well]
        rows.append(
            {
                "cluster": info.broker_addr_table[name].cluster,
                "broker": name,
                "ms": round(sum(times) / len(times), 2) if times else UNKNOWN,
                "sent": len(well),
                "failed": len(sent) - len(well),
            }
        )
    columns = (
        Column("cluster"),
        Column("broker"),
        Column("ms", right=True),
        Column("sent", right=True),
        Column("failed", right=True),
    )
    return Table(columns, rows)


async def _sends(namesrv: str, topic: str, count: int, size: int) -> list[dict[str, object]]:
    """Send one after the other; brokers have topics called like themselves for this."""
    client = client_options(namesrv)
    async with Producer(namesrv, group=SEND_GROUP, retries=0, client=client) as producer:
        return [await _timed(producer, Message(topic, b"x" * size), None) for _ in range(count)]


async def _timed(
    producer: Producer, message: Message, queue: MessageQueue | None
) -> dict[str, object]:
    began_ns = time.monotonic_ns()
    try:
        result = await producer.send(message, queue=queue)
    except CosmodromeError as error:
        if queue is not None:
            raise
        return {"status": f"failed: {error}", "ms": _ms_since(began_ns)}
    return {
        "broker": result.queue.broker_name,
        "queue": result.queue.queue_id,
        "status": result.status.name,
        "ms": _ms_since(began_ns),
        "msg_id": result.msg_id,
    }


def _with_mean(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    times = [float(str(row["ms"])) for row in rows]
    note(f"{len(rows)} sent, mean {sum(times) / len(times):.2f} ms")
    return rows


def _ms_since(began_ns: int) -> float:
    return round((time.monotonic_ns() - began_ns) / 1e6, 2)


async def queue_entries(admin: Admin, flags: Flags) -> Table:
    if flags["b"] is None:
        route = await admin.topics.route(flags["t"])
        broker = min(data.broker_name for data in route.broker_datas)
    else:
        broker = flags["b"]
    queue = MessageQueue(topic=flags["t"], broker_name=broker, queue_id=flags["q"])
    found = await admin.messages.queue_entries(
        queue, flags["i"], flags["c"] or 10, group=flags["g"]
    )
    note(f"the queue holds {found.min_queue_index} to {found.max_queue_index}")
    columns = (
        Column("offset", right=True),
        Column("log_offset", right=True),
        Column("size", right=True),
        Column("tags_code", right=True),
        Column("passes"),
        Column("message", wide=True),
    )
    return Table(
        columns,
        [
            {
                "offset": flags["i"] + number,
                "log_offset": entry.physic_offset,
                "size": entry.physic_size,
                "tags_code": entry.tags_code,
                "passes": entry.eval if flags["g"] is not None else None,
                "message": entry.msg if isinstance(entry.msg, str) else None,
            }
            for number, entry in enumerate(found.queue_data)
        ],
    )
