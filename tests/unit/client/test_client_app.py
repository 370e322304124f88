"""Typed bodies, and programs declared by decorators."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.unit.client.conftest import Node, until

from cosmodrome.client.app import App
from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.serializers import (
    JSON,
    PROTOBUF,
    TEXT,
    Custom,
    Undecodable,
    message_of,
    value_of,
)
from cosmodrome.client.values import Message, ReceivedMessage
from cosmodrome.errors import ConfigError
from cosmodrome.wire.record import decode_record, encode_record


class Order(msgspec.Struct):
    id: int
    text: str = ""


@dataclasses.dataclass
class Point:
    x: int


class FakeModel:
    """The two methods of a pydantic model."""

    def __init__(self, x: int) -> None:
        self.x = x

    def model_dump_json(self) -> str:
        return msgspec.json.encode({"x": self.x}).decode()

    @classmethod
    def model_validate_json(cls, data: bytes) -> FakeModel:
        return cls(msgspec.json.decode(data)["x"])


class FakeProto:
    """The two methods of a generated protocol buffer class."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def SerializeToString(self) -> bytes:
        return b"p" + self.data

    @classmethod
    def FromString(cls, data: bytes) -> FakeProto:
        if data[:1] != b"p":
            raise ValueError("not a FakeProto")
        return cls(data[1:])


def stored(message: Message) -> ReceivedMessage:
    """The message as a consumer gets it."""
    from cosmodrome.wire.message import format_properties, pack_host
    from cosmodrome.wire.record import Record

    record = Record(
        size=0,
        magic=0,
        body_crc=0,
        queue_id=0,
        flag=0,
        queue_offset=0,
        log_offset=0,
        sys_flag=0,
        born_ms=1,
        born_host=pack_host("127.0.0.1", 1),
        store_ms=1,
        store_host=pack_host("127.0.0.1", 1),
        reconsume_times=0,
        prepared_offset=0,
        body=message.body,
        topic=message.topic,
        properties=format_properties(message.properties),
    )
    return ReceivedMessage(decode_record(encode_record(record)), "b")


@pytest.mark.parametrize(
    ("value", "kind"),
    [(Order(7, "x"), Order), (Point(3), Point), ([1, 2], list[int]), ({"a": 1}, dict[str, int])],
)
def test_json_by_type(value: Any, kind: Any) -> None:
    message = message_of("T", value, tags="A")
    assert message.properties["content-type"] == "application/json"
    assert message.tags == "A"
    assert value_of(stored(message), kind) == value


def test_models_and_messages_of_other_libraries() -> None:
    assert value_of(stored(message_of("T", FakeModel(4))), FakeModel).x == 4
    message = message_of("T", FakeProto(b"abc"), serializer=PROTOBUF)
    assert value_of(stored(message), FakeProto, serializer=PROTOBUF).data == b"abc"


def test_text_and_functions_of_the_user() -> None:
    assert value_of(stored(message_of("T", "häuser", serializer=TEXT)), str, serializer=TEXT) == (
        "häuser"
    )
    assert value_of(stored(message_of("T", 12, serializer=TEXT)), int, serializer=TEXT) == 12
    reverse = Custom("x/reverse", lambda v: v[::-1], lambda data, kind: kind(data[::-1]))
    message = message_of("T", b"abc", serializer=reverse)
    assert message.body == b"cba"
    assert value_of(stored(message), bytes, serializer=reverse) == b"abc"


def test_failures_name_the_message_the_type_and_the_cause() -> None:
    with pytest.raises(ConfigError, match="object cannot become application/json"):
        message_of("T", object())
    text = stored(message_of("T", "x", serializer=TEXT))
    with pytest.raises(Undecodable, match=r"of T is no Order .*says it is text/plain.*malformed"):
        value_of(text, Order, serializer=JSON)


# --- apps --------------------------------------------------------------------------------------


