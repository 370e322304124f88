"""What a slave finds in its master's log: the compiled function against the law."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmodrome.errors import StoreError
from cosmodrome.layout import QUEUE_OFFSET_LIMIT
from cosmodrome.speed.core import pure
from cosmodrome.wire.message import pack_host

try:
    from cosmodrome.speed.core import native
except ImportError:
    if os.environ.get("COSMODROME_REQUIRE_NATIVE"):
        raise
    pytest.skip("the compiled twin is not built", allow_module_level=True)

often = settings(max_examples=300, deadline=None)
HOST = pack_host("10.1.2.3", 10_911)
WHOLE_MS = 1 << 62
FIRST = 3  # offset that every queue begins with

Record = tuple[bytes, int, int, int, bytes]

RECORD = st.tuples(
    # Some are the same text, one is of a queue that cannot be, one is of delayed messages.
    st.sampled_from([b"T", b"T", b"T", b"U", b"\xff", b"\xfe", b"bad", b"SCHEDULE_TOPIC_XXXX"]),
    st.integers(0, 33),
    st.sampled_from([0, 0, 0, 0, 0, 1, -1, 7, QUEUE_OFFSET_LIMIT]),  # beyond the next offset
    st.sampled_from([0, 0, 0, 0, 4, 8, 12]),
    st.sampled_from([b"", b"KEYS\1a  b\2UNIQ_KEY\1u", b"KEYS\1\xc3\xbc \xff\2TAGS\1t", b"TAGS\1x"]),
)


class Side:
    """One of the twins, with the ends of its queues."""

    def __init__(self, twin: Any) -> None:
        self.twin = twin
        self.ends: dict[tuple[str, int], Any] = {}
        self.known: dict[bytes, Any] = {}

    def queue_end(self, topic: str, queue_id: int) -> Any:
        if topic == "bad":
            raise StoreError("no such queue")
        if (topic, queue_id) not in self.ends:
            self.ends[topic, queue_id] = self.twin.QueueEnd(topic, queue_id, FIRST)
        return self.ends[topic, queue_id]

    def gather(self, log: bytes, base: int, undo: list[Callable[[], None]]) -> tuple[Any, ...]:
        runs, *rest = self.twin.gather_next(
            memoryview(log), base, len(log), WHOLE_MS, self.known, self.queue_end, undo
        )
        return (list(runs), *rest)

    @property
    def moved(self) -> dict[tuple[str, int], int]:
        return {key: end.next for key, end in self.ends.items() if end.next != FIRST}


def encode(records: list[Record], base: int, following: dict[tuple[str, int], int]) -> bytes:
    log = bytearray()
    for number, (topic, queue_id, skipped, kind, properties) in enumerate(records):
        key = topic.decode(errors="replace"), queue_id
        queue_offset = following.get(key, FIRST)
        if not skipped and kind in (0, 8):
            following[key] = queue_offset + 1
        pure.encode_record(
            log, base + len(log), queue_offset + skipped, 1_700_000_000_000 + number, topic,
            queue_id, 0, kind, 5, HOST, HOST, 0, 0, b"body", properties,
        )  # fmt: skip
    return bytes(log)


@often
@given(st.lists(st.lists(RECORD, max_size=40), min_size=1, max_size=3), st.booleans())
def test_both_find_the_same_and_move_the_same(pieces: list[list[Record]], taken_back: bool) -> None:
    sides = Side(pure), Side(native)
    base = 1 << 20
    for records in pieces:
        log = encode(records, base, sides[0].moved)
        before = sides[0].moved
        undo: tuple[list[Callable[[], None]], ...] = ([], [])
        law, found = (side.gather(log, base, to) for side, to in zip(sides, undo, strict=True))
        assert found == law
        assert sides[1].moved == sides[0].moved
        if taken_back:
            for steps in undo:
                for step in steps:
                    step()
            assert sides[0].moved == sides[1].moved == before
        base += len(log)


@often
@given(st.lists(RECORD, min_size=1, max_size=5), st.integers(0, 999), st.integers(1, 255))
def test_a_changed_byte(records: list[Record], at: int, change: int) -> None:
    log = bytearray(encode(records, 0, {}))
    log[at % len(log)] ^= change
    sides = Side(pure), Side(native)
    law, found = (side.gather(bytes(log), 0, []) for side in sides)
    assert found == law
    assert sides[1].moved == sides[0].moved


@often
@given(st.lists(RECORD, max_size=12))
def test_what_is_plain_is_what_the_walk_finds(records: list[Record]) -> None:
    """Up to where it stops, the runs and keys are those of `gather`."""
    log = encode(records, 0, {})
    for side in (Side(pure), Side(native)):
        runs, keys, count, last_ms, position = side.gather(log, 0, [])
        law = pure.gather(memoryview(log), 0, 0, position, True, 99, WHOLE_MS)
        assert (runs, keys, [], count, last_ms, position) == law[:6]


def test_a_queue_that_is_gone_is_looked_up_again() -> None:
    for side in (Side(pure), Side(native)):
        log = encode([(b"T", 0, 0, 0, b"")], 0, {})
        assert side.gather(log, 0, [])[2] == 1
        side.ends.pop(("T", 0)).next = -1
        later = encode([(b"T", 0, 0, 0, b"")], len(log), {})
        assert side.gather(later, len(log), [])[2] == 1
        assert side.moved == {("T", 0): FIRST + 1}
