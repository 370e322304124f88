from __future__ import annotations

import errno
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.broker_fakes import call_of, foundation, outcome_of
from tests.unit.broker.later_kit import START_MS, Later, SetClock, counted_batches, later

from cosmodrome.broker.later import timers as module
from cosmodrome.broker.later.delivery import BATCH_COUNT
from cosmodrome.broker.later.recall import Handle, Recall, make_handle, parse_handle
from cosmodrome.broker.later.timer_list import TimerList
from cosmodrome.broker.role import MASTER, SLAVE, Role
from cosmodrome.env.real import MappedSegment
from cosmodrome.errors import Code, Refused, StoreCorrupt
from cosmodrome.store.store import Draft
from cosmodrome.wire import bodies
from cosmodrome.wire.bodies import TopicConfig
from cosmodrome.wire.commands.produce import ListPendingTimers, RecallMessage
from cosmodrome.wire.names import TIMER_TOPIC
from cosmodrome.wire.report_bodies import PendingTimers


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


def at(ms: int, key: str = "") -> str:
    return f"TIMER_DELIVER_MS\x01{START_MS + ms}" + (f"\x02UNIQ_KEY\x01{key}" if key else "")


async def recall(
    kit: Later, key: str, ms: int, topic: str = "T", role: Role = MASTER, **changes: Any
) -> Any:
    if kit.topics.get("T") is None:
        kit.topics.put(TopicConfig(topic_name="T"))
    service = Recall(foundation(kit.options, kit.env, kit.store, role), kit.topics, kit.deferral)
    handle = make_handle(Handle("T", "b0", START_MS + ms, key))
    ask = RecallMessage(
        **{"producer_group": "P", "topic": topic, "recall_handle": handle} | changes
    )
    return await outcome_of(service.recall(ask, call_of(code=370)))


async def test_messages_come_in_the_order_of_their_times(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"third", at(3000))
        await kit.put(b"first", "TIMER_DELAY_MS\x011000\x02WAIT\x01true", queue=0)
        await kit.put(b"second", "TIMER_DELAY_SEC\x012")
        assert [one.deliver_ms - START_MS for one in kit.timers.pending(9)] == [1000, 2000, 3000]
        for ms, expected in (
            (999, []),
            (1000, [b"first"]),
            (1999, [b"first"]),
            (2500, [b"first", b"second"]),
            (2999, [b"first", b"second"]),
            (3000, [b"first", b"second", b"third"]),
        ):
            clock.ms = START_MS + ms
            await kit.until(lambda wanted=expected: kit.bodies() == wanted)  # type: ignore
            await kit.pause()
            assert kit.bodies() == expected
        assert kit.delivered()[0].pairs() == {
            "TIMER_DELAY_MS": "1000",
            "TIMER_OUT_MS": str(START_MS + 1000),
            "TIMER_DEQUEUE_MS": str(START_MS + 1000),
            "WAIT": "true",
            "REAL_TOPIC": "T",
            "REAL_QID": "0",
        }
        assert kit.timers.waiting == 0


