from __future__ import annotations

import asyncio
import errno
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.broker_fakes import call_of, outcome_of
from tests.unit.broker.later_kit import START_MS, Later, SetClock, counted_batches, later

from cosmodrome.broker.later.delivery import BATCH_COUNT
from cosmodrome.broker.role import SLAVE
from cosmodrome.env.real import MappedSegment
from cosmodrome.errors import StoreCorrupt, StoreUnwritable
from cosmodrome.store.store import Arrival, Draft, PutStatus, Store
from cosmodrome.wire import fastjson
from cosmodrome.wire.commands.offset import GetAllDelayOffset
from cosmodrome.wire.names import SCHEDULE_TOPIC


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


async def test_a_message_comes_when_it_is_due_and_not_before(
    tmp_path: Path, clock: SetClock
) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"one", "DELAY\x011\x02TAGS\x01a\x02WAIT\x01true", queue=3)
        await kit.put(b"two", "DELAY\x012")
        for moment in (START_MS, START_MS + 999):
            clock.ms = moment
            await kit.pause()
            assert kit.bodies("T", 3) == []
        clock.ms = START_MS + 1000
        await kit.until(lambda: kit.bodies("T", 3) == [b"one"])
        await kit.pause()
        assert kit.bodies() == []
        clock.ms = START_MS + 5000
        await kit.until(lambda: kit.bodies() == [b"two"])
        (record,) = kit.delivered("T", 3)
        assert record.pairs() == {
            "DELAY": "1",
            "TAGS": "a",
            "WAIT": "true",
            "REAL_TOPIC": "T",
            "REAL_QID": "3",
        }
        assert (record.flag, record.born_ms, record.store_ms) == (7, 5, START_MS + 1000)


async def test_a_level_above_the_highest_is_the_highest(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"far", "DELAY\x0199")
        assert kit.store.bounds(SCHEDULE_TOPIC, 2) == (0, 1)
        clock.ms += 10_000
        await kit.until(lambda: kit.bodies() == [b"far"])
        assert kit.delivered()[0].pairs()["DELAY"] == "3"