async def test_handlers_get_what_their_annotations_say(node: Any) -> None:
    seen: list[Any] = []
    app = App(node.namesrv)

    @app.consumer("orders", group="billing", publish="invoices", consume_from="first")
    async def bill(order: Order, message: ReceivedMessage, producer: Producer) -> Order | None:
        assert producer is app.producer
        seen.append((order.id, message.topic))
        return Order(order.id + 100) if order.id == 1 else None

    @app.consumer("invoices", group="billing")
    def invoice(body: bytes) -> None:
        seen.append(msgspec.json.decode(body)["id"])

    async with app.running():
        await app.send("orders", Order(1))
        await app.send("orders", Order(2), tags="x")
        await until(lambda: len(seen) == 3)
        with pytest.raises(ConfigError, match="runs already"):
            async with app.running():
                pass
    assert sorted(seen, key=str) == [(1, "orders"), (2, "orders"), 101]
    with pytest.raises(ConfigError, match="does not run"):
        _ = app.producer


async def test_a_body_that_cannot_be_decoded_goes_to_the_dead_letters(node: Any) -> None:
    calls = 0
    app = App(node.namesrv)

    @app.consumer("orders", group="strict", consume_from="first")
    async def take(order: Order) -> None:
        nonlocal calls
        calls += 1

    async with app.running(), Admin(node.namesrv) as admin:
        await app.producer.send(Message("orders", b"not json"))
        await app.send("orders", Order(1))
        await until(lambda: calls == 1)
        async with asyncio.timeout(60):
            while "%DLQ%strict" not in await admin.topics.names():
                await asyncio.sleep(0.05)
        rows = (await admin.topics.status("%DLQ%strict")).values()
        assert sum(row.max_offset for row in rows) == 1


async def test_run_ends_at_a_signal_and_the_lifespan_surrounds_the_handlers(node: Any) -> None:
    events: list[str] = []

    @contextlib.asynccontextmanager
    async def lifespan(app: App) -> AsyncIterator[None]:
        events.append("begin")
        yield
        events.append("end")

    app = App(node.namesrv, lifespan=lifespan)

    @app.consumer("orders", group="g1", consume_from="first")
    async def take(order: Order) -> None:
        events.append(f"order {order.id}")
        os.kill(os.getpid(), signal.SIGTERM)

    async with Producer(node.namesrv, group="p") as producer:
        await producer.send(message_of("orders", Order(5)))
    async with asyncio.timeout(60):
        await app.run()
    assert events == ["begin", "order 5", "end"]


async def test_stop_ends_run(node: Any) -> None:
    app = App(node.namesrv)
    app.stop()

    @app.consumer("orders", group="g2")
    async def take(order: Order) -> None: ...

    running = asyncio.create_task(app.run(signals=False))
    await until(lambda: app._producer is not None)
    app.stop()
    await asyncio.wait_for(running, 60)


def test_declarations_that_cannot_work_are_refused() -> None:
    app = App()

    def untyped(order) -> None: ...  # type: ignore[no-untyped-def]

    def many(*orders: Order) -> None: ...

    def positional(order: Order, /) -> None: ...

    def nothing() -> None: ...

    def fine(order: Order) -> None: ...

    for handler, why in (
        (untyped, "order has no type"),
        (many, "orders cannot be filled"),
        (positional, "positional only"),
        (nothing, "takes no parameter"),
    ):
        with pytest.raises(ConfigError, match=why):
            app.consumer("t", group="g")(handler)
    app.consumer("t", group="g")(fine)
    with pytest.raises(ConfigError, match="topic t already"):
        app.consumer("t", group="g")(fine)
    with pytest.raises(ConfigError, match="other options"):
        app.consumer("u", group="g", concurrency=3)(fine)
    with pytest.raises(ConfigError, match="batch"):
        app.consumer("u", group="h", batch=5)(fine)


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
        await until(lambda: len(started) == 2 and started[1].assignment)
    member = started[1]._running
    assert member is not None

    async def fail() -> None:
        raise ZeroDivisionError("a mistake")

    member.tasks.spawn(fail())
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(running, 60)
