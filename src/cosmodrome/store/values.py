"""What goes into the store and what comes out of it: plain values, no behaviour."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple


@dataclasses.dataclass(slots=True)
class Draft:
    """A message before the store gave it its offsets. Hosts are packed (address, port as i32)."""

    topic: str
    queue_id: int
    body: bytes
    properties: str
    born_host: bytes
    store_host: bytes
    flag: int = 0
    sys_flag: int = 0
    born_ms: int = 0
    reconsume_times: int = 0
    prepared_offset: int = 0


class Stored(NamedTuple):
    """Where one appended message stands."""

    log_offset: int
    size: int
    queue_id: int
    queue_offset: int

    @property
    def end(self) -> int:
        """What to hand to `Store.durable`."""
        return self.log_offset + self.size


class PutStatus(enum.Enum):
    """All of these mean "stored"; those after OK name a promise that was not kept in time."""

    OK = "OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"  # stored, but the sync is still running
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"  # stored, but there was no slave to wait for
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"  # stored, but no slave has reported it yet

    __hash__ = object.__hash__  # Enum's own is a call in Python


class ReadStatus(enum.Enum):
    """Why a read ended as it did, under upstream's names."""

    FOUND = "FOUND"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"


@dataclasses.dataclass(slots=True)
class Batch:
    """The answer to a read: `data` is `count` whole records, one after the other."""

    status: ReadStatus
    next_offset: int
    min_offset: int
    max_offset: int
    data: bytes = b""
    count: int = 0
    behind: bool = False  # far behind the log's end: a slave would be the better source


class Arrival(NamedTuple):
    """Messages became readable in one queue; `max_offset` is the queue's new end."""

    topic: str
    queue_id: int
    max_offset: int
    tags_codes: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The answer to a key query. Hash collisions are included: compare the keys again."""

    records: list[bytes]
    last_update_ms: int
    last_update_offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class StoreFacts:
    min_offset: int
    max_offset: int  # end of what consumers can see
    written_offset: int
    flushed_offset: int  # end of what is known to be synced
    dispatch_behind_bytes: int
    disk_ratio: float
    earliest_ms: int  # store time of the first message, -1 when there is none
    put_count: int
    put_bytes: int
    put_failed_count: int
    queue_count: int
    unwritable: str | None