async def test_a_low_load_message_leaves_at_once(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        clock.ms = START_MS + 1_000_000
        # Due when it arrives: the level was idle and must be woken by the arrival.
        await kit.put(b"x", "DELAY\x011")
        clock.ms += 1000
        await kit.until(lambda: kit.bodies() == [b"x"])


async def test_nothing_is_polled_without_messages(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.pause()
        looks: list[int] = []
        look = kit.delays._step
        kit.delays._step = lambda level: looks.append(1) or look(level)  # type: ignore
        await kit.pause()
        assert looks == []


async def test_order_and_every_message_once(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        for number in range(1000):
            await kit.put(b"%d" % number, "DELAY\x011")
        clock.ms += 1000
        await kit.until(lambda: kit.store.bounds("T", 0)[1] == 1000)
        assert kit.bodies() == [b"%d" % number for number in range(1000)]


# --- progress --------------------------------------------------------------------------------


async def test_progress_survives_a_stop(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"done", "DELAY\x011")
        clock.ms += 1000
        await kit.until(lambda: kit.bodies() == [b"done"])
        await kit.put(b"waits", "DELAY\x011")
        await kit.put(b"later", "DELAY\x013")
    saved = fastjson.loads((tmp_path / "config" / "delayOffset.json").read_bytes())
    assert saved == {"offsetTable": {1: 1}}
    async with later(tmp_path, clock) as kit:
        await kit.pause()
        assert kit.bodies() == [b"done"]
        clock.ms += 1000
        await kit.until(lambda: kit.bodies() == [b"done", b"waits"])
        await kit.until(lambda: kit.delays.figures() == {"scheduleMessageOffset_1": "2,2"})


async def test_the_file_is_upstreams(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock, save_interval_ms=20) as kit:
        await kit.put(b"x", "DELAY\x011")
        await kit.put(b"x", "DELAY\x012")
        clock.ms += 5000
        await kit.until(lambda: len(kit.bodies()) == 2)
        path = tmp_path / "config" / "delayOffset.json"
        await kit.until(lambda: path.exists() and b"2:1" in path.read_bytes())
        assert path.read_bytes() == b'{\n\t"offsetTable":{1:1,2:1\n\t}\n}'
        with pytest.raises(json.JSONDecodeError):  # bare keys, as fastjson writes them
            json.loads(path.read_bytes())


async def test_the_table_is_served_to_slaves(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"x", "DELAY\x013")
        clock.ms += 10_000
        await kit.until(lambda: kit.delays.figures() == {"scheduleMessageOffset_3": "1,1"})
        reply = await outcome_of(
            kit.delays.get_all_delay_offset(GetAllDelayOffset(), call_of(code=45))
        )
        assert reply.code == 0
        assert reply.body == b'{"offsetTable":{3:1}}'


@pytest.mark.parametrize(("saved", "delivered"), [(-3, 3), (0, 3), (2, 1), (3, 0), (99, 0)])
async def test_a_saved_offset_is_kept_inside_the_queue(
    tmp_path: Path, clock: SetClock, saved: int, delivered: int
) -> None:
    kit = await Later(tmp_path, clock).open(deliver=False)
    for _ in range(3):
        await kit.put(b"x", "DELAY\x011")
    await kit.close()
    (tmp_path / "config" / "delayOffset.json").write_text(f'{{"offsetTable":{{1:{saved}}}}}')
    clock.ms += 1000
    async with later(tmp_path, clock) as kit:
        await kit.until(lambda: kit.store.bounds("T", 0)[1] == delivered)
        await kit.pause()
        assert len(kit.bodies()) == delivered


async def test_a_damaged_file_stops_the_start(tmp_path: Path, clock: SetClock) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "delayOffset.json").write_text('{"offsetTable":{"one":"two"}}')
    kit = Later(tmp_path, clock)
    with pytest.raises(StoreCorrupt, match=r"delayOffset.json.*restore"):
        await kit.open()
    await kit.close()


async def test_a_crash_in_the_middle_loses_nothing_and_repeats_little(
    tmp_path: Path, clock: SetClock
) -> None:
    count = 2000
    kit = await Later(tmp_path, clock, save_interval_ms=1).open(deliver=False)
    for number in range(count):
        await kit.put(b"%d" % number, "DELAY\x011")
    clock.ms += 1000
    halfway = asyncio.Event()

    def look(_: Arrival) -> None:
        if kit.store.bounds("T", 0)[1] > 300:
            halfway.set()

    kit.store.arrivals.subscribe(look, topic="T")
    await kit.delays.start()
    await halfway.wait()
    assert kit.store.bounds("T", 0)[1] < count, "too fast to be interrupted"
    await kit.crash()
    async with later(tmp_path, clock) as kit:
        await kit.until(lambda: len(set(kit.bodies())) == count, 20)
        times = Counter(kit.bodies())
        assert len(times) == count
        assert max(times.values()) <= 2


async def test_a_crash_does_not_make_messages_early(tmp_path: Path, clock: SetClock) -> None:
    kit = await Later(tmp_path, clock).open()
    await kit.put(b"x", "DELAY\x013")
    await kit.crash()
    for queue in (tmp_path / "consumequeue" / SCHEDULE_TOPIC).rglob("*"):
        if queue.is_file():
            queue.unlink()  # delivery times are built again from the log
    clock.ms += 9_999
    async with later(tmp_path, clock) as kit:
        await kit.pause()
        assert kit.bodies() == []
        clock.ms += 1
        await kit.until(lambda: kit.bodies() == [b"x"])


async def test_levels_that_are_gone_still_deliver(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"third", "DELAY\x013")
    async with later(tmp_path, clock, levels="1s") as kit:
        clock.ms += 9_999
        await kit.pause()
        assert kit.bodies() == []
        clock.ms += 1
        await kit.until(lambda: kit.bodies() == [b"third"])


async def test_a_slave_delivers_nothing(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"x", "DELAY\x011")
        await kit.put(b"y", "TIMER_DELAY_MS\x0110")
    clock.ms += 60_000
    async with later(tmp_path, clock, role=SLAVE) as kit:
        await kit.pause()
        assert kit.bodies() == []


# --- trouble ---------------------------------------------------------------------------------


async def test_a_clock_that_went_back_strands_nothing_and_hurries_nothing(
    tmp_path: Path, clock: SetClock
) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"x", "DELAY\x011")
        clock.ms -= 3_600_000
        began = time.monotonic()
        await kit.until(lambda: kit.bodies() == [b"x"])
        assert time.monotonic() - began > 0.9
        # The log's own clock stays ahead, so the next message is in the same position.
        began = time.monotonic()
        await kit.put(b"y", "DELAY\x011")
        await kit.until(lambda: kit.bodies() == [b"x", b"y"])
        assert time.monotonic() - began > 0.9


async def test_a_full_disk_only_postpones(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with later(tmp_path, clock) as kit:
        for number in range(10):
            await kit.put(b"%d" % number, "DELAY\x011")
        write = MappedSegment.write
        tries: list[int] = []

        def full(self: MappedSegment, data: Any, position: int) -> None:
            if "commitlog" in self.path:
                tries.append(position)
                raise OSError(errno.ENOSPC, "no space")
            write(self, data, position)

        monkeypatch.setattr(MappedSegment, "write", full)
        clock.ms += 1000
        await kit.until(lambda: bool(tries))
        await kit.pause()
        assert kit.bodies() == []
        assert len(tries) < 10, "no busy loop"
        monkeypatch.setattr(MappedSegment, "write", write)
        await kit.until(lambda: len(kit.bodies()) >= 10, 15)
        assert kit.bodies() == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("status", list(PutStatus)[1:], ids=str)
async def test_a_slow_sync_does_not_deliver_twice(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch, status: PutStatus
) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"x", "DELAY\x011")
        durable = kit.store.durable
        answers = [status, status]
        flush = kit.store._flush
        synced = property(lambda store: 0 if answers else flush.durable_end)
        monkeypatch.setattr(Store, "durable_end", synced)

        async def slow(end: int, *, wait: bool = True) -> PutStatus:
            status = await durable(end, wait=wait)
            return answers.pop() if answers else status

        monkeypatch.setattr(kit.store, "durable", slow)
        clock.ms += 1000
        await kit.until(lambda: not answers)
        await kit.pause()
        assert kit.bodies() == [b"x"]


@pytest.mark.parametrize(
    "status", [PutStatus.SLAVE_NOT_AVAILABLE, PutStatus.FLUSH_SLAVE_TIMEOUT], ids=str
)
async def test_what_only_a_slave_lacks_is_delivered(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch, status: PutStatus
) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"x", "DELAY\x011")
        await kit.put(b"y", "DELAY\x012")
        durable = kit.store.durable
        asked = []

        async def without_slave(end: int, *, wait: bool = True) -> PutStatus:
            await durable(end, wait=wait)
            asked.append(end)
            return status

        monkeypatch.setattr(kit.store, "durable", without_slave)
        clock.ms += 1000
        await kit.until(lambda: kit.bodies() == [b"x"])
        clock.ms += 5000
        await kit.until(lambda: kit.bodies() == [b"x", b"y"])
        assert asked == sorted(set(asked)), "asked once per delivery"


