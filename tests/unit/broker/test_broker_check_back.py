from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.broker_fakes import STORE_HOST
from tests.unit.broker.later_kit import START_MS, SetClock
from tests.unit.broker.transaction_kit import HOUR_MS, ROLLBACK, Bank, bank

from cosmodrome.broker.later import check_back
from cosmodrome.broker.later.halves import op
from cosmodrome.errors import StoreUnwritable
from cosmodrome.store.store import Draft, Stored
from cosmodrome.wire import fastjson
from cosmodrome.wire.names import CHECK_MAX_TOPIC, HALF_TOPIC, OP_HALF_TOPIC
from cosmodrome.wire.record import decode_record


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


# --- who is asked, and when ------------------------------------------------------------------


async def test_a_producer_is_asked_about_an_old_half(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        half = await kit.half(KEYS="k")
        await kit.look(5999)
        assert producer.asked == []
        assert kit.progress() == (-1, -1)
        await kit.look(1)
        (question,) = producer.asked
        before, copy = kit.halves()
        assert copy.pairs() == before.pairs() | {"TRANSACTION_CHECK_TIMES": "1"}
        assert (copy.born_ms, copy.store_ms) == (START_MS, START_MS + 6000)
        assert (question.tran_state_table_offset, question.commit_log_offset) == (
            1,
            copy.log_offset,
        )
        assert question.msg_id == question.transaction_id == "paid"
        assert question.offset_msg_id == copy.message_id
        shown = decode_record(question.body)
        assert (shown.topic, shown.queue_id, shown.body) == ("T", 1, b"paid")
        assert (shown.queue_offset, shown.log_offset) == (1, copy.log_offset)
        assert shown.properties == copy.properties
        assert shown.body_is_intact()
        assert kit.progress() == (1, 0)
        # The answer ends it for good.
        await kit.end(question)
        assert kit.bodies() == [b"paid"]
        assert kit.ops() == [b"1"]
        await kit.look(60_000)
        assert len(producer.asked) == 1
        assert kit.progress() == (2, 1)
        assert half.queue_offset == 0


async def test_decided_halves_are_not_asked_about(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        halves = [await kit.half(b"%d" % number) for number in range(5)]
        for number in (3, 0, 4, 1):  # the order of ends is not that of the halves
            await kit.end(halves[number], ROLLBACK if number % 2 else 8)
        await kit.look(60_000)
        assert [question.msg_id for question in producer.asked] == ["2"]
        assert kit.progress() == (5, 4)
        await kit.end(producer.asked[0])
        assert sorted(kit.bodies()) == [b"0", b"2", b"4"]


async def test_the_op_offset_stays_behind_a_half_that_is_too_young(
    tmp_path: Path, clock: SetClock
) -> None:
    async with bank(tmp_path, clock) as kit:
        old = await kit.half(b"old")
        clock.ms += 60_000
        await kit.half(b"open")
        young = await kit.half(b"young")
        await kit.end(old)
        await kit.end(young)
        await kit.end(young)
        await kit.look()
        assert kit.progress() == (1, 1)  # the op of `young` is needed again
        await kit.look(60_000)
        assert kit.progress() == (3, 2)


async def test_ops_of_newer_brokers_name_several_halves(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        for number in range(6):
            await kit.half(b"%d" % number)
        for body, tag in ((b"0,2,", "d"), (b"3,", "d"), (b"4", "other"), (b"", "d"), (b"5,x", "d")):
            draft = op(0, STORE_HOST, clock.ms)
            draft.body, draft.properties = body, f"TAGS\x01{tag}"
            await kit.store.durable(kit.store.append(draft).end)
        await kit.look(60_000)
        assert [question.msg_id for question in producer.asked] == ["1", "4"]
        assert kit.progress() == (6, 5)


async def test_producers_take_turns_and_absent_ones_are_left_out(
    tmp_path: Path, clock: SetClock
) -> None:
    async with bank(tmp_path, clock) as kit:
        one, two, gone = (kit.producer(port=port) for port in (1, 2, 3))
        stranger = kit.producer("Q", port=4)
        gone.closed = True
        for number in range(8):
            await kit.half(b"%d" % number)
        await kit.look(60_000)
        assert len(one.asked) + len(two.asked) == 8
        assert one.asked and two.asked
        assert not gone.asked and not stranger.asked
        assert kit.check_back.asked_total == 8


async def test_without_a_producer_the_counter_still_grows(
    tmp_path: Path, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with bank(tmp_path, clock) as kit:
        await kit.half()
        await kit.look(60_000)
        assert "transaction_without_producer group=P" in caplog.text
        assert kit.halves()[-1].pairs()["TRANSACTION_CHECK_TIMES"] == "1"


async def test_a_half_from_the_future_is_asked_about_at_once(
    tmp_path: Path, clock: SetClock
) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        await kit.half(born_ms=START_MS + 100_000)
        await kit.look()
        assert producer.asked == []  # stored after the look began
        await kit.look(1)
        assert len(producer.asked) == 1


# --- times of their own ----------------------------------------------------------------------


async def test_a_half_may_ask_for_more_time(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        slow = await kit.half(b"slow", CHECK_IMMUNITY_TIME_IN_SECONDS="100")
        await kit.half(b"plain")
        await kit.look(60_000)
        # It makes way for those behind it, and is not asked about.
        assert [question.msg_id for question in producer.asked] == ["plain"]
        copy = kit.halves()[2]
        assert copy.pairs()["TRAN_PREPARED_QUEUE_OFFSET"] == "0"
        assert "TRANSACTION_CHECK_TIMES" not in copy.pairs()
        # The producer ends it under the name it knows.
        await kit.end(slow)
        await kit.look(60_000)
        assert [question.msg_id for question in producer.asked] == ["plain", "plain"]
        assert kit.bodies() == [b"slow"]


async def test_an_end_under_the_first_name_is_understood_after_a_crash(
    tmp_path: Path, clock: SetClock
) -> None:
    kit = await Bank(tmp_path, clock).open()
    slow = await kit.half(b"slow", CHECK_IMMUNITY_TIME_IN_SECONDS="100")
    await kit.look(10_000)
    await kit.look(10_000)
    assert [record.pairs().get("TRAN_PREPARED_QUEUE_OFFSET") for record in kit.halves()] == [
        None,
        "0",
        "0",
    ]
    await kit.crash(forget_offsets=False)
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        await kit.end(slow)
        assert kit.ops() == [b"0"]  # nothing is known of the copies
        await kit.look(200_000)
        assert producer.asked == []
        assert kit.bodies() == [b"slow"]


@pytest.mark.parametrize("seconds", ["-1", "soon", ""])
async def test_a_time_that_is_none_means_the_usual_one(
    tmp_path: Path, clock: SetClock, seconds: str
) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        await kit.half(CHECK_IMMUNITY_TIME_IN_SECONDS=seconds)
        await kit.look(5000)
        assert producer.asked == []
        await kit.look(1000)
        assert len(producer.asked) == 1


async def test_its_own_time_may_be_shorter(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        await kit.half(CHECK_IMMUNITY_TIME_IN_SECONDS="1")
        await kit.look(1000)
        assert len(producer.asked) == 1


# --- giving up -------------------------------------------------------------------------------


async def test_many_questions_without_answer_end_it(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock, transaction_check_max=3) as kit:
        producer = kit.producer()
        await kit.half()
        for _ in range(6):
            await kit.look(60_000)
        assert len(producer.asked) == 3
        (record,) = kit.read(CHECK_MAX_TOPIC, 0)
        assert (record.body, record.pairs()["TRANSACTION_CHECK_TIMES"]) == (b"paid", "3")
        config = kit.topics.get(CHECK_MAX_TOPIC)
        assert config is not None
        assert (config.write_queue_nums, config.perm) == (1, 6)
        assert kit.check_back.given_up_total == 1
        assert kit.progress()[0] == kit.store.bounds(HALF_TOPIC, 0)[1]


async def test_age_ends_it_too(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        await kit.half()
        await kit.look(72 * HOUR_MS + 1)
        assert producer.asked == []
        assert kit.bodies(CHECK_MAX_TOPIC, 0) == [b"paid"]


# --- one decision ----------------------------------------------------------------------------


async def test_a_late_word_about_the_first_copy_closes_the_newest(
    tmp_path: Path, clock: SetClock
) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        half = await kit.half()
        await kit.look(60_000)
        await kit.look(60_000)
        assert len(producer.asked) == 2
        await kit.end(half)
        assert kit.ops() == [b"0", b"2"]
        for question in producer.asked:  # answered as well, by a busy producer
            assert (await kit.end(question)).code == 0
        await kit.look(60_000)
        assert kit.bodies() == [b"paid"]
        assert len(producer.asked) == 2
        assert kit.progress() == (3, 2)


async def test_an_end_on_its_way_is_waited_for(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        half = await kit.half()
        durable, release = kit.store.durable, asyncio.Event()

        async def slow(end: int, *, wait: bool = True) -> Any:
            waiting = durable(end, wait=wait)
            await release.wait()
            return await waiting

        with monkeypatch.context() as patch:
            patch.setattr(kit.store, "durable", slow)
            # Hide the op, as a disk does that has not synced it yet.
            patch.setattr(check_back.Ops, "read", lambda self: False)
            ending = asyncio.create_task(kit.end(half))
            await asyncio.sleep(0.01)
            looking = asyncio.create_task(kit.look(60_000))
            await asyncio.sleep(0.02)
            assert not looking.done()
            release.set()
            await ending
            await looking
        assert producer.asked == []
        assert len(kit.halves()) == 1


# --- crashes and bad days --------------------------------------------------------------------


async def test_questions_go_on_after_a_crash(tmp_path: Path, clock: SetClock) -> None:
    kit = await Bank(tmp_path, clock).open()
    await kit.half(b"a")
    await kit.half(b"b")
    kit.producer()
    await kit.look(60_000)
    await kit.crash()  # the copies are stored, the progress is not
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        assert kit.progress() == (-1, -1)
        await kit.look(60_000)
        assert {question.msg_id for question in producer.asked} == {"a", "b"}
        for question in producer.asked:
            await kit.end(question)
        assert set(kit.bodies()) == {b"a", b"b"}
        asked = len(producer.asked)
        await kit.look(60_000)
        assert len(producer.asked) == asked


async def test_progress_is_upstreams_file(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        await kit.end(await kit.half())
        await kit.look(60_000)
    saved = fastjson.loads((tmp_path / "config" / "consumerOffset.json").read_bytes())
    assert saved == {
        "offsetTable": {
            f"{HALF_TOPIC}@CID_RMQ_SYS_TRANS": {0: 1},
            f"{OP_HALF_TOPIC}@CID_RMQ_SYS_TRANS": {0: 1},
        }
    }
    async with bank(tmp_path, clock) as kit:
        assert kit.progress() == (1, 1)


async def test_progress_outside_of_the_queues_is_put_right(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        kit.offsets.commit("CID_RMQ_SYS_TRANS", HALF_TOPIC, 0, 99)
        kit.offsets.commit("CID_RMQ_SYS_TRANS", OP_HALF_TOPIC, 0, 99)
        await kit.half(b"skipped")
        await kit.look(60_000)
        assert producer.asked == []
        await kit.half(b"seen")
        kit.offsets.commit("CID_RMQ_SYS_TRANS", HALF_TOPIC, 0, 1)
        await kit.look(60_000)
        assert [question.msg_id for question in producer.asked] == ["seen"]


async def test_a_store_that_takes_nothing_postpones(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        for number in range(3):
            await kit.half(b"%d" % number)
        append, taken = kit.store.append, 0

        def full(draft: Draft) -> Stored:
            nonlocal taken
            if taken == 1:
                raise StoreUnwritable("the disk is full")
            taken += 1
            return append(draft)

        with monkeypatch.context() as patch:
            patch.setattr(kit.store, "append", full)
            await kit.look(60_000)
        assert [question.msg_id for question in producer.asked] == ["0"]
        assert kit.progress()[0] == 1
        await kit.look()
        assert [question.msg_id for question in producer.asked] == ["0", "1", "2"]


async def test_copies_that_were_lost_leave_no_trace(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        half = await kit.half()

        async def lost(end: int, *, wait: bool = True) -> Any:
            raise StoreUnwritable("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(kit.store, "durable", lost)
            patch.setattr(kit.store, "append", lambda draft: Stored(99_999, 10, 0, 1))
            with pytest.raises(StoreUnwritable):
                await kit.look(60_000)
        assert producer.asked == []
        assert kit.progress() == (-1, -1)
        # The place of the lost copy goes to another transaction, which must stay open.
        other = await kit.half(b"other")
        assert other.queue_offset == 1
        await kit.end(half)
        assert kit.ops() == [b"0"]


async def test_a_look_that_could_not_note_its_progress_copies_nothing_again(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        await kit.half()

        async def not_yet() -> bool:
            return False

        with monkeypatch.context() as patch:
            patch.setattr(kit.check_back, "_synced", not_yet)
            await kit.look(60_000)
        assert kit.progress() == (-1, -1)
        await kit.look(60_000)
        assert [r.pairs().get("TRANSACTION_CHECK_TIMES") for r in kit.halves()] == [None, "1", "2"]
        assert len(producer.asked) == 1


async def test_progress_waits_for_the_sync(tmp_path: Path, clock: SetClock) -> None:
    async with bank(
        tmp_path, clock, flush_disk_type="ASYNC_FLUSH", flush_interval_commit_log=200
    ) as kit:
        kit.producer()
        await kit.half()
        looking = asyncio.create_task(kit.look(60_000))
        await kit.until(lambda: len(kit.halves()) == 2)
        assert kit.progress() == (-1, -1)
        await looking
        facts = kit.store.facts()
        assert facts.flushed_offset >= kit.halves()[1].log_offset + kit.halves()[1].size
        assert kit.progress() == (1, 0)


async def test_many_are_done_in_batches_and_windows(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_back, "WINDOW_MAX", 64)
    monkeypatch.setattr(check_back, "BATCH_COUNT", 10)
    monkeypatch.setattr(check_back, "OPS_PER_TURN", 7)
    async with bank(tmp_path, clock) as kit:
        producer = kit.producer()
        halves = [await kit.half(b"%d" % number) for number in range(150)]
        for half in reversed(halves[::3]):
            await kit.end(half)
        clock.ms += 60_000
        windows = 0
        while await kit.check_back.look():
            windows += 1
        assert windows == 2
        wanted = {str(number) for number in range(150) if number % 3}
        assert [q.msg_id for q in producer.asked] == sorted(wanted, key=int)
        assert kit.progress() == (150, 50)


async def test_the_task_looks_by_itself_and_stops_cleanly(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bank(tmp_path, clock, transaction_check_interval=5) as kit:
        producer = kit.producer()
        await kit.half()
        clock.ms += 60_000
        real, failures = kit.check_back.look, [RuntimeError("boom"), StoreUnwritable("full")]

        async def look() -> bool:
            if failures:
                raise failures.pop()
            return await real()

        monkeypatch.setattr(kit.check_back, "look", look)
        await kit.check_back.start()
        await kit.check_back.start()
        await kit.until(lambda: bool(producer.asked))
        await kit.check_back.stop()
        await kit.check_back.stop()
        asked = len(producer.asked)
        clock.ms += 60_000
        await asyncio.sleep(0.03)
        assert len(producer.asked) == asked


async def test_a_slave_asks_nobody(tmp_path: Path, clock: SetClock) -> None:
    async with bank(tmp_path, clock, role="SLAVE", transaction_check_interval=1) as kit:
        await kit.check_back.start()
        assert kit.check_back._task is None
