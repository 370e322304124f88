"""What is measured beside other systems: the generator of line protocols, the tables, the page."""

from __future__ import annotations

import argparse
import socketserver
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from bench.peers import BEFORE, CACHE, EACH, GROUP, MANY, ONE, Measured, put, render
from bench.pipelined import Nats, Redis, run


@pytest.mark.parametrize(
    ("protocol", "line", "verdict"),
    [
        (Redis, b"$15", None),
        (Redis, b"1526919030474-0", True),
        (Redis, b"-ERR unknown command", False),
        (Nats, b"MSG _INBOX.0 1 30", None),
        (Nats, b'{"stream":"Bench","seq":12}', True),
        (Nats, b'{"error":{"code":503},"stream":"Bench","seq":0}', False),
        (Nats, b"-ERR 'Unknown Protocol Operation'", False),
        (Nats, b'INFO {"server_id":"x"}', None),
        (Nats, b"PING", None),
        (Nats, b"", None),
    ],
)
def test_which_lines_end_an_answer(
    protocol: type[Redis] | type[Nats], line: bytes, verdict: bool | None
) -> None:
    assert protocol.verdict(line) is verdict


class Answering(socketserver.BaseRequestHandler):
    """A Redis that takes whole requests and answers in pieces; every fifth answer is bad."""

    request_bytes: ClassVar[int] = len(Redis(0, 10).request)
    taken = 0

    def handle(self) -> None:
        held = answers = 0
        while data := self.request.recv(65_536):
            held += len(data)
            while held >= self.request_bytes:
                held -= self.request_bytes
                answers += 1
                Answering.taken += 1
                bad = answers % 5 == 0
                text = b"-ERR no\r\n" if bad else b"$15\r\n1526919030474-0\r\n"
                self.request.sendall(text[:7])
                self.request.sendall(text[7:])


@pytest.fixture
def address() -> Iterator[str]:
    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # the generator leaves in the middle

    with Server(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_generator_counts_what_was_answered(address: str) -> None:
    Answering.taken = 0
    options = argparse.Namespace(
        protocol="redis", addr=address, conns=2, window=4, size=10, duration=0.3, warmup=0.1, pid=""
    )
    result: Any = run(options)
    assert 0 < result["msgs"] <= Answering.taken
    assert result["errors"] > 0 and result["first_error"] == "-ERR no"
    assert 0 < result["p50_us"] <= result["p99_us"] < 1_000_000
    assert "srv_cpu_us_msg" not in result


def sample(cpu: float, errors: int = 0) -> dict[str, float]:
    return {"srv_cpu_us_msg": cpu, "tps": 1000, "p50_us": 5, "p99_us": 50, "errors": errors}


def test_servers_of_one_promise_stand_together() -> None:
    rows = [
        Measured("cached", CACHE, MANY, [sample(1)], 10),
        Measured("slow", GROUP, MANY, [sample(9), sample(7), sample(100)], 10),
        Measured("fast", GROUP, MANY, [sample(3, errors=2)], 1234),
        Measured("each", EACH, MANY, [sample(5)], 10),
        Measured("each", EACH, ONE, [sample(50)], 10),
    ]
    many, one = render(rows).split("### ")[1:]
    lines = [line.split(" | ") for line in many.splitlines() if line.startswith(("| syn", "| in"))]
    assert [line[1] for line in lines] == ["each", "fast", "slow", "cached"]
    assert [line[2] for line in lines] == ["5.00", "3.00", "9.00", "1.00"]
    assert lines[1][6:] == ["2", "1,234 |"]
    assert "50.00" in one and "fast" not in one


def test_the_page_is_written_once_and_then_replaced() -> None:
    page = f"# Measurements\n\ntext\n\n{BEFORE}\n\n- shared\n"
    first = put(page, "## Others\n\nold\n")
    assert first.index("old") < first.index(BEFORE)
    second = put(first, "## Others\n\nnew\n")
    assert second == first.replace("old", "new")
    assert second.endswith("- shared\n")
