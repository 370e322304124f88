"""Sends over many topics, delayed and signed sends, and a given number of sends to fill a topic.

All requests are encoded before the clock starts and have one length, so a burst is a slice of one
ring of bytes; answers are counted, not parsed. That costs next to nothing per message, but
there is no latency to report. Prints one JSON line like `bench.loadgen`.

    python -m bench.ring --addr 127.0.0.1:10911 --topics 1024 --queues 4 --pid 1234

The topics `<topic>0000`, `<topic>0001`... must exist, or the broker must create them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from functools import partial
from typing import cast

from bench.loadgen import cpu_seconds, new_loop, send_frame

FRAMES_MIN = 4096  # so that unique keys do not come again at once
ANSWER, GOOD = b'"code":', b'"code":0,'
LOOK_S = 0.02
END_S = 5.0  # for answers to come after the last request


def make_ring(options: argparse.Namespace) -> tuple[memoryview, int]:
    """All frames, one after the other, and the length of one."""
    places = options.topics * options.queues
    least = FRAMES_MIN // options.batch
    access_key, _, secret = options.account.partition(":")
    account = (access_key, secret) if access_key else None
    frames = []
    for number in range(places * -(-least // places)):
        topic = f"{options.topic}{number % options.topics:04d}"
        of_topic = argparse.Namespace(**{**vars(options), "topic": topic})
        queue = number // options.topics % options.queues
        frames.append(bytes(send_frame(of_topic, queue, number, account)))
    assert len(set(map(len, frames))) == 1
    return memoryview(b"".join(frames)), len(frames[0])


class Load:
    """What all connections share."""

    def __init__(self, ring: memoryview, frame_bytes: int, count: int) -> None:
        self.ring = ring
        self.frame_bytes = frame_bytes
        self.frames = len(ring) // frame_bytes
        self.left = count or sys.maxsize  # requests that may still be sent
        self.sent = self.answered = self.good = 0
        self.first_error = ""

    async def until_answered(self, seconds: float) -> None:
        """Until nothing is left to send and all of it is answered, or the time is over."""
        for _ in range(int(seconds / LOOK_S)):
            if not self.left and self.answered == self.sent:
                break
            await asyncio.sleep(LOOK_S)


class Mark:
    """Counts a mark in bytes that come in pieces."""

    def __init__(self, mark: bytes) -> None:
        self._mark = mark
        self._tail = b""  # shorter than the mark, so nothing is counted twice

    def seen(self, data: bytes) -> int:
        text = self._tail + data
        self._tail = text[1 - len(self._mark) :]
        return text.count(self._mark)


class Sender(asyncio.Protocol):
    """Keeps `window` requests in flight, from its own place in the ring on."""

    def __init__(self, load: Load, window: int, slot: int) -> None:
        self._load = load
        self._window = window
        self._slot = slot
        self._answers, self._good = Mark(ANSWER), Mark(GOOD)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._send(self._window)

    def data_received(self, data: bytes) -> None:
        load = self._load
        answers, good = self._answers.seen(data), self._good.seen(data)
        load.answered += answers
        load.good += good
        if good < answers and not load.first_error:
            remark = data.partition(b'"remark":"')[2].partition(b'"')[0]
            load.first_error = remark.decode(errors="replace")
        self._send(answers)

    def _send(self, count: int) -> None:
        load = self._load
        count = min(count, load.left)
        load.left -= count
        load.sent += count
        assert self._transport is not None
        while count:
            run = min(count, load.frames - self._slot)
            begin = self._slot * load.frame_bytes
            self._transport.write(load.ring[begin : begin + run * load.frame_bytes])
            self._slot = (self._slot + run) % load.frames
            count -= run


async def run(options: argparse.Namespace) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    host, port = options.addr.rsplit(":", 1)
    load = Load(*make_ring(options), options.count)
    transports = []
    for number in range(options.conns):
        slot = number * load.frames // options.conns
        transport, _ = await loop.create_connection(
            partial(Sender, load, options.window, slot), host, int(port)
        )
        transports.append(transport)
    await asyncio.sleep(options.warmup)
    pids = [int(pid) for pid in options.pid.split(",") if pid]
    cpu, began, before = cpu_seconds(pids), time.perf_counter(), load.good
    if options.count:
        await load.until_answered(options.duration)
    else:
        await asyncio.sleep(options.duration)
    seconds, cpu = time.perf_counter() - began, cpu_seconds(pids) - cpu
    messages = (load.good - before) * options.batch
    load.left = 0
    await load.until_answered(END_S)
    for transport in transports:
        transport.close()
    result: dict[str, object] = {
        "op": "ring",
        "tps": round(messages / seconds),
        "stored": load.good * options.batch,
        "errors": load.sent - load.good,
        "first_error": load.first_error,
        "messages": messages,
    }
    if pids and messages:
        result["srv_cpu_us_msg"] = round(cpu / messages * 1e6, 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--addr", default="127.0.0.1:10911")
    parser.add_argument("--topic", default="Ring", help="what the names of the topics begin with")
    parser.add_argument("--topics", type=int, default=1)
    parser.add_argument("--tag", default="TagA")
    parser.add_argument("--conns", type=int, default=8)
    parser.add_argument("--window", type=int, default=16, help="requests in flight per connection")
    parser.add_argument("--size", type=int, default=128, help="body bytes")
    parser.add_argument("--queues", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--delay", type=int, default=0, help="delay level of what is sent")
    parser.add_argument("--account", default="", help="key:secret that signs every request")
    parser.add_argument("--count", type=int, default=0, help="end after this many requests")
    parser.add_argument("--duration", type=float, default=5.0, help="seconds measured")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds before that")
    parser.add_argument("--pid", default="", help="broker process ids, comma separated")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=new_loop()) as runner:
        json.dump(runner.run(run(options)), sys.stdout)
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
