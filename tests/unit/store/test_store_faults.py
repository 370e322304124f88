"""Disks that fill up, fail to sync or refuse files: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.unit.store.store_kit import (
    Faults,
    GatedOffload,
    bodies,
    draft,
    eventually,
    faulty_env,
    put,
    records,
    small,
)

from cosmodrome.errors import StoreBusy, StoreUnwritable
from cosmodrome.store.commit_log import failures
from cosmodrome.store.store import PutStatus, Store


async def reopened(store: Store, root: Path) -> Store:
    await store.abandon()
    again = Store(small(root), faulty_env())
    await again.start()
    return again


@pytest.mark.parametrize("mode", ["SYNC_FLUSH", "ASYNC_FLUSH"])
@pytest.mark.parametrize("part_bytes", [0, 150])
async def test_a_full_disk_refuses_and_sends_resume(
    tmp_path: Path, mode: str, part_bytes: int
) -> None:
    faults = Faults()
    store = Store(small(tmp_path, flush_disk_type=mode), faulty_env(faults))
    await store.start()
    await put(store, draft(b"first"))
    faults.write, faults.write_part_bytes = "commitlog", part_bytes
    ends = [store.append(draft(b"lost", queue_id=q)).end for q in (0, 0, 1)]
    results = await asyncio.gather(*(store.durable(end) for end in ends), return_exceptions=True)
    for result in results:
        assert isinstance(result, StoreUnwritable)
        assert "No space left" in str(result)
    with pytest.raises(StoreUnwritable, match="send it again"):
        await store.durable(ends[-1])
    assert store.facts().written_offset == store.facts().max_offset
    faults.write = None
    assert await put(store, draft(b"second"), draft(b"third", queue_id=1)) == [1, 0]
    assert bodies(store) == [b"first", b"second"]
    again = await reopened(store, tmp_path)
    assert bodies(again) == [b"first", b"second"]
    assert bodies(again, queue_id=1) == [b"third"]
    await again.stop()


async def test_a_full_disk_does_not_fill_the_log_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults()
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    monkeypatch.setattr(failures, "APART_SECONDS", 3600)
    faults.write = "commitlog"
    for _ in range(50):
        with pytest.raises(StoreUnwritable):
            await put(store, draft(b"lost"))
    said = [line for line in caplog.messages if line.startswith("log_write_failed")]
    assert len(said) == 1 and "held_back=0" in said[0]
    monkeypatch.setattr(failures, "APART_SECONDS", 0)
    with pytest.raises(StoreUnwritable):
        await put(store, draft(b"lost"))
    assert "held_back=49" in caplog.text
    faults.write = None
    await store.stop()


async def test_stale_bytes_of_a_failed_write_never_come_back(tmp_path: Path) -> None:
    faults = Faults()
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    faults.write, faults.write_part_bytes = "commitlog", 1000
    ends = [store.append(draft(b"stale")).end for _ in range(5)]
    with pytest.raises(StoreUnwritable):
        await store.durable(ends[-1])
    faults.write = None
    # Of the same size, so that the second stale record would continue the log.
    await put(store, draft(b"fresh", queue_id=1))
    again = await reopened(store, tmp_path)
    assert bodies(again, queue_id=1) == [b"fresh"]
    assert again.bounds("T", 0) == (0, 0)
    await again.stop()


async def test_a_roll_that_half_fails_keeps_the_written_half(tmp_path: Path) -> None:
    faults = Faults()
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    faults.write = "00000000000000004096"
    kept = [store.append(draft(bytes(1000))) for _ in range(3)]
    lost = store.append(draft(bytes(1000)))
    assert lost.log_offset == 4096
    tasks = [asyncio.ensure_future(store.durable(item.end)) for item in (*kept, lost)]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[:3] == [PutStatus.OK] * 3
    assert isinstance(results[3], StoreUnwritable)
    faults.write = None
    assert await put(store, draft(b"again")) == [3]
    again = await reopened(store, tmp_path)
    assert [len(body) for body in bodies(again)] == [1000, 1000, 1000, 5]
    await again.stop()


async def test_a_file_that_cannot_be_made_refuses_and_sends_resume(tmp_path: Path) -> None:
    faults = Faults()
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    await put(store, *(draft(bytes(1000)) for _ in range(3)))
    # The file made ahead is used first, so the refusal comes with the one after it.
    faults.create = "commitlog"
    with pytest.raises(StoreUnwritable, match="could not be made"):
        for _ in range(8):
            await put(store, draft(bytes(1000)))
    faults.create = None
    offsets = await put(store, draft(b"more"))
    assert offsets == [store.bounds("T", 0)[1] - 1]
    assert [record.queue_offset for record in records(store)] == list(range(offsets[0] + 1))
    await store.stop()


async def test_a_failed_sync_is_final(tmp_path: Path) -> None:
    faults = Faults()
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    await put(store, draft(b"kept"))
    faults.sync = "commitlog"
    end = store.append(draft(b"doubtful")).end
    with pytest.raises(StoreUnwritable, match="syncing the commit log failed"):
        await store.durable(end)
    faults.sync = None
    assert bodies(store) == [b"kept"]
    with pytest.raises(StoreUnwritable, match="restart the broker"):
        store.append(draft())
    assert "restart" in (store.why_unwritable or "")
    await store.stop()
    assert (tmp_path / "abort").exists()
    again = Store(small(tmp_path), faulty_env())
    await again.start()
    assert bodies(again)[0] == b"kept"
    await again.stop()
    assert not (tmp_path / "abort").exists()


async def test_a_failed_background_sync_is_final_too(tmp_path: Path) -> None:
    faults = Faults()
    options = small(tmp_path, flush_disk_type="ASYNC_FLUSH", flush_interval_commit_log=5)
    store = Store(options, faulty_env(faults))
    await store.start()
    faults.sync = "commitlog"
    await put(store, draft(b"in the kernel"))
    await eventually(lambda: store.why_unwritable is not None)
    await store.stop()
    assert (tmp_path / "abort").exists()


async def test_queue_files_that_fail_are_written_later(tmp_path: Path) -> None:
    faults = Faults(write="consumequeue")
    options = small(tmp_path, flush_interval_consume_queue=10)
    store = Store(options, faulty_env(faults))
    await store.start()
    await put(store, *(draft(b"%d" % at, keys=f"k{at}") for at in range(12)))
    await eventually(lambda: any("write 000" in line for line in faults.log))
    assert bodies(store) == [b"%d" % at for at in range(12)]
    faults.write = None
    await store.stop()
    again = Store(options, faulty_env())
    await again.start()
    assert bodies(again) == [b"%d" % at for at in range(12)]
    await again.stop()


async def test_a_failed_sync_of_queues_leaves_the_next_start_abnormal(tmp_path: Path) -> None:
    faults = Faults(sync="consumequeue")
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    await put(store, draft(b"a"))
    await store.stop()
    assert (tmp_path / "abort").exists()


async def test_a_nearly_full_disk_refuses_sends(tmp_path: Path) -> None:
    store = Store(
        small(tmp_path, disk_space_warning_level_ratio=90), faulty_env(Faults(used_ratio=0.95))
    )
    await store.start()
    with pytest.raises(StoreUnwritable, match=r"95\.0% used"):
        store.append(draft())
    assert store.facts().put_failed_count == 1
    await store.stop()


async def test_a_slow_sync_is_answered_in_time(tmp_path: Path) -> None:
    env = faulty_env()
    assert isinstance(env.offload, GatedOffload)
    store = Store(small(tmp_path, sync_flush_timeout=30), env)
    await store.start()
    env.offload.holding = True
    slow = store.append(draft(b"slow"))
    assert await store.durable(slow.end, wait=False) is PutStatus.OK
    assert await store.durable(slow.end) is PutStatus.FLUSH_DISK_TIMEOUT
    assert store.bounds("T", 0) == (0, 0)
    env.offload.open()
    await eventually(lambda: store.bounds("T", 0) == (0, 1))
    assert await store.durable(slow.end) is PutStatus.OK
    await store.stop()


async def test_one_sync_covers_many_sends(tmp_path: Path) -> None:
    faults = Faults()
    env = faulty_env(faults)
    options = small(tmp_path, mapped_file_size_commit_log=1 << 20, commit_log_zeros_ahead=0)
    store = Store(options, env)
    await store.start()
    faults.log.clear()
    sends = [asyncio.ensure_future(put(store, draft(b"%d" % at))) for at in range(50)]
    await asyncio.gather(*sends)
    assert len([line for line in faults.log if line.startswith("sync 000")]) <= 2
    assert len([line for line in faults.log if line.startswith("write 000")]) == 1
    await store.stop()


async def test_a_disk_that_hangs_stops_gathering_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.store.commit_log.flush.UNSYNCED_BYTES_MAX", 1000)
    env = faulty_env()
    assert isinstance(env.offload, GatedOffload)
    store = Store(small(tmp_path), env)
    await store.start()
    env.offload.holding = True
    last = 0
    with pytest.raises(StoreBusy, match="wait for the disk"):
        for _ in range(10):
            last = store.append(draft(bytes(300))).end
    waiting = asyncio.ensure_future(store.durable(last))
    await asyncio.sleep(0)
    env.offload.open()
    assert await waiting is PutStatus.OK
    assert store.why_unwritable is None
    await store.stop()


async def test_a_slow_sync_makes_busy_only_when_much_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.store.commit_log.flush.BUSY_BYTES", 1000)
    env = faulty_env()
    assert isinstance(env.offload, GatedOffload)
    store = Store(small(tmp_path, os_page_cache_busy_time_out_mills=20), env)
    await store.start()
    env.offload.holding = True
    store.append(draft(bytes(300)))
    await asyncio.sleep(0.05)
    store.append(draft(bytes(300)))  # the sync is slow, but little waits for it
    last = store.append(draft(bytes(300))).end
    with pytest.raises(StoreBusy, match="wait for the disk to sync them, the sync under way"):
        store.append(draft(bytes(300)))
    waiting = asyncio.ensure_future(store.durable(last))
    await asyncio.sleep(0)
    env.offload.open()
    assert await waiting is PutStatus.OK
    assert store.why_unwritable is None
    await store.stop()


async def test_a_start_on_a_full_disk_serves_readers(tmp_path: Path) -> None:
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    await put(store, *(draft(bytes(1000)) for _ in range(3)))
    await store.stop()
    faults = Faults(create="commitlog")
    again = Store(small(tmp_path), faulty_env(faults))
    await again.start()
    assert len(bodies(again)) == 3
    await again.stop()
    for path in (tmp_path / "commitlog").iterdir():
        path.unlink()
    empty = Store(small(tmp_path), faulty_env(faults))
    await empty.start()
    with pytest.raises(StoreUnwritable, match="could not be made"):
        empty.append(draft())
    faults.create = None
    assert await put(empty, draft(b"x")) == [0]
    await empty.stop()


async def test_too_much_derived_data_in_memory_refuses_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.store.upkeep.BACKLOG_BYTES_MAX", 100)
    faults = Faults(create="consumequeue")
    store = Store(small(tmp_path, flush_interval_consume_queue=5), faulty_env(faults))
    await store.start()
    await put(store, *(draft(b"%d" % at) for at in range(10)))
    await eventually(lambda: store.why_unwritable is not None)
    assert "queue files cannot be written" in (store.why_unwritable or "")
    faults.create = None
    await eventually(lambda: store.why_unwritable is None)
    assert len(bodies(store)) == 10
    await store.stop()


async def test_space_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cosmodrome.store.upkeep.DISK_CHECK_SECONDS", 0.01)
    faults = Faults(used_ratio=0.95)
    options = small(tmp_path, disk_space_warning_level_ratio=90, flush_interval_consume_queue=10)
    store = Store(options, faulty_env(faults))
    await store.start()
    assert store.why_unwritable is not None
    await asyncio.sleep(0.05)  # some more looks, which have nothing new to say
    faults.used_ratio = 0.5
    await eventually(lambda: store.why_unwritable is None)
    assert await put(store, draft(b"x")) == [0]
    await store.stop()
    said = [text for text in caplog.messages if text.startswith("sends_")]
    assert len(said) == 2 and "95.0% used" in said[0] and said[1] == "sends_taken_again"
