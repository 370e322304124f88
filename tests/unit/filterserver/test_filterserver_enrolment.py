"""Registration with the broker, against a scripted one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.virtual_time import virtual_time

from cosmodrome.errors import Code, ConfigError, Refused, Unreachable
from cosmodrome.filterserver.enrolment import Enrolment
from cosmodrome.wire.commands.filter import RegisterFilterServer, RegisterFilterServerReply

ADDRESS = "192.0.2.1:4000"


class Broker:
    """The channel to a broker that does what the test says."""

    name = "b:10911"

    def __init__(self) -> None:
        self.connected = False
        self.error: Exception | None = None
        self.asked: list[str] = []

    async def call(self, command: Any, timeout_ms: int = 0) -> RegisterFilterServerReply:
        assert isinstance(command, RegisterFilterServer)
        self.asked.append(command.filter_server_addr)
        if self.error is not None:
            self.connected = False
            raise self.error
        self.connected = True
        return RegisterFilterServerReply(broker_name="broker-a", broker_id=0)


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
async def enrolment(broker: Broker) -> AsyncIterator[Enrolment]:
    made = Enrolment(broker, period_s=0.05, start_s=0.2)  # type: ignore[arg-type]
    yield made
    await made.stop()


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.005)


async def test_it_is_repeated(broker: Broker, enrolment: Enrolment) -> None:
    assert enrolment.ready() == (
        False,
        "not registered with the broker at b:10911: not registered yet",
    )
    await enrolment.start(ADDRESS)
    assert enrolment.ready() == (True, "registered with broker broker-a at b:10911")
    await enrolment.start("192.0.2.9:1")  # has no effect
    await until(lambda: len(broker.asked) >= 3)
    assert set(broker.asked) == {ADDRESS}
    await enrolment.stop()
    count = len(broker.asked)
    await asyncio.sleep(0.15)
    assert len(broker.asked) == count
    assert not enrolment.ready()[0]


@virtual_time
async def test_a_broker_that_starts_at_the_same_time() -> None:
    broker = Broker()
    enrolment = Enrolment(broker, period_s=0.05, start_s=0.2)  # type: ignore[arg-type]
    broker.error = Unreachable("nobody listens")
    starting = asyncio.create_task(enrolment.start(ADDRESS))
    await until(lambda: len(broker.asked) >= 2)
    broker.error = None
    await starting
    assert enrolment.ready()[0]
    await enrolment.stop()


async def test_no_broker(broker: Broker, enrolment: Enrolment) -> None:
    broker.error = Unreachable("nobody listens")
    with pytest.raises(ConfigError, match=r"b:10911: nobody listens; start the broker first"):
        await enrolment.start(ADDRESS)


@pytest.mark.parametrize(
    ("code", "said"),
    [(Code.REQUEST_CODE_NOT_SUPPORTED, "takes no filter servers"), (Code.SYSTEM_BUSY, "too many")],
)
async def test_a_refusal_is_final(
    broker: Broker, enrolment: Enrolment, code: Code, said: str
) -> None:
    broker.error = Refused(code, "too many")
    with pytest.raises(ConfigError, match=said):
        await enrolment.start(ADDRESS)
    assert len(broker.asked) == 1


@pytest.mark.parametrize("error", [Unreachable("nobody listens"), ValueError("what was that?")])
async def test_a_lost_broker_is_tried_again(
    broker: Broker,
    enrolment: Enrolment,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await enrolment.start(ADDRESS)
    with caplog.at_level(logging.INFO):
        broker.error = error
        count = len(broker.asked)
        await until(lambda: len(broker.asked) >= count + 3)
        ready, text = enrolment.ready()
        assert not ready and str(error) in text
        broker.error = None
        await until(lambda: enrolment.ready()[0])
    assert caplog.text.count("register_failed") == 1
    assert caplog.text.count("registered_again") == 1


async def test_a_lost_connection_does_not_wait_for_the_period(broker: Broker) -> None:
    enrolment = Enrolment(broker, period_s=600)  # type: ignore[arg-type]
    await enrolment.start(ADDRESS)
    broker.connected = False
    assert not enrolment.ready()[0]
    await until(lambda: enrolment.ready()[0])
    await enrolment.stop()
