"""Load for servers that answer in order, one line that counts per message: Redis and NATS.

Every request of a connection is the same bytes, encoded once; a read is split into lines, and as
many requests as it answers go out again in one write. So the server and not this program is
what is measured. It prints the JSON line of `bench.loadgen`.

    python -m bench.pipelined redis --addr 127.0.0.1:6379 --conns 8 --window 16 --pid 1234
"""

from __future__ import annotations

import argparse
import contextlib
import json
import selectors
import socket
import time
from collections import Counter, deque

from bench.loadgen import cpu_seconds, percentile

READ_BYTES = 1 << 18
SILENCE_S = 10


class Redis:
    """XADD of one field to a stream per connection; the answer is the id of the entry."""

    def __init__(self, number: int, size: int) -> None:
        words = (b"XADD", b"bench:%d" % number, b"*", b"d", b"x" * size)
        parts = [b"*%d\r\n" % len(words), *(b"$%d\r\n%s\r\n" % (len(w), w) for w in words)]
        self.hello = b""
        self.request = b"".join(parts)

    @staticmethod
    def verdict(line: bytes) -> bool | None:
        """Whether a line ends an answer: True well, False with an error, None not."""
        first = line[:1]
        if first.isdigit():
            return True
        return False if first == b"-" else None


class Nats:
    """Publishes with a reply subject; the answer is the acknowledgement of JetStream."""

    def __init__(self, number: int, size: int) -> None:
        inbox = b"_INBOX.%d" % number
        self.hello = b'CONNECT {"verbose":false}\r\nSUB %s 1\r\n' % inbox
        self.request = b"PUB bench.%d %s %d\r\n%s\r\n" % (number, inbox, size, b"x" * size)

    @staticmethod
    def verdict(line: bytes) -> bool | None:
        first = line[:1]
        if first == b"{":
            return b'"error"' not in line
        return False if first == b"-" else None


PROTOCOLS: dict[str, type[Redis] | type[Nats]] = {"redis": Redis, "nats": Nats}


class Connection:
    """Keeps `window` requests in flight."""

    def __init__(self, protocol: Redis | Nats, address: tuple[str, int], window: int) -> None:
        self._protocol = protocol
        self._window = window
        self._rest = b""
        self._sent: deque[float] = deque()
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self) -> None:
        self.socket.sendall(self._protocol.hello)
        self.push(self._window)

    def push(self, count: int) -> None:
        now = time.perf_counter()
        self._sent.extend([now] * count)
        self.socket.sendall(self._protocol.request * count)

    def hear(self) -> tuple[list[float], list[bytes]]:
        """When the requests were sent that a read answers, and the errors among the answers."""
        data = self.socket.recv(READ_BYTES)
        if not data:
            raise SystemExit("the server closed the connection")
        lines = (self._rest + data).split(b"\r\n")
        self._rest = lines.pop()
        answered: list[float] = []
        errors: list[bytes] = []
        for line in lines:
            verdict = self._protocol.verdict(line)
            if verdict is None:
                if line == b"PING":
                    self.socket.sendall(b"PONG\r\n")
                continue
            answered.append(self._sent.popleft())
            if not verdict:
                errors.append(line)
        return answered, errors


def run(options: argparse.Namespace) -> dict[str, object]:
    host, port = options.addr.rsplit(":", 1)
    make = PROTOCOLS[options.protocol]
    with contextlib.ExitStack() as stack:
        polling = stack.enter_context(selectors.DefaultSelector())
        for number in range(options.conns):
            protocol = make(number, options.size)
            connection = Connection(protocol, (host, int(port)), options.window)
            stack.enter_context(connection.socket)
            polling.register(connection.socket, selectors.EVENT_READ, connection)
            connection.begin()
        return measure(polling, options)


def measure(polling: selectors.BaseSelector, options: argparse.Namespace) -> dict[str, object]:
    pids = [int(pid) for pid in options.pid.split(",") if pid]
    latency_us: Counter[int] = Counter()
    messages = errors = 0
    first_error = ""
    measuring = False
    cpu = 0.0
    began, until = 0.0, time.perf_counter() + options.warmup
    while True:
        ready = polling.select(SILENCE_S)
        if not ready:
            raise SystemExit(f"no answer for {SILENCE_S} s")
        now = time.perf_counter()
        if now >= until:
            if measuring:
                break
            measuring, began, until, cpu = True, now, now + options.duration, cpu_seconds(pids)
        for key, _ in ready:
            answered, bad = key.data.hear()
            if bad:
                errors += len(bad)
                first_error = first_error or bad[0].decode(errors="replace")
            if measuring:
                heard = time.perf_counter()
                messages += len(answered)
                for sent in answered:
                    latency_us[int((heard - sent) * 1e6)] += 1
            if answered:
                key.data.push(len(answered))
    seconds, cpu = time.perf_counter() - began, cpu_seconds(pids) - cpu
    result: dict[str, object] = {
        "op": "send",
        "tps": round(messages / seconds),
        "mb_s": round(messages * options.size / seconds / 1e6, 1),
        "p50_us": percentile(latency_us, 0.5),
        "p99_us": percentile(latency_us, 0.99),
        "p999_us": percentile(latency_us, 0.999),
        "errors": errors,
        "first_error": first_error,
        "msgs": messages,
    }
    if pids and messages:
        result["srv_cpu_us_msg"] = round(cpu / messages * 1e6, 2)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("protocol", choices=sorted(PROTOCOLS))
    parser.add_argument("--addr", required=True)
    parser.add_argument("--conns", type=int, default=8)
    parser.add_argument("--window", type=int, default=16, help="requests in flight per connection")
    parser.add_argument("--size", type=int, default=1024, help="body bytes")
    parser.add_argument("--duration", type=float, default=2.0, help="seconds measured")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds before that")
    parser.add_argument("--pid", default="", help="server process ids, comma separated")
    print(json.dumps(run(parser.parse_args())))


if __name__ == "__main__":
    main()
