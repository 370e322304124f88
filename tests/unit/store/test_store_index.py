"""Index files: upstream's numbers, chains, full files, names."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from tests.unit.store.store_kit import ALWAYS_MS, HandClock, draft, faulty_env, put, small

from cosmodrome import speed
from cosmodrome.env.real import RealDisk
from cosmodrome.layout import INDEX_ENTRY, INDEX_HEADER, INDEX_KEY, INDEX_SLOT
from cosmodrome.store import index as index_module
from cosmodrome.store.commit_log.segment import OpenFiles, write_files
from cosmodrome.store.index import Index, key_hash
from cosmodrome.store.store import Store


def made(root: Path, slots: int = 3, entries_max: int = 5, clock: HandClock | None = None) -> Index:
    disk = RealDisk()
    return Index(
        str(root),
        slots,
        entries_max,
        disk,
        clock or HandClock(),
        OpenFiles(disk, 2),
        read_only=False,
    )


def written(index: Index) -> None:
    batch = index.pending()
    assert index.written(batch, write_files(RealDisk(), [item[1] for item in batch])) is None


def find(index: Index, key: str, count: int = 64) -> list[int]:
    return index.find("T", key, count, 0, ALWAYS_MS)


def test_hashes_of_upstream() -> None:
    assert key_hash("TopicA", "k0") == 1903240650
    assert key_hash("Topic", "AaBB") == key_hash("Topic", "BBAa") == 1102261108


def test_the_smallest_hash_counts_as_zero() -> None:
    assert speed.java_hash("a#44xamxv") == -(1 << 31)
    assert key_hash("a", "44xamxv") == 0


def test_bytes_of_a_file(tmp_path: Path) -> None:
    index = made(tmp_path)
    index.put("T", ["a", "b"], 100, 5000)
    index.put("T", ["a"], 300, 7999)
    written(index)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    assert len(data) == 40 + 3 * 4 + 5 * 20
    a, b = key_hash("T", "a"), key_hash("T", "b")
    used = len({a % 3, b % 3})
    assert INDEX_HEADER.unpack_from(data) == (5000, 7999, 100, 300, used, 4)
    assert INDEX_SLOT.unpack_from(data, 40 + (a % 3) * 4) == (3,)
    entries = list(INDEX_ENTRY.iter_unpack(data[52:]))
    assert entries[0] == (0, 0, 0, 0)
    assert entries[1][:3] == (a, 100, 0) and entries[3][:3] == (a, 300, 2)
    assert entries[3][3] == (2 if b % 3 == a % 3 else 1)


def chains_as_upstream_reads_them(data: bytes | bytearray, slots: int) -> set[int]:
    """Log offsets that can be reached: a slot beyond the count ends its chain there."""
    count = INDEX_HEADER.unpack_from(data)[5]
    entries = list(INDEX_ENTRY.iter_unpack(data[40 + slots * 4 :]))
    found: set[int] = set()
    for (number,) in INDEX_SLOT.iter_unpack(data[40 : 40 + slots * 4]):
        while 0 < number < count:
            found.add(entries[number][1])
            number = entries[number][3]
    return found


@pytest.mark.parametrize("table", [True, False])
def test_a_batch_that_was_cut_short_hides_no_older_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, table: bool
) -> None:
    monkeypatch.setattr(index_module, "TABLE_KEYS_MIN", 1 if table else 1000)
    index = made(tmp_path, entries_max=100)

    def put_some(first: int) -> None:
        for offset in range(first, first + 500, 100):
            index.put_many(INDEX_KEY.pack(key_hash("T", "all"), offset, 1000))

    put_some(0)
    written(index)
    put_some(500)
    ((_, write, _, _),) = index.pending()
    put_some(1000)  # while the batch is under way
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    for position, piece in write.pieces:
        data[position : position + len(piece)] = piece
        end_offset = INDEX_HEADER.unpack_from(data)[3]
        # What lies behind the end of the header is put again by whoever opens the store.
        assert chains_as_upstream_reads_them(data, 3) >= set(range(0, end_offset + 100, 100))


def test_full_files_are_followed_by_new_ones(tmp_path: Path) -> None:
    clock = HandClock(1_700_000_000_123)
    index = made(tmp_path, clock=clock)
    for at in range(10):
        index.put("T", [f"k{at}", "all"], at * 100, 1000 + at)
    written(index)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 5
    assert len(set(names)) == 5 and all(len(name) == 17 for name in names)
    assert names[0].endswith("123")
    for source in (index, made(tmp_path)):
        if source is not index:
            source.load()
        assert find(source, "all") == [at * 100 for at in range(10)]
        assert find(source, "all", 2) == [800, 900]
        assert all(find(source, f"k{at}") == [at * 100] for at in range(10))


def test_names_ascend_when_the_clock_goes_back(tmp_path: Path) -> None:
    clock = HandClock()
    index = made(tmp_path, clock=clock)
    for at in range(3):
        index.put("T", ["a", "b", "c", "d"], at, 1)
        clock.at_ms -= 1_000_000
    paths = [file.path for file in index._list]
    assert paths == sorted(set(paths)) and len(paths) == 3


def test_memory_and_file_are_read_as_one(tmp_path: Path) -> None:
    index = made(tmp_path, entries_max=50)
    index.put("T", ["a"], 1, 1000)
    written(index)
    index.put("T", ["a"], 2, 1000)
    assert find(index, "a") == [1, 2]
    batch = index.pending()
    index.put("T", ["a"], 3, 1000)  # while the batch is on its way
    index.written(batch, write_files(RealDisk(), [item[1] for item in batch]))
    assert find(index, "a") == [1, 2, 3]
    assert index.memory_bytes == 20
    failed = index.pending()
    full = OSError(errno.ENOSPC, "full")
    assert index.written(failed, [full]) is full
    assert find(index, "a") == [1, 2, 3]
    written(index)
    again = made(tmp_path, entries_max=50)
    again.load()
    assert find(again, "a") == [1, 2, 3]
    assert again.last_offset == 3


def test_a_file_of_another_shape_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "20240101000000000").write_bytes(bytes(61))
    (tmp_path / "notes").write_bytes(b"")
    index = made(tmp_path)
    index.load()
    assert index.last_offset == -1
    index.put("T", ["a"], 9, 1)
    assert find(index, "a") == [9]


def test_a_damaged_chain_ends(tmp_path: Path) -> None:
    index = made(tmp_path, slots=1, entries_max=9)
    for at in range(1, 5):
        index.put("T", ["a"], at, 1000)
    written(index)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    at = 44 + 3 * 20
    hashed, log_offset, seconds, _ = INDEX_ENTRY.unpack_from(data, at)
    data[at : at + 20] = INDEX_ENTRY.pack(hashed, log_offset, seconds, 4)  # forward: a circle
    path.write_bytes(data)
    again = made(tmp_path, slots=1, entries_max=9)
    again.load()
    assert find(again, "a") == [3, 4]


def test_what_was_synced_of_the_last_file_is_salvaged(tmp_path: Path) -> None:
    index = made(tmp_path, slots=7, entries_max=100)
    for at in range(20):
        index.put("T", [f"k{at % 4}", f"each{at}"], at * 10, 1000 * at)
    written(index)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    data = bytearray(whole)
    data[40:68] = bytes(28)  # slots lost,
    data[68 + 25 * 20 :] = bytes(len(data) - 68 - 25 * 20)  # later entries lost,
    data[68 + 27 * 20 : 68 + 28 * 20] = b"\x7f" * 20  # and garbage
    for synced_ms, kept in ((10_000, 10), (18_999, 12)):
        path.write_bytes(data)
        again = made(tmp_path, slots=7, entries_max=100)
        again.load()
        assert again.keep_synced(synced_ms) == (kept - 1) * 10
        for at in range(max(0, kept - 1), 20):  # as recovery does: the last record once more
            again.put("T", [f"k{at % 4}", f"each{at}"], at * 10, 1000 * at)
        assert [find(again, f"each{at}") for at in range(20)] == [[at * 10] for at in range(20)]
        assert find(again, "k1") == [at * 10 for at in range(20) if at % 4 == 1]
        written(again)
        reread = made(tmp_path, slots=7, entries_max=100)
        reread.load()
        assert find(reread, "k3") == [at * 10 for at in range(20) if at % 4 == 3]
    path.write_bytes(whole)
    again = made(tmp_path, slots=7, entries_max=100)
    again.load()
    again.keep_synced(30_000)
    assert path.read_bytes() == whole


def test_only_synced_files_are_kept(tmp_path: Path) -> None:
    index = made(tmp_path)
    for at in range(6):
        index.put("T", ["a", "b"], at * 10, 1000 * at)
    written(index)
    for synced_ms, resume in ((-1, 0), (1000, 0), (1001, 10), (3001, 30), (9000, 50)):
        again = made(tmp_path)
        again._read_only = True
        again.load()
        assert again.keep_synced(synced_ms) == resume
    index.cut(25)
    assert index.last_offset == 10
    index.put("T", ["new"], 25, 6000)
    assert find(index, "new") == [25]


def test_a_header_older_than_the_slots_hides_nothing(tmp_path: Path) -> None:
    """A power cut may keep the header of one batch and the slots of the next."""
    index = made(tmp_path, slots=3, entries_max=100)
    for at in range(4):
        index.put("T", ["a"], at * 10, 1000 * at)
    written(index)
    (path,) = tmp_path.iterdir()
    header = path.read_bytes()[:40]
    for at in range(4, 8):
        index.put("T", ["a"], at * 10, 1000 * at)
    written(index)
    path.write_bytes(header + path.read_bytes()[40:])
    again = made(tmp_path, slots=3, entries_max=100)
    again.load()
    resume = again.keep_synced(4000)
    for at in range(resume // 10, 8):
        again.put("T", ["a"], at * 10, 1000 * at)
    assert find(again, "a") == [at * 10 for at in range(8)]


@pytest.mark.parametrize("keys_min", [0, 1 << 30])
async def test_an_index_built_in_bulk_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys_min: int
) -> None:
    monkeypatch.setattr(index_module, "TABLE_KEYS_MIN", keys_min)
    store = Store(small(tmp_path), faulty_env())
    await store.start()
    await put(store, *(draft(b"%d" % at, keys=f"k{at} k{at % 4}") for at in range(40)))
    await store.stop()
    files = sorted((tmp_path / "index").iterdir())
    before = [path.read_bytes() for path in files]
    assert len(files) > 3
    for path in files:
        path.unlink()
    (tmp_path / "abort").touch()
    again = Store(small(tmp_path), faulty_env())
    await again.start()
    for at in range(4, 40):
        assert len(again.find("T", f"k{at}", 64, 0, ALWAYS_MS).records) == 1
    await put(again, draft(b"one more", keys="k5"))
    assert len(again.find("T", "k5", 64, 0, ALWAYS_MS).records) == 2
    await again.stop()
    after = [path.read_bytes() for path in sorted((tmp_path / "index").iterdir())]
    assert after[: len(before) - 1] == before[:-1]
    last = Store(small(tmp_path), faulty_env())
    await last.start()
    assert len(last.find("T", "k5", 64, 0, ALWAYS_MS).records) == 2
    assert len(last.find("T", "k1", 64, 0, ALWAYS_MS).records) == 10
    await last.stop()


def packed_keys(first: int, count: int) -> bytes:
    return b"".join(
        INDEX_KEY.pack(key_hash("T", f"k{number}"), 1000 + number, 5000 + number)
        for number in range(first, first + count)
    )


def test_pages_of_a_failed_batch_are_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_module, "TABLE_KEYS_MIN", 10)
    index = made(tmp_path, slots=4000, entries_max=5000)
    index.put_many(packed_keys(0, 50))
    assert index.busy
    batch = index.pending()
    assert index.written(batch, [OSError("no space")]) is not None
    index.put_many(packed_keys(50, 20))
    written(index)
    for number in (0, 49, 50, 69):
        assert find(made(tmp_path, slots=4000, entries_max=5000), f"k{number}") == []  # not loaded
    again = made(tmp_path, slots=4000, entries_max=5000)
    again.load()
    for number in range(70):
        assert find(again, f"k{number}") == [1000 + number]
    # Few keys since: the table goes, and what is put then is found as before.
    written(index)
    assert not index.busy
    index.put_many(packed_keys(70, 3))
    assert not index.busy
    written(index)
    again = made(tmp_path, slots=4000, entries_max=5000)
    again.load()
    assert [find(again, f"k{number}") for number in (0, 72)] == [[1000], [1072]]


@pytest.mark.parametrize("in_bulk", [False, True], ids=["one by one", "in bulk"])
def test_entries_in_memory_are_found_block_by_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_bulk: bool
) -> None:
    monkeypatch.setattr(index_module, "BLOCK_BYTES", 3 * INDEX_ENTRY.size)
    monkeypatch.setattr(index_module, "TABLE_KEYS_MIN", 1 if in_bulk else 1 << 30)
    offsets: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    log_offset = 0

    def put(count: int) -> None:
        nonlocal log_offset
        packed = b""
        for _ in range(count):
            log_offset += 100
            key = "abc"[log_offset // 100 % 3]
            offsets[key].append(log_offset)
            packed += INDEX_KEY.pack(key_hash("T", key), log_offset, 5000)
        index.put_many(packed)

    def check() -> None:
        assert {key: find(index, key) for key in offsets} == offsets

    index = made(tmp_path, slots=7, entries_max=100)
    put(8)
    check()
    batch = index.pending()
    put(2)  # behind the batch, which has its blocks
    check()
    assert index.memory_bytes == 10 * INDEX_ENTRY.size
    assert index.written(batch, [OSError(errno.EIO, "no")]) is not None
    check()
    batch = index.pending()
    put(4)
    results = write_files(RealDisk(), [item[1] for item in batch])
    assert index.written(batch, results) is None
    assert index.memory_bytes == 4 * INDEX_ENTRY.size
    check()
    put(1)
    written(index)
    assert index.memory_bytes == 0 and not index.pending()
    check()
    put(5)
    check()
    written(index)
    index = made(tmp_path, slots=7, entries_max=100)
    index.load()
    check()
