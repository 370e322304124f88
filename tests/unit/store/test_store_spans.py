"""Whoever encodes records may say what dispatch needs of them; it is taken at its word."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.store.store_kit import Faults, draft, encode, faulty_env, put, record_size, small

from cosmodrome import speed
from cosmodrome.env.real import real_env
from cosmodrome.layout import INDEX_KEY, QUEUE_ENTRY
from cosmodrome.store.store import Store


class Knowing:
    """Messages without tags and keys; their encoder says that they have some."""

    def __init__(self, bodies: list[bytes], tags_code: int) -> None:
        self._bodies = bodies
        self._tags_code = tags_code
        self._done = 0
        self.end = 0

    @property
    def left(self) -> int:
        return len(self._bodies) - self._done

    @property
    def next_bytes(self) -> int:
        return record_size(draft(self._bodies[self._done]))

    def encode(
        self,
        out: bytearray,
        log_offset: int,
        room: int,
        store_ms: int,
        place: Callable[[str, int], speed.QueueEnd],
        undo: list[Callable[[], None]],
    ) -> tuple[Any, ...]:
        kept = place("T", 0)
        first, size = kept.next, 0
        undo.append(functools.partial(speed.put_back, [(kept, first)]))
        entries, keys, count = b"", b"", 0
        while self.left and size + self.next_bytes <= room:
            at = log_offset + size
            wrote = encode(out, at, first + count, store_ms, self._bodies[self._done])
            entries += QUEUE_ENTRY.pack(at, wrote, self._tags_code)
            keys += INDEX_KEY.pack(speed.key_hash("T", "said"), at, store_ms)
            size, count, self._done = size + wrote, count + 1, self._done + 1
        kept.next = first + count
        self.end = log_offset + size
        return size, count, [("T", 0, first, entries)], keys


def codes(store: Store) -> list[int]:
    found: list[tuple[int, int, int]] = []
    while more := store.entries("T", 0, len(found), 99):
        found += more
    return [code for _, _, code in found]


def found(store: Store) -> int:
    return len(store.find("T", "said", 99, 0, 1 << 60).records)


@pytest.mark.parametrize("flush", ["SYNC_FLUSH", "ASYNC_FLUSH"])
async def test_between_others_and_over_files(tmp_path: Path, flush: str) -> None:
    store = Store(small(tmp_path, flush_disk_type=flush, max_index_num=100), real_env())
    await store.start()
    store.append(draft(b"read"))
    knowing = Knowing([bytes(1000)] * 9, 7)
    store.stage(knowing)
    store.append(draft(b"read"))
    again = Knowing([b"x"], 8)
    store.stage(again)
    assert not knowing.left and knowing.end > 2 * 4096
    await store.durable(again.end)
    assert codes(store) == [0, *[7] * 9, 0, 8]
    assert found(store) == 10
    assert not store._log.spans
    await store.stop()


async def test_what_was_taken_back_leaves_no_span(tmp_path: Path) -> None:
    faults = Faults()
    store = Store(small(tmp_path), faulty_env(faults))
    await store.start()
    await put(store, draft(b"kept"))
    faults.write = "commitlog"
    outcome: list[object] = []
    lost = Knowing([b"lost"], 7)
    store.stage(lost)
    store.when_durable(lost.end, lambda who, error: outcome.append(error), None)
    store._log.write()
    assert len(outcome) == 1 and not store._log.spans
    faults.write = None
    await put(store, draft(b"lost"))  # at the same place
    assert codes(store) == [0, 0] and found(store) == 0
    await store.stop()


async def test_recovery_reads_the_records_themselves(tmp_path: Path) -> None:
    store = Store(small(tmp_path), real_env())
    await store.start()
    knowing = Knowing([b"a", b"b"], 7)
    store.stage(knowing)
    await store.durable(knowing.end)
    assert codes(store) == [7, 7]
    await store.abandon()
    store = Store(small(tmp_path), real_env())
    await store.start()
    assert codes(store) == [0, 0]
    await store.stop()


async def test_of_a_deleted_topic_nothing_appears(tmp_path: Path) -> None:
    store = Store(small(tmp_path), real_env())
    await store.start()
    knowing = Knowing([b"a"], 7)
    store.stage(knowing)
    store.delete_topic("T")
    await store.durable(knowing.end)
    assert store.bounds("T", 0) == (0, 0)
    await store.stop()
