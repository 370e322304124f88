"""The calling side: typed calls, time limits, broken connections, requests of the peer."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop
from tests.unit.transport.raw_peer import HOST, Offsets, frame, serving, until

from cosmodrome.env.options import SocketOptions
from cosmodrome.errors import Refused, TimedOut, Unreachable
from cosmodrome.transport.channel import Channel
from cosmodrome.transport.ports import free_base_port
from cosmodrome.transport.router import Router
from cosmodrome.transport.server import Server
from cosmodrome.wire.commands import (
    GetMaxOffset,
    GetMinOffset,
    NotifyConsumerIdsChanged,
    QueryConsumerOffset,
    SearchOffsetByTimestamp,
    UpdateConsumerOffset,
)
from cosmodrome.wire.table import BROKER, CLIENT, Call, Reply


@asynccontextmanager
async def channel(port: int, **options: object) -> AsyncIterator[Channel]:
    made = Channel(HOST, port, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def listening(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    server = await asyncio.start_server(talk, HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack(">I", await reader.readexactly(4))
    return await reader.readexactly(length)


class Consumer:
    def __init__(self) -> None:
        self.groups: list[str] = []

    @NotifyConsumerIdsChanged.handler
    def changed(self, ask: NotifyConsumerIdsChanged, call: Call) -> Reply:
        self.groups.append(ask.consumer_group)
        return Reply()


async def test_typed_calls_share_one_connection() -> None:
    async with serving(Offsets()) as (server, port), channel(port) as peer:
        replies = await asyncio.gather(
            *(peer.call(GetMaxOffset(topic="T", queue_id=i)) for i in range(50))
        )
        assert [reply.offset for reply in replies] == list(range(50))
        assert server.connections == 1


def test_typed_calls_on_uvloop() -> None:
    async def scenario() -> None:
        async with serving(Offsets()) as (_, port), channel(port) as peer:
            assert (await peer.call(GetMaxOffset(topic="T", queue_id=3))).offset == 3

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


async def test_a_refusal_carries_code_and_remark() -> None:
    async with serving(Offsets()) as (_, port), channel(port) as peer:
        with pytest.raises(Refused) as raised:
            await peer.call(SearchOffsetByTimestamp(topic="T", queue_id=0, timestamp=1))
        assert raised.value.code == 3
        assert "SEARCH_OFFSET_BY_TIMESTAMP" in raised.value.remark


async def test_the_peer_may_ask_back() -> None:
    consumer = Consumer()
    router = Router(CLIENT, [consumer], partial=True)
    async with serving(Offsets()) as (_, port), channel(port, router=router) as peer:
        query = QueryConsumerOffset(consumer_group="g", topic="T", queue_id=0)
        assert (await peer.call(query)).offset == 7
        assert consumer.groups == ["g", "g"]


async def test_without_router_the_peer_is_refused() -> None:
    async with serving(Offsets()) as (_, port), channel(port) as peer:
        with pytest.raises(Refused) as raised:
            await peer.call(QueryConsumerOffset(consumer_group="g", topic="T", queue_id=0))
        assert "NOTIFY_CONSUMER_IDS_CHANGED" in raised.value.remark


async def test_a_silent_peer_times_out_and_a_late_answer_is_dropped() -> None:
    offsets = Offsets()
    async with serving(offsets) as (_, port), channel(port) as peer:
        with pytest.raises(TimedOut, match=r"did not answer GET_MIN_OFFSET \(31\) within 50 ms"):
            await peer.call(GetMinOffset(topic="T", queue_id=1), timeout_ms=50)
        offsets.gate(1).set_result(Reply())
        assert (await peer.call(GetMaxOffset(topic="T", queue_id=2))).offset == 2


async def test_a_break_fails_what_is_out_and_the_next_call_connects_again() -> None:
    conversations = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal conversations
        conversations += 1
        await read_frame(reader)
        if conversations > 1:
            writer.write(frame(0, 1, {"offset": "5"}, flag=1))
            await writer.drain()
            await reader.read()
        writer.close()

    async with listening(talk) as port, channel(port) as peer:
        ask = GetMaxOffset(topic="T", queue_id=0)
        with pytest.raises(Unreachable, match="broke"):
            await peer.call(ask)
        assert not peer.connected
        assert (await peer.call(ask)).offset == 5
        assert conversations == 2


async def test_nobody_there_says_so_and_backs_off() -> None:
    port = free_base_port(HOST)
    loop = asyncio.get_running_loop()
    async with channel(port) as peer:
        ask = GetMaxOffset(topic="T", queue_id=0)
        outcomes = await asyncio.gather(*(peer.call(ask) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(outcome, Unreachable) for outcome in outcomes)
        assert f"{HOST}:{port}" in str(outcomes[0])
        began = loop.time()
        with pytest.raises(Unreachable):
            await peer.call(ask)
        assert loop.time() - began >= 0.03  # waited before the second attempt
        with pytest.raises(Unreachable, match="within 10 ms"):
            await peer.call(ask, timeout_ms=10)
        # It comes back as soon as somebody listens.
        server = Server(Router(BROKER, [Offsets()], partial=True), SocketOptions(), "broker")
        await server.listen(HOST, port)
        assert (await peer.call(ask)).offset == 0
        await peer.close()
        await server.stop()


async def test_one_way_requests() -> None:
    offsets = Offsets()
    async with serving(offsets) as (_, port), channel(port) as peer:
        commit = UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=5)
        assert not peer.push(commit)  # nothing is connected yet
        await peer.notify(commit)
        assert peer.push(commit)
        await until(lambda: offsets.committed == [5, 5])
    with pytest.raises(Unreachable, match="was closed"):
        await peer.notify(commit)
    assert not peer.push(commit)


async def test_calls_in_flight_are_bounded() -> None:
    offsets = Offsets()
    async with serving(offsets) as (_, port), channel(port, in_flight_max=3) as peer:
        calls = [
            asyncio.create_task(peer.call(GetMinOffset(topic="T", queue_id=i))) for i in range(6)
        ]
        await until(lambda: offsets.running == 3)
        await asyncio.sleep(0.02)
        assert offsets.running_peak == 3
        for i in range(6):
            offsets.gate(i).set_result(Reply())
        assert [reply.offset for reply in await asyncio.gather(*calls)] == list(range(6))


async def test_close_fails_what_is_out() -> None:
    async with serving(Offsets()) as (server, port):
        peer = Channel(HOST, port)
        out = asyncio.create_task(peer.call(GetMinOffset(topic="T", queue_id=1)))
        await until(lambda: peer.connected)
        await asyncio.sleep(0.01)
        await peer.close()
        with pytest.raises(Unreachable):
            await out
        await peer.close()
        await until(lambda: server.connections == 0)
        with pytest.raises(Unreachable, match="was closed"):
            await peer.call(GetMaxOffset(topic="T", queue_id=0))


async def test_cancelling_a_call_leaves_the_channel_usable() -> None:
    async with serving(Offsets()) as (_, port), channel(port) as peer:
        out = asyncio.create_task(peer.call(GetMinOffset(topic="T", queue_id=1)))
        await until(lambda: peer.connected)
        out.cancel()
        with pytest.raises(asyncio.CancelledError):
            await out
        assert (await peer.call(GetMaxOffset(topic="T", queue_id=2))).offset == 2


async def test_a_peer_that_is_no_broker_is_named() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()

    async with listening(talk) as port, channel(port) as peer:
        with pytest.raises(Unreachable, match="broken frame"):
            await peer.call(GetMaxOffset(topic="T", queue_id=0))


async def test_a_request_begun_on_the_live_connection_settles_its_waiter() -> None:
    async with serving(Offsets()) as (_, port), channel(port) as peer:
        assert peer.live is None
        await peer.connect()
        connection = peer.live
        assert connection is not None and not connection.congested
        answered = asyncio.get_running_loop().create_future()
        begun = {"topic": "T", "queueId": "5"}
        opaque = connection.begin(GetMaxOffset.request_code, begun, b"", answered)
        assert opaque > 0
        assert (await answered).ext["offset"] == "5"
        withdrawn = asyncio.get_running_loop().create_future()
        connection.forget(connection.begin(GetMaxOffset.request_code, begun, b"", withdrawn))
        assert (await peer.call(GetMaxOffset(topic="T", queue_id=6))).offset == 6
        assert not withdrawn.done()
    assert peer.live is None


async def test_answers_are_read_while_the_peer_takes_nothing() -> None:
    # Both sides would wait for the other to read, until the connection is idle for too long.
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await read_frame(reader)
        asked.set()
        for opaque in (1, 2):
            await go_on.wait()
            go_on.clear()
            writer.write(frame(0, opaque, {"offset": "7"}, flag=1))
        await go_on.wait()
        writer.transport.abort()
        writer.close()

    async with listening(talk) as port, channel(port) as peer:
        await peer.connect()
        connection = peer.live
        assert connection is not None
        fields = {"topic": "T", "queueId": "0"}
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in range(2)]
        for answer in answers:
            connection.begin(GetMaxOffset.request_code, fields, b"", answer)
        await asked.wait()
        unread = loop.create_future()
        while not connection.congested:
            connection.begin(GetMaxOffset.request_code, fields, bytes(1 << 20), unread)
            await asyncio.sleep(0)
        for answer in answers:
            go_on.set()
            async with asyncio.timeout(60):
                assert (await answer).ext["offset"] == "7"
        assert connection.congested
        go_on.set()
        with pytest.raises(Unreachable):
            await unread


def test_an_answer_that_came_while_the_process_stood_still_counts() -> None:
    listener = socket.create_server((HOST, 0))
    asked, standing_still, answered = (threading.Event() for _ in range(3))

    def answer() -> None:
        peer, _ = listener.accept()
        with peer, peer.makefile("rb") as stream:
            (length,) = struct.unpack(">I", stream.read(4))
            stream.read(length)
            asked.set()
            assert standing_still.wait(60)
            peer.sendall(frame(0, 1, {"offset": "9"}, flag=1))
            answered.set()
            stream.read()

    async def scenario() -> int:
        loop = asyncio.get_running_loop()
        async with channel(listener.getsockname()[1]) as peer:
            await peer.connect()
            hears, ring = socket.socketpair()
            due = time.monotonic() + 2

            def stand_still() -> None:
                hears.recv(1)
                standing_still.set()
                assert answered.wait(60)
                time.sleep(max(0.0, due - time.monotonic()) + 0.5)

            with hears, ring:
                loop.add_reader(hears, stand_still)
                ask = GetMaxOffset(topic="T", queue_id=0)
                call = asyncio.create_task(peer.call(ask, timeout_ms=2_000))
                while not asked.is_set():
                    await asyncio.sleep(0.001)
                ring.send(b"x")
                offset = (await call).offset
                loop.remove_reader(hears)
                return offset

    with listener:
        thread = threading.Thread(target=answer)
        thread.start()
        assert uvloop.run(scenario()) == 9  # timers run before sockets are looked at again
        thread.join(60)
