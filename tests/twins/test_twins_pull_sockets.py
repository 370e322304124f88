"""Replies that leave straight from the log: what the peer gets is what the slow lane says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import select
import socket
import struct
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
from tests.twins import test_twins_lanes as lanes
from tests.twins import test_twins_pulls as plain
from tests.twins.test_twins_lanes import Side, Wire, codes_of, compare, frame
from tests.twins.test_twins_pulls import pull, send, set_option

from cosmodrome.speed import lane

if not lane.HAS_LANE:
    pytest.skip("pulls by plan are compiled only", allow_module_level=True)


class SocketWire(Wire):
    """Has a socket; what is written waits until `drain`, as for a peer that does not read."""

    def __init__(self, peer: tuple[str, int]) -> None:
        super().__init__(peer)
        # Its buffers take far more than those of a pair that is not TCP.
        with socket.create_server(("127.0.0.1", 0)) as door:
            self.far = socket.create_connection(door.getsockname())
            self.near, _ = door.accept()
        self.near.setblocking(False)
        self.far.setblocking(False)
        cast(Any, self)._extra["socket"] = self.near
        self.late = bytearray()
        self.late_bytes = 0  # of all that was written here

    @property
    def straight_bytes(self) -> int:
        return len(self.out) - self.late_bytes

    def write(self, data: Any) -> None:
        self.late += data
        self.late_bytes += len(data)

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def get_write_buffer_size(self) -> int:
        return len(self.late)

    def is_closing(self) -> bool:
        return self.ended

    def drain(self, all_bytes: int) -> None:
        """The peer reads everything."""
        while len(self.out) < all_bytes:
            ready, _, _ = select.select([self.far], [], [], 0 if self.late else 10)
            if ready:
                self.out += self.far.recv(1 << 20)
            elif self.late:
                with contextlib.suppress(BlockingIOError):
                    del self.late[: self.near.send(self.late)]
            else:
                raise AssertionError(f"{all_bytes - len(self.out)} bytes did not arrive")


class SocketSide(Side):
    """The fast side writes to a socket."""

    drains = True
    wire: Any

    async def __aenter__(self) -> Side:
        await super().__aenter__()
        if self.fast:
            self.wire = SocketWire(lanes.PEER)
            self.connection = self.broker._server._connection()
            self.connection.connection_made(self.wire)
        return self

    async def __aexit__(self, *_: object) -> None:
        await super().__aexit__()
        if self.fast:
            self.wire.near.close()
            self.wire.far.close()

    async def feed(self, data: bytes) -> None:
        await super().feed(data)
        if self.drains:
            self.drain()

    def drain(self) -> None:
        if self.fast:
            self.wire.drain(self.connection._written_bytes)


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "Side", SocketSide)


def group(side: Any) -> None:
    plain.consume_of(side)._groups.put(plain.GROUP)


def commit(opaque: int, offset: int) -> bytes:
    fields = {"consumerGroup": "group", "topic": "Plain", "queueId": 1, "commitOffset": offset}
    return frame(15, opaque, fields)


def to_queue(opaque: int, queue_id: int, body: bytes) -> bytes:
    return frame(310, opaque, lanes.send_fields(e=str(queue_id), i="TAGS\x01A"), body)


@pytest.mark.parametrize("seed", range(3))
async def test_pieces_and_copies_of_any_size(tmp_path: Path, seed: int) -> None:
    """Records next to each other and apart, small and large, in log files of 64 KiB.

    The store keeps one file open: whoever turns to another one loses the map of the last.
    """
    chance = random.Random(seed)
    sends = [
        to_queue(number, chance.choice((1, 1, 1, 2)), b"x" * chance.choice((10, 300, 2000, 9000)))
        for number in range(200)
    ]
    asks = [
        commit(1000 + number, number)
        if number % 5 == 0
        else pull(1000 + number, chance.randrange(140), maxMsgNums=4, suspendTimeoutMillis=0)
        for number in range(200)
    ]

    async def drive(side: Any) -> None:
        group(side)
        for at in range(0, 200, 20):
            await side.feed(b"".join(sends[at : at + 20]))
        log = side.store._log
        for file in log.take_dirty():
            file.sync()
        log.release(log.written_end)
        side.store._log_files._limit = 1
        for at in range(0, 200, 8):
            await side.feed(b"".join(asks[at : at + 8]))

    _, fast = await compare(tmp_path, drive)
    wire: Any = fast.wire
    assert wire.straight_bytes > 300_000


@pytest.mark.parametrize("room_bytes", [1, 20_000, 60_000])
async def test_a_socket_that_is_full(tmp_path: Path, room_bytes: int) -> None:
    """Wherever the kernel stops, the rest follows."""

    async def drive(side: Any) -> None:
        group(side)
        for number in range(60):
            await side.feed(send(number, body=bytes([number]) * 1500))
        await side.feed(pull(100) + pull(101))
        if side.fast:
            side.wire.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room_bytes)
        for first in range(200, 500, 50):
            side.drains = False
            for number in range(0, 12, 4):
                asks = [pull(first + number + n, 5 * n, maxMsgNums=9) for n in range(4)]
                await side.feed(b"".join(asks) + commit(first + 40 + number, 7))
            side.drain()
            side.drains = True
            await side.feed(pull(first + 49, 50, maxMsgNums=1))

    _, fast = await compare(tmp_path, drive, mapped_file_size_commit_log=1 << 20)
    wire: Any = fast.wire
    assert min(wire.straight_bytes, wire.late_bytes) > 5000


async def test_a_file_that_is_removed_after_its_pull(tmp_path: Path) -> None:
    async def drive(side: Any) -> None:
        group(side)
        for number in range(60):
            await side.feed(send(number, body=bytes([number]) * 1500))
        await side.feed(pull(100) + pull(101))
        if side.fast:
            side.wire.near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        side.drains = False
        await side.feed(b"".join(pull(200 + number, number) for number in range(6)))
        log = side.store._log
        path = Path(log.path_of(0))
        log.expire(0)
        with path.open("r+b") as file:  # as if the space were somebody else's by now
            file.write(bytes(path.stat().st_size))
        path.unlink()
        side.drain()

    slow, fast = await compare(tmp_path, drive)
    assert all(codes_of(slow)[200 + number] == 0 for number in range(6))
    wire: Any = fast.wire
    assert wire.late_bytes > 20_000 and wire.straight_bytes > 5000


async def test_more_pieces_than_the_kernel_takes(tmp_path: Path) -> None:
    async def drive(side: Any) -> None:
        group(side)
        for name in ("count_on_message_in_memory", "bytes_on_message_in_memory"):
            set_option(side, "max_transfer_" + name, 1 << 30)
        for number in range(1200):
            await side.feed(to_queue(2 * number, 1, b"x" * 500) + to_queue(2 * number + 1, 2, b""))
        await side.feed(pull(9000, maxMsgNums=1) + pull(9001, maxMsgNums=1))
        wanted = (600, 600, 1, 1023, 1, 1024, 1, 1200, 1)
        await side.feed(
            b"".join(
                pull(9100 + number, maxMsgNums=count, suspendTimeoutMillis=0)
                for number, count in enumerate(wanted)
            )
        )

    _, fast = await compare(tmp_path, drive, mapped_file_size_commit_log=4 << 20)
    wire: Any = fast.wire
    assert wire.straight_bytes > 700_000 and wire.late_bytes > 600_000


async def test_a_peer_that_is_gone(tmp_path: Path) -> None:
    side = SocketSide(tmp_path, lanes.env(0), fast=True)
    async with side:
        group(side)
        for number in range(9):
            await side.feed(send(number))
        await side.feed(pull(100) + pull(101))
        side.drains = False
        side.wire.far.close()
        await side.feed(pull(102))
        assert side.wire.late_bytes > 9 * 50, "the transport is the one to notice"
        side.wire.late.clear()
        side.connection.close("over")
        assert side.connection.free_fd() == -1


async def test_what_waits_to_be_written_comes_first(tmp_path: Path) -> None:
    side = SocketSide(tmp_path, lanes.env(0), fast=True)
    async with side:
        assert side.connection.free_fd() == side.wire.near.fileno()
        side.wire.late += b"x"
        assert side.connection.free_fd() == -1
        side.wire.late.clear()
        side.connection.pause_writing()
        assert side.connection.free_fd() == -1
        side.connection.resume_writing()
        assert side.connection.free_fd() >= 0
        side.wire.ended = True
        assert side.connection.free_fd() == -1
        side.wire.ended = False
        side.wire._extra["sslcontext"] = object()
        hidden = side.broker._server._connection()
        hidden.connection_made(side.wire)
        assert hidden.free_fd() == -1
        hidden.connection_lost(None)


# --- real sockets ------------------------------------------------------------------------------


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(scenario, 60))

    return run


def test_a_slow_reader_gets_everything_in_order(
    run: Callable[[Coroutine[Any, Any, None]], None], tmp_path: Path
) -> None:
    async def scenario() -> None:
        side = Side(tmp_path, lanes.env(0), fast=True, mapped_file_size_commit_log=1 << 20)
        async with side:
            group(side)
            for number in range(64):
                await side.feed(send(number, body=os.urandom(3000)))
            await side.feed(pull(100) + pull(101, 32))
            wanted = [_body(side.replies()[opaque]) for opaque in (100, 101)]
            assert all(len(body) > 32 * 3000 for body in wanted)
            loop = asyncio.get_running_loop()
            peer = socket.socket()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            peer.setblocking(False)
            await loop.sock_connect(peer, ("127.0.0.1", side.broker.port))
            asks = b"".join(pull(1000 + number, number % 2 * 32) for number in range(150))
            sending = asyncio.create_task(loop.sock_sendall(peer, asks))
            await asyncio.sleep(0.05)  # everything on the way is full
            got = bytearray()
            for number in range(150):
                while len(got) < 4 or len(got) < 4 + struct.unpack_from(">I", got)[0]:
                    got += await loop.sock_recv(peer, 1 << 18)
                size = 4 + struct.unpack_from(">I", got)[0]
                one = bytes(got[:size])
                assert _body(one) == wanted[number % 2], number
                assert opaque_of(one) == 1000 + number
                del got[:size]
            await sending
            peer.close()
            assert not got

    run(scenario())


def opaque_of(reply: bytes) -> int:
    if reply[4]:
        return int(struct.unpack_from(">i", reply, 13)[0])
    return int(json.loads(reply[8 : 8 + struct.unpack_from(">I", reply, 4)[0]])["opaque"])


def _body(reply: bytes) -> bytes:
    return reply[8 + (struct.unpack_from(">I", reply, 4)[0] & 0xFFFFFF) :]
