"""Targets that read bytes of peers and operators: frames, headers, bodies, records, and texts.

Where a function has a compiled twin both are asked, and have to say the same.
"""

from __future__ import annotations

import base64
import importlib
import json
import logging
import os
import random
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.fuzz.engine import Broken, Target, dented, ending, outcome
from tests.goldens import frames

from cosmodrome.broker.sql92 import CHARACTERS_MAX, Sql92Error, compile_expression
from cosmodrome.env.config import Source, resolve
from cosmodrome.env.options import BrokerOptions, NameServerOptions, SocketOptions, StoreOptions
from cosmodrome.errors import ConfigError, ProtocolError
from cosmodrome.speed.client import pure as client_pure
from cosmodrome.speed.core import pure
from cosmodrome.wire import bodies, fastjson, properties_text
from cosmodrome.wire.bodies import Body
from cosmodrome.wire.frame import Frame, FrameSplitter, InPlaceSplitter, decode, encode
from cosmodrome.wire.message import decompress, format_properties, parse_properties
from cosmodrome.wire.record import (
    Record,
    decode_record,
    encode_record,
    iter_records,
    record_properties,
)

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
JSON_WORDS = (
    *(b'"', b"\\", b"\\u", b"\\ud800", b"\\u0000", b"{", b"}", b"[", b"]", b",", b":"),
    *(b"null", b"true", b" ", b"-", b"-0", b"00", b"9" * 20, b"1e5", b"1e999", b"1.0", b"\xff"),
    *(b"\xc3", b"\xed\xa0\x80", b"\0", b"\x01", b'{"$ref":"$"}', b'{"$ref":"$.a[0]"}', b"{1:2}"),
    *(b'"code":310,', b'"extFields":{},', b'"opaque":7,', b'"language":"XX",', b'"version":-1,'),
    *(b'{"topic":"a","brokerName":"b","queueId":1}:5', b'"@type":"x",', b"//", b"/*", b"'"),
)


def twin(name: str) -> ModuleType | None:
    """The compiled twin of a folder of `speed`, if it is built."""
    try:
        return importlib.import_module(f"cosmodrome.speed.{name}.native")
    except ImportError:
        if os.environ.get("COSMODROME_REQUIRE_NATIVE"):
            raise
        return None


def same(law: Callable[[], object], native: Callable[[], object]) -> tuple[str, Any]:
    """What both twins answer; they may refuse, and nothing else."""
    wanted, found = outcome(law, ProtocolError), outcome(native, ProtocolError)
    if wanted != found:
        raise Broken(f"the twins differ: pure {wanted}, compiled {found}")
    return wanted


@cache
def golden_frames() -> tuple[bytes, ...]:
    """Frames as upstream's clients and servers wrote them, the smaller ones."""
    paths = sorted((GOLDEN / "wire").glob("*/*.jsonl"))
    rows = [base64.b64decode(row["frame_b64"]) for path in paths for row in frames(path)]
    return tuple(dict.fromkeys(row for row in rows if len(row) < 4_000))


def header_of(frame: bytes) -> tuple[int, bytes, bytes]:
    """How it is serialized, the header, and the body."""
    (word,) = struct.unpack_from(">I", frame, 4)
    split = 8 + (word & 0xFFFFFF)
    return word >> 24, frame[8:split], frame[split:]


def framed(serialize: int, header: bytes, body: bytes) -> bytes:
    word = serialize << 24 | len(header)
    return struct.pack(">II", 4 + len(header) + len(body), word & 0xFFFFFFFF) + header + body


