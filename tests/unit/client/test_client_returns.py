"""Copies of messages that are given back, as they travel."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from cosmodrome.client.receive.consumer_options import ConsumerOptions
from cosmodrome.client.receive.returns import Returns
from cosmodrome.client.values import MessageQueue, ReceivedMessage
from cosmodrome.layout import MAGIC_RECORD
from cosmodrome.wire.commands.produce import SendMessageV2
from cosmodrome.wire.message import format_properties, parse_properties
from cosmodrome.wire.record import Record


def failed_message(reconsume_times: int) -> ReceivedMessage:
    record = Record(
        size=0,
        magic=MAGIC_RECORD,
        body_crc=0,
        queue_id=0,
        flag=7,
        queue_offset=3,
        log_offset=300,
        sys_flag=0,
        born_ms=1,
        born_host=bytes(8),
        store_ms=1,
        store_host=bytes(8),
        reconsume_times=reconsume_times,
        prepared_offset=0,
        body=b"body",
        topic="T",
        properties=format_properties({"UNIQ_KEY": "id", "KEYS": "k", "DELAY": "9"}),
    )
    return ReceivedMessage(record, "broker-a")


@pytest.mark.parametrize(
    ("attempts", "delay"), [(1, "4"), (2, None), (3, None)], ids=["again", "dead", "long dead"]
)
async def test_only_a_copy_that_comes_again_is_delayed(attempts: int, delay: str | None) -> None:
    sent: list[SendMessageV2] = []

    async def for_sending(topic: str) -> Any:
        queue = MessageQueue(topic=topic, broker_name="broker-a", queue_id=0)
        return SimpleNamespace(write_queues=(queue,))

    async def call(address: str, command: SendMessageV2, timeout_ms: int) -> None:
        sent.append(command)

    instance: Any = SimpleNamespace(
        routes=SimpleNamespace(for_sending=for_sending, address=lambda name, number=0: "h:1"),
        links=SimpleNamespace(call=call),
        env=SimpleNamespace(random=random.Random(1), clock=SimpleNamespace(now_ms=lambda: 5)),
    )
    returns = Returns(instance, "g", ConsumerOptions(max_reconsume_times=2))
    assert await returns.send_copy(failed_message(1), attempts)
    (command,) = sent
    assert (command.topic, command.reconsume_times) == ("%RETRY%g", attempts)
    assert command.max_reconsume_times == 2
    pairs = parse_properties(command.properties or "")
    assert pairs.get("DELAY") == delay
    assert (pairs["KEYS"], pairs["RETRY_TOPIC"], pairs["ORIGIN_MESSAGE_ID"]) == ("k", "T", "id")
