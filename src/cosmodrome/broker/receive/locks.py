"""Queue locks of ordered consumers: who may consume a queue alone, and until when.

A lock is granted when the queue is free, already the asker's, or held by someone who did not
renew for a minute; clients renew every 20 s. Locks live in memory only: after a restart every
queue is free and clients simply ask again. With access control a lock belongs to the account of its
client, too: a client id alone gives nobody the lock of another account.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from cosmodrome.broker.role import MASTER, Role
from cosmodrome.errors import Code, Refused
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import (
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
    UnlockBatchRequestBody,
)
from cosmodrome.wire.commands.client import LockBatchMq, UnlockBatchMq
from cosmodrome.wire.names import check_group
from cosmodrome.wire.table import Call, Reply

log = logging.getLogger(__name__)

EXPIRY_SECONDS = 60.0
LOCKS_MAX = 200_000
FULL_SECONDS = 1.0  # between two lines that say so
QUEUES_PER_STEP = 500

Key = tuple[str, str, str, int]  # group, broker name, topic, queue id


class _Holder(NamedTuple):
    client_id: str
    access_key: str


class _Lock:
    __slots__ = ("holder", "renewed_at")

    def __init__(self, holder: _Holder, renewed_at: float) -> None:
        self.holder = holder
        self.renewed_at = renewed_at


class Locks:
    """`account_of` is the gate's."""

    def __init__(
        self, role: Role = MASTER, account_of: Callable[[Call], str] = lambda call: ""
    ) -> None:
        self._role = role
        self._account_of = account_of
        self._locks: OrderedDict[Key, _Lock] = OrderedDict()  # the longest not renewed first
        self._full_logged_at = -math.inf

    def __len__(self) -> int:
        return len(self._locks)

    @LockBatchMq.handler
    async def lock_batch(self, ask: LockBatchMq, call: Call) -> Reply:
        # Two brokers that grant locks would let two members have one queue.
        self._role.check_takes_changes("lock queues")
        body = bodies.decode(LockBatchRequestBody, ask.body)
        group, client_id = _names(body.consumer_group, body.client_id)
        holder = _Holder(client_id, self._account_of(call))
        now = asyncio.get_running_loop().time()
        held: list[MessageQueue] = []
        async for queues in _in_steps(body.mq_set):
            held += [queue for queue in queues if self._take(_key(group, queue), holder, now)]
        return Reply(body=bodies.encode(LockBatchResponseBody(lock_ok_mq_set=held)))

    @UnlockBatchMq.handler
    async def unlock_batch(self, ask: UnlockBatchMq, call: Call) -> Reply:
        body = bodies.decode(UnlockBatchRequestBody, ask.body)
        group, client_id = _names(body.consumer_group, body.client_id)
        holder = _Holder(client_id, self._account_of(call))
        async for queues in _in_steps(body.mq_set):
            for queue in queues:
                key = _key(group, queue)
                lock = self._locks.get(key)
                if lock is not None and lock.holder == holder:
                    del self._locks[key]
        return Reply()

    def _take(self, key: Key, holder: _Holder, now: float) -> bool:
        lock = self._locks.get(key)
        if lock is None:
            if len(self._locks) >= LOCKS_MAX and not self._make_room(now):
                return False
            self._locks[key] = _Lock(holder, now)
            return True
        if lock.holder != holder:
            if now - lock.renewed_at <= EXPIRY_SECONDS:
                return False
            log.info(
                "queue_lock_expired group=%s topic=%s queue=%d client=%s taken_by=%s",
                key[0],
                key[2],
                key[3],
                lock.holder.client_id,
                holder.client_id,
            )
            lock.holder = holder
        lock.renewed_at = now
        self._locks.move_to_end(key)
        return True

    def _make_room(self, now: float) -> bool:
        """Drop a lock that has expired; false when every one is in use."""
        oldest = next(iter(self._locks.values()))
        if now - oldest.renewed_at > EXPIRY_SECONDS:
            self._locks.popitem(last=False)
            return True
        if now - self._full_logged_at >= FULL_SECONDS:
            self._full_logged_at = now
            log.error("queue_locks_full count=%d; ordered consumers wait", len(self._locks))
        return False


async def _in_steps(queues: Sequence[MessageQueue]) -> AsyncIterator[Sequence[MessageQueue]]:
    """A few at a time; everybody else has a turn of the loop before the next ones."""
    for at in range(0, len(queues), QUEUES_PER_STEP):
        if at:
            await asyncio.sleep(0)
        yield queues[at : at + QUEUES_PER_STEP]


def _key(group: str, queue: MessageQueue) -> Key:
    return (group, queue.broker_name, queue.topic, queue.queue_id)


def _names(group: str, client_id: str) -> tuple[str, str]:
    check_group(group)
    if not client_id:
        raise Refused(Code.SYSTEM_ERROR, "clientId is empty; say who asks for the lock.")
    return group, client_id
