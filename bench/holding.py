"""Many silent connections and many held pulls: what they cost a server that has nothing to do.

    python -m bench.holding --addr 127.0.0.1:10911 --idle 10000 --pulls 2000 --pid 1234

Each held pull has a connection of its own and is asked again when it is answered, as a consumer
does. Prints one JSON line: memory (MB) before and after, share of a core (%), answers, errors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
from typing import cast

from bench.brokers import memory_mb
from bench.loadgen import cpu_seconds, new_loop, pull_frame

AT_ONCE = 100  # connections under way; more than this only fills the backlog
HOLD_MS = 15_000  # what clients ask for
SPARE_FILES = 100


class Silent(asyncio.Protocol):
    lost = 0

    def connection_lost(self, error: Exception | None) -> None:
        Silent.lost += 1


class Puller(Silent):
    """One consumer with one pull at the end of an empty queue."""

    answers = 0

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._read = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._read += data
        if len(self._read) >= 4 and len(self._read) >= 4 + int.from_bytes(self._read[:4], "big"):
            self._read.clear()
            Puller.answers += 1
            self._transport.write(self._request)


async def run(options: argparse.Namespace) -> dict[str, object]:
    loop = asyncio.get_running_loop()
    host, port = options.addr.rsplit(":", 1)
    pids = [int(pid) for pid in options.pid.split(",")]
    before_mb = sum(map(memory_mb, pids))
    gate = asyncio.Semaphore(AT_ONCE)
    options.pullmax = 32
    requests = [bytes(pull_frame(options, queue, 0, HOLD_MS)) for queue in range(options.queues)]
    opened: list[asyncio.BaseTransport] = []

    async def connect(number: int) -> None:
        request = requests[number % options.queues] if number < options.pulls else b""
        async with gate:
            transport, _ = await loop.create_connection(
                lambda: Puller(request) if request else Silent(), host, int(port)
            )
            opened.append(transport)

    began = loop.time()
    async with asyncio.TaskGroup() as group:
        for number in range(options.pulls + options.idle):
            group.create_task(connect(number))
    connected_s = loop.time() - began
    await asyncio.sleep(1)
    cpu, began, answers = cpu_seconds(pids), loop.time(), Puller.answers
    await asyncio.sleep(options.duration)
    seconds, cpu = loop.time() - began, cpu_seconds(pids) - cpu
    result: dict[str, object] = {
        "before_mb": round(before_mb, 1),
        "after_mb": round(sum(map(memory_mb, pids)), 1),
        "cpu_percent": round(cpu / seconds * 100, 2),
        "answers_s": round((Puller.answers - answers) / seconds, 1),
        "connected_s": round(connected_s, 2),
        "errors": Silent.lost,
    }
    for transport in opened:
        transport.close()
    await asyncio.sleep(0.5)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--addr", default="127.0.0.1:10911")
    parser.add_argument("--topic", default="Held")
    parser.add_argument("--queues", type=int, default=8)
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--pulls", type=int, default=2_000)
    parser.add_argument("--duration", type=float, default=15.0)
    parser.add_argument("--pid", required=True)
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most < options.idle + options.pulls + SPARE_FILES:
        raise SystemExit(f"at most {most} files may be open; raise `ulimit -n`")
    with asyncio.Runner(loop_factory=new_loop()) as runner:
        json.dump(runner.run(run(options)), sys.stdout)
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
