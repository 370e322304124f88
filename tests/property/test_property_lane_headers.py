"""Headers of sends, usual and mutilated: what a lane takes of them is what the decoder reads.

A lane may leave any header to the slow lane, except the usual ones: those it has to take.
"""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmodrome import speed
from cosmodrome.errors import ProtocolError
from cosmodrome.layout import (
    FLAG_ONEWAY,
    RECORD_BYTES_MIN,
    SERIALIZE_BINARY,
    SERIALIZE_JSON,
)
from cosmodrome.speed.core import pure
from cosmodrome.speed.lane import pure as lane_pure
from cosmodrome.wire.message import parse_properties
from cosmodrome.wire.record import Record, decode_records

CORES: list[ModuleType] = [lane_pure]
try:
    from cosmodrome.speed.lane import native as lane
except ImportError:
    if os.environ.get("COSMODROME_REQUIRE_NATIVE"):
        raise
else:
    if speed.FLAVOUR == "native":  # it needs the queue ends of the compiled core
        CORES.append(lane)

often = settings(max_examples=100, deadline=None)
cores = pytest.mark.parametrize("core", CORES, ids=lambda core: core.__name__.rpartition(".")[2])

HOST = bytes(range(8))
STORE_MS = 1_700_000_000_123
BODY = b"the body"
CLUSTER = "c"
BYTES_MAX = (1 << 20, 1 << 21)  # of bodies, of records
TOPICS = (b"T", b"U", b"Topic-2", b"x" * 127, b"null")
Taken = tuple[int, int, bool, bool, Record]  # code, opaque, one-way, whether it waits
SHORT = "abcdefghijkm"
LONG = (
    "producerGroup",
    "topic",
    "defaultTopic",
    "defaultTopicQueueNums",
    "queueId",
    "sysFlag",
    "bornTimestamp",
    "flag",
    "properties",
    "reconsumeTimes",
    "unitMode",
    "batch",
)
WORDS = (
    b'"',
    b"\\",
    b"\\u",
    b"\\ud800",
    b"\\ud83d\\ude80",
    b"\\u0000",
    b"\\u0001",
    b"\\u0002",
    b"\\u000a",
    b"\\u00e9",
    b"\\n",
    b"\\/",
    b"\\q",
    b"{",
    b"}",
    b",",
    b":",
    b"null",
    b"true",
    b" ",
    b"\t",
    b"\n",
    b"-",
    b"-0",
    b"00",
    b"9" * 10,
    b"9" * 11,
    b"9" * 19,
    b"1e5",
    b"1.5",
    b"\xff",
    b"\xc3",
    b"\xc3\xa9",
    b"\xed\xa0\x80",
    b"\0",
    b"\1",
    b"\2",
    b"\x1f",
    b"\x7f",
    b'"code":310,',
    b'"flag":2,',
    b'"opaque":7,',
    b'"opaque":-7,',
    b'"extFields":{},',
    b'"extFields":{"e":"1"},',
    b'"remark":null,',
    b'"remark":"\\n",',
    b'"language":99,',
    b'"b":"T",',
    b'"b" : "T",',
    b'"e":2,',
    b'"e":"2",',
    b'"i":"TAGS\\u0001Z",',
    b'"i":"\\q",',
    b'"i":"\\ud800",',
    b'"i":"",',
    b'"j":"",',
    b'"o":"x",',
    b'"x":"\\u0041",',
    b'"\\u0062":"T",',
)
# Runs of plain letters move what follows across the borders of blocks that are read at once.
RUN = st.sampled_from(
    [0, 1, 7, 8, 14, 15, 16, 17, 31, 32, 33, 47, 48, 62, 63, 64, 65, 66, 127, 130]
)
LETTERS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\1\2"), max_size=9)
VALUE = st.builds(lambda run, text: "v" * run + text + "w" * (run % 5), RUN, LETTERS)
NAMES = ("UNIQ_KEY", "KEYS", "TAGS", "WAIT", "mine", "größe", 'q"', "n" * 16)