async def test_what_cannot_be_delivered_does_not_block_the_rest(
    tmp_path: Path, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with later(tmp_path, clock) as kit:
        for properties in (
            "DELAY\x011",  # no destination
            "DELAY\x011\x02REAL_TOPIC\x01T\x02REAL_QID\x01-1",
            "DELAY\x011\x02REAL_TOPIC\x01RMQ_SYS_TRANS_HALF_TOPIC\x02REAL_QID\x010",
        ):
            odd = Draft(SCHEDULE_TOPIC, 0, b"odd", properties, bytes(8), bytes(8))
            await kit.store.durable(kit.store.append(odd).end)
        await kit.put(b"good", "DELAY\x011")
        clock.ms += 1000
        await kit.until(lambda: kit.bodies() == [b"good"])
        assert "deferred_without_destination" in caplog.text
        assert "deferred_half_dropped" in caplog.text
        assert kit.store.bounds("RMQ_SYS_TRANS_HALF_TOPIC", 0) == (0, 0)


async def test_a_message_that_became_too_large_is_left_behind(
    tmp_path: Path, clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(bytes(2000), "DELAY\x011")
        await kit.put(b"small", "DELAY\x011")
    clock.ms += 1000
    async with later(tmp_path, clock, max_message_size=1000) as kit:
        await kit.until(lambda: kit.bodies() == [b"small"])
        assert "deferred_undeliverable topic=T" in caplog.text


async def test_an_unexpected_error_is_survived(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"x", "DELAY\x011")
        record, failures = kit.store.record, [RuntimeError("odd")]

        def odd(log_offset: int, size: int | None = None) -> bytes | None:
            if failures:
                raise failures.pop()
            return record(log_offset, size)

        monkeypatch.setattr(kit.store, "record", odd)
        clock.ms += 1000
        await kit.until(lambda: kit.bodies() == [b"x"])


async def test_progress_never_says_more_than_the_disk_holds(
    tmp_path: Path, clock: SetClock
) -> None:
    """With ASYNC_FLUSH a delivered copy can still be lost; the saved offset must not be ahead."""
    kit = await Later(
        tmp_path,
        clock,
        save_interval_ms=1,
        flush_disk_type="ASYNC_FLUSH",
        flush_interval_commit_log=3_600_000,
    ).open()
    await kit.put(b"x", "DELAY\x011")
    clock.ms += 1000
    await kit.until(lambda: kit.bodies() == [b"x"])
    await asyncio.sleep(0.05)
    assert kit.store.facts().flushed_offset < kit.store.facts().written_offset
    assert not (tmp_path / "config" / "delayOffset.json").exists()
    await kit.store._flush.sync_all()
    await kit.until(lambda: (tmp_path / "config" / "delayOffset.json").exists())
    await kit.close()


async def test_start_and_stop_twice(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.delays.start()
        await kit.timers.start()
        await kit.put(b"x", "DELAY\x011")
        await kit.delays.stop()
        await kit.delays.stop()
        await kit.delays.start()
        clock.ms += 1000
        await kit.until(lambda: kit.bodies() == [b"x"])


async def test_a_store_that_stopped_is_waited_for(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"x", "DELAY\x011")
        kit.store._flush.fail("the disk is gone")
        clock.ms += 1000
        await kit.pause()
        assert kit.bodies() == []
        with pytest.raises(StoreUnwritable):
            await kit.put(b"y")


async def test_many_due_messages_leave_in_large_batches(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 20_000
    kit = await Later(tmp_path, clock, mapped_file_size_commit_log=1 << 26).open(deliver=False)
    body = bytes(100)
    for _ in range(count // 500):
        ends = []
        for number in range(500):
            pairs = {"DELAY": "1", "UNIQ_KEY": f"{number:032X}", "TAGS": "a"}
            draft = Draft("T", number % 4, body, "", bytes(8), bytes(8))
            kit.deferral.redirect(draft, pairs)
            draft.properties = "\x02".join(f"{key}\x01{value}" for key, value in pairs.items())
            ends.append(kit.store.append(draft).end)
        await kit.store.durable(ends[-1])
    clock.ms += 1000
    batches = counted_batches(monkeypatch)
    await kit.delays.start()
    await kit.until(lambda: sum(kit.store.bounds("T", q)[1] for q in range(4)) == count, 60)
    await kit.close()
    assert sum(batches) == count
    # A batch ends where the part of the queue begins that is not in its file yet.
    assert len(batches) <= math.ceil(count / BATCH_COUNT) + 2


async def test_what_waits_in_each_level(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"one", "DELAY\x012")
        await kit.put(b"two", "DELAY\x012")
        waiting = {level.level: (level.messages, level.due_ms) for level in kit.delays.waiting()}
        assert waiting == {1: (0, None), 2: (2, START_MS + 5000), 3: (0, None)}
        clock.ms += 5000
        await kit.until(lambda: [level.messages for level in kit.delays.waiting()] == [0, 0, 0])
