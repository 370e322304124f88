"""`cosmo group reset|skip|clone`: where groups go on, before and after."""

from __future__ import annotations

import click

from cosmodrome.cli.operate.group import known, shown
from cosmodrome.cli.support.arguments import GROUP, TOPIC
from cosmodrome.cli.support.operating import confirm, dry_run_option, note, with_admin, yes_option
from cosmodrome.cli.support.output import UNKNOWN, Column, output_option, show
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.resetting import Move, Target, planned
from cosmodrome.client.operate.standing import BROADCASTING, GroupStanding, standing
from cosmodrome.env.real import WallClock
from cosmodrome.errors import ConfigError

MOVED = (
    Column("topic"),
    Column("broker"),
    Column("queue", right=True),
    Column("before", right=True),
    Column("after", right=True),
    Column("moves", right=True),
    Column("outcome"),
    Column("group", wide=True),
)
topic_option = click.option(
    "-t", "--topic", type=TOPIC, required=True, help="Change the progress in this topic."
)


@click.command()
@click.argument("group", type=GROUP)
@topic_option
@click.option(
    "--to",
    "target",
    required=True,
    metavar="earliest|latest|TIME|-AGO|OFFSET",
    help="2026-11-15T08:00:00, -2h, or an offset; a group with members takes no offset.",
)
@click.option("-b", "--broker", help="Only queues of this broker; with an OFFSET.")
@click.option("-q", "--queue", type=click.IntRange(0), help="Only this queue; with an OFFSET.")
@dry_run_option
@yes_option
@output_option
@with_admin
async def reset(
    admin: Admin,
    group: str,
    topic: str,
    target: str,
    broker: str | None,
    queue: int | None,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    """Move GROUP to a time, an offset or an end of TOPIC's queues.

    Connected members are told to continue there. Without members the offsets are written.
    """
    goal = Target.of(target, WallClock().now_ms())
    if goal.offset is None and (broker is not None or queue is not None):
        raise click.UsageError("--broker and --queue choose queues for an OFFSET only")
    await _move(admin, group, topic, goal, broker, queue, dry_run=dry_run, yes=yes, output=output)


@click.command()
@click.argument("group", type=GROUP)
@topic_option
@dry_run_option
@yes_option
@output_option
@with_admin
async def skip(admin: Admin, group: str, topic: str, dry_run: bool, yes: bool, output: str) -> None:
    """Move GROUP to the end of TOPIC. It never gets the messages that it has not consumed."""
    goal = Target(moment="end")
    await _move(admin, group, topic, goal, None, None, dry_run=dry_run, yes=yes, output=output)


@click.command()
@click.argument("source", type=GROUP)
@click.argument("target", type=GROUP)
@topic_option
@dry_run_option
@yes_option
@output_option
@with_admin
async def clone(
    admin: Admin, source: str, target: str, topic: str, dry_run: bool, yes: bool, output: str
) -> None:
    """Give the group TARGET the progress that SOURCE has in TOPIC."""
    if source == target:
        raise click.UsageError("source and target are the same group")
    giver = await known(admin, source, topic)
    taker = await standing(admin.fleet, target, topic)
    _check_movable(source, giver)
    if taker.members:
        raise ConfigError(
            f"group {target} has {taker.members} member(s) online, which would go on from where"
            " they are; stop them first"
        )
    before = {row.queue: row.offset for row in taker.queues}
    moves = [
        Move(row.queue, before.get(row.queue), row.offset)
        for row in giver.queues
        if row.offset is not None
    ]
    if not moves:
        raise ConfigError(f"group {source} has committed no offset in {topic}; nothing to copy")
    if not dry_run:
        confirm(f"{target} will go on where {source} is in {topic}", yes=yes)
        await admin.offsets.clone(source, target, topic)
    _show(output, target, moves, "would be copied" if dry_run else "copied")


async def _move(
    admin: Admin,
    group: str,
    topic: str,
    goal: Target,
    broker: str | None,
    queue_id: int | None,
    *,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    where = await known(admin, group, topic)
    _check_movable(group, where)
    moves = await planned(admin.fleet, where, goal, broker=broker, queue_id=queue_id)
    if goal.offset is not None and where.members:
        raise ConfigError(
            f"group {group} has {where.members} member(s) online, which can be told a time but no"
            " offset: stop them first, or use a time"
        )
    if dry_run:
        _show(output, group, moves, "would be moved")
        return
    confirm(_consequence(group, topic, moves), yes=yes)
    if goal.moment is None:
        for move in moves:
            await admin.offsets.set(group, move.queue, move.after)
        done = moves
    else:
        moved = await admin.offsets.reset(group, topic, goal.moment)
        done = [Move(one.queue, one.before, moved.get(one.queue, one.after)) for one in moves]
    _show(output, group, done, "told" if where.members else "moved")
    if where.members:
        note(f"{where.members} member(s) were told and go on there")


def _check_movable(group: str, where: GroupStanding) -> None:
    if where.model == BROADCASTING:
        raise ConfigError(
            f"group {group} consumes as broadcast: its members keep their offsets themselves, and"
            " brokers have none to move or copy"
        )


def _consequence(group: str, topic: str, moves: list[Move]) -> str:
    again = sum(max(0, one.before - one.after) for one in moves if one.before is not None)
    left_out = sum(max(0, one.after - one.before) for one in moves if one.before is not None)
    unknown = sum(one.before is None for one in moves)
    parts = []
    if again:
        parts.append(f"consume {again} message(s) again")
    if left_out:
        parts.append(f"never consume {left_out} message(s)")
    if unknown:
        parts.append(f"get an offset in {unknown} queue(s) where it has none")
    return f"{group} will {' and '.join(parts) or 'stay where it is'} in {topic}"


def _show(output: str, group: str, moves: list[Move], outcome: str) -> None:
    show(
        output,
        MOVED,
        (
            {
                "group": group,
                "topic": one.queue.topic,
                "broker": one.queue.broker_name,
                "queue": one.queue.queue_id,
                "before": shown(one.before),
                "after": one.after,
                "moves": UNKNOWN if one.before is None else one.after - one.before,
                "outcome": "unchanged" if one.before == one.after else outcome,
            }
            for one in moves
        ),
    )
