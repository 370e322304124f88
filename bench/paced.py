"""Loads at a rate: what `bench.loadgen --rate` does, and `--op pushlatency`.

Requests leave when they are due, whether or not earlier ones were answered, and latency counts from
when they were due: a server that stands still for a while pays for everything that it kept
waiting. With pushlatency it ends when a consumer, whose pulls wait at the server, sees the message.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import struct
import time
from abc import ABC, abstractmethod
from typing import cast

from bench.loadgen import OPAQUE_FIRST, Load, frame, header, pull_frame, send_frame

BEAT_S = 0.0005
HOLD_MS = 15_000
BODY_AT = 88  # in a record with addresses of IPv4; its length is before it


class Peer(asyncio.Protocol, ABC):
    """Takes answers apart."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= 8:
            length, mark = struct.unpack_from(">II", self._buffer, at)
            if len(self._buffer) - at < 4 + length:
                break
            begin, end = at + 8, at + 4 + length
            at = end
            split = begin + (mark & 0xFFFFFF)
            self.answered(json.loads(self._buffer[begin:split]), bytes(self._buffer[split:end]))
        del self._buffer[:at]

    @abstractmethod
    def answered(self, answer: dict[str, object], body: bytes) -> None:
        """One answer: its header and its body."""


class Producer(Peer):
    """Sends one message after the other to the queues in turn."""

    def __init__(self, options: argparse.Namespace, load: Load) -> None:
        super().__init__()
        self._load = load
        self._stamps = options.op == "pushlatency"
        self._batch = options.batch
        self._size = options.size
        self._frames = [send_frame(options, queue, queue) for queue in range(options.queues)]
        self._opaque_at = self._frames[0].index(str(OPAQUE_FIRST).encode())
        self._opaque = OPAQUE_FIRST
        self._due_ns: dict[int, int] = {}

    def send(self, due_ns: int) -> None:
        self._opaque += 1
        request = self._frames[self._opaque % len(self._frames)]
        request[self._opaque_at : self._opaque_at + 10] = b"%d" % self._opaque
        if self._stamps:
            at = len(request) - self._size
            request[at : at + 8] = due_ns.to_bytes(8, "big")
        self._due_ns[self._opaque] = due_ns
        self.transport.write(bytes(request))

    def answered(self, answer: dict[str, object], body: bytes) -> None:
        due_ns = self._due_ns.pop(int(str(answer["opaque"])))
        if answer["code"] != 0:
            self._load.errors += 1
            self._load.first_error = self._load.first_error or str(answer.get("remark"))
        elif self._load.measuring and not self._stamps:
            self._load.saw(self._batch, self._batch * self._size, time.monotonic_ns() - due_ns)


class Consumer(Peer):
    """One pull per queue that waits at the server."""

    def __init__(self, options: argparse.Namespace, load: Load) -> None:
        super().__init__()
        self._options = options
        self._load = load
        self.ready = asyncio.get_running_loop().create_future()
        self._unknown = options.queues

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        for queue in range(self._options.queues):
            ask = header(30, {"topic": self._options.topic, "queueId": str(queue)})
            self.transport.write(bytes(frame({**ask, "opaque": queue}, b"")))

    def answered(self, answer: dict[str, object], body: bytes) -> None:
        queue = int(str(answer["opaque"]))
        fields = answer.get("extFields")
        assert isinstance(fields, dict)
        if self._unknown and "offset" in fields:
            self._unknown -= 1
            if not self._unknown:
                self.ready.set_result(None)
            self._pull(queue, int(fields["offset"]))
            return
        self._pull(queue, int(fields["nextBeginOffset"]))
        now_ns, at = time.monotonic_ns(), 0
        while self._load.measuring and at + BODY_AT + 8 <= len(body):
            size = int.from_bytes(body[at : at + 4], "big")
            due_ns = int.from_bytes(body[at + BODY_AT : at + BODY_AT + 8], "big")
            self._load.saw(1, size, now_ns - due_ns)
            at += size

    def _pull(self, queue: int, offset: int) -> None:
        request = pull_frame(self._options, queue, offset, HOLD_MS)
        mark = str(OPAQUE_FIRST).encode()
        at = request.index(mark)
        # Leading zeros are no JSON; spaces are.
        request[at : at + len(mark)] = str(queue).rjust(len(mark)).encode()
        self.transport.write(bytes(request))


async def start(options: argparse.Namespace, load: Load) -> asyncio.Task[None]:
    """Connect; the task sends until the load is stopped."""
    loop = asyncio.get_running_loop()
    host, port = options.addr.rsplit(":", 1)
    producers = []
    for _ in range(options.conns):
        _, producer = await loop.create_connection(lambda: Producer(options, load), host, int(port))
        producers.append(producer)
    if options.op == "pushlatency":
        producers[0].send(time.monotonic_ns())  # the topic is there before it is pulled
        await asyncio.sleep(0.3)
        _, consumer = await loop.create_connection(lambda: Consumer(options, load), host, int(port))
        await consumer.ready

    async def pace() -> None:
        gap_ns = 1e9 / options.rate
        began_ns, sent = time.monotonic_ns(), 0
        while not load.stopped:
            due = int((time.monotonic_ns() - began_ns) / gap_ns)
            while sent < due:
                producers[sent % len(producers)].send(began_ns + int((sent + 1) * gap_ns))
                sent += 1
            await asyncio.sleep(BEAT_S)
        for producer in producers:
            producer.transport.close()

    return loop.create_task(pace())
