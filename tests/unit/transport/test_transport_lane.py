"""A connection that offers its reads to a lane: order, half frames, limits, writing."""

from __future__ import annotations

import asyncio
import struct
import tracemalloc

import pytest
from tests.unit.transport.raw_peer import Offsets, frame, max_offset
from tests.unit.transport.test_transport_connection import (
    Owner,
    RecordingTransport,
    feed,
    opaques,
)

from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.peers import Limits
from cosmodrome.transport.router import Router
from cosmodrome.wire.frame import Frame, decode, encode
from cosmodrome.wire.table import BROKER

TAKEN = 777


class FakeLane:
    """Takes requests of one code; `later` holds back the answers."""

    def __init__(self, *, later: bool = False, reply_bytes: int = 0) -> None:
        self.later = later
        self.reply_bytes = reply_bytes
        self.taken: list[int] = []
        self.asked = 0

    def feed(self, connection: SocketConnection, view: memoryview, at: int) -> int:
        self.asked += 1
        while len(view) - at >= 4 and connection.room and not connection.writing_paused:
            end = at + 4 + int.from_bytes(view[at : at + 4], "big")
            if end > len(view):
                break
            request = decode(bytes(view[at + 4 : end]))
            if request.code != TAKEN:
                break
            self.taken.append(request.opaque)
            if self.later:
                connection.accept(1)
            else:
                connection.put(self.answer(request.opaque))
            at = end
        return at

    def answer(self, opaque: int) -> bytes:
        return encode(Frame(0, opaque, 1, body=bytes(self.reply_bytes)))


def connected(
    lane: FakeLane | None, transport: RecordingTransport, limits: Limits | None = None
) -> tuple[SocketConnection, Owner]:
    owner = Owner()
    connection = SocketConnection(
        Router(BROKER, [Offsets()], partial=True),
        owner,
        limits or Limits(),
        memoryview(bytearray(1 << 16)),
        lane=lane,
    )
    transport.protocol = connection
    connection.connection_made(transport)
    return connection, owner


def taken(opaque: int) -> bytes:
    return frame(TAKEN, opaque)


async def some_turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_the_lane_leaves_goes_to_the_router_in_order() -> None:
    lane, transport = FakeLane(), RecordingTransport()
    connection, _ = connected(lane, transport)
    feed(connection, taken(1) + taken(2) + max_offset(3) + max_offset(4) + taken(5))
    await some_turns()
    assert lane.taken == [1, 2, 5]
    assert opaques(b"".join(transport.writes)) == [1, 2, 3, 4, 5]
    assert len(transport.writes) == 1  # one read, one write


async def test_any_cut_gives_the_same() -> None:
    data = taken(1) + max_offset(2) + taken(3) + max_offset(4)
    for size in (1, 3, 4, 5, 50, 131, len(data)):
        lane, transport = FakeLane(), RecordingTransport()
        connection, owner = connected(lane, transport)
        for at in range(0, len(data), size):
            feed(connection, data[at : at + size])
        await some_turns()
        assert lane.taken == [1, 3], size
        assert opaques(b"".join(transport.writes)) == [1, 2, 3, 4], size
        assert owner.held_bytes == 0, size


@pytest.mark.parametrize("lane", [FakeLane(), None])
async def test_the_memory_of_a_half_frame_ends_with_its_connection(lane: FakeLane | None) -> None:
    """Not with the next run of the collector, which may be hours away."""
    piece = bytes(1 << 15)
    connection, owner = connected(lane, RecordingTransport())
    feed(connection, struct.pack(">i", 8 << 20) + piece)
    tracemalloc.start()
    try:
        for _ in range(100):
            feed(connection, piece)
        assert tracemalloc.get_traced_memory()[0] > 3_000_000
        connection.connection_lost(None)
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()
    assert owner.held_bytes == 0


async def test_a_half_frame_is_counted_and_bounded() -> None:
    lane, transport = FakeLane(), RecordingTransport()
    connection, owner = connected(lane, transport)
    feed(connection, taken(1) + taken(2)[:50])
    assert owner.held_bytes == 50
    owner.held_bytes_max = 60
    feed(connection, taken(2)[50:70])
    assert transport.ended == "abort"
    await some_turns()
    assert owner.held_bytes == 0


async def test_an_impossible_length_ends_the_connection_at_once() -> None:
    lane, transport = FakeLane(), RecordingTransport()
    connection, _ = connected(lane, transport)
    feed(connection, taken(1) + struct.pack(">I", 1 << 30))
    await some_turns()
    assert transport.ended == "close"
    assert lane.taken == [1] and opaques(b"".join(transport.writes)) == [1]


async def test_a_header_that_is_too_long_ends_the_connection_before_it_is_read() -> None:
    lane, transport = FakeLane(), RecordingTransport()
    connection, owner = connected(lane, transport)
    feed(connection, taken(1) + struct.pack(">II", 1 << 20, 64 * 1024))
    feed(connection, b"{" * 50_000)
    assert not transport.ended  # its header may be long
    connection.abort("test")

    transport = RecordingTransport()
    connection, owner = connected(lane, transport)
    feed(connection, taken(2) + struct.pack(">II", 1 << 20, 64 * 1024 + 1))
    await some_turns()
    assert transport.ended == "close" and owner.held_bytes == 0
    assert opaques(b"".join(transport.writes)) == [2]


async def test_requests_in_flight_are_limited() -> None:
    lane, transport = FakeLane(later=True), RecordingTransport()
    connection, _ = connected(lane, transport, Limits(in_flight_max=3))
    feed(connection, b"".join(map(taken, range(1, 6))))
    assert lane.taken == [1, 2, 3]
    assert connection.in_flight == 3 and not transport.reading
    connection.answer_many(2, lane.answer(1) + lane.answer(2))
    await some_turns()
    assert opaques(b"".join(transport.writes)) == [1, 2]
    assert lane.taken == [1, 2, 3, 4, 5]  # the two that waited were offered to it again
    assert connection.in_flight == 3 and not transport.reading
    connection.answer_many(3, b"")
    await some_turns()
    assert connection.in_flight == 0 and transport.reading


async def test_a_peer_that_does_not_read_pauses_the_lane() -> None:
    lane, transport = FakeLane(reply_bytes=400), RecordingTransport(takes=False)
    connection, _ = connected(lane, transport, Limits(queued_bytes_high=1000))
    feed(connection, b"".join(map(taken, range(1, 20))))
    assert 1 <= len(lane.taken) < 10
    assert not transport.reading


async def test_a_stopping_server_does_not_ask_the_lane() -> None:
    lane, transport = FakeLane(), RecordingTransport()
    connection, _ = connected(lane, transport)
    connection.refuse_requests("stopping")
    feed(connection, taken(1) + taken(2))
    await some_turns()
    assert not lane.asked
    assert opaques(b"".join(transport.writes)) == [1, 2]


async def test_answers_after_the_end_go_nowhere() -> None:
    lane, transport = FakeLane(later=True), RecordingTransport()
    connection, _ = connected(lane, transport)
    feed(connection, taken(1))
    connection.connection_lost(None)
    connection.answer_many(1, lane.answer(1))
    assert not transport.writes and connection.in_flight == 0
