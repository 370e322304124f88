"""Trace records: their fields, who sends them, and that they disturb nothing."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.client.conftest import Node
from tests.unit.client.producer_kit import stored

from cosmodrome.client import trace as trace_module
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.send.failures import SendFailed
from cosmodrome.client.send.producer import Producer
from cosmodrome.client.send.transactions import TransactionProducer, TransactionState
from cosmodrome.client.trace import TraceRecorder
from cosmodrome.client.values import Message, ReceivedMessage
from cosmodrome.env.real import real_env
from cosmodrome.wire.message import decompress
from cosmodrome.wire.names import TRACE_TOPIC


async def traced(node: Node, topic: str = TRACE_TOPIC) -> tuple[list[list[str]], set[str]]:
    """The fields of every record, and the keys they are found by."""
    lines: list[list[str]] = []
    keys: set[str] = set()
    for record in await stored(node.broker, topic):
        body = decompress(record.body, record.sys_flag, 1 << 20).decode()
        assert body.endswith("\x02")
        lines += [line.split("\x01") for line in body.split("\x02")[:-1]]
        keys |= set(record.pairs()["KEYS"].split())
    return lines, keys


async def test_sends_are_recorded(bare_node: Node) -> None:
    node = bare_node
    await node.start_broker(trace_topic_enable=True)
    async with Producer(node.namesrv, group="p", trace=True) as producer:
        one = await producer.send(Message("traced", b"12345", tags="T", keys=("a", "b")))
        late = await producer.send(Message("traced", b"x", delay_ms=60_000))
        many = await producer.send_batch([Message("traced", b"1"), Message("traced", b"22")])
    lines, keys = await traced(node)
    assert {line[0] for line in lines} == {"Pub"}
    by_id = {line[5]: line for line in lines}
    first = by_id[one.msg_id]
    assert len(first) == 14
    assert first[2:5] == ["DefaultRegion", "p", "traced"]
    assert first[5:10] == [one.msg_id, "T", "a b", node.broker.address, "5"]
    assert first[1].isdigit() and first[10].isdigit()
    assert first[11:] == ["0", one.offset_msg_id, "true"]
    assert by_id[late.msg_id][11] == "3" and by_id[late.msg_id][6] == "null"
    assert [by_id[result.msg_id][9] for result in many] == ["1", "2"]
    assert {one.msg_id, late.msg_id, "a", "b"} <= keys


async def test_a_failed_attempt_is_recorded_as_such(bare_node: Node) -> None:
    node = bare_node
    await node.start_broker(trace_topic_enable=True, max_message_size=1000)
    async with Producer(node.namesrv, group="p", trace=True, trace_topic="my-trace") as producer:
        await producer.send(Message("fails", b"x"))
        with pytest.raises(SendFailed):
            await producer.send(Message("fails", b"x" * 1500))
    lines, _ = await traced(node, "my-trace")
    assert sorted(line[13] for line in lines) == ["false", "true"]
    failed = next(line for line in lines if line[13] == "false")
    assert failed[12] == "null" and failed[9] == "1500"


async def test_transactions_are_recorded(bare_node: Node) -> None:
    node = bare_node
    await node.start_broker(trace_topic_enable=True)
    async with TransactionProducer(
        node.namesrv, group="tx", trace=True, check=lambda message: TransactionState.COMMIT
    ) as producer:
        result = await producer.send_in_transaction(
            Message("tx", b"x", tags="T"), lambda message: TransactionState.ROLLBACK
        )
    lines, _ = await traced(node)
    pub, end = lines
    assert pub[0] == "Pub" and pub[11] == "1"
    assert end[0] == "EndTransaction" and len(end) == 13
    assert end[3:10] == ["tx", "tx", result.send.msg_id, "T", "null", node.broker.address, "2"]
    assert end[11:] == ["ROLLBACK_MESSAGE", "false"]


async def test_consumption_is_recorded(bare_node: Node) -> None:
    node = bare_node
    await node.start_broker(trace_topic_enable=True)
    async with Producer(node.namesrv, group="p") as producer:
        await producer.send(Message("consumed", b"x", keys="k"))
    (record,) = await stored(node.broker, "consumed")
    message = ReceivedMessage(record, "broker-a")
    untraced = ReceivedMessage(record, "broker-a")
    untraced._properties = {"TRACE_ON": "false", "UNIQ_KEY": "no"}
    recorder = TraceRecorder(node.namesrv, "c", "CONSUME", ClientOptions(), real_env(1))
    await recorder.start()
    consumption = recorder.sub_before("c", [message, untraced])
    recorder.sub_after(consumption, success=False, context_code=2)
    recorder.sub_after(recorder.sub_before("c", [untraced]), success=True)
    await recorder.stop()
    await recorder.stop()
    lines, keys = await traced(node)
    before, after = lines
    assert before[0] == "SubBefore" and len(before) == 8
    assert before[2:4] == ["DefaultRegion", "c"]
    assert before[5:] == [message.msg_id, "0", "k"]
    assert after[0] == "SubAfter" and len(after) == 9
    assert after[1] == before[4] and after[2] == message.msg_id
    assert after[4:7] == ["false", "k", "2"] and after[8] == "c"
    assert keys == {message.msg_id, "k"}


def end_transaction(recorder: TraceRecorder, topic: str, number: int) -> None:
    recorder.transaction_ended(
        topic=topic,
        msg_id=f"{number}",
        tags=None,
        keys=(),
        store_host="h",
        transaction_id=None,
        state="UNKNOW",
        from_check=True,
    )


async def test_records_beyond_the_bound_are_dropped(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "WAITING_MAX", 5)
    recorder = TraceRecorder(node.namesrv, "c", "CONSUME", ClientOptions(), real_env(1))
    for number in range(8):
        end_transaction(recorder, "t", number)
    assert recorder.dropped == 3


async def test_bodies_stay_below_the_limit(bare_node: Node) -> None:
    node = bare_node
    await node.start_broker(trace_topic_enable=True)
    recorder = TraceRecorder(node.namesrv, "c", "PRODUCE", ClientOptions(), real_env(1))
    await recorder.start()
    big = "t" * 2000
    for number in range(250):
        end_transaction(recorder, big, number)
    await recorder.stop()
    assert recorder.dropped == 0
    records: list[Any] = await stored(node.broker, TRACE_TOPIC)
    sizes = [len(decompress(record.body, record.sys_flag, 1 << 20)) for record in records]
    assert max(sizes) <= 128_000 and len(sizes) == 5
    assert len((await traced(node))[0]) == 250
