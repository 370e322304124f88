"""Peers that send too much or too slowly, or read nothing: the node stays small and serves on."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.errors import Code, Refused
from cosmodrome.transport.channel import Channel
from cosmodrome.wire import commands

HOST = "127.0.0.1"
NODE = Path(__file__).with_name("flood_node.py")
MIB = 1 << 20
# Far above what a busy machine needs; a node that is stuck does not answer at all.
ANSWER_SECONDS_MAX = 30.0
SEND = {"a": "p", "b": "T", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0"}
PULL = {
    "consumerGroup": "g",
    "topic": "T",
    "queueId": "0",
    "queueOffset": "0",
    "maxMsgNums": "32",
    "sysFlag": "4",
    "commitOffset": "0",
    "suspendTimeoutMillis": "0",
    "subscription": "*",
    "subVersion": "1",
}

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from /proc"
)


def frame(code: int, opaque: int, ext: dict[str, str], body: bytes = b"") -> bytes:
    header = json.dumps(
        {"code": code, "language": "JAVA", "version": 409, "opaque": opaque, "extFields": ext}
    ).encode()
    return struct.pack(">II", 4 + len(header) + len(body), len(header)) + header + body


class Node:
    def __init__(
        self, folder: Path, *, sync_delay_ms: int = 0, idle_s: int = 60, held_mib: int = 512
    ) -> None:
        self.errors = folder / "stderr"
        self._stderr = self.errors.open("wb")
        words = (str(folder / "store"), str(sync_delay_ms), str(idle_s), str(held_mib))
        self.child = subprocess.Popen(
            [sys.executable, str(NODE), *words],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        assert self.child.stdout is not None
        self.port = int(self.child.stdout.readline())
        self.before_mib = self.anonymous_mib()
        self.peak_mib = self.before_mib

    def anonymous_mib(self) -> float:
        """Memory of its own: mapped files do not count, the kernel takes those back."""
        text = Path(f"/proc/{self.child.pid}/status").read_text()
        return int(re.findall(r"RssAnon:\s+(\d+)", text)[0]) / 1024

    def grown_mib(self) -> float:
        self.peak_mib = max(self.peak_mib, self.anonymous_mib())
        return self.peak_mib - self.before_mib

    def log(self) -> str:
        return self.errors.read_text()

    def end(self) -> None:
        self.child.kill()
        self.child.communicate()
        self._stderr.close()


@contextlib.contextmanager
def node(folder: Path, **changes: int) -> Iterator[Node]:
    running = Node(folder, **changes)
    try:
        yield running
    finally:
        running.end()


class Client:
    """A well-behaved client; it notes how long answers took and what was refused."""

    def __init__(self, port: int) -> None:
        self._channel = Channel(HOST, port)
        self.longest_s = 0.0
        self.refusals: list[Refused] = []
        self.sent = 0

    async def close(self) -> None:
        await self._channel.close()

    async def ask(self) -> None:
        began = time.monotonic()
        with contextlib.suppress(Refused):  # before the first message the queue is unknown
            await self._channel.call(commands.GetMaxOffset(topic="TBW102", queue_id=0), 60_000)
        self.longest_s = max(self.longest_s, time.monotonic() - began)

    async def send(self, body: bytes = b"x", topic: str = "Other") -> None:
        began = time.monotonic()
        try:
            await self._channel.call(
                commands.SendMessageV2(
                    producer_group="p",
                    topic=topic,
                    default_topic="TBW102",
                    default_topic_queue_nums=4,
                    queue_id=0,
                    sys_flag=0,
                    born_timestamp=1,
                    flag=0,
                    body=body,
                ),
                60_000,
            )
            self.sent += 1
        except Refused as refused:
            self.refusals.append(refused)
        self.longest_s = max(self.longest_s, time.monotonic() - began)


@contextlib.asynccontextmanager
async def client(port: int) -> AsyncIterator[Client]:
    one = Client(port)
    try:
        yield one
    finally:
        await one.close()


@contextlib.asynccontextmanager
async def peers(count: int, port: int, work: Any) -> AsyncIterator[list[asyncio.Task[None]]]:
    """`count` connections, each driven by `work(reader, writer)` until the block ends."""

    async def one() -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await work(reader, writer)
        finally:
            writer.transport.abort()

    tasks = [asyncio.create_task(one()) for _ in range(count)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    data = b"".join(frame(310, opaque, SEND, bytes(65_536)) for opaque in range(1, 9))
    # The reader's own buffer takes 128 KiB of answers and then stops, too.
    while True:
        writer.write(data)
        await writer.drain()


async def until(running: Node, seconds: float, work: Any) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        await work()
        running.grown_mib()
        await asyncio.sleep(0.02)


async def test_a_flood_of_sends_nobody_reads_the_answers_of(tmp_path: Path) -> None:
    with node(tmp_path) as running:
        async with client(running.port) as other, peers(24, running.port, flood):
            await until(running, 1.5, other.ask)
            await until(running, 0.5, other.send)
        assert other.longest_s < ANSWER_SECONDS_MAX
        assert other.sent > 0
        assert running.grown_mib() < 100


BYTES_WAIT = re.compile(r"\d+ bytes wait for the disk")  # what is full, and by how much


async def test_a_flood_while_the_disk_is_slow(tmp_path: Path) -> None:
    with node(tmp_path, sync_delay_ms=2500) as running:
        codes: set[int] = set()
        refusals: set[str] = set()

        async def flood_and_read(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            sender = asyncio.create_task(flood(reader, writer))
            try:
                while True:
                    (length,) = struct.unpack(">I", await reader.readexactly(4))
                    data = await reader.readexactly(length)
                    header = json.loads(data[4:])
                    codes.add(header["code"])
                    if header["code"] == Code.SYSTEM_BUSY:
                        refusals.add(header["remark"])
            finally:
                sender.cancel()

        async with (
            client(running.port) as other,
            peers(20, running.port, flood),
            peers(4, running.port, flood_and_read),
        ):
            async with asyncio.timeout(90):
                # Other things may be full first, such as the next file that is still being made.
                while not any(BYTES_WAIT.search(refusal) for refusal in refusals):
                    await until(running, 0.1, other.ask)
            await until(running, 1, other.ask)
        assert other.longest_s < ANSWER_SECONDS_MAX
        assert running.grown_mib() < 100
        assert codes <= {Code.SUCCESS, Code.SYSTEM_BUSY, Code.FLUSH_DISK_TIMEOUT}


async def test_consumers_that_do_not_read_do_not_hurt_producers(tmp_path: Path) -> None:
    with node(tmp_path, idle_s=1) as running:
        async with client(running.port) as producer:
            for _ in range(64):
                await producer.send(bytes(65_536), "T")
            await until(running, 0.5, producer.send)
            alone_s, producer.longest_s = producer.longest_s, 0.0

            async def pull_only(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                data = b"".join(frame(11, opaque, PULL) for opaque in range(1, 65))
                for _number in range(10_000):
                    writer.write(data)
                    await writer.drain()

            async with peers(24, running.port, pull_only):
                await until(running, 2.5, producer.send)
            assert producer.refusals == []
            assert producer.longest_s < ANSWER_SECONDS_MAX + alone_s
            assert running.grown_mib() < 250
            assert "the peer does not read its replies" in running.log()


async def test_requests_that_wait_too_long_are_answered_busy(tmp_path: Path) -> None:
    """A loop that is late for its turns refuses sends instead of letting them pile up."""
    from cosmodrome.broker.app import build_broker
    from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
    from cosmodrome.env.real import real_env

    broker = build_broker(
        BrokerOptions(broker_name="late", listen_port=0, wait_time_mills_in_send_queue=20),
        StoreOptions(store_path_root_dir=str(tmp_path), mapped_file_size_commit_log=MIB),
        SocketOptions(),
        real_env(),
    )
    await broker.start()
    loop = asyncio.get_running_loop()
    blocking = True

    def block() -> None:
        if blocking:
            time.sleep(0.15)
            loop.call_later(0.001, block)

    try:
        async with client(broker.port) as one:
            await one.send()
            assert one.sent == 1
            block()
            async with asyncio.timeout(60):
                while not one.refusals:
                    await one.send()
            assert one.refusals[0].code == Code.SYSTEM_BUSY
            assert re.search(
                r"requests wait \d+ ms .* waitTimeMillsInSendQueue \(20 ms\)",
                one.refusals[0].remark,
            )
            blocking = False
            async with asyncio.timeout(60):
                sent = one.sent
                while one.sent == sent:
                    await one.send()
                    await asyncio.sleep(0.05)
    finally:
        blocking = False
        await broker.stop()


async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    for byte in itertools.cycle(frame(30, 1, {"topic": "T", "queueId": "0"}, bytes(1000))):
        writer.write(bytes([byte]))
        await asyncio.sleep(1)


async def test_slow_writers_hold_up_nobody(tmp_path: Path) -> None:
    with node(tmp_path) as running:
        async with client(running.port) as other, peers(200, running.port, drip):
            await until(running, 2, other.send)
        assert other.refusals == []
        assert other.longest_s < ANSWER_SECONDS_MAX
        assert running.grown_mib() < 60


async def test_half_frames_do_not_fill_the_memory(tmp_path: Path) -> None:
    """Each of them may be 16 MiB; together they may hold `serverHeldBytesMax`."""

    async def nearly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack(">I", 16 * MIB - 4) + bytes(16 * MIB - 100))
        await reader.read()

    with node(tmp_path, held_mib=64) as running:
        async with client(running.port) as other, peers(16, running.port, nearly) as tasks:
            async with asyncio.timeout(60):
                while not any(task.done() for task in tasks):
                    await other.ask()
                    running.grown_mib()
                    await asyncio.sleep(0.02)
            await until(running, 0.5, other.send)
        assert other.sent > 0
        assert running.grown_mib() < 64 + 80
        assert "serverHeldBytesMax" in running.log()


async def read_all(port: int, data: bytes, seconds: float) -> bytes:
    """What a connection answers to `data` until it is closed or quiet that long."""
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(data)
        answer = b""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(seconds):
                await writer.drain()
                while piece := await reader.read(65_536):
                    answer += piece
                    if b'"opaque":5' in answer:
                        break
        return answer
    finally:
        writer.transport.abort()


def properties(count: int) -> str:
    return "\x02".join(f"p{number}\x01v" for number in range(count))


# Nobody reads these, so nobody knows which request they are: the connection ends.
ENDED = {"too many properties"}
BROKEN = {
    "16 MiB and one": struct.pack(">I", 16 * MIB + 1) + bytes(100),
    "negative length": struct.pack(">i", -1) + bytes(100),
    "header beyond the frame": struct.pack(">II", 100, 200) + bytes(96),
    "nothing in it": struct.pack(">I", 0),
    "no header": struct.pack(">II", 4, 0),
    "deep header": struct.pack(">II", 100_004, 100_000) + b"[" * 100_000,
    "large numbers": frame(30, 5, {"topic": "T", "queueId": "9" * 5000}),
    "very many messages": frame(11, 5, {**PULL, "maxMsgNums": "2147483647"}),
    "an offset beyond everything": frame(11, 5, {**PULL, "queueOffset": str(2**63 - 1)}),
    "a negative count": frame(11, 5, {**PULL, "maxMsgNums": "-2147483648"}),
    "many properties": frame(310, 5, {**SEND, "i": properties(3000)}, b"x"),
    "too many properties": frame(310, 5, {**SEND, "i": properties(200_000)}, b"x"),
    "a deep expression": frame(
        11, 5, {**PULL, "expressionType": "SQL92", "subscription": "(" * 50_000}
    ),
    "a bomb as body": frame(310, 5, {**SEND, "f": "1"}, zlib.compress(bytes(64 * MIB), 9)),
    "a bomb as heartbeat": frame(34, 5, {"compressed": "true"}, zlib.compress(bytes(64 * MIB), 9)),
}


async def test_broken_and_greedy_requests_leave_the_node_alone(tmp_path: Path) -> None:
    with node(tmp_path) as running:
        async with client(running.port) as other:
            for _ in range(3):
                await other.send(bytes(1000), "T")
            for name, data in BROKEN.items():
                answered = b'"opaque": 5' in data and name not in ENDED
                answer = await read_all(running.port, data, 60 if answered else 3)
                if answered:
                    assert b'"opaque":5' in answer, f"{name}: {answer[:200]!r}"
                await other.send()
                running.grown_mib()
        assert other.refusals == []
        assert other.longest_s < ANSWER_SECONDS_MAX
        assert running.grown_mib() < 150
        assert running.child.poll() is None
        assert "Traceback" not in running.log()