def join(pairs: dict[str, str]) -> str:
    return "\2".join(f"{name}\1{value}" for name, value in pairs.items())


def header_of(fields: dict[str, str], opaque: int, code: int, style: int) -> bytes:
    """As clients write it; odd styles have text as it is, the others escape what they can."""
    head: dict[str, Any] = {"code": code, "extFields": fields, "flag": 0, "language": "JAVA"}
    head |= {"opaque": opaque, "serializeTypeCurrentRPC": "JSON", "version": 399}
    if style & 2:  # Go
        order = ("code", "language", "version", "opaque", "flag", "extFields")
        head = {name: head[name] for name in order} | {"remark": ""}
    separators = (", ", ": ") if style & 4 else (",", ":")
    text = json.dumps(head, separators=separators, ensure_ascii=not style & 1)
    return text.encode() + (b"\n" if style & 8 else b"")


def binary_header(words: Sequence[bytes], opaque: int) -> bytes:
    pairs = b"".join(
        struct.pack(">h", 1) + name.encode() + struct.pack(">i", len(word)) + word
        for name, word in zip(SHORT, words, strict=True)
    )
    return struct.pack(">hbhiiii", 310, 0, 399, opaque, 0, 0, len(pairs)) + pairs


@st.composite
def headers(draw: st.DrawFn, plain: bool = False) -> bytes:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), VALUE.filter(len), max_size=5))
    words = [draw(VALUE) if not plain else "g" * (1 + draw(RUN)), "T", "TBW102", "4"]
    words += [str(draw(st.integers(0, 3))), "0", str(draw(st.integers(0, 10**18 - 1))), "5"]
    words += [join(properties), "0", "false", "false"]
    code = draw(st.sampled_from([310, 310, 310, 10]))
    fields = dict(zip(SHORT if code == 310 else LONG, words, strict=True))
    return header_of(fields, draw(st.integers(-9, (1 << 31) - 1)), code, draw(st.integers(0, 15)))


def mutilated(chance: random.Random, header: bytes) -> bytes:
    out = bytearray(header)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        at, kind = chance.randrange(len(out) + 1), chance.randrange(6)
        if kind == 0:
            out[at:at] = chance.choice(WORDS)
        elif kind == 1:
            word = chance.choice(WORDS)
            out[at : at + len(word)] = word
        elif kind == 2:
            out[at : at + 1] = bytes([chance.randrange(256)])
        elif kind == 3:
            del out[at : at + chance.choice((1, 2, 9, 60, 999))]
        elif kind == 4:  # where a member may stand
            places = [place for place, byte in enumerate(out) if byte == 44]
            at = chance.choice(places) + 1 if places else 0
            out[at:at] = chance.choice(WORDS)
        else:
            other = chance.randrange(len(out) + 1)
            out[at:at] = out[other : other + chance.choice((1, 5, 20, 100, 5000))]
    return bytes(out)


def frame_of(header: bytes, serialize: int = SERIALIZE_JSON) -> bytes:
    word = serialize << 24 | len(header)
    return struct.pack(">II", 4 + len(header) + len(BODY), word) + header + BODY


def first_end(topic: str, queue_id: int) -> speed.QueueEnd:
    return speed.QueueEnd(topic, queue_id, 0)


