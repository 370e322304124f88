"""Headers that producers repeat are recognised, and only those."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from cosmodrome.speed import lane_pure
from cosmodrome.speed.lane_habits import CREDIT_MAX, LEARN_COST, cut, join, places, repeats

BORN_HOST = bytes(8)
STORE_HOST = bytes(range(8))


def header(opaque: Any = 1, key: str = "7F00A1", born: str = "1690", *, last: bool = True) -> bytes:
    text = f"x\x01y\x02UNIQ_KEY\x01{key}\x02TAGS\x01A"
    plain = {"a": "group", "b": "T", "c": "TBW102", "d": "4", "e": "1", "f": "0", "g": born}
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


def framed(head: bytes, body: bytes = b"body") -> bytes:
    return struct.pack(">II", 4 + len(head) + len(body), len(head)) + head + body


class Staged:
    """An intake whose sends are staged into a bytearray."""

    def __init__(self) -> None:
        self.looked_up = 0
        self.data = bytearray()
        self.offsets: dict[tuple[str, int], int] = {}
        self.intake = lane_pure.Intake(self.find, "c", 1000, 5000)

    def find(self, name: bytes) -> lane_pure.Plan:
        self.looked_up += 1
        return lane_pure.Plan(name.decode(), 4, 0)

    def stage(self, intake: lane_pure.Intake) -> None:
        end = len(self.data)
        intake.encode(self.data, end, 1 << 20, 5, self.offsets, {}, lambda topic, queue_id: 0)

    def feed(self, data: bytes) -> tuple[int, int]:
        return self.intake.feed(memoryview(data), 0, 99, BORN_HOST, STORE_HOST, self.stage)


@pytest.mark.parametrize("last", [True, False])
def test_a_cut_header_can_be_joined_again(last: bool) -> None:
    text = header(17, "AB12", last=last)
    found = cut(text)
    assert found[1:] == (b"1690", b"AB12", b"17")
    assert join(*found) == text
    a, b, c, d, e, f, behind = places(found)
    values = (text[a:b], text[c:d], text[e:f])
    assert behind is last
    assert values == ((b"1690", b"AB12", b"17") if last else (b"17", b"1690", b"AB12"))
    assert repeats(found[0], text, b"AB12")


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        header().replace(b'"g":"1690"', b'"g":1690'),
        header().replace(b'"g":"1690"', b'"z":"\\"g\\":\\"1690\\""'),
        header().replace(b'"version":9', b'"version":9,"opaque":4'),
        header().replace(b'"m":"false"', b'"g":"1"'),
        header(key='7"F'),
        header("1"),
    ],
)
def test_what_only_looks_like_one_is_no_habit(text: bytes) -> None:
    found = cut(text)
    assert join(*found) != text or not repeats(found[0], text, found[2])


def test_a_repeated_header_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    staged, twin = Staged(), Staged()
    heads = [header(number, f"7F00{number:02}", f"16{number:02}") for number in range(10, 20)]
    twin.intake._credit = -(1 << 30)
    for head in heads:
        twin.feed(framed(head))
    staged.feed(framed(heads[0]))
    monkeypatch.setattr(lane_pure, "read_json", None)
    monkeypatch.setattr(lane_pure, "read_any", None)
    data = b"".join(map(framed, heads[1:]))
    assert staged.feed(data) == (len(data), lane_pure.NOTHING)
    assert staged.data == twin.data
    assert staged.intake.tickets()[0] == [(310, 9)]


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