class FrameTarget(Target):
    """A stream of frames, cut anywhere: the same frames, or one refusal."""

    name = "frame"
    words = JSON_WORDS

    def corpus(self) -> Sequence[bytes]:
        some = golden_frames()
        return [*some[::5], *(b"".join(some[at : at + 3]) for at in range(0, len(some) - 3, 7))]

    def mutate(self, data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
        if len(data) < 8 or chance.random() < 0.3:
            return dented(data, chance, self.words, others)
        serialize, header, body = header_of(data)
        if chance.random() < 0.7:
            header = dented(header, chance, self.words, others)
        else:
            body = dented(body, chance, self.words, others)
        return framed(serialize, header, body)

    def check(self, data: bytes, chance: random.Random) -> str:
        cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(5)))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        end, whole = self._read(FrameSplitter(), [data])
        end_in_pieces, in_pieces = self._read(FrameSplitter(), pieces)
        end_in_place, in_place = self._read(InPlaceSplitter(), [data])
        # A refusal takes the frames of its own read with it; those of earlier reads stand.
        if end_in_pieces != end or (end == "read" and in_pieces != whole):
            raise Broken(f"cut at {cuts}: {end_in_pieces} {in_pieces}, not {end} {whole}")
        if end_in_place != end or in_place != whole:
            raise Broken(f"in place: {end_in_place} {in_place}, not {end} {whole}")
        for frame in in_pieces:
            self._comes_back(frame)
        return f"{end} {min(len(in_pieces), 3)}"

    def _read(self, splitter: FrameSplitter, pieces: Iterable[bytes]) -> tuple[str, list[Frame]]:
        got: list[Frame] = []
        try:
            for piece in pieces:
                got += splitter.feed(piece)
        except ProtocolError:
            return "refused", got
        for frame in got:
            frame.body = bytes(frame.body)
        return "read", got

    def _comes_back(self, frame: Frame) -> None:
        try:
            data = encode(frame)
        except ProtocolError:
            return  # a header that is longer when it is written
        if decode(data[4:]) != frame:
            raise Broken(f"{frame} comes back as {decode(data[4:])}")


class HeaderTarget(Target):
    """Headers in JSON and binary. The first byte of an input says which."""

    name = "header"
    words = JSON_WORDS

    def __init__(self) -> None:
        self._native = twin("core") or pure

    def corpus(self) -> Sequence[bytes]:
        found = [header_of(frame) for frame in golden_frames()]
        return [bytes([serialize]) + header for serialize, header, _ in found[::3]]

    def check(self, data: bytes, chance: random.Random) -> str:
        serialize, header = (data[0] if data else 0), data[1:]
        end, fields = same(
            lambda: pure.decode_header(serialize, header),
            lambda: self._native.decode_header(serialize, header),
        )
        if end != "value":
            return end
        ext = fields[-1]
        for text in (*ext, *ext.values()):
            text.encode()  # can be written into any reply
        same(
            lambda: pure.encode_header(serialize, *fields),
            lambda: self._native.encode_header(serialize, *fields),
        )
        return f"read {serialize} {min(len(ext), 3)}"


class BodyTarget(Target):
    """JSON bodies in the dialect of the peers, as values and as every type of the protocol."""

    name = "dialect"
    words = JSON_WORDS

    def __init__(self) -> None:
        self._kinds = sorted(_subclasses(Body), key=lambda kind: kind.__name__)

    def corpus(self) -> Sequence[bytes]:
        found = [header_of(frame)[2] for frame in golden_frames()]
        odd = b'{1:2,"a":{true:null},{"b":1}:[{"$ref":"$.a"}],"c":-1.5e3}'
        return [odd, *dict.fromkeys(body for body in found if body[:1] in (b"{", b"["))]

    def check(self, data: bytes, chance: random.Random) -> str:
        end, value = outcome(lambda: fastjson.loads(data), ProtocolError)
        self._agrees_with_the_standard(data, end, value)
        for kind in chance.sample(self._kinds, 4):
            known, body = outcome(partial(bodies.decode, kind, data), ProtocolError)
            if known == "value":
                assert isinstance(body, Body)
                again = bodies.encode(body)
                if bodies.encode(bodies.decode(kind, again)) != again:
                    raise Broken(f"{kind.__name__} does not come back: {again[:500]!r}")
        if end == "value":
            written = fastjson.dumps(value)
            if fastjson.dumps(fastjson.loads(written)) != written:
                raise Broken(f"does not come back: {written[:500]!r}")
        return end

    def _agrees_with_the_standard(self, data: bytes, end: str, value: object) -> None:
        """What is plain JSON to everybody is the same value here."""
        if b"$ref" in data or b"@type" in data:
            return

        def constant(text: str) -> object:
            raise ValueError(text)

        try:
            text = data.decode()
            standard = json.loads(text, parse_constant=constant)
        except (ValueError, RecursionError):
            return
        if end == "value" and value != standard and value == value:
            raise Broken(f"read as {str(value)[:300]}, not as {str(standard)[:300]}")


