"""Failures outside of a message's own path must not pass unnoticed: an app whose consumer died, a
callback that submits, a check that was cancelled, a loop of the instance that met an error."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import TYPE_CHECKING, Any

import pytest

from cosmodrome.blocking import Producer as BlockingProducer
from cosmodrome.blocking import embedded
from cosmodrome.client.app import App
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.send.failures import Busy
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.send.transactions import TransactionState, _decided
from cosmodrome.client.values import Message
from cosmodrome.errors import ProtocolError

if TYPE_CHECKING:
    from conftest import Node


async def test_an_app_ends_with_the_error_that_ended_one_of_its_consumers(node: Node) -> None:
    await node.create_topic("T", 1)
    app = App(node.namesrv)

    @app.consumer("T", group="g")
    async def handle(body: bytes) -> None: ...

    @app.consumer("T", group="h")
    async def handle_too(body: bytes) -> None: ...

    started: list[Consumer] = []
    subscribe = Consumer.subscribe

    async def subscribed(self: Consumer, *arguments: Any, **named: Any) -> None:
        started.append(self)
        await subscribe(self, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Consumer, "subscribe", subscribed)
        running = asyncio.create_task(app.run(signals=False))
        async with asyncio.timeout(10):
            while len(started) < 2 or not started[1].assignment:
                await asyncio.sleep(0.01)
    member = started[1]._running
    assert member is not None

    async def fail() -> None:
        raise ZeroDivisionError("a mistake")

    member._spawn(fail())
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(running, 10)


async def test_a_check_that_was_cancelled_from_within_decides_nothing() -> None:
    async def check(_: object) -> TransactionState:
        raise asyncio.CancelledError

    state, error = await _decided(check, None)
    assert state is TransactionState.UNKNOWN and error is not None

    async def slow(_: object) -> TransactionState:
        await asyncio.sleep(60)
        return TransactionState.COMMIT

    task = asyncio.create_task(_decided(slow, None))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("error", [ProtocolError("bad body"), ZeroDivisionError("a mistake")])
async def test_routes_are_refreshed_after_an_answer_that_made_no_sense(
    node: Node, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.create_topic("T", 1)
    options = ClientOptions(route_refresh_ms=100)
    async with Producer(node.namesrv, group="p", client=options) as producer:
        await producer.send(Message("T", b"x"))
        routes = producer._live().routes
        asked = 0
        ask = routes._ask_name_server

        async def failing(topic: str) -> Any:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise error
            return await ask(topic)

        monkeypatch.setattr(routes, "_ask_name_server", failing)
        async with asyncio.timeout(10):
            while asked < 3:
                await asyncio.sleep(0.02)


async def test_heartbeats_go_on_after_an_unexpected_error(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Producer(node.namesrv, group="p") as producer:
        instance = producer._live()
        beats = 0

        async def failing() -> None:
            nonlocal beats
            beats += 1
            raise ZeroDivisionError("a mistake")

        monkeypatch.setattr(instance, "heartbeat", failing)
        async with asyncio.timeout(10):
            while beats < 3:
                instance.heartbeat_soon()
                await asyncio.sleep(0.01)


def test_a_callback_that_submits_never_blocks_the_loop() -> None:
    """Callbacks of futures run in the loop's own thread: to wait there for room would end every
    blocking client of the process, because room is made by the loop."""
    outcomes: list[object] = []
    submitted = threading.Event()
    with embedded() as node, BlockingProducer(node.namesrv, group="p", in_flight_max=1) as producer:
        producer.send(Message("T", b"0"))
        slots = producer._slots

        def again(_: concurrent.futures.Future[Any]) -> None:
            slots.take()  # another thread was faster
            try:
                producer.submit(Message("T", b"2"))
            except Exception as error:
                outcomes.append(error)
            slots.give_back()
            submitted.set()

        producer.submit(Message("T", b"1")).add_done_callback(again)
        assert submitted.wait(10)
        assert isinstance(outcomes[0], Busy)
        producer.send(Message("T", b"3"))
