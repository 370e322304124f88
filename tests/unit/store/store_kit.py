"""What the store's tests share: small settings, drafts, and a disk that fails on demand."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from cosmodrome import speed
from cosmodrome.env.base import DiskUsage, Env, SegmentFile
from cosmodrome.env.options import StoreOptions
from cosmodrome.env.real import RealDisk, ThreadOffload
from cosmodrome.layout import RECORD_BYTES_MIN
from cosmodrome.store.store import Draft, Store
from cosmodrome.wire.record import Record, iter_records

T = TypeVar("T")

HOST = b"\x7f\x00\x00\x01\x00\x00\x2a\x9f"
ALWAYS_MS = 1 << 60


def small(root: Path, **changes: Any) -> StoreOptions:
    settings: dict[str, Any] = {
        "store_path_root_dir": str(root),
        "mapped_file_size_commit_log": 4096,
        "mapped_file_size_consume_queue": 100,  # five entries
        "max_hash_slot_num": 7,
        "max_index_num": 10,
        "max_message_size": 3000,
        "disk_space_warning_level_ratio": 100,
    }
    return StoreOptions(**(settings | changes))


def draft(body: bytes = b"body", topic: str = "T", queue_id: int = 0, **changes: Any) -> Draft:
    tags, keys = changes.pop("tags", None), changes.pop("keys", None)
    pairs = [f"{name}\x01{text}" for name, text in (("TAGS", tags), ("KEYS", keys)) if text]
    changes.setdefault("properties", "\x02".join(pairs))
    return Draft(topic, queue_id, body, born_host=HOST, store_host=HOST, **changes)


def record_size(message: Draft) -> int:
    texts = len(message.topic.encode()) + len(message.properties.encode())
    return RECORD_BYTES_MIN + texts + len(message.body)


def encode(out: bytearray, log_offset: int, queue_offset: int, store_ms: int, body: bytes) -> int:
    """Append the record of `draft(body)`; its size."""
    return speed.encode_record(
        out, log_offset, queue_offset, store_ms, b"T", 0, 0, 0, 0, HOST, HOST, 0, 0, body, b""
    )


async def put(store: Store, *messages: Draft, wait: bool = True) -> list[int]:
    """Append one by one, wait for all together; the queue offsets."""
    stored = [store.append(message) for message in messages]
    await store.durable(stored[-1].end, wait=wait)
    return [item.queue_offset for item in stored]


async def eventually(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):  # far more than it takes, also on a busy machine
        while not check():
            await asyncio.sleep(0.0025)


def records(store: Store, topic: str = "T", queue_id: int = 0) -> list[Record]:
    """Every message of a queue, whatever the limits of one read."""
    found: list[Record] = []
    offset, end = store.bounds(topic, queue_id)
    while offset < end:
        batch = store.read(topic, queue_id, offset, 32)
        found += iter_records(batch.data)
        assert batch.next_offset > offset, batch
        offset = batch.next_offset
    return found


def bodies(store: Store, topic: str = "T", queue_id: int = 0) -> list[bytes]:
    return [record.body for record in records(store, topic, queue_id)]


class HandClock:
    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.at_ms = now_ms

    def now_ms(self) -> int:
        return self.at_ms


@dataclasses.dataclass
class Faults:
    """Switches; a path that contains the text (or any, when True) fails."""

    write: str | None = None
    write_part_bytes: int = 0  # bytes that reach the file before a failing write fails
    sync: str | None = None
    create: str | None = None
    used_ratio: float = 0.1
    log: list[str] = dataclasses.field(default_factory=list)


class FaultySegment:
    def __init__(self, inner: SegmentFile, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self.path = inner.path
        self.size = inner.size

    @property
    def view(self) -> memoryview:
        return self._inner.view

    def write(self, data: bytes | bytearray | memoryview, position: int) -> None:
        self._faults.log.append(f"write {Path(self.path).name} {position} {len(data)}")
        if self._faults.write is not None and self._faults.write in self.path:
            part = memoryview(data)[: self._faults.write_part_bytes]
            self._inner.write(part, position)
            raise OSError(errno.ENOSPC, "No space left on device")
        self._inner.write(data, position)

    def next_data(self, position: int) -> int:
        return self._inner.next_data(position)

    def sync(self) -> None:
        self._faults.log.append(f"sync {Path(self.path).name}")
        if self._faults.sync is not None and self._faults.sync in self.path:
            raise OSError(errno.EIO, "Input/output error")
        self._inner.sync()

    def close(self) -> None:
        self._inner.close()


class FaultyDisk(RealDisk):
    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def create_segment(self, path: str, size: int) -> SegmentFile:
        if self._faults.create is not None and self._faults.create in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return FaultySegment(super().create_segment(path, size), self._faults)

    def open_segment(self, path: str, *, read_only: bool = False) -> SegmentFile:
        return FaultySegment(super().open_segment(path, read_only=read_only), self._faults)

    def usage(self, path: str) -> DiskUsage:
        used = int(self._faults.used_ratio * 1000)
        return DiskUsage(used_bytes=used, free_bytes=1000 - used)


class GatedOffload:
    """Work off the loop that waits, when told to, until the gate opens."""

    def __init__(self) -> None:
        self._threads = ThreadOffload()
        self.held: list[Callable[[], None]] = []
        self.holding = False

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        if not self.holding:
            return self._threads(work)
        gate = asyncio.Event()
        self.held.append(gate.set)
        return self._later(work, gate)

    async def _later(self, work: Callable[[], T], gate: asyncio.Event) -> T:
        await gate.wait()
        return await self._threads(work)

    def open(self) -> None:
        self.holding = False
        held, self.held = self.held, []
        for release in held:
            release()


def faulty_env(faults: Faults | None = None, clock: HandClock | None = None) -> Env:
    return Env(
        clock=clock or HandClock(),
        disk=FaultyDisk(faults or Faults()),
        random=random.Random(7),
        offload=GatedOffload(),
    )
