"""A peer in threads for tests of blocking connections: it answers frames, or passes bytes on."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from cosmodrome.layout import FLAG_RESPONSE
from cosmodrome.wire.frame import Frame, FrameSplitter, encode

HOST = "127.0.0.1"
# What to send back for the frames that arrived together; None closes the connection.
Answer = Callable[[list[Frame]], bytes | None]


def answer(
    request: Frame,
    ext: dict[str, str] | None = None,
    *,
    code: int = 0,
    body: bytes = b"",
    remark: str | None = None,
) -> bytes:
    return encode(Frame(code, request.opaque, FLAG_RESPONSE, ext or {}, body, remark))


class _Server:
    """Accepts connections, each served by a thread, until it is left."""

    def __init__(self, host: str = HOST) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            end(connection)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            self._start(self._served, connection)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _served(self, connection: socket.socket) -> None:
        try:
            self.serve(connection)
        except OSError:
            pass  # the other side is gone
        finally:
            end(connection)

    def serve(self, connection: socket.socket) -> None:
        raise AssertionError("a server says how it serves")


class Peer(_Server):
    def __init__(
        self, respond: Answer, *, host: str = HOST, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(host)
        self._respond = respond
        self._tls = tls
        self.requests: list[Frame] = []

    def serve(self, connection: socket.socket) -> None:
        if self._tls is not None:
            connection = self._tls.wrap_socket(connection, server_side=True)
            self._open.append(connection)
        splitter = FrameSplitter()
        while data := connection.recv(65536):
            frames = splitter.feed(data)
            self.requests += frames
            reply = self._respond(frames) if frames else b""
            if reply is None:
                end(connection)
                return
            connection.sendall(reply)


class Relay(_Server):
    """Passes bytes between its callers and another address. `change` sees what comes back, with
    the number of the connection, and may alter it; None ends the connection."""

    def __init__(self, target: str, change: Callable[[int, bytes], bytes | None]) -> None:
        super().__init__()
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._change = change

    def serve(self, connection: socket.socket) -> None:
        number = self.connections
        onward = socket.create_connection(self._target)
        self._open.append(onward)
        self._start(self._forth, connection, onward)
        try:
            while data := onward.recv(4096):
                changed = self._change(number, data)
                if changed is None:
                    return
                connection.sendall(changed)
        finally:
            end(onward)

    def _forth(self, connection: socket.socket, onward: socket.socket) -> None:
        try:
            while data := connection.recv(65536):
                onward.sendall(data)
        except OSError:
            pass
        finally:
            end(onward)


def end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()
