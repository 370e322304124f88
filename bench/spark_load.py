"""`python -m bench.spark_load`: puts bodies from a file into a topic, as KafkaLoad.java does.

Message n has body n of the file, which begins anew at its end, and goes to the same queue as in
Kafka: neighbours go together in runs, the runs go round the queues. With a rate the runs are as
long as a hundredth of a second makes them.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

from cosmodrome import Admin, Message, Producer
from cosmodrome.cli.support.running import run
from cosmodrome.client.values import SendResult
from cosmodrome.wire.bodies import MessageQueue

RUN = 32
TICKS = 100  # per second, when there is a rate
WINDOW = 64  # batches on their way

Batch = tuple[MessageQueue, list[Message]]


async def load(
    namesrv: str, topic: str, bodies: Path, size: int, count: int, rate: int, queues: int
) -> None:
    names = await _make_topic(namesrv, topic, queues)
    loop = asyncio.get_running_loop()
    on_way: set[asyncio.Task[list[SendResult]]] = set()
    length = max(1, rate // TICKS // queues) if rate else RUN
    sent = 0
    async with Producer(namesrv, group="bench_spark", in_flight_max=RUN * WINDOW * 2) as producer:
        began = loop.time()
        for queue, batch in _batches(topic, names, bodies.read_bytes(), size, count, length):
            if rate and sent % (length * queues) == 0:
                await asyncio.sleep(max(0.0, began + sent / rate - loop.time()))
            if len(on_way) >= WINDOW:
                done, on_way = await asyncio.wait(on_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            on_way.add(asyncio.create_task(producer.send_batch(batch, queue=queue)))
            sent += len(batch)
        await asyncio.gather(*on_way)


async def _make_topic(namesrv: str, topic: str, queues: int) -> list[MessageQueue]:
    async with Admin(namesrv) as admin:
        if topic not in await admin.topics.names():
            await admin.topics.create(topic, queues=queues)
        name = (await admin.topics.route(topic)).broker_datas[0].broker_name
    return [
        MessageQueue(topic=topic, broker_name=name, queue_id=number) for number in range(queues)
    ]


def _batches(
    topic: str, queues: list[MessageQueue], bodies: bytes, size: int, count: int, length: int
) -> Iterator[Batch]:
    held = len(bodies) // size
    for number, first in enumerate(range(0, count, length)):
        starts = [at % held * size for at in range(first, min(count, first + length))]
        batch = [Message(topic, bodies[at : at + size]) for at in starts]
        yield queues[number % len(queues)], batch


if __name__ == "__main__":
    _namesrv, _topic, _file, *_numbers = sys.argv[1:]
    run(load(_namesrv, _topic, Path(_file), *map(int, _numbers)))