async def test_a_time_in_the_past_is_now(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        for properties in (at(0), at(-5000), "TIMER_DELAY_MS\x010", "TIMER_DELAY_SEC\x01-7"):
            await kit.put(b"x", properties)
        assert len(kit.bodies()) == 4
        assert kit.store.bounds(TIMER_TOPIC, 0) == (0, 0)


async def test_random_lives(tmp_path: Path, clock: SetClock) -> None:
    """Sends, recalls, deliveries, stops and crashes in any order, against a plain list."""
    for seed in range(12):
        chance = random.Random(seed)
        root = tmp_path / str(seed)
        sent: dict[bytes, int] = {}
        recalled: set[bytes] = set()
        kit = await Later(root, clock, save_interval_ms=chance.choice((1, 3_600_000))).open()
        for number in range(60):
            action = chance.randrange(10)
            name = b"%d" % number
            if action < 6:
                wait_ms = chance.choice((1, 50, 50, 3000))
                sent[name] = clock.ms + wait_ms
                await kit.put(name, f"TIMER_DELAY_MS\x01{wait_ms}\x02UNIQ_KEY\x01{number}")
            elif action == 6 and (waits := [one for one in sent if sent[one] > clock.ms]):
                victim = chance.choice(waits)
                await recall(kit, victim.decode(), sent[victim] - START_MS)
                recalled.add(victim)
            elif action == 7:
                clock.ms += chance.choice((1, 20, 100, 1000))
                await kit.pause()
            else:
                await (kit.crash() if action == 8 else kit.close())
                kit = await Later(root, clock, save_interval_ms=1).open()
        clock.ms += 10_000
        kept = set(sent) - recalled
        await kit.until(lambda kit=kit, kept=kept: set(kit.bodies()) == kept)  # type: ignore
        await kit.until(lambda kit=kit: not kit.timers._cancelled)  # type: ignore
        for record in kit.delivered():
            assert record.store_ms >= sent[record.body]
        assert kit.timers.waiting == 0
        await kit.close()


async def test_full_properties_are_delivered_without_a_stamp(
    tmp_path: Path, clock: SetClock
) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"x", at(10) + "\x02a\x01" + "y" * 32_660)
        clock.ms += 10
        await kit.until(lambda: kit.bodies() == [b"x"])
        assert "TIMER_DEQUEUE_MS" not in kit.delivered()[0].pairs()


async def test_waiting_messages_survive_stop_and_crash(tmp_path: Path, clock: SetClock) -> None:
    """One message holds the low end for long; what was delivered behind it is not repeated."""
    kit = await Later(tmp_path, clock).open()
    await kit.put(b"long", at(100_000))
    for number in range(50):
        await kit.put(b"%d" % number, at(1000 + number))
    clock.ms = START_MS + 1024
    await kit.until(lambda: len(kit.bodies()) == 25)
    await kit.close()
    kit = await Later(tmp_path, clock).open()
    await kit.pause()
    assert len(kit.bodies()) == 25
    await kit.put(b"more", at(2000))
    await kit.crash()
    clock.ms = START_MS + 5000
    async with later(tmp_path, clock) as kit:
        await kit.until(lambda: len(kit.bodies()) == 51)
        await kit.pause()
        assert Counter(kit.bodies()) == Counter([*(b"%d" % n for n in range(50)), b"more"])
        assert [one.deliver_ms - START_MS for one in kit.timers.pending(9)] == [100_000]


async def test_a_crash_in_the_middle_of_delivery(tmp_path: Path, clock: SetClock) -> None:
    count = 2000
    chance = random.Random(3)
    kit = await Later(tmp_path, clock, save_interval_ms=1).open(deliver=False)
    for number in range(count):
        await kit.put(b"%d" % number, at(1 + chance.randrange(500)))
    clock.ms += 1000
    await kit.timers.start()
    await kit.until(lambda: kit.store.bounds("T", 0)[1] > 300)
    assert kit.store.bounds("T", 0)[1] < count, "too fast to be interrupted"
    await kit.crash()
    async with later(tmp_path, clock) as kit:
        await kit.until(lambda: len(set(kit.bodies())) == count, 20)
        times = Counter(kit.bodies())
        assert max(times.values()) <= 2


