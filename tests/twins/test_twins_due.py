"""Messages that waited, copied by both twins and by the way of one at a time."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosmodrome import speed
from cosmodrome.broker.later.delivery import restored
from cosmodrome.layout import (
    RECORD_SYS_FLAG_AT,
    SYS_BORN_V6,
    SYS_COMMIT,
    SYS_PREPARED,
    SYS_ROLLBACK,
    SYS_STORE_V6,
)
from cosmodrome.speed.core import pure
from cosmodrome.speed.due import pure as due_pure
from cosmodrome.wire.record import decode_record

LOG_OFFSET, STORE_MS = 7_000, 1_700_000_000_123
V4, V6 = bytes(range(8)), bytes(range(20))


def cores() -> list[ModuleType]:
    try:
        compiled = [importlib.import_module("cosmodrome.speed.due.native")]
    except ImportError:
        if os.environ.get("COSMODROME_REQUIRE_NATIVE"):
            raise
        compiled = []
    return [due_pure, *compiled]


def queue_end_class(core: ModuleType) -> Any:
    if core is due_pure:
        return pure.QueueEnd
    return importlib.import_module("cosmodrome.speed.core.native").QueueEnd


def record(
    properties: bytes,
    body: bytes = b"body",
    topic: bytes = b"SCHEDULE_TOPIC_XXXX",
    sys_flag: int = 0,
    hosts: tuple[bytes, bytes] = (V4, V4),
) -> bytes:
    out = bytearray()
    speed.encode_record(
        out,
        4_000,
        3,
        1_600_000_000_000,
        topic,
        2,
        77,
        sys_flag,
        55,
        *hosts,
        5,
        9,
        body,
        properties,
    )
    return bytes(out)


def copied(core: ModuleType, data: bytes, rooms: list[int]) -> tuple[Any, ...]:
    """All that can be seen of copying `data` into log files with so much room."""
    ends: dict[tuple[str, int], Any] = {}

    def queue_end(topic: str, queue_id: int) -> Any:
        key = (topic, queue_id)
        return ends.setdefault(key, queue_end_class(core)(topic, queue_id, 10 * queue_id))

    many = core.DueMessages(data, 3_000, 1_000)
    undo: list[Callable[[], None]] = []
    out, steps, offset = bytearray(b"before"), [many.taken], LOG_OFFSET
    for room in rooms:
        needed = many.next_bytes
        size, count, runs, keys = many.encode(out, offset, room, STORE_MS, queue_end, undo)
        assert runs is None and not keys  # the log reads the records itself
        offset += size
        steps.append((size, count, needed, many.left, many.staged, many.end))
    after = {key: one.next for key, one in ends.items()}
    for one in reversed(undo):
        one()
    back = {key: one.next for key, one in ends.items()}
    assert back == {key: 10 * key[1] for key in ends}
    return steps, bytes(out), after, sorted(many.counts())


def target(topic: str, queue_id: object, rest: str = "") -> bytes:
    return f"{rest}REAL_TOPIC\1{topic}\2REAL_QID\1{queue_id}".encode()


PLAIN = [
    record(target("T", 0)),
    record(target("T", 1, "DELAY\0013\2KEYS\1a b\2"), b""),
    record(target("Größe", 3, "TAGS\1ü\2"), b"x" * 900),
    record(target("T", 0), hosts=(V6, V4), sys_flag=SYS_BORN_V6),
    record(target("T", 123_456_789), hosts=(V4, V6), sys_flag=SYS_STORE_V6 | SYS_COMMIT),
    record(
        b"REAL_QID\0017\2\2x\1\2\1y\2REAL_TOPIC\1" + b"t" * 127 + b"\2",
        topic=b"rmq_sys_wheel_timer",
    ),
    *(record(target(f"T{number}", number % 5)) for number in range(40)),
]
UNUSUAL = {
    "no destination": record(b"DELAY\0011"),
    "no properties": record(b""),
    "no queue": record(b"REAL_TOPIC\1T"),
    "no topic": record(b"REAL_QID\0011\2REAL_TOPIC\1\2"),
    "two topics": record(target("T", 1) + b"\2REAL_TOPIC\1U"),
    "two queues": record(target("T", 1) + b"\2REAL_QID\0011"),
    "a queue that is no number": record(target("T", "-1")),
    "a queue with too many digits": record(target("T", 1_234_567_890)),
    "half topic": record(target("RMQ_SYS_TRANS_HALF_TOPIC", 0)),
    "topic too long": record(target("t" * 128, 0)),
    "not UTF-8": record(target("T", 1) + b"\2a\1\xff"),
    "zeros": record(target("T", 1) + b"\2a\1\0"),
    "prepared": record(target("T", 1), sys_flag=SYS_PREPARED),
    "rollback": record(target("T", 1), sys_flag=SYS_ROLLBACK),
    "body too large": record(target("T", 1), b"x" * 1_001),
    "too large with its topic": record(target("t" * 127, 1, "p" * 2_000 + "\2"), b"x" * 900),
    "cut short": PLAIN[0][:-1],
    "another magic": PLAIN[0][:4] + b"\0\0\0\0" + PLAIN[0][8:],
    "hosts that do not fit": (
        PLAIN[0][:RECORD_SYS_FLAG_AT]
        + (SYS_BORN_V6 | SYS_STORE_V6).to_bytes(4, "big")
        + PLAIN[0][RECORD_SYS_FLAG_AT + 4 :]
    ),
}


@pytest.mark.parametrize("core", cores(), ids=lambda core: core.__name__)
def test_plain_ones_are_what_one_at_a_time_stores(core: ModuleType) -> None:
    """The law of the copies: the draft that `restored` makes of each record, encoded."""
    expected, offset, ends = bytearray(b"before"), LOG_OFFSET, dict[tuple[str, int], int]()
    for data in PLAIN:
        found = decode_record(data)
        draft = restored(found, found.pairs())
        assert draft is not None
        key = (draft.topic, draft.queue_id)
        queue_offset = ends.get(key, 10 * draft.queue_id)
        ends[key] = queue_offset + 1
        offset += speed.encode_record(
            expected,
            offset,
            queue_offset,
            STORE_MS,
            draft.topic.encode(),
            draft.queue_id,
            draft.flag,
            draft.sys_flag,
            draft.born_ms,
            draft.born_host,
            draft.store_host,
            draft.reconsume_times,
            draft.prepared_offset,
            draft.body,
            draft.properties.encode(),
        )
    steps, out, after, counts = copied(core, b"".join(PLAIN), [1_000_000])
    assert steps[0] == len(PLAIN) and steps[1][-1] == offset
    assert out == bytes(expected)
    assert after == ends
    assert sum(count for _, _, count, _ in counts) == len(PLAIN)
    assert sum(size for *_, size in counts) == offset - LOG_OFFSET


@pytest.mark.parametrize("core", cores(), ids=lambda core: core.__name__)
@pytest.mark.parametrize("what", UNUSUAL)
def test_what_is_unusual_ends_it(core: ModuleType, what: str) -> None:
    data = PLAIN[0] + PLAIN[1] + UNUSUAL[what] + PLAIN[2]
    assert core.DueMessages(data, 3_000, 1_000).taken == 2
    assert core.DueMessages(UNUSUAL[what], 3_000, 1_000).taken == 0


@pytest.mark.parametrize("core", cores(), ids=lambda core: core.__name__)
def test_a_queue_end_that_cannot_be_had_changes_nothing(core: ModuleType) -> None:
    made = queue_end_class(core)("T", 0, 5)

    def queue_end(topic: str, queue_id: int) -> Any:
        if queue_id == 1:
            raise ValueError("no such queue")
        return made

    many, out = core.DueMessages(b"".join(PLAIN[:3]), 3_000, 1_000), bytearray(b"x")
    undo: list[Callable[[], None]] = []
    with pytest.raises(ValueError, match="no such queue"):
        many.encode(out, 0, 100_000, STORE_MS, queue_end, undo)
    assert (out, undo, made.next, many.left, many.counts()) == (bytearray(b"x"), [], 5, 3, [])


@given(
    st.lists(st.sampled_from([*PLAIN[:8], *UNUSUAL.values()]), max_size=6),
    st.lists(st.integers(0, 2_500), max_size=6),
    st.integers(0, 2**32),
)
def test_twins_agree(parts: list[bytes], rooms: list[int], seed: int) -> None:
    """Also on data that is damaged somewhere."""
    data = bytearray(b"".join(parts))
    chance = random.Random(seed)
    for _ in range(chance.randrange(4) if data else 0):
        data[chance.randrange(len(data))] = chance.choice((0, 1, 2, 127, 128, 255))
    first, *others = [copied(core, bytes(data), rooms) for core in cores()]
    for other in others:
        assert other == first
