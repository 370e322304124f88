"""Transactional messages against a real broker: decided at once, or when it asks."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from tests.unit.client.conftest import Node, until
from tests.unit.client.producer_kit import stored

from cosmodrome.client.options import ClientOptions
from cosmodrome.client.send.failures import BadMessage
from cosmodrome.client.send.transactions import (
    TransactionProducer,
    TransactionState,
    _decided,
)
from cosmodrome.client.values import Message, ReceivedMessage
from cosmodrome.errors import ConfigError
from cosmodrome.wire.commands.transaction import CheckTransactionState

COMMIT, ROLLBACK, UNKNOWN = TransactionState


def never(message: ReceivedMessage) -> TransactionState:
    raise AssertionError("nobody asks")


async def visible(node: Node, topic: str, count: int) -> list[bytes]:
    async with asyncio.timeout(60):
        while len(records := await stored(node.broker, topic)) < count:
            await asyncio.sleep(0.02)
    return [record.body for record in records]


async def test_a_committed_message_shows_and_others_do_not(node: Node) -> None:
    seen: list[Message] = []

    async def slowly(message: Message) -> TransactionState:
        seen.append(message)
        await asyncio.sleep(0)
        return COMMIT

    async with TransactionProducer(node.namesrv, group="tx", check=never) as producer:
        kept = await producer.send_in_transaction(Message("tx", b"kept"), slowly)
        dropped = await producer.send_in_transaction(Message("tx", b"no"), lambda _: ROLLBACK)
        assert kept.state is COMMIT and kept.send.msg_id
        assert dropped.state is ROLLBACK
        assert [message.body for message in seen] == [b"kept"]
        assert await visible(node, "tx", 1) == [b"kept"]
        (record,) = await stored(node.broker, "tx")
        assert record.pairs()["UNIQ_KEY"] == kept.send.msg_id
        assert record.pairs()["PGROUP"] == "tx"


async def test_a_local_transaction_that_fails_is_undecided(node: Node) -> None:
    def fails(message: Message) -> TransactionState:
        raise KeyError("no such order")

    async with TransactionProducer(node.namesrv, group="tx", check=never) as producer:
        result = await producer.send_in_transaction(Message("undecided", b"x"), fails)
        assert result.state is UNKNOWN and isinstance(result.local_error, KeyError)
        strange: Any = lambda message: "yes"  # noqa: E731
        result = await producer.send_in_transaction(Message("undecided", b"x"), strange)
        assert result.state is UNKNOWN and isinstance(result.local_error, TypeError)
        with pytest.raises(BadMessage, match="cannot be delayed"):
            await producer.send_in_transaction(Message("undecided", b"x", delay_level=2), fails)


@pytest.mark.parametrize("namespace", ["", "shop"])
async def test_the_broker_asks_about_what_is_undecided(bare_node: Node, namespace: str) -> None:
    node = bare_node
    await node.start_broker(transaction_check_interval=50, transaction_time_out=0)
    asked: list[ReceivedMessage] = []

    async def check(message: ReceivedMessage) -> TransactionState:
        asked.append(message)
        if len(asked) == 1:
            raise RuntimeError("the database is away; ask again")
        return COMMIT

    client = ClientOptions(namespace=namespace)
    body = b"big " * 2000
    async with TransactionProducer(
        node.namesrv, group="tx", check=check, client=client
    ) as producer:
        result = await producer.send_in_transaction(
            Message("asked", body, tags="A", keys="k"), lambda _: UNKNOWN
        )
        full = f"{namespace}%asked" if namespace else "asked"
        await visible(node, full, 1)
    assert len(asked) >= 2
    assert asked[0].body == body and asked[0].topic == "asked"
    assert asked[0].msg_id == result.send.msg_id
    assert asked[0].tags == "A" and asked[0].keys == ("k",)


async def test_checks_beyond_the_bound_are_dropped(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()
    asked: list[str] = []

    async def check(message: ReceivedMessage) -> TransactionState:
        asked.append(message.msg_id)
        await gate.wait()
        return ROLLBACK

    async with TransactionProducer(
        node.namesrv, group="tx", check=check, checks_waiting_max=2
    ) as producer:
        await producer.send(Message("bounded", b"x"))
        from cosmodrome.wire.record import encode_record

        (record,) = await stored(node.broker, "bounded")
        ask = CheckTransactionState(
            tran_state_table_offset=0, commit_log_offset=0, body=encode_record(record)
        )
        for _ in range(2):
            producer.check_transaction(ask, node.broker.address)
        await until(lambda: asked)  # one is being answered, one waits
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                producer.check_transaction(ask, node.broker.address)
        assert caplog.text.count("transaction check dropped") == 2
        gate.set()
        await until(lambda: len(asked) >= 3)
        broken = CheckTransactionState(
            tran_state_table_offset=0, commit_log_offset=0, body=b"garbage"
        )
        producer.check_transaction(broken, node.broker.address)
        producer.check_transaction(ask, node.broker.address)
        await until(lambda: len(asked) >= 4)


def test_bad_bounds_are_named() -> None:
    with pytest.raises(ConfigError, match="checks_waiting_max"):
        TransactionProducer("a:1", group="g", check=never, checks_waiting_max=0)


async def test_an_end_that_does_not_reach_the_broker_is_no_error(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    async def outlives_the_broker(message: Message) -> TransactionState:
        await node.stop_broker()
        return COMMIT

    async with TransactionProducer(node.namesrv, group="tx", check=never) as producer:
        result = await producer.send_in_transaction(Message("cut", b"x"), outlives_the_broker)
    assert result.state is COMMIT
    assert "its broker will ask" in caplog.text


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
