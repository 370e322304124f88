"""What one hostile peer does to a node, one function each, bounded in count and time.

Run by `bench.abuse` in a process of its own. An attack goes on when it is refused or cut off: that
is what a node should do to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import struct
import sys
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from bench.loadgen import frame, header

TOPIC = "Neighbour"  # whose messages the neighbour waits for
QUEUES = 4
PAUSE_S = 0.05  # before a connection is opened again
READ_BYTES = 1 << 20
LONG = "L" * 100
STOPPED = "settings-then-stop"  # the attack during which the node is asked to end


@dataclass(frozen=True)
class Node:
    namesrv_port: int
    broker_port: int
    http_port: int
    seconds: float


Attack = Callable[[Node], Awaitable[None]]


def request(code: int, ext: dict[str, str], body: bytes = b"") -> bytes:
    return bytes(frame(header(code, ext), body))


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    opened = await asyncio.open_connection("127.0.0.1", port, limit=READ_BYTES)
    _begun()
    return opened


@functools.cache
def _begun() -> None:
    """Say once that what had to be prepared is prepared."""
    print("begun", flush=True)


async def pipelined(
    port: int, requests: Iterator[bytes], *, at_once: int, read: bool = True
) -> None:
    """Write requests for ever, `at_once` of them before their answers are read."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await connect(port)
            try:
                while True:
                    batch = list(itertools.islice(requests, at_once))
                    if not batch:
                        return
                    writer.write(b"".join(batch))
                    await writer.drain()
                    for _ in batch if read else ():
                        size = int.from_bytes(await reader.readexactly(4), "big")
                        while size:
                            size -= len(await reader.readexactly(min(size, READ_BYTES)))
            finally:
                writer.transport.abort()
        await asyncio.sleep(PAUSE_S)


