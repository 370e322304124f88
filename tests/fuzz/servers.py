"""Targets with something behind them: the health port, a store directory, and both lanes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from tests.fuzz.engine import Broken, Target, dented, ending, outcome
from tests.fuzz.parsers import GOLDEN, JSON_WORDS, framed, header_of
from tests.twins import test_twins_lanes as lanes

from cosmodrome.env.options import StoreOptions
from cosmodrome.env.real import real_env
from cosmodrome.errors import StoreError
from cosmodrome.store.delays import DelayLevels
from cosmodrome.store.offline.directory import check, open_once, opened
from cosmodrome.transport.http.health import HealthServer
from cosmodrome.wire import fastjson

# What is synced here need not survive anything.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
ROUNDS_PER_BROKER = 100  # then both sides begin anew, and their files are compared


class HttpTarget(Target):
    """Requests to the health port: one answer, or none, and the next one is served."""

    name = "http"
    words = (
        *(b"GET ", b"HEAD ", b"POST ", b" HTTP/1.1", b"\r\n", b"\r\n\r\n", b"\n", b"/livez"),
        *(b"/metrics", b"?", b"%00", b"Accept: ", b"Content-Length: 99\r\n", b":", b"\0", b"\xff"),
        *(b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"x" * 9_000),
    )

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def corpus(self) -> Sequence[bytes]:
        return [
            b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n",
            b"HEAD /readyz?x=1 HTTP/1.0\r\nAccept: text/plain\r\nUser-Agent: b\r\n\r\n",
            b"GET /none HTTP/1.1\r\nHost: a\r\nConnection: keep-alive\r\n\r\n",
        ]

    def check(self, data: bytes, chance: random.Random) -> str:
        return self._runner.run(self._exchange(data, chance))

    async def _exchange(self, data: bytes, chance: random.Random) -> str:
        server = HealthServer({"/livez": lambda: (True, "ok"), "/readyz": lambda: (False, "no")})
        port = await server.listen("127.0.0.1", 0)
        try:
            cut = chance.randrange(len(data) + 1)
            answer = await self._ask(port, data[:cut], data[cut:])
            if answer and not answer.startswith(b"HTTP/1.1 "):
                raise Broken(f"answered {answer[:100]!r}")
            good = await self._ask(port, self.corpus()[0], b"")
            if not good.startswith(b"HTTP/1.1 200 "):
                raise Broken(f"the next probe got {good[:100]!r}")
        finally:
            await server.stop()
        return answer[:12].decode("latin-1")

    async def _ask(self, port: int, *pieces: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            writer.write_eof()
            return await reader.read(-1)
        except OSError:
            return b""  # closed while it was being written to
        finally:
            writer.transport.abort()

    def close(self) -> None:
        self._runner.close()


class StoreTarget(Target):
    """Files of a store, changed anywhere: what the checker and a start of the store make of it.

    An input is a list of changes: file, place, kind and value. The checker must survive all of
    them. A start may refuse with a reason; when it does not, what it leaves has an intact log.
    """

    name = "store"

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)  # the store says loudly what is broken, as it should
        self._scratch = tempfile.TemporaryDirectory(prefix="fuzz-store-", dir=MEMORY)
        self._root = Path(self._scratch.name) / "store"
        self._source = GOLDEN / "store"
        self._files = sorted(path for path in self._source.rglob("*") if path.is_file())
        sizes = json.loads((GOLDEN / "options.json").read_text())
        self._options = StoreOptions(
            store_path_root_dir=str(self._root),
            mapped_file_size_commit_log=sizes["mappedFileSizeCommitLog"],
            mapped_file_size_consume_queue=sizes["mappedFileSizeConsumeQueue"],
            max_hash_slot_num=sizes["maxHashSlotNum"],
            max_index_num=sizes["maxIndexNum"],
            disk_space_warning_level_ratio=100,
            file_reserved_time=1 << 20,
        )
        self._runner = asyncio.Runner()

    def corpus(self) -> Sequence[bytes]:
        chance = random.Random(0)
        return [self._change(chance) for _ in range(50)]

    def mutate(self, data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
        if chance.random() < 0.5:
            return (data + self._change(chance))[-7 * 6 :]
        return dented(data, chance, (), others)

    def _change(self, chance: random.Random) -> bytes:
        # Log, checkpoint and tables are as likely as the many files of queues.
        logs = [n for n, path in enumerate(self._files) if "consumequeue" not in path.parts]
        number = (
            chance.choice(logs) if chance.random() < 0.7 else chance.randrange(len(self._files))
        )
        return struct.pack(">BHBBH", number, chance.randrange(1 << 16), *chance.randbytes(2), 0)

    def check(self, data: bytes, chance: random.Random) -> str:
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.copytree(self._source, self._root)
        for at in range(0, len(data) - 6, 7):
            self._apply(*struct.unpack_from(">BHBBH", data, at))
        if chance.random() < 0.5:
            (self._root / "abort").touch()  # as after a crash
        looked = self._look()
        try:
            self._runner.run(open_once(self._options, real_env()))
        except StoreError as error:
            return f"{looked}, {ending(error)}"
        try:
            self._runner.run(open_once(self._options, real_env()))
        except StoreError as error:
            raise Broken(f"started and stopped once, then refused: {error}") from None
        return f"{looked}, then {self._look()}"

    def _apply(self, number: int, place: int, kind: int, value: int, _spare: int) -> None:
        path = self._root / self._files[number % len(self._files)].relative_to(self._source)
        if not path.exists():
            return
        content = bytearray(path.read_bytes())
        at = place % (len(content) or 1)
        if kind < 100:
            content[at : at + 1] = bytes([value])
        elif kind < 160:
            content[at : at + 1 + value % 8] = bytes(1 + value % 8) if kind % 2 else b"\xff" * 8
        elif kind < 190:
            del content[at:]
        elif kind < 220:
            content[at : at + 512] = bytes(len(content[at : at + 512]))
        elif kind < 240:
            del content[at : at + value]
        else:
            path.unlink()
            return
        path.write_bytes(content)

    def _look(self) -> str:
        """What the checker says of the directory, as codes."""

        def look() -> str:
            with opened(str(self._root), real_env().disk, read_only=True) as files:
                report = check(
                    files,
                    read_json=fastjson.loads,
                    delays=DelayLevels(self._options.message_delay_level),
                    read_only=True,
                )
            return " ".join(sorted({finding.code for finding in report.findings.problems}))

        end, found = outcome(look, StoreError)
        return f"[{found}]" if end == "value" else end

    def close(self) -> None:
        self._runner.close()
        self._scratch.cleanup()
        logging.disable(logging.NOTSET)


class LaneTarget(Target):
    """Streams of requests to a broker with the fast lane and to one without it.

    Valid, damaged and cut anywhere: equal replies in equal order, the connection ended or not in
    both, and in the end equal files and counts.
    """

    name = "lane"
    words: Sequence[bytes] = (
        *JSON_WORDS,
        *(b"DELAY\x011", b"DELAY\\u00011", b"TRAN_MSG\x01true", b"TIMER_", b"CLUSTER\x01"),
        *(b"WAIT\x01false\x02", b"WAIT\\u0001false", b'"e":"3"', b'"e":2,', b'"m":"true"'),
        *(b'"b":"Multi"', b'"i":null', b'"a":""', b'"queueId":"0"', b'"sysFlag":"4"'),
    )

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        self._runner = asyncio.Runner()
        self._scratch = tempfile.TemporaryDirectory(prefix="fuzz-lane-", dir=MEMORY)
        self._generation = self._rounds = 0
        self._sides: list[lanes.Side] = []
        self._broker: dict[str, Any] = {}  # settings

    def corpus(self) -> Sequence[bytes]:
        return streams()

    def mutate(self, data: bytes, chance: random.Random, others: Sequence[bytes]) -> bytes:
        return dented_frames(data, chance, self.words, others)

    def check(self, data: bytes, chance: random.Random) -> str:
        return self._runner.run(self._compare(data, chance))

    async def _compare(self, data: bytes, chance: random.Random) -> str:
        if not self._sides:
            await self._begin()
        pieces, at = [], 0
        while at < len(data):
            end = at + chance.choice((1, 3, 50, 700, 5_000, 100_000))
            pieces.append(data[at:end])
            at = end
        slow, fast = [await exchange(side, pieces) for side in self._sides]
        if slow != fast:
            raise Broken(f"slow {describe(slow)}, fast {describe(fast)}")
        self._rounds += 1
        if self._rounds % ROUNDS_PER_BROKER == 0:
            await self._end()
        ended, replies = slow
        codes = sorted({reply_code(reply) for reply in replies})
        return f"{'ended' if ended else 'open'} {codes[:4]}"

    async def _begin(self) -> None:
        self._generation += 1
        for name in ("slow", "fast"):
            path = Path(self._scratch.name) / str(self._generation) / name
            env = lanes.env(self._generation)
            side = lanes.Side(path, env, fast=name == "fast", broker=self._broker)
            await side.__aenter__()
            # Whether the loop keeps up depends on the machine, and it would be in the answers.
            options = lanes.service_of(side, 310)._options
            msgspec.structs.force_setattr(options, "broker_fast_failure_enable", False)
            self._sides.append(side)

    async def _end(self) -> None:
        sides, self._sides = self._sides, []
        slow, fast = sides
        wanted, found = slow.counted(), fast.counted()
        for side in sides:
            await side.__aexit__()
        for name, value in wanted.items():
            if found[name] != value:
                raise Broken(f"counts differ: {name} slow {value}, fast {found[name]}")
        if slow.files() != fast.files():
            raise Broken("files differ after the last streams")
        shutil.rmtree(slow.path.parent)

    def close(self) -> None:
        if self._sides:
            self._runner.run(self._end())
        self._runner.close()
        self._scratch.cleanup()
        logging.disable(logging.NOTSET)


def streams() -> list[bytes]:
    """Requests of all kinds that the lanes know, a few one after the other."""
    found = []
    for seed in range(150):
        chance = random.Random(seed)
        kinds = [chance.choice(lanes.KINDS) for _ in range(chance.choice((1, 2, 3, 6)))]
        found.append(b"".join(kind(chance, 1_000 + at) for at, kind in enumerate(kinds)))
    return [data for data in found if len(data) < 40_000]


def dented_frames(
    data: bytes, chance: random.Random, words: Sequence[bytes], others: Sequence[bytes]
) -> bytes:
    """Frames are damaged, dropped, doubled and mixed with those of other streams."""
    frames = [*cut(data)]
    if not frames or chance.random() < 0.05:
        return dented(data, chance, words, others)
    at = chance.randrange(len(frames))
    kind = chance.randrange(6)
    if kind == 0:
        del frames[at]
    elif kind == 1:
        frames.insert(at, chance.choice(frames))
    elif kind == 2:
        frames[at:at] = cut(chance.choice(others))[:3]
    elif kind == 3:
        frames[at] = dented(frames[at], chance, words, others)
    elif len(frames[at]) >= 8:
        serialize, header, body = header_of(frames[at])
        if kind == 4:
            header = dented(header, chance, words, others)
        else:
            body = dented(body, chance, words, others)
        frames[at] = framed(serialize, header, body)
    return b"".join(frames)


async def exchange(side: lanes.Side, pieces: Sequence[bytes]) -> tuple[bool, list[bytes]]:
    """Over a connection of its own: whether it was ended, and all replies in their order."""
    side.connection.connection_lost(None)
    side.wire = lanes.Wire(lanes.PEER)
    side.connection = side.broker._server._connection()
    side.connection.connection_made(side.wire)
    for piece in pieces:
        if not side.wire.ended:
            await side.feed(piece)
    await side.answered()
    out = bytes(side.wire.out).replace(b"/fast/", b"/slow/")  # paths in the words of errors
    return side.wire.ended, cut(out)


def cut(data: bytes) -> list[bytes]:
    """Frames by their lengths; what is no whole frame is the last piece."""
    found, at = [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        found.append(data[at:end])
        at = end
    return found


def reply_code(reply: bytes) -> int:
    serialize, header, _ = header_of(reply)
    return int.from_bytes(header[:2], "big") if serialize else int(json.loads(header)["code"])


def describe(seen: tuple[bool, list[bytes]]) -> str:
    return f"{'ended' if seen[0] else 'open'} {[bytes(reply[:300]) for reply in seen[1]]}"
