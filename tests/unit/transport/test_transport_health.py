"""The health port and the search for free ports."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from cosmodrome.errors import ConfigError
from cosmodrome.transport import ports
from cosmodrome.transport.http.exposition import Page
from cosmodrome.transport.http.health import (
    CONNECTIONS_LOCAL,
    CONNECTIONS_MAX,
    PAGES_MAX,
    HealthServer,
)
from cosmodrome.transport.ports import free_base_port

HOST = "127.0.0.1"


def broken() -> tuple[bool, str]:
    raise RuntimeError("probe broke")


@asynccontextmanager
async def health(timeout_s: float = 5.0) -> AsyncIterator[int]:
    probes = {
        "/livez": lambda: (True, "alive"),
        "/readyz": lambda: (False, "store\r\nX-Injected: 1"),
        "/startupz": broken,
    }
    server = HealthServer(probes, request_timeout_s=timeout_s)
    try:
        yield await server.listen(HOST, 0)
    finally:
        await server.stop()
        await server.stop()


async def ask(port: int, request: bytes) -> tuple[int, str, str]:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(request)
    data = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    await writer.wait_closed()
    head, _, body = data.decode().partition("\r\n\r\n")
    return int(head.split(" ")[1]), head, body


async def test_probes_answer_one_line() -> None:
    async with health() as port:
        status, head, body = await ask(port, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (status, body) == (200, "alive\n")
        assert "Connection: close" in head and "Content-Length: 6" in head
        status, _, body = await ask(port, b"GET /readyz?verbose HTTP/1.1\r\n\r\n")
        assert (status, body) == (503, "store X-Injected: 1\n")
        status, _, body = await ask(port, b"GET /startupz HTTP/1.0\r\n\r\n")
        assert status == 503 and "RuntimeError" in body


async def test_head_has_no_body() -> None:
    async with health() as port:
        status, head, body = await ask(port, b"HEAD /livez HTTP/1.1\r\n\r\n")
        assert (status, body) == (200, "")
        assert "Content-Length: 6" in head


async def test_strange_requests() -> None:
    async with health() as port:
        status, _, body = await ask(port, b"GET / HTTP/1.1\r\n\r\n")
        assert (status, body) == (404, "Paths served here: /livez /readyz /startupz\n")
        assert (await ask(port, b"POST /livez HTTP/1.1\r\n\r\n"))[0] == 405
        assert (await ask(port, b"nonsense\r\n\r\n"))[0] == 400
        assert (await ask(port, b"GET /livez HTTP/1.1\r\nX: " + b"a" * 20_000))[0] == 431


async def test_a_slow_request_is_dropped() -> None:
    async with health(timeout_s=0.1) as port:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"GET /li")
        with pytest.raises(ConnectionError):
            if await asyncio.wait_for(reader.read(), 60) == b"":
                raise ConnectionError
        writer.close()


async def test_connections_are_bounded_and_stop_ends_them() -> None:
    async with health() as port:
        peers = [await asyncio.open_connection(HOST, port) for _ in range(CONNECTIONS_MAX + 1)]
        reader, _ = peers[0]  # the oldest
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
    for _, writer in peers:
        writer.close()


@pytest.mark.parametrize("local", [True, False])
async def test_slow_connections_do_not_lock_probes_out(
    local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cosmodrome.transport.http.health.is_loopback", lambda host: local)
    async with health(timeout_s=3600) as port:
        slow = []
        for _ in range(200):
            _, writer = await asyncio.open_connection(HOST, port)
            writer.write(b"GET /livez HT")
            slow.append(writer)
        for _ in range(3):
            assert (await ask(port, b"GET /livez HTTP/1.1\r\n\r\n"))[0] == 200
        for writer in slow:
            writer.close()


async def test_strangers_leave_places_for_probes_of_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[bool] = []
    monkeypatch.setattr("cosmodrome.transport.http.health.is_loopback", lambda host: answers.pop())
    server = HealthServer({}, request_timeout_s=3600)
    port = await server.listen(HOST, 0)
    writers = []
    for local in (True, *(False,) * CONNECTIONS_MAX, True):
        answers.append(local)
        writers.append((await asyncio.open_connection(HOST, port))[1])
        while answers:
            await asyncio.sleep(0)
    kinds = list(server._waiting.values())
    assert kinds == [True, *(False,) * (CONNECTIONS_MAX - CONNECTIONS_LOCAL), True]
    await server.stop()
    assert not server._waiting
    for writer in writers:
        writer.close()


def test_three_related_ports_can_be_bound() -> None:
    port = free_base_port(HOST)
    with socket.socket() as main, socket.socket() as vip, socket.socket() as ha:
        for each, offset in ((main, 0), (vip, -2), (ha, 1)):
            each.bind((HOST, port + offset))


def test_a_taken_neighbour_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def bind(held: object, host: str, port: int) -> int | None:
        asked.append(port)
        if port == 0:
            return 20_000 + len(asked)
        return port if len(asked) > 6 else None

    monkeypatch.setattr(ports, "_bind", bind)
    port = free_base_port(HOST)
    assert asked[-2:] == [port - 2, port + 1]
    assert asked.count(0) == 4


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        free_base_port("192.0.2.1")


@asynccontextmanager
async def paged(make: Callable[[str], Awaitable[Page]]) -> AsyncIterator[int]:
    server = HealthServer({"/livez": lambda: (True, "alive")}, pages={"/metrics": make})
    try:
        yield await server.listen(HOST, 0)
    finally:
        await server.stop()


async def test_pages_have_their_own_type_and_see_what_is_accepted() -> None:
    accepted = []

    async def make(accept: str) -> Page:
        accepted.append(accept)
        return Page("text/x", [b"one\n", b"two\n"])

    async with paged(make) as port:
        request = b"GET /metrics?x HTTP/1.1\r\nACCEPT: a/b\r\naccept:c/d\r\n\r\n"
        status, head, body = await ask(port, request)
        assert (status, body) == (200, "one\ntwo\n")
        assert "Content-Type: text/x" in head and "Content-Length: 8" in head
        assert accepted == ["a/b,c/d"]
        status, head, body = await ask(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert (status, body) == (200, "") and "Content-Length: 8" in head
        assert "/livez /metrics" in (await ask(port, b"GET /x HTTP/1.1\r\n\r\n"))[2]


async def test_a_page_that_fails_is_an_error_and_the_next_one_is_not() -> None:
    broken = True

    async def make(accept: str) -> Page:
        if broken:
            raise RuntimeError("page broke")
        return Page("text/x", [b"fine"])

    async with paged(make) as port:
        for _ in range(PAGES_MAX + 1):
            status, _, body = await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
            assert status == 503 and "page broke" in body
        broken = False
        assert (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n"))[2] == "fine"


async def test_probes_get_through_while_pages_are_being_made() -> None:
    go = asyncio.Event()

    made = 0

    async def make(accept: str) -> Page:
        nonlocal made
        made += 1
        await go.wait()
        return Page("text/x", [b"late"])

    async with paged(make) as port:
        request = b"GET /metrics HTTP/1.1\r\n\r\n"
        waiting = [asyncio.create_task(ask(port, request)) for _ in range(PAGES_MAX)]
        while made < PAGES_MAX:
            await asyncio.sleep(0.001)
        assert (await ask(port, request))[0] == 503
        assert (await ask(port, b"GET /livez HTTP/1.1\r\n\r\n"))[0] == 200
        go.set()
        assert [body for _, _, body in await asyncio.gather(*waiting)] == ["late"] * PAGES_MAX
