"""A neutral load generator: drives any broker that speaks the remoting protocol.

Every request is encoded once; in the loop only the opaque (and for pulls the offset) is patched,
so that the broker and not the generator is measured. It prints one JSON line. The number to
compare is `srv_cpu_us_msg`: user + system CPU of the broker's process per message, which a
busy machine disturbs far less than messages per second.

    python -m bench.loadgen --addr 127.0.0.1:10911 --op send --conns 8 --window 16 --pid 1234
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

from cosmodrome.layout import ACCESS_KEY, SIGNATURE
from cosmodrome.wire.signature import signature

OPAQUE_FIRST = 1_000_000_000  # ten digits, so that patching keeps the header's length
OFFSET_FIRST = 10_000_000_000
TICKS = os.sysconf("SC_CLK_TCK")


def frame(header: dict[str, object], body: bytes) -> bytearray:
    text = json.dumps(header, separators=(",", ":")).encode()
    return bytearray(struct.pack(">II", 4 + len(text) + len(body), len(text)) + text + body)


def header(code: int, ext: dict[str, str]) -> dict[str, object]:
    return {
        "code": code,
        "language": "OTHER",
        "version": 409,
        "opaque": OPAQUE_FIRST,
        "flag": 0,
        "extFields": ext,
    }


def header_of(request: bytearray) -> tuple[dict[str, str], bytes]:
    """The fields of a request that `frame` made, and its body."""
    end = 8 + int.from_bytes(request[4:8], "big")
    fields: dict[str, str] = json.loads(request[8:end])["extFields"]
    return fields, bytes(request[end:])


def send_frame(
    options: argparse.Namespace, queue_id: int, number: int, account: tuple[str, str] | None = None
) -> bytearray:
    """`number` makes the unique key; frames of one load have the same length.

    With an account (access key and secret) it is signed. The opaque is not part of what is signed.
    """
    properties = f"TAGS\x01{options.tag}\x02UNIQ_KEY\x017F00000100002A9F{number:016X}"
    if options.delay:
        properties += f"\x02DELAY\x01{options.delay}"
    body = b"x" * options.size
    code = 310
    if options.batch > 1:
        code = 320
        own = properties.encode()
        item = struct.pack(">iiiii", 22 + len(body) + len(own), 0, 0, 0, len(body))
        body = (item + body + struct.pack(">h", len(own)) + own) * options.batch
        properties = ""
    ext = dict(
        zip(
            "abcdefghijkm",
            [
                "loadgen",
                options.topic,
                "TBW102",
                str(options.queues),
                f"{queue_id:0{len(str(options.queues - 1))}d}",
                "0",
                str(time.time_ns() // 1_000_000),
                "0",
                properties,
                "0",
                "false",
                "true" if options.batch > 1 else "false",
            ],
            strict=True,
        )
    )
    if account is not None:
        access_key, secret = account
        ext[ACCESS_KEY] = access_key
        ext[SIGNATURE] = signature(secret.encode(), ext, body)
    return frame(header(code, ext), body)


def pull_frame(
    options: argparse.Namespace, queue_id: int, offset: int = OFFSET_FIRST, hold_ms: int = 0
) -> bytearray:
    ext = {
        "consumerGroup": "loadgen",
        "topic": options.topic,
        "queueId": str(queue_id),
        "queueOffset": str(offset),
        "maxMsgNums": str(options.pullmax),
        "sysFlag": "6" if hold_ms else "4",
        "commitOffset": "0",
        "suspendTimeoutMillis": str(hold_ms),
        "subscription": "*",
        "subVersion": "0",
    }
    return frame(header(11, ext), b"")


class Load:
    """What all connections share: the clock of the run and the counts."""

    def __init__(self) -> None:
        self.measuring = False
        self.stopped = False
        self.messages = self.bytes = self.errors = 0
        self.first_error = ""
        self.latency_us: Counter[int] = Counter()

    def saw(self, messages: int, size: int, took_ns: int) -> None:
        self.messages += messages
        self.bytes += size
        self.latency_us[took_ns // 1000] += 1


class Connection(asyncio.Protocol):
    """Keeps `window` requests in flight until told to stop."""

    def __init__(self, options: argparse.Namespace, load: Load, number: int) -> None:
        self._options = options
        self._load = load
        self._pulling = options.op == "pull"
        self._frames = [
            pull_frame(options, queue) if self._pulling else send_frame(options, queue, queue)
            for queue in range(options.queues)
        ]
        self._opaque_at = self._frames[0].index(str(OPAQUE_FIRST).encode())
        self._offset_at = self._frames[0].find(str(OFFSET_FIRST).encode())
        self._offsets = [0] * options.queues
        self._sent: dict[int, tuple[float, int]] = {}
        self._next = number
        self._opaque = OPAQUE_FIRST
        self._buffer = bytearray()
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.writelines([self._request() for _ in range(self._options.window)])

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(error)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        at, out = 0, []
        buffer = self._buffer
        while len(buffer) - at >= 4:
            length = int.from_bytes(buffer[at : at + 4], "big")
            if len(buffer) - at < 4 + length:
                break
            self._reply(bytes(buffer[at + 4 : at + 4 + length]))
            at += 4 + length
            if not self._load.stopped:
                out.append(self._request())
        del buffer[:at]
        if out:
            self._transport.writelines(out)
        elif self._load.stopped and not self._sent:
            self._transport.close()

    def _request(self) -> bytes:
        queue = self._next % self._options.queues
        self._next += 1
        self._opaque += 1
        template = self._frames[queue]
        template[self._opaque_at : self._opaque_at + 10] = b"%d" % self._opaque
        request = bytes(template)
        if self._pulling:
            # An offset has as many digits as it has, so the two lengths in front move with it.
            offset = b"%d" % self._offsets[queue]
            before, after = request[8 : self._offset_at], request[self._offset_at + 11 :]
            length = len(before) + len(offset) + len(after)
            request = struct.pack(">II", 4 + length, length) + before + offset + after
        self._sent[self._opaque] = (time.perf_counter(), queue)
        return request

    def _reply(self, data: bytes) -> None:
        header_length = int.from_bytes(data[1:4], "big")
        answer = json.loads(data[4 : 4 + header_length])
        began, queue = self._sent.pop(answer["opaque"])
        body = len(data) - 4 - header_length
        load = self._load
        code = answer["code"]
        count = 1 if self._pulling else self._options.batch
        if self._pulling and code in (0, 19, 20, 21):
            ext = answer["extFields"]
            following = int(ext["nextBeginOffset"])
            count = following - self._offsets[queue] if code == 0 else 0
            self._offsets[queue] = following if code == 0 else int(ext["minOffset"])
        elif code != 0:
            load.errors += 1
            load.first_error = load.first_error or f"{code}: {answer.get('remark')}"
            return
        if load.measuring:
            size = body if self._pulling else count * self._options.size
            load.saw(count, size, int((time.perf_counter() - began) * 1e9))


def cpu_seconds(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def percentile(counts: Counter[int], share: float) -> int:
    wanted, seen = sum(counts.values()) * share, 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= wanted:
            return value
    return 0


async def run(options: argparse.Namespace) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    host, port = options.addr.rsplit(":", 1)
    load = Load()
    connections = []
    pacing: asyncio.Task[None] | None = None
    if options.rate:
        from bench import paced  # it is made of what is here

        pacing = await paced.start(options, load)
    for number in range(0 if pacing else options.conns):
        _, protocol = await loop.create_connection(
            partial(Connection, options, load, number), host, int(port)
        )
        connections.append(protocol)
    await asyncio.sleep(options.warmup)
    pids = [int(pid) for pid in options.pid.split(",") if pid]
    cpu, began = cpu_seconds(pids), time.perf_counter()
    load.measuring = True
    await asyncio.sleep(options.duration)
    load.measuring = False
    seconds, cpu = time.perf_counter() - began, cpu_seconds(pids) - cpu
    load.stopped = True
    ends = [protocol.closed for protocol in connections]
    await asyncio.wait([pacing] if pacing else ends, timeout=10)
    result: dict[str, object] = {
        "op": options.op,
        "tps": round(load.messages / seconds),
        "mb_s": round(load.bytes / seconds / 1e6, 1),
        "p50_us": percentile(load.latency_us, 0.5),
        "p99_us": percentile(load.latency_us, 0.99),
        "p999_us": percentile(load.latency_us, 0.999),
        "errors": load.errors,
        "first_error": load.first_error,
        "msgs": load.messages,
    }
    if pids and load.messages:
        result["srv_cpu_us_msg"] = round(cpu / load.messages * 1e6, 2)
    return result


def new_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--addr", default="127.0.0.1:10911")
    parser.add_argument("--op", choices=["send", "pull", "pushlatency"], default="send")
    parser.add_argument("--rate", type=float, default=0, help="messages/s instead of a window")
    parser.add_argument("--topic", default="LoadTest")
    parser.add_argument("--tag", default="TagA")
    parser.add_argument("--conns", type=int, default=8)
    parser.add_argument("--window", type=int, default=16, help="requests in flight per connection")
    parser.add_argument("--size", type=int, default=128, help="body bytes")
    parser.add_argument("--queues", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--delay", type=int, default=0, help="delay level of what is sent")
    parser.add_argument("--pullmax", type=int, default=32)
    parser.add_argument("--duration", type=float, default=5.0, help="seconds measured")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds before that")
    parser.add_argument("--pid", default="", help="broker process ids, comma separated")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=new_loop()) as runner:
        json.dump(runner.run(run(options)), sys.stdout)
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
