"""One connection over a transport that only records: writes, pauses, limits, closing."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

import pytest
from tests.unit.transport.raw_peer import Offsets, frame, max_offset
from tests.virtual_time import virtual_time

from cosmodrome.errors import Refused, Unreachable
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.peers import Limits
from cosmodrome.transport.router import LogLimit, Router
from cosmodrome.transport.turns import Turns
from cosmodrome.wire.commands import GetMaxOffset, NotifyConsumerIdsChanged, OffsetReply
from cosmodrome.wire.table import BROKER, Call

NOTIFY = NotifyConsumerIdsChanged(consumer_group="g")


class RecordingTransport(asyncio.Transport):
    """Takes every write; `stuck` bytes count as not yet taken by the peer."""

    def __init__(self, peer: object = ("10.0.0.1", 5), takes: bool = True) -> None:
        super().__init__({"peername": peer})
        self.takes = takes
        self.writes: list[bytes] = []
        self.stuck = 0
        self.reading = True
        self.protocol: SocketConnection | None = None
        self.ended = ""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high = high or 0

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))
        if not self.takes:
            self.stuck += len(data)
            if self.stuck > self.high and self.protocol is not None:
                self.protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return self.stuck

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def close(self) -> None:
        self.ended = self.ended or "close"
        if not self.stuck:
            self._lose()

    def abort(self) -> None:
        self.ended = "abort"
        self._lose()

    def _lose(self) -> None:
        protocol, self.protocol = self.protocol, None
        if protocol is not None:
            asyncio.get_running_loop().call_soon(protocol.connection_lost, None)


class Owner:
    def __init__(self) -> None:
        self.log_limit = LogLimit()
        self.clock_s = 0.0
        self.turns = Turns(lambda: self.clock_s)
        self.lost = 0
        self.held_bytes = 0
        self.held_bytes_max = 1 << 30

    def connection_opened(self, connection: SocketConnection) -> bool:
        return True

    def stray(self, kind: str) -> tuple[str, bytes]:
        return kind, b""

    def holds(self, more_bytes: int) -> bool:
        self.held_bytes += more_bytes
        return self.held_bytes <= self.held_bytes_max

    def connection_quiet(self, connection: SocketConnection) -> None: ...

    def connection_lost(self, connection: SocketConnection) -> None:
        self.lost += 1


def connected(
    service: object,
    transport: RecordingTransport,
    limits: Limits | None = None,
) -> tuple[SocketConnection, Owner]:
    owner = Owner()
    connection = SocketConnection(
        Router(BROKER, [service], partial=True),
        owner,
        limits or Limits(),
        memoryview(bytearray(1 << 16)),
    )
    transport.protocol = connection
    connection.connection_made(transport)
    return connection, owner


def feed(connection: SocketConnection, data: bytes) -> None:
    buffer = connection.get_buffer(-1)
    buffer[: len(data)] = data
    connection.buffer_updated(len(data))


def opaques(data: bytes) -> list[int]:
    found = []
    while data:
        length, word = struct.unpack_from(">II", data)
        found.append(json.loads(data[8 : 8 + (word & 0xFFFFFF)])["opaque"])
        data = data[4 + length :]
    return found


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_one_turn_is_one_write() -> None:
    transport = RecordingTransport()
    offsets = Offsets()
    connection, _ = connected(offsets, transport)
    for queue in (1, 2):
        offsets.gate(queue).set_result(None)  # type: ignore[arg-type]
    feed(connection, b"".join(max_offset(i) for i in range(20)))
    connection.push(NOTIFY)
    assert transport.writes == []
    await turns()
    assert len(transport.writes) == 1
    assert opaques(transport.writes[0])[:20] == list(range(20))
    slow = [frame(31, 100 + q, {"topic": "T", "queueId": str(q)}) for q in (1, 2)]
    feed(connection, b"".join(slow))
    await turns()
    assert len(transport.writes) == 2
    assert opaques(transport.writes[1]) == [101, 102]


async def test_serving_stops_while_the_peer_does_not_take() -> None:
    class Large:
        served = 0

        @GetMaxOffset.handler
        def max_offset(self, ask: GetMaxOffset, call: Call) -> OffsetReply:
            self.served += 1
            return OffsetReply(offset=0, body=bytes(1000))

    service = Large()
    transport = RecordingTransport(takes=False)
    limits = Limits(queued_bytes_high=5000, queued_bytes_max=20_000)
    connection, _ = connected(service, transport, limits)
    feed(connection, b"".join(max_offset(i) for i in range(50)))
    await turns()
    assert service.served == 5  # then the replies passed the high-water mark
    assert not transport.reading and not connection.closed
    transport.takes, transport.stuck = True, 0
    connection.resume_writing()
    await turns()
    assert service.served == 50
    assert transport.reading
    assert opaques(b"".join(transport.writes)) == list(range(50))


async def test_queued_bytes_have_a_hard_limit() -> None:
    transport = RecordingTransport(takes=False)
    limits = Limits(queued_bytes_high=1000, queued_bytes_max=5000)
    connection, owner = connected(Offsets(), transport, limits)
    for _ in range(200):
        connection.push(NOTIFY)
    await turns()
    assert transport.ended == "abort"
    assert sum(map(len, transport.writes)) <= 5000
    assert owner.lost == 1


async def test_half_frames_are_counted_and_cut_when_all_hold_too_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    transport = RecordingTransport()
    connection, owner = connected(Offsets(), transport)
    whole = max_offset(7)
    feed(connection, struct.pack(">II", 100_000, 100) + b"x" * 396)
    assert owner.held_bytes == 404
    feed(connection, b"x" * 600)
    assert owner.held_bytes == 1004
    connection.abort("test")
    await turns()
    assert owner.held_bytes == 0

    transport = RecordingTransport()
    connection, owner = connected(Offsets(), transport)
    owner.held_bytes_max = 1000
    feed(connection, whole + whole[:50])
    assert owner.held_bytes == 50
    feed(connection, whole[50:])
    assert owner.held_bytes == 0
    feed(connection, struct.pack(">II", 100_000, 100) + b"x" * 996)
    assert transport.ended == "abort"
    assert "serverHeldBytesMax" in caplog.text
    await turns()
    assert owner.held_bytes == 0


async def test_unread_replies_are_counted_and_cut_when_all_hold_too_many() -> None:
    transport = RecordingTransport(takes=False)
    limits = Limits(queued_bytes_high=1000, queued_bytes_max=1 << 20)
    connection, owner = connected(Offsets(), transport, limits)
    owner.held_bytes_max = 5000
    for _ in range(20):
        connection.push(NOTIFY)
    await turns()
    connection.push(NOTIFY)
    assert 1000 < owner.held_bytes < 5000
    transport.stuck = 0
    connection.resume_writing()
    assert owner.held_bytes == 0
    for _ in range(200):
        connection.push(NOTIFY)
    await turns()
    assert transport.ended == "abort"
    assert owner.held_bytes == 0


async def test_close_callbacks_run_exactly_once() -> None:
    transport = RecordingTransport()
    connection, owner = connected(Offsets(), transport)
    seen: list[str] = []

    def broken() -> None:
        seen.append("broken")
        raise RuntimeError("callback")

    connection.on_close(broken)
    connection.on_close(lambda: seen.append("second"))
    connection.close("test")
    connection.close("again")
    assert connection.closed and seen == []
    await turns()
    assert seen == ["broken", "second"]
    connection.on_close(lambda: seen.append("late"))
    assert seen == ["broken", "second", "late"]
    connection.push(NOTIFY)
    await turns()
    assert transport.writes == []
    assert owner.lost == 1


async def test_calls_that_are_out_fail_when_it_closes() -> None:
    connection, _ = connected(Offsets(), RecordingTransport())
    calls = [asyncio.create_task(connection.call(NOTIFY)) for _ in range(3)]
    await turns()
    connection.close("test")
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(outcome, Unreachable) and "test" in str(outcome)
    with pytest.raises(Unreachable, match=r"was not sent: .*10\.0\.0\.1:5 is closed"):
        await connection.call(NOTIFY)


async def test_what_is_queued_leaves_before_the_close() -> None:
    transport = RecordingTransport()
    connection, _ = connected(Offsets(), transport)
    feed(connection, max_offset(1))
    connection.close("test")
    assert opaques(b"".join(transport.writes)) == [1]


@virtual_time
async def test_a_close_that_is_not_taken_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cosmodrome.transport.connection.CLOSE_TIMEOUT_S", 0.02)
    transport = RecordingTransport(takes=False)
    connection, owner = connected(Offsets(), transport)
    connection.push(NOTIFY)
    connection.close("test")
    assert transport.ended == "close" and owner.lost == 0
    await asyncio.sleep(0.05)
    assert transport.ended == "abort" and owner.lost == 1


async def test_a_reply_that_does_not_fit_becomes_an_error() -> None:
    class Huge:
        @GetMaxOffset.handler
        def max_offset(self, ask: GetMaxOffset, call: Call) -> OffsetReply:
            return OffsetReply(offset=0, body=bytes(16 * 1024 * 1024))

    transport = RecordingTransport()
    connection, _ = connected(Huge(), transport)
    feed(connection, max_offset(8))
    await turns()
    data = b"".join(transport.writes)
    assert opaques(data) == [8]
    assert b'"code":1' in data and b"cannot be encoded" in data
    assert connection.in_flight == 0


@pytest.mark.parametrize(
    ("address", "peer", "name"),
    [
        (("10.1.2.3", 5), ("10.1.2.3", 5), "10.1.2.3:5"),
        (("::ffff:10.1.2.3", 5, 0, 0), ("10.1.2.3", 5), "10.1.2.3:5"),
        (("fe80::1", 5, 0, 2), ("fe80::1", 5), "[fe80::1]:5"),
        (None, ("?", 0), "?:0"),
    ],
)
async def test_peers_as_people_write_them(
    address: object, peer: tuple[str, int], name: str
) -> None:
    connection, _ = connected(Offsets(), RecordingTransport(address))
    assert (connection.peer, connection.name) == (peer, name)
    connection.abort("test")
    await turns()


@virtual_time
async def test_a_quiet_stretch_does_not_count_against_a_fresh_write() -> None:
    transport = RecordingTransport(takes=False)
    connection, _ = connected(Offsets(), transport, Limits(idle_s=0.2))
    await asyncio.sleep(0.12)
    feed(connection, max_offset(1))  # answered into a socket that takes nothing
    await asyncio.sleep(0.12)
    assert not connection.closed
    await asyncio.sleep(0.25)
    assert transport.ended == "abort"


async def test_one_read_full_of_requests_is_served_within_the_limit() -> None:
    transport = RecordingTransport()
    offsets = Offsets()
    connection, _ = connected(offsets, transport, Limits(in_flight_max=8))
    asks = [frame(31, i, {"topic": "T", "queueId": str(i)}) for i in range(30)]
    feed(connection, b"".join(asks))
    await turns()
    assert (offsets.running, connection.in_flight) == (8, 8)
    assert not transport.reading
    for i in range(30):
        offsets.gate(i).set_result(None)  # type: ignore[arg-type]
    await turns(40)
    assert offsets.running_peak == 8
    assert sorted(opaques(b"".join(transport.writes))) == list(range(30))
    assert transport.reading


class Slow:
    """Each request takes a millisecond of the clock that slices are measured with."""

    def __init__(self) -> None:
        self.owner = Owner()
        self.served: list[int] = []

    @GetMaxOffset.handler
    def max_offset(self, ask: GetMaxOffset, call: Call) -> OffsetReply:
        self.owner.clock_s += 0.001
        self.served.append(call.frame.opaque)
        return OffsetReply(offset=0)


async def test_a_read_full_of_slow_requests_lets_others_run_in_between() -> None:
    service = Slow()
    busy, neighbour = RecordingTransport(), RecordingTransport()
    connection, service.owner = connected(service, busy)
    other = SocketConnection(
        Router(BROKER, [service], partial=True),
        service.owner,
        Limits(),
        memoryview(bytearray(1 << 16)),
    )
    neighbour.protocol = other
    other.connection_made(neighbour)
    feed(connection, b"".join(max_offset(i) for i in range(500)) + max_offset(500)[:9])
    assert service.served == [0]  # one slice
    assert not busy.reading and connection.busy and not connection.in_flight
    feed(other, max_offset(9000))
    await turns(3)
    assert opaques(b"".join(neighbour.writes)) == [9000]
    assert len(service.served) < 20
    await turns(600)
    assert opaques(b"".join(busy.writes)) == list(range(500))
    assert busy.reading and not connection.busy
    feed(connection, max_offset(500)[9:])
    assert service.served[-1] == 500


async def test_many_busy_connections_share_the_time_of_a_turn() -> None:
    service = Slow()
    first, service.owner = connected(service, RecordingTransport())
    others = []
    for _ in range(20):
        connection = SocketConnection(
            Router(BROKER, [service], partial=True),
            service.owner,
            Limits(),
            memoryview(bytearray(1 << 16)),
        )
        connection.connection_made(RecordingTransport())
        others.append(connection)
    for connection in (first, *others):
        feed(connection, b"".join(max_offset(i) for i in range(10)))
    served = len(service.served)
    await asyncio.sleep(0)  # one turn of the line
    assert 0 < len(service.served) - served <= 5
    await turns(200)
    assert len(service.served) == 210


async def test_requests_that_run_as_tasks_are_charged_before_they_run() -> None:
    offsets, transport = Offsets(), RecordingTransport()
    connection, _ = connected(offsets, transport)
    asks = [frame(31, i, {"topic": "T", "queueId": "1"}) for i in range(400)]
    feed(connection, b"".join(asks))
    await asyncio.sleep(0)
    assert 0 < offsets.running <= 20  # that many began in one turn
    await turns(100)
    assert offsets.running == 400
    offsets.gate(1).set_result(None)  # type: ignore[arg-type]
    await turns()
    assert opaques(b"".join(transport.writes)) == list(range(400))


@virtual_time
async def test_a_half_frame_that_creeps_is_cut_although_it_moves() -> None:
    transport = RecordingTransport()
    connection, _ = connected(Offsets(), transport, Limits(idle_s=100))
    feed(connection, struct.pack(">II", 1 << 20, 100))
    for _ in range(190):
        feed(connection, b"x")
        await asyncio.sleep(1)
    assert transport.ended == "close"

    transport = RecordingTransport()
    connection, _ = connected(Offsets(), transport, Limits(idle_s=100))
    feed(connection, struct.pack(">II", 1 << 20, 100))
    for _ in range(190):
        feed(connection, b"x" * 2048)  # slow, and still worth waiting for
        await asyncio.sleep(1)
    assert not transport.ended
    connection.abort("test")


async def test_an_error_that_somebody_keeps_does_not_keep_the_input() -> None:
    kept: list[BaseException] = []

    class Failing:
        @GetMaxOffset.handler
        def max_offset(self, ask: GetMaxOffset, call: Call) -> OffsetReply:
            try:
                raise Refused(1, "no")
            except Refused as error:
                kept.append(error)
                raise

    transport = RecordingTransport()
    connection, _ = connected(Failing(), transport)
    data = b"".join(max_offset(i) for i in range(4))
    for at in range(0, len(data), 50):  # with half frames in between
        feed(connection, data[at : at + 50])
    await turns()
    assert len(kept) == 4
    assert opaques(b"".join(transport.writes)) == [0, 1, 2, 3]
