"""Lag in messages and in time; what is not known is None, with the reason."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cosmodrome.client.operate.admin import Admin
from cosmodrome.client.operate.standing import (
    AT_CLIENTS,
    BEYOND_END,
    NO_OFFSET,
    GroupStanding,
    QueueStanding,
    standing,
)
from cosmodrome.client.options import ClientOptions
from cosmodrome.client.receive.consumer import Consumer
from cosmodrome.client.values import MessageQueue, NoRoute
from cosmodrome.wire import commands

QUEUE = MessageQueue(topic="T", broker_name="b", queue_id=0)


@pytest.fixture
async def admin(node: Any) -> AsyncIterator[Admin]:
    async with Admin(node.namesrv, timeout_ms=10_000) as admin:
        yield admin


async def commit(node: Any, offset: int, queue_id: int = 0, topic: str = "T") -> None:
    await node.call(
        commands.UpdateConsumerOffset(
            consumer_group="g", topic=topic, queue_id=queue_id, commit_offset=offset
        )
    )


async def test_lag_in_messages_and_seconds(node: Any, admin: Admin) -> None:
    await node.create_topic("T", queues=2)
    for _ in range(5):
        await node.send("T", b"x")
    await commit(node, 2)
    await commit(node, 0, queue_id=1)
    await asyncio.sleep(0.06)
    found = await standing(admin.fleet, "g")
    first, second = found.queues
    assert (first.first, first.end, first.offset, first.lag) == (0, 5, 2, 3)
    assert first.age_ms is not None and 50 <= first.age_ms < 30_000
    assert (second.lag, second.age_ms, second.why) == (0, 0, "")
    assert (found.lag, found.lag_known, found.age_ms) == (3, 3, first.age_ms)
    assert (found.members, found.model, found.topics) == (0, None, ["T"])


async def test_no_offset_yet_is_unknown_and_a_committed_zero_is_not(
    node: Any, admin: Admin
) -> None:
    await node.create_topic("T", queues=2)
    await node.send("T", b"x", queue_id=0)
    await node.send("T", b"x", queue_id=1)
    await commit(node, 0, queue_id=1)
    found = await standing(admin.fleet, "g", "T")
    assert [row.offset for row in found.queues] == [None, 0]
    assert [row.lag for row in found.queues] == [None, 1]
    assert found.queues[0].why == NO_OFFSET
    assert (found.lag, found.lag_known, found.age_ms) == (None, 1, None)


async def test_beyond_the_end_is_unknown(node: Any, admin: Admin) -> None:
    await node.create_topic("T", queues=1)
    await node.send("T", b"x")
    await commit(node, 7)
    (row,) = (await standing(admin.fleet, "g")).queues
    assert (row.offset, row.end, row.lag, row.age_ms, row.why) == (7, 1, None, None, BEYOND_END)


async def test_an_empty_queue_lags_by_nothing(node: Any, admin: Admin) -> None:
    await node.create_topic("T", queues=1)
    found = await standing(admin.fleet, "g", "T")
    assert (found.lag, found.age_ms) == (0, 0)


async def test_queues_that_are_only_read_have_bounds_too(node: Any, admin: Admin) -> None:
    await node.create_topic("T", queues=2)
    await node.send("T", b"x", queue_id=1)
    await node.create_topic("T", queues=2, write_queue_nums=1)
    await commit(node, 0, queue_id=1)
    rows = (await standing(admin.fleet, "g", "T")).queues
    assert [(row.queue.queue_id, row.end, row.lag) for row in rows] == [(0, 0, 0), (1, 1, 1)]


async def test_a_silent_broker_makes_the_whole_unknown(bare_node: Any) -> None:
    await bare_node.start_broker("broker-a")
    await bare_node.start_broker("broker-b", broker_ip1="203.0.113.9")  # nobody is there
    for name in ("broker-a", "broker-b"):
        await bare_node.create_topic("T", queues=1, broker=name)
        await bare_node.send("T", b"x", broker=name)
    await commit(bare_node, 1)
    async with Admin(bare_node.namesrv, timeout_ms=1500) as admin:
        found = await standing(admin.fleet, "g", "T")
    assert {row.queue.broker_name: row.lag for row in found.queues} == {
        "broker-a": 0,
        "broker-b": None,
    }
    assert "broker-b" in found.silent and "does not answer" in found.queues[1].why
    assert found.lag is None


async def test_broadcasting_groups_keep_their_offsets_themselves(
    node: Any, admin: Admin, tmp_path: Path
) -> None:
    await node.create_topic("T", queues=1)
    await node.send("T", b"x")
    async with Consumer(
        node.namesrv, group="g", model="broadcasting", offsets_dir=str(tmp_path)
    ) as consumer:
        await consumer.subscribe("T")
        found = await standing(admin.fleet, "g")
    (row,) = found.queues
    assert (row.lag, row.why, found.lag, found.model) == (None, AT_CLIENTS, None, "BROADCASTING")
    assert found.members == 1


async def test_a_topic_that_does_not_exist(admin: Admin) -> None:
    with pytest.raises(NoRoute):
        await standing(admin.fleet, "g", "Nothing")
    assert (await standing(admin.fleet, "g")).queues == []


async def test_names_in_a_namespace_come_back_as_they_were_given(node: Any) -> None:
    await node.create_topic("shop%T", queues=1)
    await node.send("shop%T", b"x")
    await node.call(
        commands.UpdateConsumerOffset(
            consumer_group="shop%g", topic="shop%T", queue_id=0, commit_offset=0
        )
    )
    async with Admin(node.namesrv, client=ClientOptions(namespace="shop")) as admin:
        found = await standing(admin.fleet, "g")
    assert (found.group, found.topics, found.lag) == ("g", ["T"], 1)


@pytest.mark.parametrize(
    ("row", "lag"),
    [
        (QueueStanding(QUEUE, 10, 20, 5), 10),  # what is deleted cannot be consumed
        (QueueStanding(QUEUE, 10, 10, 5), 0),
        (QueueStanding(QUEUE, 0, 0, 3), None),
        (QueueStanding(QUEUE, None, None, 3), None),
        (QueueStanding(QUEUE, 0, 4, None), None),
    ],
)
def test_what_counts_as_lag(row: QueueStanding, lag: int | None) -> None:
    assert row.lag == lag
    assert GroupStanding("g", [row], None, 0, 0.0, {}).lag == lag
