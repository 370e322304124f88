from __future__ import annotations

import asyncio

import pytest

from cosmodrome.errors import Code, ProtocolError, Refused, Unreachable
from cosmodrome.layout import FLAG_ONEWAY, FLAG_RESPONSE, SERIALIZE_BINARY, SERIALIZE_JSON
from cosmodrome.wire.commands.client import NotifyConsumerIdsChanged
from cosmodrome.wire.commands.offset import GetMaxOffset
from cosmodrome.wire.frame import Frame, InPlaceSplitter, decode, encode
from cosmodrome.wire.session import RepeatedRequest, Session
from cosmodrome.wire.table import Reply

ASK = GetMaxOffset(topic="T", queue_id=3)
NOTE = NotifyConsumerIdsChanged(consumer_group="g")


class OffsetOnly(Reply, kw_only=True):
    offset: int


def waiter() -> asyncio.Future[Frame]:
    return asyncio.get_running_loop().create_future()


def broken() -> Unreachable:
    return Unreachable("gone")


def request_of(data: bytes) -> Frame:
    return decode(data[4:])


async def test_a_request_and_its_answer() -> None:
    ours, theirs = Session(), Session()
    answer = waiter()
    opaque, data = ours.request(ASK, answer)
    (request,) = theirs.receive(data)
    assert (request.code, request.opaque, request.flag) == (30, opaque, 0)
    assert request.ext == {"topic": "T", "queueId": "3"}
    reply = theirs.reply(request, OffsetOnly(offset=7, remark="fine", body=b"b"))
    assert ours.waiting == 1
    assert ours.receive(reply) == []
    assert ours.waiting == 0
    frame = answer.result()
    assert (frame.code, frame.flag, frame.opaque) == (0, FLAG_RESPONSE, opaque)
    assert (frame.ext, frame.remark, frame.body) == ({"offset": "7"}, "fine", b"b")


async def test_answers_find_their_waiters_in_any_order() -> None:
    session = Session()
    waiters = {session.request(ASK, w)[0]: w for w in [waiter() for _ in range(5)]}
    data = b"".join(encode(Frame(n, n, FLAG_RESPONSE)) for n in sorted(waiters, reverse=True))
    session.receive(data)
    assert all(w.result().code == opaque for opaque, w in waiters.items())


async def test_requests_and_answers_share_a_stream() -> None:
    session = Session()
    answer = waiter()
    opaque, _ = session.request(ASK, answer)
    mixed = encode(Frame(40, opaque)) + encode(Frame(0, opaque, FLAG_RESPONSE))
    assert [frame.code for frame in session.receive(mixed + encode(Frame(41, 9)))] == [40, 41]
    assert answer.done()


async def test_unknown_and_late_answers_are_dropped() -> None:
    session = Session()
    answer = waiter()
    opaque, _ = session.request(ASK, answer)
    assert session.forget(opaque)
    assert not session.forget(opaque)
    late = encode(Frame(0, opaque, FLAG_RESPONSE))
    assert session.receive(late + encode(Frame(0, 99, FLAG_RESPONSE))) == []
    assert not answer.done()
    answer.cancel()


async def test_a_cancelled_waiter_is_left_alone() -> None:
    session = Session()
    first, second = waiter(), waiter()
    opaque, _ = session.request(ASK, first)
    session.request(ASK, second)
    first.cancel()
    second.cancel()
    session.receive(encode(Frame(0, opaque, FLAG_RESPONSE)))
    session.close(broken)
    assert first.cancelled()


async def test_a_one_way_request_is_never_answered() -> None:
    ours, theirs = Session(), Session()
    (request,) = theirs.receive(ours.push(NOTE))
    assert request.flag == FLAG_ONEWAY
    assert request.opaque != 0
    assert ours.waiting == 0
    assert theirs.reply(request, Reply(code=Code.SYSTEM_ERROR)) == b""


@pytest.mark.parametrize("serialize", [SERIALIZE_JSON, SERIALIZE_BINARY])
async def test_an_answer_has_the_form_of_its_request(serialize: int) -> None:
    session = Session()
    (request,) = session.receive(encode(Frame(30, 5, serialize=serialize)))
    assert request_of(session.reply(request, Reply())).serialize == serialize


