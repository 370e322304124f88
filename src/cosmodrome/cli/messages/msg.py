"""`cosmo msg …`: single messages, found, shown, sent again, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import click

from cosmodrome.cli.messages.columns import MESSAGES, message_cells, message_record
from cosmodrome.cli.messages.options import COUNT_MAX, most_option, stored_options
from cosmodrome.cli.support.arguments import GROUP, TOPIC
from cosmodrome.cli.support.exits import NotFound
from cosmodrome.cli.support.operating import confirm, dry_run_option, note, with_admin, yes_option
from cosmodrome.cli.support.output import UNKNOWN, Column, output_option, show, show_one
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.reading import Span, spans, walk
from cosmodrome.client.operate.redriving.audit import Outcome
from cosmodrome.client.operate.redriving.plan import Plan
from cosmodrome.client.operate.redriving.sends import Sends
from cosmodrome.client.operate.resetting import Target
from cosmodrome.client.operate.tracks import find_message, traces, tracks
from cosmodrome.client.values import NoRoute, ReceivedMessage
from cosmodrome.env.real import WallClock, real_env
from cosmodrome.errors import ConfigError
from cosmodrome.wire.names import TRACE_TOPIC

COUNT = 32
TRACKS = (
    Column("group"),
    Column("state"),
    Column("online"),
    Column("offset", right=True),
    Column("message_offset", right=True),
    Column("why"),
    Column("topic", wide=True),
    Column("msg_id", wide=True),
)
TRACES = (
    Column("time_ms", time=True),
    Column("event"),
    Column("group"),
    Column("client"),
    Column("status"),
    Column("cost_ms", right=True),
    Column("detail"),
    Column("topic", wide=True),
    Column("msg_id", wide=True),
    Column("keys", wide=True),
)
RESENT = (
    Column("msg_id"),
    Column("outcome"),
    Column("to"),
    Column("new_msg_id"),
    Column("place"),
    Column("why"),
)

in_topic_option = click.option(
    "-t", "--topic", type=TOPIC, help="Its topic; needed to find it by its unique id."
)


@click.group()
def msg() -> None:
    """Single messages: get, find, print, resend them; see who consumed them, trace them."""


@msg.command()
@click.argument("msg_id", metavar="ID")
@in_topic_option
@output_option
@with_admin
async def get(admin: Admin, msg_id: str, topic: str | None, output: str) -> None:
    """Show one message. ID is its offset id or, with --topic, the unique id from its sender."""
    message = await find_message(admin, msg_id, topic)
    show_one(output, message_record(message, output))


@msg.command()
@click.argument("topic", type=TOPIC)
@click.option("--key", help="Messages with this key.")
@click.option("--unique", metavar="ID", help="The message with this unique id.")
@stored_options
@most_option(default=COUNT, most=COUNT_MAX)
@output_option
@with_admin
async def find(
    admin: Admin,
    topic: str,
    key: str | None,
    unique: str | None,
    since: str | None,
    until: str | None,
    count: int,
    output: str,
) -> None:
    """Find messages of TOPIC by key, by unique id or by the time they were stored."""
    if (key is not None and unique is not None) or (key, unique, since, until) == (None,) * 4:
        raise click.UsageError("give --key, --unique, or a time with --since or --until")
    begin_ms, end_ms = moment(since), moment(until)
    if unique is not None:
        one = await admin.messages.by_unique_key(topic, unique)
        found = [] if one is None else [one]
    elif key is not None:
        found = await admin.messages.by_key(
            topic, key, max_count=count, begin_ms=begin_ms or 0, end_ms=end_ms or 2**63 - 1
        )
    else:
        parts = [
            await _within(admin, part, begin_ms, end_ms)
            for part in await spans(admin.fleet, admin.fleet.full(topic))
        ]
        found = await merged(admin, parts, count)
    found = [
        message
        for message in found
        if (begin_ms is None or message.store_ms >= begin_ms)
        and (end_ms is None or message.store_ms < end_ms)
    ]
    if not found:
        await admin.topics.route(topic)  # or that is what is wrong
        raise NotFound(f"no such message in {topic}; it may have expired, or has no key")
    _show(output, found)


@msg.command("print")
@click.argument("topic", type=TOPIC)
@click.option("-b", "--broker", help="Only queues of this broker.")
@click.option("-q", "--queue", type=click.IntRange(0), help="Only this queue.")
@click.option(
    "--from",
    "start",
    default="earliest",
    show_default=True,
    metavar="earliest|TIME|-AGO|OFFSET",
    help="Where to begin in every chosen queue.",
)
@click.option(
    "--to", "stop", metavar="latest|TIME|-AGO|OFFSET", help="Where to stop, just before it."
)
@click.option("--tag", metavar="TAGS", help='Only messages with one of these tags: "A || B".')
@most_option(default=COUNT, most=COUNT_MAX)
@output_option
@with_admin
async def print_messages(
    admin: Admin,
    topic: str,
    broker: str | None,
    queue: int | None,
    start: str,
    stop: str | None,
    tag: str | None,
    count: int,
    output: str,
) -> None:
    """Print messages of TOPIC, oldest first. No group is joined and nobody's progress moves."""
    now_ms = WallClock().now_ms()
    begin = Target.of(start, now_ms)
    end = None if stop is None else Target.of(stop, now_ms)
    parts = [
        part
        for part in await spans(admin.fleet, admin.fleet.full(topic))
        if broker in (None, part.queue.broker_name) and queue in (None, part.queue.queue_id)
    ]
    if not parts:
        raise NotFound(f"{topic} has no such queue; `cosmo topic route {topic}` shows them")
    chosen = [
        part._replace(
            begin=await _offset(admin, part, begin),
            end=part.end if end is None else min(part.end, await _offset(admin, part, end)),
        )
        for part in parts
    ]
    tags = _tags(tag)
    found = await merged(admin, chosen, count, tags)
    _show(output, found)
    total = sum(part.length for part in chosen)
    if total > len(found) and (tags is None or len(found) == count):
        note(f"{len(found)} of {total} shown; --count shows more")


