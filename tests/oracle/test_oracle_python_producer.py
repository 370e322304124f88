"""The Python producer with servers of either kind; the Java client reads what it sent."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from functools import partial

import pytest
from peers.clients import Client, Consumer
from peers.java import JavaCluster, mqadmin
from peers.node import CosmoNode
from peers.process import free_port
from peers.raw import create_topic
from tests.oracle.oracle_checks import Cluster, body

from cosmodrome.client.send.producer import Producer
from cosmodrome.client.send.transactions import TransactionProducer, TransactionState
from cosmodrome.client.values import Message, ReceivedMessage, SendStatus

SETTINGS = {"transactionCheckInterval": "1000", "transactionTimeOut": "1000"}
TRACE = {"traceTopicEnable": "true"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("python")
    server: CosmoNode | JavaCluster
    settings = SETTINGS | TRACE
    if os.environ.get("ORACLE_TARGET") == "java":
        server = JavaCluster(folder, free_port(), free_port(-2, 1), settings=settings)
    else:
        words = [word for pair in settings.items() for word in ("--set", "=".join(pair))]
        server = CosmoNode(folder / "data", options=words)
    server.start()
    yield Cluster(server)
    server.stop()


@pytest.fixture
def topic(cluster: Cluster, name: str) -> str:
    create_topic(cluster.namesrv_port, cluster.broker_port, f"T_{name}", 4)
    return f"T_{name}"


async def test_the_java_client_reads_what_was_sent(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    messages = [
        Message(topic, "plain 消息", tags="标签", keys=("k1", "键2"), properties={"colour": "blå"}),
        Message(topic, b"big " * 5000, tags="big"),
        Message(topic, b"soon", delay_level=1),
        Message(topic, b"keyed", queue_key="order-1"),
    ]
    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        async with Producer(cluster.namesrv, group="py", linger_ms=0) as producer:
            results = [await producer.send(message) for message in messages]
            results += await producer.send_batch(
                [Message(topic, b"batch %d" % n, keys=f"b{n}", flag=n) for n in range(50)]
            )
            await producer.send_oneway(Message(topic, b"oneway"))
        async with Producer(cluster.namesrv, group="py", linger_ms=5) as producer:
            results += await asyncio.gather(
                *(producer.submit(Message(topic, b"auto %d" % n)) for n in range(100))
            )
        received = await asyncio.to_thread(consumer.receive, 155)
    assert {result.status for result in results} == {SendStatus.OK}
    by_id = {line["msg_id"]: line for line in received}
    for message, result in zip(messages, results, strict=False):
        line = by_id[result.msg_id]
        assert body(line) == message.body
        assert line["tags"] == message.tags
        assert line["keys"] == (" ".join(message.keys) or None)
        if not message.delay_level:
            assert line["queue_id"] == result.queue.queue_id
            assert line["queue_offset"] == result.queue_offset
    assert by_id[results[0].msg_id]["properties"]["colour"] == "blå"
    for number, result in enumerate(results[4:54]):
        line = by_id[result.msg_id]
        assert body(line) == b"batch %d" % number and line["queue_offset"] == result.queue_offset
    assert sorted(body(by_id[result.msg_id]) for result in results[54:]) == sorted(
        b"auto %d" % n for n in range(100)
    )


async def test_transactions_are_decided_and_asked_about(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    asked: list[bytes] = []

    def check(message: ReceivedMessage) -> TransactionState:
        asked.append(message.body)
        return TransactionState.COMMIT

    with Consumer(java, cluster.namesrv, topic, group) as consumer:
        async with TransactionProducer(
            cluster.namesrv, group=f"p_{group}", check=check
        ) as producer:
            for state in TransactionState:
                message = Message(topic, state.name.encode())
                result = await producer.send_in_transaction(
                    message, partial(lambda state, _: state, state)
                )
                assert result.send.status is SendStatus.OK
            received = await asyncio.to_thread(consumer.receive, 2)
    assert sorted(map(body, received)) == [b"COMMIT", b"UNKNOWN"]
    assert asked[0] == b"UNKNOWN"


async def test_the_java_client_replies(
    java: Client, cluster: Cluster, topic: str, group: str
) -> None:
    with Consumer(java, cluster.namesrv, topic, group, mode="replying") as consumer:
        await asyncio.to_thread(consumer.await_start)
        async with Producer(cluster.namesrv, group=f"p_{group}") as producer:
            for number in range(3):
                reply = await producer.request(
                    Message(topic, b"question %d" % number), timeout_ms=30_000
                )
                assert reply.body == b"re: question %d" % number


async def test_traces_are_read_by_the_admin_tool(cluster: Cluster, topic: str, group: str) -> None:
    async with Producer(cluster.namesrv, group=f"p_{group}", trace=True) as producer:
        result = await producer.send(Message(topic, b"traced", tags="T1", keys=f"key_{group}"))
    deadline = time.monotonic() + 20
    while True:
        printed = await asyncio.to_thread(
            mqadmin, cluster.namesrv, "queryMsgTraceById", "-i", result.msg_id
        )
        rows = [line.split() for line in printed.splitlines() if "success" in line]
        if rows or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.5)
    (row,) = rows
    assert row[:2] == ["Pub", f"p_{group}"]
