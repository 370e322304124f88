"""`cosmo dlq …`: dead letters, that is, messages which a consumer group has given up."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator

import click

from cosmodrome.cli.messages.columns import DEAD, dead_cells
from cosmodrome.cli.messages.msg import merged, moment
from cosmodrome.cli.messages.options import (
    COUNT_MAX,
    most_option,
    stored_options,
    tags_option,
)
from cosmodrome.cli.support.arguments import GROUP, TOPIC
from cosmodrome.cli.support.exits import NotFound
from cosmodrome.cli.support.lazy import LazyGroup
from cosmodrome.cli.support.operating import note, similar, watch_option, with_admin
from cosmodrome.cli.support.output import UNKNOWN, Column, as_record, output_option, show
from cosmodrome.cli.support.progress import Progress
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.reading import Span, page, spans, walk
from cosmodrome.client.values import NoRoute, ReceivedMessage
from cosmodrome.env.real import WallClock
from cosmodrome.errors import CosmodromeError
from cosmodrome.wire.names import DLQ_PREFIX, dlq_topic

LISTED = (
    Column("group"),
    Column("messages", right=True),
    Column("oldest_age_s", "OLDEST AGE S", right=True),
    Column("newest_age_s", "NEWEST AGE S", right=True),
    Column("topic", wide=True),
    Column("oldest_ms", wide=True, time=True),
    Column("newest_ms", wide=True, time=True),
    Column("brokers", wide=True),
)
PEEK_COUNT = 10


def source_arguments(command: click.decorators.FC) -> click.decorators.FC:
    """Whose dead letters: a group's, or the messages of any topic."""
    text = "Read this topic instead of a group's."
    command = click.option("--from", "topic", type=TOPIC, help=text)(command)
    return click.argument("group", type=GROUP, required=False)(command)


@click.group(
    cls=LazyGroup,
    homes={
        "redrive": (
            "messages.redrive:redrive",
            "Send dead letters once more; list, resume, cancel.",
        )
    },
)
def dlq() -> None:
    """Dead letters: list them, look at them, send them once more, export them."""


@dlq.command("list")
@click.option("--all", "everything", is_flag=True, help="Also list topics that are empty.")
@output_option
@watch_option
@with_admin
async def list_topics(admin: Admin, everything: bool, output: str) -> None:
    """List groups that have dead letters: how many, and how old."""
    names = [name for name in await admin.topics.names() if name.startswith(DLQ_PREFIX)]
    rows = await asyncio.gather(*(_row(admin, name) for name in sorted(names)))
    shown = [row for row in rows if everything or row["messages"] != 0]
    show(output, LISTED, shown)


@dlq.command()
@source_arguments
@most_option(default=PEEK_COUNT, most=COUNT_MAX)
@output_option
@with_admin
async def peek(admin: Admin, group: str | None, topic: str | None, count: int, output: str) -> None:
    """Show the oldest dead letters of GROUP, where they come from and why they are there."""
    parts = await source_parts(admin, group, topic)
    found = await merged(admin, parts, count)
    show(output, DEAD, (dead_cells(message, output) for message in found))
    total = sum(part.length for part in parts)
    if total > len(found):
        note(f"{len(found)} of {total} shown; --count shows more")


@dlq.command()
@source_arguments
@stored_options
@tags_option
@most_option()
@click.option(
    "--body",
    type=click.Choice(["auto", "text", "base64"]),
    default="auto",
    show_default=True,
    help="Form of bodies; auto is text if it is UTF-8, otherwise base64.",
)
@output_option
@with_admin
async def export(
    admin: Admin,
    group: str | None,
    topic: str | None,
    since: str | None,
    until: str | None,
    tags: tuple[str, ...],
    count: int | None,
    body: str,
    output: str,
) -> None:
    """Write the dead letters of GROUP to stdout.

    -o jsonl and -o csv write each message as it is read, however many there are. `cosmo produce
    TOPIC --jsonl` sends what -o jsonl wrote.
    """
    parts = await source_parts(admin, group, topic)
    begin_ms, end_ms = moment(since), moment(until)

    async def chosen() -> AsyncIterator[dict[str, object]]:
        left = count
        for part in parts:
            async for message in walk(admin.fleet, part):
                if left == 0:
                    return
                if _chosen(message, begin_ms, end_ms, tags):
                    left = None if left is None else left - 1
                    yield dead_cells(message, output, body=body)

    async with Progress("exported", total=sum(part.length for part in parts)) as progress:
        if output not in ("jsonl", "csv"):
            rows = [row async for row in chosen()]
            progress.done = len(rows)
            show(output, DEAD, rows)
        else:
            async for row in chosen():
                click.echo(_line(output, row, first=not progress.done), nl=False)
                progress.done += 1
            if output == "csv" and not progress.done:
                show(output, DEAD, [])
        summary = progress.summary()
    note(summary)


