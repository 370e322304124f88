"""`cosmo timer …`: the timed messages that wait on a cluster's brokers, and calling one back."""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import click

from cosmodrome.cli.context import namesrv_option
from cosmodrome.errors import ConfigError, Unreachable
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import bodies
from cosmodrome.wire.commands import GetBrokerClusterInfo, ListPendingTimers, RecallMessage
from cosmodrome.wire.report_bodies import PendingTimer, PendingTimers

MASTER_ID = 0
PAGE_COUNT = 500
TIMEOUT_MS = 10_000  # a page of a full broker takes a few hundred milliseconds
COLUMNS = ("DELIVER AT", "TOPIC", "QUEUE", "SIZE", "MESSAGE ID", "HANDLE")

T = TypeVar("T")


@click.group()
def timer() -> None:
    """Messages with a delivery time of their own: list what waits, cancel one."""


@timer.command("list")
@namesrv_option
@click.option("-t", "--topic", help="Only messages to this topic.")
@click.option("-b", "--broker", help="Only this broker.  [default: every master]")
@click.option("--limit", type=click.IntRange(min=1), default=100, show_default=True)
@click.option(
    "-o", "--output-format", type=click.Choice(["table", "json"]), default="table", help="Form."
)
def list_timers(
    namesrv: str, topic: str | None, broker: str | None, limit: int, output_format: str
) -> None:
    """List timed messages that wait, the next due first on each broker."""
    shown, waiting = _run(_list(namesrv, topic, broker, limit))
    if output_format == "json":
        for name, one in shown:
            click.echo(json.dumps({"brokerName": name, **_document(one)}, ensure_ascii=False))
    elif shown:
        click.echo(_table([_cells(one) for _, one in shown]), nl=False)
    click.echo(f"{len(shown)} shown, {waiting} wait", err=True)


@timer.command()
@namesrv_option
@click.argument("handle")
def cancel(namesrv: str, handle: str) -> None:
    """Cancel the message of HANDLE, as `cosmo timer list` or the answer to its send shows it."""
    message_id = _run(_cancel(namesrv, handle))
    click.echo(f"{message_id} will not be delivered", err=True)


async def _list(
    namesrv: str, topic: str | None, broker: str | None, limit: int
) -> tuple[list[tuple[str, PendingTimer]], int]:
    masters = await _masters(namesrv)
    if broker is not None:
        masters = {broker: _chosen(masters, broker)}
    found: list[tuple[str, PendingTimer]] = []
    waiting = 0
    for name, address in sorted(masters.items()):
        async with _channel(address) as channel:
            ask = ListPendingTimers(topic=topic)
            while True:
                ask.max_num = min(limit - len(found), PAGE_COUNT) or 1  # the count is wanted still
                answer = await channel.call(ask, TIMEOUT_MS)
                page = bodies.decode(PendingTimers, answer.body).pending
                found += ((name, one) for one in page[: limit - len(found)])
                if answer.next_deliver_ms is None or len(found) >= limit:
                    break
                ask.after_deliver_ms = answer.next_deliver_ms
                ask.after_queue_offset = answer.next_queue_offset or 0
            waiting += answer.waiting
    return found, waiting


async def _cancel(namesrv: str, handle: str) -> str:
    from cosmodrome.broker.recall import parse_handle

    named = parse_handle(handle)
    async with _channel(_chosen(await _masters(namesrv), named.broker_name)) as channel:
        answer = await channel.call(
            RecallMessage(topic=named.topic, recall_handle=handle), TIMEOUT_MS
        )
    return answer.msg_id


async def _masters(namesrv: str) -> dict[str, str]:
    """Address of each broker name's master, from the first name server that answers."""
    addresses = [part.strip() for part in namesrv.split(";") if part.strip()]
    failure: Unreachable | None = None
    for address in addresses:
        async with _channel(address) as channel:
            try:
                answer = await channel.call(GetBrokerClusterInfo())
            except Unreachable as error:
                failure = error
                continue
        table = bodies.decode(bodies.ClusterInfo, answer.body).broker_addr_table
        return {
            name: data.broker_addrs[MASTER_ID]
            for name, data in table.items()
            if MASTER_ID in data.broker_addrs
        }
    raise failure or ConfigError("no name server given; use -n HOST:PORT or NAMESRV_ADDR")


def _chosen(masters: dict[str, str], name: str) -> str:
    if name not in masters:
        known = ", ".join(sorted(masters)) or "none"
        raise ConfigError(f"no master of broker {name} is registered; there is: {known}")
    return masters[name]


@asynccontextmanager
async def _channel(address: str) -> AsyncIterator[Channel]:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
        raise ConfigError(f"{address!r} is not an address; write host:port")
    channel = Channel(host.strip("[]"), int(port))
    try:
        yield channel
    finally:
        await channel.close()


def _run(work: Awaitable[T]) -> T:
    async def awaited() -> T:
        return await work

    return asyncio.run(awaited())


def _document(one: PendingTimer) -> dict[str, Any]:
    return {
        "topic": one.topic,
        "queueId": one.queue_id,
        "deliverMs": one.deliver_ms,
        "msgId": one.msg_id,
        "size": one.size,
        "recallHandle": one.recall_handle,
    }


def _cells(one: PendingTimer) -> tuple[str, ...]:
    at = datetime.datetime.fromtimestamp(one.deliver_ms / 1000).astimezone()
    return (
        at.isoformat(" ", "milliseconds"),
        one.topic,
        str(one.queue_id),
        str(one.size),
        one.msg_id or "-",
        one.recall_handle or "-",
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        + "\n"
        for cells in (COLUMNS, *rows)
    )