async def test_the_low_end_moves_with_what_is_done(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        for ms in (10, 5000, 20, 30):
            await kit.put(b"%d" % ms, at(ms))
        clock.ms += 100
        await kit.until(lambda: kit.timers.waiting == 1)
        await kit.until(lambda: kit.timers._document()["lowOffset"] == 1)
        state = kit.timers._document()
        assert state == {"scannedOffset": 4, "deliveredMs": START_MS + 100, "lowOffset": 1}
        clock.ms += 10_000
        await kit.until(lambda: kit.timers._document()["lowOffset"] == 4)
        assert len(kit.timers._done) == 0


async def test_a_full_disk_only_postpones(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with later(tmp_path, clock) as kit:
        for number in range(10):
            await kit.put(b"%d" % number, at(10 + number))
        write = MappedSegment.write

        def full(self: MappedSegment, data: Any, position: int) -> None:
            if "commitlog" in self.path:
                raise OSError(errno.ENOSPC, "no space")
            write(self, data, position)

        monkeypatch.setattr(MappedSegment, "write", full)
        clock.ms += 1000
        await kit.pause()
        assert kit.bodies() == []
        await kit.until(lambda: kit.timers.waiting == 10)  # none of them in hand for another try
        monkeypatch.setattr(MappedSegment, "write", write)
        await kit.until(lambda: len(kit.bodies()) == 10, 15)
        assert kit.bodies() == [b"%d" % number for number in range(10)]


async def test_no_more_than_fit_into_memory(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    async with later(tmp_path, clock) as kit:
        await kit.put(b"1", at(1000))
        await kit.put(b"2", at(1000))
        await kit.until(lambda: kit.timers.waiting == 2)
        with pytest.raises(Refused, match="as many timed messages") as refused:
            await kit.put(b"3", at(1000))
        assert refused.value.code == Code.SYSTEM_ERROR


async def test_a_deleted_topic_takes_its_messages_along(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"gone", at(1000))
        await kit.put(b"gone", at(1000))
        await kit.until(lambda: kit.timers.waiting == 2)
        kit.store.delete_topic(TIMER_TOPIC)
        await kit.put(b"new", at(500))
        clock.ms += 2000
        await kit.until(lambda: kit.bodies() == [b"new"])
        await kit.pause()
        assert kit.bodies() == [b"new"]


async def test_foreign_records_do_no_harm(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        for properties in ("", "TIMER_OUT_MS\x01soon", "REAL_TOPIC\x01T\x02REAL_QID\x010"):
            odd = Draft(TIMER_TOPIC, 0, b"odd", properties, bytes(8), bytes(8))
            await kit.store.durable(kit.store.append(odd).end)
        await kit.put(b"good", at(10))
        clock.ms += 10
        await kit.until(lambda: kit.bodies() == [b"odd", b"good"])


async def test_a_damaged_file_stops_the_start(tmp_path: Path, clock: SetClock) -> None:
    config = tmp_path / "config"
    config.mkdir()
    (config / "timerOffset.json").write_text('{"lowOffset":"x"}')
    kit = Later(tmp_path, clock)
    with pytest.raises(StoreCorrupt, match=r"timerOffset.json.*restore"):
        await kit.open()
    await kit.close()


async def test_a_wait_does_not_poll(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.pause()
        scans: list[int] = []
        scan = kit.timers._scan
        kit.timers._scan = lambda: scans.append(1) or scan()
        await kit.pause()
        assert scans == []


async def test_many_due_messages_leave_in_large_batches(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 10_000
    kit = await Later(tmp_path, clock, mapped_file_size_commit_log=1 << 26).open(deliver=False)
    chance = random.Random(5)
    for _ in range(count // 500):
        end = 0
        for _ in range(500):
            out = START_MS + 1 + chance.randrange(1000)
            properties = f"TIMER_OUT_MS\x01{out}\x02REAL_TOPIC\x01T\x02REAL_QID\x010"
            draft = Draft(TIMER_TOPIC, 0, bytes(100), properties, bytes(8), bytes(8))
            end = kit.store.append(draft).end
        await kit.store.durable(end)
    clock.ms += 1000
    batches = counted_batches(monkeypatch)
    await kit.timers.start()
    await kit.until(lambda: kit.store.bounds("T", 0)[1] == count, 60)
    await kit.close()
    assert sum(batches) == count
    assert len(batches) == math.ceil(count / BATCH_COUNT)


# --- recall ----------------------------------------------------------------------------------


async def test_a_slave_recalls_nothing(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"x", at(1000, "K"))
        with pytest.raises(Refused, match="at its master") as refused:
            await recall(kit, "K", 1000, role=SLAVE)
        assert refused.value.code == Code.SLAVE_NOT_AVAILABLE
        clock.ms += 1000
        await kit.until(lambda: kit.bodies() == [b"x"])


async def test_a_recalled_message_never_comes(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"kept", at(1000, "K1"))
        await kit.put(b"recalled", at(1000, "K2"))
        await kit.put(b"other topic", at(1000, "K2"), topic="U")
        reply = await recall(kit, "K2", 1000)
        assert (reply.code, reply.msg_id) == (0, "K2")
        assert [(one.topic, one.unique_key) for one in kit.timers.pending(9)] == [
            ("T", "K1"),
            ("U", "K2"),
        ]
        clock.ms += 1000
        await kit.until(lambda: bool(kit.bodies("U")))
        await kit.pause()
        assert kit.bodies() == [b"kept"]
        assert kit.timers.waiting == 0
        await kit.until(lambda: not kit.timers._cancelled)


@pytest.mark.parametrize("crash", [False, True])
async def test_a_recall_survives_a_restart(tmp_path: Path, clock: SetClock, crash: bool) -> None:
    kit = await Later(tmp_path, clock).open()
    await kit.put(b"recalled", at(1000, "K"))
    await kit.put(b"kept", at(1000, "L"))
    await recall(kit, "K", 1000)
    await (kit.crash() if crash else kit.close())
    clock.ms += 5000
    async with later(tmp_path, clock) as kit:
        await kit.until(lambda: bool(kit.bodies()))
        await kit.pause()
        assert kit.bodies() == [b"kept"]


async def test_a_client_may_cancel_with_a_send(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        for key in ("K", "L"):
            await kit.put(b"recalled", at(1000, key))
        await kit.put(b"0", at(1000) + "\x02TIMER_DEL_UNIQKEY\x01K")
        await kit.put(b"0", at(1000) + "\x02TIMER_DEL_UNIQKEY\x01T+L")
        clock.ms += 1000
        await kit.until(lambda: kit.timers.waiting == 0)
        assert kit.bodies() == []
        with pytest.raises(Refused, match="is over"):
            await kit.put(b"0", at(1000) + "\x02TIMER_DEL_UNIQKEY\x01K")


async def test_what_cannot_be_recalled(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        cases: list[tuple[dict[str, Any], int, str]] = [
            ({"topic": "Nowhere"}, Code.TOPIC_NOT_EXIST, "Nowhere"),
            ({"topic": "bad name"}, Code.SYSTEM_ERROR, "not allowed"),
            ({"recall_handle": "?"}, Code.ILLEGAL_OPERATION, "not a recall handle"),
            ({"recall_handle": "AAAA"}, Code.ILLEGAL_OPERATION, "not a recall handle"),
            (
                {"recall_handle": make_handle(Handle("U", "b0", START_MS + 5, "K"))},
                Code.ILLEGAL_OPERATION,
                "topic U",
            ),
            (
                {"recall_handle": make_handle(Handle("T", "b1", START_MS + 5, "K"))},
                Code.ILLEGAL_OPERATION,
                "broker b1",
            ),
            (
                {"recall_handle": make_handle(Handle("T", "b0", START_MS, "K"))},
                Code.ILLEGAL_OPERATION,
                "is over",
            ),
        ]
        for changes, code, words in cases:
            with pytest.raises(Refused, match=words) as refused:
                await recall(kit, "K", 1000, **changes)
            assert refused.value.code == code


def test_handles_are_upstreams() -> None:
    """Recorded from a 5.3.3 broker."""
    text = (
        "djEgR1BvcCBicm9rZXItYSAxNzk0NzcyNDU1MDAxIEZEMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAwMDAyMTlD"
        "MDMwOTQ2RTA5NEM1RTYwRkYwMDA2"
    )
    handle = Handle(
        "GPop",
        "broker-a",
        1794772455001,
        "FD00000000000000000000000000000219C030946E094C5E60FF0006",
    )
    assert parse_handle(text) == handle
    assert make_handle(handle) == text


async def listed(kit: Later, **fields: Any) -> tuple[list[Any], Any]:
    answer = await TimerList("b0", kit.timers).list_pending(
        ListPendingTimers(**fields), call_of(code=31001)
    )
    return bodies.decode(PendingTimers, answer.body).pending, answer


async def test_pending_messages_are_listed_page_by_page(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        for number in range(7):
            await kit.put(b"x" * number, at(9000 - number * 1000, f"K{number}"), queue=number % 3)
        await kit.put(b"y", at(5000), topic="U")
        await kit.until(lambda: kit.timers.waiting == 8)
        seen: list[Any] = []
        place: dict[str, Any] = {}
        pages = 0
        while True:
            found, answer = await listed(kit, max_num=3, **place)
            seen += found
            pages += 1
            assert answer.waiting == 8
            if answer.next_deliver_ms is None:
                break
            place = {
                "after_deliver_ms": answer.next_deliver_ms,
                "after_queue_offset": answer.next_queue_offset,
            }
        assert pages == 3
        assert [(one.deliver_ms - START_MS) // 1000 for one in seen] == [3, 4, 5, 5, 6, 7, 8, 9]
        assert [one.msg_id for one in seen if one.topic == "T"] == [
            f"K{n}" for n in range(6, -1, -1)
        ]
        assert parse_handle(seen[0].recall_handle) == Handle("T", "b0", START_MS + 3000, "K6")
        assert seen[0].queue_id == 0 and seen[-1].queue_id == 0 and seen[1].queue_id == 2
        assert all(one.size > 90 for one in seen)
        (other,), answer = await listed(kit, topic="U")
        assert (other.topic, other.msg_id, other.recall_handle) == ("U", "", "")


async def test_a_page_of_a_topic_looks_at_so_many_messages_only(
    tmp_path: Path, clock: SetClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAGE_LOOKED_MAX", 5)
    monkeypatch.setattr(module, "RECORDS_PER_TURN", 2)
    monkeypatch.setattr(module, "KEYS_PER_TURN", 3)
    async with later(tmp_path, clock) as kit:
        for number in range(12):
            await kit.put(b"x", at(1000 + number, f"K{number}"), topic="U" if number == 8 else "T")
        await kit.until(lambda: kit.timers.waiting == 12)
        found, answer = await listed(kit, topic="U")
        assert (found, answer.next_deliver_ms) == ([], START_MS + 1004)
        found, answer = await listed(
            kit, topic="U", after_deliver_ms=START_MS + 1004, after_queue_offset=4
        )
        assert [one.msg_id for one in found] == ["K8"]
        found, answer = await listed(
            kit, topic="U", after_deliver_ms=START_MS + 1009, after_queue_offset=9
        )
        assert (found, answer.next_deliver_ms) == ([], None)


async def test_a_cancelled_message_is_not_listed(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        await kit.put(b"x", at(5000, "K"))
        await recall(kit, "K", 5000)
        await kit.until(lambda: kit.timers.waiting == 2)
        found, answer = await listed(kit)
        assert found == [] and answer.next_deliver_ms is None


@pytest.mark.parametrize(
    "fields", [{"max_num": 0}, {"max_num": -5}, {"after_queue_offset": 2**48}, {"topic": "a/b"}]
)
async def test_a_wrong_question_for_pending_messages_is_refused(
    tmp_path: Path, clock: SetClock, fields: dict[str, Any]
) -> None:
    kit = Later(tmp_path, clock)
    with pytest.raises(Refused):
        await listed(kit, **fields)


async def test_when_the_next_one_is_due(tmp_path: Path, clock: SetClock) -> None:
    async with later(tmp_path, clock) as kit:
        assert (kit.timers.next_due_ms, kit.timers.scanned) == (None, 0)
        await kit.put(b"x", f"TIMER_DELIVER_MS\x01{START_MS + 9000}")
        await kit.put(b"y", f"TIMER_DELIVER_MS\x01{START_MS + 4000}")
        await kit.until(lambda: kit.timers.scanned == 2)
        assert kit.timers.next_due_ms == START_MS + 4000
