"""`cosmo consume` and `cosmo tail`: messages of a topic on stdout.

Without a group every queue is read and nothing is remembered. With one, this is a member of the
group like any other: it gets its share of the queues, and what was printed is done.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import sys
from collections.abc import AsyncIterator
from typing import Literal

import click

from cosmodrome.cli.messages.rows import message_json, table_head, table_line
from cosmodrome.cli.support.connection import client_options
from cosmodrome.cli.support.context import namesrv_option
from cosmodrome.cli.support.progress import Progress
from cosmodrome.cli.support.running import run
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.pull_consumer import PullConsumer
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.errors import ConfigError
from cosmodrome.wire.names import TOOLS_GROUP

POLL_MS = 200
READ_BATCH = 32
FORMS = ("table", "json", "jsonl", "raw")


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Where to begin: at one end, at a time, or at an offset of every queue."""

    kind: str  # begin, end, time, offset
    value: int = 0

    @classmethod
    def of(cls, text: str) -> Start:
        if text in ("begin", "end"):
            return cls(text)
        if text.isascii() and text.isdigit():
            return cls("offset", int(text))
        try:
            moment = datetime.datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(
                f"--from {text!r}: write begin, end, a time such as 2026-11-15T08:00:00, or an"
                " offset"
            ) from None
        return cls("time", int(moment.timestamp() * 1000))


class Printer:
    """Messages in one of the forms, each as soon as it is there."""

    def __init__(self, form: str) -> None:
        self._form = form
        self._count = 0

    def show(self, message: ReceivedMessage) -> None:
        if self._form == "raw":
            if message.damage is None:  # else the log has said on stderr that it cannot be read
                click.echo(message.body)
        elif self._form == "jsonl":
            click.echo(message_json(message))
        elif self._form == "json":
            click.echo(("[\n" if not self._count else ",\n") + message_json(message), nl=False)
        else:
            if not self._count:
                click.echo(table_head())
            click.echo(table_line(message))
        self._count += 1

    def end(self) -> None:
        if self._form == "json":
            click.echo("\n]" if self._count else "[]")


def _filters(command: click.decorators.FC) -> click.decorators.FC:
    for option in (
        click.option(
            "--sql", metavar="EXPR", help="Only messages for which this SQL92 expression holds."
        ),
        click.option(
            "--tag", metavar="TAGS", help='Only messages with one of these tags: "A || B".'
        ),
        namesrv_option,
    ):
        command = option(command)
    return command


@click.command()
@click.argument("topic")
@_filters
@click.option(
    "--group", help="Consume as a member of this group. Without it, nothing is remembered."
)
@click.option(
    "--from",
    "start",
    metavar="begin|end|TIME|OFFSET",
    default="begin",
    show_default=True,
    help="Where to begin. A group that has progress continues there instead.",
)
@click.option("--count", type=click.IntRange(1), help="Stop after this many messages.")
@click.option("--timeout", type=float, help="Stop when nothing came for this many seconds.")
@click.option(
    "--exit-at-end", is_flag=True, help="Stop after the messages that were there at the start."
)
@click.option(
    "-o",
    "output",
    type=click.Choice(FORMS),
    default="table",
    show_default=True,
    help="Form of the messages on stdout.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress and no summary.")
def consume(
    topic: str,
    namesrv: str,
    tag: str | None,
    sql: str | None,
    group: str | None,
    start: str,
    count: int | None,
    timeout: float | None,
    exit_at_end: bool,
    output: str,
    quiet: bool,
) -> None:
    """Print messages of TOPIC until --count, --timeout, --exit-at-end or Ctrl-C ends it.

    JSON has the body as text in `body`, or in `body_base64` when it is not UTF-8.
    """
    begin = Start.of(start)
    if group and (begin.kind == "offset" or exit_at_end):
        raise ConfigError("--from OFFSET and --exit-at-end read every queue; leave --group out")
    if group:
        messages = _as_member(namesrv, topic, group, begin, tag, sql, timeout)
    else:
        messages = _all(namesrv, topic, begin, tag, sql, timeout, exit_at_end=exit_at_end)
    run(_print(messages, output, count, quiet=quiet or sys.stdout.isatty()))


@click.command()
@click.argument("topic")
@_filters
@click.option("--timeout", type=float, help="Stop when nothing came for this many seconds.")
@click.option(
    "-o",
    "output",
    type=click.Choice(FORMS),
    default="table",
    show_default=True,
    help="Form of the messages on stdout.",
)
def tail(
    topic: str, namesrv: str, tag: str | None, sql: str | None, timeout: float | None, output: str
) -> None:
    """Print messages of TOPIC as they arrive, until Ctrl-C. Nothing is remembered."""
    messages = _all(namesrv, topic, Start("end"), tag, sql, timeout)
    run(_print(messages, output, None, quiet=True))


async def _print(
    messages: AsyncIterator[ReceivedMessage], form: str, count: int | None, *, quiet: bool
) -> None:
    printer = Printer(form)
    async with Progress("received", total=count, quiet=quiet) as progress:
        try:
            async for message in messages:
                printer.show(message)
                await message.ack()  # of interest to a group only
                progress.done += 1
                if progress.done == count:
                    break
        finally:
            printer.end()
            await messages.aclose()  # type: ignore[attr-defined]
        summary = progress.summary()
    if not quiet:
        click.echo(summary, err=True)


async def _as_member(
    namesrv: str,
    topic: str,
    group: str,
    start: Start,
    tag: str | None,
    sql: str | None,
    timeout: float | None,
) -> AsyncIterator[ReceivedMessage]:
    where: Literal["first", "last"] | int = start.value
    if start.kind in ("begin", "end"):
        where = "first" if start.kind == "begin" else "last"
    client = client_options(namesrv)
    async with Consumer(namesrv, group=group, consume_from=where, client=client) as consumer:
        await consumer.subscribe(topic, tags=tag, sql=sql)
        while True:
            try:
                async with asyncio.timeout(timeout):
                    message = await anext(consumer)
            except (TimeoutError, StopAsyncIteration):
                return
            yield message


async def _all(
    namesrv: str,
    topic: str,
    start: Start,
    tag: str | None,
    sql: str | None,
    timeout: float | None,
    *,
    exit_at_end: bool = False,
) -> AsyncIterator[ReceivedMessage]:
    loop = asyncio.get_running_loop()
    reader = PullConsumer(
        namesrv,
        group=TOOLS_GROUP,
        auto_commit=False,
        pull_batch=READ_BATCH,
        client=client_options(namesrv),
    )
    async with reader:
        queues = await reader.queues(topic)
        ends = {queue: await reader.end_offset(queue) for queue in queues}
        begins = {queue: await _offset(reader, queue, start, ends[queue]) for queue in queues}
        await reader.assign(queues, tags=tag, sql=sql, offsets=begins)
        last_news = loop.time()
        while True:
            found = await reader.poll(POLL_MS)
            for message in found:
                if not exit_at_end or message.queue_offset < ends[message.queue]:
                    yield message
            if found:
                last_news = loop.time()
            elif timeout is not None and loop.time() - last_news >= timeout:
                return
            if exit_at_end and all(reader.position(queue) >= ends[queue] for queue in queues):
                return


async def _offset(reader: PullConsumer, queue: MessageQueue, start: Start, end: int) -> int:
    if start.kind == "end":
        return end
    if start.kind == "time":
        return await reader.offset_for_time(queue, start.value)
    return min(max(await reader.begin_offset(queue), start.value), end)
