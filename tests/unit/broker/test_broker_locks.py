"""Queue locks of ordered consumers."""

from __future__ import annotations

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


def lock(locks: Locks, client: str, *queues: int, **more: Any) -> list[int]:
    reply = locks.lock_batch(LockBatchMq(body=body(client, *queues, **more)), CALL)
    return [queue["queueId"] for queue in json.loads(reply.body)["lockOKMQSet"]]


def unlock(locks: Locks, client: str, *queues: int, **more: Any) -> None:
    assert locks.unlock_batch(UnlockBatchMq(body=body(client, *queues, **more)), CALL).code == 0


async def test_a_free_queue_is_granted_and_others_wait() -> None:
    locks = Locks()
    assert lock(locks, "a", 0, 1) == [0, 1]
    assert lock(locks, "a", 0, 1) == [0, 1]
    assert lock(locks, "b", 0, 1, 2) == [2]
    assert lock(locks, "b", 0, group="h") == [0]
    assert lock(locks, "b", 0, topic="U") == [0]


async def test_the_answer_has_upstreams_form() -> None:
    reply = Locks().lock_batch(LockBatchMq(body=body("a", 2)), CALL)
    assert reply.body == b'{"lockOKMQSet":[{"brokerName":"b","queueId":2,"topic":"T"}]}'


async def test_only_the_owner_unlocks() -> None:
    locks = Locks()
    lock(locks, "a", 0)
    unlock(locks, "b", 0)
    assert lock(locks, "b", 0) == []
    unlock(locks, "a", 0, 5)
    assert lock(locks, "b", 0) == [0]


async def test_locks_expire_unless_renewed() -> None:
    locks = Locks()
    lock(locks, "a", 0, 1)
    for held in locks._locks.values():
        held.renewed_at -= module.EXPIRY_SECONDS + 1
    lock(locks, "a", 1)
    assert lock(locks, "b", 0, 1) == [0]
    assert lock(locks, "a", 0) == []


async def test_locks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOCKS_MAX", 2)
    locks = Locks()
    assert lock(locks, "a", 0, 1, 2) == [0, 1]
    for held in locks._locks.values():
        held.renewed_at -= module.EXPIRY_SECONDS + 1
    locks._full_until -= module.FULL_SECONDS
    assert lock(locks, "a", 2) == [2]
    assert len(locks) == 1


async def test_a_full_table_is_looked_through_once_and_not_for_each_queue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOCKS_MAX", 2)
    monkeypatch.setattr(module, "FULL_SECONDS", 3600.0)
    locks = Locks()
    assert lock(locks, "a", *range(100)) == [0, 1]
    assert lock(locks, "b", *range(100)) == []
    assert caplog.text.count("queue_locks_full") == 1


@pytest.mark.parametrize("data", [body("", 0), body("a", 0, group=""), body("a", 0, group="a/b")])
async def test_bad_names_are_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        Locks().lock_batch(LockBatchMq(body=data), CALL)
    with pytest.raises(Refused):
        Locks().unlock_batch(UnlockBatchMq(body=data), CALL)


def test_a_slave_grants_no_locks() -> None:
    with pytest.raises(Refused, match="slave and cannot lock queues") as caught:
        Locks(SLAVE).lock_batch(LockBatchMq(body=body("a", 0)), CALL)
    assert caught.value.code == Code.SYSTEM_ERROR
