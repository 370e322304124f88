"""`cosmo bench`: how fast a cluster and this client are together, in the manner of `nats bench`.

Each message carries the time it was sent at in its first 8 bytes, so that a consumer in the same
process can tell how long it took.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import resource
import struct
import time
from array import array
from typing import Any

import click

from cosmodrome.cli.support.connection import client_options
from cosmodrome.cli.support.context import namesrv_option
from cosmodrome.cli.support.progress import Progress
from cosmodrome.cli.support.running import run
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message, ReceivedMessage, SendResult
from cosmodrome.env.options import StoreOptions
from cosmodrome.errors import ConfigError

TOPIC = "cosmo_bench"
STAMP = struct.Struct(">q")  # nanoseconds on the monotonic clock
SIZE_BYTES_MAX = StoreOptions().max_message_size
PROBE_S = 0.1
SECONDS_WITHOUT_NEWS_MAX = 30


@dataclasses.dataclass(slots=True)
class Outcome:
    what: str
    messages: int
    size_bytes: int
    seconds: float
    cpu_seconds: float  # of this process
    failed: int = 0
    latencies: array[float] = dataclasses.field(default_factory=lambda: array("d"))

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "case": self.what,
            "messages": self.messages,
            "failed": self.failed,
            "size_bytes": self.size_bytes,
            "seconds": round(self.seconds, 3),
            "msgs_per_s": round(self.messages / self.seconds),
            "mib_per_s": round(self.messages * self.size_bytes / self.seconds / 2**20, 2),
            "client_cpu_us_per_msg": round(self.cpu_seconds / max(self.messages, 1) * 1e6, 2),
        }
        ordered = sorted(self.latencies)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0)):
            if ordered:
                at = min(len(ordered) - 1, int(share * len(ordered)))
                row[f"{name}_ms"] = round(ordered[at] * 1000, 3)
        return row

    def text(self) -> str:
        row = self.row()
        parts = [
            f"{row['case']}: {self.messages:,} messages of {self.size_bytes} B in"
            f" {self.seconds:.2f} s",
            f"  {row['msgs_per_s']:,} msgs/s   {row['mib_per_s']} MiB/s"
            f"   {row['client_cpu_us_per_msg']} µs of this process's CPU per message",
        ]
        if self.latencies:
            parts.append(
                f"  latency ms: p50 {row['p50_ms']}   p99 {row['p99_ms']}"
                f"   p99.9 {row['p999_ms']}   max {row['max_ms']}"
            )
        if self.failed:
            parts.append(f"  {self.failed:,} failed")
        return "\n".join(parts)


@click.group()
def bench() -> None:
    """Measure this cluster with this client. Messages go to the topic cosmo_bench."""


def _common(command: Any) -> Any:
    for option in (
        click.option(
            "-o",
            "output",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="Form of the result.",
        ),
        click.option("--topic", default=TOPIC, show_default=True, help="Topic to use."),
        click.option(
            "--size",
            type=click.IntRange(STAMP.size, SIZE_BYTES_MAX),
            default=128,
            show_default=True,
            help="Bytes per message.",
        ),
        click.option(
            "--msgs",
            type=click.IntRange(1),
            default=100_000,
            show_default=True,
            help="Messages to send or receive.",
        ),
        namesrv_option,
    ):
        command = option(command)
    return command


@bench.command("produce")
@_common
@click.option(
    "--in-flight",
    type=click.IntRange(1, 65_536),
    default=512,
    show_default=True,
    help="Most sends that may wait for an answer at the same time.",
)
@click.option(
    "--linger",
    type=float,
    default=0.0,
    show_default=True,
    help="Milliseconds that a message may wait for others to share a send; 0 sends it at once.",
)
@click.option(
    "--batch", type=click.IntRange(1, 4096), default=1, show_default=True, help="Messages per send."
)
def bench_produce(
    namesrv: str,
    msgs: int,
    size: int,
    topic: str,
    output: str,
    in_flight: int,
    linger: float,
    batch: int,
) -> None:
    """Send as fast as the window allows."""
    _say(run(produce(namesrv, topic, msgs, size, in_flight, linger, batch)), output)


@bench.command("consume")
@_common
def bench_consume(namesrv: str, msgs: int, size: int, topic: str, output: str) -> None:
    """Receive messages that `cosmo bench produce` has sent, and count them."""
    _say(run(consume(namesrv, topic, msgs, size)), output)


@bench.command("e2e")
@_common
@click.option(
    "--rate", type=click.IntRange(1), default=1000, show_default=True, help="Messages per second."
)
def bench_e2e(namesrv: str, msgs: int, size: int, topic: str, output: str, rate: int) -> None:
    """Send at a steady rate and measure the time until each message is in a handler."""
    _say(run(end_to_end(namesrv, topic, msgs, size, rate)), output)


async def produce(
    namesrv: str, topic: str, msgs: int, size: int, in_flight: int, linger_ms: float, batch: int
) -> Outcome:
    loop = asyncio.get_running_loop()
    body = bytes(size)
    latencies = array("d")
    failures: list[BaseException] = []
    answered = asyncio.Event()
    producer = Producer(
        namesrv,
        group="cosmo_bench",
        in_flight_max=in_flight,
        linger_ms=linger_ms,
        retries=0,
        client=client_options(namesrv),
    )
    async with producer, Progress("sent", total=msgs) as progress:
        await producer.send(Message(topic, body))  # the route, the connection, the topic itself
        begun, cpu = loop.time(), _cpu_seconds()

        def sent(since: int, future: asyncio.Future[SendResult]) -> None:
            error = future.exception()
            if error is not None:
                failures.append(error)
            else:
                progress.done += 1
                latencies.append((time.monotonic_ns() - since) / 1e9)
            if progress.done + len(failures) == msgs:
                answered.set()

        if batch > 1:
            await _produce_batches(producer, topic, body, msgs, batch, in_flight, progress)
        else:
            for _ in range(msgs):
                await producer.ready()
                now = time.monotonic_ns()
                future = producer.submit(Message(topic, body))
                future.add_done_callback(functools.partial(sent, now))
            await answered.wait()
        seconds, cpu = loop.time() - begun, _cpu_seconds() - cpu
    what = "produce" + (f" in batches of {batch}" if batch > 1 else "")
    return Outcome(what, progress.done, size, seconds, cpu, len(failures), latencies)


async def _produce_batches(
    producer: Producer, topic: str, body: bytes, msgs: int, batch: int, width: int, done: Progress
) -> None:
    left = msgs

    async def worker() -> None:
        nonlocal left
        while left > 0:
            count = min(batch, left)
            left -= count
            await producer.send_batch([Message(topic, body) for _ in range(count)])
            done.done += count

    async with asyncio.TaskGroup() as group:
        for _ in range(max(1, min(width // batch, 64))):
            group.create_task(worker())


async def consume(namesrv: str, topic: str, msgs: int, size: int) -> Outcome:
    loop = asyncio.get_running_loop()
    enough = asyncio.Event()
    group, client = f"cosmo_bench_{_token()}", client_options(namesrv)
    consumer = Consumer(namesrv, group=group, consume_from="first", client=client)
    async with consumer, Progress("received", total=msgs) as progress:
        begun, cpu = 0.0, 0.0

        def count(_message: ReceivedMessage) -> None:
            nonlocal begun, cpu
            if not progress.done:
                begun, cpu = loop.time(), _cpu_seconds()
            progress.done += 1
            if progress.done == msgs:
                enough.set()

        await consumer.subscribe(topic, handler=count)
        work = loop.create_task(consumer.run())
        await _wait(enough, work, progress, msgs)
        seconds, cpu = loop.time() - begun, _cpu_seconds() - cpu
        work.cancel()
        await asyncio.wait((work,))
    return Outcome("consume", msgs, size, seconds, cpu)


async def end_to_end(namesrv: str, topic: str, msgs: int, size: int, rate: int) -> Outcome:
    loop = asyncio.get_running_loop()
    enough, reached = asyncio.Event(), asyncio.Event()
    latencies = array("d")
    token = _token()
    group, client = f"cosmo_bench_{token}", client_options(namesrv)
    consumer = Consumer(namesrv, group=group, consume_from="last", client=client)
    producer = Producer(namesrv, group="cosmo_bench", client=client)
    async with producer, consumer, Progress("received", total=msgs) as progress:
        await producer.send(Message(topic, bytes(size)))  # there is a topic to subscribe to now

        def arrived(message: ReceivedMessage) -> None:
            if message.tags != token:
                return  # left over from an earlier run
            sent_ns = STAMP.unpack_from(message.body)[0]
            if not sent_ns:
                reached.set()
                return
            latencies.append((time.monotonic_ns() - sent_ns) / 1e9)
            progress.done += 1
            if progress.done == msgs:
                enough.set()

        # The broker leaves out what earlier runs put there, and time counts from the first
        # arrival: a new group may begin at the oldest message, whatever `consume_from` says.
        await consumer.subscribe(topic, tags=token, handler=arrived)
        work = loop.create_task(consumer.run())
        await _probe(producer, Message(topic, bytes(size), tags=token), reached, work)
        begun, cpu = loop.time(), _cpu_seconds()
        for number in range(msgs):
            due = begun + number / rate
            if due > loop.time():
                await asyncio.sleep(due - loop.time())
            await producer.ready()
            body = STAMP.pack(time.monotonic_ns()) + bytes(size - STAMP.size)
            producer.submit(Message(topic, body, tags=token)).add_done_callback(_raise_nothing)
        await _wait(enough, work, progress, msgs)
        seconds, cpu = loop.time() - begun, _cpu_seconds() - cpu
        work.cancel()
        await asyncio.wait((work,))
    return Outcome(f"e2e at {rate}/s", msgs, size, seconds, cpu, 0, latencies)


async def _probe(
    producer: Producer, message: Message, reached: asyncio.Event, work: asyncio.Task[None]
) -> None:
    """Send until something arrives."""
    for _ in range(round(SECONDS_WITHOUT_NEWS_MAX / PROBE_S)):
        if work.done():
            work.result()
        await producer.send(message)
        try:
            async with asyncio.timeout(PROBE_S):
                await reached.wait()
        except TimeoutError:
            continue
        return
    raise ConfigError(f"nothing arrived within {SECONDS_WITHOUT_NEWS_MAX} s")


async def _wait(
    enough: asyncio.Event, work: asyncio.Task[None], progress: Progress, msgs: int
) -> None:
    waiting = asyncio.get_running_loop().create_task(enough.wait())
    while not enough.is_set():
        before = progress.done
        await asyncio.wait(
            (waiting, work), timeout=SECONDS_WITHOUT_NEWS_MAX, return_when=asyncio.FIRST_COMPLETED
        )
        if work.done():
            waiting.cancel()
            work.result()
        if progress.done == before and not enough.is_set():
            waiting.cancel()
            raise ConfigError(
                f"{progress.done} of {msgs} messages came, then none for"
                f" {SECONDS_WITHOUT_NEWS_MAX} s; ask for fewer with --msgs or produce more"
            )


def _raise_nothing(future: asyncio.Future[SendResult]) -> None:
    future.exception()  # a message that was not sent is missed at the other end


def _token() -> str:
    import secrets

    return secrets.token_hex(4)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _say(outcome: Outcome, output: str) -> None:
    click.echo(json.dumps(outcome.row()) if output == "json" else outcome.text())
