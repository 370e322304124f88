"""What a server says is bounded before it costs memory, connections or progress."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from tests.plain_peer import Peer, answer
from tests.unit.client.conftest import Node, until
from tests.unit.client.test_client_consumer_parts import (
    Broker,
    Host,
    pull_answer,
    puller,
    queue,
    record,
    window,
)

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.options import split_address
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.receive.engine.member import DIRECT_MAX
from cosmodrome.client.receive.engine.queue_calls import MEMBERS_MAX, members_of
from cosmodrome.client.routes import ADDRESSES_MAX, QUEUES_MAX, decode_route, route_from
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.send.transactions import TransactionProducer, TransactionState
from cosmodrome.client.values import Message, MessageQueue, ReceivedMessage
from cosmodrome.errors import Code, ConfigError, ProtocolError, Refused
from cosmodrome.wire import bodies, commands
from cosmodrome.wire.bodies import BrokerData, QueueData, TopicRouteData
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.message import whole_number
from cosmodrome.wire.record import encode_record

MANY = 30_000_000


def route(**changes: Any) -> TopicRouteData:
    fields: dict[str, Any] = {
        "broker_datas": [BrokerData(broker_name="a", broker_addrs={0: "127.0.0.1:1"})],
        "queue_datas": [queues()],
    }
    return TopicRouteData(**{**fields, **changes})


def queues(read: int = 1, write: int = 1, broker: str = "a") -> QueueData:
    return QueueData(
        broker_name=broker, perm=6, read_queue_nums=read, write_queue_nums=write, topic_sys_flag=0
    )


def name_server(data: bodies.Body) -> Any:
    """A name server that has one answer to all requests."""
    body = bodies.encode(data)

    def answers(frames: list[Frame]) -> bytes:
        return b"".join(answer(frame, body=body) for frame in frames)

    return Peer(answers)


# --- routes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        route(queue_datas=[queues(read=MANY)]),
        route(queue_datas=[queues(write=MANY)]),
        route(queue_datas=[queues(QUEUES_MAX // 2 + 1), queues(QUEUES_MAX // 2, broker="b")]),
        route(order_topic_conf=f"a:{MANY}"),
    ],
)
async def test_more_queues_than_a_cluster_has_are_not_made(data: TopicRouteData) -> None:
    with name_server(data) as peer:
        async with Producer(peer.address, group="g") as producer:
            with pytest.raises(ProtocolError, match=r"has \d+ .*queues; a client takes at most"):
                await producer.send(Message("T", b"x"))


async def test_an_admin_call_makes_no_more_queues_either() -> None:
    with name_server(route(queue_datas=[queues(read=MANY)])) as peer:
        async with Admin(peer.address) as admin:
            with pytest.raises(ProtocolError, match="30000000 readable queues"):
                await admin.topics.route("T")


async def test_an_admin_call_connects_to_no_more_brokers_than_a_cluster_has() -> None:
    table = {
        str(number): BrokerData(broker_name=str(number), broker_addrs={0: "127.0.0.1:1"})
        for number in range(ADDRESSES_MAX)
    }
    with name_server(bodies.ClusterInfo(broker_addr_table=table)) as peer:
        async with Admin(peer.address) as admin:
            with pytest.raises(ProtocolError, match="knows 8192 brokers and addresses"):
                await admin.fleet.masters()


def test_as_many_queues_as_brokers_take_are_fine() -> None:
    data = route(queue_datas=[queues(bodies.QUEUES_MAX, bodies.QUEUES_MAX)])
    found = route_from("T", decode_route("T", bodies.encode(data)))
    assert len(found.read_queues) == len(found.write_queues) == bodies.QUEUES_MAX


def test_more_addresses_than_a_client_connects_to_are_refused() -> None:
    many = {number: f"127.0.0.1:{number + 1}" for number in range(ADDRESSES_MAX)}
    data = route(broker_datas=[BrokerData(broker_name="a", broker_addrs=many)])
    with pytest.raises(ProtocolError, match="4097 brokers and addresses"):
        decode_route("T", bodies.encode(data))


def test_negative_counts_hide_nothing() -> None:
    data = route(queue_datas=[queues(-MANY), queues(MANY, broker="b")])
    with pytest.raises(ProtocolError, match="30000000 readable queues"):
        decode_route("T", bodies.encode(data))


def test_an_address_that_cannot_be_called_spoils_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    addresses = {0: "10.0.0.1:10911", 1: "nonsense", 2: "h:²", 3: "h:" + "9" * 5000}
    data = route(broker_datas=[BrokerData(broker_name="a", broker_addrs=addresses)])
    assert route_from("T", data).addresses == {"a": {0: "10.0.0.1:10911"}}
    assert caplog.text.count("address left out: broker=a") == 3


@pytest.mark.parametrize("count", ["²", "9" * 5000, "-1", "", "x"])
def test_order_settings_that_are_no_numbers_have_no_queues(count: str) -> None:
    assert route_from("T", route(order_topic_conf=f"a:{count};b:2")).write_queues == (
        MessageQueue(topic="T", broker_name="b", queue_id=0),
        MessageQueue(topic="T", broker_name="b", queue_id=1),
    )


def test_numbers_of_peers() -> None:
    assert whole_number("0123") == 123
    assert whole_number("9" * 18) == 10**18 - 1
    for text in ("", "-1", "+1", " 1", "1_0", "²", "٣", "9" * 19, "9" * 5000):
        assert whole_number(text) is None
    with pytest.raises(ConfigError, match="is not an address"):
        split_address("h:²")


async def test_a_route_that_is_refused_leaves_the_known_one_in_use(node: Node) -> None:
    await node.create_topic("T", 1)
    async with Producer(node.namesrv, group="g") as producer:
        await producer.send(Message("T", b"1"))
        routes = producer._live().routes
        before = routes.known("T")

        async def hostile(*_: object, **__: object) -> Any:
            return SimpleNamespace(body=bodies.encode(route(queue_datas=[queues(MANY)])))

        routes.ask = hostile
        await routes._refresh("T")
        assert routes.known("T") is before
        await producer.send(Message("T", b"2"))


# --- consumers -----------------------------------------------------------------------------------


async def test_more_members_than_queues_can_be_shared_among() -> None:
    ids = [str(number) for number in range(MEMBERS_MAX + 1)]
    body = bodies.encode(bodies.GetConsumerListByGroupResponseBody(consumer_id_list=ids))
    broker: Any = Broker({commands.GetConsumerListByGroup: SimpleNamespace(body=body)})
    with pytest.raises(ProtocolError, match="group g has 65537 members"):
        await members_of("g", broker, await broker.route("T"))


@pytest.mark.parametrize("next_offset", [5, 4, -1, -(2**63)])
async def test_messages_that_come_again_and_again_are_not_taken(next_offset: int) -> None:
    data = encode_record(record(5))
    broker: Any = Broker(
        {commands.PullMessage: pull_answer(data=data, next_begin_offset=next_offset)}
    )
    host, found = Host(), window()
    found.next_offset = 5
    pause_s = await puller(broker, host)._pull_once(found, subscribed())
    assert pause_s > 1  # a broker that says so is not asked in a hurry
    assert (found.next_offset, host.bodies) == (5, [])
    assert "says to go on at" in str(host.errors[0])


async def test_an_answer_without_messages_leads_never_back() -> None:
    answers = pull_answer(Code.PULL_NOT_FOUND, next_begin_offset=-7)
    broker: Any = Broker({commands.PullMessage: answers})
    found = window()
    found.next_offset = 5
    await puller(broker, Host())._pull_once(found, subscribed())
    assert found.next_offset == 5


def subscribed() -> Any:
    return Host().subscription(queue())


async def test_a_reset_is_about_the_queues_that_the_consumer_has(node: Node) -> None:
    await node.create_topic("T", 1)
    async with Consumer(node.namesrv, group="g") as consumer:
        await consumer.subscribe("T", handler=lambda message: None)
        member = consumer._live()
        moved: list[Any] = []

        async def restart(queue: MessageQueue, offset: int) -> None:
            moved.append((queue.queue_id, offset))

        await until(lambda: member.assignment.windows)
        member.assignment.restart = restart  # type: ignore[assignment]
        table = {
            MessageQueue(topic="T", broker_name="broker-a", queue_id=number): -5
            for number in range(20_000)
        }
        member.reset_offsets("T", table)
        await until(lambda: moved)
        assert moved == [(0, 0)]


async def test_messages_that_brokers_push_are_bounded(node: Node) -> None:
    gate = asyncio.Event()
    running = 0

    async def handle(message: ReceivedMessage) -> None:
        nonlocal running
        running += 1
        await gate.wait()

    await node.create_topic("T", 1)
    async with Consumer(node.namesrv, group="g") as consumer:
        await consumer.subscribe("T", handler=handle)
        ask = commands.ConsumeMessageDirectly(
            consumer_group="g", client_id="me", body=encode_record(record(0))
        )
        member = consumer._live()
        calls = [asyncio.ensure_future(member.consume_directly(ask)) for _ in range(DIRECT_MAX)]
        await until(lambda: running == DIRECT_MAX)
        with pytest.raises(Refused, match="16 messages are consumed directly"):
            await member.consume_directly(ask)
        gate.set()
        await asyncio.gather(*calls)
        assert b"CR_SUCCESS" in await member.consume_directly(ask)


async def test_messages_that_brokers_ask_about_are_bounded(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cosmodrome.client.send.transactions.CHECK_BYTES_MAX", 3_000)
    asked = 0

    def check(message: ReceivedMessage) -> TransactionState:
        nonlocal asked
        asked += 1
        return TransactionState.UNKNOWN

    ask = commands.CheckTransactionState(
        tran_state_table_offset=0,
        commit_log_offset=0,
        body=encode_record(record(0, body=bytes(1_000))),
    )
    async with TransactionProducer(node.namesrv, group="tx", check=check) as producer:
        with caplog.at_level(logging.WARNING):
            for _ in range(5):
                producer.check_transaction(ask, node.broker.address)
        assert caplog.text.count("transaction check dropped") == 3
        await until(lambda: asked == 2)
        producer.check_transaction(ask, node.broker.address)
        await until(lambda: asked == 3)