async def test_binary_requests_only_to_peers_that_know_them() -> None:
    session = Session()
    assert request_of(session.push(NOTE)).serialize == SERIALIZE_JSON
    session.receive(encode(Frame(30, 5, serialize=SERIALIZE_BINARY)))
    assert request_of(session.push(NOTE)).serialize == SERIALIZE_BINARY


async def test_a_code_beyond_16_bits_travels_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(serialize=SERIALIZE_BINARY)
    assert request_of(session.push(NOTE)).serialize == SERIALIZE_BINARY
    monkeypatch.setattr(NotifyConsumerIdsChanged, "request_code", 200050)
    assert request_of(session.push(NOTE)).serialize == SERIALIZE_JSON


async def test_opaque_is_never_zero_and_wraps() -> None:
    session = Session()
    first = waiter()
    opaque, _ = session.request(ASK, first)
    assert opaque == 1
    session._opaque = 0x7FFFFFFE
    assert request_of(session.push(NOTE)).opaque == 0x7FFFFFFF
    assert request_of(session.push(NOTE)).opaque == 2  # 1 is still waited for
    first.cancel()


async def test_a_repeated_request_differs_by_one_number() -> None:
    request = RepeatedRequest(ASK, "queueId")
    signed: list[Frame] = []
    for session in (Session(), Session(prepare=signed.append), Session(serialize=SERIALIZE_BINARY)):
        (first, data), (second, more) = (
            session.request_repeated(request, number, waiter()) for number in (8, 9)
        )
        frames = [request_of(data), request_of(more)]
        assert [frame.opaque for frame in frames] == [first, second] == [1, 2]
        assert [frame.ext for frame in frames] == [
            {"topic": "T", "queueId": "8"},
            {"topic": "T", "queueId": "9"},
        ]
        assert {frame.code for frame in frames} == {30}
        assert session.waiting == 2
    assert len(signed) == 2
    assert frames[0].serialize == SERIALIZE_BINARY


async def test_a_splitter_of_the_driver_leaves_bodies_in_place() -> None:
    splitter = InPlaceSplitter()
    session = Session(splitter=splitter)
    answer = waiter()
    opaque, _ = session.request(ASK, answer)
    buffer = bytearray(encode(Frame(0, opaque, FLAG_RESPONSE, body=b"view")))
    session.receive(memoryview(buffer))
    assert splitter.used == len(buffer)
    buffer[-4:] = b"seen"
    assert answer.result().body == b"seen"


async def test_waiters_are_bounded() -> None:
    session = Session(waiters_max=2)
    waiters = [waiter() for _ in range(3)]
    opaque, _ = session.request(ASK, waiters[0])
    session.request(ASK, waiters[1])
    with pytest.raises(Refused, match="unanswered"):
        session.request(ASK, waiters[2])
    session.forget(opaque)
    session.request(ASK, waiters[2])
    assert session.waiting == 2


async def test_a_closed_session_fails_its_waiters_once() -> None:
    session = Session()
    waiters = [waiter(), waiter()]
    for one in waiters:
        session.request(ASK, one)
    session.close(broken)
    session.close(lambda: Unreachable("again"))
    errors = [one.exception() for one in waiters]
    assert [str(error) for error in errors] == ["gone", "gone"]
    assert errors[0] is not errors[1]
    assert session.waiting == 0
    with pytest.raises(Unreachable, match="gone"):
        session.request(ASK, waiter())
    with pytest.raises(Unreachable, match="gone"):
        session.push(NOTE)
    assert session.receive(encode(Frame(40, 1))) == []


async def test_a_broken_stream_is_reported() -> None:
    session = Session()
    session.receive(encode(Frame(40, 1))[:10])
    assert session.pending_bytes == 10
    with pytest.raises(ProtocolError):
        session.receive(b"GET / HTTP/1.1\r\n" * 10)
    with pytest.raises(ProtocolError):
        Session(frame_bytes_max=20).receive(encode(Frame(40, 1)))
