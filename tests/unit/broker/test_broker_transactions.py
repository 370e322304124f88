from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.broker_clients_kit import running_broker, until
from tests.unit.broker.broker_fakes import STORE_HOST, call_of, outcome_of
from tests.unit.broker.later_kit import START_MS, SetClock
from tests.unit.broker.transaction_kit import COMMIT, ROLLBACK, UNKNOWN, Bank, bank

from cosmodrome.broker.later.halves import copied
from cosmodrome.errors import Code, ProtocolError, Refused, StoreUnwritable
from cosmodrome.store.store import Draft, PutStatus
from cosmodrome.wire import commands
from cosmodrome.wire.commands.transaction import (
    CheckTransactionState,
    EndTransaction,
    ResumeCheckHalfMessage,
)
from cosmodrome.wire.message import offset_message_id
from cosmodrome.wire.names import HALF_TOPIC, OP_HALF_TOPIC, SCHEDULE_TOPIC
from cosmodrome.wire.table import Call, Reply


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


# --- the end ---------------------------------------------------------------------------------


async def test_a_commit_stores_the_message_and_closes_the_half(
    tmp_path: Path, clock: SetClock
) -> None:
    async with bank(tmp_path, clock) as kit:
        half = await kit.half(TAGS="A", WAIT="true")
        assert kit.bodies() == []
        clock.ms += 5
        assert (await kit.end(half)).code == Code.SUCCESS
        (record,) = kit.read()
        (before,) = kit.halves()
        assert before.sys_flag == 0
        assert record.sys_flag == 8
        assert record.prepared_offset == half.log_offset
        assert record.properties == before.properties  # with REAL_TOPIC and TRAN_MSG, as upstream
        assert record.pairs()["REAL_QID"] == "1"
        assert (record.flag, record.born_ms, record.store_ms) == (7, START_MS, START_MS + 5)
        (op,) = kit.read(OP_HALF_TOPIC, 0)
        assert (op.body, op.properties) == (b"0", "WAIT\x01true\x02TAGS\x01d")
        assert (op.born_ms, op.born_host) == (START_MS + 5, op.store_host)
        assert kit.topics.get(OP_HALF_TOPIC) is None
        assert kit.transactions.committed_total == 1


async def test_a_rollback_only_closes_the_half(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        await kit.half(b"one")
        second = await kit.half(b"two")
        assert (await kit.end(second, ROLLBACK)).code == Code.SUCCESS
        assert kit.bodies() == []
        assert kit.ops() == [b"1"]
        assert kit.transactions.rolled_back_total == 1


@pytest.mark.parametrize("verdict", [UNKNOWN, 4, 99, -1])
async def test_undecided_gets_no_answer(tmp_path: Path, clock: SetClock, verdict: int) -> None:
    async with bank(tmp_path, clock) as kit:
        half = await kit.half()
        assert await kit.end(half, verdict) is None
        assert kit.ops() == []


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"producer_group": "Q"}, "another producer group than Q"),
        ({"tran_state_table_offset": 1}, "tranStateTableOffset 1"),
        ({"commit_log_offset": 1}, "no half message at log offset 1"),
        ({"commit_log_offset": -1}, "no half message at log offset -1"),
        ({"commit_log_offset": 1 << 40}, "no half message"),
    ],
)
@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
async def test_an_end_that_does_not_fit_is_refused(
    tmp_path: Path, clock: SetClock, changes: dict[str, Any], word: str, verdict: int
) -> None:
    async with bank(tmp_path, clock) as kit:
        half = await kit.half()
        with pytest.raises(Refused, match=word) as caught:
            await kit.end(half, verdict, **changes)
        assert caught.value.code == Code.SYSTEM_ERROR
        assert (kit.bodies(), kit.ops()) == ([], [])