@msg.command()
@click.argument("msg_id", metavar="ID")
@in_topic_option
@click.option("-g", "--group", type=GROUP, help="Hand it to a member of this group at once.")
@click.option("--client", help="Hand it to this member; needs --group.  [default: the first]")
@click.option("--to", "target", type=TOPIC, help="Send a copy to this topic.  [default: its own]")
@dry_run_option
@yes_option
@output_option
@with_admin
async def resend(
    admin: Admin,
    msg_id: str,
    topic: str | None,
    group: str | None,
    client: str | None,
    target: str | None,
    dry_run: bool,
    yes: bool,
    output: str,
) -> None:
    """Send the message ID once more, as a copy to a topic or to one member of a group."""
    if (group is not None and target is not None) or (client is not None and group is None):
        raise click.UsageError("give --group (with --client) or --to, not both")
    message = await find_message(admin, msg_id, topic)
    row: dict[str, object] = {"msg_id": message.msg_id}
    if group is not None:
        members = [client] if client is not None else await admin.groups.members(group)
        if not members:
            raise NotFound(f"group {group} has no member online")
        row["to"] = f"{group} at {members[0]}"
        if dry_run:
            row["outcome"] = "would be handed over"
        else:
            confirm(f"{members[0]} of {group} will process {message.msg_id} now", yes=yes)
            result = await admin.groups.consume_directly(
                group, members[0], message.offset_msg_id, broker=message.broker_name
            )
            row["outcome"] = result.consume_result
            row["why"] = result.remark or f"{result.spent_time_mills} ms"
    else:
        row["to"] = to = target or message.topic
        if dry_run:
            await admin.topics.route(to)
            row["outcome"] = "would be sent"
        else:
            confirm(f"a copy of {message.msg_id} goes to {to}", yes=yes)
            row.update(await _copy(admin, message, to))
    show(output, RESENT, [row])


@msg.command()
@click.argument("msg_id", metavar="ID")
@in_topic_option
@output_option
@with_admin
async def track(admin: Admin, msg_id: str, topic: str | None, output: str) -> None:
    """Show which groups have consumed the message ID, and which have not.

    \b
    consumed              the group is past it
    waiting               not yet
    filtered              the group's subscription leaves it out
    retried, dead letter  the group failed to process it
    broadcast, unknown    brokers cannot know
    """
    message = await find_message(admin, msg_id, topic)
    found = await tracks(admin, message)
    show(
        output,
        TRACKS,
        (
            {
                "group": one.group,
                "state": one.state,
                "online": one.online,
                "offset": UNKNOWN if one.offset is None else one.offset,
                "message_offset": message.queue_offset,
                "why": one.why,
                "topic": message.topic,
                "msg_id": message.msg_id,
            }
            for one in found
        ),
    )
    if not found:
        note(f"no group has consumed anything of {message.topic}")


