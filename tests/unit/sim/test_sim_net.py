"""The network in memory: order, time, limits and faults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cosmodrome.sim.loop import Stuck
from cosmodrome.sim.net import PIPE_BYTES, NetLoop


class End(asyncio.Protocol):
    """Remembers everything; a server's end answers with what it got."""

    def __init__(self, *, echo: bool = False) -> None:
        self.echo = echo
        self.got = b""
        self.lost = False
        self.eof = False
        self.paused = 0
        self.resumed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.got += data
        if self.echo:
            self.transport.write(data)

    def eof_received(self) -> None:
        self.eof = True

    def connection_lost(self, error: Exception | None) -> None:
        assert not self.lost
        self.lost = True

    def pause_writing(self) -> None:
        self.paused += 1

    def resume_writing(self) -> None:
        self.resumed += 1


class Buffered(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self.buffer = bytearray(7)
        self.got = b""

    def get_buffer(self, sizehint: int) -> bytearray:
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.got += self.buffer[:nbytes]


def run(scenario: Callable[[NetLoop], Awaitable[None]], latency_s: float = 0.01) -> float:
    loop = NetLoop(latency_s=latency_s)
    try:
        loop.run_until_complete(scenario(loop))
        return loop.time()
    finally:
        loop.close()


async def pair(loop: NetLoop, *, echo: bool = False) -> tuple[End, End]:
    ends: list[End] = []

    def serve() -> End:
        ends.append(End(echo=echo))
        return ends[-1]

    server = await loop.create_server(serve, "127.0.0.1", 0)
    assert server.is_serving()
    port = server.sockets[0].getsockname()[1]
    _, near = await loop.create_connection(End, "127.0.0.1", port)
    assert isinstance(near, End)
    far = ends[-1]
    assert near.transport.get_extra_info("peername") == ("127.0.0.1", port)
    assert far.transport.get_extra_info("peername") == near.transport.get_extra_info("sockname")
    return near, far


def test_bytes_keep_their_order_and_take_their_time() -> None:
    async def scenario(loop: NetLoop) -> None:
        near, far = await pair(loop, echo=True)
        began = loop.time()
        near.transport.writelines([b"a", b"b"])
        near.transport.write(b"c")
        await asyncio.sleep(0.005)
        assert far.got == b""
        while near.got != b"abc":
            await asyncio.sleep(0.001)
        assert far.got == b"abc"
        assert 0.019 < loop.time() - began < 0.03

    run(scenario)


def test_buffered_protocols_are_filled_piece_by_piece() -> None:
    async def scenario(loop: NetLoop) -> None:
        protocol = Buffered()
        await loop.create_server(lambda: protocol, None, 700)
        transport, _ = await loop.create_connection(End, "127.0.0.1", 700)
        transport.write(b"0123456789" * 3)
        await asyncio.sleep(1)
        assert protocol.got == b"0123456789" * 3

    run(scenario)


def test_a_reader_that_pauses_holds_up_the_writer() -> None:
    async def scenario(loop: NetLoop) -> None:
        near, far = await pair(loop)
        far.transport.pause_reading()
        assert not far.transport.is_reading()
        near.transport.set_write_buffer_limits(high=1000)
        for _ in range(10):
            near.transport.write(b"x" * (PIPE_BYTES // 4))
        await asyncio.sleep(1)
        assert far.got == b""
        assert near.paused == 1 and near.resumed == 0
        assert near.transport.get_write_buffer_size() == 6 * (PIPE_BYTES // 4)
        far.transport.resume_reading()
        await asyncio.sleep(1)
        assert len(far.got) == 10 * (PIPE_BYTES // 4)
        assert near.resumed == 1 and near.transport.get_write_buffer_size() == 0

    run(scenario)


def test_closing_delivers_what_was_written() -> None:
    async def scenario(loop: NetLoop) -> None:
        near, far = await pair(loop)
        near.transport.write(b"last words")
        near.transport.close()
        near.transport.write(b"too late")
        assert near.transport.is_closing()
        await asyncio.sleep(1)
        assert (far.got, far.eof, far.lost, near.lost) == (b"last words", True, True, True)
        near.transport.abort()  # nothing happens a second time

    run(scenario)


def test_a_cut_ends_both_sides_at_once() -> None:
    async def scenario(loop: NetLoop) -> None:
        near, far = await pair(loop)
        near.transport.write(b"lost")
        loop.cut(far.transport.get_extra_info("sockname")[1])
        await asyncio.sleep(1)
        assert near.lost and far.lost and far.got == b""

    run(scenario)


def test_a_silent_port_lets_nothing_through() -> None:
    async def scenario(loop: NetLoop) -> None:
        near, far = await pair(loop)
        port = far.transport.get_extra_info("sockname")[1]
        loop.silent.add(port)
        near.transport.write(b"x")
        far.transport.write(b"y")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await loop.create_connection(End, "127.0.0.1", port)
        assert (near.got, far.got) == (b"", b"")
        near.transport.abort()
        await asyncio.sleep(1)
        assert near.lost and not far.lost

    assert run(scenario) >= 60


def test_ports_are_taken_once_and_given_back() -> None:
    async def scenario(loop: NetLoop) -> None:
        server = await loop.create_server(End, None, 800)
        with pytest.raises(OSError, match="in use"):
            await loop.create_server(End, None, 800)
        server.close()
        await server.wait_closed()
        assert not server.is_serving()
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(End, "127.0.0.1", 800)
        with pytest.raises(ValueError, match="TLS"):
            await loop.create_server(End, None, 801, ssl=object())

    run(scenario)


def test_waiting_for_nothing_is_noticed() -> None:
    async def scenario(loop: NetLoop) -> None:
        await pair(loop)
        await loop.create_future()

    with pytest.raises(Stuck):
        run(scenario)
