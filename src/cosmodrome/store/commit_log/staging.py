"""What is staged for the log: the records of one write, and what queues and index get of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from cosmodrome import speed
from cosmodrome.env.base import SegmentFile
from cosmodrome.errors import MessageTooLarge, StoreCorrupt
from cosmodrome.layout import (
    BLANK_BYTES,
    HOST_V4_BYTES,
    HOST_V6_BYTES,
    PROPERTIES_BYTES_MAX,
    RECORD_BYTES_MIN,
    SECTOR_BYTES,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_TRANSACTION_MASK,
    TOPIC_BYTES_MAX,
)
from cosmodrome.store.values import Draft, Stored

Undo = list[Callable[[], None]]
FindQueueEnd = Callable[[str, int], speed.QueueEnd]
Runs = Collection[speed.Run]


class Stageable(Protocol):
    """Requests whose messages only need their offsets; see `Log.stage`."""

    @property
    def left(self) -> int:
        """Requests that are not encoded yet."""

    @property
    def next_bytes(self) -> int:
        """Room that the next request needs, contiguous in one file."""

    def encode(
        self,
        out: bytearray,
        log_offset: int,
        room: int,
        store_ms: int,
        queue_end: FindQueueEnd,
        undo: Undo,
        /,
    ) -> tuple[int, int, Runs | None, bytes]:
        """Append the records of as many requests as fit.

        `queue_end` gives the end of a queue, which is moved on for what is appended; what moves it
        back goes to `undo`. Returns how many bytes and messages were appended, and the runs and
        keys that `speed.gather` would find in them. Runs are None when they are not known.
        """


@dataclasses.dataclass(slots=True)
class Span:
    """Records of [start, end) in the log, and what queues and index get of them.

    A blank at the end of a file is a span without records.
    """

    start: int
    end: int
    last_ms: int  # store time of the last record
    count: int
    runs: Runs | None  # None until `Chunk.describe`
    keys: bytes
    delayed: Sequence[speed.Entry] = ()
    followed: bool = False  # a copy of a master's, and the ends of its queues are behind it


@dataclasses.dataclass(slots=True)
class Chunk:
    """What is staged for one file, in one piece."""

    file: SegmentFile
    base: int  # where the file begins in the log
    start: int
    end: int  # behind the data when the rest of the file is blank
    data: bytearray = dataclasses.field(default_factory=bytearray)
    copied: memoryview | None = None  # what is written instead of data, as a master sent it
    undo: Undo = dataclasses.field(default_factory=list)  # in the order of staging
    spans: list[Span] = dataclasses.field(default_factory=list)
    last_ms: int = 0
    described: bool = True  # every span has its runs

    def add(self, size: int, count: int, store_ms: int, runs: Runs | None, keys: bytes) -> None:
        """Records were appended to the data."""
        start, end = self.end, self.end + size
        if runs is None:
            self.described = False
        last = self.spans[-1] if self.spans and runs is None else None
        if last is not None and last.runs is None:
            last.end, last.count, last.last_ms = end, last.count + count, store_ms
        else:
            self.spans.append(Span(start, end, store_ms, count, runs, keys))
        self.end = end
        self.last_ms = store_ms

    def add_blank(self, blank: bytes, end: int) -> None:
        """Leave the rest of the file, up to `end`, empty."""
        self.data += blank
        self.spans.append(Span(self.end, end, self.last_ms, 0, (), b""))
        self.end = end

    def describe(self) -> None:
        """Find out, once, what queues and index get of records whose encoder did not say it."""
        for span in self.spans:
            if span.runs is None:
                with memoryview(self.data) as view:
                    begin, stop = span.start - self.start, span.end - self.start
                    found = speed.gather(view, self.start, begin, stop, False, span.count)
                runs, span.keys, span.delayed, count, _, position, _ = found
                if count != span.count or position != stop:
                    raise StoreCorrupt(
                        f"what was staged at offset {self.start + position} of the commit log is"
                        " no record; nothing of it is written: restart the broker and report this"
                    )
                span.runs = runs
        self.described = True


class DraftRecords:
    """Messages that are staged all or none, contiguous in one file."""

    def __init__(self, drafts: Sequence[Draft], body_bytes_max: int, segment_bytes: int) -> None:
        """MessageTooLarge for what breaks a limit."""
        self.stored: list[Stored] = []
        self._drafts = [(draft, *_encode_texts(draft, body_bytes_max)) for draft in drafts]
        self.next_bytes = sum([one[3] for one in self._drafts])
        if self.next_bytes + BLANK_BYTES > segment_bytes:
            raise MessageTooLarge(
                f"{self.next_bytes} bytes of records do not fit a commit-log file of"
                f" {segment_bytes} bytes; send less at once or raise mappedFileSizeCommitLog"
            )

    @property
    def left(self) -> int:
        return len(self._drafts) - len(self.stored)

    def encode(
        self,
        out: bytearray,
        log_offset: int,
        room: int,
        store_ms: int,
        queue_end: FindQueueEnd,
        undo: Undo,
        /,
    ) -> tuple[int, int, Runs | None, bytes]:
        assert room >= self.next_bytes, (room, self.next_bytes)
        mark, start = len(out), log_offset
        stored: list[Stored] = []
        moved: list[tuple[speed.QueueEnd, int]] = []
        try:
            for draft, topic, properties, size in self._drafts:
                queue_offset = _take_queue_offset(draft, queue_end, moved)
                wrote = speed.encode_record(
                    out,
                    log_offset,
                    queue_offset,
                    store_ms,
                    topic,
                    draft.queue_id,
                    draft.flag,
                    draft.sys_flag,
                    draft.born_ms,
                    draft.born_host,
                    draft.store_host,
                    draft.reconsume_times,
                    draft.prepared_offset,
                    draft.body,
                    properties,
                )
                assert wrote == size, (wrote, size)
                stored.append(Stored(log_offset, size, draft.queue_id, queue_offset))
                log_offset += size
        except BaseException:
            del out[mark:]
            speed.put_back(moved)
            raise
        undo.append(functools.partial(speed.put_back, moved))
        self.stored = stored
        return log_offset - start, len(stored), None, b""


def _take_queue_offset(
    draft: Draft, find_queue_end: FindQueueEnd, moved: list[tuple[speed.QueueEnd, int]]
) -> int:
    if draft.sys_flag & SYS_TRANSACTION_MASK in (SYS_PREPARED, SYS_ROLLBACK):
        return 0  # not in any queue
    queue_end = find_queue_end(draft.topic, draft.queue_id)
    queue_offset = queue_end.next
    moved.append((queue_end, queue_offset))
    queue_end.next = queue_offset + 1
    return queue_offset


def _encode_texts(draft: Draft, body_bytes_max: int) -> tuple[bytes, bytes, int]:
    """Topic and properties of a message that keeps the limits, and the size of its record."""
    topic = draft.topic.encode()
    properties = draft.properties.encode()
    if not 0 < len(topic) <= TOPIC_BYTES_MAX:
        raise MessageTooLarge(
            f"the topic name has {len(topic)} bytes; 1 to {TOPIC_BYTES_MAX} are allowed"
        )
    if len(properties) > PROPERTIES_BYTES_MAX:
        raise MessageTooLarge(
            f"the properties have {len(properties)} bytes; at most {PROPERTIES_BYTES_MAX}"
            " are allowed, move large values into the body"
        )
    if "\0" in draft.properties and _looks_torn(properties):
        raise MessageTooLarge(
            "the properties hold or end with zero bytes in a way that cannot be told from"
            " data lost in a power cut; encode such values as text"
        )
    if len(draft.body) > body_bytes_max:
        raise MessageTooLarge(
            f"the body has {len(draft.body)} bytes; maxMessageSize is {body_bytes_max}"
        )
    hosts = len(draft.born_host), len(draft.store_host)
    if not all(length in (HOST_V4_BYTES, HOST_V6_BYTES) for length in hosts):
        raise ValueError(f"packed hosts of {hosts} bytes; 8 or 20 are expected")
    size = RECORD_BYTES_MIN + sum(hosts) - 2 * HOST_V4_BYTES
    size += len(draft.body) + len(topic) + len(properties)
    return topic, properties, size


def _looks_torn(properties: bytes) -> bool:
    """Whether recovery could, depending on their position, take these for a lost sector."""
    return properties.endswith(b"\0") or bytes(SECTOR_BYTES) in properties
