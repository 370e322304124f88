"""Headers that producers repeat are recognised, and only those."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from cosmodrome.speed import lane_pure
from cosmodrome.speed.lane_habits import CREDIT_MAX, LEARN_COST, places, repeats
from cosmodrome.speed.pure import encode_header
from cosmodrome.speed.tails import Place

BORN_HOST = bytes(8)
STORE_HOST = bytes(range(8))


def header(
    opaque: Any = 1,
    key: str = "7F00A1",
    born: str = "1690",
    *,
    queue: str = "1",
    last: bool = True,
) -> bytes:
    text = f"x\x01y\x02UNIQ_KEY\x01{key}\x02TAGS\x01A"
    plain = {"a": "group", "b": "T", "c": "TBW102", "d": "4", "e": queue, "f": "0", "g": born}
    ext = {**plain, "h": "0", "i": text, "j": "0", "k": "false", "m": "false"}
    head: dict[str, Any] = {
        "code": 310,
        "extFields": ext,
        "flag": 0,
        "opaque": opaque,
        "version": 9,
    }
    if not last:
        head = {"code": 310, "opaque": opaque, "flag": 0, "version": 9, "extFields": ext}
    return json.dumps(head, separators=(",", ":")).encode()


def framed(head: bytes, body: bytes = b"body", serialize: int = 0) -> bytes:
    word = serialize << 24 | len(head)
    return struct.pack(">II", 4 + len(head) + len(body), word) + head + body


class Staged:
    """An intake whose sends are staged into a bytearray."""

    def __init__(self) -> None:
        self.looked_up = 0
        self.data = bytearray()
        self.places: dict[tuple[str, int], Place] = {}
        self.intake = lane_pure.Intake(self.find, "c", 1000, 5000)

    def find(self, name: bytes) -> lane_pure.Plan:
        self.looked_up += 1
        return lane_pure.Plan(name.decode(), 4, 0)

    def feed(self, data: bytes) -> tuple[int, int]:
        self.intake.clear()
        at, why, _ = self.intake.gather(None, memoryview(data), 0, 99, BORN_HOST, STORE_HOST)
        end = len(self.data)
        self.intake.encode(self.data, end, 1 << 20, 5, self.place, [])
        return at, why

    def place(self, topic: str, queue_id: int) -> Place:
        return self.places.setdefault((topic, queue_id), Place(topic, queue_id, 0))


def binary(
    opaque: int = 1,
    key: str = "7F00A1",
    born: str = "1690",
    group: str = "group",
    queue: str = "1",
) -> bytes:
    text = f"x\x01y\x02UNIQ_KEY\x01{key}\x02TAGS\x01A"
    ext = {"a": group, "b": "T", "c": "TBW102", "d": "4", "e": queue, "f": "0", "g": born, "h": "0"}
    return encode_header(1, 310, 0, 9, opaque, 0, None, {**ext, "i": text, "j": "0"})


@pytest.mark.parametrize("last", [True, False])
def test_values_are_found(last: bool) -> None:
    text = header(17, "AB12", last=last)
    where = places(0, text)
    assert where is not None and repeats(0, text, where)
    a, b, c, d, e, f, behind = where
    assert behind is last
    values = (text[a:b], text[c:d], text[e:f])
    assert values == ((b"1690", b"AB12", b"17") if last else (b"17", b"1690", b"AB12"))


def test_values_are_found_in_a_binary_header() -> None:
    text = binary(17, "AB12")
    where = places(1, text)
    assert where is not None and repeats(1, text, where)
    a, b, c, d, e, f, behind = where
    assert (text[a:b], text[c:d], text[e:f], behind) == (b"\0\0\0\x11", b"1690", b"AB12", False)


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        header().replace(b'"g":"1690"', b'"g":1690'),
        header().replace(b'"g":"1690"', b'"z":"\\"g\\":\\"1690\\""'),
        header().replace(b'"version":9', b'"version":9,"opaque":4'),
        header().replace(b'"m":"false"', b'"g":"1"'),
        header().replace(b'"a":"group"', b'"a":"UNIQ_KEY\\u0001A1\\u0002"'),
        header(key='7"F'),
        header("1"),
        header(12345678901),
    ],
)
def test_what_only_looks_like_one_is_no_habit(text: bytes) -> None:
    where = places(0, text)
    assert where is None or not repeats(0, text, where)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        binary()[:40],
        binary(key=""),
        binary(born="x"),
        binary(group="\0\1g\0\0\0\0017"),
        binary(group="UNIQ_KEY\1A1\2"),
        binary(group="\0\1g\0\0\0\0017UNIQ_KEY\1A1\2"),
    ],
)
def test_what_only_looks_like_a_binary_one(text: bytes) -> None:
    where = places(1, text)
    assert where is None or not repeats(1, text, where)


@pytest.mark.parametrize("serialize", [0, 1])
def test_a_repeated_header_is_not_decoded(monkeypatch: pytest.MonkeyPatch, serialize: int) -> None:
    staged, twin = Staged(), Staged()
    make = binary if serialize else header
    heads = [make(number, f"7F00{number:02}", f"16{number:02}") for number in range(10, 20)]
    twin.intake._credit = -(1 << 30)
    for head in heads:
        twin.feed(framed(head, serialize=serialize))
    staged.feed(framed(heads[0], serialize=serialize))
    monkeypatch.setattr(lane_pure, "read_json", None)
    monkeypatch.setattr(lane_pure, "read_any", None)
    data = b"".join(framed(head, serialize=serialize) for head in heads[1:])
    assert staged.feed(data) == (len(data), lane_pure.NOTHING)
    assert staged.data == twin.data
    assert staged.intake.tickets()[0] == [(310, 9)]
    assert staged.intake.saw_binary is bool(serialize)


def test_a_header_form_that_nobody_knows_is_no_habit() -> None:
    staged = Staged()
    staged.feed(framed(binary(1), serialize=1))
    assert staged.feed(framed(binary(2), serialize=2)) == (0, lane_pure.OTHER)


@pytest.mark.parametrize("opaque", ["01", "-1", "2147483648", "1.5", "1e1", '"1"', "null"])
def test_an_odd_opaque_is_read_in_the_ordinary_way(opaque: str) -> None:
    staged, twin = Staged(), Staged()
    twin.intake._credit = -(1 << 30)
    odd = header(10 ** (len(opaque) - 1)).replace(
        b'"opaque":' + b"1" + b"0" * (len(opaque) - 1), b'"opaque":' + opaque.encode()
    )
    assert len(odd) == len(header(10 ** (len(opaque) - 1)))
    for one in (staged, twin):
        one.feed(framed(header(10 ** (len(opaque) - 1))))
    assert staged.feed(framed(odd)) == twin.feed(framed(odd))
    assert staged.data == twin.data
    assert [ask[2] for ask in staged.intake._asks] == [ask[2] for ask in twin.intake._asks]


@pytest.mark.parametrize("form", ["json", "opaque first", "binary"])
def test_queues_do_not_displace_each_other(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    staged = Staged()
    heads = [
        binary(1, queue=queue) if form == "binary" else header(1, queue=queue, last=form == "json")
        for queue in "0123"
    ]
    data = b"".join(framed(head, serialize=int(form == "binary")) for head in heads)
    staged.feed(data)
    monkeypatch.setattr(lane_pure, "read_json", None)
    monkeypatch.setattr(lane_pure, "read_any", None)
    assert staged.feed(data) == (len(data), lane_pure.NOTHING)
    offsets = {key: place.next for key, place in staged.places.items()}
    assert offsets == {("T", queue_id): 2 for queue_id in range(4)}


def test_habits_go_with_the_plans() -> None:
    staged = Staged()
    staged.feed(framed(header(1)) + framed(header(2)))
    assert staged.looked_up == 1
    staged.intake.known.clear()
    staged.feed(framed(header(3)))
    assert staged.looked_up == 2


def test_where_nothing_repeats_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    staged = Staged()
    proofs = 0

    def count(*_: object) -> bool:
        nonlocal proofs
        proofs += 1
        return True

    monkeypatch.setattr(lane_pure, "repeats", count)
    for number in range(2 * CREDIT_MAX):
        staged.feed(framed(header(1, "A1").replace(b'"group"', b'"%06d"' % number)))
    assert 1 < proofs <= CREDIT_MAX // LEARN_COST + 1
    assert len(staged.intake.known) < 2 * CREDIT_MAX + 2 * proofs + 2


def test_what_is_known_is_bounded() -> None:
    staged = Staged()
    for number in range(lane_pure.SHAPES_MAX + 10):
        staged.feed(framed(header().replace(b'"group"', b'"%06d"' % number)))
    assert len(staged.intake.known) <= lane_pure.SHAPES_MAX
    before = len(staged.intake.known)
    taken, why = staged.feed(framed(header().replace(b'"group"', b'"%01100d"' % 7)))
    assert (taken, why) == (0, lane_pure.OTHER) and len(staged.intake.known) == before
