"""`cosmo tx …`: transactions that nobody has decided yet."""

from __future__ import annotations

import click

from cosmodrome.cli.messages.options import COUNT_MAX, most_option
from cosmodrome.cli.support.arguments import TOPIC, broker_option
from cosmodrome.cli.support.operating import confirm, note, watch_option, with_admin, yes_option
from cosmodrome.cli.support.output import Column, output_option, show, show_one
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.tracks import find_message
from cosmodrome.client.operate.waiting import Waiting, given_up, waiting
from cosmodrome.env.real import WallClock
from cosmodrome.errors import ConfigError
from cosmodrome.wire.names import CHECK_MAX_TOPIC, HALF_TOPIC

LISTED = (
    Column("state"),
    Column("topic"),
    Column("group"),
    Column("age_s", right=True),
    Column("checks", right=True),
    Column("msg_id"),
    Column("offset_msg_id"),
    Column("born_ms", wide=True, time=True),
    Column("broker", wide=True),
    Column("queue_offset", wide=True, right=True),
    Column("size", wide=True, right=True),
    Column("keys", wide=True),
)


@click.group()
def tx() -> None:
    """Undecided transactions: list the half messages that wait, ask about one again."""


@tx.command("list")
@click.option("-t", "--topic", type=TOPIC, help="Only messages to this topic.")
@broker_option
@click.option(
    "--given-up", "abandoned", is_flag=True, help="List those that brokers no longer ask about."
)
@most_option("--limit", "limit", default=100, most=COUNT_MAX)
@output_option
@watch_option
@with_admin
async def list_waiting(
    admin: Admin, topic: str | None, broker: str | None, abandoned: bool, limit: int, output: str
) -> None:
    """List half messages that wait for commit or rollback, the oldest first on each broker.

    CHECKS is how often producers were asked.
    """
    rows: list[dict[str, object]] = []
    more = 0
    now_ms = WallClock().now_ms()
    async for one in (given_up if abandoned else waiting)(admin, broker):
        if topic is not None and one.topic != topic:
            continue
        if len(rows) < limit:
            rows.append(_row(one, now_ms))
        else:
            more += 1
    show(output, LISTED, rows)
    if more:
        note(f"{more} more; --limit shows them")


@tx.command()
@click.argument("offset_msg_id", metavar="ID")
@yes_option
@output_option
@with_admin
async def resume(admin: Admin, offset_msg_id: str, yes: bool, output: str) -> None:
    """Ask producers again about the half message with this ID.

    `cosmo tx list` shows the ID in the column OFFSET MSG ID.
    """
    message = await find_message(admin, offset_msg_id)
    if message.record.topic not in (HALF_TOPIC, CHECK_MAX_TOPIC):
        raise ConfigError(
            f"{offset_msg_id} is a message of {message.topic}, no half message; `cosmo tx list"
            " --given-up` shows those"
        )
    one = Waiting("resumed", message)
    confirm(f"producers of {one.group} will be asked about {message.msg_id} again", yes=yes)
    await admin.messages.resume_transaction(offset_msg_id)
    show_one(
        output,
        {
            "state": one.state,
            "topic": one.topic,
            "group": one.group,
            "msg_id": message.msg_id,
            "offset_msg_id": offset_msg_id,
        },
    )


def _row(one: Waiting, now_ms: int) -> dict[str, object]:
    message = one.message
    return {
        "state": one.state,
        "topic": one.topic,
        "group": one.group,
        "age_s": round(max(0, now_ms - message.born_ms) / 1000, 1),
        "checks": one.checks,
        "msg_id": message.msg_id,
        "offset_msg_id": message.offset_msg_id,
        "born_ms": message.born_ms,
        "broker": message.broker_name,
        "queue_offset": message.queue_offset,
        "size": message.size,
        "keys": list(message.keys),
    }
