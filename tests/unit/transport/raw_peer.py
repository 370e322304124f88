"""A peer written down by hand for transport tests: frames built and read without our codec."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cosmodrome.env.options import SocketOptions
from cosmodrome.transport.router import Router
from cosmodrome.transport.server import Server
from cosmodrome.wire.commands import (
    GetMaxOffset,
    GetMinOffset,
    NotifyConsumerIdsChanged,
    OffsetReply,
    QueryConsumerOffset,
    UpdateConsumerOffset,
)
from cosmodrome.wire.table import BROKER, Call, Reply

HOST = "127.0.0.1"


def frame(
    code: int,
    opaque: int,
    ext: dict[str, Any] | None = None,
    body: bytes = b"",
    flag: int = 0,
) -> bytes:
    header = json.dumps(
        {
            "code": code,
            "language": "JAVA",
            "version": 409,
            "opaque": opaque,
            "flag": flag,
            "extFields": ext or {},
        }
    ).encode()
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


def max_offset(opaque: int, queue_id: int = 0, flag: int = 0) -> bytes:
    return frame(30, opaque, {"topic": "T", "queueId": str(queue_id)}, flag=flag)


class RawPeer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int) -> RawPeer:
        return cls(*await asyncio.open_connection(HOST, port))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def read(self) -> dict[str, Any]:
        """The header of the next frame, with its body under "body"."""
        async with asyncio.timeout(60):
            (length,) = struct.unpack(">I", await self.reader.readexactly(4))
            data = await self.reader.readexactly(length)
        (word,) = struct.unpack_from(">I", data)
        header: dict[str, Any] = json.loads(data[4 : 4 + (word & 0xFFFFFF)])
        header["serialize"] = word >> 24
        header["body"] = data[4 + (word & 0xFFFFFF) :]
        return header

    async def ask(self, data: bytes) -> dict[str, Any]:
        self.send(data)
        return await self.read()

    async def ended(self, within_s: float = 60) -> bytes:
        """Everything until the other side closed."""
        chunks = []
        try:
            async with asyncio.timeout(within_s):
                while chunk := await self.reader.read(65536):
                    chunks.append(chunk)
        except ConnectionError:
            pass
        return b"".join(chunks)

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass


class Offsets:
    """GetMaxOffset answers its queue id at once; GetMinOffset waits for its queue's gate;
    QueryConsumerOffset asks the requester back; UpdateConsumerOffset records."""

    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Future[Reply]] = {}
        self.committed: list[int] = []
        self.running = 0
        self.running_peak = 0

    @GetMaxOffset.handler
    def max_offset(self, ask: GetMaxOffset, call: Call) -> OffsetReply:
        return OffsetReply(offset=ask.queue_id, body=ask.body)

    @GetMinOffset.handler
    async def min_offset(self, ask: GetMinOffset, call: Call) -> OffsetReply:
        self.running += 1
        self.running_peak = max(self.running_peak, self.running)
        try:
            await self.gate(ask.queue_id)
        finally:
            self.running -= 1
        return OffsetReply(offset=ask.queue_id)

    @QueryConsumerOffset.handler
    async def query(self, ask: QueryConsumerOffset, call: Call) -> OffsetReply:
        notify = NotifyConsumerIdsChanged(consumer_group=ask.consumer_group)
        call.connection.push(notify)
        await call.connection.call(notify, timeout_ms=60_000)
        return OffsetReply(offset=7)

    @UpdateConsumerOffset.handler
    def update(self, ask: UpdateConsumerOffset, call: Call) -> Reply:
        self.committed.append(ask.commit_offset)
        return Reply()

    def gate(self, queue_id: int) -> asyncio.Future[Reply]:
        gate = self.gates.get(queue_id)
        if gate is None:
            gate = self.gates[queue_id] = asyncio.get_running_loop().create_future()
        return gate


@asynccontextmanager
async def serving(
    service: object, options: SocketOptions | None = None, hint: str = ""
) -> AsyncIterator[tuple[Server, int]]:
    router = Router(BROKER, [service], partial=True)
    server = Server(router, options or SocketOptions(), "broker", hint)
    port = await server.listen(HOST, 0)
    try:
        yield server, port
    finally:
        await server.stop(grace_ms=0)


async def until(condition: Any, within_s: float = 60) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