@msg.command()
@click.argument("msg_id", metavar="ID|KEY")
@click.option(
    "--trace-topic", type=TOPIC, default=TRACE_TOPIC, show_default=True, help="Where traces are."
)
@output_option
@with_admin
async def trace(admin: Admin, msg_id: str, trace_topic: str, output: str) -> None:
    """Show the life of a message, found by its unique id or by a key, as its clients traced it.

    Clients trace only if it is switched on: `enableMsgTrace` in Java, `trace=True` in Python.
    """
    try:
        found = await traces(admin, msg_id, trace_topic)
    except NoRoute:
        raise NotFound(
            f"there is no topic {trace_topic}; brokers make it with traceTopicEnable=true"
        ) from None
    if not found:
        raise NotFound(
            f"no trace of {msg_id!r} in {trace_topic}; clients write one only when their trace is"
            " on, and about the unique id, not the offset id"
        )
    show(
        output,
        TRACES,
        (
            {
                "time_ms": UNKNOWN if one.time_ms is None else one.time_ms,
                "event": one.event,
                "group": one.group,
                "client": one.client,
                "status": one.status,
                "cost_ms": one.cost_ms,
                "detail": one.place,
                "topic": one.topic,
                "msg_id": one.msg_id,
                "keys": one.keys,
            }
            for one in found
        ),
    )


# --- parts -----------------------------------------------------------------------------------


def moment(text: str | None) -> int | None:
    """A time in milliseconds; `Target` reads more than that."""
    if text is None:
        return None
    goal = Target.of(text, WallClock().now_ms())
    if not isinstance(goal.moment, int):
        raise ConfigError(f"{text!r} is no time; write 2026-11-15T08:00:00, or -30m")
    return goal.moment


async def merged(
    admin: Admin, parts: Iterable[Span], count: int, tags: frozenset[str] | None = None
) -> list[ReceivedMessage]:
    """The oldest messages of several queues, by the time that they were stored."""
    found: list[ReceivedMessage] = []
    for messages in await asyncio.gather(*(_first(admin, part, count, tags) for part in parts)):
        found += messages
    found.sort(key=lambda message: (message.store_ms, message.broker_name, message.queue_id))
    return found[:count]


async def _first(
    admin: Admin, part: Span, count: int, tags: frozenset[str] | None
) -> list[ReceivedMessage]:
    stop = min(part.end, part.begin + count) if tags is None else part.end
    rest: AsyncIterator[ReceivedMessage] = walk(admin.fleet, part._replace(end=stop))
    found: list[ReceivedMessage] = []
    async for message in rest:
        if tags is None or message.tags in tags:
            found.append(message)
            if len(found) == count:
                break
    return found


def _tags(expression: str | None) -> frozenset[str] | None:
    """The tags of an expression; None when it takes everything."""
    if expression is None or expression.strip() in ("", "*"):
        return None
    return frozenset(word.strip() for word in expression.split("||"))


async def _within(admin: Admin, part: Span, begin_ms: int | None, end_ms: int | None) -> Span:
    begin, end = part.begin, part.end
    if begin_ms is not None:
        begin = max(begin, await admin.offsets.at_time(part.queue, begin_ms, address=part.address))
    if end_ms is not None:
        end = min(end, await admin.offsets.at_time(part.queue, end_ms, address=part.address) + 1)
    return part._replace(begin=begin, end=end)


async def _offset(admin: Admin, part: Span, goal: Target) -> int:
    if goal.offset is not None:
        return min(max(goal.offset, part.begin), part.end)
    if goal.moment == "begin":
        return part.begin
    if goal.moment == "end":
        return part.end
    assert isinstance(goal.moment, int)
    at = await admin.offsets.at_time(part.queue, goal.moment, address=part.address)
    return min(max(at, part.begin), part.end)


async def _copy(admin: Admin, message: ReceivedMessage, to: str) -> dict[str, object]:
    env = real_env()
    run = f"resend-{env.random.getrandbits(64):016x}"  # every copy has an id of its own
    plan = Plan(run=run, source=message.record.topic, parts=(), target=admin.fleet.full(to))
    sends = Sends(admin.fleet, env.clock, plan, copies=True)
    item = await sends.item(message)
    if isinstance(item, Outcome):
        raise NotFound(item.why or f"{to} takes no messages")
    outcome = await sends.send(item, message)
    return {
        "outcome": outcome.outcome,
        "new_msg_id": outcome.new_id,
        "place": outcome.place,
        "why": outcome.why,
    }


def _show(output: str, messages: Iterable[ReceivedMessage]) -> None:
    show(output, MESSAGES, (message_cells(message, output) for message in messages))
