"""What both lanes tell the log about their records is what `gather` finds in them."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from types import ModuleType

import pytest

from cosmodrome import layout, speed

HOST = bytes(range(8))
START = 1 << 40
STORE_MS = 1_700_000_000_123


def send(topic: str, queue_id: int, properties: str, body: bytes = b"x", code: int = 310) -> bytes:
    words = ["producers", topic, "TBW102", "4", str(queue_id), "0", "1", "0", properties, "0"]
    ext = dict(zip("abcdefghij", words, strict=True)) | {"m": str(code == 320).lower()}
    head = {"code": code, "extFields": ext, "flag": 0, "opaque": 7, "version": 399}
    text = json.dumps(head, ensure_ascii=False).encode()
    return struct.pack(">II", 4 + len(text) + len(body), len(text)) + text + body


def binary_send(topic: str, queue_id: int, properties: str) -> bytes:
    words = ["producers", topic, "TBW102", "4", str(queue_id), "0", "1", "0", properties, "0"]
    pairs = b"".join(
        struct.pack(">h", 1) + name.encode() + struct.pack(">i", len(word)) + word.encode()
        for name, word in zip("abcdefghij", words, strict=True)
    )
    text = struct.pack(">hbhiiii", 310, 0, 399, 7, 0, 0, len(pairs)) + pairs
    return struct.pack(">II", 5 + len(text), len(text) | 1 << 24) + text + b"x"


def item(properties: str, body: bytes = b"inner") -> bytes:
    own = properties.encode()
    size = 22 + len(body) + len(own)
    return struct.pack(">5i", size, 0, 0, 0, len(body)) + body + struct.pack(">h", len(own)) + own


SENDS = {
    "nothing to find": [send("T", 0, "")],
    "all of it": [send("T", 1, "UNIQ_KEY\x01A1\x02KEYS\x01k1 k2\x02TAGS\x01TagA")],
    "empty words": [send("T", 1, "KEYS\x01 a  b \x02TAGS\x01\x02UNIQ_KEY\x01u")],
    "not ASCII": [
        send("T", 3, "KEYS\x01schlüssel 鍵 \U0001f511\x02TAGS\x01Größe\x02UNIQ_KEY\x01ü")
    ],
    "a topic with other keys": [send("T", 0, "KEYS\x01k"), send("Other", 0, "KEYS\x01k")],
    "queues in turn": [send("T", n % 4, f"UNIQ_KEY\x01{n:04}\x02TAGS\x01t{n}") for n in range(40)],
    "a batch": [
        send("T", 2, "TAGS\x01shared", item("KEYS\x01a b") + item("UNIQ_KEY\x01u\x02"), 320),
        send("T", 2, "", b"".join(item(f"TAGS\x01t{n}\x02KEYS\x01{n} {n}") for n in range(9)), 320),
    ],
    "a batch whose items say the same as the request": [
        send("T", 2, "TAGS\x01shared\x02KEYS\x01k", item("TAGS\x01own\x02KEYS\x01a b\x02"), 320),
        send("T", 2, "UNIQ_KEY\x01shared", item("UNIQ_KEY\x01own") + item(""), 320),
    ],
    "a batch with unusual properties": [
        send("T", 0, "TAGS\x01shared", item(own) + item(f"{own}\x02KEYS\x01k"), 320)
        for own in (
            "TAGS\x01a\x02TAGS\x01b",
            "TAGS\x01a\x02TAGS\x01",
            "TAGS",
            "TAGS\x02",
            "\x02\x02a\x01b",
            "\x01a\x02KEYS\x01k",
            "KEYS\x01a\x01b",
            "KEYS\x02\x01",
            "TAGS\x01Größe\x02KEYS\x01鍵",
            "TAG\x01a",
            "DELAYED\x01x",
            "UNIQ_KEY\x01" + "u" * 300,
            "a\x01" + "x" * 15,
            "T",
            "D",
        )
    ],
    "many keys": [send("T", 0, "KEYS\x01" + " ".join(map(str, range(900)))) for _ in range(3)],
}


@pytest.mark.parametrize("sends", SENDS.values(), ids=SENDS)
@pytest.mark.parametrize("room_bytes", [1 << 20, 700], ids=["one file", "several files"])
def test_facts_are_those_of_the_records(
    lane_core: ModuleType, sends: list[bytes], room_bytes: int
) -> None:
    intake = lane_core.Intake(lambda name: lane_core.Plan(name.decode(), 4, 0), "c", 9000, 90_000)
    data, view = b"".join(sends), memoryview(b"".join(sends))
    ends = {("T", 0): speed.QueueEnd("T", 0, 17)}
    at, why, requests = intake.gather(None, view, 0, 1000, HOST, HOST)
    assert (at, why, requests) == (len(data), layout.LANE_NOTHING, len(sends))
    taken, log_offset = 0, START
    while intake.left:
        out = bytearray()
        room = max(room_bytes, intake.next_bytes)
        size, count, runs, keys = intake.encode(
            out,
            log_offset,
            room,
            STORE_MS,
            lambda topic, queue: ends.setdefault((topic, queue), speed.QueueEnd(topic, queue, 5)),
            [],
        )
        found = speed.gather(memoryview(out), log_offset, 0, len(out), True, 1000)
        assert (list(runs), keys, [], count) == found[:4]
        assert size == len(out) == found[5]
        log_offset += size
        taken += count
    assert taken >= len(sends)


def test_a_topic_is_asked_for_once(lane_core: ModuleType) -> None:
    asked: list[bytes] = []

    def find(name: bytes) -> object:
        asked.append(name)
        return lane_core.Plan(name.decode(), 4, 0)

    intake = lane_core.Intake(find, "c", 9000, 90_000)
    names = [f"{'long-' * (number % 20)}{number}" for number in range(300)]
    view = memoryview(b"".join(send(name, 0, "") for name in names))
    for lives, forget in ((1, False), (1, True), (2, False)):
        intake.gather(None, view, 0, 1000, HOST, HOST)
        assert intake.left == len(names) <= len(intake.known)
        assert asked == [name.encode() for name in names] * lives
        intake.clear()
        if forget:
            intake.known.clear()
            assert len(intake.known) == 0


@pytest.mark.parametrize(
    "own",
    [
        "DELAY\x013",
        "TAGS\x01a\x02DELAY\x013\x02",
        "TRAN_MSG\x01true",
        "TIMER_DELAY_SEC\x011",
        "TIMER_\x02a\x01b",
        "a\0\x01b",
        "TAGS\x01" + "x" * 40 + "\0",
        "\0",
    ],
)
def test_items_that_the_slow_lane_has_to_see(lane_core: ModuleType, own: str) -> None:
    intake = lane_core.Intake(lambda name: lane_core.Plan(name.decode(), 4, 0), "c", 9000, 90_000)
    data = send("T", 0, "", item("TAGS\x01a") + item(own), 320)
    found = intake.gather(None, memoryview(data), 0, 1000, HOST, HOST)
    assert found == (0, layout.LANE_OTHER, 0) and intake.left == 0


@pytest.mark.parametrize("seed", range(6))
def test_many_topics_in_any_order(lane_core: ModuleType, seed: int) -> None:
    """What is guessed about frames that come soon changes nothing, whatever they are."""
    chance = random.Random(seed)
    intake = lane_core.Intake(lambda name: lane_core.Plan(name.decode(), 4, 0), "c", 9000, 1 << 20)
    names = [f"{'t' * chance.choice((0, 1, 20, 121))}-{number}" for number in range(150)]
    ends: dict[tuple[str, int], speed.QueueEnd] = {}
    log_offset = START
    for _ in range(12):
        makers = chance.sample([send, binary_send], chance.choice((1, 1, 2)))
        sends = [
            chance.choice(makers)(
                chance.choice(names), chance.randrange(4), chance.choice(("", "TAGS\x01a"))
            )
            for _ in range(200)
        ]
        data = b"".join(sends)
        cut = chance.randrange(len(data))
        first, _, _ = intake.gather(None, memoryview(data)[:cut], 0, 1000, HOST, HOST)
        at, why, _ = intake.gather(None, memoryview(data), first, 1000, HOST, HOST)
        assert (at, why, intake.left) == (len(data), layout.LANE_NOTHING, len(sends))
        out = bytearray()
        size, count, runs, keys = intake.encode(
            out,
            log_offset,
            1 << 30,
            STORE_MS,
            lambda topic, queue: ends.setdefault((topic, queue), speed.QueueEnd(topic, queue, 5)),
            [],
        )
        found = speed.gather(memoryview(out), log_offset, 0, len(out), True, 1000)
        assert (sorted(runs), keys, [], count) == (sorted(found[0]), *found[1:4])
        log_offset += size
        intake.clear()
        if chance.random() < 0.2:
            intake.known.clear()


def test_an_encoding_that_fails_leaves_nothing_behind(lane_core: ModuleType) -> None:
    intake = lane_core.Intake(lambda name: lane_core.Plan(name.decode(), 4, 0), "c", 9000, 90_000)
    for name in ("T", "U"):  # two connections
        intake.gather(name, memoryview(send(name, 0, "")), 0, 1000, HOST, HOST)
    ends = {name: speed.QueueEnd(name, 0, 5) for name in ("T", "U")}
    broken = True

    def place(topic: str, queue_id: int) -> speed.QueueEnd:
        if broken and topic == "U":
            raise RuntimeError("a queue that cannot be found")
        return ends[topic]

    out = bytearray(b"before")
    undo: list[Callable[[], None]] = []
    with pytest.raises(RuntimeError, match="cannot be found"):
        intake.encode(out, START, 9000, STORE_MS, place, undo)
    assert (out, undo, intake.left) == (b"before", [], 2)
    assert [end.next for end in ends.values()] == [5, 5]
    broken = False
    size, count, _, _ = intake.encode(out, START, 9000, STORE_MS, place, undo)
    assert (count, intake.left, len(out)) == (2, 0, len(b"before") + size)
    assert [end.next for end in ends.values()] == [6, 6]