class Lane:
    """A lane that sees one header after the other, and may remember what they look like."""

    def __init__(self, core: ModuleType) -> None:
        plans = {name: core.Plan(name.decode(), 4, 0) for name in TOPICS}
        self.intake = core.Intake(plans.get, CLUSTER, *BYTES_MAX)

    def take(self, header: bytes, serialize: int = SERIALIZE_JSON) -> Taken | None:
        """What became of a send with this header; None when it is left to the slow lane."""
        frame, log = frame_of(header, serialize), bytearray()
        self.intake.clear()
        at, _, taken = self.intake.gather(None, memoryview(frame), 0, 9, HOST, HOST)
        if not taken:
            assert at == 0
            return None
        assert (at, taken) == (len(frame), 1)
        _, count, runs, keys = self.intake.encode(log, 0, 1 << 30, STORE_MS, first_end, [])
        assert (list(runs), keys) == pure.gather(memoryview(log), 0, 0, len(log), True, count)[:2]
        ((_, wait, ticket),) = self.intake.tickets()[1]
        ((_, code, opaque, seen, oneway),) = ticket.requests()
        assert seen == serialize
        (record,) = decode_records(bytes(log))
        return code, opaque, oneway, wait, record


def check(header: bytes, found: Taken, serialize: int = SERIALIZE_JSON) -> None:
    """What was taken of a header is what the decoder reads in it."""
    code, _, _, opaque, flag, _, ext = pure.decode_header(serialize, header)
    *seen, wait, record = found
    assert seen == [code, opaque, bool(flag & FLAG_ONEWAY)]
    fields = [ext.get(name) for name in (LONG if code == 10 else SHORT)]
    topic, queue_id, born_ms, own_flag = fields[1], fields[4], fields[6], fields[7]
    assert topic is not None and topic.encode() in TOPICS
    assert record.topic == topic and record.body == BODY
    assert [record.queue_id, record.born_ms, record.flag] == [
        int(text or "") for text in (queue_id, born_ms, own_flag)
    ]
    assert record.reconsume_times == int(fields[9] or 0)
    pairs = parse_properties(fields[8] or "")
    assert wait is (pairs.pop("WAIT", "true").lower() == "true")
    properties = join(pairs | {"CLUSTER": CLUSTER})
    assert record.properties == properties
    assert record.size == RECORD_BYTES_MIN + len(topic) + len(BODY) + len(properties.encode())


@cores
@often
@given(st.lists(headers(plain=True), min_size=1, max_size=3))
def test_usual_headers_are_taken(core: ModuleType, texts: list[bytes]) -> None:
    seen = Lane(core)
    for text in [*texts, *texts]:
        found = seen.take(text)
        assert found is not None
        check(text, found)


@cores
@often
@given(headers(plain=True), st.lists(headers(), max_size=1), st.integers(0, 1 << 32))
def test_mutilated_headers(core: ModuleType, text: bytes, others: list[bytes], seed: int) -> None:
    chance, seen = random.Random(seed), Lane(core)
    assert seen.take(text) is not None
    for _ in range(25):
        case = mutilated(chance, chance.choice([text, text, *others]))
        found = seen.take(case)
        if found is not None:
            check(case, found)


BINARY = 32  # a style of its own; those below are of JSON
REPEATED = "UNIQ_KEY\1{}\2WAIT\1true\2mine\1{}\2TAGS\1{}\2KEYS\1{}"
PLAIN_WORD = st.text(st.sampled_from("azAZ09 -_.,:{}[]/'=~"), min_size=1, max_size=40)
ODD_WORDS = (
    b"",
    b"\\n",
    b'a\\"',
    b"\\u00e9",
    b"\xc3\xa9",
    b"\xff",
    b"\0",
    b"\x1f",
    b"\x7f",
    b'"',
    b"\\",
    b"x\\u0002DELAY\\u00013",
    b"x\\u0002x\\u0001y",
    b'","e":"3',
    b"\\u0000",
    b"v" * 33_000,
)
NUMBERS = (
    "0",
    "3",
    "4",
    "03",
    "00",
    "",
    "-1",
    "7x",
    "1234567",
    "12345678",
    "123456789",
    "1234567890",
    "2147483647",
    "2147483648",
    "9" * 10,
    "1690000000001",
    "9" * 18,
    "9" * 19,
    "0" * 19,
    "1.5",
)


