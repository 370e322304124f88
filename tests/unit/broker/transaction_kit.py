"""A store whose clock the test sets, with everything that transactions need in it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from tests.unit.broker.broker_fakes import (
    STORE_HOST,
    FakeConnection,
    call_of,
    foundation,
    outcome_of,
)
from tests.unit.broker.later_kit import SetClock

from cosmodrome.broker.counts.transaction_counts import TransactionCounts
from cosmodrome.broker.later.check_back import CheckBack
from cosmodrome.broker.later.deferral import Deferral
from cosmodrome.broker.later.halves import TRANSACTION_GROUP, Decisions, make_half
from cosmodrome.broker.later.transactions import Transactions
from cosmodrome.broker.members.clients import Clients
from cosmodrome.broker.members.groups import Groups
from cosmodrome.broker.members.offsets import Offsets
from cosmodrome.broker.members.room import Members
from cosmodrome.broker.members.topics import Topics
from cosmodrome.broker.role import role_of
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.store.store import DelayLevels, Draft, Store, Stored
from cosmodrome.wire import bodies
from cosmodrome.wire.commands.client import HeartBeat
from cosmodrome.wire.commands.transaction import CheckTransactionState, EndTransaction
from cosmodrome.wire.message import format_properties
from cosmodrome.wire.names import HALF_TOPIC, OP_HALF_TOPIC
from cosmodrome.wire.record import Record, iter_records
from cosmodrome.wire.table import Command

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
HOUR_MS = 3_600_000


class Producer(FakeConnection):
    """A connected producer that notes what it is asked."""

    def __init__(self, port: int = 4242) -> None:
        super().__init__(("192.0.2.7", port))
        self.asked: list[CheckTransactionState] = []

    def push(self, command: Command[Any]) -> None:
        assert isinstance(command, CheckTransactionState)
        self.asked.append(command)


class Bank:
    """One life of a store directory; open the next one after `close` or `crash`."""

    def __init__(self, path: Path, clock: SetClock, *, role: str = "", **changes: Any) -> None:
        self.clock = clock
        self.env: Env = dataclasses.replace(real_env(seed=1), clock=clock)
        store = StoreOptions(
            store_path_root_dir=str(path),
            mapped_file_size_commit_log=1 << 20,
            mapped_file_size_consume_queue=60_000,
            message_index_enable=False,
            broker_role=role or "ASYNC_MASTER",  # type: ignore[arg-type]
            **{key: changes.pop(key) for key in list(changes) if key.startswith("flush")},
        )
        self.options = BrokerOptions(broker_name="b0", **changes)
        config = path / "config"
        self.store = Store(store, self.env)
        self.topics = Topics(self.options, str(config / "topics.json"), self.env)
        self.groups = Groups(self.options, str(config / "subscriptionGroup.json"), self.env)
        self.offsets = Offsets(
            self.options, str(config / "consumerOffset.json"), self.store, self.env
        )
        self.clients = Clients(self.options, self.topics, self.groups, clock)
        self.decisions = Decisions()
        deferral = Deferral(
            DelayLevels("1s 5s 10s"),
            self.topics,
            clock,
            timer_delay_seconds_max=60,
            timers_full=lambda: False,
        )
        base = foundation(self.options, self.env, self.store, role_of(store))
        members = Members(self.topics, self.groups, self.offsets, self.clients)
        self.transactions = Transactions(
            base, members, deferral, self.decisions, TransactionCounts()
        )
        self.check_back = CheckBack(base, members, self.decisions)
        self._tables = (self.topics, self.groups, self.offsets)

    async def open(self) -> Bank:
        await self.store.start()
        for table in self._tables:
            await table.start()
        return self

    async def close(self) -> None:
        await self.check_back.stop()
        for table in reversed(self._tables):
            await table.stop()
        await self.store.stop()

    async def crash(self, *, forget_offsets: bool = True) -> None:
        """What a killed process leaves: the log, and offsets as far as they were saved."""
        if forget_offsets:
            self.offsets._changed = False
        for table in reversed(self._tables):
            await table.stop()
        await self.store.abandon()

    # --- acting ------------------------------------------------------------------------------

    def producer(self, group: str = "P", port: int = 4242) -> Producer:
        connection = Producer(port)
        beat = bodies.HeartbeatData(
            client_id=f"c{port}", producer_data_set=[bodies.ProducerData(group_name=group)]
        )
        self.clients.heart_beat(
            HeartBeat(body=bodies.encode(beat)),
            call_of(connection, code=34),
        )
        return connection

    async def half(
        self, body: bytes = b"paid", queue: int = 1, *, born_ms: int | None = None, **more: str
    ) -> Stored:
        """A half for queue `queue` of topic T, as a send leaves it."""
        pairs = {"TRAN_MSG": "true", "PGROUP": "P", "UNIQ_KEY": body.decode(), **more}
        draft = Draft("T", queue, body, "", STORE_HOST, STORE_HOST, flag=7, sys_flag=4)
        draft.born_ms = self.clock.ms if born_ms is None else born_ms
        make_half(draft, pairs)
        draft.properties = format_properties(pairs)
        stored = self.store.append(draft)
        await self.store.durable(stored.end)
        return stored

    async def end(self, half: Any, verdict: int = COMMIT, **changes: Any) -> Any:
        """The producer's word about a half, or about what it was asked."""
        if isinstance(half, CheckTransactionState):
            places = half.tran_state_table_offset, half.commit_log_offset
        else:
            places = half.queue_offset, half.log_offset
        fields: dict[str, Any] = {
            "producer_group": "P",
            "tran_state_table_offset": places[0],
            "commit_log_offset": places[1],
            "commit_or_rollback": verdict,
            "msg_id": "m",
        }
        ask = EndTransaction(**{**fields, **changes})
        outcome: Any = self.transactions.end(ask, call_of(code=37))
        return await outcome_of(outcome)

    async def look(self, later_ms: int = 0) -> None:
        self.clock.ms += later_ms
        await self.check_back.look()

    # --- seeing ------------------------------------------------------------------------------

    def read(self, topic: str = "T", queue: int = 1) -> list[Record]:
        records: list[Record] = []
        while True:
            batch = self.store.read(topic, queue, len(records), 1000)
            if not batch.count:
                return records
            records += iter_records(batch.data)

    def bodies(self, topic: str = "T", queue: int = 1) -> list[bytes]:
        return [record.body for record in self.read(topic, queue)]

    def halves(self) -> list[Record]:
        return self.read(HALF_TOPIC, 0)

    def ops(self) -> list[bytes]:
        return self.bodies(OP_HALF_TOPIC, 0)

    def progress(self) -> tuple[int, int]:
        """Saved offsets of the half and of the op queue."""
        return (
            self.offsets.query(TRANSACTION_GROUP, HALF_TOPIC, 0),
            self.offsets.query(TRANSACTION_GROUP, OP_HALF_TOPIC, 0),
        )

    async def until(self, done: Callable[[], bool], seconds: float = 60) -> None:
        async with asyncio.timeout(seconds):
            while not done():
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def bank(path: Path, clock: SetClock, **changes: Any) -> AsyncIterator[Bank]:
    kit = await Bank(path, clock, **changes).open()
    try:
        yield kit
    finally:
        await kit.close()
