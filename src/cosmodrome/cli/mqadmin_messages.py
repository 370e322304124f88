"""Calls of `cosmo mqadmin` about single messages, and those that send some to take the time."""

from __future__ import annotations

import time

from cosmodrome.cli.mqadmin_call import Given, Table, masters
from cosmodrome.cli.operating import note
from cosmodrome.cli.output import UNKNOWN, Column
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


async def send_message(admin: Admin, given: Given) -> Table:
    topic, broker, queue_id = given["t"], given["b"], given["i"]
    if queue_id is not None and broker is None:
        raise ConfigError("-i needs the broker of the queue as well: say -b")
    queue = None
    if broker is not None:
        name = next(iter(await masters(admin, broker=broker)))
        queue = MessageQueue(topic=topic, broker_name=name, queue_id=queue_id or 0)
    keys = tuple((given["k"] or "").split())
    message = Message(topic, given["p"].encode(), tags=given["c"], keys=keys)
    await admin.topics.route(topic)  # nothing is made by sending
    async with Producer(
        given["namesrv"], group=SEND_GROUP, trace=given["m"] == "true", retries=0
    ) as producer:
        return Table(SENT, [await _timed(producer, message, queue)])


async def time_topic(admin: Admin, given: Given) -> Table:
    await admin.topics.route(given["t"])
    count, size = given["a"] or 100, given["s"] or SIZE_BYTES
    rows = await _sends(given["namesrv"], given["t"], count, size)
    return Table(SENT, _with_mean(rows))


async def time_broker(admin: Admin, given: Given) -> Table:
    name = next(iter(await masters(admin, broker=given["b"])))
    count, size = given["c"] or 50, given["s"] or SIZE_BYTES
    return Table(SENT, _with_mean(await _sends(given["namesrv"], name, count, size)))


async def time_cluster(admin: Admin, given: Given) -> Table:
    info = await admin.brokers.cluster()
    targets = await admin.brokers.addresses(cluster=given["c"])
    count, size = given["a"] or 100, given["s"] or SIZE_BYTES
    rows = []
    for name in targets:
        sent = await _sends(given["namesrv"], name, count, size)
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
        *(Column("cluster"), Column("broker"), Column("ms", right=True)),
        *(Column("sent", right=True), Column("failed", right=True)),
    )
    return Table(columns, rows)


async def _sends(namesrv: str, topic: str, count: int, size: int) -> list[dict[str, object]]:
    """Send one after the other; brokers have topics called like themselves for this."""
    async with Producer(namesrv, group=SEND_GROUP, retries=0) as producer:
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


async def queue_entries(admin: Admin, given: Given) -> Table:
    if given["b"] is None:
        route = await admin.topics.route(given["t"])
        broker = min(data.broker_name for data in route.broker_datas)
    else:
        broker = given["b"]
    queue = MessageQueue(topic=given["t"], broker_name=broker, queue_id=given["q"])
    found = await admin.messages.queue_entries(
        queue, given["i"], given["c"] or 10, group=given["g"]
    )
    note(f"the queue holds {found.min_queue_index} to {found.max_queue_index}")
    columns = (
        *(Column("offset", right=True), Column("log_offset", right=True)),
        *(Column("size", right=True), Column("tags_code", right=True), Column("passes")),
        Column("message", wide=True),
    )
    return Table(
        columns,
        [
            {
                "offset": given["i"] + number,
                "log_offset": entry.physic_offset,
                "size": entry.physic_size,
                "tags_code": entry.tags_code,
                "passes": entry.eval if given["g"] is not None else None,
                "message": entry.msg if isinstance(entry.msg, str) else None,
            }
            for number, entry in enumerate(found.queue_data)
        ],
    )