def repeated(
    style: int, numbers: Sequence[str], values: Sequence[bytes], topic: bytes = b"T"
) -> bytes:
    """The header of a producer that always writes the same around these."""
    words = [
        "g",
        "TOPIC",
        "TBW102",
        "4",
        "QUEUE",
        "0",
        "BORN",
        "5",
        REPEATED,
        "0",
        "false",
        "false",
    ]
    opaque, queue_id, born_ms = numbers
    if style == BINARY:
        front, *rest = REPEATED.encode().split(b"{}")
        text = front + b"".join(value + part for value, part in zip(values, rest, strict=True))
        swapped = {"QUEUE": queue_id.encode(), "BORN": born_ms.encode(), REPEATED: text}
        swapped["TOPIC"] = topic
        number = int(opaque) if opaque.isdigit() and int(opaque) < 1 << 31 else -7
        return binary_header([swapped.get(word, word.encode()) for word in words], number)
    header = header_of(dict(zip(SHORT, words, strict=True)), 987654321, 310, style)
    if style & 16:
        header = header.replace(b'"QUEUE"', b"QUEUE").replace(b'"BORN"', b"BORN")
    for place, said in ((b"987654321", opaque), (b"QUEUE", queue_id), (b"BORN", born_ms)):
        header = header.replace(place, said.encode())
    front, *rest = header.split(b"{}")
    header = front + b"".join(value + part for value, part in zip(values, rest, strict=True))
    return header.replace(b"TOPIC", topic)


def take_and_check(lane: Lane, style: int, header: bytes) -> bool:
    serialize = SERIALIZE_BINARY if style == BINARY else SERIALIZE_JSON
    found = lane.take(header, serialize)
    if found is not None:
        check(header, found, serialize)
    return found is not None


STYLE = st.integers(0, BINARY) | st.just(BINARY)
INT31 = st.integers(0, (1 << 31) - 1)


@cores
@often
@given(
    STYLE,
    st.lists(st.tuples(INT31, st.integers(0, 3), INT31), max_size=4),
    st.lists(PLAIN_WORD, min_size=4, max_size=9),
)
def test_headers_that_repeat_are_taken(
    core: ModuleType, style: int, numbers: list[tuple[int, ...]], words: list[str]
) -> None:
    seen = Lane(core)
    for turn, said in enumerate([(1, 1, 1), *numbers, *numbers]):
        values = [words[(turn + number) % len(words)].encode() for number in range(4)]
        topic = TOPICS[turn % len(TOPICS)]
        assert take_and_check(
            seen, style, repeated(style, [str(number) for number in said], values, topic)
        )


@cores
@often
@given(
    STYLE,
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(NUMBERS), min_size=3, max_size=3),
            st.lists(
                PLAIN_WORD.map(str.encode) | st.sampled_from(ODD_WORDS), min_size=4, max_size=4
            ),
        ),
        max_size=8,
    ),
)
def test_headers_that_nearly_repeat(
    core: ModuleType, style: int, cases: list[tuple[list[str], list[bytes]]]
) -> None:
    seen, said, usual = Lane(core), ["7", "1", "12"], [b"u", b"m", b"t", b"k"]
    assert take_and_check(seen, style, repeated(style, said, usual))
    for numbers, values in cases:
        # One thing at a time is odd, behind one of the same length that is not, and then all of it.
        for place, (number, value) in enumerate(zip([*numbers, "1"], values, strict=True)):
            others = [*said[:place], number, *said[place + 1 :]][:3]
            alike = ["1" * len(number) if other is number else other for other in others]
            texts = [*usual[:place], value, *usual[place + 1 :]]
            plain = [b"v" * len(value) if text is value else text for text in texts]
            for header in (
                repeated(style, alike, usual),
                repeated(style, others, usual),
                repeated(style, said, plain),
                repeated(style, said, texts),
            ):
                take_and_check(seen, style, header)
        for topic in (*TOPICS, *values):
            take_and_check(seen, style, repeated(style, said, usual, topic))
        take_and_check(seen, style, repeated(style, numbers, values, values[0]))


