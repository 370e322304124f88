"""The face for threads: a real node in one thread, clients in another, tests in a third."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cosmodrome.blocking import (
    Admin,
    Consumer,
    Node,
    Producer,
    PullConsumer,
    TransactionProducer,
    embedded,
)
from cosmodrome.client import portal as portals
from cosmodrome.client.receive.handlers import RetryLater
from cosmodrome.client.send.failures import Busy
from cosmodrome.client.send.transactions import TransactionState
from cosmodrome.client.values import Message, MessageQueue, ReceivedMessage
from cosmodrome.errors import ConfigError, CosmodromeError


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with embedded(message_delay_level="1s 1s 1s 1s 1s") as node:
        yield node


def threads_of_ours() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "cosmodrome"]


def wait_for(condition: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    assert callable(condition)
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.01)


def test_sends_and_iteration(node: Node) -> None:
    with Producer(node.namesrv, group="p") as producer:
        sent = [producer.send(Message("B1", f"m{number}")).msg_id for number in range(3)]
        sent += [result.msg_id for result in producer.send_batch([Message("B1", b"x")] * 2)]
        futures = [producer.submit(Message("B1", b"y")) for _ in range(50)]
        sent += [future.result(10).msg_id for future in futures]
        producer.send_oneway(Message("B1", b"z"))
        assert producer.in_flight == 0
    got = set()
    with Consumer(node.namesrv, group="c1", consume_from="first") as consumer:
        consumer.subscribe("B1")
        for message in consumer:
            assert isinstance(message, ReceivedMessage)
            got.add(message.msg_id)
            message.ack()
            if len(got) == 56:
                break
        assert len(consumer.assignment) == 5  # four, and that of the retry topic
        consumer.commit()
    assert set(sent) <= got
    assert threads_of_ours() == []


def test_handlers_run_in_threads_and_may_block_and_ask_for_a_retry(node: Node) -> None:
    with Producer(node.namesrv, group="p") as producer:
        for number in range(4):
            producer.send(Message("B2", f"m{number}"))
    seen: list[str] = []
    names: set[str] = set()
    refused: set[bytes] = set()
    together = threading.Barrier(4)

    def handler(message: ReceivedMessage) -> None:
        names.add(threading.current_thread().name)
        if message.reconsume_times == 0:
            together.wait(60)  # all four at once, or this breaks
        if message.body == b"m0" and message.body not in refused:
            refused.add(message.body)
            raise RetryLater(1)
        seen.append(message.body.decode())

    consumer = Consumer(node.namesrv, group="c2", consume_from="first", threads=4)
    with consumer:
        consumer.subscribe("B2")
        runner = threading.Thread(target=lambda: consumer.run(handler))
        runner.start()
        wait_for(lambda: len(seen) == 4)
        consumer.stop()
        runner.join(60)
        assert not runner.is_alive()
    assert sorted(seen) == ["m0", "m1", "m2", "m3"]
    assert all(name.startswith("cosmodrome-handler") for name in names)


def test_many_threads_share_one_producer_and_one_loop(node: Node) -> None:
    results: list[str] = []
    with Producer(node.namesrv, group="p") as producer, Producer(node.namesrv, group="q") as other:

        def send(number: int) -> None:
            for _ in range(10):
                results.append((producer, other)[number % 2].send(Message("B3", b"x")).msg_id)

        workers = [threading.Thread(target=send, args=(number,)) for number in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
        assert threads_of_ours() == ["cosmodrome"]
    assert len(set(results)) == 60


def test_pulling(node: Node) -> None:
    with Producer(node.namesrv, group="p") as producer:
        queue = producer.send(Message("B4", b"a")).queue
        producer.send(Message("B4", b"b"), queue=queue)
    with PullConsumer(node.namesrv, group="c4", consume_from="first") as consumer:
        assert queue in consumer.queues("B4")
        consumer.assign([queue])
        assert consumer.assignment == [queue]
        found: list[bytes] = []
        while len(found) < 2:
            found += [message.body for message in consumer.poll(2000)]
        assert found == [b"a", b"b"]
        assert consumer.position(queue) == 2
        consumer.assign([])
        consumer.assign([queue], offsets={queue: 1})
        assert consumer.position(queue) == 1
        consumer.seek(queue, 1)
        assert [message.body for message in consumer.poll(5000)] == [b"b"]
        consumer.pause([queue])
        consumer.seek_to_begin(queue)
        assert consumer.poll(50) == []
        consumer.resume([queue])
        consumer.seek_to_end(queue)
        consumer.seek_to_time(queue, 0)
        assert (consumer.begin_offset(queue), consumer.end_offset(queue)) == (0, 2)
        assert consumer.offset_for_time(queue, 0) == 0
        consumer.commit({queue: 1})
        assert consumer.committed(queue) == 1
        assert [m.body for m in consumer.pull(queue, 1).messages] == [b"b"]


def test_an_error_in_the_block_leaves_the_last_poll_undone(node: Node) -> None:
    with Producer(node.namesrv, group="p") as producer:
        queue = producer.send(Message("B5", b"a")).queue
    with (
        pytest.raises(RuntimeError),
        PullConsumer(node.namesrv, group="c5", consume_from="first") as consumer,
    ):
        consumer.assign([queue])
        assert consumer.poll(5000)
        raise RuntimeError
    with PullConsumer(node.namesrv, group="c5", consume_from="first") as consumer:
        consumer.assign([queue])
        assert [message.body for message in consumer.poll(5000)] == [b"a"]


def test_transactions(node: Node) -> None:
    names: list[str] = []

    def local(message: Message) -> TransactionState:
        names.append(threading.current_thread().name)
        return TransactionState.COMMIT

    with TransactionProducer(
        node.namesrv, group="tp", check=lambda message: TransactionState.COMMIT
    ) as producer:
        result = producer.send_in_transaction(Message("B6", b"t"), local)
        assert result.state is TransactionState.COMMIT
    assert names[0].startswith("cosmodrome-handler")


def test_admin(node: Node) -> None:
    with Admin(node.namesrv) as admin:
        admin.topics.create("B7", queues=3)
        assert "B7" in admin.topics.names()
        assert admin.brokers.config("embedded")["brokerName"] == "embedded"
        assert admin.name_servers.entries("nothing") == {}
        assert admin.groups.describe("nobody") == {}
        assert admin.messages.by_unique_key("B7", "x") is None
        queue = MessageQueue(topic="B7", broker_name="embedded", queue_id=0)
        assert admin.offsets.bounds(queue) == (0, 0)
        with pytest.raises(AttributeError):
            admin.topics.nonsense()
        topics = admin.topics
    with pytest.raises(ConfigError, match="not started"):
        topics.names()


def test_use_without_with_is_explained(node: Node) -> None:
    producer = Producer(node.namesrv, group="p")
    with pytest.raises(ConfigError, match="use `with`"):
        producer.send(Message("B8", b"x"))
    with pytest.raises(ConfigError, match="use `with`"):
        producer.submit(Message("B8", b"x"))
    producer.stop()
    with Consumer(node.namesrv, group="c8") as consumer:

        async def handler(message: ReceivedMessage) -> None: ...

        with pytest.raises(ConfigError, match="async handler"):
            consumer.subscribe("B8", handler=handler)


def test_a_failed_start_leaves_no_thread() -> None:
    with pytest.raises(CosmodromeError), Producer("nonsense", group="p"):
        pass
    assert threads_of_ours() == []


def test_an_interrupt_ends_a_call_that_waits(node: Node) -> None:
    with PullConsumer(node.namesrv, group="c9") as consumer:
        timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            assert consumer.poll(600_000), "the poll ended by itself"
        timer.join()
        assert consumer.poll(10) == []


def test_a_call_from_inside_the_loop_is_refused() -> None:
    portal = portals.Portal()
    portal.start()
    try:
        with pytest.raises(ConfigError, match="wait for itself"):
            portal.do(lambda: portal.call(asyncio.sleep(0)))
    finally:
        portal.stop()
        portal.stop()
    with pytest.raises(ConfigError, match="not started"):
        portal.call(asyncio.sleep(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # fork with threads: that is the point
def test_after_a_fork_old_objects_say_so_and_new_ones_work(node: Node) -> None:
    with Producer(node.namesrv, group="p") as producer:
        producer.send(Message("B10", b"parent"))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                try:
                    producer.send(Message("B10", b"no"))
                except ConfigError as error:
                    if "forked" in str(error):
                        with Producer(node.namesrv, group="p") as fresh:
                            fresh.send(Message("B10", b"child"))
                        code = 0
            finally:
                os._exit(code)
        deadline = time.monotonic() + 120
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert os.waitstatus_to_exitcode(status) == 0
        producer.send(Message("B10", b"still here"))


def test_the_node_can_be_restarted(node: Node) -> None:
    with embedded() as other:
        before = (other.namesrv, other.broker_address, other.data)
        other.restart()
        other.stop_broker()
        other.start_broker()
        assert (other.namesrv, other.broker_address, other.data) == before
        assert other.broker_name == "embedded"


def test_a_callback_that_submits_never_blocks_the_loop() -> None:
    """Callbacks of futures run in the loop's own thread: to wait there for room would end every
    blocking client of the process, because room is made by the loop."""
    outcomes: list[object] = []
    submitted = threading.Event()
    with embedded() as node, Producer(node.namesrv, group="p", in_flight_max=1) as producer:
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
        assert submitted.wait(60)
        assert isinstance(outcomes[0], Busy)
        producer.send(Message("T", b"3"))