def _subclasses(kind: type[Body]) -> set[type[Body]]:
    return {kind}.union(*(_subclasses(one) for one in kind.__subclasses__())) - {Body}


class RecordTarget(Target):
    """Stored records: decoded, walked, gathered and outlined alike."""

    name = "record"
    words = (
        *(b"\xda\xa3\x20\xa7", b"\xda\xa3\x20\xa8", b"\xbd\x43\x19\x4d", b"\x00" * 512),
        *(b"TAGS\x01A\x02", b"KEYS\x01a b\x02", b"DELAY\x013\x02", b"UNIQ_KEY\x01K\x02"),
    )

    def __init__(self) -> None:
        self._native, self._client = twin("core") or pure, twin("client") or client_pure

    def corpus(self) -> Sequence[bytes]:
        log = b"".join(path.read_bytes() for path in sorted(GOLDEN.glob("store/commitlog/*")))
        found: list[bytes] = []
        at = 0
        while len(found) < 40 and log[at + 4 : at + 8] == self.words[0]:
            size = int.from_bytes(log[at : at + 4], "big")
            found.append(log[at : at + size])
            at += size
        short = [record for record in found if len(record) < 4_000]
        return [*short, b"".join(short[:5]), b"".join(short[5:9])]

    def check(self, data: bytes, chance: random.Random) -> str:
        view, base = memoryview(data), chance.choice((0, int.from_bytes(data[28:36], "big")))
        base = min(base, 1 << 62)
        crc, limit = chance.random() < 0.5, chance.choice((1, 3, 100))
        for name in ("walk", "gather"):
            law, native = (
                partial(getattr(core, name), view, base, 0, len(data), crc, limit)
                for core in (pure, self._native)
            )
            end, _ = same(law, native)
            if end != "value":
                raise Broken(f"{name} raised: {end}")
        same(partial(client_pure.outline, data, 0), partial(self._client.outline, data, 0))
        outcome(partial(record_properties, data), ProtocolError)
        try:
            found = list(iter_records(data))
        except ProtocolError as error:
            return ending(error)
        for record in found:
            outcome(partial(decompress, record.body, record.sys_flag, 1 << 20), ProtocolError)
            self._comes_back(record)
        return f"read {min(len(found), 3)}"

    def _comes_back(self, record: Record) -> None:
        if len(record.topic.encode()) >= 128 or len(record.properties.encode()) >= 32_768:
            return  # longer than it was: what is not UTF-8 was replaced
        again = decode_record(encode_record(record))
        if (again.body, again.topic, again.pairs()) != (record.body, record.topic, record.pairs()):
            raise Broken(f"{record} comes back as {again}")


