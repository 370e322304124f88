"""The health port: a tiny HTTP/1.1 server that answers probes with one line of text.

It knows GET and HEAD, reads no bodies, and closes after each answer. Requests are bounded in
size and time and connections in number, so that nobody can hold the process through it. When there
are too many, the oldest goes: a probe asks at once and is gone before that, and who keeps others
out by being slow is the first to leave. Some places are kept for probes of this machine. Pages
(/metrics) are longer and take longer; only a few are made at once, so that probes get through.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from cosmodrome.transport.admission import is_loopback
from cosmodrome.transport.http.exposition import Page
from cosmodrome.transport.peers import plain_peer
from cosmodrome.transport.tls import Door, secure_streams
from cosmodrome.wire.frame import TLS_FIRST_BYTE

log = logging.getLogger(__name__)

Probe = Callable[[], tuple[bool, str]]
Pages = Mapping[str, Callable[[str], Awaitable[Page]]]  # path -> made for what the asker accepts

HEAD_BYTES_MAX = 8192
FIRST_BYTES_MAX = 1 << 20  # more than a reader holds, so that it is empty afterwards
CONNECTIONS_MAX = 64
CONNECTIONS_LOCAL = 16  # of these, for loopback only
REQUEST_TIMEOUT_S = 5.0
PAGE_TIMEOUT_S = 30.0  # to make it and to take it
PAGES_MAX = 4  # at once

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


def http_response(status: int, text: str, *, head: bool = False) -> bytes:
    """A complete response with one line of plain text; `head` leaves the text out."""
    body = (text + "\n").encode()
    lines = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
        "Content-Type: text/plain; charset=utf-8\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    ).encode()
    return lines if head else lines + body


class HealthServer:
    """Serves each path of `probes`: 200 when its probe says so, 503 when not; and `pages`."""

    def __init__(
        self,
        probes: Mapping[str, Probe],
        *,
        pages: Pages | None = None,
        door: Door | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> None:
        self._door = door or Door()
        self._probes = dict(probes)
        self._pages = dict(pages or {})
        self._pages_made = 0  # right now
        self._request_timeout_s = request_timeout_s
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        # Those that may have to leave, the oldest first, and whether they are of this machine.
        self._waiting: dict[asyncio.Task[None], bool] = {}

    async def listen(self, host: str, port: int) -> int:
        """Start answering; returns the port, which matters when 0 was asked for."""
        server = await asyncio.start_server(
            self._connected, host, port, limit=HEAD_BYTES_MAX, backlog=CONNECTIONS_MAX
        )
        self._servers.append(server)
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        while self._tasks:
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for server in servers:
            await server.wait_closed()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        local = is_loopback(plain_peer(writer.get_extra_info("peername"))[0])
        self._make_room(local=local)
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        self._waiting[task] = local
        task.add_done_callback(self._ended)

    def _make_room(self, *, local: bool) -> None:
        """Have the oldest of too many connections leave; a stranger never takes a local's place."""
        rivals = [task for task, is_local in self._waiting.items() if local or not is_local]
        if local and len(rivals) >= CONNECTIONS_MAX:
            strangers = [task for task in rivals if not self._waiting[task]]
            self._leave((strangers or rivals)[0])
        elif not local and len(rivals) >= CONNECTIONS_MAX - CONNECTIONS_LOCAL:
            self._leave(rivals[0])

    def _leave(self, task: asyncio.Task[None]) -> None:
        del self._waiting[task]
        task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._waiting.pop(task, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._request_timeout_s) as deadline:
                first = await reader.read(1)
                if first == TLS_FIRST_BYTE:
                    first += await reader.read(FIRST_BYTES_MAX)
                    reader, writer = secure_streams(self._door, writer, first, HEAD_BYTES_MAX)
                    response = await self._response(reader)
                elif self._door.takes_plain:
                    response = await self._response(reader, first)
                else:
                    response = http_response(400, "This port takes TLS only: use https://")
                if isinstance(response, bytes):
                    writer.write(response)
                else:
                    loop = asyncio.get_running_loop()
                    deadline.reschedule(loop.time() + PAGE_TIMEOUT_S)
                    await self._write_page(writer, *response)
                await writer.drain()
                # Until the peer has closed: an early close could reset the answer away.
                writer.write_eof()
                while await reader.read(HEAD_BYTES_MAX):
                    pass
        except (TimeoutError, OSError):
            pass  # the probe that asked sees a closed connection
        finally:
            writer.transport.abort()

    async def _response(
        self, reader: asyncio.StreamReader, first: bytes = b""
    ) -> bytes | tuple[str, str, bool]:
        """The answer, or a page: its path, what the asker accepts, whether the body is wanted.

        `first` has been read already.
        """
        try:
            head = first + await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return http_response(431, f"The request head exceeds {HEAD_BYTES_MAX} bytes.")
        except asyncio.IncompleteReadError:
            return http_response(400, "The request ended before its head was complete.")
        words = head.split(b"\r\n", 1)[0].split(b" ")
        if len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return http_response(400, "This is not an HTTP/1 request line.")
        method = words[0]
        if method not in (b"GET", b"HEAD"):
            return http_response(405, "Only GET and HEAD are served here.")
        path = words[1].split(b"?", 1)[0].decode("latin-1")
        if path in self._pages:
            return path, _header(head, b"accept"), method == b"GET"
        status, text = self._ask(path)
        return http_response(status, text, head=method == b"HEAD")

    async def _write_page(
        self, writer: asyncio.StreamWriter, path: str, accept: str, with_body: bool
    ) -> None:
        if self._pages_made >= PAGES_MAX:
            writer.write(http_response(503, f"{path} is being made {PAGES_MAX} times; ask less."))
            return
        self._pages_made += 1
        task = asyncio.current_task()
        assert task is not None
        local = self._waiting.pop(task, False)  # nobody takes its place until it has its page
        try:
            page = await self._pages[path](accept)
            writer.write(_page_head(page))
            for chunk in page.chunks if with_body else ():
                writer.write(chunk)
                await writer.drain()
        except OSError:
            raise
        except Exception as error:
            log.exception("page failed: path=%s", path)
            writer.write(http_response(503, f"{path} failed: {type(error).__name__}: {error}"))
        finally:
            self._pages_made -= 1
            self._waiting[task] = local

    def _ask(self, path: str) -> tuple[int, str]:
        probe = self._probes.get(path)
        if probe is None:
            served = sorted((*self._probes, *self._pages))
            return 404, "Paths served here: " + " ".join(served)
        try:
            healthy, text = probe()
        except Exception as error:
            log.exception("health probe failed: path=%s", path)
            return 503, f"The probe itself failed: {type(error).__name__}: {error}"
        # One line, whatever a probe says.
        return (200 if healthy else 503), " ".join(text.split())


def _page_head(page: Page) -> bytes:
    return (
        "HTTP/1.1 200 OK\r\n"
        f"Content-Type: {page.content_type}\r\n"
        f"Content-Length: {sum(map(len, page.chunks))}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    ).encode()


def _header(head: bytes, name: bytes) -> str:
    """All values of a header field, whatever the case of its name."""
    lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
    return ",".join(
        value.decode("latin-1").strip() for key, _, value in lines if key.strip().lower() == name
    )
