"""The listening side: framing, limits, back-pressure, sniffing and stopping."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from tests.unit.transport.raw_peer import (
    HOST,
    Offsets,
    RawPeer,
    frame,
    max_offset,
    serving,
    until,
)

from cosmodrome.env.options import SocketOptions
from cosmodrome.errors import ConfigError
from cosmodrome.transport.router import LogLimit, Router
from cosmodrome.transport.server import Server
from cosmodrome.wire.commands import GetMaxOffset
from cosmodrome.wire.table import ANY_BODY, BROKER

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a scenario on each of the two event loops."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def run(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(asyncio.wait_for(scenario, 120))

    return run


def test_a_request_is_answered(run: Run) -> None:
    async def scenario() -> None:
        async with serving(Offsets()) as (server, port):
            peer = await RawPeer.connect(port)
            reply = await peer.ask(max_offset(5, queue_id=3))
            assert (reply["code"], reply["opaque"], reply["flag"]) == (0, 5, 1)
            assert reply["extFields"] == {"offset": "3"}
            assert reply["version"] == 409
            assert server.connections == 1
            await peer.close()
            await until(lambda: server.connections == 0)

    run(scenario())


def test_frames_byte_by_byte(run: Run) -> None:
    async def scenario() -> None:
        async with serving(Offsets()) as (_, port):
            peer = await RawPeer.connect(port)
            for byte in max_offset(1) + max_offset(2):
                peer.send(bytes([byte]))
                await asyncio.sleep(0)
            assert [(await peer.read())["opaque"] for _ in range(2)] == [1, 2]
            await peer.close()

    run(scenario())


def test_many_frames_in_one_write_are_answered_together(run: Run) -> None:
    async def scenario() -> None:
        async with serving(Offsets()) as (_, port):
            peer = await RawPeer.connect(port)
            peer.send(b"".join(max_offset(i, queue_id=i) for i in range(5000)))
            for i in range(5000):
                reply = await peer.read()
                assert (reply["opaque"], reply["extFields"]["offset"]) == (i, str(i))
            await peer.close()

    run(scenario())


def test_a_large_body_comes_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GetMaxOffset, "body_bytes_max", ANY_BODY)

    async def scenario() -> None:
        body = bytes(range(256)) * (4 * 4096)  # many reads, and more than one write takes
        async with serving(Offsets()) as (_, port):
            peer = await RawPeer.connect(port)
            reply = await peer.ask(frame(30, 1, {"topic": "T", "queueId": 1}, body))
            assert reply["body"] == body
            await peer.close()

    run(scenario())


@pytest.mark.parametrize("code", [30, 9999], ids=["known", "unknown"])
def test_a_body_that_is_too_long_is_refused_by_its_header(run: Run, code: int) -> None:
    async def scenario() -> None:
        async with serving(Offsets()) as (server, port):
            peer = await RawPeer.connect(port)
            long = frame(code, 2, {"topic": "T", "queueId": 1}, bytes(8 << 20))
            peer.send(max_offset(1) + long[: 1 << 20])
            assert (await peer.read())["opaque"] == 1
            refusal = await peer.read()
            assert (refusal["opaque"], refusal["code"]) == (2, 1 if code == 30 else 3)
            if code == 30:
                assert "a body of 8388608 bytes: at most 65536 are taken" in refusal["remark"]
            assert not any(connection._rest for connection in server._connections)
            peer.send(long[1 << 20 :] + max_offset(3) + max_offset(4))
            assert [(await peer.read())["opaque"] for _ in range(2)] == [3, 4]
            await peer.close()

    run(scenario())


def test_replies_overtake_each_other(run: Run) -> None:
    async def scenario() -> None:
        offsets = Offsets()
        async with serving(offsets) as (_, port):
            peer = await RawPeer.connect(port)
            peer.send(frame(31, 1, {"topic": "T", "queueId": "1"}))
            peer.send(frame(31, 2, {"topic": "T", "queueId": "2"}))
            peer.send(max_offset(3))
            assert (await peer.read())["opaque"] == 3
            offsets.gate(2).set_result(None)  # type: ignore[arg-type]
            assert (await peer.read())["opaque"] == 2
            offsets.gate(1).set_result(None)  # type: ignore[arg-type]
            assert (await peer.read())["opaque"] == 1
            await peer.close()

    run(scenario())


def test_one_way_requests_are_served_and_never_answered(run: Run) -> None:
    async def scenario() -> None:
        offsets = Offsets()
        async with serving(offsets) as (_, port):
            peer = await RawPeer.connect(port)
            commit = {"consumerGroup": "g", "topic": "T", "queueId": "0", "commitOffset": "9"}
            peer.send(frame(15, 1, commit, flag=2))
            peer.send(frame(15, 2, {}, flag=2))  # lacks its fields
            peer.send(frame(9999, 3, {}, flag=2))  # unknown
            assert (await peer.ask(max_offset(4)))["opaque"] == 4
            assert offsets.committed == [9]
            await peer.close()

    run(scenario())


def test_the_server_asks_its_client(run: Run) -> None:
    async def scenario() -> None:
        async with serving(Offsets()) as (_, port):
            peer = await RawPeer.connect(port)
            ask = {"consumerGroup": "g", "topic": "T", "queueId": "0"}
            peer.send(frame(14, 77, ask))
            push = await peer.read()
            assert (push["code"], push["flag"], push["extFields"]) == (
                40,
                2,
                {"consumerGroup": "g"},
            )
            question = await peer.read()
            assert (question["code"], question["flag"]) == (40, 0)
            assert question["opaque"] != 0
            peer.send(frame(0, question["opaque"], flag=1))
            answer = await peer.read()
            assert (answer["opaque"], answer["extFields"]) == (77, {"offset": "7"})
            await peer.close()

    run(scenario())


@pytest.mark.parametrize(
    "garbage",
    [
        struct.pack(">I", 16 * 1024 * 1024) + b"\x00",  # too long
        struct.pack(">I", 0),  # no room for the header length
        struct.pack(">II", 10, 100) + b"123456",  # header longer than the frame
        struct.pack(">II", 1 << 20, 65_537) + b"{",  # a header that nobody needs
        struct.pack(">II", 6, (7 << 24) | 2) + b"{}",  # unknown serialize type
        struct.pack(">II", 6, 2) + b"[]",  # header is no object
        b"\xff" * 64,
    ],
    ids=["oversize", "zero", "header-lies", "header-long", "serialize", "no-object", "noise"],
)
def test_broken_frames_close_only_their_connection(run: Run, garbage: bytes) -> None:
    async def scenario() -> None:
        async with serving(Offsets()) as (server, port):
            good, bad = await RawPeer.connect(port), await RawPeer.connect(port)
            bad.send(garbage)
            assert await bad.ended() == b""
            assert (await good.ask(max_offset(1)))["code"] == 0
            await until(lambda: server.connections == 1)
            await good.close()
            await bad.close()

    run(scenario())


def test_strangers_are_told(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "cosmodrome")

    async def talk(port: int, *pieces: bytes) -> bytes:
        peer = await RawPeer.connect(port)
        for piece in pieces:
            peer.send(piece)
            await asyncio.sleep(0.01)
        words = await peer.ended()
        await peer.close()
        return words

    async def scenario() -> None:
        async with serving(Offsets(), hint="Health is on port 8080.") as (server, port):
            server.log_limit = LogLimit(3600.0)
            assert await talk(port, b"\x16\x03\x01\x02\x00\x01") == b""
            assert await talk(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") == b""
            for pieces in ([b"GET / HTTP/1.1\r\n\r\n"], [b"G", b"ET / HTTP/1.1\r\n\r\n"]):
                words = await talk(port, *pieces)
                assert words.startswith(b"HTTP/1.1 400 ")
                assert words.endswith(b"\r\n\r\nHealth is on port 8080.\n")
            await until(lambda: server.connections == 0)

    run(scenario())
    text = caplog.text
    assert text.count("this server has no certificate for TLS") == 1
    assert text.count("gRPC") == 1
    assert text.count("HTTP request") == 1  # the second one within the hour is held back


def test_in_flight_requests_are_bounded(run: Run) -> None:
    async def scenario() -> None:
        offsets = Offsets()
        options = SocketOptions(server_requests_in_flight_max=8)
        async with serving(offsets, options) as (_, port):
            peer = await RawPeer.connect(port)
            for i in range(30):
                peer.send(frame(31, i, {"topic": "T", "queueId": str(i)}))
                await asyncio.sleep(0.005)  # one read each
            await until(lambda: offsets.running == 8)
            await asyncio.sleep(0.05)
            assert offsets.running_peak == 8
            answered = set()
            for i in range(4):
                offsets.gate(i).set_result(None)  # type: ignore[arg-type]
                answered.add((await peer.read())["opaque"])
            await until(lambda: offsets.running > 4)  # reading again
            for i in range(4, 30):
                offsets.gate(i).set_result(None)  # type: ignore[arg-type]
                answered.add((await peer.read())["opaque"])
            assert answered == set(range(30))
            await peer.close()

    run(scenario())


def test_a_peer_that_never_reads_is_held_and_then_closed(run: Run) -> None:
    async def scenario() -> None:
        options = SocketOptions(server_channel_max_idle_time_seconds=1)
        async with serving(Offsets(), options) as (server, port):
            loop = asyncio.get_running_loop()
            raw = socket.create_connection((HOST, port))
            raw.setblocking(False)
            ask = frame(30, 1, {"topic": "T", "queueId": "1"}, bytes(1024 * 1024))
            sent = 0
            try:
                async with asyncio.timeout(60):
                    while server.connections or not sent:
                        try:
                            async with asyncio.timeout(0.2):
                                await loop.sock_sendall(raw, ask)
                                sent += len(ask)
                        except TimeoutError:
                            break
                    await until(lambda: server.connections == 0)
            except OSError:
                await until(lambda: server.connections == 0)
            finally:
                raw.close()
            assert sent < 64 * 1024 * 1024  # reading paused long before
            other = await RawPeer.connect(port)
            assert (await other.ask(max_offset(1)))["code"] == 0
            await other.close()

    run(scenario())


def test_idle_and_half_frames_are_closed(run: Run) -> None:
    async def scenario() -> None:
        options = SocketOptions(server_channel_max_idle_time_seconds=1)
        async with serving(Offsets(), options) as (server, port):
            idle, half = [await RawPeer.connect(port) for _ in range(2)]
            half.send(max_offset(1)[:20])
            await asyncio.gather(idle.ended(), half.ended())
            assert server.connections == 0
            for peer in (idle, half):
                await peer.close()

    run(scenario())


class AheadLoop(asyncio.SelectorEventLoop):
    """A loop whose clock the test moves on; sockets work as usual."""

    ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self.ahead_s


def test_whoever_asks_now_and_then_is_not_idle() -> None:
    loop = AheadLoop()

    async def scenario() -> None:
        options = SocketOptions(server_channel_max_idle_time_seconds=1000)
        async with serving(Offsets(), options) as (server, port):
            idle, busy = [await RawPeer.connect(port) for _ in range(2)]
            for i in range(6):
                loop.ahead_s += 300
                await asyncio.sleep(0.01)  # the timers that are due run
                assert (await busy.ask(max_offset(i)))["code"] == 0
            assert await idle.ended() == b""
            assert server.connections == 1
            for peer in (idle, busy):
                await peer.close()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scenario())


def test_a_half_frame_is_closed_although_we_keep_writing() -> None:
    from cosmodrome.wire.commands import GetMaxOffset, NotifyConsumerIdsChanged, OffsetReply
    from cosmodrome.wire.table import Call

    class Pusher:
        @GetMaxOffset.handler
        def max_offset(self, ask: GetMaxOffset, call: Call) -> OffsetReply:
            async def keep_pushing() -> None:
                while not call.connection.closed:
                    call.connection.push(NotifyConsumerIdsChanged(consumer_group="g"))
                    await asyncio.sleep(0.1)

            self.task = asyncio.create_task(keep_pushing())
            return OffsetReply(offset=0)

    async def scenario() -> None:
        options = SocketOptions(server_channel_max_idle_time_seconds=1)
        async with serving(Pusher(), options) as (server, port):
            peer = await RawPeer.connect(port)
            peer.send(max_offset(1) + b"\x00\x00")
            await peer.ended()
            await until(lambda: server.connections == 0)
            await peer.close()

    asyncio.run(scenario())


def test_connections_are_bounded(run: Run) -> None:
    async def scenario() -> None:
        options = SocketOptions(server_connections_max=2)
        async with serving(Offsets(), options) as (server, port):
            kept = [await RawPeer.connect(port) for _ in range(2)]
            for peer in kept:
                assert (await peer.ask(max_offset(1)))["code"] == 0
            extra = await RawPeer.connect(port)
            assert await extra.ended() == b""
            assert server.connections == 2
            await extra.close()
            await kept[0].close()
            await until(lambda: server.connections == 1)
            again = await RawPeer.connect(port)
            assert (await again.ask(max_offset(2)))["code"] == 0
            await again.close()
            await kept[1].close()

    run(scenario())


def test_idle_and_slow_crowds_do_not_stall_others(run: Run) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        options = SocketOptions(server_socket_backlog=2048)
        async with serving(Offsets(), options) as (server, port):
            crowd: list[socket.socket] = []
            try:
                for _ in range(1100):
                    raw = socket.socket()
                    raw.setblocking(False)
                    crowd.append(raw)
                    await loop.sock_connect(raw, (HOST, port))
                slow = crowd[1000:]
                dribble = max_offset(1)
                peer = await RawPeer.connect(port)
                await until(lambda: server.connections == 1101)
                for byte in dribble:
                    for raw in slow:
                        raw.send(bytes([byte]))
                    assert (await peer.ask(max_offset(2)))["code"] == 0
                for raw in slow:
                    assert await asyncio.wait_for(loop.sock_recv(raw, 4096), 60)
                await peer.close()
            finally:
                for raw in crowd:
                    raw.close()
            await until(lambda: server.connections == 0)

    run(scenario())


def test_stop_lets_requests_finish(run: Run) -> None:
    async def scenario() -> None:
        offsets = Offsets()
        server = Server(Router(BROKER, [offsets], partial=True), SocketOptions(), "broker")
        port = await server.listen(HOST, 0)
        peer = await RawPeer.connect(port)
        peer.send(frame(31, 1, {"topic": "T", "queueId": "1"}))
        await until(lambda: offsets.running == 1)
        stopping = asyncio.create_task(server.stop(grace_ms=60_000))
        await asyncio.sleep(0.01)
        late = await peer.ask(max_offset(2))
        assert (late["code"], late["opaque"]) == (14, 2)
        assert "stopping" in late["remark"]
        assert not stopping.done()
        offsets.gate(1).set_result(None)  # type: ignore[arg-type]
        assert (await peer.read())["opaque"] == 1
        assert await peer.ended() == b""
        await stopping
        assert server.connections == 0
        with pytest.raises(OSError):
            await RawPeer.connect(port)
        await server.stop()
        await peer.close()

    run(scenario())


def test_stop_cancels_what_outlives_the_grace(run: Run) -> None:
    async def scenario() -> None:
        offsets = Offsets()
        server = Server(Router(BROKER, [offsets], partial=True), SocketOptions(), "broker")
        peer = await RawPeer.connect(await server.listen(HOST, 0))
        peer.send(frame(31, 1, {"topic": "T", "queueId": "1"}))
        await until(lambda: offsets.running == 1)
        await server.stop(grace_ms=50)
        assert offsets.running == 0
        assert await peer.ended() == b""
        await peer.close()

    run(scenario())


def test_two_ports_share_one_server(run: Run) -> None:
    async def scenario() -> None:
        async with serving(Offsets()) as (server, port):
            vip = await server.listen(HOST, 0)
            assert vip != port
            for each in (port, vip):
                peer = await RawPeer.connect(each)
                assert (await peer.ask(max_offset(1)))["code"] == 0
                await peer.close()

    run(scenario())


async def test_a_taken_port_says_so() -> None:
    async with serving(Offsets()) as (server, port):
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port}: .*another"):
            await server.listen(HOST, port)