async def test_an_ordinary_message_cannot_be_committed(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        await kit.end(await kit.half())
        (message,) = kit.read()
        with pytest.raises(Refused, match="no half message"):
            await kit.end(message)
        assert len(kit.bodies()) == 1


async def test_a_slave_ends_nothing(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        half = await kit.half()
    async with bank(tmp_path, clock, role="SLAVE") as kit:
        for verdict in (COMMIT, ROLLBACK, UNKNOWN):
            with pytest.raises(Refused) as caught:
                await kit.end(half, verdict)
            assert caught.value.code == Code.SLAVE_NOT_AVAILABLE


async def test_a_delayed_transaction_is_delayed_by_its_commit(
    tmp_path: Path, clock: SetClock
) -> None:
    async with bank(tmp_path, clock) as kit:
        await kit.end(await kit.half(DELAY="9"))
        assert kit.bodies() == []
        (record,) = kit.read(SCHEDULE_TOPIC, 2)  # the highest level
        assert record.pairs()["REAL_TOPIC"] == "T"
        assert (record.pairs()["DELAY"], record.sys_flag) == ("3", 8)
        assert kit.ops() == [b"0"]


async def test_a_half_without_destination_is_not_committed(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        await kit.half()
        (record,) = kit.halves()
        for number, (name, value) in enumerate(
            [("REAL_TOPIC", "../x"), ("REAL_QID", "-1"), ("REAL_QID", "nine")], 1
        ):
            pairs = record.pairs() | {name: value}
            draft = copied(record, pairs)
            bad = kit.store.append(draft)
            await kit.store.durable(bad.end)
            assert bad.queue_offset == number
            with pytest.raises(Refused):
                await kit.end(bad)
        assert kit.ops() == []


# --- twice -----------------------------------------------------------------------------------


async def test_the_same_word_twice_counts_once(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        half = await kit.half()
        first, second = await asyncio.gather(kit.end(half), kit.end(half))
        assert (first.code, second.code) == (0, 0)
        assert (await kit.end(half)).code == 0
        assert (kit.bodies(), kit.ops()) == ([b"paid"], [b"0"])


@pytest.mark.parametrize(("first", "second"), [(COMMIT, ROLLBACK), (ROLLBACK, COMMIT)])
async def test_the_first_decision_stands(
    tmp_path: Path, clock: SetClock, first: int, second: int
) -> None:
    async with bank(tmp_path, clock) as kit:
        half = await kit.half()
        await kit.end(half, first)
        with pytest.raises(Refused, match="first decision stands"):
            await kit.end(half, second)
        assert kit.bodies() == ([b"paid"] if first == COMMIT else [])


async def test_a_failed_end_can_be_said_again(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bank(tmp_path, clock) as kit:
        half = await kit.half()

        async def lost(end: int, *, wait: bool = True) -> PutStatus:
            await asyncio.sleep(0.01)
            raise StoreUnwritable("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(kit.store, "durable", lost)
            patch.setattr(kit.store, "append_batch", lambda drafts: [half])
            outcomes = await asyncio.gather(
                kit.end(half), kit.end(half), kit.end(half, ROLLBACK), return_exceptions=True
            )
        assert [type(outcome) for outcome in outcomes] == [StoreUnwritable] * 3
        assert kit.bodies() == []
        await kit.end(half)
        assert kit.bodies() == [b"paid"]


# --- after a crash ---------------------------------------------------------------------------


async def test_a_half_survives_and_can_be_committed(tmp_path: Path, clock: SetClock) -> None:
    kit = await Bank(tmp_path, clock).open()
    half = await kit.half()
    await kit.crash()
    async with bank(tmp_path, clock) as kit:
        await kit.end(half)
        assert kit.bodies() == [b"paid"]


async def test_a_commit_survives(tmp_path: Path, clock: SetClock) -> None:
    kit = await Bank(tmp_path, clock).open()
    await kit.end(await kit.half())
    await kit.crash()
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        await kit.look(60_000)
        assert (kit.bodies(), kit.ops(), producer.asked) == ([b"paid"], [b"0"], [])
        assert kit.progress() == (1, 1)


async def test_a_message_without_its_op_leads_to_a_question(
    tmp_path: Path, clock: SetClock
) -> None:
    """The log was cut between the two records of a commit: twice is allowed, never is not."""
    kit = await Bank(tmp_path, clock).open()
    await kit.end(await kit.half())
    (message,) = kit.read()
    await kit.crash()
    path = tmp_path / "commitlog" / ("0" * 20)
    data = path.read_bytes()
    cut = message.log_offset + message.size
    path.write_bytes(data[:cut] + bytes(len(data) - cut))
    async with bank(tmp_path, clock) as kit:
        assert (kit.bodies(), kit.ops()) == ([b"paid"], [])
        producer = kit.producer()
        await kit.look(60_000)
        await kit.end(producer.asked[0])
        assert kit.bodies() == [b"paid", b"paid"]
        await kit.look(60_000)
        assert len(producer.asked) == 1


# --- once more -------------------------------------------------------------------------------


async def test_resume(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock, transaction_check_max=1) as kit:
        producer = kit.producer()
        await kit.half()
        await kit.look(60_000)
        await kit.look(60_000)
        (given_up,) = kit.read("TRANS_CHECK_MAX_TIME_TOPIC", 0)
        assert len(producer.asked) == 1
        ask = ResumeCheckHalfMessage(
            msg_id=offset_message_id(given_up.store_host, given_up.log_offset)
        )
        assert (await outcome_of(kit.transactions.resume(ask, call_of(code=323)))).code == 0
        assert kit.halves()[-1].pairs()["TRANSACTION_CHECK_TIMES"] == "0"
        config = kit.topics.get(HALF_TOPIC)
        assert config is not None and config.write_queue_nums == 1
        await kit.look(60_000)
        await kit.end(producer.asked[1])
        assert kit.bodies() == [b"paid"]


async def test_resume_takes_any_message_but_asks_nobody(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        stored = kit.store.append(Draft("T", 0, b"plain", "", STORE_HOST, STORE_HOST))
        await kit.store.durable(stored.end)
        ask = ResumeCheckHalfMessage(msg_id=offset_message_id(STORE_HOST, stored.log_offset))
        assert (await outcome_of(kit.transactions.resume(ask, call_of(code=323)))).code == 0
        await kit.look(60_000)
        assert kit.progress()[0] == 1
        assert len(kit.halves()) == 1


@pytest.mark.parametrize(
    ("msg_id", "error"), [("", ProtocolError), ("zz", ProtocolError), ("0" * 31 + "1", Refused)]
)
async def test_resume_of_nothing(
    tmp_path: Path, clock: SetClock, msg_id: str, error: type[Exception]
) -> None:
    async with bank(tmp_path, clock) as kit:
        with pytest.raises(error):
            await outcome_of(
                kit.transactions.resume(ResumeCheckHalfMessage(msg_id=msg_id), call_of(code=323))
            )
        assert kit.halves() == []


# --- over the wire ---------------------------------------------------------------------------


class Ledger:
    """A producer that knows how its transactions ended."""

    def __init__(self) -> None:
        self.asked: list[CheckTransactionState] = []

    @CheckTransactionState.handler
    def check(self, ask: CheckTransactionState, call: Call) -> Reply:
        self.asked.append(ask)
        return Reply()


def end_of(sent: Any, verdict: int, log_offset: int | None = None) -> EndTransaction:
    return EndTransaction(
        producer_group="P",
        tran_state_table_offset=sent.queue_offset,
        commit_log_offset=int(sent.msg_id[16:], 16) if log_offset is None else log_offset,
        commit_or_rollback=verdict,
        from_transaction_check=False,
        msg_id="m",
    )


TRANSACTIONAL = "TRAN_MSG\x01true\x02PGROUP\x01P\x02UNIQ_KEY\x01u1\x02WAIT\x01true"


async def test_a_whole_transaction(tmp_path: Path) -> None:
    settings = {"transaction_check_interval": 20, "transaction_time_out": 100}
    async with running_broker(tmp_path, **settings) as here:
        ledger = Ledger()
        producer = await here.client("c1", ledger).join()
        sent = await producer.send(b"paid", properties=TRANSACTIONAL, sys_flag=4, queue_id=1)
        assert (sent.code, sent.queue_id, sent.queue_offset) == (0, 1, 0)
        assert await producer.pull(queue_id=1) == []
        (half,) = await producer.pull(HALF_TOPIC)
        assert half.sys_flag == 0
        assert half.pairs() == {
            "TRAN_MSG": "true",
            "PGROUP": "P",
            "UNIQ_KEY": "u1",
            "WAIT": "true",
            "CLUSTER": "DefaultCluster",
            "REAL_TOPIC": "T",
            "REAL_QID": "1",
        }
        producer.channel.push(end_of(sent, COMMIT))
        second = await producer.send(b"lost", properties=TRANSACTIONAL, sys_flag=4)
        producer.channel.push(end_of(second, ROLLBACK))
        records = await producer.pull(queue_id=1)
        assert [record.body for record in records] == [b"paid"]
        # The third is forgotten by its producer, until the broker asks.
        await producer.send(b"late", properties=TRANSACTIONAL, sys_flag=4)
        await until(lambda: bool(ledger.asked))
        question = ledger.asked[0]
        await producer.call(
            EndTransaction(
                producer_group="P",
                tran_state_table_offset=question.tran_state_table_offset,
                commit_log_offset=question.commit_log_offset,
                commit_or_rollback=COMMIT,
                from_transaction_check=True,
                msg_id=question.msg_id or "",
                transaction_id=question.transaction_id,
            )
        )
        assert [record.body for record in await producer.pull()] == [b"late"]
        asked = len(ledger.asked)
        await asyncio.sleep(0.1)
        assert len(ledger.asked) == asked


async def test_a_transaction_across_a_restart(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as here:
        producer = await here.client().join()
        sent = await producer.send(b"paid", properties=TRANSACTIONAL, sys_flag=4)
    async with running_broker(tmp_path) as here:
        producer = await here.client().join()
        await producer.call(end_of(sent, COMMIT))
        with pytest.raises(Refused, match="no half message"):
            await producer.call(end_of(sent, COMMIT, log_offset=7))
    async with running_broker(tmp_path) as here:
        assert [record.body for record in await here.client().pull()] == [b"paid"]


async def test_a_half_is_answered_when_it_is_safe(tmp_path: Path) -> None:
    """With WAIT=false, too: otherwise the producer's word could come before the half."""
    async with running_broker(tmp_path) as here:
        producer = await here.client().join()
        for _ in range(20):
            properties = TRANSACTIONAL.replace("WAIT\x01true", "WAIT\x01false")
            sent = await producer.send(properties=properties, sys_flag=4)
            assert (await producer.call(end_of(sent, ROLLBACK))).code == 0


async def test_retries_of_a_transactional_message_are_no_transactions(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as here:
        producer = await here.client().join("T")  # makes the group and its retry topic
        retry = {"topic": "%RETRY%g", "sys_flag": 4, "reconsume_times": 1}
        await producer.send(b"again", properties=TRANSACTIONAL, **retry)
        (record,) = await producer.pull("%RETRY%g")
        assert (record.body, record.sys_flag) == (b"again", 0)
        bounds = await producer.call(commands.GetMaxOffset(topic=HALF_TOPIC, queue_id=0))
        assert bounds.offset == 0
