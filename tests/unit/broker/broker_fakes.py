"""Stand-ins for what a broker service is given, and the one store the tests can steer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cosmodrome.access.gate import build_gate
from cosmodrome.access.own_account import OwnAccount
from cosmodrome.broker.address import AdvertisedAddress
from cosmodrome.broker.counts.stats import Stats
from cosmodrome.broker.foundation import Foundation
from cosmodrome.broker.role import MASTER, Role
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions, TlsOptions
from cosmodrome.env.real import real_env
from cosmodrome.store.store import (
    Arrival,
    Arrivals,
    Batch,
    Draft,
    Found,
    PutStatus,
    ReadStatus,
    Store,
    Stored,
)
from cosmodrome.transport.certificates import Tls
from cosmodrome.wire.frame import VERSION, Frame
from cosmodrome.wire.message import pack_host, parse_properties, tags_code
from cosmodrome.wire.table import Call, Command, Reply

T = TypeVar("T")

STORE_HOST = pack_host("10.1.2.3", 10911)


class FakeConnection:
    """A requester that can be closed by the test."""

    def __init__(self, peer: tuple[str, int] = ("192.0.2.7", 4242)) -> None:
        self.peer = peer
        self.closed = False
        self.callbacks: list[Callable[[], None]] = []

    def push(self, command: Command[Any]) -> None:
        raise AssertionError("nothing is pushed here")

    async def call(self, command: Command[Any], *, timeout_ms: int = 3000) -> Any:
        raise AssertionError("nothing is called here")

    def on_close(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def close(self, reason: str) -> None:
        self.closed = True
        for callback in self.callbacks:
            callback()


class FakeStore:
    """Messages in lists. `status`, `asked_durable` and `outcome` let a test choose what happens."""

    def __init__(self) -> None:
        self.arrivals = Arrivals()
        self.messages: dict[tuple[str, int], list[Draft]] = {}
        self.log: list[Draft] = []
        self.end = 1000
        self.error: Exception | None = None
        self.durable_error: Exception | None = None
        self.status = PutStatus.OK
        self.asked_durable: list[tuple[int, bool]] = []
        self.outcome: Batch | None = None
        self.first: dict[tuple[str, int], int] = {}
        self.warm = True
        self.reads = 0
        self.found = Found([], 0, 0)
        self.asked: list[tuple[Any, ...]] = []
        self.records: dict[int, bytes] = {}

    def append(self, draft: Draft) -> Stored:
        return self.append_batch([draft])[0]

    def append_batch(self, drafts: Sequence[Draft]) -> list[Stored]:
        if self.error is not None:
            raise self.error
        stored = []
        for draft in drafts:
            queue = self.messages.setdefault((draft.topic, draft.queue_id), [])
            stored.append(Stored(self.end, 100, draft.queue_id, len(queue)))
            queue.append(draft)
            self.log.append(draft)
            self.end += 100
        return stored

    def durable(self, end: int, *, wait: bool = True) -> asyncio.Future[PutStatus]:
        done: asyncio.Future[PutStatus] = asyncio.get_running_loop().create_future()
        if self.durable_error is not None:
            done.set_exception(self.durable_error)
        else:
            self.asked_durable.append((end, wait))
            done.set_result(self.status)
        return done

    def arrive(self, topic: str, queue_id: int, tags: str = "") -> None:
        """One more message with this tag, announced at once."""
        properties = f"TAGS\x01{tags}" if tags else ""
        self.append(Draft(topic, queue_id, b"body", properties, STORE_HOST, STORE_HOST))
        end = len(self.messages[topic, queue_id])
        self.arrivals.fire(Arrival(topic, queue_id, end, [tags_code(tags) if tags else 0]))

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        *,
        matches: Callable[[int], bool] | None = None,
        matches_record: object = None,
        records_max: int | None = None,
    ) -> Batch:
        self.reads += 1
        if self.outcome is not None:
            return self.outcome
        queue = self.messages.get((topic, queue_id), [])
        end = len(queue)
        if not queue:
            return Batch(ReadStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
        if offset < 0:
            return Batch(ReadStatus.OFFSET_TOO_SMALL, 0, 0, end)
        if offset == end:
            return Batch(ReadStatus.OFFSET_OVERFLOW_ONE, offset, 0, end)
        if offset > end:
            return Batch(ReadStatus.OFFSET_OVERFLOW_BADLY, end, 0, end)
        data = [
            draft.body
            for draft in queue[offset:]
            if matches is None or matches(_code_of(draft.properties))
        ][:max_count]
        status = ReadStatus.FOUND if data else ReadStatus.NO_MATCHED_MESSAGE
        return Batch(status, end, 0, end, b"".join(data), len(data))

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        key = (topic, queue_id)
        first = self.first.get(key, 0)
        return first, first + len(self.messages.get(key, ()))

    def in_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        return self.warm

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        self.asked.append((topic, queue_id, timestamp_ms))
        return 17

    def store_time(self, topic: str, queue_id: int, queue_offset: int) -> int:
        self.asked.append((topic, queue_id, queue_offset))
        return 1234 if (topic, queue_id) in self.messages else -1

    def record(self, log_offset: int, size: int | None = None) -> bytes | None:
        return self.records.get(log_offset)

    def find(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> Found:
        self.asked.append((topic, key, max_count, begin_ms, end_ms))
        return self.found


def _code_of(properties: str) -> int:
    tags = parse_properties(properties).get("TAGS")
    return tags_code(tags) if tags else 0


def call_of(
    connection: FakeConnection | None = None, *, code: int = 310, version: int = VERSION
) -> Call:
    frame = Frame(code=code, opaque=1, version=version)
    return Call(frame, connection or FakeConnection())


async def outcome_of(outcome: Reply | Awaitable[Reply | None]) -> Any:
    """What a handler's outcome becomes, as the router would see it."""
    return outcome if isinstance(outcome, Reply) else await outcome


def foundation(
    options: BrokerOptions, env: Env, store: Any, role: Role = MASTER, **changes: Any
) -> Foundation:
    """What services are built on, around a store of the test; `changes` are of its options."""
    address = AdvertisedAddress(options)
    address.packed = STORE_HOST
    gate = build_gate("broker", options, "", env, is_local=lambda host: True)
    return Foundation(
        options=options,
        store_options=StoreOptions(**changes),
        sockets=SocketOptions(),
        env=env,
        store=store,
        stats=Stats(),
        role=role,
        address=address,
        gate=gate,
        own_account=OwnAccount(options, gate.accounts),
        tls=Tls(TlsOptions(), env),
    )


@contextlib.asynccontextmanager
async def open_store(path: Path, **changes: Any) -> AsyncIterator[Store]:
    options = StoreOptions(
        store_path_root_dir=str(path),
        mapped_file_size_commit_log=1 << 20,
        mapped_file_size_consume_queue=6000,
        max_hash_slot_num=100,
        max_index_num=400,
        **changes,
    )
    store = Store(options, real_env(seed=1))
    await store.start()
    try:
        yield store
    finally:
        await store.stop()
