"""Queue locks of ordered consumers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cosmodrome.broker.receive import locks as module
from cosmodrome.broker.receive.locks import Locks
from cosmodrome.broker.role import SLAVE
from cosmodrome.errors import Code, Refused
from cosmodrome.wire.commands.client import LockBatchMq, UnlockBatchMq
from cosmodrome.wire.frame import Frame
from cosmodrome.wire.table import Call

CALL = Call(Frame(code=0, opaque=0), None)  # type: ignore[arg-type]


def body(client: str, *queues: int, group: str = "g", topic: str = "T") -> bytes:
    mq_set = [{"brokerName": "b", "queueId": queue, "topic": topic} for queue in queues]
    return json.dumps({"clientId": client, "consumerGroup": group, "mqSet": mq_set}).encode()


async def lock(locks: Locks, client: str, *queues: int, **more: Any) -> list[int]:
    reply = await locks.lock_batch(LockBatchMq(body=body(client, *queues, **more)), CALL)
    return [queue["queueId"] for queue in json.loads(reply.body)["lockOKMQSet"]]


async def unlock(locks: Locks, client: str, *queues: int, **more: Any) -> None:
    ask = UnlockBatchMq(body=body(client, *queues, **more))
    assert (await locks.unlock_batch(ask, CALL)).code == 0


async def test_a_free_queue_is_granted_and_others_wait() -> None:
    locks = Locks()
    assert await lock(locks, "a", 0, 1) == [0, 1]
    assert await lock(locks, "a", 0, 1) == [0, 1]
    assert await lock(locks, "b", 0, 1, 2) == [2]
    assert await lock(locks, "b", 0, group="h") == [0]
    assert await lock(locks, "b", 0, topic="U") == [0]


async def test_the_answer_has_upstreams_form() -> None:
    reply = await Locks().lock_batch(LockBatchMq(body=body("a", 2)), CALL)
    assert reply.body == b'{"lockOKMQSet":[{"brokerName":"b","queueId":2,"topic":"T"}]}'


async def test_only_the_owner_unlocks() -> None:
    locks = Locks()
    await lock(locks, "a", 0)
    await unlock(locks, "b", 0)
    assert await lock(locks, "b", 0) == []
    await unlock(locks, "a", 0, 5)
    assert await lock(locks, "b", 0) == [0]


async def test_locks_expire_unless_renewed() -> None:
    locks = Locks()
    await lock(locks, "a", 0, 1)
    for held in locks._locks.values():
        held.renewed_at -= module.EXPIRY_SECONDS + 1
    await lock(locks, "a", 1)
    assert await lock(locks, "b", 0, 1) == [0]
    assert await lock(locks, "a", 0) == []


async def test_locks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCKS_MAX", 2)
    locks = Locks()
    assert await lock(locks, "a", 0, 1, 2) == [0, 1]
    for held in locks._locks.values():
        held.renewed_at -= module.EXPIRY_SECONDS + 1
    await lock(locks, "a", 0)
    assert await lock(locks, "a", 2, 3) == [2]
    assert await lock(locks, "b", 0, 1, 2) == []
    assert len(locks) == 2


async def test_a_full_table_is_logged_once_and_not_for_each_queue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOCKS_MAX", 2)
    monkeypatch.setattr(module, "FULL_SECONDS", 3600.0)
    locks = Locks()
    assert await lock(locks, "a", *range(100)) == [0, 1]
    assert await lock(locks, "b", *range(100)) == []
    assert caplog.text.count("queue_locks_full") == 1


@pytest.mark.parametrize("data", [body("", 0), body("a", 0, group=""), body("a", 0, group="a/b")])
async def test_bad_names_are_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        await Locks().lock_batch(LockBatchMq(body=data), CALL)
    with pytest.raises(Refused):
        await Locks().unlock_batch(UnlockBatchMq(body=data), CALL)


async def test_a_slave_grants_no_locks() -> None:
    with pytest.raises(Refused, match="slave and cannot lock queues") as caught:
        await Locks(SLAVE).lock_batch(LockBatchMq(body=body("a", 0)), CALL)
    assert caught.value.code == Code.SYSTEM_ERROR


async def test_others_have_their_turn_while_a_long_list_is_locked() -> None:
    locks = Locks()
    queues = range(3 * module.QUEUES_PER_STEP)
    for request in (lock, unlock):
        turns = 0
        running = asyncio.create_task(request(locks, "a", *queues))
        while not running.done():
            await asyncio.sleep(0)
            turns += 1
        assert turns >= 3
    assert not len(locks)
