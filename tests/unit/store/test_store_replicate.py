"""The door for replication: the log as bytes, and taking a master's log."""

from __future__ import annotations

import asyncio
import random
import struct
import zlib
from pathlib import Path

import msgspec
import pytest
from tests.unit.store.copy_kit import derived, files, filled, slave_of, take_all, whole
from tests.unit.store.store_kit import Faults, bodies, draft, encode, faulty_env, put, small

from cosmodrome.errors import StoreCorrupt, StoreError, StoreUnwritable
from cosmodrome.layout import (
    MAGIC_BLANK,
    RECORD_BYTES_MIN,
    RECORD_LOG_OFFSET_AT,
    SYS_PREPARED,
)
from cosmodrome.store.commit_log import flush
from cosmodrome.store.commit_log.copy import whole_spans
from cosmodrome.store.store import Store

SEGMENT = 4096
COUNT = 60


async def synced(store: Store) -> None:
    await asyncio.wait_for(store.durable(store.log_end), 30)


# --- copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
async def test_pieces_of_any_size_make_an_equal_store(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    master = await filled(tmp_path / "a", seed, COUNT)
    slave = slave_of(tmp_path / "b", flush_disk_type=chance.choice(["SYNC_FLUSH", "ASYNC_FLUSH"]))
    await slave.start()
    log = whole(master, chance.choice([100, 1000, 1 << 20]))
    assert len(log) > 3 * SEGMENT
    stop = 0
    while stop < len(log):
        stop = min(len(log), stop + chance.choice([1, 7, 90, 500, 3000, 9000]))
        take_all(slave, log, stop)
        if chance.random() < 0.1:
            await asyncio.sleep(0.001)
    await synced(slave)
    assert whole(slave) == log
    seen = derived(master, COUNT)
    assert derived(slave, COUNT) == seen
    assert slave.last_store_ms == master.last_store_ms
    assert slave.facts().dispatch_behind_bytes == 0
    await master.stop()
    await slave.stop()
    assert files(tmp_path / "a") == files(tmp_path / "b")
    again = slave_of(tmp_path / "b")
    await again.start()
    assert whole(again) == log and derived(again, COUNT) == seen
    await again.stop()


async def test_a_log_byte_by_byte(tmp_path: Path) -> None:
    master = await filled(tmp_path / "a", 3, 12)
    slave = slave_of(tmp_path / "b", flush_disk_type="ASYNC_FLUSH")
    await slave.start()
    log = whole(master)
    assert len(log) > SEGMENT
    for stop in range(len(log) + 1):
        take_all(slave, log, stop)
        assert slave.log_end <= stop
        assert log.startswith(whole(slave))
    assert whole(slave) == log
    await master.stop()
    await slave.stop()


async def test_a_promoted_slave_goes_on_with_the_queues_of_its_master(tmp_path: Path) -> None:
    master = await filled(tmp_path / "a", 5, COUNT)
    slave = slave_of(tmp_path / "b")
    await slave.start()
    log = whole(master)
    half = len(log) // 2
    take_all(slave, log, half)
    slave._log.queue_ends.find("T", 0)  # somebody kept it
    take_all(slave, log, len(log))
    slave._options = msgspec.structs.replace(slave._options, broker_role="SYNC_MASTER")
    expected = {
        (topic, queue_id): master.bounds(topic, queue_id)[1]
        for topic, ids in master.queues().items()
        for queue_id in ids
    }
    # In this turn: nothing of what was taken last is in its queue yet.
    for (topic, queue_id), end in expected.items():
        assert slave.append(draft(b"own", topic, queue_id)).queue_offset == end
    await slave.durable(slave._log.end)
    assert all(slave.bounds(*queue)[1] == end + 1 for queue, end in expected.items())
    await master.stop()
    await slave.stop()


async def test_consumers_of_a_slave_are_woken_when_its_disk_has_the_message(
    tmp_path: Path,
) -> None:
    master = Store(small(tmp_path / "a"), faulty_env())
    slave = slave_of(tmp_path / "b")
    await master.start()
    await slave.start()
    arrived: list[int] = []
    slave.arrivals.subscribe(lambda arrival: arrived.append(arrival.max_offset))
    await put(master, draft(b"1"), draft(b"2"))
    assert slave.take(0, whole(master)) == master.log_end
    assert not arrived and slave.durable_end == 0
    await synced(slave)
    assert arrived == [2] and bodies(slave) == [b"1", b"2"]
    assert slave.durable_end == slave.log_end == master.log_end
    await master.stop()
    await slave.stop()


async def test_a_killed_slave_goes_on_at_its_end(tmp_path: Path) -> None:
    master = await filled(tmp_path / "a", 8, COUNT)
    log = whole(master)
    for stop in range(0, len(log) + 3000, 3000):
        slave = slave_of(tmp_path / "b")
        await slave.start()
        take_all(slave, log, min(stop, len(log)))
        if stop % 2000:
            await synced(slave)
        await slave.abandon()
    slave = slave_of(tmp_path / "b")
    await slave.start()
    assert whole(slave) == log and derived(slave, COUNT) == derived(master, COUNT)
    await master.stop()
    await slave.stop()


# --- what is no log ----------------------------------------------------------------------------

UNCHECKED = {  # position in a record without a body checksum over it -> what it is
    **dict.fromkeys(range(12, 16), "queue id"),
    **dict.fromkeys(range(16, 20), "flag"),
    **dict.fromkeys(range(20, 28), "queue offset"),
    **dict.fromkeys(range(36, 40), "sys flag, but for the sizes of hosts"),
    **dict.fromkeys(range(40, 48), "born time"),
    **dict.fromkeys(range(48, 56), "born host"),
    **dict.fromkeys(range(56, 64), "store time"),
    **dict.fromkeys(range(64, 72), "store host"),
    **dict.fromkeys(range(72, 76), "reconsume times"),
    **dict.fromkeys(range(76, 84), "prepared offset"),
}


async def test_a_changed_byte_is_found_or_is_in_no_checked_field(tmp_path: Path) -> None:
    master = Store(small(tmp_path), faulty_env())
    await master.start()
    await put(master, draft(b"a body", "Topic", properties="TAGS\x01t\x02KEYS\x01k"))
    record = whole(master)
    await master.stop()
    topic_at = RECORD_BYTES_MIN - 2 + len(b"a body")
    unchecked = UNCHECKED | dict.fromkeys(range(topic_at, topic_at + 5), "topic")
    unchecked |= dict.fromkeys(range(topic_at + 7, len(record)), "properties")
    unnoticed = set()
    for at in range(len(record)):
        for change in range(1, 256):
            bad = bytearray(record)
            bad[at] ^= change
            try:
                spans = whole_spans(memoryview(bad), 0, SEGMENT)
            except StoreCorrupt as error:
                assert "offset 0 " in str(error)
                continue
            if spans:
                assert at in unchecked, f"byte {at} changed by {change:#x} was taken"
                unnoticed.add(unchecked[at])
    assert unnoticed == set(unchecked.values())


@pytest.mark.parametrize("at", sorted(UNCHECKED))
async def test_a_change_that_nobody_can_find_harms_nothing_else(tmp_path: Path, at: int) -> None:
    slave = slave_of(tmp_path, flush_disk_type="ASYNC_FLUSH")
    await slave.start()
    size = 0
    for change in (0x00, 0x01, 0x7F, 0x80, 0xFF):
        log = bytearray()
        encode(log, size, 0, 1_700_000_000_000, b"body")
        log[at] ^= change
        try:
            size += slave.take(size, log)
        except StoreCorrupt:
            assert UNCHECKED[at].startswith("sys flag") or at == 20
    assert slave.log_end == size == slave.facts().max_offset
    assert slave._flush.failure is None
    await slave.stop()


async def test_what_a_record_may_not_say(tmp_path: Path) -> None:
    master = await filled(tmp_path / "a", 1, 3)
    slave = slave_of(tmp_path / "b")
    await slave.start()
    log = whole(master)

    def with_field(at: int, form: str, value: int) -> bytes:
        bad = bytearray(log)
        struct.pack_into(form, bad, at, value)
        return bytes(bad)

    cases = {
        "magic number 0x00000000": bytes(200),
        "magic number 0xcafebabe": with_field(4, ">I", 0xCAFEBABE),
        "a record of 90 bytes": with_field(0, ">i", 90),
        "a record of -1 bytes": with_field(0, ">i", -1),
        f"a record of {SEGMENT - 7} bytes": with_field(0, ">i", SEGMENT - 7),
        "belongs to 77": with_field(RECORD_LOG_OFFSET_AT, ">q", 77),
        "lengths do not add up": with_field(0, ">i", 91),
        f"ends there with {SEGMENT - 1} bytes left": struct.pack(">ii", SEGMENT - 1, MAGIC_BLANK),
        "does not continue": log,
    }
    for text, data in cases.items():
        offset = 1 if text == "does not continue" else 0
        kind = StoreUnwritable if offset else StoreCorrupt
        with pytest.raises(kind, match=text):
            slave.take(offset, data)
        assert slave.log_end == 0
    # A size that may be right needs no more than its beginning to be waited for.
    assert slave.take(0, with_field(0, ">i", SEGMENT - 8)[:36]) == 0
    with pytest.raises(StoreCorrupt, match="belongs to"):
        slave.take(0, with_field(RECORD_LOG_OFFSET_AT, ">q", 1)[:36])
    assert slave.take(0, b"") == 0
    take_all(slave, log, len(log))
    assert whole(slave) == log
    await master.stop()
    await slave.stop()


async def test_what_is_good_is_taken_before_damage_is_reported(tmp_path: Path) -> None:
    master = Store(small(tmp_path / "a"), faulty_env())
    slave = slave_of(tmp_path / "b")
    await master.start()
    await slave.start()
    first = master.append(draft(b"first"))
    await put(master, draft(b"second"))
    bad = bytearray(whole(master))
    bad[first.end + 88] ^= 1  # in its body
    assert slave.take(0, bad) == first.end
    with pytest.raises(StoreCorrupt, match=f"offset {first.end} .*checksum"):
        slave.take(first.end, bad[first.end :])
    assert slave.take(first.end, whole(master)[first.end :]) == master.log_end - first.end
    await master.stop()
    await slave.stop()


async def test_a_blank_is_taken_with_all_that_is_behind_it(tmp_path: Path) -> None:
    """Older brokers of Apache RocketMQ leave other bytes than zeros there."""
    slave = slave_of(tmp_path / "b")
    await slave.start()
    blank = struct.pack(">ii", SEGMENT, MAGIC_BLANK) + b"rest" * 1022
    for size in (7, 8, SEGMENT - 1):
        assert slave.take(0, blank[:size]) == 0
    assert slave.take(0, blank + b"the next file") == SEGMENT
    assert slave.log_end == SEGMENT and whole(slave) == blank
    await synced(slave)
    await slave.stop()
    again = slave_of(tmp_path / "b")
    await again.start()
    assert again.log_end == SEGMENT and whole(again) == blank
    await again.stop()


# --- refusals ----------------------------------------------------------------------------------


async def test_a_failed_write_takes_nothing_and_the_next_one_goes_on(tmp_path: Path) -> None:
    master = await filled(tmp_path / "a", 9, 20)
    faults = Faults()
    options = small(
        tmp_path / "b",
        broker_role="SLAVE",
        mapped_file_size_consume_queue=2000,
        commit_log_zeros_ahead=0,
    )
    slave = Store(options, faulty_env(faults))
    await slave.start()
    log = whole(master)
    while slave.log_end < len(log):
        end = slave.log_end
        ends = slave._log.queue_ends
        before = {key: queue_end.next for key, queue_end in ends._ends.items()}
        faults.write, faults.write_part_bytes = "commitlog", 50
        with pytest.raises(StoreUnwritable, match="No space left"):
            slave.take(end, log[end : end + 3500])
        assert slave.log_end == end and whole(slave) == log[:end]
        assert {key: ends.find(*key).next for key in before} == before
        faults.write = None
        assert slave.take(end, log[end : end + 3000])
    await synced(slave)
    assert whole(slave) == log and derived(slave, 20) == derived(master, 20)
    await master.stop()
    await slave.stop()


async def test_who_takes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slave = slave_of(tmp_path)
    with pytest.raises(StoreUnwritable, match="not started"):
        slave.take(0, b"")
    with pytest.raises(StoreUnwritable, match="not started"):
        slave.begin_at(0)
    await slave.start()
    assert slave.why_unwritable == "this broker is a slave; send to its master"
    slave._upkeep.backlog = "queue files cannot be written"
    with pytest.raises(StoreUnwritable, match="queue files"):
        slave.take(0, b"")
    slave._upkeep.backlog = None
    monkeypatch.setattr(flush, "UNSYNCED_BYTES_MAX", -1)
    with pytest.raises(StoreUnwritable, match="wait for the disk"):
        slave.take(0, b"")
    slave._flush.fail("a sync failed")
    with pytest.raises(StoreUnwritable, match="a sync failed"):
        slave.take(0, b"")
    await slave.stop()
    with pytest.raises(StoreUnwritable, match="stopped"):
        slave.take(0, b"")


async def test_a_pool_takes_no_copy(tmp_path: Path) -> None:
    options = small(tmp_path, flush_disk_type="ASYNC_FLUSH", transient_store_pool_enable=True)
    store = Store(options, faulty_env())
    await store.start()
    with pytest.raises(StoreUnwritable, match="transientStorePoolEnable"):
        store.take(0, b"")
    await store.stop()


async def test_a_reader_takes_nothing(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env(), read_only=True)
    await store.start()
    with pytest.raises(StoreUnwritable, match="reading only"):
        store.take(0, b"")
    with pytest.raises(StoreUnwritable, match="reading only"):
        store.begin_at(SEGMENT)
    await store.stop()


# --- where a log begins ------------------------------------------------------------------------


async def test_an_empty_log_begins_where_its_master_says(tmp_path: Path) -> None:
    master = await filled(tmp_path / "a", 2, COUNT)
    log = whole(master)
    start = 2 * SEGMENT
    for _ in range(2):  # nothing was taken: it begins again
        slave = slave_of(tmp_path / "b")
        await slave.start()
        slave.begin_at(5 * SEGMENT)
        slave.begin_at(start)
        slave.begin_at(start)
        assert slave.log_start == slave.log_end == slave.durable_end == start
        assert slave.log_bytes(start, 100) is None
        await slave.stop()
    assert files(tmp_path / "b") == {}
    slave = slave_of(tmp_path / "b")
    await slave.start()
    slave.begin_at(start)
    take_all(slave, log[start:], len(log), start)
    await synced(slave)
    with pytest.raises(StoreError, match=f"records from {start} to {len(log)}"):
        slave.begin_at(0)
    expected = derived(slave, COUNT)
    for topic, ids in slave.queues().items():
        for queue_id in ids:
            first, end = slave.bounds(topic, queue_id)
            assert end == master.bounds(topic, queue_id)[1]
            assert slave.entries(topic, queue_id, first, 1)[0][0] >= start
    for how in ("abandon", "stop"):
        await getattr(slave, how)()
        slave = slave_of(tmp_path / "b")
        await slave.start()
        assert (slave.log_start, slave.log_end) == (start, len(log))
        assert whole(slave) == log[start:] and derived(slave, COUNT) == expected
    assert slave._log.queue_ends.find("T", 0).next == master.bounds("T", 0)[1]
    await slave.stop()
    await master.stop()


async def test_a_killed_log_that_began_elsewhere_is_still_empty(tmp_path: Path) -> None:
    slave = slave_of(tmp_path)
    await slave.start()
    slave.begin_at(3 * SEGMENT)
    await slave.abandon()
    slave = slave_of(tmp_path)
    await slave.start()
    assert slave.log_start == slave.log_end == 3 * SEGMENT
    slave.begin_at(0)
    assert slave.log_start == slave.log_end == 0
    await slave.stop()


async def test_where_no_log_begins(tmp_path: Path) -> None:
    slave = slave_of(tmp_path)
    await slave.start()
    for offset in (-SEGMENT, 1, SEGMENT + 8):
        with pytest.raises(StoreError, match="multiples of 4096"):
            slave.begin_at(offset)
    assert slave.log_start == slave.log_end == 0
    await slave.stop()


# --- the log as bytes --------------------------------------------------------------------------


async def test_bytes_are_of_one_file_and_written(tmp_path: Path) -> None:
    store = await filled(tmp_path, 4, COUNT)
    log = whole(store)
    assert store.log_start == 0 and store.log_end == len(log)
    blank = store.log_bytes(SEGMENT - 8, 100)
    assert blank is not None and len(blank) == 8
    assert store.log_bytes(len(log), 100) is None
    assert store.log_bytes(len(log) + SEGMENT, 100) is None
    assert store.log_bytes(-1, 100) is None
    assert store.log_bytes(0, 0) is None
    last = store.log_bytes(len(log) - 3, 100)
    assert last is not None and bytes(last) == log[-3:]
    store.append(draft(b"staged only"))
    assert store.log_end == len(log) and store.log_bytes(len(log), 100) is None
    kept = store.log_bytes(0, SEGMENT)
    store._log.expire(0)
    (tmp_path / "commitlog" / f"{0:020d}").unlink()
    assert kept is not None and bytes(kept) == log[:SEGMENT]
    assert store.log_bytes(0, 100) is None and store.log_start == SEGMENT
    (tmp_path / "commitlog" / f"{SEGMENT:020d}").unlink()
    store._log.drop_view(SEGMENT)
    assert store.log_bytes(SEGMENT, 100) is None, "somebody removed it"
    await store.abandon()


async def test_a_fingerprint_is_of_the_last_bytes_of_a_file(tmp_path: Path) -> None:
    store = await filled(tmp_path, 4, COUNT)
    log = whole(store)
    for end in (1, 100, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT, len(log)):
        start = (end - 1) // SEGMENT * SEGMENT
        assert store.fingerprint(end) == (start, zlib.crc32(log[start:end]))
    assert store.fingerprint(0) == (0, 0)
    with pytest.raises(ValueError, match=f"from 0 to {len(log)}"):
        store.fingerprint(len(log) + 1)
    store._log.expire(0)
    assert store.fingerprint(SEGMENT) == (SEGMENT, 0)
    for end in (-1, 0, SEGMENT - 1):
        with pytest.raises(ValueError, match=f"from {SEGMENT}"):
            store.fingerprint(end)
    await store.stop()


async def test_a_long_fingerprint_is_cut(tmp_path: Path) -> None:
    options = small(tmp_path, mapped_file_size_commit_log=1 << 20, max_message_size=1 << 19)
    store = Store(options, faulty_env())
    await store.start()
    await put(store, draft(random.Random(1).randbytes(100_000)))
    end = store.log_end
    assert store.fingerprint(end) == (end - 65536, zlib.crc32(whole(store)[-65536:]))
    await store.stop()


async def test_zeros_that_fill_a_file_are_no_fingerprint(tmp_path: Path) -> None:
    found = []
    for number in (1, 2):
        root = tmp_path / str(number)
        options = small(root, mapped_file_size_commit_log=1 << 20, max_message_size=1 << 20)
        store = Store(options, faulty_env())
        await store.start()
        await put(store, draft(bytes([number]) * 300_000))
        await put(store, draft(b"x" * 800_000))  # goes to the next file
        found.append(store.fingerprint(1 << 20))
        await store.stop()
    assert found[0] != found[1]


async def test_every_write_is_announced_once(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    ends: list[int] = []
    store.written.subscribe(lambda _: ends.append(store.log_end))
    await put(store, *[draft(b"a" * 900) for _ in range(9)])
    assert ends == [store.log_end] and store.log_end > 2 * SEGMENT, "also when it fills files"
    half = draft(b"b", sys_flag=SYS_PREPARED)
    await put(store, half)
    assert ends[1:] == [store.log_end]
    await store.stop()