# --- parts -----------------------------------------------------------------------------------


async def source_parts(admin: Admin, group: str | None, topic: str | None) -> list[Span]:
    """The queues of the topic that a command is about."""
    name = await source_topic(admin, group, topic)
    return await spans(admin.fleet, admin.fleet.full(name))


async def source_topic(admin: Admin, group: str | None, topic: str | None) -> str:
    if (group is None) == (topic is None):
        raise click.UsageError("name a GROUP, or a topic with --from TOPIC")
    if topic is not None:
        await admin.topics.route(topic)
        return topic
    assert group is not None
    name = group if group.startswith(DLQ_PREFIX) else dlq_topic(group)
    try:
        await admin.topics.route(name)
    except NoRoute:
        known = [one for one in await admin.topics.names() if one.startswith(DLQ_PREFIX)]
        groups = [one.removeprefix(DLQ_PREFIX) for one in known]
        raise NotFound(
            f"group {name.removeprefix(DLQ_PREFIX)} has no dead letters"
            f"{similar(name.removeprefix(DLQ_PREFIX), groups)}; `cosmo dlq list` shows who has"
        ) from None
    return name


def _chosen(
    message: ReceivedMessage, begin_ms: int | None, end_ms: int | None, tags: tuple[str, ...]
) -> bool:
    return (
        (begin_ms is None or message.store_ms >= begin_ms)
        and (end_ms is None or message.store_ms < end_ms)
        and (not tags or message.tags in tags)
    )


def _line(output: str, row: dict[str, object], *, first: bool) -> str:
    plain = as_record(DEAD, row)
    if output == "jsonl":
        return json.dumps(plain, ensure_ascii=False) + "\n"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if first:
        writer.writerow(plain)
    writer.writerow(
        json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value
        for value in plain.values()
    )
    return text.getvalue()


async def _row(admin: Admin, topic: str) -> dict[str, object]:
    row: dict[str, object] = {"topic": topic, "group": topic.removeprefix(DLQ_PREFIX)}
    try:
        parts = [part for part in await spans(admin.fleet, admin.fleet.full(topic)) if part.length]
        row["messages"] = sum(part.length for part in parts)
        row["brokers"] = sorted({part.queue.broker_name for part in parts})
        ends = await asyncio.gather(*(_times(admin, part) for part in parts))
    except CosmodromeError as error:
        note(f"{topic}: {error}")
        unknown = ("oldest_age_s", "newest_age_s", "oldest_ms", "newest_ms")
        return {"messages": UNKNOWN, **row, **dict.fromkeys(unknown, UNKNOWN)}
    times = [time_ms for pair in ends for time_ms in pair]
    if times:
        now_ms = WallClock().now_ms()
        row |= {
            "oldest_ms": min(times),
            "newest_ms": max(times),
            "oldest_age_s": round(max(0, now_ms - min(times)) / 1000, 1),
            "newest_age_s": round(max(0, now_ms - max(times)) / 1000, 1),
        }
    return row


async def _times(admin: Admin, part: Span) -> list[int]:
    """When the first and the last message of a queue were stored."""
    found = []
    for offset in {part.begin, part.end - 1}:
        one = await page(admin.fleet, part.queue, part.address, offset, 1)
        found += [message.store_ms for message in one.messages[:1]]
    return found
