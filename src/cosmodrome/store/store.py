"""The message store: the one door to messages on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cosmodrome.env.base import Env
from cosmodrome.env.options import StoreOptions
from cosmodrome.env.signal import Signal
from cosmodrome.errors import StoreUnwritable
from cosmodrome.store.values import (
    Arrival,
    Batch,
    Draft,
    Found,
    PutStatus,
    ReadStatus,
    Stored,
    StoreFacts,
)

__all__ = [
    "Arrival",
    "Batch",
    "Draft",
    "Found",
    "PutStatus",
    "ReadStatus",
    "Store",
    "StoreFacts",
    "Stored",
]

MEMORY_BYTES_ASSUMED = 8 << 30


class Store:
    """Signatures only; the parts behind them follow."""

    def __init__(
        self,
        options: StoreOptions,
        env: Env,
        delay_ms: Callable[[int], int] | None = None,
        *,
        memory_bytes: int = MEMORY_BYTES_ASSUMED,
        read_only: bool = False,
    ) -> None:
        self.arrivals: Signal[Arrival] = Signal()

    async def start(self) -> None:
        raise StoreUnwritable("the store is not built yet")

    async def stop(self) -> None: ...

    def append(self, draft: Draft) -> Stored:
        return self.append_batch([draft])[0]

    def append_batch(self, drafts: Sequence[Draft]) -> list[Stored]:
        raise StoreUnwritable("the store is not built yet")

    async def settle(self, end: int, *, wait: bool = True) -> PutStatus:
        raise StoreUnwritable("the store is not built yet")

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        *,
        matches: Callable[[int], bool] | None = None,
        matches_record: Callable[[memoryview], bool] | None = None,
    ) -> Batch:
        return Batch(ReadStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)

    def bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        return 0, 0

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        return 0

    def store_time(self, topic: str, queue_id: int, queue_offset: int) -> int:
        return -1

    def in_memory(self, topic: str, queue_id: int, queue_offset: int) -> bool:
        return True

    def record(self, log_offset: int, size: int | None = None) -> bytes | None:
        return None

    def find(self, topic: str, key: str, max_count: int, begin_ms: int, end_ms: int) -> Found:
        return Found([], 0, 0)

    def queues(self) -> Mapping[str, Sequence[int]]:
        return {}

    def delete_topic(self, topic: str) -> None: ...

    def facts(self) -> StoreFacts:
        return StoreFacts(0, 0, 0, 0, 0, 0.0, -1, 0, 0, 0, 0, None)

    @property
    def why_unwritable(self) -> str | None:
        return "the store is not built yet"