class PropertiesTarget(Target):
    """Properties of messages, and settings in Java's form."""

    name = "properties"
    words = (b"\x01", b"\x02", b"\\u0041", b"\\u", b"\\", b"=", b":", b"#", b"!", b"\r\n", b"\n")

    def corpus(self) -> Sequence[bytes]:
        return [
            b"TAGS\x01A\x02KEYS\x01k1 k2\x02WAIT\x01true\x02",
            b"UNIQ_KEY\x017F00\x02CLUSTER\x01c",
            b"brokerName=b\nlistenPort = 10911\n# why\nnamesrvAddr: a\\:1;b\\\n  c\n!\n",
            "ключ\x01значение\x02".encode(),
        ]

    def check(self, data: bytes, chance: random.Random) -> str:
        text = data.decode("utf-8", "replace")
        pairs = parse_properties(text)
        if parse_properties(format_properties(pairs)) != pairs:
            raise Broken(f"{pairs} do not come back")
        end, values = outcome(lambda: properties_text.loads(data), ProtocolError)
        if end != "value":
            return end
        assert isinstance(values, dict)
        end, written = outcome(lambda: properties_text.dumps(values), UnicodeEncodeError)
        if end == "value" and properties_text.loads(written) != values:  # type: ignore[arg-type]
            raise Broken(f"{values} come back from {written!r}")
        return f"read {min(len(pairs), 3)} {min(len(values), 3)}"


class Sql92Target(Target):
    """Expressions of filters: compiled, or refused at a place that exists."""

    name = "sql92"
    words = tuple(
        f" {word} ".encode()
        for word in (
            *("a", "TAGS", "1", "2.5", "'x'", "''", "NULL", "TRUE", "(", ")", ",", "+", "-", "="),
            *("<>", "<", ">=", "AND", "OR", "NOT", "IS", "IN", "BETWEEN", "CONTAINS", "LIKE"),
            *("--", "/*", "*/", "'", "!", "é", "007", "1e999", "((((((((", "NOT NOT NOT"),
        )
    )

    def corpus(self) -> Sequence[bytes]:
        return [
            b"a > 1",
            b"a BETWEEN 1 AND 2 OR b IN ('x', 'y') AND NOT (c IS NULL)",
            b"TAGS IS NOT NULL AND TAGS = 'A' OR a >= -1.5e3",
            b"a = b AND c <> 'it''s' -- why",
            b" AND ".join(b"a%d = %d" % (number, number) for number in range(50)),
        ]

    def check(self, data: bytes, chance: random.Random) -> str:
        text = data.decode("utf-8", "replace")
        try:
            expression = compile_expression(text)
        except Sql92Error as error:
            if not 0 <= error.position <= min(len(text), CHARACTERS_MAX):
                raise Broken(f"position {error.position} in {len(text)} characters") from None
            return ending(error).split("found")[0].split("\n")[0]
        for properties in ({}, {"a": "1", "b": "x", "c": "true"}, {"a": "x" * 100, "TAGS": "A"}):
            if expression.matches(properties) not in (True, False):
                raise Broken("matched neither true nor false")
        return f"compiled {len(text) // 100}"


class SettingsTarget(Target):
    """A file of settings: values within their ranges, or an error that names the key."""

    name = "settings"

    def __init__(self) -> None:
        self._log = logging.getLogger("cosmo.config")
        self._level = self._log.level
        self._log.setLevel(logging.ERROR)
        self._groups = (BrokerOptions, StoreOptions, SocketOptions, NameServerOptions)
        self._lines = [
            f"{key}={'' if value is None else json.dumps(value)}\n".replace('"', "").encode()
            for group in self._groups
            for key, value in resolve([group], []).items()
        ]
        self.words = [
            *(line.partition(b"=")[0] for line in self._lines),
            *(b"=-1\n", b"=0\n", b"=9" + b"9" * 30 + b"\n", b"=true\n", b"=\n", b"=1.5\n"),
            *(b"=nan\n", b"=inf\n", b"=1e400\n", b"=0x10\n", b"=1_000\n", b"= 7 \n", b"=\\u0660\n"),
        ]

    def corpus(self) -> Sequence[bytes]:
        return [*self._lines, b"".join(self._lines[:20])]

    def check(self, data: bytes, chance: random.Random) -> str:
        end, values = outcome(lambda: properties_text.loads(data), ProtocolError)
        if end != "value":
            return end
        assert isinstance(values, dict)
        group = self._groups[chance.randrange(len(self._groups))]
        source = Source("file", values)
        return outcome(lambda: resolve([group], [source]).get(group), ConfigError)[0]

    def close(self) -> None:
        self._log.setLevel(self._level)