@pytest.mark.skipif(len(CORES) == 1, reason="the compiled lane is not built")
@pytest.mark.parametrize("style", [0, 2, 4, BINARY])
def test_a_shape_fits_whatever_the_topic(style: int) -> None:
    seen, said, usual = Lane(CORES[-1]), ["7", "1", "12"], [b"u", b"m", b"t", b"k"]
    topics = [topic for topic in TOPICS if style != BINARY or len(topic) == 1]
    for topic in [*topics, *topics]:
        assert take_and_check(seen, style, repeated(style, said, usual, topic))
    assert seen.intake.shaped == 2 * len(topics) - 1, "the first one was read, no other"
    assert not take_and_check(seen, style, repeated(style, said, usual, b"Z"))
    assert not take_and_check(seen, style, repeated(style, ["7", "4", "12"], usual))


def signed(header: bytes, signature: bytes) -> bytes:
    """The header of a producer with an account, in JSON."""
    return header.replace(b'"b"', b'"AccessKey":"a", "Signature":"%s", "b"' % signature, 1)


@pytest.mark.skipif(len(CORES) == 1, reason="the compiled lane is not built")
@pytest.mark.parametrize("style", [0, 2, 4])
def test_a_shape_fits_whatever_the_signature(style: int) -> None:
    seen, plain = Lane(CORES[-1]), repeated(style, ["7", "1", "12"], [b"u", b"m", b"t", b"k"])
    for signature in (b"yhCmA6P+2gJ/dHT1m5aQJwAJkSY=", b"A" * 28, b"short"):
        assert take_and_check(seen, style, signed(plain, signature))
    assert seen.intake.shaped == 2, "the first one was read, no other"


@cores
@often
@given(
    st.integers(0, BINARY - 1),
    st.lists(
        PLAIN_WORD.map(str.encode) | st.sampled_from([*ODD_WORDS, b"", b'","b":"U']), max_size=6
    ),
)
def test_odd_signatures(core: ModuleType, style: int, signatures: list[bytes]) -> None:
    seen, plain = Lane(core), repeated(style, ["7", "1", "12"], [b"u", b"m", b"t", b"k"])
    for signature in (b"right", *signatures):
        take_and_check(seen, style, signed(plain, signature))


@cores
@pytest.mark.parametrize("broken", [r"\q", r"\u12", r"A\u0001\x"])
@pytest.mark.parametrize("where", ["field", "fields"])
def test_broken_escapes_that_do_not_count(core: ModuleType, broken: str, where: str) -> None:
    words = ["g", "T", "c", "4", "3", "0", "12", "7", "TAGS\1A", "0", "false", "false"]
    fields = dict(zip(SHORT, words, strict=True))
    usual = header_of(fields, 77, 310, 0)
    assert Lane(core).take(usual) is not None
    extra = f'"i":"{broken}",' if where == "field" else f'"i":"{broken}"}},"extFields":{{'
    header = usual.replace(b'"extFields":{', b'"extFields":{' + extra.encode())
    with pytest.raises(ProtocolError):
        pure.decode_header(SERIALIZE_JSON, header)
    assert Lane(core).take(header) is None


@cores
@often
@given(st.dictionaries(st.sampled_from(NAMES), VALUE, max_size=6), st.integers(0, 1 << 32))
def test_binary_headers(core: ModuleType, properties: dict[str, str], seed: int) -> None:
    chance = random.Random(seed)
    words = ["g", "T", "c", "4", "3", "0", "12", "7", join(properties), "0", "false", "false"]
    header = binary_header([word.encode() for word in words], 77)
    cases = [header, *(mutilated(chance, header) for _ in range(6))]
    seen = Lane(core)
    for case in cases:
        found = seen.take(case, SERIALIZE_BINARY)
        if found is not None:
            check(case, found, SERIALIZE_BINARY)
