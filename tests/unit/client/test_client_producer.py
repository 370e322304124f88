"""Producers against a real name server and broker in the same process."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop
from tests.unit.client.conftest import Node, until
from tests.unit.client.producer_kit import stored

from cosmodrome import blocking
from cosmodrome.broker.app import Broker
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.send.failures import (
    BadMessage,
    BatchFailed,
    Busy,
    NotRunning,
    SendFailed,
    SendTimedOut,
)
from cosmodrome.client.send.hooks import MessageKind, SendContext, SendMode
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message, MessageQueue, NoRoute, SendStatus
from cosmodrome.errors import ConfigError, Unreachable
from cosmodrome.speed import java_hash
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.message import decompress, parse_offset_message_id


def producer(node: Node, **options: Any) -> Producer:
    return Producer(node.namesrv, **({"group": "orders-p"} | options))


async def test_a_message_arrives_with_all_it_carries(node: Node) -> None:
    async with producer(node) as sender:
        result = await sender.send(
            Message(
                "orders", "grüße", tags="A", keys=("k1", "k2"), properties={"shop": "é"}, flag=7
            )
        )
    assert result.status is SendStatus.OK
    assert result.queue.topic == "orders" and result.queue.broker_name == "broker-a"
    assert result.queue_offset == 0
    assert result.region == "DefaultRegion"
    (record,) = await stored(node.broker, "orders")
    assert record.body == "grüße".encode()
    assert record.flag == 7
    assert record.queue_id == result.queue.queue_id
    assert parse_offset_message_id(result.offset_msg_id)[1] == record.log_offset
    pairs = record.pairs()
    assert pairs["TAGS"] == "A" and pairs["KEYS"] == "k1 k2" and pairs["shop"] == "é"
    assert pairs["UNIQ_KEY"] == result.msg_id and len(result.msg_id) == 32
    assert "INSTANCE_ID" not in pairs


async def test_plain_sends_visit_all_queues_in_turn(node: Node) -> None:
    async with producer(node) as sender:
        results = [await sender.send(Message("turns", b"x")) for _ in range(8)]
    visited = [result.queue.queue_id for result in results]
    assert sorted(visited[:4]) == [0, 1, 2, 3]
    assert visited[4:] == visited[:4]


async def test_a_key_a_queue_or_a_selector_decides_the_queue(node: Node) -> None:
    def second(queues: Sequence[MessageQueue], message: Message) -> MessageQueue:
        return queues[1]

    async with producer(node) as sender:
        keyed = [await sender.send(Message("chosen", b"x", queue_key="order-1")) for _ in range(3)]
        assert {result.queue.queue_id for result in keyed} == {abs(java_hash("order-1")) % 4}
        assert (await sender.send(Message("chosen", b"x"), selector=second)).queue.queue_id == 1
        queue = MessageQueue(topic="chosen", broker_name="broker-a", queue_id=3)
        assert (await sender.send(Message("chosen", b"x"), queue=queue)).queue == queue
        with pytest.raises(BadMessage, match="the queue is of chosen, the message of other"):
            await sender.send(Message("other", b"x"), queue=queue)
        with pytest.raises(BadMessage, match="not one of the queues"):
            wrong = MessageQueue(topic="chosen", broker_name="x", queue_id=0)
            await sender.send(Message("chosen", b"x"), selector=lambda queues, message: wrong)
        gone = MessageQueue(topic="chosen", broker_name="broker-z", queue_id=0)
        with pytest.raises(SendFailed, match="no name server knows a master of broker broker-z"):
            await sender.send(Message("chosen", b"x"), queue=gone)


async def test_pipelined_sends_to_one_queue_keep_their_order(node: Node) -> None:
    async with producer(node, in_flight_max=1000) as sender:
        # Nothing is known yet: the first ones wait for a route and a connection.
        futures = [sender.submit(Message("piped", b"%d" % n, queue_key="k")) for n in range(100)]
        await asyncio.sleep(0)
        futures += [
            sender.submit(Message("piped", b"%d" % n, queue_key="k")) for n in range(100, 200)
        ]
        results = await asyncio.gather(*futures)
    assert [result.queue_offset for result in results] == list(range(200))
    records = await stored(node.broker, "piped")
    assert [int(record.body) for record in records] == list(range(200))
    assert len({result.msg_id for result in results}) == 200


async def test_the_window_bounds_what_is_on_its_way(node: Node) -> None:
    async with producer(node, in_flight_max=3) as sender:
        futures = [sender.submit(Message("window", b"x")) for _ in range(3)]
        assert sender.in_flight == 3
        with pytest.raises(Busy, match="3 messages"):
            sender.submit(Message("window", b"x"))
        waiting = [asyncio.ensure_future(sender.send(Message("window", b"y"))) for _ in range(20)]
        peak = 0
        while not all(task.done() for task in waiting):
            peak = max(peak, sender.in_flight)
            await asyncio.sleep(0)
        assert peak == 3
        await asyncio.gather(*futures, *waiting)
        await sender.ready()
        assert sender.in_flight == 0


async def test_a_cancelled_send_leaves_no_trace(node: Node) -> None:
    async with producer(node, in_flight_max=2) as sender:
        first = asyncio.ensure_future(sender.send(Message("cancelled", b"1")))
        second = asyncio.ensure_future(sender.send(Message("cancelled", b"2")))
        third = asyncio.ensure_future(sender.send(Message("cancelled", b"3")))
        await asyncio.sleep(0)
        for task in (first, third):
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        with pytest.raises(asyncio.CancelledError):
            await third
        assert (await second).status is SendStatus.OK
        await sender.send(Message("cancelled", b"4"))
        assert sender.in_flight == 0
    bodies = {record.body for record in await stored(node.broker, "cancelled")}
    assert {b"2", b"4"} <= bodies and b"3" not in bodies


@pytest.mark.parametrize(("name", "flag"), [("zlib", 0x301), ("lz4", 0x101), ("zstd", 0x201)])
async def test_big_bodies_are_compressed(node: Node, name: Any, flag: int) -> None:
    async with producer(node, compression=name) as sender:
        await sender.send(Message("packed", b"a" * 4095, queue_key="k"))
        await sender.send(Message("packed", b"a" * 4096, queue_key="k"))
        await sender.send(Message("packed", b"b" * 300_000, queue_key="k"))
        await sender.submit(Message("packed", b"b" * 5000, queue_key="k"))
    small, *others = await stored(node.broker, "packed")
    assert small.sys_flag & 0x701 == 0
    for record, plain in zip(others, (b"a" * 4096, b"b" * 300_000, b"b" * 5000), strict=True):
        assert record.sys_flag & 0x701 == flag
        assert len(record.body) < 2000
        assert decompress(record.body, record.sys_flag, 1 << 20) == plain


async def test_bodies_that_do_not_shrink_stay_as_they_are(node: Node) -> None:
    import os

    body = os.urandom(5000)
    async with producer(node) as sender:
        await sender.send(Message("random", body))
    (record,) = await stored(node.broker, "random")
    assert record.body == body and record.sys_flag & 1 == 0


async def test_names_are_wrapped_into_the_namespace_and_unwrapped(node: Node) -> None:
    async with producer(node, client=ClientOptions(namespace="shop")) as sender:
        result = await sender.send(Message("orders", b"x", queue_key="a"))
        assert result.queue.topic == "orders"
        queue = MessageQueue(topic="orders", broker_name="broker-a", queue_id=2)
        assert (await sender.send(Message("orders", b"x"), queue=queue)).queue == queue
        picked = await sender.send(Message("orders", b"x"), selector=lambda queues, _: queues[3])
        assert picked.queue.queue_id == 3
        assert sender.group == "shop%orders-p"
    records = await stored(node.broker, "shop%orders")
    assert len(records) == 3
    assert records[0].pairs()["INSTANCE_ID"] == "shop"


async def test_one_way_messages_arrive(node: Node) -> None:
    async with producer(node) as sender:
        for _ in range(5):
            await sender.send_oneway(Message("oneway", b"x" * 100))
        await sender.send(Message("oneway", b"end"))
    async with asyncio.timeout(60):
        while len(await stored(node.broker, "oneway")) < 6:
            await asyncio.sleep(0.01)


async def test_delays_and_recall(node: Node) -> None:
    async with producer(node) as sender:
        await sender.send(Message("later", b"1", delay_level=1))
        timed = await sender.send(Message("later", b"2", delay_ms=60_000))
        await sender.send(Message("later", b"3", deliver_at_ms=1))
        assert timed.recall_handle is not None
        assert await sender.recall("later", timed.recall_handle) == timed.msg_id
        with pytest.raises(BadMessage, match="not a recall handle"):
            await sender.recall("later", "nonsense")
        with pytest.raises(BadMessage, match="several"):
            await sender.send(Message("later", b"x", delay_level=1, delay_ms=5))
        with pytest.raises(BadMessage, match="negative"):
            await sender.send(Message("later", b"x", delay_ms=-5))


async def test_a_batch_is_split_and_each_message_has_a_result(node: Node) -> None:
    async with producer(node, max_message_bytes=2000) as sender:
        messages = [Message("batch", b"%03d" % n * 100, keys=f"k{n}", flag=n) for n in range(20)]
        results = await sender.send_batch(
            messages, queue=MessageQueue(topic="batch", broker_name="broker-a", queue_id=1)
        )
        assert await sender.send_batch([]) == []
    assert [result.queue_offset for result in results] == list(range(20))
    records = await stored(node.broker, "batch")
    assert [record.body for record in records] == [message.body for message in messages]
    assert [record.flag for record in records] == list(range(20))
    for record, result in zip(records, results, strict=True):
        assert record.pairs()["UNIQ_KEY"] == result.msg_id
        assert record.message_id[-16:] == result.offset_msg_id[-16:]


async def test_a_batch_that_breaks_a_rule_is_not_sent(node: Node) -> None:
    async with producer(node) as sender:
        for other, why in (
            (Message("other", b"x"), "its topic is other"),
            (Message("rules", b"x", delay_level=1), "delayed"),
            (Message("rules", b"x", delay_ms=10), "delayed"),
            (Message("rules", b"x", wait_store=False), "wait_store"),
            (Message("rules", b"x", queue_key="a"), "queue_key"),
        ):
            with pytest.raises(BadMessage, match=f"message 1 cannot be in this batch: .*{why}"):
                await sender.send_batch([Message("rules", b"x"), other])
        with pytest.raises(BadMessage, match="retry topic"):
            await sender.send_batch([Message("%RETRY%g", b"x")])
        with pytest.raises(BatchFailed) as raised:
            too_big = [Message("rules", b"x" * (1 << 20)) for _ in range(3)]
            await node.stop_broker()
            await sender.send_batch(too_big, timeout_ms=300)
    assert len(raised.value.results) == 3
    assert all(isinstance(result, NoRoute | SendFailed) for result in raised.value.results)


async def test_an_empty_or_oversized_or_misnamed_message_is_refused_here(node: Node) -> None:
    async with producer(node, max_message_bytes=1000) as sender:
        for message, why in (
            (Message("bad", b""), "empty body"),
            (Message("bad", b"x" * 1001), "1001 bytes; at most 1000"),
            (Message("", b"x"), "name is empty"),
            (Message("a b", b"x"), "not allowed"),
            (Message("t" * 128, b"x"), "128 characters"),
            (Message("SCHEDULE_TOPIC_XXXX", b"x"), "belongs to the broker"),
            (Message("bad", b"x", properties={"UNIQ_KEY": "1"}), "reserved"),
            (Message("bad", b"x", properties={"a\x01b": "1"}), "0x01 or 0x02"),
            (Message("bad", b"x", properties={"a": "1\x02"}), "0x01 or 0x02"),
            (Message("bad", b"x", properties={"a": ""}), "property a is empty"),
            (Message("bad", b"x", properties={"": "a"}), "property name is empty"),
            (Message("bad", b"x", properties={"a": 1}), "no text"),  # type: ignore[dict-item]
            (Message("bad", b"x", properties={"a": "\ud800"}), "no valid text"),
            (Message("bad", b"x", properties={"a": "é" * 16384}), "at most 32767"),
            (Message("bad", b"x", tags="a\x01"), "0x01"),
            (Message("bad", b"x", tags=""), "tag is empty"),
            (Message("bad", b"x", keys=("a", "")), "key is empty"),
            (Message("bad", b"x", flag=1 << 31), "32 bits"),
        ):
            with pytest.raises(BadMessage, match=why):
                await sender.send(message)
            with pytest.raises(BadMessage, match=why):
                sender.submit(message)
        assert sender.in_flight == 0


def test_bad_options_are_named() -> None:
    for options, why in (
        ({"group": "a b"}, "not allowed"),
        ({"group": "DEFAULT_PRODUCER"}, "default"),
        ({"send_timeout_ms": 0}, "send_timeout_ms"),
        ({"retries": -1}, "retries"),
        ({"linger_ms": -1}, "linger_ms"),
        ({"in_flight_max": 0}, "in_flight_max"),
        ({"compression": "rar"}, "rar"),
        ({"max_message_bytes": 0}, "max_message_bytes"),
    ):
        with pytest.raises(ConfigError, match=why):
            Producer("127.0.0.1:1", **({"group": "g"} | options))
    with pytest.raises(TypeError, match="is no hook"):
        Producer("127.0.0.1:1", group="g", hooks=(object(),))  # type: ignore[arg-type]


async def test_a_closed_producer_says_so(node: Node) -> None:
    sender = producer(node)
    with pytest.raises(NotRunning, match="async with"):
        await sender.send(Message("closed", b"x"))
    await sender.start()
    await sender.start()
    await sender.send(Message("closed", b"x"))
    await sender.stop()
    await sender.stop()
    with pytest.raises(NotRunning):
        sender.submit(Message("closed", b"x"))
    await sender.start()
    await sender.send(Message("closed", b"x"))
    await sender.stop()


async def test_closing_waits_for_what_is_on_its_way(node: Node) -> None:
    async with producer(node) as sender:
        futures = [sender.submit(Message("closing", b"x")) for _ in range(50)]
    assert all(future.done() and future.exception() is None for future in futures)
    assert len(await stored(node.broker, "closing")) == 50


async def test_no_route_is_told_at_once(bare_node: Node) -> None:
    async with producer(bare_node) as sender:
        with pytest.raises(NoRoute, match="no broker has topic nowhere"):
            await sender.send(Message("nowhere", b"x"))
        assert sender.in_flight == 0


async def test_a_silent_name_server_ends_at_the_deadline() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Producer(f"127.0.0.1:{port}", group="g") as sender:
        with pytest.raises(SendTimedOut, match="no name server gave a route"):
            await sender.send(Message("silent", b"x"), timeout_ms=50)
        assert sender.in_flight == 0
    server.close()
    await server.wait_closed()


class Seen:
    def __init__(self) -> None:
        self.before: list[SendContext] = []
        self.after: list[SendContext] = []

    def before_send(self, context: SendContext) -> None:
        self.before.append(context)
        raise RuntimeError("a hook that fails changes nothing")

    def after_send(self, context: SendContext) -> None:
        self.after.append(context)


class Forbid:
    def check_forbidden(self, context: SendContext) -> None:
        if context.messages[0].tags == "secret":
            raise PermissionError("not allowed to send secrets")


async def test_hooks_see_and_forbid(node: Node) -> None:
    seen = Seen()
    async with producer(node, hooks=(seen, Forbid())) as sender:
        result = await sender.send(Message("hooked", b"x"))
        await sender.submit(Message("hooked", b"y", delay_ms=1))
        await sender.send_batch([Message("hooked", b"1"), Message("hooked", b"2")])
        await sender.send_oneway(Message("hooked", b"z"))
        for call in (sender.send, sender.submit):
            with pytest.raises(PermissionError, match="secrets"):
                await call(Message("hooked", b"x", tags="secret"))
        with pytest.raises(PermissionError):
            await sender.send_oneway(Message("hooked", b"x", tags="secret"))
        assert sender.in_flight == 0
    assert [context.mode for context in seen.after] == [
        SendMode.SYNC,
        SendMode.ASYNC,
        SendMode.SYNC,
        SendMode.ONEWAY,
    ]
    assert len(seen.before) == 4
    first, second, third, _ = seen.after
    assert list(first.results) == [result]
    assert first.group == "orders-p" and first.msg_ids == [result.msg_id]
    assert first.address == node.broker.address
    assert second.kind is MessageKind.DELAY
    assert len(third.messages) == len(third.results) == 2


async def test_a_broker_that_restarts_loses_nothing_it_acknowledged(node: Node) -> None:
    acknowledged: set[str] = set()
    failed = 0
    stop = asyncio.Event()

    async def work(producer: Producer, number: int) -> None:
        nonlocal failed
        count = 0
        while not stop.is_set():
            count += 1
            body = b"%d-%d" % (number, count)
            try:
                result = await producer.send(Message("restart", body), timeout_ms=2000)
                acknowledged.add(result.msg_id)
            except SendFailed:
                failed += 1
                await asyncio.sleep(0.01)

    async with Producer(node.namesrv, group="p", linger_ms=0) as producer:
        await producer.send(Message("restart", b"first"))
        workers = [asyncio.ensure_future(work(producer, number)) for number in range(20)]
        for _ in range(2):
            stored_before, failed_before = len(acknowledged), failed
            await until(lambda: len(acknowledged) > stored_before + 50)  # noqa: B023
            await node.stop_broker()
            await until(lambda: failed > failed_before)  # noqa: B023
            await node.start_broker()
        before = len(acknowledged)
        await until(lambda: len(acknowledged) > before + 50)
        stop.set()
        await asyncio.gather(*workers)
        assert producer.in_flight == 0
    kept = {record.pairs()["UNIQ_KEY"] for record in await stored(node.broker, "restart")}
    assert acknowledged <= kept


async def test_every_waiter_gets_an_error_of_its_own(bare_node: Node) -> None:
    async with producer(bare_node, linger_ms=5) as sender:
        futures = [sender.submit(Message("nowhere", b"x")) for _ in range(5)]
        errors = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(error, NoRoute) for error in errors)
        assert len({id(error) for error in errors}) == 5
        await bare_node.start_broker()
        await sender.send(Message("somewhere", b"x"))
        await bare_node.stop_broker()
        futures = [sender.submit(Message("somewhere", b"x")) for _ in range(5)]
        errors = await asyncio.gather(*futures, return_exceptions=True)
        assert all(isinstance(error, SendFailed) and error.tried for error in errors)
        assert len({id(error) for error in errors}) == 5
        assert sender.in_flight == 0
        with pytest.raises(Unreachable):
            await sender.send_oneway(Message("somewhere", b"x"))


async def test_a_full_window_is_waited_for_until_the_deadline(bare_node: Node) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with Producer(
        f"127.0.0.1:{port}",
        group="g",
        client=ClientOptions(call_timeout_ms=600_000),  # nothing ends by itself
        in_flight_max=1,
        send_timeout_ms=600_000,
        close_timeout_ms=10,
    ) as sender:
        stuck = sender.submit(Message("silent", b"x"))
        with pytest.raises(SendTimedOut, match="1 other messages are on their way"):
            await sender.send(Message("silent", b"x"), timeout_ms=30)
        late = asyncio.ensure_future(sender.send(Message("silent", b"x")))
        await asyncio.sleep(0)  # it waits for room
    with pytest.raises(SendFailed, match="the producer was closed"):
        await stuck
    with pytest.raises(NotRunning):
        await late
    assert sender.in_flight == 0
    server.close()
    await server.wait_closed()


async def test_a_message_that_is_sent_back_says_how_often_it_was_consumed(node: Node) -> None:
    class Look:
        def __init__(self) -> None:
            self.sends: list[dict[str, str]] = []
            self.answers: list[tuple[int, int, int]] = []

        def before_request(self, address: str, frame: Frame) -> None:
            if frame.code == 310:
                self.sends.append(dict(frame.ext))

        def after_response(self, address: str, request: Frame, response: Frame) -> None:
            if request.code == 310:
                self.answers.append((request.opaque, response.opaque, response.code))
                raise RuntimeError("a hook that fails is nobody's business")

    look = Look()
    client = ClientOptions(rpc_hooks=(look,), instance_name="back")
    async with producer(node, client=client) as sender:
        back = {"RECONSUME_TIME": "3", "MAX_RECONSUME_TIMES": "16", "RETRY_TOPIC": "orders"}
        await sender.send_with(Message("%RETRY%g", b"x", queue_key="k"), back)
        await sender.send(Message("orders", b"x"))
    assert len(look.answers) == 2
    assert all(asked == answered and code == 0 for asked, answered, code in look.answers)
    sent, plain = look.sends
    assert (sent["j"], sent["l"]) == ("3", "16")
    assert plain["j"] == "0" and "l" not in plain
    assert plain["a"] == "orders-p" and plain["c"] == "TBW102" and plain["d"] == "4"
    assert plain["n"] == "broker-a" and plain["k"] == plain["m"] == "false"


async def test_a_batch_waits_for_room_between_its_parts(node: Node) -> None:
    async with producer(node, max_message_bytes=400, in_flight_max=3) as sender:
        messages = [Message("parts", b"x" * 100, queue_key="k") for _ in range(9)]
        results = await sender.send_batch(messages)
        assert [result.queue_offset for result in results] == list(range(9))
        sender._window.take(3, 0)  # as if other messages were not answered
        with pytest.raises(BatchFailed) as raised:
            await sender.send_batch(messages, timeout_ms=50)
        sender._window.give(3, 0)
    assert [type(result) for result in raised.value.results] == [SendTimedOut] * 9
    assert "9 of 9 messages were not sent" in str(raised.value)


def test_answers_that_came_while_the_process_stood_still_count() -> None:
    async def answered(broker: Broker) -> None:
        store = broker._base.store
        async with asyncio.timeout(60):
            while sum(store.bounds("orders", queue_id)[1] for queue_id in range(4)) < 51:
                await asyncio.sleep(0.001)

    async def scenario(node: blocking.Node) -> None:
        loop = asyncio.get_running_loop()
        hears, ring = socket.socketpair()

        def stand_still() -> None:
            hears.recv(1)
            assert node._portal is not None and node._inner._broker is not None
            node._portal.call(answered(node._inner._broker))
            time.sleep(max(0.0, due - time.monotonic()) + 0.5)

        async with Producer(node.namesrv, group="orders-p", retries=0) as sender:
            await sender.send(Message("orders", b"first"), timeout_ms=60_000)
            due = time.monotonic() + 3
            out = [sender.submit(Message("orders", b"x"), timeout_ms=3_000) for _ in range(50)]
            await asyncio.sleep(0)  # they leave
            with hears, ring:
                loop.add_reader(hears, stand_still)
                ring.send(b"x")
                results = await asyncio.gather(*out)
                loop.remove_reader(hears)
        assert {result.status for result in results} == {SendStatus.OK}

    with blocking.embedded() as node:
        uvloop.run(scenario(node))  # timers run before the sockets are looked at again
