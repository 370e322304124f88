"""The fast lane against the slow one: the same bytes in give the same replies and files."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from cosmodrome import speed
from cosmodrome.broker.app import Broker, build_broker
from cosmodrome.env.base import Env
from cosmodrome.env.options import BrokerOptions, SocketOptions, StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.speed.lane import pure as lane_pure
from cosmodrome.transport.connection import SocketConnection
from cosmodrome.transport.turns import Turns
from cosmodrome.wire.bodies import SubscriptionGroupConfig, TopicConfig
from cosmodrome.wire.message import pack_host

pytestmark = pytest.mark.usefixtures("lane_core")

NOW_MS = 1_700_000_000_123
PEER = ("10.1.2.3", 40_000)
FILES = ("commitlog", "consumequeue", "index")


class StoppedClock:
    def now_ms(self) -> int:
        return NOW_MS


def service_of(side: Any, code: int) -> Any:
    """The service whose handler serves a request code."""
    return side.router._handlers[code][1].__self__


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self, peer: tuple[str, int]) -> None:
        super().__init__({"peername": peer})
        self.out = bytearray()
        self.ended = False

    def write(self, data: Any) -> None:
        self.out += data

    def writelines(self, parts: Any) -> None:
        self.out += b"".join(parts)

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True


class Side:
    """A broker and one connection to it, without sockets in between."""

    def __init__(
        self,
        path: Path,
        env: Env,
        *,
        fast: bool,
        broker: dict[str, Any] | None = None,
        **store: Any,
    ) -> None:
        self.path = path
        options = {
            "flush_disk_type": "ASYNC_FLUSH",
            "mapped_file_size_commit_log": 65_536,
            "mapped_file_size_consume_queue": 2000,
            "max_hash_slot_num": 5000,
            "max_index_num": 500,
        }
        self.broker: Broker = build_broker(
            BrokerOptions(fast_lane_enable=fast, broker_name="b", listen_port=0, **(broker or {})),
            StoreOptions(store_path_root_dir=str(path), **{**options, **store}),
            SocketOptions(),
            env,
        )
        self.fast = fast
        self.dispatched = 0  # requests that took the slow lane

    async def __aenter__(self) -> Side:
        await self.broker.start()
        self.broker._base.address.packed = pack_host("10.9.9.9", 10_911)
        server = self.broker._server
        # A clock that runs backwards: nobody's slice ends, so each read is served as a whole.
        server.turns = Turns(itertools.count(0, -1).__next__)
        assert (server._lane is not None) is self.fast
        self.router = server._router
        dispatch = self.router.dispatch

        def count(*request: Any) -> None:
            self.dispatched += 1
            dispatch(*request)

        self.router.dispatch = count  # type: ignore[assignment]
        self.store = self.broker._base.store
        topics = self.broker._rooms.members.topics
        topics.put(TopicConfig(topic_name="Plain", read_queue_nums=4, write_queue_nums=4))
        multi = TopicConfig(topic_name="Multi", topic_filter_type="MULTI_TAG")
        topics.put(multi)
        self.wire = Wire(PEER)
        self.connection: SocketConnection = server._connection()
        self.connection.connection_made(self.wire)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.connection.connection_lost(None)
        await self.broker.stop()

    async def feed(self, data: bytes) -> None:
        buffer = self.connection.get_buffer(-1)
        buffer[: len(data)] = data
        self.connection.buffer_updated(len(data))
        buffer[: len(data)] = bytes(len(data))  # another connection's read comes
        await self.run_turns()

    async def run_turns(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def answered(self) -> None:
        async with asyncio.timeout(60):
            while self.connection.busy:
                await asyncio.sleep(0.001)
        await self.run_turns()

    def replies(self) -> dict[int, bytes]:
        """Whole frames by opaque; requests of the broker count from -1 downwards."""
        found: dict[int, bytes] = {}
        data, at = bytes(self.wire.out).replace(b"/fast/", b"/slow/"), 0  # in the words of errors
        while at < len(data):
            length, word = struct.unpack_from(">II", data, at)
            frame = data[at : at + 4 + length]
            if word >> 24:
                opaque, flag = struct.unpack_from(">ii", frame, 13)
            else:
                head = json.loads(frame[8 : 8 + word])
                opaque, flag = head["opaque"], head["flag"]
            opaque = opaque if flag & 1 else -opaque
            assert opaque not in found
            found[opaque] = frame
            at += 4 + length
        return found

    def counted(self) -> dict[str, object]:
        handlers: dict[int, Any] = dict(self.router._handlers)
        produce = handlers[310][1].__self__
        consume = handlers[11][1].__self__
        offsets = handlers[15][1].__self__
        stats = produce.stats
        pulled = stats.get_counts
        all_of_it = (stats.puts, stats.gets)  # which rolls up what was counted
        facts = self.store.facts()

        def item(one: Any) -> tuple[int, ...]:
            return one.messages, one.size, one.calls

        return {
            "requests": self.router.requests,
            "errors": self.router.errors,
            "produce": produce.failures_total,
            "times": sum(produce._put_times._counts),
            "pulled": (pulled.messages_total, pulled.bytes_total, pulled.pulls_total),
            "misses": (consume.missed_total, consume.failures_total),
            "topics": {name: item(one) for name, one in stats._topics.items()},
            "groups": {name: item(one) for name, one in stats._groups.items()},
            "all": [item(one) for one in all_of_it],
            "offsets": offsets._table,
            "store": (facts.put_count, facts.put_bytes, facts.put_failed_count),
            "serialize": self.connection._session._serialize,
        }

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.path)): path.read_bytes()
            for folder in FILES
            for path in sorted((self.path / folder).rglob("*"))
            if path.is_file()
        }


def env(seed: int) -> Env:
    return dataclasses.replace(real_env(), clock=StoppedClock(), random=random.Random(seed))


async def compare(
    tmp_path: Path,
    drive: Callable[[Side], Any],
    *,
    seed: int = 0,
    make_env: Callable[[int], Env] = env,
    broker: dict[str, Any] | None = None,
    **store: Any,
) -> list[Side]:
    """Do the same to a broker with and without the lane; what they did must be the same."""
    sides = [
        Side(tmp_path / name, make_env(seed), fast=name == "fast", broker=broker, **store)
        for name in ("slow", "fast")
    ]
    seen = []
    for side in sides:
        async with side:
            await drive(side)
            await side.answered()
            seen.append((side.replies(), side.counted()))
    (slow_replies, slow_counted), (fast_replies, fast_counted) = seen
    assert slow_replies.keys() == fast_replies.keys()
    for opaque, reply in slow_replies.items():
        assert fast_replies[opaque] == reply, opaque
    for name, value in slow_counted.items():
        assert fast_counted[name] == value, name
    assert sides[0].files() == sides[1].files()
    return sides


# --- requests --------------------------------------------------------------------------------


def header_json(code: int, opaque: int, flag: int, ext: dict[str, Any], style: int) -> bytes:
    head = {"code": code, "language": "JAVA", "version": 399, "opaque": opaque, "flag": flag}
    head |= {"serializeTypeCurrentRPC": "JSON"} if style != 1 else {"remark": None}
    if style == 2:
        head = {"extFields": ext, **head}  # its fields first
    elif style == 5:
        head = dict(sorted({**head, "extFields": ext}.items()))  # as Java writes them
    else:
        head["extFields"] = ext
    separators = (", ", ": ") if style == 1 else (",", ":")
    return json.dumps(head, separators=separators, ensure_ascii=style != 3).encode(
        "utf-8", "surrogatepass"
    )


def header_binary(code: int, opaque: int, flag: int, ext: dict[str, Any]) -> bytes:
    pairs = b""
    for name, value in ext.items():
        text = (str(value).lower() if isinstance(value, bool) else str(value)).encode(
            "utf-8", "surrogatepass"
        )
        pairs += struct.pack(">h", len(name)) + name.encode() + struct.pack(">i", len(text)) + text
    return struct.pack(">hbhiiii", code, 0, 399, opaque, flag, 0, len(pairs)) + pairs


def frame(
    code: int, opaque: int, ext: dict[str, Any], body: bytes = b"", *, flag: int = 0, style: int = 0
) -> bytes:
    if style == 4:
        header = header_binary(code, opaque, flag, ext)
    else:
        header = header_json(code, opaque, flag, ext, style)
    word = len(header) | (1 << 24 if style == 4 else 0)
    return struct.pack(">II", 4 + len(header) + len(body), word) + header + body


LONG = dict(
    zip(
        "abcdefghijklmn",
        [
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
            "maxReconsumeTimes",
            "batch",
            "bname",
        ],
        strict=True,
    )
)


def send_fields(**changes: Any) -> dict[str, Any]:
    properties = "KEYS\x01k1 k2\x02TAGS\x01A\x02WAIT\x01true"
    plain = ["group", "Plain", "TBW102", "4", "1", "0", "1690000000000", "7", properties, "0"]
    fields: dict[str, Any] = dict(zip("abcdefghij", plain, strict=True), k="false", m="false")
    for name, value in changes.items():
        if value is None:
            fields.pop(name, None)
        else:
            fields[name] = value
    return fields


def item(body: bytes, properties: str = "TAGS\x01B", flag: int = 3) -> bytes:
    text = properties.encode()
    size = 22 + len(body) + len(text)
    head = struct.pack(">iiiii", size, 0, 0, flag, len(body))
    return head + body + struct.pack(">h", len(text)) + text


PROPERTIES = (
    None,
    "",
    "WAIT\x01false",
    "WAIT\x01TRUE",
    "TAGS\x01A\x02",
    "\x02\x02TAGS\x01A",
    "UNIQ_KEY\x01AB\x02KEYS\x01one two  three\x02WAIT\x01false\x02",
    "TAGS\x01A\x02TAGS\x01B",
    "CLUSTER\x01mine\x02TAGS\x01A",
    "broken\x02\x01\x02name\x01\x02TAGS\x01A\x01B",
    "null",
    "DELAY\x013",
    "DELAY\x010\x02TAGS\x01A",
    "DELAY\x01x",
    "TRAN_MSG\x01true\x02PGROUP\x01g",
    "TRAN_MSG\x01false",
    "TIMER_DELAY_SEC\x015\x02UNIQ_KEY\x01u",
    "TIMER_OUT_MS\x015",
    "KEYS\x01schlüssel\x02TAGS\x01标签",
    "TAGS\x01\U0001f680",
    "a\x01b\0c",
    "a\x01b\x00",
    "x\x01" + "y" * 300,
    "x\x01" + "y" * 32_700,
    "x\x01" + "y" * 32_767,
    'q\x01"\\/\b\n\t',
    "\x02".join(f"p{number}\x01v" for number in range(30)),
)
CHANGES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("b", ("Plain", "Plain", "Multi", "New", "%RETRY%group", "SCHEDULE_TOPIC_XXXX", "a b", "")),
    ("e", (0, "3", "4", "-1", "+1", "007", "x", "", "99999999999", None, 2.0, True)),
    ("f", ("1", "4", "8", "12", "16", "48", "-1", "0x1", None)),
    ("g", ("0", "-5", "9223372036854775807", "9223372036854775808", 1690000000000, 12, None)),
    ("h", ("0", "-1", "2147483648", None)),
    ("i", PROPERTIES),
    ("j", (None, "3", "-2", "", "null", "1.5")),
    ("k", (None, "true", "TRUE", "1", "maybe", True, False)),
    ("l", ("16", "x", None)),
    ("m", (None, "true", "True", "0", False)),
    ("a", (None, "", "grüppe", 'quo"te')),
    ("c", (None, "", "Nope")),
    ("d", (None, "0", "x")),
    ("n", ("b", None)),
    ("zz", ("unknown", 5, True)),
    ("body", ("meta",)),
)


def random_send(chance: random.Random, opaque: int) -> bytes:
    fields = send_fields(e=str(chance.randrange(4)))
    changes = dict(chance.sample(CHANGES, chance.choice((0, 0, 0, 1, 1, 2, 3))))
    for name, values in changes.items():
        value = chance.choice(values)
        fields.pop(name, None)
        if value is not None:
            fields[name] = value
    code = chance.choice((310, 310, 310, 10, 320))
    body = chance.randbytes(chance.choice((0, 1, 100, 3000, 30_000)))
    if code == 320 or fields.get("m") == "true":
        texts = chance.choices([text for text in PROPERTIES if text is not None], k=3)
        if chance.random() < 0.6:
            texts = ["TAGS\x01A", "", "KEYS\x01k\x02"]
        body = b"".join(
            item(chance.randbytes(20), text) for text in texts if len(text.encode()) < 32_768
        )
        damage = chance.random()
        if damage < 0.1:
            body = body[:-1]
        elif damage < 0.15:
            body = b""
        elif damage < 0.2:
            body = item(b"x", "TAGS\x01A")[:-1] + b"\xff"
    if code == 10:
        fields = {LONG.get(name, name): value for name, value in fields.items()}
    flag = chance.choice((0, 0, 0, 0, 2))
    return frame(code, opaque, fields, body, flag=flag, style=chance.randrange(5))


def random_pull(chance: random.Random, opaque: int) -> bytes:
    fields = {
        "consumerGroup": chance.choice(("group", "group", "other", "bad group", "")),
        "topic": chance.choice(("Plain", "Plain", "Plain", "Multi", "Unknown", "%RETRY%group")),
        "queueId": chance.choice(("0", "1", "1", "2", "9", "-1", "x")),
        "queueOffset": str(chance.choice((0, 0, 1, 2, 5, 100, -1))),
        "maxMsgNums": chance.choice(("32", "1", "0", "-3", "2", "100000")),
        "sysFlag": str(chance.choice((4, 4, 5, 5, 0, 1))),
        "commitOffset": chance.choice(("0", "2", "-1", "-7", "9223372036854775807")),
        "suspendTimeoutMillis": "0",
        "subscription": chance.choice(("*", "*", "A", "A || B", "||", "a > 1", "null", "")),
        "subVersion": chance.choice(("0", "1690000000000", "")),
        "expressionType": chance.choice(("TAG", "TAG", "SQL92", "", "ODD")),
        "maxMsgBytes": "100",
    }
    for name in chance.sample(sorted(fields), chance.choice((0, 0, 1))):
        del fields[name]
    flag = 2 if chance.random() < 0.05 else 0
    return frame(11, opaque, fields, flag=flag, style=chance.randrange(5))


def random_commit(chance: random.Random, opaque: int) -> bytes:
    fields = {
        "consumerGroup": chance.choice(("group", "other", "bad group")),
        "topic": chance.choice(("Plain", "Gone", "not good")),
        "queueId": chance.choice((0, "1", "-1")),
        "commitOffset": chance.choice((5, "0", "3", "-1", "-2", "y")),
    }
    return frame(15, opaque, fields, flag=chance.choice((0, 2)), style=chance.randrange(5))


def random_other(chance: random.Random, opaque: int) -> bytes:
    fields = {"topic": "Plain", "queueId": "1"}
    return frame(chance.choice((30, 31, 9999)), opaque, fields, style=chance.randrange(5))


UNIQUE = (
    "",
    "a b",
    "grün",
    'q"',
    "back\\slash",
    "x\x01y",
    "z" * 300,
    "x" * 32_700,
    "A\x02DELAY\x013",
)
BORN = ("", "-1", "007", "x", "9" * 19, "1690000000001")
OPAQUE = (0, -1, -(1 << 31), (1 << 31) - 1, 1 << 31)


def random_repeat(chance: random.Random, opaque: int) -> bytes:
    """What a producer sends again and again, with now and then something odd in its place."""
    key = chance.choice(UNIQUE) if chance.random() < 0.1 else f"7F0000010000{opaque:020X}"
    before, behind = chance.choice((("", "WAIT\x01true\x02TAGS\x01A\x02"), ("a\x01b\x02", "")))
    text = f"{before}UNIQ_KEY\x01{key}\x02{behind}"
    born = chance.choice(BORN) if chance.random() < 0.1 else f"16900000000{opaque % 100:02}"
    fields = send_fields(e=str(chance.randrange(2)), g=born, i=text)
    flag = 2 if chance.random() < 0.05 else 0
    return frame(
        310, opaque, fields, b"x" * chance.randrange(90), flag=flag, style=(0, 5, 4)[opaque % 3]
    )


KINDS = (
    random_send,
    random_send,
    random_send,
    random_pull,
    random_commit,
    random_other,
    random_repeat,
    random_repeat,
)


COUNT = 400


def stream(seed: int) -> tuple[bytes, list[int]]:
    """Frames one after the other, and where the reads end."""
    chance = random.Random(seed)
    data = b"".join(chance.choice(KINDS)(chance, opaque) for opaque in range(COUNT))
    cuts, at = [], 0
    while at < len(data):
        at = min(len(data), at + chance.choice((3, 50, 700, 5000, 60_000, 200_000)))
        cuts.append(at)
    return data, cuts


@pytest.mark.parametrize("seed", range(6))
async def test_any_stream(tmp_path: Path, seed: int) -> None:
    data, cuts = stream(seed)

    async def drive(side: Side) -> None:
        at = 0
        for end in cuts:
            await side.feed(data[at:end])
            at = end

    slow, fast = await compare(tmp_path, drive, seed=seed)
    assert len(slow.replies()) > 100
    assert slow.dispatched == COUNT
    assert 20 < fast.dispatched < COUNT * 0.8


@pytest.mark.parametrize("seed", range(2))
async def test_producers_that_repeat_themselves(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    frames = [random_repeat(chance, opaque) for opaque in range(1, COUNT)]
    plain = [frame(310, opaque, send_fields(i="UNIQ_KEY\x01A1\x02")) for opaque in OPAQUE]

    async def drive(side: Side) -> None:
        for at in range(0, len(frames), 9):
            await side.feed(b"".join(frames[at : at + 9]))
        for one in plain:
            await side.feed(one)
        assert side.wire.ended  # the last opaque is none

    slow, fast = await compare(tmp_path, drive, seed=seed)
    assert slow.dispatched > COUNT and fast.dispatched < 0.3 * slow.dispatched


async def test_a_broken_frame_ends_both(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        good = frame(310, 1, send_fields(), b"x")
        await side.feed(good + struct.pack(">II", 1 << 30, 0)[:3])
        await side.feed(struct.pack(">II", 1 << 30, 0)[3:] + good)
        assert side.wire.ended

    await compare(tmp_path, drive)


async def test_synced_sends(tmp_path: Path) -> None:
    data = b"".join(
        frame(310, opaque, send_fields(i=f"WAIT\x01{opaque % 2 == 0}"), b"x" * opaque)
        for opaque in range(1, 60)
    )

    async def drive(side: Side) -> None:
        await side.feed(data)

    await compare(tmp_path, drive, flush_disk_type="SYNC_FLUSH")


async def test_a_sync_that_takes_too_long(tmp_path: Path) -> None:
    release = asyncio.Event()

    def slow_env(seed: int) -> Env:
        plain = env(seed)

        async def offload(work: Callable[[], Any]) -> Any:
            await release.wait()
            return work()

        return dataclasses.replace(plain, offload=offload, syncer=None)

    async def drive(side: Side) -> None:
        release.clear()
        frames = (frame(code, code, send_fields(), item(b"x")) for code in (310, 320, 10))
        longs = {LONG[name]: value for name, value in send_fields().items()}
        await side.feed(b"".join((*frames, frame(10, 1, longs, b"y", style=4))))
        await side.answered()
        assert len(side.replies()) == 4
        release.set()

    # Nothing waits at start and stop, only in between.
    release.set()
    slow, _ = await compare(
        tmp_path, drive, make_env=slow_env, flush_disk_type="SYNC_FLUSH", sync_flush_timeout=20
    )
    assert any(b"syncFlushTimeout" in reply for reply in slow.replies().values())


async def test_a_write_that_fails(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        send = frame(310, 1, send_fields(), b"x") + frame(10, 2, {}, b"x")
        await side.feed(send)
        log = side.store._log
        write_chunk = log._write_chunk
        log._write_chunk = lambda chunk: OSError(28, "No space left on device")
        await side.feed(
            frame(310, 3, send_fields(), b"lost")
            + frame(320, 4, send_fields(), item(b"lost") * 3, style=4)
            + frame(310, 5, send_fields(), b"lost", flag=2)
        )
        await side.answered()
        log._write_chunk = write_chunk
        await side.feed(frame(310, 6, send_fields(), b"kept"))

    slow, _ = await compare(tmp_path, drive)
    assert b'"code":14' in slow.replies()[3] and b'"queueOffset":"1"' in slow.replies()[6]


async def test_files_roll_within_a_read(tmp_path: Path) -> None:
    data = b"".join(
        frame(320, opaque, send_fields(), item(b"x" * 2000) * 3) for opaque in range(1, 40)
    )

    async def drive(side: Side) -> None:
        for at in range(0, len(data), 120_000):
            await side.feed(data[at : at + 120_000])

    await compare(tmp_path, drive, mapped_file_size_commit_log=8192)


@pytest.mark.parametrize("cause", ["a full pool", "trouble"])
async def test_what_cannot_be_staged_is_not_read_over_and_over(tmp_path: Path, cause: str) -> None:
    count = 300
    looked_at = 0
    body = b"x" * 300  # all of them are more than the pool takes
    data = b"".join(frame(310, opaque, send_fields(), body) for opaque in range(1, count + 1))

    async def drive(side: Side) -> None:
        nonlocal looked_at
        stage = side.store.stage

        def watched(ready: Any) -> None:
            nonlocal looked_at
            looked_at += ready.left
            stage(ready)

        side.store.stage = watched  # type: ignore[assignment]
        log = side.store._log
        log.trouble = "no room" if cause == "trouble" else None
        await side.feed(data)
        log.trouble = None
        looked_at, before = 0, looked_at
        await side.feed(frame(310, 1000, send_fields(), b"x"))
        await side.feed(b"".join(frame(310, 1001 + n, send_fields(), b"x") for n in range(9)))
        looked_at = before

    pooled = cause == "a full pool"
    _, fast = await compare(
        tmp_path, drive, transient_store_pool_enable=pooled, transient_store_pool_size=1
    )
    assert looked_at == count
    # Once the store takes messages again, so does the lane.
    assert fast.dispatched < count if pooled else fast.dispatched == count
    assert fast.dispatched > 0


async def test_a_pool_answers_before_the_write(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        await side.feed(b"".join(frame(310, 1 + n, send_fields(), b"x") for n in range(9)))
        await side.feed(frame(310, 1000, send_fields(i="WAIT\x01false"), b"x"))
        assert len(side.replies()) == 10 and side.store.facts().written_offset == 0

    _, fast = await compare(
        tmp_path, drive, transient_store_pool_enable=True, commit_interval_commit_log=3_600_000
    )
    assert fast.dispatched == 0


def codes_of(side: Side) -> dict[int, int]:
    """The codes of the replies by opaque."""
    codes = {}
    for opaque, reply in side.replies().items():
        word = int.from_bytes(reply[4:8], "big")
        if word >> 24:
            (codes[opaque],) = struct.unpack_from(">h", reply, 8)
        else:
            codes[opaque] = json.loads(reply[8 : 8 + word])["code"]
    return codes


async def test_plans_follow_the_topics(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        topics = side.broker._rooms.members.topics
        await side.feed(frame(310, 1, send_fields(e="3"), b"x"))
        topics.put(TopicConfig(topic_name="Plain", read_queue_nums=2, write_queue_nums=2))
        await side.feed(frame(310, 2, send_fields(e="3"), b"x"))
        topics.delete("Plain")
        await side.feed(frame(310, 3, send_fields(c="None"), b"x"))
        topics.put(TopicConfig(topic_name="Plain"))
        await side.feed(frame(310, 4, send_fields(e="3"), b"x"))

    slow, _ = await compare(tmp_path, drive)
    assert [codes_of(slow)[opaque] for opaque in (1, 2, 3, 4)] == [0, 1, 17, 0]


async def test_settings_and_load_that_change(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        produce = service_of(side, 310)
        options = produce._options
        force = msgspec.structs.force_setattr

        async def send(opaque: int, **changes: Any) -> None:
            await side.feed(frame(310, opaque, send_fields(**changes), b"x", style=opaque % 2 * 4))

        await send(1)
        force(options, "trace_on", False)
        await send(2)
        side.broker._rooms.members.topics.put(TopicConfig(topic_name="Ordered", order=True))
        force(options, "broker_permission", 4)
        await send(3, b="Ordered")
        await send(4)
        force(options, "broker_permission", 2)
        await side.feed(random_pull(random.Random(3), 5))
        force(options, "broker_permission", 6)
        produce._pressure._late_beats = 10
        produce._pressure.late_ms = 7.0  # it is in the answer, and measured otherwise
        await send(6)
        produce._pressure._late_beats = 0
        force(options, "start_accept_send_request_time_stamp", NOW_MS + 1)
        await send(7)
        force(options, "start_accept_send_request_time_stamp", NOW_MS)
        await send(8)

    slow, fast = await compare(tmp_path, drive)
    assert b"Ordered is an order topic" in slow.replies()[3]
    assert b"OVERLOAD" in slow.replies()[6]
    assert slow.dispatched == 8 and fast.dispatched == 5


def plain_pull(opaque: int) -> bytes:
    fields = {
        "consumerGroup": "group",
        "topic": "Plain",
        "queueId": "1",
        "queueOffset": "0",
        "maxMsgNums": "32",
        "sysFlag": "5",
        "commitOffset": "1",
        "suspendTimeoutMillis": "0",
        "subscription": "*",
        "subVersion": "0",
        "expressionType": "TAG",
    }
    return frame(11, opaque, fields, style=opaque % 2 * 4)


async def test_pulls_follow_groups_and_topics(tmp_path: Path, lane_core: ModuleType) -> None:
    async def drive(side: Side) -> None:
        consume = service_of(side, 11)
        topics, groups, options = consume._topics, consume._groups, consume._options
        group = SubscriptionGroupConfig(group_name="group")
        groups.put(group)
        await side.feed(frame(310, 1, send_fields(), b"x"))
        await side.answered()

        async def pull(opaque: int, **topic: Any) -> None:
            if topic:
                queues = {"read_queue_nums": 4, "write_queue_nums": 4}
                topics.put(TopicConfig(topic_name="Plain", **{**queues, **topic}))
            await side.feed(plain_pull(opaque))
            await side.answered()

        await pull(2)
        groups.put(msgspec.structs.replace(group, consume_enable=False))
        await pull(3)
        groups.put(group)
        await pull(4)
        await pull(5, perm=2)
        await pull(6, perm=6, read_queue_nums=1)
        await pull(7, perm=4)
        msgspec.structs.force_setattr(options, "broker_permission", 2)
        await pull(8)
        msgspec.structs.force_setattr(options, "broker_permission", 6)
        topics.delete("Plain")
        await pull(9)

    slow, fast = await compare(tmp_path, drive)
    codes = [codes_of(slow)[opaque] for opaque in range(2, 10)]
    assert codes == [0, 16, 0, 16, 1, 0, 16, 17]
    by_plan = 0 if lane_core is lane_pure else codes.count(0)
    assert slow.dispatched - fast.dispatched == 1 + by_plan


async def test_a_read_that_fails_is_answered(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        await side.feed(frame(310, 1, send_fields(), b"x"))
        log = side.store._log
        view = log.view

        def fail(base: int) -> Any:
            raise RuntimeError("broken")

        log.view = fail
        for opaque in (2, 4):  # without a plan and with one
            await side.feed(plain_pull(opaque))
        log.view = view
        for opaque in (5, 7, 3):
            await side.feed(plain_pull(opaque))
        assert not side.wire.ended

    slow, _ = await compare(tmp_path, drive)
    assert [codes_of(slow)[opaque] for opaque in (2, 5, 4, 7, 3)] == [1, 0, 1, 0, 0]


async def test_what_a_send_may_not_do_is_refused_in_both(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        produce = service_of(side, 310)
        half = send_fields(i="TRAN_MSG\x01true\x02PGROUP\x01g", f="4")
        await side.feed(frame(310, 1, half, b"half"))
        msgspec.structs.force_setattr(produce._options, "reject_transaction_message", True)
        await side.feed(frame(310, 2, half, b"half"))
        await side.feed(frame(310, 3, send_fields(), b"x" * 1000))
        await side.feed(frame(310, 4, send_fields(), b"x" * 1001))
        await side.feed(frame(320, 5, send_fields(), item(b"x" * 500) * 2))
        msgspec.structs.force_setattr(side.store._options, "broker_role", "SLAVE")
        await side.feed(frame(310, 6, send_fields(), b"x"))
        msgspec.structs.force_setattr(side.store._options, "broker_role", "ASYNC_MASTER")
        await side.feed(frame(310, 7, send_fields(), b"x"))
        side.store._state, before = "stopping", side.store._state
        await side.feed(frame(310, 8, send_fields(), b"x"))
        side.store._state = before
        await side.feed(frame(310, 9, send_fields(), b"x"))
        await side.answered()
        side.connection.refuse_requests("This broker is stopping.")
        await side.feed(frame(310, 10, send_fields(), b"x") + plain_pull(11))

    slow, fast = await compare(tmp_path, drive, max_message_size=1000)
    codes = [codes_of(slow)[opaque] for opaque in range(1, 12)]
    assert codes == [0, 16, 0, 13, 13, 14, 0, 14, 0, 14, 14]
    assert slow.dispatched - fast.dispatched == 3


async def test_a_batch_cannot_grow_without_bounds(tmp_path: Path) -> None:
    async def drive(side: Side) -> None:
        small = item(b"", "") * 40
        await side.feed(frame(320, 1, send_fields(), small))
        await side.feed(frame(320, 2, send_fields(i="x\x01" + "y" * 300), small))
        await side.feed(frame(320, 3, send_fields(i="x\x01" + "y" * 500), small))

    slow, fast = await compare(tmp_path, drive, max_message_size=1000)
    assert [codes_of(slow)[opaque] for opaque in (1, 2, 3)] == [0, 0, 13]
    assert b"16 times maxMessageSize" in slow.replies()[3]
    assert fast.dispatched < slow.dispatched


async def test_a_tag_subscription_of_a_heartbeat(tmp_path: Path, lane_core: ModuleType) -> None:
    body = {
        "clientID": "c@1",
        "consumerDataSet": [
            {
                "consumeFromWhere": "CONSUME_FROM_LAST_OFFSET",
                "consumeType": "CONSUME_PASSIVELY",
                "groupName": "group",
                "messageModel": "CLUSTERING",
                "subscriptionDataSet": [
                    {
                        "classFilterMode": False,
                        "codeSet": [66, speed.java_hash("标签")],
                        "expressionType": "TAG",
                        "subString": "B || 标签",
                        "subVersion": 5,
                        "tagsSet": ["B", "标签"],
                        "topic": "Plain",
                    }
                ],
                "unitMode": False,
            }
        ],
        "producerDataSet": [],
    }

    def pull(opaque: int, offset: int, flags: int = 0, version: int = 5) -> bytes:
        fields = {
            "consumerGroup": "group",
            "topic": "Plain",
            "queueId": 1,
            "queueOffset": offset,
            "maxMsgNums": 4,
            "sysFlag": flags,
            "commitOffset": offset,
            "suspendTimeoutMillis": 50,
            "subVersion": version,
        }
        return frame(11, opaque, fields, style=opaque % 5)

    async def drive(side: Side) -> None:
        await side.feed(frame(34, 1, {}, json.dumps(body).encode()))
        tags = ("A", "B", "标签", "", "B", "C", "B", "B", "D")
        for number, tag in enumerate(tags):
            text = f"TAGS\x01{tag}"
            await side.feed(frame(310, 10 + number, send_fields(i=text), b"x", style=3))
        for number in range(10):
            await side.feed(pull(30 + number, number, flags=number % 2))
        await side.feed(pull(50, 9, flags=3))  # parked, and woken by the message after it
        await side.feed(frame(310, 51, send_fields(i="TAGS\x01B"), b"late"))
        await side.feed(pull(52, 0, version=6))  # newer than what the heartbeat said

    slow, fast = await compare(tmp_path, drive)
    assert b"late" in slow.replies()[50]
    assert lane_core is lane_pure or fast.dispatched < slow.dispatched - 12
