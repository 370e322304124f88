"""Batches: their bytes and bounds, and the ones that make themselves."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.client.conftest import Node
from tests.unit.client.producer_kit import stored

from cosmodrome.broker.send.produce import parse_batch
from cosmodrome.client.send.batching import encode_batch, item_bytes, split
from cosmodrome.client.send.failures import SendFailed
from cosmodrome.client.send.hooks import MessageKind, SendContext
from cosmodrome.client.send.packing import Packed
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.values import Message, SendResult


def packed(body: bytes, properties: str = "", flag: int = 0) -> Packed:
    message = Message("t", body, flag=flag)
    return Packed(message, "t", body, 0, properties, "id", MessageKind.NORMAL)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
items = st.lists(st.tuples(st.binary(min_size=1, max_size=50), texts, st.integers(0, 99)))


@given(items)
def test_the_broker_reads_what_is_encoded(given_items: list[tuple[bytes, str, int]]) -> None:
    members = [packed(body, f"k\x01{text or 'v'}", flag) for body, text, flag in given_items]
    body = encode_batch(members)
    assert len(body) == sum(map(item_bytes, members))
    read = list(parse_batch(body))
    assert [(item.body, item.flag) for item in read] == [
        (member.body, member.message.flag) for member in members
    ]
    assert [item.properties for item in read] == [member.properties for member in members]


@given(items, st.integers(30, 300))
def test_splitting_keeps_order_and_limit(
    given_items: list[tuple[bytes, str, int]], limit: int
) -> None:
    members = [packed(body, text) for body, text, _ in given_items]
    batches = split(members, limit)
    assert [member for batch in batches for member in batch] == members
    for batch in batches:
        assert batch
        assert len(batch) == 1 or len(encode_batch(batch)) <= limit


class Counter:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def before_send(self, context: SendContext) -> None:
        self.sizes.append(len(context.messages))

    def after_send(self, context: SendContext) -> None: ...


async def test_concurrent_sends_travel_together(node: Node) -> None:
    counter = Counter()
    async with Producer(node.namesrv, group="g", linger_ms=20, hooks=(counter,)) as producer:
        await producer.send(Message("auto", b"first"))
        assert counter.sizes == [1]
        messages = [Message("auto", b"%d" % n, queue_key="k", keys=f"k{n}") for n in range(900)]
        futures = [producer.submit(message) for message in messages]
        results = await asyncio.gather(*futures)
        assert producer.in_flight == 0
        # 512 fill the first batch, the rest leaves when it is answered.
        assert counter.sizes == [1, 512, 388]
        assert [result.queue_offset for result in results] == [
            results[0].queue_offset + n for n in range(900)
        ]
        # Another choice of queue, a delay, a big body: none of them joins.
        mixed = await asyncio.gather(
            producer.send(Message("auto", b"a", queue_key="k")),
            producer.send(Message("auto", b"b", queue_key="other")),
            producer.send(Message("auto", b"c", delay_ms=1)),
            producer.send(Message("auto", b"d" * 5000)),
            producer.send(Message("auto", b"e", wait_store=False)),
        )
        assert all(isinstance(result, SendResult) for result in mixed)
        assert counter.sizes[3:] == [1] * 5
        assert not producer._gatherer._groups
    records = {record.pairs()["UNIQ_KEY"]: record for record in await stored(node.broker, "auto")}
    for message, result in zip(messages, results, strict=True):
        record = records[result.msg_id]
        assert record.body == message.body
        assert record.queue_offset == result.queue_offset
        assert record.message_id[-16:] == result.offset_msg_id[-16:]


async def test_a_batch_leaves_at_the_latest_after_the_linger_time(node: Node) -> None:
    counter = Counter()
    async with Producer(node.namesrv, group="g", linger_ms=30, hooks=(counter,)) as producer:
        await producer.send(Message("linger", b"x"))
        group_busy = producer.submit(Message("linger", b"x"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        late = [producer.submit(Message("linger", b"y")) for _ in range(5)]
        await asyncio.gather(group_busy, *late)
        assert counter.sizes == [1, 1, 5]


async def test_one_bad_message_does_not_spoil_the_others(bare_node: Node) -> None:
    node = bare_node
    await node.start_broker(max_message_size=1000)
    async with Producer(node.namesrv, group="g", linger_ms=5) as producer:
        await producer.send(Message("mixed", b"x"))
        futures = [producer.submit(Message("mixed", b"x" * size)) for size in (10, 20, 1500, 30)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert producer.in_flight == 0
    assert [type(outcome) for outcome in outcomes] == [
        SendResult,
        SendResult,
        SendFailed,
        SendResult,
    ]
    assert isinstance(outcomes[2], SendFailed) and outcomes[2].code == 13
    sizes = sorted(len(record.body) for record in await stored(node.broker, "mixed"))
    assert sizes == [1, 10, 20, 30]


async def test_cancelled_messages_do_not_hold_up_their_batch(node: Node) -> None:
    async with Producer(node.namesrv, group="g", linger_ms=5, in_flight_max=10) as producer:
        futures = [producer.submit(Message("gone", b"x")) for _ in range(10)]
        for future in futures[::2]:
            future.cancel()
        await asyncio.gather(*futures[1::2])
        every = [producer.submit(Message("gone", b"x")) for _ in range(10)]
        for future in every:
            future.cancel()
        await producer.ready()
        assert (await producer.send(Message("gone", b"last"))).queue_offset >= 0
        async with asyncio.timeout(60):
            while producer.in_flight or producer._gatherer._groups:
                await asyncio.sleep(0.01)


async def test_closing_lets_gathered_messages_leave(node: Node) -> None:
    async with Producer(node.namesrv, group="g", linger_ms=1000) as producer:
        futures = [producer.submit(Message("flush", b"x")) for _ in range(7)]
    assert [future.exception() for future in futures] == [None] * 7
