"""Routing: what is demanded of services, and how outcomes become replies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from cosmodrome.errors import (
    Code,
    MessageTooLarge,
    ProtocolError,
    Refused,
    StoreBusy,
    StoreUnwritable,
    TimedOut,
)
from cosmodrome.layout import FLAG_ONEWAY, SERIALIZE_BINARY
from cosmodrome.transport.router import LogLimit, Router
from cosmodrome.wire.commands import (
    GetMaxOffset,
    GetMinOffset,
    GetRouteinfoByTopic,
    OffsetReply,
    QueryBrokerOffset,
)
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.table import BROKER, NAMESERVER, Call, Command, Reply, rows

ASK = {"topic": "T", "queueId": "4"}


class Requester:
    """Keeps the answers."""

    peer = ("10.0.0.1", 4242)
    closed = False

    def __init__(self) -> None:
        self.answers: list[Frame | None] = []

    def answer(self, reply: Frame | None) -> None:
        self.answers.append(reply)

    def push(self, command: Command[Any]) -> None: ...

    async def call(self, command: Command[Any], *, timeout_ms: int = 3000) -> Any: ...

    def on_close(self, callback: Callable[[], None]) -> None: ...

    def close(self, reason: str) -> None: ...


class Plain:
    def __init__(self, outcome: Any = None) -> None:
        self.outcome = outcome

    @GetMaxOffset.handler
    def max_offset(self, ask: GetMaxOffset, call: Call) -> Any:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return OffsetReply(offset=ask.queue_id) if self.outcome is None else self.outcome

    @property
    def explosive(self) -> int:
        raise RuntimeError("a router must not read properties")


class Slow(Plain):
    @GetMaxOffset.handler
    async def max_offset(self, ask: GetMaxOffset, call: Call) -> Any:
        await asyncio.sleep(0)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return OffsetReply(offset=ask.queue_id)


class Waiting(Plain):
    """Hands out a future of its own."""

    @GetMaxOffset.handler
    def max_offset(self, ask: GetMaxOffset, call: Call) -> Any:
        future = asyncio.get_running_loop().create_future()
        if isinstance(self.outcome, BaseException):
            future.set_exception(self.outcome)
        else:
            future.set_result(OffsetReply(offset=ask.queue_id))
        return future


async def ask(service: object, frame: Frame) -> tuple[Frame | None, Router]:
    router = Router(BROKER, [service], partial=True)
    requester = Requester()
    router.dispatch(frame, requester)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(requester.answers) == 1
    assert router.tasks == 0
    return requester.answers[0], router


@pytest.mark.parametrize("service", [Plain, Slow, Waiting])
@pytest.mark.parametrize("serialize", [0, SERIALIZE_BINARY])
async def test_a_handler_is_found_and_answered(service: type[Plain], serialize: int) -> None:
    reply, router = await ask(service(), Frame(30, 9, ext=ASK, serialize=serialize))
    assert reply is not None
    assert (reply.code, reply.opaque, reply.flag, reply.serialize) == (0, 9, 1, serialize)
    assert reply.ext == {"offset": "4"}
    assert (router.requests[30], router.errors[30]) == (1, 0)


@pytest.mark.parametrize("service", [Plain, Slow, Waiting])
@pytest.mark.parametrize(
    ("error", "code", "remark"),
    [
        (Refused(Code.TOPIC_NOT_EXIST, "no such topic"), 17, "no such topic"),
        (StoreUnwritable("disk full"), 14, "disk full"),
        (StoreBusy("pool full"), 2, "pool full"),
        (MessageTooLarge("5 MiB"), 13, "5 MiB"),
        (ProtocolError("bad body"), 1, "bad body"),
        (TimedOut("client is silent"), 1, "client is silent"),
        (KeyError("x"), 1, "GET_MAX_OFFSET failed: KeyError: 'x'; the server's log has more."),
    ],
)
async def test_errors_become_codes(
    service: type[Plain],
    error: Exception,
    code: int,
    remark: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reply, router = await ask(service(error), Frame(30, 9, ext=ASK))
    assert reply is not None
    assert (reply.code, reply.remark, reply.opaque) == (code, remark, 9)
    assert router.errors[30] == 1
    logged = [record.getMessage() for record in caplog.records]
    if isinstance(error, KeyError):
        assert len(logged) == 1
        assert "code=30 opaque=9 peer=10.0.0.1:4242" in logged[0]
        assert caplog.records[0].exc_info is not None
    else:
        assert logged == []


@pytest.mark.parametrize("service", [Plain, Slow, Waiting])
@pytest.mark.parametrize("error", [None, Refused(1, "no"), ValueError("no")])
async def test_one_way_requests_are_never_answered(
    service: type[Plain], error: Exception | None
) -> None:
    reply, _ = await ask(service(error), Frame(30, 9, FLAG_ONEWAY, ext=ASK))
    assert reply is None


async def test_no_reply_on_request() -> None:
    class Silent:
        @GetMaxOffset.handler
        def max_offset(self, ask: GetMaxOffset, call: Call) -> Any:
            return None

        @GetMinOffset.handler
        async def min_offset(self, ask: GetMinOffset, call: Call) -> Any:
            return None

    for code in (30, 31):
        assert (await ask(Silent(), Frame(code, 9, ext=ASK)))[0] is None


async def test_missing_and_bad_fields_are_named() -> None:
    reply, _ = await ask(Plain(), Frame(30, 9, ext={"topic": "T"}))
    assert reply is not None and reply.code == 1
    assert "GET_MAX_OFFSET (30)" in str(reply.remark) and "queueId" in str(reply.remark)
    reply, _ = await ask(Plain(), Frame(30, 9, ext={"topic": "T", "queueId": "four"}))
    assert reply is not None and reply.code == 1 and "queueId" in str(reply.remark)


async def test_what_is_not_served_says_why() -> None:
    cases = {
        99999: "Request code 99999 is not known to this broker.",
        13: f"QUERY_BROKER_OFFSET (13) is not served: {QueryBrokerOffset.planned}",
        105: "GET_ROUTEINFO_BY_TOPIC (105) is served by the name server, this is a broker;",
        31: "GET_MIN_OFFSET (31) is not served on this port.",
    }
    for code, remark in cases.items():
        reply, router = await ask(Plain(), Frame(code, 9))
        assert reply is not None and reply.code == 3
        assert str(reply.remark).startswith(remark)
        assert router.requests == {-1: 1, 30: 0}


async def test_an_unencodable_reply_is_an_error() -> None:
    class Odd(Reply):
        offset: object = None

    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    reply, _ = await ask(Plain(Odd(offset=Bad())), Frame(30, 9, ext=ASK))
    assert reply is not None and reply.code == 1


def test_every_row_of_a_role_is_demanded() -> None:
    with pytest.raises(AssertionError, match=r"no handler of the broker for .*GET_MIN_OFFSET"):
        Router(BROKER, [Plain()])
    with pytest.raises(AssertionError) as raised:
        Router(NAMESERVER, [])
    for row in rows().values():
        demanded = NAMESERVER in row.served_by and not row.planned
        assert (f"{row.name} ({row.request_code})" in str(raised.value)) == demanded


def test_handlers_that_must_not_be() -> None:
    class Planned:
        @QueryBrokerOffset.handler
        def delays(self, ask: QueryBrokerOffset, call: Call) -> Reply:
            return Reply()

    class Foreign:
        @GetRouteinfoByTopic.handler
        def route(self, ask: GetRouteinfoByTopic, call: Call) -> Reply:
            return Reply()

    with pytest.raises(AssertionError, match=r"QUERY_BROKER_OFFSET \(13\) is marked as planned"):
        Router(BROKER, [Planned()], partial=True)
    with pytest.raises(AssertionError, match=r"GET_ROUTEINFO_BY_TOPIC \(105\) is not served"):
        Router(BROKER, [Foreign()], partial=True)
    with pytest.raises(AssertionError, match=r"GET_MAX_OFFSET \(30\) has two handlers"):
        Router(BROKER, [Plain(), Slow()], partial=True)


async def test_stop_cancels_tasks_without_a_reply() -> None:
    class Forever:
        cancelled = False

        @GetMaxOffset.handler
        async def max_offset(self, ask: GetMaxOffset, call: Call) -> OffsetReply:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise
            return OffsetReply(offset=0)

    service = Forever()
    router = Router(BROKER, [service], partial=True)
    requester = Requester()
    router.dispatch(Frame(30, 1, ext=ASK), requester)
    await asyncio.sleep(0)
    assert router.tasks == 1
    await router.stop(grace_s=0.01)
    assert service.cancelled
    assert requester.answers == [None]
    await router.stop()


async def test_a_future_cancelled_by_its_owner_ends_without_reply() -> None:
    class Gone:
        @GetMaxOffset.handler
        def max_offset(self, ask: GetMaxOffset, call: Call) -> Any:
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            return future

    assert (await ask(Gone(), Frame(30, 9, ext=ASK)))[0] is None


async def test_log_lines_are_limited_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    limit = LogLimit(interval_s=0.02)
    assert [limit.admit("a"), limit.admit("a"), limit.admit("b")] == [0, None, 0]
    await asyncio.sleep(0.03)
    assert limit.admit("a") == 1
    caplog.set_level(logging.ERROR)
    router = Router(BROKER, [Plain(ValueError("x"))], partial=True)
    for opaque in range(50):
        router.dispatch(Frame(30, opaque, ext=ASK), Requester())
    assert len(caplog.records) == 1
    assert router.errors[30] == 50


async def test_a_body_that_is_too_long_is_refused_by_name() -> None:
    reply, router = await ask(Plain(), Frame(30, 9, ext=ASK, body=bytes(65_536)))
    assert reply is not None and reply.code == Code.SUCCESS
    reply, router = await ask(Plain(), Frame(30, 9, ext=ASK, body=bytes(65_537)))
    assert reply is not None and reply.code == Code.SYSTEM_ERROR
    assert reply.remark == (
        "GET_MAX_OFFSET (30) with a body of 65537 bytes: at most 65536 are taken;"
        " send less at once."
    )
    assert router.errors[30] == 1
