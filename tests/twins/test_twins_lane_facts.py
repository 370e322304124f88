"""What both lanes tell the log about their records is what `gather` finds in them."""

from __future__ import annotations

import json
import struct
from types import ModuleType

import pytest

from cosmodrome import speed

HOST = bytes(range(8))
START = 1 << 40
STORE_MS = 1_700_000_000_123


def send(topic: str, queue_id: int, properties: str, body: bytes = b"x", code: int = 310) -> bytes:
    words = ["producers", topic, "TBW102", "4", str(queue_id), "0", "1", "0", properties, "0"]
    ext = dict(zip("abcdefghij", words, strict=True)) | {"m": str(code == 320).lower()}
    head = {"code": code, "extFields": ext, "flag": 0, "opaque": 7, "version": 399}
    text = json.dumps(head, ensure_ascii=False).encode()
    return struct.pack(">II", 4 + len(text) + len(body), len(text)) + text + body


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
    "many keys": [send("T", 0, "KEYS\x01" + " ".join(map(str, range(900)))) for _ in range(3)],
}


@pytest.mark.parametrize("sends", SENDS.values(), ids=SENDS)
@pytest.mark.parametrize("room_bytes", [1 << 20, 700], ids=["one file", "several files"])
def test_facts_are_those_of_the_records(
    lane_core: ModuleType, sends: list[bytes], room_bytes: int
) -> None:
    intake = lane_core.Intake(lambda name: lane_core.Plan(name.decode(), 4, 0), "c", 9000, 90_000)
    data, view = b"".join(sends), memoryview(b"".join(sends))
    places = {("T", 0): speed.Place("T", 0, 17)}
    at, why, requests = intake.gather(None, view, 0, 1000, HOST, HOST)
    assert (at, why, requests) == (len(data), lane_core.NOTHING, len(sends))
    taken, log_offset = 0, START
    while intake.left:
        out = bytearray()
        room = max(room_bytes, intake.next_bytes)
        size, count, runs, keys = intake.encode(
            *(out, log_offset, room, STORE_MS),
            *(lambda *queue: places.setdefault(queue, speed.Place(*queue, 5)), []),
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