async def many(count: int, attack: Callable[[int], Awaitable[None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(attack(number))  # type: ignore[arg-type]


async def config(node: Node) -> None:
    """Requests of 86 bytes for all settings, hundreds in one packet."""
    asks = itertools.repeat(request(26, {}))
    await many(2, lambda _: pipelined(node.broker_port, asks, at_once=150))


async def config_unread(node: Node) -> None:
    """The same, tens of thousands of them, and nobody reads the answers."""
    asks = itertools.repeat(request(26, {}))
    await many(4, lambda _: pipelined(node.broker_port, asks, at_once=10_000, read=False))


async def registration(node: Node) -> None:
    """A broker of 600,000 topics in 2 MB, then one of as many as are taken, again and again."""
    bodies = [registered(600_000), registered(100_000)]

    def asks() -> Iterator[bytes]:
        for number in itertools.count():
            ext = {"brokerName": "attack", "brokerAddr": f"10.0.0.{number % 2}:1"}
            ext |= {"clusterName": "attack", "haServerAddr": "10.0.0.1:2", "brokerId": "0"}
            body = bodies[number % 2]
            yield request(103, ext | {"compressed": "true", "bodyCrc32": str(crc(body))}, body)

    await pipelined(node.namesrv_port, asks(), at_once=1)


def registered(count: int) -> bytes:
    """The compressed body of a registration with this many topics."""
    version = b'{"timestamp":1,"counter":1}'
    lines = [b"%x 1 1 6 SINGLE_TAG" % number for number in range(count)]
    parts = [version, *lines, b"[]"]
    sized = [struct.pack(">i", len(part)) + part for part in parts]
    sized.insert(1, struct.pack(">i", count))
    return zlib.compress(b"".join(sized), 9)


def crc(body: bytes) -> int:
    return zlib.crc32(body) & 0x7FFFFFFF


async def headers(node: Node) -> None:
    """A header of 15 MB."""
    fields = ",".join(f'"k{number}":"{LONG}"' for number in range(140_000))
    text = b'{"code":34,"opaque":1,"flag":0,"extFields":{%b}}' % fields.encode()
    bomb = struct.pack(">II", 4 + len(text), len(text)) + text
    await pipelined(node.broker_port, itertools.repeat(bomb), at_once=1)


async def dialect(node: Node) -> None:
    """4 MB of JSON with one token that only upstream's own parser knows."""
    body = b'{1:2,"y":[' + b",".join(itertools.repeat(b"1", 2_000_000)) + b"]}"
    await pipelined(node.broker_port, itertools.repeat(request(34, {}, body)), at_once=1)


async def topics(node: Node) -> None:
    """Sends that make a topic each."""

    def sends() -> Iterator[bytes]:
        for number in range(100_000):
            fields = ["attack", f"{LONG}{number}", "TBW102", "8", "0", "0", "1", "0", "", "0"]
            ext = dict(zip("abcdefghij", fields, strict=True), k="false", m="false")
            yield request(310, ext, b"x")

    await pipelined(node.broker_port, sends(), at_once=50)


async def sql(node: Node) -> None:
    """2,000 pulls that wait for the neighbour's messages, with 400 terms each."""
    terms = " OR ".join(f"a{number} = {number}" for number in range(400))

    def pull(queue: int, offset: str) -> bytes:
        fields = {"consumerGroup": "attack", "topic": TOPIC, "queueId": str(queue)}
        fields |= {"queueOffset": offset, "maxMsgNums": "32", "sysFlag": "6", "commitOffset": "0"}
        fields |= {"suspendTimeoutMillis": "15000", "subscription": terms, "subVersion": "0"}
        return request(11, fields | {"expressionType": "SQL92"})

    async def attack(number: int) -> None:
        queue = number % QUEUES
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, KeyError):
                reader, writer = await connect(node.broker_port)
                try:
                    writer.write(request(30, {"topic": TOPIC, "queueId": str(queue)}))
                    offset = (await answer(reader))["offset"]
                    writer.write(pull(queue, offset) * 50)
                    while True:  # as a consumer does: what was answered is asked again
                        writer.write(pull(queue, (await answer(reader))["nextBeginOffset"]))
                finally:
                    writer.transport.abort()
            await asyncio.sleep(PAUSE_S)

    await many(40, attack)


async def answer(reader: asyncio.StreamReader) -> dict[str, str]:
    """The fields of the next answer."""
    size, word = struct.unpack(">II", await reader.readexactly(8))
    rest = await reader.readexactly(size - 4)
    fields: dict[str, str] = json.loads(rest[: word & 0xFFFFFF]).get("extFields") or {}
    return fields


async def offsets(node: Node) -> None:
    """Commits for a group each, and now and then somebody who asks for all of them."""

    def commits(part: int) -> Iterator[bytes]:
        for number in range(250_000):
            ext = {"consumerGroup": f"attack-{part}-{number}", "topic": TOPIC}
            yield request(15, ext | {"queueId": "0", "commitOffset": "1"})

    async def attack(part: int) -> None:
        if part:
            await pipelined(node.broker_port, commits(part), at_once=500)
        while True:
            await asyncio.sleep(0.5)
            await pipelined(node.broker_port, iter([request(43, {})]), at_once=1)

    await many(3, attack)


async def statistics(node: Node) -> None:
    """A topic with as many queues as there may be, and its statistics again and again."""
    ext = {
        "topic": "Wide",
        "defaultTopic": "TBW102",
        "readQueueNums": "65535",
        "writeQueueNums": "65535",
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
    }
    await pipelined(node.broker_port, iter([request(17, ext)]), at_once=1)
    asks = itertools.repeat(request(202, {"topic": "Wide"}))
    await pipelined(node.broker_port, asks, at_once=4)


async def trickle(port: int, text: bytes) -> None:
    """One byte per second, for as long as the other side lets it."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await connect(port)
            try:
                for at in itertools.count():
                    writer.write(text[at % len(text) :][:1])
                    await writer.drain()
                    with contextlib.suppress(TimeoutError):
                        if not await asyncio.wait_for(reader.read(READ_BYTES), 1):
                            break
            finally:
                writer.transport.abort()
        await asyncio.sleep(PAUSE_S)


async def slow_http(node: Node) -> None:
    await many(200, lambda _: trickle(node.http_port, b"GET /livez HTTP/1.1\r\nX: "))


async def slow_frames(node: Node) -> None:
    text = struct.pack(">II", 1 << 20, 1 << 16) + b"{"
    await many(500, lambda _: trickle(node.broker_port, text))


async def connections(node: Node) -> None:
    """Up to 4,000 connections that say nothing; half of them come and go."""
    kept: list[asyncio.StreamWriter] = []

    async def attack(_number: int) -> None:
        for at in itertools.count():
            with contextlib.suppress(OSError):
                _, writer = await connect(node.broker_port)
                if at % 2 or len(kept) >= 2_000:
                    writer.transport.abort()
                else:
                    kept.append(writer)
            await asyncio.sleep(PAUSE_S)

    await many(50, attack)


async def inflate(node: Node) -> None:
    """Messages to the neighbour's topic that are 1,000 times larger when they are unpacked."""
    body = zlib.compress(bytes(60 << 20), 9)

    def sends() -> Iterator[bytes]:
        for number in range(64):
            fields = ["attack", TOPIC, "TBW102", "4", str(number % QUEUES), "1", "1", "0", "", "0"]
            ext = dict(zip("abcdefghij", fields, strict=True), k="false", m="false")
            yield request(310, ext, body)

    await pipelined(node.broker_port, sends(), at_once=4)


async def unread(node: Node) -> None:
    """Pulls of everything there is, whose answers nobody reads."""
    fields = ["attack", "Large", "TBW102", "4", "0", "0", "1", "0", "", "0"]
    ext = dict(zip("abcdefghij", fields, strict=True), k="false", m="false")
    await pipelined(
        node.broker_port, itertools.repeat(request(310, ext, bytes(4_000)), 2_000), at_once=50
    )
    pull = request(
        11,
        {
            "consumerGroup": "attack",
            "topic": "Large",
            "queueId": "0",
            "queueOffset": "0",
            "maxMsgNums": "1024",
            "sysFlag": "4",
            "commitOffset": "0",
            "suspendTimeoutMillis": "0",
            "subscription": "*",
            "subVersion": "0",
        },
    )
    asks = itertools.repeat(pull)
    await many(50, lambda _: pipelined(node.broker_port, asks, at_once=100, read=False))


ATTACKS: dict[str, Attack] = {
    "settings-pipelined": config,
    STOPPED: config_unread,
    "registration": registration,
    "header-bomb": headers,
    "dialect-bomb": dialect,
    "topic-flood": topics,
    "held-sql-pulls": sql,
    "offset-rows": offsets,
    "huge-statistics": statistics,
    "slow-http": slow_http,
    "slow-frames": slow_frames,
    "connection-flood": connections,
    "inflate-bomb": inflate,
    "unread-replies": unread,
}


async def run(name: str, node: Node) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(node.seconds):
            await ATTACKS[name](node)


if __name__ == "__main__":
    # It shares a core with the neighbour, who must not wait for a slice of time to end.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    asyncio.run(run(sys.argv[1], Node(**json.loads(sys.argv[2]))))
