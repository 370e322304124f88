"""`cosmo timer …`: the timed messages that wait on a cluster's brokers, and calling one back."""

from __future__ import annotations

import click

from cosmodrome.cli.messages.options import most_option
from cosmodrome.cli.support.arguments import TOPIC, broker_option
from cosmodrome.cli.support.operating import note, watch_option, with_admin
from cosmodrome.cli.support.output import Column, output_option, show, show_one
from cosmodrome.client.operate.admin import Admin
from cosmodrome.wire import bodies
from cosmodrome.wire.commands import ListPendingTimers, RecallMessage
from cosmodrome.wire.report_bodies import PendingTimer, PendingTimers

PAGE_COUNT = 500
TIMEOUT_MS = 10_000  # a page of a full broker takes a few hundred milliseconds
LISTED = (
    Column("deliver_ms", "DELIVER AT", time=True),
    Column("topic"),
    Column("queue", right=True),
    Column("size", right=True),
    Column("msg_id", "MESSAGE ID"),
    Column("handle"),
    Column("broker", wide=True),
)


@click.group()
def timer() -> None:
    """Messages with a delivery time of their own: list what waits, cancel one."""


@timer.command("list")
@click.option("-t", "--topic", type=TOPIC, help="Only messages to this topic.")
@broker_option
@most_option("--limit", "limit", default=100)
@output_option
@watch_option
@with_admin
async def list_timers(
    admin: Admin, topic: str | None, broker: str | None, limit: int, output: str
) -> None:
    """List timed messages that wait, the next due first on each broker."""
    found: list[tuple[str, PendingTimer]] = []
    waiting = 0
    fleet = admin.fleet
    for name, address in (await fleet.chosen(cluster=None, broker=broker)).items():
        ask = ListPendingTimers(topic=None if topic is None else fleet.full(topic))
        while True:
            ask.max_num = min(limit - len(found), PAGE_COUNT) or 1  # the count is wanted still
            answer = await fleet.call(address, ask, TIMEOUT_MS)
            pending = bodies.decode(PendingTimers, answer.body).pending
            found += ((name, one) for one in pending[: limit - len(found)])
            if answer.next_deliver_ms is None or len(found) >= limit:
                break
            ask.after_deliver_ms = answer.next_deliver_ms
            ask.after_queue_offset = answer.next_queue_offset or 0
        waiting += answer.waiting
    show(output, LISTED, (_row(name, one) for name, one in found))
    note(f"{len(found)} shown, {waiting} wait")


@timer.command()
@click.argument("handle")
@output_option
@with_admin
async def cancel(admin: Admin, handle: str, output: str) -> None:
    """Cancel the timed message with this HANDLE.

    `cosmo timer list` shows the handle. The sender also got it in the result of the send.
    """
    from cosmodrome.broker.later.recall import parse_handle

    named = parse_handle(handle)
    answer = await admin.fleet.call(
        await admin.fleet.broker(named.broker_name),
        RecallMessage(topic=named.topic, recall_handle=handle),
        TIMEOUT_MS,
    )
    show_one(
        output,
        {
            "msg_id": answer.msg_id,
            "topic": named.topic,
            "broker": named.broker_name,
            "outcome": "cancelled",
        },
    )
    note(f"{answer.msg_id} will not be delivered")


def _row(broker: str, one: PendingTimer) -> dict[str, object]:
    return {
        "deliver_ms": one.deliver_ms,
        "topic": one.topic,
        "queue": one.queue_id,
        "size": one.size,
        "msg_id": one.msg_id,
        "handle": one.recall_handle,
        "broker": broker,
    }
