"""Places in the log, rolling, limits, and what ends up in the files."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from tests.unit.store.store_kit import (
    HOST,
    Faults,
    HandClock,
    bodies,
    draft,
    faulty_env,
    put,
    record_size,
    records,
    small,
)

from cosmodrome.errors import MessageTooLarge, StoreError, StoreUnwritable
from cosmodrome.layout import BLANK, MAGIC_BLANK, SYS_COMMIT, SYS_PREPARED, SYS_ROLLBACK
from cosmodrome.store.commit_log import log as log_module
from cosmodrome.store.store import PutStatus, Store


@pytest.fixture
async def store(tmp_path: Path) -> Store:
    opened = Store(small(tmp_path), faulty_env())
    await opened.start()
    return opened


async def test_places_follow_each_other(store: Store) -> None:
    first, second = store.append(draft(b"a")), store.append(draft(b"b", queue_id=4))
    third = store.append(draft(b"c"))
    assert (first.log_offset, first.size) == (0, record_size(draft(b"a")))
    assert second.log_offset == first.end and third.log_offset == second.end
    assert [item.queue_offset for item in (first, second, third)] == [0, 0, 1]
    assert second.queue_id == 4
    await store.durable(third.end)
    await store.stop()


async def test_nothing_is_visible_before_it_is_settled(store: Store) -> None:
    stored = store.append(draft(b"a"))
    assert store.bounds("T", 0) == (0, 0)
    assert store.record(stored.log_offset) is None
    await store.durable(stored.end)
    assert store.bounds("T", 0) == (0, 1)
    assert store.record(stored.log_offset) is not None
    await store.stop()


async def test_a_message_that_does_not_fit_goes_to_the_next_file(
    store: Store, tmp_path: Path
) -> None:
    stored = [store.append(draft(bytes(900))) for _ in range(9)]
    await store.durable(stored[-1].end)
    size = record_size(draft(bytes(900)))
    assert [item.log_offset for item in stored[:5]] == [0, size, 2 * size, 3 * size, 4096]
    data = (tmp_path / "commitlog" / ("0" * 20)).read_bytes()
    left = 4096 - 4 * size
    assert BLANK.unpack_from(data, 4 * size) == (left, MAGIC_BLANK)
    assert not any(data[4 * size + 8 :])
    assert len(bodies(store)) == 9
    await store.stop()


@pytest.mark.parametrize("spare_bytes", [7, 8, 9])
async def test_eight_bytes_are_always_left_for_the_end(store: Store, spare_bytes: int) -> None:
    room = 4096 - record_size(draft(bytes(2000)))
    await put(store, draft(bytes(2000)))
    last = store.append(draft(bytes(room - record_size(draft(b"")) - spare_bytes)))
    assert last.log_offset == (4096 if spare_bytes < 8 else 4096 - room)
    await store.durable(last.end)
    assert await put(store, draft(b"on")) == [2]
    assert len(bodies(store)) == 3
    await store.stop()


async def test_a_batch_lies_whole_in_one_file(store: Store) -> None:
    await put(store, draft(bytes(2500)))
    stored = store.append_batch([draft(bytes(700)), draft(bytes(700), queue_id=1), draft(b"z")])
    assert [item.log_offset // 4096 for item in stored] == [1, 1, 1]
    assert [item.queue_offset for item in stored] == [1, 0, 2]
    assert stored[1].log_offset == stored[0].end
    await store.durable(stored[-1].end)
    assert [len(body) for body in bodies(store)] == [2500, 700, 1]
    assert store.append_batch([]) == []
    await store.stop()


async def test_messages_that_break_a_limit_change_nothing(store: Store) -> None:
    for message, reason in (
        (draft(bytes(3001)), "maxMessageSize is 3000"),
        (draft(topic="t" * 128), "topic name has 128 bytes"),
        (draft(topic=""), "topic name has 0 bytes"),
        (draft(properties="p" * 32_768), "32768 bytes"),
    ):
        with pytest.raises(MessageTooLarge, match=reason):
            store.append(message)
    with pytest.raises(MessageTooLarge, match="mappedFileSizeCommitLog"):
        store.append_batch([draft(bytes(2500)), draft(bytes(2500))])
    with pytest.raises(ValueError, match="8 or 20"):
        message = draft()
        message.born_host = b"\x01"
        store.append(message)
    for topic in ("..", ".", "a/b", "a\0b"):
        with pytest.raises(StoreError, match="cannot name a topic"):
            store.append(draft(topic=topic))
    with pytest.raises(StoreError, match="negative"):
        store.append(draft(queue_id=-1))
    assert await put(store, draft(b"fine")) == [0]
    assert records(store)[0].log_offset == 0
    await store.stop()


async def test_a_batch_with_a_bad_member_stages_nothing(store: Store) -> None:
    with pytest.raises(StoreError):
        store.append_batch([draft(b"a"), draft(b"b", topic="x/y")])
    assert await put(store, draft(b"c")) == [0]
    assert bodies(store) == [b"c"]
    await store.stop()


async def test_hidden_messages_have_no_place_in_a_queue(store: Store) -> None:
    kinds = (SYS_PREPARED, SYS_ROLLBACK, SYS_COMMIT, 0)
    offsets = await put(store, *(draft(b"%d" % kind, sys_flag=kind) for kind in kinds))
    assert offsets == [0, 0, 0, 1]
    assert [record.sys_flag for record in records(store)] == [SYS_COMMIT, 0]
    await store.stop()


async def test_store_times_never_go_back(tmp_path: Path) -> None:
    clock = HandClock(5000)
    store = Store(small(tmp_path), faulty_env(clock=clock))
    await store.start()
    for now_ms in (5000, 4000, 6000):
        clock.at_ms = now_ms
        await put(store, draft())
    assert [record.store_ms for record in records(store)] == [5000, 5000, 6000]
    await store.stop()


async def test_every_field_is_kept(store: Store) -> None:
    v6 = bytes(range(16)) + b"\x00\x00\x00\x50"
    message = draft(
        b"b",
        flag=-3,
        sys_flag=0x101,
        born_ms=77,
        reconsume_times=2,
        prepared_offset=99,
        tags="x",
    )
    message.born_host = v6
    await put(store, message)
    (record,) = records(store)
    assert (record.flag, record.sys_flag, record.born_ms) == (-3, 0x111, 77)
    assert (record.reconsume_times, record.prepared_offset) == (2, 99)
    assert (record.born_host, record.store_host) == (v6, HOST)
    assert record.pairs() == {"TAGS": "x"}
    assert store.store_time("T", 0, 0) == record.store_ms
    await store.stop()


async def test_much_at_once_is_written_before_the_turn_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "STAGED_BYTES_MAX", 2000)
    faults = Faults()
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    stored = [store.append(draft(bytes(900))) for _ in range(3)]
    assert store.facts().written_offset == stored[2].end
    faults.write = "commitlog"
    store.append(draft(bytes(900)))
    with pytest.raises(StoreUnwritable, match="No space left"):
        for _ in range(3):
            store.append(draft(bytes(900)))
    faults.write = None
    assert await put(store, draft(b"x")) == [3]
    await store.stop()


async def test_a_turn_may_fill_many_files(store: Store, tmp_path: Path) -> None:
    wanted = [b"%03d" % at * 300 for at in range(60)]
    assert await put(store, *(draft(body) for body in wanted)) == list(range(60))
    assert bodies(store) == wanted
    await store.stop()
    assert len(list((tmp_path / "commitlog").iterdir())) == 15


async def test_waiting_is_for_the_right_place(store: Store) -> None:
    stored = [store.append(draft(b"%d" % at)) for at in range(5)]
    waits = [store.durable(item.end) for item in reversed(stored)]
    assert await asyncio.gather(*waits) == [PutStatus.OK] * 5
    assert await store.durable(0) is PutStatus.OK
    await store.stop()
    with pytest.raises(StoreUnwritable, match="stopped"):
        store.append(draft())


async def test_a_cancelled_wait_harms_nobody(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    ends = [store.append(draft(b"%d" % at)).end for at in range(2)]
    gone, kept = (asyncio.ensure_future(store.durable(end)) for end in ends)
    await asyncio.sleep(0)
    gone.cancel()
    assert await kept is PutStatus.OK
    assert bodies(store) == [b"0", b"1"]
    await store.stop()
    assert not [item for item in caplog.records if item.levelno >= logging.ERROR]


async def test_a_slave_and_a_new_store_refuse(tmp_path: Path) -> None:
    store = Store(small(tmp_path, broker_role="SLAVE"), faulty_env())
    with pytest.raises(StoreUnwritable, match="not started"):
        store.append(draft())
    await store.start()
    with pytest.raises(StoreUnwritable, match="send to its master"):
        store.append(draft())
    await store.stop()
