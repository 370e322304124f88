"""`cosmo produce` and `cosmo request`: messages from a file or a pipe into a topic."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from typing import BinaryIO

import click

from cosmodrome.cli.messages.options import content_options
from cosmodrome.cli.messages.rows import message_from_json, message_json
from cosmodrome.cli.support.connection import client_options
from cosmodrome.cli.support.context import namesrv_option
from cosmodrome.cli.support.lines import lines
from cosmodrome.cli.support.progress import Progress
from cosmodrome.cli.support.running import run
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message, SendResult, SendStatus
from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import ConfigError, CosmodromeError

GROUP = "cosmo_produce"
IN_FLIGHT_MAX = 256
DELAY_LEVELS = len(StoreOptions().message_delay_level.split())  # unless brokers are set otherwise
LINGER_MS = 2  # what a pipe brings together leaves together

# Messages with these answers are stored; what is said here is missing.
UNPROMISED = {
    SendStatus.FLUSH_DISK_TIMEOUT: "the broker's disk had not synced in time; look at the disk",
    SendStatus.SLAVE_NOT_AVAILABLE: "on the master only, no slave to wait for; look at the slave",
    SendStatus.FLUSH_SLAVE_TIMEOUT: "no slave had it in time; look at the slave and the network",
}


class Template:
    """What flags say about every message of plain lines."""

    def __init__(
        self,
        topic: str,
        tag: str | None,
        keys: tuple[str, ...],
        pairs: tuple[str, ...],
        delay_level: int,
        queue_key: str | None,
    ) -> None:
        self.topic = topic
        self._tag = tag
        self._keys = keys
        self._delay_level = delay_level
        self._queue_key = queue_key
        self._properties: dict[str, str] = {}
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if not equals or not name or not value:
                raise ConfigError(f"--property {pair!r}: write NAME=VALUE")
            self._properties[name] = value

    def message(self, body: bytes) -> Message:
        return Message(
            self.topic,
            body,
            tags=self._tag,
            keys=self._keys,
            properties=self._properties,
            delay_level=self._delay_level,
            queue_key=self._queue_key,
        )


@click.command()
@click.argument("topic")
@namesrv_option
@click.option(
    "--file", "source", type=click.File("rb"), default="-", help="Read this file instead of stdin."
)
@click.option(
    "--jsonl",
    is_flag=True,
    help="Lines are JSON: body or body_base64, tags, keys, properties, delay (a level), delay_ms,"
    " deliver_at_ms, queue_key.",
)
@content_options("every message")
@click.option(
    "--delay", type=click.IntRange(0, DELAY_LEVELS), default=0, help="Delay level of every message."
)
@click.option("--queue-key", help="Send everything to the queue of this key, in order.")
@click.option("--group", default=GROUP, show_default=True, help="Producer group.")
@click.option("--timeout", type=float, default=3.0, show_default=True, help="Seconds per send.")
@click.option("--keep-going", is_flag=True, help="Go on after a message that cannot be sent.")
@click.option(
    "-o",
    "output",
    type=click.Choice(["none", "jsonl"]),
    default="none",
    show_default=True,
    help="Print where each message was stored.",
)
@click.option("-q", "--quiet", is_flag=True, help="Show no progress and no summary.")
def produce(
    topic: str,
    namesrv: str,
    source: BinaryIO,
    jsonl: bool,
    tag: str | None,
    keys: tuple[str, ...],
    pairs: tuple[str, ...],
    delay: int,
    queue_key: str | None,
    group: str,
    timeout: float,
    keep_going: bool,
    output: str,
    quiet: bool,
) -> None:
    """Send one message per line of stdin (or --file) to TOPIC. Empty lines are skipped.

    The exit code is 1 when a message could not be sent; stderr has its line and the reason.
    Messages that are stored without all that the broker's settings promise are counted there.
    """
    template = Template(topic, tag, keys, pairs, delay, queue_key)
    work = _Produce(template, source, jsonl=jsonl, keep_going=keep_going, output=output)
    failed = run(work.run(namesrv, group, timeout_ms=int(timeout * 1000), quiet=quiet))
    if failed:
        sys.exit(1)


class _Produce:
    def __init__(
        self, template: Template, source: BinaryIO, *, jsonl: bool, keep_going: bool, output: str
    ) -> None:
        self._template = template
        self._source = source
        self._jsonl = jsonl
        self._keep_going = keep_going
        self._output = output
        self._failed = 0
        self._statuses: Counter[SendStatus] = Counter()
        self._sending: set[asyncio.Task[None]] = set()

    async def run(self, namesrv: str, group: str, *, timeout_ms: int, quiet: bool) -> int:
        """How many messages failed."""
        # One queue key means one order, and only one send at a time keeps it over a retry.
        width = 1 if self._template.message(b"x").queue_key else IN_FLIGHT_MAX
        producer = Producer(
            namesrv,
            group=group,
            send_timeout_ms=timeout_ms,
            linger_ms=0 if width == 1 else LINGER_MS,
            client=client_options(namesrv),
        )
        slots = asyncio.Semaphore(width)
        async with producer, Progress("sent", quiet=quiet) as progress:
            try:
                async for number, message in self._messages():
                    if self._failed and not self._keep_going:
                        break
                    await slots.acquire()
                    task = asyncio.get_running_loop().create_task(
                        self._send(producer, number, message, progress)
                    )
                    self._sending.add(task)
                    task.add_done_callback(self._sending.discard)
                    task.add_done_callback(lambda _: slots.release())
            finally:
                if self._sending:
                    await asyncio.wait(tuple(self._sending))
            summary = progress.summary()
        if not quiet:
            click.echo(summary + (f", {self._failed} failed" if self._failed else ""), err=True)
            for status, what in UNPROMISED.items():
                if count := self._statuses[status]:
                    click.echo(
                        f"{count:,} of them answered {status.name} ({status.value}): stored, but"
                        f" {what}",
                        err=True,
                    )
        return self._failed

    async def _messages(self) -> AsyncIterator[tuple[int, Message]]:
        async for number, line in lines(self._source):
            if not line.strip():
                continue
            try:
                if self._jsonl:
                    yield number, message_from_json(self._template.topic, line)
                else:
                    yield number, self._template.message(line)
            except ConfigError as error:
                self._complain(number, error)
                if not self._keep_going:
                    return

    async def _send(
        self, producer: Producer, number: int, message: Message, progress: Progress
    ) -> None:
        try:
            result = await producer.send(message)
        except CosmodromeError as error:
            self._complain(number, error)
            return
        progress.done += 1
        self._statuses[result.status] += 1
        if self._output == "jsonl":
            click.echo(json.dumps({"line": number, **_result_row(result)}))

    def _complain(self, number: int, error: Exception) -> None:
        self._failed += 1
        click.echo(f"cosmo: line {number}: {error}", err=True)


def _result_row(result: SendResult) -> dict[str, object]:
    return {
        "status": result.status.name,
        "msg_id": result.msg_id,
        "offset_msg_id": result.offset_msg_id,
        "topic": result.queue.topic,
        "broker": result.queue.broker_name,
        "queue_id": result.queue.queue_id,
        "queue_offset": result.queue_offset,
        **({"recall_handle": result.recall_handle} if result.recall_handle else {}),
    }


@click.command()
@click.argument("topic")
@click.argument("body")
@namesrv_option
@content_options("the request")
@click.option("--group", default="cosmo_request", show_default=True, help="Producer group.")
@click.option("--timeout", type=float, default=10.0, show_default=True, help="Seconds to wait.")
@click.option(
    "-o",
    "output",
    type=click.Choice(["raw", "json"]),
    default="raw",
    show_default=True,
    help="Form of the reply.",
)
def request(
    topic: str,
    body: str,
    namesrv: str,
    tag: str | None,
    keys: tuple[str, ...],
    pairs: tuple[str, ...],
    group: str,
    timeout: float,
    output: str,
) -> None:
    """Send BODY (- for stdin) to TOPIC and print the reply of the consumer that answers."""
    content = sys.stdin.buffer.read() if body == "-" else body.encode()
    message = Template(topic, tag, keys, pairs, 0, None).message(content)

    async def ask() -> None:
        async with Producer(namesrv, group=group, client=client_options(namesrv)) as producer:
            reply = await producer.request(message, timeout_ms=int(timeout * 1000))
        if output == "json":
            click.echo(message_json(reply))
        else:
            click.echo(reply.body)

    run(ask())
